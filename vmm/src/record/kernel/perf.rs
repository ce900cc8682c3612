//! Samples of tracepoints by perf_event_open(2), of all threads of this process and of one CPU, in a ring
//! that the kernel fills and this process reads.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings::{
    PERF_FLAG_FD_CLOEXEC, PERF_RECORD_LOST, PERF_RECORD_SAMPLE, PERF_SAMPLE_RAW, PERF_SAMPLE_TID,
    PERF_SAMPLE_TIME, PERF_TYPE_TRACEPOINT, perf_event_attr, perf_event_mmap_page,
};
use perf_event_open_sys::{ioctls, perf_event_open};

/// Bytes of a ring's data, a power of two.
const RING_BYTES: usize = 512 << 10;
const HEADER_BYTES: usize = 8;

/// A tracepoint's number, and which of its events are wanted.
pub struct Wanted<'a> {
    pub id: u16,
    pub filter: Option<&'a str>,
}

/// What a ring has.
pub enum Record<'a> {
    /// A tracepoint was passed: when (CLOCK_MONOTONIC, in nanoseconds), by which thread, and its data.
    Sample { time_ns: u64, tid: i32, raw: &'a [u8] },
    /// So many found no room.
    Lost(u64),
}

/// The events of one CPU.
pub struct Ring {
    page: *mut perf_event_mmap_page,
    map_bytes: usize,
    /// Where the data begins and how long it is.
    data: *const u8,
    data_bytes: usize,
    /// The first one's is the ring. Closing them ends the events.
    fds: Vec<OwnedFd>,
    record: Vec<u8>,
}

// SAFETY: the mapping is this object's own and is bound to no thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Begins to record what the current thread, and all that it starts from now on, do on `cpu`.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn open(cpu: i32, wanted: &[Wanted<'_>]) -> io::Result<Self> {
        let mut fds: Vec<OwnedFd> = Vec::new();
        for Wanted { id, filter } in wanted {
            let fd = open_event(*id, cpu)?;
            if let Some(filter) = filter {
                let filter = CString::new(*filter).map_err(io::Error::other)?;
                // SAFETY: the kernel copies the string, which lives until then.
                check(unsafe { ioctls::SET_FILTER(fd.as_raw_fd(), filter.as_ptr().cast_mut()) })?;
            }
            fds.push(fd);
        }
        let first = fds.first().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: sysconf has no preconditions.
        let page_bytes = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) });
        let map_bytes = page_bytes.map_err(io::Error::other)? + RING_BYTES;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe {
            libc::mmap(ptr::null_mut(), map_bytes, protection, libc::MAP_SHARED, first, 0)
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = map.cast::<perf_event_mmap_page>();
        // SAFETY: the kernel filled the first page; the two fields do not change.
        let (offset, data_bytes) = unsafe { ((*page).data_offset, (*page).data_size) };
        let (offset, data_bytes) = (offset as usize, data_bytes as usize);
        // SAFETY: the kernel says that the data begins there, within the mapping.
        let data = unsafe { map.cast::<u8>().add(offset) }.cast_const();
        let ring = Self { page, map_bytes, data, data_bytes, fds, record: Vec::new() };
        if data_bytes == 0 || offset.saturating_add(data_bytes) > map_bytes {
            return Err(io::Error::other("a ring of another form"));
        }
        for fd in ring.fds.iter().skip(1) {
            // SAFETY: no memory is involved.
            check(unsafe { ioctls::SET_OUTPUT(fd.as_raw_fd(), first) })?;
        }
        Ok(ring)
    }

    /// Readable when the ring is half full.
    pub fn wake(&self) -> RawFd {
        self.fds.first().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Takes out what there is.
    pub fn drain(&mut self, mut each: impl FnMut(Record<'_>)) {
        // SAFETY: the page is mapped as long as `self` lives; both sides access the two fields atomically
        // (`uapi/linux/perf_event.h`).
        let (head, tail) = unsafe {
            let head = AtomicU64::from_ptr(&raw mut (*self.page).data_head);
            let tail = AtomicU64::from_ptr(&raw mut (*self.page).data_tail);
            (head, tail)
        };
        let (end, mut at) = (head.load(Ordering::Acquire), tail.load(Ordering::Relaxed));
        let mut record = std::mem::take(&mut self.record);
        while end.wrapping_sub(at) >= HEADER_BYTES as u64 {
            self.copy(at, HEADER_BYTES, &mut record);
            let mut fields = Fields(&record);
            let (kind, _misc, size) = (fields.u32(), fields.u16(), fields.u16());
            let size = usize::from(size);
            if size < HEADER_BYTES || size as u64 > end.wrapping_sub(at) {
                // Not the kernel's doing; but better than to read on.
                at = end;
                break;
            }
            self.copy(at, size, &mut record);
            let mut fields = Fields(record.get(HEADER_BYTES..).unwrap_or_default());
            if kind == PERF_RECORD_SAMPLE {
                let (_pid, tid, time_ns) = (fields.u32(), fields.u32() as i32, fields.u64());
                let length = fields.u32() as usize;
                let raw = fields.0.get(..length).unwrap_or_default();
                each(Record::Sample { time_ns, tid, raw });
            } else if kind == PERF_RECORD_LOST {
                let (_id, lost) = (fields.u64(), fields.u64());
                each(Record::Lost(lost));
            }
            at = at.wrapping_add(size as u64);
        }
        self.record = record;
        tail.store(at, Ordering::Release);
    }

    /// Copies `length` bytes from position `at`, which may go round the ring's end.
    fn copy(&self, at: u64, length: usize, to: &mut Vec<u8>) {
        to.clear();
        let start = (at % self.data_bytes as u64) as usize;
        let first = length.min(self.data_bytes - start);
        to.reserve(length);
        // SAFETY: both parts are within the data, `to` has room for them, and the kernel does not write
        // between tail and head.
        unsafe {
            ptr::copy_nonoverlapping(self.data.add(start), to.as_mut_ptr(), first);
            let rest = length - first;
            ptr::copy_nonoverlapping(self.data, to.as_mut_ptr().add(first), rest);
            to.set_len(length);
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nothing of it is used again.
        unsafe { libc::munmap(self.page.cast(), self.map_bytes) };
    }
}

fn open_event(id: u16, cpu: i32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_TRACEPOINT,
        size: size_of::<perf_event_attr>() as u32,
        config: id.into(),
        sample_type: u64::from(PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_RAW),
        clockid: libc::CLOCK_MONOTONIC,
        ..Default::default()
    };
    attr.__bindgen_anon_1.sample_period = 1;
    attr.__bindgen_anon_2.wakeup_watermark = RING_BYTES as u32 / 2;
    attr.set_inherit(1);
    attr.set_use_clockid(1);
    attr.set_watermark(1);
    // SAFETY: `attr` is a live local that the kernel reads, and writes only its size.
    let fd = check(unsafe { perf_event_open(&mut attr, 0, cpu, -1, PERF_FLAG_FD_CLOEXEC.into()) })?;
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Fields as they follow each other; zeros after the last one.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let Some((first, rest)) = self.0.split_first_chunk::<N>() else { return [0; N] };
        self.0 = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.array())
    }
}
