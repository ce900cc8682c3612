//! What the main thread waits for while the vCPUs run: the end, a signal, the user's keys, the
//! control socket's clients.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::input::PortInput;
use crate::lifecycle::{End, Lifecycle};
use crate::terminal::{Escape, Typed};

/// The signal that asks for the statistics so far.
const REPORT: libc::c_int = libc::SIGUSR1;
/// The signals that end Pollux in order.
const ENDING: [(libc::c_int, &str); 4] = [
    (libc::SIGTERM, "SIGTERM"),
    (libc::SIGINT, "SIGINT"),
    (libc::SIGHUP, "SIGHUP"),
    (libc::SIGQUIT, "SIGQUIT"),
];
/// How soon input is offered again to a serial port that was full.
const RETRY: Duration = Duration::from_millis(2);

/// Whether whoever started us has this signal ignored, as `nohup` has SIGHUP: then it stays so.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: an all-zero sigaction is valid storage.
    let mut found: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: nothing is set; `found` is a live local.
    let status = unsafe { libc::sigaction(signal, std::ptr::null(), &mut found) };
    status == 0 && found.sa_sigaction == libc::SIG_IGN
}

/// Signals as a file. They are blocked in every thread that is started afterwards.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals and opens them as a file. Call before any thread starts.
    ///
    /// # Errors
    /// The host refused.
    pub fn open() -> io::Result<Self> {
        // SAFETY: an all-zero sigset_t is valid storage; sigemptyset makes it a set. Only this
        // local is written.
        let set = unsafe {
            let mut set: libc::sigset_t = mem::zeroed();
            libc::sigemptyset(&mut set);
            for (signal, _) in ENDING {
                if !is_ignored(signal) {
                    libc::sigaddset(&mut set, signal);
                }
            }
            libc::sigaddset(&mut set, REPORT);
            set
        };
        // A file at its size limit is an error of the write (EFBIG), not the end of the guest.
        // SAFETY: no handler is installed, only the default action replaced.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: `set` is a valid set; no old set is asked for.
        let status = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        if status != 0 {
            return Err(io::Error::from_raw_os_error(status));
        }
        // SAFETY: `set` is a valid set.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just returned by the kernel, owned by nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The signal that came, if one did.
    fn next(&self) -> Option<Signal> {
        let mut info = [0u8; mem::size_of::<libc::signalfd_siginfo>()];
        // SAFETY: the buffer is as long as said.
        let got = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) };
        if got != info.len() as isize {
            return None;
        }
        // The number is the first field.
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        let ending = ENDING.iter().find(|&&(signal, _)| signal == number);
        Some(ending.map_or(Signal::Report, |&(_, name)| Signal::End(name)))
    }
}

/// What a signal asks for.
enum Signal {
    /// The end; with the signal's name.
    End(&'static str),
    /// The statistics so far.
    Report,
}

/// The user's keys on their way to the console.
#[derive(Default)]
struct Keys {
    escape: Escape,
    closed: bool,
}

impl Keys {
    /// Reads what was typed, for `console`; `false`: the user leaves.
    fn read(&mut self, console: &PortInput) -> bool {
        let mut bytes = [0; 256];
        // Not `io::stdin()`: what its buffer holds, poll does not see.
        // SAFETY: the buffer is as long as said.
        let got = unsafe { libc::read(libc::STDIN_FILENO, bytes.as_mut_ptr().cast(), bytes.len()) };
        match usize::try_from(got) {
            Ok(0) => self.closed = true,
            Ok(count) => match self.escape.filter(bytes.get(..count).unwrap_or_default()) {
                // It is empty, or nobody would read.
                Typed::Guest(bytes) => _ = console.push(&bytes),
                Typed::Leave => return false,
            },
            Err(_) => self.closed = io::Error::last_os_error().kind() != io::ErrorKind::Interrupted,
        }
        true
    }
}

/// What the main thread is wanted for while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The statistics so far: a signal asks for them.
    Report,
    /// There is something to do on the control socket.
    Control,
    /// The sandbox kept a thread from a system call.
    Violation,
}

/// The guest's serial ports, as far as there is input for them.
pub struct Inputs<'a> {
    /// The console, if it is on stdio: takes the user's keys.
    pub console: Option<&'a PortInput>,
    /// The results channel: takes lines of the control socket.
    pub results: Option<&'a PortInput>,
}

/// Waits until the run has ended, passing input to the guest's serial ports meanwhile, and calling `attend` when something is wanted. The first of `wakes` is readable when the control
/// socket is to be served, the second when the sandbox was violated; negative ones never are.
///
/// # Errors
/// The host refused to wait.
pub fn wait(
    lifecycle: &Lifecycle,
    signals: &Signals,
    inputs: &Inputs<'_>,
    [control, violation]: [RawFd; 2],
    mut attend: impl FnMut(Wanted),
) -> io::Result<End> {
    let mut keys = Keys::default();
    loop {
        let listen = inputs.console.filter(|console| !keys.closed && console.is_empty()).is_some();
        let stdin = if listen { libc::STDIN_FILENO } else { -1 };
        let ports = [inputs.console, inputs.results].into_iter().flatten();
        let retry = ports.clone().any(|port| !port.is_empty()).then_some(RETRY);
        let fds = [lifecycle.wake().as_raw_fd(), signals.0.as_raw_fd(), stdin, control, violation];
        let ready = poll(fds, retry)?;
        match ready[1].then(|| signals.next()).flatten() {
            Some(Signal::End(name)) => lifecycle.finish(End::Stopped(name.into())),
            Some(Signal::Report) => attend(Wanted::Report),
            None => {}
        }
        if ready[2]
            && let Some(console) = inputs.console
            && !keys.read(console)
        {
            lifecycle.finish(End::Stopped("the user (Ctrl-A x)".into()));
        }
        if ready[3] {
            attend(Wanted::Control);
        }
        if ready[4] {
            attend(Wanted::Violation);
        }
        ports.for_each(PortInput::offer);
        // Last, so that a guest which has always just ended does not keep a signal from being seen.
        if let Some(end) = lifecycle.ended() {
            return Ok(end);
        }
    }
}

/// Waits for any of `fds` (negative ones are passed over) or the timeout.
fn poll<const N: usize>(fds: [RawFd; N], timeout: Option<Duration>) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let timeout_ms = timeout.map_or(-1, |timeout| timeout.as_millis() as libc::c_int);
    // SAFETY: the array is as long as said.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, timeout_ms) };
    if count < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        return Ok([false; N]);
    }
    Ok(polled.map(|fd| fd.revents != 0))
}
