//! `--halt passthrough`: HLT stays in the guest, whose host CPU then waits for the next interrupt.
//! KVM sees no halts, so it polls for none and counts none.

use kvm_bindings::{KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_HLT, kvm_enable_cap};

use crate::builder::BuildError;
use crate::config::ConfigError;
use crate::vm::{Vm, kvm_error};

/// Makes HLT stay in the guest. Before the first vCPU.
///
/// # Errors
/// This KVM does not allow it.
pub fn enable(vm: &Vm) -> Result<(), BuildError> {
    // What is allowed is asked of the VM and not of the system where KVM tells the two apart.
    let allowed = vm.fd.check_extension_raw(KVM_CAP_X86_DISABLE_EXITS.into());
    if !allows_hlt(allowed) {
        let problem = "this KVM does not let HLT stay in the guest (KVM_CAP_X86_DISABLE_EXITS with \
                       KVM_X86_DISABLE_EXITS_HLT)";
        return Err(ConfigError::new("--halt", "passthrough", problem)
            .hint("use kernel; pollux doctor tells what this KVM can do")
            .into());
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_DISABLE_EXITS, ..Default::default() };
    cap.args[0] = KVM_X86_DISABLE_EXITS_HLT.into();
    Ok(vm.fd.enable_cap(&cap).map_err(kvm_error("leave HLT to the guest"))?)
}

/// Whether what KVM says of `KVM_CAP_X86_DISABLE_EXITS`, a mask of exits, has HLT in it.
pub fn allows_hlt(capability: i32) -> bool {
    u32::try_from(capability).is_ok_and(|mask| mask & KVM_X86_DISABLE_EXITS_HLT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mask_with_hlt_allows_it() {
        assert!(allows_hlt(2) && allows_hlt(0xf));
        assert!(!allows_hlt(0) && !allows_hlt(1 | 4 | 8) && !allows_hlt(-1));
    }
}
