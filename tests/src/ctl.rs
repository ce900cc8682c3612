//! A control socket's other end: `pollux ctl`, and clients that say anything.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value as Json;

use crate::guest::program;

/// How long a reply may take before it counts as missing.
const LIMIT: Duration = Duration::from_secs(60);

/// What `pollux ctl` did.
#[derive(Debug)]
pub struct Answer {
    /// Its exit status.
    pub status: Option<i32>,
    /// What it printed: JSON, or null if that was none.
    pub reply: Json,
    /// What it said on stderr.
    pub stderr: String,
}

impl Answer {
    /// The reply of a request that was carried out.
    ///
    /// # Panics
    /// If it was not.
    #[track_caller]
    pub fn done(self) -> Json {
        assert!(self.status == Some(0) && self.stderr.is_empty(), "{self:?}");
        assert_eq!(self.reply["ok"], true, "{self:?}");
        self.reply
    }

    /// The one line of an error.
    ///
    /// # Panics
    /// If it is another error, or more than a line, or none.
    #[track_caller]
    pub fn refused(self, status: i32) -> String {
        assert_eq!(self.status, Some(status), "{self:?}");
        assert!(self.reply.is_null() && self.stderr.lines().count() == 1, "{self:?}");
        self.stderr
    }
}

/// A control socket.
#[derive(Clone, Debug)]
pub struct Control(pub PathBuf);

impl Control {
    /// Runs `pollux ctl SOCKET WORDS`.
    ///
    /// # Panics
    /// If it cannot be run.
    pub fn ctl(&self, words: &str) -> Answer {
        let mut command = Command::new(program());
        command.arg("ctl").arg(&self.0).args(words.split_whitespace());
        let output = command.output().expect("pollux starts");
        Answer {
            status: output.status.code(),
            reply: serde_json::from_slice(&output.stdout).unwrap_or(Json::Null),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The document of the statistics so far.
    #[track_caller]
    pub fn stats(&self) -> Json {
        self.ctl("stats").done()["stats"].take()
    }

    /// Another connection.
    ///
    /// # Panics
    /// If there is none to be had.
    #[track_caller]
    pub fn connect(&self) -> Client {
        Client::new(&self.0)
    }
}

/// A connection that sends whatever it likes.
pub struct Client(BufReader<UnixStream>);

impl Client {
    #[track_caller]
    fn new(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("somebody listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a limit");
        stream.set_write_timeout(Some(LIMIT)).expect("a limit");
        Self(BufReader::new(stream))
    }

    /// The connection itself.
    pub fn stream(&mut self) -> &mut UnixStream {
        self.0.get_mut()
    }

    /// Sends bytes; false if the other end has closed the connection.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream().write_all(bytes.as_ref()).is_ok()
    }

    /// The next reply, or null if the connection ended.
    ///
    /// # Panics
    /// If there is neither in time.
    #[track_caller]
    pub fn reply(&mut self) -> Json {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(_) => serde_json::from_str(&line).unwrap_or(Json::Null),
            Err(why) if why.kind() == std::io::ErrorKind::ConnectionReset => Json::Null,
            Err(why) => panic!("no reply: {why}"),
        }
    }

    /// Sends a line and gives its reply.
    #[track_caller]
    pub fn ask(&mut self, line: &str) -> Json {
        assert!(self.send(format!("{line}\n")), "the connection is closed");
        self.reply()
    }
}
