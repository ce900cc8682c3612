//! One run of a command in the emulated machine: QEMU's start, the watch over L1, and its end.
//!
//! L1 talks through virtio ports whose other ends are regular files in the run's directory: QEMU
//! never has to wait for a reader, and with `ioeventfd=off` what L1 wrote is in the file before the
//! write returns, so nothing is lost when L1 powers off.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::cache::{Cache, RunDir};
use super::{Attempt, Options, Outcome, Sink, Stream, process};
use crate::guest::cpio::Archive;
use crate::util::{self, Context, Result};

/// How often the files are looked at.
const TICK: Duration = Duration::from_millis(20);
/// A machine that is not up by then never will be. Takes 5 s on an idle host.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// L1 beats once a second.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// L1 ends a command that is out of time itself; the host does when L1 cannot.
const REPORT_LIMIT: Duration = Duration::from_secs(60);
/// How long L1's console is read on after the run is given up.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How much of the console is shown after a failure, in lines.
const CONSOLE_TAIL_LINES: usize = 40;

/// What L1's kernel says when it is broken. The console shows errors only (`quiet`).
const COMPLAINTS: [&str; 9] = [
    "Kernel panic",
    "BUG: ",
    "Oops: ",
    "general protection fault",
    "rcu: INFO: ",
    "blocked for more than",
    "soft lockup",
    "hard LOCKUP",
    "Call Trace:",
];

/// L1's kernel command line.
///
/// `mitigations=off`, no self-tests and no jitter entropy save a second of emulation;
/// khugepaged is what stalls first when an emulated interrupt is lost.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off \
    transparent_hugepage=never cryptomgr.notests initcall_blacklist=jent_mod_init rdinit=/lab/init";

/// Ports of L1, in the order of `tests/lab/init`.
const PORTS: [&str; 5] = ["out", "err", "beat", "status", "dump"];

/// Runs a command once in a fresh L1.
///
/// # Errors
/// The machine could not even be started: no lab failure, and not worth another try.
pub fn attempt(
    cache: &Cache,
    options: &Options,
    command: &[OsString],
    sink: &mut Sink,
) -> Result<Attempt> {
    let dir = cache.run_dir()?;
    prepare(cache, &dir, options, command)?;
    let mut qemu = Qemu(start(cache, &dir, options)?);
    let mut watch = Watch::new(&dir, options)?;
    let started = Instant::now();
    let outcome = loop {
        // In this order: what was written before the end is read after it is known.
        let ended = qemu.0.try_wait().context("QEMU")?;
        watch.pump(sink)?;
        if let Some(status) = ended {
            break watch.last_word(&format!("L1 ended without a status (QEMU: {status})"));
        }
        if let Some(signal) = process::signalled() {
            break Outcome::Interrupted(signal);
        }
        if let Some(outcome) = watch.verdict() {
            // A broken kernel may have more to say.
            thread::sleep(LAST_WORDS);
            watch.pump(sink)?;
            break outcome;
        }
        thread::sleep(TICK);
    };
    drop(qemu);
    watch.pump(sink)?;
    let run_time = watch.ready.map_or(Duration::ZERO, |ready| ready.elapsed());
    let boot_time = watch.ready.map(|ready| ready - started);
    match &outcome {
        Outcome::LabFailed(_) => sink(Stream::Err, &watch.console.tail()),
        Outcome::TimedOut => {
            let dump = fs::read(dir.file("dump")).unwrap_or_default();
            sink(Stream::Err, if dump.is_empty() { b"lab: L1 gave no report\n" } else { &dump });
        }
        Outcome::Exited(_) | Outcome::Interrupted(_) => {}
    }
    Ok(Attempt { outcome, boot_time, run_time })
}

/// QEMU, which does not outlive this value (nor this process: see [`process::die_with_parent`]).
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn prepare(cache: &Cache, dir: &RunDir, options: &Options, command: &[OsString]) -> Result<()> {
    let init = util::workspace_root().join("tests/lab/init");
    let cwd = std::env::current_dir().context("the working directory")?;
    let mut archive = Archive::default();
    archive.directory("lab")?;
    archive.file("lab/init", 0o755, &fs::read(&init).context(init.display())?)?;
    archive.file("lab/settings", 0o644, &settings(options, &cwd))?;
    archive.file("lab/command", 0o644, &script(&cwd, command))?;
    // The kernel unpacks one archive after the other.
    let mut initramfs = fs::read(cache.initramfs()).context(cache.initramfs().display())?;
    initramfs.extend(archive.finish()?);
    fs::write(dir.file("initramfs"), initramfs).context("initramfs")?;
    for port in PORTS {
        File::create(dir.file(port)).context(port)?;
    }
    File::create(dir.file("console")).context("console")?;
    if options.scratch_mib > 0 {
        let scratch = dir.file("scratch");
        let file = File::create(&scratch).context(scratch.display())?;
        file.set_len(options.scratch_mib << 20).context(scratch.display())?;
        util::run(util::command("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&scratch))?;
    }
    Ok(())
}

/// What the init of L1 is told, as shell assignments.
fn settings(options: &Options, cwd: &Path) -> Vec<u8> {
    let mut text = Vec::new();
    let mut assign = |name: &str, value: &[u8]| {
        text.extend(name.as_bytes());
        text.push(b'=');
        text.extend(quote(value));
        text.push(b'\n');
    };
    assign("timeout_s", options.timeout.as_secs().to_string().as_bytes());
    assign("trace", if options.trace { b"1" } else { b"0" });
    let below_tmp: Vec<PathBuf> = [cwd.into(), util::workspace_root(), util::target_dir()]
        .into_iter()
        .filter(|dir| dir.starts_with("/tmp") && dir != Path::new("/tmp"))
        .collect();
    let keep: Vec<&[u8]> = below_tmp.iter().map(|dir| dir.as_os_str().as_bytes()).collect();
    assign("keep", &keep.join(&b'\n'));
    for option in &options.module_options {
        if let Some((module, setting)) = option.split_once('.') {
            // Later ones join earlier ones.
            let variable = format!("opt_{}", module.replace('-', "_"));
            let value = format!("${{{variable}:-}} {setting}");
            text.extend(format!("{variable}=\"{value}\"\n").bytes());
        }
    }
    text
}

/// A shell script that does what the caller would have: its environment, its directory, the command.
fn script(cwd: &Path, command: &[OsString]) -> Vec<u8> {
    let mut text = Vec::new();
    let is_name = |name: &OsStr| {
        let name = name.as_bytes();
        name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
            && !name.first().is_none_or(u8::is_ascii_digit)
    };
    // What belongs to this machine's processes means nothing in L1.
    let foreign = ["CARGO_MAKEFLAGS", "MAKEFLAGS", "MFLAGS", "TMPDIR", "PWD", "OLDPWD"];
    let environment = std::env::vars_os()
        .filter(|(name, _)| is_name(name) && !foreign.iter().any(|other| name == other))
        .chain([(super::SCRATCH_VARIABLE.into(), "/tmp/scratch".into())]);
    for (name, value) in environment {
        text.extend(b"export ");
        text.extend(name.as_bytes());
        text.push(b'=');
        text.extend(quote(value.as_bytes()));
        text.push(b'\n');
    }
    text.extend(b"cd ");
    text.extend(quote(cwd.as_os_str().as_bytes()));
    text.extend(b" || exit 126\nexec");
    for word in command {
        text.push(b' ');
        text.extend(quote(word.as_bytes()));
    }
    text.push(b'\n');
    text
}

/// A word of the shell that stands for these bytes.
fn quote(bytes: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for &byte in bytes {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

fn start(cache: &Cache, dir: &RunDir, options: &Options) -> Result<Child> {
    let mut qemu = cache.qemu();
    // 5-level paging is off: with it a nested page fault can repeat for ever.
    qemu.args(["-nodefaults", "-nographic", "-no-reboot", "-cpu", "max,-la57"])
        .args(["-accel", &options.accel])
        .args(["-smp", &options.cpus.to_string()])
        .args(["-m", &options.memory_mib.to_string()])
        .arg("-kernel")
        .arg(cache.kernel())
        .arg("-initrd")
        .arg(dir.file("initramfs"))
        .args(["-append", COMMAND_LINE, "-monitor", "none"])
        .arg("-serial")
        .arg(with_path("file:", &dir.file("console")))
        .args(["-virtfs", "local,path=/,mount_tag=host,security_model=none,multidevs=remap"])
        .args(["-device", "virtio-serial-pci,ioeventfd=off"]);
    for port in PORTS {
        let file = with_path(&format!("file,append=on,id={port},path="), &dir.file(port));
        qemu.arg("-chardev").arg(file);
        qemu.args(["-device", &format!("virtserialport,chardev={port},name=lab.{port}")]);
    }
    if options.scratch_mib > 0 {
        let drive = "if=virtio,format=raw,cache=unsafe,discard=unmap,file=";
        qemu.arg("-drive").arg(with_path(drive, &dir.file("scratch")));
    }
    let log = File::create(dir.file("qemu")).context("QEMU's log")?;
    qemu.stdin(Stdio::null()).stdout(log.try_clone().context("QEMU's log")?).stderr(log);
    process::die_with_parent(&mut qemu);
    qemu.spawn().context("cannot run QEMU")
}

/// An option of QEMU that ends in a path; commas are doubled, as QEMU wants.
fn with_path(option: &str, path: &Path) -> OsString {
    let mut text = option.as_bytes().to_vec();
    for &byte in path.as_os_str().as_bytes() {
        text.push(byte);
        if byte == b',' && !option.starts_with("file:") {
            text.push(byte);
        }
    }
    OsStr::from_bytes(&text).into()
}

/// What the host sees of L1.
struct Watch {
    out: Tail,
    err: Tail,
    beat: Tail,
    console: Console,
    status: PathBuf,
    timeout: Duration,
    started: Instant,
    /// When the first beat came.
    ready: Option<Instant>,
    last_beat: Instant,
}

impl Watch {
    fn new(dir: &RunDir, options: &Options) -> Result<Watch> {
        let tail = |name: &str| Tail::open(&dir.file(name));
        Ok(Watch {
            out: tail("out")?,
            err: tail("err")?,
            beat: tail("beat")?,
            console: Console { tail: tail("console")?, text: Vec::new(), qemu: dir.file("qemu") },
            status: dir.file("status"),
            timeout: options.timeout,
            started: Instant::now(),
            ready: None,
            last_beat: Instant::now(),
        })
    }

    /// Passes on what the command wrote and takes in what L1 did.
    fn pump(&mut self, sink: &mut Sink) -> Result<()> {
        for (tail, stream) in [(&mut self.out, Stream::Out), (&mut self.err, Stream::Err)] {
            let new = tail.read()?;
            if !new.is_empty() {
                sink(stream, &new);
            }
        }
        self.console.read()?;
        if !self.beat.read()?.is_empty() {
            self.last_beat = Instant::now();
            self.ready.get_or_insert(self.last_beat);
        }
        Ok(())
    }

    /// The end of the run, if it must end now although L1 is still there.
    fn verdict(&self) -> Option<Outcome> {
        if let Some(complaint) = self.console.complaint() {
            return Some(Outcome::LabFailed(format!("L1's kernel: {complaint}")));
        }
        let Some(ready) = self.ready else {
            return (self.started.elapsed() > BOOT_LIMIT)
                .then(|| Outcome::LabFailed(format!("not up after {} s", BOOT_LIMIT.as_secs())));
        };
        let silent = self.last_beat.elapsed();
        if silent > SILENCE_LIMIT {
            return Some(self.last_word(&format!("L1 silent for {} s", silent.as_secs())));
        }
        (ready.elapsed() > self.timeout + REPORT_LIMIT).then_some(Outcome::TimedOut)
    }

    /// What L1 said about the command; else the lab has failed, for `reason`.
    fn last_word(&self, reason: &str) -> Outcome {
        let word = fs::read_to_string(&self.status).unwrap_or_default();
        match word.lines().next().map(str::trim) {
            Some("timeout") => Outcome::TimedOut,
            Some(status) if status.parse::<i32>().is_ok() => {
                Outcome::Exited(status.parse().unwrap_or_default())
            }
            _ => match self.console.complaint() {
                Some(complaint) => Outcome::LabFailed(format!("{reason}; its kernel: {complaint}")),
                None => Outcome::LabFailed(reason.into()),
            },
        }
    }
}

/// A file that grows.
struct Tail(File);

impl Tail {
    fn open(path: &Path) -> Result<Tail> {
        File::open(path).context(path.display()).map(Tail)
    }

    /// What is new.
    fn read(&mut self) -> Result<Vec<u8>> {
        let mut new = Vec::new();
        self.0.read_to_end(&mut new).context("the run's directory")?;
        Ok(new)
    }
}

/// L1's console.
struct Console {
    tail: Tail,
    text: Vec<u8>,
    qemu: PathBuf,
}

impl Console {
    fn read(&mut self) -> Result<()> {
        self.text.extend(self.tail.read()?);
        Ok(())
    }

    /// The first line that says that L1's kernel is broken.
    fn complaint(&self) -> Option<String> {
        complaint(&String::from_utf8_lossy(&self.text))
    }

    /// The last lines, and what QEMU itself had to say.
    fn tail(&self) -> Vec<u8> {
        let text = String::from_utf8_lossy(&self.text);
        let qemu = fs::read_to_string(&self.qemu).unwrap_or_default();
        let lines: Vec<&str> = text.lines().chain(qemu.lines()).collect();
        let skipped = lines.len().saturating_sub(CONSOLE_TAIL_LINES);
        let mut tail = String::from("lab: the end of L1's console:\n");
        for line in lines.into_iter().skip(skipped) {
            tail.push_str("  ");
            tail.push_str(line.trim_end());
            tail.push('\n');
        }
        tail.into_bytes()
    }
}

fn complaint(console: &str) -> Option<String> {
    console
        .lines()
        .find(|line| COMPLAINTS.iter().any(|complaint| line.contains(complaint)))
        .map(|line| line.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_shell_unchanged() {
        let words = ["a b", "it's", "$HOME", "", "\\n", "`x`", "\"", "two\nlines", "*"];
        let mut script = b"printf '%s\\0'".to_vec();
        for word in words {
            script.push(b' ');
            script.extend(quote(word.as_bytes()));
        }
        let output = util::output(
            std::process::Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)),
        )
        .unwrap();
        let seen: Vec<&[u8]> = output.strip_suffix(b"\0").unwrap().split(|&b| b == 0).collect();
        assert_eq!(seen, words.map(str::as_bytes));
    }

    #[test]
    fn a_broken_kernel_is_told_from_a_quiet_one() {
        assert_eq!(complaint("kvm_amd: Nested Paging enabled\nlab: ready 4.9\n"), None);
        assert_eq!(complaint("kvm: kvm [98]: vcpu0 Unhandled WRMSR(0xc0010007) = 0x0\n"), None);
        for line in [
            "[   9.1] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "[ 100.2] INFO: task khugepaged:30 blocked for more than 60 seconds.",
            "[  61.0] watchdog: BUG: soft lockup - CPU#1 stuck for 44s!",
            "[   3.0] Oops: general protection fault, probably for non-canonical address",
            "[   3.0] Kernel panic - not syncing: Fatal exception",
        ] {
            assert_eq!(complaint(&format!("fine\n{line}\r\n")).as_deref(), Some(line));
        }
    }

    #[test]
    fn options_of_one_module_add_up() {
        let options = Options {
            module_options: vec!["kvm.halt_poll_ns=0".into(), "kvm.mmio_caching=0".into()],
            ..Options::default()
        };
        let mut script = settings(&options, Path::new("/tmp/it's here"));
        script.extend(b"printf '%s|%s|%s' \"$opt_kvm\" \"$keep\" \"$timeout_s\"");
        let output = util::output_text(
            std::process::Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)),
        )
        .unwrap();
        assert_eq!(output, format!(" halt_poll_ns=0 mmio_caching=0|/tmp/it's here|600"));
    }

    #[test]
    fn commas_of_a_path_are_doubled_where_qemu_splits() {
        assert_eq!(with_path("file,path=", Path::new("/a,b")), "file,path=/a,,b");
    }
}
