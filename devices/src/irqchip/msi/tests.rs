//! The sink of a function's MSIs.

use std::sync::atomic::AtomicBool;
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::irqchip::testing::*;
use crate::pci::msix::Msix;

fn message(vcpu: u64, vector: u32) -> MsiMessage {
    MsiMessage { address: 0xfee0_0000 | vcpu << 12, data: vector }
}

#[test]
fn a_trigger_goes_straight_to_the_destination() {
    let mut machine = Machine::xapic(2);
    let sink = machine.chip.msi_sink(2);
    sink.unmask(0, message(0, 0x40)).unwrap();
    sink.unmask(1, message(1, 0x41)).unwrap();
    sink.trigger(1);
    assert_eq!(machine.bells[1].take(), 1);
    assert_eq!(machine.take_vectors(), [(1, 0x41)]);
    sink.trigger(0);
    assert_eq!(machine.take_vectors(), [(0, 0x40)]);
}

#[test]
fn a_vector_that_was_never_unmasked_is_dropped() {
    let mut machine = Machine::xapic(1);
    let sink = machine.chip.msi_sink(1);
    sink.trigger(0);
    sink.unmask(0, message(0, 0x40)).unwrap();
    assert_eq!(machine.take_vectors(), []);
}

#[test]
fn what_is_triggered_while_masked_is_delivered_once_on_unmask_with_the_new_message() {
    let mut machine = Machine::xapic(2);
    let sink = machine.chip.msi_sink(1);
    sink.unmask(0, message(0, 0x40)).unwrap();
    sink.mask(0).unwrap();
    sink.trigger(0);
    sink.trigger(0);
    assert_eq!(machine.take_vectors(), []);
    sink.unmask(0, message(1, 0x50)).unwrap();
    assert_eq!(machine.take_vectors(), [(1, 0x50)]);
    sink.mask(0).unwrap();
    sink.unmask(0, message(1, 0x50)).unwrap();
    assert_eq!(machine.take_vectors(), []);
}

#[test]
fn a_vector_that_is_unmasked_after_it_was_seen_masked_is_delivered_once() {
    let mut machine = Machine::xapic(1);
    let sink = machine.chip.msi_sink(1);
    sink.unmask(0, message(0, 0x40)).unwrap();
    // What a trigger does that saw the vector as it was before.
    sink.keep(&sink.vectors[0]);
    assert_eq!(machine.take_vectors(), [(0, 0x40)]);
    sink.mask(0).unwrap();
    sink.unmask(0, message(0, 0x40)).unwrap();
    assert_eq!(machine.take_vectors(), []);
}

#[test]
fn unmasking_again_changes_the_message() {
    let mut machine = Machine::xapic(2);
    let sink = machine.chip.msi_sink(1);
    sink.unmask(0, message(0, 0x40)).unwrap();
    sink.unmask(0, message(1, 0x41)).unwrap();
    sink.trigger(0);
    assert_eq!(machine.take_vectors(), [(1, 0x41)]);
}

#[test]
fn vectors_that_do_not_exist_are_errors_or_ignored() {
    let machine = Machine::xapic(1);
    let sink = machine.chip.msi_sink(1);
    assert!(sink.unmask(1, message(0, 0x40)).is_err() && sink.mask(1).is_err());
    sink.trigger(1);
    assert_eq!(machine.bells[0].take(), 0);
}

#[test]
fn messages_to_other_addresses_go_nowhere() {
    let mut machine = Machine::xapic(1);
    let sink = machine.chip.msi_sink(1);
    for address in [0, 0x1000, 0xfec0_0000, 0x1_fee0_0000, u64::MAX] {
        sink.unmask(0, MsiMessage { address, data: 0x40 }).unwrap();
        sink.trigger(0);
    }
    assert_eq!(machine.take_vectors(), []);
}

proptest! {
    #[test]
    fn a_message_survives_packing(address: u32, data: u16, upper: u16) {
        let address = u64::from(address);
        let packed = pack(MsiMessage { address, data: u32::from(upper) << 16 | u32::from(data) });
        prop_assert_eq!(unpack(packed | LIVE | PENDING), MsiMessage { address, data: data.into() });
        prop_assert_eq!(packed & (LIVE | PENDING | KNOWN), KNOWN);
    }
}

/// One thread signals, another masks and unmasks; after the last unmask nothing may be missing.
#[test]
fn a_trigger_that_races_with_mask_and_unmask_is_never_lost() {
    const ROUNDS: u32 = 20_000;
    let mut machine = Machine::xapic(1);
    let sink = machine.chip.msi_sink(1);
    sink.unmask(0, message(0, 0x40)).unwrap();
    let stop = AtomicBool::new(false);
    let mut lost = None;
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                sink.mask(0).unwrap();
                sink.unmask(0, message(0, 0x40)).unwrap();
            }
        });
        'rounds: for round in 0..ROUNDS {
            sink.trigger(0);
            for _ in 0..1_000_000 {
                if machine.lapics[0].serve().is_some() {
                    machine.lapics[0].eoi();
                    continue 'rounds;
                }
                thread::yield_now();
            }
            lost = Some(round);
            break;
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!(lost, None);
}

#[test]
fn an_msix_table_works_on_this_sink() {
    let mut machine = Machine::xapic(1);
    let msix = Msix::new(1, machine.chip.msi_sink(1));
    msix.set_control(true, false);
    msix.write_table(0, &0xfee0_0000_u64.to_le_bytes());
    msix.write_table(8, &0x42_u64.to_le_bytes());
    msix.signal(0);
    assert_eq!(machine.take_vectors(), [(0, 0x42)]);
    msix.set_control(true, true);
    msix.signal(0);
    assert_eq!(machine.take_vectors(), []);
    msix.set_control(true, false);
    assert_eq!(machine.take_vectors(), [(0, 0x42)]);
}
