//! The client's side of a control socket (`pollux run --control`).

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::Value as Json;

/// How long a reply may take. It comes at once, unless the host hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Sends a request and waits for its reply.
///
/// # Errors
/// Nobody listens any more, or there is no reply within [`LIMIT`].
pub fn ask(mut socket: &UnixStream, request: &Json) -> io::Result<Json> {
    socket.set_read_timeout(Some(LIMIT))?;
    socket.set_write_timeout(Some(LIMIT))?;
    socket.write_all(format!("{request}\n").as_bytes())?;
    let mut line = String::new();
    if BufReader::new(socket).read_line(&mut line)? == 0 {
        return Err(io::Error::other("Pollux has ended"));
    }
    Ok(serde_json::from_str(&line)?)
}
