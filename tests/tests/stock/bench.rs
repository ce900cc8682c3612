//! `pollux bench`: what is set while a guest runs does what it does when set at the start, and what was
//! measured survives an interruption.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use pollux_tests::guest::{guest_file, program, scratch};
use serde_json::Value as Json;

use super::new_disk;

/// Polling on either side, hardly or without end: what a live change does shows in counts.
const PLAN: &str = r#"
[measure]
repeats = 1
seconds = 1
warmup_seconds = 0.5
idle_seconds = 0

[[workload]]
name = "randread"

[[sweep]]
halt = "user"
guest_idle = "halt"
halt_poll_ns = ["1us", "1s"]
halt_poll_ns_grow_start = "1s"

[[sweep]]
halt = "kernel"
guest_idle = "haltpoll"
guest_halt_poll_ns = [0, "1s"]
guest_halt_poll_grow_start = "1s"
"#;

fn start(dir: &Path, options: &[&str]) -> Child {
    let plan = dir.join("plan.toml");
    fs::write(&plan, PLAN).expect("a plan");
    let stderr = fs::File::create(dir.join("stderr")).expect("stderr's file");
    Command::new(program())
        .arg("bench")
        .arg("--kernel")
        .arg(guest_file("vmlinuz-6.12"))
        .arg("--initrd")
        .arg(guest_file("initrd-6.12.img"))
        .arg("--root")
        .arg(guest_file("rootfs.ext4"))
        .arg("--data")
        .arg(new_disk(dir))
        .arg("--plan")
        .arg(&plan)
        .args(options)
        .current_dir(dir)
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .expect("pollux starts")
}

fn results(path: &Path) -> Option<Json> {
    serde_json::from_str(&fs::read_to_string(path.join("results.json")).ok()?).ok()
}

#[track_caller]
fn finished(dir: &Path, mut bench: Child, out: &str) -> Json {
    let status = bench.wait().expect("it ends");
    let said = fs::read_to_string(dir.join("stderr")).unwrap_or_default();
    assert!(status.success(), "{status}: {said}");
    results(&dir.join(out)).expect("results")
}

/// A figure of a row's only run.
fn figure(results: &Json, row: usize, name: &str) -> f64 {
    let runs = &results["rows"][row]["runs"];
    assert_eq!(runs.as_array().map(Vec::len), Some(1), "{results:#}");
    runs[0]["figures"][name].as_f64().unwrap_or_else(|| panic!("{name}: {runs:#}"))
}

#[test]
fn one_boot_for_many_settings_gives_what_separate_boots_give() {
    let dir = scratch();
    let shared = start(dir.path(), &["--out", "shared"]);
    let shared = finished(dir.path(), shared, "shared");
    let each = start(dir.path(), &["--out", "each", "--boot-each"]);
    let each = finished(dir.path(), each, "each");
    let boots = |results: &Json, row: usize| results["rows"][row]["runs"][0]["boot"].clone();
    assert_eq!(boots(&shared, 0), boots(&shared, 1));
    assert_ne!(boots(&each, 0), boots(&each, 1));
    for results in [&shared, &each] {
        for row in 0..4 {
            let interrupts = figure(results, row, "interrupts_per_request");
            assert!((0.9..1.1).contains(&interrupts), "row {row}: {results:#}");
        }
        let halts = |row| figure(results, row, "exits_halt_per_request");
        let polled = |row| figure(results, row, "polled_per_request");
        // The host polls long enough for nearly every halt, or for hardly any.
        assert!(polled(0) < 0.2 * halts(0), "{results:#}");
        assert!(polled(1) > 0.8 * halts(1), "{results:#}");
        // A guest that polls for ever does not halt; the host's polling is off then.
        assert!(halts(3) < 0.2 && halts(2) > 2.0 * halts(3), "{results:#}");
        assert_eq!(polled(2) + polled(3), 0.0, "{results:#}");
    }
}

#[test]
fn what_was_measured_survives_an_interruption() {
    let dir = scratch();
    let mut bench = start(dir.path(), &["--out", "out"]);
    let out = dir.path().join("out");
    let measured =
        |row: usize| results(&out).and_then(|results| results["rows"][row]["runs"].get(0).cloned());
    for _ in 0..30_000 {
        if measured(0).is_some() {
            break;
        }
        assert!(bench.try_wait().expect("waiting works").is_none(), "it ended");
        thread::sleep(Duration::from_millis(20));
    }
    let first = measured(0).expect("a run");
    // SAFETY: no memory is involved; the child is not yet waited for, so the pid is its own.
    unsafe { libc::kill(bench.id() as libc::pid_t, libc::SIGINT) };
    assert_eq!(bench.wait().expect("it ends").code(), Some(130));
    assert!(out.join("report.html").exists());
    assert!(results(&out).expect("results")["ended"].is_null());
    let bench = start(dir.path(), &["--out", "out", "--resume"]);
    let whole = finished(dir.path(), bench, "out");
    assert_eq!(whole["rows"][0]["runs"][0], first, "it is not made again");
    for row in 0..4 {
        figure(&whole, row, "iops");
    }
    assert!(whole["ended"].is_string());
}
