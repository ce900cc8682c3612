//! What recorded halts would have cost with other parameters: this crate's own policies of both sides,
//! run over a [`Recording`].
//!
//! What is assumed: a CPU is idle for as long as it was when it was recorded, whatever polls. That holds
//! where idle time is the wait for a device or a timer, and the guest has no more to do because it is
//! served faster. It does not hold where the poller takes the host CPU from who is to wake it.

use std::ops::AddAssign;

use crate::guest::{Governor, IdleState, Idled};
use crate::recording::{Halt, Header, Recording, Source};
use crate::{Outcome, Params, Policy, WakeReason, guest};

/// What one vCPU's idle times, or all of them, would come to. The names that [`StatsSnapshot`] has as
/// well mean the same.
///
/// [`StatsSnapshot`]: crate::StatsSnapshot
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Times that a CPU had nothing to do: the recorded halts.
    pub idles: u64,
    /// Of these, the ones for which the guest polled.
    pub guest_attempted_poll: u64,
    /// Of those, the ones that ended while the guest polled, and did not become a halt.
    pub guest_successful_poll: u64,
    /// Time that the guest polled in these, in nanoseconds.
    pub guest_poll_success_ns: u64,
    /// Time that it polled in vain, in nanoseconds.
    pub guest_poll_fail_ns: u64,
    /// Halts, which the host sees.
    pub halts: u64,
    /// Halts that the host polled for.
    pub halt_attempted_poll: u64,
    /// Of those, the ones that did not have to sleep.
    pub halt_successful_poll: u64,
    /// Time that the host polled in these, in nanoseconds.
    pub halt_poll_success_ns: u64,
    /// Time that it polled in vain, in nanoseconds.
    pub halt_poll_fail_ns: u64,
    /// Time slept, in nanoseconds, with what waking costs.
    pub halt_wait_ns: u64,
    /// What waking from sleep added to idle times, in nanoseconds.
    pub added_latency_ns: u64,
}

impl Prediction {
    /// CPU time that polling in the host took, in nanoseconds.
    pub fn host_polled_ns(&self) -> u64 {
        self.halt_poll_success_ns.saturating_add(self.halt_poll_fail_ns)
    }

    /// CPU time that polling in the guest took, in nanoseconds.
    pub fn guest_polled_ns(&self) -> u64 {
        self.guest_poll_success_ns.saturating_add(self.guest_poll_fail_ns)
    }

    /// CPU time that polling took, in nanoseconds.
    pub fn polled_ns(&self) -> u64 {
        self.host_polled_ns().saturating_add(self.guest_polled_ns())
    }

    /// Idle times that ended while somebody polled, and did not have to wake a thread.
    pub fn hits(&self) -> u64 {
        self.guest_successful_poll.saturating_add(self.halt_successful_poll)
    }
}

impl AddAssign for Prediction {
    fn add_assign(&mut self, other: Self) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.idles, other.idles);
        add(&mut self.guest_attempted_poll, other.guest_attempted_poll);
        add(&mut self.guest_successful_poll, other.guest_successful_poll);
        add(&mut self.guest_poll_success_ns, other.guest_poll_success_ns);
        add(&mut self.guest_poll_fail_ns, other.guest_poll_fail_ns);
        add(&mut self.halts, other.halts);
        add(&mut self.halt_attempted_poll, other.halt_attempted_poll);
        add(&mut self.halt_successful_poll, other.halt_successful_poll);
        add(&mut self.halt_poll_success_ns, other.halt_poll_success_ns);
        add(&mut self.halt_poll_fail_ns, other.halt_poll_fail_ns);
        add(&mut self.halt_wait_ns, other.halt_wait_ns);
        add(&mut self.added_latency_ns, other.added_latency_ns);
    }
}

/// Predicts what the recorded halts of each vCPU would come to.
///
/// `host`: the host's parameters. `guest`: those of the guest's haltpoll governor, if the guest is to
/// have it; its driver then forbids the host to poll (`MSR_KVM_POLL_CONTROL`), so `host` has no effect.
/// Without it the guest halts at once. `wake_cost_ns`: what it costs to wake a vCPU's thread that sleeps,
/// in nanoseconds, for instance [`Recording::wake_cost_ns`]: of a recorded halt that does not tell, as
/// one that did not sleep. One that tells is taken to cost what it did.
///
/// Windows begin at 0. Halts after which the guest had [polled](Recording::after_guest_polling) are
/// taken as they are, though the guest was idle for longer.
pub fn simulate(
    recording: &Recording,
    host: Params,
    guest: Option<guest::Params>,
    wake_cost_ns: u32,
) -> Vec<Prediction> {
    let simulate = |halts: &Vec<Halt>| {
        let mut vcpu = Vcpu::new(recording.header, host, guest, wake_cost_ns);
        halts.iter().for_each(|halt| vcpu.idle(halt));
        vcpu.prediction
    };
    recording.vcpus.iter().map(simulate).collect()
}

/// The sum of what [`simulate`] predicts for each vCPU.
pub fn total(vcpus: &[Prediction]) -> Prediction {
    let mut total = Prediction::default();
    vcpus.iter().for_each(|vcpu| total += *vcpu);
    total
}

struct Vcpu {
    policy: Policy,
    governor: Option<Governor>,
    wake_cost_ns: u64,
    deadline_lead_ns: u64,
    prediction: Prediction,
}

impl Vcpu {
    fn new(header: Header, host: Params, guest: Option<guest::Params>, wake_cost_ns: u32) -> Self {
        let mut policy = Policy::new(host);
        policy.set_poll_allowed(guest.is_none());
        Vcpu {
            policy,
            governor: guest.map(Governor::new),
            wake_cost_ns: wake_cost_ns.into(),
            deadline_lead_ns: header.deadline_lead_ns.into(),
            prediction: Prediction::default(),
        }
    }

    /// The CPU has nothing to do, and halted as recorded.
    fn idle(&mut self, halt: &Halt) {
        // Who sleeps until a deadline that it knows wakes early enough, and spins through the rest.
        let lead_ns = if halt.source == Source::Timer { self.deadline_lead_ns } else { 0 };
        let usual_ns = if lead_ns > 0 { 0 } else { self.wake_cost_ns };
        // One who sleeps again pays what it paid: costs are spread widely, and windows follow each of them.
        let wake_cost_ns = halt.wake_cost_ns.map_or(usual_ns, u64::from);
        // Neither polled nor slept: the wake was there at once.
        let mut idle_ns = halt.polled_ns.map_or(0, u64::from);
        if halt.slept {
            // It was idle at least for as long as it polled in vain.
            idle_ns = halt.halt_ns.saturating_sub(wake_cost_ns).max(idle_ns);
        }
        self.prediction.idles += 1;
        let Some(governor) = &mut self.governor else {
            self.halt(idle_ns, lead_ns, wake_cost_ns, halt.valid);
            return;
        };
        if governor.select(u64::MAX) == IdleState::Poll {
            let limit_ns = governor.poll_limit_ns();
            let timed_out = idle_ns > limit_ns;
            governor.reflect(Idled::Polled { timed_out });
            self.prediction.guest_attempted_poll += 1;
            if !timed_out {
                self.prediction.guest_successful_poll += 1;
                self.prediction.guest_poll_success_ns += idle_ns;
                return;
            }
            self.prediction.guest_poll_fail_ns += limit_ns;
            idle_ns -= limit_ns;
        }
        let residency_ns = self.halt(idle_ns, lead_ns, wake_cost_ns, halt.valid);
        if let Some(governor) = &mut self.governor {
            governor.reflect(Idled::Halted { residency_ns });
        }
    }

    /// A halt that a wake event would end after `idle_ns`; gives how long it is.
    fn halt(&mut self, idle_ns: u64, lead_ns: u64, wake_cost_ns: u64, valid: bool) -> u64 {
        let window_ns = self.policy.window_ns();
        // As `Poller::wait` does it.
        let prolonged = lead_ns > 0 && idle_ns.saturating_sub(lead_ns) <= window_ns;
        let stop_ns = if prolonged { idle_ns } else { window_ns };
        let polls = stop_ns > 0 || window_ns > 0;
        let slept = idle_ns > stop_ns;
        let polled_ns = idle_ns.min(stop_ns);
        let outcome = Outcome {
            polled_ns: polls.then_some(polled_ns),
            blocked_ns: slept.then(|| (idle_ns - polled_ns).saturating_add(wake_cost_ns)),
            wake: WakeReason::Event,
            valid,
        };
        self.policy.update(&outcome);
        let prediction = &mut self.prediction;
        prediction.halts += 1;
        prediction.halt_attempted_poll += u64::from(polls);
        if slept {
            prediction.halt_poll_fail_ns += polled_ns;
            prediction.added_latency_ns += wake_cost_ns;
        } else {
            prediction.halt_successful_poll += u64::from(polls);
            prediction.halt_poll_success_ns += polled_ns;
        }
        let blocked_ns = outcome.blocked_ns.unwrap_or(0);
        prediction.halt_wait_ns = prediction.halt_wait_ns.saturating_add(blocked_ns);
        outcome.halt_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{GuestIdle, Mode};
    use crate::{Clock, Poller, Stats, StatsSnapshot, WakeSource};
    use proptest::prelude::*;
    use std::cell::Cell;

    /// A turn of the poll loop. All times below are multiples of it, so that polls are exact.
    const TURN_NS: u64 = 1_000;
    const WAKE_COST_NS: u32 = 7_000;
    const LEAD_NS: u64 = 20_000;

    /// A CPU that is idle until a device or its timer wakes it; sleep ends late for a device.
    struct Idle {
        now_ns: Cell<u64>,
        last_ns: Cell<u64>,
        wake_ns: u64,
        by_timer: bool,
    }

    impl Clock for Idle {
        fn now_ns(&self) -> u64 {
            self.last_ns.set(self.now_ns.replace(self.now_ns.get() + TURN_NS));
            self.last_ns.get()
        }
    }

    impl WakeSource for Idle {
        fn woken(&self) -> Option<WakeReason> {
            let woken = !self.by_timer && self.last_ns.get() >= self.wake_ns;
            woken.then_some(WakeReason::Event)
        }

        fn block(&self, timeout_ns: Option<u64>) {
            let until_ns = match timeout_ns {
                Some(ns) => self.last_ns.get() + ns,
                None => self.wake_ns + u64::from(WAKE_COST_NS),
            };
            self.now_ns.set(until_ns);
        }
    }

    /// The poller, the policy and the counters as they are used live, and what they record.
    fn live(idles: &[(u64, bool)], params: Params) -> (StatsSnapshot, Vec<Halt>) {
        let poller = Poller { deadline_lead_ns: LEAD_NS };
        let mut policy = Policy::new(params);
        let stats = Stats::new();
        let halts = idles.iter().map(|&(idle_ns, by_timer)| {
            let idle =
                Idle { now_ns: Cell::new(0), last_ns: Cell::new(0), wake_ns: idle_ns, by_timer };
            let window_ns = policy.window_ns();
            let outcome = poller.wait(&idle, &idle, window_ns, by_timer.then_some(idle_ns));
            policy.update(&outcome);
            stats.record(&outcome);
            let wake_cost_ns = (!by_timer && outcome.blocked_ns.is_some()).then_some(WAKE_COST_NS);
            Halt { wake_cost_ns, ..Halt::new(0, window_ns, &outcome) }
        });
        let halts = halts.collect();
        (stats.snapshot(), halts)
    }

    fn recording(vcpus: Vec<Vec<Halt>>) -> Recording {
        let header = Header {
            mode: Mode::User,
            vcpus: vcpus.len() as u32,
            host: Params::default(),
            guest_idle: GuestIdle::Halt,
            deadline_lead_ns: LEAD_NS as u32,
        };
        Recording { header, vcpus, lost: 0, truncated: false }
    }

    fn params() -> impl Strategy<Value = Params> {
        // Halves of such windows are whole turns until they are below grow_start.
        let unit = 8 * TURN_NS as u32;
        let grow = prop::sample::select(vec![0, 1, 2, 4]);
        (0..15u32, grow, 1..4u32, 0..3u32).prop_map(move |(max, grow, start, shrink)| Params {
            max_ns: max * unit,
            grow,
            grow_start_ns: start * unit,
            shrink,
        })
    }

    /// Most idle times are about as long as windows are.
    fn idles() -> impl Strategy<Value = Vec<(u64, bool)>> {
        let turns = prop_oneof![3 => 0..150u64, 1 => 0..2_000u64];
        prop::collection::vec((turns.prop_map(|turns| turns * TURN_NS), any::<bool>()), 0..120)
    }

    proptest! {
        #[test]
        fn whatever_the_parameters_were_it_predicts_what_others_do_live(
            idles in idles(), recorded in params(), asked in params(),
        ) {
            let (_, halts) = live(&idles, recorded);
            let (stats, _) = live(&idles, asked);
            let [predicted] = simulate(&recording(vec![halts]), asked, None, WAKE_COST_NS)[..]
                else { panic!("one vCPU") };
            let slept = stats.halt_wait_hist.iter().sum::<u64>();
            prop_assert_eq!(predicted.idles, idles.len() as u64);
            prop_assert_eq!(predicted.halts, idles.len() as u64);
            prop_assert_eq!(predicted.halt_attempted_poll, stats.halt_attempted_poll);
            prop_assert_eq!(predicted.halt_poll_success_ns, stats.halt_poll_success_ns);
            prop_assert_eq!(predicted.halt_poll_fail_ns, stats.halt_poll_fail_ns);
            prop_assert_eq!(predicted.halt_successful_poll, stats.halt_successful_poll);
            prop_assert_eq!(predicted.halt_wait_ns, stats.halt_wait_ns);
            prop_assert!(predicted.added_latency_ns <= slept * u64::from(WAKE_COST_NS));
        }

        #[test]
        fn vcpus_do_not_see_each_other(first in idles(), second in idles(), asked in params()) {
            let halts = [first, second].map(|idles| live(&idles, Params::default()).1);
            let guest = Some(guest::Params::default());
            let alone = halts.clone().map(|halts| {
                simulate(&recording(vec![halts]), asked, guest, WAKE_COST_NS)[0]
            });
            let together = simulate(&recording(halts.to_vec()), asked, guest, WAKE_COST_NS);
            prop_assert_eq!(&together[..], &alone[..]);
            prop_assert_eq!(total(&together).idles, alone[0].idles + alone[1].idles);
        }
    }

    /// Recorded without polling, each with a known cost of waking.
    fn slept(idles_ns: &[u64]) -> Recording {
        let halt = |idle_ns: &u64| Halt {
            wake_cost_ns: Some(WAKE_COST_NS),
            ..Halt::new(
                0,
                0,
                &Outcome {
                    polled_ns: None,
                    blocked_ns: Some(idle_ns + u64::from(WAKE_COST_NS)),
                    wake: WakeReason::Event,
                    valid: true,
                },
            )
        };
        recording(vec![idles_ns.iter().map(halt).collect()])
    }

    #[test]
    fn the_guests_governor_grows_its_window_and_what_it_polls_away_is_no_halt() {
        let predicted = simulate(
            &slept(&[40_000, 40_000, 40_000, 150_000, 150_000]),
            Params::default(),
            Some(guest::Params::default()),
            WAKE_COST_NS,
        );
        // Window 0: halt, 47 us long, and the window is 50 us: two hits. 50 us in vain, then a halt of 107
        // us: the window is 100 us, in vain again; a halt of 57 us is shorter, and leaves it.
        let expected = Prediction {
            idles: 5,
            guest_attempted_poll: 4,
            guest_successful_poll: 2,
            guest_poll_success_ns: 80_000,
            guest_poll_fail_ns: 150_000,
            halts: 3,
            halt_wait_ns: 47_000 + 107_000 + 57_000,
            added_latency_ns: 3 * 7_000,
            ..Prediction::default()
        };
        assert_eq!(predicted, [expected]);
    }

    #[test]
    fn while_the_guest_polls_the_host_does_not() {
        let recording = slept(&[5_000; 50]);
        let without = total(&simulate(&recording, Params::default(), None, WAKE_COST_NS));
        // After one halt of 12 us the window is 10 us.
        assert_eq!((without.halts, without.hits(), without.host_polled_ns()), (50, 49, 245_000));
        let driver = guest::Params { guest_halt_poll_ns: 0, ..guest::Params::default() };
        let with = total(&simulate(&recording, Params::default(), Some(driver), WAKE_COST_NS));
        assert_eq!((with.halts, with.halt_attempted_poll, with.polled_ns()), (50, 0, 0));
    }

    #[test]
    fn a_halt_that_sleeps_again_costs_what_it_did() {
        let mut recording = slept(&[100_000; 20]);
        for (halt, cost_ns) in recording.vcpus[0].iter_mut().zip([7_000, 107_000].iter().cycle()) {
            *halt =
                Halt { halt_ns: 100_000 + cost_ns, wake_cost_ns: Some(*cost_ns as u32), ..*halt };
        }
        // Every second halt is longer than the maximum, and shrinks the window that the others make.
        let params = Params { max_ns: 150_000, ..Params::default() };
        let predicted = total(&simulate(&recording, params, None, 7_000));
        assert_eq!((predicted.halt_attempted_poll, predicted.hits()), (10, 0));
        assert_eq!(predicted.added_latency_ns, 10 * 7_000 + 10 * 107_000);
    }

    #[test]
    fn halts_that_do_not_tell_what_waking_cost_are_taken_to_have_cost_what_is_said() {
        let mut recording = slept(&[100_000; 20]);
        for halt in &mut recording.vcpus[0] {
            halt.wake_cost_ns = None;
        }
        let params = Params { max_ns: 108_000, grow: 1, grow_start_ns: 103_000, shrink: 2 };
        let hits = |cost_ns| total(&simulate(&recording, params, None, cost_ns)).hits();
        // 107 us are recorded; the window of 103 us covers what is left of them.
        assert_eq!((hits(WAKE_COST_NS), hits(3_000)), (19, 0));
    }
}
