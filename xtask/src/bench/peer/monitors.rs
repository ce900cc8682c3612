//! How each monitor is told to run the same guest: one vCPU, the root disk, the data disk, the
//! console in a file, the results channel on the second serial port.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::plan::{Kernel, MEMORY_MIB, Monitor, Plan};
use crate::util;

/// What Pollux puts in front of the kernel command line by itself.
const COMMAND_LINE: &str = "console=ttyS0 reboot=k panic=-1";

/// The files of a guest, all in memory but the data disk, which is where it is asked to be.
pub struct Files {
    /// A directory in memory.
    pub dir: PathBuf,
}

impl Files {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The kernel's image.
    pub fn kernel(&self, plan: &Plan, kernel: Kernel) -> PathBuf {
        self.file(&Files::kernel_name(plan, kernel))
    }

    /// Its name in `target/guest/`, too.
    pub fn kernel_name(plan: &Plan, kernel: Kernel) -> String {
        let image = if kernel == Kernel::BzImage { "vmlinuz" } else { "vmlinux" };
        format!("{image}-{}", plan.release)
    }

    /// The name of the initrd.
    pub fn initrd_name(plan: &Plan) -> String {
        format!("initrd-{}.img", plan.release)
    }

    /// The root disk, read only.
    pub fn root(&self) -> PathBuf {
        self.file("rootfs.ext4")
    }

    /// What the guest writes to its console.
    pub fn console(&self) -> PathBuf {
        self.file("console")
    }

    /// The other end of the results channel: a FIFO.
    pub fn results(&self) -> PathBuf {
        self.file("results")
    }

    /// What the monitor says of itself.
    pub fn log(&self) -> PathBuf {
        self.file("log")
    }

    /// The table of strace.
    pub fn strace(&self) -> PathBuf {
        self.file("strace")
    }

    /// Pollux's statistics.
    pub fn stats(&self) -> PathBuf {
        self.file("stats.json")
    }
}

/// The command that runs a guest, which executes `guest_command` and powers off.
pub fn command(
    plan: &Plan,
    monitor: Monitor,
    kernel: Kernel,
    files: &Files,
    data: &Path,
    guest_command: &str,
) -> Command {
    let arguments = format!("quiet pollux.cmd=\"{guest_command}\"");
    match monitor {
        Monitor::Pollux => pollux(plan, kernel, files, data, &arguments),
        Monitor::QemuThreads => qemu(plan, kernel, files, data, &arguments, "threads"),
        Monitor::QemuUring => qemu(plan, kernel, files, data, &arguments, "io_uring"),
    }
}

fn pollux(plan: &Plan, kernel: Kernel, files: &Files, data: &Path, arguments: &str) -> Command {
    let boot = if kernel == Kernel::Pvh { "pvh" } else { "linux64" };
    let mut command = Command::new(&plan.pollux);
    command
        .arg("run")
        .arg("--kernel")
        .arg(files.kernel(plan, kernel))
        .args(["--boot", boot])
        .arg("--initrd")
        .arg(files.file(&Files::initrd_name(plan)))
        .args(["--cmdline", arguments, "--cpus", "1"])
        .args(["--memory", &format!("{MEMORY_MIB}M")])
        .arg("--disk")
        .arg(join(&[&"path=", &files.root(), &",readonly=on"]))
        .arg("--disk")
        .arg(join(&[&"path=", &data]))
        .arg("--console")
        .arg(join(&[&"file=", &files.console()]))
        .arg("--results")
        .arg(files.results())
        .arg("--stats")
        .arg(files.stats());
    command
}

fn qemu(
    plan: &Plan,
    kernel: Kernel,
    files: &Files,
    data: &Path,
    arguments: &str,
    aio: &str,
) -> Command {
    let mut command = util::command("qemu-system-x86_64");
    command
        .args(["-M", "q35", "-enable-kvm", "-cpu", "host", "-nodefaults", "-nographic"])
        .args(["-no-reboot", "-name", "bench,debug-threads=on", "-monitor", "none"])
        .args(["-smp", "1", "-m", &MEMORY_MIB.to_string()])
        .arg("-kernel")
        .arg(files.kernel(plan, kernel))
        .arg("-initrd")
        .arg(files.file(&Files::initrd_name(plan)))
        .args(["-append", &format!("{COMMAND_LINE} {arguments}")])
        .arg("-serial")
        .arg(join(&[&"file:", &files.console()]))
        .arg("-serial")
        .arg(join(&[&"file:", &files.results()]))
        .args(["-object", "iothread,id=io"])
        .arg("-drive")
        .arg(join(&[&"if=none,id=root,format=raw,readonly=on,file=", &files.root()]))
        .args(["-device", "virtio-blk-pci,drive=root,iothread=io,disable-legacy=on"])
        .arg("-drive")
        .arg(join(&[&format!("if=none,id=data,format=raw,aio={aio},file="), &data]))
        .args(["-device", "virtio-blk-pci,drive=data,iothread=io,disable-legacy=on"]);
    command
}

/// Options are words and paths run together.
fn join(parts: &[&dyn AsRef<std::ffi::OsStr>]) -> OsString {
    parts.iter().map(|part| part.as_ref()).collect()
}
