//! What the vCPUs' registers hold when the guest starts.
//!
//! Only the boot CPU needs any of this. The others wait for INIT and SIPI in the state KVM creates
//! them in.

use kvm_bindings::{kvm_fpu, kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::layout;
use super::load::{Entry, EntryMode};

/// Selectors that Linux' boot protocol asks for (`__BOOT_CS`, `__BOOT_DS`); the task state segment
/// is what VMX asks for.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TSS_SELECTOR: u16 = 0x20;

/// Types of segments (Intel SDM volume 3, 3.4.5.1 and 3.5).
const TYPE_CODE: u8 = 0xb;
const TYPE_DATA: u8 = 0x3;
const TYPE_TSS_BUSY: u8 = 0xb;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of RFLAGS is always set; interrupts are off.
const RFLAGS: u64 = 2;

const PAGE_PRESENT: u64 = 1;
const PAGE_WRITABLE: u64 = 1 << 1;
const PAGE_LARGE: u64 = 1 << 7;
const LARGE_PAGE_BYTES: u64 = 2 << 20;
const TABLE_BYTES: u64 = 4096;
const TABLE_ENTRIES: u64 = 512;
/// One page directory maps 1 GiB.
const DIRECTORIES: u64 = 4;

/// A flat segment over all 4 GiB.
fn flat_segment(selector: u16, type_: u8, mode: EntryMode) -> kvm_segment {
    let is_long_code = type_ == TYPE_CODE && mode == EntryMode::Long64;
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        l: u8::from(is_long_code),
        db: u8::from(!is_long_code),
        g: 1,
        ..kvm_segment::default()
    }
}

fn task_segment() -> kvm_segment {
    kvm_segment {
        limit: 0x67,
        selector: TSS_SELECTOR,
        type_: TYPE_TSS_BUSY,
        present: 1,
        ..kvm_segment::default()
    }
}

/// The descriptor of a segment (Intel SDM volume 3, 3.4.5), whose limit is in pages if `g` is set.
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let bit = |value: u8, position: u32| u64::from(value) << position;
    (limit & 0xffff)
        | ((segment.base & 0xff_ffff) << 16)
        | bit(segment.type_, 40)
        | bit(segment.s, 44)
        | bit(segment.dpl, 45)
        | bit(segment.present, 47)
        | ((limit >> 16 & 0xf) << 48)
        | bit(segment.l, 53)
        | bit(segment.db, 54)
        | bit(segment.g, 55)
        | ((segment.base >> 24 & 0xff) << 56)
}

fn gdt(mode: EntryMode) -> [u64; 5] {
    [
        0,
        0,
        descriptor(&flat_segment(CODE_SELECTOR, TYPE_CODE, mode)),
        descriptor(&flat_segment(DATA_SELECTOR, TYPE_DATA, mode)),
        descriptor(&task_segment()),
    ]
}

/// Writes the GDT, which must agree with the segments of [`sregs`].
///
/// # Errors
/// No RAM at [`layout::GDT_START`].
pub fn write_gdt(
    memory: &GuestMemoryMmap,
    mode: EntryMode,
) -> Result<(), vm_memory::GuestMemoryError> {
    memory.write_obj(gdt(mode), GuestAddress(layout::GDT_START))
}

/// Writes page tables that map the first 4 GiB to themselves, in pages of 2 MiB, which every CPU
/// with long mode has.
///
/// # Errors
/// No RAM at [`layout::PAGE_TABLES_START`].
pub fn write_page_tables(memory: &GuestMemoryMmap) -> Result<(), vm_memory::GuestMemoryError> {
    const FLAGS: u64 = PAGE_PRESENT | PAGE_WRITABLE;
    let pdpt = layout::PAGE_TABLES_START + TABLE_BYTES;
    let directories = pdpt + TABLE_BYTES;
    memory.write_obj(pdpt | FLAGS, GuestAddress(layout::PAGE_TABLES_START))?;
    for index in 0..DIRECTORIES {
        let directory = directories + index * TABLE_BYTES;
        memory.write_obj(directory | FLAGS, GuestAddress(pdpt + index * 8))?;
    }
    let mut entries = Vec::with_capacity((DIRECTORIES * TABLE_BYTES) as usize);
    for index in 0..DIRECTORIES * TABLE_ENTRIES {
        entries.extend(((index * LARGE_PAGE_BYTES) | FLAGS | PAGE_LARGE).to_le_bytes());
    }
    memory.write_slice(&entries, GuestAddress(directories))
}

/// The general registers of the boot CPU.
pub fn regs(entry: &Entry) -> kvm_regs {
    let mut regs = kvm_regs {
        rip: entry.instruction_pointer,
        rflags: RFLAGS,
        rsp: layout::BOOT_STACK,
        ..kvm_regs::default()
    };
    match entry.mode {
        EntryMode::Long64 => regs.rsi = entry.boot_info,
        EntryMode::Protected32 => regs.rbx = entry.boot_info,
    }
    regs
}

/// The special registers of the boot CPU, from those KVM created it with.
pub fn sregs(entry: &Entry, created: kvm_sregs) -> kvm_sregs {
    let mut sregs = created;
    let data = flat_segment(DATA_SELECTOR, TYPE_DATA, entry.mode);
    sregs.cs = flat_segment(CODE_SELECTOR, TYPE_CODE, entry.mode);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = data;
    }
    sregs.tr = task_segment();
    sregs.gdt.base = layout::GDT_START;
    sregs.gdt.limit = size_of_val(&gdt(entry.mode)) as u16 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = match entry.mode {
        EntryMode::Long64 => {
            (CR0_PE | CR0_ET | CR0_PG, layout::PAGE_TABLES_START, CR4_PAE, EFER_LME | EFER_LMA)
        }
        EntryMode::Protected32 => (CR0_PE | CR0_ET, 0, 0, 0),
    };
    sregs
}

/// The floating-point state of any CPU: as after FINIT, with all SSE exceptions masked.
pub fn fpu() -> kvm_fpu {
    kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..kvm_fpu::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Entry =
        Entry { mode: EntryMode::Long64, instruction_pointer: 0x100_0200, boot_info: 0x7000 };
    const PROTECTED: Entry =
        Entry { mode: EntryMode::Protected32, instruction_pointer: 0x100_0a30, boot_info: 0x6000 };

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    /// Follows the page tables as the CPU does.
    fn translate(memory: &GuestMemoryMmap, root: u64, address: u64) -> Option<u64> {
        let mut table = root;
        for shift in [39, 30, 21] {
            let slot = table + (address >> shift & 0x1ff) * 8;
            let entry: u64 = memory.read_obj(GuestAddress(slot)).unwrap();
            if entry & PAGE_PRESENT == 0 {
                return None;
            }
            table = entry & 0x000f_ffff_ffff_f000;
            if shift == 21 {
                assert_ne!(entry & PAGE_LARGE, 0);
                return Some(table | address & (LARGE_PAGE_BYTES - 1));
            }
        }
        None
    }

    #[test]
    fn the_first_four_gib_and_no_more_map_to_themselves() {
        let memory = memory();
        write_page_tables(&memory).unwrap();
        let root = sregs(&LONG, kvm_sregs::default()).cr3;
        for address in [0, 0x7000, 0x1f_ffff, 0x20_0000, 0x4000_0000, 0xfee0_0020, 0xffff_ffff] {
            assert_eq!(translate(&memory, root, address), Some(address));
        }
        assert_eq!(translate(&memory, root, 1 << 32), None);
        assert_eq!(translate(&memory, root, 1 << 39), None);
    }

    #[test]
    fn descriptors_are_those_of_flat_segments() {
        assert_eq!(gdt(EntryMode::Long64)[2..4], [0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff]);
        assert_eq!(
            gdt(EntryMode::Protected32)[2..4],
            [0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff]
        );
        assert_eq!(gdt(EntryMode::Long64)[4], 0x0000_8b00_0000_0067);
    }

    #[test]
    fn the_gdt_is_where_gdtr_points() {
        let memory = memory();
        write_gdt(&memory, EntryMode::Long64).unwrap();
        let sregs = sregs(&LONG, kvm_sregs::default());
        assert_eq!(sregs.gdt.limit, 39);
        let code = GuestAddress(sregs.gdt.base + u64::from(sregs.cs.selector));
        assert_eq!(memory.read_obj::<u64>(code).unwrap(), 0x00af_9b00_0000_ffff);
    }

    #[test]
    fn linux_is_entered_in_long_mode_with_rsi_at_the_zero_page() {
        let sregs = sregs(&LONG, kvm_sregs::default());
        assert_eq!(sregs.cr0 & (CR0_PE | CR0_PG), CR0_PE | CR0_PG);
        assert_eq!(sregs.cr4 & CR4_PAE, CR4_PAE);
        assert_eq!(sregs.efer & (EFER_LME | EFER_LMA), EFER_LME | EFER_LMA);
        assert_eq!((sregs.cs.l, sregs.cs.db, sregs.cs.selector), (1, 0, 0x10));
        assert_eq!((sregs.ds.selector, sregs.ss.selector), (0x18, 0x18));
        let regs = regs(&LONG);
        assert_eq!((regs.rip, regs.rsi, regs.rflags), (0x100_0200, 0x7000, 2));
    }

    #[test]
    fn pvh_is_entered_without_paging_with_ebx_at_the_start_info() {
        let sregs = sregs(&PROTECTED, kvm_sregs::default());
        assert_eq!((sregs.cr0 & CR0_PE, sregs.cr0 & CR0_PG), (CR0_PE, 0));
        assert_eq!((sregs.cr4, sregs.efer), (0, 0));
        assert_eq!((sregs.cs.l, sregs.cs.db, sregs.cs.limit), (0, 1, 0xffff_ffff));
        let regs = regs(&PROTECTED);
        assert_eq!((regs.rip, regs.rbx, regs.rflags), (0x100_0a30, 0x6000, 2));
    }

    #[test]
    fn what_kvm_set_and_the_protocol_does_not_is_kept() {
        let created = kvm_sregs { apic_base: 0xfee0_0900, cr8: 3, ..kvm_sregs::default() };
        let sregs = sregs(&LONG, created);
        assert_eq!((sregs.apic_base, sregs.cr8), (0xfee0_0900, 3));
    }
}
