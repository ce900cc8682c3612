//! Guest RAM: anonymous memory, mapped before there is a VM so that a kernel that does not fit is
//! told before anything is created.

use std::io;
use std::ptr;
use std::sync::Arc;

use devices::GuestMemory;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress,
};

use crate::vm::VmError;

/// A huge page of x86, in bytes. KVM maps one only where guest and host address are equal modulo
/// this.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maps RAM at `ranges` (guest physical address, length in bytes; page aligned, not overlapping).
///
/// # Errors
/// The host refused the mapping.
pub fn map(ranges: &[(u64, u64)]) -> Result<GuestMemory, VmError> {
    let total_bytes: usize = ranges.iter().map(|&(_, len)| len as usize).sum();
    let failed = |why: String| VmError::Memory { total_bytes, why };
    let regions = ranges
        .iter()
        .map(|&(base, len)| map_region(GuestAddress(base), len as usize))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    let memory =
        GuestMemoryMmap::from_regions(regions).map_err(|error| failed(error.to_string()))?;
    for region in memory.iter() {
        let Ok(host) = region.get_host_address(MemoryRegionAddress(0)) else { continue };
        // SAFETY: the range is exactly the region's own mapping; the advice changes no contents.
        // Failure (a kernel without huge pages) costs speed only.
        unsafe { libc::madvise(host.cast(), region.len() as usize, libc::MADV_HUGEPAGE) };
    }
    Ok(Arc::new(memory))
}

/// Maps one region where huge pages can back it. Guest addresses of regions are multiples of
/// [`HUGE_PAGE_BYTES`]; Linux before 6.7 gives host addresses that are not.
fn map_region(base: GuestAddress, len: usize) -> Result<GuestRegionMmap, String> {
    // Without it the region is mapped wherever there is room, which costs speed only.
    let _hole = Hole::make(len).ok();
    GuestRegionMmap::from_range(base, len, None).map_err(|error| error.to_string())
}

/// A free range of addresses that begins at a multiple of [`HUGE_PAGE_BYTES`], between two that are
/// taken while this lives: the kernel puts a mapping of the same size there, since it prefers the
/// highest place that is large enough.
struct Hole {
    below: (*mut libc::c_void, usize),
    above: (*mut libc::c_void, usize),
}

impl Hole {
    /// Makes a hole of `len` bytes.
    fn make(len: usize) -> io::Result<Hole> {
        let total = len.checked_add(HUGE_PAGE_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { libc::mmap(ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let below = start.align_offset(HUGE_PAGE_BYTES);
        let hole = start.wrapping_byte_add(below);
        let above = (hole.wrapping_byte_add(len), HUGE_PAGE_BYTES - below);
        // SAFETY: `below` is less than HUGE_PAGE_BYTES, so the range is within the mapping that was
        // just made, which nothing refers to.
        unsafe { libc::munmap(hole, len) };
        Ok(Hole { below: (start, below), above })
    }
}

impl Drop for Hole {
    fn drop(&mut self) {
        for (start, len) in [self.below, self.above] {
            if len > 0 {
                // SAFETY: a part of the mapping made for this hole that is still there; nothing
                // refers to it.
                unsafe { libc::munmap(start, len) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_and_host_addresses_agree_where_huge_pages_need_it() {
        // Not a multiple of a huge page: no kernel aligns that by itself.
        let ranges = [(0, (64 << 20) + 4096), (4 << 30, (32 << 20) + 8192)];
        // Other threads map memory too, and may take the place: that is rare.
        let aligned = (0..100).any(|_| {
            let memory = map(&ranges).unwrap();
            let hosts: Vec<usize> = memory
                .iter()
                .map(|region| region.get_host_address(MemoryRegionAddress(0)).unwrap() as usize)
                .collect();
            hosts.len() == 2 && hosts.iter().all(|host| host % HUGE_PAGE_BYTES == 0)
        });
        assert!(aligned);
    }
}
