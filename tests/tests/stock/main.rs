//! Stock Debian guests, where KVM can run them: `cargo xtask test` runs these in the lab.

mod bench;
mod control;
mod failing;
mod oracle;
mod packed;
mod record;
mod user;
mod verify;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use pollux_tests::guest::{Running, guest_file, workspace};
use pollux_tests::{Guest, Outcome};

/// Bytes of the disk that fio writes.
const DATA_BYTES: u64 = 64 << 20;

/// A guest of `release` that boots `image`, with the root disk as /dev/vda.
fn guest(image: &str, release: &str) -> Guest {
    let initrd = guest_file(&format!("initrd-{release}.img"));
    let root = format!("path={},readonly=on", guest_file("rootfs.ext4").display());
    Guest::new(&guest_file(&format!("{image}-{release}")))
        .args([Path::new("--initrd"), &initrd])
        .args(["--disk", &root])
}

/// Runs `command` in `guest` and checks that it succeeded there.
fn succeed(guest: Guest, command: &str) -> Outcome {
    let end = run(guest, command);
    end.expect(0);
    assert_eq!(end.stats["guest_exit_status"], 0, "{}\n{}", end.results, end.console);
    end
}

fn run(guest: Guest, command: &str) -> Outcome {
    start(guest, command).wait()
}

/// Starts `guest`, which is to run `command`.
fn start(guest: Guest, command: &str) -> Running {
    assert!(!command.contains('"'), "the command stands in double quotes");
    guest.args(["--cmdline", &format!("quiet pollux.cmd=\"{command}\"")]).spawn()
}

/// A file of `bytes` zeros in `dir`.
fn new_file(dir: &Path, name: &str, bytes: u64) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).and_then(|file| file.set_len(bytes)).expect("a disk's file");
    path
}

fn new_disk(dir: &Path) -> PathBuf {
    new_file(dir, "data", DATA_BYTES)
}

fn read_all(mut file: File) -> Vec<u8> {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut file, &mut bytes).expect("the disk can be read");
    bytes
}

/// A script of `tests/lab` as a disk of `guest`'s, the next one; and the command that runs it there, if
/// that disk is /dev/`name`.
fn with_script(guest: Guest, script: &str, name: &str) -> (Guest, String) {
    let mut text = fs::read(workspace().join("tests/lab").join(script)).expect("the script");
    let command = format!("head -c {} /dev/{name} | sh -s", text.len());
    // A disk has whole sectors.
    text.resize(text.len().next_multiple_of(512), 0);
    let padded = guest.dir().join(script);
    fs::write(&padded, text).expect("a disk with the script");
    let disk = format!("path={},readonly=on", padded.display());
    (guest.args(["--disk", &disk]), command)
}

// --- Boot: both releases, three ways in.

fn boots(image: &str, release: &str, protocol: &str) {
    let guest = guest(image, release).args(["--boot", protocol, "--cpus", "2"]);
    let end = succeed(guest, "uname -r; nproc; cat /proc/mounts; dmesg | grep -i 'booting para'");
    assert!(end.results.contains(release), "the kernel's release: {}", end.results);
    assert!(end.results.lines().any(|line| line == "2"), "both CPUs: {}", end.results);
    assert!(end.results.contains("/dev/vda / ext4 ro"), "the root disk: {}", end.results);
    assert!(end.stats["queues"][0]["requests"].as_u64() > Some(0), "{:#}", end.stats["queues"]);
}

#[test]
fn boot_6_12_bzimage() {
    boots("vmlinuz", "6.12", "auto");
}

#[test]
fn boot_6_12_vmlinux() {
    boots("vmlinux", "6.12", "linux64");
}

#[test]
fn boot_6_12_pvh() {
    boots("vmlinux", "6.12", "pvh");
}

#[test]
fn boot_6_1_bzimage() {
    boots("vmlinuz", "6.1", "auto");
}

#[test]
fn boot_6_1_vmlinux() {
    boots("vmlinux", "6.1", "linux64");
}

#[test]
fn boot_6_1_pvh() {
    boots("vmlinux", "6.1", "pvh");
}

#[test]
fn boot_four_cpus() {
    let end = succeed(guest("vmlinuz", "6.12").args(["--cpus", "4"]), "nproc");
    assert!(end.results.lines().any(|line| line == "4"), "{}", end.results);
    assert_eq!(end.stats["vcpus"].as_array().map(Vec::len), Some(4));
}

// --- Memory: each side of the hole below 4 GiB.

/// Kilobytes of memory the guest manages.
fn memory_total_kib(memory: &str) -> u64 {
    let end =
        succeed(guest("vmlinuz", "6.12").args(["--memory", memory]), "grep MemTotal /proc/meminfo");
    let line = end.results.lines().find(|line| line.starts_with("MemTotal:")).expect("MemTotal");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

#[test]
fn memory_of_128_mib_is_enough() {
    assert!((60 << 10..128 << 10).contains(&memory_total_kib("128M")));
}

#[test]
fn memory_beyond_the_hole_is_all_there() {
    assert!((4700 << 10..5 << 20).contains(&memory_total_kib("5G")));
}

// --- How a stock guest ends.

#[test]
fn end_reboot_is_0() {
    let end = run(guest("vmlinuz", "6.12"), "reboot -f");
    end.expect(0);
    assert_eq!(end.stats["end"]["how"]["reason"], "reboot");
}

#[test]
fn end_panic_is_3() {
    run(guest("vmlinuz", "6.12"), "echo c > /proc/sysrq-trigger").expect(3);
}

#[test]
fn end_panic_before_any_driver_is_3() {
    // No initrd and no root=: the kernel panics before it has loaded a module.
    Guest::new(&guest_file("vmlinuz-6.1")).args(["--cmdline", "quiet"]).run().expect(3);
}

// --- The host's parameters of halt polling, which this changes for some seconds.

/// Parameters by name, value that the guest's run sets, and their values now.
fn host_parameters() -> Vec<(&'static str, &'static str, String)> {
    [("grow", "3"), ("grow-start", "12345"), ("shrink", "4")]
        .into_iter()
        .map(|(name, ours)| {
            let file = format!("halt_poll_ns_{}", name.replace('-', "_"));
            let now = fs::read_to_string(Path::new("/sys/module/kvm/parameters").join(file));
            (name, ours, now.expect("a parameter of kvm").trim().to_owned())
        })
        .collect()
}

#[test]
fn host_parameters_hold_while_the_guest_runs_and_not_after_any_end() {
    let before = host_parameters();
    assert!(before.iter().all(|(_, ours, now)| ours != now), "{before:?}");
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, 0] {
        let mut tuned = guest("vmlinuz", "6.12").args(["--allow-host-tuning"]);
        for (name, ours, _) in &before {
            tuned = tuned.args([format!("--halt-poll-ns-{name}"), (*ours).to_owned()]);
        }
        let command = if signal == 0 { "true" } else { "echo up; sleep 1000" };
        let mut running = start(tuned, command);
        running.wait_for("parameters", |_| host_parameters() != before);
        let second = guest("vmlinuz", "6.12").args(["--allow-host-tuning"]);
        second.args(["--halt-poll-ns-grow", "9"]).run().expect(2);
        if signal != 0 {
            running.wait_for("the guest", |guest| guest.results().contains("up"));
            assert!(host_parameters().iter().all(|(_, ours, now)| ours == now));
            running.signal(signal);
        }
        let end = running.wait();
        end.expect(0);
        let told = &end.stats["host"]["kvm_parameters"];
        assert_eq!(told["halt_poll_ns_grow_start"], 12345, "{told}");
        assert_eq!(host_parameters(), before, "after signal {signal}");
    }
}

#[test]
fn passthrough_guests_run_and_halt_without_exits() {
    let guest = guest("vmlinuz", "6.12").args(["--halt", "passthrough", "--cpus", "2"]);
    let end = succeed(guest, "sleep 1; nproc");
    assert!(end.results.lines().any(|line| line == "2"), "{}", end.results);
    for vcpu in end.stats["vcpus"].as_array().expect("vCPUs") {
        assert_eq!(vcpu["exits"]["halt_exits"], 0, "{vcpu:#}");
    }
}

#[test]
fn the_report_says_what_the_guests_haltpoll_driver_did_to_host_polling() {
    let options = ["--guest-idle", "haltpoll", "--halt-poll-ns", "200us"];
    let end = succeed(guest("vmlinuz", "6.12").args(options), "report; sleep 1");
    assert_eq!(
        end.stats["guest"]["guest"][0]["cpuidle_governor"], "haltpoll",
        "{}",
        end.stats["guest"]
    );
    assert_eq!(end.stats["vcpus"][0]["poll_control"], 0, "{:#}", end.stats["vcpus"]);
    assert!(end.stats["notes"].to_string().contains("switched host polling off"));
    let end = succeed(guest("vmlinuz", "6.12").args(["--guest-idle", "halt"]), "true");
    assert_eq!(end.stats["vcpus"][0]["poll_control"], 1);
    assert_eq!(end.stats["notes"], serde_json::json!([]));
}

// --- What the guest sees of the disk.

#[test]
fn disk_properties_reach_the_guest() {
    let guest = guest("vmlinuz", "6.12");
    let data = new_disk(guest.dir());
    let spec = format!("path={},queues=2,serial=pollux-42,cache=writethrough", data.display());
    let guest = guest.args(["--cpus", "2", "--disk", &spec]);
    let end = succeed(
        guest,
        "cd /sys/block/vdb; cat serial; echo; cat size ro queue/write_cache; ls mq | wc -l; \
         cat /sys/block/vda/ro; cat queue/discard_max_bytes; blockdev --flushbufs /dev/vdb",
    );
    let lines: Vec<&str> = end.results.lines().skip_while(|line| *line != "pollux-42").collect();
    assert_eq!(lines.get(1..6), Some(&["131072", "0", "write through", "2", "1"][..]), "{lines:?}");
    assert!(lines.get(6).and_then(|n| n.parse::<u64>().ok()) > Some(0), "discard: {lines:?}");
}

#[test]
fn discard_gives_the_hosts_space_back() {
    use std::os::unix::fs::MetadataExt;
    let guest = guest("vmlinuz", "6.12");
    let data = new_disk(guest.dir());
    fs::write(&data, vec![0xa5; DATA_BYTES as usize]).expect("a full disk");
    let before = fs::metadata(&data).expect("the disk").blocks();
    let file = File::open(&data).expect("the disk");
    let guest = guest.args(["--disk", &format!("path={}", data.display())]);
    succeed(guest, "blkdiscard /dev/vdb && sync");
    let after = file.metadata().expect("the disk").blocks();
    assert!(after < before / 10, "{before} blocks before, {after} after");
}
