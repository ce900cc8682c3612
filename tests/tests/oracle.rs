//! The policies of `halt-poll` beside what Linux's own did, from recorded traces. How they were
//! recorded: `tests/stock/oracle.rs`.

use pollux_tests::oracle::{haltpoll, kvm};

const KVM_MODULE: &str = include_str!("../data/kvm-module.trace");
const KVM_VM: &str = include_str!("../data/kvm-vm-haltpoll.trace");
const GUEST: &str = include_str!("../data/guest-haltpoll.trace");

#[test]
fn the_policy_does_what_kvm_did_while_its_parameters_changed() {
    let summary = kvm::check(KVM_MODULE).unwrap();
    assert!(summary.halts > 1000 && summary.grown > 50 && summary.shrunk > 50, "{summary:?}");
    assert!(summary.cut > 0 && summary.polled > 50, "{summary:?}");
    assert!(summary.during_a_change * 20 < summary.halts, "{summary:?}");
}

#[test]
fn the_policy_does_what_kvm_did_for_a_guest_that_forbade_polling() {
    let summary = kvm::check(KVM_VM).unwrap();
    assert!(summary.forbidden > 500 && summary.grown > 5, "{summary:?}");
}

#[test]
fn the_governor_does_what_linuxs_did() {
    let summary = haltpoll::check(GUEST).unwrap();
    assert!(summary.grown > 10 && summary.shrunk > 10 && summary.timed_out > 10, "{summary:?}");
    assert!(summary.exact * 10 > summary.halts * 8 && summary.counts == 10, "{summary:?}");
}

/// The trace with one number of one line, the `nth` of its kind, changed.
fn altered(trace: &str, kind: &str, nth: usize, word: usize, by: impl Fn(u64) -> u64) -> String {
    let mut seen = 0;
    let lines = trace.lines().map(|line| {
        seen += usize::from(line.starts_with(kind));
        if seen != nth || !line.starts_with(kind) {
            return line.to_owned();
        }
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        words[word] = by(words[word].parse().expect("a number")).to_string();
        words.join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_window_that_is_wrong_by_one_nanosecond_is_found() {
    for nth in [1, 2, 10, 50] {
        assert!(kvm::check(&altered(KVM_MODULE, "window", nth, 2, |ns| ns + 1)).is_err());
        assert!(kvm::check(&altered(KVM_MODULE, "window", nth, 3, |ns| ns + 1)).is_err());
    }
    for nth in [2, 5, 20] {
        assert!(haltpoll::check(&altered(GUEST, "limit", nth, 1, |ns| ns + 1)).is_err());
    }
}

#[test]
fn other_parameters_than_those_in_force_are_found() {
    let wrong = KVM_MODULE.replace("params 200000 2 10000 2", "params 200000 2 10000 0");
    assert_ne!(wrong, KVM_MODULE);
    assert!(kvm::check(&wrong).is_err(), "shrink");
    let wrong = KVM_MODULE.replace("params 200000 2 10000 2", "params 200000 3 10000 2");
    assert!(kvm::check(&wrong).is_err(), "grow");
    for nth in 3..=5 {
        let wrong = altered(GUEST, "params", nth, 1, |ns| ns / 1000);
        assert!(haltpoll::check(&wrong).is_err(), "maximum {nth}");
    }
}

#[test]
fn a_count_that_is_wrong_by_one_is_found() {
    for (nth, word) in [(2, 1), (3, 2)] {
        let wrong = altered(GUEST, "counts", nth, word, |count| count + 1);
        assert!(haltpoll::check(&wrong).unwrap_err().contains("cpuidle counts"));
    }
}
