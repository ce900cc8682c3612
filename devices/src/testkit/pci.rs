//! The driver's side of the virtio PCI transport (virtio 1.2, 4.1).

use std::sync::Arc;

use super::status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK};
use super::{Driver, Notifier};
use crate::GuestMemory;
use crate::pci::PciDevice;
use crate::virtio::common_cfg::offset as common;
use crate::virtio::queue::QueueConfig;

const COMMAND: u16 = 0x04;
const CAPABILITIES: u16 = 0x34;
const BAR_0: u16 = 0x10;
const VENDOR_CAPABILITY: u8 = 0x09;
const MSIX_CAPABILITY: u8 = 0x11;

/// Where a structure is, as its capability says (4.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// Offset of the capability in configuration space.
    pub capability: u16,
    /// BAR index.
    pub bar: u8,
    /// Offset into the BAR in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// Drives a virtio PCI function as a driver would: finds everything by its capabilities.
pub struct PciDriver<D> {
    /// The function itself, for accesses of any kind.
    pub device: D,
    /// The common configuration structure.
    pub common: Location,
    /// The notification structure.
    pub notify: Location,
    /// The ISR status.
    pub isr: Location,
    /// The device configuration; length zero if there is none.
    pub device_config: Location,
    /// The capability for access through configuration space.
    pub pci_access: Location,
    /// The vector table: its capability, BAR, offset and length.
    pub msix_table: Location,
    /// The pending bit array.
    pub msix_pba: Location,
    notify_multiplier: u64,
    notifier: Option<Arc<Notifier>>,
}

impl<D: PciDevice> PciDriver<D> {
    /// Finds the structures of `device`. `notifier` is the device's binder: kicks go through it
    /// when it has the address bound, else to the BAR.
    pub fn new(device: D, notifier: Option<Arc<Notifier>>) -> PciDriver<D> {
        let mut driver = PciDriver {
            device,
            common: Location::default(),
            notify: Location::default(),
            isr: Location::default(),
            device_config: Location::default(),
            pci_access: Location::default(),
            msix_table: Location::default(),
            msix_pba: Location::default(),
            notify_multiplier: 0,
            notifier,
        };
        driver.find_capabilities();
        driver
    }

    fn find_capabilities(&mut self) {
        let mut at = u16::from(self.config_u8(CAPABILITIES));
        for _ in 0..48 {
            if at == 0 {
                return;
            }
            match self.config_u8(at) {
                VENDOR_CAPABILITY => self.virtio_capability(at),
                MSIX_CAPABILITY => {
                    let vectors = u64::from(self.config_u16(at + 2) & 0x7ff) + 1;
                    self.msix_table = self.msix_location(at, at + 4, 16 * vectors);
                    self.msix_pba = self.msix_location(at, at + 8, vectors.div_ceil(64) * 8);
                }
                _ => {}
            }
            at = u16::from(self.config_u8(at + 1));
        }
        panic!("the list of capabilities has no end");
    }

    fn virtio_capability(&mut self, at: u16) {
        let location = Location {
            capability: at,
            bar: self.config_u8(at + 4),
            offset: u64::from(self.config_u32(at + 8)),
            len_bytes: u64::from(self.config_u32(at + 12)),
        };
        match self.config_u8(at + 3) {
            1 => self.common = location,
            2 => {
                self.notify = location;
                self.notify_multiplier = u64::from(self.config_u32(at + 16));
            }
            3 => self.isr = location,
            4 => self.device_config = location,
            5 => self.pci_access = location,
            _ => {}
        }
    }

    fn msix_location(&self, capability: u16, field: u16, len_bytes: u64) -> Location {
        let value = self.config_u32(field);
        Location { capability, bar: (value & 7) as u8, offset: u64::from(value & !7), len_bytes }
    }

    /// Reads configuration space.
    pub fn config_u8(&self, offset: u16) -> u8 {
        let mut data = [0; 1];
        self.device.read_config(offset, &mut data);
        data[0]
    }

    /// Reads configuration space.
    pub fn config_u16(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.device.read_config(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// Reads configuration space.
    pub fn config_u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.device.read_config(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes configuration space.
    pub fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    /// Puts BAR 0 (64 bits) at `address` and turns memory decoding and bus mastering on.
    pub fn map(&mut self, address: u64) {
        self.write_config(COMMAND, &0u16.to_le_bytes());
        self.write_config(BAR_0, &(address as u32).to_le_bytes());
        self.write_config(BAR_0 + 4, &((address >> 32) as u32).to_le_bytes());
        self.write_config(COMMAND, &0x0006u16.to_le_bytes());
    }

    /// Turns memory decoding and bus mastering off.
    pub fn unmap(&mut self) {
        self.write_config(COMMAND, &0u16.to_le_bytes());
    }

    /// Reads `N` bytes of a structure, in one access.
    pub fn read<const N: usize>(&mut self, place: Location, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.device.read_bar(place.bar, place.offset + offset, &mut data);
        data
    }

    /// Writes a structure, in one access.
    pub fn write(&mut self, place: Location, offset: u64, data: &[u8]) {
        self.device.write_bar(place.bar, place.offset + offset, data);
    }

    /// Reads a field of the common configuration.
    pub fn common_u8(&mut self, offset: u64) -> u8 {
        u8::from_le_bytes(self.read(self.common, offset))
    }

    /// Reads a field of the common configuration.
    pub fn common_u16(&mut self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(self.common, offset))
    }

    /// Reads a field of the common configuration.
    pub fn common_u32(&mut self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(self.common, offset))
    }

    /// Writes a field of the common configuration.
    pub fn write_common(&mut self, offset: u64, data: &[u8]) {
        self.write(self.common, offset, data);
    }

    /// The device status.
    pub fn status(&mut self) -> u8 {
        self.common_u8(common::DEVICE_STATUS)
    }

    /// Writes the device status.
    pub fn set_status(&mut self, status: u8) {
        self.write_common(common::DEVICE_STATUS, &[status]);
    }

    /// Resets the device and waits until the status reads zero (it does at once).
    pub fn reset(&mut self) {
        self.set_status(0);
        assert_eq!(self.status(), 0, "the device is not reset");
    }

    /// All features the device offers.
    pub fn device_features(&mut self) -> u64 {
        let mut half = |select: u32| {
            self.write_common(common::DEVICE_FEATURE_SELECT, &select.to_le_bytes());
            u64::from(self.common_u32(common::DEVICE_FEATURE))
        };
        half(0) | half(1) << 32
    }

    /// Writes the features the driver accepts.
    pub fn write_driver_features(&mut self, features: u64) {
        for (select, half) in [(0u32, features as u32), (1, (features >> 32) as u32)] {
            self.write_common(common::DRIVER_FEATURE_SELECT, &select.to_le_bytes());
            self.write_common(common::DRIVER_FEATURE, &half.to_le_bytes());
        }
    }

    /// Resets, and negotiates those of `wanted` that the device offers (3.1.1, steps 1 to 6). Gives
    /// the negotiated features.
    pub fn negotiate(&mut self, wanted: u64) -> u64 {
        self.reset();
        self.set_status(ACKNOWLEDGE);
        self.set_status(ACKNOWLEDGE | DRIVER);
        let features = self.device_features() & wanted;
        self.write_driver_features(features);
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_ne!(self.status() & FEATURES_OK, 0, "features {features:#x} were refused");
        features
    }

    /// Writes a queue's size, addresses and vector; does not enable it.
    pub fn configure_queue(&mut self, index: u16, config: &QueueConfig, vector: u16) {
        self.write_common(common::QUEUE_SELECT, &index.to_le_bytes());
        self.write_common(common::QUEUE_SIZE, &config.size.to_le_bytes());
        self.write_common(common::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
        for (offset, address) in [
            (common::QUEUE_DESC, config.desc),
            (common::QUEUE_DRIVER, config.driver),
            (common::QUEUE_DEVICE, config.device),
        ] {
            self.write_common(offset, &(address as u32).to_le_bytes());
            self.write_common(offset + 4, &((address >> 32) as u32).to_le_bytes());
        }
    }

    /// Configures a queue with vector `1 + index` and enables it.
    pub fn enable_queue(&mut self, index: u16, config: &QueueConfig) {
        self.configure_queue(index, config, index + 1);
        self.write_common(common::QUEUE_ENABLE, &1u16.to_le_bytes());
    }

    /// Asks for the reset of a queue; gives whether it is done at once (4.1.4.3.2).
    pub fn reset_queue(&mut self, index: u16) -> bool {
        self.write_common(common::QUEUE_SELECT, &index.to_le_bytes());
        self.write_common(common::QUEUE_RESET, &1u16.to_le_bytes());
        self.common_u16(common::QUEUE_RESET) == 0
    }

    /// Resets a queue and waits until that is done; panics after [`TIMEOUT`](super::TIMEOUT).
    pub fn reset_queue_and_wait(&mut self, index: u16) {
        if !self.reset_queue(index) {
            super::wait_for("the end of a queue's reset", || {
                (self.common_u16(common::QUEUE_RESET) == 0).then_some(())
            });
        }
        assert_eq!(self.common_u16(common::QUEUE_ENABLE), 0, "queue {index} is reset");
    }

    /// Turns MSI-X on, with every vector unmasked, and gives vector 0 to configuration changes.
    pub fn enable_msix(&mut self) {
        self.write_config(self.msix_table.capability + 2, &0x8000u16.to_le_bytes());
        for vector in 0..self.msix_table.len_bytes / 16 {
            let entry = [0xfee0_0000, 0, 0x40 + vector as u32, 0];
            for (word, at) in entry.into_iter().zip((16 * vector..).step_by(4)) {
                self.write(self.msix_table, at, &u32::to_le_bytes(word));
            }
        }
        self.write_common(common::CONFIG_MSIX_VECTOR, &0u16.to_le_bytes());
    }

    /// Sets or clears the mask bit of a vector.
    pub fn mask_vector(&mut self, vector: u16, masked: bool) {
        let at = 16 * u64::from(vector) + 12;
        self.write(self.msix_table, at, &u32::from(masked).to_le_bytes());
    }

    /// The pending bit of a vector.
    pub fn is_pending(&mut self, vector: u16) -> bool {
        let word = u64::from_le_bytes(self.read(self.msix_pba, u64::from(vector / 64) * 8));
        word >> (vector % 64) & 1 != 0
    }

    /// Sets DRIVER_OK and gives the device status after it.
    pub fn driver_ok(&mut self) -> u8 {
        let status = self.status();
        self.set_status(status | DRIVER_OK);
        self.status()
    }

    /// From reset to DRIVER_OK: negotiates `wanted`, turns MSI-X on, and enables the first
    /// `sizes.len()` queues with rings from guest address `base` on. Gives the negotiated features
    /// and the queues; the last queue's [`Driver::end`] is the first address not used.
    pub fn start(
        &mut self,
        memory: &GuestMemory,
        base: u64,
        sizes: &[u16],
        wanted: u64,
    ) -> (u64, Vec<Driver>) {
        let features = self.negotiate(wanted);
        self.enable_msix();
        let mut drivers: Vec<Driver> = Vec::new();
        for (index, &size) in (0..).zip(sizes) {
            let base = drivers.last().map_or(base, Driver::end);
            let driver = Driver::new(memory, base, size, features);
            self.enable_queue(index, &driver.config());
            drivers.push(driver);
        }
        let status = self.driver_ok();
        assert_eq!(status, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK, "the device status");
        (features, drivers)
    }

    /// The guest physical address of a queue's notification register; the BAR must be mapped.
    pub fn notify_address(&mut self, queue: u16) -> u64 {
        let offset = self.notify_offset(queue);
        self.bar_address().expect("a mapped BAR") + self.notify.offset + offset
    }

    fn bar_address(&self) -> Option<u64> {
        let mapped = self.device.mapped_bars();
        Some(mapped.iter().find(|mapping| mapping.bar == self.notify.bar)?.address)
    }

    fn notify_offset(&mut self, queue: u16) -> u64 {
        self.write_common(common::QUEUE_SELECT, &queue.to_le_bytes());
        u64::from(self.common_u16(common::QUEUE_NOTIFY_OFF)) * self.notify_multiplier
    }

    /// Kicks a queue, through the notifier if the address is bound there.
    pub fn kick(&mut self, queue: u16) {
        let offset = self.notify.offset + self.notify_offset(queue);
        if let (Some(notifier), Some(bar)) = (&self.notifier, self.bar_address())
            && notifier.write(bar + offset)
        {
            return;
        }
        self.device.write_bar(self.notify.bar, offset, &queue.to_le_bytes());
    }

    /// Reads the ISR status, which clears it.
    pub fn take_isr(&mut self) -> u8 {
        u8::from_le_bytes(self.read(self.isr, 0))
    }
}
