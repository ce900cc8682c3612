//! `pollux run`: a VM from its assembly to its end.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::builder::{self, BuildError, Built, host_error};
use crate::config::{Console, OnReboot, Stats, VmConfig};
use crate::control::commands::Live;
use crate::control::server::Server;
use crate::doctor::host::HOST;
use crate::events::{self, Inputs, Signals, Wanted};
use crate::input::PortInput;
use crate::lifecycle::End;
use crate::record::{self, Recorder};
use crate::sandbox::{Kind, Sandbox, Starter};
use crate::stats::{report, sample};
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
    // Blocked signals are inherited, so this comes before the first thread.
    let signals = Signals::open().map_err(host_error("open the signals"))?;
    kick::install_handler().map_err(host_error("install the kick signal"))?;
    let mut control = config.control.as_deref().map(Server::listen).transpose()?;
    let tuning = HostTuning::new(Path::new(tuning::PARAMETERS), &config.host_parameters())?;
    // The control socket changes it.
    let mut config = config.clone();
    let sandbox = Sandbox::new(&config)?;
    let starter = Starter::default();
    let start_worker = starter.orders();
    let recording = record::prepare(&config)?;
    let mut built = builder::build(&config, &start_worker, false)?;
    // What the statistics say of the host is read while it can be, if anybody may ask.
    if config.stats.is_some() || config.control.is_some() {
        LazyLock::force(&HOST);
    }
    sandbox.confine(&config)?;
    starter.begin(&sandbox).map_err(host_error("start a thread"))?;
    let start = built.sources.start;
    let recorder = recording.map(|recording| recording.begin(&sandbox, start)).transpose();
    let recorder = recorder.map_err(host_error("begin the recording"))?;
    loop {
        if let Some(recorder) = &recorder {
            recorder.attach(&mut built);
        }
        let host = Host {
            signals: &signals,
            tuning: &tuning,
            sandbox: &sandbox,
            recorder: recorder.as_ref(),
        };
        let end = run_once(&mut config, built, control.as_mut(), host)?;
        if end != End::Reboot || config.on_reboot == OnReboot::Exit {
            return Ok(end);
        }
        built = builder::build(&config, &start_worker, true)?;
    }
}

/// What all boots of a run have in common.
#[derive(Clone, Copy)]
struct Host<'a> {
    signals: &'a Signals,
    tuning: &'a HostTuning,
    sandbox: &'a Sandbox,
    recorder: Option<&'a Recorder>,
}

/// From the first KVM_RUN to disks that are flushed and statistics that are written.
fn run_once(
    config: &mut VmConfig,
    built: Built,
    mut control: Option<&mut Server>,
    host: Host<'_>,
) -> Result<End, VmError> {
    let Host { signals, tuning, sandbox, recorder } = host;
    let Built { machine, vcpus, console, results, sources, guest, polling, .. } = built;
    let stdio = config.console == Console::Stdio;
    let terminal =
        stdio.then(RawTerminal::enter).transpose().map_err(host_error("set the terminal"))?;
    let threads = vcpus
        .into_iter()
        .map(|vcpu| vcpu.spawn(machine.clone(), sandbox.clone()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(host_error("start a vCPU thread"))?;
    // After them, which would inherit it.
    let entered = sandbox.enter(Kind::Main);
    let kick_all = || {
        for thread in &threads {
            kick::kick(thread);
            thread.thread().unpark();
        }
    };
    let snapshot = || {
        sample::ask(&sources.vcpus, kick_all);
        sources.snapshot()
    };
    let keys = stdio.then(|| PortInput::new(Arc::clone(&console)));
    let lines = results.map(PortInput::new);
    let mut live = Live {
        config,
        sources: &sources,
        guest: &guest,
        lifecycle: &machine.lifecycle,
        results: lines.as_ref(),
        polling: &polling,
        tuning,
        recorder,
        snapshot: &snapshot,
    };
    let wake = control.as_ref().map(|control| control.wake());
    let attend = |wanted| match (wanted, &mut control) {
        (Wanted::Control, Some(control)) => control.serve(|request| live.answer(request)),
        (Wanted::Control, None) => {}
        // What it was is told at the end.
        (Wanted::Violation, _) => {
            machine.lifecycle.finish(End::Failed("the sandbox was violated".into()));
        }
        (Wanted::Report, _) => {
            if let Some(target) = &live.config.stats
                && let Err(why) = write_stats(target, &live.stats())
            {
                devices::tell(why);
            }
        }
    };
    let waited = entered.and_then(|()| {
        let wakes = [wake.unwrap_or(-1), sandbox.wake()];
        let inputs = Inputs { console: keys.as_ref(), results: lines.as_ref() };
        events::wait(&machine.lifecycle, signals, &inputs, wakes, attend)
    });
    let last = config.stats.is_some().then(snapshot);

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
        drop((console, keys, lines));
    } else {
        devices::tell("a vCPU does not stop, for nobody takes its output or its disk hangs");
    }
    if let Some(recorder) = recorder {
        recorder.flush();
    }
    let unflushed: Vec<String> = sources
        .disks
        .iter()
        .filter_map(|disk| Some(format!("{}: {}", disk.name, disk.device.flush().err()?)))
        .collect();
    drop(terminal);
    let mut end = waited.map_err(host_error("wait for the guest"))?;
    if !unflushed.is_empty() {
        let what = unflushed.join(", ");
        end = End::Failed(format!("cannot flush {what}; what the guest wrote last may be lost"));
    }
    // Whatever the guest did next: it may have ended the run in the same moment, to be left unseen.
    if let Some(violation) = sandbox.violation() {
        end = End::Failed(violation.to_string());
    }
    if let (Some(target), Some(last)) = (&config.stats, &last) {
        let guest = guest.lock().unwrap_or_else(PoisonError::into_inner);
        let recording = recorder.map(Recorder::figures);
        write_stats(target, &report::report(config, &guest, last, recording, Some(&end)))?;
    }
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

fn write_stats(target: &Stats, document: &Json) -> Result<(), VmError> {
    report::write(target, document).map_err(host_error("write the statistics"))
}
