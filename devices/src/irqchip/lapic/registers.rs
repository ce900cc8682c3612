//! A local APIC's registers as its guest sees them: a page of memory in xAPIC mode (Intel SDM vol.
//! 3, 11.4.1), model-specific registers in x2APIC mode (11.12.1). A register has the same number in
//! both: 16 bytes each from the start of the page, or one MSR each from 0x800.

use super::{DFR_ONES, ERROR_ILLEGAL_REGISTER, LVT_MASKED, LocalApic, Lvt, SVR_MASK};
use crate::irqchip::message::{DeliveryMode, Destination, Interrupt};
use crate::irqchip::shared::{ApicMode, x2apic_logical_id};
use crate::irqchip::timer::Now;
use crate::irqchip::{GeneralProtection, LAPIC_BYTES};

/// IA32_APIC_BASE.
const MSR_APIC_BASE: u32 = 0x1b;
/// IA32_TSC_DEADLINE.
const MSR_TSC_DEADLINE: u32 = 0x6e0;
const X2APIC_FIRST: u32 = 0x800;
const X2APIC_LAST: u32 = 0x8ff;

const ID: u8 = 0x02;
const VERSION: u8 = 0x03;
const TPR: u8 = 0x08;
const APR: u8 = 0x09;
const PPR: u8 = 0x0a;
const EOI: u8 = 0x0b;
const RRD: u8 = 0x0c;
const LDR: u8 = 0x0d;
const DFR: u8 = 0x0e;
const SVR: u8 = 0x0f;
const ISR: u8 = 0x10;
const ISR_LAST: u8 = 0x17;
const TMR: u8 = 0x18;
const TMR_LAST: u8 = 0x1f;
const IRR: u8 = 0x20;
const IRR_LAST: u8 = 0x27;
const ESR: u8 = 0x28;
const ICR: u8 = 0x30;
const ICR_HIGH: u8 = 0x31;
const LVT_TIMER: u8 = 0x32;
const LVT_THERMAL: u8 = 0x33;
const LVT_PERFORMANCE: u8 = 0x34;
const LVT_LINT0: u8 = 0x35;
const LVT_LINT1: u8 = 0x36;
const LVT_ERROR: u8 = 0x37;
const INITIAL_COUNT: u8 = 0x38;
const CURRENT_COUNT: u8 = 0x39;
const DIVIDE: u8 = 0x3e;
const SELF_IPI: u8 = 0x3f;

/// An integrated APIC, with entries 0 to 5 in its local vector table, which always broadcasts the
/// end of level-triggered interrupts.
const VERSION_VALUE: u32 = 0x0005_0014;

// Fields of the local vector table.
const LVT_VECTOR: u32 = 0xff;
const LVT_DELIVERY_MODE: u32 = 0x700;
/// Delivery status, and a pin's remote IRR: read-only, and never set here.
const LVT_DELIVERY_STATUS: u32 = 1 << 12;
const LVT_REMOTE_IRR: u32 = 1 << 14;
const LVT_POLARITY: u32 = 1 << 13;
const LVT_LEVEL: u32 = 1 << 15;
const LVT_TIMER_MODE: u32 = 3 << 17;

const DIVIDE_MASK: u32 = 0b1011;

/// Interrupt command: delivery status, read-only and never set here.
const ICR_BUSY: u64 = 1 << 12;
const ICR_RESERVED: u64 = 0xfff0_0000 | 3 << 16 | 1 << 13;

/// The entry of the local vector table behind a register: its writable bits, and those that are
/// read-only but not reserved.
fn lvt_entry(register: u8) -> Option<(Lvt, u32, u32)> {
    const COMMON: u32 = LVT_VECTOR | LVT_MASKED;
    const PIN: u32 = COMMON | LVT_DELIVERY_MODE | LVT_POLARITY | LVT_LEVEL;
    const STATUS: u32 = LVT_DELIVERY_STATUS;
    Some(match register {
        LVT_TIMER => (Lvt::Timer, COMMON | LVT_TIMER_MODE, STATUS),
        LVT_THERMAL => (Lvt::Thermal, COMMON | LVT_DELIVERY_MODE, STATUS),
        LVT_PERFORMANCE => (Lvt::Performance, COMMON | LVT_DELIVERY_MODE, STATUS),
        LVT_LINT0 => (Lvt::Lint0, PIN, STATUS | LVT_REMOTE_IRR),
        LVT_LINT1 => (Lvt::Lint1, PIN, STATUS | LVT_REMOTE_IRR),
        LVT_ERROR => (Lvt::Error, COMMON, STATUS),
        _ => return None,
    })
}

impl LocalApic {
    /// Whether the model-specific register `msr` is one of this APIC's.
    pub fn handles_msr(msr: u32) -> bool {
        matches!(msr, MSR_APIC_BASE | MSR_TSC_DEADLINE | X2APIC_FIRST..=X2APIC_LAST)
    }

    /// The guest reads a model-specific register.
    ///
    /// # Errors
    /// It is not there, not readable, or one of x2APIC mode in another mode.
    pub fn read_msr(&mut self, msr: u32, now: Now) -> Result<u64, GeneralProtection> {
        match msr {
            MSR_APIC_BASE => return Ok(self.base),
            MSR_TSC_DEADLINE => {
                self.timer_tick(now);
                return Ok(self.timer.tsc_deadline());
            }
            _ => {}
        }
        match self.x2apic_register(msr)? {
            ID => Ok(self.shared.id().into()),
            LDR => Ok(x2apic_logical_id(self.shared.id()).into()),
            ICR => Ok(self.icr),
            register => self.read_common(register, now).map(u64::from).ok_or(GeneralProtection),
        }
    }

    /// The guest writes a model-specific register.
    ///
    /// # Errors
    /// It is not there, not writable, or one of x2APIC mode in another mode; a reserved bit is set;
    /// see also [`set_apic_base`](Self::set_apic_base).
    #[inline]
    pub fn write_msr(&mut self, msr: u32, value: u64, now: Now) -> Result<(), GeneralProtection> {
        match msr {
            MSR_APIC_BASE => return self.set_apic_base(value),
            MSR_TSC_DEADLINE => {
                self.timer_tick(now);
                self.timer.set_tsc_deadline(value);
                self.timer_tick(now);
                return Ok(());
            }
            _ => {}
        }
        let register = self.x2apic_register(msr)?;
        if register == ICR {
            if value & ICR_RESERVED != 0 {
                return Err(GeneralProtection);
            }
            self.icr = value & !ICR_BUSY;
            if let Some(interrupt) = Interrupt::from_x2apic_command(self.icr) {
                self.send_ipi(&interrupt);
            }
            return Ok(());
        }
        let allowed = match register {
            TPR | SELF_IPI => 0xff,
            EOI | ESR => 0,
            SVR => SVR_MASK,
            INITIAL_COUNT => u32::MAX,
            DIVIDE => DIVIDE_MASK,
            _ => {
                let (_, writable, read_only) = lvt_entry(register).ok_or(GeneralProtection)?;
                writable | read_only
            }
        };
        let value = u32::try_from(value).map_err(|_| GeneralProtection)?;
        if value & !allowed != 0 {
            return Err(GeneralProtection);
        }
        if register == SELF_IPI {
            self.send_ipi(&Interrupt {
                destination: Destination::Myself,
                mode: DeliveryMode::Fixed,
                vector: value as u8,
                level: false,
            });
        } else {
            self.write_common(register, value, now);
        }
        Ok(())
    }

    /// The number of the register behind `msr`, in x2APIC mode.
    fn x2apic_register(&self, msr: u32) -> Result<u8, GeneralProtection> {
        let index = msr.checked_sub(X2APIC_FIRST).and_then(|index| u8::try_from(index).ok());
        index.filter(|_| self.mode() == ApicMode::X2Apic).ok_or(GeneralProtection)
    }

    /// The guest reads its page of registers at `offset`. A register is the first four of its 16
    /// bytes; what lies between reads as zero. In other modes than xAPIC there is no page, and all
    /// ones are read.
    pub fn read_mmio(&mut self, offset: u64, data: &mut [u8], now: Now) {
        if self.mode() != ApicMode::XApic {
            data.fill(0xff);
            return;
        }
        data.fill(0);
        let Some(register) = xapic_register(offset) else { return };
        let value = self.read_xapic(register, now);
        let skip = usize::try_from(offset % 16).unwrap_or(0);
        for (byte, value) in data.iter_mut().zip(value.to_le_bytes().into_iter().skip(skip)) {
            *byte = value;
        }
    }

    /// The guest writes its page of registers at `offset`. Only whole registers can be written
    /// (SDM 11.4.1); anything else is ignored.
    pub fn write_mmio(&mut self, offset: u64, data: &[u8], now: Now) {
        let (Ok(bytes), Some(register)) = (data.try_into(), xapic_register(offset)) else { return };
        if self.mode() == ApicMode::XApic && offset.is_multiple_of(16) {
            self.write_xapic(register, u32::from_le_bytes(bytes), now);
        }
    }

    fn read_xapic(&mut self, register: u8, now: Now) -> u32 {
        match register {
            // Identifiers that do not fit are for x2APIC mode.
            ID => self.shared.id() << 24,
            LDR => u32::from(self.logical_id) << 24,
            DFR => self.dfr,
            ICR => self.icr as u32,
            ICR_HIGH => (self.icr >> 32) as u32,
            // Nothing arbitrates here, nothing is read remotely, and EOI is write-only.
            APR | RRD | EOI => 0,
            _ => match self.read_common(register, now) {
                Some(value) => value,
                None => {
                    self.raise_error(ERROR_ILLEGAL_REGISTER);
                    0
                }
            },
        }
    }

    fn write_xapic(&mut self, register: u8, value: u32, now: Now) {
        const HIGH: u64 = 0xffff_ffff_0000_0000;
        match register {
            LDR => {
                self.logical_id = (value >> 24) as u8;
                self.publish();
            }
            DFR => {
                self.dfr = value | DFR_ONES;
                self.publish();
            }
            ICR => {
                let word = u64::from(value) & !(ICR_RESERVED | ICR_BUSY);
                self.icr = self.icr & HIGH | word;
                if let Some(interrupt) = Interrupt::from_xapic_command(self.icr) {
                    self.send_ipi(&interrupt);
                }
            }
            ICR_HIGH => {
                self.icr = self.icr & !HIGH | u64::from(value & 0xff00_0000) << 32;
            }
            // Read-only.
            ID | VERSION | APR | PPR | RRD | ISR..=IRR_LAST | CURRENT_COUNT => {}
            TPR | EOI | SVR | ESR | LVT_TIMER..=INITIAL_COUNT | DIVIDE => {
                self.write_common(register, value, now);
            }
            _ => self.raise_error(ERROR_ILLEGAL_REGISTER),
        }
    }

    /// Registers that read the same in both modes; `None` for others.
    fn read_common(&mut self, register: u8, now: Now) -> Option<u32> {
        Some(match register {
            VERSION => VERSION_VALUE,
            TPR => self.task_priority.into(),
            PPR => self.processor_priority().into(),
            SVR => self.svr,
            ISR..=ISR_LAST => self.isr.register(register - ISR),
            TMR..=TMR_LAST => self.shared.tmr.register(register - TMR),
            IRR..=IRR_LAST => self.shared.irr.register(register - IRR),
            ESR => self.esr,
            INITIAL_COUNT => self.timer.initial_count(),
            CURRENT_COUNT => self.timer.current_count(now),
            DIVIDE => self.timer.divide(),
            _ => self.lvt(lvt_entry(register)?.0),
        })
    }

    /// Registers that are written the same way in both modes; others are ignored.
    fn write_common(&mut self, register: u8, value: u32, now: Now) {
        match register {
            TPR => self.set_task_priority(value as u8),
            EOI => self.end_of_interrupt(),
            SVR => {
                self.timer_tick(now);
                self.set_svr(value);
            }
            ESR => self.latch_errors(),
            INITIAL_COUNT => {
                self.timer_tick(now);
                self.timer.set_initial_count(value, now);
            }
            DIVIDE => {
                self.timer_tick(now);
                self.timer.set_divide(value, now);
            }
            _ => {
                let Some((entry, writable, _)) = lvt_entry(register) else { return };
                self.timer_tick(now);
                self.set_lvt(entry, value, writable);
            }
        }
    }
}

/// The number of the register at `offset`; `None` beyond the page.
fn xapic_register(offset: u64) -> Option<u8> {
    (offset < LAPIC_BYTES).then_some((offset / 16) as u8)
}
