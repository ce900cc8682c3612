//! What a thread that a guest has taken over can do: nothing that Pollux does not do anyway.
//!
//! A library that is loaded before all others plays the guest's part: at the first KVM_RUN it makes a
//! system call of its own, on the vCPU's thread.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pollux_tests::elf::{self, power_off, spin};
use pollux_tests::{Guest, Outcome};

/// `ATTEMPT`: a socket is made, or the file of that name opened. What became of it is told on stderr.
const INTRUDER: &str = r#"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void attempt(const char *what) {
    char told[64];
    errno = 0;
    if (strcmp(what, "socket") == 0)
        syscall(SYS_socket, 1, 1, 0);
    else
        syscall(SYS_openat, AT_FDCWD, what, O_RDONLY);
    int length = snprintf(told, sizeof told, "attempt: errno %d\n", errno);
    if (write(2, told, length) < 0)
        return;
}

int ioctl(int fd, unsigned long request, ...) {
    static atomic_flag done = ATOMIC_FLAG_INIT;
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (request == 0xae80 && !atomic_flag_test_and_set(&done))
        attempt(getenv("ATTEMPT"));
    return syscall(SYS_ioctl, fd, request, argument);
}
"#;

fn intruder(dir: &Path) -> PathBuf {
    let (source, library) = (dir.join("intruder.c"), dir.join("intruder.so"));
    fs::write(&source, INTRUDER).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]);
    assert!(compiler.status().expect("a C compiler").success());
    library
}

fn with_intruder(attempt: &str, sandbox: &str) -> Outcome {
    let dir = pollux_tests::guest::scratch();
    let kernel = elf::write(dir.path(), &power_off());
    Guest::new(&kernel)
        .args(["--boot", "linux64", "--sandbox", sandbox])
        .env("LD_PRELOAD", intruder(dir.path()))
        .env("ATTEMPT", attempt)
        .run()
}

#[test]
fn a_system_call_that_is_not_pollux_s_fails_is_told_by_its_name_and_ends_the_run_in_order() {
    let outcome = with_intruder("socket", "on");
    assert_eq!(outcome.status, 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("attempt: errno 1\n"), "EPERM: {}", outcome.stderr);
    let told: Vec<&str> =
        outcome.stderr.lines().filter(|line| line.starts_with("pollux: ")).collect();
    assert!(told[0].contains("kept a vCPU from the system call socket"), "{told:?}");
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(outcome.stats["end"]["exit_status"], 1, "the statistics are written all the same");

    let outcome = with_intruder("socket", "off");
    assert_eq!(outcome.status, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("attempt: errno 0\n"), "{}", outcome.stderr);
}

#[test]
fn a_file_that_was_not_named_cannot_be_opened_even_for_reading() {
    let outcome = with_intruder("/etc/passwd", "on");
    // A kernel without Landlock is told so by `pollux doctor`.
    let doctor = Command::new(pollux_tests::guest::program()).args(["doctor", "--json"]).output();
    let doctor = String::from_utf8(doctor.expect("pollux starts").stdout).expect("JSON");
    let doctor: serde_json::Value = serde_json::from_str(&doctor).expect("JSON");
    let errno = if doctor["sandbox"]["landlock_abi"].is_u64() { 13 } else { 0 };
    assert!(outcome.stderr.contains(&format!("attempt: errno {errno}\n")), "{}", outcome.stderr);
    assert_eq!(outcome.status, 0, "reading is no violation: {}", outcome.stderr);

    let outcome = with_intruder("/etc/passwd", "off");
    assert!(outcome.stderr.contains("attempt: errno 0\n"), "{}", outcome.stderr);
}

/// `Name:` of every thread's status, and the values of these fields.
fn threads(pid: u32, fields: [&str; 3]) -> Vec<(String, [String; 3])> {
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_default().trim().to_owned()
    };
    fs::read_dir(format!("/proc/{pid}/task"))
        .expect("it runs")
        .filter_map(|entry| {
            let status = fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
            Some((field(&status, "Name"), fields.map(|name| field(&status, name))))
        })
        .collect()
}

#[test]
fn every_thread_is_confined_while_the_guest_runs_unless_that_is_switched_off() {
    let dir = pollux_tests::guest::scratch();
    let kernel = elf::write(dir.path(), &spin());
    for (sandbox, confined) in [("on", true), ("off", false)] {
        let mut guest =
            Guest::new(&kernel).args(["--boot", "linux64", "--sandbox", sandbox]).spawn();
        // The last to enter is the first thread, when its vCPU runs already.
        let of = |pid| threads(pid, ["NoNewPrivs", "Seccomp", "CapEff"]);
        let names = |pid| of(pid).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        guest.wait_for("a vCPU", |guest| names(guest.pid()).iter().any(|name| name == "vcpu0"));
        let expected = if confined { ["1", "2"] } else { ["0", "0"] };
        guest.wait_for("the sandbox", |guest| {
            of(guest.pid()).iter().all(|(_, values)| values[..2] == expected)
        });
        for (name, [.., capabilities]) in of(guest.pid()).iter().filter(|_| confined) {
            let bits = u64::from_str_radix(capabilities, 16).expect("a set of bits");
            // CAP_DAC_OVERRIDE, for files of other users that root may open.
            let allowed = if name == "pollux" { 0b10 } else { 0 };
            assert_eq!(bits & !allowed, 0, "{name}");
        }
        guest.signal(libc::SIGTERM);
        assert_eq!(guest.wait().status, 0);
    }
}
