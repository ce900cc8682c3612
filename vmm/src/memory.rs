//! Guest RAM: anonymous memory, mapped before there is a VM so that a kernel that does not fit is
//! told before anything is created.

use std::sync::Arc;

use devices::GuestMemory;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::vm::VmError;

/// Maps RAM at `ranges` (guest physical address, length in bytes; page aligned, not overlapping).
///
/// # Errors
/// The host refused the mapping.
pub fn map(ranges: &[(u64, u64)]) -> Result<GuestMemory, VmError> {
    let ranges: Vec<(GuestAddress, usize)> =
        ranges.iter().map(|&(base, len)| (GuestAddress(base), len as usize)).collect();
    let total_bytes: usize = ranges.iter().map(|&(_, len)| len).sum();
    let memory = GuestMemoryMmap::from_ranges(&ranges)
        .map_err(|error| VmError::Memory { total_bytes, why: error.to_string() })?;
    for region in memory.iter() {
        let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
        // SAFETY: the range is exactly the region's own mapping; the advice changes no contents.
        // Failure (a kernel without huge pages) costs speed only.
        unsafe { libc::madvise(host.cast(), region.len() as usize, libc::MADV_HUGEPAGE) };
    }
    Ok(Arc::new(memory))
}
