//! A request as a sequence of steps, each one system call: the same for every engine, whether it
//! makes the call itself or has io_uring make it.
//!
//! `next` gives the step, `advance` takes its result: it continues short transfers, goes on to the
//! next range, and falls back where a file cannot do what was asked.

use std::alloc::Layout;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;

use devices::virtio::queue::GuestBuf;
use vm_memory::VolatileSlice;

use crate::disk::{DirectAlignment, Disk};
use crate::request::{Action, Range, Request, Status};

/// The most buffers of one call (the kernel's `UIO_MAXIOV`).
const MAX_IOVECS: usize = 1024;
/// The most bytes of a bounce buffer: a longer transfer goes in pieces, so that a guest cannot have
/// the host allocate what it likes.
const MAX_BOUNCE_BYTES: u64 = 128 << 10;
/// The most calls in a row that may end with EAGAIN or EINTR.
const MAX_RETRIES: u32 = 1000;

/// A page of zeros, and how many times over it is written by one call.
#[repr(align(4096))]
struct ZeroPage([u8; 4096]);
static ZERO_PAGE: ZeroPage = ZeroPage([0; 4096]);
const MAX_ZERO_PAGES: u64 = 64;

/// One system call.
pub(crate) enum Step {
    Transfer(Transfer),
    /// `fallocate`.
    Allocate {
        mode: i32,
        range: Range,
    },
    /// `BLKDISCARD`.
    DiscardDevice(Range),
    /// `fdatasync`.
    Sync,
}

/// `preadv2` or `pwritev2`. The buffers belong to the job it came from, and stay where they are
/// until that is advanced or dropped.
pub(crate) struct Transfer {
    pub(crate) write: bool,
    /// Through [`Disk::buffered_fd`], not [`Disk::fd`].
    pub(crate) buffered: bool,
    pub(crate) iovecs: *const libc::iovec,
    pub(crate) count: u32,
    pub(crate) offset_bytes: u64,
    /// 0 or `RWF_DSYNC`.
    pub(crate) flags: i32,
}

impl Transfer {
    pub(crate) fn fd(&self, disk: &Disk) -> RawFd {
        if self.buffered { disk.buffered_fd() } else { disk.fd() }
    }

    /// Makes the call, with `flags` besides its own. The error is an errno.
    pub(crate) fn run(&self, disk: &Disk, flags: i32) -> Result<u64, i32> {
        let Ok(offset) = i64::try_from(self.offset_bytes) else {
            return Err(libc::EINVAL);
        };
        let (fd, count, flags) = (self.fd(disk), self.count as i32, self.flags | flags);
        let moved = if self.write {
            // SAFETY: `iovecs` are `count` buffers of guest RAM, of the zero page or of a bounce
            // buffer, all alive as long as the job, which outlives the call.
            unsafe { libc::pwritev2(fd, self.iovecs, count, offset, flags) }
        } else {
            // SAFETY: as above; only buffers the guest made writable, or a bounce buffer.
            unsafe { libc::preadv2(fd, self.iovecs, count, offset, flags) }
        };
        u64::try_from(moved).map_err(|_| errno())
    }
}

impl Step {
    /// Makes the call and waits for it. The error is an errno.
    pub(crate) fn run(&self, disk: &Disk) -> Result<u64, i32> {
        let done = match self {
            Step::Transfer(transfer) => return transfer.run(disk, 0),
            Step::Allocate { mode, range } => {
                disk.fallocate(*mode, range.offset_bytes, range.length_bytes)
            }
            Step::DiscardDevice(range) => {
                disk.discard_device_range(range.offset_bytes, range.length_bytes)
            }
            Step::Sync => disk.sync(),
        };
        done.map(|()| 0).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// How a range is made to read as zero, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zeroing {
    Punch,
    ZeroRange,
    Write,
}

/// A request under way.
pub(crate) struct Job {
    request: Request,
    /// The range of a discard or write-zeroes request that is being worked on.
    range_index: usize,
    /// Bytes of the transfer, or of that range, that are done.
    done_bytes: u64,
    /// What did not work for that range is not tried again for it.
    zeroing: Option<Zeroing>,
    synced: bool,
    retries: u32,
    /// The buffers of a step, where the chain's own do not fit. Empty as a rule.
    iovecs: Vec<libc::iovec>,
    bounce: Option<Bounce>,
}

impl Job {
    pub(crate) fn new(request: Request) -> Job {
        Job {
            request,
            range_index: 0,
            done_bytes: 0,
            zeroing: None,
            synced: false,
            retries: 0,
            iovecs: Vec::new(),
            bounce: None,
        }
    }

    /// The request back, with its buffers.
    pub(crate) fn into_request(self) -> Request {
        self.request
    }

    /// What is to be done now; `None`: the request is complete.
    pub(crate) fn next(&mut self, disk: &Disk) -> Option<Step> {
        match &self.request.action {
            Action::Read(range) => {
                let range = *range;
                self.transfer(disk, range, false, false)
            }
            Action::Write { range, durable } => {
                let (range, durable) = (*range, *durable);
                self.transfer(disk, range, true, durable)
            }
            Action::Flush => (!self.synced).then_some(Step::Sync),
            Action::Discard { ranges, durable } => match ranges.get(self.range_index) {
                Some(range) if disk.is_block_device() => Some(Step::DiscardDevice(*range)),
                Some(range) => Some(punch(*range)),
                None => (*durable && !self.synced).then_some(Step::Sync),
            },
            Action::WriteZeroes { ranges, durable } => match ranges.get(self.range_index) {
                Some((range, unmap)) => {
                    let range = *range;
                    let first = if *unmap { Zeroing::Punch } else { Zeroing::ZeroRange };
                    Some(self.zero(range, self.zeroing.unwrap_or(first)))
                }
                None => (*durable && !self.synced).then_some(Step::Sync),
            },
        }
    }

    /// Takes the result of the step `next` gave last, the error an errno. An error ends the
    /// request with that status.
    pub(crate) fn advance(&mut self, result: Result<u64, i32>) -> Result<(), Status> {
        match result {
            Err(libc::EAGAIN | libc::EINTR) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                return Ok(());
            }
            _ => self.retries = 0,
        }
        match &self.request.action {
            Action::Read(_) => {
                let moved = moved(result)?;
                if let Some(bounce) = self.bounce.take() {
                    let bufs = self.request.chain.writable();
                    bounce.copy(pieces(bufs, self.done_bytes, moved), Direction::ToGuest);
                }
                self.done_bytes = self.done_bytes.saturating_add(moved);
            }
            Action::Write { .. } => {
                self.bounce = None;
                self.done_bytes = self.done_bytes.saturating_add(moved(result)?);
            }
            Action::Flush => {
                result.map_err(|_| Status::IoError)?;
                self.synced = true;
            }
            Action::Discard { ranges, .. } => {
                result.map_err(refusal)?;
                if self.range_index < ranges.len() {
                    self.range_index += 1;
                } else {
                    self.synced = true;
                }
            }
            Action::WriteZeroes { ranges, .. } => {
                let Some((range, unmap)) = ranges.get(self.range_index) else {
                    result.map_err(|_| Status::IoError)?;
                    self.synced = true;
                    return Ok(());
                };
                let first = if *unmap { Zeroing::Punch } else { Zeroing::ZeroRange };
                let whole = match (self.zeroing.unwrap_or(first), result) {
                    (Zeroing::Write, result) => {
                        self.done_bytes = self.done_bytes.saturating_add(moved(result)?);
                        self.done_bytes >= range.length_bytes
                    }
                    (_, Ok(_)) => true,
                    (tried, Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) => {
                        let next = match tried {
                            Zeroing::Punch => Zeroing::ZeroRange,
                            _ => Zeroing::Write,
                        };
                        self.zeroing = Some(next);
                        false
                    }
                    (_, Err(_)) => return Err(Status::IoError),
                };
                if whole {
                    self.range_index += 1;
                    self.done_bytes = 0;
                    self.zeroing = None;
                }
            }
        }
        Ok(())
    }

    /// The rest of a transfer between the disk and the chain, or as much as fits one call.
    fn transfer(&mut self, disk: &Disk, range: Range, write: bool, durable: bool) -> Option<Step> {
        let left_bytes =
            range.length_bytes.checked_sub(self.done_bytes).filter(|left| *left > 0)?;
        let offset_bytes = range.offset_bytes.checked_add(self.done_bytes)?;
        let chain = &self.request.chain;
        let bufs = if write { chain.readable() } else { chain.writable() };
        let rest = || pieces(bufs, self.done_bytes, left_bytes);
        let flags = if durable { libc::RWF_DSYNC } else { 0 };

        let mut buffered = false;
        let mut bounces = false;
        if let Some(alignment) = disk.direct_alignment() {
            buffered = !(offset_bytes | left_bytes).is_multiple_of(alignment.offset);
            bounces = !buffered && !rest().all(|buf| fits(&buf, alignment));
        }
        let (iovecs, count) = if bounces {
            let alignment = disk.direct_alignment().map_or(1, |a| a.memory.max(a.offset));
            let bounce = Bounce::new(left_bytes.min(MAX_BOUNCE_BYTES.max(alignment)), alignment);
            if write {
                bounce.copy(rest(), Direction::FromGuest);
            }
            self.iovecs.clear();
            self.iovecs.push(bounce.iovec());
            self.bounce = Some(bounce);
            (self.iovecs.as_ptr(), 1)
        } else if self.done_bytes == 0 {
            (GuestBuf::as_iovecs(bufs), bufs.len().min(MAX_IOVECS))
        } else {
            let iovecs: Vec<libc::iovec> = rest()
                .take(MAX_IOVECS)
                .map(|buf| libc::iovec { iov_base: buf.as_ptr().cast(), iov_len: buf.len_bytes() })
                .collect();
            self.iovecs = iovecs;
            (self.iovecs.as_ptr(), self.iovecs.len())
        };
        let count = count as u32;
        Some(Step::Transfer(Transfer { write, buffered, iovecs, count, offset_bytes, flags }))
    }

    fn zero(&mut self, range: Range, how: Zeroing) -> Step {
        match how {
            Zeroing::Punch => punch(range),
            Zeroing::ZeroRange => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                Step::Allocate { mode, range }
            }
            Zeroing::Write => {
                let page_bytes = ZERO_PAGE.0.len() as u64;
                let base = ZERO_PAGE.0.as_ptr().cast_mut().cast();
                let mut left_bytes = range
                    .length_bytes
                    .saturating_sub(self.done_bytes)
                    .min(MAX_ZERO_PAGES * page_bytes);
                self.iovecs.clear();
                while left_bytes > 0 {
                    let now_bytes = left_bytes.min(page_bytes);
                    self.iovecs.push(libc::iovec { iov_base: base, iov_len: now_bytes as usize });
                    left_bytes -= now_bytes;
                }
                Step::Transfer(Transfer {
                    write: true,
                    buffered: true,
                    iovecs: self.iovecs.as_ptr(),
                    count: self.iovecs.len() as u32,
                    offset_bytes: range.offset_bytes.saturating_add(self.done_bytes),
                    flags: 0,
                })
            }
        }
    }
}

fn punch(range: Range) -> Step {
    Step::Allocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, range }
}

/// The bytes a transfer moved. None at all is the end of the file, where there should be data.
fn moved(result: Result<u64, i32>) -> Result<u64, Status> {
    result.ok().filter(|moved| *moved > 0).ok_or(Status::IoError)
}

fn refusal(errno: i32) -> Status {
    match errno {
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Status::Unsupported,
        _ => Status::IoError,
    }
}

/// Buffers from the `skip_bytes`th byte on, `limit_bytes` in all.
fn pieces(
    bufs: &[GuestBuf],
    mut skip_bytes: u64,
    mut limit_bytes: u64,
) -> impl Iterator<Item = GuestBuf> {
    bufs.iter().filter_map(move |buf| {
        let skip = skip_bytes.min(buf.len_bytes() as u64);
        skip_bytes -= skip;
        let rest = buf.split_at(skip as usize).1?;
        let take = limit_bytes.min(rest.len_bytes() as u64);
        limit_bytes -= take;
        rest.split_at(take as usize).0
    })
}

fn fits(buf: &GuestBuf, alignment: DirectAlignment) -> bool {
    (buf.as_ptr().addr() as u64).is_multiple_of(alignment.memory)
        && (buf.len_bytes() as u64).is_multiple_of(alignment.offset)
}

#[derive(Clone, Copy)]
enum Direction {
    ToGuest,
    FromGuest,
}

/// Aligned memory between guest buffers and `O_DIRECT`.
struct Bounce {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Bounce {}

impl Bounce {
    /// `len_bytes` must not be 0; `alignment_bytes` is a power of two.
    fn new(len_bytes: u64, alignment_bytes: u64) -> Bounce {
        let layout = Layout::from_size_align(len_bytes.max(1) as usize, alignment_bytes as usize)
            .unwrap_or(Layout::new::<ZeroPage>());
        // SAFETY: the size is not zero. Zeroed, for the kernel may fill less than all of it.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { std::alloc::handle_alloc_error(layout) };
        Bounce { base, layout }
    }

    fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.base.as_ptr().cast(), iov_len: self.layout.size() }
    }

    /// Copies as many bytes as both sides have.
    fn copy(&self, bufs: impl Iterator<Item = GuestBuf>, direction: Direction) {
        // SAFETY: the whole of the allocation, which lives as long as `self`; no call is under way
        // that uses it.
        let mut bounce = unsafe { VolatileSlice::new(self.base.as_ptr(), self.layout.size()) };
        for buf in bufs {
            // SAFETY: guest RAM, kept mapped by the engine for as long as it has the request.
            let guest = unsafe { VolatileSlice::new(buf.as_ptr(), buf.len_bytes()) };
            match direction {
                Direction::ToGuest => bounce.copy_to_volatile_slice(guest),
                Direction::FromGuest => guest.copy_to_volatile_slice(bounce),
            }
            let copied = buf.len_bytes().min(bounce.len());
            let Ok(rest) = bounce.offset(copied) else { return };
            bounce = rest;
        }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use devices::testkit;
    use virtio_bindings::virtio_blk::{
        VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
        VIRTIO_BLK_T_WRITE_ZEROES,
    };

    use super::*;
    use crate::config::{BlkConfig, EngineKind};
    use crate::request::Limits;
    use crate::request::tests::{chain, limits, request};

    const DURABLE: fn() -> Limits = || Limits { writeback: false, ..limits() };

    fn disk() -> (tempfile::NamedTempFile, Disk) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let path = file.path().to_path_buf();
        let config = BlkConfig { path, engine: EngineKind::Sync, ..BlkConfig::default() };
        let disk = Disk::open(&config).unwrap();
        (file, disk)
    }

    fn ranges(segments: &[(u64, u32, u32)]) -> Vec<u8> {
        let bytes = |&(sector, sectors, flags): &(u64, u32, u32)| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        segments.iter().flat_map(bytes).collect()
    }

    fn transfer(step: Option<Step>) -> Transfer {
        match step {
            Some(Step::Transfer(transfer)) => transfer,
            _ => panic!("not a transfer"),
        }
    }

    fn lengths(transfer: &Transfer) -> Vec<usize> {
        // SAFETY: the job the transfer came from is alive and was not advanced.
        let iovecs =
            unsafe { std::slice::from_raw_parts(transfer.iovecs, transfer.count as usize) };
        iovecs.iter().map(|iovec| iovec.iov_len).collect()
    }

    fn allocation(step: Option<Step>) -> (i32, u64, u64) {
        match step {
            Some(Step::Allocate { mode, range }) => (mode, range.offset_bytes, range.length_bytes),
            _ => panic!("not an allocation"),
        }
    }

    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

    #[test]
    fn a_short_transfer_goes_on_where_it_stopped_and_the_end_of_the_file_is_an_error() {
        let (memory, (_file, disk)) = (testkit::memory(1 << 20), disk());
        let mut job = Job::new(request(chain(&memory, VIRTIO_BLK_T_IN, &[], 4096), &limits()));
        let first = transfer(job.next(&disk));
        assert_eq!((first.offset_bytes, lengths(&first)), (0, vec![4096]));
        job.advance(Ok(1000)).unwrap();
        let rest = transfer(job.next(&disk));
        assert_eq!((rest.offset_bytes, lengths(&rest)), (1000, vec![3096]));
        assert_eq!(job.advance(Ok(0)), Err(Status::IoError));
        job.advance(Ok(3096)).unwrap();
        assert!(job.next(&disk).is_none());
    }

    #[test]
    fn interruptions_are_retried_but_not_for_ever() {
        let (memory, (_file, disk)) = (testkit::memory(1 << 20), disk());
        let mut job = Job::new(request(chain(&memory, VIRTIO_BLK_T_IN, &[], 512), &limits()));
        for errno in [libc::EAGAIN, libc::EINTR] {
            job.advance(Err(errno)).unwrap();
            assert_eq!(transfer(job.next(&disk)).offset_bytes, 0);
        }
        let ended = (0..2 * MAX_RETRIES).find_map(|_| job.advance(Err(libc::EAGAIN)).err());
        assert_eq!(ended, Some(Status::IoError));
        assert_eq!(job.advance(Err(libc::EIO)), Err(Status::IoError));
    }

    #[test]
    fn a_durable_write_is_on_stable_storage_when_its_call_returns() {
        let (memory, (_file, disk)) = (testkit::memory(1 << 20), disk());
        for (limits, flags) in [(limits(), 0), (DURABLE(), libc::RWF_DSYNC)] {
            let write = request(chain(&memory, VIRTIO_BLK_T_OUT, &[1; 1024], 0), &limits);
            let mut job = Job::new(write);
            assert_eq!(transfer(job.next(&disk)).flags, flags);
            job.advance(Ok(512)).unwrap();
            assert_eq!(transfer(job.next(&disk)).flags, flags, "the rest of it as well");
        }
    }

    #[test]
    fn a_flush_is_one_sync_and_fails_if_that_fails() {
        let (memory, (_file, disk)) = (testkit::memory(1 << 20), disk());
        let mut job = Job::new(request(chain(&memory, VIRTIO_BLK_T_FLUSH, &[], 0), &limits()));
        assert!(matches!(job.next(&disk), Some(Step::Sync)));
        assert_eq!(job.advance(Err(libc::EIO)), Err(Status::IoError));
        job.advance(Ok(0)).unwrap();
        assert!(job.next(&disk).is_none());
    }

    #[test]
    fn a_durable_discard_syncs_after_its_last_range() {
        let (memory, (_file, disk)) = (testkit::memory(1 << 20), disk());
        let data = ranges(&[(0, 8, 0), (16, 8, 0)]);
        let mut job = Job::new(request(chain(&memory, VIRTIO_BLK_T_DISCARD, &data, 0), &DURABLE()));
        assert_eq!(allocation(job.next(&disk)), (PUNCH, 0, 4096));
        job.advance(Ok(0)).unwrap();
        assert_eq!(allocation(job.next(&disk)), (PUNCH, 8192, 4096));
        job.advance(Ok(0)).unwrap();
        assert!(matches!(job.next(&disk), Some(Step::Sync)));
        job.advance(Ok(0)).unwrap();
        assert!(job.next(&disk).is_none());
    }

    #[test]
    fn what_the_file_cannot_do_is_unsupported_and_what_failed_is_an_error() {
        let memory = testkit::memory(1 << 20);
        let data = ranges(&[(0, 8, 0)]);
        for (errno, status) in [
            (libc::EOPNOTSUPP, Status::Unsupported),
            (libc::ENOTTY, Status::Unsupported),
            (libc::EIO, Status::IoError),
            (libc::ENOSPC, Status::IoError),
        ] {
            let discard = request(chain(&memory, VIRTIO_BLK_T_DISCARD, &data, 0), &limits());
            assert_eq!(Job::new(discard).advance(Err(errno)), Err(status), "errno {errno}");
        }
        let zeroes = request(chain(&memory, VIRTIO_BLK_T_WRITE_ZEROES, &data, 0), &limits());
        assert_eq!(Job::new(zeroes).advance(Err(libc::ENOSPC)), Err(Status::IoError));
    }

    #[test]
    fn zeroing_falls_back_from_holes_to_ranges_to_writing_zeros() {
        let (memory, (_file, disk)) = (testkit::memory(1 << 20), disk());
        let data = ranges(&[(0, 1024, 1), (1024 - 8, 8, 0)]);
        let zeroes = chain(&memory, VIRTIO_BLK_T_WRITE_ZEROES, &data, 0);
        let mut job = Job::new(request(zeroes, &limits()));
        assert_eq!(allocation(job.next(&disk)), (PUNCH, 0, 512 << 10));
        job.advance(Err(libc::EOPNOTSUPP)).unwrap();
        assert_eq!(allocation(job.next(&disk)), (ZERO, 0, 512 << 10));
        job.advance(Err(libc::EOPNOTSUPP)).unwrap();
        for offset_bytes in [0, 256 << 10] {
            let zeros = transfer(job.next(&disk));
            assert_eq!((zeros.write, zeros.offset_bytes), (true, offset_bytes));
            assert_eq!(lengths(&zeros), [4096; 64]);
            job.advance(Ok(256 << 10)).unwrap();
        }
        // The second range begins with the best way again, and may not punch.
        assert_eq!(allocation(job.next(&disk)), (ZERO, (1024 - 8) * 512, 4096));
        job.advance(Ok(0)).unwrap();
        assert!(job.next(&disk).is_none());
    }
}
