//! What only a try tells: whether a guest's IA32_TSC_DEADLINE reaches Pollux where the local APIC is
//! Pollux's own. Some KVMs take the write on a fast path that looks neither at the MSR filter nor at
//! whether there is a local APIC in the kernel, and drop it; a guest that relies on it then waits
//! for ever. Where it does not come through, the guest is not offered that timer mode.

use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::vm::leave_apic_msrs;

const IA32_TSC_DEADLINE: u32 = 0x6e0;
const PAGE_BYTES: usize = 0x1000;
/// Real mode: mov ecx, IA32_TSC_DEADLINE; mov eax, 1; xor edx, edx; wrmsr; hlt.
const CODE: [u8; 18] = [
    0x66, 0xb9, 0xe0, 0x06, 0x00, 0x00, 0x66, 0xb8, 0x01, 0x00, 0x00, 0x00, 0x31, 0xd2, 0x0f, 0x30,
    0xf4, 0xf4,
];

/// Whether a guest's writes of IA32_TSC_DEADLINE exit to user space.
pub fn tsc_deadline_exits(kvm: &Kvm) -> bool {
    attempt(kvm).unwrap_or(false)
}

/// `None`: a step failed.
fn attempt(kvm: &Kvm) -> Option<bool> {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), PAGE_BYTES)]).ok()?;
    memory.write_slice(&CODE, GuestAddress(0)).ok()?;
    let vm = kvm.create_vm().ok()?;
    leave_apic_msrs(&vm).ok()?;
    let region = kvm_userspace_memory_region {
        memory_size: PAGE_BYTES as u64,
        userspace_addr: memory.get_host_address(GuestAddress(0)).ok()? as u64,
        ..Default::default()
    };
    // SAFETY: one page that is mapped until after the VM is gone: `memory` is dropped last.
    unsafe { vm.set_user_memory_region(region) }.ok()?;
    let mut vcpu = vm.create_vcpu(0).ok()?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).ok()?).ok()?;
    let mut sregs = vcpu.get_sregs().ok()?;
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).ok()?;
    vcpu.set_regs(&kvm_regs { rflags: 2, ..kvm_regs::default() }).ok()?;
    let exit = vcpu.run().ok()?;
    Some(matches!(exit, VcpuExit::X86Wrmsr(msr) if msr.index == IA32_TSC_DEADLINE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_try_gives_an_answer_on_this_kvm() {
        let kvm = Kvm::new().expect("this test needs /dev/kvm");
        assert!(attempt(&kvm).is_some());
    }
}
