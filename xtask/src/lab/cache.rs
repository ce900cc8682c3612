//! What the emulated machine is made of, made once: a kernel with KVM, its modules and busybox as an
//! initramfs, and a QEMU whose emulated SVM can be relied on.
//!
//! Everything is fetched with apt, which checks the archive's signatures, laid out in a directory of
//! its own under a lock, and moved into place when it is whole: a half-made cache is never used.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::cpio::Archive;
use crate::guest::kernel::{self, Modules};
use crate::guest::packages;
use crate::util::{self, Context, Error, Result, bail, step};

/// Changes when what is in the cache changes; part of its path.
const FORMAT: &str = "2";

/// The kernel of the emulated machine: a pattern for apt-cache.
const KERNEL: (&str, &str) = ("6.12", r"^linux-image-6\.12\.[0-9]+\+deb12-amd64$");

/// What L1 loads: its root, its scratch disk, KVM with AMD's SVM, and loop devices with the device
/// mapper's disks that fail.
const MODULES: [&str; 10] = [
    "9pnet_virtio",
    "9p",
    "virtio_console",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "kvm_amd",
    "loop",
    "dm_flakey",
    "dm_delay",
];

/// QEMU of this suite: newer than Debian 12's own, whose emulation loses a breakpoint race and
/// kills L1, and whose VMRUN drops the interrupt shadow.
const QEMU_SUITE: &str = "bookworm-backports";
const QEMU_PACKAGES: [&str; 4] =
    ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];
const QEMU_PROGRAM: &str = "qemu/usr/bin/qemu-system-x86_64";

const HOST_PROGRAMS: &[(&str, &str)] = &[
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("mke2fs", "e2fsprogs"),
];

/// A finished cache.
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// Returns the cache, making it if it is not there.
    ///
    /// # Errors
    /// One line on what is missing; nothing half made is left.
    pub fn open() -> Result<Cache> {
        util::ensure_programs(HOST_PROGRAMS)?;
        let base = base_dir()?;
        fs::create_dir_all(&base).context(base.display())?;
        let base = base.canonicalize().context(base.display())?;
        let dir = base.join(format!("machine-{FORMAT}"));
        let cache = Cache { dir };
        let lock = File::create(base.join("lock")).context("the lab's lock")?;
        lock.lock().context("the lab's lock")?;
        if !cache.dir.exists() {
            step("making the lab's machine (once)");
            let new = base.join("new");
            util::recreate_dir(&new)?;
            make(&new)?;
            fs::rename(&new, &cache.dir).context(cache.dir.display())?;
        }
        ensure_qemu_starts(&cache)?;
        Ok(cache)
    }

    /// The kernel's ELF image, which QEMU enters through PVH: nothing to decompress in emulation.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// The part of the initramfs that is the same for every run.
    pub fn initramfs(&self) -> PathBuf {
        self.dir.join("initramfs")
    }

    /// A QEMU command with the firmware's directories set.
    pub fn qemu(&self) -> Command {
        let mut command = Command::new(self.dir.join(QEMU_PROGRAM));
        for data in ["qemu/usr/share/seabios", "qemu/usr/share/qemu"] {
            command.arg("-L").arg(self.dir.join(data));
        }
        command
    }

    /// Makes a directory for one run. Directories of runs that were killed are removed on the way.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn run_dir(&self) -> Result<RunDir> {
        let base = self.dir.parent().ok_or(Error("the cache has no parent".into()))?;
        let lock = File::create(base.join("lock")).context("the lab's lock")?;
        lock.lock().context("the lab's lock")?;
        RunDir::sweep(base);
        RunDir::create(base)
    }
}

/// A run's own directory, removed when dropped. A locked file in it says that its owner lives.
pub struct RunDir {
    path: PathBuf,
    _alive: File,
}

impl RunDir {
    const PREFIX: &str = "run-";
    const ALIVE: &str = "alive";

    fn create(base: &Path) -> Result<RunDir> {
        let path = (0..)
            .map(|number| base.join(format!("{}{}-{number}", Self::PREFIX, std::process::id())))
            .find(|path| !path.exists())
            .ok_or(Error("no name is left for a run".into()))?;
        fs::create_dir(&path).context(path.display())?;
        let alive = File::create(path.join(Self::ALIVE)).context(path.display())?;
        alive.lock().context(path.display())?;
        Ok(RunDir { path, _alive: alive })
    }

    fn sweep(base: &Path) {
        let Ok(entries) = fs::read_dir(base) else { return };
        for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let dead = name.starts_with(Self::PREFIX)
                && File::open(path.join(Self::ALIVE)).map_or(true, |file| file.try_lock().is_ok());
            if dead {
                // Left for the next sweep if it cannot be removed.
                fs::remove_dir_all(&path).ok();
            }
        }
    }

    /// A file in the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.path).ok();
    }
}

/// `POLLUX_LAB_CACHE`, else `pollux-lab` in the user's cache directory.
fn base_dir() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    variable("POLLUX_LAB_CACHE")
        .map(PathBuf::from)
        .or_else(|| variable("XDG_CACHE_HOME").map(|dir| PathBuf::from(dir).join("pollux-lab")))
        .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache/pollux-lab")))
        .ok_or(Error("neither XDG_CACHE_HOME nor HOME is set: nowhere to keep the lab".into()))
}

fn make(dir: &Path) -> Result<()> {
    let scratch = dir.join("scratch");
    fs::create_dir(&scratch).context(scratch.display())?;
    let kernel = packages::newest_kernel(KERNEL.0, KERNEL.1).or_else(|_| {
        util::apt_update()?;
        packages::newest_kernel(KERNEL.0, KERNEL.1)
    })?;
    step(format_args!("fetching {} and busybox-static", kernel.package));
    download(&scratch, &[], &[&kernel.package, "busybox-static"])?;
    let root = scratch.join("root");
    unpack_all(&scratch, &root)?;
    let image = root.join(format!("boot/vmlinuz-{}", release(&kernel.package)));
    let bz_image = fs::read(&image).context(image.display())?;
    fs::write(dir.join("vmlinux"), kernel::extract_vmlinux(&bz_image)?).context("vmlinux")?;
    let modules = root.join("lib/modules").join(release(&kernel.package));
    let initramfs = initramfs(&Modules::open(&modules)?, &root.join("bin/busybox"))?;
    fs::write(dir.join("initramfs"), initramfs).context("initramfs")?;

    fs::remove_dir_all(&scratch).context(scratch.display())?;
    fs::create_dir(&scratch).context(scratch.display())?;
    step(format_args!("fetching QEMU of {QEMU_SUITE}"));
    download_qemu(&scratch)?;
    unpack_all(&scratch, &dir.join("qemu"))?;
    let program = dir.join(QEMU_PROGRAM);
    let mut image = fs::read(&program).context(program.display())?;
    drop_stale_vector(&mut image)?;
    fs::write(&program, image).context(program.display())?;
    fs::remove_dir_all(&scratch).context(scratch.display())
}

/// The kernel's release in the name of its package.
fn release(package: &str) -> &str {
    package.strip_prefix("linux-image-").unwrap_or(package)
}

fn initramfs(modules: &Modules, busybox: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "host", "lab", "modules", "proc", "sys"] {
        archive.directory(dir)?;
    }
    archive.character_device("dev/console", 5, 1)?;
    archive.file("bin/busybox", 0o755, &fs::read(busybox).context(busybox.display())?)?;
    let mut order = String::new();
    for (name, image) in modules.closure(&MODULES)? {
        archive.file(&format!("modules/{name}.ko"), 0o644, &image)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes())?;
    archive.finish()
}

/// Downloads packages into a directory.
fn download(dir: &Path, options: &[String], names: &[&str]) -> Result<()> {
    util::run(
        util::command("apt-get")
            .current_dir(dir)
            .args(["-qq", "-o", "APT::Sandbox::User=root"])
            .args(options)
            .arg("download")
            .args(names),
    )
}

/// Downloads QEMU from its suite, on the mirror that this machine's apt uses already.
fn download_qemu(dir: &Path) -> Result<()> {
    let sites = util::output_text(util::command("apt-get").args([
        "indextargets",
        "--format",
        "$(SITE)",
        "Created-By: Packages",
    ]))?;
    let site = sites
        .lines()
        .find(|site| !site.contains("security"))
        .ok_or(Error("apt has no package source".into()))?;
    let keyring = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let sources = dir.join("sources.list");
    fs::write(&sources, format!("deb [signed-by={keyring}] {site} {QEMU_SUITE} main\n"))
        .context(sources.display())?;
    let lists = dir.join("lists");
    fs::create_dir_all(lists.join("partial")).context(lists.display())?;
    let options = [
        "-o".into(),
        format!("Dir::Etc::SourceList={}", sources.display()),
        "-oDir::Etc::SourceParts=/dev/null".into(),
        format!("-oDir::State::Lists={}", lists.display()),
        "-oDir::Cache::pkgcache=".into(),
        "-oDir::Cache::srcpkgcache=".into(),
    ];
    util::run(
        util::command("apt-get")
            .args(["-qq", "-oAPT::Sandbox::User=root"])
            .args(&options)
            .arg("update"),
    )?;
    let names: Vec<String> =
        QEMU_PACKAGES.iter().map(|name| format!("{name}/{QEMU_SUITE}")).collect();
    download(dir, &options, &names.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Unpacks every package of a directory.
fn unpack_all(dir: &Path, root: &Path) -> Result<()> {
    fs::create_dir_all(root).context(root.display())?;
    for entry in fs::read_dir(dir).context(dir.display())? {
        let path = entry.context(dir.display())?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            util::run(util::command("dpkg-deb").arg("-x").arg(&path).arg(root))?;
        }
    }
    Ok(())
}

/// Makes sure that QEMU finds its shared libraries: those of the release's own QEMU package.
fn ensure_qemu_starts(cache: &Cache) -> Result<()> {
    let starts = || util::run(cache.qemu().arg("--version"));
    starts().or_else(|_| {
        util::install_packages(&["qemu-system-x86"])?;
        starts()
    })
}

/// Removes one store from QEMU's `helper_vmrun`.
///
/// After VMRUN has injected an external interrupt into its guest, `cs->exception_index` still holds
/// the vector. If the vCPU's thread is kicked before the guest's next exit, the vector is delivered
/// again, as an exception and whatever RFLAGS.IF says; the guest then spins or dies. The injection
/// itself does not need the store. It becomes a six-byte no-op. A QEMU in which it is not found
/// exactly once is refused.
fn drop_stale_vector(image: &mut [u8]) -> Result<()> {
    let mut places = image.windows(InjectedVector::BYTES).enumerate().filter_map(|(at, code)| {
        InjectedVector::matches(code).then_some(at + InjectedVector::STORE)
    });
    let (Some(store), None) = (places.next(), places.next()) else {
        bail!("QEMU's code for VMRUN is not what the lab knows how to correct");
    };
    image[store..store + InjectedVector::NO_OP.len()].copy_from_slice(InjectedVector::NO_OP);
    Ok(())
}

/// The machine code around that store, which differs between QEMU's versions in the offsets of
/// fields only (7.2, 10.0 and 11.1 were looked at):
///
/// ```text
/// movzbl %r12b,%esi                  the vector
/// mov    %r13d,is_int(%rbx)          env->exception_is_int, at some offset A
/// mov    %esi,index(%rbx)            cs->exception_index, in front of env: negative; the store
/// movl   $0,error_code(%rbx)         env->error_code, at A + 4
/// movq   $-1,next_eip(%rbx)          env->exception_next_eip, at A + 8
/// ```
struct InjectedVector;

impl InjectedVector {
    const BYTES: usize = 38;
    /// Where the store is.
    const STORE: usize = 11;
    const NO_OP: &[u8] = b"\x66\x0f\x1f\x44\0\0";

    fn matches(code: &[u8]) -> bool {
        let has = |at: usize, bytes: &[u8]| code.get(at..at + bytes.len()) == Some(bytes);
        let offset =
            |at: usize| code.get(at..)?.first_chunk().map(|bytes| i32::from_le_bytes(*bytes));
        let opcodes = has(0, b"\x41\x0f\xb6\xf4")
            && has(4, b"\x44\x89\xab")
            && has(11, b"\x89\xb3")
            && has(17, b"\xc7\x83")
            && has(23, b"\0\0\0\0")
            && has(27, b"\x48\xc7\x83")
            && has(34, b"\xff\xff\xff\xff");
        opcodes
            && match (offset(7), offset(13), offset(19), offset(30)) {
                (Some(is_int @ 0..0x10000), Some(..0), Some(error_code), Some(next_eip)) => {
                    error_code == is_int + 4 && next_eip == is_int + 8
                }
                _ => false,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[u8] = b"x\x41\x0f\xb6\xf4\x44\x89\xab\xe0\x33\0\0\x89\xb3\x10\xd7\xff\xff\
        \xc7\x83\xe4\x33\0\0\0\0\0\0\x48\xc7\x83\xe8\x33\0\0\xff\xff\xff\xffy";

    #[test]
    fn the_store_and_nothing_else_becomes_a_no_op() {
        let mut image = KNOWN.to_vec();
        drop_stale_vector(&mut image).unwrap();
        assert_eq!(&image[12..18], b"\x66\x0f\x1f\x44\0\0");
        assert_eq!(image[..12], KNOWN[..12]);
        assert_eq!(image[18..], KNOWN[18..]);
    }

    #[test]
    fn an_unknown_or_ambiguous_qemu_is_refused() {
        assert!(drop_stale_vector(&mut b"another program".to_vec()).is_err());
        assert!(drop_stale_vector(&mut [KNOWN, KNOWN].concat()).is_err());
        let mut other_field = KNOWN.to_vec();
        other_field[20] = 0xf4; // what is set to 0 does not follow what was set before
        assert!(drop_stale_vector(&mut other_field).is_err());
    }

    #[test]
    fn a_run_directory_goes_with_its_owner_and_a_dead_one_with_the_next_sweep() {
        let base = std::env::temp_dir().join(format!("pollux-lab-{}", std::process::id()));
        fs::create_dir_all(base.join("run-1-0")).unwrap(); // its owner was killed
        let live = RunDir::create(&base).unwrap();
        RunDir::sweep(&base);
        assert!(!base.join("run-1-0").exists());
        assert!(live.path.exists());
        let path = live.path.clone();
        drop(live);
        assert!(!path.exists());
        fs::remove_dir_all(&base).unwrap();
    }
}
