//! The system calls of each kind of thread, and the filters made of them.
//!
//! The lists were found by running every test under strace(1), and by reading what the C library and
//! the standard library do where a test cannot bring them to it (out of memory, an abort). A thread
//! has its own list *and* those of the threads that started it: so what starts another has at least
//! the list of what it starts.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::config::OnReboot;
use crate::vm::VmError;

/// A system call that a thread may make.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) number: c_long,
    arguments: Arguments,
}

/// With which arguments. Pointers are never looked at: what they point to may change.
#[derive(Clone, Copy)]
enum Arguments {
    Any,
    /// The argument of this index (from 0) is one of these.
    OneOf(u8, &'static [u64]),
    /// The argument of this index, under a mask, has this value.
    Masked(u8, u64, u64),
}

const fn any(number: c_long) -> Call {
    Call { number, arguments: Arguments::Any }
}

const fn one_of(number: c_long, index: u8, values: &'static [u64]) -> Call {
    Call { number, arguments: Arguments::OneOf(index, values) }
}

const fn masked(number: c_long, index: u8, mask: u64, value: u64) -> Call {
    Call { number, arguments: Arguments::Masked(index, mask, value) }
}

/// What memory that is mapped or changed never is.
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
/// What an `open` for reading, of what is there, has none of.
const WRITING: u64 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64;
/// `clone` of a thread of this process, not of a process.
const THREAD: u64 = (libc::CLONE_THREAD | libc::CLONE_VM) as u64;
/// The type byte of an ioctl's number, and KVM's (`uapi/asm-generic/ioctl.h`, `uapi/linux/kvm.h`).
const IOCTL_TYPE: u64 = 0xff00;
const KVM_TYPE: u64 = 0xae00;

/// KVM's ioctl(2) requests (`uapi/linux/kvm.h`).
mod request {
    pub(super) const KVM_RUN: u64 = 0xae80;
    pub(super) const KVM_INTERRUPT: u64 = 0x4004_ae86;
    pub(super) const KVM_NMI: u64 = 0xae9a;
    pub(super) const KVM_GET_REGS: u64 = 0x8090_ae81;
    pub(super) const KVM_SET_REGS: u64 = 0x4090_ae82;
    pub(super) const KVM_GET_SREGS: u64 = 0x8138_ae83;
    pub(super) const KVM_SET_SREGS: u64 = 0x4138_ae84;
    pub(super) const KVM_TRANSLATE: u64 = 0xc018_ae85;
    pub(super) const KVM_GET_MSRS: u64 = 0xc008_ae88;
    pub(super) const KVM_GET_LAPIC: u64 = 0x8400_ae8e;
    pub(super) const KVM_SET_GSI_ROUTING: u64 = 0x4008_ae6a;
    pub(super) const KVM_IRQFD: u64 = 0x4020_ae76;
    pub(super) const KVM_IOEVENTFD: u64 = 0x4040_ae79;
}

/// What every thread may do: allocate, wait, wake another, read and write what is open, tell that
/// it panicked, and end.
const COMMON: &[Call] = &[
    any(libc::SYS_read),
    any(libc::SYS_write),
    any(libc::SYS_writev),
    any(libc::SYS_close),
    // A debug build looks whether what it closes is open.
    one_of(libc::SYS_fcntl, 1, &[libc::F_GETFD as u64]),
    any(libc::SYS_brk),
    masked(libc::SYS_mmap, 2, EXECUTABLE, 0),
    masked(libc::SYS_mprotect, 2, EXECUTABLE, 0),
    any(libc::SYS_mremap),
    any(libc::SYS_munmap),
    any(libc::SYS_madvise),
    any(libc::SYS_futex),
    any(libc::SYS_sched_yield),
    any(libc::SYS_clock_gettime),
    any(libc::SYS_clock_nanosleep),
    any(libc::SYS_restart_syscall),
    any(libc::SYS_rt_sigreturn),
    any(libc::SYS_rt_sigprocmask),
    one_of(libc::SYS_rt_sigaction, 0, &[libc::SIGABRT as u64]),
    any(libc::SYS_sigaltstack),
    any(libc::SYS_tgkill),
    any(libc::SYS_getpid),
    any(libc::SYS_gettid),
    any(libc::SYS_getrandom),
    any(libc::SYS_exit),
    any(libc::SYS_exit_group),
];

const VCPU: &[Call] = &[
    one_of(
        libc::SYS_ioctl,
        1,
        &[
            request::KVM_RUN,
            request::KVM_INTERRUPT,
            request::KVM_NMI,
            request::KVM_GET_REGS,
            request::KVM_SET_REGS,
            request::KVM_GET_SREGS,
            request::KVM_SET_SREGS,
            request::KVM_TRANSLATE,
            request::KVM_GET_MSRS,
            request::KVM_GET_LAPIC,
            // The guest sets up a device's interrupts and queues.
            request::KVM_SET_GSI_ROUTING,
            request::KVM_IRQFD,
            request::KVM_IOEVENTFD,
        ],
    ),
    any(libc::SYS_eventfd2),
    one_of(libc::SYS_fcntl, 1, &[libc::F_DUPFD_CLOEXEC as u64]),
    // A mark takes a snapshot of the statistics: KVM's, and the threads' from /proc.
    any(libc::SYS_pread64),
    masked(libc::SYS_openat, 2, WRITING, 0),
    any(libc::SYS_statx),
    any(libc::SYS_lseek),
    // The timer of a local APIC in Pollux.
    any(libc::SYS_timer_create),
    any(libc::SYS_timer_settime),
    any(libc::SYS_timer_delete),
    one_of(libc::SYS_prctl, 0, &[libc::PR_SET_TIMERSLACK as u64]),
];

const WORKER: &[Call] = &[
    any(libc::SYS_preadv2),
    any(libc::SYS_pwritev2),
    any(libc::SYS_preadv),
    any(libc::SYS_pwritev),
    any(libc::SYS_fdatasync),
    any(libc::SYS_fallocate),
    one_of(libc::SYS_ioctl, 1, &[virtio_blk::BLKDISCARD]),
    any(libc::SYS_io_uring_setup),
    any(libc::SYS_io_uring_enter),
    any(libc::SYS_io_uring_register),
    any(libc::SYS_poll),
    any(libc::SYS_sched_setaffinity),
];

/// To start a thread, and to have it enter its sandbox.
const START: &[Call] = &[
    any(libc::SYS_clone3),
    masked(libc::SYS_clone, 0, THREAD, THREAD),
    any(libc::SYS_set_robust_list),
    any(libc::SYS_rseq),
    any(libc::SYS_sched_getaffinity),
    any(libc::SYS_prlimit64),
    one_of(
        libc::SYS_prctl,
        0,
        &[
            libc::PR_SET_NAME as u64,
            libc::PR_SET_NO_NEW_PRIVS as u64,
            libc::PR_SET_SECCOMP as u64,
            libc::PR_CAP_AMBIENT as u64,
        ],
    ),
    any(libc::SYS_seccomp),
    any(libc::SYS_capget),
    any(libc::SYS_capset),
];

/// What the first thread does once the guest runs.
const MAIN: &[Call] = &[
    any(libc::SYS_poll),
    any(libc::SYS_epoll_wait),
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_accept4),
    any(libc::SYS_recvfrom),
    any(libc::SYS_sendto),
    any(libc::SYS_shutdown),
    one_of(
        libc::SYS_ioctl,
        1,
        &[
            libc::FIONBIO,
            libc::TCGETS,
            libc::TCSETS,
            virtio_blk::BLKGETSIZE64,
            libc::BLKSSZGET,
            libc::BLKPBSZGET,
        ],
    ),
    masked(libc::SYS_ioctl, 1, IOCTL_TYPE, KVM_TYPE),
    // Statistics and the host's parameters are read and written, disks looked at and flushed.
    any(libc::SYS_openat),
    any(libc::SYS_fcntl),
    any(libc::SYS_flock),
    any(libc::SYS_statx),
    any(libc::SYS_newfstatat),
    any(libc::SYS_fstat),
    any(libc::SYS_lseek),
    any(libc::SYS_pread64),
    any(libc::SYS_getdents64),
    any(libc::SYS_readlink),
    any(libc::SYS_getcwd),
    any(libc::SYS_rename),
    any(libc::SYS_unlink),
    any(libc::SYS_ftruncate),
    any(libc::SYS_fdatasync),
    any(libc::SYS_fsync),
    any(libc::SYS_eventfd2),
    any(libc::SYS_timer_delete),
];

/// To wait for the kernel's events; the file is open.
const RECORDER: &[Call] = &[any(libc::SYS_poll)];

/// Once more what it does before: the guest is booted anew.
const BUILD: &[Call] = &[any(libc::SYS_fstatfs), any(libc::SYS_faccessat2)];

/// The first thread's calls.
pub(super) fn main(on_reboot: OnReboot) -> Vec<Call> {
    match on_reboot {
        OnReboot::Exit => [COMMON, MAIN].concat(),
        // The vCPUs of a second boot are started with its filter.
        OnReboot::Restart => [COMMON, MAIN, VCPU, START, BUILD].concat(),
    }
}

pub(super) fn starter() -> Vec<Call> {
    [COMMON, WORKER, START].concat()
}

pub(super) fn worker() -> Vec<Call> {
    [COMMON, WORKER].concat()
}

pub(super) fn vcpu() -> Vec<Call> {
    [COMMON, VCPU].concat()
}

pub(super) fn recorder() -> Vec<Call> {
    [COMMON, RECORDER].concat()
}

/// A filter that lets these calls through and traps all others.
pub(super) fn filter(calls: &[Call]) -> Result<BpfProgram, VmError> {
    let mut rules = BTreeMap::<i64, Vec<SeccompRule>>::new();
    for call in calls {
        let of_call = rules.entry(call.number).or_default();
        of_call.extend(conditions(call.arguments).map_err(sandbox_error)?);
    }
    // Without a rule a call is allowed whatever its arguments are: that is to win over those with some.
    for call in calls.iter().filter(|call| matches!(call.arguments, Arguments::Any)) {
        rules.insert(call.number, Vec::new());
    }
    compile(rules, SeccompAction::Trap, SeccompAction::Allow)
}

/// `clone3` keeps its flags where no filter can look at them. Where there is none, the C library takes
/// `clone`, whose flags can be looked at.
pub(super) fn no_clone3() -> Result<BpfProgram, VmError> {
    let rules = [(libc::SYS_clone3, Vec::new())].into();
    compile(rules, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))
}

fn conditions(arguments: Arguments) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    // The kernel looks at the lower half of each argument that matters here.
    let rule = |index, operator, value| {
        let half = SeccompCmpArgLen::Dword;
        SeccompRule::new(vec![SeccompCondition::new(index, half, operator, value)?])
    };
    match arguments {
        Arguments::Any => Ok(Vec::new()),
        Arguments::OneOf(index, values) => {
            values.iter().map(|&value| rule(index, SeccompCmpOp::Eq, value)).collect()
        }
        Arguments::Masked(index, mask, value) => {
            Ok(vec![rule(index, SeccompCmpOp::MaskedEq(mask), value)?])
        }
    }
}

fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    on_match: SeccompAction,
) -> Result<BpfProgram, VmError> {
    SeccompFilter::new(rules, otherwise, on_match, TargetArch::x86_64)
        .and_then(BpfProgram::try_from)
        .map_err(sandbox_error)
}

fn sandbox_error(error: seccompiler::BackendError) -> VmError {
    VmError::Machine(format!("the sandbox cannot be made: {error}"))
}
