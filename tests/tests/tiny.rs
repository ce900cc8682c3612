//! Guests of a few instructions on this machine's own KVM: how a run ends, and what it leaves.

use std::fs;
use std::time::Duration;

use pollux_tests::elf::{self, out, power_off, print, reset, spin};
use pollux_tests::{Guest, Outcome};

const COM1: u16 = 0x3f8;
const COM2: u16 = 0x2f8;
const PVPANIC: u16 = 0x505;

fn guest(code: &[Vec<u8>]) -> Guest {
    let kernel_dir = pollux_tests::guest::scratch().keep();
    let kernel = elf::write(&kernel_dir, &code.concat());
    Guest::new(&kernel).args(["--boot", "linux64"]).limit(Duration::from_secs(60))
}

fn run(code: &[Vec<u8>]) -> Outcome {
    guest(code).run()
}

#[test]
fn poweroff_ends_with_0_and_the_console_is_complete() {
    let end = run(&[print(COM1, "last words, no newline"), power_off()]);
    end.expect(0);
    assert_eq!(end.console, "last words, no newline");
    assert_eq!(end.stderr, "");
    assert_eq!(end.stats["end"]["exit_status"], 0);
}

#[test]
fn reboot_ends_with_0() {
    let end = run(&[reset()]);
    end.expect(0);
    assert_eq!(end.stats["end"]["how"]["reason"], "reboot");
}

#[test]
fn reboot_restarts_when_asked_to() {
    let mut guest =
        guest(&[print(COM1, "again\n"), reset()]).args(["--on-reboot", "restart"]).spawn();
    guest.wait_for("three boots", |g| g.console().matches("again").count() >= 3);
    guest.signal(libc::SIGTERM);
    guest.wait().expect(0);
}

#[test]
fn a_reset_after_pvpanic_ends_with_3() {
    let end = run(&[out(PVPANIC, 1), print(COM1, "trace"), reset()]);
    end.expect(3);
    assert_eq!(end.console, "trace", "the guest goes on after pvpanic");
}

#[test]
fn a_reset_after_a_panic_on_the_console_ends_with_3() {
    run(&[print(COM1, "[    0.1] Kernel panic - not syncing: x\n"), reset()]).expect(3);
}

#[test]
fn a_triple_fault_ends_with_4() {
    let end = run(&[elf::triple_fault()]);
    end.expect(4);
    assert_eq!(end.stderr.lines().count(), 1, "{}", end.stderr);
}

#[test]
fn an_instruction_that_kvm_cannot_emulate_ends_with_5_and_is_named() {
    let end = run(&[elf::not_emulated()]);
    end.expect(5);
    assert_eq!(end.stderr.lines().count(), 1, "{}", end.stderr);
    for part in ["RIP 0x100007", "dd 00", "pollux doctor"] {
        assert!(end.stderr.contains(part), "{part} not in: {}", end.stderr);
    }
}

#[test]
fn sigterm_and_sigint_stop_a_spinning_guest_in_order() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut guest = guest(&[print(COM1, "up\n"), spin()]).args(["--cpus", "1"]).spawn();
        guest.wait_for("the guest", |g| g.console().contains("up"));
        guest.signal(signal);
        let end = guest.wait();
        end.expect(0);
        assert_eq!(end.stats["end"]["how"]["reason"], "stopped");
    }
}

#[test]
fn results_marks_are_snapshots_of_all_counters() {
    let end = run(&[
        print(COM2, "@mark one\n@guest {\"driver\":\"x\"}\n"),
        print(COM1, "abc"),
        print(COM2, "@mark two\n@exit 3\n"),
        power_off(),
    ]);
    end.expect(0);
    assert!(
        end.results.starts_with("@mark one\n"),
        "the channel is kept as it is: {}",
        end.results
    );
    assert_eq!(end.stats["guest"]["guest"][0]["driver"], "x");
    assert_eq!(end.stats["guest_exit_status"], 3);
    let marks = end.stats["marks"].as_array().expect("marks");
    let writes = |mark: &serde_json::Value| mark["vcpus"][0]["exits"]["userspace_io_out"].as_u64();
    let between = writes(&marks[1]).zip(writes(&marks[0])).map(|(b, a)| b - a);
    let sent = "\n@guest {\"driver\":\"x\"}\n".len() - 1 + "abc".len() + "@mark two\n".len();
    assert_eq!(between, Some(sent as u64), "every port write between the marks is one exit");
    assert!(
        marks[1]["vcpus"][0]["exits"]["exits"].as_u64() >= writes(&marks[1]),
        "KVM counts them"
    );
}

#[test]
fn a_string_of_port_writes_is_a_write_each() {
    // lea rsi, [rip + text]; mov ecx, 3; mov dx, COM1; rep outsb
    let mut code = vec![0x48, 0x8d, 0x35, 0, 0, 0, 0, 0xb9, 3, 0, 0, 0, 0x66, 0xba, 0xf8, 0x03];
    code.extend([0xf3, 0x6e]);
    let tail = power_off();
    let distance = (code.len() - 7 + tail.len()) as u32;
    code[3..7].copy_from_slice(&distance.to_le_bytes());
    let end = run(&[code, tail, b"xyz".to_vec()]);
    end.expect(0);
    assert_eq!(end.console, "xyz");
}

#[test]
fn the_halt_polling_limit_is_the_vms_own_and_shown() {
    let end = guest(&[power_off()]).args(["--halt-poll-ns", "123us"]).run();
    end.expect(0);
    assert_eq!(end.stats["config"]["halt_poll_ns"], 123_000);
    let module =
        fs::read_to_string("/sys/module/kvm/parameters/halt_poll_ns").expect("kvm is loaded");
    assert_eq!(
        end.stats["host"]["kvm_parameters"]["halt_poll_ns"],
        module.trim().parse::<u64>().unwrap()
    );
}
