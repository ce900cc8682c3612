//! What the specifications say that a driver reads, and which interrupts may come: reference models
//! to compare a device with. They share no code with the device, and are as plain as possible: speed
//! does not matter here.

use super::common::*;
use super::status::*;
use crate::irq::MsiMessage;
use crate::virtio::queue::{QueueConfig, QueueFeatures};

/// `VIRTIO_MSI_NO_VECTOR` (virtio 1.2, 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;

const VERSION_1: u64 = 1 << 32;
const RING_PACKED: u64 = 1 << 34;
const RING_RESET: u64 = 1 << 40;

/// Whether a queue can be where `config` says (2.7, 2.8.10.1): sizes, alignments, and every area in
/// one of the ranges of `ram` (address, length in bytes).
pub fn queue_is_sound(config: &QueueConfig, features: u64, ram: &[(u64, u64)]) -> bool {
    let packed = QueueFeatures::from_bits(features).packed;
    let size = u64::from(config.size);
    let areas = if packed {
        [(config.desc, 16 * size, 16), (config.driver, 4, 4), (config.device, 4, 4)]
    } else {
        [
            (config.desc, 16 * size, 16),
            (config.driver, 6 + 2 * size, 2),
            (config.device, 6 + 8 * size, 4),
        ]
    };
    let in_ram = |address: u64, len: u64| {
        ram.iter().any(|&(start, bytes)| {
            address >= start && u128::from(address) + u128::from(len) <= u128::from(start + bytes)
        })
    };
    (1..=32768).contains(&size)
        && (packed || size.is_power_of_two())
        && areas.iter().all(|&(at, len, align)| at % align == 0 && in_ram(at, len))
}

/// What follows from a write of the common configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// Nothing beyond the registers.
    Nothing,
    /// The device is reset; the registers are already.
    Reset,
    /// DRIVER_OK is set, and was not before.
    Start,
    /// A queue that cannot work was enabled: DEVICE_NEEDS_RESET.
    Broken,
    /// A queue of a device that runs starts (2.6.1.2).
    StartQueue(u16),
    /// A queue of a device that runs is reset (2.6.1.1).
    ResetQueue(u16),
}

/// A queue's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueModel {
    /// Size and addresses.
    pub config: QueueConfig,
    /// Its MSI-X vector.
    pub vector: u16,
    /// `queue_enable`.
    pub enabled: bool,
    max_size: u16,
}

impl QueueModel {
    fn new(max_size: u16) -> QueueModel {
        let config = QueueConfig { size: max_size, ..QueueConfig::default() };
        QueueModel { config, vector: NO_VECTOR, enabled: false, max_size }
    }
}

/// The common configuration structure (4.1.4.3) of a device whose queue resets are done at once.
#[derive(Clone, Debug)]
pub struct CommonModel {
    offered: u64,
    vectors: u16,
    ram: Vec<(u64, u64)>,
    select: [u32; 2],
    queue_select: u16,
    /// The features the driver has written.
    pub accepted: u64,
    /// The device status.
    pub status: u8,
    /// The vector of configuration changes.
    pub config_vector: u16,
    /// The queues.
    pub queues: Vec<QueueModel>,
}

impl CommonModel {
    /// A device after its reset; `ram` are the ranges of RAM (address, length in bytes).
    pub fn new(offered: u64, max_sizes: &[u16], vectors: u16, ram: &[(u64, u64)]) -> CommonModel {
        CommonModel {
            offered,
            vectors,
            ram: ram.to_vec(),
            select: [0; 2],
            queue_select: 0,
            accepted: 0,
            status: 0,
            config_vector: NO_VECTOR,
            queues: max_sizes.iter().map(|&size| QueueModel::new(size)).collect(),
        }
    }

    /// The state after a reset.
    pub fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|queue| queue.max_size).collect();
        *self = CommonModel::new(self.offered, &sizes, self.vectors, &self.ram);
    }

    /// DRIVER_OK is set.
    pub fn is_running(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    /// DEVICE_NEEDS_RESET is set.
    pub fn needs_reset(&self) -> bool {
        self.status & NEEDS_RESET != 0
    }

    /// The device asks for a reset: true if it sends a configuration interrupt with that (2.1.2).
    pub fn ask_for_reset(&mut self) -> bool {
        let news = self.is_running() && !self.needs_reset();
        self.status |= NEEDS_RESET;
        news
    }

    /// The negotiated features.
    pub fn negotiated(&self) -> u64 {
        if self.status & FEATURES_OK != 0 { self.accepted } else { 0 }
    }

    /// Whether this queue could be made where its registers say.
    pub fn is_sound(&self, queue: u16) -> bool {
        let queue = &self.queues[usize::from(queue)];
        queue_is_sound(&queue.config, self.accepted, &self.ram)
    }

    fn selected(&self) -> Option<&QueueModel> {
        self.queues.get(usize::from(self.queue_select))
    }

    fn selected_mut(&mut self) -> Option<&mut QueueModel> {
        self.queues.get_mut(usize::from(self.queue_select))
    }

    /// What `len` bytes at `at` read as, byte by byte.
    pub fn read(&self, at: u64, len: usize, generation: u8) -> Vec<u8> {
        let byte = |at: u64| {
            let (start, value) = self.register(at, generation)?;
            value.to_le_bytes().get((at - start) as usize).copied()
        };
        (at..).take(len).map(|at| byte(at).unwrap_or(0)).collect()
    }

    /// The register that the byte at `at` belongs to: its offset and its value.
    fn register(&self, at: u64, generation: u8) -> Option<(u64, u64)> {
        let half = |features: u64, select: u32| match select {
            0 | 1 => features >> (32 * select) & 0xffff_ffff,
            _ => 0,
        };
        let queue = self.selected();
        let field = |get: fn(&QueueModel) -> u64| queue.map_or(0, get);
        Some(match at {
            0x00..0x04 => (DEVICE_FEATURE_SELECT, self.select[0].into()),
            0x04..0x08 => (DEVICE_FEATURE, half(self.offered, self.select[0])),
            0x08..0x0c => (DRIVER_FEATURE_SELECT, self.select[1].into()),
            0x0c..0x10 => (DRIVER_FEATURE, half(self.accepted, self.select[1])),
            0x10..0x12 => (CONFIG_MSIX_VECTOR, self.config_vector.into()),
            0x12..0x14 => (NUM_QUEUES, self.queues.len() as u64),
            0x14 => (DEVICE_STATUS, self.status.into()),
            0x15 => (CONFIG_GENERATION, generation.into()),
            0x16..0x18 => (QUEUE_SELECT, self.queue_select.into()),
            0x18..0x1a => (QUEUE_SIZE, field(|queue| queue.config.size.into())),
            0x1a..0x1c => {
                (QUEUE_MSIX_VECTOR, queue.map_or(NO_VECTOR.into(), |queue| queue.vector.into()))
            }
            0x1c..0x1e => (QUEUE_ENABLE, field(|queue| queue.enabled.into())),
            0x1e..0x20 => (QUEUE_NOTIFY_OFF, queue.map_or(0, |_| self.queue_select.into())),
            0x20..0x28 => (QUEUE_DESC, field(|queue| queue.config.desc)),
            0x28..0x30 => (QUEUE_DRIVER, field(|queue| queue.config.driver)),
            0x30..0x38 => (QUEUE_DEVICE, field(|queue| queue.config.device)),
            _ => return None,
        })
    }

    /// The driver writes `data` at `at`.
    pub fn write(&mut self, at: u64, data: &[u8]) -> Consequence {
        let mut bytes = [0; 8];
        bytes[..data.len().min(8)].copy_from_slice(&data[..data.len().min(8)]);
        let value = u64::from_le_bytes(bytes);
        match (data.len(), at) {
            (1, DEVICE_STATUS) => return self.write_status(value as u8),
            (4, DEVICE_FEATURE_SELECT) => self.select[0] = value as u32,
            (4, DRIVER_FEATURE_SELECT) => self.select[1] = value as u32,
            (4, DRIVER_FEATURE) if self.status & FEATURES_OK == 0 && self.select[1] < 2 => {
                let shift = 32 * self.select[1];
                self.accepted = self.accepted & !(0xffff_ffff << shift) | value << shift;
            }
            (2, CONFIG_MSIX_VECTOR) => self.config_vector = self.vector(value),
            (2, QUEUE_SELECT) => self.queue_select = value as u16,
            (2, QUEUE_MSIX_VECTOR) => {
                let vector = self.vector(value);
                if let Some(queue) = self.selected_mut() {
                    queue.vector = vector;
                }
            }
            (2, QUEUE_SIZE) => self.write_size(value as u16),
            (2, QUEUE_ENABLE) if value == 1 => return self.enable(),
            (2, QUEUE_RESET) if value == 1 => return self.reset_queue(),
            (4 | 8, QUEUE_DESC..QUEUE_NOTIFY_DATA) => self.write_address(at, data),
            _ => {}
        }
        Consequence::Nothing
    }

    fn vector(&self, value: u64) -> u16 {
        if value < self.vectors.into() { value as u16 } else { NO_VECTOR }
    }

    fn write_size(&mut self, size: u16) {
        let any = self.negotiated() & RING_PACKED != 0;
        if let Some(queue) = self.selected_mut()
            && !queue.enabled
            && size > 0
            && size <= queue.max_size
            && (any || size.is_power_of_two())
        {
            queue.config.size = size;
        }
    }

    /// 64-bit registers are written as a whole or by halves (4.1.3.1).
    fn write_address(&mut self, at: u64, data: &[u8]) {
        if !at.is_multiple_of(data.len() as u64) {
            return;
        }
        let Some(queue) = self.selected_mut().filter(|queue| !queue.enabled) else { return };
        let register = match at & !7 {
            QUEUE_DESC => &mut queue.config.desc,
            QUEUE_DRIVER => &mut queue.config.driver,
            _ => &mut queue.config.device,
        };
        let mut bytes = register.to_le_bytes();
        bytes[at as usize % 8..][..data.len()].copy_from_slice(data);
        *register = u64::from_le_bytes(bytes);
    }

    fn write_status(&mut self, value: u8) -> Consequence {
        if value == 0 {
            self.reset();
            return Consequence::Reset;
        }
        let was_running = self.is_running();
        self.status |= value & (ACKNOWLEDGE | DRIVER | FAILED);
        let agreed = self.accepted & VERSION_1 != 0 && self.accepted & !self.offered == 0;
        if value & FEATURES_OK != 0 && agreed {
            self.status |= FEATURES_OK;
        }
        if value & DRIVER_OK != 0 && self.status & FEATURES_OK != 0 {
            self.status |= DRIVER_OK;
        }
        if self.is_running() && !was_running { Consequence::Start } else { Consequence::Nothing }
    }

    fn enable(&mut self) -> Consequence {
        let (index, running) = (self.queue_select, self.is_running());
        let may_later = self.negotiated() & RING_RESET != 0;
        let Some(queue) = self.selected() else { return Consequence::Nothing };
        if running && (!may_later || queue.enabled) {
            return Consequence::Nothing;
        }
        if !self.is_sound(index) {
            return Consequence::Broken;
        }
        self.queues[usize::from(index)].enabled = true;
        if running { Consequence::StartQueue(index) } else { Consequence::Nothing }
    }

    fn reset_queue(&mut self) -> Consequence {
        let (index, running) = (self.queue_select, self.is_running());
        if self.negotiated() & RING_RESET == 0 {
            return Consequence::Nothing;
        }
        let Some(queue) = self.selected_mut() else { return Consequence::Nothing };
        *queue = QueueModel::new(queue.max_size);
        if running { Consequence::ResetQueue(index) } else { Consequence::Nothing }
    }
}

/// A vector of an [`MsixModel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorModel {
    /// What is sent.
    pub message: MsiMessage,
    /// The mask bit.
    pub masked: bool,
    /// The pending bit.
    pub pending: bool,
    /// How many interrupts were delivered.
    pub delivered: usize,
}

/// MSI-X of a function (PCI 3.0, 6.8.2). A vector that is signalled while it cannot be delivered is
/// pending, and delivered once when it can be.
#[derive(Clone, Debug)]
pub struct MsixModel {
    /// The enable bit.
    pub enabled: bool,
    /// The function mask bit.
    pub function_mask: bool,
    /// The vectors.
    pub vectors: Vec<VectorModel>,
}

impl MsixModel {
    /// After a reset of the function.
    pub fn new(vectors: u16) -> MsixModel {
        let vector = VectorModel {
            message: MsiMessage::default(),
            masked: true,
            pending: false,
            delivered: 0,
        };
        let vectors = vec![vector; vectors.into()];
        MsixModel { enabled: false, function_mask: false, vectors }
    }

    /// Whether a signal of `vector` is delivered at once.
    pub fn is_live(&self, vector: u16) -> bool {
        self.enabled && !self.function_mask && !self.vectors[usize::from(vector)].masked
    }

    /// The message control word.
    pub fn control(&self) -> u16 {
        (self.vectors.len() as u16 - 1)
            | u16::from(self.enabled) << 15
            | u16::from(self.function_mask) << 14
    }

    /// The two writable bits of message control.
    pub fn set_control(&mut self, enabled: bool, function_mask: bool) {
        (self.enabled, self.function_mask) = (enabled, function_mask);
        self.deliver();
    }

    /// A write of the table: of aligned double or quad words.
    pub fn write_table(&mut self, at: u64, data: &[u8]) {
        let aligned = matches!(data.len(), 4 | 8) && at.is_multiple_of(data.len() as u64);
        let Some(vector) = self.vectors.get_mut((at / 16) as usize).filter(|_| aligned) else {
            return;
        };
        let mut bytes = Self::entry(vector);
        bytes[at as usize % 16..][..data.len()].copy_from_slice(data);
        let word = u128::from_le_bytes(bytes);
        vector.message = MsiMessage { address: word as u64 & !3, data: (word >> 64) as u32 };
        vector.masked = word >> 96 & 1 != 0;
        self.deliver();
    }

    fn entry(vector: &VectorModel) -> [u8; 16] {
        let word = u128::from(vector.message.address)
            | u128::from(vector.message.data) << 64
            | u128::from(vector.masked) << 96;
        word.to_le_bytes()
    }

    /// What the table reads as; zero past its end.
    pub fn read_table(&self, at: u64, len: usize) -> Vec<u8> {
        let table: Vec<u8> = self.vectors.iter().flat_map(Self::entry).collect();
        let byte = |at: u64| usize::try_from(at).ok().and_then(|at| table.get(at)).copied();
        (at..).take(len).map(|at| byte(at).unwrap_or(0)).collect()
    }

    /// What the pending bits read as; zero past their end.
    pub fn read_pending(&self, at: u64, len: usize) -> Vec<u8> {
        let bit = |at: u64| self.vectors.get(usize::try_from(at).ok()?).map(|v| v.pending);
        let byte = |at: u64| {
            let bits = (0..8).map(|i| {
                let index = at.checked_mul(8).and_then(|first| first.checked_add(i));
                u8::from(index.and_then(bit).unwrap_or(false)) << i
            });
            bits.sum()
        };
        (at..).take(len).map(byte).collect()
    }

    /// A signal of `vector`; ignored if there is none such.
    pub fn signal(&mut self, vector: u16) {
        if let Some(state) = self.vectors.get_mut(usize::from(vector)) {
            state.pending = true;
            self.deliver();
        }
    }

    /// The device was reset: nothing is pending.
    pub fn forget_pending(&mut self) {
        self.vectors.iter_mut().for_each(|vector| vector.pending = false);
    }

    fn deliver(&mut self) {
        for index in 0..self.vectors.len() as u16 {
            let live = self.is_live(index);
            let vector = &mut self.vectors[usize::from(index)];
            if live && std::mem::take(&mut vector.pending) {
                vector.delivered += 1;
            }
        }
    }
}
