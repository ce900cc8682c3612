//! Interrupts without an in-kernel irqchip: the local APICs and the I/O APIC are
//! [`devices::irqchip`]'s, and a vCPU is told by [`VcpuWake`] that it has something to look at.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use devices::irqchip::Notify;
use vmm_sys_util::signal::SIGRTMIN;

use crate::vcpu::user::host_tsc;

/// In user space and awake: it looks at its local APIC before it sleeps or enters.
const AWAKE: u32 = 0;
/// In KVM_RUN: a signal gets it out.
const IN_GUEST: u32 = 1;
/// Parked.
const ASLEEP: u32 = 2;

/// How a vCPU is reached by whoever has an interrupt for it. To a vCPU that polls, this is one load:
/// the request itself is the store that it polls for.
#[derive(Debug, Default)]
pub struct VcpuWake {
    state: AtomicU32,
    thread: OnceLock<(Thread, libc::pthread_t)>,
    /// Who wakes a sleeper notes when.
    timed: AtomicBool,
    /// The host's time stamp counter when a sleeper was last woken.
    woken_tsc: AtomicU64,
}

impl VcpuWake {
    /// Says which thread the vCPU runs on. Until then, nobody is woken.
    pub fn attach(&self, thread: &JoinHandle<()>) {
        let _ = self.thread.set((thread.thread().clone(), thread.as_pthread_t()));
    }

    /// From now on, the time at which a sleeper is woken is noted.
    pub fn note_times(&self) {
        self.timed.store(true, Ordering::Relaxed);
    }

    /// The host's time stamp counter when the vCPU was last woken from its sleep by a notification.
    pub fn woken_tsc(&self) -> u64 {
        self.woken_tsc.load(Ordering::Relaxed)
    }

    /// The vCPU is about to enter the guest; it looks at its local APIC once more after this.
    pub fn enter(&self) {
        self.state.store(IN_GUEST, Ordering::SeqCst);
    }

    /// The vCPU is out of the guest.
    pub fn leave(&self) {
        self.state.store(AWAKE, Ordering::Relaxed);
    }

    /// Sleeps until notified, or for `timeout`, unless `woken` already. May return early.
    pub fn sleep(&self, woken: impl FnOnce() -> bool, timeout: Option<Duration>) {
        self.state.store(ASLEEP, Ordering::SeqCst);
        if !woken() {
            match timeout {
                Some(timeout) => thread::park_timeout(timeout),
                None => thread::park(),
            }
        }
        self.state.store(AWAKE, Ordering::Relaxed);
    }
}

impl Notify for VcpuWake {
    fn notify(&self) {
        let state = self.state.load(Ordering::SeqCst);
        if state == AWAKE {
            return;
        }
        // Whoever changes the state back is the one to wake it.
        let mine = self.state.compare_exchange(state, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
        let (Ok(_), Some((thread, handle))) = (mine, self.thread.get()) else { return };
        if state == ASLEEP {
            if self.timed.load(Ordering::Relaxed) {
                self.woken_tsc.store(host_tsc(), Ordering::Relaxed);
            }
            thread.unpark();
        } else {
            // SAFETY: the vCPU's thread is joined only after everything that notifies it is gone or
            // stopped, so the handle is valid; the signal has a handler.
            unsafe { libc::pthread_kill(*handle, SIGRTMIN()) };
        }
    }
}

/// A timer of the host that gets its thread's vCPU out of the guest.
pub struct KickTimer {
    timer: libc::timer_t,
    /// When it will go off, on the clock of who arms it; `u64::MAX`: not set.
    armed_ns: u64,
}

// SAFETY: a timer_t names a timer of the process; it is not bound to the thread that made it.
unsafe impl Send for KickTimer {}

impl KickTimer {
    /// By how much it goes off late, in nanoseconds.
    const MARGIN_NS: u64 = 1_000;

    /// A timer for the current thread.
    ///
    /// # Errors
    /// The host has no more timers.
    pub fn new() -> io::Result<Self> {
        // SAFETY: an all-zero sigevent is valid storage.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGRTMIN();
        event.sigev_notify_thread_id = devices::affinity::current_tid();
        let mut timer = std::ptr::null_mut();
        // SAFETY: both pointers are to live locals; the call fills `timer` or fails.
        let status = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { timer, armed_ns: u64::MAX })
    }

    /// Sees to a kick at `deadline_ns`, `now_ns` being the time now on the same clock. One that is
    /// set for earlier stays: the vCPU then comes out for nothing, and sets it anew. That is cheaper
    /// than a system call at each of the deadlines that a guest sets and forgets.
    pub fn arm(&mut self, deadline_ns: u64, now_ns: u64) {
        if (now_ns..=deadline_ns).contains(&self.armed_ns) {
            return;
        }
        // The host's timers are on another clock: rather a little late than too early, for nothing.
        let wait_ns = deadline_ns.saturating_sub(now_ns).saturating_add(Self::MARGIN_NS);
        let value = libc::timespec {
            tv_sec: (wait_ns / 1_000_000_000) as libc::time_t,
            tv_nsec: (wait_ns % 1_000_000_000) as libc::c_long,
        };
        let interval = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = libc::itimerspec { it_interval: interval, it_value: value };
        // SAFETY: the timer is ours and lives; `spec` is a live local; no old value is asked for.
        // It can fail only for arguments that these are not.
        unsafe {
            libc::timer_settime(self.timer, 0, &spec, std::ptr::null_mut());
        }
        self.armed_ns = deadline_ns;
    }
}

impl Drop for KickTimer {
    fn drop(&mut self) {
        // SAFETY: the timer is ours and is not used again.
        unsafe { libc::timer_delete(self.timer) };
    }
}
