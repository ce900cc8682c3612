//! `--stats`: every document has the form that `docs/stats.schema.json` says, and the fields say
//! what was. Tiny guests on this machine's own KVM.

use std::fs;
use std::time::Duration;

use pollux_tests::elf::{self, power_off, print, spin, write_msr};
use pollux_tests::guest::workspace;
use pollux_tests::schema::Schema;
use pollux_tests::{Guest, Outcome};
use serde_json::Value as Json;

const COM1: u16 = 0x3f8;
const COM2: u16 = 0x2f8;
const POLL_CONTROL: u32 = 0x4b56_4d05;
const ASYNC_PF_EN: u32 = 0x4b56_4d02;

fn guest(code: &[Vec<u8>]) -> Guest {
    let kernel_dir = pollux_tests::guest::scratch().keep();
    let kernel = elf::write(&kernel_dir, &code.concat());
    Guest::new(&kernel).args(["--boot", "linux64"]).limit(Duration::from_secs(60))
}

fn run(options: &[&str], code: &[Vec<u8>]) -> Outcome {
    let end = guest(code).args(options).run();
    end.expect(0);
    check(&end.stats);
    end
}

#[track_caller]
fn check(document: &Json) {
    let path = workspace().join("docs/stats.schema.json");
    let schema = Schema::new(&fs::read_to_string(path).expect("the schema")).expect("JSON");
    if let Err(broken) = schema.check(document) {
        panic!("{broken}\n{document:#}");
    }
}

fn notes(document: &Json) -> String {
    document["notes"].to_string()
}

const MODES: [&str; 3] = ["kernel", "user", "passthrough"];

#[test]
fn the_document_has_the_form_of_the_schema_in_every_mode() {
    let code = [print(COM2, "@mark a\n@guest {\"x\":1}\n@exit 3\n"), power_off()];
    for mode in MODES {
        let end = run(&["--halt", mode, "--cpus", "2"], &code);
        assert_eq!(end.stats["config"]["halt"], mode);
        assert_eq!(end.stats["vcpus"].as_array().map(Vec::len), Some(2), "{mode}");
        assert_eq!(end.stats["marks"][0]["name"], "a");
        assert_eq!(notes(&end.stats).contains("HLT does not leave"), mode == "passthrough");
    }
}

#[test]
fn the_document_has_the_form_of_the_schema_whatever_the_options() {
    let guest = guest(&[power_off()]);
    let disk = guest.dir().join("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let disk = format!("path={},queues=2,engine=sync,serial=x", disk.display());
    let words = "--dedicated --io-poll-ns 10us --pin vcpu0=0,io1=0 --halt-poll-ns 5us \
                 --guest-idle haltpoll --guest-halt-poll-ns 1us --guest-halt-poll-allow-shrink off";
    let end = guest.args(words.split_whitespace()).args(["--disk", &disk]).run();
    end.expect(0);
    check(&end.stats);
    assert_eq!(end.stats["queues"].as_array().map(Vec::len), Some(2));
    assert_eq!(end.stats["queues"][0]["service_time_ns"]["count"], 0);
}

#[test]
fn a_run_that_fails_in_the_guest_has_the_form_too() {
    for code in [elf::triple_fault(), elf::not_emulated()] {
        check(&guest(&[code]).run().stats);
    }
}

#[test]
fn a_guest_that_switches_host_polling_off_is_reported_in_words() {
    for mode in ["kernel", "user"] {
        let off = run(&["--halt", mode], &[write_msr(POLL_CONTROL, 0), power_off()]);
        assert_eq!(off.stats["vcpus"][0]["poll_control"], 0, "{mode}");
        assert!(notes(&off.stats).contains("switched host polling off"), "{:#}", off.stats);
        let on = run(&["--halt", mode], &[power_off()]);
        assert_eq!(on.stats["vcpus"][0]["poll_control"], 1, "{mode}");
        assert_eq!(notes(&on.stats), "[]", "{mode}");
    }
}

#[test]
fn only_mode_user_knows_the_window() {
    for mode in MODES {
        let end = run(&["--halt", mode], &[power_off()]);
        let vcpu = &end.stats["vcpus"][0];
        assert_eq!(vcpu["window_ns"].is_u64(), mode == "user", "{mode}: {vcpu:#}");
        assert_eq!(vcpu["timer"].is_object(), mode == "user", "{mode}: {vcpu:#}");
    }
}

#[test]
fn page_faults_by_message_with_the_apic_off_are_told_from_polling() {
    // A page for the messages at 2 MiB; enabled, delivered by interrupt. The APIC is off: reset.
    let vector = write_msr(0x4b56_4d06, 0xf0);
    let enable = write_msr(ASYNC_PF_EN, 0x20_0000 | 1 | 8);
    let mut guest = guest(&[vector, enable, print(COM1, "up\n"), spin()]).spawn();
    guest.wait_for("the guest", |guest| guest.console().contains("up"));
    guest.signal(libc::SIGUSR1);
    guest.wait_for("the document", |guest| !guest.stats().is_null());
    let stats = guest.stats();
    let vcpu = &stats["vcpus"][0];
    assert_eq!(vcpu["async_pf_control"], 0x20_0009);
    assert_eq!(vcpu["apic_enabled"], false);
    assert!(notes(&stats).contains("not polling"), "{:#}", stats["notes"]);
    guest.signal(libc::SIGTERM);
    guest.wait().expect(0);
}

#[test]
fn sigusr1_writes_the_figures_so_far_and_the_guest_goes_on() {
    for mode in MODES {
        let code = [write_msr(POLL_CONTROL, 0), print(COM1, "up\n"), spin()];
        let mut guest = guest(&code).args(["--halt", mode, "--cpus", "2"]).spawn();
        guest.wait_for("the guest", |guest| guest.console().contains("up"));
        let mut time_ns = 0;
        for _ in 0..3 {
            guest.signal(libc::SIGUSR1);
            let later = move |stats: &Json| stats["time_ns"].as_u64() > Some(time_ns);
            guest.wait_for("a later document", |guest| later(&guest.stats()));
            let stats = guest.stats();
            check(&stats);
            assert_eq!(stats["end"], Json::Null, "{mode}");
            assert_eq!(stats["vcpus"][0]["poll_control"], 0, "{mode}");
            assert_eq!(stats["vcpus"][1]["poll_control"], 1, "{mode}: it waits to be started");
            time_ns = stats["time_ns"].as_u64().expect("a time");
        }
        guest.signal(libc::SIGTERM);
        let end = guest.wait();
        end.expect(0);
        check(&end.stats);
        assert_eq!(end.stats["end"]["how"]["reason"], "stopped");
        assert!(end.stats["time_ns"].as_u64() > Some(time_ns));
    }
}

#[test]
fn sigusr1_without_statistics_to_write_does_no_harm() {
    let code = [print(COM1, "up\n"), spin()];
    let mut guest = guest(&code).without_stats().spawn();
    guest.wait_for("the guest", |guest| guest.console().contains("up"));
    guest.signal(libc::SIGUSR1);
    guest.signal(libc::SIGTERM);
    let end = guest.wait();
    end.expect(0);
    assert_eq!(end.stats, Json::Null);
}

#[test]
fn parameters_of_the_host_are_not_touched_without_consent() {
    let end = guest(&[power_off()]).args(["--halt-poll-ns-shrink", "3"]).run();
    end.expect(2);
    assert!(end.stderr.contains("--allow-host-tuning"), "{}", end.stderr);
    assert_eq!(end.stderr.lines().count(), 1);
}
