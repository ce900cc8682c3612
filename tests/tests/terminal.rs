//! The console on a terminal: raw while the guest runs, and as it was before on every way out.

use std::fs::File;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pollux_tests::elf::{self, power_off, print, reset, triple_fault};
use pollux_tests::guest::{program, scratch};

const COM1: u16 = 0x3f8;
const LIMIT: Duration = Duration::from_secs(30);

/// `pollux run` on a terminal of its own.
struct Session {
    ours: File,
    theirs: OwnedFd,
    before: libc::termios,
    pollux: Child,
    seen: String,
    _dir: tempfile::TempDir,
}

impl Drop for Session {
    /// A test that failed leaves no guest behind.
    fn drop(&mut self) {
        let _ = self.pollux.kill();
        let _ = self.pollux.wait();
    }
}

fn settings(terminal: &OwnedFd) -> libc::termios {
    let mut found = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: the pointer is to a termios; the call fills it.
    let status = unsafe { libc::tcgetattr(terminal.as_raw_fd(), found.as_mut_ptr()) };
    assert_eq!(status, 0);
    // SAFETY: filled by the successful call.
    unsafe { found.assume_init() }
}

impl Session {
    fn start(code: &[Vec<u8>]) -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let null = std::ptr::null_mut();
        // SAFETY: the pointers are to live locals, or null for what is not wanted.
        let status =
            unsafe { libc::openpty(&mut ours, &mut theirs, null, null.cast(), null.cast()) };
        assert_eq!(status, 0, "a pseudo terminal");
        // SAFETY: both were just opened and are owned by nobody else.
        let (ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        // SAFETY: changes a flag of our own descriptor.
        unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        let dir = scratch();
        let kernel = elf::write(dir.path(), &code.concat());
        let end = || Stdio::from(theirs.try_clone().expect("a descriptor"));
        let before = settings(&theirs);
        assert_ne!(before.c_lflag & (libc::ICANON | libc::ECHO | libc::ISIG), 0);
        let pollux = Command::new(program())
            .args(["run", "--boot", "linux64", "--kernel"])
            .arg(kernel)
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("pollux starts");
        Session { ours, theirs, before, pollux, seen: String::new(), _dir: dir }
    }

    /// Waits until the guest has printed `text`.
    fn see(&mut self, text: &str) {
        let start = Instant::now();
        let mut bytes = [0; 512];
        while !self.seen.contains(text) {
            assert!(start.elapsed() < LIMIT, "{text:?} not in {:?}", self.seen);
            match self.ours.read(&mut bytes) {
                Ok(count) => self.seen.push_str(&String::from_utf8_lossy(&bytes[..count])),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn is_raw(&self) -> bool {
        settings(&self.theirs).c_lflag & (libc::ICANON | libc::ECHO | libc::ISIG) == 0
    }

    fn type_keys(&mut self, keys: &[u8]) {
        self.ours.write_all(keys).expect("the terminal takes keys");
    }

    /// Waits for the end; the terminal must be as it was before.
    fn ends_with(mut self, status: i32) {
        let start = Instant::now();
        let ended = loop {
            match self.pollux.try_wait().expect("waiting works") {
                Some(ended) => break ended,
                None => std::thread::sleep(Duration::from_millis(2)),
            }
            assert!(start.elapsed() < LIMIT, "pollux did not end; {:?}", self.seen);
        };
        assert_eq!(ended.code(), Some(status), "{:?}", self.seen);
        let (after, before) = (settings(&self.theirs), self.before);
        assert_eq!(after.c_lflag, before.c_lflag);
        assert_eq!(after.c_iflag, before.c_iflag);
        assert_eq!(after.c_oflag, before.c_oflag);
        assert_eq!(after.c_cc, before.c_cc);
    }
}

/// Prints "up", then sends back each byte it gets; `after` runs when that is a `.`.
fn echo(after: &[u8]) -> Vec<Vec<u8>> {
    let mut code = vec![0x66, 0xba, 0xfd, 0x03]; // again: mov dx, 0x3fd
    code.push(0xec); // in al, dx
    code.extend([0xa8, 0x01]); // test al, 1: is there a byte?
    code.extend([0x74, 0xf7]); // jz again
    code.extend([0x66, 0xba, 0xf8, 0x03]); // mov dx, 0x3f8
    code.push(0xec); // in al, dx
    code.push(0xee); // out dx, al
    code.extend([0x3c, b'.']); // cmp al, '.'
    code.extend([0x75, 0xed]); // jne again
    vec![print(COM1, "up\n"), code, after.to_vec()]
}

#[test]
fn keys_reach_the_guest_raw_and_poweroff_restores() {
    let mut session = Session::start(&echo(&[print(COM1, "\n"), power_off()].concat()));
    session.see("up");
    assert!(session.is_raw());
    // Ctrl-C is a key like any other, and Ctrl-A twice is one.
    session.type_keys(b"x\x03\x01\x01y");
    session.see("x\x03\x01y");
    session.type_keys(b".");
    session.ends_with(0);
}

#[test]
fn a_triple_fault_restores() {
    let mut session = Session::start(&echo(&triple_fault()));
    session.see("up");
    session.type_keys(b".");
    session.ends_with(4);
}

#[test]
fn an_instruction_that_cannot_be_emulated_restores() {
    let mut session = Session::start(&echo(&elf::not_emulated()));
    session.see("up");
    session.type_keys(b".");
    session.ends_with(5);
}

#[test]
fn leaving_by_ctrl_a_x_restores() {
    let mut session = Session::start(&echo(&reset()));
    session.see("up");
    session.type_keys(b"\x01x");
    session.ends_with(0);
}

#[test]
fn signals_restore() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        let mut session = Session::start(&echo(&reset()));
        session.see("up");
        assert!(session.is_raw());
        // SAFETY: no memory is involved; the child is not yet waited for.
        unsafe { libc::kill(session.pollux.id() as libc::pid_t, signal) };
        session.ends_with(0);
    }
}
