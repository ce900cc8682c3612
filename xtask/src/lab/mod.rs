//! `cargo xtask lab -- COMMAND`: runs a command where KVM can run stock kernels.
//!
//! That is this machine if `pollux doctor` says so, else *L1*: a Debian kernel with KVM in QEMU's
//! emulation of AMD SVM, with this machine's file system as its root. Emulated SVM has bugs, so a
//! failure of the lab is told apart from one of the command: a heartbeat from L1 and its kernel's
//! messages say that L1 lives. If it does not, the command runs again in a fresh L1.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::util::{self, Context, Result, bail};

mod cache;
mod here;
mod machine;
mod process;

pub use process::{catch_signals, signalled};

/// Exit status for a command that was still running at its timeout.
const TIMED_OUT: u8 = 124;
/// Exit status when the lab failed, every time it was tried.
const LAB_FAILED: u8 = 125;

/// Tells the command a directory on a real file system (ext4 in L1) that ends with the run.
const SCRATCH_VARIABLE: &str = "POLLUX_SCRATCH";

/// Runs a command where KVM can run stock kernels: here, or in an emulated machine.
///
/// The exit status is the command's. Others: 124 it was still running at the timeout, 125 the lab
/// itself failed (three times, each in a fresh machine), 128 + N interrupted by signal N.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    options: Options,
    /// Run the command this often, each time in a fresh machine, and count how it ends.
    #[arg(long, value_name = "TIMES", conflicts_with = "no_retry")]
    repeat: Option<u32>,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// How a command is run.
#[derive(Clone, clap::Args)]
pub struct Options {
    /// CPUs of the emulated machine.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub cpus: u32,
    /// Memory of the emulated machine.
    #[arg(long = "memory", value_name = "MIB", default_value_t = 4096)]
    pub memory_mib: u64,
    /// Disk of the emulated machine, mounted at $POLLUX_SCRATCH; 0: none.
    #[arg(long = "scratch", value_name = "MIB", default_value_t = 1024)]
    pub scratch_mib: u64,
    /// How long the command may run.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub timeout: Duration,
    /// The command's effects cannot be repeated: do not run it again if the lab fails.
    #[arg(long)]
    pub no_retry: bool,
    /// Use the emulated machine, whatever this machine's KVM can do.
    #[arg(long)]
    pub emulate: bool,
    /// How QEMU emulates. `tcg,thread=multi` runs CPUs at the same time, but loses interrupts.
    #[arg(long, value_name = "ACCEL", default_value = "tcg,thread=single")]
    pub accel: String,
    /// An option of a module of the emulated machine, such as `kvm.halt_poll_ns=0`.
    #[arg(long = "module-option", value_name = "MODULE.OPTION=VALUE")]
    pub module_options: Vec<String>,
    /// Record KVM's trace events; a timeout's report shows the last ones.
    #[arg(long)]
    pub trace: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            cpus: 2,
            memory_mib: 4096,
            scratch_mib: 1024,
            timeout: Duration::from_secs(600),
            no_retry: false,
            emulate: false,
            accel: "tcg,thread=single".into(),
            module_options: Vec::new(),
            trace: false,
        }
    }
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds)),
        _ => Err("a whole number of seconds, 1 or more".into()),
    }
}

/// Which of a command's outputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error; what the lab itself has to say comes here as well.
    Err,
}

/// Takes a command's output as it comes.
pub type Sink<'a> = dyn FnMut(Stream, &[u8]) + 'a;

/// How a run ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The command ended with this status.
    Exited(i32),
    /// The command was still running at its timeout, in a machine that was well.
    TimedOut,
    /// The machine failed; the reason.
    LabFailed(String),
    /// A signal asked us to stop.
    Interrupted(i32),
}

impl Outcome {
    fn status(&self) -> u8 {
        match self {
            Outcome::Exited(status) => (status & 0xff) as u8,
            Outcome::TimedOut => TIMED_OUT,
            Outcome::LabFailed(_) => LAB_FAILED,
            Outcome::Interrupted(signal) => (128 + signal) as u8,
        }
    }
}

/// One attempt.
pub struct Attempt {
    outcome: Outcome,
    /// Until the machine's heart beat first; none if it never did, or if no machine was needed.
    boot_time: Option<Duration>,
    /// From then to the end.
    run_time: Duration,
}

/// Where commands run.
pub enum Lab {
    /// On this machine.
    Here,
    /// In the emulated machine.
    Emulated(cache::Cache),
}

impl Lab {
    /// Looks at this machine's KVM, and makes the emulated machine if that is needed.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(emulate: bool) -> Result<Lab> {
        catch_signals();
        if !emulate && here::can_run_stock_kernels() {
            return Ok(Lab::Here);
        }
        cache::Cache::open().map(Lab::Emulated)
    }

    /// Where commands run, for people.
    pub fn place(&self) -> &'static str {
        match self {
            Lab::Here => "this machine's KVM",
            Lab::Emulated(_) => "the emulated machine",
        }
    }

    /// Runs a command, up to three times if the lab fails. Returns how it ended in the end and how
    /// often it was tried.
    ///
    /// # Errors
    /// It cannot be started at all.
    pub fn run(
        &self,
        options: &Options,
        command: &[OsString],
        sink: &mut Sink,
    ) -> Result<(Outcome, u32)> {
        let tries = if options.no_retry { 1 } else { 3 };
        let mut number = 1;
        loop {
            let attempt = match self {
                Lab::Here => here::attempt(options, command, sink)?,
                Lab::Emulated(cache) => machine::attempt(cache, options, command, sink)?,
            };
            record(&attempt, number, command)?;
            let mut say = |text: String| sink(Stream::Err, text.as_bytes());
            match &attempt.outcome {
                Outcome::LabFailed(cause) if number < tries => {
                    say(format!("lab: attempt {number} void, running it again: {cause}\n"));
                    number += 1;
                }
                outcome => {
                    if let Outcome::LabFailed(cause) = outcome {
                        say(format!("lab: failed, attempt {number} of {tries}: {cause}\n"));
                    }
                    if *outcome == Outcome::TimedOut {
                        let limit_s = options.timeout.as_secs();
                        say(format!("lab: the command was still running after {limit_s} s\n"));
                    }
                    return Ok((attempt.outcome, number));
                }
            }
        }
    }
}

/// `cargo xtask lab`.
///
/// # Errors
/// The lab cannot be made or the command cannot be started.
pub fn run(args: &Args) -> Result<ExitCode> {
    for option in &args.options.module_options {
        if !is_module_option(option) {
            bail!("--module-option {option}: must be MODULE.OPTION=VALUE");
        }
    }
    let lab = Lab::open(args.options.emulate)?;
    if let Some(times) = args.repeat {
        return repeat(&lab, args, times);
    }
    let (outcome, _) = lab.run(&args.options, &args.command, &mut pass_through)?;
    Ok(outcome.status().into())
}

/// It becomes part of a shell script, so nothing that a shell could take for more than a word.
fn is_module_option(option: &str) -> bool {
    let plain = |text: &str, others: &str| {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
    };
    option
        .split_once('.')
        .and_then(|(module, setting)| Some((module, setting.split_once('=')?)))
        .is_some_and(|(module, (name, value))| {
            plain(module, "_-") && plain(name, "_") && plain(value, "_-,.:")
        })
}

/// The command's output is ours. Nobody to read it is no reason to leave the machine running.
fn pass_through(stream: Stream, bytes: &[u8]) {
    match stream {
        Stream::Out => {
            let mut out = std::io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush()).ok();
        }
        Stream::Err => drop(std::io::stderr().write_all(bytes)),
    }
}

/// Runs the command again and again and counts: the lab's own measure.
fn repeat(lab: &Lab, args: &Args, times: u32) -> Result<ExitCode> {
    let options = Options { no_retry: true, ..args.options.clone() };
    let (mut passed, mut failed, mut hung, mut broken) = (0, 0, 0, 0);
    let started = std::time::Instant::now();
    for number in 1..=times {
        let (outcome, _) = lab.run(&options, &args.command, &mut pass_through)?;
        match outcome {
            Outcome::Exited(0) => passed += 1,
            Outcome::Exited(_) => failed += 1,
            Outcome::TimedOut => hung += 1,
            Outcome::LabFailed(_) => broken += 1,
            Outcome::Interrupted(_) => return Ok(outcome.status().into()),
        }
        eprintln!(
            "lab: run {number} of {times}: {outcome:?}; {passed} exited 0, {failed} otherwise, \
             {hung} timed out, {broken} lab failures; {:.1} s a run",
            started.elapsed().as_secs_f64() / f64::from(number)
        );
    }
    Ok(if passed == times { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A line of `target/lab/log.jsonl`.
#[derive(Serialize)]
struct Record<'a> {
    /// Seconds since 1970.
    time_s: u64,
    command: String,
    attempt: u32,
    outcome: &'a str,
    status: Option<i32>,
    cause: Option<&'a str>,
    boot_ms: Option<u128>,
    run_ms: u128,
}

fn record(attempt: &Attempt, number: u32, command: &[OsString]) -> Result<()> {
    let (outcome, status, cause) = match &attempt.outcome {
        Outcome::Exited(status) => ("exited", Some(*status), None),
        Outcome::TimedOut => ("timed-out", None, None),
        Outcome::LabFailed(cause) => ("lab-failed", None, Some(cause.as_str())),
        Outcome::Interrupted(signal) => ("interrupted", Some(*signal), None),
    };
    let mut words = String::new();
    for word in command {
        // Writing to a String does not fail.
        let _ = write!(words, "{}{}", if words.is_empty() { "" } else { " " }, word.display());
    }
    let record = Record {
        time_s: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs(),
        command: words,
        attempt: number,
        outcome,
        status,
        cause,
        boot_ms: attempt.boot_time.map(|time| time.as_millis()),
        run_ms: attempt.run_time.as_millis(),
    };
    let mut line = serde_json::to_string(&record).context("the lab's log")?;
    line.push('\n');
    let dir = util::target_dir().join("lab");
    fs::create_dir_all(&dir).context(dir.display())?;
    let path = dir.join("log.jsonl");
    // One write a line: two labs may run at once.
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .context(path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statuses_are_told_apart() {
        let statuses = [
            Outcome::Exited(7).status(),
            Outcome::TimedOut.status(),
            Outcome::LabFailed("L1 silent".into()).status(),
            Outcome::Interrupted(libc::SIGTERM).status(),
        ];
        assert_eq!(statuses, [7, 124, 125, 143]);
    }

    #[test]
    fn module_options_cannot_be_more_than_a_word() {
        assert!(is_module_option("kvm.halt_poll_ns=0"));
        assert!(is_module_option("kvm-amd.npt=0"));
        for wrong in ["kvm", "kvm.x", "kvm.x=", ".x=1", "kvm.x=$(reboot)", "kvm.x=1 y=2"] {
            assert!(!is_module_option(wrong), "{wrong}");
        }
    }

    #[test]
    fn a_command_here_keeps_its_status_and_both_outputs() {
        let words = ["sh", "-c", "echo out; echo err >&2; test -d \"$POLLUX_SCRATCH\"; exit 7"];
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let attempt =
            here::attempt(&Options::default(), &words.map(OsString::from), &mut |s, b| match s {
                Stream::Out => out.extend(b),
                Stream::Err => err.extend(b),
            })
            .unwrap();
        assert_eq!(attempt.outcome, Outcome::Exited(7));
        assert_eq!((out, err), (b"out\n".to_vec(), b"err\n".to_vec()));
    }

    #[test]
    fn a_command_here_that_does_not_end_is_ended() {
        let options = Options { timeout: Duration::from_millis(100), ..Options::default() };
        let words = ["sleep", "1000"].map(OsString::from);
        let attempt = here::attempt(&options, &words, &mut |_, _| ()).unwrap();
        assert_eq!(attempt.outcome, Outcome::TimedOut);
    }

    /// Runs a shell script in the emulated machine, once.
    fn emulated(script: &str, options: Options) -> (Outcome, String, String) {
        let lab = Lab::open(true).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let options = Options { no_retry: true, ..options };
        let command = ["sh", "-c", script].map(OsString::from);
        let (outcome, attempts) = lab
            .run(&options, &command, &mut |stream, bytes| match stream {
                Stream::Out => out.extend(bytes),
                Stream::Err => err.extend(bytes),
            })
            .unwrap();
        assert_eq!(attempts, 1);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (outcome, text(out), text(err))
    }

    #[test]
    #[ignore = "boots the emulated machine; `cargo xtask test` runs it"]
    fn a_command_in_the_machine_has_kvm_a_disk_its_directory_and_its_status() {
        let script = "test -c /dev/kvm && pwd && \
            dd if=/dev/zero of=$POLLUX_SCRATCH/x bs=4k count=1 oflag=direct status=none && \
            echo \"it's\" >&2; exit 7";
        let (outcome, out, err) = emulated(script, Options::default());
        let cwd = std::env::current_dir().unwrap();
        assert_eq!(outcome, Outcome::Exited(7));
        assert_eq!((out.trim_end(), err.as_str()), (cwd.to_str().unwrap(), "it's\n"));
    }

    #[test]
    #[ignore = "boots the emulated machine; `cargo xtask test` runs it"]
    fn a_hang_in_a_machine_that_is_well_is_the_commands_and_reported() {
        let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
        let (outcome, out, err) = emulated("echo here; sleep 1000", options);
        assert_eq!(outcome, Outcome::TimedOut);
        assert_eq!(out, "here\n");
        assert!(err.contains("sleep 1000"), "the processes are missing: {err}");
        assert!(err.contains("--- end"), "the report is not complete: {err}");
    }

    #[test]
    #[ignore = "boots the emulated machine; `cargo xtask test` runs it"]
    fn a_machine_that_dies_is_a_failure_of_the_lab() {
        let (outcome, _, err) =
            emulated("echo c > /proc/sysrq-trigger; sleep 1000", Options::default());
        assert!(matches!(&outcome, Outcome::LabFailed(cause) if cause.contains("Kernel panic")));
        assert!(err.contains("Call Trace"), "the console is missing: {err}");
    }
}
