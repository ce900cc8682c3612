//! What the vCPUs' model-specific registers hold when the guest starts. KVM's own reset values serve
//! for the others.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use thiserror::Error;

const IA32_TSC: u32 = 0x10;
const IA32_SYSENTER_CS: u32 = 0x174;
const IA32_SYSENTER_ESP: u32 = 0x175;
const IA32_SYSENTER_EIP: u32 = 0x176;
const IA32_MISC_ENABLE: u32 = 0x1a0;
const IA32_PAT: u32 = 0x277;
const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const SYSCALL_MASK: u32 = 0xc000_0084;
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// Fast string operations (Intel SDM volume 4, IA32_MISC_ENABLE bit 0).
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// The reset value (Intel SDM volume 3, 12.12.4): WB, WT, UC-, UC, twice.
const PAT_RESET: u64 = 0x0007_0406_0007_0406;
/// MTRRs on (bit 11), default type write-back (6), as firmware leaves them: a guest that finds them
/// off complains, and runs uncached.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// A register to set.
struct BootMsr {
    index: u32,
    value: u64,
    /// Not every KVM and CPU has it, and the guest starts without it.
    optional: bool,
}

/// KVM refused a register that a guest needs.
#[derive(Debug, Error)]
pub enum MsrError {
    /// KVM refused this one.
    #[error("KVM refused to set MSR {index:#x} to {value:#x}")]
    Refused {
        /// Its number.
        index: u32,
        /// The value refused.
        value: u64,
    },
    /// The request itself failed.
    #[error("KVM_SET_MSRS: {0}")]
    Ioctl(#[from] kvm_ioctls::Error),
}

fn boot_msrs() -> Vec<BootMsr> {
    let needed = |index, value| BootMsr { index, value, optional: false };
    let optional = |index, value| BootMsr { index, value, optional: true };
    vec![
        needed(IA32_SYSENTER_CS, 0),
        needed(IA32_SYSENTER_ESP, 0),
        needed(IA32_SYSENTER_EIP, 0),
        needed(STAR, 0),
        needed(LSTAR, 0),
        needed(CSTAR, 0),
        needed(SYSCALL_MASK, 0),
        needed(KERNEL_GS_BASE, 0),
        needed(IA32_PAT, PAT_RESET),
        needed(IA32_MTRR_DEF_TYPE, MTRR_WRITE_BACK),
        optional(IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        optional(IA32_TSC, 0),
    ]
}

/// Sets the boot MSRs of one vCPU, each vCPU alike (a guest compares the MTRRs).
///
/// # Errors
/// [`MsrError`].
pub fn set(vcpu: &VcpuFd) -> Result<(), MsrError> {
    set_with(&boot_msrs(), |msrs| vcpu.set_msrs(msrs))
}

/// KVM_SET_MSRS stops at the first register it refuses and returns how many it has set.
fn set_with(
    msrs: &[BootMsr],
    mut set: impl FnMut(&Msrs) -> Result<usize, kvm_ioctls::Error>,
) -> Result<(), MsrError> {
    let mut rest = msrs;
    while !rest.is_empty() {
        let entries: Vec<kvm_msr_entry> = rest
            .iter()
            .map(|msr| kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() })
            .collect();
        let refused = |msr: &BootMsr| MsrError::Refused { index: msr.index, value: msr.value };
        // A dozen entries are far below the structure's limit.
        let Ok(batch) = Msrs::from_entries(&entries) else { return Err(refused(&rest[0])) };
        let set_count = set(&batch)?;
        match rest.get(set_count) {
            Some(msr) if !msr.optional => return Err(refused(msr)),
            Some(_) => rest = &rest[set_count + 1..],
            None => break,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn msr(index: u32, optional: bool) -> BootMsr {
        BootMsr { index, value: 0, optional }
    }

    /// A KVM that refuses the registers `refused`, and what it was made to set.
    fn run(msrs: &[BootMsr], refused: &[u32]) -> (Result<(), MsrError>, Vec<u32>) {
        let mut seen = Vec::new();
        let result = set_with(msrs, |batch| {
            for (count, entry) in batch.as_slice().iter().enumerate() {
                if refused.contains(&entry.index) {
                    return Ok(count);
                }
                seen.push(entry.index);
            }
            Ok(batch.as_slice().len())
        });
        (result, seen)
    }

    #[test]
    fn a_refused_optional_register_does_not_keep_the_others_from_being_set() {
        let msrs = [msr(1, false), msr(2, true), msr(3, false), msr(4, true)];
        let (result, seen) = run(&msrs, &[2, 4]);
        assert!(result.is_ok());
        assert_eq!(seen, [1, 3]);
    }

    #[test]
    fn a_refused_needed_register_is_named() {
        let (result, _) = run(&[msr(1, true), msr(0x2ff, false)], &[1, 0x2ff]);
        assert_eq!(result.unwrap_err().to_string(), "KVM refused to set MSR 0x2ff to 0x0");
    }

    #[test]
    fn memory_is_write_back_by_default() {
        let msrs = boot_msrs();
        let mtrr = msrs.iter().find(|msr| msr.index == IA32_MTRR_DEF_TYPE).unwrap();
        assert_eq!(mtrr.value, 0x806);
    }
}
