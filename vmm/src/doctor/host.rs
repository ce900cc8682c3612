//! The host: its kernel and CPU, KVM's modules and their parameters, io_uring.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use io_uring::{IoUring, Probe, opcode};
use serde::Serialize;

use crate::config::reason;

/// This machine and the names of KVM's modules, which stay as they are while Pollux runs.
pub static HOST: LazyLock<(Host, Vec<String>)> = LazyLock::new(|| (Host::query(), kvm_modules()));

/// The machine that would run guests.
#[derive(Debug, Serialize)]
pub struct Host {
    /// The kernel's release, as of `uname -r`.
    pub kernel: String,
    /// The CPU's name.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The host is itself the guest of a hypervisor (CPUID leaf 1, ECX bit 31).
    pub is_guest: bool,
}

impl Host {
    /// Asks this machine.
    pub fn query() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map_or("unknown", |(_, name)| name.trim());
        Self {
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
            cpu: cpu.to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, Into::into),
            is_guest: std::arch::x86_64::__cpuid(1).ecx >> 31 == 1,
        }
    }
}

/// The names of KVM's modules besides `kvm` itself: `kvm_intel`, `kvm_amd`, or what else there is.
pub fn kvm_modules() -> Vec<String> {
    let Ok(directory) = fs::read_dir("/sys/module") else { return Vec::new() };
    let mut modules: Vec<String> = directory
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("kvm_"))
        .collect();
    modules.sort();
    modules
}

/// Parameters of the module `kvm` that say how long a halted vCPU polls; of all VMs that have no
/// window of their own. `None`: there is no such parameter.
#[derive(Debug, Serialize)]
pub struct HaltPoll {
    /// The longest poll window, in nanoseconds.
    pub halt_poll_ns: Option<u64>,
    /// What the window is multiplied by when it grows.
    pub halt_poll_ns_grow: Option<u64>,
    /// The least window after growing, in nanoseconds.
    pub halt_poll_ns_grow_start: Option<u64>,
    /// What the window is divided by when it shrinks; 0 makes it 0.
    pub halt_poll_ns_shrink: Option<u64>,
}

impl HaltPoll {
    /// Reads them now.
    pub fn query() -> Self {
        let parameter = |name: &str| read(Path::new("/sys/module/kvm/parameters").join(name));
        let number = |name: &str| parameter(name)?.parse().ok();
        Self {
            halt_poll_ns: number("halt_poll_ns"),
            halt_poll_ns_grow: number("halt_poll_ns_grow"),
            halt_poll_ns_grow_start: number("halt_poll_ns_grow_start"),
            halt_poll_ns_shrink: number("halt_poll_ns_shrink"),
        }
    }
}

/// What `--sandbox on` can use.
#[derive(Debug, Serialize)]
pub(super) struct Confinement {
    /// The kernel can trap system calls (seccomp). Without it there is no sandbox.
    pub(super) seccomp: bool,
    /// The version of Landlock's interface. `None`: there is none, and files are not restricted.
    pub(super) landlock_abi: Option<i64>,
    /// What to do about what is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<&'static str>,
}

impl Confinement {
    pub(super) fn query() -> Self {
        /// `LANDLOCK_CREATE_RULESET_VERSION` (`uapi/linux/landlock.h`).
        const VERSION: libc::c_uint = 1;
        let actions = read("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
        let seccomp = actions.split(' ').any(|action| action == "trap");
        let (nothing, length) = (std::ptr::null::<libc::c_void>(), 0usize);
        // SAFETY: asked for the version, the call takes no memory.
        let abi =
            unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, length, VERSION) };
        let landlock_abi = (abi > 0).then_some(abi);
        let advice = match (seccomp, landlock_abi) {
            (false, _) => {
                Some("use a kernel with CONFIG_SECCOMP_FILTER, or run with --sandbox off")
            }
            (true, None) => Some(
                "use a kernel of 5.13 or later with CONFIG_SECURITY_LANDLOCK, and have landlock in \
                 its lsm= parameter",
            ),
            (true, Some(_)) => None,
        };
        Self { seccomp, landlock_abi, advice }
    }
}

/// Whether `engine=uring` works.
#[derive(Debug, Serialize)]
pub(super) struct Uring {
    /// A ring can be made, and has every operation that is used.
    pub(super) usable: bool,
    /// The sysctl `kernel.io_uring_disabled`, if there is one: 0 for nobody, 1 for who is not
    /// privileged, 2 for all.
    pub(super) disabled: Option<u64>,
    /// The operations that are used, and whether they are there.
    pub(super) operations: Vec<Operation>,
    /// Why it does not work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<&'static str>,
}

/// An operation of io_uring.
#[derive(Debug, Serialize)]
pub(super) struct Operation {
    /// Its name, as in `IORING_OP_READV`.
    pub(super) name: &'static str,
    /// Whether this kernel has it.
    pub(super) present: bool,
}

impl Uring {
    const OPERATIONS: [(&str, u8); 6] = [
        ("READV", opcode::Readv::CODE),
        ("WRITEV", opcode::Writev::CODE),
        ("FSYNC", opcode::Fsync::CODE),
        ("FALLOCATE", opcode::Fallocate::CODE),
        ("READ", opcode::Read::CODE),
        ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
    ];

    pub(super) fn query() -> Self {
        let disabled = read("/proc/sys/kernel/io_uring_disabled").and_then(|s| s.parse().ok());
        let mut probe = Probe::new();
        let probed = IoUring::new(1).and_then(|ring| ring.submitter().register_probe(&mut probe));
        let operations: Vec<_> = Self::OPERATIONS
            .into_iter()
            .map(|(name, code)| Operation { name, present: probe.is_supported(code) })
            .collect();
        let (problem, advice) = match probed {
            Err(error) if disabled.is_some_and(|level| level > 0) => (
                Some(format!("no ring: {}", reason(&error))),
                Some("set the sysctl kernel.io_uring_disabled to 0, or use engine=sync"),
            ),
            Err(error) => (
                Some(format!("no ring: {}", reason(&error))),
                Some(
                    "let the container's seccomp profile allow io_uring_setup, or use a kernel of \
                     5.6 or later, or use engine=sync",
                ),
            ),
            Ok(()) if operations.iter().any(|operation| !operation.present) => (
                Some("some operation is missing".to_owned()),
                Some("use a kernel of 5.6 or later, or use engine=sync"),
            ),
            Ok(()) => (None, None),
        };
        Self { usable: problem.is_none(), disabled, operations, problem, advice }
    }
}

/// The first line of a small file of the kernel's.
fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(|line| line.trim().to_owned())
}
