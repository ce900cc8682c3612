//! `--record` beside the statistics: KVM's in mode `kernel`, whose tracepoints it is made of, and Pollux's
//! in mode `user`.

use std::path::{Path, PathBuf};
use std::process::Command;

use halt_poll::recording::{Halt, Recording, Source};
use pollux_tests::Outcome;

use super::{guest, new_disk, succeed};

const TRACEFS: &str = "/sys/kernel/tracing";
/// Reads, pauses and wakes of one CPU by another.
const LOAD: &str = "fio --filename=/dev/vdb --rw=randread --bs=4k --direct=1 --ioengine=psync --size=2m \
     --name=busy --name=now-and-then --thinktime=500 && perf bench sched pipe --loop 200";

/// What a guest with 2 CPUs records with these options.
fn record(options: &str) -> (Outcome, Recording) {
    if !Path::new(TRACEFS).join("events").exists() {
        let mount = ["-t", "tracefs", "tracefs", TRACEFS];
        assert!(Command::new("mount").args(mount).status().expect("mount").success());
    }
    let file: PathBuf = pollux_tests::guest::scratch().keep().join("halts");
    let guest = guest("vmlinuz", "6.12").args(["--cpus", "2"]).args(options.split_whitespace());
    let disk = format!("path={}", new_disk(guest.dir()).display());
    let guest = guest.args(["--disk", &disk]).args([Path::new("--record"), &file]);
    let end = succeed(guest, LOAD);
    let recording = Recording::read(file).expect("a recording");
    assert_eq!(end.stats["recording"]["halts"].as_u64(), Some(recording.halts() as u64));
    assert_eq!((recording.lost, recording.truncated), (0, false));
    (end, recording)
}

/// What the statistics say of these halts: all who slept, and for how long with what they polled before;
/// those who polled, and those of them who did not have to sleep.
fn counted(halts: &[Halt]) -> [u64; 4] {
    let slept = || halts.iter().filter(|halt| halt.slept);
    let polled = || halts.iter().filter(|halt| halt.polled_ns.is_some());
    [
        slept().count() as u64,
        slept().map(|halt| halt.halt_ns).sum(),
        polled().count() as u64,
        polled().filter(|halt| !halt.slept).count() as u64,
    ]
}

/// Both sides say the same, to the nanosecond.
fn agree(end: &Outcome, recording: &Recording) {
    for (index, halts) in recording.vcpus.iter().enumerate() {
        let halt = &end.stats["vcpus"][index]["halt"];
        let number = |name: &str| halt[name].as_u64().expect(name);
        let waits = halt["halt_wait_hist"].as_array().expect("a histogram");
        let expected = [
            waits.iter().filter_map(serde_json::Value::as_u64).sum(),
            number("halt_wait_ns") + number("halt_poll_fail_ns"),
            number("halt_attempted_poll"),
            number("halt_successful_poll"),
        ];
        // The figures are read before the CPUs are stopped: one that is halted then ends that halt later.
        let before = halts.split_last().map_or(&halts[..], |(_, before)| before);
        let seen = [counted(before), counted(halts)];
        assert!(seen.contains(&expected), "vCPU {index}: {seen:?}, but {expected:?} were counted");
        assert!(halts.len() > 100, "{}", halts.len());
        let known = halts.iter().filter(|halt| halt.source != Source::Unknown).count();
        assert!(known * 10 > halts.len() * 9, "{known} of {} were told by whom", halts.len());
        let mut last_ns = 0;
        for halt in halts {
            // In mode kernel the time of the event counts, a little after the end.
            let start_ns = halt.start_ns + 1_000_000;
            assert!(start_ns >= last_ns, "{halt:?} begins before {last_ns}");
            last_ns = halt.start_ns + halt.halt_ns;
        }
    }
    let of = |source| recording.iter().filter(|halt| halt.source == source).count();
    let [device, ipi, timer] = [Source::Device, Source::Ipi, Source::Timer].map(of);
    assert!(device > 100 && ipi > 20 && timer > 20, "{device}, {ipi}, {timer}");
    let woken = recording.iter().filter(|halt| halt.slept && halt.source == Source::Device);
    let costs: Vec<_> = woken.map(|halt| halt.wake_cost_ns).collect();
    let known = costs.iter().flatten().count();
    assert!(known * 10 > costs.len() * 8, "what waking cost is known of {known}: {costs:?}");
    assert_eq!(recording.after_guest_polling(), 0);
}

#[test]
fn kvms_halts_without_polling() {
    let (end, recording) = record("--halt-poll-ns 0 --guest-idle halt");
    agree(&end, &recording);
    assert!(recording.iter().all(|halt| halt.window_ns == 0 && halt.polled_ns.is_none()));
}

#[test]
fn kvms_halts_with_polling() {
    let (end, recording) = record("--halt-poll-ns 4ms --guest-idle halt");
    agree(&end, &recording);
    assert!(recording.iter().any(|halt| halt.window_ns > 1_000_000), "the window has grown");
}

#[test]
fn halts_in_pollux() {
    for poll in ["0", "4ms"] {
        let options = format!("--halt user --guest-idle halt --halt-poll-ns {poll}");
        let (end, recording) = record(&options);
        agree(&end, &recording);
    }
}

#[test]
fn a_guest_that_polls_by_itself_is_seen_in_both_modes() {
    for mode in ["kernel", "user"] {
        let (_, recording) = record(&format!("--halt {mode} --guest-idle haltpoll"));
        let short = recording.after_guest_polling();
        assert!(short > 20 && short < recording.halts(), "{short} of {}", recording.halts());
    }
}
