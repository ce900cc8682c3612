//! The capabilities of KVM that Pollux uses (Documentation/virt/kvm/api.rst).

use kvm_bindings as kvm;
use kvm_ioctls::Kvm;
use serde::Serialize;

/// What Pollux needs a capability for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Need {
    /// There is no guest without it.
    Required,
    /// Something is missing without it.
    Optional,
}

/// A capability, and whether it is there.
#[derive(Debug, Serialize)]
pub(super) struct Capability {
    /// Its name in the kernel's headers.
    pub(super) name: &'static str,
    /// What KVM says of it: 0 is no, and what another number means depends on the capability.
    pub(super) value: i32,
    /// Whether it is there.
    pub(super) present: bool,
    /// Whether guests can run without it.
    pub(super) need: Need,
    /// What Pollux uses it for.
    pub(super) purpose: &'static str,
    /// What to do about it, if it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<&'static str>,
}

const OLD_KERNEL: &str = "run a host kernel of 4.12 or later, with its own kvm_intel or kvm_amd";

type Entry = (u32, &'static str, Need, &'static str, &'static str);

const CAPABILITIES: [Entry; 24] = {
    use Need::{Optional, Required};
    [
        (kvm::KVM_CAP_USER_MEMORY, "KVM_CAP_USER_MEMORY", Required, "guest RAM", OLD_KERNEL),
        (
            kvm::KVM_CAP_IRQCHIP,
            "KVM_CAP_IRQCHIP",
            Required,
            "local and I/O APIC in the kernel (--halt kernel)",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_IRQ_ROUTING,
            "KVM_CAP_IRQ_ROUTING",
            Required,
            "routes from GSIs to MSI messages",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_IRQFD,
            "KVM_CAP_IRQFD",
            Required,
            "interrupts from a worker without a system call of the vCPU",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_IOEVENTFD,
            "KVM_CAP_IOEVENTFD",
            Required,
            "kicks that do not leave the kernel",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_IOEVENTFD_NO_LENGTH,
            "KVM_CAP_IOEVENTFD_NO_LENGTH",
            Optional,
            "kicks of any length by the fast path",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_IOEVENTFD_ANY_LENGTH,
            "KVM_CAP_IOEVENTFD_ANY_LENGTH",
            Required,
            "kicks by writes of any length",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_SIGNAL_MSI,
            "KVM_CAP_SIGNAL_MSI",
            Optional,
            "an MSI without a route",
            OLD_KERNEL,
        ),
        (kvm::KVM_CAP_EXT_CPUID, "KVM_CAP_EXT_CPUID", Required, "the guest's CPUID", OLD_KERNEL),
        (
            kvm::KVM_CAP_SET_TSS_ADDR,
            "KVM_CAP_SET_TSS_ADDR",
            Required,
            "where real mode runs on older Intel CPUs",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_SET_IDENTITY_MAP_ADDR,
            "KVM_CAP_SET_IDENTITY_MAP_ADDR",
            Required,
            "where unpaged mode runs on older Intel CPUs",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_MP_STATE,
            "KVM_CAP_MP_STATE",
            Required,
            "vCPUs that wait for INIT and SIPI",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_IMMEDIATE_EXIT,
            "KVM_CAP_IMMEDIATE_EXIT",
            Required,
            "stopping a vCPU without a race",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_TSC_DEADLINE_TIMER,
            "KVM_CAP_TSC_DEADLINE_TIMER",
            Optional,
            "the guest's cheapest timer",
            "guests use the one-shot APIC timer, and every wake costs more",
        ),
        (
            kvm::KVM_CAP_ADJUST_CLOCK,
            "KVM_CAP_ADJUST_CLOCK",
            Optional,
            "kvm-clock can be set",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_HALT_POLL,
            "KVM_CAP_HALT_POLL",
            Optional,
            "--halt-poll-ns: a poll window of the VM's own",
            "run a host kernel of 4.20 or later, or set the module parameter halt_poll_ns, which \
             holds for all VMs",
        ),
        (
            kvm::KVM_CAP_BINARY_STATS_FD,
            "KVM_CAP_BINARY_STATS_FD",
            Optional,
            "KVM's own halt, exit and interrupt counts",
            "run a host kernel of 5.14 or later",
        ),
        (
            kvm::KVM_CAP_X86_DISABLE_EXITS,
            "KVM_CAP_X86_DISABLE_EXITS",
            Optional,
            "HLT that does not leave the guest (--halt passthrough)",
            "run a host kernel of 4.17 or later, on a CPU whose KVM allows it",
        ),
        (
            kvm::KVM_CAP_SPLIT_IRQCHIP,
            "KVM_CAP_SPLIT_IRQCHIP",
            Optional,
            "a local APIC in the kernel with an I/O APIC outside of it",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_X86_USER_SPACE_MSR,
            "KVM_CAP_X86_USER_SPACE_MSR",
            Optional,
            "exits at MSRs (--halt user)",
            "run a host kernel of 5.10 or later",
        ),
        (
            kvm::KVM_CAP_X86_MSR_FILTER,
            "KVM_CAP_X86_MSR_FILTER",
            Optional,
            "seeing MSR_KVM_POLL_CONTROL (--halt user)",
            "run a host kernel of 5.10 or later",
        ),
        (
            kvm::KVM_CAP_SYNC_REGS,
            "KVM_CAP_SYNC_REGS",
            Optional,
            "interrupts without a system call of their own (--halt user)",
            "run a host kernel of 4.17 or later",
        ),
        (
            kvm::KVM_CAP_NR_VCPUS,
            "KVM_CAP_NR_VCPUS",
            Optional,
            "the number of vCPUs that KVM recommends",
            OLD_KERNEL,
        ),
        (
            kvm::KVM_CAP_MAX_VCPUS,
            "KVM_CAP_MAX_VCPUS",
            Optional,
            "the number of vCPUs that KVM allows",
            OLD_KERNEL,
        ),
    ]
};

/// Asks KVM for all of them.
pub(super) fn query(kvm: &Kvm) -> Vec<Capability> {
    CAPABILITIES
        .iter()
        .map(|&(number, name, need, purpose, advice)| {
            let value = kvm.check_extension_raw(number.into());
            let present = value > 0;
            let advice = (!present).then_some(advice);
            Capability { name, value, present, need, purpose, advice }
        })
        .collect()
}
