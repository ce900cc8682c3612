//! Whole requests to a block device, from the ring through the worker and the sync engine to a file
//! and back, against a plain reading of virtio 1.2, 5.2.6, on a vector of bytes.
//!
//! All requests of an input are in the ring before the device starts, and the engine carries them out
//! one after the other, so status, used length, guest memory and disk are known exactly.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use devices::GuestMemory;
use devices::testkit::{self, AnyDriver, Buf, Signals};
use devices::virtio::VirtioDevice;
use tempfile::NamedTempFile;
use virtio_blk::{BlkConfig, Block, CacheMode, Disk, EngineKind};

use crate::input::Input;

const SECTOR: usize = 512;
const SECTORS: usize = 64;
const QUEUE_SIZE: u16 = 128;
const RAM_BYTES: usize = 1 << 20;
/// Where buffers are.
const BUFFERS: u64 = 0x8_0000;
const BUFFERS_BYTES: usize = 0x3_0000;
/// What is in buffers that nobody wrote to.
const UNTOUCHED: u8 = 0xa5;
const REQUESTS: usize = 8;
/// As long as a request can take on the busiest machine.
const PATIENCE: Duration = Duration::from_secs(60);

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const KINDS: [u64; 8] = [1, 0, 4, 13, 8, 11, 2, 14];
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;
const F_INDIRECT: u64 = 1 << 28;
const F_PACKED: u64 = 1 << 34;
const SEGMENT_BYTES: usize = 16;
const MAX_SEGMENTS: usize = 16;
const ID: &[u8; 20] = b"fuzzed\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

thread_local! {
    /// Mapped and made once.
    static PLACE: (GuestMemory, NamedTempFile) = {
        // In memory, where there is such a place: a disk is written to for each input.
        let shm = Path::new("/dev/shm");
        let image = if shm.is_dir() { NamedTempFile::new_in(shm) } else { NamedTempFile::new() };
        (testkit::memory(RAM_BYTES), image.expect("a file"))
    };
}

/// The target.
pub fn run(bytes: &[u8]) {
    PLACE.with(|(memory, image)| play(&mut Input::new(bytes), memory, image));
}

/// What a request asks for, and what must come of it.
struct Request {
    head: u16,
    readable: Vec<u8>,
    writable_at: u64,
    writable_bytes: usize,
}

fn play(input: &mut Input, memory: &GuestMemory, image: &NamedTempFile) {
    let readonly = input.rarely(8);
    let config = BlkConfig {
        path: image.path().to_path_buf(),
        engine: EngineKind::Sync,
        queue_size: QUEUE_SIZE,
        serial: "fuzzed".into(),
        readonly,
        packed: input.flag(),
        cache: if input.flag() { CacheMode::Writethrough } else { CacheMode::Writeback },
        ..BlkConfig::default()
    };
    let mut disk: Vec<u8> = (0..SECTORS * SECTOR).map(|at| (at % 251) as u8 | 1).collect();
    image.as_file().write_all_at(&disk, 0).expect("written");
    let mut block = Block::new(config.clone(), Disk::open(&config).expect("opens"));
    let dropped = if input.rarely(4) { input.u64() } else { 0 };
    let features = block.features() & !(dropped & !(1 << 32) & !F_PACKED);
    let mut driver = AnyDriver::new(memory, 0, QUEUE_SIZE, features);
    assert!(driver.end() <= BUFFERS);
    testkit::write(memory, BUFFERS, &[UNTOUCHED; BUFFERS_BYTES]);

    let mut next = BUFFERS;
    let mut requests = Vec::new();
    while !input.is_empty() && requests.len() < REQUESTS {
        requests.push(request(input, memory, &mut driver, features, &mut next));
    }
    let mut ram = testkit::read(memory, BUFFERS, BUFFERS_BYTES);
    driver.publish();
    let signals = Signals::new(1);
    let (activation, _kicks) = signals.activation(memory, features, &[driver.config()]);
    block.activate(activation).expect("starts");
    let mut errors = 0;
    for request in &requests {
        let at = (request.writable_at - BUFFERS) as usize;
        let place = &mut ram[at..at + request.writable_bytes];
        let (status, expected) = carry_out(request, place, &mut disk, readonly, features);
        errors += u64::from(status != Some(OK));
        let start = Instant::now();
        let used = loop {
            if let Some(used) = driver.take_used() {
                break used;
            }
            assert!(start.elapsed() < PATIENCE, "a request was forgotten");
            std::thread::yield_now();
        };
        assert_eq!((used.head, used.written_bytes as usize), (request.head, expected));
    }
    // From here on the worker does nothing more.
    block.reset();
    assert_eq!(signals.status(), Signals::new(1).status(), "no reset is needed");
    assert_eq!(
        signals.sink.count(1),
        usize::from(!requests.is_empty()),
        "one batch, one interrupt"
    );
    assert_eq!(block.counters()[0].requests.get(), requests.len() as u64);
    assert_eq!(block.counters()[0].errors.get(), errors);
    assert!(testkit::read(memory, BUFFERS, BUFFERS_BYTES) == ram, "what is in guest memory");
    let mut found = vec![0; disk.len() + 1];
    let length = image.as_file().read_at(&mut found, 0).expect("read");
    assert!(found[..length] == disk, "what is on the disk");
}

/// A length that is usually whole sectors.
fn data_bytes(input: &mut Input) -> usize {
    let sectors = input.below(9);
    let odd = if input.rarely(16) { input.below(SECTOR) } else { 0 };
    sectors * SECTOR + odd
}

fn segments(input: &mut Input) -> Vec<u8> {
    let count = if input.rarely(16) { 14 + input.below(5) } else { 1 + input.below(3) };
    let mut bytes = Vec::new();
    for _ in 0..count {
        bytes.extend(input.usually(&[0, 1, 8, 32, 56, 63, 64, 65]).to_le_bytes());
        bytes.extend((input.usually(&[1, 8, 0, 3, 64, 65]) as u32).to_le_bytes());
        bytes.extend((input.usually(&[0, 0, 0, 0, 0, 0, 1, 1, 1, 2]) as u32).to_le_bytes());
    }
    if input.rarely(16) {
        bytes.truncate(input.below(bytes.len()));
    }
    bytes
}

/// Writes a request into the ring.
fn request(
    input: &mut Input,
    memory: &GuestMemory,
    driver: &mut AnyDriver,
    features: u64,
    next: &mut u64,
) -> Request {
    let kind = input.usually(&KINDS) as u32;
    let sector = input.usually(&[0, 1, 8, 31, 56, 63, 64, 65]);
    let mut readable = kind.to_le_bytes().to_vec();
    readable.extend(input.u8().to_le_bytes().repeat(4));
    readable.extend(sector.to_le_bytes());
    match kind {
        DISCARD | WRITE_ZEROES => readable.extend(segments(input)),
        OUT => {
            let (bytes, fill) = (data_bytes(input), input.u8());
            readable.extend((0..bytes).map(|at| (at % 241) as u8 ^ fill));
        }
        _ if input.rarely(8) => readable.extend(vec![1; data_bytes(input)]),
        _ => {}
    }
    if input.rarely(32) {
        readable.truncate(input.below(17));
    }
    let data_in = match kind {
        IN => data_bytes(input),
        GET_ID => input.usually(&[20, 20, 20, 0, 19, 21]) as usize % SECTOR,
        _ if input.rarely(8) => data_bytes(input),
        _ => 0,
    };
    let mut writable_bytes = data_in + 1;
    if input.rarely(32) {
        writable_bytes = 0;
    }
    // A chain has a descriptor.
    if readable.is_empty() && writable_bytes == 0 {
        writable_bytes = 1;
    }
    let readable_at = *next + input.below(SECTOR) as u64;
    let writable_at = readable_at + (readable.len() + input.below(SECTOR)) as u64;
    *next = writable_at + writable_bytes as u64;
    testkit::write(memory, readable_at, &readable);
    let mut bufs = pieces(input, Buf::readable(readable_at, readable.len() as u32));
    bufs.extend(pieces(input, Buf::writable(writable_at, writable_bytes as u32)));
    let indirect = input.flag() && features & F_INDIRECT != 0;
    let head = if indirect { driver.add_indirect(&bufs) } else { driver.add(&bufs) };
    Request { head, readable, writable_at, writable_bytes }
}

/// A buffer in at most 8 descriptors.
fn pieces(input: &mut Input, buf: Buf) -> Vec<Buf> {
    let mut left = buf;
    let mut pieces = Vec::new();
    for _ in 0..input.below(8) {
        let len_bytes = input.u16() as u32 % left.len_bytes.max(1);
        if len_bytes > 0 {
            pieces.push(Buf { len_bytes, ..left });
            left.address += u64::from(len_bytes);
            left.len_bytes -= len_bytes;
        }
    }
    pieces.extend((left.len_bytes > 0).then_some(left));
    pieces
}

/// What must become of the writable bytes and of the disk; gives the status, if there is room for one,
/// and the used length.
fn carry_out(
    request: &Request,
    writable: &mut [u8],
    disk: &mut [u8],
    readonly: bool,
    features: u64,
) -> (Option<u8>, usize) {
    let Some((status, data)) = writable.split_last_mut() else { return (None, 0) };
    let done = answer(&request.readable, data, disk, readonly, features);
    *status = done.err().unwrap_or(OK);
    let written = done.unwrap_or(0);
    // The status byte counts where it follows what was written.
    (Some(*status), written + usize::from(written == data.len()))
}

/// Bytes of data written, or the status of a failure.
fn answer(
    readable: &[u8],
    data: &mut [u8],
    disk: &mut [u8],
    readonly: bool,
    features: u64,
) -> Result<usize, u8> {
    let (header, out) = readable.split_at_checked(16).ok_or(IOERR)?;
    let kind = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
    let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
    match kind {
        IN => {
            let range = range(sector, data.len())?;
            data.copy_from_slice(&disk[range]);
            Ok(data.len())
        }
        OUT if readonly => Err(IOERR),
        OUT => {
            disk[range(sector, out.len())?].copy_from_slice(out);
            Ok(0)
        }
        FLUSH => Ok(0),
        GET_ID => {
            data.get_mut(..20).ok_or(IOERR)?.copy_from_slice(ID);
            Ok(20)
        }
        DISCARD if features & F_DISCARD != 0 => zero(out, 0, disk, readonly),
        WRITE_ZEROES if features & F_WRITE_ZEROES != 0 => zero(out, 1, disk, readonly),
        _ => Err(UNSUPP),
    }
}

fn range(sector: u64, bytes: usize) -> Result<std::ops::Range<usize>, u8> {
    let end = u128::from(sector) * SECTOR as u128 + bytes as u128;
    if !bytes.is_multiple_of(SECTOR) || end > (SECTORS * SECTOR) as u128 {
        return Err(IOERR);
    }
    Ok(end as usize - bytes..end as usize)
}

/// What is discarded in a file reads as zero as well.
fn zero(out: &[u8], known: u32, disk: &mut [u8], readonly: bool) -> Result<usize, u8> {
    let mut ranges = Vec::new();
    let mut wrong = readonly
        || out.is_empty()
        || !out.len().is_multiple_of(SEGMENT_BYTES)
        || out.len() > MAX_SEGMENTS * SEGMENT_BYTES;
    for segment in out.chunks_exact(SEGMENT_BYTES).take(MAX_SEGMENTS) {
        let sector = u64::from_le_bytes(segment[..8].try_into().expect("8 bytes"));
        let sectors = u32::from_le_bytes(segment[8..12].try_into().expect("4 bytes"));
        let flags = u32::from_le_bytes(segment[12..].try_into().expect("4 bytes"));
        if flags & !known != 0 {
            return Err(UNSUPP);
        }
        match range(sector, sectors as usize * SECTOR) {
            Ok(range) => ranges.push(range),
            Err(_) => wrong = true,
        }
    }
    if wrong {
        return Err(IOERR);
    }
    ranges.into_iter().for_each(|range| disk[range].fill(0));
    Ok(0)
}
