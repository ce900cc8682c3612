//! `pollux run`: a VM from its assembly to its end.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::builder::{self, BuildError, Built};
use crate::config::{Console, OnReboot, VmConfig};
use crate::events::{self, Signals};
use crate::lifecycle::End;
use crate::stats::channel::GuestReport;
use crate::stats::{Snapshot, report, sample};
use crate::terminal::RawTerminal;
use crate::tuning::{self, HostTuning};
use crate::vcpu::kick;
use crate::vm::VmError;

/// How long vCPUs may take to leave the guest.
const STOP_LIMIT: Duration = Duration::from_secs(3);

/// Runs the guest that `config` describes, and gives how it ended.
///
/// # Errors
/// There could be no VM; see [`BuildError`].
pub fn run(config: &VmConfig) -> Result<End, BuildError> {
    let host = |what| move |why| VmError::Host { what, why };
    // Blocked signals are inherited, so this comes before the first thread.
    let signals = Signals::open().map_err(host("open the signals"))?;
    kick::install_handler().map_err(host("install the kick signal"))?;
    let _tuning = HostTuning::new(Path::new(tuning::PARAMETERS), &config.host_parameters())?;
    let mut restarted = false;
    loop {
        let built = builder::build(config, restarted)?;
        let end = run_once(config, built, &signals)?;
        if end != End::Reboot || config.on_reboot == OnReboot::Exit {
            return Ok(end);
        }
        restarted = true;
    }
}

/// From the first KVM_RUN to disks that are flushed and statistics that are written.
fn run_once(config: &VmConfig, built: Built, signals: &Signals) -> Result<End, VmError> {
    let Built { machine, vcpus, console, sources, guest, .. } = built;
    let host = |what| move |why| VmError::Host { what, why };
    let stdio = config.console == Console::Stdio;
    let terminal = stdio.then(RawTerminal::enter).transpose().map_err(host("set the terminal"))?;
    let threads = vcpus
        .into_iter()
        .map(|vcpu| vcpu.spawn(machine.clone()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(host("start a vCPU thread"))?;
    let kick_all = || {
        for thread in &threads {
            kick::kick(thread);
            thread.thread().unpark();
        }
    };
    let snapshot = || {
        if config.stats.is_some() {
            sample::ask(&sources.vcpus, kick_all);
        }
        sources.snapshot()
    };
    let so_far = || {
        if let Err(why) = write_stats(config, &guest, &snapshot(), None) {
            devices::tell(why);
        }
    };
    let waited = events::wait(&machine.lifecycle, signals, stdio.then_some(&*console), so_far);
    let last = snapshot();

    machine.stop.store(true, Ordering::Release);
    kick_all();
    if wait_for(&threads) {
        for thread in threads {
            // A panicked vCPU thread has told so on stderr; disks are still to be flushed.
            let _ = thread.join();
        }
        console.lock().unwrap_or_else(PoisonError::into_inner).flush();
        // The last owner: devices go, which drains what is in flight.
        drop(machine);
        drop(console);
    } else {
        devices::tell("a vCPU does not stop, for nobody takes its output or its disk hangs");
    }
    let unflushed: Vec<String> = sources
        .disks
        .iter()
        .filter_map(|disk| Some(format!("{}: {}", disk.name, disk.device.flush().err()?)))
        .collect();
    drop(terminal);
    let mut end = waited.map_err(host("wait for the guest"))?;
    if !unflushed.is_empty() {
        let what = unflushed.join(", ");
        end = End::Failed(format!("cannot flush {what}; what the guest wrote last may be lost"));
    }
    write_stats(config, &guest, &last, Some(&end))?;
    Ok(end)
}

/// Waits for the vCPU threads to end. One that hangs in the host, in a write to a terminal that
/// nobody reads, must not keep the disks from being flushed and the program from ending.
fn wait_for(threads: &[JoinHandle<()>]) -> bool {
    let start = Instant::now();
    while !threads.iter().all(JoinHandle::is_finished) {
        if start.elapsed() > STOP_LIMIT {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Writes the statistics if they are wanted. `end`: how the run ended, if it has.
fn write_stats(
    config: &VmConfig,
    guest: &Mutex<GuestReport>,
    last: &Snapshot,
    end: Option<&End>,
) -> Result<(), VmError> {
    let Some(target) = &config.stats else { return Ok(()) };
    let guest = guest.lock().unwrap_or_else(PoisonError::into_inner);
    let document = report::report(config, &guest, last, end);
    report::write(target, &document)
        .map_err(|why| VmError::Host { what: "write the statistics", why })
}
