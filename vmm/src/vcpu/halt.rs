//! The halt, a straight line.
//!
//! With the in-kernel irqchip (`--halt kernel`) a HLT never comes here: KVM polls for the vCPU's
//! window, at most the VM's `halt_poll_ns`, and then blocks the thread inside KVM_RUN; its counts
//! are in the binary statistics (see [`crate::stats::kvm`]).
//!
//! With Pollux's own (`--halt user`) it is KVM_EXIT_HLT, and [`halt`] is all there is to it: the
//! policy's window, the poller, the policy's update.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devices::irqchip::LocalApic;
use halt_poll::{Clock, WakeReason, WakeSource};

use super::preempted::Watch;
use super::user::{UserApic, host_tsc};
use crate::irq::user::VcpuWake;
use crate::lifecycle::End;
use crate::record::vcpu::record;

/// Where the kernel does not tell: a gap between two turns of the poll loop that is no turn's work, so
/// the thread was off its CPU. (Or the CPU was off its own: a host that is a guest itself.)
const PREEMPTED_NS: u64 = 100_000;

/// The guest has nothing to do until an interrupt: polls for one, then sleeps. `interrupts_enabled`
/// is the guest's interrupt flag; a guest that halts without it waits for an NMI.
pub fn halt(apic: &mut UserApic, interrupts_enabled: bool, stop: &AtomicBool) {
    let now = apic.now();
    let deadline_ns = apic.lapic.next_timer_deadline_ns(now);
    apic.params.follow(&mut apic.policy);
    let window_ns = apic.policy.window_ns();
    let halted = Halted {
        lapic: RefCell::new(&mut apic.lapic),
        wake: &apic.wake,
        stop,
        interrupts_enabled,
        watch: Watch::start(),
        last_turn_tsc: Cell::new(host_tsc()),
        preempted_tsc: u64::from(apic.tsc_khz).saturating_mul(PREEMPTED_NS) / 1_000_000,
    };
    let outcome = apic.poller.wait(&halted, &apic.clock, window_ns, deadline_ns);
    apic.policy.update(&outcome);
    apic.shared.halts.record(&outcome);
    if apic.recorder.is_some() {
        record(apic, now.ns, window_ns, &outcome);
    }
    apic.shared.halts.set_window_ns(apic.policy.uncut_window_ns());
    if outcome.wake == WakeReason::Deadline
        && let Some(deadline_ns) = deadline_ns
    {
        apic.shared.record_lateness(apic.clock.now_ns().saturating_sub(deadline_ns));
    }
}

/// A halted vCPU.
struct Halted<'a> {
    lapic: RefCell<&'a mut LocalApic>,
    wake: &'a VcpuWake,
    stop: &'a AtomicBool,
    interrupts_enabled: bool,
    watch: Option<Watch>,
    last_turn_tsc: Cell<u64>,
    preempted_tsc: u64,
}

impl WakeSource for Halted<'_> {
    fn woken(&self) -> Option<WakeReason> {
        if self.lapic.borrow_mut().has_wake_event(self.interrupts_enabled) {
            return Some(WakeReason::Event);
        }
        self.stop.load(Ordering::Acquire).then_some(WakeReason::Interrupted)
    }

    fn block(&self, timeout_ns: Option<u64>) {
        self.wake.sleep(|| self.woken().is_some(), timeout_ns.map(Duration::from_nanos));
        // The sleep itself is nobody's wish for the CPU.
        match &self.watch {
            Some(watch) => watch.restart(),
            None => self.last_turn_tsc.set(host_tsc()),
        }
    }

    /// Whoever had the CPU meanwhile may want it again.
    fn cpu_wanted(&self) -> bool {
        if let Some(watch) = &self.watch {
            return watch.was_interrupted();
        }
        let now = host_tsc();
        now.wrapping_sub(self.last_turn_tsc.replace(now)) > self.preempted_tsc
    }
}

/// What a KVM_EXIT_HLT means while the local APIC is in the kernel: KVM does not report halts then,
/// so the guest cannot be continued meaningfully.
pub fn unexpected_hlt(vcpu: u32) -> End {
    End::Failed(format!(
        "vcpu{vcpu}: KVM reported a HLT although its local APIC is in the kernel; this KVM is not \
         one Pollux knows"
    ))
}
