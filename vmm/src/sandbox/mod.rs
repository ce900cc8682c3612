//! What Pollux keeps itself from doing while a guest runs, so that a guest which takes over one of its
//! threads gets little: `--sandbox`, on by default.
//!
//! In order: when the VM is assembled, and every file open, [`Sandbox::confine`] gives up privileges
//! (`no_new_privs`, capabilities) and all files but those still to be opened (Landlock). Every
//! thread then starts with [`Sandbox::enter`], which leaves it the system calls that its kind makes
//! (seccomp). What is not on a thread's list fails with EPERM, is told by its name, and ends the
//! run in order: see [`violation`].

mod calls;
mod capabilities;
mod files;
mod starter;
mod violation;

use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::thread;

use seccompiler::BpfProgram;

pub use starter::Starter;
pub use violation::Violation;

use crate::builder::host_error;
use crate::config::VmConfig;
use crate::vm::VmError;

/// The kinds of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The first thread: waits for signals and clients, writes statistics, may boot the guest anew.
    Main,
    /// Starts the workers, so that vCPUs need not be able to start threads.
    Starter,
    /// A disk queue's thread.
    Worker,
    /// A vCPU's thread.
    Vcpu,
    /// Writes a recording of halts.
    Recorder,
}

/// What the threads of this process may do.
#[derive(Clone, Default)]
pub struct Sandbox(Option<Arc<Filters>>);

/// The filters of each kind of thread, all of which a call must pass.
struct Filters {
    main: Vec<BpfProgram>,
    starter: Vec<BpfProgram>,
    worker: Vec<BpfProgram>,
    vcpu: Vec<BpfProgram>,
    recorder: Vec<BpfProgram>,
}

impl Sandbox {
    /// Prepares what `config` asks for.
    ///
    /// # Errors
    /// The host has no seccomp filters, or no room.
    pub fn new(config: &VmConfig) -> Result<Self, VmError> {
        if !config.sandbox {
            return Ok(Self(None));
        }
        violation::install().map_err(host_error("prepare the sandbox"))?;
        // glibc's own rule, eight for each CPU. Without it, whichever thread needs the ninth heap opens a
        // file of sysfs to count the CPUs.
        let heaps = thread::available_parallelism().map_or(1, NonZero::get).saturating_mul(8);
        // SAFETY: changes a limit of the allocator, which takes it over at any time.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, libc::c_int::try_from(heaps).unwrap_or(8)) };
        let filters = Filters {
            main: vec![calls::filter(&calls::main(config.on_reboot))?],
            starter: vec![calls::filter(&calls::starter())?, calls::no_clone3()?],
            worker: vec![calls::filter(&calls::worker())?],
            vcpu: vec![calls::filter(&calls::vcpu())?],
            recorder: vec![calls::filter(&calls::recorder())?],
        };
        Ok(Self(Some(Arc::new(filters))))
    }

    /// Confines the process. Call it before its second thread starts, with every file open that is
    /// not needed again.
    ///
    /// # Errors
    /// The host refused.
    pub fn confine(&self, config: &VmConfig) -> Result<(), VmError> {
        if self.0.is_none() {
            return Ok(());
        }
        capabilities::keep_for_files().map_err(host_error("give up capabilities"))?;
        files::restrict(config).map_err(|error| VmError::Machine(format!("Landlock: {error}")))
    }

    /// From now on the current thread makes only the system calls of its kind. Threads that it starts
    /// inherit that. A second time does nothing.
    ///
    /// # Errors
    /// The host has no seccomp filters.
    pub fn enter(&self, kind: Kind) -> io::Result<()> {
        let Some(filters) = &self.0 else { return Ok(()) };
        if !violation::watch(kind) {
            return Ok(());
        }
        if kind != Kind::Main {
            capabilities::drop_all()?;
        }
        let filters = match kind {
            Kind::Main => &filters.main,
            Kind::Starter => &filters.starter,
            Kind::Worker => &filters.worker,
            Kind::Vcpu => &filters.vcpu,
            Kind::Recorder => &filters.recorder,
        };
        for filter in filters {
            seccompiler::apply_filter(filter).map_err(|error| match error {
                seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                other => io::Error::other(other),
            })?;
        }
        Ok(())
    }

    /// The first system call that was not allowed, if there was one.
    pub fn violation(&self) -> Option<Violation> {
        self.0.as_ref().and_then(|_| violation::first())
    }

    /// Readable once there was one; negative: there never will be.
    pub fn wake(&self) -> std::os::fd::RawFd {
        if self.0.is_some() { violation::wake() } else { -1 }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr;

    use super::*;
    use crate::cli::{self, Command};

    fn config(words: &str) -> VmConfig {
        let image = tempfile::NamedTempFile::new().unwrap();
        let words = words.split_whitespace().map(Into::into);
        let start = ["pollux", "run", "--kernel"].map(Into::into).into_iter();
        let all = start.chain([image.path().into()]).chain(words);
        let Command::Run(args) = cli::parse(all).unwrap().command else { panic!() };
        VmConfig::new(&args).unwrap()
    }

    /// What a call says, on a thread of this kind.
    fn errno_in(kind: Kind, call: Try) -> i32 {
        let sandbox = Sandbox::new(&config("--console off")).unwrap();
        thread::spawn(move || {
            sandbox.enter(kind).unwrap();
            if call() < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
        })
        .join()
        .unwrap()
    }

    /// A system call, and what it returned.
    type Try = fn() -> i64;

    const TRUE: &CStr = c"/bin/true";

    fn execute() -> i64 {
        // SAFETY: the path is a string; no arguments and no environment are allowed to be null.
        unsafe {
            libc::syscall(libc::SYS_execve, TRUE.as_ptr(), ptr::null::<u8>(), ptr::null::<u8>())
        }
    }

    fn fork() -> i64 {
        // SAFETY: a child, if there is one, ends at once.
        match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
            // SAFETY: as above.
            0 => unsafe { libc::_exit(0) },
            result => result,
        }
    }

    fn make_socket() -> i64 {
        // SAFETY: no memory is involved.
        unsafe { libc::syscall(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0) }
    }

    fn trace() -> i64 {
        // SAFETY: no memory is involved.
        unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0) }
    }

    fn map_code() -> i64 {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that nobody uses.
        unsafe { libc::syscall(libc::SYS_mmap, 0, 4096, protection, flags, -1, 0) }
    }

    fn type_into_the_terminal() -> i64 {
        // SAFETY: the third argument is a byte's address.
        unsafe { libc::syscall(libc::SYS_ioctl, -1, libc::TIOCSTI, c"x".as_ptr()) }
    }

    fn open_for_writing() -> i64 {
        // SAFETY: the path is a string.
        unsafe {
            libc::syscall(libc::SYS_openat, libc::AT_FDCWD, c"/dev/null".as_ptr(), libc::O_RDWR)
        }
    }

    fn run_a_vcpu() -> i64 {
        // SAFETY: there is no such descriptor.
        unsafe { libc::syscall(libc::SYS_ioctl, -1, 0xae80, 0) }
    }

    fn write_a_disk() -> i64 {
        // SAFETY: there is no such descriptor, and nothing to write.
        unsafe { libc::syscall(libc::SYS_pwritev2, -1, 0, 0, 0, 0, 0) }
    }

    #[test]
    fn no_thread_does_what_no_thread_has_to() {
        let nobody: [Try; 6] =
            [execute, fork, make_socket, trace, map_code, type_into_the_terminal];
        for kind in [Kind::Main, Kind::Starter, Kind::Worker, Kind::Vcpu, Kind::Recorder] {
            for (number, call) in nobody.into_iter().enumerate() {
                assert_eq!(errno_in(kind, call), libc::EPERM, "{kind:?}, call {number}");
            }
        }
    }

    #[test]
    fn each_kind_does_its_own_work_and_not_the_others() {
        // What gets as far as the kernel finds no such descriptor.
        let table: [(Kind, Try, i32); 10] = [
            (Kind::Vcpu, run_a_vcpu, libc::EBADF),
            (Kind::Vcpu, write_a_disk, libc::EPERM),
            (Kind::Vcpu, open_for_writing, libc::EPERM),
            (Kind::Worker, write_a_disk, libc::EBADF),
            (Kind::Worker, run_a_vcpu, libc::EPERM),
            (Kind::Worker, open_for_writing, libc::EPERM),
            (Kind::Recorder, run_a_vcpu, libc::EPERM),
            (Kind::Recorder, write_a_disk, libc::EPERM),
            (Kind::Recorder, open_for_writing, libc::EPERM),
            (Kind::Main, open_for_writing, 0),
        ];
        for (kind, call, errno) in table {
            assert_eq!(errno_in(kind, call), errno, "{kind:?}");
        }
    }

    #[test]
    fn who_starts_a_thread_may_do_all_that_it_may() {
        let numbers = |calls: Vec<calls::Call>| calls.into_iter().map(|call| call.number).collect();
        let [starter, worker, vcpu, again]: [std::collections::BTreeSet<_>; 4] = [
            numbers(calls::starter()),
            numbers(calls::worker()),
            numbers(calls::vcpu()),
            numbers(calls::main(crate::config::OnReboot::Restart)),
        ];
        assert!(starter.is_superset(&worker));
        assert!(again.is_superset(&vcpu));
    }

    #[test]
    fn only_named_files_are_opened_and_statistics_find_their_place() {
        let directory = tempfile::tempdir().unwrap();
        let stats = directory.path().join("stats");
        let config = config(&format!("--console off --stats {}", stats.display()));
        let opened = thread::spawn(move || {
            let sandbox = Sandbox::new(&config).unwrap();
            sandbox.confine(&config).unwrap();
            let write = |path| std::fs::write(path, "x").map_err(|error| error.kind());
            [write(stats), write("/dev/null".into())].map(|done| done.is_ok())
        })
        .join()
        .unwrap();
        // Without Landlock, both: see `pollux doctor`.
        assert!(opened[0]);
        let landlock = std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
        assert!(!opened[1] || !landlock.contains("landlock"));
    }

    #[test]
    fn switched_off_it_does_nothing() {
        let sandbox = Sandbox::new(&config("--console off --sandbox off")).unwrap();
        thread::spawn(move || {
            sandbox.enter(Kind::Vcpu).unwrap();
            assert!(make_socket() >= 0);
            assert_eq!((sandbox.violation(), sandbox.wake()), (None, -1));
        })
        .join()
        .unwrap();
    }
}
