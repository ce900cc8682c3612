//! The I/O APIC: 24 pins, each with a redirection entry that says which message the pin sends
//! (Intel 82093AA data sheet). Version 0x20, whose one addition is the EOI register.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::message::{DeliveryMode, Interrupt};
use super::shared::ApicBus;
use crate::bus::BusDevice;
use crate::irq::IrqLine;

/// Pins, and redirection entries.
pub(super) const PINS: u8 = 24;

// Memory-mapped registers, by offset (3.1, and the EOI register of version 0x20).
const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
const EOI: u64 = 0x40;

// Registers behind the window (3.2).
const REG_ID: u8 = 0x00;
const REG_VERSION: u8 = 0x01;
const REG_ARBITRATION: u8 = 0x02;
const REG_REDIRECTION: u8 = 0x10;

const VERSION: u32 = 0x20;
/// The identifier is bits 27:24.
const ID_MASK: u32 = 0x0f00_0000;

// A redirection entry (3.2.4).
const DELIVERY_STATUS: u64 = 1 << 12;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// What a guest can write: destination, and the low 17 bits but for the two read-only ones.
const WRITABLE: u64 = 0xff00_0000_0001_ffff & !(DELIVERY_STATUS | REMOTE_IRR);

#[derive(Clone, Copy)]
struct Pin {
    entry: u64,
    /// The level of the wire.
    asserted: bool,
}

/// The I/O APIC.
pub struct IoApic {
    bus: Arc<ApicBus>,
    select: u8,
    id: u32,
    pins: [Pin; PINS as usize],
}

impl IoApic {
    /// After reset: every pin masked and low.
    pub(super) fn new(bus: Arc<ApicBus>) -> Self {
        let pin = Pin { entry: MASKED, asserted: false };
        IoApic { bus, select: 0, id: 0, pins: [pin; PINS as usize] }
    }

    /// Sets the level of the wire to `pin` (asserted: true). An edge-triggered entry sends its
    /// message when the wire becomes asserted; what happens while it is masked is lost (3.2.4, bit
    /// 16). A level-triggered one sends it as long as the wire is asserted, again after each end
    /// of interrupt. A pin that does not exist is ignored.
    pub fn set_level(&mut self, pin: u8, asserted: bool) {
        let Some(pin) = self.pins.get_mut(usize::from(pin)) else { return };
        let rising = asserted && !pin.asserted;
        pin.asserted = asserted;
        if pin.entry & LEVEL != 0 {
            pin.send_level(&self.bus);
        } else if rising && pin.entry & MASKED == 0 {
            pin.send(&self.bus);
        }
    }

    /// Asserts and de-asserts the wire to `pin`.
    pub fn pulse(&mut self, pin: u8) {
        self.set_level(pin, true);
        self.set_level(pin, false);
    }

    /// A local APIC ended the level-triggered interrupt `vector`: the pins that sent it may send
    /// again, and do if their wires are still asserted.
    pub(super) fn end_of_interrupt(&mut self, vector: u8) {
        for pin in &mut self.pins {
            if pin.entry as u8 == vector && pin.entry & REMOTE_IRR != 0 {
                pin.entry &= !REMOTE_IRR;
                pin.send_level(&self.bus);
            }
        }
    }

    fn read_register(&self) -> u32 {
        match self.select {
            REG_ID | REG_ARBITRATION => self.id,
            REG_VERSION => VERSION | u32::from(PINS - 1) << 16,
            register => match self.pins.get(entry_index(register)) {
                Some(pin) => (pin.entry >> half_shift(register)) as u32,
                None => 0,
            },
        }
    }

    fn write_register(&mut self, value: u32) {
        let register = self.select;
        if register == REG_ID {
            self.id = value & ID_MASK;
        }
        let Some(pin) = self.pins.get_mut(entry_index(register)) else { return };
        let shift = half_shift(register);
        let writable = WRITABLE & u64::from(u32::MAX) << shift;
        pin.entry = pin.entry & !writable | u64::from(value) << shift & writable;
        if pin.entry & LEVEL == 0 {
            // Guests that know no EOI register clear the remote IRR by making the entry edge
            // triggered for a moment.
            pin.entry &= !REMOTE_IRR;
        } else {
            pin.send_level(&self.bus);
        }
    }
}

impl Pin {
    /// Sends the message of the entry; true if a local APIC accepted it.
    fn send(&self, bus: &ApicBus) -> bool {
        Interrupt::from_redirection(self.entry).is_some_and(|interrupt| bus.send(&interrupt, None))
    }

    /// Sends the message of a level-triggered entry if its wire is asserted, it is not masked, and
    /// the last message was ended.
    fn send_level(&mut self, bus: &ApicBus) {
        if !self.asserted || self.entry & (LEVEL | MASKED | REMOTE_IRR) != LEVEL {
            return;
        }
        let mode = Interrupt::from_redirection(self.entry).map(|interrupt| interrupt.mode);
        let ends = matches!(mode, Some(DeliveryMode::Fixed | DeliveryMode::LowestPriority));
        if self.send(bus) && ends {
            self.entry |= REMOTE_IRR;
        }
    }
}

/// The redirection entry that `register` belongs to; past the last if to none.
fn entry_index(register: u8) -> usize {
    register.checked_sub(REG_REDIRECTION).map_or(usize::MAX, |index| usize::from(index / 2))
}

/// Where the half of the entry that `register` is begins.
fn half_shift(register: u8) -> u32 {
    u32::from(register % 2) * 32
}

impl BusDevice for IoApic {
    /// Registers are 32 bits wide; what lies between them reads as zero.
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            SELECT => self.select.into(),
            WINDOW => self.read_register(),
            _ => 0,
        };
        data.fill(0);
        for (byte, value) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = value;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 4];
        for (byte, value) in bytes.iter_mut().zip(data) {
            *byte = *value;
        }
        let value = u32::from_le_bytes(bytes);
        match offset {
            SELECT => self.select = value as u8,
            WINDOW => self.write_register(value),
            EOI => self.end_of_interrupt(value as u8),
            _ => {}
        }
    }
}

/// The wire to one pin of the I/O APIC.
pub struct IoApicLine {
    ioapic: Arc<Mutex<IoApic>>,
    pin: u8,
}

impl IoApicLine {
    pub(super) fn new(ioapic: Arc<Mutex<IoApic>>, pin: u8) -> Self {
        IoApicLine { ioapic, pin }
    }

    /// Sets the level of the wire, for a level-triggered pin.
    pub fn set_level(&self, asserted: bool) {
        lock(&self.ioapic).set_level(self.pin, asserted);
    }
}

impl IrqLine for IoApicLine {
    fn pulse(&self) {
        lock(&self.ioapic).pulse(self.pin);
    }
}

/// Every state of an I/O APIC is a valid one, so a panic elsewhere does not spoil it.
pub(super) fn lock(ioapic: &Mutex<IoApic>) -> MutexGuard<'_, IoApic> {
    ioapic.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
