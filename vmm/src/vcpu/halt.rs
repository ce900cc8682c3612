//! The halt, a straight line.
//!
//! With the in-kernel irqchip (`--halt kernel`) a HLT never comes here: KVM polls for the vCPU's
//! window, at most the VM's `halt_poll_ns`, and then blocks the thread inside KVM_RUN; its counts
//! are in the binary statistics (see [`crate::stats::kvm`]). The user-mode loop around
//! KVM_EXIT_HLT gets its place in this module.

use crate::lifecycle::End;

/// What a KVM_EXIT_HLT means while the local APIC is in the kernel: KVM does not report halts then,
/// so the guest cannot be continued meaningfully.
pub fn unexpected_hlt(vcpu: u32) -> End {
    End::Failed(format!(
        "vcpu{vcpu}: KVM reported a HLT although its local APIC is in the kernel; this KVM is not \
         one Pollux knows"
    ))
}
