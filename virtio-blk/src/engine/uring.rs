//! The page cache first, io_uring for what would wait.
//!
//! A read that the page cache can answer is a single `preadv2` with `RWF_NOWAIT`: it costs less
//! than a trip through the ring, and at queue depth 1 nothing can be overlapped with it anyway. A
//! file in memory (tmpfs) never waits but refuses that flag, and io_uring would hand its transfers
//! to kernel threads; it gets plain calls. So do writes into the page cache of a file system that
//! refuses the flag for them (ext4): the cache takes them at once unless it is full of what is not yet
//! written back, and then they would wait anywhere. Everything else goes to the ring, one submit a
//! batch. Where the quick try keeps failing, as on a cold disk, it is made only now and then.
//!
//! The ring is made when it is first needed: on a warm cache that is never, and its memory is
//! saved. Each request has at most one entry in it, so that the completion queue cannot overflow.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use devices::GuestMemory;
use io_uring::{IoUring, opcode, squeue, types};
use vmm_sys_util::eventfd::EventFd;

use super::job::{Job, Step, Transfer};
use super::{Done, Engine, sync};
use crate::disk::Disk;
use crate::request::{Request, Status};

/// The most entries of the submission queue; a longer batch is submitted in parts.
const MAX_SUBMISSIONS: u32 = 256;
/// So many quick tries in a row that would have waited …
const TRIES: u32 = 8;
/// … and so many transfers go to the ring before the next.
const PAUSE: u32 = 64;

/// `user_data` of the read of the kick eventfd; those of requests are slot numbers.
const KICK: u64 = u64::MAX;
/// `user_data` of its cancellation.
const CANCEL: u64 = u64::MAX - 1;

/// Finds out whether this process may use io_uring.
///
/// # Errors
/// What the kernel said: ENOSYS or EPERM where it is switched off.
pub(crate) fn check() -> io::Result<()> {
    build(1, 2).map(drop)
}

/// A plain ring. What the kernel offers beyond that was measured, and is not worth its lines here:
/// docs/measuring.md, "What io_uring's features are worth".
fn build(submissions: u32, completions: u32) -> io::Result<IoUring> {
    IoUring::builder().dontfork().setup_clamp().setup_cqsize(completions).build(submissions)
}

/// Whether a quick try is worth its system call.
#[derive(Default)]
struct Quick {
    /// In a row.
    failures: u32,
    /// Transfers that still go straight to the ring.
    pause: u32,
    /// The file cannot do it at all.
    never: bool,
}

impl Quick {
    fn worth_it(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        !self.never
    }

    fn learn(&mut self, result: &Result<u64, i32>) {
        match result {
            Err(libc::EAGAIN) => {
                self.failures += 1;
                if self.failures >= TRIES {
                    // One try after the pause, and if that fails, the next pause.
                    self.failures = TRIES - 1;
                    self.pause = PAUSE;
                }
            }
            Err(libc::EOPNOTSUPP) => self.never = true,
            _ => self.failures = 0,
        }
    }
}

/// See the module.
pub(crate) struct Uring {
    /// `None` until it is needed.
    ring: Option<IoUring>,
    /// It could be made when the disk was opened but not later: out of descriptors or memory.
    /// Requests are then carried out one by one.
    ring_failed: bool,
    queue_size: u32,
    disk: Arc<Disk>,
    /// Requests in the ring, by `user_data`.
    slots: Vec<Option<Job>>,
    free: Vec<usize>,
    quick_read: Quick,
    quick_write: Quick,
    done: Vec<Done>,
    /// Where the ring's read of the kick eventfd puts the number of kicks.
    kick_buffer: Box<AtomicU64>,
    kick_armed: bool,
    kicks: u64,
    draining: bool,
    /// Keeps the buffers of the requests mapped.
    _memory: GuestMemory,
}

impl Uring {
    pub(crate) fn new(disk: Arc<Disk>, memory: GuestMemory, queue_size: u32) -> Uring {
        let quick = || Quick { never: disk.is_direct(), ..Quick::default() };
        Uring {
            ring: None,
            ring_failed: false,
            queue_size,
            slots: Vec::new(),
            free: Vec::new(),
            quick_read: quick(),
            quick_write: quick(),
            done: Vec::new(),
            kick_buffer: Box::default(),
            kick_armed: false,
            kicks: 0,
            draining: false,
            disk,
            _memory: memory,
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Goes on with a job until it is complete or waits in the ring.
    fn proceed(&mut self, mut job: Job, mut quick: bool) -> Option<Done> {
        let status = loop {
            let Some(step) = job.next(&self.disk) else { break Status::Ok };
            let result = match &step {
                step if self.disk.never_waits() => step.run(&self.disk),
                Step::Transfer(transfer) if self.goes_to_the_cache(transfer) => {
                    step.run(&self.disk)
                }
                Step::Transfer(transfer) if quick => match self.try_quickly(transfer) {
                    Some(result) => {
                        // What follows a short transfer is not in the cache.
                        quick = false;
                        result
                    }
                    None => return self.enqueue(job, &step),
                },
                Step::Transfer(_) | Step::Allocate { .. } | Step::Sync => {
                    return self.enqueue(job, &step);
                }
                Step::DiscardDevice(_) => step.run(&self.disk),
            };
            if let Err(status) = job.advance(result) {
                break status;
            }
        };
        Some(Done { request: job.into_request(), status })
    }

    /// Whether this is a write into the page cache that cannot be tried without waiting.
    fn goes_to_the_cache(&self, transfer: &Transfer) -> bool {
        let cached = transfer.write && transfer.flags & libc::RWF_DSYNC == 0;
        cached && self.quick_write.never && !self.disk.is_direct()
    }

    /// The result, unless the transfer would wait.
    fn try_quickly(&mut self, transfer: &Transfer) -> Option<Result<u64, i32>> {
        let quick = if transfer.write { &mut self.quick_write } else { &mut self.quick_read };
        // What must be on stable storage waits for it.
        if transfer.flags & libc::RWF_DSYNC != 0 || !quick.worth_it() {
            return None;
        }
        let result = transfer.run(&self.disk, libc::RWF_NOWAIT);
        quick.learn(&result);
        // The ring finds out what any other error is about.
        result.is_ok().then_some(result)
    }

    /// Puts a step into the ring; carries the job out here if that is not possible.
    fn enqueue(&mut self, job: Job, step: &Step) -> Option<Done> {
        let (file, buffered_file) = (types::Fd(self.disk.fd()), types::Fd(self.disk.buffered_fd()));
        let entry = match step {
            Step::Transfer(transfer) => {
                let file = if transfer.buffered { buffered_file } else { file };
                let (iovecs, count) = (transfer.iovecs, transfer.count);
                if transfer.write {
                    opcode::Writev::new(file, iovecs, count)
                        .offset(transfer.offset_bytes)
                        .rw_flags(transfer.flags)
                        .build()
                } else {
                    opcode::Readv::new(file, iovecs, count).offset(transfer.offset_bytes).build()
                }
            }
            Step::Allocate { mode, range } => {
                opcode::Fallocate::new(buffered_file, range.length_bytes)
                    .offset(range.offset_bytes)
                    .mode(*mode)
                    .build()
            }
            Step::Sync => {
                opcode::Fsync::new(buffered_file).flags(types::FsyncFlags::DATASYNC).build()
            }
            Step::DiscardDevice(_) => return Some(sync::run(job, &self.disk)),
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        // SAFETY: what the entry points to belongs to the job or is static. The job stays in its
        // slot, and guest RAM mapped, until the entry's completion was seen: `drop` waits for it.
        if unsafe { self.add(&entry.user_data(slot as u64)) } {
            if let Some(place) = self.slots.get_mut(slot) {
                *place = Some(job);
            }
            None
        } else {
            self.free.push(slot);
            Some(sync::run(job, &self.disk))
        }
    }

    /// Adds an entry to the submission queue; false if there is no ring or no room to be had.
    ///
    /// # Safety
    /// What the entry points to must live until its completion was seen.
    unsafe fn add(&mut self, entry: &squeue::Entry) -> bool {
        if self.ring.is_none() && !self.ring_failed {
            self.ring = self.make_ring().ok();
            self.ring_failed = self.ring.is_none();
        }
        let Some(ring) = &mut self.ring else { return false };
        // SAFETY: by the contract of this function.
        if unsafe { ring.submission().push(entry) }.is_ok() {
            return true;
        }
        // Full: a batch longer than the queue.
        let _ = ring.submit();
        // SAFETY: by the contract of this function.
        unsafe { ring.submission().push(entry) }.is_ok()
    }

    fn make_ring(&self) -> io::Result<IoUring> {
        // Room for all requests, the read of the kick and its cancellation.
        let completions = (self.queue_size + 2).max(2 * MAX_SUBMISSIONS.min(self.queue_size));
        build(MAX_SUBMISSIONS.min(self.queue_size), completions)
    }

    /// Enters the kernel, once, and waits there for `wanted` completions.
    fn enter(&mut self, wanted: usize) {
        if let Some(ring) = &self.ring {
            // Interrupted, or short of memory: the entries stay, and the caller comes again.
            let _ = ring.submit_and_wait(wanted);
        }
    }

    /// Goes through the completion queue: finished requests to `done`, kicks counted, requests
    /// with more to do go on.
    fn collect(&mut self) {
        loop {
            let Some(ring) = &mut self.ring else { return };
            let Some(entry) = ring.completion().next() else { return };
            let result = entry.result();
            match entry.user_data() {
                KICK => {
                    self.kick_armed = false;
                    if result > 0 {
                        self.kicks += self.kick_buffer.load(Ordering::Relaxed);
                    }
                }
                CANCEL => {}
                slot => self.finish_step(slot as usize, result),
            }
        }
    }

    fn finish_step(&mut self, slot: usize, result: i32) {
        let Some(mut job) = self.slots.get_mut(slot).and_then(Option::take) else { return };
        self.free.push(slot);
        if self.draining {
            return;
        }
        let done = match job.advance(u64::try_from(result).map_err(|_| result.wrapping_neg())) {
            Ok(()) => self.proceed(job, false),
            Err(status) => Some(Done { request: job.into_request(), status }),
        };
        self.done.extend(done);
    }
}

impl Engine for Uring {
    fn push(&mut self, request: Request) -> Option<Done> {
        self.proceed(Job::new(request), true)
    }

    fn submit(&mut self) {
        if let Some(ring) = &mut self.ring
            && !ring.submission().is_empty()
        {
            self.enter(0);
        }
    }

    fn ready(&mut self) -> bool {
        self.ring.as_mut().is_some_and(|ring| !ring.completion().is_empty())
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> u64 {
        self.collect();
        done.append(&mut self.done);
        std::mem::take(&mut self.kicks)
    }

    fn sleep(&mut self, kick: &EventFd) -> u64 {
        // Nothing in the ring: the cheapest sleep is to wait for the kick itself.
        if self.in_flight() == 0 && !self.kick_armed {
            return kick.read().unwrap_or(0);
        }
        if !self.kick_armed {
            let buffer = self.kick_buffer.as_ptr().cast::<u8>();
            let entry = opcode::Read::new(types::Fd(kick.as_raw_fd()), buffer, 8).build();
            // SAFETY: the buffer lives as long as the engine, whose `drop` waits for this read.
            self.kick_armed = unsafe { self.add(&entry.user_data(KICK)) };
        }
        self.enter(1);
        self.collect();
        std::mem::take(&mut self.kicks)
    }

    fn drain(&mut self) {
        self.draining = true;
        while self.in_flight() > 0 {
            self.enter(1);
            self.collect();
        }
        if self.kick_armed {
            let entry = opcode::AsyncCancel::new(KICK).build().user_data(CANCEL);
            // SAFETY: the entry points to nothing.
            while self.kick_armed && !unsafe { self.add(&entry) } {
                self.collect();
            }
        }
        while self.kick_armed {
            self.enter(1);
            self.collect();
        }
        self.done.clear();
        self.draining = false;
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.drain();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_tries_pause_where_they_keep_failing_and_come_back() {
        let mut quick = Quick::default();
        let mut tries = 0;
        for _ in 0..1000 {
            if quick.worth_it() {
                tries += 1;
                quick.learn(&Err(libc::EAGAIN));
            }
        }
        assert_eq!(tries, TRIES + (1000 - TRIES) / (PAUSE + 1));
        while !quick.worth_it() {}
        quick.learn(&Ok(4096));
        for _ in 0..TRIES {
            assert!(quick.worth_it(), "one success, and all is forgiven");
            quick.learn(&Err(libc::EAGAIN));
        }
        assert!(!quick.worth_it());
    }

    #[test]
    fn quick_tries_end_where_the_file_cannot() {
        let mut quick = Quick::default();
        quick.learn(&Err(libc::EOPNOTSUPP));
        assert!((0..1000).all(|_| !quick.worth_it()));
    }
}
