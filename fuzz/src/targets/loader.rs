//! The kernel loader with kernels, initrds and command lines made by the input: bzImage and ELF with
//! either protocol, mostly sound. What is loaded must be what was in the file, in RAM that nothing
//! else has.

use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm::boot::load::{BootRequest, EntryMode, Image, load};
use vmm::boot::{BootError, BootProtocol, Entry, layout};

use crate::input::Input;

const MIB: u64 = 1 << 20;
const RSDP: u64 = 0xe_0000;
const NUL_AND_MORE: u64 = 2;

thread_local! {
    /// The kernel's and the initrd's file, written anew for each input.
    static FILES: RefCell<[File; 2]> =
        RefCell::new([(); 2].map(|()| tempfile::tempfile().expect("a temporary file")));
}

/// Where pieces of the kernel file go, and what memory they take.
struct Kernel {
    bytes: Vec<u8>,
    /// Offset in the file, length, address.
    pieces: Vec<(usize, usize, u64)>,
    /// What must not be given to anything else.
    taken: Range<u64>,
    /// Nothing was made wrong on purpose.
    sound: bool,
    initrd_max: u64,
    entry: u64,
    is_elf: bool,
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory_bytes = MIB * input.usually(&[32, 64, 3, 1, 3073 - 64]).clamp(1, 4096);
    let protocol = input.pick(&[BootProtocol::Auto, BootProtocol::Linux64, BootProtocol::Pvh]);
    let initrd_bytes = match input.u8() % 4 {
        0 => None,
        1 => Some(usize::from(input.u16())),
        2 => Some(0),
        _ => Some(16 * usize::from(input.u16())),
    };
    let cmdline: String = match input.u8() % 4 {
        0 => String::new(),
        1 => input.bytes(40).iter().map(|byte| char::from(*byte)).collect(),
        _ => "a".repeat(usize::from(input.u16()) % 3000),
    };
    let kernel = match input.u8() % 8 {
        0..3 => bzimage(&mut input),
        3..7 => elf(&mut input),
        _ => Kernel {
            bytes: input.bytes(1000).to_vec(),
            pieces: Vec::new(),
            taken: 0..0,
            sound: false,
            initrd_max: 0,
            entry: 0,
            is_elf: false,
        },
    };
    let initrd = initrd_bytes.map(|len| (0..len).map(|at| (at * 7 + 1) as u8).collect::<Vec<u8>>());
    let ranges: Vec<_> = layout::ram_ranges(memory_bytes)
        .into_iter()
        .map(|(start, bytes)| (GuestAddress(start), bytes as usize))
        .collect();
    let Ok(memory) = GuestMemoryMmap::<()>::from_ranges(&ranges) else { return };

    let entry = FILES.with_borrow_mut(|[kernel_file, initrd_file]| {
        fill(kernel_file, &kernel.bytes);
        if let Some(initrd) = &initrd {
            fill(initrd_file, initrd);
        }
        let request = BootRequest {
            kernel: Image { file: kernel_file, path: Path::new("vmlinuz") },
            initrd: initrd
                .is_some()
                .then_some(Image { file: initrd_file, path: Path::new("initrd.img") }),
            protocol,
            cmdline: &cmdline,
            rsdp: RSDP,
        };
        load(&memory, request)
    });
    match entry {
        Ok(entry) => {
            check(&memory, memory_bytes, &kernel, initrd.as_deref(), &cmdline, entry);
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
            may_fail(&error, &kernel, initrd.as_deref(), memory_bytes, protocol);
        }
    }
}

fn fill(file: &File, bytes: &[u8]) {
    file.set_len(0).and_then(|()| file.write_all_at(bytes, 0)).expect("room for a temporary file");
}

/// A sound kernel that fits is refused only for what else is wrong.
fn may_fail(
    error: &BootError,
    kernel: &Kernel,
    initrd: Option<&[u8]>,
    memory_bytes: u64,
    protocol: BootProtocol,
) {
    let low_end = memory_bytes.min(layout::LOW_RAM_END);
    match error {
        BootError::Read { .. } => panic!("{error}"),
        BootError::EmptyInitrd { .. } => assert_eq!(initrd.map(<[u8]>::len), Some(0)),
        BootError::InitrdTooLarge { .. } => {
            let top = low_end.min(kernel.initrd_max.saturating_add(1));
            let first = kernel.taken.end.checked_next_multiple_of(4096).unwrap_or(u64::MAX);
            let room = top.saturating_sub(first);
            let bytes = initrd.map_or(0, <[u8]>::len) as u64;
            assert!(!kernel.sound || bytes + 4096 > room, "{error}");
        }
        BootError::KernelTooLarge { .. } => {
            assert!(!kernel.sound || kernel.taken.end > low_end, "{error}");
        }
        BootError::NotAKernel { .. } => assert!(!kernel.sound, "{error}"),
        BootError::Protocol { .. } => assert!(!kernel.sound || protocol == BootProtocol::Pvh),
        BootError::Cmdline(_) | BootError::MemoryTooSmall { .. } => {}
        BootError::TooManyCpus { .. } => panic!("{error}"),
    }
}

fn at(memory: &GuestMemoryMmap, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read_slice(&mut bytes, GuestAddress(address)).expect("in RAM");
    bytes
}

fn u32_at(memory: &GuestMemoryMmap, address: u64) -> u32 {
    memory.read_obj(GuestAddress(address)).expect("in RAM")
}

fn u64_at(memory: &GuestMemoryMmap, address: u64) -> u64 {
    memory.read_obj(GuestAddress(address)).expect("in RAM")
}

fn check(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    kernel: &Kernel,
    initrd: Option<&[u8]>,
    cmdline: &str,
    entry: Entry,
) {
    let low_end = memory_bytes.min(layout::LOW_RAM_END);
    let rip = entry.instruction_pointer;
    assert!((layout::HIGH_MEMORY_START..low_end).contains(&rip), "entered at {rip:#x}");
    let line = at(memory, layout::CMDLINE_START, cmdline.len() + 1);
    assert_eq!(line, [cmdline.as_bytes(), &[0]].concat());
    assert!((cmdline.len() as u64) + NUL_AND_MORE <= layout::CMDLINE_MAX_BYTES);

    let (image, size, cmd_line, map) = match entry.mode {
        EntryMode::Long64 => {
            let page = entry.boot_info;
            assert_eq!(page, layout::ZERO_PAGE_START);
            let count = usize::from(at(memory, page + 0x1e8, 1)[0]);
            let map: Vec<_> = (0..count as u64)
                .map(|index| page + 0x2d0 + 20 * index)
                .map(|at| (u64_at(memory, at), u64_at(memory, at + 8), u32_at(memory, at + 16)))
                .collect();
            let image = u64::from(u32_at(memory, page + 0x218));
            let size = u64::from(u32_at(memory, page + 0x21c));
            assert_eq!(u64_at(memory, page + 0x70), RSDP);
            (image, size, u32_at(memory, page + 0x228).into(), map)
        }
        EntryMode::Protected32 => {
            let info = entry.boot_info;
            assert_eq!(u32_at(memory, info), 0x336e_c578);
            let (modules, list) = (u32_at(memory, info + 12), u64_at(memory, info + 16));
            let (image, size) = match modules {
                0 => (0, 0),
                _ => (u64_at(memory, list), u64_at(memory, list + 8)),
            };
            assert_eq!(u64_at(memory, info + 32), RSDP);
            let (map, count) = (u64_at(memory, info + 40), u32_at(memory, info + 48));
            let map: Vec<_> = (0..u64::from(count))
                .map(|index| map + 24 * index)
                .map(|at| (u64_at(memory, at), u64_at(memory, at + 8), u32_at(memory, at + 16)))
                .collect();
            (image, size, u64_at(memory, info + 24), map)
        }
    };
    assert_eq!(cmd_line, layout::CMDLINE_START);
    check_map(&map, memory_bytes);
    match initrd {
        None => assert_eq!((image, size), (0, 0)),
        Some(initrd) => {
            assert_eq!(size, initrd.len() as u64);
            assert!(image % 4096 == 0 && image + size <= low_end);
            assert!(at(memory, image, initrd.len()) == initrd, "the initrd is in memory");
        }
    }
    if !kernel.sound {
        return;
    }
    assert_eq!(entry.mode == EntryMode::Protected32, kernel.is_elf && rip != kernel.entry);
    assert!(kernel.taken.contains(&rip));
    if size > 0 {
        assert!(image >= kernel.taken.end && image + size - 1 <= kernel.initrd_max);
    }
    for &(offset, len, address) in &kernel.pieces {
        let loaded = at(memory, address, len);
        assert!(loaded == kernel.bytes[offset..offset + len], "{len:#x} bytes at {address:#x}");
    }
}

/// Sorted, without overlaps, and all of RAM but for what firmware would have.
fn check_map(map: &[(u64, u64, u32)], memory_bytes: u64) {
    for pair in map.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{map:x?}");
    }
    let ram: u64 = map.iter().filter(|entry| entry.2 == 1).map(|entry| entry.1).sum();
    assert!(
        ram <= memory_bytes
            && ram + (layout::HIGH_MEMORY_START - layout::CONVENTIONAL_END) >= memory_bytes
    );
}

fn put(bytes: &mut [u8], offset: usize, field: &[u8]) {
    if let Some(place) = bytes.get_mut(offset..offset + field.len()) {
        place.copy_from_slice(field);
    }
}

/// Usually `good`; then and now something else, and the kernel is not sound any more.
fn field(input: &mut Input, sound: &mut bool, good: u64) -> u64 {
    if input.rarely(40) {
        *sound = false;
        input.usually(&[0, u64::MAX, 1, good.wrapping_add(1), 0xffff_f000, 0x8000_0000])
    } else {
        good
    }
}

fn bzimage(input: &mut Input) -> Kernel {
    let mut sound = true;
    let sectors = input.u8() % 5;
    let setup = (if sectors == 0 { 4 } else { usize::from(sectors) } + 1) * 512;
    let body = input.usually(&[0x1000, 0x210, 0x8000, 0x200, 0x3000]) as usize % 0x1_0000;
    sound &= body > 0x200;
    let mut bytes = vec![0; setup + body];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = (at * 13 + at / 256) as u8;
    }
    let alignment = input.usually(&[0x20_0000, 0x1000, 1, 0x100_0000]);
    let preferred = input.usually(&[0x100_0000, 0x20_0000, 0x10_0000]);
    let init_size = input.usually(&[0x40_0000, 0, 0x1000, 0x200_0000]);
    let initrd_max = input.usually(&[0x7fff_ffff, 0x37ff_ffff, 0x1ff_ffff, 0xffff_ffff]);
    // All are fields of 32 bits but one.
    let [alignment, init_size, initrd_max] =
        [alignment, init_size, initrd_max].map(|value| value & 0xffff_ffff);
    let fields: [(usize, usize, u64); 12] = [
        (0x1f1, 1, sectors.into()),
        (0x1f4, 4, body as u64 / 16),
        (0x1fe, 2, 0xaa55),
        (0x202, 4, 0x5372_6448),
        (0x206, 2, 0x020f),
        (0x211, 1, 1),
        (0x22c, 4, initrd_max),
        (0x230, 4, alignment),
        (0x236, 2, 1),
        (0x238, 4, 2047),
        (0x258, 8, preferred),
        (0x260, 4, init_size),
    ];
    for (at, len, good) in fields {
        let value = field(input, &mut sound, good);
        put(&mut bytes, at, &value.to_le_bytes()[..len]);
    }
    let load = preferred.checked_next_multiple_of(alignment.max(1)).unwrap_or(u64::MAX);
    let needed = init_size.max(body as u64);
    sound &= load >= layout::HIGH_MEMORY_START;
    if input.rarely(16) {
        sound = false;
        bytes.truncate(input.u16().into());
    }
    Kernel {
        bytes,
        pieces: vec![(setup, body, load)],
        taken: load..load.saturating_add(needed),
        sound,
        initrd_max,
        entry: load.saturating_add(0x200),
        is_elf: false,
    }
}

fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [name.len() as u32, content.len() as u32, kind] {
        bytes.extend(word.to_le_bytes());
    }
    for part in [name, content] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

fn elf(input: &mut Input) -> Kernel {
    const BODY: usize = 0x800;
    let mut sound = true;
    let segments = 1 + usize::from(input.u8() % 4);
    let mut notes = Vec::new();
    let load = input.usually(&[0x100_0000, 0x10_0000, 0x20_0000]);
    sound &= (layout::HIGH_MEMORY_START..1 << 40).contains(&load);
    let (linux, pvh) = (!input.rarely(4), !input.rarely(4));
    if linux {
        notes.extend(note(b"Linux\0", 0x100, b"6.12\0"));
    }
    if input.flag() {
        notes.extend(note(b"GNU\0", 3, input.bytes(7)));
    }
    if pvh {
        let entry = (load as u32).wrapping_add(0x80);
        notes.extend(note(b"Xen\0", 18, &u64::from(entry).to_le_bytes()));
    }
    if input.rarely(8) {
        notes.extend(input.bytes(24));
    }
    // Without either of the two there is a protocol that does not boot it.
    sound &= linux && pvh;
    let mut bytes = vec![0; BODY];
    let mut headers = vec![(4_u32, 0x400_u64, 0_u64, notes.len() as u64, notes.len() as u64)];
    let mut pieces = Vec::new();
    let mut end = load;
    for _ in 0..segments {
        let len = input.usually(&[0x800, 0x100, 1, 0x2000]) % 0x4000;
        let more = input.usually(&[0, 0x1000, 0x20_0000]) % (16 * MIB);
        pieces.push((bytes.len(), len as usize, end));
        headers.push((1, bytes.len() as u64, end, len, len + more));
        let start = bytes.len();
        bytes.extend((0..len as usize).map(|at| ((start + at) * 11) as u8));
        end = end.saturating_add(len + more).checked_next_multiple_of(0x1000).unwrap_or(!0xfff);
    }
    let last = headers.last().map_or(0, |header| header.2.saturating_add(header.4));
    sound &= last - load.min(last) > 0x80;
    let entry = load.saturating_add(0x40);
    let fields: [(usize, usize, u64); 8] = [
        (0, 4, 0x464c_457f),
        (4, 1, 2),
        (5, 1, 1),
        (18, 2, 62),
        (24, 8, entry),
        (32, 8, 64),
        (54, 2, 56),
        (56, 2, headers.len() as u64),
    ];
    for (at, len, good) in fields {
        let value = field(input, &mut sound, good);
        put(&mut bytes, at, &value.to_le_bytes()[..len]);
    }
    for (index, header) in headers.iter().enumerate() {
        let &(kind, offset, start, file, mem) = header;
        for (at, len, good) in
            [(0, 4, kind.into()), (8, 8, offset), (24, 8, start), (32, 8, file), (40, 8, mem)]
        {
            let value = field(input, &mut sound, good);
            put(&mut bytes, 64 + 56 * index + at, &value.to_le_bytes()[..len]);
        }
    }
    put(&mut bytes, 0x400, &notes);
    if input.rarely(16) {
        sound = false;
        bytes.truncate(input.u16().into());
    }
    Kernel { bytes, pieces, taken: load..last, sound, initrd_max: 0x7fff_ffff, entry, is_elf: true }
}
