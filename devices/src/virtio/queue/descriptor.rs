//! What the descriptors of both ring formats have in common: 16 bytes, of which the first eight are
//! an address and the next four a length (virtio 1.2, 2.7.5 and 2.8.13).

use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::ram::RamMap;
use super::{Chain, GuestBuf, QueueError};

/// Length of a descriptor in bytes.
pub(super) const DESCRIPTOR_BYTES: u64 = 16;
pub(super) const F_NEXT: u16 = VRING_DESC_F_NEXT as u16;
pub(super) const F_WRITE: u16 = VRING_DESC_F_WRITE as u16;
pub(super) const F_INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// A piece of a buffer or an indirect table, copied out of guest memory.
#[derive(Clone, Copy)]
pub(super) struct Element {
    pub(super) address: u64,
    pub(super) len_bytes: u32,
    pub(super) flags: u16,
}

impl Element {
    #[inline]
    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Adds the piece to a chain: one run of host memory, or one for each region it spans.
    #[inline]
    pub(super) fn append_to(&self, chain: &mut Chain, ram: &mut RamMap) -> Result<(), QueueError> {
        let writable = self.has(F_WRITE);
        let mut address = self.address;
        let mut left_bytes = u64::from(self.len_bytes);
        // Ends: every turn takes at least one byte, and in fact a whole region.
        while left_bytes > 0 {
            if !writable && chain.has_writable() {
                return Err(QueueError::ReadableAfterWritable);
            }
            let outside = QueueError::OutsideRam { address, len_bytes: left_bytes };
            let (host, available_bytes) = ram.translate(address).ok_or(outside)?;
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

    /// The indirect table this refers to: at least one descriptor, at most `max_entries`.
    pub(super) fn indirect_table(
        &self,
        max_entries: u16,
        ram: &mut RamMap,
    ) -> Result<Table, QueueError> {
        let (address, len_bytes) = (self.address, u64::from(self.len_bytes));
        let entries = len_bytes / DESCRIPTOR_BYTES;
        if !len_bytes.is_multiple_of(DESCRIPTOR_BYTES)
            || entries == 0
            || entries > u64::from(max_entries)
        {
            return Err(QueueError::IndirectLength(self.len_bytes));
        }
        let base = ram
            .translate_whole(address, len_bytes)
            .ok_or(QueueError::OutsideRam { address, len_bytes })?;
        // At most `max_entries`, a u16.
        Ok(Table { base, entries: entries as u16 })
    }
}

/// A table of descriptors in guest memory, a split queue's own or an indirect one.
#[derive(Clone, Copy)]
pub(super) struct Table {
    /// The first of `entries` descriptors, all of them in guest RAM. Not always aligned.
    pub(super) base: *const u8,
    pub(super) entries: u16,
}

impl Table {
    /// Copies a descriptor once: its address, and its other three fields in one word.
    #[inline]
    pub(super) fn get(&self, index: u16) -> Result<[u64; 2], QueueError> {
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
        Ok(words.map(u64::from_le))
    }
}
