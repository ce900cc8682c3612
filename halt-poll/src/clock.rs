//! The time, as the poller sees it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A clock that never goes back. The poller reads it once per turn of its loop.
pub trait Clock {
    /// Nanoseconds since a moment fixed for this clock.
    fn now_ns(&self) -> u64;
}

/// The system's monotonic clock, counted from the making of this value. Copies share that origin;
/// two values made apart do not, so a deadline belongs to the clock it was taken from.
#[derive(Debug, Clone, Copy)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// A clock that begins at 0 now.
    pub fn new() -> Self {
        MonotonicClock { origin: Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    #[inline]
    fn now_ns(&self) -> u64 {
        // 64 bits of nanoseconds last 584 years.
        self.origin.elapsed().as_nanos() as u64
    }
}

/// A clock for tests: it moves when told to, and by a fixed step with every reading, so that a
/// loop that reads it comes to its end.
#[derive(Debug)]
pub struct FakeClock {
    now_ns: AtomicU64,
    step_ns: u64,
}

impl FakeClock {
    /// A clock at 0 that moves on by `step_ns` after each reading.
    pub fn new(step_ns: u64) -> Self {
        FakeClock { now_ns: AtomicU64::new(0), step_ns }
    }

    /// Moves the clock on by `ns`.
    pub fn advance_ns(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// What the next reading will be; does not move the clock.
    pub fn peek_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }
}

impl Clock for FakeClock {
    fn now_ns(&self) -> u64 {
        self.now_ns.fetch_add(self.step_ns, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monotonic_clock_never_goes_back_and_copies_share_its_origin() {
        let clock = MonotonicClock::new();
        let copy = clock;
        let mut last_ns = 0;
        for _ in 0..1000 {
            let (a_ns, b_ns) = (clock.now_ns(), copy.now_ns());
            assert!(last_ns <= a_ns && a_ns <= b_ns);
            last_ns = b_ns;
        }
    }

    #[test]
    fn the_fake_clock_moves_by_its_step_and_when_told() {
        let clock = FakeClock::new(10);
        assert_eq!([clock.now_ns(), clock.now_ns()], [0, 10]);
        clock.advance_ns(100);
        assert_eq!([clock.peek_ns(), clock.peek_ns(), clock.now_ns()], [120, 120, 120]);
    }
}
