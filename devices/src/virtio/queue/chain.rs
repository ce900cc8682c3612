//! A descriptor chain, resolved to host memory.

use std::fmt;

use vm_memory::VolatileSlice;

/// A mapped run of guest RAM, never empty. It has the layout of an `iovec`, so that a slice of them
/// goes to the kernel as it is.
///
/// It is valid while the [`GuestMemory`](crate::GuestMemory) it was resolved from lives. Whoever
/// keeps one beyond the life of its [`Queue`](super::Queue) keeps a clone of that as well. The
/// guest may change the contents at any time: read what matters once, into memory of one's own.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct GuestBuf(libc::iovec);

// SAFETY: a GuestBuf is an address and a length. All access through it is unsafe or, within this
// crate, volatile; guest memory is shared with the vCPUs in any case.
unsafe impl Send for GuestBuf {}
// SAFETY: as above.
unsafe impl Sync for GuestBuf {}

impl GuestBuf {
    /// `base` to `base + len_bytes` must lie in a mapping of guest RAM.
    pub(super) fn new(base: *mut u8, len_bytes: usize) -> GuestBuf {
        GuestBuf(libc::iovec { iov_base: base.cast(), iov_len: len_bytes })
    }

    /// The length in bytes.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.0.iov_len
    }

    /// The first byte, in this process's memory.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// The buffers as the kernel takes them; as many as `bufs` has.
    #[inline]
    pub fn as_iovecs(bufs: &[GuestBuf]) -> *const libc::iovec {
        bufs.as_ptr().cast()
    }

    /// The first `mid_bytes` bytes and the rest; either part is `None` if it would be empty, and
    /// what lies past the end counts to the first.
    pub fn split_at(self, mid_bytes: usize) -> (Option<GuestBuf>, Option<GuestBuf>) {
        let mid_bytes = mid_bytes.min(self.len_bytes());
        let part = |from: usize, len_bytes: usize| {
            (len_bytes > 0).then(|| GuestBuf::new(self.as_ptr().wrapping_add(from), len_bytes))
        };
        (part(0, mid_bytes), part(mid_bytes, self.len_bytes() - mid_bytes))
    }

    fn as_volatile(&self) -> VolatileSlice<'_> {
        // SAFETY: a GuestBuf lies in a mapping of guest RAM, which lives while the queue (and so
        // the chain) is in use; VolatileSlice makes no assumption about what else writes there.
        unsafe { VolatileSlice::new(self.as_ptr(), self.len_bytes()) }
    }
}

impl fmt::Debug for GuestBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestBuf({:p}, {} bytes)", self.as_ptr(), self.len_bytes())
    }
}

/// One byte of guest RAM that is still to be written; valid as long as a [`GuestBuf`].
#[derive(Debug)]
pub struct GuestByte(*mut u8);

// SAFETY: as for GuestBuf: an address of guest RAM, written with a volatile store only.
unsafe impl Send for GuestByte {}

impl GuestByte {
    /// Writes this byte and nothing else.
    #[inline]
    pub fn store(self, value: u8) {
        // SAFETY: the address is one byte of a mapping of guest RAM (a GuestBuf's last), alive
        // by the contract of GuestBuf.
        unsafe { self.0.write_volatile(value) }
    }
}

/// A descriptor chain: what the device may read, then what it may write.
///
/// Made once and filled by [`Queue::pop`](super::Queue::pop) again and again, so that popping
/// allocates nothing once it has grown. [`read`](Self::read) and [`write`](Self::write) consume
/// from the front, whatever the framing (virtio 1.2, 2.7.4.1).
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    readable: Part,
    writable: Part,
}

impl Chain {
    /// An empty chain.
    pub fn new() -> Chain {
        Chain::default()
    }

    pub(super) fn restart(&mut self, head: u16) {
        self.head = head;
        self.readable.clear();
        self.writable.clear();
    }

    #[inline]
    pub(super) fn append(&mut self, writable: bool, buf: GuestBuf) {
        let part = if writable { &mut self.writable } else { &mut self.readable };
        part.bufs.push(buf);
    }

    pub(super) fn has_writable(&self) -> bool {
        !self.writable.bufs.is_empty()
    }

    /// What [`Queue::push`](super::Queue::push) returns the chain by: the index of the first
    /// descriptor in a split queue, a number of the queue's own in a packed one. Less than the
    /// queue's size, and in a packed queue unlike that of any other chain that is out.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// What is left for the device to read.
    #[inline]
    pub fn readable(&self) -> &[GuestBuf] {
        self.readable.left()
    }

    /// What is left for the device to write.
    #[inline]
    pub fn writable(&self) -> &[GuestBuf] {
        self.writable.left()
    }

    /// The sum of [`readable`](Self::readable) in bytes.
    pub fn readable_bytes(&self) -> u64 {
        self.readable.left_bytes()
    }

    /// The sum of [`writable`](Self::writable) in bytes.
    pub fn writable_bytes(&self) -> u64 {
        self.writable.left_bytes()
    }

    /// Copies the next `out.len()` readable bytes and consumes them. False if there are fewer;
    /// then nothing is copied or consumed.
    pub fn read(&mut self, out: &mut [u8]) -> bool {
        if self.readable.left_bytes() < out.len() as u64 {
            return false;
        }
        let mut out = out;
        while !out.is_empty() {
            let Some(buf) = self.readable.take_front(out.len()) else { return false };
            let (now, later) = out.split_at_mut(buf.len_bytes());
            buf.as_volatile().copy_to(now);
            out = later;
        }
        true
    }

    /// Writes `bytes` to the front of the writable part and consumes it. False if there is less
    /// room; then nothing is written or consumed.
    pub fn write(&mut self, bytes: &[u8]) -> bool {
        if self.writable.left_bytes() < bytes.len() as u64 {
            return false;
        }
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let Some(buf) = self.writable.take_front(bytes.len()) else { return false };
            let (now, later) = bytes.split_at(buf.len_bytes());
            buf.as_volatile().copy_from(now);
            bytes = later;
        }
        true
    }

    /// Takes the last byte off the writable part, `None` if there is none.
    pub fn take_last_writable_byte(&mut self) -> Option<GuestByte> {
        let buf = self.writable.pop_back_byte()?;
        Some(GuestByte(buf))
    }
}

/// Buffers, of which those before `front` are consumed.
#[derive(Debug, Default)]
struct Part {
    bufs: Vec<GuestBuf>,
    front: usize,
}

impl Part {
    fn clear(&mut self) {
        self.bufs.clear();
        self.front = 0;
    }

    fn left(&self) -> &[GuestBuf] {
        self.bufs.get(self.front..).unwrap_or_default()
    }

    /// At most 2 * 32768 descriptors of less than 2^32 bytes: far from overflow.
    fn left_bytes(&self) -> u64 {
        self.left().iter().map(|buf| buf.len_bytes() as u64).sum()
    }

    /// Consumes at most `max_bytes` of the first buffer.
    fn take_front(&mut self, max_bytes: usize) -> Option<GuestBuf> {
        let slot = self.bufs.get_mut(self.front)?;
        let (taken, rest) = slot.split_at(max_bytes);
        match rest {
            Some(rest) => *slot = rest,
            None => self.front += 1,
        }
        taken
    }

    fn pop_back_byte(&mut self) -> Option<*mut u8> {
        if self.left().is_empty() {
            return None;
        }
        let slot = self.bufs.last_mut()?;
        // No buffer is empty.
        let (rest, last) = slot.split_at(slot.len_bytes().saturating_sub(1));
        match rest {
            Some(rest) => *slot = rest,
            None => {
                self.bufs.pop();
            }
        }
        Some(last?.as_ptr())
    }
}
