//! The block device as the transport sees it, and as the monitor does.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};

use devices::affinity;
use devices::virtio::signal::DeviceSignal;
use devices::virtio::stats::QueueCounters;
use devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice};
use halt_poll::{Params, Policy};
use vmm_sys_util::eventfd::EventFd;

use crate::config::{BlkConfig, CacheMode, ConfigSpace, SECTOR_BYTES, features, may_cache};
use crate::disk::Disk;
use crate::engine;
use crate::request::Limits;
use crate::worker::{ServiceTimes, Worker};

/// The device ID of a block device (virtio 1.2, 5.2.1).
const DEVICE_TYPE: u32 = 2;

/// What the device, its workers and its handles have in common.
pub(crate) struct Shared {
    disk: Arc<Disk>,
    /// Changes only under the lock of `told`.
    pub(crate) capacity_sectors: AtomicU64,
    /// The longest time a worker polls before it sleeps, in nanoseconds.
    pub(crate) io_poll_ns: AtomicU32,
    /// The `writeback` field of the configuration space.
    pub(crate) writeback: AtomicBool,
    told: Mutex<Told>,
    counters: Vec<Arc<QueueCounters>>,
    /// Thread ids of the workers, in order of their queues.
    tids: Mutex<Vec<i32>>,
}

/// How a driver learns that the capacity has changed. Locked while it changes and while it is read for
/// the driver.
#[derive(Default)]
struct Told {
    generation: u8,
    /// The capacity has changed since the driver last read the configuration space.
    changed: bool,
    /// While there is a driver to be told.
    signal: Option<DeviceSignal>,
    /// It changed when there was none. A driver that is starting may have read it before that.
    missed: bool,
}

impl Shared {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The capacity for the driver, who finds a new generation if it is a new one. The generation goes
    /// on no faster than the driver reads: it cannot have come round while half of a number was read
    /// (virtio 1.2, 4.1.4.3.1).
    fn read_capacity(&self) -> u64 {
        let mut told = self.told();
        if std::mem::take(&mut told.changed) {
            told.generation = told.generation.wrapping_add(1);
        }
        self.capacity_sectors.load(Ordering::SeqCst)
    }
}

/// A disk's capacity before and after its size was looked at again, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resize {
    /// As the driver knew it.
    pub old_bytes: u64,
    /// As it knows it now.
    pub new_bytes: u64,
}

/// Starts a thread that runs what it is given, as [`Builder::spawn`] does: whoever assembles the VM may
/// have all workers started from a thread of its own.
pub type StartThread =
    Arc<dyn Fn(Builder, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> + Send + Sync>;

/// A virtio block device.
pub struct Block {
    config: BlkConfig,
    space: ConfigSpace,
    features: u64,
    queue_sizes: Vec<u16>,
    shared: Arc<Shared>,
    running: Vec<Running>,
    start_thread: StartThread,
}

/// A worker, and how to stop it.
struct Running {
    /// The queue's index.
    queue: u16,
    tid: i32,
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
    kick: EventFd,
}

impl Running {
    /// Has the worker end, soon.
    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        // It fails only where the worker is awake already: at 2⁶⁴ - 2 kicks unread.
        let _ = self.kick.write(1);
    }
}

/// Watches a device from outside, while the transport owns it.
#[derive(Clone)]
pub struct BlockHandle(Arc<Shared>);

impl BlockHandle {
    /// See [`Block::counters`].
    pub fn counters(&self) -> &[Arc<QueueCounters>] {
        &self.0.counters
    }

    /// See [`Block::worker_tids`].
    pub fn worker_tids(&self) -> Vec<i32> {
        self.0.tids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts what the guest has written on stable storage. Writes still under way may be missed:
    /// stop the guest first.
    ///
    /// # Errors
    /// What the system said; data may be lost.
    pub fn flush(&self) -> io::Result<()> {
        self.0.disk.sync()
    }

    /// The capacity that the driver knows, in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.0.capacity_sectors.load(Ordering::SeqCst).saturating_mul(SECTOR_BYTES)
    }

    /// Looks at the size of the backing file or block device again. If it has another number of whole
    /// sectors than before, the driver sees the new capacity and a new generation, and is told by a
    /// configuration change notification (virtio 1.2, 5.2.5). The backing is never changed, and a
    /// smaller size counts as a larger one does: requests beyond it fail from now on.
    ///
    /// # Errors
    /// The size cannot be told; then nothing has changed.
    pub fn rescan(&self) -> io::Result<Resize> {
        let shared = &self.0;
        let mut told = shared.told();
        let sectors = shared.disk.size_bytes()? / SECTOR_BYTES;
        let before = shared.capacity_sectors.swap(sectors, Ordering::SeqCst);
        if before != sectors {
            told.changed = true;
            match &told.signal {
                Some(signal) => signal.config_changed(),
                None => told.missed = true,
            }
        }
        let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
        Ok(Resize { old_bytes: bytes(before), new_bytes: bytes(sectors) })
    }

    /// Changes the longest time that this device's workers poll before they sleep, in nanoseconds; 0:
    /// they do not poll. A worker takes it over when it has nothing to do the next time.
    pub fn set_io_poll_ns(&self, max_ns: u32) {
        self.0.io_poll_ns.store(max_ns, Ordering::Relaxed);
    }
}

impl Block {
    /// A device for an open disk, not yet active. `config` is the one the disk was opened with.
    pub fn new(config: BlkConfig, disk: Disk) -> Block {
        let capacity_sectors = disk.size_bytes().unwrap_or(0) / SECTOR_BYTES;
        Block {
            space: ConfigSpace::new(&config, &disk),
            features: features(&config, &disk),
            queue_sizes: vec![config.queue_size; usize::from(config.queues)],
            shared: Arc::new(Shared {
                disk: Arc::new(disk),
                capacity_sectors: AtomicU64::new(capacity_sectors),
                io_poll_ns: AtomicU32::new(config.io_poll_ns),
                writeback: AtomicBool::new(config.cache == CacheMode::Writeback),
                told: Mutex::default(),
                counters: (0..config.queues).map(|_| Arc::default()).collect(),
                tids: Mutex::default(),
            }),
            running: Vec::new(),
            start_thread: Arc::new(|builder, body| builder.spawn(body)),
            config,
        }
    }

    /// Has workers started by `start_thread` from now on.
    #[must_use]
    pub fn started_by(mut self, start_thread: StartThread) -> Block {
        self.start_thread = start_thread;
        self
    }

    /// The counters of each queue, which go on counting over resets.
    pub fn counters(&self) -> &[Arc<QueueCounters>] {
        &self.shared.counters
    }

    /// The host's thread ids of the workers, in order of their queues; empty while the device is
    /// not active. That of a queue that was reset stays until it is started again. Their CPU time is in
    /// `/proc/self/task/TID/`.
    pub fn worker_tids(&self) -> Vec<i32> {
        self.handle().worker_tids()
    }

    /// Watches the device after it has been given away.
    pub fn handle(&self) -> BlockHandle {
        BlockHandle(self.shared.clone())
    }

    /// Starts the worker of one queue, bound to its CPU.
    fn start(
        &mut self,
        active: ActiveQueue,
        memory: &devices::GuestMemory,
        negotiated: u64,
        device: &DeviceSignal,
    ) -> io::Result<()> {
        let ActiveQueue { index, queue, kick, signal } = active;
        let counters = self.shared.counters.get(usize::from(index)).cloned();
        let counters = counters.ok_or(io::ErrorKind::InvalidInput)?;
        let stop = Arc::new(AtomicBool::new(false));
        let limits = Limits {
            capacity_sectors: 0,
            readonly: self.config.readonly,
            features: negotiated,
            writeback: false,
            id: self.config.id(),
        };
        let (shared, memory, device) = (self.shared.clone(), memory.clone(), device.clone());
        let (worker_stop, worker_kick) = (stop.clone(), kick.try_clone()?);
        let engine_kind = self.config.engine;
        let pin_cpu = self.config.pin_cpus.get(usize::from(index)).copied().flatten();
        let (tell, told) = mpsc::sync_channel(1);
        let builder = Builder::new().name(format!("{}-q{index}", self.config.name));
        let body = move || {
            let pinned = pin_cpu.map_or(Ok(()), affinity::pin_current_thread);
            let _ = tell.send(pinned.map(|()| affinity::current_tid()));
            drop(tell);
            Worker {
                engine: engine::new(engine_kind, &shared.disk, &memory, queue.size()),
                service: ServiceTimes::new(queue.size()),
                queue,
                kick: worker_kick,
                signal,
                device,
                counters,
                shared,
                limits,
                stop: worker_stop,
                policy: Policy::new(Params::default()),
                spare: Vec::new(),
                done: Vec::new(),
            }
            .run();
        };
        let thread = (self.start_thread)(builder, Box::new(body))?;
        // A worker that does not tell is one that could not begin.
        let tid = told.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()));
        let tid_or_none = tid.as_ref().copied().unwrap_or(0);
        self.running.push(Running { queue: index, tid: tid_or_none, thread, stop, kick });
        tid.map(drop)
    }

    /// Waits for the workers of these queues, which have been told to stop.
    fn join(&mut self, which: impl Fn(u16) -> bool) {
        for running in self.running.extract_if(.., |running| which(running.queue)) {
            let _ = running.thread.join();
        }
    }

    fn show_tids(&self) {
        let tids = self.running.iter().map(|running| running.tid).collect();
        *self.shared.tids.lock().unwrap_or_else(PoisonError::into_inner) = tids;
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, features: u64, offset: u64, data: &mut [u8]) {
        let capacity_sectors = self.shared.read_capacity();
        let writeback = self.shared.writeback.load(Ordering::Relaxed) && may_cache(features);
        let space = self.space.to_bytes(capacity_sectors, writeback);
        let from = usize::try_from(offset).ok().and_then(|at| space.get(at..)).unwrap_or_default();
        data.fill(0);
        for (to, from) in data.iter_mut().zip(from) {
            *to = *from;
        }
    }

    fn write_config(&mut self, features: u64, offset: u64, data: &[u8]) {
        if let Some(writeback) = ConfigSpace::writeback_written(features, offset, data) {
            self.shared.writeback.store(writeback, Ordering::Relaxed);
        }
    }

    fn config_generation(&self) -> u8 {
        self.shared.told().generation
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, features, queues, device } = activation;
        for queue in queues {
            // The one before it, if this queue was reset.
            let index = queue.index;
            self.join(|this| this == index);
            if let Err(error) = self.start(queue, &memory, features, &device) {
                self.reset();
                return Err(error.into());
            }
        }
        self.running.sort_by_key(|running| running.queue);
        self.show_tids();
        let mut told = self.shared.told();
        if std::mem::take(&mut told.missed) {
            device.config_changed();
        }
        told.signal = Some(device);
        Ok(())
    }

    fn reset(&mut self) {
        let mut told = self.shared.told();
        (told.signal, told.missed) = (None, false);
        drop(told);
        self.running.iter().for_each(Running::stop);
        self.join(|_| true);
        self.show_tids();
        self.shared.writeback.store(self.config.cache == CacheMode::Writeback, Ordering::Relaxed);
    }

    fn reset_queue(&mut self, index: u16) {
        self.running.iter().filter(|running| running.queue == index).for_each(Running::stop);
    }

    fn is_queue_reset(&self, index: u16) -> bool {
        let mut workers = self.running.iter().filter(|running| running.queue == index);
        // Its engine has drained, and is gone together with the queue.
        workers.all(|running| running.thread.is_finished())
    }
}

impl Drop for Block {
    /// Stops the workers, which drains what is in flight. It does not put it on stable storage: the
    /// system tells an error of that once, and here it would be lost. See [`BlockHandle::flush`].
    fn drop(&mut self) {
        self.reset();
    }
}
