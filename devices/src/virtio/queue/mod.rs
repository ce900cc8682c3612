//! Split virtqueues (virtio 1.2, 2.7), the device's side.
//!
//! This is the data path. The three areas are resolved to host addresses once, in
//! [`Queue::new`]; afterwards a pop is a few loads. Everything in the rings is the guest's and may
//! change at any time: each field is copied once and then checked, every walk is bounded by the
//! queue's size, and what breaks the rules breaks the queue for good.

mod chain;
mod ram;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU16, Ordering, fence};

use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};

pub use chain::{Chain, GuestBuf, GuestByte};
use ram::RamMap;

use crate::GuestMemory;

/// The largest size of a split queue (virtio 1.2, 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

const DESCRIPTOR_BYTES: u64 = 16;
const F_NEXT: u16 = VRING_DESC_F_NEXT as u16;
const F_WRITE: u16 = VRING_DESC_F_WRITE as u16;
const F_INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// Size and place of a queue, as the driver configured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of descriptors, a power of two.
    pub size: u16,
    /// Guest physical address of the descriptor table.
    pub desc: u64,
    /// Guest physical address of the driver area (the available ring).
    pub driver: u64,
    /// Guest physical address of the device area (the used ring).
    pub device: u64,
}

/// The negotiated features that change how a queue works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueFeatures {
    /// `VIRTIO_F_EVENT_IDX`: events are suppressed by index (virtio 1.2, 2.7.7, 2.7.10).
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC`: a chain may end in an indirect table (2.7.5.3).
    pub indirect: bool,
}

impl QueueFeatures {
    /// Picks the queue's features from all negotiated ones.
    pub fn from_bits(features: u64) -> QueueFeatures {
        QueueFeatures {
            event_idx: features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0,
            indirect: features & (1 << VIRTIO_RING_F_INDIRECT_DESC) != 0,
        }
    }
}

/// What is wrong with a queue. None of these goes away before a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// Zero, not a power of two, or more than [`MAX_QUEUE_SIZE`].
    #[error("queue size {0} is not a power of two from 1 to 32768")]
    Size(u16),
    /// The descriptor table is aligned to 16 bytes, the driver area to 2, the device area to 4.
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
    /// A device-readable descriptor after a device-writable one (2.7.4.2).
    #[error("a readable descriptor follows a writable one")]
    ReadableAfterWritable,
    /// An indirect descriptor that was not negotiated, has NEXT set, or lies in an indirect table.
    #[error("an indirect descriptor where none is allowed")]
    IndirectNotAllowed,
    /// An indirect table that is empty, not whole descriptors, or longer than the queue.
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
}

/// One descriptor (2.7.5), copied out of guest memory.
#[derive(Clone, Copy)]
struct Descriptor {
    address: u64,
    len_bytes: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn from_words([address, rest]: [u64; 2]) -> Descriptor {
        let rest = u64::from_le(rest);
        Descriptor {
            address: u64::from_le(address),
            len_bytes: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// A table of descriptors in guest memory, the queue's own or an indirect one.
#[derive(Clone, Copy)]
struct Table {
    /// The first of `entries` descriptors, all of them in guest RAM. Not always aligned.
    base: *const u8,
    entries: u16,
}

impl Table {
    /// Copies the descriptor once.
    #[inline]
    fn get(&self, index: u16) -> Result<Descriptor, QueueError> {
        if index >= self.entries {
            return Err(QueueError::DescriptorIndex(index));
        }
        let at = self.base.wrapping_add(usize::from(index) * DESCRIPTOR_BYTES as usize);
        let words = if at.addr().is_multiple_of(align_of::<u64>()) {
            let at = at.cast::<u64>();
            // SAFETY: the descriptor lies inside the table, which lies in a mapping of guest RAM
            // that the queue keeps alive; it is aligned. Volatile, for the guest may be writing.
            unsafe { [at.read_volatile(), at.add(1).read_volatile()] }
        } else {
            // An indirect table may start at any address.
            let mut bytes = [[0u8; 8]; 2];
            for (i, byte) in bytes.as_flattened_mut().iter_mut().enumerate() {
                // SAFETY: as above; bytes need no alignment.
                *byte = unsafe { at.add(i).read_volatile() };
            }
            bytes.map(u64::from_ne_bytes)
        };
        Ok(Descriptor::from_words(words))
    }
}

/// A split virtqueue. It owns what keeps the rings mapped.
///
/// At most [`size`](Self::size) chains are out at once, that is popped and not yet pushed: a driver
/// that makes more available breaks the queue. A device may rely on it.
pub struct Queue {
    table: Table,
    /// `flags`, `idx`, `ring[size]`, `used_event`.
    available: *mut u16,
    /// `flags`, `idx`, `ring[size]` of 8 bytes, `avail_event`.
    used: *mut u16,
    size: u16,
    features: QueueFeatures,
    /// The first available entry not yet popped.
    next_available: u16,
    /// The driver's index when it was last loaded: entries before it may be popped.
    seen_available: u16,
    /// The next used entry to be written.
    next_used: u16,
    /// The used index the driver sees.
    published_used: u16,
    /// `used.flags` says NO_NOTIFY.
    kicks_off: bool,
    broken: Option<QueueError>,
    ram: RamMap,
    /// Keeps mapped what the pointers above and in `ram` point to.
    _memory: GuestMemory,
}

// SAFETY: the raw pointers are into guest RAM, which `_memory` keeps mapped on any thread; all
// other state is owned.
unsafe impl Send for Queue {}

impl Queue {
    /// Checks the configuration and resolves the rings. Touches no guest memory.
    ///
    /// # Errors
    /// A size or alignment that is against virtio 1.2, 2.7, or an area that is not wholly inside
    /// one region of RAM.
    pub fn new(
        memory: &GuestMemory,
        config: &QueueConfig,
        features: QueueFeatures,
    ) -> Result<Queue, QueueError> {
        let size = config.size;
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size(size));
        }
        let mut ram = RamMap::new(memory);
        let mut area = |address: u64, len_bytes: u64, alignment: usize| {
            let host = ram
                .translate_whole(address, len_bytes)
                .ok_or(QueueError::OutsideRam { address, len_bytes })?;
            // RAM regions are page aligned on both sides, so that one check is as good as the
            // other; the host's is the one the accesses rely on.
            if !address.is_multiple_of(alignment as u64) || !host.addr().is_multiple_of(alignment) {
                return Err(QueueError::Misaligned(address));
            }
            Ok(host)
        };
        let entries = u64::from(size);
        let base = area(config.desc, DESCRIPTOR_BYTES * entries, 16)?;
        let available = area(config.driver, 6 + 2 * entries, 2)?.cast();
        let used = area(config.device, 6 + 8 * entries, 4)?.cast();
        Ok(Queue {
            table: Table { base, entries: size },
            available,
            used,
            size,
            features,
            next_available: 0,
            seen_available: 0,
            next_used: 0,
            published_used: 0,
            kicks_off: false,
            broken: None,
            ram,
            _memory: memory.clone(),
        })
    }

    /// The number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
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
        match self.try_pop(chain) {
            Err(error) => {
                self.broken = Some(error);
                Err(error)
            }
            popped => popped,
        }
    }

    #[inline]
    fn try_pop(&mut self, chain: &mut Chain) -> Result<bool, QueueError> {
        if self.next_available == self.seen_available && !self.look_for_available()? {
            return Ok(false);
        }
        let slot = usize::from(self.next_available & (self.size - 1));
        // The load of the index (Acquire) came before, so this is what the driver published.
        let head = u16::from_le(self.available_cell(2 + slot).load(Ordering::Relaxed));
        chain.restart(head);
        self.walk(head, chain)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(true)
    }

    /// Loads the available index: true if it moved.
    #[inline]
    fn look_for_available(&mut self) -> Result<bool, QueueError> {
        let available = self.load_available_index();
        if available == self.next_available {
            return Ok(false);
        }
        // A driver has `size` descriptors and reuses one only after its chain came back.
        if available.wrapping_sub(self.next_used) > self.size {
            let device = self.next_available;
            return Err(QueueError::AvailableIndex { available, device });
        }
        self.seen_available = available;
        Ok(true)
    }

    /// Follows the chain from `head`. Each descriptor with a buffer counts against the queue's
    /// size, wherever it lies, so a cycle ends.
    #[inline]
    fn walk(&mut self, head: u16, chain: &mut Chain) -> Result<(), QueueError> {
        let mut table = self.table;
        let mut in_indirect = false;
        let mut descriptor = table.get(head)?;
        let mut left = self.size;
        loop {
            if descriptor.has(F_INDIRECT) {
                if in_indirect || !self.features.indirect || descriptor.has(F_NEXT) {
                    return Err(QueueError::IndirectNotAllowed);
                }
                // Its WRITE flag says nothing (2.7.5.3.2).
                table = self.indirect_table(&descriptor)?;
                in_indirect = true;
                descriptor = table.get(0)?;
                continue;
            }
            left = left.checked_sub(1).ok_or(QueueError::ChainTooLong)?;
            self.append(&descriptor, chain)?;
            if !descriptor.has(F_NEXT) {
                return Ok(());
            }
            descriptor = table.get(descriptor.next)?;
        }
    }

    fn indirect_table(&mut self, descriptor: &Descriptor) -> Result<Table, QueueError> {
        let len_bytes = u64::from(descriptor.len_bytes);
        let entries = len_bytes / DESCRIPTOR_BYTES;
        if !len_bytes.is_multiple_of(DESCRIPTOR_BYTES)
            || entries == 0
            || entries > u64::from(self.size)
        {
            return Err(QueueError::IndirectLength(descriptor.len_bytes));
        }
        let address = descriptor.address;
        let base = self
            .ram
            .translate_whole(address, len_bytes)
            .ok_or(QueueError::OutsideRam { address, len_bytes })?;
        // At most the queue's size, a u16.
        Ok(Table { base, entries: entries as u16 })
    }

    /// Adds a descriptor's buffer: one run of host memory, or one for each region it spans.
    #[inline]
    fn append(&mut self, descriptor: &Descriptor, chain: &mut Chain) -> Result<(), QueueError> {
        let writable = descriptor.has(F_WRITE);
        let mut address = descriptor.address;
        let mut left_bytes = u64::from(descriptor.len_bytes);
        // Ends: every turn takes at least one byte, and in fact a whole region.
        while left_bytes > 0 {
            if !writable && chain.has_writable() {
                return Err(QueueError::ReadableAfterWritable);
            }
            let outside = QueueError::OutsideRam { address, len_bytes: left_bytes };
            let (host, available_bytes) = self.ram.translate(address).ok_or(outside)?;
            let here_bytes = left_bytes.min(available_bytes);
            chain.append(writable, GuestBuf::new(host, here_bytes as usize));
            left_bytes -= here_bytes;
            address = match address.checked_add(here_bytes) {
                Some(address) => address,
                None if left_bytes == 0 => break,
                None => return Err(outside),
            };
        }
        Ok(())
    }

    /// Writes the chain that began at `head` into the used ring. The driver sees it after
    /// [`publish`](Self::publish). `head` is that of a popped chain, each pushed once;
    /// `written_bytes` counts what the device wrote, from the first writable byte on (2.7.8.2).
    #[inline]
    pub fn push(&mut self, head: u16, written_bytes: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        let at = self.used.wrapping_add(2 + 4 * slot).cast::<u32>();
        // SAFETY: `slot` is less than the size, so both words lie in the used ring, which
        // Queue::new found to be guest RAM that `_memory` keeps mapped, aligned to 4 bytes.
        unsafe {
            at.write_volatile(u32::from(head).to_le());
            at.add(1).write_volatile(written_bytes.to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes everything pushed since the last call visible, with one store. True if the driver
    /// wants an interrupt for it; one decision for the whole batch. False if nothing was pushed.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let old = self.published_used;
        let new = self.next_used;
        if old == new {
            return false;
        }
        self.published_used = new;
        // Release: the entries, and what the device wrote to the buffers, come first.
        self.used_cell(1).store(new.to_le(), Ordering::Release);
        // The driver stores its wish, fences and looks at the index; the other way round here. One
        // of the two sees the other's store (2.7.7.2).
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let cell = self.available_cell(2 + usize::from(self.size));
            need_event(u16::from_le(cell.load(Ordering::Relaxed)), new, old)
        } else {
            let flags = u16::from_le(self.available_cell(0).load(Ordering::Relaxed));
            flags & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0
        }
    }

    /// Asks the driver not to kick. A hint: kicks may come nevertheless. With `EVENT_IDX` nothing
    /// is stored: the event index falls behind by itself (2.7.10.1).
    #[inline]
    pub fn disable_kicks(&mut self) {
        if !self.features.event_idx && !self.kicks_off {
            self.kicks_off = true;
            self.used_cell(0).store((VRING_USED_F_NO_NOTIFY as u16).to_le(), Ordering::Relaxed);
        }
    }

    /// Asks for a kick with the next chain, then looks once more: true if chains are available
    /// now, for which no kick may come. Nobody may sleep on it then.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        if self.features.event_idx {
            let cell = self.used_cell(2 + 4 * usize::from(self.size));
            cell.store(self.next_available.to_le(), Ordering::Relaxed);
        } else if self.kicks_off {
            self.kicks_off = false;
            self.used_cell(0).store(0, Ordering::Relaxed);
        }
        // The store above before the load below: without it, both sides may miss the other.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Whether [`pop`](Self::pop) would find a chain (or an error); one load. False on a broken
    /// queue.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.broken.is_none() && self.load_available_index() != self.next_available
    }

    #[inline]
    fn load_available_index(&self) -> u16 {
        // Acquire: the ring and the descriptors are read after it (2.7.13.1).
        u16::from_le(self.available_cell(1).load(Ordering::Acquire))
    }

    /// The u16 at `index` of the available ring; `index` is at most `size + 2`.
    #[inline]
    fn available_cell(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index <= 2 + usize::from(self.size));
        // SAFETY: Queue::new found 6 + 2 * size bytes there to be guest RAM, aligned to 2;
        // `_memory` keeps it mapped for the life of `self`. All accesses of this process to these
        // words are atomic; the guest's are out of the language's sight.
        unsafe { AtomicU16::from_ptr(self.available.add(index)) }
    }

    /// The u16 at `index` of the used ring; `index` is at most `4 * size + 2`.
    #[inline]
    fn used_cell(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index <= 2 + 4 * usize::from(self.size));
        // SAFETY: as above, 6 + 8 * size bytes, aligned to 4.
        unsafe { AtomicU16::from_ptr(self.used.add(index)) }
    }
}

/// Whether an index that went from `old` to `new` passed `event`, in arithmetic that wraps
/// (virtio 1.2, 2.7.7.2 and 2.7.10.2): whether `event` is one of `old`, …, `new - 1`.
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
