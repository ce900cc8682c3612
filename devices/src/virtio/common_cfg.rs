//! The common configuration structure (virtio 1.2, 4.1.4.3): a register file and the rules by which
//! the driver may change it. What follows from a write is for the transport to do.
//!
//! Every register is written with one access of its own width (4.1.3.1), 64-bit ones also by
//! halves; writes of other shapes are ignored. Reads may have any shape.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_F_RING_PACKED, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1,
};

use super::queue::{Queue, QueueConfig, QueueFeatures};
use super::signal::{NO_VECTOR, STATUS_DRIVER_OK, STATUS_NEEDS_RESET};
use crate::GuestMemory;

/// Offsets of the registers in bytes.
pub mod offset {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub const DEVICE_FEATURE: u64 = 0x04;
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub const DRIVER_FEATURE: u64 = 0x0c;
    pub const CONFIG_MSIX_VECTOR: u64 = 0x10;
    pub const NUM_QUEUES: u64 = 0x12;
    pub const DEVICE_STATUS: u64 = 0x14;
    pub const CONFIG_GENERATION: u64 = 0x15;
    pub const QUEUE_SELECT: u64 = 0x16;
    pub const QUEUE_SIZE: u64 = 0x18;
    pub const QUEUE_MSIX_VECTOR: u64 = 0x1a;
    pub const QUEUE_ENABLE: u64 = 0x1c;
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub const QUEUE_DESC: u64 = 0x20;
    pub const QUEUE_DRIVER: u64 = 0x28;
    pub const QUEUE_DEVICE: u64 = 0x30;
    /// Reads as zero: `VIRTIO_F_NOTIF_CONFIG_DATA` is not offered.
    pub const QUEUE_NOTIFY_DATA: u64 = 0x38;
    pub const QUEUE_RESET: u64 = 0x3a;
    /// Length of the structure in bytes.
    pub const BYTES: u64 = 0x3c;
}

/// Device status: the driver accepted its features, and the device agreed.
pub const STATUS_FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
/// The bits a driver can set without a condition.
const STATUS_FREE: u8 =
    (VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FAILED) as u8;

/// What a write asks of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing.
    None,
    /// Reset the device, then call [`CommonConfig::reset`].
    Reset,
    /// DRIVER_OK was set just now: start the device.
    DriverOk,
    /// A queue that cannot work was enabled: the device needs a reset.
    BadQueue,
    /// A queue was enabled in a device that runs: start it.
    EnableQueue(u16),
    /// Reset this queue of a device that runs; when it is done, call
    /// [`CommonConfig::queue_was_reset`].
    ResetQueue(u16),
}

/// The registers of one queue.
struct QueueRegisters {
    max_size: u16,
    size: u16,
    vector: Arc<AtomicU16>,
    enabled: bool,
    /// A reset of this queue was asked for, and is not known to be done.
    resetting: bool,
    desc: u64,
    driver: u64,
    device: u64,
}

impl QueueRegisters {
    fn new(max_size: u16) -> QueueRegisters {
        QueueRegisters {
            max_size,
            size: max_size,
            vector: Arc::new(AtomicU16::new(NO_VECTOR)),
            enabled: false,
            resetting: false,
            desc: 0,
            driver: 0,
            device: 0,
        }
    }

    fn config(&self) -> QueueConfig {
        QueueConfig { size: self.size, desc: self.desc, driver: self.driver, device: self.device }
    }

    fn reset(&mut self) {
        self.size = self.max_size;
        self.vector.store(NO_VECTOR, Ordering::SeqCst);
        self.enabled = false;
        self.resetting = false;
        (self.desc, self.driver, self.device) = (0, 0, 0);
    }
}

/// The registers of one device.
pub struct CommonConfig {
    offered: u64,
    accepted: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    vectors: u16,
    config_vector: Arc<AtomicU16>,
    /// Shared, for the device sets NEEDS_RESET from its own threads. Bits are only ever added,
    /// until a reset.
    status: Arc<AtomicU8>,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

impl CommonConfig {
    /// The registers after a reset, of a device that offers the features `offered`, has a queue
    /// for each of `max_sizes` (65535 at most) and `vectors` MSI-X vectors.
    pub fn new(offered: u64, max_sizes: &[u16], vectors: u16) -> CommonConfig {
        let max_sizes = max_sizes.iter().take(usize::from(u16::MAX));
        let queues = max_sizes.map(|&max_size| QueueRegisters::new(max_size));
        CommonConfig {
            offered,
            accepted: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            vectors,
            config_vector: Arc::new(AtomicU16::new(NO_VECTOR)),
            status: Arc::new(AtomicU8::new(0)),
            queue_select: 0,
            queues: queues.collect(),
        }
    }

    /// Everything as after power-on; the status reads 0 last of all.
    pub fn reset(&mut self) {
        self.accepted = 0;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.config_vector.store(NO_VECTOR, Ordering::SeqCst);
        self.queue_select = 0;
        self.queues.iter_mut().for_each(QueueRegisters::reset);
        self.status.store(0, Ordering::SeqCst);
    }

    /// The negotiated features: none before FEATURES_OK.
    pub fn features(&self) -> u64 {
        if self.status() & STATUS_FEATURES_OK != 0 { self.accepted } else { 0 }
    }

    /// The device status (2.1).
    pub fn status(&self) -> u8 {
        self.status.load(Ordering::SeqCst)
    }

    /// The device status, for the device to set NEEDS_RESET in.
    pub fn shared_status(&self) -> Arc<AtomicU8> {
        self.status.clone()
    }

    /// The vector of configuration changes.
    pub fn config_vector(&self) -> Arc<AtomicU16> {
        self.config_vector.clone()
    }

    /// The vector of a queue.
    pub fn queue_vector(&self, index: u16) -> Option<Arc<AtomicU16>> {
        Some(self.queues.get(usize::from(index))?.vector.clone())
    }

    /// Index and configuration of each enabled queue.
    pub fn enabled_queues(&self) -> impl Iterator<Item = (u16, QueueConfig)> {
        (0..).zip(&self.queues).filter(|(_, q)| q.enabled).map(|(index, q)| (index, q.config()))
    }

    /// The selected queue, if its reset was asked for and is not known to be done.
    pub fn resetting(&self) -> Option<u16> {
        let queue = self.queues.get(usize::from(self.queue_select))?;
        queue.resetting.then_some(self.queue_select)
    }

    /// The reset of a queue is done.
    pub fn queue_was_reset(&mut self, index: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            queue.resetting = false;
        }
    }

    /// Reads at `at` bytes into the structure; what lies outside reads as zero. `generation` is
    /// the device configuration's; `resetting` says that the reset of the selected queue goes on.
    pub fn read(&self, at: u64, data: &mut [u8], generation: u8, resetting: bool) {
        data.fill(0);
        let image = self.image(generation, resetting);
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        for (byte, value) in data.iter_mut().zip(image.iter().skip(start)) {
            *byte = *value;
        }
    }

    /// All registers as they read now.
    fn image(&self, generation: u8, resetting: bool) -> [u8; offset::BYTES as usize] {
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let mut image = [0; offset::BYTES as usize];
        let mut put = |at: u64, value: &[u8]| {
            for (byte, value) in image.iter_mut().skip(at as usize).zip(value) {
                *byte = *value;
            }
        };
        put(offset::DEVICE_FEATURE_SELECT, &self.device_feature_select.to_le_bytes());
        let offered = half(self.offered, self.device_feature_select);
        put(offset::DEVICE_FEATURE, &offered.to_le_bytes());
        put(offset::DRIVER_FEATURE_SELECT, &self.driver_feature_select.to_le_bytes());
        let accepted = half(self.accepted, self.driver_feature_select);
        put(offset::DRIVER_FEATURE, &accepted.to_le_bytes());
        let vector = self.config_vector.load(Ordering::SeqCst);
        put(offset::CONFIG_MSIX_VECTOR, &vector.to_le_bytes());
        put(offset::NUM_QUEUES, &(self.queues.len() as u16).to_le_bytes());
        put(offset::DEVICE_STATUS, &[self.status()]);
        put(offset::CONFIG_GENERATION, &[generation]);
        put(offset::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        match self.queues.get(usize::from(self.queue_select)) {
            Some(queue) => {
                put(offset::QUEUE_SIZE, &queue.size.to_le_bytes());
                let vector = queue.vector.load(Ordering::SeqCst);
                put(offset::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
                put(offset::QUEUE_ENABLE, &u16::from(queue.enabled).to_le_bytes());
                put(offset::QUEUE_NOTIFY_OFF, &self.queue_select.to_le_bytes());
                put(offset::QUEUE_DESC, &queue.desc.to_le_bytes());
                put(offset::QUEUE_DRIVER, &queue.driver.to_le_bytes());
                put(offset::QUEUE_DEVICE, &queue.device.to_le_bytes());
                put(offset::QUEUE_RESET, &u16::from(resetting).to_le_bytes());
            }
            // A queue size of 0 says that there is no such queue (4.1.4.3.1).
            None => put(offset::QUEUE_MSIX_VECTOR, &NO_VECTOR.to_le_bytes()),
        }
        image
    }

    /// Writes at `at` bytes into the structure. `memory` is where the queues must lie.
    pub fn write(&mut self, at: u64, data: &[u8], memory: &GuestMemory) -> Event {
        match *data {
            [value] if at == offset::DEVICE_STATUS => return self.write_status(value),
            [a, b] => return self.write_u16(at, u16::from_le_bytes([a, b]), memory),
            [a, b, c, d] => self.write_u32(at, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => {
                if let Some(address) = self.address_register(at) {
                    *address = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
                }
            }
            _ => {}
        }
        Event::None
    }

    fn write_u16(&mut self, at: u64, value: u16, memory: &GuestMemory) -> Event {
        let vector = if value < self.vectors { value } else { NO_VECTOR };
        let any_size = self.features() & (1 << VIRTIO_F_RING_PACKED) != 0;
        let queue = self.queues.get_mut(usize::from(self.queue_select));
        match (at, queue) {
            (offset::CONFIG_MSIX_VECTOR, _) => self.config_vector.store(vector, Ordering::SeqCst),
            (offset::QUEUE_SELECT, _) => self.queue_select = value,
            (offset::QUEUE_MSIX_VECTOR, Some(queue)) => {
                queue.vector.store(vector, Ordering::SeqCst);
            }
            (offset::QUEUE_SIZE, Some(queue))
                if !queue.enabled
                    && (1..=queue.max_size).contains(&value)
                    && (any_size || value.is_power_of_two()) =>
            {
                queue.size = value;
            }
            // A driver never writes 0 (4.1.4.3.2).
            (offset::QUEUE_ENABLE, Some(_)) if value == 1 => return self.enable_queue(memory),
            (offset::QUEUE_RESET, Some(_)) if value == 1 => return self.reset_queue(),
            _ => {}
        }
        Event::None
    }

    fn write_u32(&mut self, at: u64, value: u32) {
        match at {
            offset::DEVICE_FEATURE_SELECT => self.device_feature_select = value,
            offset::DRIVER_FEATURE_SELECT => self.driver_feature_select = value,
            offset::DRIVER_FEATURE => self.write_driver_feature(value),
            _ => {
                if let Some(address) = self.address_register(at) {
                    *address = *address & !0xffff_ffff | u64::from(value);
                } else if let Some(address) =
                    at.checked_sub(4).and_then(|at| self.address_register(at))
                {
                    *address = *address & 0xffff_ffff | u64::from(value) << 32;
                }
            }
        }
    }

    /// The address register at `at` of the selected queue, while it may be written.
    fn address_register(&mut self, at: u64) -> Option<&mut u64> {
        let queue = self.queues.get_mut(usize::from(self.queue_select))?;
        match at {
            _ if queue.enabled => None,
            offset::QUEUE_DESC => Some(&mut queue.desc),
            offset::QUEUE_DRIVER => Some(&mut queue.driver),
            offset::QUEUE_DEVICE => Some(&mut queue.device),
            _ => None,
        }
    }

    fn write_driver_feature(&mut self, value: u32) {
        // Once agreed upon, features stand (3.1.1).
        if self.status() & STATUS_FEATURES_OK != 0 {
            return;
        }
        let value = u64::from(value);
        match self.driver_feature_select {
            0 => self.accepted = self.accepted & !0xffff_ffff | value,
            1 => self.accepted = self.accepted & 0xffff_ffff | value << 32,
            _ => {}
        }
    }

    /// Enables the selected queue, if its rings are sound. A device that has started can be given
    /// more only if its queues can be reset one by one (2.6.1).
    fn enable_queue(&mut self, memory: &GuestMemory) -> Event {
        let features = QueueFeatures::from_bits(self.accepted);
        let running = self.status() & STATUS_DRIVER_OK != 0;
        let index = self.queue_select;
        if running && !self.can_reset_queues() {
            return Event::None;
        }
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return Event::None;
        };
        if running && (queue.enabled || queue.resetting) {
            return Event::None;
        }
        if Queue::new(memory, &queue.config(), features).is_err() {
            return Event::BadQueue;
        }
        queue.enabled = true;
        if running { Event::EnableQueue(index) } else { Event::None }
    }

    /// Begins to reset the selected queue: its registers have their defaults from now on (2.6.1.1).
    fn reset_queue(&mut self) -> Event {
        let running = self.status() & STATUS_DRIVER_OK != 0;
        let index = self.queue_select;
        if !self.can_reset_queues() {
            return Event::None;
        }
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return Event::None;
        };
        queue.reset();
        queue.resetting = running;
        if running { Event::ResetQueue(index) } else { Event::None }
    }

    fn can_reset_queues(&self) -> bool {
        self.features() & (1 << VIRTIO_F_RING_RESET) != 0
    }

    /// The driver sets bits and, but for a reset, clears none (2.1.1). FEATURES_OK stays clear if
    /// the features cannot be agreed upon (2.2.2, 3.1.1), DRIVER_OK without FEATURES_OK.
    fn write_status(&mut self, value: u8) -> Event {
        if value == 0 {
            return Event::Reset;
        }
        let before = self.status();
        let mut set = value & STATUS_FREE;
        if value & STATUS_FEATURES_OK != 0 && self.features_acceptable() {
            set |= STATUS_FEATURES_OK;
        }
        if value & STATUS_DRIVER_OK != 0 && (before | set) & STATUS_FEATURES_OK != 0 {
            set |= STATUS_DRIVER_OK;
        }
        self.status.fetch_or(set, Ordering::SeqCst);
        if set & !before & STATUS_DRIVER_OK != 0 { Event::DriverOk } else { Event::None }
    }

    fn features_acceptable(&self) -> bool {
        self.accepted & !self.offered == 0 && self.accepted & (1 << VIRTIO_F_VERSION_1) != 0
    }

    /// Whether the device asked for a reset.
    pub fn needs_reset(&self) -> bool {
        self.status() & STATUS_NEEDS_RESET != 0
    }
}

#[cfg(test)]
mod tests;
