//! The timer of a local APIC (Intel SDM vol. 3, 11.5.4). It has no clock of its own: every call
//! that depends on the time is told the time.

/// The time, on both clocks that a timer can follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// A monotonic clock, in nanoseconds.
    pub ns: u64,
    /// The guest's time stamp counter.
    pub tsc: u64,
}

/// The timer's input clock: one tick a nanosecond, before it is divided. A guest that does not use
/// the TSC deadline measures it.
pub const TIMER_HZ: u64 = 1_000_000_000;

/// Bits 18:17 of the timer's entry in the local vector table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimerMode {
    OneShot,
    Periodic,
    TscDeadline,
}

impl TimerMode {
    const SHIFT: u32 = 17;

    /// The mode in an entry; the reserved value counts as the TSC deadline.
    pub fn from_lvt(entry: u32) -> Self {
        match entry >> Self::SHIFT & 3 {
            0 => TimerMode::OneShot,
            1 => TimerMode::Periodic,
            _ => TimerMode::TscDeadline,
        }
    }
}

/// A count on its way to zero.
#[derive(Clone, Copy, Debug)]
struct Countdown {
    /// When the count was `count`.
    start_ns: u64,
    count: u32,
}

#[derive(Debug)]
pub(super) struct Timer {
    tsc_khz: u32,
    mode: TimerMode,
    /// The divide configuration register: bits 3, 1 and 0.
    divide: u32,
    initial_count: u32,
    running: Option<Countdown>,
    /// IA32_TSC_DEADLINE; 0 is disarmed.
    tsc_deadline: u64,
}

impl Timer {
    /// A stopped timer. `tsc_khz`: the guest's TSC frequency; 0 counts as 1.
    pub fn new(tsc_khz: u32) -> Self {
        Timer {
            tsc_khz: tsc_khz.max(1),
            mode: TimerMode::OneShot,
            divide: 0,
            initial_count: 0,
            running: None,
            tsc_deadline: 0,
        }
    }

    /// The state after power-up.
    pub fn reset(&mut self) {
        *self = Timer::new(self.tsc_khz);
    }

    /// Changes the mode. Going to or from the TSC deadline disarms the timer.
    pub fn set_mode(&mut self, mode: TimerMode) {
        let old = std::mem::replace(&mut self.mode, mode);
        if old != mode && (old == TimerMode::TscDeadline || mode == TimerMode::TscDeadline) {
            self.initial_count = 0;
            self.running = None;
            self.tsc_deadline = 0;
        }
    }

    /// The divide configuration register.
    pub fn divide(&self) -> u32 {
        self.divide
    }

    /// Sets the divide configuration register. A running count goes on from where it is.
    pub fn set_divide(&mut self, divide: u32, now: Now) {
        let count = self.current_count(now);
        self.divide = divide & 0b1011;
        if let Some(running) = &mut self.running {
            *running = Countdown { start_ns: now.ns, count };
        }
    }

    /// Nanoseconds a count: 1, 2, 4 ... 128.
    fn tick_ns(&self) -> u64 {
        let code = self.divide >> 1 & 0b100 | self.divide & 0b11;
        1 << ((code + 1) & 0b111)
    }

    /// The initial count.
    pub fn initial_count(&self) -> u32 {
        self.initial_count
    }

    /// Sets the initial count and starts to count down from it; 0 stops the timer. Ignored when the
    /// timer follows the TSC.
    pub fn set_initial_count(&mut self, count: u32, now: Now) {
        if self.mode != TimerMode::TscDeadline {
            self.initial_count = count;
            self.running = (count != 0).then_some(Countdown { start_ns: now.ns, count });
        }
    }

    /// The current count; 0 when the timer is stopped or follows the TSC.
    pub fn current_count(&self, now: Now) -> u32 {
        let Some(Countdown { start_ns, count }) = self.running else { return 0 };
        let ticks = now.ns.saturating_sub(start_ns) / self.tick_ns();
        match ticks.checked_sub(count.into()) {
            // Less than the 32-bit count.
            None => count - ticks as u32,
            Some(beyond) if self.mode == TimerMode::Periodic => {
                let into = beyond.checked_rem(self.initial_count.into()).unwrap_or(0);
                self.initial_count - into as u32
            }
            Some(_) => 0,
        }
    }

    /// IA32_TSC_DEADLINE: 0 when disarmed, and in the other modes.
    pub fn tsc_deadline(&self) -> u64 {
        self.tsc_deadline
    }

    /// Sets IA32_TSC_DEADLINE; 0 disarms. Ignored in the other modes.
    pub fn set_tsc_deadline(&mut self, tsc: u64) {
        if self.mode == TimerMode::TscDeadline {
            self.tsc_deadline = tsc;
        }
    }

    fn expiry_ns(&self, running: Countdown) -> u64 {
        running.start_ns.saturating_add(u64::from(running.count) * self.tick_ns())
    }

    /// Whether the timer has expired since this was asked last. A periodic timer goes on, and
    /// periods that passed unseen count once, as they would in a request bit.
    pub fn expire(&mut self, now: Now) -> bool {
        if self.tsc_deadline != 0 && now.tsc >= self.tsc_deadline {
            self.tsc_deadline = 0;
            return true;
        }
        let Some(running) = self.running else { return false };
        let expiry_ns = self.expiry_ns(running);
        let Some(late_ns) = now.ns.checked_sub(expiry_ns) else { return false };
        let period_ns = u64::from(self.initial_count) * self.tick_ns();
        self.running = late_ns
            .checked_rem(period_ns)
            .filter(|_| self.mode == TimerMode::Periodic)
            .map(|into_ns| Countdown { start_ns: now.ns - into_ns, count: self.initial_count });
        true
    }

    /// When the timer will expire, on the nanosecond clock; not before `now`. `None`: never.
    pub fn deadline_ns(&self, now: Now) -> Option<u64> {
        if self.tsc_deadline != 0 {
            let cycles = self.tsc_deadline.saturating_sub(now.tsc);
            let wait_ns = (u128::from(cycles) * 1_000_000).div_ceil(self.tsc_khz.into());
            return Some(now.ns.saturating_add(u64::try_from(wait_ns).unwrap_or(u64::MAX)));
        }
        self.running.map(|running| self.expiry_ns(running).max(now.ns))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TSC_KHZ: u32 = 2_500_000;
    const DIVIDE_BY_1: u32 = 0b1011;
    const DIVIDE_BY_16: u32 = 0b0011;

    /// A TSC of 2.5 GHz that started with the clock.
    fn at(ns: u64) -> Now {
        Now { ns, tsc: ns * 5 / 2 }
    }

    fn timer(mode: TimerMode, divide: u32) -> Timer {
        let mut timer = Timer::new(TSC_KHZ);
        timer.set_mode(mode);
        timer.set_divide(divide, at(0));
        timer
    }

    #[test]
    fn modes_are_bits_18_and_17() {
        assert_eq!(TimerMode::from_lvt(0x1_00ec), TimerMode::OneShot);
        assert_eq!(TimerMode::from_lvt(0x3_00ec), TimerMode::Periodic);
        assert_eq!(TimerMode::from_lvt(0x5_00ec), TimerMode::TscDeadline);
    }

    #[test]
    fn the_divide_register_has_its_bits_0_1_and_3() {
        let values = [
            (0b0000, 2),
            (0b0001, 4),
            (0b0010, 8),
            (0b0011, 16),
            (0b1000, 32),
            (0b1001, 64),
            (0b1010, 128),
            (0b1011, 1),
        ];
        for (divide, by) in values {
            let mut timer = timer(TimerMode::OneShot, divide);
            timer.set_initial_count(1000, at(0));
            assert_eq!(timer.deadline_ns(at(0)), Some(1000 * by), "{divide:#b}");
        }
        assert_eq!(timer(TimerMode::OneShot, 0xffff_ffff).divide(), 0b1011);
    }

    #[test]
    fn one_shot_counts_down_expires_once_and_rearms_on_a_write() {
        let mut timer = timer(TimerMode::OneShot, DIVIDE_BY_16);
        timer.set_initial_count(100, at(1000));
        assert_eq!(timer.current_count(at(1000)), 100);
        assert_eq!(timer.current_count(at(1015)), 100);
        assert_eq!(timer.current_count(at(1016)), 99);
        assert_eq!(timer.current_count(at(2599)), 1);
        assert!(!timer.expire(at(2599)));
        assert_eq!(timer.current_count(at(2600)), 0);
        assert!(timer.expire(at(2600)));
        assert!(!timer.expire(at(10_000)));
        assert_eq!((timer.current_count(at(10_000)), timer.deadline_ns(at(10_000))), (0, None));
        assert_eq!(timer.initial_count(), 100);
        timer.set_initial_count(5, at(10_000));
        assert_eq!(timer.deadline_ns(at(10_000)), Some(10_080));
        assert_eq!(timer.deadline_ns(at(10_090)), Some(10_090), "due already");
        timer.set_initial_count(50, at(10_010));
        assert!(!timer.expire(at(10_100)), "the new count replaces the old");
        assert!(timer.expire(at(10_810)));
    }

    #[test]
    fn an_initial_count_of_zero_stops_the_timer() {
        let mut timer = timer(TimerMode::Periodic, DIVIDE_BY_1);
        timer.set_initial_count(100, at(0));
        timer.set_initial_count(0, at(50));
        assert_eq!((timer.current_count(at(60)), timer.deadline_ns(at(60))), (0, None));
        assert!(!timer.expire(at(1000)));
    }

    #[test]
    fn periodic_reloads_without_drift_however_late_it_is_asked() {
        let mut timer = timer(TimerMode::Periodic, DIVIDE_BY_1);
        timer.set_initial_count(100, at(0));
        assert!(timer.expire(at(130)));
        assert!(!timer.expire(at(199)));
        assert_eq!(timer.current_count(at(130)), 70);
        assert_eq!(timer.deadline_ns(at(130)), Some(200));
        assert_eq!(timer.current_count(at(1_050)), 50, "also before the expiry was taken");
        assert!(timer.expire(at(1_050)));
        assert!(!timer.expire(at(1_050)));
        assert_eq!(timer.deadline_ns(at(1_050)), Some(1_100));
    }

    #[test]
    fn a_new_divisor_applies_to_what_is_left_of_the_count() {
        let mut timer = timer(TimerMode::OneShot, DIVIDE_BY_1);
        timer.set_initial_count(1000, at(0));
        timer.set_divide(DIVIDE_BY_16, at(400));
        assert_eq!(timer.current_count(at(400)), 600);
        assert_eq!(timer.deadline_ns(at(400)), Some(400 + 600 * 16));
    }

    #[test]
    fn one_shot_and_periodic_change_into_each_other_while_counting() {
        let mut timer = timer(TimerMode::OneShot, DIVIDE_BY_1);
        timer.set_initial_count(100, at(0));
        timer.set_mode(TimerMode::Periodic);
        assert!(timer.expire(at(100)) && timer.expire(at(200)));
        timer.set_mode(TimerMode::OneShot);
        assert!(timer.expire(at(300)) && !timer.expire(at(400)));
    }

    #[test]
    fn the_tsc_deadline_expires_when_the_tsc_is_there_and_is_then_zero() {
        let mut timer = timer(TimerMode::TscDeadline, DIVIDE_BY_1);
        timer.set_tsc_deadline(2500);
        assert_eq!(timer.deadline_ns(at(0)), Some(1000));
        assert_eq!(timer.deadline_ns(Now { ns: 77, tsc: 2499 }), Some(78), "rounded up");
        assert!(!timer.expire(Now { ns: 5000, tsc: 2499 }), "only the TSC counts");
        assert_eq!(timer.tsc_deadline(), 2500);
        assert!(timer.expire(at(1000)));
        assert!(!timer.expire(at(1001)));
        assert_eq!((timer.tsc_deadline(), timer.deadline_ns(at(1001))), (0, None));
    }

    #[test]
    fn a_tsc_deadline_in_the_past_expires_at_once() {
        let mut timer = timer(TimerMode::TscDeadline, DIVIDE_BY_1);
        timer.set_tsc_deadline(1);
        assert_eq!(timer.deadline_ns(at(1000)), Some(1000));
        assert!(timer.expire(at(1000)));
    }

    #[test]
    fn a_tsc_deadline_of_zero_disarms() {
        let mut timer = timer(TimerMode::TscDeadline, DIVIDE_BY_1);
        timer.set_tsc_deadline(100);
        timer.set_tsc_deadline(0);
        assert_eq!(timer.deadline_ns(at(0)), None);
        assert!(!timer.expire(at(1000)));
    }

    #[test]
    fn the_farthest_deadlines_do_not_overflow() {
        let mut timer = timer(TimerMode::TscDeadline, 0b1010);
        timer.set_tsc_deadline(u64::MAX);
        assert!(timer.deadline_ns(at(0)).is_some());
        let mut slow = Timer::new(0);
        slow.set_mode(TimerMode::TscDeadline);
        slow.set_tsc_deadline(u64::MAX);
        assert_eq!(slow.deadline_ns(at(5)), Some(u64::MAX));
        timer.set_mode(TimerMode::Periodic);
        timer.set_initial_count(u32::MAX, Now { ns: u64::MAX - 1, tsc: 0 });
        assert_eq!(timer.deadline_ns(Now { ns: u64::MAX - 1, tsc: 0 }), Some(u64::MAX));
        assert!(timer.expire(Now { ns: u64::MAX, tsc: 0 }));
    }

    #[test]
    fn registers_of_one_kind_of_mode_are_dead_in_the_other() {
        let mut timer = timer(TimerMode::TscDeadline, DIVIDE_BY_1);
        timer.set_initial_count(100, at(0));
        assert_eq!((timer.initial_count(), timer.current_count(at(0))), (0, 0));
        assert_eq!(timer.deadline_ns(at(0)), None);
        timer.set_mode(TimerMode::OneShot);
        timer.set_tsc_deadline(100);
        assert_eq!((timer.tsc_deadline(), timer.deadline_ns(at(0))), (0, None));
    }

    #[test]
    fn going_to_or_from_the_tsc_deadline_disarms() {
        let mut timer = timer(TimerMode::TscDeadline, DIVIDE_BY_1);
        timer.set_tsc_deadline(5000);
        timer.set_mode(TimerMode::TscDeadline);
        assert_eq!(timer.tsc_deadline(), 5000, "no change of mode");
        timer.set_mode(TimerMode::Periodic);
        assert_eq!(timer.deadline_ns(at(0)), None);
        timer.set_initial_count(100, at(0));
        timer.set_mode(TimerMode::TscDeadline);
        assert_eq!((timer.deadline_ns(at(0)), timer.initial_count()), (None, 0));
    }

    /// A counter that is really counted down, nanosecond by nanosecond.
    #[derive(Default)]
    struct Model {
        periodic: bool,
        tick_ns: u64,
        initial: u32,
        count: u32,
        phase_ns: u64,
        expired: bool,
    }

    impl Model {
        fn advance(&mut self, ns: u64) {
            for _ in 0..ns {
                if self.count == 0 {
                    continue;
                }
                self.phase_ns += 1;
                if self.phase_ns == self.tick_ns {
                    self.phase_ns = 0;
                    self.count -= 1;
                    if self.count == 0 {
                        self.expired = true;
                        self.count = if self.periodic { self.initial } else { 0 };
                    }
                }
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Wait(u64),
        Mode(bool),
        Divide(u32),
        Initial(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..400u64).prop_map(Step::Wait),
            1 => any::<bool>().prop_map(Step::Mode),
            1 => prop::sample::select(vec![0b1011, 0b0000, 0b0001]).prop_map(Step::Divide),
            2 => (0..60u32).prop_map(Step::Initial),
        ]
    }

    proptest! {
        #[test]
        fn the_timer_agrees_with_a_counter(steps in prop::collection::vec(step(), 1..60)) {
            let mut ns = 0;
            let mut timer = timer(TimerMode::OneShot, DIVIDE_BY_1);
            let mut model = Model { tick_ns: 1, ..Model::default() };
            for step in steps {
                match step {
                    Step::Wait(wait_ns) => {
                        ns += wait_ns;
                        model.advance(wait_ns);
                    }
                    Step::Mode(periodic) => {
                        let mode =
                            if periodic { TimerMode::Periodic } else { TimerMode::OneShot };
                        timer.set_mode(mode);
                        model.periodic = periodic;
                    }
                    Step::Divide(divide) => {
                        timer.set_divide(divide, at(ns));
                        model.tick_ns = timer.tick_ns();
                        model.phase_ns = 0;
                    }
                    Step::Initial(count) => {
                        timer.set_initial_count(count, at(ns));
                        (model.initial, model.count, model.phase_ns) = (count, count, 0);
                    }
                }
                prop_assert_eq!(timer.current_count(at(ns)), model.count);
                prop_assert_eq!(timer.expire(at(ns)), std::mem::take(&mut model.expired));
                prop_assert_eq!(timer.current_count(at(ns)), model.count);
                let left_ns = (model.count > 0)
                    .then(|| u64::from(model.count) * model.tick_ns - model.phase_ns);
                prop_assert_eq!(timer.deadline_ns(at(ns)), left_ns.map(|left| ns + left));
            }
        }
    }
}
