//! Base address registers: 64-bit memory BARs (PCI Local Bus 3.0, 6.2.5.1).
//!
//! A BAR needs no protocol of its own. Its size is a power of two and the address bits below the
//! size are wired to zero, so a guest that writes all ones reads the size mask back. Here a BAR is
//! therefore a value and a mask of its writable bits, and configuration space does the rest.

use std::ops::RangeInclusive;

use super::BarMapping;

/// Memory BAR, 64 bits wide (bits 2:1 are 10b).
const TYPE_64_BIT: u64 = 0b100;
/// Reads have no side effects, and the range may be merged.
const PREFETCHABLE: u64 = 0b1000;

/// The smallest memory BAR (6.2.5.1 has 16 bytes; below a page it would share one with another).
const MIN_BYTES: u64 = 4096;

/// A 64-bit memory BAR of a function. It takes two of the six BAR registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    index: u8,
    size_bytes: u64,
    prefetchable: bool,
}

/// Why a BAR cannot exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BarError {
    /// A 64-bit BAR begins at index 0, 2 or 4.
    #[error("a 64-bit BAR cannot have index {0}")]
    Index(u8),
    /// The size is a power of two, of a page at least.
    #[error("a BAR cannot have {0} bytes")]
    Size(u64),
}

impl Bar {
    /// A BAR of `size_bytes` in the registers `index` and `index + 1`.
    ///
    /// # Errors
    /// [`BarError`], if no such BAR can exist.
    pub const fn new(index: u8, size_bytes: u64, prefetchable: bool) -> Result<Self, BarError> {
        if !matches!(index, 0 | 2 | 4) {
            return Err(BarError::Index(index));
        }
        // 2^63 at most, so that the size mask has an address bit left.
        if !size_bytes.is_power_of_two() || size_bytes < MIN_BYTES {
            return Err(BarError::Size(size_bytes));
        }
        Ok(Bar { index, size_bytes, prefetchable })
    }

    /// The index of its lower half.
    pub const fn index(&self) -> u8 {
        self.index
    }

    /// Its size in bytes.
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The offset of its lower half in configuration space.
    pub(super) const fn register(&self) -> u16 {
        super::config::BAR0 + self.index as u16 * 4
    }

    /// What both halves read as, with no address set.
    pub(super) const fn type_bits(&self) -> u64 {
        TYPE_64_BIT | if self.prefetchable { PREFETCHABLE } else { 0 }
    }

    /// The bits a guest can write: those of an address that is a multiple of the size.
    pub(super) const fn writable_bits(&self) -> u64 {
        !(self.size_bytes - 1)
    }

    /// Where the BAR lies when both halves read as `value`; `None` while no address is set.
    pub(super) fn mapping(&self, value: u64) -> Option<BarMapping> {
        let address = value & self.writable_bits();
        (address != 0).then_some(BarMapping {
            bar: self.index,
            address,
            size_bytes: self.size_bytes,
        })
    }
}

/// Gives out addresses for BARs from a window of guest physical addresses, upwards.
#[derive(Clone, Debug)]
pub struct BarAllocator {
    next: u64,
    last: u64,
}

/// The window has no room for a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no {size_bytes} bytes of PCI address space are left")]
pub struct NoSpace {
    /// The size of the BAR.
    pub size_bytes: u64,
}

impl BarAllocator {
    /// Gives out the addresses of `window`.
    pub fn new(window: RangeInclusive<u64>) -> Self {
        // Address 0 means "not set" in a BAR, so it is never given out.
        BarAllocator { next: (*window.start()).max(1), last: *window.end() }
    }

    /// An address for `size_bytes`, a power of two, aligned to it.
    ///
    /// # Errors
    /// [`NoSpace`], if the window has no room left.
    pub fn allocate(&mut self, size_bytes: u64) -> Result<u64, NoSpace> {
        let full = NoSpace { size_bytes };
        let start = self.next.checked_next_multiple_of(size_bytes).ok_or(full)?;
        let next = start.checked_add(size_bytes).ok_or(full)?;
        if next - 1 > self.last {
            return Err(full);
        }
        self.next = next;
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_has_an_even_index_and_a_power_of_two_of_at_least_a_page() {
        for index in [1, 3, 5, 6, 255] {
            assert_eq!(Bar::new(index, 4096, false), Err(BarError::Index(index)));
        }
        for size in [0, 1, 16, 2048, 4097, 0x3000, u64::MAX] {
            assert_eq!(Bar::new(0, size, false), Err(BarError::Size(size)));
        }
        for size in [4096, 0x8_0000, 1 << 63] {
            assert!(Bar::new(4, size, false).is_ok());
        }
    }

    #[test]
    fn a_bar_without_an_address_is_not_mapped() {
        let bar = Bar::new(2, 0x4000, true).unwrap();
        assert_eq!(bar.mapping(bar.type_bits()), None);
        assert_eq!(
            bar.mapping(0x10_0000_4000 | bar.type_bits()),
            Some(BarMapping { bar: 2, address: 0x10_0000_4000, size_bytes: 0x4000 })
        );
    }

    #[test]
    fn allocations_are_aligned_disjoint_and_inside_the_window() {
        let mut allocator = BarAllocator::new(0x1_0000_1000..=0x1_0000_ffff);
        assert_eq!(allocator.allocate(0x1000), Ok(0x1_0000_1000));
        assert_eq!(allocator.allocate(0x4000), Ok(0x1_0000_4000));
        assert_eq!(allocator.allocate(0x8000), Ok(0x1_0000_8000));
        assert_eq!(allocator.allocate(0x1000), Err(NoSpace { size_bytes: 0x1000 }));
    }

    #[test]
    fn an_allocation_at_the_end_of_the_address_space_does_not_wrap() {
        let mut allocator = BarAllocator::new(u64::MAX - 0x1fff..=u64::MAX);
        assert_eq!(allocator.allocate(0x1000), Ok(u64::MAX - 0x1fff));
        assert_eq!(allocator.allocate(0x1000), Err(NoSpace { size_bytes: 0x1000 }));
        assert_eq!(allocator.allocate(1 << 63), Err(NoSpace { size_bytes: 1 << 63 }));
    }

    #[test]
    fn address_zero_is_never_given_out() {
        assert_eq!(BarAllocator::new(0..=0xffff).allocate(0x1000), Ok(0x1000));
    }
}
