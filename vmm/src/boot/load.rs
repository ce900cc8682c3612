//! Puts kernel, initrd, command line and boot information into guest memory.
//!
//! Two boot protocols: Linux' 64-bit one (Documentation/arch/x86/boot.rst; bzImage, and vmlinux at
//! its ELF entry) and PVH (the Xen HVM direct boot ABI). Files are read straight into guest memory.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::{
    CAN_USE_HEAP, LOADED_HIGH, XLF_KERNEL_64, boot_e820_entry, boot_params, setup_header,
};
use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use thiserror::Error;
use vm_memory::{
    ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};

use super::cmdline::{self, CmdlineError};
use super::{elf, layout, regs};

/// Which boot protocol to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootProtocol {
    /// The 64-bit protocol for bzImage and a Linux ELF; PVH for an ELF that offers nothing else.
    #[default]
    Auto,
    /// Linux' 64-bit boot protocol.
    Linux64,
    /// PVH: ELF only.
    Pvh,
}

/// An open file and its path, for messages.
pub struct Image<'a> {
    /// Open for reading.
    pub file: &'a mut File,
    /// As the user wrote it.
    pub path: &'a Path,
}

/// Everything the guest boots from.
pub struct BootRequest<'a> {
    /// bzImage or ELF.
    pub kernel: Image<'a>,
    /// Initial RAM disk.
    pub initrd: Option<Image<'a>>,
    /// Boot protocol.
    pub protocol: BootProtocol,
    /// The whole command line.
    pub cmdline: &'a str,
    /// Guest-physical address of the RSDP, as from [`super::acpi::write`].
    pub rsdp: u64,
}

/// The state of the CPU in which the kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryMode {
    /// Long mode, the first 4 GiB mapped to themselves, RSI pointing to the zero page.
    Long64,
    /// Protected mode without paging, flat segments, EBX pointing to `hvm_start_info`.
    Protected32,
}

/// How the boot CPU starts; [`regs`] makes registers of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Mode of the CPU.
    pub mode: EntryMode,
    /// Address of the first instruction.
    pub instruction_pointer: u64,
    /// Guest-physical address of the zero page or the start info.
    pub boot_info: u64,
}

/// Why a guest cannot boot from what it was given. One line for the user.
#[derive(Debug, Error)]
pub enum BootError {
    /// A file could not be read.
    #[error("{path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// Not a kernel that can be booted.
    #[error("{path}: not a kernel Pollux can boot: {reason}")]
    NotAKernel {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel, but not for the protocol asked for.
    #[error("{path}: {reason}")]
    Protocol {
        /// The file.
        path: PathBuf,
        /// What is missing, and what would be right.
        reason: &'static str,
    },
    /// The kernel does not fit guest memory.
    #[error(
        "{path}: the kernel needs memory from {:#x} to {:#x}, but the guest has {memory_bytes} bytes; \
         give it more --memory", range.start, range.end
    )]
    KernelTooLarge {
        /// The file.
        path: PathBuf,
        /// What it needs.
        range: Range<u64>,
        /// Guest memory below the PCI hole, in bytes.
        memory_bytes: u64,
    },
    /// The initrd is empty.
    #[error("{path}: the initrd is empty")]
    EmptyInitrd {
        /// The file.
        path: PathBuf,
    },
    /// The initrd does not fit guest memory beside the kernel.
    #[error(
        "{path}: initrd larger than memory: {bytes} bytes, but only {free_bytes} are free above the \
         kernel; give the guest more --memory"
    )]
    InitrdTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// What is free where this kernel takes an initrd.
        free_bytes: u64,
    },
    /// The command line is unusable.
    #[error(transparent)]
    Cmdline(#[from] CmdlineError),
    /// Guest memory does not hold the structures that every boot needs.
    #[error("guest memory of {memory_bytes} bytes is too small to boot from")]
    MemoryTooSmall {
        /// Guest memory below the PCI hole, in bytes.
        memory_bytes: u64,
    },
    /// The ACPI tables do not fit their place.
    #[error("ACPI tables for {cpus} CPUs: at most {max_cpus} CPUs are possible")]
    TooManyCpus {
        /// CPUs asked for.
        cpus: u32,
        /// The most there can be.
        max_cpus: u32,
    },
}

/// What a kernel, once loaded, asks of the rest.
struct Loaded {
    mode: EntryMode,
    instruction_pointer: u64,
    /// Setup header to hand on in the zero page.
    header: setup_header,
    /// Addresses that the kernel takes until it manages memory itself.
    memory: Range<u64>,
    /// Last address an initrd may take.
    initrd_last: u64,
    /// Longest command line in bytes, without its NUL.
    cmdline_max_bytes: usize,
}

/// The highest address of an initrd for a kernel that does not say.
const DEFAULT_INITRD_LAST: u64 = 0x7fff_ffff;
const SETUP_HEADER_OFFSET: usize = 0x1f1;
const BZIMAGE_MAGIC: [u8; 4] = *b"HdrS";
const BZIMAGE_MAGIC_OFFSET: usize = 0x202;
/// The first with `pref_address`, `init_size` (2.10) and `xloadflags` (2.12).
const PROTOCOL_2_12: u16 = 0x020c;
const SECTOR_BYTES: u64 = 512;
/// The 64-bit entry point of a bzImage, from its load address.
const ENTRY_64_OFFSET: u64 = 0x200;
/// `type_of_loader` of a boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
const PAGE_BYTES: u64 = 4096;

/// Loads everything `request` names into `memory`, and writes what the kernel needs to start.
/// `memory` must be fresh: what is not written here is taken to be zero.
///
/// # Errors
/// [`BootError`]; guest memory then holds anything.
pub fn load(memory: &GuestMemoryMmap, request: BootRequest) -> Result<Entry, BootError> {
    let BootRequest { mut kernel, initrd, protocol, cmdline, rsdp } = request;
    let loaded = load_kernel(memory, &mut kernel, protocol)?;
    cmdline::check(cmdline, loaded.cmdline_max_bytes)?;

    let too_small = |_| BootError::MemoryTooSmall { memory_bytes: low_ram_end(memory) };
    let mut line = cmdline.as_bytes().to_vec();
    line.push(0);
    memory.write_slice(&line, GuestAddress(layout::CMDLINE_START)).map_err(too_small)?;
    let initrd = match initrd {
        Some(mut image) => Some(load_initrd(memory, &mut image, &loaded)?),
        None => None,
    };
    regs::write_gdt(memory, loaded.mode).map_err(too_small)?;
    let boot_info = match loaded.mode {
        EntryMode::Long64 => {
            regs::write_page_tables(memory).map_err(too_small)?;
            write_zero_page(memory, loaded.header, initrd, rsdp)
        }
        EntryMode::Protected32 => write_start_info(memory, initrd, rsdp),
    }
    .map_err(too_small)?;
    Ok(Entry { mode: loaded.mode, instruction_pointer: loaded.instruction_pointer, boot_info })
}

/// End of the RAM that starts at 0.
fn low_ram_end(memory: &GuestMemoryMmap) -> u64 {
    memory.find_region(GuestAddress(0)).map_or(0, |region| region.len())
}

fn file_bytes(image: &Image) -> Result<u64, BootError> {
    let metadata = image.file.metadata().map_err(|error| read_error(image.path, error))?;
    Ok(metadata.len())
}

fn read_error(path: &Path, error: std::io::Error) -> BootError {
    BootError::Read { path: path.into(), error }
}

/// Reads `bytes` bytes at `offset` of the file to `address`, without a copy in between. The caller
/// has checked that the file has them and that memory takes them.
fn read_into(
    memory: &GuestMemoryMmap,
    image: &mut Image,
    offset: u64,
    bytes: u64,
    address: u64,
) -> Result<(), BootError> {
    let failed = |error| read_error(image.path, error);
    image.file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    memory
        .read_exact_volatile_from(GuestAddress(address), image.file, bytes as usize)
        .map_err(|error| read_error(image.path, std::io::Error::other(error)))
}

fn load_kernel(
    memory: &GuestMemoryMmap,
    image: &mut Image,
    protocol: BootProtocol,
) -> Result<Loaded, BootError> {
    let mut head = [0; SETUP_HEADER_OFFSET + size_of::<setup_header>()];
    let total_bytes = file_bytes(image)?;
    let head_bytes = total_bytes.min(head.len() as u64) as usize;
    image
        .file
        .read_exact_at(&mut head[..head_bytes], 0)
        .map_err(|error| read_error(image.path, error))?;
    let loaded = if head.starts_with(&elf::MAGIC) {
        load_elf(memory, image, total_bytes, protocol)
    } else if head[BZIMAGE_MAGIC_OFFSET..].starts_with(&BZIMAGE_MAGIC) {
        if protocol == BootProtocol::Pvh {
            return Err(BootError::Protocol {
                path: image.path.into(),
                reason: "PVH boots an ELF vmlinux, and this is a bzImage; use --boot linux64, or \
                         extract its vmlinux",
            });
        }
        let mut header = setup_header::default();
        header.as_mut_slice().copy_from_slice(&head[SETUP_HEADER_OFFSET..]);
        load_bzimage(memory, image, total_bytes, header)
    } else {
        Err(not_a_kernel(image, "neither bzImage nor ELF".into()))
    }?;
    Ok(loaded)
}

fn not_a_kernel(image: &Image, reason: String) -> BootError {
    BootError::NotAKernel { path: image.path.into(), reason }
}

/// Checks that RAM from 0 holds `range`, above the first MiB.
fn check_fits(
    memory: &GuestMemoryMmap,
    image: &Image,
    range: &Range<u64>,
) -> Result<(), BootError> {
    let memory_bytes = low_ram_end(memory);
    if range.start < layout::HIGH_MEMORY_START {
        let reason = format!(
            "it wants to be loaded at {:#x}, below {:#x}",
            range.start,
            layout::HIGH_MEMORY_START
        );
        return Err(not_a_kernel(image, reason));
    }
    if range.end > memory_bytes {
        return Err(BootError::KernelTooLarge {
            path: image.path.into(),
            range: range.clone(),
            memory_bytes,
        });
    }
    Ok(())
}

fn load_bzimage(
    memory: &GuestMemoryMmap,
    image: &mut Image,
    total_bytes: u64,
    mut header: setup_header,
) -> Result<Loaded, BootError> {
    let version = header.version;
    if version < PROTOCOL_2_12 {
        let (major, minor) = (version >> 8, version & 0xff);
        let reason = format!(
            "its boot protocol is {major}.{minor}; 2.12 or later is needed (Linux 3.8 or later)"
        );
        return Err(not_a_kernel(image, reason));
    }
    let (load_flags, xload_flags) = (header.loadflags, header.xloadflags);
    if xload_flags & XLF_KERNEL_64 == 0 || load_flags & LOADED_HIGH == 0 {
        return Err(not_a_kernel(
            image,
            "it has no 64-bit entry point (a 32-bit kernel?); an x86-64 one is needed".into(),
        ));
    }
    // 0 means 4, for historical reasons.
    let setup_sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    let setup_bytes = (setup_sectors + 1) * SECTOR_BYTES;
    let kernel_bytes = total_bytes.saturating_sub(setup_bytes);
    if kernel_bytes <= ENTRY_64_OFFSET {
        return Err(not_a_kernel(
            image,
            format!(
                "it is cut short: {total_bytes} bytes, of which the setup code takes {setup_bytes}"
            ),
        ));
    }
    // Of the protected-mode part, in paragraphs. A signature may follow it.
    let told_bytes = u64::from(header.syssize) * 16;
    if kernel_bytes < told_bytes {
        return Err(not_a_kernel(
            image,
            format!(
                "it is cut short: {told_bytes} bytes should follow its setup code, {kernel_bytes} do"
            ),
        ));
    }
    // The address the kernel decompresses to when nothing moves it; starting there saves it a move.
    let alignment = u64::from(header.kernel_alignment).max(1);
    let preferred = header.pref_address.checked_next_multiple_of(alignment);
    let load_address = preferred.unwrap_or(u64::MAX);
    let needed_bytes = u64::from(header.init_size).max(kernel_bytes);
    let range = load_address..load_address.saturating_add(needed_bytes);
    check_fits(memory, image, &range)?;
    read_into(memory, image, setup_bytes, kernel_bytes, load_address)?;

    // check_fits() keeps it below 3 GiB.
    header.code32_start = load_address as u32;
    let cmdline_max_bytes = match header.cmdline_size {
        0 => cmdline::DEFAULT_MAX_BYTES,
        bytes => (bytes as usize).min(layout::CMDLINE_MAX_BYTES as usize - 1),
    };
    Ok(Loaded {
        mode: EntryMode::Long64,
        instruction_pointer: load_address + ENTRY_64_OFFSET,
        header,
        memory: range,
        initrd_last: u64::from(header.initrd_addr_max),
        cmdline_max_bytes,
    })
}

fn load_elf(
    memory: &GuestMemoryMmap,
    image: &mut Image,
    total_bytes: u64,
    protocol: BootProtocol,
) -> Result<Loaded, BootError> {
    let executable = elf::Executable::read(image.file, total_bytes)
        .map_err(|reason| not_a_kernel(image, reason))?;
    let use_pvh = match (protocol, executable.is_linux, executable.pvh_entry) {
        (BootProtocol::Linux64, ..) | (BootProtocol::Auto, true, _) => None,
        (BootProtocol::Pvh | BootProtocol::Auto, _, Some(entry)) => Some(entry),
        (BootProtocol::Pvh, _, None) => {
            return Err(BootError::Protocol {
                path: image.path.into(),
                reason: "it has no PVH entry point (Linux: CONFIG_PVH=y); use --boot linux64",
            });
        }
        (BootProtocol::Auto, false, None) => {
            return Err(not_a_kernel(
                image,
                "it is ELF, but has neither a note of Linux nor a PVH entry point (a Linux that is older \
                 boots with --boot linux64)"
                    .into(),
            ));
        }
    };
    let range = executable.extent();
    check_fits(memory, image, &range)?;
    let instruction_pointer = use_pvh.map_or(executable.entry, u64::from);
    if !range.contains(&instruction_pointer) {
        let reason = format!("its entry point {instruction_pointer:#x} is outside its segments");
        return Err(not_a_kernel(image, reason));
    }
    for segment in &executable.segments {
        let start = segment.memory.start;
        read_into(memory, image, segment.offset, segment.file_bytes, start)?;
    }
    // What a boot loader tells a kernel that has no setup header of its own.
    let header = setup_header {
        header: u32::from_le_bytes(BZIMAGE_MAGIC),
        boot_flag: 0xaa55,
        version: PROTOCOL_2_12,
        kernel_alignment: 0x20_0000,
        loadflags: LOADED_HIGH,
        ..setup_header::default()
    };
    Ok(Loaded {
        mode: if use_pvh.is_some() { EntryMode::Protected32 } else { EntryMode::Long64 },
        instruction_pointer,
        header,
        memory: range,
        initrd_last: DEFAULT_INITRD_LAST,
        cmdline_max_bytes: cmdline::DEFAULT_MAX_BYTES,
    })
}

/// Loads the initrd as high as the kernel and RAM allow, page aligned.
fn load_initrd(
    memory: &GuestMemoryMmap,
    image: &mut Image,
    kernel: &Loaded,
) -> Result<Range<u64>, BootError> {
    let bytes = file_bytes(image)?;
    if bytes == 0 {
        return Err(BootError::EmptyInitrd { path: image.path.into() });
    }
    let end = low_ram_end(memory).min(kernel.initrd_last.saturating_add(1));
    let free = kernel.memory.end.next_multiple_of(PAGE_BYTES)..end;
    let start = end.checked_sub(bytes).map(|start| start & !(PAGE_BYTES - 1));
    let Some(start) = start.filter(|start| *start >= free.start) else {
        return Err(BootError::InitrdTooLarge {
            path: image.path.into(),
            bytes,
            free_bytes: free.end.saturating_sub(free.start),
        });
    };
    read_into(memory, image, 0, bytes, start)?;
    Ok(start..start + bytes)
}

type MemoryResult<T> = Result<T, vm_memory::GuestMemoryError>;

fn memory_map(memory: &GuestMemoryMmap) -> Vec<layout::MemoryMapEntry> {
    let ram: Vec<_> = memory.iter().map(|region| (region.start_addr().0, region.len())).collect();
    layout::memory_map(&ram)
}

/// Writes the zero page, and returns its address.
fn write_zero_page(
    memory: &GuestMemoryMmap,
    header: setup_header,
    initrd: Option<Range<u64>>,
    rsdp: u64,
) -> MemoryResult<u64> {
    let mut params = boot_params { hdr: header, acpi_rsdp_addr: rsdp, ..boot_params::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    // There is no real-mode heap, and the kernel is not to look for one.
    params.hdr.loadflags &= !CAN_USE_HEAP;
    // All three lie below 4 GiB: see the layout, and the limits of load_initrd().
    params.hdr.cmd_line_ptr = layout::CMDLINE_START as u32;
    // These are the boot loader's to write, also where it has nothing: what the file has there means
    // nothing.
    let initrd = initrd.unwrap_or_default();
    params.hdr.ramdisk_image = initrd.start as u32;
    params.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    params.hdr.setup_data = 0;
    let map = memory_map(memory);
    let mut table = params.e820_table;
    for (slot, entry) in table.iter_mut().zip(&map) {
        *slot = boot_e820_entry { addr: entry.start, size: entry.bytes, r#type: entry.kind as u32 };
    }
    params.e820_entries = map.len().min(table.len()) as u8;
    params.e820_table = table;
    memory.write_obj(params, GuestAddress(layout::ZERO_PAGE_START))?;
    Ok(layout::ZERO_PAGE_START)
}

/// Writes PVH's start info, memory map and module list, and returns the start info's address.
fn write_start_info(
    memory: &GuestMemoryMmap,
    initrd: Option<Range<u64>>,
    rsdp: u64,
) -> MemoryResult<u64> {
    let map = memory_map(memory);
    let mut address = layout::PVH_MEMMAP_START;
    for entry in &map {
        let entry = hvm_memmap_table_entry {
            addr: entry.start,
            size: entry.bytes,
            type_: entry.kind as u32,
            reserved: 0,
        };
        memory.write_obj(entry, GuestAddress(address))?;
        address += size_of::<hvm_memmap_table_entry>() as u64;
    }
    let mut info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        cmdline_paddr: layout::CMDLINE_START,
        rsdp_paddr: rsdp,
        memmap_paddr: layout::PVH_MEMMAP_START,
        memmap_entries: map.len() as u32,
        ..hvm_start_info::default()
    };
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.end - initrd.start,
            ..hvm_modlist_entry::default()
        };
        info.nr_modules = 1;
        info.modlist_paddr = layout::PVH_INFO_START + size_of::<hvm_start_info>() as u64;
        memory.write_obj(module, GuestAddress(info.modlist_paddr))?;
    }
    memory.write_obj(info, GuestAddress(layout::PVH_INFO_START))?;
    Ok(layout::PVH_INFO_START)
}

#[cfg(test)]
mod tests;
