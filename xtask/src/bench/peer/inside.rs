//! The part that runs where the guests run: one guest after the other, each line of its results
//! channel with the time at which it came, and the kernel's figures at fio's marks.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use super::monitors::{self, Files};
use super::plan::{Device, Fio, Kernel, Line, Medium, Monitor, Plan, Purpose, Run, Window};
use super::probe::{self, Snapshot};
use crate::util::{self, Context, Error, Result, bail};

/// The data disk. Small enough to stay in the page cache.
const DATA_BYTES: usize = 64 << 20;
/// A guest that takes longer hangs.
const GUEST_LIMIT: Duration = Duration::from_secs(150);
/// How often a monitor that says nothing is looked at, in milliseconds.
const TICK_MS: i32 = 50;
/// How long the guest waits for strace before it begins, in seconds.
const STRACE_HEAD_START_S: u32 = 4;

/// All ways to boot. Pollux first and last: A-B-A.
const BOOTS: [(Monitor, Kernel); 6] = [
    (Monitor::Pollux, Kernel::BzImage),
    (Monitor::QemuThreads, Kernel::BzImage),
    (Monitor::Pollux, Kernel::Vmlinux),
    (Monitor::QemuThreads, Kernel::Pvh),
    (Monitor::Pollux, Kernel::Pvh),
    (Monitor::Pollux, Kernel::BzImage),
];
/// Who runs fio. Pollux first and last: A-B-A.
const FIO: [Monitor; 4] =
    [Monitor::Pollux, Monitor::QemuThreads, Monitor::QemuUring, Monitor::Pollux];
/// Whose system calls are counted.
const SYSCALLS: [Monitor; 2] = [Monitor::Pollux, Monitor::QemuThreads];

/// Runs one round, and writes a line of JSON for every guest.
///
/// # Errors
/// A guest did not do what it should.
pub fn run(plan: &Plan) -> Result<()> {
    let bench = Bench::prepare(plan)?;
    say(&Line::Begin { versions: versions(plan)? })?;
    // Programs and libraries into the page cache.
    for (monitor, kernel) in &BOOTS[..2] {
        bench.guest(*monitor, *kernel, Purpose::Boot, Medium::Tmpfs)?;
    }
    for _ in 0..plan.boots {
        for (monitor, kernel) in BOOTS {
            say_run(bench.guest(monitor, kernel, Purpose::Boot, Medium::Tmpfs)?)?;
        }
    }
    for &medium in &plan.media {
        for monitor in FIO {
            say_run(bench.guest(monitor, Kernel::BzImage, Purpose::Fio, medium)?)?;
        }
    }
    if plan.syscalls {
        for &medium in &plan.media {
            for monitor in SYSCALLS {
                say_run(bench.guest(monitor, Kernel::BzImage, Purpose::Syscalls, medium)?)?;
            }
        }
    }
    say(&Line::End)
}

fn say_run(run: Run) -> Result<()> {
    say(&Line::Run(Box::new(run)))
}

fn say(line: &Line) -> Result<()> {
    // What came before may have been cut off within a line.
    let text = format!("\n{}\n", serde_json::to_string(line).context("a result")?);
    std::io::stdout().write_all(text.as_bytes()).context("stdout")
}

fn versions(plan: &Plan) -> Result<BTreeMap<String, String>> {
    let first_line = |command: &mut Command| -> Result<String> {
        Ok(util::output_text(command)?.lines().next().unwrap_or_default().to_owned())
    };
    let host = fs::read_to_string("/proc/sys/kernel/osrelease").context("osrelease")?;
    Ok(BTreeMap::from([
        ("pollux".into(), first_line(Command::new(&plan.pollux).arg("--version"))?),
        ("qemu".into(), first_line(util::command("qemu-system-x86_64").arg("--version"))?),
        ("host kernel".into(), host.trim().into()),
        ("guest kernel".into(), plan.release.clone()),
    ]))
}

/// Everything that the guests of a round have in common.
struct Bench<'a> {
    plan: &'a Plan,
    files: Files,
    data: BTreeMap<Medium, PathBuf>,
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.files.dir).ok();
    }
}

impl<'a> Bench<'a> {
    /// Puts the guest's files into memory, so that no monitor waits for them, and makes the data
    /// disks.
    fn prepare(plan: &'a Plan) -> Result<Bench<'a>> {
        let memory = ["/dev/shm", "/tmp", "/run"]
            .map(Path::new)
            .into_iter()
            .find(|dir| probe::is_tmpfs(dir))
            .ok_or(Error("no tmpfs at /dev/shm, /tmp or /run".into()))?;
        let dir = memory.join(format!("pollux-bench-{}", std::process::id()));
        util::recreate_dir(&dir)?;
        let mut bench = Bench { plan, files: Files { dir: dir.clone() }, data: BTreeMap::new() };
        for name in [
            Files::kernel_name(plan, Kernel::BzImage),
            Files::kernel_name(plan, Kernel::Vmlinux),
            Files::initrd_name(plan),
            "rootfs.ext4".into(),
        ] {
            let from = plan.guest.join(&name);
            fs::copy(&from, dir.join(&name)).context(from.display())?;
        }
        for medium in plan.media.iter().copied().chain([Medium::Tmpfs]) {
            let path = match medium {
                Medium::Tmpfs => dir.join("data"),
                Medium::Scratch => scratch_dir()?.join("data"),
            };
            make_data(&path)?;
            bench.data.insert(medium, path);
        }
        make_fifo(&bench.files.results())?;
        Ok(bench)
    }

    /// Runs one guest to its end.
    fn guest(
        &self,
        monitor: Monitor,
        kernel: Kernel,
        purpose: Purpose,
        medium: Medium,
    ) -> Result<Run> {
        let what = format!("{monitor}, {kernel}, {medium}, {purpose:?}");
        util::step(&what);
        let started = Instant::now();
        self.try_guest(monitor, kernel, purpose, medium).map_err(|error| {
            let console = fs::read(self.files.console()).unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            let from = console.lines().count().saturating_sub(20);
            let tail: Vec<&str> = console.lines().skip(from).collect();
            let seconds = started.elapsed().as_secs();
            Error(format!("{what} ({seconds} s): {error}; the console's end:\n{}", tail.join("\n")))
        })
    }

    fn try_guest(
        &self,
        monitor: Monitor,
        kernel: Kernel,
        purpose: Purpose,
        medium: Medium,
    ) -> Result<Run> {
        let seconds = self.plan.seconds;
        // A short run first has the guest read what it needs from its root disk. What it prints
        // would be still on its way through a pipe when the next mark is written.
        let warm_up = "fio-measure 1 >/dev/null";
        let guest_command = match purpose {
            Purpose::Boot => "true".into(),
            Purpose::Fio => format!("{warm_up} && fio-measure {seconds}"),
            Purpose::Syscalls => format!(
                "{warm_up} && mark trace && sleep {STRACE_HEAD_START_S} && fio-measure {seconds}"
            ),
        };
        let data = self.data.get(&medium).ok_or(Error(format!("no data disk on {medium}")))?;
        let command =
            monitors::command(self.plan, monitor, kernel, &self.files, data, &guest_command);
        let mut watch = Watch::start(&self.files, purpose, command)?;
        watch.follow()?;

        let exec_to_init_ns = watch.init_ns.ok_or(Error("the guest did not start".into()))?;
        let mut window = watch.window.take();
        if purpose != Purpose::Boot {
            if watch.exit_status != Some(0) {
                bail!("the guest's command failed: {:?}", watch.exit_status);
            }
            if !watch.fio.as_ref().is_some_and(|fio| fio.error == 0 && fio.ios > 0) {
                bail!("fio failed: {:?}", watch.fio);
            }
            if let (Some(window), Monitor::Pollux) = (&mut window, monitor) {
                window.device = Some(device_counts(&self.files.stats())?);
            }
        }
        Ok(Run {
            monitor,
            kernel,
            purpose,
            medium,
            exec_to_init_ns,
            boot: watch.boot,
            fio: watch.fio,
            window,
            beside_kib: watch.beside_kib,
            syscalls: watch.syscalls,
        })
    }
}

/// The lab's disk, or a directory of the machine's own.
fn scratch_dir() -> Result<PathBuf> {
    std::env::var_os("POLLUX_SCRATCH").map(PathBuf::from).ok_or(Error("no POLLUX_SCRATCH".into()))
}

/// A file without holes: reading those costs less than data.
fn make_data(path: &Path) -> Result<()> {
    let block: Vec<u8> = (0..1 << 20).map(|at: usize| (at ^ (at >> 8)) as u8 | 1).collect();
    let mut file = File::create(path).context(path.display())?;
    for _ in 0..DATA_BYTES / block.len() {
        file.write_all(&block).context(path.display())?;
    }
    // Nothing is left for the kernel to do while guests run.
    file.sync_all().context(path.display())
}

fn make_fifo(path: &Path) -> Result<()> {
    let c_path = CString::new(path.as_os_str().as_bytes()).context(path.display())?;
    // SAFETY: a C string that outlives the call.
    if unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) } != 0 {
        return Err(std::io::Error::last_os_error()).context(path.display());
    }
    Ok(())
}

/// The data disk's counts between fio's marks, from Pollux's statistics.
fn device_counts(path: &Path) -> Result<Device> {
    let text = fs::read_to_string(path).context(path.display())?;
    let stats: Json = serde_json::from_str(&text).context(path.display())?;
    let at = |mark: &str| -> Option<Device> {
        let marks = stats.get("marks")?.as_array()?;
        // The last of its name: the first run is a warm-up.
        let mark = marks.iter().rfind(|entry| entry["name"] == mark)?;
        let queues = mark.get("queues")?.as_array()?;
        let sum = |name: &str| {
            let of_data = queues.iter().filter(|queue| queue["disk"] == "blk1");
            of_data.filter_map(|queue| queue.get(name)?.as_u64()).sum()
        };
        Some(Device {
            requests: sum("requests"),
            kicks: sum("kicks"),
            interrupts: sum("interrupts"),
        })
    };
    let missing = || Error(format!("{}: no marks of fio", path.display()));
    let (before, after) =
        (at("fio-start").ok_or_else(missing)?, at("fio-end").ok_or_else(missing)?);
    Ok(Device {
        requests: after.requests.saturating_sub(before.requests),
        kicks: after.kicks.saturating_sub(before.kicks),
        interrupts: after.interrupts.saturating_sub(before.interrupts),
    })
}

/// A child that does not outlive this value.
struct Monitored(Child);

impl Drop for Monitored {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// One guest as seen from outside.
struct Watch<'a> {
    files: &'a Files,
    purpose: Purpose,
    /// Open in both directions, so that it has no end while the monitor comes and goes.
    channel: File,
    started: Instant,
    child: Monitored,
    strace: Option<Monitored>,
    before: Option<Snapshot>,
    init_ns: Option<u64>,
    boot: Option<Window>,
    fio: Option<Fio>,
    window: Option<Window>,
    beside_kib: Option<u64>,
    syscalls: Option<BTreeMap<String, u64>>,
    exit_status: Option<i32>,
}

impl<'a> Watch<'a> {
    fn start(files: &'a Files, purpose: Purpose, mut command: Command) -> Result<Watch<'a>> {
        let channel = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(files.results())
            .context("the results channel")?;
        File::create(files.console()).context("the console")?;
        let log = File::create(files.log()).context("the monitor's log")?;
        command.stdin(Stdio::null()).stdout(log.try_clone().context("log")?).stderr(log);
        let started = Instant::now();
        let child = Monitored(command.spawn().context("cannot run the monitor")?);
        Ok(Watch {
            files,
            purpose,
            channel,
            started,
            child,
            strace: None,
            before: None,
            init_ns: None,
            boot: None,
            fio: None,
            window: None,
            beside_kib: None,
            syscalls: None,
            exit_status: None,
        })
    }

    /// Takes in the results channel until the monitor has ended, or has been seen enough of.
    fn follow(&mut self) -> Result<()> {
        let mut pending = Vec::new();
        loop {
            let ended = self.child.0.try_wait().context("the monitor")?;
            if self.readable(ended.is_none()) {
                let mut buffer = [0; 4096];
                let count = self.channel.read(&mut buffer).context("the results channel")?;
                pending.extend(&buffer[..count]);
            } else if let Some(status) = ended {
                // Pollux gives the guest's end as its status, QEMU 0.
                return if status.success() { Ok(()) } else { Err(self.failed(status)) };
            }
            let now_ns = nanoseconds(self.started.elapsed());
            while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                self.line(String::from_utf8_lossy(&line).trim_end(), now_ns)?;
            }
            if self.purpose == Purpose::Boot && self.init_ns.is_some() {
                return Ok(());
            }
            if self.started.elapsed() > GUEST_LIMIT {
                bail!("still running after {} s", GUEST_LIMIT.as_secs());
            }
        }
    }

    /// Whether there is something to read; with `wait`, after a while.
    fn readable(&self, wait: bool) -> bool {
        let mut fd =
            libc::pollfd { fd: self.channel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live pollfd.
        unsafe { libc::poll(&raw mut fd, 1, if wait { TICK_MS } else { 0 }) > 0 }
    }

    fn failed(&self, status: ExitStatus) -> Error {
        let log = fs::read_to_string(self.files.log()).unwrap_or_default();
        Error(format!("the monitor failed: {status}: {}", log.trim()))
    }

    fn line(&mut self, line: &str, now_ns: u64) -> Result<()> {
        let pid = self.child.0.id();
        match line.split_once(' ') {
            Some(("@mark", "init")) => {
                self.init_ns = Some(now_ns);
                self.boot = Some(Snapshot::default().until(&Snapshot::take(pid)?));
            }
            Some(("@mark", "trace")) => self.strace = Some(self.trace(pid)?),
            Some(("@mark", "fio-start")) => self.before = Some(Snapshot::take(pid)?),
            Some(("@mark", "fio-end")) => {
                let before = self.before.take().ok_or(Error("fio ended before it began".into()))?;
                self.window = Some(before.until(&Snapshot::take(pid)?));
                // fio waits for its mark to be written and read: it still runs.
                self.beside_kib = Some(probe::beside_kib(pid)?);
                if let Some(strace) = self.strace.take() {
                    self.syscalls = Some(self.end_trace(strace)?);
                }
            }
            Some(("@fio", json)) => self.fio = Some(serde_json::from_str(json).context("@fio")?),
            Some(("@exit", status)) => self.exit_status = status.parse().ok(),
            _ => {}
        }
        Ok(())
    }

    /// Counts the system calls of all threads, those of a pool as they come.
    fn trace(&self, pid: u32) -> Result<Monitored> {
        let mut strace = util::command("strace");
        strace.args(["-c", "-f", "-q", "-p", &pid.to_string(), "-o"]).arg(self.files.strace());
        strace.stdin(Stdio::null()).stderr(Stdio::null());
        Ok(Monitored(strace.spawn().context("cannot run strace")?))
    }

    fn end_trace(&self, mut strace: Monitored) -> Result<BTreeMap<String, u64>> {
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(strace.0.id() as libc::pid_t, libc::SIGINT) };
        strace.0.wait().context("strace")?;
        let table = fs::read_to_string(self.files.strace()).context("strace's table")?;
        let calls = probe::parse_strace(&table);
        if calls.is_empty() {
            bail!("strace counted nothing: {table}");
        }
        Ok(calls)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_disk_alone_is_counted_between_the_last_marks() {
        let dir = util::target_dir().join(format!("bench-test-{}", std::process::id()));
        util::recreate_dir(&dir).unwrap();
        let path = dir.join("stats.json");
        let mark = |name: &str, count: u64| {
            serde_json::json!({ "name": name, "queues": [
                { "disk": "blk0", "requests": 1000, "kicks": 1000, "interrupts": 1000 },
                { "disk": "blk1", "requests": count, "kicks": count - 1, "interrupts": count },
            ]})
        };
        let marks =
            [mark("fio-start", 1), mark("fio-end", 4), mark("fio-start", 5), mark("fio-end", 105)];
        let stats = serde_json::json!({ "marks": marks });
        fs::write(&path, stats.to_string()).unwrap();
        let counts = device_counts(&path).unwrap();
        assert_eq!(counts, Device { requests: 100, kicks: 100, interrupts: 100 });
        fs::write(&path, "{}").unwrap();
        assert!(device_counts(&path).is_err());
        util::remove_dir(&dir).unwrap();
    }
}
