//! Event suppression: who is told of what, and that nobody sleeps on it.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;

/// Adds one chain, pops it and pushes it; not published.
fn one(driver: &mut Driver, queue: &mut Queue, chain: &mut Chain) {
    driver.add(&[Buf::writable(BUFFERS, 1)]);
    driver.publish();
    assert_eq!(queue.pop(chain), Ok(true));
    queue.push(chain.head(), 1);
}

#[test]
fn the_flag_decides_about_interrupts_without_event_idx() {
    let (mut driver, mut queue, _, _) = setup(8, 0);
    let mut chain = Chain::new();
    driver.set_used_event(100);
    for wanted in [true, false, true] {
        driver.want_interrupts(wanted);
        one(&mut driver, &mut queue, &mut chain);
        assert_eq!(queue.publish(), wanted);
        assert!(!queue.publish(), "nothing was pushed since");
    }
}

#[test]
fn the_flag_says_nothing_with_event_idx() {
    let (mut driver, mut queue, _, _) = setup(8, EVENT_IDX);
    driver.set_available_flags(1);
    one(&mut driver, &mut queue, &mut Chain::new());
    assert!(queue.publish(), "used_event is 0, and index 0 was used");
}

#[test]
fn a_batch_is_one_decision_by_whether_it_passed_used_event() {
    for (event, interrupt) in [(0, false), (1, false), (2, true), (3, true), (4, true), (5, false)]
    {
        let (mut driver, mut queue, _, _) = setup(8, EVENT_IDX);
        let mut chain = Chain::new();
        for _ in 0..2 {
            one(&mut driver, &mut queue, &mut chain);
        }
        queue.publish();
        driver.set_used_event(event);
        for _ in 0..3 {
            one(&mut driver, &mut queue, &mut chain);
        }
        assert_eq!(driver.used_index(), 2, "the batch is not visible yet");
        assert_eq!(queue.publish(), interrupt, "used_event {event}, indices 2 to 4 used");
        assert_eq!(driver.used_index(), 5);
    }
}

#[test]
fn kicks_are_switched_by_the_flag_without_event_idx() {
    let (driver, mut queue, _, _) = setup(8, 0);
    assert_eq!(driver.used_flags(), 0);
    queue.disable_kicks();
    queue.disable_kicks();
    assert_eq!(driver.used_flags(), 1);
    assert!(!queue.enable_kicks());
    assert_eq!(driver.used_flags(), 0);
}

#[test]
fn kicks_are_asked_for_by_avail_event_with_event_idx() {
    let (mut driver, mut queue, _, _) = setup(8, EVENT_IDX);
    let mut chain = Chain::new();
    driver.add(&[Buf::readable(BUFFERS, 1)]);
    assert!(driver.publish(), "the first chain is kicked for");
    queue.disable_kicks();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    driver.add(&[Buf::readable(BUFFERS, 1)]);
    assert!(!driver.publish(), "the event index is behind");
    assert_eq!(driver.used_flags(), 0, "the flag is not used");
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert!(!queue.enable_kicks());
    assert_eq!(driver.kick_event(), 2);
    driver.add(&[Buf::readable(BUFFERS, 1)]);
    assert!(driver.publish());
}

#[test]
fn enabling_kicks_tells_of_what_came_meanwhile() {
    for features in [0, EVENT_IDX] {
        let (mut driver, mut queue, _, _) = setup(8, features);
        let mut chain = Chain::new();
        queue.disable_kicks();
        driver.add(&[Buf::readable(BUFFERS, 1)]);
        driver.publish();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        assert_eq!(queue.pop(&mut chain), Ok(false));
        driver.add(&[Buf::readable(BUFFERS, 1)]);
        assert!(!driver.publish(), "no kick comes for this one");
        assert!(queue.enable_kicks());
        assert_eq!(queue.pop(&mut chain), Ok(true));
        assert!(!queue.enable_kicks());
    }
}

/// A device thread and a driver thread, each of which sleeps for good unless the other tells it:
/// a single lost kick or interrupt ends in the time-out.
fn nobody_sleeps_on_work(features: u64) {
    const CHAINS: usize = 40_000;
    let (mut driver, mut queue, _, _) = setup_any(8, features);
    let (kick, kicked) = mpsc::channel();
    let (interrupt, interrupted) = mpsc::channel();
    let device = std::thread::spawn(move || {
        let mut chain = Chain::new();
        let mut done = 0;
        while done < CHAINS {
            queue.disable_kicks();
            while queue.pop(&mut chain).unwrap() {
                queue.push(chain.head(), 1);
                done += 1;
                if done.is_multiple_of(3) && queue.publish() {
                    interrupt.send(()).unwrap();
                }
            }
            if queue.publish() {
                interrupt.send(()).unwrap();
            }
            if done < CHAINS && !queue.enable_kicks() {
                kicked.recv_timeout(testkit::TIMEOUT).expect("a kick was lost");
            }
        }
        // Kicks may still be sent until the driver is done.
        kicked
    });
    let (mut added, mut taken) = (0, 0);
    while taken < CHAINS {
        driver.want_interrupts(false);
        while added < CHAINS && driver.free() > 0 {
            driver.add(&[Buf::writable(BUFFERS, 1)]);
            added += 1;
            if driver.publish() {
                kick.send(()).unwrap();
            }
        }
        let before = taken;
        while driver.take_used().is_some() {
            taken += 1;
        }
        if taken == before {
            driver.want_interrupts(true);
            if !driver.has_used() {
                interrupted.recv_timeout(testkit::TIMEOUT).expect("an interrupt was lost");
            }
        }
    }
    device.join().unwrap();
}

#[test]
fn nobody_sleeps_on_work_with_flags() {
    nobody_sleeps_on_work(0);
}

#[test]
fn nobody_sleeps_on_work_with_event_idx() {
    nobody_sleeps_on_work(EVENT_IDX);
}

#[test]
fn nobody_sleeps_on_work_of_a_packed_queue_with_flags() {
    nobody_sleeps_on_work(PACKED);
}

#[test]
fn nobody_sleeps_on_work_of_a_packed_queue_with_descriptor_events() {
    nobody_sleeps_on_work(PACKED | EVENT_IDX);
}

/// Where two threads meet, to go on at nearly the same moment.
#[derive(Default)]
struct Meeting(AtomicUsize);

impl Meeting {
    /// Waits for the other thread; `visits` counts the caller's own meetings.
    fn meet(&self, visits: &mut usize) {
        *visits += 1;
        self.0.fetch_add(1, Ordering::SeqCst);
        for spins in 1u64.. {
            if self.0.load(Ordering::SeqCst) >= 2 * *visits {
                return;
            }
            // The other one may be waiting for this CPU.
            if spins.is_multiple_of(128) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// One step of a side of a race: true if it saw the other, or told it.
type Step<'a> = &'a mut dyn FnMut() -> bool;

/// Lets two threads do one step each at the same time, again and again: each side gets a function
/// to call with its step. In every round at least one of the steps must be true.
fn race(
    left: impl FnOnce(&mut dyn FnMut(Step<'_>)) + Send,
    right: impl FnOnce(&mut dyn FnMut(Step<'_>)) + Send,
) {
    let meeting = Meeting::default();
    let either = [const { AtomicBool::new(false) }; 2];
    let run = |visits: &mut usize, side: usize, step: Step<'_>| {
        meeting.meet(visits);
        // Now the one is a little earlier, now the other.
        for spin in 0..(*visits / 3 * (7 + 30 * side)) % 101 {
            std::hint::black_box(spin);
        }
        let result = step();
        either[side].store(result, Ordering::SeqCst);
        meeting.meet(visits);
        let told = either.iter().any(|one| one.load(Ordering::SeqCst));
        meeting.meet(visits);
        // In both threads, so that neither waits for the other for ever.
        assert!(told, "round {}: neither side learnt of the other", *visits / 3);
    };
    std::thread::scope(|scope| {
        let mut visits = 0;
        scope.spawn(move || left(&mut |step| run(&mut visits, 0, step)));
        let mut visits = 0;
        right(&mut |step| run(&mut visits, 1, step));
    });
}

const RACES: usize = 20_000;

/// The driver publishes a chain while the device enables kicks: one of them learns of the other.
fn a_chain_or_a_kick_is_seen(features: u64) {
    let (mut driver, mut queue, _, _) = setup_any(8, features);
    race(
        move |round| {
            let mut chain = Chain::new();
            for _ in 0..RACES {
                queue.disable_kicks();
                round(&mut || queue.enable_kicks());
                assert_eq!(queue.pop(&mut chain), Ok(true));
                queue.push(chain.head(), 1);
                queue.publish();
            }
        },
        move |round| {
            for _ in 0..RACES {
                driver.add(&[Buf::writable(BUFFERS, 1)]);
                round(&mut || driver.publish());
                driver.wait_used();
            }
        },
    );
}

/// How long a race of publishing goes on, if it is not over by itself. Nothing depends on it but how
/// often the two threads meet.
const RACE_TIME: Duration = Duration::from_millis(800);
/// One race of that kind at a time.
static RACE: Mutex<()> = Mutex::new(());

/// The device publishes a used chain while the driver enables interrupts: likewise. Without the fence
/// in `publish` the device's look at the driver's wish overtakes its store, for as long as the store
/// waits for its cache line. So that line is made the driver's first, and that of the wish the
/// device's, who then finds it at once, and before the driver's store comes.
fn a_used_chain_or_an_interrupt_is_seen(features: u64) {
    let (mut driver, mut queue, _, memory) = setup_any(8, features);
    let config = driver.config();
    let event_idx_split = features & (PACKED | EVENT_IDX) == EVENT_IDX;
    let wish = config.driver + if event_idx_split { 4 + 2 * u64::from(config.size) } else { 0 };
    // A race needs both CPUs of a small machine.
    let _turn = RACE.lock().unwrap_or_else(PoisonError::into_inner);
    let over = AtomicBool::new(false);
    let start = Instant::now();
    race(
        |round| {
            let mut chain = Chain::new();
            while !over.load(Ordering::Acquire) {
                if !queue.pop(&mut chain).unwrap() {
                    std::thread::yield_now();
                    continue;
                }
                queue.push(chain.head(), 1);
                round(&mut || {
                    std::hint::black_box(memory.load::<u16>(GuestAddress(wish), Ordering::Relaxed))
                        .unwrap();
                    queue.publish()
                });
            }
        },
        |round| {
            while start.elapsed() < RACE_TIME {
                driver.want_interrupts(false);
                driver.add(&[Buf::writable(BUFFERS, 1)]);
                driver.publish();
                round(&mut || {
                    // The device's store now has to wait for this cache line.
                    driver.has_used();
                    driver.want_interrupts(true);
                    driver.has_used()
                });
                driver.wait_used();
            }
            over.store(true, Ordering::Release);
        },
    );
}

#[test]
fn a_chain_or_a_kick_is_seen_with_flags() {
    a_chain_or_a_kick_is_seen(0);
}

#[test]
fn a_chain_or_a_kick_is_seen_with_event_idx() {
    a_chain_or_a_kick_is_seen(EVENT_IDX);
}

#[test]
fn a_used_chain_or_an_interrupt_is_seen_with_flags() {
    a_used_chain_or_an_interrupt_is_seen(0);
}

#[test]
fn a_used_chain_or_an_interrupt_is_seen_with_event_idx() {
    a_used_chain_or_an_interrupt_is_seen(EVENT_IDX);
}

#[test]
fn a_chain_or_a_kick_is_seen_in_a_packed_queue_with_flags() {
    a_chain_or_a_kick_is_seen(PACKED);
}

#[test]
fn a_chain_or_a_kick_is_seen_in_a_packed_queue_with_descriptor_events() {
    a_chain_or_a_kick_is_seen(PACKED | EVENT_IDX);
}

#[test]
fn a_used_chain_or_an_interrupt_is_seen_in_a_packed_queue_with_flags() {
    a_used_chain_or_an_interrupt_is_seen(PACKED);
}

#[test]
fn a_used_chain_or_an_interrupt_is_seen_in_a_packed_queue_with_descriptor_events() {
    a_used_chain_or_an_interrupt_is_seen(PACKED | EVENT_IDX);
}

proptest! {
    /// The rule in one subtraction agrees with counting through the indices.
    #[test]
    fn an_event_is_needed_when_its_index_was_passed(
        old in any::<u16>(),
        count in prop_oneof![3 => 0u16..20, 1 => any::<u16>()],
        ahead in prop_oneof![3 => 0u16..40, 1 => any::<u16>()],
    ) {
        let new = old.wrapping_add(count);
        let event = old.wrapping_sub(10).wrapping_add(ahead);
        let passed = (0..count).any(|i| old.wrapping_add(i) == event);
        prop_assert_eq!(need_event(event, new, old), passed);
    }
}
