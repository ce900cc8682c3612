//! From guest physical addresses to this process's.

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::QueueError;
use crate::GuestMemory;

/// One run of guest RAM.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: u64,
    len_bytes: u64,
    host: *mut u8,
}

impl Region {
    /// The host address of `address` and how many bytes follow it in this region, at least one.
    #[inline]
    fn translate(&self, address: u64) -> Option<(*mut u8, u64)> {
        // Below the start this wraps to more than any length of a region.
        let offset = address.wrapping_sub(self.start);
        if offset >= self.len_bytes {
            return None;
        }
        // `offset` is inside one mapping, so it fits a usize and the pointer stays inside.
        Some((self.host.wrapping_add(offset as usize), self.len_bytes - offset))
    }
}

/// A flat copy of the layout of guest RAM, with the region of the last hit at hand.
///
/// The addresses it gives are those of mappings which the [`GuestMemory`] owns: whoever uses them
/// keeps it.
pub(super) struct RamMap {
    last_hit: Region,
    regions: Box<[Region]>,
}

impl RamMap {
    pub(super) fn new(memory: &GuestMemory) -> RamMap {
        let regions: Box<[Region]> = memory
            .iter()
            .filter_map(|region| {
                let host = region.get_host_address(MemoryRegionAddress(0)).ok()?;
                Some(Region {
                    start: region.start_addr().raw_value(),
                    len_bytes: region.len(),
                    host,
                })
            })
            .collect();
        let nowhere = Region { start: 0, len_bytes: 0, host: std::ptr::null_mut() };
        RamMap { last_hit: regions.first().copied().unwrap_or(nowhere), regions }
    }

    /// The host address of `address` and the bytes of RAM from there to the end of its region.
    #[inline]
    pub(super) fn translate(&mut self, address: u64) -> Option<(*mut u8, u64)> {
        match self.last_hit.translate(address) {
            Some(found) => Some(found),
            None => self.translate_elsewhere(address),
        }
    }

    #[cold]
    fn translate_elsewhere(&mut self, address: u64) -> Option<(*mut u8, u64)> {
        let (region, found) =
            self.regions.iter().find_map(|region| Some((region, region.translate(address)?)))?;
        self.last_hit = *region;
        Some(found)
    }

    /// The host address of `len_bytes` bytes at `address` that lie in one region.
    #[inline]
    pub(super) fn translate_whole(&mut self, address: u64, len_bytes: u64) -> Option<*mut u8> {
        let (host, available_bytes) = self.translate(address)?;
        (len_bytes <= available_bytes).then_some(host)
    }

    /// The host address of one area of a queue: `len_bytes` bytes in one region, aligned.
    pub(super) fn area(
        &mut self,
        address: u64,
        len_bytes: u64,
        alignment: usize,
    ) -> Result<*mut u8, QueueError> {
        let host = self
            .translate_whole(address, len_bytes)
            .ok_or(QueueError::OutsideRam { address, len_bytes })?;
        // RAM regions are page aligned on both sides, so that one check is as good as the other;
        // the host's is the one the accesses rely on.
        if !address.is_multiple_of(alignment as u64) || !host.addr().is_multiple_of(alignment) {
            return Err(QueueError::Misaligned(address));
        }
        Ok(host)
    }
}
