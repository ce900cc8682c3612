//! A local APIC as its vCPU uses it. Modes and registers are tested in [`registers`].

mod registers;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::irqchip::message::{DeliveryMode, Destination};
use crate::irqchip::testing::*;

const PERIODIC: u32 = 1 << 17;
const DEADLINE: u32 = 2 << 17;
const DIVIDE_BY_1: u32 = 0b1011;

/// A machine of one software-enabled local APIC.
fn single() -> (Machine, LocalApic) {
    let mut machine = Machine::xapic(1);
    let lapic = machine.lapics.pop().unwrap();
    (machine, lapic)
}

/// Sends itself `vectors`.
fn request(lapic: &mut LocalApic, vectors: &[u8]) {
    for &vector in vectors {
        lapic.command(0, 1 << 18 | u32::from(vector));
    }
}

#[test]
fn the_highest_vector_is_first() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x31, 0xfe, 0x80]);
    assert_eq!(lapic.vectors(IRR), [0x31, 0x80, 0xfe]);
    for vector in [0xfe, 0x80, 0x31] {
        assert_eq!(lapic.serve(), Some(vector));
        assert_eq!(lapic.vectors(ISR), [vector]);
        lapic.eoi();
    }
    assert_eq!(lapic.pending_vector(), None);
}

#[test]
fn pending_is_asked_without_being_taken() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x31]);
    assert_eq!((lapic.pending_vector(), lapic.pending_vector()), (Some(0x31), Some(0x31)));
    assert_eq!(lapic.vectors(IRR), [0x31]);
    assert!(!lapic.accept(0x32), "was not requested");
    assert_eq!(lapic.vectors(ISR), []);
}

#[test]
fn interrupts_nest_by_class_and_end_in_order() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x31]);
    assert_eq!(lapic.serve(), Some(0x31));
    request(&mut lapic, &[0x3f, 0x30, 0x22]);
    assert_eq!(lapic.pending_vector(), None, "the same class, and a lower one");
    request(&mut lapic, &[0x40]);
    assert_eq!(lapic.serve(), Some(0x40));
    assert_eq!(lapic.vectors(ISR), [0x31, 0x40]);
    assert_eq!(lapic.processor_priority(), 0x40);
    lapic.eoi();
    assert_eq!((lapic.vectors(ISR), lapic.processor_priority()), (vec![0x31], 0x30));
    assert_eq!(lapic.pending_vector(), None);
    lapic.eoi();
    for vector in [0x3f, 0x30, 0x22] {
        assert_eq!(lapic.serve(), Some(vector));
        lapic.eoi();
    }
}

#[test]
fn a_vector_in_service_can_be_requested_once_more() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x31]);
    assert_eq!(lapic.serve(), Some(0x31));
    request(&mut lapic, &[0x31, 0x31]);
    assert_eq!((lapic.vectors(IRR), lapic.pending_vector()), (vec![0x31], None));
    lapic.eoi();
    assert_eq!(lapic.serve(), Some(0x31));
    lapic.eoi();
    assert_eq!(lapic.pending_vector(), None);
}

#[test]
fn an_end_of_interrupt_with_nothing_in_service_does_nothing() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x31]);
    lapic.eoi();
    assert_eq!(lapic.vectors(IRR), [0x31]);
}

#[test]
fn the_task_priority_holds_back_its_class_and_those_below() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x5f]);
    lapic.write_reg(TPR, 0x50);
    assert_eq!((lapic.processor_priority(), lapic.pending_vector()), (0x50, None));
    lapic.write_reg(TPR, 0x4f);
    assert_eq!((lapic.processor_priority(), lapic.pending_vector()), (0x4f, Some(0x5f)));
    lapic.write_reg(TPR, 0xff);
    request(&mut lapic, &[0xff]);
    assert_eq!(lapic.pending_vector(), None, "nothing passes class 15");
}

#[test]
fn the_processor_priority_is_the_higher_of_task_and_service() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x57]);
    lapic.serve().unwrap();
    for (tpr, ppr) in [(0x00, 0x50), (0x4f, 0x50), (0x50, 0x50), (0x53, 0x53), (0x61, 0x61)] {
        lapic.write_reg(TPR, tpr);
        assert_eq!(lapic.read_reg(PPR), ppr, "{tpr:#x}");
    }
}

#[test]
fn cr8_is_the_class_of_the_task_priority() {
    let (_machine, mut lapic) = single();
    lapic.set_cr8(5);
    assert_eq!((lapic.read_reg(TPR), lapic.cr8()), (0x50, 5));
    lapic.write_reg(TPR, 0x67);
    assert_eq!(lapic.cr8(), 6);
    lapic.set_cr8(6);
    assert_eq!(lapic.read_reg(TPR), 0x67, "not written by the guest");
    lapic.set_cr8(0xf7);
    assert_eq!(lapic.read_reg(TPR), 0x70);
    lapic.set_cr8(0);
    assert_eq!(lapic.read_reg(TPR), 0);
}

#[test]
fn a_software_disabled_apic_keeps_what_it_has_and_takes_no_more() {
    let (machine, mut lapic) = single();
    lapic.write_reg(LVT_TIMER, 0xec);
    request(&mut lapic, &[0x31, 0x41]);
    assert_eq!(lapic.serve(), Some(0x41));
    lapic.write_reg(SVR, 0xff);
    assert!(!machine.msi(0, false, 0x51));
    request(&mut lapic, &[0x61]);
    assert_eq!((lapic.vectors(IRR), lapic.vectors(ISR)), (vec![0x31], vec![0x41]));
    lapic.eoi();
    assert_eq!(lapic.pending_vector(), Some(0x31));
    assert_eq!(lapic.read_reg(LVT_TIMER), 0x1_00ec, "masked");
    lapic.write_reg(LVT_TIMER, 0xec);
    assert_eq!(lapic.read_reg(LVT_TIMER), 0x1_00ec, "and stays so");
    lapic.write_reg(SVR, 0x1ff);
    assert_eq!(lapic.read_reg(LVT_TIMER), 0x1_00ec, "until it is written");
    lapic.write_reg(LVT_TIMER, 0xec);
    assert_eq!(lapic.read_reg(LVT_TIMER), 0xec);
}

#[test]
fn the_spurious_vector_is_never_put_in_service() {
    let (_machine, mut lapic) = single();
    request(&mut lapic, &[0x31]);
    assert_eq!(lapic.pending_vector(), Some(0x31));
    lapic.set_cr8(15);
    assert_eq!(lapic.pending_vector(), None);
    assert_eq!((lapic.vectors(IRR), lapic.vectors(ISR)), (vec![0x31], vec![]));
}

#[test]
fn a_halted_processor_goes_on_for_what_it_can_take() {
    let (machine, mut lapic) = single();
    assert!(!lapic.has_wake_event(true));
    request(&mut lapic, &[0x31]);
    assert!(lapic.has_wake_event(true) && !lapic.has_wake_event(false));
    lapic.set_cr8(3);
    assert!(!lapic.has_wake_event(true));
    for mode in [DeliveryMode::Nmi, DeliveryMode::Init] {
        let interrupt = Interrupt { destination: Destination::All, mode, vector: 0, level: false };
        assert!(machine.chip.bus().send(&interrupt, None));
        assert!(lapic.has_wake_event(false));
        assert!(lapic.take_nmi() != lapic.take_init());
        assert!(!lapic.has_wake_event(true));
    }
}

#[test]
fn init_resets_all_but_identifier_and_mode() {
    for mut machine in [Machine::xapic(2), Machine::x2apic(2)] {
        let base = machine.lapics[1].apic_base();
        let lapic = &mut machine.lapics[1];
        lapic.write_reg(LVT_TIMER, 0xec);
        lapic.write_reg(INITIAL_COUNT, 1000);
        lapic.write_reg(TPR, 0x20);
        lapic.command(0, 1 << 18 | 0x31);
        lapic.command(0, 1 << 18 | 0x41);
        lapic.serve().unwrap();
        assert!(machine.msi(1, false, 0xc051));
        machine.lapics[0].command(1, 0xc500);
        let lapic = &mut machine.lapics[1];
        assert!(lapic.take_init());
        assert_eq!(lapic.apic_base(), base);
        assert_eq!((lapic.vectors(IRR), lapic.vectors(ISR)), (vec![], vec![]));
        assert_eq!(lapic.vectors(TMR), []);
        assert_eq!((lapic.read_reg(SVR), lapic.read_reg(TPR)), (0xff, 0));
        assert_eq!(lapic.read_reg(LVT_TIMER), 0x1_0000);
        assert_eq!(lapic.read_reg(CURRENT_COUNT), 0);
        assert!(!machine.msi(1, false, 0x31), "software-disabled for senders, too");
    }
}

#[test]
fn the_timer_requests_its_vector_when_its_time_has_come() {
    let (machine, mut lapic) = single();
    lapic.write_reg(DIVIDE, DIVIDE_BY_1);
    lapic.write_reg(LVT_TIMER, 0xec);
    lapic.write_reg_at(INITIAL_COUNT, 1000, at(500));
    assert_eq!(lapic.next_timer_deadline_ns(at(600)), Some(1500));
    assert!(!lapic.timer_tick(at(1499)));
    assert_eq!(lapic.read_reg_at(CURRENT_COUNT, at(1499)), 1);
    assert_eq!(lapic.pending_vector(), None);
    assert!(lapic.timer_tick(at(1500)) && !lapic.timer_tick(at(1501)));
    assert_eq!(lapic.serve(), Some(0xec));
    assert_eq!(lapic.next_timer_deadline_ns(at(1501)), None);
    assert_eq!(machine.bells[0].take(), 0, "the owner needs no notification");
}

#[test]
fn a_periodic_timer_requests_its_vector_again_and_again() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(DIVIDE, DIVIDE_BY_1);
    lapic.write_reg(LVT_TIMER, PERIODIC | 0xec);
    lapic.write_reg(INITIAL_COUNT, 100);
    for period in 1..5 {
        assert_eq!(lapic.next_timer_deadline_ns(at(period * 100 - 1)), Some(period * 100));
        assert!(lapic.timer_tick(at(period * 100)));
        assert_eq!(lapic.serve(), Some(0xec));
        lapic.eoi();
    }
    lapic.write_reg_at(INITIAL_COUNT, 0, at(450));
    assert_eq!(lapic.next_timer_deadline_ns(at(450)), None);
}

#[test]
fn a_masked_timer_counts_in_silence() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(DIVIDE, DIVIDE_BY_1);
    lapic.write_reg(LVT_TIMER, PERIODIC | LVT_MASKED | 0xec);
    lapic.write_reg(INITIAL_COUNT, 100);
    assert_eq!(lapic.next_timer_deadline_ns(at(0)), None);
    assert_eq!(lapic.read_reg_at(CURRENT_COUNT, at(30)), 70);
    lapic.write_reg_at(LVT_TIMER, PERIODIC | 0xec, at(250));
    assert_eq!(lapic.pending_vector(), None, "what passed while it was masked is gone");
    assert_eq!(lapic.next_timer_deadline_ns(at(250)), Some(300));
}

#[test]
fn an_expiry_before_a_register_access_is_not_lost_to_it() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(DIVIDE, DIVIDE_BY_1);
    let rearm: [(u32, u32); 4] =
        [(INITIAL_COUNT, 0), (LVT_TIMER, 0x1_00ec), (SVR, 0xff), (DIVIDE, 0)];
    for (register, value) in rearm {
        lapic.write_reg(SVR, 0x1ff);
        lapic.write_reg(LVT_TIMER, 0xec);
        lapic.write_reg_at(INITIAL_COUNT, 100, at(0));
        lapic.write_reg_at(register, value, at(150));
        assert_eq!(lapic.serve(), Some(0xec), "{register:#x}");
        lapic.eoi();
        lapic.write_reg(DIVIDE, DIVIDE_BY_1);
    }
}

#[test]
fn a_tsc_deadline_fires_when_it_is_reached() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(LVT_TIMER, DEADLINE | 0xec);
    lapic.write_msr(MSR_TSC_DEADLINE, 2000, at(0)).unwrap();
    assert_eq!(lapic.read_msr(MSR_TSC_DEADLINE, at(999)), Ok(2000));
    assert_eq!(lapic.next_timer_deadline_ns(at(400)), Some(1000));
    assert_eq!(lapic.pending_vector(), None);
    assert_eq!(lapic.read_msr(MSR_TSC_DEADLINE, at(1000)), Ok(0), "reading finds it expired");
    assert_eq!(lapic.serve(), Some(0xec));
    assert_eq!(lapic.next_timer_deadline_ns(at(1000)), None);
}

#[test]
fn a_tsc_deadline_in_the_past_fires_with_the_write() {
    for past in [1, 1_999, 2_000] {
        let (_machine, mut lapic) = single();
        lapic.write_reg(LVT_TIMER, DEADLINE | 0xec);
        lapic.write_msr(MSR_TSC_DEADLINE, past, at(1000)).unwrap();
        assert_eq!(lapic.pending_vector(), Some(0xec));
        assert_eq!(lapic.read_msr(MSR_TSC_DEADLINE, at(1000)), Ok(0));
    }
}

#[test]
fn a_new_tsc_deadline_does_not_lose_an_expired_one() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(LVT_TIMER, DEADLINE | 0xec);
    lapic.write_msr(MSR_TSC_DEADLINE, 100, at(0)).unwrap();
    lapic.write_msr(MSR_TSC_DEADLINE, 4000, at(1000)).unwrap();
    assert_eq!(lapic.serve(), Some(0xec));
    assert_eq!(lapic.next_timer_deadline_ns(at(1000)), Some(2000));
}

#[test]
fn a_tsc_deadline_is_replaced_disarmed_and_ignored_in_other_modes() {
    let (_machine, mut lapic) = single();
    lapic.write_msr(MSR_TSC_DEADLINE, 1, at(100)).unwrap();
    assert_eq!(lapic.read_msr(MSR_TSC_DEADLINE, at(100)), Ok(0));
    lapic.write_reg_at(LVT_TIMER, DEADLINE | 0xec, at(100));
    lapic.write_msr(MSR_TSC_DEADLINE, 400, at(100)).unwrap();
    lapic.write_msr(MSR_TSC_DEADLINE, 4000, at(199)).unwrap();
    assert!(!lapic.timer_tick(at(1999)));
    lapic.write_msr(MSR_TSC_DEADLINE, 0, at(1999)).unwrap();
    assert!(!lapic.timer_tick(at(5000)));
    assert_eq!(lapic.pending_vector(), None);
}

/// Sends an interrupt with an illegal vector.
fn send_illegal(lapic: &mut LocalApic) {
    request(lapic, &[0x0f]);
}

#[test]
fn errors_show_once_the_status_register_is_written() {
    let (_machine, mut lapic) = single();
    send_illegal(&mut lapic);
    assert_eq!(lapic.read_reg(ESR), 0);
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), ERROR_SEND_ILLEGAL_VECTOR);
    assert_eq!(lapic.read_reg(ESR), ERROR_SEND_ILLEGAL_VECTOR, "reading changes nothing");
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), 0);
}

#[test]
fn an_error_interrupts_once_until_the_status_register_is_written() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(LVT_ERROR, 0xfe);
    for _ in 0..2 {
        send_illegal(&mut lapic);
        assert_eq!(lapic.serve(), Some(0xfe));
        lapic.eoi();
        send_illegal(&mut lapic);
        assert_eq!(lapic.pending_vector(), None);
        lapic.write_reg(ESR, 0);
    }
}

#[test]
fn a_masked_error_is_only_recorded() {
    let (_machine, mut lapic) = single();
    send_illegal(&mut lapic);
    assert_eq!(lapic.pending_vector(), None);
    lapic.write_reg(LVT_ERROR, 0xfe);
    send_illegal(&mut lapic);
    assert_eq!(lapic.pending_vector(), Some(0xfe), "the masked one did not use up the interrupt");
}

#[test]
fn an_illegal_vector_from_elsewhere_is_the_receivers_error() {
    let (machine, mut lapic) = single();
    lapic.write_reg(LVT_ERROR, 0xfe);
    assert!(!machine.msi(0, false, 0x0f));
    assert_eq!(machine.bells[0].take(), 1);
    assert_eq!((lapic.serve(), lapic.vectors(IRR)), (Some(0xfe), vec![]));
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), ERROR_RECEIVE_ILLEGAL_VECTOR);
    assert!(!machine.msi(0, false, 0x00));
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), ERROR_RECEIVE_ILLEGAL_VECTOR, "found by the write itself");
}

#[test]
fn an_illegal_vector_in_the_local_vector_table_is_an_error_and_ends_there() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(LVT_TIMER, DEADLINE | 0x05);
    lapic.write_reg(LVT_ERROR, 0x06);
    lapic.write_msr(MSR_TSC_DEADLINE, 1, at(10)).unwrap();
    for _ in 0..3 {
        assert_eq!(lapic.pending_vector(), None);
    }
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), ERROR_RECEIVE_ILLEGAL_VECTOR);
}

#[derive(Clone, Debug)]
enum Step {
    Request(u8, bool),
    TaskPriority(u8),
    Cr8(u8),
    Serve,
    Eoi,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any::<u8>(), any::<bool>()).prop_map(|(vector, level)| Step::Request(vector, level)),
        1 => any::<u8>().prop_map(Step::TaskPriority),
        1 => (0..16u8).prop_map(Step::Cr8),
        3 => Just(Step::Serve),
        3 => Just(Step::Eoi),
    ]
}

proptest! {
    #[test]
    fn priorities_agree_with_a_model_of_sets(steps in prop::collection::vec(step(), 0..200)) {
        let (machine, mut lapic) = single();
        let (mut irr, mut isr, mut tmr) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut tpr: u8 = 0;
        for step in steps {
            let blocking = isr.last().map_or(0, |vector: &u8| vector / 16).max(tpr / 16);
            let next = irr.last().copied().filter(|vector: &u8| vector / 16 > blocking);
            prop_assert_eq!(lapic.pending_vector(), next);
            match step {
                Step::Request(vector, level) => {
                    machine.msi(0, false, if level { 0xc000 } else { 0 } | u32::from(vector));
                    if vector >= 16 {
                        irr.insert(vector);
                        if level { tmr.insert(vector) } else { tmr.remove(&vector) };
                    }
                }
                Step::TaskPriority(priority) => {
                    tpr = priority;
                    lapic.write_reg(TPR, priority.into());
                }
                Step::Cr8(cr8) => {
                    if cr8 != tpr / 16 {
                        tpr = cr8 * 16;
                    }
                    lapic.set_cr8(cr8);
                }
                Step::Serve => {
                    prop_assert_eq!(lapic.serve(), next);
                    if let Some(vector) = next {
                        irr.remove(&vector);
                        isr.insert(vector);
                    }
                }
                Step::Eoi => {
                    isr.pop_last();
                    lapic.eoi();
                }
            }
            prop_assert_eq!(lapic.read_reg(TPR), u32::from(tpr));
            prop_assert_eq!(lapic.vectors(IRR), Vec::from_iter(irr.iter().copied()));
            prop_assert_eq!(lapic.vectors(ISR), Vec::from_iter(isr.iter().copied()));
            prop_assert_eq!(lapic.vectors(TMR), Vec::from_iter(tmr.iter().copied()));
        }
    }
}

/// Two threads send all vectors, each again as soon as it was served: none may get lost, and each
/// may be served once only.
#[test]
fn no_request_of_another_thread_is_lost() {
    const TIMES: u32 = 200;
    const TURNS: u32 = 50_000_000;
    let (machine, mut lapic) = single();
    let served: Vec<AtomicU32> = (0..=255).map(|_| AtomicU32::new(0)).collect();
    let stop = AtomicBool::new(false);
    let (bus, served, stop) = (machine.chip.bus(), &served, &stop);
    let mut total = 0;
    thread::scope(|scope| {
        for parity in 0..2 {
            scope.spawn(move || {
                for time in 0..TIMES {
                    for vector in (16 + parity..=255).step_by(2) {
                        while served[usize::from(vector)].load(Ordering::Acquire) < time {
                            if stop.load(Ordering::Relaxed) {
                                return;
                            }
                            thread::yield_now();
                        }
                        let interrupt = Interrupt {
                            destination: Destination::Physical(0),
                            mode: DeliveryMode::Fixed,
                            vector,
                            level: false,
                        };
                        assert!(bus.send(&interrupt, None));
                    }
                }
            });
        }
        for _ in 0..TURNS {
            match lapic.serve() {
                Some(vector) => {
                    lapic.eoi();
                    served[usize::from(vector)].fetch_add(1, Ordering::Release);
                    total += 1;
                }
                None => thread::yield_now(),
            }
            if total == TIMES * 240 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(total, TIMES * 240);
    assert!(served.iter().skip(16).all(|count| count.load(Ordering::Relaxed) == TIMES));
    assert_eq!(lapic.pending_vector(), None);
}

/// The order that [`Notify`](crate::irqchip::Notify) promises: a vCPU that sees no request after
/// it said that it sleeps is notified afterwards.
#[test]
fn a_request_is_seen_or_notified() {
    const ROUNDS: u32 = 20_000;
    let (machine, mut lapic) = single();
    let (bell, chip) = (&machine.bells[0], &machine.chip);
    let turn = AtomicU32::new(0);
    let turn = &turn;
    let mut missed = None;
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 1..=ROUNDS {
                while turn.load(Ordering::Acquire) < round {
                    thread::yield_now();
                }
                chip.deliver(crate::irq::MsiMessage { address: 0xfee0_0000, data: 0x40 });
            }
        });
        for round in 1..=ROUNDS {
            turn.store(round, Ordering::Release);
            let mut notified = false;
            for _ in 0..10_000_000 {
                notified |= bell.take() != 0;
                if notified {
                    break;
                }
                thread::yield_now();
            }
            if !notified || lapic.serve() != Some(0x40) {
                missed.get_or_insert(round);
            }
            lapic.eoi();
        }
    });
    assert_eq!(missed, None);
}
