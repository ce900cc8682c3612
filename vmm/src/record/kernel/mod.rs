//! Halts in mode `kernel`: KVM's tracepoints, taken by perf_event_open(2).
//!
//! Events are opened for the first thread, before any other is started, and are inherited by all that it
//! starts: nothing of other processes is seen. Each CPU has a ring, which the writer's thread reads.

mod assemble;
mod perf;
mod tracepoint;

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};

use halt_poll::recording::{BLOCK_BYTES, HALT_BYTES, Halt, Header};
use vmm_sys_util::eventfd::EventFd;

use super::writer::{Message, Writer};
use crate::config::reason;
use crate::vcpu::user::MSR_KVM_POLL_CONTROL;
use assemble::{Assembler, Event, What};
use perf::{Record, Ring, Wanted};
use tracepoint::{Field, Tracepoint};

/// The rings are read at least so often, in milliseconds: a run that is killed loses no more.
const READ_MS: libc::c_int = 1_000;
/// A block has at most so many halts.
const BLOCK_HALTS: usize = 1024;

/// Where the fields of the tracepoints are.
struct Fields {
    wakeup: (u16, [Field; 3]),
    window: (u16, [Field; 3]),
    accept: (u16, [Field; 2]),
    inject: (u16, [Field; 1]),
    msr: (u16, [Field; 1]),
    waking: (u16, [Field; 1]),
    pid: Field,
    kind: Field,
}

/// The kernel's events of this process.
pub struct Tracer {
    fields: Fields,
    rings: Vec<Ring>,
    /// Woken by a message.
    wake: EventFd,
}

/// Why halts in the kernel cannot be recorded, and what would help.
pub type Refusal = (String, &'static str);

const MOUNT: &str = "mount tracefs, as mount -t tracefs tracefs /sys/kernel/tracing, and have it \
                     readable, with KVM loaded; or use --halt user, which needs nothing";
const ALLOW: &str = "run as root or with CAP_PERFMON, set kernel.perf_event_paranoid to -1, or use \
                     --halt user, which needs nothing";
const DESCRIPTORS: &str = "raise the limit of open files; it takes 6 for each CPU of the host";

impl Tracer {
    /// Opens the events of the current thread, and of all that it starts from now on.
    ///
    /// # Errors
    /// The host does not let us, or has no such tracepoints.
    pub fn open() -> Result<Self, Refusal> {
        let unreadable = |(path, why): (PathBuf, io::Error)| {
            let hint = if why.kind() == io::ErrorKind::PermissionDenied { ALLOW } else { MOUNT };
            (format!("cannot trace KVM: {}: {}", path.display(), reason(&why)), hint)
        };
        let fields = Fields::find().map_err(unreadable)?;
        let filter = format!("ecx == {MSR_KVM_POLL_CONTROL:#x} && write == 1");
        let all =
            [fields.wakeup.0, fields.window.0, fields.accept.0, fields.inject.0, fields.waking.0];
        let mut wanted: Vec<_> = all.map(|id| Wanted { id, filter: None }).into();
        wanted.push(Wanted { id: fields.msr.0, filter: Some(&filter) });
        let open = |cpu| Ring::open(cpu, &wanted);
        let rings: io::Result<Vec<Ring>> =
            online_cpus().and_then(|cpus| cpus.into_iter().map(open).collect());
        let rings = rings.map_err(|why| {
            let hint = match why.raw_os_error() {
                Some(libc::EMFILE) => DESCRIPTORS,
                _ => ALLOW,
            };
            (format!("the host does not let this user trace KVM: {}", reason(&why)), hint)
        })?;
        let wake = EventFd::new(libc::EFD_NONBLOCK)
            .map_err(|why| (format!("no eventfd: {}", reason(&why)), DESCRIPTORS))?;
        Ok(Self { fields, rings, wake })
    }

    /// To be written to after each message.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn wake(&self) -> io::Result<EventFd> {
        self.wake.try_clone()
    }

    /// Writes halts until nobody can send messages any more. `origin_ns`: when time begins, on
    /// CLOCK_MONOTONIC.
    pub fn run(
        mut self,
        writer: &mut Writer,
        messages: &Receiver<Message>,
        header: &Header,
        origin_ns: u64,
    ) {
        let mut turn = Turn {
            assembler: Assembler::new(origin_ns, header.host.max_ns),
            tids: Vec::new(),
            events: Vec::new(),
            before_ns: 0,
            blocks: (0..header.vcpus).map(|_| new_block()).collect(),
        };
        loop {
            self.wait();
            let _ = self.wake.read();
            loop {
                match messages.try_recv() {
                    Ok(Message::Vcpus(tids)) => {
                        turn.read(&mut self, writer, true);
                        turn.assembler.begin(tids.len());
                        turn.tids = tids;
                    }
                    Ok(Message::Flush(done)) => {
                        turn.read(&mut self, writer, true);
                        writer.serve(Message::Flush(done));
                    }
                    Ok(message) => writer.serve(message),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            turn.read(&mut self, writer, false);
        }
    }

    /// Waits for a message, for a ring that is half full, or for a while.
    fn wait(&self) {
        let fd = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let rings = self.rings.iter().map(|ring| fd(ring.wake()));
        let mut fds: Vec<_> = std::iter::once(fd(self.wake.as_raw_fd())).chain(rings).collect();
        // SAFETY: `fds` is a live array of that length. What the call says does not matter: all is looked at.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, READ_MS) };
    }
}

/// What the writer's thread keeps from one reading of the rings to the next.
struct Turn {
    assembler: Assembler,
    /// The threads of the vCPUs; 0 until they run.
    tids: Vec<Arc<AtomicI32>>,
    events: Vec<Event>,
    /// When the rings were last read.
    before_ns: u64,
    /// The halts of each vCPU that are not yet written.
    blocks: Vec<Vec<u8>>,
}

impl Turn {
    /// Reads all rings, and writes the halts that are complete; with `all`, every one that has ended.
    fn read(&mut self, tracer: &mut Tracer, writer: &mut Writer, all: bool) {
        let now_ns = monotonic_ns();
        let mut lost = 0;
        for ring in &mut tracer.rings {
            ring.drain(|record| match record {
                Record::Lost(events) => lost += events,
                Record::Sample { time_ns, tid, raw } => {
                    let pid = tracer.fields.pid.of(raw) as i32;
                    let what = tracer.fields.what(raw);
                    self.events.extend(what.map(|what| Event { time_ns, tid, pid, what }));
                }
            });
        }
        let tids = self.tids.iter().map(|tid| tid.load(Ordering::Relaxed));
        self.assembler.set_threads(tids);
        self.assembler.set_max_ns(writer.max_ns());
        // An event of one CPU may come into its ring a little after a later one of another: what is as old as
        // the last reading is in order.
        let until_ns = if all { u64::MAX } else { self.before_ns };
        self.before_ns = now_ns;
        self.events.sort_by_key(|event| event.time_ns);
        let ripe = self.events.partition_point(|event| event.time_ns < until_ns);
        for event in self.events.drain(..ripe) {
            if let Some((vcpu, halt)) = self.assembler.take(&event) {
                push(&mut self.blocks, vcpu, &halt, &mut lost, writer);
            }
        }
        if all {
            for (vcpu, halt) in self.assembler.finish() {
                push(&mut self.blocks, vcpu, &halt, &mut lost, writer);
            }
        }
        for (vcpu, block) in (0..).zip(&mut self.blocks) {
            writer.write(vcpu, std::mem::take(&mut lost), block);
            block.truncate(BLOCK_BYTES);
        }
    }
}

/// Puts a halt into its vCPU's block, which is written when it is full.
fn push(blocks: &mut [Vec<u8>], vcpu: u32, halt: &Halt, lost: &mut u64, writer: &mut Writer) {
    let Some(block) = blocks.get_mut(vcpu as usize) else { return };
    block.extend_from_slice(&halt.to_bytes());
    if block.len() >= BLOCK_BYTES + BLOCK_HALTS * HALT_BYTES {
        writer.write(vcpu, std::mem::take(lost), block);
        block.truncate(BLOCK_BYTES);
    }
}

fn new_block() -> Vec<u8> {
    vec![0; BLOCK_BYTES]
}

impl Fields {
    fn find() -> Result<Self, (PathBuf, io::Error)> {
        fn of<const N: usize>(
            name: &str,
            fields: [&str; N],
        ) -> Result<(u16, [Field; N]), (PathBuf, io::Error)> {
            let tracepoint = Tracepoint::find(name)?;
            let found: Result<Vec<_>, _> =
                fields.into_iter().map(|field| tracepoint.field(field)).collect();
            let found = <[Field; N]>::try_from(found?);
            // As many as were asked for.
            let error = |_| (PathBuf::from(name), io::ErrorKind::InvalidData.into());
            Ok((tracepoint.id, found.map_err(error)?))
        }
        let common = Tracepoint::find("sched/sched_waking")?;
        Ok(Self {
            wakeup: of("kvm/kvm_vcpu_wakeup", ["ns", "waited", "valid"])?,
            window: of("kvm/kvm_halt_poll_ns", ["vcpu_id", "new", "old"])?,
            accept: of("kvm/kvm_apic_accept_irq", ["apicid", "vec"])?,
            inject: of("kvm/kvm_inj_virq", ["vector"])?,
            msr: of("kvm/kvm_msr", ["data"])?,
            waking: of("sched/sched_waking", ["pid"])?,
            pid: common.field("common_pid")?,
            kind: common.field("common_type")?,
        })
    }

    /// What a sample says, by the tracepoint that it is of.
    fn what(&self, raw: &[u8]) -> Option<What> {
        let id = self.kind.of(raw) as u16;
        let number = |field: Field| field.of(raw);
        if id == self.wakeup.0 {
            let [halt_ns, waited, valid] = self.wakeup.1.map(number);
            Some(What::Wakeup { halt_ns, waited: waited != 0, valid: valid != 0 })
        } else if id == self.window.0 {
            let [vcpu, new_ns, old_ns] = self.window.1.map(|field| number(field) as u32);
            Some(What::Window { vcpu, new_ns, old_ns })
        } else if id == self.accept.0 {
            let [vcpu, vector] = self.accept.1.map(number);
            Some(What::Accept { vcpu: vcpu as u32, vector: vector as u8 })
        } else if id == self.inject.0 {
            let [vector] = self.inject.1.map(number);
            Some(What::Inject { vector: vector as u8 })
        } else if id == self.msr.0 {
            let [value] = self.msr.1.map(number);
            Some(What::PollControl { value })
        } else if id == self.waking.0 {
            let [pid] = self.waking.1.map(number);
            Some(What::Waking { pid: pid as i32 })
        } else {
            None
        }
    }
}

/// CLOCK_MONOTONIC, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live local; the clock exists, so the call does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

/// The CPUs that run, from the kernel's list: `0-3,8`.
fn online_cpus() -> io::Result<Vec<i32>> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online")?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<i32>().ok()?..=last.parse::<i32>().ok()?)
    };
    let ranges: Option<Vec<_>> = list.trim().split(',').map(range).collect();
    let ranges = ranges.ok_or_else(|| io::Error::other(format!("no list of CPUs: {list}")))?;
    Ok(ranges.into_iter().flatten().collect())
}
