//! The KVM virtual machine: its creation, memory slots and the in-kernel irqchip.

use std::sync::Arc;

use devices::GuestMemory;
use kvm_bindings::{
    KVM_CAP_HALT_POLL, KVM_CAP_X86_USER_SPACE_MSR, kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{
    Cap, Kvm, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd,
};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::boot::layout;
use crate::config::Halt;
use crate::vcpu::user::MSR_KVM_POLL_CONTROL;

/// Why a VM could not be made or went on no longer. Every message is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// KVM lacks something without which there is no VM.
    #[error("this KVM lacks {0}; see `pollux doctor`")]
    Missing(&'static str),
    /// RAM could not be mapped.
    #[error("--memory: cannot map {total_bytes} bytes of guest memory: {why}")]
    Memory {
        /// The size asked for.
        total_bytes: usize,
        /// What the host said.
        why: String,
    },
    /// A KVM request failed.
    #[error("KVM refused to {what}: {why}")]
    Kvm {
        /// What was asked.
        what: &'static str,
        /// The error number.
        why: std::io::Error,
    },
    /// The host refused something that is not KVM's.
    #[error("cannot {what}: {why}")]
    Host {
        /// What was asked.
        what: &'static str,
        /// The error.
        why: std::io::Error,
    },
    /// The machine cannot be assembled as configured.
    #[error("{0}")]
    Machine(String),
}

/// Names the KVM request that failed.
pub fn kvm_error(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> VmError {
    move |error| VmError::Kvm { what, why: error.into() }
}

/// A VM with its RAM and, in this mode, the in-kernel irqchip.
pub struct Vm {
    /// `/dev/kvm`.
    pub kvm: Kvm,
    /// The VM; shared with what routes interrupts and binds notifications.
    pub fd: Arc<VmFd>,
    /// Guest RAM.
    pub memory: GuestMemory,
}

/// What a VM cannot do without.
const REQUIRED: [(Cap, &str); 5] = [
    (Cap::Ioeventfd, "ioeventfd (KVM_CAP_IOEVENTFD)"),
    (Cap::UserMemory, "user memory slots (KVM_CAP_USER_MEMORY)"),
    (Cap::ExtCpuid, "KVM_GET_SUPPORTED_CPUID (KVM_CAP_EXT_CPUID)"),
    (Cap::SetTssAddr, "KVM_SET_TSS_ADDR (KVM_CAP_SET_TSS_ADDR)"),
    (Cap::ImmediateExit, "immediate_exit (KVM_CAP_IMMEDIATE_EXIT)"),
];

/// What it needs besides where KVM has the local APIC.
const REQUIRED_IRQCHIP: [(Cap, &str); 3] = [
    (Cap::Irqchip, "an in-kernel irqchip (KVM_CAP_IRQCHIP)"),
    (Cap::IrqRouting, "interrupt routing (KVM_CAP_IRQ_ROUTING)"),
    (Cap::Irqfd, "irqfd (KVM_CAP_IRQFD)"),
];

/// What it needs besides where Pollux has the local APIC.
const REQUIRED_USER: [(Cap, &str); 3] = [
    (Cap::X86UserSpaceMsr, "exits at MSR accesses (KVM_CAP_X86_USER_SPACE_MSR)"),
    (Cap::X86MsrFilter, "an MSR filter (KVM_CAP_X86_MSR_FILTER)"),
    (Cap::SyncRegs, "vCPU events in KVM_RUN (KVM_CAP_SYNC_REGS)"),
];

/// MSRs that KVM would take for itself or drop although the local APIC is Pollux's. Those of x2APIC
/// mode need no filter: without a local APIC KVM has none.
const LEFT_TO_US: [u32; 3] = [0x1b, 0x6e0, MSR_KVM_POLL_CONTROL];

impl Vm {
    /// Creates a VM over `memory`; with an in-kernel local APIC and I/O APIC, unless `halt` says
    /// that they are Pollux's own.
    ///
    /// `halt_poll_ns`: this VM's largest poll window, in nanoseconds; `None` leaves the module's.
    ///
    /// # Errors
    /// A capability is missing or KVM refused a step.
    pub fn new(
        kvm: Kvm,
        memory: GuestMemory,
        halt: Halt,
        halt_poll_ns: Option<u32>,
    ) -> Result<Self, VmError> {
        let required: &[(Cap, &str)] = match halt {
            Halt::Kernel | Halt::Passthrough => &REQUIRED_IRQCHIP,
            Halt::User => &REQUIRED_USER,
        };
        for &(cap, name) in REQUIRED.iter().chain(required) {
            if !kvm.check_extension(cap) {
                return Err(VmError::Missing(name));
            }
        }
        let fd = Arc::new(kvm.create_vm().map_err(kvm_error("create a VM"))?);
        // Intel needs three pages and one page of its own below 4 GiB for real mode.
        fd.set_identity_map_address(layout::KVM_IDENTITY_MAP_START)
            .map_err(kvm_error("place the identity map"))?;
        fd.set_tss_address(layout::KVM_TSS_START as usize).map_err(kvm_error("place the TSS"))?;
        match halt {
            Halt::Kernel | Halt::Passthrough => {
                fd.create_irq_chip().map_err(kvm_error("create the irqchip"))?;
                if let Some(max_ns) = halt_poll_ns {
                    set_halt_poll_ns(&fd, max_ns)?;
                }
            }
            Halt::User => leave_apic_msrs(&fd)?,
        }
        let vm = Self { kvm, fd, memory };
        vm.register_memory()?;
        Ok(vm)
    }

    /// One memory slot a RAM region.
    fn register_memory(&self) -> Result<(), VmError> {
        for (slot, region) in (0u32..).zip(self.memory.iter()) {
            let host = region
                .get_host_address(MemoryRegionAddress(0))
                .map_err(|error| VmError::Machine(error.to_string()))?;
            let region = kvm_userspace_memory_region {
                slot,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: host as u64,
                flags: 0,
            };
            // SAFETY: the region is mapped for as long as `self.memory` lives, slots are distinct
            // and do not overlap because the regions of one GuestMemoryMmap do not.
            unsafe { self.fd.set_user_memory_region(region) }.map_err(|error| VmError::Memory {
                total_bytes: self.memory.iter().map(|region| region.len() as usize).sum(),
                why: format!("KVM does not take it: {error}"),
            })?;
        }
        Ok(())
    }
}

/// Sets the VM's largest poll window in KVM, in nanoseconds; from its vCPUs' next halts on.
///
/// # Errors
/// KVM has no such limit, or refused.
pub fn set_halt_poll_ns(fd: &VmFd, max_ns: u32) -> Result<(), VmError> {
    if fd.check_extension_raw(u64::from(KVM_CAP_HALT_POLL)) <= 0 {
        return Err(VmError::Missing("a halt-polling limit per VM (KVM_CAP_HALT_POLL)"));
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_HALT_POLL, ..Default::default() };
    cap.args[0] = u64::from(max_ns);
    fd.enable_cap(&cap).map_err(kvm_error("set halt_poll_ns"))
}

/// Makes accesses to the local APIC's MSRs and to MSR_KVM_POLL_CONTROL come to us.
///
/// # Errors
/// KVM refused.
pub fn leave_apic_msrs(fd: &VmFd) -> Result<(), VmError> {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
    cap.args[0] = u64::from((MsrExitReason::Inval | MsrExitReason::Filter).bits());
    fd.enable_cap(&cap).map_err(kvm_error("leave MSR accesses to user space"))?;
    let deny = [0];
    let ranges = LEFT_TO_US.map(|base| MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base,
        msr_count: 1,
        bitmap: &deny,
    });
    fd.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges)
        .map_err(kvm_error("filter MSR accesses"))
}
