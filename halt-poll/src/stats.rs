//! What halting did, counted as KVM counts it: the same names and meanings as the statistics a
//! vCPU's `KVM_GET_STATS_FD` shows (`include/linux/kvm_types.h`, `struct kvm_vcpu_stat_generic`).

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Outcome, WakeReason};

/// Buckets of a histogram, as in KVM.
pub const HISTOGRAM_BUCKETS: usize = 32;

/// Counts of durations by their order of magnitude. Bucket 0 counts 0 ns, bucket `i` the durations
/// from 2^(`i` − 1) ns up to but excluding 2^`i` ns, and the last one all from 2^30 ns (1.07 s) up.
pub type HistogramCounts = [u64; HISTOGRAM_BUCKETS];

/// The bucket that counts `ns`.
pub fn histogram_bucket(ns: u64) -> usize {
    let significant_bits = (u64::BITS - ns.leading_zeros()) as usize;
    significant_bits.min(HISTOGRAM_BUCKETS - 1)
}

/// A counter with one writer: an add is a load and a store, no locked instruction.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    #[inline]
    fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Histogram([Counter; HISTOGRAM_BUCKETS]);

impl Histogram {
    #[inline]
    fn record(&self, ns: u64) {
        if let Some(bucket) = self.0.get(histogram_bucket(ns)) {
            bucket.add(1);
        }
    }

    fn counts(&self) -> HistogramCounts {
        array::from_fn(|i| self.0.get(i).map_or(0, Counter::get))
    }
}

/// The counters of one vCPU or I/O worker.
///
/// One thread records, any thread reads: nothing is locked, and the counters share no cache line
/// with anything else.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Stats {
    halt_attempted_poll: Counter,
    halt_successful_poll: Counter,
    halt_poll_invalid: Counter,
    halt_wakeup: Counter,
    halt_poll_success_ns: Counter,
    halt_poll_fail_ns: Counter,
    halt_wait_ns: Counter,
    window_ns: AtomicU64,
    halt_poll_success_hist: Histogram,
    halt_poll_fail_hist: Histogram,
    halt_wait_hist: Histogram,
}

impl Stats {
    /// All zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts one halt. Only the thread that halts may call this.
    pub fn record(&self, outcome: &Outcome) {
        if let Some(polled_ns) = outcome.polled_ns {
            self.halt_attempted_poll.add(1);
            if outcome.blocked_ns.is_none() {
                self.halt_successful_poll.add(1);
                self.halt_poll_success_ns.add(polled_ns);
                self.halt_poll_success_hist.record(polled_ns);
                if !outcome.valid {
                    self.halt_poll_invalid.add(1);
                }
            } else {
                self.halt_poll_fail_ns.add(polled_ns);
                self.halt_poll_fail_hist.record(polled_ns);
            }
        }
        if let Some(blocked_ns) = outcome.blocked_ns {
            self.halt_wait_ns.add(blocked_ns);
            self.halt_wait_hist.record(blocked_ns);
            if outcome.wake != WakeReason::Interrupted {
                self.halt_wakeup.add(1);
            }
        }
    }

    /// Shows the poll window to readers, in nanoseconds. Only the thread that halts may call this.
    pub fn set_window_ns(&self, window_ns: u64) {
        self.window_ns.store(window_ns, Ordering::Relaxed);
    }

    /// A copy of the counters. Taken while the writer runs, it may show one halt in some counters
    /// and not yet in others.
    pub fn snapshot(&self) -> StatsSnapshot {
        StatsSnapshot {
            halt_attempted_poll: self.halt_attempted_poll.get(),
            halt_successful_poll: self.halt_successful_poll.get(),
            halt_poll_invalid: self.halt_poll_invalid.get(),
            halt_wakeup: self.halt_wakeup.get(),
            halt_poll_success_ns: self.halt_poll_success_ns.get(),
            halt_poll_fail_ns: self.halt_poll_fail_ns.get(),
            halt_wait_ns: self.halt_wait_ns.get(),
            window_ns: self.window_ns.load(Ordering::Relaxed),
            halt_poll_success_hist: self.halt_poll_success_hist.counts(),
            halt_poll_fail_hist: self.halt_poll_fail_hist.counts(),
            halt_wait_hist: self.halt_wait_hist.counts(),
        }
    }
}

/// The counters at one moment. Every name but `window_ns` is KVM's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatsSnapshot {
    /// Halts that polled.
    pub halt_attempted_poll: u64,
    /// Halts that polled and did not have to sleep.
    pub halt_successful_poll: u64,
    /// Of those, the ones whose wake was invalid.
    pub halt_poll_invalid: u64,
    /// Halts that slept and were woken by an event or by the halted CPU's timer.
    pub halt_wakeup: u64,
    /// Time polled in halts that did not have to sleep, in nanoseconds.
    pub halt_poll_success_ns: u64,
    /// Time polled in vain, in nanoseconds.
    pub halt_poll_fail_ns: u64,
    /// Time slept, in nanoseconds.
    pub halt_wait_ns: u64,
    /// The poll window as last shown, in nanoseconds.
    pub window_ns: u64,
    /// Polls by their duration, of halts that did not have to sleep.
    pub halt_poll_success_hist: HistogramCounts,
    /// Polls in vain by their duration.
    pub halt_poll_fail_hist: HistogramCounts,
    /// Sleeps by their duration.
    pub halt_wait_hist: HistogramCounts,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::thread;

    fn outcome(polled_ns: Option<u64>, blocked_ns: Option<u64>) -> Outcome {
        Outcome { polled_ns, blocked_ns, wake: WakeReason::Event, valid: true }
    }

    fn recorded(outcomes: &[Outcome]) -> StatsSnapshot {
        let stats = Stats::new();
        for outcome in outcomes {
            stats.record(outcome);
        }
        stats.snapshot()
    }

    fn one_in_bucket(bucket: usize) -> HistogramCounts {
        array::from_fn(|i| u64::from(i == bucket))
    }

    #[test]
    fn buckets_are_powers_of_two_with_zero_by_itself_and_the_last_one_open() {
        let expected = [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 3),
            (1023, 10),
            (1024, 11),
            ((1 << 30) - 1, 30),
            (1 << 30, 31),
            (1 << 31, 31),
            (u64::MAX, 31),
        ];
        for (ns, bucket) in expected {
            assert_eq!(histogram_bucket(ns), bucket, "{ns} ns");
        }
    }

    #[test]
    fn a_successful_poll_counts_as_such_and_waits_for_nothing() {
        let expected = StatsSnapshot {
            halt_attempted_poll: 1,
            halt_successful_poll: 1,
            halt_poll_success_ns: 5_000,
            halt_poll_success_hist: one_in_bucket(13),
            ..StatsSnapshot::default()
        };
        assert_eq!(recorded(&[outcome(Some(5_000), None)]), expected);
    }

    #[test]
    fn a_poll_in_vain_counts_its_time_and_the_wait_after_it() {
        let expected = StatsSnapshot {
            halt_attempted_poll: 1,
            halt_wakeup: 1,
            halt_poll_fail_ns: 5_000,
            halt_wait_ns: 70_000,
            halt_poll_fail_hist: one_in_bucket(13),
            halt_wait_hist: one_in_bucket(17),
            ..StatsSnapshot::default()
        };
        assert_eq!(recorded(&[outcome(Some(5_000), Some(70_000))]), expected);
    }

    #[test]
    fn a_halt_that_did_not_poll_counts_only_its_wait() {
        let expected = StatsSnapshot {
            halt_wakeup: 1,
            halt_wait_ns: 70_000,
            halt_wait_hist: one_in_bucket(17),
            ..StatsSnapshot::default()
        };
        assert_eq!(recorded(&[outcome(None, Some(70_000))]), expected);
        assert_eq!(recorded(&[outcome(None, None)]), StatsSnapshot::default());
    }

    #[test]
    fn only_a_successful_poll_can_be_an_invalid_one() {
        let invalid = |outcome: Outcome| Outcome { valid: false, ..outcome };
        assert_eq!(recorded(&[invalid(outcome(Some(1), None))]).halt_poll_invalid, 1);
        assert_eq!(recorded(&[invalid(outcome(Some(1), Some(1)))]).halt_poll_invalid, 0);
        assert_eq!(recorded(&[invalid(outcome(None, None))]).halt_poll_invalid, 0);
    }

    #[test]
    fn an_interrupted_sleep_is_no_wakeup_but_a_deadline_is() {
        let slept = |wake| Outcome { wake, ..outcome(None, Some(1)) };
        let stats = recorded(&[slept(WakeReason::Interrupted), slept(WakeReason::Deadline)]);
        assert_eq!((stats.halt_wakeup, stats.halt_wait_ns), (1, 2));
    }

    #[test]
    fn the_counters_have_cache_lines_of_their_own() {
        assert_eq!(align_of::<Stats>(), 128);
        assert_eq!(size_of::<Stats>() % 128, 0);
    }

    #[test]
    fn another_thread_sees_everything_that_was_recorded() {
        let stats = Stats::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..1_000 {
                    stats.record(&outcome(Some(1), None));
                    stats.set_window_ns(20_000);
                }
            });
            while stats.snapshot().halt_successful_poll < 1_000 {
                thread::yield_now();
            }
        });
        let snapshot = stats.snapshot();
        assert_eq!((snapshot.halt_poll_success_ns, snapshot.window_ns), (1_000, 20_000));
    }

    proptest! {
        #[test]
        fn every_duration_is_counted_in_the_bucket_whose_bounds_hold_it(ns: u64, shift in 0..64u32) {
            let ns = ns >> shift;
            let bucket = histogram_bucket(ns) as u32;
            prop_assert!(bucket == 0 || ns >= 1 << (bucket - 1));
            prop_assert!(bucket == 31 || ns < 1 << bucket);
        }
    }
}
