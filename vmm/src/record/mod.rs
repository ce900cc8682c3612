//! `--record`: every halt of every vCPU goes to a file, for `pollux replay`. The file's form is
//! [`halt_poll::recording`]'s, and documented in `docs/recording.md`.
//!
//! In mode `user` a vCPU's thread puts its halts into a buffer of its own ([`vcpu`]) and hands that to
//! the writer's thread when it is full: no lock, and no system call but for one wake of the writer in a
//! thousand halts. In mode `kernel` halts are made of KVM's tracepoints ([`kernel`]).

mod kernel;
pub mod vcpu;
mod writer;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::Builder;
use std::time::Instant;

use halt_poll::Clock;
use halt_poll::recording::{GuestIdle, Header, Mode};
use serde::Serialize;
use vmm_sys_util::eventfd::EventFd;

use crate::builder::{BuildError, Built, open_output};
use crate::config::{self, ConfigError, Halt, VmConfig};
use crate::doctor::host;
use crate::sandbox::{Kind, Sandbox};
use crate::vcpu::polling;
use crate::vcpu::user::TIMER_LEAD_NS;
use kernel::Tracer;
use vcpu::VcpuRecorder;
use writer::{Message, Shared, Writer};

/// A recording has at most so many bytes. What comes later is counted as lost.
pub const LIMIT_BYTES: u64 = 1 << 30;

/// A recording whose file is open, and whose thread does not run yet.
pub struct Prepared {
    path: PathBuf,
    file: File,
    header: Header,
    to: Sender<Message>,
    messages: Receiver<Message>,
    /// In mode `kernel`.
    tracer: Option<Tracer>,
}

/// Where halts go.
pub struct Recorder {
    path: PathBuf,
    shared: Arc<Shared>,
    to: Sender<Message>,
    /// Tells the writer's thread of messages, where it waits for more than these.
    wake: Option<EventFd>,
    /// When time began.
    start: Instant,
}

/// How a recording is getting on, as part of the statistics.
#[derive(Debug, Serialize)]
pub struct Figures {
    #[serde(serialize_with = "config::path_as_text")]
    path: PathBuf,
    /// Halts that were written.
    halts: u64,
    /// Halts that were not.
    lost: u64,
    /// The file's length.
    bytes: u64,
    /// What it may come to.
    limit_bytes: u64,
    /// Why there will be no more.
    stopped: Option<String>,
}

/// Opens what `config` asks to be recorded to. An old recording stays as it is until the new one begins.
///
/// # Errors
/// The file cannot be written, or the host does not let KVM be traced.
pub fn prepare(config: &VmConfig) -> Result<Option<Prepared>, BuildError> {
    let Some(path) = &config.record else { return Ok(None) };
    let tracer = (config.halt == Halt::Kernel).then(Tracer::open).transpose();
    let tracer = tracer.map_err(|(problem, hint)| {
        ConfigError::new("--record", path.display(), problem).hint(hint)
    })?;
    let file = open_output("--record", path, true)?;
    let (to, messages) = mpsc::channel();
    Ok(Some(Prepared { path: path.clone(), file, header: header(config), to, messages, tracer }))
}

impl Prepared {
    /// Begins the file, and starts the thread that writes it. `start`: when time begins.
    ///
    /// # Errors
    /// The host refused a thread, or to write.
    pub fn begin(self, sandbox: &Sandbox, start: Instant) -> io::Result<Recorder> {
        let Self { path, file, header, to, messages, tracer } = self;
        let mut writer = Writer::begin(file, &header)?;
        let shared = writer.shared();
        shared.set_max_ns(header.host.max_ns);
        let wake = tracer.as_ref().map(Tracer::wake).transpose()?;
        let origin_ns = kernel::monotonic_ns().saturating_sub(start.elapsed().as_nanos() as u64);
        let sandbox = sandbox.clone();
        let (entered, has_entered) = mpsc::sync_channel(1);
        Builder::new().name("recorder".into()).spawn(move || {
            let mine = sandbox.enter(Kind::Recorder);
            let is_confined = mine.is_ok();
            let _ = entered.send(mine);
            match tracer {
                _ if !is_confined => {}
                Some(tracer) => tracer.run(&mut writer, &messages, &header, origin_ns),
                None => writer.run(&messages),
            }
        })?;
        has_entered.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Recorder { path, shared, to, wake, start })
    }
}

impl Recorder {
    /// Records the vCPUs of a VM that is about to run.
    pub fn attach(&self, built: &mut Built) {
        if self.wake.is_some() {
            let tids = built.vcpus.iter().map(|vcpu| Arc::clone(&vcpu.tid)).collect();
            self.send(Message::Vcpus(tids));
        }
        for vcpu in &mut built.vcpus {
            if let Some(user) = &mut vcpu.user {
                let elapsed_ns = self.start.elapsed().as_nanos() as u64;
                let origin_ns = user.clock.now_ns().wrapping_sub(elapsed_ns);
                user.wake.note_times();
                user.recorder = Some(VcpuRecorder::new(vcpu.index, origin_ns, self.to.clone()));
            }
        }
    }

    /// The largest window is another from now on: KVM does not tell when it cuts one to it.
    pub fn set_max_ns(&self, max_ns: u32) {
        self.shared.set_max_ns(max_ns);
    }

    /// Waits until all that was handed over is written.
    pub fn flush(&self) {
        let (done, is_done) = mpsc::sync_channel(1);
        self.send(Message::Flush(done));
        // Without a writer there is nobody to answer.
        let _ = is_done.recv();
    }

    fn send(&self, message: Message) {
        let _ = self.to.send(message);
        if let Some(wake) = &self.wake {
            let _ = wake.write(1);
        }
    }

    /// How it is getting on.
    pub fn figures(&self) -> Figures {
        let (halts, lost, bytes) = self.shared.counts();
        Figures {
            path: self.path.clone(),
            halts,
            lost,
            bytes,
            limit_bytes: LIMIT_BYTES,
            stopped: self.shared.stopped(),
        }
    }
}

fn header(config: &VmConfig) -> Header {
    let mut host = polling::params(&config.halt_poll);
    let (mut mode, mut deadline_lead_ns) = (Mode::User, TIMER_LEAD_NS as u32);
    if config.halt == Halt::Kernel {
        (mode, deadline_lead_ns) = (Mode::Kernel, 0);
        // What was not asked for is the module's.
        let module = host::HaltPoll::query();
        let asked = &config.halt_poll;
        for (parameter, asked, module) in [
            (&mut host.max_ns, asked.halt_poll_ns, module.halt_poll_ns),
            (&mut host.grow, asked.halt_poll_ns_grow, module.halt_poll_ns_grow),
            (
                &mut host.grow_start_ns,
                asked.halt_poll_ns_grow_start,
                module.halt_poll_ns_grow_start,
            ),
            (&mut host.shrink, asked.halt_poll_ns_shrink, module.halt_poll_ns_shrink),
        ] {
            let module = module.and_then(|value| u32::try_from(value).ok());
            *parameter = asked.or(module).unwrap_or(*parameter);
        }
    }
    let guest_idle = match config.guest_idle {
        config::GuestIdle::Default => GuestIdle::Default,
        config::GuestIdle::Haltpoll => GuestIdle::Haltpoll,
        config::GuestIdle::Halt => GuestIdle::Halt,
        config::GuestIdle::Poll => GuestIdle::Poll,
    };
    Header { mode, vcpus: config.cpus, host, guest_idle, deadline_lead_ns }
}
