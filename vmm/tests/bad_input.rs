//! Bad input of `pollux run`: one line on stderr that names what is wrong, nothing on stdout, exit
//! status 2, and no VM.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// A user and group without any rights.
const NOBODY: u32 = 65534;

/// A directory with a kernel that loads, in which each test puts what is bad.
struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap() };
        fs::set_permissions(place.directory.path(), Permissions::from_mode(0o755)).unwrap();
        fs::write(place.path("vmlinux"), kernel()).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A file of zeros.
    fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// `pollux run` with `options`, in which `@NAME` is a file of this place, after the kernel
    /// (unless they name one).
    fn command(&self, program: &Path, options: &str) -> Command {
        // What is not refused runs a guest that never ends: `timeout` fails the test then.
        let mut command = Command::new("timeout");
        command.arg("60").arg(program).arg("run").current_dir(self.directory.path());
        if !options.contains("--kernel") {
            command.arg("--kernel").arg(self.path("vmlinux"));
        }
        if !options.contains("--boot") {
            command.args(["--boot", "linux64"]); // which is taken on trust
        }
        let here = format!("{}/", self.directory.path().display());
        command.args(options.split_whitespace().map(|word| word.replace('@', &here)));
        command.stdin(Stdio::null());
        command
    }

    /// Runs it, and gives the one line it must have answered.
    fn refused(&self, options: &str) -> String {
        let program = Path::new(env!("CARGO_BIN_EXE_pollux"));
        line(options, self.command(program, options).output().unwrap())
    }

    /// The same as a user who may nothing, so that permissions bind. The program is copied to where
    /// that user can reach it, by another process: a file that some process has open for writing
    /// cannot be executed, and every fork of another test's would inherit ours.
    fn refused_as_nobody(&self, options: &str) -> String {
        let program = self.path("pollux");
        let copy = Command::new("cp").arg(env!("CARGO_BIN_EXE_pollux")).arg(&program).status();
        assert!(copy.unwrap().success());
        let mut command = self.command(&program, options);
        // SAFETY: getuid has no precondition.
        if unsafe { libc::getuid() } == 0 {
            command.uid(NOBODY).gid(NOBODY);
        }
        line(options, command.output().unwrap())
    }
}

fn line(options: &str, output: Output) -> String {
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{options}: {stderr}");
    assert_eq!(output.stdout, b"", "{options}");
    let line = stderr.strip_suffix('\n').unwrap_or_else(|| panic!("{options}: {stderr:?}"));
    assert!(!line.contains('\n'), "{options}: {line}");
    line.strip_prefix("pollux: ").unwrap_or_else(|| panic!("{options}: {line}")).to_owned()
}

/// An ELF executable of one page at 16 MiB, which is a kernel as far as loading goes.
fn kernel() -> Vec<u8> {
    let address = 16u64 << 20;
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1];
    elf.resize(16, 0);
    elf.extend([2u16, 62].map(u16::to_le_bytes).concat()); // ET_EXEC, EM_X86_64
    elf.extend(1u32.to_le_bytes());
    elf.extend([address, 64, 0].map(u64::to_le_bytes).concat()); // entry, program headers, sections
    elf.extend(0u32.to_le_bytes());
    elf.extend([64u16, 56, 1, 64, 0, 0].map(u16::to_le_bytes).concat());
    elf.extend([1u32, 5].map(u32::to_le_bytes).concat()); // PT_LOAD, readable and executable
    elf.extend([0u64, address, address, 4096, 4096, 4096].map(u64::to_le_bytes).concat());
    elf.resize(4096, 0xf4);
    elf
}

/// Locks the file as a guest that writes to it would, while the file returned lives.
fn lock(path: &Path) -> File {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    // SAFETY: all-zero is a valid `flock`: the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the descriptor is open, and `lock` outlives the call.
    let status = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    assert_eq!(status, 0);
    file
}

/// Asserts that `line` begins with the option and tells all of `expected`.
#[track_caller]
fn tells(line: &str, option: &str, expected: &[&str]) {
    assert!(line.starts_with(option), "should begin with {option}: {line}");
    for words in expected {
        assert!(line.contains(words), "should tell {words}: {line}");
    }
}

#[test]
fn missing_files() {
    let place = Place::new();
    tells(&place.refused("--kernel @none"), "--kernel", &["/none: no such file"]);
    tells(&place.refused("--initrd @none"), "--initrd", &["/none: no such file"]);
    tells(&place.refused("--disk path=@none"), "--disk", &["/none: ", "no such file"]);
    tells(&place.refused("--stats @no/dir"), "--stats", &["cannot be made", "no such file"]);
    tells(&place.refused("--results @no/dir"), "--results", &["cannot be made"]);
    tells(&place.refused("--console file=@no/dir"), "--console", &["cannot be made"]);
}

#[test]
fn files_of_the_wrong_kind() {
    let place = Place::new();
    for option in ["--kernel", "--initrd", "--results", "--stats"] {
        tells(&place.refused(&format!("{option} @")), option, &["is a directory"]);
    }
    tells(&place.refused("--disk path=@"), "--disk", &["directory"]);
    tells(&place.refused("--disk path=/dev/null"), "--disk", &["block device"]);
}

#[test]
fn unreadable_files() {
    let place = Place::new();
    for (name, option) in
        [("k", "--kernel @k"), ("i", "--initrd @i"), ("d", "--disk path=@d,readonly=on")]
    {
        let path = place.file(name, 512);
        fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap();
        let told = place.refused_as_nobody(option);
        tells(&told, option.split([' ', '=']).next().unwrap(), &["permission denied"]);
    }
}

#[test]
fn outputs_that_cannot_be_written() {
    let place = Place::new();
    fs::write(place.path("old"), "kept").unwrap();
    fs::set_permissions(place.path("old"), Permissions::from_mode(0o444)).unwrap();
    let told = place.refused_as_nobody("--stats @old");
    tells(&told, "--stats", &["cannot be written: permission denied"]);
    let told = place.refused_as_nobody("--results @new");
    // The directory belongs to who runs the tests, so it binds only nobody.
    // SAFETY: getuid has no precondition.
    if unsafe { libc::getuid() } == 0 {
        tells(&told, "--results", &["cannot be made", "permission denied"]);
    }
    assert_eq!(fs::read(place.path("old")).unwrap(), b"kept");
}

#[test]
fn outputs_that_would_destroy_something() {
    let place = Place::new();
    place.file("disk", 512);
    let told = place.refused("--disk path=@disk --stats @disk");
    tells(&told, "--stats", &["is the file of --disk as well"]);
    let told = place.refused("--stats @vmlinux");
    tells(&told, "--stats", &["is the file of --kernel as well"]);
    let told = place.refused("--stats @out --results @out");
    tells(&told, "--stats", &["is the file of --results as well"]);
    assert_eq!(fs::read(place.path("vmlinux")).unwrap(), kernel());
}

#[test]
fn what_is_not_a_kernel() {
    let place = Place::new();
    place.file("empty", 0);
    place.file("zeros", 100_000);
    fs::write(place.path("text"), "#!/bin/sh\n").unwrap();
    fs::write(place.path("cut"), &kernel()[..100]).unwrap();
    for name in ["empty", "zeros", "text", "cut"] {
        tells(&place.refused(&format!("--kernel @{name}")), "--kernel", &[name, "not a kernel"]);
    }
    // An ELF without the PVH note cannot be entered that way.
    tells(&place.refused("--boot pvh"), "--kernel", &["vmlinux: "]);
}

#[test]
fn an_initrd_that_does_not_fit() {
    let place = Place::new();
    place.file("initrd", 65 << 20);
    let told = place.refused("--memory 64M --initrd @initrd");
    tells(&told, "--initrd", &["larger than memory", "68157440 bytes", "--memory"]);
    place.file("initrd", 0);
    tells(&place.refused("--initrd @initrd"), "--initrd", &["is empty"]);
}

#[test]
fn a_kernel_that_does_not_fit() {
    let place = Place::new();
    let mut high = kernel();
    high[64 + 24..64 + 32].copy_from_slice(&(1u64 << 30).to_le_bytes()); // physical address
    fs::write(place.path("high"), high).unwrap();
    tells(&place.refused("--kernel @high --memory 64M"), "--kernel", &["--memory"]);
}

#[test]
fn a_command_line_that_does_not_fit() {
    let place = Place::new();
    let told = place.refused(&format!("--cmdline {}", "x".repeat(5000)));
    tells(&told, "--cmdline", &["at most 2047"]);
    assert!(told.len() < 500, "{told}");
}

#[test]
fn disks_of_a_wrong_size() {
    let place = Place::new();
    place.file("odd", 1000);
    let told = place.refused("--disk path=@odd");
    tells(&told, "--disk", &["/odd: ", "1000 bytes", "multiple of 512"]);
}

#[test]
fn a_disk_that_somebody_writes_to() {
    let place = Place::new();
    let path = place.file("disk", 512);
    let held = lock(&path);
    tells(&place.refused("--disk path=@disk"), "--disk", &["/disk: is in use"]);
    tells(&place.refused("--disk path=@disk,readonly=on"), "--disk", &["is being written"]);
    drop(held);
    // Free again, it gets as far as the next thing that is wrong.
    place.file("text", 10);
    tells(&place.refused("--disk path=@disk --kernel @text"), "--kernel", &["not a kernel"]);
}

#[test]
fn a_read_only_file_as_a_writable_disk() {
    let place = Place::new();
    let path = place.file("disk", 512);
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
    tells(&place.refused("--disk path=@disk"), "--disk", &["read-only", "readonly=on"]);
    place.file("text", 10);
    let told = place.refused("--disk path=@disk,readonly=on --kernel @text");
    tells(&told, "--kernel", &["not a kernel"]);
}

#[test]
fn one_file_as_two_disks() {
    let place = Place::new();
    place.file("disk", 512);
    for second in ["path=@disk", "path=@./disk,readonly=on"] {
        let told = place.refused(&format!("--disk path=@disk --disk {second}"));
        tells(&told, "--disk", &["two disks at once", "readonly=on"]);
    }
}

#[test]
fn numbers_out_of_range() {
    let place = Place::new();
    tells(&place.refused("--cpus 0"), "--cpus 0: ", &["at least 1"]);
    tells(
        &place.refused("--cpus 1000000"),
        "--cpus 1000000: ",
        &["more than one VM", "at most 254"],
    );
    tells(&place.refused("--cpus -1"), "unexpected argument '-1'", &[]);
    tells(&place.refused("--memory 1M"), "--memory 1M: ", &["at least 64M"]);
    tells(&place.refused("--memory 12Q"), "--memory 12Q: not a size", &["512M"]);
    tells(&place.refused("--memory 16777215G"), "--memory ", &["more than this CPU can address"]);
    tells(&place.refused("--halt-poll-ns 5s"), "--halt-poll-ns 5s: too long", &["4294967295"]);
    tells(&place.refused("--io-poll-ns 1m"), "--io-poll-ns 1m: not a time", &["200us"]);
    tells(&place.refused("--pin vcpu0=99999"), "--pin vcpu0=99999: ", &["is not there"]);
    tells(&place.refused("--pin vcpu1=0"), "--pin vcpu1=0: ", &["only one vCPU"]);
}

#[test]
fn unknown_options_keys_and_words() {
    let place = Place::new();
    place.file("disk", 512);
    tells(&place.refused("--frob"), "unexpected argument '--frob'", &[]);
    tells(&place.refused("--initrd"), "a value is required for '--initrd", &[]);
    let told = place.refused("--disk path=@disk,readnoly=on");
    tells(&told, "--disk", &["unknown key \"readnoly\"", "readonly", "event-idx"]);
    tells(&place.refused("--disk path=@disk,engine=aio"), "--disk engine=aio: ", &["uring"]);
    tells(
        &place.refused("--halt sideways"),
        "--halt sideways: ",
        &["kernel", "user", "passthrough"],
    );
    tells(&place.refused("--guest-idle deep"), "--guest-idle deep: ", &["haltpoll"]);
    tells(&place.refused("--boot efi"), "--boot efi: ", &["linux64"]);
    tells(&place.refused("--console tcp"), "--console tcp: ", &["stdio"]);
    tells(&place.refused("--on-reboot loop"), "--on-reboot loop: ", &["restart"]);
}

#[test]
fn contradictions_about_idling() {
    let place = Place::new();
    let told = place.refused("--guest-idle haltpoll --cmdline idle=poll");
    tells(&told, "--cmdline idle=poll: ", &["--guest-idle haltpoll"]);
    let told = place.refused("--guest-idle halt --guest-halt-poll-ns 1ms");
    tells(&told, "--guest-halt-poll-ns 1000000: ", &["idle=halt"]);
}

#[test]
fn recordings_that_cannot_be_made_or_replayed() {
    let place = Place::new();
    let told = place.refused("--halt passthrough --record @halts");
    tells(&told, "--record ", &["HLT does not leave the guest", "--halt kernel or user"]);
    tells(&place.refused("--halt user --record @none/halts"), "--record ", &["no such file"]);
    tells(&place.refused("--halt user --record @vmlinux"), "--record ", &["file of --kernel"]);
    let told = place.refused_as_nobody("--record /dev/null");
    tells(&told, "--record /dev/null: cannot trace KVM: /sys/kernel/", &["--halt user"]);
    assert!(!place.path("halts").exists());

    let replay = |path: &Path, options: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pollux"));
        command.arg("replay").arg(path).args(options.split_whitespace());
        line(&format!("{} {options}", path.display()), command.output().unwrap())
    };
    let noise = place.path("noise");
    fs::write(&noise, [0xa5; 200]).unwrap();
    tells(&replay(&noise, ""), "FILE ", &["not a recording", "pollux run --record"]);
    tells(&replay(&place.path("none"), ""), "FILE ", &["no such file"]);
    tells(&replay(&noise, "--halt-poll-ns 1us,2"), "FILE ", &["not a recording"]);
    tells(&replay(&noise, "--halt-poll-ns 1us,2m"), "--halt-poll-ns 2m: not a time", &["200us"]);
    tells(&replay(&noise, "--until never"), "--until never: not a time", &[]);
}

#[test]
fn no_kernel_and_no_command() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_pollux")).args(args).output().unwrap();
        line(&args.join(" "), output)
    };
    tells(&run(&["run"]), "the following required arguments", &["--kernel"]);
    tells(&run(&[]), "no command", &["pollux <COMMAND>"]);
    tells(&run(&["walk"]), "unrecognized subcommand 'walk'", &[]);
}

#[test]
fn a_kvm_that_is_absent_forbidden_or_something_else() {
    let place = Place::new();
    tells(&place.refused("--kvm @none"), "--kvm", &["no such file", "kvm_intel or kvm_amd"]);
    let path = place.file("forbidden", 0);
    fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap();
    let told = place.refused_as_nobody("--kvm @forbidden");
    tells(&told, "--kvm", &["permission denied", "group"]);
    tells(&place.refused("--kvm /dev/null"), "--kvm", &["not a KVM device", "/dev/kvm"]);
}
