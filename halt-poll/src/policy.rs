//! How long to poll: KVM's adaptive window, as in Linux since 6.11 (`virt/kvm/kvm_main.c`,
//! `kvm_vcpu_halt`, `grow_halt_poll_ns` and `shrink_halt_poll_ns`).

use crate::Outcome;

/// The four parameters of KVM's halt polling, with their names and 32-bit unsigned range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// `halt_poll_ns`, or what `KVM_CAP_HALT_POLL` put in its place for one VM: the longest a halt
    /// may poll, in nanoseconds. 0 switches polling off.
    pub max_ns: u32,
    /// `halt_poll_ns_grow`: the factor by which a window grows. 0 never grows, and so never polls
    /// unless the window was above 0 when the parameter changed.
    pub grow: u32,
    /// `halt_poll_ns_grow_start`: the least a window that grew can be, and the least a window that
    /// shrank can be without becoming 0, in nanoseconds.
    pub grow_start_ns: u32,
    /// `halt_poll_ns_shrink`: the divisor by which a window shrinks. 0 makes it 0 at once.
    pub shrink: u32,
}

impl Default for Params {
    /// Linux's defaults on x86 since 6.11. Before that, `shrink` was 0.
    fn default() -> Self {
        Params { max_ns: 200_000, grow: 2, grow_start_ns: 10_000, shrink: 2 }
    }
}

/// The poll window of one vCPU or one I/O worker, and the rule that adapts it.
///
/// A halt is: take [`window_ns`](Policy::window_ns), poll at most that long, sleep if nothing
/// came, and tell [`update`](Policy::update) what happened.
#[derive(Debug, Clone)]
pub struct Policy {
    params: Params,
    window_ns: u32,
    poll_allowed: bool,
}

impl Policy {
    /// A policy whose first halt does not poll: the window starts at 0, as a new vCPU's.
    pub fn new(params: Params) -> Self {
        Policy { params, window_ns: 0, poll_allowed: true }
    }

    /// How long the halt that begins now may poll, in nanoseconds.
    ///
    /// Cuts the window to the maximum of the moment, for good: growing does not look at the
    /// maximum, and the maximum may have been lowered. 0 while polling is not allowed.
    pub fn window_ns(&mut self) -> u64 {
        self.window_ns = self.window_ns.min(self.params.max_ns);
        if self.poll_allowed { u64::from(self.window_ns) } else { 0 }
    }

    /// The window as the last halt left it, in nanoseconds: what the tracepoint
    /// `kvm:kvm_halt_poll_ns` shows. Not yet cut, so it may be above the maximum.
    pub fn uncut_window_ns(&self) -> u64 {
        u64::from(self.window_ns)
    }

    /// The parameters in force.
    pub fn params(&self) -> Params {
        self.params
    }

    /// Changes the parameters, at any time: the window stays, the next [`update`](Policy::update)
    /// goes by the new values, and the next halt's window is cut to the new maximum. A change
    /// during a halt leaves the window that halt began with, as in KVM.
    pub fn set_params(&mut self, params: Params) {
        self.params = params;
    }

    /// Whether halts may poll. A guest that polls by itself forbids it by clearing bit 0 of
    /// `MSR_KVM_POLL_CONTROL` (0x4b564d05). While forbidden the window is kept, but
    /// [`window_ns`](Policy::window_ns) is 0 and [`update`](Policy::update) does nothing.
    pub fn set_poll_allowed(&mut self, allowed: bool) {
        self.poll_allowed = allowed;
    }

    /// Whether halts may poll: see [`set_poll_allowed`](Policy::set_poll_allowed).
    pub fn poll_allowed(&self) -> bool {
        self.poll_allowed
    }

    /// Adapts the window to a halt that has just ended.
    ///
    /// * An invalid wake shrinks the window, whatever the maximum.
    /// * A maximum of 0 makes it 0.
    /// * A halt no longer than the window leaves it: the window was right.
    /// * A halt longer than the maximum shrinks it, since no allowed window would have covered it.
    /// * A halt longer than the window and shorter than the maximum grows it.
    ///
    /// A halt of exactly the maximum neither grows nor shrinks the window.
    pub fn update(&mut self, outcome: &Outcome) {
        if !self.poll_allowed {
            return;
        }
        let halt_ns = outcome.halt_ns();
        let max_ns = u64::from(self.params.max_ns);
        if !outcome.valid {
            self.shrink();
        } else if max_ns == 0 {
            self.window_ns = 0;
        } else if halt_ns <= u64::from(self.window_ns) {
            // The window covered the halt.
        } else if halt_ns > max_ns {
            self.shrink();
        } else if halt_ns < max_ns {
            // The window is shorter than the halt, so it is below the maximum too.
            self.grow();
        }
    }

    /// The product wraps at 32 bits, as KVM's does; with a maximum below 2³¹ ns and a factor of 2
    /// it never gets there.
    fn grow(&mut self) {
        if self.params.grow != 0 {
            let grown_ns = self.window_ns.wrapping_mul(self.params.grow);
            self.window_ns = grown_ns.max(self.params.grow_start_ns);
        }
    }

    fn shrink(&mut self) {
        let shrunk_ns = self.window_ns.checked_div(self.params.shrink).unwrap_or(0);
        self.window_ns = if shrunk_ns < self.params.grow_start_ns { 0 } else { shrunk_ns };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WakeReason;
    use proptest::prelude::*;

    const MAX_NS: u32 = 200_000;

    fn halt(halt_ns: u64) -> Outcome {
        Outcome {
            polled_ns: Some(0),
            blocked_ns: Some(halt_ns),
            wake: WakeReason::Event,
            valid: true,
        }
    }

    fn invalid(halt_ns: u64) -> Outcome {
        Outcome { valid: false, ..halt(halt_ns) }
    }

    fn policy(window_ns: u32, params: Params) -> Policy {
        Policy { params, window_ns, poll_allowed: true }
    }

    /// The window after one halt that began with `window_ns`, not yet cut.
    fn after(window_ns: u32, params: Params, outcome: Outcome) -> u64 {
        let mut policy = policy(window_ns, params);
        policy.window_ns();
        policy.update(&outcome);
        policy.uncut_window_ns()
    }

    #[test]
    fn the_defaults_are_those_of_linux_since_6_11() {
        let expected = Params { max_ns: 200_000, grow: 2, grow_start_ns: 10_000, shrink: 2 };
        assert_eq!(Params::default(), expected);
        assert_eq!(Policy::new(Params::default()).window_ns(), 0);
    }

    #[test]
    fn short_halts_grow_the_window_from_grow_start_by_the_factor() {
        let mut policy = Policy::new(Params::default());
        let mut seen = Vec::new();
        for _ in 0..7 {
            policy.window_ns();
            policy.update(&halt(190_000));
            seen.push(policy.uncut_window_ns());
        }
        // 320000 is above the maximum; it is cut to 200000 before the next halt, which it covers.
        assert_eq!(seen, [10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 200_000]);
    }

    #[test]
    fn a_halt_no_longer_than_the_window_leaves_it() {
        let params = Params::default();
        assert_eq!(after(20_000, params, halt(0)), 20_000);
        assert_eq!(after(20_000, params, halt(20_000)), 20_000);
        assert_eq!(after(20_000, params, halt(20_001)), 40_000);
    }

    #[test]
    fn the_duration_that_counts_is_polling_and_blocking_together() {
        let outcome = Outcome {
            polled_ns: Some(20_000),
            blocked_ns: Some(MAX_NS as u64 - 19_999),
            wake: WakeReason::Event,
            valid: true,
        };
        assert_eq!(outcome.halt_ns(), MAX_NS as u64 + 1);
        assert_eq!(after(20_000, Params::default(), outcome), 10_000);
    }

    #[test]
    fn a_halt_of_exactly_the_maximum_neither_grows_nor_shrinks() {
        for window_ns in [0, 10_000, 160_000] {
            assert_eq!(after(window_ns, Params::default(), halt(MAX_NS.into())), window_ns.into());
        }
    }

    #[test]
    fn a_window_of_zero_stays_zero_after_a_halt_longer_than_the_maximum() {
        assert_eq!(after(0, Params::default(), halt(MAX_NS as u64 + 1)), 0);
    }

    #[test]
    fn long_halts_halve_the_window_down_to_grow_start_and_then_to_zero() {
        let mut policy = policy(MAX_NS, Params::default());
        let mut seen = Vec::new();
        for _ in 0..6 {
            policy.window_ns();
            policy.update(&halt(1_000_000));
            seen.push(policy.uncut_window_ns());
        }
        assert_eq!(seen, [100_000, 50_000, 25_000, 12_500, 0, 0]);
    }

    #[test]
    fn a_window_shrunk_to_exactly_grow_start_survives() {
        assert_eq!(after(20_000, Params::default(), halt(1_000_000)), 10_000);
        assert_eq!(after(19_999, Params::default(), halt(1_000_000)), 0);
    }

    #[test]
    fn shrink_0_makes_the_window_zero_and_shrink_1_leaves_it() {
        let zero = Params { shrink: 0, ..Params::default() };
        assert_eq!(after(MAX_NS, zero, halt(1_000_000)), 0);
        let one = Params { shrink: 1, ..Params::default() };
        assert_eq!(after(MAX_NS, one, halt(1_000_000)), MAX_NS.into());
    }

    #[test]
    fn grow_0_leaves_the_window() {
        let params = Params { grow: 0, ..Params::default() };
        assert_eq!(after(0, params, halt(50_000)), 0);
        assert_eq!(after(40_000, params, halt(50_000)), 40_000);
    }

    #[test]
    fn grow_1_stays_at_grow_start() {
        let params = Params { grow: 1, ..Params::default() };
        assert_eq!(after(0, params, halt(50_000)), 10_000);
        assert_eq!(after(10_000, params, halt(50_000)), 10_000);
    }

    #[test]
    fn an_invalid_wake_shrinks_however_short_the_halt_and_whatever_the_maximum() {
        assert_eq!(after(40_000, Params::default(), invalid(1)), 20_000);
        // The maximum became 0 during the halt: an invalid wake still divides.
        let mut policy = policy(40_000, Params::default());
        policy.window_ns();
        policy.set_params(Params { max_ns: 0, ..Params::default() });
        policy.update(&invalid(1));
        assert_eq!(policy.uncut_window_ns(), 20_000);
        assert_eq!(policy.window_ns(), 0);
    }

    #[test]
    fn a_maximum_of_zero_ends_polling() {
        let mut policy = policy(40_000, Params { max_ns: 0, ..Params::default() });
        policy.update(&halt(1));
        assert_eq!(policy.uncut_window_ns(), 0);
        assert_eq!(policy.window_ns(), 0);
    }

    #[test]
    fn the_window_is_cut_for_good_before_a_halt_and_not_after_it() {
        let mut policy = policy(160_000, Params::default());
        policy.update(&halt(170_000));
        assert_eq!(policy.uncut_window_ns(), 320_000);
        policy.set_params(Params { max_ns: 50_000, ..Params::default() });
        assert_eq!(policy.window_ns(), 50_000);
        policy.set_params(Params::default());
        assert_eq!(policy.window_ns(), 50_000);
    }

    #[test]
    fn a_maximum_lowered_during_a_halt_does_not_cut_the_window_that_halt_began_with() {
        let mut policy = policy(160_000, Params::default());
        assert_eq!(policy.window_ns(), 160_000);
        policy.set_params(Params { max_ns: 50_000, ..Params::default() });
        // Longer than the new maximum, yet covered by the window: left alone.
        policy.update(&halt(100_000));
        assert_eq!(policy.uncut_window_ns(), 160_000);
    }

    #[test]
    fn a_grow_start_above_the_maximum_polls_for_the_maximum() {
        let params = Params { max_ns: 5_000, ..Params::default() };
        let mut policy = Policy::new(params);
        policy.update(&halt(4_000));
        assert_eq!(policy.uncut_window_ns(), 10_000);
        assert_eq!(policy.window_ns(), 5_000);
        // And one halt too long ends it, since half of it is below grow_start.
        policy.update(&halt(5_001));
        assert_eq!(policy.window_ns(), 0);
    }

    #[test]
    fn growth_wraps_at_32_bits_as_in_kvm() {
        let params = Params { max_ns: u32::MAX, ..Params::default() };
        assert_eq!(after(0x8000_1000, params, halt(0xffff_0000)), 0x2710);
        assert_eq!(after(0x8001_0000, params, halt(0xffff_0000)), 0x2_0000);
    }

    #[test]
    fn where_polling_is_forbidden_the_window_is_cut_and_kept_but_not_used() {
        let mut policy = policy(160_000, Params::default());
        policy.set_poll_allowed(false);
        assert_eq!(policy.window_ns(), 0);
        policy.update(&halt(170_000));
        policy.update(&invalid(1));
        assert_eq!(policy.uncut_window_ns(), 160_000);
        policy.set_params(Params { max_ns: 100_000, ..Params::default() });
        assert_eq!(policy.window_ns(), 0);
        assert_eq!(policy.uncut_window_ns(), 100_000);
        policy.set_poll_allowed(true);
        assert_eq!(policy.window_ns(), 100_000);
    }

    prop_compose! {
        fn any_params()(
            max_ns in prop_oneof![Just(0), 1..1_000_000u32, any::<u32>()],
            grow in prop_oneof![0..5u32, any::<u32>()],
            grow_start_ns in prop_oneof![0..50_000u32, any::<u32>()],
            shrink in prop_oneof![0..5u32, any::<u32>()],
        ) -> Params {
            Params { max_ns, grow, grow_start_ns, shrink }
        }
    }

    prop_compose! {
        fn any_halt()(
            polled_ns in prop::option::of(0..1_000_000u64),
            blocked_ns in prop::option::of(prop_oneof![0..1_000_000u64, any::<u64>()]),
            valid in prop::bool::weighted(0.9),
        ) -> Outcome {
            Outcome { polled_ns, blocked_ns, wake: WakeReason::Event, valid }
        }
    }

    /// The window after `update`, by KVM's conditions one by one, including those that
    /// [`Policy::update`] leaves out because they follow from the others.
    fn by_kvms_conditions(window_ns: u32, params: Params, outcome: &Outcome) -> u32 {
        let (window, max) = (u64::from(window_ns), u64::from(params.max_ns));
        let halt_ns = outcome.halt_ns();
        let grown_ns = (window * u64::from(params.grow) % (1 << 32)) as u32;
        let shrunk_ns = window_ns.checked_div(params.shrink).unwrap_or(0);
        let shrunk_ns = if shrunk_ns < params.grow_start_ns { 0 } else { shrunk_ns };
        match (outcome.valid, max) {
            (false, _) => shrunk_ns,
            (true, 0) => 0,
            _ if halt_ns <= window => window_ns,
            _ if window > 0 && halt_ns > max => shrunk_ns,
            _ if window < max && halt_ns < max && params.grow > 0 => {
                grown_ns.max(params.grow_start_ns)
            }
            _ => window_ns,
        }
    }

    proptest! {
        #[test]
        fn an_update_meets_kvms_conditions_one_by_one(
            window_ns in prop_oneof![Just(0), 0..1_000_000u32, any::<u32>()],
            params in any_params(),
            outcome in any_halt(),
        ) {
            let mut policy = policy(window_ns, params);
            policy.update(&outcome);
            let expected_ns = by_kvms_conditions(window_ns, params, &outcome);
            prop_assert_eq!(policy.uncut_window_ns(), u64::from(expected_ns));
        }

        #[test]
        fn no_halt_ever_polls_longer_than_the_maximum(
            halts in prop::collection::vec((any_params(), any_halt()), 1..50),
        ) {
            let mut policy = Policy::new(Params::default());
            for (params, outcome) in halts {
                policy.set_params(params);
                prop_assert!(policy.window_ns() <= params.max_ns.into());
                policy.update(&outcome);
            }
        }

        #[test]
        fn shrinking_never_leaves_a_window_between_zero_and_grow_start(
            window_ns: u32, params in any_params(),
        ) {
            let mut policy = policy(window_ns, params);
            policy.update(&invalid(0));
            let shrunk_ns = policy.uncut_window_ns();
            prop_assert!(shrunk_ns == 0 || shrunk_ns >= params.grow_start_ns.into());
            prop_assert!(shrunk_ns <= window_ns.into());
        }

        #[test]
        fn growth_is_monotone(
            a in 0..1_000_000u32, b in 0..1_000_000u32, grow in 1..1000u32,
            grow_start_ns in 0..1_000_000u32,
        ) {
            let params = Params { max_ns: u32::MAX, grow, grow_start_ns, shrink: 2 };
            let (low, high) = (a.min(b), a.max(b));
            let grown = |window_ns| after(window_ns, params, halt(2_000_000));
            prop_assert!(grown(low) <= grown(high));
            prop_assert!(grown(low) >= u64::from(low));
        }

        #[test]
        fn halts_of_one_duration_below_the_maximum_are_soon_covered(
            halt_ns in 1..200_000u64, window_ns in 0..400_000u32,
        ) {
            let mut policy = policy(window_ns, Params::default());
            for _ in 0..6 {
                policy.window_ns();
                policy.update(&halt(halt_ns));
            }
            prop_assert!(policy.window_ns() >= halt_ns);
        }
    }
}
