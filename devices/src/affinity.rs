//! Pinning threads to host CPUs.

use std::{io, mem};

/// Pins the current thread to host CPU `cpu`.
///
/// # Errors
/// The CPU does not exist or this process may not run there.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: `cpu` is below CPU_SETSIZE; `set` is a live local.
    let status = unsafe {
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, mem::size_of_val(&set), &set)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The current thread's id, as /proc/self/task has it.
pub fn current_tid() -> i32 {
    // SAFETY: no memory is involved.
    unsafe { libc::gettid() }
}
