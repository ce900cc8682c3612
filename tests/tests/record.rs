//! `pollux run --record` and `pollux replay`: what is recorded is what was counted. Tiny guests on this
//! machine's own KVM.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use halt_poll::recording::{GuestIdle, Halt, Mode, Recording, Source};
use pollux_tests::elf::{self, power_off, print, write_msr};
use pollux_tests::guest::{Running, program};
use pollux_tests::{Guest, Outcome};
use serde_json::Value as Json;

const COM1: u16 = 0x3f8;
const PERIOD_NS: u32 = 300_000;
/// The vector of `halts_with_timer`.
const VECTOR: u8 = 0x40;
const POLL_CONTROL: u32 = 0x4b56_4d05;

fn guest(code: &[u8], options: &str) -> Guest {
    let kernel_dir = pollux_tests::guest::scratch().keep();
    let code = [&print(COM1, "up\n"), code].concat();
    let kernel = elf::write(&kernel_dir, &code);
    let guest = Guest::new(&kernel).args(["--boot", "linux64", "--halt", "user"]);
    let file = guest.dir().join("halts");
    let guest = guest.args([Path::new("--record"), &file]).args(options.split_whitespace());
    guest.limit(Duration::from_secs(60))
}

fn halts(stats: &Json) -> u64 {
    stats["vcpus"][0]["exits"]["userspace_hlt"].as_u64().unwrap_or(0)
}

/// Lets the guest halt at least so often.
fn let_halt(guest: &mut Running, at_least: u64) {
    guest.wait_for("the guest", |guest| guest.console().contains("up"));
    guest.wait_for("some halts", |guest| {
        guest.signal(libc::SIGUSR1);
        halts(&guest.stats()) >= at_least
    });
}

/// A guest that halted at least so often, until it was stopped; and its recording.
fn recorded(code: &[u8], options: &str, at_least: u64) -> (Outcome, Recording) {
    let guest = guest(code, options);
    let copy = guest.dir().join("copy");
    std::fs::File::create(guest.dir().join("halts")).expect("a file");
    std::fs::hard_link(guest.dir().join("halts"), &copy).expect("a link");
    let keep = pollux_tests::guest::scratch().keep().join("halts");
    std::fs::rename(&copy, &keep).expect("on one file system");
    let mut guest = guest.spawn();
    let_halt(&mut guest, at_least);
    guest.signal(libc::SIGTERM);
    let end = guest.wait();
    end.expect(0);
    (end, Recording::read(keep).expect("a recording"))
}

fn sum<'a>(halts: impl IntoIterator<Item = &'a Halt>, what: impl Fn(&Halt) -> u64) -> u64 {
    halts.into_iter().map(what).sum()
}

/// What the statistics say of these halts.
fn counted(halts: &[Halt]) -> [(&'static str, u64); 5] {
    let polled_ns = |halt: &Halt| halt.polled_ns.map_or(0, u64::from);
    let hit = |halt: &Halt| u64::from(halt.polled_ns.is_some() && !halt.slept);
    [
        ("halt_attempted_poll", sum(halts, |halt| halt.polled_ns.is_some().into())),
        ("halt_successful_poll", sum(halts, hit)),
        ("halt_poll_success_ns", sum(halts, |halt| polled_ns(halt) * hit(halt))),
        ("halt_poll_fail_ns", sum(halts, |halt| polled_ns(halt) * u64::from(halt.slept))),
        ("halt_wait_ns", sum(halts, Halt::blocked_ns)),
    ]
}

/// The recording and the statistics say the same, to the nanosecond.
#[track_caller]
fn agree(end: &Outcome, recording: &Recording) {
    let counts = &end.stats["recording"];
    assert_eq!(counts["halts"].as_u64(), Some(recording.halts() as u64), "{counts:#}");
    assert_eq!((counts["lost"].as_u64(), recording.lost), (Some(0), 0));
    assert_eq!(counts["stopped"], Json::Null);
    assert!(!recording.truncated);
    // The figures are read before the guest is stopped, mostly while it is halted: that halt has begun, and
    // is not yet counted. The guest may halt some more until it is stopped.
    let begun = halts(&end.stats);
    assert!((begun..begun + 50).contains(&(recording.halts() as u64)), "{begun}");
    let halt = &end.stats["vcpus"][0]["halt"];
    let first = |count: u64| counted(&recording.vcpus[0][..count as usize]);
    let same = |figures: [(&str, u64); 5]| {
        figures.into_iter().all(|(name, value)| halt[name].as_u64() == Some(value))
    };
    let (before, with) = (first(begun - 1), first(begun));
    assert!(same(before) || same(with), "neither {before:?} nor {with:?}: {halt:#}");
}

#[test]
fn every_halt_is_recorded_as_it_was_counted() {
    let code = elf::halts_with_timer(PERIOD_NS);
    for (options, idle) in
        [("--halt-poll-ns 0", GuestIdle::Default), ("--guest-idle halt", GuestIdle::Halt)]
    {
        // More than a buffer holds.
        let (end, recording) = recorded(&code, options, 1_500);
        agree(&end, &recording);
        let header = recording.header;
        assert_eq!((header.mode, header.vcpus, header.guest_idle), (Mode::User, 1, idle));
        let mut last_ns = 0;
        for halt in recording.iter() {
            assert!(halt.start_ns >= last_ns && halt.poll_allowed && halt.valid, "{halt:?}");
            last_ns = halt.start_ns + halt.halt_ns;
        }
        let snapshot_ns = end.stats["time_ns"].as_u64().expect("a time");
        assert!(last_ns.abs_diff(snapshot_ns) < 1_000_000_000, "{last_ns}, {snapshot_ns}");
        let by_timer = |halt: &&Halt| (halt.source, halt.vector) == (Source::Timer, VECTOR);
        let others = recording.halts() - recording.iter().filter(by_timer).count();
        assert!(others <= 1, "{others} halts were not ended by the timer, but for the stop");
    }
}

#[test]
fn a_guest_that_polls_by_itself_is_told_from_one_that_does_not() {
    let code = [write_msr(POLL_CONTROL, 0), elf::halts_with_timer(PERIOD_NS)].concat();
    let (end, recording) = recorded(&code, "", 50);
    agree(&end, &recording);
    assert_eq!(recording.after_guest_polling(), recording.halts());
    assert_eq!(sum(recording.iter(), |halt| halt.window_ns.into()), 0);
}

#[test]
fn a_guest_that_never_halts_leaves_a_recording_without_halts() {
    let guest = guest(&power_off(), "");
    let file = guest.dir().join("halts");
    let mut guest = guest.spawn();
    let mut seen = None;
    guest.wait_for("the recording", |_| {
        seen = Recording::read(&file).ok().or(seen.take());
        seen.is_some()
    });
    assert_eq!(seen.map(|recording| recording.halts()), Some(0));
    guest.wait().expect(0);
}

#[test]
fn a_run_that_is_killed_leaves_what_was_written() {
    let guest = guest(&elf::halts_with_timer(PERIOD_NS), "");
    let file = guest.dir().join("halts");
    let mut guest = guest.spawn();
    let_halt(&mut guest, 2_500);
    guest.signal(libc::SIGKILL);
    guest.wait_for("its end", |guest| {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", guest.pid()));
        state.is_ok_and(|state| state.contains(") Z "))
    });
    let recording = Recording::read(file).expect("a recording");
    assert!(recording.halts() >= 1_024 && !recording.truncated, "{}", recording.halts());
}

fn replay(file: &Path, options: &str) -> Output {
    let mut replay = Command::new(program());
    replay.arg("replay").arg(file).args(options.split_whitespace());
    replay.output().expect("pollux starts")
}

#[test]
fn replay_predicts_by_table_and_json() {
    let guest = guest(&elf::halts_with_timer(PERIOD_NS), "--halt-poll-ns 0");
    let file = guest.dir().join("halts");
    let mut guest = guest.spawn();
    let_halt(&mut guest, 1_500);
    let told = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    // No timer tells what waking costs: it wakes early enough. The run still goes on.
    let refused = replay(&file, "");
    assert_eq!(refused.status.code(), Some(2));
    assert!(told(&refused).contains("--wake-cost-ns"), "{}", told(&refused));
    assert_eq!(told(&refused).lines().count(), 1);

    let lists =
        "--wake-cost-ns 50us --halt-poll-ns 0,100ms --grow 2,4 --guest-halt-poll-ns off,100ms";
    let output = replay(&file, &format!("{lists} --json"));
    assert!(output.status.success(), "{}", told(&output));
    let document: Json = serde_json::from_slice(&output.stdout).expect("JSON");
    let predictions = document["predictions"].as_array().expect("predictions");
    assert_eq!((predictions.len(), &document["wake_cost_ns"]), (8, &50_000.into()));
    for prediction in predictions {
        let (host, guest) = (&prediction["host"]["halt_poll_ns"], &prediction["guest"]);
        let total = &prediction["total"];
        let halts = total["halts"].as_u64().expect("halts");
        assert_eq!(total["idles"], document["recording"]["halts"]);
        assert_eq!(total, &prediction["vcpus"][0]);
        // Idle times of 300 us are covered by a window that can be longer, once that has grown.
        let hit = total["halt_successful_poll"].as_u64() > Some(halts / 2);
        assert_eq!(hit, guest.is_null() && *host == 100_000_000, "{prediction:#}");
        assert_eq!(halts * 2 < total["idles"].as_u64().unwrap(), !guest.is_null());
    }
    let table = replay(&file, lists);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("8 settings in ") && table.contains("100ms/2/10us/2"), "{table}");

    let none = replay(&file, "--from 3600s --wake-cost-ns 0");
    assert!(told(&none).contains("no halts in that time"), "{}", told(&none));
    guest.signal(libc::SIGTERM);
    guest.wait().expect(0);
}
