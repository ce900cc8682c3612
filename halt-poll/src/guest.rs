//! The guest's side: how Linux's `haltpoll` cpuidle governor adapts the time a CPU polls before it
//! halts (`drivers/cpuidle/governors/haltpoll.c`).
//!
//! It differs from the host's policy in more than its parameters: it goes by the time the CPU was
//! halted after polling, not by both; it leaves the window when that is longer than the maximum
//! and shrinking is not allowed; it cuts the window only when growing it; and a growth factor of 0
//! sets the window to where growth starts.

/// The governor's parameters, with their names, units and defaults since Linux 5.4. A window that
/// shrinks below `guest_halt_poll_grow_start` becomes 0, as since Linux 6.9.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// The longest a CPU polls before it halts, in nanoseconds.
    pub guest_halt_poll_ns: u32,
    /// The factor by which the window grows.
    pub guest_halt_poll_grow: u32,
    /// The least a window that grew can be, in nanoseconds.
    pub guest_halt_poll_grow_start: u32,
    /// The divisor by which the window shrinks; 0 makes it 0 at once.
    pub guest_halt_poll_shrink: u32,
    /// Whether the window may shrink.
    pub guest_halt_poll_allow_shrink: bool,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            guest_halt_poll_ns: 200_000,
            guest_halt_poll_grow: 2,
            guest_halt_poll_grow_start: 50_000,
            guest_halt_poll_shrink: 2,
            guest_halt_poll_allow_shrink: true,
        }
    }
}

/// The parameters of the governor as first proposed in June 2019, which measured in whole
/// microseconds and let a window shrink by division to any value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicrosecondsOf2019 {
    /// The longest a CPU polls before it halts, in microseconds.
    pub guest_halt_poll_us: u32,
    /// The factor by which the window grows.
    pub guest_halt_poll_grow: u32,
    /// The least a window that grew can be, in microseconds.
    pub guest_halt_poll_grow_start: u32,
    /// The divisor by which the window shrinks; 0 makes it 0 at once.
    pub guest_halt_poll_shrink: u32,
    /// Whether the window may shrink.
    pub guest_halt_poll_allow_shrink: bool,
}

impl Default for MicrosecondsOf2019 {
    fn default() -> Self {
        MicrosecondsOf2019 {
            guest_halt_poll_us: 200,
            guest_halt_poll_grow: 2,
            guest_halt_poll_grow_start: 50,
            guest_halt_poll_shrink: 2,
            guest_halt_poll_allow_shrink: true,
        }
    }
}

/// What a [`Governor`] goes by: made from [`Params`] or [`MicrosecondsOf2019`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Of `max` and `grow_start`, in nanoseconds.
    unit_ns: u32,
    max: u32,
    grow: u32,
    grow_start: u32,
    shrink: u32,
    allow_shrink: bool,
    /// Whether a window that shrank below `grow_start` becomes 0.
    shrink_to_zero: bool,
}

impl From<Params> for Rules {
    fn from(params: Params) -> Self {
        Rules {
            unit_ns: 1,
            max: params.guest_halt_poll_ns,
            grow: params.guest_halt_poll_grow,
            grow_start: params.guest_halt_poll_grow_start,
            shrink: params.guest_halt_poll_shrink,
            allow_shrink: params.guest_halt_poll_allow_shrink,
            shrink_to_zero: true,
        }
    }
}

impl From<MicrosecondsOf2019> for Rules {
    fn from(params: MicrosecondsOf2019) -> Self {
        Rules {
            unit_ns: 1_000,
            max: params.guest_halt_poll_us,
            grow: params.guest_halt_poll_grow,
            grow_start: params.guest_halt_poll_grow_start,
            shrink: params.guest_halt_poll_shrink,
            allow_shrink: params.guest_halt_poll_allow_shrink,
            shrink_to_zero: false,
        }
    }
}

/// The two idle states of the haltpoll driver: what an idle CPU does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleState {
    /// State 0: poll for [`Governor::poll_limit_ns`], with the tick running.
    Poll,
    /// State 1: HLT.
    Halt,
}

/// What an idle state came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idled {
    /// The CPU polled.
    Polled {
        /// Whether the limit passed with nothing to do (`poll_time_limit`).
        timed_out: bool,
    },
    /// The CPU halted.
    Halted {
        /// For how long, in nanoseconds (`last_residency_ns`).
        residency_ns: u64,
    },
}

/// The governor of one CPU.
#[derive(Debug, Clone)]
pub struct Governor {
    rules: Rules,
    poll_limit_ns: u64,
    last: Idled,
}

impl Governor {
    /// A governor whose window is 0, as when a CPU's cpuidle device is enabled.
    pub fn new(params: impl Into<Rules>) -> Self {
        let last = Idled::Polled { timed_out: false };
        Governor { rules: params.into(), poll_limit_ns: 0, last }
    }

    /// Changes the parameters; the window stays, even above a lowered maximum.
    pub fn set_params(&mut self, params: impl Into<Rules>) {
        self.rules = params.into();
    }

    /// The poll window now, in nanoseconds.
    pub fn poll_limit_ns(&self) -> u64 {
        self.poll_limit_ns
    }

    /// The state an idle CPU enters next (`haltpoll_select`). `latency_limit_ns` is the longest
    /// the CPU may take to wake, `u64::MAX` if nobody set one; 0 forbids halting.
    ///
    /// A CPU polls first, unless its window is 0; when the poll timed out, it halts.
    pub fn select(&self, latency_limit_ns: u64) -> IdleState {
        if latency_limit_ns == 0 {
            IdleState::Poll
        } else if self.poll_limit_ns == 0 || self.last == (Idled::Polled { timed_out: true }) {
            IdleState::Halt
        } else {
            IdleState::Poll
        }
    }

    /// Takes note of what the CPU did (`haltpoll_reflect`). Only a halt adapts the window.
    pub fn reflect(&mut self, idled: Idled) {
        self.last = idled;
        if let Idled::Halted { residency_ns } = idled {
            self.adjust_poll_limit(residency_ns);
        }
    }

    /// In the rules' unit, in which residencies are rounded down. Products are cut to 32 bits, as
    /// the kernel's are.
    fn adjust_poll_limit(&mut self, residency_ns: u64) {
        let rules = &self.rules;
        let unit_ns = u64::from(rules.unit_ns);
        let (block, limit) = (residency_ns / unit_ns, self.poll_limit_ns / unit_ns);
        let max = u64::from(rules.max);
        let adjusted = if block > limit && block <= max {
            let grown = limit.wrapping_mul(u64::from(rules.grow)) as u32;
            grown.max(rules.grow_start).min(rules.max)
        } else if block > max && rules.allow_shrink {
            let shrunk = (limit as u32).checked_div(rules.shrink).unwrap_or(0);
            if rules.shrink_to_zero && shrunk < rules.grow_start { 0 } else { shrunk }
        } else {
            return;
        };
        self.poll_limit_ns = u64::from(adjusted) * unit_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NO_LIMIT: u64 = u64::MAX;

    fn halt(governor: &mut Governor, residency_ns: u64) -> u64 {
        governor.reflect(Idled::Halted { residency_ns });
        governor.poll_limit_ns()
    }

    fn halts<const N: usize>(governor: &mut Governor, residency_ns: u64) -> [u64; N] {
        std::array::from_fn(|_| halt(governor, residency_ns))
    }

    /// A governor with a window as given.
    fn governor(poll_limit_ns: u64, params: impl Into<Rules>) -> Governor {
        Governor { poll_limit_ns, ..Governor::new(params) }
    }

    #[test]
    fn halts_up_to_the_maximum_grow_the_window_from_grow_start_and_it_is_cut() {
        let mut governor = Governor::new(Params::default());
        let grown = halts(&mut governor, 200_000);
        assert_eq!(grown, [50_000, 100_000, 200_000, 200_000]);
        let params = Params { guest_halt_poll_ns: 150_000, ..Params::default() };
        assert_eq!(halt(&mut self::governor(100_000, params), 120_000), 150_000);
    }

    #[test]
    fn a_halt_no_longer_than_the_window_leaves_it() {
        let mut governor = governor(100_000, Params::default());
        assert_eq!(halt(&mut governor, 0), 100_000);
        assert_eq!(halt(&mut governor, 100_000), 100_000);
        assert_eq!(halt(&mut governor, 100_001), 200_000);
    }

    #[test]
    fn halts_longer_than_the_maximum_shrink_the_window_and_below_grow_start_it_is_zero() {
        let mut governor = governor(200_000, Params::default());
        assert_eq!(halt(&mut governor, 200_000), 200_000);
        assert_eq!(halts(&mut governor, 200_001), [100_000, 50_000, 0, 0]);
    }

    #[test]
    fn a_divisor_of_zero_makes_the_window_zero() {
        let params = Params { guest_halt_poll_shrink: 0, ..Params::default() };
        assert_eq!(halt(&mut governor(200_000, params), 200_001), 0);
    }

    #[test]
    fn a_window_that_may_not_shrink_stays_even_above_a_lowered_maximum() {
        let params = Params { guest_halt_poll_allow_shrink: false, ..Params::default() };
        let mut governor = governor(200_000, params);
        assert_eq!(halt(&mut governor, 1_000_000), 200_000);
        governor.set_params(Params { guest_halt_poll_ns: 0, ..params });
        assert_eq!(halt(&mut governor, 1_000_000), 200_000);
    }

    #[test]
    fn a_growth_factor_of_zero_sets_the_window_to_grow_start() {
        let params = Params { guest_halt_poll_grow: 0, ..Params::default() };
        let mut governor = governor(100_000, params);
        assert_eq!(halt(&mut governor, 150_000), 50_000);
    }

    #[test]
    fn a_grow_start_above_the_maximum_is_cut_to_it() {
        let params = Params { guest_halt_poll_ns: 20_000, ..Params::default() };
        let mut governor = Governor::new(params);
        assert_eq!(halt(&mut governor, 15_000), 20_000);
        assert_eq!(halt(&mut governor, 20_001), 0);
    }

    #[test]
    fn growth_is_cut_to_32_bits_as_in_the_kernel() {
        let params = Params { guest_halt_poll_ns: u32::MAX, ..Params::default() };
        assert_eq!(halt(&mut governor(0x8000_1000, params), 0xffff_0000), 50_000);
        assert_eq!(halt(&mut governor(0x8001_0000, params), 0xffff_0000), 0x2_0000);
    }

    #[test]
    fn in_2019_time_was_counted_in_whole_microseconds() {
        let mut governor = Governor::new(MicrosecondsOf2019::default());
        // 999 ns are 0 µs, no longer than the window of 0.
        assert_eq!(halt(&mut governor, 999), 0);
        assert_eq!(halt(&mut governor, 1_000), 50_000);
        // 50999 ns are 50 µs, as long as the window; 200999 ns are 200 µs, the maximum.
        assert_eq!(halt(&mut governor, 50_999), 50_000);
        assert_eq!(halt(&mut governor, 200_999), 100_000);
        assert_eq!(halt(&mut governor, 200_999), 200_000);
        assert_eq!(halt(&mut governor, 201_000), 100_000);
    }

    #[test]
    fn in_2019_a_window_shrank_below_grow_start_by_division() {
        let mut governor = governor(100_000, MicrosecondsOf2019::default());
        let shrunk = halts(&mut governor, 1_000_000);
        assert_eq!(shrunk, [50_000, 25_000, 12_000, 6_000, 3_000, 1_000, 0]);
    }

    #[test]
    fn a_cpu_with_a_window_polls_first_and_halts_when_the_poll_times_out() {
        let mut governor = Governor::new(Params::default());
        assert_eq!(governor.select(NO_LIMIT), IdleState::Halt);
        governor.reflect(Idled::Halted { residency_ns: 60_000 });
        assert_eq!(governor.select(NO_LIMIT), IdleState::Poll);
        governor.reflect(Idled::Polled { timed_out: false });
        assert_eq!(governor.select(NO_LIMIT), IdleState::Poll);
        governor.reflect(Idled::Polled { timed_out: true });
        assert_eq!(governor.select(NO_LIMIT), IdleState::Halt);
        governor.reflect(Idled::Halted { residency_ns: 10_000 });
        assert_eq!(governor.select(NO_LIMIT), IdleState::Poll);
    }

    #[test]
    fn a_cpu_that_may_take_no_time_to_wake_always_polls() {
        let mut governor = Governor::new(Params::default());
        governor.reflect(Idled::Polled { timed_out: true });
        assert_eq!(governor.select(0), IdleState::Poll);
        assert_eq!(governor.select(1), IdleState::Halt);
    }

    #[test]
    fn polling_does_not_adapt_the_window() {
        let mut governor = governor(100_000, Params::default());
        governor.reflect(Idled::Polled { timed_out: true });
        governor.reflect(Idled::Polled { timed_out: false });
        assert_eq!(governor.poll_limit_ns(), 100_000);
    }

    prop_compose! {
        fn any_params()(
            guest_halt_poll_ns in prop_oneof![0..1_000_000u32, any::<u32>()],
            guest_halt_poll_grow in prop_oneof![0..5u32, any::<u32>()],
            guest_halt_poll_grow_start in prop_oneof![0..100_000u32, any::<u32>()],
            guest_halt_poll_shrink in 0..5u32,
            guest_halt_poll_allow_shrink: bool,
        ) -> Params {
            Params {
                guest_halt_poll_ns,
                guest_halt_poll_grow,
                guest_halt_poll_grow_start,
                guest_halt_poll_shrink,
                guest_halt_poll_allow_shrink,
            }
        }
    }

    proptest! {
        #[test]
        fn the_window_is_never_above_the_maximum_while_that_stays(
            params in any_params(), residencies in prop::collection::vec(0..2_000_000u64, 1..50),
        ) {
            let mut governor = Governor::new(params);
            for residency_ns in residencies {
                let window_ns = halt(&mut governor, residency_ns);
                prop_assert!(window_ns <= params.guest_halt_poll_ns.into());
            }
        }

        #[test]
        fn the_window_of_2019_is_whole_microseconds_and_never_above_the_maximum(
            guest_halt_poll_us in 0..1_000u32,
            residencies in prop::collection::vec(0..2_000_000u64, 1..50),
        ) {
            let params = MicrosecondsOf2019 { guest_halt_poll_us, ..Default::default() };
            let mut governor = Governor::new(params);
            for residency_ns in residencies {
                let window_ns = halt(&mut governor, residency_ns);
                prop_assert_eq!(window_ns % 1_000, 0);
                prop_assert!(window_ns <= u64::from(guest_halt_poll_us) * 1_000);
            }
        }

        #[test]
        fn a_growing_window_never_becomes_smaller_unless_the_factor_is_zero(
            window_ns in 0..200_000u64, residency_ns in 0..=200_000u64, grow in 1..1_000u32,
        ) {
            let params = Params { guest_halt_poll_grow: grow, ..Params::default() };
            prop_assert!(halt(&mut governor(window_ns, params), residency_ns) >= window_ns);
        }

        #[test]
        fn a_window_is_zero_or_at_least_grow_start_or_cut_to_the_maximum(
            params in any_params(), residencies in prop::collection::vec(0..2_000_000u64, 1..50),
        ) {
            let mut governor = Governor::new(params);
            let least = params.guest_halt_poll_grow_start.min(params.guest_halt_poll_ns);
            for residency_ns in residencies {
                let window_ns = halt(&mut governor, residency_ns);
                prop_assert!(window_ns == 0 || window_ns >= least.into());
            }
        }
    }
}
