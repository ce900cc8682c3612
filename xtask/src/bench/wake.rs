//! `cargo xtask bench wake`: what it costs to wake a halted vCPU, and what a vCPU costs that is idle,
//! natively on /dev/kvm. The guest is a few plain instructions, so the lab is not needed.
//!
//! The measuring itself is `vmm/benches/wake`, which runs one guest at a time; here are the settings,
//! their order, the statistics and the tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use serde::Serialize;
use serde_json::Value as Json;

use crate::util::{self, Context, Error, Result, bail, step};

use super::load::{self, Load};

/// What this machine must have: program and Debian package.
const HOST_PROGRAMS: &[(&str, &str)] = &[("strace", "strace"), ("taskset", "util-linux")];

/// What waking a halted vCPU costs, and what an idle one costs, with host polling, guest polling and
/// neither.
///
/// A tiny guest runs on this machine's own KVM, in the halt modes `kernel` and `user`. Every window that polls
/// is measured between two runs that do not. The machine must have nothing else to do, and two CPUs.
#[derive(clap::Args)]
pub struct Args {
    /// Wakes a run, after a quarter as many to warm up.
    #[arg(long, value_name = "COUNT", default_value_t = 4000, value_parser = clap::value_parser!(u32).range(100..))]
    wakes: u32,
    /// How long each idle guest is watched.
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Measure beside other work, too. The times mean nothing, and say so.
    #[arg(long)]
    busy: bool,
}

const MODES: [&str; 2] = ["kernel", "user"];

/// How long after the guest is about to halt it is woken.
const DELAYS_NS: [u64; 2] = [100_000, 300_000];
/// A window that covers these delays and what comes on top of them.
const COVERING_NS: u64 = 2_000_000;
/// Windows in the order in which they are measured.
const WINDOWS_NS: [u64; 3] = [0, COVERING_NS, 0];

/// Wakes under strace.
const TRACED: u64 = 500;
/// Wakes before them.
const TRACED_WARM_UP: u64 = 50;
/// How strace shows the mark around them.
const MARK: &str = "getpriority(PRIO_PROCESS, 1073741808";

/// An idle guest: who polls how long, and how often its timer ticks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct IdleSetting {
    tick_ns: u64,
    window_ns: u64,
    guest_poll_ns: u64,
}

/// A guest with HZ=250, then one whose wakes come soon enough for a window of 200 us (KVM's timer ticks no
/// faster). In this order.
const IDLE: [IdleSetting; 8] = [
    IdleSetting { tick_ns: 4_000_000, window_ns: 0, guest_poll_ns: 0 },
    IdleSetting { tick_ns: 4_000_000, window_ns: 200_000, guest_poll_ns: 0 },
    IdleSetting { tick_ns: 4_000_000, window_ns: 0, guest_poll_ns: 200_000 },
    IdleSetting { tick_ns: 4_000_000, window_ns: 0, guest_poll_ns: 0 },
    IdleSetting { tick_ns: 200_000, window_ns: 0, guest_poll_ns: 0 },
    IdleSetting { tick_ns: 200_000, window_ns: 200_000, guest_poll_ns: 0 },
    IdleSetting { tick_ns: 200_000, window_ns: 0, guest_poll_ns: 200_000 },
    IdleSetting { tick_ns: 200_000, window_ns: 0, guest_poll_ns: 0 },
];

/// One run of wakes. Counts and CPU time are those of the vCPU's thread, a wake.
#[derive(Debug, PartialEq, Serialize)]
struct Wakes {
    mode: &'static str,
    delay_ns: u64,
    window_ns: u64,
    wakes: usize,
    median_us: f64,
    p99_us: f64,
    max_us: f64,
    /// Halts that ended while the host polled.
    polled: f64,
    /// Halts for which the thread slept.
    blocked: f64,
    exits: f64,
    /// Exits that reached Pollux: as many times was KVM_RUN called.
    userspace_exits: f64,
    cpu_us: f64,
}

/// System calls a wake in one mode, by name.
#[derive(Debug, PartialEq, Serialize)]
struct SystemCalls {
    mode: &'static str,
    /// Halts that ended while the host polled. The others sleep, which is a system call in mode `user`.
    polled: f64,
    vcpu: BTreeMap<String, f64>,
    signaller: BTreeMap<String, f64>,
}

/// One idle guest, a second.
#[derive(Debug, PartialEq, Serialize)]
struct Idle {
    mode: &'static str,
    #[serde(flatten)]
    setting: IdleSetting,
    cpu_ms: f64,
    wakes: f64,
    exits: f64,
    halts: f64,
    /// Halts that polled at all.
    attempted: f64,
    /// Halts that ended while the host polled.
    polled: f64,
}

/// What is kept in `target/bench/wake.json`.
#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    load: Load,
    /// Of this machine's KVM; the windows of mode `kernel` grow and shrink by them.
    kvm_parameters: &'a BTreeMap<String, String>,
    wakes: &'a [Wakes],
    system_calls: &'a [SystemCalls],
    idle: &'a [Idle],
}

/// `cargo xtask bench wake`.
///
/// # Errors
/// A guest failed, or the machine is not idle.
pub fn run(args: &Args) -> Result<ExitCode> {
    util::ensure_programs(HOST_PROGRAMS)?;
    let what = ["bench", "--no-run", "--package", "vmm", "--bench", "wake"];
    let program = util::build(&what, "wake")?;
    let load = load::check(args.busy)?;

    let mut wakes = Vec::new();
    for mode in MODES {
        for delay_ns in DELAYS_NS {
            for window_ns in WINDOWS_NS {
                let (delay, window) = (delay_ns / 1000, window_ns / 1000);
                step(format_args!("{mode}: woken after {delay} us, window {window} us"));
                let warm_up = args.wakes / 4;
                let words = format!("wakes {mode} {window_ns} {delay_ns} {warm_up} {}", args.wakes);
                wakes.push(Wakes::new(mode, delay_ns, window_ns, &figures(&program, &words)?)?);
            }
        }
    }
    let mut idle = Vec::new();
    for mode in MODES {
        for setting in IDLE {
            let IdleSetting { tick_ns, window_ns, guest_poll_ns } = setting;
            let words =
                format!("idle {mode} {window_ns} {guest_poll_ns} {tick_ns} {}", args.seconds);
            step(format_args!("{mode}: idle, tick {} us", tick_ns / 1000));
            idle.push(Idle::new(mode, setting, &figures(&program, &words)?)?);
        }
    }
    let mut system_calls = Vec::new();
    for mode in MODES {
        step(format_args!("{mode}: system calls"));
        system_calls.push(trace(&program, mode)?);
    }

    let kvm_parameters = kvm_parameters();
    print!("{}{}{}", wake_table(&wakes), call_table(&system_calls), idle_table(&idle));
    println!("\nKVM here: {}.", list(&kvm_parameters));
    if !load.is_idle() {
        println!("\nNOT IDLE: other work ran on this machine. No time above means anything.");
    }
    let document = Document {
        schema: 1,
        load,
        kvm_parameters: &kvm_parameters,
        wakes: &wakes,
        system_calls: &system_calls,
        idle: &idle,
    };
    super::keep("wake", &document)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs one guest and returns its figures.
fn figures(program: &Path, words: &str) -> Result<Json> {
    let output = Command::new(program)
        .args(words.split(' '))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context(program.display())?;
    if !output.status.success() {
        bail!("{words}: {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context(words)
}

/// A value of a sorted list in nanoseconds, at a part of it; in microseconds.
fn quantile_us(sorted_ns: &[u64], part: f64) -> Option<f64> {
    let last = sorted_ns.len().checked_sub(1)?;
    Some(*sorted_ns.get((last as f64 * part).round() as usize)? as f64 / 1e3)
}

/// A count of a run.
fn count(figures: &Json, name: &str) -> Option<f64> {
    figures["counts"][name].as_f64()
}

/// Exits that reached Pollux.
fn userspace_exits(figures: &Json) -> Option<f64> {
    let counts = figures["counts"].as_object()?;
    let userspace = counts.iter().filter(|(name, _)| name.starts_with("userspace_"));
    Some(userspace.filter_map(|(_, count)| count.as_f64()).sum())
}

impl Wakes {
    fn new(mode: &'static str, delay_ns: u64, window_ns: u64, figures: &Json) -> Result<Self> {
        let of = || {
            let latencies = figures["latencies_ns"].as_array()?;
            let mut latencies: Vec<u64> =
                latencies.iter().map(Json::as_u64).collect::<Option<_>>()?;
            latencies.sort_unstable();
            let a_wake = |all: f64| all / latencies.len() as f64;
            Some(Self {
                mode,
                delay_ns,
                window_ns,
                wakes: latencies.len(),
                median_us: quantile_us(&latencies, 0.5)?,
                p99_us: quantile_us(&latencies, 0.99)?,
                max_us: quantile_us(&latencies, 1.0)?,
                polled: a_wake(count(figures, "halt_successful_poll")?),
                blocked: a_wake(count(figures, "halt_wakeup")?),
                exits: a_wake(count(figures, "exits")?),
                userspace_exits: a_wake(userspace_exits(figures)?),
                cpu_us: a_wake(figures["cpu_ns"].as_f64()?) / 1e3,
            })
        };
        of().ok_or_else(|| Error(format!("{mode}: figures are missing: {}", figures["counts"])))
    }
}

impl Idle {
    fn new(mode: &'static str, setting: IdleSetting, figures: &Json) -> Result<Self> {
        let of = || {
            let seconds = figures["time_ns"].as_f64().filter(|&ns| ns > 0.0)? / 1e9;
            let a_second = |name: &str| Some(count(figures, name)? / seconds);
            Some(Self {
                mode,
                setting,
                cpu_ms: figures["cpu_ns"].as_f64()? / 1e6 / seconds,
                wakes: figures["wakes"].as_f64()? / seconds,
                exits: a_second("exits")?,
                halts: a_second("halt_exits")?,
                attempted: a_second("halt_attempted_poll")?,
                polled: a_second("halt_successful_poll")?,
            })
        };
        of().ok_or_else(|| Error(format!("{mode}: figures are missing: {}", figures["counts"])))
    }
}

/// Counts system calls in a run of its own, which they disturb.
fn trace(program: &Path, mode: &'static str) -> Result<SystemCalls> {
    let log = super::bench_dir()?.join("wake.strace");
    // On the signaller's CPU: on the vCPU's, strace would take it from who polls there.
    let output = util::output(
        util::command("taskset")
            .args(["--cpu-list", "0", "strace", "-f", "-qq", "-o"])
            .arg(&log)
            .arg(program)
            .args(["traced", mode, &TRACED_WARM_UP.to_string(), &TRACED.to_string()]),
    )?;
    let figures = serde_json::from_slice(&output).context("the traced run")?;
    let polled = count(&figures, "halt_successful_poll").unwrap_or(f64::NAN) / TRACED as f64;
    let text = fs::read_to_string(&log).context(log.display())?;
    SystemCalls::parse(mode, polled, &text, TRACED)
        .ok_or_else(|| Error(format!("{}: not two marks", log.display())))
}

impl SystemCalls {
    /// From what strace wrote (`TID call(arguments…`): the calls between the two marks. The thread
    /// that makes the marks is the signaller; the only other one is the vCPU's.
    fn parse(mode: &'static str, polled: f64, log: &str, wakes: u64) -> Option<Self> {
        let mut marks = log.lines().enumerate().filter(|(_, line)| line.contains(MARK));
        let ((first, mark), (second, _)) = (marks.next()?, marks.next()?);
        let signaller_tid = mark.split_whitespace().next()?;
        let mut found = Self { mode, polled, vcpu: BTreeMap::new(), signaller: BTreeMap::new() };
        for line in log.lines().take(second).skip(first + 1) {
            let Some((tid, call)) = line.split_once(' ') else { continue };
            // Neither the end of a call that began earlier (`<... ioctl resumed>`) nor a signal.
            let Some((name, arguments)) = call.trim_start().split_once('(') else { continue };
            if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                continue;
            }
            let name = match name {
                "ioctl" => arguments.split([',', ' ', ')']).find(|word| word.starts_with("KVM_")),
                _ => None,
            }
            .unwrap_or(name);
            let whose = if tid == signaller_tid { &mut found.signaller } else { &mut found.vcpu };
            *whose.entry(name.to_owned()).or_default() += 1.0 / wakes as f64;
        }
        Some(found)
    }
}

/// The parameters of KVM that are about polling.
fn kvm_parameters() -> BTreeMap<String, String> {
    let names =
        ["halt_poll_ns", "halt_poll_ns_grow", "halt_poll_ns_grow_start", "halt_poll_ns_shrink"];
    let read = |name: &str| {
        let value = fs::read_to_string(format!("/sys/module/kvm/parameters/{name}")).ok()?;
        Some((name.to_owned(), value.trim().to_owned()))
    };
    names.into_iter().filter_map(read).collect()
}

fn list(parameters: &BTreeMap<String, String>) -> String {
    let all: Vec<String> =
        parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
    if all.is_empty() { "no parameters to be read".into() } else { all.join(", ") }
}

fn wake_table(runs: &[Wakes]) -> String {
    let mut text = String::from(
        "\n\
         From the signal to the guest's first instruction            a wake\n\
         mode    woken after   window   median      p99      max   polled  blocked   exits  to Pollux  vCPU us\n",
    );
    for run in runs {
        let _ = writeln!(
            text,
            "{:<7} {:>8} us {:>5} us {:>8.1} {:>8.1} {:>8.1}   {:>6.3}  {:>7.3}  {:>6.2}  {:>9.2}  {:>7.1}",
            run.mode,
            run.delay_ns / 1000,
            run.window_ns / 1000,
            run.median_us,
            run.p99_us,
            run.max_us,
            run.polled,
            run.blocked,
            run.exits,
            run.userspace_exits,
            run.cpu_us,
        );
    }
    text
}

fn call_table(modes: &[SystemCalls]) -> String {
    let mut text = format!(
        "\nSystem calls a wake, of {TRACED} under strace\nmode     polled  vCPU's thread; signaller\n"
    );
    let list = |calls: &BTreeMap<String, f64>| {
        let calls: Vec<String> =
            calls.iter().map(|(name, calls)| format!("{name} {calls:.3}")).collect();
        if calls.is_empty() { "none".into() } else { calls.join(", ") }
    };
    for SystemCalls { mode, polled, vcpu, signaller } in modes {
        let _ = writeln!(text, "{mode:<7}  {polled:>5.3}  {}; {}", list(vcpu), list(signaller));
    }
    text
}

fn idle_table(guests: &[Idle]) -> String {
    let mut text = String::from(
        "\n\
         An idle guest                                 a second of idling\n\
         mode        tick   window  guest polls   vCPU CPU ms   wakes   exits   halts  polling  polled\n",
    );
    for Idle { mode, setting, cpu_ms, wakes, exits, halts, attempted, polled } in guests {
        let _ = writeln!(
            text,
            "{:<7} {:>5} us {:>5} us  {:>8} us   {:>11.1}  {:>6.0}  {:>6.0}  {:>6.0}  {:>7.0}  {:>6.0}",
            mode,
            setting.tick_ns / 1000,
            setting.window_ns / 1000,
            setting.guest_poll_ns / 1000,
            cpu_ms,
            wakes,
            exits,
            halts,
            attempted,
            polled,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn wakes_are_put_in_order_before_quantiles_are_taken() {
        let latencies: Vec<u64> = (0..=100).rev().map(|us| us * 1000).collect();
        let figures = json!({ "latencies_ns": latencies, "cpu_ns": 202_000, "counts": {
            "halt_successful_poll": 101, "halt_wakeup": 0, "exits": 303,
            "userspace_hlt": 101, "userspace_wrmsr": 101,
        }});
        let run = Wakes::new("user", 1, 2, &figures).unwrap();
        assert_eq!((run.median_us, run.p99_us, run.max_us), (50.0, 99.0, 100.0));
        assert_eq!((run.polled, run.blocked, run.exits, run.userspace_exits), (1.0, 0.0, 3.0, 2.0));
        assert_eq!(run.cpu_us, 2.0);
    }

    #[test]
    fn a_run_without_a_figure_is_an_error_and_no_zero() {
        assert_eq!(quantile_us(&[], 0.5), None);
        assert!(Wakes::new("user", 1, 2, &json!({ "latencies_ns": [1], "cpu_ns": 1 })).is_err());
        assert!(Idle::new("user", IDLE[0], &json!({ "time_ns": 0 })).is_err());
    }

    #[test]
    fn idle_figures_are_those_of_a_second() {
        let figures = json!({ "time_ns": 2_000_000_000u64, "cpu_ns": 4_000_000, "wakes": 500, "counts": {
            "exits": 1000, "halt_exits": 500, "halt_attempted_poll": 6, "halt_successful_poll": 2,
        }});
        let idle = Idle::new("kernel", IDLE[0], &figures).unwrap();
        assert_eq!((idle.cpu_ms, idle.wakes, idle.exits), (2.0, 250.0, 500.0));
        assert_eq!((idle.halts, idle.attempted, idle.polled), (250.0, 3.0, 1.0));
    }

    #[test]
    fn system_calls_are_counted_between_the_marks_and_by_thread() {
        let log = "\
            10 write(1, \"x\", 1) = 1\n\
            10 getpriority(PRIO_PROCESS, 1073741808 <unfinished ...>\n\
            10 <... getpriority resumed>) = -1 ESRCH (No such process)\n\
            11 <... ioctl resumed>, 0)         = 0\n\
            11 ioctl(14, KVM_RUN <unfinished ...>\n\
            10 write(9, \"\\1\\0\", 8 <unfinished ...>\n\
            11 <... ioctl resumed>, 0) = 0\n\
            11 --- SIGRT_2 {si_signo=SIGRT_2} ---\n\
            11 ioctl(14, KVM_RUN, 0) = 0\n\
            11  futex(0x7f, FUTEX_WAIT) = 0\n\
            10 getpriority(PRIO_PROCESS, 1073741808) = -1 ESRCH (No such process)\n\
            11 ioctl(14, KVM_RUN, 0) = 0\n";
        let calls = SystemCalls::parse("user", 0.5, log, 2).unwrap();
        let map = |all: &[(&str, f64)]| all.iter().map(|&(n, v)| (n.to_owned(), v)).collect();
        assert_eq!(calls.vcpu, map(&[("KVM_RUN", 1.0), ("futex", 0.5)]));
        assert_eq!(calls.signaller, map(&[("write", 0.5)]));
        assert_eq!(SystemCalls::parse("user", 0.5, "10 write(1) = 1\n", 2), None);
    }
}
