//! Virtqueues, split (virtio 1.2, 2.7) and packed (2.8): the device's side.
//!
//! This is the data path. The three areas are resolved to host addresses once, in
//! [`Queue::new`]; afterwards a pop is a few loads. Everything in the rings is the guest's and may
//! change at any time: each field is copied once and then checked, every walk is bounded by the
//! queue's size, and what breaks the rules breaks the queue for good.

mod chain;
mod descriptor;
mod packed;
mod ram;
mod split;
#[cfg(test)]
mod tests;

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use chain::{Chain, GuestBuf, GuestByte};
use packed::Packed;
use ram::RamMap;
use split::Split;
pub use split::need_event;

use crate::GuestMemory;

/// The largest size of a queue of either format (virtio 1.2, 2.7 and 2.8).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// Size and place of a queue, as the driver configured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of descriptors; a power of two if the queue is split.
    pub size: u16,
    /// Guest physical address of the descriptor area (the table, or the packed ring).
    pub desc: u64,
    /// Guest physical address of the driver area (the available ring, or the driver's event
    /// suppression structure).
    pub driver: u64,
    /// Guest physical address of the device area (the used ring, or the device's event
    /// suppression structure).
    pub device: u64,
}

/// The negotiated features that change how a queue works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueFeatures {
    /// `VIRTIO_F_EVENT_IDX`: events are suppressed by index (virtio 1.2, 2.7.7, 2.7.10), or by
    /// descriptor (2.8.10).
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC`: a chain may end in an indirect table (2.7.5.3), or be one (2.8.7).
    pub indirect: bool,
    /// `VIRTIO_F_RING_PACKED`: the queue is packed (2.8).
    pub packed: bool,
}

impl QueueFeatures {
    /// Picks the queue's features from all negotiated ones.
    pub fn from_bits(features: u64) -> QueueFeatures {
        QueueFeatures {
            event_idx: features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0,
            indirect: features & (1 << VIRTIO_RING_F_INDIRECT_DESC) != 0,
            packed: features & (1 << VIRTIO_F_RING_PACKED) != 0,
        }
    }
}

/// What is wrong with a queue. None of these goes away before a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// Zero, more than [`MAX_QUEUE_SIZE`], or (of a split queue) not a power of two.
    #[error("queue size {0} is not a size from 1 to 32768, or not a power of two")]
    Size(u16),
    /// The descriptor area is aligned to 16 bytes, the driver area to 2 (in a packed queue to 4),
    /// the device area to 4.
    #[error("the queue's area at {0:#x} is misaligned")]
    Misaligned(u64),
    /// An area, a buffer or an indirect table that is not all guest RAM.
    #[error("{len_bytes} bytes at {address:#x} are not in guest RAM")]
    OutsideRam {
        /// Guest physical address.
        address: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// More chains available than there are descriptors: the index jumped.
    #[error("available index {available} is too far ahead: the device stands at {device}")]
    AvailableIndex {
        /// What the driver published.
        available: u16,
        /// The first index the device has not yet taken.
        device: u16,
    },
    /// A descriptor number that does not exist in its table.
    #[error("descriptor {0} does not exist")]
    DescriptorIndex(u16),
    /// A chain with more descriptors than the queue has, or with a cycle.
    #[error("the descriptor chain is longer than the queue, or has a cycle")]
    ChainTooLong,
    /// A chain of a packed queue takes descriptors of chains that are not given back yet.
    #[error("a chain takes descriptors that the device still holds")]
    NotGivenBack,
    /// A chain of a packed queue goes on in a descriptor that is not available (2.8.6).
    #[error("a chain goes on in descriptor {0}, which is not available")]
    ChainNotAvailable(u16),
    /// A device-readable descriptor after a device-writable one (2.7.4.2, 2.8.17).
    #[error("a readable descriptor follows a writable one")]
    ReadableAfterWritable,
    /// An indirect descriptor that was not negotiated, has NEXT set, lies in an indirect table, or
    /// (in a packed queue) is part of a chain (2.8.19).
    #[error("an indirect descriptor where none is allowed")]
    IndirectNotAllowed,
    /// An indirect table that is empty, not whole descriptors, or longer than the queue.
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
}

/// A virtqueue. It owns what keeps the rings mapped.
///
/// At most [`size`](Self::size) chains are out at once, that is popped and not yet pushed: a driver
/// that makes more available breaks the queue. A device may rely on it.
pub struct Queue {
    ring: Ring,
    broken: Option<QueueError>,
    ram: RamMap,
    /// Keeps mapped what the pointers in `ring` and `ram` point to.
    _memory: GuestMemory,
}

enum Ring {
    Split(Split),
    Packed(Packed),
}

// SAFETY: the raw pointers are into guest RAM, which `_memory` keeps mapped on any thread; all
// other state is owned.
unsafe impl Send for Queue {}

impl Queue {
    /// Checks the configuration and resolves the rings. Touches no guest memory.
    ///
    /// # Errors
    /// A size or alignment that is against virtio 1.2, 2.7 or 2.8.10.1, or an area that is not
    /// wholly inside one region of RAM.
    pub fn new(
        memory: &GuestMemory,
        config: &QueueConfig,
        features: QueueFeatures,
    ) -> Result<Queue, QueueError> {
        if config.size == 0 || config.size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size(config.size));
        }
        let mut ram = RamMap::new(memory);
        let ring = if features.packed {
            Ring::Packed(Packed::new(&mut ram, config, features)?)
        } else {
            Ring::Split(Split::new(&mut ram, config, features)?)
        };
        Ok(Queue { ring, broken: None, ram, _memory: memory.clone() })
    }

    /// The number of descriptors.
    pub fn size(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.size(),
            Ring::Packed(ring) => ring.size(),
        }
    }

    /// Takes the next available chain. False, and `chain` as it was, if there is none. Work is
    /// bounded by the queue's size, whatever the rings contain.
    ///
    /// # Errors
    /// The driver broke a rule. The queue is then broken for good: every later call gives the same
    /// error and touches nothing. What `chain` holds after an error is unspecified.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, QueueError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let popped = match &mut self.ring {
            Ring::Split(ring) => ring.pop(chain, &mut self.ram),
            Ring::Packed(ring) => ring.pop(chain, &mut self.ram),
        };
        if let Err(error) = popped {
            self.broken = Some(error);
        }
        popped
    }

    /// Puts a chain among the used ones. The driver sees it after [`publish`](Self::publish).
    /// `head` is the [`Chain::head`] of a popped chain, each pushed once; `written_bytes` counts
    /// what the device wrote, from the first writable byte on (2.7.8.2, 2.8.4).
    #[inline]
    pub fn push(&mut self, head: u16, written_bytes: u32) {
        match &mut self.ring {
            Ring::Split(ring) => ring.push(head, written_bytes),
            Ring::Packed(ring) => ring.push(head, written_bytes),
        }
    }

    /// Makes everything pushed since the last call visible, with one store. True if the driver
    /// wants an interrupt for it; one decision for the whole batch. False if nothing was pushed.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match &mut self.ring {
            Ring::Split(ring) => ring.publish(),
            Ring::Packed(ring) => ring.publish(),
        }
    }

    /// Asks the driver not to kick. A hint: kicks may come nevertheless.
    #[inline]
    pub fn disable_kicks(&mut self) {
        match &mut self.ring {
            Ring::Split(ring) => ring.disable_kicks(),
            Ring::Packed(ring) => ring.disable_kicks(),
        }
    }

    /// Asks for a kick with the next chain, then looks once more: true if chains are available
    /// now, for which no kick may come. Nobody may sleep on it then.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        match &mut self.ring {
            Ring::Split(ring) => ring.ask_for_kicks(),
            Ring::Packed(ring) => ring.ask_for_kicks(),
        }
        // The store above before the load below: without it, both sides may miss the other.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Whether [`pop`](Self::pop) would find a chain (or an error); one load. False on a broken
    /// queue.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.broken.is_none()
            && match &self.ring {
                Ring::Split(ring) => ring.has_available(),
                Ring::Packed(ring) => ring.has_available(),
            }
    }
}
