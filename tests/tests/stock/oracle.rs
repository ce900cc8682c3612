//! The policies of `halt-poll` beside those of the kernels, while stock guests run.
//!
//! With POLLUX_TRACES=DIR the traces are kept there, in the form of those in `tests/data/`.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use halt_poll::Params;
use pollux_tests::oracle::{haltpoll, kvm, tracefs::Recording};

use super::{guest, new_disk, new_file, read_all, start, with_script};

const PARAMETERS: &str = "/sys/module/kvm/parameters";
/// How long the guest runs with each set of parameters.
const A_WHILE: Duration = Duration::from_millis(400);
/// Reads that never end: back to back, and with pauses of some milliseconds.
const LOAD: &str = "fio --filename=/dev/vdb --rw=randread --bs=4k --direct=1 --ioengine=psync \
     --time_based --runtime=1h --name=busy --name=now-and-then --thinktime=5000";

/// KVM's parameters, put back when dropped.
struct KvmParameters(Vec<(String, String)>);

impl KvmParameters {
    /// Remembers them as they are, and gives them Linux's defaults.
    fn defaults() -> Self {
        let params = Params::default();
        let defaults = [
            ("halt_poll_ns", params.max_ns),
            ("halt_poll_ns_grow", params.grow),
            ("halt_poll_ns_grow_start", params.grow_start_ns),
            ("halt_poll_ns_shrink", params.shrink),
        ];
        let set = |(name, value): (&str, u32)| {
            let path = Path::new(PARAMETERS).join(name);
            let before = fs::read_to_string(&path).expect("a parameter of kvm");
            fs::write(&path, value.to_string()).expect("we may set it");
            (name.to_owned(), before)
        };
        Self(defaults.map(set).into())
    }

    fn set(&self, recording: &Recording, name: &str, value: u32) {
        recording.mark(&kvm::changing(name, value));
        fs::write(Path::new(PARAMETERS).join(name), value.to_string()).expect("we may set it");
        recording.mark(kvm::CHANGED);
    }
}

impl Drop for KvmParameters {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            let _ = fs::write(Path::new(PARAMETERS).join(name), value);
        }
    }
}

fn keep(name: &str, trace: &str) {
    if let Some(dir) = std::env::var_os("POLLUX_TRACES") {
        fs::write(Path::new(&dir).join(name), trace).expect("a place for the traces");
    }
}

/// A guest with 2 CPUs, recorded while it runs [`LOAD`] and `steps` change KVM's parameters.
fn record(options: &[&str], params: Params, steps: &[(&str, u32)]) -> String {
    let parameters = KvmParameters::defaults();
    let recording = Recording::start(&kvm::EVENTS);
    let guest = guest("vmlinuz", "6.12").args(["--cpus", "2"]).args(options);
    let disk = format!("path={}", new_disk(guest.dir()).display());
    let mut running = start(guest.args(["--disk", &disk]), &format!("mark load; {LOAD}"));
    running.wait_for("the load", |guest| guest.results().contains("@mark load"));
    // fio needs a moment to start; what happens until then is as good.
    thread::sleep(3 * A_WHILE);
    for (name, value) in steps {
        parameters.set(&recording, name, *value);
        thread::sleep(A_WHILE);
    }
    running.signal(libc::SIGTERM);
    running.wait().expect(0);
    kvm::compact(params, &recording.text())
}

#[test]
fn the_policy_agrees_with_kvms_while_its_parameters_change() {
    let steps = [
        ("halt_poll_ns", 4_000_000),
        ("halt_poll_ns_shrink", 0),
        ("halt_poll_ns_grow", 4),
        ("halt_poll_ns_shrink", 2),
        ("halt_poll_ns_grow_start", 100_000),
        ("halt_poll_ns_grow", 0),
        ("halt_poll_ns", 300_000),
        ("halt_poll_ns_grow", 2),
        ("halt_poll_ns", 50_000),
        ("halt_poll_ns", 0),
        ("halt_poll_ns", 8_000_000),
        ("halt_poll_ns_grow_start", 10_000_000),
        ("halt_poll_ns", 2_000_000),
    ];
    let trace = record(&[], Params::default(), &steps);
    keep("kvm-module.trace", &trace);
    let summary = kvm::check(&trace).unwrap_or_else(|why| panic!("{why}\n{trace}"));
    assert!(summary.halts > 1000, "{summary:?}");
    assert!(summary.grown > 50 && summary.shrunk > 50 && summary.cut > 0, "{summary:?}");
}

#[test]
fn the_policy_agrees_with_kvms_for_one_vm_whose_guest_forbids_polling() {
    let params = Params { max_ns: 4_000_000, ..Params::default() };
    // The module's maximum is not this VM's.
    let steps = [("halt_poll_ns_shrink", 0), ("halt_poll_ns_grow", 3)];
    let options = ["--halt-poll-ns", "4ms", "--guest-idle", "haltpoll"];
    let trace = record(&options, params, &steps);
    keep("kvm-vm-haltpoll.trace", &trace);
    let summary = kvm::check(&trace).unwrap_or_else(|why| panic!("{why}\n{trace}"));
    assert!(summary.forbidden > 500 && summary.forbidden < summary.halts, "{summary:?}");
}

#[test]
fn the_governor_agrees_with_the_guests() {
    let guest = guest("vmlinuz", "6.12").args(["--guest-idle", "haltpoll"]);
    let load = format!("path={}", new_disk(guest.dir()).display());
    let output = new_file(guest.dir(), "output", 16 << 20);
    let (guest, script) = with_script(guest.args(["--disk", &load]), "trace-idle", "vdc");
    let guest = guest.args(["--disk", &format!("path={}", output.display())]);
    let mut running = start(guest, &script);
    running.wait_for("the end of the script", |guest| guest.results().contains("@exit"));
    let results = running.results();
    let copy = fs::File::open(&output).expect("the output");
    running.wait().expect(0);
    assert!(results.contains("@exit 0"), "{results}");
    let trace = String::from_utf8_lossy(&read_all(copy)).into_owned();
    let trace = haltpoll::compact(trace.trim_end_matches('\0'));
    keep("guest-haltpoll.trace", &trace);
    let summary = haltpoll::check(&trace).unwrap_or_else(|why| panic!("{why}\n{trace}"));
    assert!(summary.polls > 300 && summary.halts > 300 && summary.counts == 10, "{summary:?}");
    assert!(summary.grown > 10 && summary.shrunk > 10 && summary.timed_out > 10, "{summary:?}");
    assert!(summary.exact * 10 > summary.halts * 8, "{summary:?}");
}
