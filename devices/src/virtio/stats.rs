//! Counters of the data path: each has one writer (the queue's worker) and any number of readers,
//! and each queue's counters have cache lines of their own.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer: an add is a load and a store, no locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call this.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What happened on one queue since the VM was created. Times are in nanoseconds.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCounters {
    /// Notifications the driver sent (each was a VM exit, or an ioeventfd inside KVM).
    pub kicks: Counter,
    /// Times the worker found new chains without a kick, because kicks were suppressed.
    pub kicks_suppressed: Counter,
    /// Requests completed, whatever their status.
    pub requests: Counter,
    /// Bytes moved from the disk into guest memory.
    pub bytes_read: Counter,
    /// Bytes moved from guest memory to the disk.
    pub bytes_written: Counter,
    /// Flush requests completed.
    pub flushes: Counter,
    /// Requests that ended with IOERR or UNSUPP.
    pub errors: Counter,
    /// Interrupts sent (or left pending in a masked MSI-X entry).
    pub interrupts: Counter,
    /// Used-ring publications after which the driver wanted no interrupt.
    pub interrupts_suppressed: Counter,
    /// Times the worker slept.
    pub sleeps: Counter,
    /// Times the worker's poll window saw work before it ended.
    pub polls_hit: Counter,
    /// Times the worker's poll window ended without work.
    pub polls_missed: Counter,
}
