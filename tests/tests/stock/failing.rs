//! Disks that fail, fill up or are slow, and a monitor that is killed: what the guest sees, and what
//! is on the disk afterwards. Uses the kernel's device mapper (dmsetup) and loop devices, as root.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pollux_tests::guest::{Running, scratch};

use super::{DATA_BYTES, guest, new_disk, start};

const SECTORS: u64 = DATA_BYTES / 512;
/// Half of the disk, in sectors and in blocks of 4 KiB.
const HALF: u64 = SECTORS / 2;
const HALF_BLOCKS: u64 = DATA_BYTES / 2 / 4096;

/// Runs a host program and gives its output.
pub fn host(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("the program runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A loop device on `backing`, which goes when dropped.
pub struct Loop(pub String);

impl Loop {
    pub fn new(backing: &Path) -> Self {
        Self(host("losetup", &["--find", "--show", backing.to_str().expect("a plain path")]))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).output();
    }
}

/// A mapped block device of [`DATA_BYTES`] on a loop device; both go when dropped.
struct Mapped {
    name: String,
    under: Loop,
    _dir: tempfile::TempDir,
}

impl Mapped {
    /// `table`: lines of dmsetup, with `{loop}` for the loop device.
    fn new(name: &str, table: &str) -> Self {
        let dir = scratch();
        let under = Loop::new(&new_disk(dir.path()));
        let mapped = Self { name: format!("pollux-{name}"), under, _dir: dir };
        let table = mapped.table(table);
        host("dmsetup", &["create", &mapped.name, "--noudevsync", "--table", &table]);
        mapped
    }

    fn table(&self, table: &str) -> String {
        table.replace("{loop}", &self.under.0)
    }

    /// Another table, while the device is in use.
    fn becomes(&self, table: &str) {
        host("dmsetup", &["suspend", "--noflush", "--noudevsync", &self.name]);
        host("dmsetup", &["load", &self.name, "--table", &self.table(table)]);
        host("dmsetup", &["resume", "--noudevsync", &self.name]);
    }

    fn path(&self) -> PathBuf {
        let path = Path::new("/dev/mapper").join(&self.name);
        if path.exists() {
            return path;
        }
        // Nobody makes the link where udev does not run.
        let numbers = host("dmsetup", &["info", "-c", "--noheadings", "-o", "minor", &self.name]);
        PathBuf::from(format!("/dev/dm-{numbers}"))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let remove = ["remove", "--force", "--noudevsync", &self.name];
        let _ = Command::new("dmsetup").args(remove).output();
    }
}

/// A guest with `disk` as /dev/vdb that runs `command`.
fn run_on(disk: &Path, options: &str, command: &str) -> Running {
    let disk = format!("path={}{options}", disk.display());
    start(guest("vmlinuz", "6.12").args(["--disk", &disk]), command)
}

fn read_of(block: u64) -> String {
    format!("dd if=/dev/vdb of=/dev/null bs=4k count=1 iflag=direct skip={block}")
}

/// With a flush: without `direct=on` a write is in the host's page cache, which does not fail.
fn write_of(block: u64) -> String {
    format!("dd if=/dev/zero of=/dev/vdb bs=4k count=1 oflag=direct conv=fsync seek={block}")
}

#[test]
fn sectors_that_fail_are_the_guests_io_errors_and_heal() {
    let whole = format!("0 {SECTORS} linear {{loop}} 0");
    let half = format!("0 {HALF} linear {{loop}} 0\n{HALF} {HALF} error");
    for options in ["", ",direct=on", ",engine=sync"] {
        let mapped = Mapped::new("error", &half);
        let (good, bad) = (HALF_BLOCKS - 1, HALF_BLOCKS + 7);
        let command = format!(
            "{good_read} && echo good is read; {bad_read} || echo bad is not; {bad_write} || echo nor written; \
             {good_write} && echo good is written; until {bad_write}; do sleep 0.2; done; {bad_read} && echo healed",
            good_read = read_of(good),
            bad_read = read_of(bad),
            good_write = write_of(good),
            bad_write = write_of(bad),
        );
        let mut running = run_on(&mapped.path(), options, &command);
        running.wait_for("the errors", |guest| guest.results().contains("good is written"));
        mapped.becomes(&whole);
        let end = running.wait();
        end.expect(0);
        for line in ["good is read", "bad is not", "nor written", "healed"] {
            assert!(end.results.contains(line), "{line} ({options}): {}", end.results);
        }
        assert!(end.results.contains("Input/output error"), "{}", end.results);
        let queue = &end.stats["queues"][1];
        assert!(queue["errors"].as_u64() >= Some(2), "{queue:#}");
    }
}

#[test]
fn a_disk_that_fails_now_and_then_costs_only_the_requests_of_that_time() {
    let mapped = Mapped::new("flakey", &format!("0 {SECTORS} flakey {{loop}} 0 1 2"));
    // A second up, two seconds down, for ever: until both have been seen twice.
    let write = write_of(5);
    let command = format!(
        "for turn in 1 2; do while {write}; do :; done; echo down $turn; \
         until {write}; do sleep 0.1; done; echo up $turn; done 2>/dev/null; sleep 1"
    );
    let mut running = run_on(&mapped.path(), "", &command);
    running.wait_for("both", |guest| guest.results().contains("up 2"));
    // For the flush at the end.
    mapped.becomes(&format!("0 {SECTORS} linear {{loop}} 0"));
    let end = running.wait();
    end.expect(0);
    assert!(end.stats["queues"][1]["errors"].as_u64() >= Some(2), "{:#}", end.stats["queues"]);
}

#[test]
fn a_disk_that_cannot_be_flushed_at_the_end_is_exit_status_1_and_the_figures_are_kept() {
    let half = format!("0 {HALF} linear {{loop}} 0\n{HALF} {HALF} error");
    let mapped = Mapped::new("unflushed", &half);
    // Into the host's page cache: only a flush finds out.
    let write = write_of(HALF_BLOCKS + 7).replace("conv=fsync", "conv=notrunc");
    let end = run_on(&mapped.path(), "", &write).wait();
    end.expect(1);
    assert!(end.stderr.contains("cannot flush blk1"), "{}", end.stderr);
    assert_eq!(end.stats["end"]["how"]["reason"], "failed");
}

#[test]
fn a_slow_disk_is_slow_and_nothing_else() {
    const DELAY_MS: u64 = 300;
    let mapped = Mapped::new("delay", &format!("0 {SECTORS} delay {{loop}} 0 {DELAY_MS}"));
    // The other disk goes on meanwhile.
    let command = format!(
        "{slow} & dd if=/dev/vda of=/dev/null bs=4k count=100 iflag=direct; wait; {slow} && echo read",
        slow = read_of(9),
    );
    let end = run_on(&mapped.path(), ",direct=on", &command).wait();
    end.expect(0);
    assert!(end.results.contains("read"), "{}", end.results);
    let queue = &end.stats["queues"][1];
    assert_eq!(queue["errors"], 0, "{queue:#}");
    let slowest_ns = queue["service_time_ns"]["max"].as_u64();
    assert!(slowest_ns >= Some(DELAY_MS * 1_000_000), "{queue:#}");
}

/// A file system of 24 MiB in memory, unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        host("mount", &["-t", "tmpfs", "-o", "size=24m", "small", &dir.path().to_string_lossy()]);
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_file_system_is_an_io_error_until_there_is_room() {
    let small = Small::new();
    let data = new_disk(small.0.path());
    let filler = small.0.path().join("filler");
    fs::write(&filler, vec![1; 20 << 20]).expect("room for the filler");
    let write = "dd if=/dev/urandom of=/dev/vdb bs=64k count=128 oflag=direct";
    let command = format!(
        "{write} || echo full; {read} && echo readable; until {write}; do sleep 0.2; done; echo written",
        read = read_of(0)
    );
    let mut running = run_on(&data, "", &command);
    running.wait_for("a full disk", |guest| guest.results().contains("readable"));
    fs::remove_file(&filler).expect("the filler");
    let end = running.wait();
    end.expect(0);
    assert!(end.results.contains("full") && end.results.contains("written"), "{}", end.results);
    assert!(end.stats["queues"][1]["errors"].as_u64() >= Some(1), "{:#}", end.stats["queues"]);
}

/// How often the next test kills: POLLUX_KILLS, or a few.
fn kills() -> usize {
    std::env::var("POLLUX_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(3)
}

#[test]
fn what_a_completed_flush_covered_outlives_a_kill() {
    let command = "n=0; while :; do n=$((n + 1)); printf %08d $n | \
         dd of=/dev/vdb bs=4k seek=$n conv=sync,fsync 2>/dev/null || exit; echo flushed $n; done";
    for kill in 0..kills() {
        let dir = scratch();
        let data = new_disk(dir.path());
        let options = ["", ",cache=writethrough", ",direct=on", ",engine=sync"][kill % 4];
        let mut running = run_on(&data, options, command);
        // Not always at the same place of the guest's loop.
        let wanted = format!("flushed {}", 10 + 7 * kill);
        running.wait_for("writes", |guest| guest.results().contains(&wanted));
        running.signal(libc::SIGKILL);
        let end = running.wait();
        assert_eq!(end.status, 128 + libc::SIGKILL);
        let flushed = end
            .results
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .filter_map(|line| line.trim().strip_prefix("flushed ")?.parse::<u64>().ok());
        let file = File::open(&data).expect("the disk");
        let mut checked = 0;
        for number in flushed {
            let mut block = [0; 8];
            file.read_exact_at(&mut block, number * 4096).expect("a block");
            assert_eq!(block, *format!("{number:08}").as_bytes(), "kill {kill}, {options}");
            checked += 1;
        }
        assert!(checked >= 10 + 7 * kill, "{}", end.results);
    }
}
