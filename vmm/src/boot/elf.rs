//! Just enough of ELF to load a kernel: the loadable segments of an x86-64 executable, and the notes
//! that say what it is. All numbers come from a file that may be damaged.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The first bytes of every ELF file.
pub const MAGIC: [u8; 4] = *b"\x7fELF";

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
/// Far more than any kernel has.
const MAX_NOTES_BYTES: u64 = 1 << 20;
/// `XEN_ELFNOTE_PHYS32_ENTRY`: the PVH entry point.
const NOTE_PVH_ENTRY: u32 = 18;

/// A run of bytes of the file and where it goes.
#[derive(Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in the file, in bytes. What memory has beyond it is zero.
    pub file_bytes: u64,
    /// Guest-physical addresses it takes.
    pub memory: Range<u64>,
}

/// What the headers and notes of a kernel say.
#[derive(Debug, Default)]
pub struct Executable {
    /// Physical address of the 64-bit entry point.
    pub entry: u64,
    /// Segments to load, none of them empty.
    pub segments: Vec<Segment>,
    /// Physical address of the 32-bit PVH entry point.
    pub pvh_entry: Option<u32>,
    /// It carries a note of Linux.
    pub is_linux: bool,
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(offset..)?.first_chunk().copied()?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(offset..)?.first_chunk().copied()?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(offset..)?.first_chunk().copied()?))
}

impl Executable {
    /// Reads headers and notes of an ELF file of `file_bytes` bytes.
    ///
    /// # Errors
    /// What is wrong with the file, as the end of a sentence.
    pub fn read(file: &File, file_bytes: u64) -> Result<Self, String> {
        const CUT_SHORT: &str = "its ELF headers are cut short";
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0).map_err(|_| CUT_SHORT)?;
        let machine = u16_at(&header, 18);
        if header[4] != CLASS_64 || header[5] != LITTLE_ENDIAN || machine != Some(MACHINE_X86_64) {
            return Err("it is ELF, but not for 64-bit x86".into());
        }
        let field = |value: Option<u64>| value.ok_or(CUT_SHORT);
        let segments_offset = field(u64_at(&header, 32))?;
        let segment_bytes = field(u16_at(&header, 54).map(u64::from))?;
        let segment_count = field(u16_at(&header, 56).map(u64::from))?;
        if segment_bytes != SEGMENT_BYTES as u64 || segment_count == 0 {
            return Err("it is ELF, but not an executable (no program headers)".into());
        }
        // At most 65535 * 56 bytes.
        let mut table = vec![0; (segment_count * segment_bytes) as usize];
        file.read_exact_at(&mut table, segments_offset).map_err(|_| CUT_SHORT)?;

        let mut this = Self { entry: field(u64_at(&header, 24))?, ..Self::default() };
        for segment in table.chunks_exact(SEGMENT_BYTES) {
            let kind = u32_at(segment, 0);
            let offset = field(u64_at(segment, 8))?;
            let start = field(u64_at(segment, 24))?;
            let file_bytes_here = field(u64_at(segment, 32))?;
            let memory_bytes = field(u64_at(segment, 40))?;
            if kind != Some(SEGMENT_LOAD) && kind != Some(SEGMENT_NOTE) {
                continue;
            }
            let in_file = offset.checked_add(file_bytes_here).is_some_and(|end| end <= file_bytes);
            if !in_file {
                return Err(format!(
                    "it is cut short: {file_bytes} bytes, but a segment is {file_bytes_here} bytes \
                     at {offset}"
                ));
            }
            if kind == Some(SEGMENT_NOTE) {
                if file_bytes_here <= MAX_NOTES_BYTES {
                    let mut notes = vec![0; file_bytes_here as usize];
                    file.read_exact_at(&mut notes, offset).map_err(|_| CUT_SHORT)?;
                    this.read_notes(&notes);
                }
            } else if memory_bytes > 0 {
                let end = start.checked_add(memory_bytes);
                let Some(end) = end.filter(|_| file_bytes_here <= memory_bytes) else {
                    return Err(format!("its segment at {start:#x} has impossible sizes"));
                };
                this.segments.push(Segment {
                    offset,
                    file_bytes: file_bytes_here,
                    memory: start..end,
                });
            }
        }
        if this.segments.is_empty() {
            return Err("it is ELF, but has nothing to load".into());
        }
        Ok(this)
    }

    /// Walks a note segment (ELF specification, "Note Section"; names and contents are padded to
    /// four bytes). A damaged one ends the walk: its notes are as good as absent.
    fn read_notes(&mut self, mut notes: &[u8]) {
        while let (Some(name_bytes), Some(content_bytes), Some(kind)) =
            (u32_at(notes, 0), u32_at(notes, 4), u32_at(notes, 8))
        {
            let rest = &notes[12..];
            let padded = |bytes: u32| (bytes as usize).next_multiple_of(4);
            let Some((name, rest)) = rest.split_at_checked(padded(name_bytes)) else { return };
            let name = name.get(..name_bytes as usize).unwrap_or_default();
            self.is_linux |= name == b"Linux\0";
            if name == b"Xen\0" && kind == NOTE_PVH_ENTRY {
                self.pvh_entry = u32_at(rest, 0).filter(|_| content_bytes >= 4);
            }
            // The last note's padding may be missing.
            notes = rest.get(padded(content_bytes)..).unwrap_or_default();
        }
    }

    /// The first and last guest-physical address of all segments.
    pub fn extent(&self) -> Range<u64> {
        let start = self.segments.iter().map(|segment| segment.memory.start).min();
        let end = self.segments.iter().map(|segment| segment.memory.end).max();
        start.unwrap_or(0)..end.unwrap_or(0)
    }
}
