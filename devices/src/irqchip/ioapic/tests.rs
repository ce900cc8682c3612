//! The I/O APIC through its registers and wires.

use proptest::prelude::*;

use super::*;
use crate::irqchip::testing::{IRR, ISR, LDR, Machine, TMR};

fn write(machine: &Machine, offset: u64, value: u32) {
    machine.chip.ioapic().lock().unwrap().write(offset, &value.to_le_bytes());
}

fn write_register(machine: &Machine, register: u8, value: u32) {
    write(machine, SELECT, register.into());
    write(machine, WINDOW, value);
}

fn read_register(machine: &Machine, register: u8) -> u32 {
    write(machine, SELECT, register.into());
    let mut data = [0xee; 4];
    machine.chip.ioapic().lock().unwrap().read(WINDOW, &mut data);
    u32::from_le_bytes(data)
}

/// Sets pin `pin` up for vCPU `vcpu`, upper half first as guests do.
fn route(machine: &Machine, pin: u8, vcpu: u8, low: u32) {
    write_register(machine, REG_REDIRECTION + 2 * pin + 1, u32::from(vcpu) << 24);
    write_register(machine, REG_REDIRECTION + 2 * pin, low);
}

fn remote_irr(machine: &Machine, pin: u8) -> bool {
    read_register(machine, REG_REDIRECTION + 2 * pin) & REMOTE_IRR as u32 != 0
}

const LEVEL_LOW: u32 = LEVEL as u32;
const MASKED_LOW: u32 = MASKED as u32;

#[test]
fn identification_and_reset_values() {
    let machine = Machine::xapic(1);
    assert_eq!(read_register(&machine, REG_VERSION), 0x0017_0020);
    write_register(&machine, REG_VERSION, 0);
    assert_eq!(read_register(&machine, REG_VERSION), 0x0017_0020);
    write_register(&machine, REG_ID, 0xffff_ffff);
    assert_eq!(read_register(&machine, REG_ID), 0x0f00_0000);
    for pin in 0..PINS {
        assert_eq!(read_register(&machine, REG_REDIRECTION + 2 * pin), 0x0001_0000);
        assert_eq!(read_register(&machine, REG_REDIRECTION + 2 * pin + 1), 0);
    }
    for register in [0x03, 0x0f, 0x40, 0xff] {
        write_register(&machine, register, 0xffff_ffff);
        assert_eq!(read_register(&machine, register), 0, "{register:#x}");
    }
}

#[test]
fn entries_keep_what_is_writable_and_nothing_else() {
    let machine = Machine::xapic(1);
    route(&machine, 23, 0xff, 0xffff_ffff);
    assert_eq!(read_register(&machine, 0x3e), 0x0001_afff);
    assert_eq!(read_register(&machine, 0x3f), 0xff00_0000);
    assert_eq!(read_register(&machine, 0x3c), 0x0001_0000, "the neighbour");
}

#[test]
fn the_select_register_reads_back_and_other_offsets_read_zero() {
    let machine = Machine::xapic(1);
    write(&machine, SELECT, 0x1234_5612);
    let ioapic = machine.chip.ioapic();
    let mut ioapic = ioapic.lock().unwrap();
    for (offset, value) in [(SELECT, 0x12), (4, 0), (0x20, 0), (EOI, 0), (0xfff, 0)] {
        let mut data = [0xee; 8];
        ioapic.read(offset, &mut data);
        assert_eq!(u64::from_le_bytes(data), value, "{offset:#x}");
    }
    let mut byte = [0xee];
    ioapic.read(SELECT, &mut byte);
    assert_eq!(byte, [0x12]);
}

#[test]
fn an_edge_sends_one_message() {
    let mut machine = Machine::xapic(2);
    let line = machine.chip.line(4).unwrap();
    route(&machine, 4, 1, 0x31);
    line.pulse();
    assert_eq!(machine.take_vectors(), [(1, 0x31)]);
    line.set_level(true);
    assert_eq!(machine.take_vectors(), [(1, 0x31)]);
    line.set_level(true);
    line.set_level(false);
    assert_eq!(machine.take_vectors(), []);
    assert!(!remote_irr(&machine, 4));
}

#[test]
fn an_edge_on_a_masked_pin_is_lost() {
    let mut machine = Machine::xapic(1);
    let line = machine.chip.line(4).unwrap();
    route(&machine, 4, 0, 0x31 | MASKED_LOW);
    line.pulse();
    route(&machine, 4, 0, 0x31);
    assert_eq!(machine.take_vectors(), []);
}

#[test]
fn a_level_is_sent_again_after_each_end_while_it_lasts() {
    for mut machine in [Machine::xapic(1), Machine::x2apic(1)] {
        let line = machine.chip.line(9).unwrap();
        route(&machine, 9, 0, 0x31 | LEVEL_LOW);
        line.set_level(true);
        for _ in 0..3 {
            assert!(remote_irr(&machine, 9));
            let lapic = &mut machine.lapics[0];
            assert_eq!(lapic.serve(), Some(0x31));
            assert_eq!(lapic.pending_vector(), None, "not before its end");
            assert_eq!(lapic.vectors(TMR), [0x31]);
            lapic.eoi();
        }
        line.set_level(false);
        assert_eq!(machine.take_vectors(), [(0, 0x31)], "it was sent before");
        assert!(!remote_irr(&machine, 9));
        assert_eq!(machine.take_vectors(), []);
    }
}

#[test]
fn a_level_that_is_masked_waits_for_the_unmask() {
    let mut machine = Machine::xapic(1);
    let line = machine.chip.line(9).unwrap();
    route(&machine, 9, 0, 0x31 | LEVEL_LOW | MASKED_LOW);
    line.set_level(true);
    assert_eq!(machine.take_vectors(), []);
    route(&machine, 9, 0, 0x31 | LEVEL_LOW);
    assert_eq!(machine.lapics[0].serve(), Some(0x31));
    route(&machine, 9, 0, 0x31 | LEVEL_LOW | MASKED_LOW);
    machine.lapics[0].eoi();
    assert!(!remote_irr(&machine, 9));
    assert_eq!(machine.take_vectors(), []);
}

#[test]
fn the_end_of_an_edge_interrupt_is_not_told() {
    let mut machine = Machine::xapic(1);
    let line = machine.chip.line(9).unwrap();
    route(&machine, 9, 0, 0x31 | LEVEL_LOW);
    line.set_level(true);
    assert_eq!(machine.lapics[0].serve(), Some(0x31));
    line.set_level(false);
    // The same vector, from an MSI: edge triggered.
    assert!(machine.msi(0, false, 0x31));
    machine.lapics[0].eoi();
    assert!(remote_irr(&machine, 9));
}

#[test]
fn an_end_only_concerns_pins_with_that_vector() {
    let mut machine = Machine::xapic(1);
    for (pin, vector) in [(9, 0x31), (10, 0x32), (11, 0x31)] {
        route(&machine, pin, 0, vector | LEVEL_LOW);
        machine.chip.line(pin).unwrap().set_level(true);
    }
    assert_eq!(machine.lapics[0].serve(), Some(0x32));
    for pin in [9, 10, 11] {
        machine.chip.line(pin).unwrap().set_level(false);
    }
    machine.lapics[0].eoi();
    assert_eq!([9, 10, 11].map(|pin| remote_irr(&machine, pin)), [true, false, true]);
    assert_eq!(machine.lapics[0].serve(), Some(0x31));
    machine.lapics[0].eoi();
    assert_eq!([9, 10, 11].map(|pin| remote_irr(&machine, pin)), [false; 3]);
}

#[test]
fn the_eoi_register_ends_a_vector_too() {
    let mut machine = Machine::xapic(1);
    route(&machine, 9, 0, 0x31 | LEVEL_LOW);
    machine.chip.line(9).unwrap().set_level(true);
    assert_eq!(machine.lapics[0].serve(), Some(0x31));
    write(&machine, EOI, 0x32);
    assert!(remote_irr(&machine, 9));
    machine.chip.line(9).unwrap().set_level(false);
    write(&machine, EOI, 0x31);
    assert!(!remote_irr(&machine, 9));
}

#[test]
fn making_an_entry_edge_triggered_clears_its_remote_irr() {
    let mut machine = Machine::xapic(1);
    route(&machine, 9, 0, 0x31 | LEVEL_LOW);
    machine.chip.line(9).unwrap().set_level(true);
    assert_eq!(machine.lapics[0].serve(), Some(0x31));
    write_register(&machine, 0x22, 0x31 | MASKED_LOW);
    write_register(&machine, 0x22, 0x31 | MASKED_LOW | LEVEL_LOW);
    assert!(!remote_irr(&machine, 9));
    write_register(&machine, 0x22, 0x31 | LEVEL_LOW);
    assert!(remote_irr(&machine, 9), "the wire is still asserted");
}

#[test]
fn a_level_that_nobody_accepts_leaves_no_remote_irr() {
    let machine = Machine::xapic(1);
    route(&machine, 9, 7, 0x31 | LEVEL_LOW);
    machine.chip.line(9).unwrap().set_level(true);
    assert!(!remote_irr(&machine, 9));
    route(&machine, 9, 0, 0x31 | LEVEL_LOW);
    assert!(remote_irr(&machine, 9));
}

#[test]
fn a_pin_can_send_a_non_maskable_interrupt_and_logical_destinations() {
    let mut machine = Machine::xapic(2);
    route(&machine, 2, 1, 0x400);
    machine.chip.line(2).unwrap().pulse();
    assert!(machine.lapics[1].take_nmi() && !machine.lapics[0].take_nmi());
    machine.lapics[0].write_reg(LDR, 1 << 24);
    machine.lapics[1].write_reg(LDR, 2 << 24);
    route(&machine, 2, 0b11, 0x831);
    machine.chip.line(2).unwrap().pulse();
    assert_eq!(machine.take_vectors(), [(0, 0x31), (1, 0x31)]);
    route(&machine, 2, 0b11, 0x931);
    machine.chip.line(2).unwrap().pulse();
    assert_eq!(machine.take_vectors().len(), 1, "lowest priority");
}

#[test]
fn there_are_24_pins() {
    let machine = Machine::xapic(1);
    assert!(machine.chip.line(23).is_some() && machine.chip.line(24).is_none());
    let ioapic = Arc::new(Mutex::new(IoApic::new(machine.chip.bus().clone())));
    IoApicLine::new(ioapic, 24).pulse();
    assert_eq!(machine.bells[0].take(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Wire(u8, bool),
    Mask(u8, bool),
    Serve,
    Eoi,
}

const LINES: u8 = 3;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..LINES, any::<bool>()).prop_map(|(pin, level)| Step::Wire(pin, level)),
        (0..LINES, any::<bool>()).prop_map(|(pin, mask)| Step::Mask(pin, mask)),
        Just(Step::Serve),
        Just(Step::Eoi),
    ]
}

proptest! {
    /// Three level-triggered lines of different priorities: a line that is asserted and not masked
    /// is always on its way (remote IRR), and remote IRR is set exactly while its vector is
    /// requested or in service.
    #[test]
    fn levels_are_never_lost_and_never_doubled(steps in prop::collection::vec(step(), 0..200)) {
        let mut machine = Machine::xapic(1);
        let vector = |pin: u8| 0x30 + 0x10 * pin;
        let (mut asserted, mut masked) = ([false; LINES as usize], [false; LINES as usize]);
        for pin in 0..LINES {
            route(&machine, pin, 0, u32::from(vector(pin)) | LEVEL_LOW);
        }
        for step in steps {
            match step {
                Step::Wire(pin, level) => {
                    asserted[usize::from(pin)] = level;
                    machine.chip.line(pin).unwrap().set_level(level);
                }
                Step::Mask(pin, mask) => {
                    masked[usize::from(pin)] = mask;
                    let mask = u32::from(mask) * MASKED_LOW;
                    route(&machine, pin, 0, u32::from(vector(pin)) | LEVEL_LOW | mask);
                }
                Step::Serve => {
                    machine.lapics[0].serve();
                }
                Step::Eoi => machine.lapics[0].eoi(),
            }
            let (requested, served) =
                (machine.lapics[0].vectors(IRR), machine.lapics[0].vectors(ISR));
            for pin in 0..LINES {
                let vector = vector(pin);
                let under_way = requested.contains(&vector) || served.contains(&vector);
                prop_assert_eq!(remote_irr(&machine, pin), under_way);
                prop_assert!(!(requested.contains(&vector) && served.contains(&vector)));
                let index = usize::from(pin);
                prop_assert!(under_way || !asserted[index] || masked[index]);
            }
        }
    }
}
