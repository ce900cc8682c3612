//! Whether this thread was taken off its CPU, without a system call.
//!
//! The kernel's *restartable sequences* (rseq(2); `struct rseq` in Linux's `uapi/linux/rseq.h`), which
//! the C library registers for every thread, say so: a thread that was switched out, or got a signal,
//! while its `rseq_cs` points to a sequence that it is not in finds that pointer 0 when it goes on.

use std::ffi::CStr;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// `struct rseq_cs`: a sequence of no length, so that no thread is ever in it.
#[repr(C, align(32))]
struct Sequence {
    version: u32,
    flags: u32,
    start_ip: u64,
    post_commit_offset: u64,
    abort_ip: u64,
}

/// What the sequence's `abort_ip` points behind: the signature with which the C library registers on
/// x86. Nothing ever goes there.
#[used]
static SIGNATURE: u32 = 0x5305_3053;

static SEQUENCE: LazyLock<Sequence> = LazyLock::new(|| {
    let abort_ip = (&raw const SIGNATURE).wrapping_add(1).addr() as u64;
    Sequence { version: 0, flags: 0, start_ip: abort_ip, post_commit_offset: 0, abort_ip }
});

/// From a thread's pointer to its `struct rseq`; `None`: the kernel or the C library has none.
static AREA_OFFSET: LazyLock<Option<isize>> = LazyLock::new(|| {
    let size = symbol::<libc::c_uint>(c"__rseq_size")?;
    (size > 0).then(|| symbol::<isize>(c"__rseq_offset")).flatten()
});

/// A variable of the C library: `__rseq_*` are there since glibc 2.35.
fn symbol<T: Copy>(name: &CStr) -> Option<T> {
    // SAFETY: the name is a C string; looking it up changes nothing.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: glibc documents these variables with type T; they are constant once the program runs.
    (!address.is_null()).then(|| unsafe { *address.cast::<T>() })
}

/// `rseq_cs` of this thread's `struct rseq`.
fn sequence_field() -> Option<*const AtomicU64> {
    /// Of `rseq_cs`, in bytes.
    const SEQUENCE_OFFSET: isize = 8;
    let offset = (*AREA_OFFSET)?;
    let thread: *const u8;
    // SAFETY: the x86-64 ABI has the thread pointer itself in the first word of the thread's block.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, readonly, pure)) };
    Some(thread.wrapping_offset(offset + SEQUENCE_OFFSET).cast())
}

/// Watches the current thread from [`Watch::start`] on, until it is dropped.
pub struct Watch {
    field: *const AtomicU64,
}

impl Watch {
    /// `None`: this kernel or C library cannot tell.
    pub fn start() -> Option<Self> {
        let watch = Self { field: sequence_field()? };
        watch.restart();
        Some(watch)
    }

    /// Forgets what was.
    pub fn restart(&self) {
        self.field().store(ptr::from_ref(&*SEQUENCE).addr() as u64, Ordering::Relaxed);
    }

    /// Whether the thread was off its CPU, or got a signal, since the start. One load.
    pub fn was_interrupted(&self) -> bool {
        self.field().load(Ordering::Relaxed) == 0
    }

    fn field(&self) -> &AtomicU64 {
        // SAFETY: the area belongs to this thread (a `Watch` cannot be sent, for it has a raw pointer),
        // is aligned, and lives as long as the thread. Only this thread and the kernel on its behalf
        // write to it.
        unsafe { &*self.field }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.field().store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn a_thread_that_slept_was_off_its_cpu_and_one_that_ran_was_not() {
        // glibc 2.35 and Linux 4.18 have it; without them there is nothing to test.
        let Some(watch) = Watch::start() else { return };
        drop(watch);
        let calm =
            (0..1000).any(|_| !Watch::start().expect("there a moment ago").was_interrupted());
        assert!(calm, "no thread is interrupted all the time");
        let watch = Watch::start().expect("there a moment ago");
        thread::sleep(Duration::from_millis(1));
        assert!(watch.was_interrupted());
        assert!((0..1000).any(|_| {
            watch.restart();
            !watch.was_interrupted()
        }));
    }
}
