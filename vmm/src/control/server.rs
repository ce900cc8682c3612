//! The socket and its clients; what they say is [`commands`](super::commands)' matter.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{mem, thread};

use serde_json::{Value as Json, json};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::config::{ConfigError, directory_of, reason};

/// Clients at a time. One more takes the place of the one that has been silent longest, so that
/// nobody is kept out by connections that are only held.
pub const MAX_CLIENTS: usize = 16;
/// The longest request, in bytes, with the end of its line. Who sends a longer one is told so and
/// disconnected.
pub const MAX_REQUEST_BYTES: usize = 4096;

const OPTION: &str = "--control";
/// Connections that wait to be accepted.
const BACKLOG: libc::c_int = 16;
/// The listener's number among the events; clients have those above.
const LISTENER: u64 = 0;
/// How long to wait for another Pollux that makes its socket in the same directory.
const TURN_TRIES: u32 = 100;
const TURN_PAUSE: Duration = Duration::from_millis(10);

/// A control socket and its clients. The file goes when this is dropped.
pub struct Server {
    path: PathBuf,
    /// Device and inode of the socket's file, by which it is known again.
    file: (u64, u64),
    listener: UnixListener,
    /// All that the server waits for; itself to be waited for.
    epoll: Epoll,
    clients: BTreeMap<u64, Client>,
    /// The number of the next client.
    next: u64,
    /// Counts what clients did, to tell who did something last.
    time: u64,
}

impl Server {
    /// Makes the socket at `path`, which only its owner may open, from the beginning. A socket that
    /// nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Somebody listens there, there is something else, or the system refused.
    pub fn listen(path: &Path) -> Result<Self, ConfigError> {
        let error = |problem: String| ConfigError::new(OPTION, path.display(), problem);
        let refused = |why: io::Error| error(format!("cannot be made: {}", reason(&why)));
        // Held until the socket listens. Without it, one that is just being made would be taken for a
        // stale one.
        let _turn = turn(path);
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(error("exists and is not a socket".into()).hint("name a new file"));
            }
            Ok(_) => {
                if is_served(path).map_err(refused)? {
                    return Err(error("somebody listens there already".into())
                        .hint("stop that Pollux first, or name another path"));
                }
                fs::remove_file(path).map_err(refused)?;
            }
            Err(why) if why.kind() == ErrorKind::NotFound => {}
            Err(why) => return Err(refused(why)),
        }
        let listener = bind(path).map_err(refused)?;
        let file = identity(path).map_err(refused)?;
        let epoll = Epoll::new().map_err(refused)?;
        let (clients, next) = (BTreeMap::new(), LISTENER + 1);
        let server = Self { path: path.into(), file, listener, epoll, clients, next, time: 0 };
        let fd = server.listener.as_raw_fd();
        server.watch(ControlOperation::Add, fd, EventSet::IN, LISTENER).map_err(refused)?;
        Ok(server)
    }

    /// Readable when there is something to [`serve`](Self::serve).
    pub fn wake(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Takes what clients have sent, has it answered, and sends what they take: at most one request of
    /// each. Waits for nobody.
    pub fn serve(&mut self, mut answer: impl FnMut(&[u8]) -> Json) {
        let mut events = [EpollEvent::default(); MAX_CLIENTS + 1];
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        for event in events.iter().take(count) {
            match event.data() {
                LISTENER => self.accept(),
                number => self.attend(number, &mut answer),
            }
        }
    }

    fn accept(&mut self) {
        let accepted = self.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        let full = match &accepted {
            Ok(_) => self.clients.len() >= MAX_CLIENTS,
            // Descriptors or memory ran out; what did not come at all is no reason to part with anybody.
            Err(why) => !matches!(
                why.kind(),
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
            ),
        };
        if full {
            let silent = self.clients.iter().min_by_key(|(_, client)| client.active);
            match silent.map(|(&number, _)| number) {
                Some(number) => drop(self.clients.remove(&number)),
                // Its event would come back for ever.
                None => {
                    let fd = self.listener.as_raw_fd();
                    let _ = self.watch(ControlOperation::Delete, fd, EventSet::empty(), LISTENER);
                    devices::tell(format_args!("{OPTION}: no client can be taken any more"));
                }
            }
        }
        let Ok(stream) = accepted else { return };
        let number = self.next;
        if self.watch(ControlOperation::Add, stream.as_raw_fd(), EventSet::IN, number).is_ok() {
            self.next += 1;
            self.time += 1;
            self.clients.insert(number, Client::new(stream, self.time));
        }
    }

    fn attend(&mut self, number: u64, answer: &mut impl FnMut(&[u8]) -> Json) {
        self.time += 1;
        let Some(client) = self.clients.get_mut(&number) else { return };
        client.active = self.time;
        let Ok(wanted) = client.turn(answer) else {
            self.clients.remove(&number);
            return;
        };
        let fd = client.stream.as_raw_fd();
        if self.watch(ControlOperation::Modify, fd, wanted, number).is_err() {
            self.clients.remove(&number);
        }
    }

    fn watch(
        &self,
        operation: ControlOperation,
        fd: RawFd,
        events: EventSet,
        number: u64,
    ) -> io::Result<()> {
        self.epoll.ctl(operation, fd, EpollEvent::new(events, number))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // What somebody else has put there meanwhile is theirs.
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A connection.
struct Client {
    stream: UnixStream,
    /// What has come and is not answered; at most [`MAX_REQUEST_BYTES`].
    input: Vec<u8>,
    /// The reply that is being sent.
    output: Vec<u8>,
    sent: usize,
    /// It sends nothing more, or has sent too much: close when the replies are sent.
    last: bool,
    /// When it was last attended to.
    active: u64,
}

/// A connection is over.
struct Over;

impl Client {
    fn new(stream: UnixStream, active: u64) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        Self { stream, input, output, sent: 0, last: false, active }
    }

    /// One step: sends on, or else receives, answers one line, and sends. Gives what to wait for.
    fn turn(&mut self, answer: &mut impl FnMut(&[u8]) -> Json) -> Result<EventSet, Over> {
        if !self.send()? {
            return Ok(EventSet::OUT);
        }
        if !self.input.contains(&b'\n') && !self.last {
            self.receive()?;
        }
        if let Some(end) = self.input.iter().position(|&byte| byte == b'\n') {
            let rest = self.input.split_off(end + 1);
            let line = mem::replace(&mut self.input, rest);
            self.reply(&answer(line.get(..end).unwrap_or_default()));
        } else if self.input.len() >= MAX_REQUEST_BYTES {
            let problem = format!("a request has at most {MAX_REQUEST_BYTES} bytes");
            self.reply(&json!({ "ok": false, "error": problem }));
            self.input.clear();
            self.last = true;
        }
        let sent = self.send()?;
        // With more to answer, a socket that takes output calls again, after everybody else's turn.
        if !sent || self.input.contains(&b'\n') {
            Ok(EventSet::OUT)
        } else if self.last {
            Err(Over)
        } else {
            Ok(EventSet::IN)
        }
    }

    /// Receives at most as much as a request may have.
    fn receive(&mut self) -> Result<(), Over> {
        let mut bytes = [0; MAX_REQUEST_BYTES];
        let room = MAX_REQUEST_BYTES.saturating_sub(self.input.len());
        match self.stream.read(bytes.get_mut(..room).unwrap_or_default()) {
            Ok(0) => self.last = true,
            Ok(count) => self.input.extend(bytes.iter().take(count)),
            Err(why) if is_later(&why) => {}
            Err(_) => return Err(Over),
        }
        Ok(())
    }

    fn reply(&mut self, reply: &Json) {
        self.output = format!("{reply}\n").into_bytes();
        self.sent = 0;
    }

    /// Sends what the client takes of the reply; true when all of it has gone.
    fn send(&mut self) -> Result<bool, Over> {
        while let Some(rest) = self.output.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(count) => self.sent += count,
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) if is_later(&why) => return Ok(false),
                Err(_) => return Err(Over),
            }
        }
        // A large one's memory goes.
        self.output = Vec::new();
        Ok(true)
    }
}

fn is_later(why: &io::Error) -> bool {
    matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Device and inode of what is at `path` itself.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Whether somebody listens on the socket at `path`.
fn is_served(path: &Path) -> io::Result<bool> {
    let socket = socket()?;
    let (address, length) = address(path)?;
    // SAFETY: the address is a local of the length said.
    let status = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if status == 0 {
        return Ok(true);
    }
    let why = io::Error::last_os_error();
    match why.raw_os_error() {
        Some(libc::ECONNREFUSED) => Ok(false),
        // As many connections as can be wait to be accepted.
        Some(libc::EAGAIN) => Ok(true),
        _ => Err(why),
    }
}

/// A listening socket at `path`, where nothing is.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let socket = socket()?;
    let (address, length) = address(path)?;
    // The file that `bind` makes gets the mode of the socket, so it is never open to others.
    // SAFETY: no memory is involved.
    let mut status = unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) };
    if status == 0 {
        // SAFETY: the address is a local of the length said.
        status = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    }
    if status == 0 {
        // SAFETY: no memory is involved.
        status = unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) };
    }
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixListener::from(socket))
}

/// A Unix stream socket that does not wait.
fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just returned by the kernel, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The address of a socket at `path`.
fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: an all-zero sockaddr_un is valid.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_encoded_bytes();
    // One byte stays 0.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let longest = address.sun_path.len() - 1;
        let why = format!("the path of a socket has 1 to {longest} bytes");
        return Err(io::Error::new(ErrorKind::InvalidInput, why));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok((address, mem::size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

/// A lock on the directory that `path` is in. Whoever holds it for long does not keep us.
fn turn(path: &Path) -> Option<File> {
    let directory = File::open(directory_of(path)).ok()?;
    for _ in 0..TURN_TRIES {
        match directory.try_lock() {
            Ok(()) => return Some(directory),
            Err(fs::TryLockError::WouldBlock) => thread::sleep(TURN_PAUSE),
            Err(fs::TryLockError::Error(_)) => break,
        }
    }
    None
}
