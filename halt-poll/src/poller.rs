//! Spin for a while, then sleep: what a halt does with its window.

use std::hint::spin_loop;

use crate::{Clock, Outcome, WakeReason};

/// What a halt waits for.
pub trait WakeSource {
    /// What there is to wake up for, if anything.
    ///
    /// Asked once per turn of the poll loop, so it should be a load or two of memory that stays in
    /// this CPU's cache until somebody wakes it. Reading what the waker published needs an
    /// `Acquire` load here, paired with the waker's `Release` store.
    fn woken(&self) -> Option<WakeReason>;

    /// Sleeps until [`woken`](WakeSource::woken) has an answer, or for `timeout_ns` if given.
    ///
    /// A wake that comes between the last look and the sleep must end the sleep at once (a futex,
    /// an eventfd and a parked thread's token all see to that). It may return early for no reason;
    /// whoever interrupts it for good makes `woken` say [`WakeReason::Interrupted`].
    fn block(&self, timeout_ns: Option<u64>);

    /// Whether somebody else could use this CPU now; if so, polling stops and the thread sleeps.
    ///
    /// Asked once per turn. KVM looks at its run queue. A user program cannot; what it can see
    /// cheaply is that it has just been preempted (a gap in the clock, involuntary context
    /// switches in `getrusage`), or that it shares its CPU with another thread of its own. The
    /// default says no, which is right for a thread that has a CPU to itself.
    fn cpu_wanted(&self) -> bool {
        false
    }
}

/// The halt loop. Allocates nothing and makes no system call until it blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Poller {
    /// How long before its deadline a sleeper wakes, in nanoseconds, to spin through the rest: at
    /// least as long as this machine takes to wake a thread, or timers are late by the difference.
    /// 0, the default, sleeps until the deadline. This spinning is not the policy's: it happens
    /// whatever the window.
    pub deadline_lead_ns: u64,
}

impl Poller {
    /// Waits for `source` to wake or for `deadline_ns` on `clock` to pass: polls for at most
    /// `window_ns`, less if the CPU is wanted, then blocks.
    ///
    /// Looks at the source at least once before it blocks, even with a window of 0; a wake that is
    /// already there costs no sleep. If both are there, the source's wake counts, not the deadline.
    /// A deadline within [`deadline_lead_ns`](Poller::deadline_lead_ns) of the window's end
    /// prolongs the poll, since sleeping would not pay.
    ///
    /// Times in the outcome are as exact as one turn of the loop. What is spun before a deadline
    /// after having slept counts as blocked.
    #[inline]
    pub fn wait<S, C>(
        &self,
        source: &S,
        clock: &C,
        window_ns: u64,
        deadline_ns: Option<u64>,
    ) -> Outcome
    where
        S: WakeSource + ?Sized,
        C: Clock + ?Sized,
    {
        let lead_ns = self.deadline_lead_ns;
        let deadline_ns = deadline_ns.unwrap_or(u64::MAX);
        let look = |now_ns: u64| {
            source.woken().or_else(|| (now_ns >= deadline_ns).then_some(WakeReason::Deadline))
        };

        let start_ns = clock.now_ns();
        let mut stop_ns = start_ns.saturating_add(window_ns);
        if deadline_ns.saturating_sub(lead_ns) <= stop_ns {
            stop_ns = deadline_ns;
        }
        let polls = window_ns > 0 || stop_ns > start_ns;

        let mut now_ns = start_ns;
        let mut wake = look(now_ns);
        while wake.is_none() && now_ns < stop_ns && !source.cpu_wanted() {
            spin_loop();
            now_ns = clock.now_ns();
            wake = look(now_ns);
        }
        let polled_ns = polls.then_some(now_ns.saturating_sub(start_ns));
        if let Some(wake) = wake {
            return Outcome { polled_ns, blocked_ns: None, wake, valid: true };
        }

        let block_start_ns = now_ns;
        let wake = loop {
            let left_ns = deadline_ns.saturating_sub(now_ns);
            if deadline_ns == u64::MAX {
                source.block(None);
            } else if left_ns > lead_ns {
                source.block(Some(left_ns - lead_ns));
            } else if source.cpu_wanted() {
                source.block(Some(left_ns));
            } else {
                spin_loop();
            }
            now_ns = clock.now_ns();
            if let Some(wake) = look(now_ns) {
                break wake;
            }
        };
        let blocked_ns = Some(now_ns.saturating_sub(block_start_ns));
        Outcome { polled_ns, blocked_ns, wake, valid: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FakeClock, MonotonicClock};
    use proptest::prelude::*;
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    const STEP_NS: u64 = 50;

    /// Wakes, and is wanted by another, at times of a fake clock. Sleeping moves that clock.
    struct Script<'a> {
        clock: &'a FakeClock,
        wake_at_ns: u64,
        wanted_at_ns: u64,
        spurious_returns: Cell<u32>,
        blocks: RefCell<Vec<Option<u64>>>,
    }

    impl<'a> Script<'a> {
        fn new(clock: &'a FakeClock, wake_at_ns: u64) -> Self {
            Script {
                clock,
                wake_at_ns,
                wanted_at_ns: u64::MAX,
                spurious_returns: Cell::new(0),
                blocks: RefCell::default(),
            }
        }

        fn wait(&self, poller: Poller, window_ns: u64, deadline_ns: Option<u64>) -> Outcome {
            poller.wait(self, self.clock, window_ns, deadline_ns)
        }
    }

    impl WakeSource for Script<'_> {
        fn woken(&self) -> Option<WakeReason> {
            (self.clock.peek_ns() >= self.wake_at_ns).then_some(WakeReason::Event)
        }

        fn block(&self, timeout_ns: Option<u64>) {
            self.blocks.borrow_mut().push(timeout_ns);
            if let Some(left) = self.spurious_returns.get().checked_sub(1) {
                self.spurious_returns.set(left);
                return;
            }
            let wake_in_ns = self.wake_at_ns.saturating_sub(self.clock.peek_ns());
            self.clock.advance_ns(timeout_ns.unwrap_or(u64::MAX).min(wake_in_ns));
        }

        fn cpu_wanted(&self) -> bool {
            self.clock.peek_ns() >= self.wanted_at_ns
        }
    }

    fn lead(deadline_lead_ns: u64) -> Poller {
        Poller { deadline_lead_ns }
    }

    #[test]
    fn a_wake_within_the_window_is_polled() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script::new(&clock, 5_000);
        let outcome = source.wait(lead(0), 10_000, None);
        assert!(outcome.poll_succeeded() && outcome.valid);
        assert_eq!(outcome.wake, WakeReason::Event);
        let polled_ns = outcome.polled_ns.unwrap();
        assert!((5_000 - STEP_NS..=5_000).contains(&polled_ns), "{polled_ns}");
        assert!(source.blocks.borrow().is_empty());
    }

    #[test]
    fn a_wake_after_the_window_is_slept_for() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script::new(&clock, 50_000);
        let outcome = source.wait(lead(0), 10_000, None);
        assert_eq!(outcome.wake, WakeReason::Event);
        assert_eq!(outcome.polled_ns, Some(10_000));
        assert!(outcome.halt_ns().abs_diff(50_000) <= STEP_NS, "{outcome:?}");
        assert_eq!(*source.blocks.borrow(), [None]);
    }

    #[test]
    fn a_window_of_zero_sleeps_without_polling() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script::new(&clock, 50_000);
        let outcome = source.wait(lead(0), 0, None);
        assert_eq!(outcome.polled_ns, None);
        assert!(outcome.blocked_ns.is_some());
        assert_eq!(*source.blocks.borrow(), [None]);
    }

    #[test]
    fn a_wake_that_is_already_there_costs_no_sleep_even_with_a_window_of_zero() {
        for (window_ns, polled_ns) in [(0, None), (10_000, Some(0))] {
            let clock = FakeClock::new(STEP_NS);
            let source = Script::new(&clock, 0);
            let outcome = source.wait(lead(0), window_ns, None);
            assert_eq!((outcome.polled_ns, outcome.blocked_ns), (polled_ns, None));
            assert!(source.blocks.borrow().is_empty());
        }
    }

    #[test]
    fn polling_stops_early_when_the_cpu_is_wanted() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script { wanted_at_ns: 3_000, ..Script::new(&clock, 9_000) };
        let outcome = source.wait(lead(0), 10_000, None);
        assert!(outcome.polled_ns.unwrap().abs_diff(3_000) <= STEP_NS, "{outcome:?}");
        assert!(outcome.blocked_ns.is_some());
        assert_eq!(*source.blocks.borrow(), [None]);
    }

    #[test]
    fn a_deadline_within_the_window_ends_the_poll() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script::new(&clock, u64::MAX);
        let outcome = source.wait(lead(0), 10_000, Some(4_000));
        assert_eq!((outcome.wake, outcome.polled_ns), (WakeReason::Deadline, Some(4_000)));
        assert!(source.blocks.borrow().is_empty());
    }

    #[test]
    fn a_deadline_that_has_passed_ends_the_halt_at_once() {
        let clock = FakeClock::new(STEP_NS);
        clock.advance_ns(5_000);
        let source = Script::new(&clock, u64::MAX);
        let outcome = source.wait(lead(1_000), 10_000, Some(4_000));
        assert_eq!((outcome.wake, outcome.halt_ns()), (WakeReason::Deadline, 0));
        assert_eq!((outcome.polled_ns, outcome.blocked_ns), (Some(0), None));
    }

    #[test]
    fn a_sleep_lasts_no_longer_than_the_deadline() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script::new(&clock, u64::MAX);
        let outcome = source.wait(lead(0), 10_000, Some(70_000));
        assert_eq!((outcome.wake, outcome.polled_ns), (WakeReason::Deadline, Some(10_000)));
        assert_eq!(*source.blocks.borrow(), [Some(60_000)]);
    }

    #[test]
    fn the_lead_wakes_a_sleeper_early_and_spins_through_the_rest() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script::new(&clock, u64::MAX);
        let outcome = source.wait(lead(8_000), 10_000, Some(70_000));
        assert_eq!(outcome.wake, WakeReason::Deadline);
        assert!(outcome.halt_ns().abs_diff(70_000) <= 2 * STEP_NS, "{outcome:?}");
        assert_eq!(*source.blocks.borrow(), [Some(52_000)]);
    }

    #[test]
    fn a_deadline_within_the_lead_of_the_windows_end_prolongs_the_poll() {
        for window_ns in [0, 10_000] {
            let clock = FakeClock::new(STEP_NS);
            let source = Script::new(&clock, u64::MAX);
            let outcome = source.wait(lead(8_000), window_ns, Some(window_ns + 8_000));
            assert_eq!(outcome.polled_ns, Some(window_ns + 8_000));
            assert!(outcome.poll_succeeded());
            assert!(source.blocks.borrow().is_empty());
        }
    }

    #[test]
    fn the_lead_is_slept_through_when_the_cpu_is_wanted() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script { wanted_at_ns: 0, ..Script::new(&clock, u64::MAX) };
        let outcome = source.wait(lead(8_000), 0, Some(6_000));
        assert_eq!((outcome.wake, outcome.polled_ns), (WakeReason::Deadline, Some(0)));
        assert_eq!(*source.blocks.borrow(), [Some(6_000)]);
    }

    #[test]
    fn a_sleep_that_returns_for_no_reason_is_resumed_for_the_time_left() {
        let clock = FakeClock::new(STEP_NS);
        let source = Script { spurious_returns: Cell::new(2), ..Script::new(&clock, u64::MAX) };
        let outcome = source.wait(lead(0), 0, Some(1_000));
        assert_eq!(outcome.wake, WakeReason::Deadline);
        let expected = [Some(1_000), Some(1_000 - STEP_NS), Some(1_000 - 2 * STEP_NS)];
        assert_eq!(*source.blocks.borrow(), expected);
    }

    proptest! {
        #[test]
        fn a_wake_within_the_window_never_blocks(
            window_ns in 1..300_000u64,
            wake in 0.0..1.0f64,
            step_ns in 1..1_000u64,
            lead_ns in 0..20_000u64,
            deadline_ns in prop::option::of(0..1_000_000u64),
        ) {
            let clock = FakeClock::new(step_ns);
            let source = Script::new(&clock, (window_ns as f64 * wake) as u64);
            let outcome = source.wait(lead(lead_ns), window_ns, deadline_ns);
            prop_assert!(outcome.poll_succeeded());
            prop_assert!(source.blocks.borrow().is_empty());
        }

        #[test]
        fn a_poll_outlasts_neither_window_nor_wake_nor_want_by_more_than_one_turn(
            window_ns in 0..300_000u64,
            wake_at_ns in 0..500_000u64,
            wanted_at_ns in 0..500_000u64,
            step_ns in 1..1_000u64,
        ) {
            let clock = FakeClock::new(step_ns);
            let source = Script { wanted_at_ns, ..Script::new(&clock, wake_at_ns) };
            let outcome = source.wait(lead(0), window_ns, None);
            let polled_ns = outcome.polled_ns.unwrap_or(0);
            prop_assert!(polled_ns < window_ns.max(1) + step_ns);
            prop_assert!(polled_ns <= wake_at_ns && polled_ns <= wanted_at_ns);
            prop_assert_eq!(outcome.polled_ns.is_some(), window_ns > 0);
            prop_assert_eq!(outcome.blocked_ns.is_none(), source.blocks.borrow().is_empty());
        }
    }

    /// A counter that another thread raises, and a parked thread.
    #[derive(Default)]
    struct Turns {
        given: AtomicU32,
        taken: AtomicU32,
    }

    impl WakeSource for Turns {
        fn woken(&self) -> Option<WakeReason> {
            let given = self.given.load(Ordering::Acquire);
            (given != self.taken.load(Ordering::Relaxed)).then_some(WakeReason::Event)
        }

        fn block(&self, _timeout_ns: Option<u64>) {
            thread::park();
        }
    }

    #[test]
    fn no_wake_from_another_thread_is_lost_whether_polling_or_asleep() {
        const TURNS: u32 = 2_000;
        let turns = Arc::new(Turns::default());
        let (done, waits) = mpsc::channel();
        let waiter = thread::spawn({
            let turns = Arc::clone(&turns);
            move || {
                let clock = MonotonicClock::new();
                for turn in 1..=TURNS {
                    // Every other halt polls.
                    let window_ns = u64::from(turn % 2) * 20_000;
                    let outcome = Poller::default().wait(&*turns, &clock, window_ns, None);
                    assert_eq!(outcome.wake, WakeReason::Event);
                    turns.taken.store(turn, Ordering::Relaxed);
                    done.send(()).unwrap();
                }
            }
        });
        for turn in 1..=TURNS {
            turns.given.store(turn, Ordering::Release);
            waiter.thread().unpark();
            waits.recv().unwrap();
        }
        waiter.join().unwrap();
    }
}
