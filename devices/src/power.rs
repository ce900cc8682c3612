//! The registers by which a guest ends, or tells that it is about to: the i8042's reset command, the
//! ACPI sleep and reset registers, and pvpanic.

use std::sync::Arc;

use crate::bus::BusDevice;

/// What a guest asked for or told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerEvent {
    /// Reset the machine.
    Reset,
    /// Switch the machine off.
    PowerOff,
    /// The guest's kernel has panicked. The machine goes on; a reset usually follows.
    Panicked,
}

/// Where the events go. Called from vCPU threads, as often as the guest likes.
pub type PowerSink = Arc<dyn Fn(PowerEvent) + Send + Sync>;

/// The i8042's command and status port, which is all there is of the i8042: its data port, like any
/// port without a device, reads all ones.
pub const I8042_PORT: u16 = 0x64;

/// The i8042, as far as `reboot=k` needs it.
pub struct I8042(pub PowerSink);

impl I8042 {
    /// Pulse the reset line (output port bit 0).
    const COMMAND_RESET: u8 = 0xfe;
    /// Status: the input buffer is empty (bit 1 clear), so the loop that waits for that before a
    /// reset does not run to its end; and there is always output (bit 0), so a probe that drains it
    /// first finds after a few reads that there is no keyboard controller.
    const STATUS: u8 = 0b01;
}

impl BusDevice for I8042 {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(Self::STATUS);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        if data.first() == Some(&Self::COMMAND_RESET) {
            (self.0)(PowerEvent::Reset);
        }
    }
}

/// The first port of [`AcpiPower`], and with it of the sleep control register.
pub const ACPI_POWER_PORT: u16 = 0x600;
/// Ports of [`AcpiPower`].
pub const ACPI_POWER_PORTS: u16 = 3;
/// The sleep status register.
pub const ACPI_SLEEP_STATUS_PORT: u16 = ACPI_POWER_PORT + 1;
/// The reset register.
pub const ACPI_RESET_PORT: u16 = ACPI_POWER_PORT + 2;
/// What resets the machine when it is written to the reset register.
pub const ACPI_RESET_VALUE: u8 = 1;
/// SLP_TYP of the soft-off state, S5.
pub const ACPI_SLEEP_TYPE_S5: u8 = 5;

/// The registers of a hardware-reduced ACPI machine (ACPI 6.5, 4.8.3.6 and 4.8.3.7).
pub struct AcpiPower(pub PowerSink);

impl AcpiPower {
    const SLEEP_CONTROL: u64 = 0;
    const RESET: u64 = (ACPI_RESET_PORT - ACPI_POWER_PORT) as u64;
    /// Sleep control: enter the state in bits 4:2.
    const SLP_EN: u8 = 1 << 5;
    const SLP_TYP_SHIFT: u8 = 2;
    const SLP_TYP_MASK: u8 = 0b111;
}

impl BusDevice for AcpiPower {
    /// Nothing to report: SLP_EN reads as zero, and the machine never woke from sleep.
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// The registers are a byte wide; a wider access reaches the first one only.
    fn write(&mut self, offset: u64, data: &[u8]) {
        let Some(&value) = data.first() else { return };
        let sleep_type = value >> Self::SLP_TYP_SHIFT & Self::SLP_TYP_MASK;
        match offset {
            Self::SLEEP_CONTROL
                if value & Self::SLP_EN != 0 && sleep_type == ACPI_SLEEP_TYPE_S5 =>
            {
                (self.0)(PowerEvent::PowerOff);
            }
            Self::RESET if value == ACPI_RESET_VALUE => (self.0)(PowerEvent::Reset),
            _ => {}
        }
    }
}

/// The port of [`PvPanic`], as QEMU's ISA device has it.
pub const PVPANIC_PORT: u16 = 0x505;

/// pvpanic: a guest's kernel tells that it panicked (QEMU, docs/specs/pvpanic).
pub struct PvPanic(pub PowerSink);

impl PvPanic {
    /// The guest has panicked. The only event offered.
    const PANICKED: u8 = 1 << 0;
}

impl BusDevice for PvPanic {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(Self::PANICKED);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        if data.first().is_some_and(|events| events & Self::PANICKED != 0) {
            (self.0)(PowerEvent::Panicked);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// The events that `device` sends for each of the 256 values written at `offset`.
    fn events<D: BusDevice>(device: fn(PowerSink) -> D, offset: u64) -> Vec<(u8, PowerEvent)> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = seen.clone();
        let mut device = device(Arc::new(move |event| sink.lock().unwrap().push(event)));
        let mut all = Vec::new();
        for value in 0..=u8::MAX {
            device.write(offset, &[value]);
            all.extend(seen.lock().unwrap().drain(..).map(|event| (value, event)));
        }
        device.write(offset, &[]);
        assert!(seen.lock().unwrap().is_empty());
        all
    }

    fn read<D: BusDevice>(device: fn(PowerSink) -> D, offset: u64) -> u8 {
        let mut data = [0xee];
        device(Arc::new(|_| {})).read(offset, &mut data);
        data[0]
    }

    #[test]
    fn only_the_reset_command_of_the_i8042_resets() {
        assert_eq!(events(I8042, 0), [(0xfe, PowerEvent::Reset)]);
    }

    #[test]
    fn the_i8042_never_seems_busy_and_never_runs_dry() {
        assert_eq!(read(I8042, 0) & 0b11, 0b01);
    }

    #[test]
    fn sleep_enable_with_the_type_of_s5_switches_off() {
        let off = events(AcpiPower, 0);
        assert!(off.iter().all(|&(_, event)| event == PowerEvent::PowerOff));
        let values: Vec<u8> = off.iter().map(|&(value, _)| value).collect();
        let expected: Vec<u8> = (0..=255).filter(|value| value & 0b11_1100 == 0b11_0100).collect();
        assert_eq!(values, expected);
    }

    #[test]
    fn the_reset_register_takes_its_value_only_and_the_status_register_nothing() {
        assert_eq!(events(AcpiPower, 2), [(ACPI_RESET_VALUE, PowerEvent::Reset)]);
        assert_eq!(events(AcpiPower, 1), []);
        assert_eq!(read(AcpiPower, 1), 0);
    }

    #[test]
    fn pvpanic_offers_the_panic_event_and_takes_no_other() {
        assert_eq!(read(PvPanic, 0), 1);
        let panics = events(PvPanic, 0);
        assert_eq!(panics.len(), 128);
        assert!(
            panics.iter().all(|&(value, event)| value & 1 == 1 && event == PowerEvent::Panicked)
        );
    }
}
