//! Outputs that nobody reads: they must neither hang Pollux nor end it.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use pollux_tests::elf::{self, print, spin, triple_fault};
use pollux_tests::guest::{program, scratch};

const COM1: u16 = 0x3f8;
const LIMIT: Duration = Duration::from_secs(30);

fn fifo(dir: &Path) -> PathBuf {
    let path = dir.join("fifo");
    let name = CString::new(path.as_os_str().as_bytes()).expect("a path");
    // SAFETY: the path is a string that ends with NUL.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    path
}

fn pollux(kernel: &Path, options: &[String]) -> Command {
    let mut command = Command::new(program());
    command.args(["run", "--boot", "linux64", "--kernel"]).arg(kernel).args(options);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn end(mut child: Child) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().expect("waiting works") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().expect("it can be killed");
    child.wait().expect("waiting works");
    None
}

#[test]
fn a_fifo_that_nobody_reads_is_refused() {
    let dir = scratch();
    let kernel = elf::write(dir.path(), &spin());
    let fifo = fifo(dir.path());
    for options in [
        ["--results".to_owned(), fifo.display().to_string()],
        ["--console".to_owned(), format!("file={}", fifo.display())],
    ] {
        let child = pollux(&kernel, &options).spawn().expect("pollux starts");
        assert_eq!(end(child).and_then(|status| status.code()), Some(2), "{options:?}");
    }
}

#[test]
fn a_reader_that_stalls_does_not_keep_pollux_from_stopping() {
    let dir = scratch();
    // Prints for ever: the text, and back to it.
    let mut code = print(COM1, "flood\n");
    let back = u8::try_from(256 - (code.len() + 2)).expect("a short jump");
    code.extend([0xeb, back]);
    let kernel = elf::write(dir.path(), &code);
    let fifo = fifo(dir.path());
    let reader = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&fifo)
        .expect("a reader that does not read");
    let options = ["--console".to_owned(), format!("file={}", fifo.display())];
    let child = pollux(&kernel, &options).spawn().expect("pollux starts");
    let start = Instant::now();
    let mut before = -1;
    loop {
        let mut waiting: libc::c_int = 0;
        // SAFETY: the request fills one number.
        unsafe { libc::ioctl(reader.as_raw_fd(), libc::FIONREAD, &raw mut waiting) };
        if waiting > 0 && waiting == before {
            break;
        }
        before = waiting;
        assert!(start.elapsed() < LIMIT, "the pipe never filled");
        std::thread::sleep(Duration::from_millis(200));
    }
    // SAFETY: no memory is involved; the child is not yet waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    assert_eq!(end(child).and_then(|status| status.code()), Some(0));
}

#[test]
fn a_stderr_that_takes_nothing_changes_no_exit_status() {
    let dir = scratch();
    let kernel = elf::write(dir.path(), &triple_fault());
    let full = || Stdio::from(OpenOptions::new().write(true).open("/dev/full").expect("/dev/full"));
    let child = pollux(&kernel, &[]).stderr(full()).spawn().expect("pollux starts");
    assert_eq!(end(child).and_then(|status| status.code()), Some(4));
    let options = ["--cpus".to_owned(), "0".to_owned()];
    let child = pollux(&kernel, &options).stderr(full()).spawn().expect("pollux starts");
    assert_eq!(end(child).and_then(|status| status.code()), Some(2));
    // A console that is gone, and a stderr that cannot tell so.
    let child = pollux(&kernel, &[]).stdout(full()).stderr(full()).spawn().expect("pollux starts");
    assert_eq!(end(child).and_then(|status| status.code()), Some(4));
}
