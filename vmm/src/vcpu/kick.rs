//! Getting a vCPU thread out of KVM_RUN: a signal whose handler sets `immediate_exit` in the
//! thread's own `kvm_run`, so that a kick between the last check and KVM_RUN is not lost.

use std::cell::Cell;
use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;

use kvm_bindings::kvm_run;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

thread_local! {
    /// The `immediate_exit` byte of this thread's vCPU, or null.
    static IMMEDIATE_EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

extern "C" fn handle_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let byte = IMMEDIATE_EXIT.get();
    if !byte.is_null() {
        // SAFETY: set by `attach` on this thread to a byte of a mapping that outlives the
        // attachment; `detach` clears it on this thread first.
        unsafe { (*byte).store(1, Ordering::Relaxed) };
    }
}

/// Installs the handler, once a process.
///
/// # Errors
/// The host refused the signal action.
pub fn install_handler() -> io::Result<()> {
    register_signal_handler(SIGRTMIN(), handle_kick).map_err(io::Error::from)
}

/// While this lives, kicks of the current thread reach its vCPU.
pub struct Attachment<'a> {
    immediate_exit: &'a AtomicU8,
}

impl<'a> Attachment<'a> {
    /// Attaches the current thread to the vCPU whose `kvm_run` this is.
    ///
    /// # Safety
    /// `run` points to the vCPU's mapped `kvm_run`, which outlives `'a`.
    pub unsafe fn new(run: *mut kvm_run) -> Self {
        // SAFETY: in bounds by the caller's promise; KVM and the handler access the byte
        // concurrently, hence an atomic.
        let immediate_exit = unsafe { AtomicU8::from_ptr(&raw mut (*run).immediate_exit) };
        IMMEDIATE_EXIT.set(immediate_exit);
        Self { immediate_exit }
    }

    /// Forgets kicks so far; call before looking at what the kick was for.
    pub fn clear(&self) {
        self.immediate_exit.store(0, Ordering::Relaxed);
    }
}

impl Drop for Attachment<'_> {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null());
    }
}

/// Makes the vCPU of `thread` leave KVM_RUN soon. A thread that has ended is left alone.
pub fn kick<T>(thread: &JoinHandle<T>) {
    // SAFETY: an unjoined thread's pthread_t is valid. The signal has a handler (installed before
    // any vCPU thread starts). An error means that the thread has ended.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
}
