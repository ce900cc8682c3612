//! Modes, and the two forms of the registers.

use super::*;

const X2APIC: u64 = BASE_ENABLE | BASE_X2APIC;
const PAGE: u64 = LAPIC_ADDRESS;

fn msr(register: u32) -> u32 {
    MSR_X2APIC + register
}

/// A machine of one local APIC in x2APIC mode.
fn single_x2apic() -> (Machine, LocalApic) {
    let mut machine = Machine::x2apic(1);
    let lapic = machine.lapics.pop().unwrap();
    (machine, lapic)
}

#[test]
fn the_state_after_reset() {
    let mut machine = Machine::reset(2);
    assert_eq!(machine.lapics[0].apic_base(), 0xfee0_0900);
    assert_eq!(machine.lapics[1].apic_base(), 0xfee0_0800);
    for (id, lapic) in (0..).zip(&mut machine.lapics) {
        assert_eq!((lapic.mode(), lapic.mmio_base()), (ApicMode::XApic, Some(0xfee0_0000)));
        assert_eq!(lapic.read_reg(ID), id << 24);
        assert_eq!(lapic.read_reg(VERSION), 0x0005_0014);
        assert_eq!(lapic.read_reg(SVR), 0xff);
        assert_eq!(lapic.read_reg(DFR), 0xffff_ffff);
        for register in LVT_TIMER..=LVT_ERROR {
            assert_eq!(lapic.read_reg(register), 0x1_0000);
        }
        for register in [TPR, LDR, ESR, ICR, ICR_HIGH, INITIAL_COUNT, CURRENT_COUNT, DIVIDE] {
            assert_eq!(lapic.read_reg(register), 0, "{register:#x}");
        }
    }
}

#[test]
fn mode_transitions_that_exist_succeed_and_all_others_fault() {
    let modes =
        [(0, ApicMode::Disabled), (BASE_ENABLE, ApicMode::XApic), (X2APIC, ApicMode::X2Apic)];
    for (from, from_mode) in modes {
        for to in [0, BASE_ENABLE, BASE_X2APIC, X2APIC] {
            let (_machine, mut lapic) = single();
            lapic.set_apic_base(PAGE | from).unwrap();
            assert_eq!(lapic.mode(), from_mode);
            let legal = from == to
                || matches!(
                    (from, to),
                    (0, BASE_ENABLE) | (BASE_ENABLE, 0) | (BASE_ENABLE, X2APIC) | (X2APIC, 0)
                );
            let result = lapic.write_msr(MSR_APIC_BASE, PAGE | to, at(0));
            assert_eq!(result.is_ok(), legal, "{from:#x} to {to:#x}");
            let now = if legal { to } else { from };
            assert_eq!(lapic.read_msr(MSR_APIC_BASE, at(0)), Ok(PAGE | now));
        }
    }
}

#[test]
fn reserved_bits_of_the_base_fault() {
    let (_machine, mut lapic) = single();
    let base = lapic.apic_base();
    for bit in [0, 1, 7, 9, 40, 52, 63] {
        assert_eq!(lapic.set_apic_base(base | 1 << bit), Err(GeneralProtection), "{bit}");
    }
    lapic.set_apic_base(0x80_0000_0000 | BASE_ENABLE).unwrap();
    assert_eq!(lapic.mmio_base(), Some(0x80_0000_0000));
}

#[test]
fn only_xapic_mode_has_a_page() {
    let (_machine, mut lapic) = single();
    lapic.set_apic_base(PAGE | X2APIC).unwrap();
    for base in [PAGE | X2APIC, PAGE] {
        lapic.set_apic_base(base).unwrap();
        assert_eq!(lapic.mmio_base(), None);
        let mut data = [0; 4];
        lapic.read_mmio(u64::from(VERSION) * 16, &mut data, at(0));
        assert_eq!(data, [0xff; 4]);
        lapic.write_mmio(u64::from(TPR) * 16, &[0x20, 0, 0, 0], at(0));
        assert_eq!(lapic.cr8(), 0);
    }
}

#[test]
fn only_x2apic_mode_has_the_msrs() {
    let (_machine, mut lapic) = single();
    for base in [PAGE | BASE_ENABLE, PAGE] {
        lapic.set_apic_base(base).unwrap();
        assert_eq!(lapic.read_msr(msr(VERSION), at(0)), Err(GeneralProtection));
        assert_eq!(lapic.write_msr(msr(EOI), 0, at(0)), Err(GeneralProtection));
    }
}

#[test]
fn entering_x2apic_mode_keeps_the_state_but_for_destinations() {
    let mut machine = Machine::xapic(3);
    let lapic = &mut machine.lapics[2];
    lapic.write_reg(LDR, 0x0400_0000);
    lapic.write_reg(ICR_HIGH, 0x0100_0000);
    lapic.write_reg(TPR, 0x20);
    lapic.write_reg(LVT_TIMER, 0xec);
    lapic.command(2, 0x31);
    lapic.command(2, 0x41);
    assert_eq!(lapic.serve(), Some(0x41));
    lapic.set_apic_base(PAGE | X2APIC).unwrap();
    assert_eq!(lapic.read_msr(msr(ID), at(0)), Ok(2));
    assert_eq!(lapic.read_msr(msr(LDR), at(0)), Ok(4));
    assert_eq!(lapic.read_msr(msr(ICR), at(0)), Ok(0x41));
    assert_eq!((lapic.read_reg(TPR), lapic.read_reg(LVT_TIMER)), (0x20, 0xec));
    assert_eq!((lapic.vectors(IRR), lapic.vectors(ISR)), (vec![0x31], vec![0x41]));
    assert!(machine.msi(2, false, 0x51), "still software-enabled");
}

#[test]
fn disabling_resets_and_forgets() {
    let (machine, mut lapic) = single_x2apic();
    lapic.write_reg(TPR, 0x20);
    assert!(machine.msi(0, false, 0x31));
    lapic.set_apic_base(PAGE).unwrap();
    assert!(!machine.msi(0, false, 0x41));
    assert_eq!((lapic.pending_vector(), lapic.has_wake_event(true)), (None, false));
    lapic.set_apic_base(PAGE | BASE_ENABLE).unwrap();
    assert_eq!((lapic.read_reg(SVR), lapic.read_reg(TPR)), (0xff, 0));
    assert_eq!(lapic.vectors(IRR), []);
}

#[test]
fn the_msrs_of_this_apic_are_known_by_number() {
    for msr in [0x1b, 0x6e0, 0x800, 0x83f, 0x8ff] {
        assert!(LocalApic::handles_msr(msr), "{msr:#x}");
    }
    for msr in [0, 0x1a, 0x6e1, 0x7ff, 0x900, u32::MAX] {
        assert!(!LocalApic::handles_msr(msr), "{msr:#x}");
        let (_machine, mut lapic) = single_x2apic();
        assert!(lapic.read_msr(msr, at(0)).is_err() && lapic.write_msr(msr, 0, at(0)).is_err());
    }
}

/// Registers of x2APIC mode: number, whether it can be read, and the bits that can be written.
const X2APIC_REGISTERS: [(u32, bool, Option<u64>); 20] = [
    (0x02, true, None),
    (0x03, true, None),
    (0x08, true, Some(0xff)),
    (0x0a, true, None),
    (0x0b, false, Some(0)),
    (0x0d, true, None),
    (0x0f, true, Some(0x3ff)),
    (0x28, true, Some(0)),
    (0x30, true, Some(0xffff_ffff_000c_dfff)),
    (0x32, true, Some(0x7_10ff)),
    (0x33, true, Some(0x1_17ff)),
    (0x34, true, Some(0x1_17ff)),
    (0x35, true, Some(0x1_f7ff)),
    (0x36, true, Some(0x1_f7ff)),
    (0x37, true, Some(0x1_10ff)),
    (0x38, true, Some(0xffff_ffff)),
    (0x39, true, None),
    (0x3e, true, Some(0xb)),
    (0x3f, false, Some(0xff)),
    // ISR, TMR and IRR, as one.
    (0x10, true, None),
];

#[test]
fn x2apic_registers_fault_on_every_access_that_is_not_theirs() {
    for register in 0..=0xff {
        let name = if (0x10..=0x27).contains(&register) { 0x10 } else { register };
        let found = X2APIC_REGISTERS.iter().find(|&&(number, ..)| number == name);
        let (readable, writable) = found.map_or((false, None), |&(_, read, write)| (read, write));
        let (_machine, mut lapic) = single_x2apic();
        assert_eq!(lapic.read_msr(msr(register), at(0)).is_ok(), readable, "{register:#x}");
        assert_eq!(
            lapic.write_msr(msr(register), 0, at(0)).is_ok(),
            writable.is_some(),
            "{register:#x}"
        );
        for bit in 0..64 {
            let (_machine, mut lapic) = single_x2apic();
            let allowed = writable.is_some_and(|mask| mask >> bit & 1 != 0);
            let result = lapic.write_msr(msr(register), 1 << bit, at(0));
            assert_eq!(result.is_ok(), allowed, "{register:#x} bit {bit}");
        }
    }
}

#[test]
fn read_only_status_bits_do_not_stick() {
    let (_machine, mut lapic) = single_x2apic();
    lapic.write_msr(msr(LVT_LINT0), 0x1_f7ff, at(0)).unwrap();
    assert_eq!(lapic.read_msr(msr(LVT_LINT0), at(0)), Ok(0x1_a7ff));
    lapic.write_msr(msr(ICR), 0x4_1041, at(0)).unwrap();
    assert_eq!(lapic.read_msr(msr(ICR), at(0)), Ok(0x4_0041));
}

#[test]
fn a_fault_changes_nothing() {
    let (_machine, mut lapic) = single_x2apic();
    lapic.write_reg(TPR, 0x20);
    assert!(lapic.write_msr(msr(TPR), 0x130, at(0)).is_err());
    assert_eq!(lapic.read_reg(TPR), 0x20);
    assert!(lapic.write_msr(msr(ICR), 0x14_0041, at(0)).is_err());
    assert_eq!((lapic.pending_vector(), lapic.read_msr(msr(ICR), at(0))), (None, Ok(0)));
    lapic.write_msr(msr(SELF_IPI), 0x41, at(0)).unwrap();
    lapic.serve().unwrap();
    assert!(lapic.write_msr(msr(EOI), 1, at(0)).is_err());
    assert_eq!(lapic.vectors(ISR), [0x41]);
}

#[test]
fn the_self_ipi_register_sends_to_itself() {
    let (machine, mut lapic) = single_x2apic();
    lapic.write_msr(msr(SELF_IPI), 0x41, at(0)).unwrap();
    assert_eq!((lapic.serve(), machine.bells[0].take()), (Some(0x41), 0));
    lapic.write_msr(msr(SELF_IPI), 0x0f, at(0)).unwrap();
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), ERROR_SEND_ILLEGAL_VECTOR);
}

#[test]
fn the_xapic_command_is_sent_by_its_lower_half() {
    let mut machine = Machine::xapic(2);
    machine.lapics[0].write_reg(ICR_HIGH, 0x01ff_ffff);
    assert_eq!(machine.take_vectors(), []);
    assert_eq!(machine.lapics[0].read_reg(ICR_HIGH), 0x0100_0000);
    machine.lapics[0].write_reg(ICR, 0xfff0_1041);
    assert_eq!(machine.lapics[0].read_reg(ICR), 0x0000_0041, "idle, reserved bits clear");
    assert_eq!(machine.take_vectors(), [(1, 0x41)]);
    machine.lapics[0].write_reg(ICR, 0x42);
    assert_eq!(machine.take_vectors(), [(1, 0x42)], "the destination stays");
}

#[test]
fn xapic_registers_keep_their_writable_bits() {
    let (_machine, mut lapic) = single();
    let masks = [
        (TPR, 0xff),
        (LDR, 0xff00_0000),
        (SVR, 0x3ff),
        (0x33, 0x1_07ff),
        (0x34, 0x1_07ff),
        (0x35, 0x1_a7ff),
        (0x36, 0x1_a7ff),
        (LVT_ERROR, 0x1_00ff),
        (INITIAL_COUNT, 0xffff_ffff),
        (LVT_TIMER, 0x7_00ff),
        (DIVIDE, 0xb),
    ];
    for (register, mask) in masks {
        lapic.write_reg(register, 0xffff_ffff);
        assert_eq!(lapic.read_reg(register), mask, "{register:#x}");
    }
    lapic.write_reg(DFR, 0);
    assert_eq!(lapic.read_reg(DFR), 0x0fff_ffff);
    for register in [ID, VERSION, 0x09, PPR, 0x0c, ISR, TMR, IRR, CURRENT_COUNT] {
        let before = lapic.read_reg(register);
        lapic.write_reg(register, 0xffff_ffff);
        assert_eq!(lapic.read_reg(register), before, "{register:#x}");
    }
    lapic.write_reg(ESR, 0);
    assert_eq!(lapic.read_reg(ESR), 0, "none of this is an error");
}

#[test]
fn access_to_a_reserved_register_of_the_page_is_an_error() {
    for register in [0x00, 0x01, 0x04, 0x29, 0x2f, 0x3a, 0x3f, 0x40, 0xff] {
        let (_machine, mut lapic) = single();
        assert_eq!(lapic.read_reg(register), 0);
        lapic.write_reg(ESR, 0);
        assert_eq!(lapic.read_reg(ESR), ERROR_ILLEGAL_REGISTER, "{register:#x}");
        lapic.write_reg(ESR, 0);
        lapic.write_reg(register, 0);
        lapic.write_reg(ESR, 0);
        assert_eq!(lapic.read_reg(ESR), ERROR_ILLEGAL_REGISTER, "{register:#x}");
    }
}

#[test]
fn odd_accesses_to_the_page_are_harmless() {
    let (_machine, mut lapic) = single();
    lapic.write_reg(LDR, 0x1200_0000);
    let offset = u64::from(LDR) * 16;
    let read = |lapic: &mut LocalApic, offset, bytes| {
        let mut data = vec![0xee; bytes];
        lapic.read_mmio(offset, &mut data, at(0));
        data
    };
    assert_eq!(read(&mut lapic, offset + 3, 1), [0x12]);
    assert_eq!(read(&mut lapic, offset + 2, 2), [0, 0x12]);
    assert_eq!(read(&mut lapic, offset, 8), [0, 0, 0, 0x12, 0, 0, 0, 0]);
    assert_eq!(read(&mut lapic, offset + 4, 4), [0; 4]);
    assert_eq!(read(&mut lapic, 0x1000, 4), [0; 4]);
    for (skip, data) in [(0, &[1_u8; 1][..]), (0, &[1; 8]), (4, &[1; 4]), (1, &[1; 4])] {
        lapic.write_mmio(offset + skip, data, at(0));
    }
    lapic.write_mmio(u64::MAX, &[1; 4], at(0));
    assert_eq!(lapic.read_reg(LDR), 0x1200_0000);
}

proptest! {
    #[test]
    fn no_access_panics(
        x2apic: bool,
        accesses in prop::collection::vec(
            (0..0x1100u64, 0..0x140u32, any::<u64>(), 1..9usize, 0..u64::MAX), 0..100),
    ) {
        let mut machine = if x2apic { Machine::x2apic(2) } else { Machine::xapic(2) };
        let lapic = &mut machine.lapics[0];
        for (offset, register, value, bytes, ns) in accesses {
            let now = Now { ns, tsc: ns.rotate_left(7) };
            let mut data = value.to_le_bytes();
            lapic.write_mmio(offset, &data[..bytes], now);
            lapic.read_mmio(offset, &mut data[..bytes], now);
            let _ = lapic.write_msr(msr(register), value, now);
            let _ = lapic.write_msr(msr(register), value & 0xb, now);
            let _ = lapic.read_msr(msr(register), now);
            let _ = lapic.write_msr(MSR_TSC_DEADLINE, value, now);
            lapic.timer_tick(now);
            lapic.next_timer_deadline_ns(now);
            lapic.serve();
        }
    }
}
