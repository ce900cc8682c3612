//! Kernels made by hand: a setup header or ELF headers, and bytes that are easy to find again.

use std::io::Write;

use super::*;

const MIB: u64 = 1 << 20;
const RSDP: u64 = 0xe_0000;
const BODY_BYTES: usize = 0x1000;

fn memory(bytes: u64) -> GuestMemoryMmap {
    let ranges: Vec<_> = layout::ram_ranges(bytes)
        .into_iter()
        .map(|(start, bytes)| (GuestAddress(start), bytes as usize))
        .collect();
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn header() -> setup_header {
    setup_header {
        setup_sects: 1,
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(BZIMAGE_MAGIC),
        version: 0x020f,
        loadflags: LOADED_HIGH,
        initrd_addr_max: 0x7fff_ffff,
        kernel_alignment: 0x20_0000,
        relocatable_kernel: 1,
        xloadflags: XLF_KERNEL_64,
        cmdline_size: 2047,
        pref_address: 16 * MIB,
        init_size: 4 * MIB as u32,
        ..setup_header::default()
    }
}

/// The setup code, then a body of 0xb0.
fn bzimage(header: setup_header) -> Vec<u8> {
    let sectors = if header.setup_sects == 0 { 4 } else { usize::from(header.setup_sects) };
    let mut bytes = vec![0; (sectors + 1) * 512];
    bytes[SETUP_HEADER_OFFSET..][..size_of::<setup_header>()].copy_from_slice(header.as_slice());
    bytes.resize(bytes.len() + BODY_BYTES, 0xb0);
    bytes
}

const ELF_LOAD: u64 = 16 * MIB;
const ELF_ENTRY: u64 = ELF_LOAD + 0x40;
const ELF_PVH_ENTRY: u32 = ELF_LOAD as u32 + 0x80;
const ELF_BODY_OFFSET: usize = 0x1000;

fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = [name.len() as u32, content.len() as u32, kind]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect::<Vec<u8>>();
    for part in [name, content] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

fn linux_note() -> Vec<u8> {
    note(b"Linux\0", 0x100, b"6.12\0")
}

fn pvh_note() -> Vec<u8> {
    note(b"Xen\0", 18, &u64::from(ELF_PVH_ENTRY).to_le_bytes())
}

/// One segment of 0xe1 that memory continues with zeros, and a note segment.
fn elf_image(notes: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; ELF_BODY_OFFSET];
    let mut put = |offset: usize, field: &[u8]| {
        bytes[offset..offset + field.len()].copy_from_slice(field);
    };
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &2_u16.to_le_bytes());
    put(18, &62_u16.to_le_bytes());
    put(24, &ELF_ENTRY.to_le_bytes());
    put(32, &64_u64.to_le_bytes());
    put(54, &56_u16.to_le_bytes());
    put(56, &2_u16.to_le_bytes());
    let mut segment =
        |index: usize, kind: u32, offset: usize, start: u64, file: usize, mem: u64| {
            let at = 64 + index * 56;
            put(at, &kind.to_le_bytes());
            put(at + 8, &offset.to_le_bytes());
            put(at + 24, &start.to_le_bytes());
            put(at + 32, &file.to_le_bytes());
            put(at + 40, &mem.to_le_bytes());
        };
    segment(0, 1, ELF_BODY_OFFSET, ELF_LOAD, BODY_BYTES, 2 * MIB);
    segment(1, 4, 0x200, 0, notes.len(), notes.len() as u64);
    put(0x200, notes);
    bytes.resize(ELF_BODY_OFFSET + BODY_BYTES, 0xe1);
    bytes
}

struct Boot<'a> {
    memory: &'a GuestMemoryMmap,
    kernel: Vec<u8>,
    initrd: Option<Vec<u8>>,
    protocol: BootProtocol,
    cmdline: &'a str,
}

impl<'a> Boot<'a> {
    fn new(memory: &'a GuestMemoryMmap, kernel: Vec<u8>) -> Self {
        Self { memory, kernel, initrd: None, protocol: BootProtocol::Auto, cmdline: "quiet" }
    }

    fn initrd(self, bytes: u64) -> Self {
        Self { initrd: Some(vec![0x1d; bytes as usize]), ..self }
    }

    fn load(self) -> Result<Entry, BootError> {
        let mut kernel = file(&self.kernel);
        let mut initrd = self.initrd.as_deref().map(file);
        let request = BootRequest {
            kernel: Image { file: &mut kernel, path: Path::new("vmlinuz") },
            initrd: initrd.as_mut().map(|file| Image { file, path: Path::new("initrd.img") }),
            protocol: self.protocol,
            cmdline: self.cmdline,
            rsdp: RSDP,
        };
        load(self.memory, request)
    }

    fn error(self) -> String {
        self.load().unwrap_err().to_string()
    }
}

fn zero_page(memory: &GuestMemoryMmap) -> boot_params {
    memory.read_obj(GuestAddress(layout::ZERO_PAGE_START)).unwrap()
}

/// Checks that `address..address + bytes` holds `value` and its neighbours do not.
fn assert_filled(memory: &GuestMemoryMmap, address: u64, bytes: u64, value: u8) {
    let byte = |address| memory.read_obj::<u8>(GuestAddress(address)).unwrap();
    assert_eq!(byte(address), value, "at {address:#x}");
    assert_eq!(byte(address + bytes - 1), value, "at the end of {address:#x}");
    assert_ne!(byte(address - 1), value, "before {address:#x}");
    if (address + bytes) < low_ram_end(memory) {
        assert_ne!(byte(address + bytes), value, "after {address:#x}");
    }
}

#[test]
fn a_bzimage_is_entered_512_bytes_into_its_preferred_address() {
    let memory = memory(128 * MIB);
    let entry = Boot::new(&memory, bzimage(header())).load().unwrap();
    assert_eq!(
        entry,
        Entry {
            mode: EntryMode::Long64,
            instruction_pointer: 16 * MIB + 0x200,
            boot_info: layout::ZERO_PAGE_START
        }
    );
    assert_filled(&memory, 16 * MIB, BODY_BYTES as u64, 0xb0);
}

#[test]
fn no_setup_sectors_mean_four() {
    let memory = memory(128 * MIB);
    Boot::new(&memory, bzimage(setup_header { setup_sects: 0, ..header() })).load().unwrap();
    assert_filled(&memory, 16 * MIB, BODY_BYTES as u64, 0xb0);
}

#[test]
fn the_load_address_is_aligned_as_the_kernel_asks() {
    let memory = memory(128 * MIB);
    let unaligned = setup_header { pref_address: 16 * MIB + 1, ..header() };
    let entry = Boot::new(&memory, bzimage(unaligned)).load().unwrap();
    assert_eq!(entry.instruction_pointer, 18 * MIB + 0x200);
}

#[test]
fn the_zero_page_holds_header_command_line_initrd_memory_map_and_rsdp() {
    let memory = memory(128 * MIB);
    Boot::new(&memory, bzimage(header())).initrd(5000).load().unwrap();
    let page = zero_page(&memory);
    let hdr = page.hdr;
    let fields = (hdr.version, hdr.type_of_loader, hdr.cmd_line_ptr, hdr.cmdline_size);
    assert_eq!(fields, (0x020f, LOADER_UNDEFINED, layout::CMDLINE_START as u32, 2047));
    let initrd = (u64::from(hdr.ramdisk_image), hdr.ramdisk_size);
    assert_eq!(initrd, (128 * MIB - 8192, 5000));
    let rsdp = page.acpi_rsdp_addr;
    assert_eq!(rsdp, RSDP);
    let mut line = [0xff; 6];
    memory.read_slice(&mut line, GuestAddress(layout::CMDLINE_START)).unwrap();
    assert_eq!(&line, b"quiet\0");
    let table = page.e820_table;
    let map: Vec<_> = table[..usize::from(page.e820_entries)]
        .iter()
        .map(|entry| (entry.addr, entry.size, entry.r#type))
        .collect();
    let expected: Vec<_> = layout::memory_map(&[(0, 128 * MIB)])
        .iter()
        .map(|entry| (entry.start, entry.bytes, entry.kind as u32))
        .collect();
    assert_eq!(map, expected);
}

#[test]
fn what_a_boot_loader_is_to_write_does_not_come_from_the_file() {
    let memory = memory(64 * MIB);
    let file = setup_header {
        ramdisk_image: 0x1234_5000,
        ramdisk_size: 0x1000,
        setup_data: 0x9000,
        ..header()
    };
    Boot::new(&memory, bzimage(file)).load().unwrap();
    let header = zero_page(&memory).hdr;
    let (image, size, data) = (header.ramdisk_image, header.ramdisk_size, header.setup_data);
    assert_eq!((image, size, data), (0, 0, 0));
}

#[test]
fn the_initrd_goes_as_high_as_the_kernel_and_the_hole_allow() {
    for (memory_bytes, initrd_addr_max, start) in [
        (128 * MIB, 0x7fff_ffff, 128 * MIB - 4096),
        (128 * MIB, 64 * MIB as u32 - 1, 64 * MIB - 4096),
        (128 * MIB, 64 * MIB as u32 - 2, 64 * MIB - 8192),
        (3584 * MIB, 0x7fff_ffff, 0x8000_0000 - 4096),
        (3584 * MIB, u32::MAX, layout::LOW_RAM_END - 4096),
    ] {
        let memory = memory(memory_bytes);
        let header = setup_header { initrd_addr_max, ..header() };
        Boot::new(&memory, bzimage(header)).initrd(4096).load().unwrap();
        let hdr = zero_page(&memory).hdr;
        assert_eq!(u64::from(hdr.ramdisk_image), start, "limit {initrd_addr_max:#x}");
        assert_filled(&memory, start, 4096, 0x1d);
    }
}

#[test]
fn the_initrd_stays_clear_of_all_that_the_kernel_needs_to_unpack() {
    // The kernel takes 16 to 20 MiB: 4 MiB are left.
    let memory = memory(24 * MIB);
    Boot::new(&memory, bzimage(header())).initrd(4 * MIB).load().unwrap();
    assert_eq!(
        Boot::new(&memory, bzimage(header())).initrd(4 * MIB + 1).error(),
        "initrd.img: initrd larger than memory: 4194305 bytes, but only 4194304 are free above the \
         kernel; give the guest more --memory"
    );
}

#[test]
fn an_empty_initrd_is_refused() {
    let memory = memory(24 * MIB);
    let error = Boot::new(&memory, bzimage(header())).initrd(0).error();
    assert_eq!(error, "initrd.img: the initrd is empty");
}

#[test]
fn a_kernel_that_needs_more_memory_than_there_is_is_refused() {
    let memory = memory(20 * MIB - 4096);
    assert_eq!(
        Boot::new(&memory, bzimage(header())).error(),
        "vmlinuz: the kernel needs memory from 0x1000000 to 0x1400000, but the guest has 20967424 \
         bytes; give it more --memory"
    );
}

#[test]
fn what_is_no_kernel_is_told_apart() {
    let memory = memory(24 * MIB);
    let old = setup_header { version: 0x0209, ..header() };
    let narrow = setup_header { xloadflags: 0, ..header() };
    let low = setup_header { pref_address: 0, ..header() };
    let mut short = bzimage(header());
    short.truncate(1024 + 0x200);
    let mut narrow_elf = elf_image(&linux_note());
    narrow_elf[4] = 1;
    let mut arm_elf = elf_image(&linux_note());
    arm_elf[18] = 183;
    let mut short_elf = elf_image(&linux_note());
    short_elf.pop();
    for (kernel, reason) in [
        (vec![], "neither bzImage nor ELF"),
        (vec![0; 100_000], "neither bzImage nor ELF"),
        (bzimage(old), "its boot protocol is 2.9; 2.12 or later is needed"),
        (bzimage(narrow), "it has no 64-bit entry point"),
        (bzimage(low), "it wants to be loaded at 0x0, below 0x100000"),
        (short, "it is cut short: 1536 bytes, of which the setup code takes 1024"),
        (b"\x7fELF".to_vec(), "its ELF headers are cut short"),
        (narrow_elf, "it is ELF, but not for 64-bit x86"),
        (arm_elf, "it is ELF, but not for 64-bit x86"),
        (short_elf, "it is cut short: 8191 bytes, but a segment is 4096 bytes at 4096"),
        (elf_image(&[]), "it is ELF, but has neither a note of Linux nor a PVH entry point"),
    ] {
        let error = Boot::new(&memory, kernel).error();
        let expected = format!("vmlinuz: not a kernel Pollux can boot: {reason}");
        assert!(error.starts_with(&expected), "{error:?} for {reason:?}");
    }
}

#[test]
fn a_linux_elf_is_entered_at_its_64_bit_entry() {
    let memory = memory(24 * MIB);
    let kernel = elf_image(&[pvh_note(), linux_note()].concat());
    let entry = Boot::new(&memory, kernel).initrd(4096).load().unwrap();
    assert_eq!((entry.mode, entry.instruction_pointer), (EntryMode::Long64, ELF_ENTRY));
    assert_filled(&memory, ELF_LOAD, BODY_BYTES as u64, 0xe1);
    let hdr = zero_page(&memory).hdr;
    let magic = (hdr.header, hdr.boot_flag, hdr.ramdisk_size);
    assert_eq!(magic, (u32::from_le_bytes(BZIMAGE_MAGIC), 0xaa55, 4096));
}

#[test]
fn an_elf_that_offers_only_pvh_is_entered_there() {
    let memory = memory(24 * MIB);
    let entry = Boot::new(&memory, elf_image(&pvh_note())).load().unwrap();
    let expected = Entry {
        mode: EntryMode::Protected32,
        instruction_pointer: ELF_PVH_ENTRY.into(),
        boot_info: layout::PVH_INFO_START,
    };
    assert_eq!(entry, expected);
}

#[test]
fn pvh_gets_memory_map_command_line_rsdp_and_initrd() {
    let memory = memory(24 * MIB);
    let boot = Boot {
        protocol: BootProtocol::Pvh,
        ..Boot::new(&memory, elf_image(&[linux_note(), pvh_note()].concat())).initrd(5000)
    };
    let entry = boot.load().unwrap();
    let info: hvm_start_info = memory.read_obj(GuestAddress(entry.boot_info)).unwrap();
    assert_eq!((info.magic, info.version), (0x336e_c578, 1));
    assert_eq!((info.cmdline_paddr, info.rsdp_paddr), (layout::CMDLINE_START, RSDP));
    assert_eq!(info.nr_modules, 1);
    let module: hvm_modlist_entry = memory.read_obj(GuestAddress(info.modlist_paddr)).unwrap();
    assert_eq!((module.paddr, module.size), (24 * MIB - 8192, 5000));
    let map = layout::memory_map(&[(0, 24 * MIB)]);
    assert_eq!(info.memmap_entries as usize, map.len());
    for (index, expected) in map.iter().enumerate() {
        let address = info.memmap_paddr + (index * size_of::<hvm_memmap_table_entry>()) as u64;
        let entry: hvm_memmap_table_entry = memory.read_obj(GuestAddress(address)).unwrap();
        let expected = (expected.start, expected.bytes, expected.kind as u32);
        assert_eq!((entry.addr, entry.size, entry.type_), expected);
    }
}

#[test]
fn pvh_needs_an_elf_with_its_note() {
    let memory = memory(24 * MIB);
    for (kernel, reason) in [
        (bzimage(header()), "vmlinuz: PVH boots an ELF vmlinux, and this is a bzImage"),
        (elf_image(&linux_note()), "vmlinuz: it has no PVH entry point"),
    ] {
        let error = Boot { protocol: BootProtocol::Pvh, ..Boot::new(&memory, kernel) }.error();
        assert!(error.starts_with(reason), "{error:?}");
    }
}

#[test]
fn an_elf_without_notes_boots_when_the_protocol_is_named() {
    let memory = memory(24 * MIB);
    let boot = Boot { protocol: BootProtocol::Linux64, ..Boot::new(&memory, elf_image(&[])) };
    assert_eq!(boot.load().unwrap().instruction_pointer, ELF_ENTRY);
}

#[test]
fn a_command_line_longer_than_the_kernel_takes_is_refused() {
    let memory = memory(24 * MIB);
    let kernel = bzimage(setup_header { cmdline_size: 4, ..header() });
    assert_eq!(
        Boot::new(&memory, kernel).error(),
        "kernel command line: 5 bytes, but this kernel takes at most 4"
    );
    let long = "x".repeat(cmdline::DEFAULT_MAX_BYTES + 1);
    let boot = Boot { cmdline: &long, ..Boot::new(&memory, elf_image(&linux_note())) };
    assert!(boot.error().contains("2048 bytes, but this kernel takes at most 2047"));
}

#[test]
fn damaged_headers_are_errors_or_kernels_but_never_panics() {
    let memory = memory(24 * MIB);
    let elf = elf_image(&[linux_note(), pvh_note()].concat());
    let setup = SETUP_HEADER_OFFSET..SETUP_HEADER_OFFSET + size_of::<setup_header>();
    let headers = [(bzimage(header()), setup), (elf, 0..0x260)];
    for (image, range) in headers {
        for offset in range {
            for value in [0, 0x7f, 0xff] {
                let mut damaged = image.clone();
                damaged[offset] = value;
                if let Ok(entry) = Boot::new(&memory, damaged).load() {
                    assert!(entry.instruction_pointer < 24 * MIB, "byte {offset} = {value}");
                }
            }
        }
    }
}
