//! What the kernel says of a running monitor.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::plan::{MEMORY_MIB, Window};
use crate::util::{Context, Error, Result};

/// KVM's counts that are read (`/sys/kernel/debug/kvm/PID-FD/`): the sum over the VM's vCPUs.
const KVM_COUNTS: [&str; 11] = [
    "exits",
    "halt_exits",
    "irq_injections",
    "irq_exits",
    "irq_window_exits",
    "io_exits",
    "mmio_exits",
    "insn_emulation",
    "pf_taken",
    "halt_successful_poll",
    "halt_wakeup",
];

/// The figures at one moment.
#[derive(Clone, Default)]
pub struct Snapshot {
    kvm: BTreeMap<String, u64>,
    vcpu_cpu_ns: u64,
    other_cpu_ns: u64,
}

impl Snapshot {
    /// Reads them for the monitor with this process id.
    ///
    /// # Errors
    /// It has ended.
    pub fn take(pid: u32) -> Result<Snapshot> {
        let mut snapshot = Snapshot { kvm: kvm_counts(pid), ..Snapshot::default() };
        let tasks = format!("/proc/{pid}/task");
        for task in fs::read_dir(&tasks).context(&tasks)? {
            let task = task.context(&tasks)?.path();
            // A thread of a pool may end while it is looked at.
            let Ok(cost) = fs::read_to_string(task.join("schedstat")) else { continue };
            let cpu_ns = cost.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
            if is_vcpu(name.trim_end()) {
                snapshot.vcpu_cpu_ns += cpu_ns;
            } else {
                snapshot.other_cpu_ns += cpu_ns;
            }
        }
        Ok(snapshot)
    }

    /// What happened from then until now.
    pub fn until(&self, after: &Snapshot) -> Window {
        let kvm = after.kvm.iter().map(|(name, count)| {
            (name.clone(), count.saturating_sub(self.kvm.get(name).copied().unwrap_or(0)))
        });
        Window {
            kvm: kvm.collect(),
            vcpu_cpu_ns: after.vcpu_cpu_ns.saturating_sub(self.vcpu_cpu_ns),
            other_cpu_ns: after.other_cpu_ns.saturating_sub(self.other_cpu_ns),
            device: None,
        }
    }
}

/// Pollux's `vcpu0`; QEMU's `CPU 0/KVM` (with `debug-threads=on`).
fn is_vcpu(name: &str) -> bool {
    name.starts_with("vcpu") || (name.starts_with("CPU ") && name.ends_with("/KVM"))
}

fn kvm_counts(pid: u32) -> BTreeMap<String, u64> {
    let prefix = format!("{pid}-");
    let vm = fs::read_dir("/sys/kernel/debug/kvm").ok().and_then(|entries| {
        entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)))
    });
    let Some(vm) = vm else { return BTreeMap::new() };
    let count = |name: &str| fs::read_to_string(vm.join(name)).ok()?.trim().parse().ok();
    KVM_COUNTS.iter().filter_map(|&name| Some((name.to_owned(), count(name)?))).collect()
}

/// Resident memory of a process beside the mapping that is guest memory, in KiB.
///
/// # Errors
/// The process has ended, or has no mapping that could be guest memory.
pub fn beside_kib(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let smaps = fs::read_to_string(&path).context(&path)?;
    beside_guest_memory(&smaps, MEMORY_MIB << 10)
        .ok_or(Error(format!("{path}: no mapping of the size of guest memory")))
}

/// The sum of `Rss` over all mappings but the one of guest memory, in KiB.
fn beside_guest_memory(smaps: &str, guest_kib: u64) -> Option<u64> {
    let field = |line: &str, name: &str| -> Option<u64> {
        line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let (mut beside_kib, mut is_guest, mut found) = (0, false, false);
    for line in smaps.lines() {
        if let Some(size_kib) = field(line, "Size:") {
            is_guest = size_kib == guest_kib;
            found |= is_guest;
        } else if let Some(rss_kib) = field(line, "Rss:")
            && !is_guest
        {
            beside_kib += rss_kib;
        }
    }
    found.then_some(beside_kib)
}

/// Calls by name, from the table of `strace -c`.
pub fn parse_strace(table: &str) -> BTreeMap<String, u64> {
    let row = |line: &str| -> Option<(String, u64)> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (share, calls, name) = (words.first()?, words.get(3)?, words.last()?);
        share.parse::<f64>().ok()?;
        (*name != "total").then_some((name.to_string(), calls.parse().ok()?))
    };
    table.lines().filter_map(row).collect()
}

/// True if files at `path` are in memory.
pub fn is_tmpfs(path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `path` is a C string; the call fills `stat` or fails.
    if unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: filled by the successful call above.
    unsafe { stat.assume_init() }.f_type == libc::TMPFS_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_left_out_and_all_else_is_summed() {
        let smaps = "55-56 r-xp 0 00:01 7 /usr/bin/x\nSize: 100 kB\nRss: 80 kB\nPss: 1 kB\n\
                     7f-80 rw-p 0 00:00 0\nSize: 1024 kB\nKernelPageSize: 4 kB\nRss: 600 kB\n\
                     80-81 rw-p 0 00:00 0 [heap]\nSize: 132 kB\nRss: 12 kB\n";
        assert_eq!(beside_guest_memory(smaps, 1024), Some(92));
        assert_eq!(beside_guest_memory(smaps, 2048), None);
    }

    #[test]
    fn straces_table_is_read_with_and_without_errors() {
        let table = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.003000           3      1000           preadv2
 40.00    0.002000           2       900        12 read
------ ----------- ----------- --------- --------- ----------------
100.00    0.005000           2      1900        12 total
";
        let calls = parse_strace(table);
        assert_eq!(calls, [("preadv2".into(), 1000), ("read".into(), 900)].into());
    }

    #[test]
    fn vcpu_threads_are_told_by_their_names() {
        assert!(is_vcpu("vcpu0") && is_vcpu("CPU 0/KVM"));
        assert!(!is_vcpu("blk0-q0") && !is_vcpu("IO iothread0") && !is_vcpu("pollux"));
    }
}
