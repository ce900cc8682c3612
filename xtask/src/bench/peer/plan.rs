//! What is run, and what comes out of a run: the words between the command and its part in the lab.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Guest memory, in MiB.
pub const MEMORY_MIB: u64 = 512;

/// One round: everything the lab is asked for at a time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The program under test.
    pub pollux: PathBuf,
    /// `target/guest/`.
    pub guest: PathBuf,
    /// Which of its kernels.
    pub release: String,
    /// How long fio runs, in seconds.
    pub seconds: u32,
    /// Where the data disk is.
    pub media: Vec<Medium>,
    /// Passes over all ways to boot.
    pub boots: u32,
    /// Count system calls as well.
    pub syscalls: bool,
}

/// Who runs the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Monitor {
    /// Pollux, with its default engine.
    Pollux,
    /// QEMU with an iothread and `aio=threads`.
    QemuThreads,
    /// QEMU with an iothread and `aio=io_uring`.
    QemuUring,
}

impl fmt::Display for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Monitor::Pollux => "Pollux",
            Monitor::QemuThreads => "QEMU threads",
            Monitor::QemuUring => "QEMU io_uring",
        })
    }
}

/// Where the data disk's file is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Medium {
    /// A file system in memory.
    Tmpfs,
    /// The lab's disk: ext4, read through the page cache.
    Scratch,
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Medium::Tmpfs => "tmpfs",
            Medium::Scratch => "scratch",
        })
    }
}

/// The kernel's file, and how it is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kernel {
    /// As packaged: compressed, 64-bit boot protocol (QEMU: real mode, through its firmware).
    BzImage,
    /// The ELF image, 64-bit boot protocol.
    Vmlinux,
    /// The ELF image through PVH.
    Pvh,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kernel::BzImage => "bzImage",
            Kernel::Vmlinux => "vmlinux",
            Kernel::Pvh => "vmlinux, PVH",
        })
    }
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Ends when the guest's first program starts.
    Boot,
    /// fio, undisturbed.
    Fio,
    /// fio, with the monitor's system calls counted.
    Syscalls,
}

/// A line of the lab's part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// A round begins; what came before was of an attempt that is void.
    Begin {
        /// What the monitors call themselves.
        versions: BTreeMap<String, String>,
    },
    /// One guest.
    Run(Box<Run>),
    /// The round is complete.
    End,
}

/// One guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub monitor: Monitor,
    pub kernel: Kernel,
    pub purpose: Purpose,
    pub medium: Medium,
    /// From the start of the monitor to the guest's first program, in nanoseconds.
    pub exec_to_init_ns: u64,
    /// Until then.
    pub boot: Option<Window>,
    /// What fio says.
    pub fio: Option<Fio>,
    /// Between fio's marks.
    pub window: Option<Window>,
    /// Resident memory beside guest memory while fio runs, in KiB.
    pub beside_kib: Option<u64>,
    /// System calls of all threads, by name.
    pub syscalls: Option<BTreeMap<String, u64>>,
}

/// The part of the guest's `@fio` line that is used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fio {
    pub error: i64,
    pub ios: u64,
    pub iops: f64,
    pub lat_ns_mean: f64,
    pub clat_ns_p99: u64,
}

/// What happened in a stretch of time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Window {
    /// KVM's own counts for the VM, by its names; empty without debugfs.
    pub kvm: BTreeMap<String, u64>,
    /// CPU time of the vCPU's thread, in nanoseconds.
    pub vcpu_cpu_ns: u64,
    /// CPU time of all other threads, in nanoseconds.
    pub other_cpu_ns: u64,
    /// The device's own counts, where the monitor has them.
    pub device: Option<Device>,
}

/// Pollux's counts of the data disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub requests: u64,
    pub kicks: u64,
    pub interrupts: u64,
}

impl Run {
    /// System calls a request of everything but the vCPU, whose only one is `ioctl` (KVM_RUN).
    pub fn syscalls_per_request(&self) -> Option<f64> {
        let calls = self.syscalls.as_ref()?;
        let workers: u64 = calls.iter().filter(|(name, _)| *name != "ioctl").map(|(_, n)| n).sum();
        self.per_request(workers)
    }

    /// A count of KVM's over fio's requests.
    pub fn kvm_per_request(&self, name: &str) -> Option<f64> {
        self.per_request(*self.window.as_ref()?.kvm.get(name)?)
    }

    /// A count over fio's requests.
    pub fn per_request(&self, count: u64) -> Option<f64> {
        let ios = self.fio.as_ref()?.ios;
        (ios > 0).then(|| count as f64 / ios as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vcpus_own_system_calls_are_not_the_workers() {
        let calls = [("ioctl", 70), ("read", 100), ("preadv2", 100), ("write", 100)];
        let run = Run {
            monitor: Monitor::Pollux,
            kernel: Kernel::BzImage,
            purpose: Purpose::Syscalls,
            medium: Medium::Tmpfs,
            exec_to_init_ns: 0,
            boot: None,
            fio: Some(Fio { error: 0, ios: 100, iops: 1.0, lat_ns_mean: 1.0, clat_ns_p99: 1 }),
            window: None,
            beside_kib: None,
            syscalls: Some(calls.map(|(name, count)| (name.into(), count)).into()),
        };
        assert_eq!(run.syscalls_per_request(), Some(3.0));
        let line = serde_json::to_string(&Line::Run(Box::new(run))).unwrap();
        assert!(
            matches!(serde_json::from_str(&line), Ok(Line::Run(run)) if run.beside_kib.is_none())
        );
    }
}
