//! Whether this KVM can run a stock kernel, found by trying: guests of a few instructions each, in
//! 64-bit mode at privilege level 0, executing what every kernel executes. A KVM that emulates
//! kernel-mode code, instead of running it, stops at what its emulator lacks.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use serde::{Serialize, Serializer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::signal::register_signal_handler;

/// A guest that has not ended by then hangs.
const TIME_LIMIT: Duration = Duration::from_secs(1);
/// Interrupts `KVM_RUN` at the time limit.
const KICK_SIGNAL: libc::c_int = libc::SIGUSR1;

// Guest physical memory, all of it identity mapped.
const MEMORY_BYTES: usize = 0x10000;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const IDT: u64 = 0x4000;
const GDT: u64 = 0x5000;
const STACK_TOP: u64 = 0x8000;
const IMAGE: u64 = 0x8000;
const DATA: u64 = 0xa000;
/// Outside of guest memory: three pages of KVM's own.
const KVM_TSS: usize = 0xfffb_d000;

const VECTORS: u64 = 32;
const BREAKPOINT_VECTOR: u64 = 3;
/// Bytes between the entry points of two vectors in the image.
const VECTOR_STRIDE: u64 = 16;
const CODE_SELECTOR: u16 = 0x08;
const DATA_SELECTOR: u16 = 0x10;

const CR0_PE: u64 = 1 << 0;
const CR0_MP: u64 = 1 << 1;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_OSFXSR: u64 = 1 << 9;
const CR4_OSXMMEXCPT: u64 = 1 << 10;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Port on which a guest says whether its instruction did what it should.
const RESULT_PORT: u16 = 0xf4;
/// Port on which a guest names the vector of an unexpected exception.
const EXCEPTION_PORT: u16 = 0xf5;

std::arch::global_asm!(include_str!("tiny.S"));

/// The table at the end of `tiny.S`. Offsets are into the image.
#[repr(C)]
struct Image {
    start: *const u8,
    length: usize,
    breakpoint: u64,
    guests: [u64; 5],
}

unsafe extern "C" {
    static pollux_tiny_guests: Image;
}

/// What a tiny guest shows.
struct Guest {
    name: &'static str,
    /// What a kernel needs it for.
    purpose: &'static str,
}

/// In the order of the image's table.
const GUESTS: [Guest; 5] = [
    Guest { name: "long_mode", purpose: "arrive in 64-bit mode" },
    Guest { name: "cmpxchg16b", purpose: "the slab allocator's lockless fast path" },
    Guest { name: "int3", purpose: "a breakpoint and its handler: live patching of code at boot" },
    Guest { name: "fxrstor", purpose: "restore FPU state" },
    Guest { name: "xrstor", purpose: "restore extended FPU state at a context switch" },
];

/// How one tiny guest went.
#[derive(Debug, Serialize)]
pub(super) struct TinyRun {
    /// The instruction.
    pub(super) name: &'static str,
    /// What a kernel needs it for.
    pub(super) purpose: &'static str,
    /// What happened.
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

/// What happened to a tiny guest.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(super) enum Outcome {
    /// The instruction did what it should.
    Ok,
    /// The CPU does not have the instruction, and says so: no kernel would try it.
    NotOffered,
    /// `KVM_EXIT_INTERNAL_ERROR`.
    CannotEmulate {
        /// KVM's reason; 1 is an instruction it cannot emulate.
        suberror: u32,
        /// Where the guest was.
        #[serde(serialize_with = "hexadecimal")]
        rip: u64,
        /// What is there.
        bytes: String,
    },
    /// The instruction came back with a wrong result.
    WrongResult,
    /// The guest took an exception that it should not have.
    Exception {
        /// Its vector.
        vector: u8,
    },
    /// The guest halted, and KVM said so.
    Halted,
    /// The guest did not end in time.
    Hung,
    /// Some other exit.
    UnexpectedExit {
        /// Which.
        exit: String,
    },
    /// The guest could not be made.
    Failed {
        /// Why.
        problem: String,
    },
}

impl Outcome {
    /// Whether a stock kernel gets along with this.
    pub(super) fn is_good(&self) -> bool {
        matches!(self, Self::Ok | Self::NotOffered)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::NotOffered => f.write_str("not offered by this CPU, so no kernel uses it"),
            Self::CannotEmulate { suberror, rip, bytes } => write!(
                f,
                "KVM cannot emulate it: KVM_EXIT_INTERNAL_ERROR, suberror {suberror}, at RIP \
                 {rip:#x}, bytes {bytes}"
            ),
            Self::WrongResult => f.write_str("came back with a wrong result"),
            Self::Exception { vector } => write!(f, "took exception {vector}"),
            Self::Halted => f.write_str("halted"),
            Self::Hung => write!(f, "did not end within {} s", TIME_LIMIT.as_secs()),
            Self::UnexpectedExit { exit } => write!(f, "ended with {exit}"),
            Self::Failed { problem } => write!(f, "could not be run: {problem}"),
        }
    }
}

/// Runs all tiny guests, each in a VM of its own. Takes at most [`TIME_LIMIT`] for each.
pub(super) fn run_all(kvm: &Kvm) -> Vec<TinyRun> {
    // SAFETY: the static is defined in tiny.S with this layout, and nobody writes to it.
    let image = unsafe { &pollux_tiny_guests };
    GUESTS
        .iter()
        .zip(image.guests)
        .map(|(guest, entry)| {
            let outcome = guest_memory(image)
                .and_then(|memory| run(kvm, &memory, IMAGE + entry))
                .unwrap_or_else(|problem| Outcome::Failed { problem: problem.to_string() });
            TinyRun { name: guest.name, purpose: guest.purpose, outcome }
        })
        .collect()
}

/// Runs a guest that executes HLT, in a VM without a local APIC. KVM that lets userspace have the
/// local APIC gives [`Outcome::Halted`].
pub(super) fn halt(kvm: &Kvm) -> Outcome {
    const HLT: [u8; 1] = [0xf4];
    run_code(kvm, &HLT).unwrap_or_else(|problem| Outcome::Failed { problem: problem.to_string() })
}

/// Runs `code` in the place of the tiny guests' data.
fn run_code(kvm: &Kvm, code: &[u8]) -> Result<Outcome, Failure> {
    // SAFETY: as in `run_all`.
    let memory = guest_memory(unsafe { &pollux_tiny_guests })?;
    memory.write_slice(code, GuestAddress(DATA))?;
    run(kvm, &memory, DATA)
}

type Failure = Box<dyn std::error::Error>;

/// Runs what is at `rip` in `memory` in a VM of its own.
fn run(kvm: &Kvm, memory: &GuestMemoryMmap, rip: u64) -> Result<Outcome, Failure> {
    let vm = kvm.create_vm()?;
    // Intel's VMX without unrestricted guests needs these pages, outside of the guest's memory.
    if kvm.check_extension(kvm_ioctls::Cap::SetTssAddr) {
        vm.set_tss_address(KVM_TSS)?;
    }
    let region = kvm_userspace_memory_region {
        slot: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY_BYTES as u64,
        userspace_addr: memory.get_host_address(GuestAddress(0))? as u64,
        flags: 0,
    };
    // SAFETY: the region is mapped for as long as `memory` lives, which is borrowed for longer than
    // `vm` and its vCPU live.
    unsafe { vm.set_user_memory_region(region)? };
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    enter_long_mode(&vcpu)?;
    vcpu.set_regs(&kvm_regs { rip, rsp: STACK_TOP, rsi: DATA, rflags: 2, ..Default::default() })?;
    run_bounded(&mut vcpu, memory)
}

/// Page tables, descriptor tables and the image.
fn guest_memory(image: &Image) -> Result<GuestMemoryMmap, Failure> {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)])?;
    let put = |address: u64, value: u64| memory.write_obj(value.to_le(), GuestAddress(address));

    // The first 2 MiB, identity mapped by one large page: present, writable (and size).
    put(PML4, PDPT | 0x3)?;
    put(PDPT, PD | 0x3)?;
    put(PD, 0x83)?;
    // 64-bit code and flat data, of privilege level 0, accessed.
    put(GDT + u64::from(CODE_SELECTOR), 0x00af_9b00_0000_ffff)?;
    put(GDT + u64::from(DATA_SELECTOR), 0x00cf_9300_0000_ffff)?;
    for vector in 0..VECTORS {
        let handler = IMAGE
            + if vector == BREAKPOINT_VECTOR { image.breakpoint } else { vector * VECTOR_STRIDE };
        // An interrupt gate: offset 15:0, selector, present and type 14, offset 31:16.
        let gate = handler & 0xffff
            | u64::from(CODE_SELECTOR) << 16
            | 0x8e00 << 32
            | (handler & 0xffff_0000) << 32;
        put(IDT + 16 * vector, gate)?;
    }
    // SAFETY: the table gives the place and the length of the image, which is constant.
    let code = unsafe { std::slice::from_raw_parts(image.start, image.length) };
    memory.write_slice(code, GuestAddress(IMAGE))?;
    Ok(memory)
}

fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), Failure> {
    let mut sregs = vcpu.get_sregs()?;
    let segment = |selector: u16, type_: u8, long: bool| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        l: u8::from(long),
        db: u8::from(!long),
        g: 1,
        ..Default::default()
    };
    sregs.cs = segment(CODE_SELECTOR, 0xb, true);
    let data = segment(DATA_SELECTOR, 0x3, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, DATA_SELECTOR + 7);
    (sregs.idt.base, sregs.idt.limit) = (IDT, (VECTORS * 16 - 1) as u16);
    sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_PG;
    sregs.cr3 = PML4;
    sregs.cr4 = CR4_PAE | CR4_OSFXSR | CR4_OSXMMEXCPT;
    sregs.efer = EFER_LME | EFER_LMA;
    vcpu.set_sregs(&sregs)?;
    Ok(())
}

extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs the guest to its end, or to the time limit: then a second thread interrupts this one, again
/// and again, since a signal that comes just before `KVM_RUN` is lost.
fn run_bounded(vcpu: &mut VcpuFd, memory: &GuestMemoryMmap) -> Result<Outcome, Failure> {
    register_signal_handler(KICK_SIGNAL, ignore_signal)?;
    let deadline = Instant::now() + TIME_LIMIT;
    // SAFETY: has no precondition.
    let this_thread = unsafe { libc::pthread_self() };
    let (done, wait) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut pause = TIME_LIMIT;
            while wait.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                // SAFETY: the thread waits for this one at the end of the scope, so it is there.
                unsafe { libc::pthread_kill(this_thread, KICK_SIGNAL) };
                pause = Duration::from_millis(5);
            }
        });
        let outcome = run_to_end(vcpu, memory, deadline);
        drop(done);
        outcome
    })
}

fn run_to_end(
    vcpu: &mut VcpuFd,
    memory: &GuestMemoryMmap,
    deadline: Instant,
) -> Result<Outcome, Failure> {
    loop {
        match vcpu.run() {
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                if Instant::now() >= deadline {
                    return Ok(Outcome::Hung);
                }
            }
            Err(error) => return Err(error.into()),
            Ok(VcpuExit::IoOut(RESULT_PORT, [1])) => return Ok(Outcome::Ok),
            Ok(VcpuExit::IoOut(RESULT_PORT, [2])) => return Ok(Outcome::NotOffered),
            Ok(VcpuExit::IoOut(RESULT_PORT, _)) => return Ok(Outcome::WrongResult),
            Ok(VcpuExit::IoOut(EXCEPTION_PORT, &[vector])) => {
                return Ok(Outcome::Exception { vector });
            }
            Ok(VcpuExit::Hlt) => return Ok(Outcome::Halted),
            Ok(VcpuExit::InternalError) => return internal_error(vcpu, memory),
            Ok(VcpuExit::Shutdown) => {
                return Ok(Outcome::UnexpectedExit { exit: "a triple fault".to_owned() });
            }
            Ok(exit) => return Ok(Outcome::UnexpectedExit { exit: format!("{exit:?}") }),
        }
    }
}

fn internal_error(vcpu: &mut VcpuFd, memory: &GuestMemoryMmap) -> Result<Outcome, Failure> {
    let rip = vcpu.get_regs()?.rip;
    // SAFETY: at this exit KVM has filled in the `internal` member, and any bytes make a `u32`.
    let suberror = unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal.suberror };
    // All memory is identity mapped, so RIP is a guest physical address.
    let mut bytes = [0u8; 8];
    let bytes = match memory.read(&mut bytes, GuestAddress(rip)) {
        Ok(length) => bytes.iter().take(length).map(|byte| format!("{byte:02x}")).collect(),
        Err(_) => Vec::new(),
    };
    Ok(Outcome::CannotEmulate { suberror, rip, bytes: bytes.join(" ") })
}

fn hexadecimal<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_code(code: &[u8]) -> Outcome {
        let kvm = Kvm::new().expect("these tests need /dev/kvm");
        super::run_code(&kvm, code).unwrap()
    }

    #[test]
    fn every_kvm_runs_a_guest_in_long_mode() {
        let runs = run_all(&Kvm::new().expect("these tests need /dev/kvm"));
        assert_eq!(runs.len(), GUESTS.len());
        assert_eq!(runs[0].outcome, Outcome::Ok, "{}", runs[0].outcome);
    }

    #[test]
    fn a_guest_that_does_not_end_is_stopped() {
        let jump_to_itself = [0xeb, 0xfe];
        assert_eq!(run_code(&jump_to_itself), Outcome::Hung);
    }

    #[test]
    fn results_are_told_apart() {
        let out = |port: u8, value: u8| [0xb0, value, 0xe6, port]; // mov al, value; out port, al
        assert_eq!(run_code(&out(0xf4, 1)), Outcome::Ok);
        assert_eq!(run_code(&out(0xf4, 0)), Outcome::WrongResult);
        assert_eq!(run_code(&out(0xf4, 2)), Outcome::NotOffered);
        assert_eq!(run_code(&out(0xf5, 13)), Outcome::Exception { vector: 13 });
        assert_eq!(run_code(&[0xf4]), Outcome::Halted);
        let elsewhere = run_code(&out(0x80, 1));
        assert!(matches!(&elsewhere, Outcome::UnexpectedExit { .. }), "{elsewhere}");
    }

    #[test]
    fn an_exception_is_told_by_its_vector() {
        let ud2 = [0x0f, 0x0b];
        assert_eq!(run_code(&ud2), Outcome::Exception { vector: 6 });
    }

    #[test]
    fn only_a_right_result_or_a_missing_instruction_is_good() {
        assert!(Outcome::Ok.is_good() && Outcome::NotOffered.is_good());
        let bytes = "cc".to_owned();
        for bad in [
            Outcome::CannotEmulate { suberror: 1, rip: 0x8000, bytes },
            Outcome::WrongResult,
            Outcome::Exception { vector: 6 },
            Outcome::Halted,
            Outcome::Hung,
            Outcome::UnexpectedExit { exit: String::new() },
            Outcome::Failed { problem: String::new() },
        ] {
            assert!(!bad.is_good(), "{bad}");
        }
    }
}
