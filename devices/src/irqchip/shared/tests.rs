//! Which local APICs a message reaches, and what it leaves there.

use proptest::prelude::*;

use super::*;
use crate::irqchip::testing::*;

const VECTOR: u8 = 0x55;
const NOBODY: [u32; 0] = [];

fn fixed(destination: Destination) -> Interrupt {
    Interrupt { destination, mode: DeliveryMode::Fixed, vector: VECTOR, level: false }
}

/// Who gets a fixed interrupt that no local APIC sent.
fn reached(machine: &mut Machine, destination: Destination) -> Vec<u32> {
    let accepted = machine.chip.bus().send(&fixed(destination), None);
    let receivers = machine.receivers(VECTOR);
    assert_eq!(accepted, !receivers.is_empty());
    receivers
}

fn set_logical_ids(machine: &mut Machine, dfr: u32, ids: &[u8]) {
    for (lapic, &id) in machine.lapics.iter_mut().zip(ids) {
        lapic.write_reg(DFR, dfr);
        lapic.write_reg(LDR, u32::from(id) << 24);
    }
}

#[test]
fn addressing_survives_packing() {
    for mode in [ApicMode::Disabled, ApicMode::XApic, ApicMode::X2Apic] {
        for bits in 0..4 {
            let addressing = Addressing {
                mode,
                software_enabled: bits & 1 != 0,
                flat: bits & 2 != 0,
                logical_id: 0xa5,
                task_priority: 0x7e,
            };
            assert_eq!(Addressing::unpack(addressing.pack()), addressing);
        }
    }
}

#[test]
fn a_physical_destination_is_one_identifier() {
    for mut machine in [Machine::xapic(4), Machine::x2apic(4)] {
        assert_eq!(reached(&mut machine, Destination::Physical(2)), [2]);
        assert_eq!(reached(&mut machine, Destination::Physical(4)), NOBODY);
        assert_eq!(reached(&mut machine, Destination::Physical(0xff)), NOBODY);
        assert_eq!(reached(&mut machine, Destination::Physical(BROADCAST)), [0, 1, 2, 3]);
    }
}

#[test]
fn flat_logical_destinations_are_a_set_of_bits() {
    let mut machine = Machine::xapic(4);
    set_logical_ids(&mut machine, 0xffff_ffff, &[1, 2, 4, 0x84]);
    assert_eq!(reached(&mut machine, Destination::Logical(0b0001)), [0]);
    assert_eq!(reached(&mut machine, Destination::Logical(0b0110)), [1, 2, 3]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x80)), [3]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x78)), NOBODY);
    assert_eq!(reached(&mut machine, Destination::Logical(0)), NOBODY);
    assert_eq!(reached(&mut machine, Destination::Logical(BROADCAST)), [0, 1, 2, 3]);
    assert_eq!(
        reached(&mut machine, Destination::Logical(0x1_0001)),
        NOBODY,
        "an x2APIC's cluster"
    );
}

#[test]
fn cluster_logical_destinations_are_a_cluster_and_a_set_of_bits_in_it() {
    let mut machine = Machine::xapic(4);
    set_logical_ids(&mut machine, 0x0fff_ffff, &[0x01, 0x02, 0x11, 0x12]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x01)), [0]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x03)), [0, 1]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x1f)), [2, 3]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x21)), NOBODY);
    assert_eq!(reached(&mut machine, Destination::Logical(0x10)), NOBODY);
    assert_eq!(reached(&mut machine, Destination::Logical(BROADCAST)), [0, 1, 2, 3]);
}

#[test]
fn x2apic_logical_identifiers_follow_from_the_identifier() {
    let mut machine = Machine::x2apic(35);
    assert_eq!(machine.lapics[0].read_reg(LDR), 0x0000_0001);
    assert_eq!(machine.lapics[15].read_reg(LDR), 0x0000_8000);
    assert_eq!(machine.lapics[16].read_reg(LDR), 0x0001_0001);
    assert_eq!(machine.lapics[34].read_reg(LDR), 0x0002_0004);
    assert_eq!(reached(&mut machine, Destination::Logical(0x0001_8003)), [16, 17, 31]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x0002_ffff)), [32, 33, 34]);
    assert_eq!(reached(&mut machine, Destination::Logical(0x0003_0001)), NOBODY);
    assert_eq!(reached(&mut machine, Destination::Logical(0x0002_0000)), NOBODY);
    let all = Vec::from_iter(0..35);
    assert_eq!(reached(&mut machine, Destination::Logical(BROADCAST)), all);
}

#[test]
fn an_8_bit_broadcast_reaches_x2apics_too() {
    let mut machine = Machine::x2apic(3);
    for logical in [false, true] {
        assert!(machine.msi(0xff, logical, VECTOR.into()));
        assert_eq!(machine.receivers(VECTOR), [0, 1, 2]);
    }
}

#[test]
fn in_x2apic_mode_ff_is_an_identifier_and_no_broadcast() {
    let mut machine = Machine::x2apic(3);
    machine.lapics[0].command(0xff, VECTOR.into());
    assert_eq!(machine.receivers(VECTOR), NOBODY);
    machine.lapics[0].command(u32::MAX, VECTOR.into());
    assert_eq!(machine.receivers(VECTOR), [0, 1, 2]);
}

#[test]
fn identifiers_above_255_are_reached_from_x2apic_mode() {
    let mut machine = Machine::x2apic(300);
    machine.lapics[0].command(299, VECTOR.into());
    assert_eq!(machine.receivers(VECTOR), [299]);
}

#[test]
fn shorthands_are_relative_to_the_sender() {
    for mut machine in [Machine::xapic(3), Machine::x2apic(3)] {
        for (shorthand, receivers) in [(1, vec![1]), (2, vec![0, 1, 2]), (3, vec![0, 2])] {
            machine.lapics[1].command(0, shorthand << 18 | u32::from(VECTOR));
            assert_eq!(machine.receivers(VECTOR), receivers, "{shorthand}");
        }
        assert_eq!(reached(&mut machine, Destination::Myself), NOBODY);
        assert_eq!(reached(&mut machine, Destination::All), [0, 1, 2]);
    }
}

#[test]
fn a_sender_is_not_notified_of_what_it_sends_itself() {
    let mut machine = Machine::x2apic(2);
    machine.lapics[0].command(0, 2 << 18 | u32::from(VECTOR));
    assert_eq!([machine.bells[0].take(), machine.bells[1].take()], [0, 1]);
    assert_eq!(machine.receivers(VECTOR), [0, 1]);
}

#[test]
fn requests_that_become_one_notify_once() {
    let mut machine = Machine::xapic(1);
    for _ in 0..3 {
        assert!(machine.msi(0, false, VECTOR.into()));
    }
    assert_eq!(machine.bells[0].take(), 1);
    assert_eq!(machine.take_vectors(), [(0, VECTOR)]);
    assert!(machine.msi(0, false, VECTOR.into()));
    assert_eq!(machine.bells[0].take(), 1);
}

#[test]
fn lowest_priority_reaches_one_of_those_with_the_lowest_task_priority() {
    let mut machine = Machine::xapic(4);
    set_logical_ids(&mut machine, 0xffff_ffff, &[1, 2, 4, 8]);
    for (lapic, priority) in machine.lapics.iter_mut().zip([0x30, 0x20, 0x2f, 0x10]) {
        lapic.write_reg(TPR, priority);
    }
    let lowest = |destination, vector| Interrupt {
        mode: DeliveryMode::LowestPriority,
        vector,
        ..fixed(Destination::Logical(destination))
    };
    let one = |machine: &mut Machine, destination, vector| {
        assert!(machine.chip.bus().send(&lowest(destination, vector), None));
        let receivers = machine.receivers(vector);
        assert_eq!(receivers.len(), 1, "{receivers:?}");
        receivers[0]
    };
    assert_eq!(one(&mut machine, 0b1111, 0x80), 3);
    assert_eq!(one(&mut machine, 0b0011, 0x80), 1);
    // 1 and 2 are of the same class: the vector decides, always in the same way.
    let mut spread = [0; 4];
    for vector in 0x40..=0xff {
        let id = one(&mut machine, 0b0111, vector);
        assert_eq!(one(&mut machine, 0b0111, vector), id);
        spread[id as usize] += 1;
    }
    assert_eq!(spread[0] + spread[3], 0);
    assert!(spread[1] >= 64 && spread[2] >= 64, "{spread:?}");
}

#[test]
fn lowest_priority_passes_by_those_that_are_disabled() {
    let mut machine = Machine::xapic(2);
    machine.lapics[0].write_reg(SVR, 0xff);
    machine.lapics[1].write_reg(TPR, 0x20);
    let all = Interrupt { mode: DeliveryMode::LowestPriority, ..fixed(Destination::All) };
    assert!(machine.chip.bus().send(&all, None));
    assert_eq!(machine.receivers(VECTOR), [1]);
    machine.lapics[1].set_apic_base(0xfee0_0000).unwrap();
    assert!(!machine.chip.bus().send(&all, None));
}

#[test]
fn a_software_disabled_apic_takes_everything_but_vectors() {
    let machine = &mut Machine::reset(2);
    assert!(!machine.msi(1, false, VECTOR.into()));
    for mode in [DeliveryMode::Nmi, DeliveryMode::Init, DeliveryMode::StartUp] {
        let interrupt = Interrupt { mode, ..fixed(Destination::Physical(1)) };
        assert!(machine.chip.bus().send(&interrupt, Some(0)));
    }
    let lapic = &mut machine.lapics[1];
    assert!(lapic.take_nmi() && lapic.take_init());
    assert_eq!((lapic.take_sipi(), lapic.pending_vector()), (Some(VECTOR), None));
}

#[test]
fn a_disabled_apic_takes_nothing() {
    let machine = &mut Machine::xapic(2);
    machine.lapics[1].set_apic_base(0xfee0_0000).unwrap();
    for destination in [Destination::Physical(1), Destination::AllButSelf] {
        for mode in [DeliveryMode::Fixed, DeliveryMode::Nmi, DeliveryMode::Init] {
            let interrupt = Interrupt { mode, ..fixed(destination) };
            assert!(!machine.chip.bus().send(&interrupt, Some(0)));
        }
    }
    assert_eq!(machine.bells[1].take(), 0);
}

#[test]
fn smi_and_extint_are_ignored() {
    let machine = Machine::xapic(1);
    for mode in [DeliveryMode::Smi, DeliveryMode::ExtInt] {
        let interrupt = Interrupt { mode, ..fixed(Destination::All) };
        assert!(!machine.chip.bus().send(&interrupt, None));
    }
    assert_eq!(machine.bells[0].take(), 0);
}

#[test]
fn nmis_become_one_and_are_taken_once() {
    let machine = &mut Machine::xapic(2);
    machine.lapics[0].command(1, 0x400);
    machine.lapics[0].command(1, 0x400);
    assert_eq!(machine.bells[1].take(), 1);
    let lapic = &mut machine.lapics[1];
    assert!(lapic.shared().nmi_pending() && lapic.has_wake_event(false));
    assert!(lapic.take_nmi() && !lapic.take_nmi());
}

#[test]
fn init_and_two_start_up_messages_start_a_processor_once_each() {
    for mut machine in [Machine::xapic(2), Machine::x2apic(2)] {
        // The sequence of SDM 9.4.4: INIT, its de-assertion, and the start-up message twice.
        machine.lapics[0].command(1, 0xc500);
        machine.lapics[0].command(1, 0x8500);
        machine.lapics[0].command(1, 0x0698);
        machine.lapics[0].command(1, 0x0665);
        assert_eq!(machine.bells[1].take(), 3);
        let lapic = &mut machine.lapics[1];
        assert!(lapic.shared().init_pending() && lapic.shared().sipi_pending());
        assert!(lapic.take_init() && !lapic.take_init());
        assert_eq!((lapic.take_sipi(), lapic.take_sipi()), (Some(0x65), None));
    }
}

#[test]
fn an_init_voids_the_start_up_messages_before_it() {
    let machine = &mut Machine::xapic(2);
    machine.lapics[0].command(1, 0x0698);
    machine.lapics[0].command(1, 0xc500);
    let lapic = &mut machine.lapics[1];
    assert!(lapic.take_init());
    assert_eq!(lapic.take_sipi(), None);
}

#[test]
fn the_trigger_mode_register_follows_the_last_message() {
    let mut machine = Machine::xapic(1);
    for level in [true, false, true] {
        assert!(machine.msi(0, false, if level { 0xc000 } else { 0 } | u32::from(VECTOR)));
        assert_eq!(machine.lapics[0].vectors(TMR) == [VECTOR], level);
    }
}

/// What an APIC's registers say, decided bit by bit.
fn model(mode: ApicMode, id: u32, dfr: u32, logical_id: u8, destination: u32) -> bool {
    if destination == u32::MAX {
        return true;
    }
    let shares_bit = |own: u32, bits: std::ops::Range<u32>| {
        bits.into_iter().any(|bit| own >> bit & 1 != 0 && destination >> bit & 1 != 0)
    };
    match mode {
        ApicMode::Disabled => false,
        ApicMode::X2Apic => id / 16 == destination / 65536 && destination >> (id % 16) & 1 != 0,
        ApicMode::XApic if destination > 255 => false,
        ApicMode::XApic if dfr >> 28 == 0xf => shares_bit(logical_id.into(), 0..8),
        ApicMode::XApic => {
            u32::from(logical_id) / 16 == destination / 16 && shares_bit(logical_id.into(), 0..4)
        }
    }
}

fn logical_destination() -> impl Strategy<Value = u32> {
    prop_oneof![
        0..256u32,
        (0..3u32, any::<u16>()).prop_map(|(c, b)| c << 16 | u32::from(b)),
        Just(u32::MAX)
    ]
}

proptest! {
    #[test]
    fn logical_destinations_agree_with_the_bitwise_model(
        lapics in prop::collection::vec((any::<bool>(), any::<bool>(), any::<u8>()), 1..40),
        destination in logical_destination(),
    ) {
        let mut machine = Machine::xapic(lapics.len());
        let mut expected = Vec::new();
        for ((x2apic, flat, logical_id), lapic) in lapics.into_iter().zip(&mut machine.lapics) {
            let dfr = if flat { 0xffff_ffff } else { 0x0fff_ffff };
            lapic.write_reg(DFR, dfr);
            lapic.write_reg(LDR, u32::from(logical_id) << 24);
            if x2apic {
                lapic.set_apic_base(lapic.apic_base() | 1 << 10).unwrap();
            }
            let id = lapic.shared().id();
            if model(lapic.mode(), id, dfr, logical_id, destination) {
                expected.push(id);
            }
        }
        prop_assert_eq!(reached(&mut machine, Destination::Logical(destination)), expected.clone());
        let lowest = Interrupt {
            mode: DeliveryMode::LowestPriority,
            ..fixed(Destination::Logical(destination))
        };
        prop_assert_eq!(machine.chip.bus().send(&lowest, None), !expected.is_empty());
        let receivers = machine.receivers(VECTOR);
        prop_assert_eq!(receivers.len(), expected.len().min(1));
        prop_assert!(receivers.iter().all(|id| expected.contains(id)));
    }
}

#[test]
fn a_vector_is_an_ipi_if_a_local_apic_was_the_last_to_send_it() {
    let machine = Machine::xapic(2);
    let bus = machine.chip.bus();
    let message = fixed(Destination::Physical(1));
    for (from, is_ipi) in [(None, false), (Some(0), true), (Some(1), true), (None, false)] {
        bus.send(&message, from);
        let seen = [0, 1].map(|id: usize| bus.lapics()[id].is_ipi(VECTOR));
        assert_eq!(seen, [false, is_ipi], "{from:?}");
    }
}
