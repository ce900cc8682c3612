//! What a run cost, both sides, as one JSON document: counters of exits, halts, kicks, interrupts
//! and requests, CPU time of every vCPU and worker thread, and what the guest reported. Documented
//! field by field in `docs/measuring.md`.

pub mod channel;
pub mod kvm;
pub mod report;
pub mod sample;
pub mod threads;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use devices::virtio::stats::Histogram;
use serde::Serialize;
use virtio_blk::BlockHandle;

use crate::vcpu::run::ExitCounters;
use crate::vcpu::user::UserStats;
use kvm::{KvmStats, Value, Values};
use sample::{GuestSetup, Sample};
use threads::ThreadCost;

/// The version of the report's fields.
pub const SCHEMA: u32 = 1;

/// Where one vCPU's figures come from.
pub struct VcpuSource {
    /// Its number.
    pub index: u32,
    /// Exits to userspace.
    pub counters: Arc<ExitCounters>,
    /// Its thread; 0 until it runs.
    pub tid: Arc<AtomicI32>,
    /// KVM's own statistics, where this KVM has them.
    pub kvm: Option<KvmStats>,
    /// What its own local APIC and halt loop count, in mode `user`.
    pub user: Option<Arc<UserStats>>,
    /// What only its thread can read.
    pub sample: Arc<Sample>,
}

/// Where one disk's figures come from.
pub struct DiskSource {
    /// `blk0`.
    pub name: String,
    /// The device, seen from outside.
    pub device: BlockHandle,
}

/// Where all figures come from. Reading them disturbs no hot path.
pub struct Sources {
    /// When the VM was assembled.
    pub start: Instant,
    /// The vCPUs.
    pub vcpus: Vec<VcpuSource>,
    /// The disks.
    pub disks: Vec<DiskSource>,
}

/// All figures at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// Since the VM was assembled, in nanoseconds.
    pub time_ns: u64,
    /// One a vCPU.
    pub vcpus: Vec<VcpuFigures>,
    /// One a queue of every disk.
    pub queues: Vec<QueueFigures>,
    /// One a worker thread.
    pub workers: Vec<WorkerFigures>,
}

/// One vCPU.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VcpuFigures {
    /// `vcpu0`.
    pub name: String,
    /// Exits by reason: KVM's own counts (all exits are `exits`) and, as `userspace_*`, those that
    /// reached Pollux.
    pub exits: BTreeMap<String, u64>,
    /// Halts, with the names of KVM's statistics.
    pub halt: Values,
    /// The poll window now, in nanoseconds. KVM does not tell its own.
    pub window_ns: Option<u64>,
    /// The timers of a local APIC that is Pollux's own.
    pub timer: Option<TimerFigures>,
    /// How the guest set it up, as last asked.
    #[serde(flatten)]
    pub setup: GuestSetup,
    /// What its thread cost.
    #[serde(flatten)]
    pub cost: ThreadCost,
}

/// Timers that ended a halt.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TimerFigures {
    /// How many.
    pub wakes: u64,
    /// By how much they were late in sum, in nanoseconds.
    pub late_ns: u64,
    /// By how much the latest was late, in nanoseconds.
    pub late_max_ns: u64,
}

/// One queue.
#[derive(Clone, Debug, Serialize)]
pub struct QueueFigures {
    /// `blk0`.
    pub disk: String,
    /// The queue's number.
    pub queue: usize,
    /// Notifications by the driver.
    pub kicks: u64,
    /// Work found without one.
    pub kicks_suppressed: u64,
    /// Requests completed.
    pub requests: u64,
    /// Bytes from the disk.
    pub bytes_read: u64,
    /// Bytes to the disk.
    pub bytes_written: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Requests that ended with IOERR or UNSUPP.
    pub errors: u64,
    /// Notifications by the device.
    pub interrupts: u64,
    /// Publications that needed none.
    pub interrupts_suppressed: u64,
    /// How long requests took the device.
    pub service_time_ns: Times,
}

/// A distribution of times, in nanoseconds. Quantiles are at most 12.5 % too large.
#[derive(Clone, Debug, Serialize)]
pub struct Times {
    /// How many.
    pub count: u64,
    /// Their mean.
    pub mean: Option<u64>,
    /// Half of them take at most this.
    pub p50: Option<u64>,
    /// 99 of 100.
    pub p99: Option<u64>,
    /// 999 of 1000.
    pub p99_9: Option<u64>,
    /// The longest, exactly.
    pub max: Option<u64>,
    /// Pairs of a bucket's largest value and its count, where that is not 0. Buckets of two
    /// snapshots can be subtracted; quantiles cannot.
    pub buckets: Vec<(u64, u64)>,
}

impl Times {
    fn of(histogram: &Histogram) -> Self {
        let times = histogram.snapshot();
        let count = times.count();
        Self {
            count,
            mean: times.sum.checked_div(count),
            p50: times.quantile(500),
            p99: times.quantile(990),
            p99_9: times.quantile(999),
            max: (count > 0).then_some(times.max),
            buckets: times.buckets.iter().map(|bucket| (bucket.last, bucket.count)).collect(),
        }
    }
}

/// One worker thread.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerFigures {
    /// `blk0-q0`.
    pub name: String,
    /// Times it slept.
    pub sleeps: u64,
    /// Poll windows that saw work.
    pub polls_hit: u64,
    /// Poll windows that ended without.
    pub polls_missed: u64,
    /// What its thread cost.
    #[serde(flatten)]
    pub cost: ThreadCost,
}

impl Sources {
    /// Reads all figures now.
    pub fn snapshot(&self) -> Snapshot {
        let vcpus = self.vcpus.iter().map(VcpuSource::figures).collect();
        let queues = self.disks.iter().flat_map(DiskSource::queue_figures).collect();
        let workers = self.disks.iter().flat_map(DiskSource::worker_figures).collect();
        Snapshot { time_ns: self.start.elapsed().as_nanos() as u64, vcpus, queues, workers }
    }
}

impl VcpuSource {
    fn figures(&self) -> VcpuFigures {
        let cost = threads::cost_of(self.tid.load(Ordering::Relaxed)).unwrap_or_default();
        let kvm = self.kvm.as_ref().and_then(|kvm| kvm.read().ok()).unwrap_or_default();
        let mut exits = BTreeMap::new();
        let mut halt = Values::new();
        for (name, value) in kvm {
            match value {
                _ if name.starts_with("halt_") && name != "halt_exits" => {
                    halt.insert(name, value);
                }
                Value::Number(n) if name == "exits" || name.ends_with("_exits") => {
                    exits.insert(name, n);
                }
                _ => {}
            }
        }
        let own = &self.counters;
        for (name, counter) in [
            ("userspace_io_in", &own.io_in),
            ("userspace_io_out", &own.io_out),
            ("userspace_mmio_read", &own.mmio_read),
            ("userspace_mmio_write", &own.mmio_write),
            ("userspace_hlt", &own.hlt),
            ("userspace_rdmsr", &own.rdmsr),
            ("userspace_wrmsr", &own.wrmsr),
            ("userspace_irq_window", &own.irq_window),
            ("userspace_intr", &own.intr),
            ("userspace_other", &own.other),
        ] {
            exits.insert(name.to_owned(), counter.get());
        }
        let mut setup = self.sample.get();
        let (mut window_ns, mut timer) = (None, None);
        if let Some(user) = &self.user {
            halt = user.halt_values();
            window_ns = Some(user.halts.snapshot().window_ns);
            setup.poll_control = Some(user.poll_control.load(Ordering::Relaxed));
            timer = Some(TimerFigures {
                wakes: user.timer_wakes.get(),
                late_ns: user.timer_late_ns.get(),
                late_max_ns: user.timer_late_max_ns.load(Ordering::Relaxed),
            });
        }
        let name = format!("vcpu{}", self.index);
        VcpuFigures { name, exits, halt, window_ns, timer, setup, cost }
    }
}

impl DiskSource {
    fn queue_figures(&self) -> impl Iterator<Item = QueueFigures> {
        self.device.counters().iter().enumerate().map(|(queue, counters)| QueueFigures {
            disk: self.name.clone(),
            queue,
            kicks: counters.kicks.get(),
            kicks_suppressed: counters.kicks_suppressed.get(),
            requests: counters.requests.get(),
            bytes_read: counters.bytes_read.get(),
            bytes_written: counters.bytes_written.get(),
            flushes: counters.flushes.get(),
            errors: counters.errors.get(),
            interrupts: counters.interrupts.get(),
            interrupts_suppressed: counters.interrupts_suppressed.get(),
            service_time_ns: Times::of(&counters.service_time_ns),
        })
    }

    fn worker_figures(&self) -> impl Iterator<Item = WorkerFigures> {
        let tids = self.device.worker_tids();
        self.device.counters().iter().zip(tids).enumerate().map(|(queue, (counters, tid))| {
            WorkerFigures {
                name: format!("{}-q{queue}", self.name),
                sleeps: counters.sleeps.get(),
                polls_hit: counters.polls_hit.get(),
                polls_missed: counters.polls_missed.get(),
                cost: threads::cost_of(tid).unwrap_or_default(),
            }
        })
    }
}
