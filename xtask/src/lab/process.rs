//! Processes that end with this one, and the signals that end this one.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

/// From now on SIGINT, SIGTERM and SIGHUP are noted instead of ending the process at once, so that
/// it can clean up.
pub fn catch_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            let handler = note as extern "C" fn(libc::c_int);
            // SAFETY: the handler only stores into an atomic, which is async-signal-safe.
            unsafe { libc::signal(signal, handler as libc::sighandler_t) };
        }
    });
}

/// The signal that asked this process to end, if one did.
pub fn signalled() -> Option<i32> {
    Some(SIGNAL.load(Ordering::Relaxed)).filter(|&signal| signal != 0)
}

/// Makes a child that gets SIGKILL when the thread that starts it ends, however that comes about,
/// and that is in a process group of its own, so that a terminal's SIGINT comes to us alone.
pub fn die_with_parent(command: &mut Command) {
    command.process_group(0);
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// Kills a child's process group.
pub fn kill_group(leader: u32) {
    if let Ok(group) = libc::pid_t::try_from(leader) {
        // SAFETY: kill has no memory effects; the group is a child's that has not been waited for.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

/// The status a shell would give: 128 and the signal's number for a killed process.
pub fn exit_status(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}
