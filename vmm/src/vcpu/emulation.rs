//! Telling the user which instruction KVM could not run.

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// `KVM_INTERNAL_ERROR_EMULATION`: the instruction emulator gave up.
const SUBERROR_EMULATION: u32 = 1;
/// The longest x86 instruction.
const MAX_INSTRUCTION_BYTES: usize = 15;

/// One line about a `KVM_EXIT_INTERNAL_ERROR`: RIP, the instruction's bytes and what to do.
pub fn describe(name: &str, vcpu: &mut VcpuFd, memory: &GuestMemoryMmap) -> String {
    let run = vcpu.get_kvm_run();
    let suberror = suberror(run);
    let reported = reported_bytes(run);
    let rip = match vcpu.get_regs() {
        Ok(regs) => regs.rip,
        Err(error) => return format!("{name}: KVM stopped with an internal error; {error}"),
    };
    let bytes = reported.or_else(|| fetch(vcpu, memory, rip));
    let bytes = bytes.map_or_else(
        || "not readable".into(),
        |bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" "),
    );
    let what = if suberror == SUBERROR_EMULATION {
        "KVM cannot emulate an instruction".into()
    } else {
        format!("KVM stopped with internal error {suberror}")
    };
    format!(
        "{name}: {what} at RIP {rip:#x}, bytes {bytes}; `pollux doctor` tells whether this KVM \
         can run a stock kernel"
    )
}

fn suberror(run: &kvm_run) -> u32 {
    // SAFETY: KVM filled this member of the union: the exit reason is KVM_EXIT_INTERNAL_ERROR.
    unsafe { run.__bindgen_anon_1.internal.suberror }
}

/// The bytes KVM itself reports, where it does (`KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES`).
fn reported_bytes(run: &kvm_run) -> Option<Vec<u8>> {
    // SAFETY: as in `suberror`; emulation_failure is the same area read as what KVM documents
    // for this suberror, and every bit pattern is valid for it.
    let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
    if failure.suberror != SUBERROR_EMULATION || failure.ndata < 3 || failure.flags & 1 == 0 {
        return None;
    }
    // SAFETY: the flag says that the instruction bytes are the member that is filled.
    let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
    let len = usize::from(instruction.insn_size).min(MAX_INSTRUCTION_BYTES);
    instruction.insn_bytes.get(..len).filter(|bytes| !bytes.is_empty()).map(<[u8]>::to_vec)
}

/// Reads the instruction from guest memory.
fn fetch(vcpu: &VcpuFd, memory: &GuestMemoryMmap, rip: u64) -> Option<Vec<u8>> {
    let physical = vcpu.translate_gva(rip).ok().filter(|t| t.valid != 0)?.physical_address;
    let mut bytes = [0; MAX_INSTRUCTION_BYTES];
    let got = memory.read(&mut bytes, GuestAddress(physical)).ok()?;
    bytes.get(..got).map(<[u8]>::to_vec)
}
