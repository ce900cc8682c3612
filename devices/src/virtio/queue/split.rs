//! The device's side of a split ring (virtio 1.2, 2.7).

use std::sync::atomic::{AtomicU16, Ordering, fence};

use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::descriptor::{DESCRIPTOR_BYTES, Element, F_INDIRECT, F_NEXT, Table};
use super::ram::RamMap;
use super::{Chain, QueueConfig, QueueError, QueueFeatures};

/// The three areas, resolved to host addresses, and where the device stands in them. Whoever has
/// one keeps guest memory mapped.
pub(super) struct Split {
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
}

/// A descriptor's fields but for `next`, and that.
#[inline]
fn descriptor(table: &Table, index: u16) -> Result<(Element, u16), QueueError> {
    let [address, rest] = table.get(index)?;
    let (flags, next) = ((rest >> 32) as u16, (rest >> 48) as u16);
    Ok((Element { address, len_bytes: rest as u32, flags }, next))
}

impl Split {
    pub(super) fn new(
        ram: &mut RamMap,
        config: &QueueConfig,
        features: QueueFeatures,
    ) -> Result<Split, QueueError> {
        let size = config.size;
        if !size.is_power_of_two() {
            return Err(QueueError::Size(size));
        }
        let entries = u64::from(size);
        let base = ram.area(config.desc, DESCRIPTOR_BYTES * entries, 16)?;
        let available = ram.area(config.driver, 6 + 2 * entries, 2)?.cast();
        let used = ram.area(config.device, 6 + 8 * entries, 4)?.cast();
        Ok(Split {
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
        })
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain, ram: &mut RamMap) -> Result<bool, QueueError> {
        if self.next_available == self.seen_available && !self.look_for_available()? {
            return Ok(false);
        }
        let slot = usize::from(self.next_available & (self.size - 1));
        // The load of the index (Acquire) came before, so this is what the driver published.
        let head = u16::from_le(self.available_cell(2 + slot).load(Ordering::Relaxed));
        chain.restart(head);
        self.walk(head, chain, ram)?;
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
    fn walk(&mut self, head: u16, chain: &mut Chain, ram: &mut RamMap) -> Result<(), QueueError> {
        let mut table = self.table;
        let mut in_indirect = false;
        let (mut element, mut next) = descriptor(&table, head)?;
        let mut left = self.size;
        loop {
            if element.has(F_INDIRECT) {
                if in_indirect || !self.features.indirect || element.has(F_NEXT) {
                    return Err(QueueError::IndirectNotAllowed);
                }
                // Its WRITE flag says nothing (2.7.5.3.2).
                table = element.indirect_table(self.size, ram)?;
                in_indirect = true;
                (element, next) = descriptor(&table, 0)?;
                continue;
            }
            left = left.checked_sub(1).ok_or(QueueError::ChainTooLong)?;
            element.append_to(chain, ram)?;
            if !element.has(F_NEXT) {
                return Ok(());
            }
            (element, next) = descriptor(&table, next)?;
        }
    }

    #[inline]
    pub(super) fn push(&mut self, head: u16, written_bytes: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        let at = self.used.wrapping_add(2 + 4 * slot).cast::<u32>();
        // SAFETY: `slot` is less than the size, so both words lie in the used ring, which `new`
        // found to be guest RAM, aligned to 4 bytes, and which is still mapped.
        unsafe {
            at.write_volatile(u32::from(head).to_le());
            at.add(1).write_volatile(written_bytes.to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
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

    /// With `EVENT_IDX` nothing is stored: the event index falls behind by itself (2.7.10.1).
    #[inline]
    pub(super) fn disable_kicks(&mut self) {
        if !self.features.event_idx && !self.kicks_off {
            self.kicks_off = true;
            self.used_cell(0).store((VRING_USED_F_NO_NOTIFY as u16).to_le(), Ordering::Relaxed);
        }
    }

    /// The caller fences and looks once more.
    #[inline]
    pub(super) fn ask_for_kicks(&mut self) {
        if self.features.event_idx {
            let cell = self.used_cell(2 + 4 * usize::from(self.size));
            cell.store(self.next_available.to_le(), Ordering::Relaxed);
        } else if self.kicks_off {
            self.kicks_off = false;
            self.used_cell(0).store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn has_available(&self) -> bool {
        self.load_available_index() != self.next_available
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
        // SAFETY: `new` found 6 + 2 * size bytes there to be guest RAM, aligned to 2, and it is
        // still mapped. All accesses of this process to these words are atomic; the guest's are
        // out of the language's sight.
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

/// Whether an index of a split ring that went from `old` to `new` passed `event`, in arithmetic
/// that wraps (virtio 1.2, 2.7.7.2 and 2.7.10.2): whether `event` is one of `old`, …, `new - 1`.
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
