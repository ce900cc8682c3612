//! The owner's half of a local APIC: priorities, what to inject next, local interrupts, and its
//! mode. Its registers as a guest sees them are in [`registers`].

mod registers;

use std::sync::{Arc, Mutex};

use super::ioapic::{self, IoApic};
use super::message::Interrupt;
use super::shared::{Addressing, ApicBus, ApicMode, LapicShared, Requested};
use super::timer::{Now, Timer, TimerMode};
use super::vectors::VectorSet;
use super::{ApicConfig, GeneralProtection, LAPIC_ADDRESS};

/// IA32_APIC_BASE (SDM 11.4.4).
const BASE_BSP: u64 = 1 << 8;
const BASE_X2APIC: u64 = 1 << 10;
const BASE_ENABLE: u64 = 1 << 11;
const BASE_ADDRESS_SHIFT: u32 = 12;

/// Spurious-interrupt vector register (SDM 11.9): the vector, software enable, and focus checking,
/// which can be set and means nothing.
const SVR_ENABLE: u32 = 1 << 8;
const SVR_MASK: u32 = 0x3ff;
const SVR_RESET: u32 = 0xff;

/// Destination format register: bits 31:28 are the model, the others are always set
/// (SDM 11.6.2.2).
const DFR_FLAT: u32 = 0xf000_0000;
const DFR_ONES: u32 = 0x0fff_ffff;

/// Local vector table (SDM 11.5.1).
const LVT_MASKED: u32 = 1 << 16;
const LVT_ENTRIES: usize = 6;

/// Error status register (SDM 11.5.3).
const ERROR_SEND_ILLEGAL_VECTOR: u32 = 1 << 5;
const ERROR_RECEIVE_ILLEGAL_VECTOR: u32 = 1 << 6;
const ERROR_ILLEGAL_REGISTER: u32 = 1 << 7;

/// The upper four bits of a vector or priority: its class (SDM 11.8.3).
const CLASS: u8 = 0xf0;

/// How a local APIC is reached after reset.
pub(super) const RESET_ADDRESSING: Addressing = Addressing {
    mode: ApicMode::XApic,
    software_enabled: false,
    flat: true,
    logical_id: 0,
    task_priority: 0,
};

/// The entries of the local vector table. Nothing drives the pins, the performance counters or the
/// thermal sensor of this machine: their entries are registers and no more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lvt {
    Timer,
    Thermal,
    Performance,
    Lint0,
    Lint1,
    Error,
}

/// A local APIC, owned by its vCPU's thread.
///
/// Where a method takes the time, it is the time of the call: a timer that expired before it fires
/// first.
pub struct LocalApic {
    shared: Arc<LapicShared>,
    bus: Arc<ApicBus>,
    ioapic: Arc<Mutex<IoApic>>,
    /// Bits that are reserved in IA32_APIC_BASE.
    base_reserved: u64,
    base: u64,
    /// In-service register.
    isr: VectorSet,
    task_priority: u8,
    logical_id: u8,
    /// Destination format register.
    dfr: u32,
    /// Spurious-interrupt vector register.
    svr: u32,
    /// Interrupt command register.
    icr: u64,
    lvt: [u32; LVT_ENTRIES],
    /// Error status as the guest reads it.
    esr: u32,
    /// Errors since the guest last wrote the error status register.
    new_errors: u32,
    /// The next error interrupts; until the guest writes the register, only one does.
    error_armed: bool,
    timer: Timer,
}

impl LocalApic {
    pub(super) fn new(
        config: &ApicConfig,
        shared: Arc<LapicShared>,
        bus: Arc<ApicBus>,
        ioapic: Arc<Mutex<IoApic>>,
    ) -> Self {
        let bsp = if shared.id() == 0 { BASE_BSP } else { 0 };
        let address_bits = u64::MAX.checked_shl(config.physical_address_bits.into()).unwrap_or(0);
        let flags = BASE_BSP | BASE_X2APIC | BASE_ENABLE;
        LocalApic {
            base_reserved: address_bits | ((1 << BASE_ADDRESS_SHIFT) - 1) & !flags,
            base: LAPIC_ADDRESS | BASE_ENABLE | bsp,
            shared,
            bus,
            ioapic,
            isr: VectorSet::default(),
            task_priority: 0,
            logical_id: 0,
            dfr: u32::MAX,
            svr: SVR_RESET,
            icr: 0,
            lvt: [LVT_MASKED; LVT_ENTRIES],
            esr: 0,
            new_errors: 0,
            error_armed: true,
            timer: Timer::new(config.tsc_khz),
        }
    }

    /// What other threads see of this APIC.
    pub fn shared(&self) -> &Arc<LapicShared> {
        &self.shared
    }

    /// The mode.
    pub fn mode(&self) -> ApicMode {
        if self.base & BASE_ENABLE == 0 {
            ApicMode::Disabled
        } else if self.base & BASE_X2APIC == 0 {
            ApicMode::XApic
        } else {
            ApicMode::X2Apic
        }
    }

    /// Where this vCPU has the page of registers; `None` if it has none, and an access there is as
    /// one to any other memory.
    pub fn mmio_base(&self) -> Option<u64> {
        let address = self.base >> BASE_ADDRESS_SHIFT << BASE_ADDRESS_SHIFT;
        (self.mode() == ApicMode::XApic).then_some(address)
    }

    /// IA32_APIC_BASE.
    pub fn apic_base(&self) -> u64 {
        self.base
    }

    /// The guest writes IA32_APIC_BASE. Between xAPIC and x2APIC mode all registers but the
    /// destinations keep their values; disabling resets them (SDM 11.4.3, 11.12.5).
    ///
    /// # Errors
    /// Reserved bits, and the transitions that do not exist: only by being disabled does an APIC
    /// leave x2APIC mode, and only from xAPIC mode does it enter it.
    pub fn set_apic_base(&mut self, value: u64) -> Result<(), GeneralProtection> {
        let enable = value & BASE_ENABLE != 0;
        let x2apic = value & BASE_X2APIC != 0;
        let allowed = match self.mode() {
            ApicMode::Disabled => !x2apic,
            ApicMode::XApic => enable || !x2apic,
            ApicMode::X2Apic => enable == x2apic,
        };
        if !allowed || value & self.base_reserved != 0 {
            return Err(GeneralProtection);
        }
        let old = self.mode();
        self.base = value;
        match (old, self.mode()) {
            (ApicMode::XApic, ApicMode::X2Apic) => self.icr &= u64::from(u32::MAX),
            (_, ApicMode::Disabled) => self.reset_registers(),
            _ => {}
        }
        self.publish();
        Ok(())
    }

    /// The state after power-up and INIT, but for identifier and mode (SDM 11.4.7).
    fn reset_registers(&mut self) {
        self.isr = VectorSet::default();
        self.task_priority = 0;
        self.logical_id = 0;
        self.dfr = u32::MAX;
        self.svr = SVR_RESET;
        self.icr = 0;
        self.lvt = [LVT_MASKED; LVT_ENTRIES];
        self.esr = 0;
        self.new_errors = 0;
        self.error_armed = true;
        self.timer.reset();
        // First nobody may send to it any more, then what was sent is dropped.
        self.publish();
        self.shared.irr.clear();
        self.shared.tmr.clear();
    }

    /// Tells senders how this APIC is reached.
    fn publish(&self) {
        self.shared.publish(Addressing {
            mode: self.mode(),
            software_enabled: self.svr & SVR_ENABLE != 0,
            flat: self.dfr & DFR_FLAT == DFR_FLAT,
            logical_id: self.logical_id,
            task_priority: self.task_priority,
        });
    }

    /// Processor priority: a vector is taken only if its class is above this one's (SDM 11.8.3.1).
    pub fn processor_priority(&self) -> u8 {
        let in_service = self.isr.highest().unwrap_or(0);
        if self.task_priority & CLASS >= in_service & CLASS {
            self.task_priority
        } else {
            in_service & CLASS
        }
    }

    /// The vector to inject next: the highest that is requested, if the processor's priority lets
    /// it through. Whether the guest can take an interrupt now is not known here.
    #[inline]
    pub fn pending_vector(&mut self) -> Option<u8> {
        if self.shared.take_illegal_vector() {
            self.raise_error(ERROR_RECEIVE_ILLEGAL_VECTOR);
        }
        let vector = self.shared.irr.highest()?;
        let deliverable = vector & CLASS > self.processor_priority() & CLASS;
        (deliverable && self.mode() != ApicMode::Disabled).then_some(vector)
    }

    /// `vector`, as [`pending_vector`](Self::pending_vector) gave it, was injected: it is in service
    /// from now on. False, with nothing changed, if it was not requested.
    ///
    /// Asking and accepting are one step here, so the spurious vector, which a real APIC gives when
    /// the priority rises between the two, is never needed.
    pub fn accept(&mut self, vector: u8) -> bool {
        let requested = self.shared.irr.remove(vector);
        if requested {
            self.isr.insert(vector);
        }
        requested
    }

    /// The guest ends the highest interrupt in service (SDM 11.8.5).
    fn end_of_interrupt(&mut self) {
        let Some(vector) = self.isr.highest() else { return };
        self.isr.remove(vector);
        if self.shared.tmr.contains(vector) {
            ioapic::lock(&self.ioapic).end_of_interrupt(vector);
        }
    }

    /// CR8, which is the class of the task priority.
    pub fn cr8(&self) -> u8 {
        self.task_priority >> 4
    }

    /// CR8 as the guest left it. If it is what it was, so is the task priority.
    pub fn set_cr8(&mut self, cr8: u8) {
        let cr8 = cr8 & 0xf;
        if cr8 != self.cr8() {
            self.set_task_priority(cr8 << 4);
        }
    }

    fn set_task_priority(&mut self, priority: u8) {
        self.task_priority = priority;
        self.publish();
    }

    /// Takes an INIT, if one was sent: true, and this APIC is in the state after INIT. The
    /// processor is to be reset, and to wait for a start-up message if it is not the bootstrap
    /// processor.
    pub fn take_init(&mut self) -> bool {
        let init = self.shared.take_init();
        if init {
            self.reset_registers();
        }
        init
    }

    /// Takes a start-up message, if one was sent: the page number to start at. A processor that
    /// does not wait for one takes it and ignores it. One that was sent after an INIT survives
    /// [`take_init`](Self::take_init), so that is to be asked first.
    pub fn take_sipi(&mut self) -> Option<u8> {
        self.shared.take_sipi()
    }

    /// Takes a non-maskable interrupt, if one was sent.
    pub fn take_nmi(&mut self) -> bool {
        self.shared.take_nmi()
    }

    /// Whether there is anything for which a halted processor goes on. `interrupts_enabled`: the
    /// interrupt flag; without it only NMI and INIT count.
    pub fn has_wake_event(&mut self, interrupts_enabled: bool) -> bool {
        self.shared.nmi_pending()
            || self.shared.init_pending()
            || interrupts_enabled && self.pending_vector().is_some()
    }

    /// When the timer will have something to say, on the nanosecond clock, and not before `now`;
    /// `None` if it will not: it is stopped or its interrupt masked. For the TSC deadline this is
    /// an estimate from `now`, so it is to be asked again when the guest's TSC was changed.
    pub fn next_timer_deadline_ns(&self, now: Now) -> Option<u64> {
        if self.lvt(Lvt::Timer) & LVT_MASKED != 0 {
            return None;
        }
        self.timer.deadline_ns(now)
    }

    /// The vector of the timer's interrupt.
    pub fn timer_vector(&self) -> u8 {
        self.lvt(Lvt::Timer) as u8
    }

    /// Lets the timer fire if its time has come; true if it did.
    #[inline]
    pub fn timer_tick(&mut self, now: Now) -> bool {
        let expired = self.timer.expire(now);
        if expired {
            self.raise_local(Lvt::Timer);
        }
        expired
    }

    fn lvt(&self, entry: Lvt) -> u32 {
        self.lvt.get(entry as usize).copied().unwrap_or(LVT_MASKED)
    }

    /// Sets an entry, of which the guest can write the bits of `writable`. A software-disabled
    /// APIC's entries stay masked (SDM 11.4.7.2).
    fn set_lvt(&mut self, entry: Lvt, value: u32, writable: u32) {
        let forced = if self.svr & SVR_ENABLE == 0 { LVT_MASKED } else { 0 };
        if let Some(register) = self.lvt.get_mut(entry as usize) {
            *register = value & writable | forced;
        }
        if entry == Lvt::Timer {
            self.timer.set_mode(TimerMode::from_lvt(value));
        }
    }

    fn set_svr(&mut self, value: u32) {
        self.svr = value & SVR_MASK;
        if self.svr & SVR_ENABLE == 0 {
            for entry in &mut self.lvt {
                *entry |= LVT_MASKED;
            }
        }
        self.publish();
    }

    /// Requests the interrupt of an entry of fixed delivery mode, unless it is masked.
    fn raise_local(&mut self, entry: Lvt) -> bool {
        let register = self.lvt(entry);
        let unmasked = register & LVT_MASKED == 0;
        unmasked && self.shared.request(register as u8, false) != Requested::Illegal
    }

    fn raise_error(&mut self, error: u32) {
        self.new_errors |= error;
        if self.error_armed && self.raise_local(Lvt::Error) {
            self.error_armed = false;
        }
    }

    /// The guest writes the error status register: what was found since the last write becomes
    /// readable, and the next error interrupts again.
    fn latch_errors(&mut self) {
        // Found, but not looked at yet.
        if self.shared.take_illegal_vector() {
            self.raise_error(ERROR_RECEIVE_ILLEGAL_VECTOR);
        }
        self.esr = std::mem::take(&mut self.new_errors);
        self.error_armed = true;
    }

    fn send_ipi(&mut self, interrupt: &Interrupt) {
        if interrupt.has_illegal_vector() {
            self.raise_error(ERROR_SEND_ILLEGAL_VECTOR);
        } else {
            self.bus.send(interrupt, Some(self.shared.id()));
        }
    }
}

#[cfg(test)]
mod tests;
