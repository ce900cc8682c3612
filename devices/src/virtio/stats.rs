//! Counters of the data path: each has one writer (the queue's worker) and any number of readers,
//! and each queue's counters have cache lines of their own.

use std::array;
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

/// Values below this have a bucket each; from here on, each power of two has this many.
const SUB_BUCKETS: u64 = 8;
const SUB_BITS: u32 = SUB_BUCKETS.trailing_zeros();
/// One group of exact buckets, and one for each power of two from 2^3 to 2^63.
const BUCKETS: usize = (u64::BITS - SUB_BITS + 1) as usize * SUB_BUCKETS as usize;

/// A histogram with one writer, as [`Counter`] is: recording takes no lock and no locked
/// instruction.
///
/// Log-linear: each power of two is cut into 8 buckets of equal width, so that a value is told from
/// its bucket with a relative error of at most 12.5 %. Takes any value, in 4 KiB.
#[derive(Debug)]
pub struct Histogram {
    sum: Counter,
    max: Counter,
    buckets: [Counter; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = array::from_fn(|_| Counter::default());
        Self { sum: Counter::default(), max: Counter::default(), buckets }
    }
}

impl Histogram {
    /// Counts one value. Only the owning thread may call this.
    #[inline]
    pub fn record(&self, value: u64) {
        if let Some(bucket) = self.buckets.get(bucket_of(value)) {
            bucket.add(1);
        }
        self.sum.add(value);
        self.max.add(value.saturating_sub(self.max.get()));
    }

    /// A copy. Taken while the writer runs, it may lack the last value in part.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let buckets = self.buckets.iter().enumerate().filter_map(|(index, bucket)| {
            let count = bucket.get();
            (count > 0).then(|| Bucket { last: last_of(index), count })
        });
        HistogramSnapshot { buckets: buckets.collect(), sum: self.sum.get(), max: self.max.get() }
    }
}

/// The index of the bucket that counts `value`.
fn bucket_of(value: u64) -> usize {
    // The position of the highest bit beyond the bits that number a group's buckets.
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(SUB_BITS + 1);
    (u64::from(shift) * SUB_BUCKETS + (value >> shift)) as usize
}

/// The largest value that bucket `index` counts.
fn last_of(index: usize) -> u64 {
    let index = index as u64;
    let shift = (index / SUB_BUCKETS).saturating_sub(1);
    let first_of_next = u128::from(index - shift * SUB_BUCKETS + 1) << shift;
    u64::try_from(first_of_next - 1).unwrap_or(u64::MAX)
}

/// A bucket of a histogram that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The largest value it counts. It begins where the one before it ends.
    pub last: u64,
    /// How many values it has counted.
    pub count: u64,
}

/// A histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// The buckets that are not empty, from the smallest values on.
    pub buckets: Vec<Bucket>,
    /// The sum of all values (wrapping).
    pub sum: u64,
    /// The largest value, exactly; 0 if there is none.
    pub max: u64,
}

impl HistogramSnapshot {
    /// How many values were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.count).sum()
    }

    /// The value below or at which `per_mille` thousandths of all values are: at most 12.5 % too
    /// large, never too small. `None` if there are no values.
    pub fn quantile(&self, per_mille: u64) -> Option<u64> {
        let rank = u128::from(self.count()) * u128::from(per_mille);
        let mut seen = 0_u128;
        let bucket = self.buckets.iter().find(|bucket| {
            seen += u128::from(bucket.count);
            seen * 1000 >= rank
        })?;
        Some(bucket.last.min(self.max))
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
    /// Service times of requests: from the moment their batch was taken from the queue to the one
    /// before their completion was made visible to the driver.
    pub service_time_ns: Histogram,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn recorded(values: impl IntoIterator<Item = u64>) -> HistogramSnapshot {
        let histogram = Histogram::default();
        values.into_iter().for_each(|value| histogram.record(value));
        histogram.snapshot()
    }

    #[test]
    fn buckets_follow_each_other_without_gap_up_to_the_largest_value() {
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(last_of(BUCKETS - 1), u64::MAX);
        for index in 0..BUCKETS - 1 {
            assert_eq!(bucket_of(last_of(index)), index);
            assert_eq!(bucket_of(last_of(index) + 1), index + 1);
        }
    }

    #[test]
    fn small_values_are_exact() {
        for value in 0..16 {
            assert_eq!(recorded([value]).buckets, [Bucket { last: value, count: 1 }]);
        }
    }

    #[test]
    fn no_value_has_no_quantile() {
        assert_eq!(recorded([]), HistogramSnapshot::default());
        assert_eq!(recorded([]).quantile(500), None);
    }

    #[test]
    fn quantiles_of_a_known_distribution() {
        let snapshot = recorded((1..=1000).map(|n| n * 1000));
        assert_eq!((snapshot.count(), snapshot.sum), (1000, 500_500_000));
        assert_eq!(snapshot.max, 1_000_000);
        assert_eq!(snapshot.quantile(1000), Some(1_000_000), "the largest is exact");
        for (per_mille, exact) in [(500, 500_000), (990, 990_000), (999, 999_000)] {
            let told = snapshot.quantile(per_mille).unwrap();
            assert!((exact..=exact + exact / 8).contains(&told), "{per_mille}: {told}");
        }
    }

    #[test]
    fn one_slow_request_of_a_thousand_shows_only_beyond_the_999th() {
        let snapshot = recorded((0..999).map(|_| 1000).chain([1_000_000]));
        assert!(snapshot.quantile(999).unwrap() < 1125);
        assert_eq!(snapshot.quantile(1000), Some(1_000_000));
    }

    #[test]
    fn the_counters_of_two_queues_share_no_cache_line() {
        assert_eq!(align_of::<QueueCounters>(), 128);
        assert_eq!(size_of::<QueueCounters>() % 128, 0);
    }

    proptest! {
        #[test]
        fn a_bucket_tells_its_values_with_an_eighth_of_error(value: u64, shift in 0..64_u32) {
            let value = value >> shift;
            let last = last_of(bucket_of(value));
            prop_assert!(last >= value && last - value <= value / 8, "{} for {}", last, value);
        }
    }
}
