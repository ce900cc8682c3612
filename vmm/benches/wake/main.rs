//! What a wake costs: `cargo xtask bench wake`, natively on /dev/kvm.
//!
//! A vCPU halts; another thread signals an MSI as Pollux's devices do; the latency is the time from
//! just before the signal until that thread sees the store that is the first instruction of the
//! guest's interrupt handler. The vCPU's thread, its halt, its interrupts and its statistics are
//! those of `pollux run`.

mod guest;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use devices::irq::{MsiMessage, MsiSink};
use guest::{VECTOR, Word};
use halt_poll::Clock;
use vmm::affinity::pin_current_thread;
use vmm::builder::{self, Built};
use vmm::cli::{self, Command};
use vmm::config::VmConfig;
use vmm::stats::Snapshot;
use vmm::stats::kvm::Value;
use vmm::vcpu::kick;

/// Wakes that are measured, after as many that are not: KVM's window has to grow first.
const WAKES: u64 = 4000;
/// How long the guest has been halting when it is woken.
const DELAY: Duration = Duration::from_micros(100);
/// A window that covers the delay and all that comes on top of it.
const COVERING: &str = "2ms";
/// How long a guest that is only idle is watched.
const IDLE: Duration = Duration::from_secs(3);
/// The timer's period of a Linux guest with HZ=250, in nanoseconds, which are counts of the local
/// APIC's timer in both modes.
const TICK_NS: u64 = 4_000_000;
/// How long the guest may take for anything.
const PATIENCE: Duration = Duration::from_secs(10);

/// Host CPUs of the thread that signals and of the vCPU. On one CPU, the two would take turns.
const SIGNALLER_CPU: usize = 0;
const VCPU_CPU: usize = 1;

/// A guest that runs.
struct Running {
    built: Option<Built>,
    sink: Arc<dyn MsiSink>,
    vcpu: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Running {
    fn start(halt: &str, window: &str, words: &[(Word, u64)]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let kernel = dir.path().join("guest");
        std::fs::write(&kernel, guest::elf()).expect("a kernel");
        let kernel = kernel.to_str().expect("a plain path");
        let options =
            ["pollux", "run", "--kernel", kernel, "--boot", "linux64", "--console", "off"];
        let options = options.into_iter().chain(["--halt", halt, "--halt-poll-ns", window]);
        let Ok(cli::Cli { command: Command::Run(args) }) = cli::parse(options.map(Into::into))
        else {
            panic!("the options are right")
        };
        let config = VmConfig::new(&args).unwrap_or_else(|why| panic!("{why}"));
        let mut built = builder::build(&config, false).unwrap_or_else(|why| panic!("{why}"));
        for (word, value) in words {
            guest::store(&built.machine.memory, *word, *value);
        }
        let sink = built.interrupts.msi_sink(1).expect("a vector");
        let message = MsiMessage { address: 0xfee0_0000, data: u32::from(VECTOR) };
        sink.unmask(0, message).expect("KVM takes a route");
        let pin = |cpu| pin_current_thread(cpu).expect("a machine with two CPUs");
        let vcpu = built.vcpus.pop().expect("a vCPU");
        // The vCPU's thread inherits this.
        pin(VCPU_CPU);
        let vcpu = vcpu.spawn(Arc::clone(&built.machine)).expect("a thread");
        pin(SIGNALLER_CPU);
        Self { built: Some(built), sink, vcpu: Some(vcpu), _dir: dir }
    }

    fn built(&self) -> &Built {
        self.built.as_ref().expect("until dropped")
    }

    fn word(&self, word: Word) -> u64 {
        guest::load(&self.built().machine.memory, word)
    }

    fn wait_for(&self, word: Word, value: u64) {
        let start = Instant::now();
        while self.word(word) < value {
            std::hint::spin_loop();
            if start.elapsed() > PATIENCE {
                let end = self.built().machine.lifecycle.ended();
                panic!("the guest does not go on; it ended: {end:?}");
            }
        }
    }

    /// Wakes the guest when it has been halting for `DELAY`, and gives how long that took, in
    /// nanoseconds. `woken`: how often it has been.
    fn wake(&self, woken: u64) -> u64 {
        let clock = halt_poll::MonotonicClock::new();
        self.wait_for(Word::Halts, woken + 1);
        let begun = clock.now_ns();
        while clock.now_ns() - begun < DELAY.as_nanos() as u64 {
            std::hint::spin_loop();
        }
        let signalled = clock.now_ns();
        self.sink.trigger(0);
        self.wait_for(Word::Wakes, woken + 1);
        clock.now_ns() - signalled
    }

    fn snapshot(&self) -> Snapshot {
        self.built().sources.snapshot()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(built) = self.built.take() else { return };
        built.machine.stop.store(true, Ordering::Release);
        if let Some(vcpu) = self.vcpu.take() {
            kick::kick(&vcpu);
            vcpu.thread().unpark();
            let _ = vcpu.join();
        }
    }
}

/// What a counter of KVM's halts, or of exits, grew by.
fn grown(before: &Snapshot, after: &Snapshot, name: &str) -> u64 {
    let read = |snapshot: &Snapshot| {
        let vcpu = &snapshot.vcpus[0];
        match vcpu.halt.get(name) {
            Some(Value::Number(number)) => *number,
            _ => vcpu.exits.get(name).copied().unwrap_or(0),
        }
    };
    read(after) - read(before)
}

/// A value of a sorted list, at a part of it.
fn quantile(sorted: &[u64], part: f64) -> f64 {
    let last = sorted.len() - 1;
    sorted[(last as f64 * part).round() as usize] as f64 / 1e3
}

fn wakes(halt: &str, window: &str, count: u64) -> String {
    let running = Running::start(halt, window, &[]);
    for woken in 0..count {
        running.wake(woken);
    }
    let before = running.snapshot();
    let mut latencies: Vec<u64> = (count..2 * count).map(|woken| running.wake(woken)).collect();
    let after = running.snapshot();
    latencies.sort_unstable();
    let a_wake = |name: &str| grown(&before, &after, name) as f64 / count as f64;
    format!(
        "{halt:<7} {window:>6} {:>9.1} {:>7.1} {:>8.1} {:>7.2} {:>7.2} {:>8.2} {:>9.1}",
        quantile(&latencies, 0.5),
        quantile(&latencies, 0.99),
        quantile(&latencies, 1.0),
        a_wake("exits"),
        a_wake("halt_successful_poll"),
        a_wake("halt_wakeup"),
        (after.vcpus[0].cost.cpu_ns - before.vcpus[0].cost.cpu_ns) as f64 / count as f64 / 1e3,
    )
}

/// An idle guest with a timer, which polls itself for `guest_poll` before it halts.
fn idle(halt: &str, window: &str, guest_poll: Duration) -> String {
    let cycles = guest_poll.as_nanos() as u64 * tsc_khz() / 1_000_000;
    let words = [(Word::TimerPeriod, TICK_NS), (Word::PollCycles, cycles)];
    let running = Running::start(halt, window, &words);
    running.wait_for(Word::Wakes, 50);
    let before = running.snapshot();
    thread::sleep(IDLE);
    let after = running.snapshot();
    let seconds = (after.time_ns - before.time_ns) as f64 / 1e9;
    let a_second = |name: &str| grown(&before, &after, name) as f64 / seconds;
    format!(
        "{halt:<7} {window:>6} {:>7} us {:>12.2} {:>8.0} {:>8.0} {:>8.0} {:>8.0}",
        guest_poll.as_micros(),
        (after.vcpus[0].cost.cpu_ns - before.vcpus[0].cost.cpu_ns) as f64 / 1e6 / seconds,
        a_second("exits"),
        a_second("halt_exits"),
        a_second("halt_attempted_poll"),
        a_second("halt_successful_poll"),
    )
}

/// The TSC's frequency, measured against the clock.
fn tsc_khz() -> u64 {
    let (start, before) = (Instant::now(), vmm::vcpu::user::host_tsc());
    thread::sleep(Duration::from_millis(50));
    let cycles = vmm::vcpu::user::host_tsc() - before;
    cycles * 1_000_000 / start.elapsed().as_nanos() as u64
}

/// One thread's system calls between two marks, by name, from what strace wrote.
fn system_calls(mode: &str, count: u64) -> Result<String, String> {
    let dir = tempfile::tempdir().map_err(|why| why.to_string())?;
    let log = dir.path().join("log");
    let program = std::env::current_exe().map_err(|why| why.to_string())?;
    let status = std::process::Command::new("strace")
        .args(["-f", "-qq", "-o"])
        .arg(&log)
        .arg(program)
        .args(["traced", mode, &count.to_string()])
        .status()
        .map_err(|why| format!("strace: {why}"))?;
    if !status.success() {
        return Err(format!("the traced run failed: {status}"));
    }
    let text = std::fs::read_to_string(&log).map_err(|why| why.to_string())?;
    let between: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.contains(&format!("getpriority(PRIO_PROCESS, {MARK})")))
        .skip(1)
        .take_while(|line| !line.contains(&format!("getpriority(PRIO_PROCESS, {MARK})")))
        .collect();
    let marker = text.lines().find(|line| line.contains("getpriority(PRIO_PROCESS"));
    let signaller = marker.and_then(|line| line.split_whitespace().next()).ok_or("no mark")?;
    let mut counts = std::collections::BTreeMap::new();
    for line in between {
        let mut words = line.split_whitespace();
        let (Some(tid), Some(call)) = (words.next(), words.next()) else { continue };
        let Some((name, _)) = call.split_once('(') else { continue };
        let name = if line.contains("KVM_RUN") { "KVM_RUN" } else { name };
        let who = if tid == signaller { "signaller" } else { "vCPU" };
        *counts.entry((who, name.to_owned())).or_insert(0u64) += 1;
    }
    let of = |who: &str| {
        let calls = counts.iter().filter(|((found, _), _)| *found == who);
        let calls: Vec<String> = calls
            .map(|((_, name), calls)| format!("{name} {:.2}", *calls as f64 / count as f64))
            .collect();
        if calls.is_empty() { "none".into() } else { calls.join(", ") }
    };
    Ok(format!("{mode:<7} {COVERING:>6}   vCPU: {}; signaller: {}", of("vCPU"), of("signaller")))
}

/// A process that does not exist: asking for its priority marks a place in strace's log.
const MARK: libc::id_t = 0x3fff_fff0;

/// What [`system_calls`] traces.
fn traced(mode: &str, count: u64) {
    // Under strace, everything takes much longer.
    let running = Running::start(mode, "1s", &[]);
    for woken in 0..20 {
        running.wake(woken);
    }
    // SAFETY: no memory is involved.
    let mark = || unsafe { libc::getpriority(libc::PRIO_PROCESS, MARK) };
    mark();
    for woken in 20..20 + count {
        running.wake(woken);
    }
    mark();
}

fn main() {
    kick::install_handler().expect("the kick signal");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["traced", mode, count] => traced(mode, count.parse().expect("a number")),
        _ => all(),
    }
}

fn all() {
    println!(
        "\nA wake, {} us after the halt, from the signal to the guest's first instruction; us; {WAKES} wakes after as \
         many to warm up\nmode    window    median     p99      max   exits  polled  blocked   vCPU us",
        DELAY.as_micros()
    );
    for mode in ["kernel", "user"] {
        for window in ["0", COVERING, "0", COVERING] {
            println!("{}", wakes(mode, window, WAKES));
        }
    }
    println!("\nSystem calls a wake, of 500 under strace");
    for mode in ["kernel", "user"] {
        match system_calls(mode, 500) {
            Ok(line) => println!("{line}"),
            Err(why) => println!("{mode}: not counted: {why}"),
        }
    }
    println!(
        "\nAn idle guest with a timer of 250 Hz, for {} s; a second of idling\n\
         mode    window  guest polls  vCPU CPU ms    exits    halts   polling   polled",
        IDLE.as_secs()
    );
    for mode in ["kernel", "user"] {
        for (window, guest_poll_us) in [("0", 0), ("200us", 0), ("0", 200), ("5ms", 0), ("0", 0)] {
            println!("{}", idle(mode, window, Duration::from_micros(guest_poll_us)));
        }
    }
}
