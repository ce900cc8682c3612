//! A system call that is not on its thread's list.
//!
//! The kernel does not carry it out but sends SIGSYS (seccomp(2), `SECCOMP_RET_TRAP`). The handler
//! has it fail with EPERM, notes the first one, and wakes the first thread, which ends the run in
//! order: disks flushed, terminal and host parameters as they were.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use syscalls::Sysno;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::register_signal_handler;

use super::Kind;

/// The first one, as [`Violation::to_bits`]; 0: none.
static FIRST: AtomicU64 = AtomicU64::new(0);
/// Readable once there was one.
static WAKE: OnceLock<EventFd> = OnceLock::new();

thread_local! {
    /// What list this thread has.
    static KIND: Cell<Option<Kind>> = const { Cell::new(None) };
}

/// A system call that was not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    kind: Kind,
    /// The call's number.
    call: u32,
    /// It was made in another way than a 64-bit program makes calls, and its number means another.
    foreign: bool,
}

impl Violation {
    const PRESENT: u64 = 1 << 63;
    const FOREIGN: u64 = 1 << 62;

    /// In a word that is never 0, for a signal handler can store no more at once.
    fn to_bits(self) -> u64 {
        let foreign = if self.foreign { Self::FOREIGN } else { 0 };
        Self::PRESENT | foreign | u64::from(self.kind as u8) << 32 | u64::from(self.call)
    }

    fn from_bits(bits: u64) -> Option<Self> {
        let kinds = [Kind::Main, Kind::Starter, Kind::Worker, Kind::Vcpu, Kind::Recorder];
        let kind = kinds.into_iter().find(|&kind| kind as u8 == (bits >> 32) as u8)?;
        let foreign = bits & Self::FOREIGN != 0;
        (bits != 0).then_some(Self { kind, call: bits as u32, foreign })
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let thread = match self.kind {
            Kind::Main => "the main thread",
            Kind::Starter => "the thread that starts workers",
            Kind::Worker => "a disk's worker",
            Kind::Vcpu => "a vCPU",
            Kind::Recorder => "the thread that writes the recording",
        };
        let number = self.call;
        let call = if self.foreign { None } else { Sysno::new(number as usize) };
        match call {
            Some(call) => write!(f, "the sandbox kept {thread} from the system call {call}")?,
            None => write!(f, "the sandbox kept {thread} from system call number {number}")?,
        }
        f.write_str(
            " and ended the run; if the guest did nothing bad, please report it, and use --sandbox off until then",
        )
    }
}

/// The part of a `siginfo_t` that SIGSYS has (`uapi/asm-generic/siginfo.h`).
#[repr(C)]
struct SigSys {
    signal: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    call_address: *mut libc::c_void,
    call: libc::c_int,
    arch: libc::c_uint,
}

/// `si_code` of a call that seccomp did not let through, and `AUDIT_ARCH_X86_64`.
const SYS_SECCOMP: libc::c_int = 1;
const X86_64: libc::c_uint = 0xc000_003e;

extern "C" fn handle(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler a siginfo_t, which for SIGSYS begins like this.
    let info = unsafe { &*info.cast::<SigSys>() };
    if info.code != SYS_SECCOMP {
        return;
    }
    // SAFETY: the third argument of such a handler is a ucontext_t, nobody else's while it runs.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    if let Some(result) = context.uc_mcontext.gregs.get_mut(libc::REG_RAX as usize) {
        *result = -i64::from(libc::EPERM);
    }
    let foreign = info.arch != X86_64;
    let violation =
        Violation { kind: KIND.get().unwrap_or(Kind::Main), call: info.call as u32, foreign };
    let first =
        FIRST.compare_exchange(0, violation.to_bits(), Ordering::Release, Ordering::Relaxed);
    if first.is_ok()
        && let Some(wake) = WAKE.get()
    {
        // A write(2), which every list has.
        let _ = wake.write(1);
    }
}

/// Installs the handler, once a process.
pub(super) fn install() -> io::Result<()> {
    if WAKE.get().is_none() {
        let _ = WAKE.set(EventFd::new(EFD_NONBLOCK)?);
    }
    register_signal_handler(libc::SIGSYS, handle).map_err(io::Error::from)
}

/// Says what list the current thread will have; false: it has one already.
pub(super) fn watch(kind: Kind) -> bool {
    KIND.replace(Some(kind)).is_none()
}

/// The first one of this process.
pub(super) fn first() -> Option<Violation> {
    Violation::from_bits(FIRST.load(Ordering::Acquire))
}

/// Readable once there was one.
pub(super) fn wake() -> RawFd {
    WAKE.get().map_or(-1, AsRawFd::as_raw_fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_fits_a_word_and_names_its_call() {
        assert_eq!(Violation::from_bits(0), None);
        for kind in [Kind::Main, Kind::Starter, Kind::Worker, Kind::Vcpu, Kind::Recorder] {
            for (call, foreign) in [(0, false), (41, false), (u32::MAX, true)] {
                let violation = Violation { kind, call, foreign };
                assert_eq!(Violation::from_bits(violation.to_bits()), Some(violation));
            }
        }
        let told = |call, foreign| Violation { kind: Kind::Vcpu, call, foreign }.to_string();
        assert!(
            told(libc::SYS_socket as u32, false).contains("a vCPU from the system call socket ")
        );
        assert!(told(libc::SYS_socket as u32, true).contains("number 41 "));
        assert!(told(99_999, false).contains("number 99999 "));
    }
}
