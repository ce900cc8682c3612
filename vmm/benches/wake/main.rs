//! The measuring part of `cargo xtask bench wake`: one guest a run, whose figures are one line of
//! JSON on stdout. It needs /dev/kvm and two CPUs, and nothing that a stock guest needs.
//!
//!     wakes HALT WINDOW_NS DELAY_NS WARM_UP COUNT    what a wake costs
//!     traced HALT WARM_UP COUNT                      the same, between two marks, for strace
//!     idle HALT WINDOW_NS GUEST_POLL_NS TICK_NS SECONDS
//!
//! The vCPU's thread, its halt, its interrupts and its statistics are those of `pollux run`: the
//! guest is built by the same code, and woken by an MSI as Pollux's devices send it. SANDBOX=off in the
//! environment leaves the vCPU's thread without its sandbox.

mod guest;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use devices::affinity::pin_current_thread;
use devices::irq::{MsiMessage, MsiSink};
use guest::{VECTOR, Word};
use halt_poll::{Clock, MonotonicClock};
use serde_json::{Value as Json, json};
use vmm::builder::{self, Built};
use vmm::cli::{self, Command};
use vmm::config::VmConfig;
use vmm::sandbox::{Sandbox, Starter};
use vmm::stats::Snapshot;
use vmm::stats::kvm::Value;
use vmm::vcpu::kick;
use vmm::vcpu::user::host_tsc;

/// How long the guest may take for anything.
const PATIENCE: Duration = Duration::from_secs(10);
/// Ticks of an idle guest before it is watched: its window has grown or shrunk by then.
const IDLE_WARM_UP: u64 = 50;

/// Host CPUs of the thread that signals and of the vCPU. On one CPU, the two would take turns.
const SIGNALLER_CPU: usize = 0;
const VCPU_CPU: usize = 1;

/// A process that does not exist: asking for its priority marks a place in strace's log.
const MARK: libc::id_t = 0x3fff_fff0;

/// The window of a guest that is traced, which covers what strace adds.
const TRACED_WINDOW_NS: &str = "1000000000";
/// How long a guest halts before it is woken while traced.
const TRACED_DELAY_NS: u64 = 1_000_000;

/// A guest that runs.
struct Running {
    built: Option<Built>,
    sink: Arc<dyn MsiSink>,
    clock: MonotonicClock,
    vcpu: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Running {
    fn start(halt: &str, window_ns: &str, words: &[(Word, u64)]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let kernel = dir.path().join("guest");
        std::fs::write(&kernel, guest::elf()).expect("a kernel");
        let kernel = kernel.to_str().expect("a plain path");
        let options =
            ["pollux", "run", "--kernel", kernel, "--boot", "linux64", "--console", "off"];
        let options = options.into_iter().chain(["--halt", halt, "--halt-poll-ns", window_ns]);
        let sandbox = std::env::var("SANDBOX").unwrap_or_else(|_| "on".into());
        let options = options.chain(["--sandbox", &sandbox]);
        let Ok(cli::Cli { command: Command::Run(args) }) = cli::parse(options.map(Into::into))
        else {
            panic!("halt mode {halt}, window {window_ns}: not as `pollux run` takes them")
        };
        let config = VmConfig::new(&args).unwrap_or_else(|why| panic!("{why}"));
        let no_disks = Starter::default().orders();
        let mut built =
            builder::build(&config, &no_disks, false).unwrap_or_else(|why| panic!("{why}"));
        let sandbox = Sandbox::new(&config).unwrap_or_else(|why| panic!("{why}"));
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
        let vcpu = vcpu.spawn(Arc::clone(&built.machine), sandbox).expect("a thread");
        pin(SIGNALLER_CPU);
        let clock = MonotonicClock::new();
        Self { built: Some(built), sink, clock, vcpu: Some(vcpu), _dir: dir }
    }

    fn built(&self) -> &Built {
        self.built.as_ref().expect("until dropped")
    }

    /// Spins until the guest has counted so far.
    fn wait_for(&self, word: Word, count: u64) {
        let start = Instant::now();
        let mut turns = 0u32;
        while guest::load(&self.built().machine.memory, word) < count {
            std::hint::spin_loop();
            turns = turns.wrapping_add(1);
            // Seldom, for the clock would take longer than the look at the guest.
            if turns.is_multiple_of(1 << 16) && start.elapsed() > PATIENCE {
                let end = self.built().machine.lifecycle.ended();
                panic!("the guest does not go on; it ended: {end:?}");
            }
        }
    }

    /// Wakes the guest `delay_ns` after it was about to halt, and gives how long that took, in
    /// nanoseconds: from just before the signal until this thread sees the store that is the first
    /// instruction of the guest's interrupt handler. `woken`: how often it has been.
    fn wake(&self, woken: u64, delay_ns: u64) -> u64 {
        self.wait_for(Word::Halts, woken + 1);
        let begun_ns = self.clock.now_ns();
        while self.clock.now_ns() - begun_ns < delay_ns {
            std::hint::spin_loop();
        }
        let signalled_ns = self.clock.now_ns();
        self.sink.trigger(0);
        self.wait_for(Word::Wakes, woken + 1);
        self.clock.now_ns() - signalled_ns
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

/// By how much the vCPU's counters grew.
fn grown(before: &Snapshot, after: &Snapshot) -> Json {
    let (before_vcpu, after_vcpu) = (&before.vcpus[0], &after.vcpus[0]);
    let mut counts = serde_json::Map::new();
    for (name, value) in &after_vcpu.exits {
        let before = before_vcpu.exits.get(name).copied().unwrap_or(0);
        counts.insert(name.clone(), (value - before).into());
    }
    for (name, value) in &after_vcpu.halt {
        if let (Value::Number(after), Some(Value::Number(before))) =
            (value, before_vcpu.halt.get(name))
        {
            counts.insert(name.clone(), (after - before).into());
        }
    }
    json!({
        "time_ns": after.time_ns - before.time_ns,
        "cpu_ns": after_vcpu.cost.cpu_ns - before_vcpu.cost.cpu_ns,
        "counts": counts,
    })
}

fn wakes(halt: &str, window_ns: &str, delay_ns: u64, warm_up: u64, count: u64) -> Json {
    let running = Running::start(halt, window_ns, &[]);
    for woken in 0..warm_up {
        running.wake(woken, delay_ns);
    }
    let before = running.snapshot();
    let latencies: Vec<u64> =
        (warm_up..warm_up + count).map(|woken| running.wake(woken, delay_ns)).collect();
    let mut figures = grown(&before, &running.snapshot());
    figures["latencies_ns"] = latencies.into();
    figures
}

fn traced(halt: &str, warm_up: u64, count: u64) -> Json {
    let running = Running::start(halt, TRACED_WINDOW_NS, &[]);
    for woken in 0..warm_up {
        running.wake(woken, TRACED_DELAY_NS);
    }
    let before = running.snapshot();
    // SAFETY: no memory is involved.
    let mark = || unsafe { libc::getpriority(libc::PRIO_PROCESS, MARK) };
    mark();
    for woken in warm_up..warm_up + count {
        running.wake(woken, TRACED_DELAY_NS);
    }
    mark();
    grown(&before, &running.snapshot())
}

fn idle(halt: &str, window_ns: &str, guest_poll_ns: u64, tick_ns: u64, seconds: u64) -> Json {
    // The local APIC's timer counts nanoseconds in both modes.
    let cycles = guest_poll_ns * tsc_khz() / 1_000_000;
    let words = [(Word::TimerPeriod, tick_ns), (Word::PollCycles, cycles)];
    let running = Running::start(halt, window_ns, &words);
    running.wait_for(Word::Wakes, IDLE_WARM_UP);
    let woken = || guest::load(&running.built().machine.memory, Word::Wakes);
    let (before, woken_before) = (running.snapshot(), woken());
    thread::sleep(Duration::from_secs(seconds));
    let (after, woken_after) = (running.snapshot(), woken());
    let mut figures = grown(&before, &after);
    figures["wakes"] = (woken_after - woken_before).into();
    figures
}

/// The TSC's frequency, measured against the clock.
fn tsc_khz() -> u64 {
    let (start, before) = (Instant::now(), host_tsc());
    thread::sleep(Duration::from_millis(50));
    let cycles = host_tsc() - before;
    cycles * 1_000_000 / start.elapsed().as_nanos() as u64
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: &str| text.parse().unwrap_or_else(|why| panic!("{text}: {why}"));
    kick::install_handler().expect("the kick signal");
    let figures = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["wakes", halt, window_ns, delay_ns, warm_up, count] => {
            wakes(halt, window_ns, number(delay_ns), number(warm_up), number(count))
        }
        ["traced", halt, warm_up, count] => traced(halt, number(warm_up), number(count)),
        ["idle", halt, window_ns, guest_poll_ns, tick_ns, seconds] => {
            idle(halt, window_ns, number(guest_poll_ns), number(tick_ns), number(seconds))
        }
        _ => {
            eprintln!("This is run by `cargo xtask bench wake`.");
            return ExitCode::SUCCESS;
        }
    };
    println!("{figures}");
    ExitCode::SUCCESS
}
