//! Where everything is: the guest-physical address map, the I/O ports and the legacy interrupts.
//!
//! ```text
//! 0x0000_0000  RAM, with the boot structures below 0x9_fc00
//! 0x0009_fc00  reserved, as on every PC; the ACPI tables from 0xe_0000 to 1 MiB
//! 0x0010_0000  RAM up to 3 GiB
//! 0xc000_0000  32-bit PCI window
//! 0xe000_0000  ECAM of bus 0 (1 MiB)
//! 0xfec0_0000  I/O APIC            0xfee0_0000  local APIC (MSI doorbell)
//! 0xfffb_c000  KVM's identity-map page and TSS (Intel without unrestricted guest)
//! 0x1_0000_0000  the rest of RAM
//! above RAM    64-bit PCI window
//! ```

use std::ops::Range;

use devices::irqchip;
use thiserror::Error;

/// End of RAM below 4 GiB: what does not fit goes to [`HIGH_RAM_START`].
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Start of RAM above the hole.
pub const HIGH_RAM_START: u64 = 1 << 32;

/// The 32-bit window for memory BARs.
pub const PCI_MMIO32: Range<u64> = 0xc000_0000..0xe000_0000;
/// ECAM (PCI Express 3.0, 7.2.2): 1 MiB a bus, and bus 0 is the only one.
pub const ECAM_START: u64 = 0xe000_0000;
/// Size of the ECAM in bytes.
pub const ECAM_BYTES: u64 = 1 << 20;
/// Last bus reachable through the ECAM.
pub const ECAM_LAST_BUS: u8 = 0;
/// First of the eight bytes of PCI configuration mechanism #1.
pub const PCI_CONFIG_PORT: u16 = 0xcf8;

/// I/O APIC registers (one page).
pub const IOAPIC_START: u64 = irqchip::IOAPIC_ADDRESS;
/// Local APIC registers (one page), which is also where MSI messages are written.
pub const LAPIC_START: u64 = irqchip::LAPIC_ADDRESS;
/// For `KVM_SET_IDENTITY_MAP_ADDR`: one page, outside RAM.
pub const KVM_IDENTITY_MAP_START: u64 = 0xfffb_c000;
/// For `KVM_SET_TSS_ADDR`: three pages, outside RAM.
pub const KVM_TSS_START: u64 = 0xfffb_d000;

/// Smallest and largest size of the 64-bit PCI window; a power of two in between is used.
const PCI_MMIO64_BYTES: Range<u64> = (1 << 30)..(64 << 30);
const PCI_MMIO64_ALIGN: u64 = 1 << 30;

/// COM1, the console.
pub const COM1_PORT: u16 = 0x3f8;
/// GSI of COM1.
pub const COM1_GSI: u32 = 4;
/// COM2, the results channel.
pub const COM2_PORT: u16 = 0x2f8;
/// GSI of COM2.
pub const COM2_GSI: u32 = 3;
// Boot structures, all below the reserved range and apart from each other.
/// Global descriptor table of the boot CPU.
pub const GDT_START: u64 = 0x500;
/// PVH `hvm_start_info`, followed by the module list.
pub const PVH_INFO_START: u64 = 0x6000;
/// PVH memory map.
pub const PVH_MEMMAP_START: u64 = 0x6800;
/// The zero page (`struct boot_params`).
pub const ZERO_PAGE_START: u64 = 0x7000;
/// Page tables: PML4, PDPT and four page directories.
pub const PAGE_TABLES_START: u64 = 0x9000;
/// Initial stack pointer; the stack grows down from here.
pub const BOOT_STACK: u64 = 0x1_f000;
/// Kernel command line.
pub const CMDLINE_START: u64 = 0x2_0000;
/// Room for the command line and its NUL.
pub const CMDLINE_MAX_BYTES: u64 = 0x1_0000;
/// End of conventional memory (where a BIOS would put its extended data area).
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// ACPI tables, the RSDP first: inside the range that a guest searches for it.
pub const ACPI_TABLES: Range<u64> = 0xe_0000..0x10_0000;
/// First byte above 1 MiB, where kernels go.
pub const HIGH_MEMORY_START: u64 = 0x10_0000;

/// Why a machine cannot be laid out.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// RAM and the PCI window above it do not fit the physical address space.
    #[error(
        "{memory_bytes} bytes of memory do not fit: this CPU has {physical_bits} physical address \
         bits, and a PCI window must fit above memory"
    )]
    TooMuchMemory {
        /// Guest memory asked for.
        memory_bytes: u64,
        /// Physical address bits of the guest's CPU.
        physical_bits: u8,
    },
}

/// The RAM of a guest with `memory_bytes`: up to 3 GiB from 0, the rest from 4 GiB. Each entry is
/// (guest-physical address, length in bytes).
pub fn ram_ranges(memory_bytes: u64) -> Vec<(u64, u64)> {
    let low_bytes = memory_bytes.min(LOW_RAM_END);
    let high_bytes = memory_bytes - low_bytes;
    let mut ranges = vec![(0, low_bytes)];
    if high_bytes > 0 {
        ranges.push((HIGH_RAM_START, high_bytes));
    }
    ranges
}

/// The 64-bit PCI window: above RAM, at least 1 GiB, at most 64 GiB, inside the guest's physical
/// address space.
///
/// # Errors
/// [`LayoutError::TooMuchMemory`] if there is no room for it.
pub fn pci_mmio64(memory_bytes: u64, physical_bits: u8) -> Result<Range<u64>, LayoutError> {
    let too_much = LayoutError::TooMuchMemory { memory_bytes, physical_bits };
    // 52 is the architecture's limit (Intel SDM volume 3, 4.1.4).
    let space_end = 1_u64 << physical_bits.min(52);
    let window = |bytes: u64| {
        let high_bytes = memory_bytes.saturating_sub(LOW_RAM_END);
        let start =
            HIGH_RAM_START.checked_add(high_bytes)?.checked_next_multiple_of(PCI_MMIO64_ALIGN)?;
        let end = start.checked_add(bytes)?;
        (end <= space_end).then_some(start..end)
    };
    let mut bytes = PCI_MMIO64_BYTES.end;
    while bytes >= PCI_MMIO64_BYTES.start {
        if let Some(range) = window(bytes) {
            return Ok(range);
        }
        bytes /= 2;
    }
    Err(too_much)
}

/// What a range of guest-physical addresses is to the guest. The values are those of E820 and of
/// PVH's memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// Usable RAM.
    Ram = 1,
    /// Not to be used: firmware tables, ECAM.
    Reserved = 2,
}

/// One range of the memory map given to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// Guest-physical address.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// What it is.
    pub kind: MemoryKind,
}

/// The memory map of a guest with the RAM ranges `ram` (as from [`ram_ranges`]), sorted and without
/// overlaps. The ECAM is in it because Linux uses an ECAM only where firmware reserves it.
pub fn memory_map(ram: &[(u64, u64)]) -> Vec<MemoryMapEntry> {
    let entry = |start, end, kind| MemoryMapEntry { start, bytes: end - start, kind };
    let mut map = Vec::new();
    for &(start, bytes) in ram {
        let end = start.saturating_add(bytes);
        if start == 0 && end > HIGH_MEMORY_START {
            map.push(entry(0, CONVENTIONAL_END, MemoryKind::Ram));
            map.push(entry(CONVENTIONAL_END, HIGH_MEMORY_START, MemoryKind::Reserved));
            map.push(entry(HIGH_MEMORY_START, end, MemoryKind::Ram));
        } else {
            map.push(MemoryMapEntry { start, bytes, kind: MemoryKind::Ram });
        }
    }
    map.push(MemoryMapEntry { start: ECAM_START, bytes: ECAM_BYTES, kind: MemoryKind::Reserved });
    map.sort_by_key(|entry| entry.start);
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn ram_up_to_three_gib_is_one_range() {
        assert_eq!(ram_ranges(128 << 20), [(0, 128 << 20)]);
        assert_eq!(ram_ranges(3 * GIB), [(0, 3 * GIB)]);
    }

    #[test]
    fn ram_beyond_three_gib_continues_at_four() {
        assert_eq!(ram_ranges(3 * GIB + 4096), [(0, 3 * GIB), (4 * GIB, 4096)]);
        assert_eq!(ram_ranges(8 * GIB), [(0, 3 * GIB), (4 * GIB, 5 * GIB)]);
    }

    #[test]
    fn fixed_ranges_do_not_overlap() {
        let mut ranges = [
            0..LOW_RAM_END,
            PCI_MMIO32,
            ECAM_START..ECAM_START + ECAM_BYTES,
            IOAPIC_START..IOAPIC_START + irqchip::IOAPIC_BYTES,
            LAPIC_START..LAPIC_START + irqchip::LAPIC_BYTES,
            KVM_IDENTITY_MAP_START..KVM_IDENTITY_MAP_START + 0x1000,
            KVM_TSS_START..KVM_TSS_START + 0x3000,
        ];
        ranges.sort_by_key(|range| range.start);
        for pair in ranges.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{:x?} and {:x?}", pair[0], pair[1]);
        }
        assert!(ranges.last().is_some_and(|last| last.end <= HIGH_RAM_START));
    }

    #[test]
    fn boot_structures_do_not_overlap() {
        let mut ranges = [
            GDT_START..GDT_START + 40,
            PVH_INFO_START..PVH_MEMMAP_START,
            PVH_MEMMAP_START..ZERO_PAGE_START,
            ZERO_PAGE_START..ZERO_PAGE_START + 0x1000,
            PAGE_TABLES_START..PAGE_TABLES_START + 6 * 0x1000,
            BOOT_STACK - 0x1000..BOOT_STACK,
            CMDLINE_START..CMDLINE_START + CMDLINE_MAX_BYTES,
            CONVENTIONAL_END..ACPI_TABLES.start,
            ACPI_TABLES,
        ];
        ranges.sort_by_key(|range| range.start);
        for pair in ranges.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{:x?} and {:x?}", pair[0], pair[1]);
        }
    }

    #[test]
    fn the_64_bit_window_is_above_ram_and_inside_the_address_space() {
        assert_eq!(pci_mmio64(GIB, 40), Ok(4 * GIB..68 * GIB));
        assert_eq!(pci_mmio64(4 * GIB + 4096, 40), Ok(6 * GIB..70 * GIB));
        // 36 bits are 64 GiB: a smaller window.
        assert_eq!(pci_mmio64(GIB, 36), Ok(4 * GIB..36 * GIB));
    }

    #[test]
    fn memory_that_leaves_no_room_for_the_window_is_refused() {
        let refused = |memory_bytes, physical_bits| {
            Err(LayoutError::TooMuchMemory { memory_bytes, physical_bits })
        };
        assert_eq!(pci_mmio64(62 * GIB, 36), Ok(63 * GIB..64 * GIB));
        assert_eq!(pci_mmio64(63 * GIB, 36), refused(63 * GIB, 36));
        assert_eq!(pci_mmio64(u64::MAX, 64), refused(u64::MAX, 64));
    }

    #[test]
    fn the_memory_map_is_sorted_and_reserves_ecam_and_bios_area() {
        for memory_bytes in [128 << 20, 3 * GIB, 8 * GIB] {
            let map = memory_map(&ram_ranges(memory_bytes));
            for pair in map.windows(2) {
                assert!(pair[0].start + pair[0].bytes <= pair[1].start);
            }
            let is_reserved = |address| {
                map.iter().any(|entry| {
                    entry.kind == MemoryKind::Reserved
                        && (entry.start..entry.start + entry.bytes).contains(&address)
                })
            };
            assert!(is_reserved(ECAM_START) && is_reserved(ECAM_START + ECAM_BYTES - 1));
            assert!(is_reserved(ACPI_TABLES.start) && is_reserved(CONVENTIONAL_END));
            let ram_bytes: u64 = map
                .iter()
                .filter(|entry| entry.kind == MemoryKind::Ram)
                .map(|entry| entry.bytes)
                .sum();
            assert_eq!(ram_bytes, memory_bytes - (HIGH_MEMORY_START - CONVENTIONAL_END));
        }
    }
}
