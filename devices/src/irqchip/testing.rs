//! A machine to test the interrupt controllers with: every vCPU's local APIC in the test's hands.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

pub const MSR_X2APIC: u32 = 0x800;
pub const MSR_APIC_BASE: u32 = 0x1b;
pub const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// A TSC of 2 GHz.
pub const TSC_KHZ: u32 = 2_000_000;

// Register numbers, in either mode.
pub const ID: u32 = 0x02;
pub const VERSION: u32 = 0x03;
pub const TPR: u32 = 0x08;
pub const PPR: u32 = 0x0a;
pub const EOI: u32 = 0x0b;
pub const LDR: u32 = 0x0d;
pub const DFR: u32 = 0x0e;
pub const SVR: u32 = 0x0f;
pub const ISR: u32 = 0x10;
pub const TMR: u32 = 0x18;
pub const IRR: u32 = 0x20;
pub const ESR: u32 = 0x28;
pub const ICR: u32 = 0x30;
pub const ICR_HIGH: u32 = 0x31;
pub const LVT_TIMER: u32 = 0x32;
pub const LVT_LINT0: u32 = 0x35;
pub const LVT_ERROR: u32 = 0x37;
pub const INITIAL_COUNT: u32 = 0x38;
pub const CURRENT_COUNT: u32 = 0x39;
pub const DIVIDE: u32 = 0x3e;
pub const SELF_IPI: u32 = 0x3f;

/// The time `ns` after both clocks started.
pub fn at(ns: u64) -> Now {
    Now { ns, tsc: ns * 2 }
}

/// Counts notifications.
#[derive(Default)]
pub struct Bell(AtomicU32);

impl Bell {
    /// How often it rang since this was asked last.
    pub fn take(&self) -> u32 {
        self.0.swap(0, Ordering::SeqCst)
    }
}

impl Notify for Bell {
    fn notify(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The controllers of a machine.
pub struct Machine {
    pub chip: IrqChip,
    pub lapics: Vec<LocalApic>,
    pub bells: Vec<Arc<Bell>>,
}

impl Machine {
    /// `vcpus` local APICs in xAPIC mode, as after reset.
    pub fn reset(vcpus: usize) -> Self {
        let bells: Vec<_> = (0..vcpus).map(|_| Arc::new(Bell::default())).collect();
        let config = ApicConfig { tsc_khz: TSC_KHZ, physical_address_bits: 40 };
        let notify = bells.iter().map(|bell| bell.clone() as Arc<dyn Notify>).collect();
        let (chip, lapics) = IrqChip::new(&config, notify);
        Machine { chip, lapics, bells }
    }

    /// `vcpus` software-enabled local APICs in xAPIC mode.
    pub fn xapic(vcpus: usize) -> Self {
        let mut machine = Machine::reset(vcpus);
        for lapic in &mut machine.lapics {
            lapic.write_reg(SVR, 0x1ff);
        }
        machine
    }

    /// `vcpus` software-enabled local APICs in x2APIC mode.
    pub fn x2apic(vcpus: usize) -> Self {
        let mut machine = Machine::xapic(vcpus);
        for lapic in &mut machine.lapics {
            lapic.set_apic_base(lapic.apic_base() | 1 << 10).unwrap();
        }
        machine
    }

    /// Takes what every local APIC has pending, with identifiers.
    pub fn take_vectors(&mut self) -> Vec<(u32, u8)> {
        let mut taken = Vec::new();
        for (id, lapic) in (0..).zip(&mut self.lapics) {
            while let Some(vector) = lapic.serve() {
                taken.push((id, vector));
                lapic.eoi();
            }
        }
        taken
    }

    /// The identifiers of those that have `vector` pending; takes it.
    pub fn receivers(&mut self, vector: u8) -> Vec<u32> {
        let taken = self.take_vectors();
        assert!(taken.iter().all(|&(_, taken)| taken == vector), "{taken:?}");
        taken.into_iter().map(|(id, _)| id).collect()
    }

    /// An MSI without a redirection hint.
    pub fn msi(&self, destination: u8, logical: bool, data: u32) -> bool {
        let address = 0xfee0_0000 | u64::from(destination) << 12 | u64::from(logical) << 2;
        self.chip.deliver(MsiMessage { address, data })
    }
}

impl LocalApic {
    /// Writes register `register` at time 0, the way the mode asks for.
    pub fn write_reg(&mut self, register: u32, value: u32) {
        self.write_reg_at(register, value, at(0));
    }

    /// Writes register `register` at `now`.
    pub fn write_reg_at(&mut self, register: u32, value: u32, now: Now) {
        match self.mode() {
            ApicMode::XApic => {
                self.write_mmio(u64::from(register) * 16, &value.to_le_bytes(), now);
            }
            _ => self.write_msr(MSR_X2APIC + register, value.into(), now).unwrap(),
        }
    }

    /// Reads register `register` at time 0, the way the mode asks for.
    pub fn read_reg(&mut self, register: u32) -> u32 {
        self.read_reg_at(register, at(0))
    }

    /// Reads register `register` at `now`.
    pub fn read_reg_at(&mut self, register: u32, now: Now) -> u32 {
        match self.mode() {
            ApicMode::XApic => {
                let mut data = [0; 4];
                self.read_mmio(u64::from(register) * 16, &mut data, now);
                u32::from_le_bytes(data)
            }
            _ => self.read_msr(MSR_X2APIC + register, now).unwrap() as u32,
        }
    }

    /// Sends an IPI to `destination`, the way the mode asks for.
    pub fn command(&mut self, destination: u32, low: u32) {
        match self.mode() {
            ApicMode::XApic => {
                self.write_reg(ICR_HIGH, destination << 24);
                self.write_reg(ICR, low);
            }
            _ => {
                let command = u64::from(destination) << 32 | u64::from(low);
                self.write_msr(MSR_X2APIC + ICR, command, at(0)).unwrap();
            }
        }
    }

    /// Takes the pending vector, as an entry with it would.
    pub fn serve(&mut self) -> Option<u8> {
        let vector = self.pending_vector()?;
        assert!(self.accept(vector));
        Some(vector)
    }

    /// Ends the interrupt in service.
    pub fn eoi(&mut self) {
        self.write_reg(EOI, 0);
    }

    /// The vectors in the 256-bit register that begins at `first`.
    pub fn vectors(&mut self, first: u32) -> Vec<u8> {
        (0..=255)
            .filter(|&vector: &u8| {
                self.read_reg(first + u32::from(vector / 32)) >> (vector % 32) & 1 != 0
            })
            .collect()
    }
}
