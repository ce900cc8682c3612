//! `pollux run`: a VM from its assembly to its end.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::builder::{self, BuildError, Built};
use crate::config::{Console, OnReboot, Stats, VmConfig};
use crate::events::{self, Signals};
use crate::lifecycle::End;
use crate::stats;
use crate::terminal::RawTerminal;
use crate::tuning::{self, HostTuning};
use crate::vcpu::kick;
use crate::vm::VmError;

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
    let Built { machine, vcpus, console, sources, guest } = built;
    let host = |what| move |why| VmError::Host { what, why };
    let stdio = config.console == Console::Stdio;
    let terminal = stdio.then(RawTerminal::enter).transpose().map_err(host("set the terminal"))?;
    let threads = vcpus
        .into_iter()
        .map(|vcpu| vcpu.spawn(machine.clone()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(host("start a vCPU thread"))?;
    let waited = events::wait(&machine.lifecycle, signals, stdio.then_some(&*console));
    let last = sources.snapshot();

    machine.stop.store(true, Ordering::Release);
    for thread in &threads {
        kick::kick(thread);
        thread.thread().unpark();
    }
    for thread in threads {
        // A panicked vCPU thread has told so on stderr; disks are still to be flushed.
        let _ = thread.join();
    }
    console.lock().unwrap_or_else(PoisonError::into_inner).flush();
    // The last owner: devices go, which drains what is in flight.
    drop(machine);
    drop(console);
    for disk in &sources.disks {
        disk.device.flush().map_err(host("flush a disk"))?;
    }
    drop(terminal);
    let end = waited.map_err(host("wait for the guest"))?;
    if let Some(target) = &config.stats {
        let guest = guest.lock().unwrap_or_else(PoisonError::into_inner);
        let document = format!("{:#}\n", stats::report(config, &guest, &last, &end));
        let written = match target {
            Stats::Stdout => io::stdout().write_all(document.as_bytes()),
            Stats::File(path) => fs::write(path, document),
        };
        written.map_err(host("write the statistics"))?;
    }
    Ok(end)
}
