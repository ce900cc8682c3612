//! The control socket, with guests of a few instructions on this machine's own KVM.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use pollux_tests::Guest;
use pollux_tests::ctl::Control;
use pollux_tests::elf::{self, halts_with_timer, out, power_off, print, reset, spin};
use pollux_tests::guest::{Running, program, scratch, workspace};
use pollux_tests::schema::Schema;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

const COM1: u16 = 0x3f8;
/// Nothing is there: an exit to Pollux and nothing else.
const NO_PORT: u16 = 0x700;

fn guest(dir: &TempDir, code: &[Vec<u8>]) -> Guest {
    let kernel = elf::write(dir.path(), &code.concat());
    Guest::new(&kernel)
        .args(["--boot", "linux64", "--control"])
        .args([dir.path().join("control")])
        .limit(Duration::from_secs(60))
}

fn control(dir: &TempDir) -> Control {
    Control(dir.path().join("control"))
}

/// Prints "up", then writes to a port for ever.
fn busy() -> Vec<Vec<u8>> {
    let port = out(NO_PORT, 1);
    let back = u8::try_from(256 - (port.len() + 2)).expect("a short jump");
    vec![print(COM1, "up\n"), port, vec![0xeb, back]]
}

fn start(guest: Guest) -> Running {
    let mut guest = guest.spawn();
    guest.wait_for("the guest", |guest| guest.console().contains("up"));
    guest
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

#[track_caller]
fn check_form(document: &Json) {
    let path = workspace().join("docs/stats.schema.json");
    let schema = Schema::new(&fs::read_to_string(path).expect("the schema")).expect("JSON");
    if let Err(broken) = schema.check(document) {
        panic!("{broken}\n{document:#}");
    }
}

fn counter(document: &Json, name: &str) -> u64 {
    let vcpu = &document["vcpus"][0];
    let value = vcpu["exits"].get(name).or(vcpu["halt"].get(name));
    value.and_then(Json::as_u64).unwrap_or_else(|| panic!("{name}: {vcpu:#}"))
}

/// Asks for the statistics until `seen` holds.
#[track_caller]
fn stats_when(control: &Control, what: &str, seen: impl Fn(&Json) -> bool) -> Json {
    for _ in 0..2000 {
        let stats = control.stats();
        if seen(&stats) {
            return stats;
        }
    }
    panic!("never seen: {what}: {:#}", control.stats());
}

#[test]
fn status_says_what_runs() {
    let dir = scratch();
    let disk = dir.path().join("disk");
    File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let spec = format!("path={},readonly=on", disk.display());
    let guest = start(guest(&dir, &busy()).args(["--cpus", "2", "--disk", &spec]));
    let status = control(&dir).ctl("status").done();
    assert_eq!(status["state"], "running");
    assert_eq!(status["end"], Json::Null);
    assert_eq!(status["pid"], guest.pid());
    assert_eq!(status["halt"], "kernel");
    assert_eq!((&status["cpus"], &status["memory_bytes"]), (&json!(2), &json!(512 << 20)));
    let disk = json!({
        "name": "blk0",
        "path": disk.to_str().expect("a plain path"),
        "readonly": true,
        "capacity_bytes": 1 << 20,
    });
    assert_eq!(status["disks"], json!([disk]));
    let later = control(&dir).ctl("status").done();
    assert!(later["uptime_ns"].as_u64() > status["uptime_ns"].as_u64(), "{later:#}");
}

/// What a guest that does read makes of it: `stock::bench`.
#[test]
fn lines_for_a_guest_that_does_not_read_them_are_bounded() {
    let dir = scratch();
    let _guest = start(guest(&dir, &busy()));
    let line = format!("send {}", "x".repeat(3000));
    let first = control(&dir).ctl(&line).done();
    assert_eq!(first["sent_bytes"], 3001);
    let refused = (0..22).map(|_| control(&dir).ctl(&line)).find(|answer| answer.status != Some(0));
    let error = refused.expect("64 KiB wait at most").refused(1);
    assert!(error.contains("has not read what was sent before"), "{error}");
    let mut client = control(&dir).connect();
    let reply = client.ask(r#"{"command":"send","line":"two\nlines"}"#);
    assert_eq!(reply["error"], "send: more than one line");
}

#[test]
fn stats_are_the_document_of_stats_so_far_even_without_that_option() {
    for mode in ["kernel", "user", "passthrough"] {
        let dir = scratch();
        let _guest = start(guest(&dir, &busy()).without_stats().args(["--halt", mode]));
        let (first, second) = (control(&dir).stats(), control(&dir).stats());
        check_form(&first);
        assert_eq!(first["end"], Json::Null);
        assert_eq!(first["config"]["halt"], mode);
        assert!(second["time_ns"].as_u64() > first["time_ns"].as_u64());
        let writes = |stats| counter(stats, "userspace_io_out");
        assert!(writes(&second) > writes(&first), "{mode}: the guest goes on");
        assert!(first["vcpus"][0]["poll_control"].is_u64(), "{mode}: the vCPUs are asked");
    }
}

#[test]
fn resize_reads_the_size_again_and_changes_no_file() {
    for options in ["", ",readonly=on", ",engine=null", ",engine=sync"] {
        let dir = scratch();
        let file = File::create(dir.path().join("disk")).expect("a disk");
        file.set_len(1 << 20).expect("a size");
        let spec = format!("path={}{options}", dir.path().join("disk").display());
        let _guest = start(guest(&dir, &busy()).args(["--disk", &spec]));
        let control = control(&dir);
        for (bytes, old, new) in [
            (1 << 20, 1 << 20, 1 << 20),
            (3 << 20, 1 << 20, 3 << 20),
            ((2 << 20) + 100, 3 << 20, 2 << 20),
        ] {
            file.set_len(bytes).expect("another size");
            let reply = control.ctl("resize blk0").done();
            assert_eq!(reply["disk"], "blk0");
            assert_eq!(reply["old_capacity_bytes"], old, "{options}");
            assert_eq!(reply["new_capacity_bytes"], new, "{options}");
            assert_eq!(file.metadata().expect("the disk").len(), bytes);
            let status = control.ctl("status").done();
            assert_eq!(status["disks"][0]["capacity_bytes"], new, "{options}");
        }
        let error = control.ctl("resize blk1").refused(1);
        assert_eq!(error, "pollux: resize blk1: no such disk (use blk0)\n");
    }
}

#[test]
fn set_changes_how_pollux_polls_at_the_next_halts() {
    sets_how_it_polls("user");
}

#[test]
fn set_changes_how_kvm_polls_at_the_next_halts() {
    sets_how_it_polls("kernel");
}

fn sets_how_it_polls(mode: &str) {
    // 1 ms between the timer's interrupts.
    let dir = scratch();
    let guest = guest(&dir, &[print(COM1, "up\n"), halts_with_timer(1_000_000)]);
    let guest = start(guest.args(["--halt", mode, "--halt-poll-ns", "0"]));
    let control = control(&dir);
    let halts = |stats: &Json| match mode {
        "user" => counter(stats, "userspace_hlt"),
        _ => counter(stats, "halt_exits"),
    };
    let more_halts = |since: &Json| {
        let enough = halts(since) + 20;
        stats_when(&control, "20 halts", |stats| halts(stats) > enough)
    };
    let before = stats_when(&control, "20 halts", |stats| halts(stats) > 20);
    assert_eq!(counter(&before, "halt_attempted_poll"), 0);
    assert_eq!(before["config"]["halt_poll_ns"], 0);

    // More than the timer's period, so that the window grows to cover it.
    let reply = control.ctl("set halt_poll_ns=100ms").done();
    assert_eq!(reply["set"], json!({ "halt_poll_ns": 100_000_000 }));
    let polled = stats_when(&control, "polls that see the timer", |stats| {
        counter(stats, "halt_successful_poll") > 5
    });
    check_form(&polled);
    assert_eq!(polled["config"]["halt_poll_ns"], 100_000_000);

    control.ctl("set halt_poll_ns=0").done();
    // The halt that is under way began before.
    let off = more_halts(&control.stats());
    let later = more_halts(&off);
    assert_eq!(counter(&later, "halt_attempted_poll"), counter(&off, "halt_attempted_poll"));

    guest.signal(libc::SIGTERM);
    let end = guest.wait();
    end.expect(0);
    assert_eq!(end.stats["config"]["halt_poll_ns"], 0);
}

#[test]
fn all_parameters_are_the_vms_own_in_mode_user() {
    let dir = scratch();
    let guest = guest(&dir, &[print(COM1, "up\n"), halts_with_timer(1_000_000)]);
    let guest = start(guest.args(["--halt", "user", "--halt-poll-ns", "100ms"]));
    let control = control(&dir);
    stats_when(&control, "polls", |stats| counter(stats, "halt_successful_poll") > 5);
    // A window that only ever becomes 0 or this.
    let words = "halt_poll_ns=2us halt_poll_ns_grow=0 halt_poll_ns_grow_start=3us \
                 halt_poll_ns_shrink=0 io_poll_ns=4us";
    let reply = control.ctl(&format!("set {words}")).done();
    let expected = json!({
        "halt_poll_ns": 2000,
        "halt_poll_ns_grow": 0,
        "halt_poll_ns_grow_start": 3000,
        "halt_poll_ns_shrink": 0,
        "io_poll_ns": 4000,
    });
    assert_eq!(reply["set"], expected);
    let window = |stats: &Json| stats["vcpus"][0]["window_ns"].as_u64();
    let stats = stats_when(&control, "a window of 0", |stats| window(stats) == Some(0));
    for (name, value) in expected.as_object().expect("an object") {
        assert_eq!(&stats["config"][name], value, "{name}");
    }
    // grow is 0: no window grows from 0 again.
    let attempts = counter(&stats, "halt_attempted_poll");
    let halts = counter(&stats, "userspace_hlt");
    let later =
        stats_when(&control, "20 halts", |stats| counter(stats, "userspace_hlt") > halts + 20);
    assert_eq!(counter(&later, "halt_attempted_poll"), attempts);
    drop(guest);
}

#[test]
fn a_set_that_is_wrong_in_part_changes_nothing() {
    let dir = scratch();
    let _guest = start(guest(&dir, &busy()).args(["--halt-poll-ns", "7"]));
    let control = control(&dir);
    for (words, expected) in [
        (
            "halt_poll_ns=5us cpus=2",
            "set cpus: not a parameter that can be changed (use halt_poll_ns,",
        ),
        ("halt_poll_ns=5us io_poll_ns=x", "io_poll_ns=x: not a time"),
        (
            "halt_poll_ns=5us halt_poll_ns_grow=3",
            "affects all VMs of the host (add --allow-host-tuning",
        ),
        ("halt_poll_ns=99s", "halt_poll_ns=99s: too long"),
    ] {
        let error = control.ctl(&format!("set {words}")).refused(1);
        assert!(error.contains(expected), "{error}");
        assert_eq!(control.stats()["config"]["halt_poll_ns"], 7, "{words}");
    }
    let mut client = control.connect();
    let reply = client.ask(r#"{"command":"set","parameters":{"halt_poll_ns":9}}"#);
    assert_eq!(reply, json!({ "ok": true, "set": { "halt_poll_ns": 9 } }));
    for value in ["-1", "1.5", "null", "[1]", "{}", "true", "\"\""] {
        let reply =
            client.ask(&format!(r#"{{"command":"set","parameters":{{"halt_poll_ns":{value}}}}}"#));
        assert_eq!(reply["ok"], false, "{value}");
    }
    assert_eq!(client.ask(r#"{"command":"set","parameters":{}}"#)["ok"], false);
    assert_eq!(control.stats()["config"]["halt_poll_ns"], 9);
}

#[test]
fn no_parameter_of_the_host_goes_with_passthrough() {
    let dir = scratch();
    let _guest = start(guest(&dir, &busy()).args(["--halt", "passthrough"]));
    let error = control(&dir).ctl("set halt_poll_ns=1").refused(1);
    assert!(error.contains("no effect with --halt passthrough"), "{error}");
    control(&dir).ctl("set io_poll_ns=1").done();
}

#[test]
fn stop_ends_the_guest_in_order() {
    for mode in ["kernel", "user", "passthrough"] {
        let dir = scratch();
        let guest = start(guest(&dir, &busy()).args(["--halt", mode, "--cpus", "2"]));
        assert_eq!(control(&dir).ctl("stop").done()["state"], "stopping");
        let end = guest.wait();
        end.expect(0);
        let how = json!({ "reason": "stopped", "detail": "the control socket" });
        assert_eq!(end.stats["end"]["how"], how, "{mode}");
        assert_eq!(end.stderr, "pollux: stopped by the control socket; disks are flushed\n");
        assert!(!exists(&control(&dir).0), "{mode}");
    }
}

#[test]
fn a_guest_that_restarts_keeps_its_socket_its_clients_and_what_was_set() {
    let dir = scratch();
    let guest = guest(&dir, &[print(COM1, "up\n"), reset()]).args(["--on-reboot", "restart"]);
    let mut guest = start(guest);
    let mut client = control(&dir).connect();
    let reply = client.ask(r#"{"command":"set","parameters":{"halt_poll_ns":"5us"}}"#);
    assert_eq!(reply["ok"], true, "{reply}");
    let boots = |guest: &Running| guest.console().matches("up").count();
    let before = boots(&guest);
    guest.wait_for("two more boots", |guest| boots(guest) > before + 1);
    let stats = client.ask(r#"{"command":"stats"}"#);
    assert_eq!(stats["stats"]["config"]["halt_poll_ns"], 5000);
    assert_eq!(client.ask(r#"{"command":"stop"}"#)["ok"], true);
    guest.wait().expect(0);
}

// --- The file.

/// A test that failed leaves no guest behind.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn only_its_owner_may_open_it_whatever_the_umask_says() {
    for umask in [0, 0o022, 0o077] {
        let dir = scratch();
        let kernel = elf::write(dir.path(), &spin());
        let mut command = Command::new(program());
        command.args(["run", "--boot", "linux64", "--kernel"]).arg(&kernel).arg("--control");
        command.arg(&control(&dir).0).stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: umask is safe between fork and exec.
        unsafe {
            command.pre_exec(move || {
                libc::umask(umask);
                Ok(())
            });
        }
        let mut child = Ended(command.spawn().expect("pollux starts"));
        // Whenever there is something, nobody else may open it.
        let found = loop {
            if let Ok(found) = control(&dir).0.symlink_metadata() {
                break found;
            }
            assert_eq!(child.0.try_wait().expect("waiting works"), None);
        };
        assert!(found.file_type().is_socket());
        assert_eq!(found.permissions().mode() & 0o7777, 0o600, "umask {umask:o}");
        while control(&dir).ctl("stop").status != Some(0) {}
        assert_eq!(child.0.wait().expect("waiting works").code(), Some(0));
    }
}

#[test]
fn it_goes_at_every_orderly_end() {
    let dir = scratch();
    guest(&dir, &[power_off()]).run().expect(0);
    assert!(!exists(&control(&dir).0), "power off");
    guest(&dir, &[elf::triple_fault()]).run().expect(4);
    assert!(!exists(&control(&dir).0), "triple fault");
    guest(&dir, &busy()).args(["--kvm", "/dev/null"]).run().expect(2);
    assert!(!exists(&control(&dir).0), "no VM at all");
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let guest = start(guest(&dir, &busy()));
        assert!(exists(&control(&dir).0));
        guest.signal(signal);
        guest.wait().expect(0);
        assert!(!exists(&control(&dir).0), "signal {signal}");
    }
}

#[test]
fn a_socket_that_somebody_listens_on_is_left_to_them() {
    let dir = scratch();
    let first = start(guest(&dir, &busy()));
    let second = guest(&dir, &busy()).run();
    second.expect(2);
    assert_eq!(second.stderr.lines().count(), 1, "{}", second.stderr);
    assert!(second.stderr.contains("somebody listens there already"), "{}", second.stderr);
    assert_eq!(control(&dir).ctl("status").done()["pid"], first.pid());

    // Anybody else's as well, also if that takes no more connections.
    let other = dir.path().join("other");
    let listener = UnixListener::bind(&other).expect("a socket");
    // SAFETY: no memory is involved.
    unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 0) };
    let _waiting = Control(other.clone()).connect();
    let kernel = elf::write(dir.path(), &spin());
    let refused = Guest::new(&kernel).args(["--boot", "linux64", "--control"]).args([&other]).run();
    refused.expect(2);
    assert!(refused.stderr.contains("somebody listens"), "{}", refused.stderr);
    assert!(exists(&other));
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = scratch();
    drop(UnixListener::bind(&control(&dir).0).expect("a socket"));
    let error = control(&dir).ctl("status").refused(2);
    assert!(error.contains("nobody listens there any more"), "{error}");
    let killed = start(guest(&dir, &busy()));
    control(&dir).ctl("status").done();
    killed.signal(libc::SIGKILL);
    killed.wait().expect(128 + libc::SIGKILL);
    assert!(exists(&control(&dir).0), "nobody was left to remove it");
    control(&dir).ctl("status").refused(2);
    let _guest = start(guest(&dir, &busy()));
    control(&dir).ctl("status").done();
}

#[test]
fn what_is_no_socket_is_never_removed() {
    let dir = scratch();
    let path = &control(&dir).0;
    let target = dir.path().join("target");
    drop(UnixListener::bind(&target).expect("a socket"));
    for make in [
        &|| fs::write(path, "precious").expect("a file"),
        &|| fs::create_dir(path).expect("a directory"),
        // Also if it leads to a stale one.
        &|| symlink(&target, path).expect("a link"),
    ] as [&dyn Fn(); 3]
    {
        make();
        let end = guest(&dir, &busy()).run();
        end.expect(2);
        assert_eq!(end.stderr.lines().count(), 1, "{}", end.stderr);
        assert!(end.stderr.starts_with("pollux: --control "), "{}", end.stderr);
        let found = path.symlink_metadata().expect("it is still there");
        if found.is_file() {
            assert_eq!(fs::read_to_string(path).expect("the file"), "precious");
            fs::remove_file(path).expect("ours");
        } else if found.is_dir() {
            fs::remove_dir(path).expect("ours");
        }
    }
    assert!(exists(&target));
}

#[test]
fn a_file_that_took_its_place_meanwhile_stays() {
    let dir = scratch();
    let guest = start(guest(&dir, &busy()));
    fs::remove_file(&control(&dir).0).expect("the socket");
    fs::write(&control(&dir).0, "precious").expect("a file");
    guest.signal(libc::SIGTERM);
    guest.wait().expect(0);
    assert_eq!(fs::read_to_string(&control(&dir).0).expect("the file"), "precious");
}

#[test]
fn paths_that_cannot_be_are_refused_in_one_line() {
    let dir = scratch();
    let long = dir.path().join("x".repeat(120));
    let missing = dir.path().join("missing/control");
    let stats = dir.path().join("same");
    let kernel = elf::write(dir.path(), &power_off());
    for (path, expected) in
        [(&long, "1 to 107 bytes"), (&missing, "missing"), (&stats, "is the file of --stats")]
    {
        let guest = Guest::new(&kernel).without_stats().args(["--boot", "linux64"]);
        let end = guest.args(["--stats".as_ref(), stats.as_os_str()]);
        let end = end.args(["--control".as_ref(), path.as_os_str()]).run();
        end.expect(2);
        assert_eq!(end.stderr.lines().count(), 1, "{}", end.stderr);
        assert!(end.stderr.contains(expected), "{}", end.stderr);
    }
}

#[test]
fn bad_arguments_of_ctl_are_2() {
    let dir = scratch();
    for words in ["status", "stop", "frob", "set halt_poll_ns", "set", "resize"] {
        control(&dir).ctl(words).refused(2);
    }
    fs::write(&control(&dir).0, "no socket").expect("a file");
    control(&dir).ctl("status").refused(2);
}

// --- Clients that misbehave.

#[test]
fn what_is_no_request_is_answered_in_one_line_and_the_connection_stays() {
    let dir = scratch();
    let _guest = start(guest(&dir, &busy()));
    let mut client = control(&dir).connect();
    for line in [
        "",
        " ",
        "x",
        "null",
        "[]",
        "{}",
        "\u{1b}[2J",
        r#"{"command":"frob\n\u001b[2J"}"#,
        r#"{"command":"status","disk":"blk0"}"#,
        r#"{"command":"resize"}"#,
        r#"{"command":"resize","disk":7}"#,
        r#"{"command":"resize","disk":"blk7\n"}"#,
        r#"{"command":"set"}"#,
        r#"{"command":"set","parameters":{"\n":"\n"}}"#,
        &"[".repeat(4000),
        &format!(r#"{{"command":"status{}"}}"#, " ".repeat(4000)),
    ] {
        let reply = client.ask(line);
        assert_eq!(reply["ok"], false, "{line}: {reply}");
        let error = reply["error"].as_str().expect("an error");
        assert!(!error.contains(char::is_control), "{line}: {error:?}");
    }
    assert!(client.send([0xff, 0xfe, 0, b'\n']));
    assert_eq!(client.reply()["ok"], false);
    assert_eq!(client.ask(r#"{"command":"status"}"#)["ok"], true);
    assert_eq!(client.ask(r#" { "command" : "status" } "#)["ok"], true);
}

#[test]
fn requests_are_answered_in_order_however_they_arrive() {
    let dir = scratch();
    let _guest = start(guest(&dir, &busy()));
    let mut client = control(&dir).connect();
    let requests = (0..100).map(|n| format!("{{\"command\":\"resize\",\"disk\":\"d{n}\"}}\n"));
    assert!(client.send(requests.collect::<String>()));
    for n in 0..100 {
        let reply = client.reply();
        assert!(reply["error"].as_str().is_some_and(|e| e.contains(&format!("d{n}:"))), "{reply}");
    }
    for byte in b"{\"command\":\"status\"}" {
        assert!(client.send([*byte]));
    }
    // The end of what is sent is no end of what is answered; half a request is none.
    assert!(client.send("\n{\"command\":\"status\"}\n{\"command\":\"stop\"}"));
    client.stream().shutdown(std::net::Shutdown::Write).expect("a connection");
    assert_eq!(client.reply()["ok"], true);
    assert_eq!(client.reply()["ok"], true);
    assert_eq!(client.reply(), Json::Null);
    control(&dir).ctl("status").done();
}

/// Resident memory of a process, in KiB, and its open files.
fn size(guest: &Running) -> (u64, usize) {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.pid())).expect("a process");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
    let kib = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    let files = fs::read_dir(format!("/proc/{}/fd", guest.pid())).expect("its files");
    (kib, files.count())
}

#[test]
fn clients_that_misbehave_hurt_neither_the_guest_nor_others_nor_make_pollux_grow() {
    let dir = scratch();
    let guest = start(guest(&dir, &busy()));
    let control = control(&dir);
    let mut good = control.connect();
    let mut fine = |what: &str| {
        // Whoever was silent longest may have lost its place.
        let mut reply =
            if good.send("{\"command\":\"status\"}\n") { good.reply() } else { Json::Null };
        if reply.is_null() {
            good = control.connect();
            reply = good.ask(r#"{"command":"status"}"#);
        }
        assert_eq!(reply["ok"], true, "{what}");
    };
    let writes = || counter(&control.stats(), "userspace_io_out");
    fine("before");
    let (mut before, (kib, files)) = (writes(), size(&guest));
    let mut goes_on = |what: &str| {
        let now = writes();
        assert!(now > before, "{what}: the guest stands still");
        before = now;
    };

    // 10 MB without an end: told, and disconnected.
    let mut endless = control.connect();
    let chunk = [b'x'; 64 << 10];
    let sent = (0..160).take_while(|_| endless.send(chunk)).count();
    assert!(sent < 160, "nobody stops it");
    assert!(endless.reply()["error"].as_str().is_some_and(|e| e.contains("4096 bytes")));
    assert_eq!(endless.reply(), Json::Null);
    fine("a line without end");

    // Exactly as long as a request may be, and one byte more.
    let request = r#"{"command":"status"}"#;
    let mut exact = control.connect();
    assert_eq!(exact.ask(&format!("{request}{}", " ".repeat(4095 - request.len())))["ok"], true);
    assert_eq!(exact.ask(&format!("{request}{}", " ".repeat(4096 - request.len())))["ok"], false);
    assert_eq!(exact.reply(), Json::Null);

    // Large replies that are asked for and not read.
    let mut stalling: Vec<_> = (0..4).map(|_| control.connect()).collect();
    for client in &mut stalling {
        client.stream().set_nonblocking(true).expect("a connection");
        while client.send("{\"command\":\"stats\"}\n".repeat(50)) {}
    }
    for _ in 0..20 {
        fine("replies that nobody reads");
    }
    goes_on("replies that nobody reads");

    // More connections than there may be, which are only held.
    let held: Vec<_> = (0..100).map(|_| control.connect()).collect();
    fine("connections that are only held");
    goes_on("connections that are only held");
    assert!(size(&guest).1 <= files + 17, "{files} files before, {} now", size(&guest).1);
    drop(held);

    // Half a request, or a whole one, and gone before the reply.
    for turn in 0..500 {
        let mut hasty = control.connect();
        hasty.send(if turn % 2 == 0 { "{\"command\":\"st" } else { "{\"command\":\"stats\"}\n" });
    }
    fine("clients that close early");
    goes_on("clients that close early");

    // Bytes of all kinds.
    let mut state = 1u32;
    for _ in 0..50 {
        let mut noisy = control.connect();
        let bytes: Vec<u8> = (0..3000)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        noisy.send(bytes);
    }
    fine("noise");
    goes_on("noise");
    drop((stalling, endless, exact));
    fine("after");

    let (kib_after, files_after) = size(&guest);
    assert!(kib_after < kib + (4 << 10), "{kib} KiB before, {kib_after} KiB after");
    assert!(files_after <= files + 2, "{files} files before, {files_after} after");
    guest.signal(libc::SIGTERM);
    guest.wait().expect(0);
}
