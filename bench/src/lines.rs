//! A guest's lines, as they come: its reports and marks.

use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// How soon an interruption is noticed.
const TURN: Duration = Duration::from_millis(50);
/// The longest line that is kept; a guest that sends more at a stretch has the rest dropped.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Set by a signal: everything ends at once.
pub type Interrupt = AtomicBool;

/// What ended the waiting for a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Waited {
    /// There is one, without its end.
    Line(String),
    /// There will be none: whoever wrote has ended.
    End,
    /// Not in time.
    TimedOut,
    /// The user wants an end.
    Interrupted,
}

/// The lines of a stream, read by a thread, so that one may wait for them with a limit.
pub struct Lines(Receiver<String>);

impl Lines {
    /// Reads `stream` to its end.
    pub fn new(stream: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            loop {
                let mut line = Vec::new();
                match (&mut stream).take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self(receiver)
    }

    /// Waits for the next line, until `deadline`.
    pub fn next(&self, deadline: Instant, interrupt: &Interrupt) -> Waited {
        loop {
            if interrupt.load(Ordering::Relaxed) {
                return Waited::Interrupted;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left.min(TURN)) {
                Ok(line) => return Waited::Line(line),
                Err(RecvTimeoutError::Disconnected) => return Waited::End,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Waited::TimedOut,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_order_then_the_end() {
        let lines = Lines::new(&b"one\r\ntwo\nthree"[..]);
        let soon = Instant::now() + Duration::from_secs(60);
        let interrupt = Interrupt::new(false);
        for expected in ["one", "two", "three"] {
            assert_eq!(lines.next(soon, &interrupt), Waited::Line(expected.into()));
        }
        assert_eq!(lines.next(soon, &interrupt), Waited::End);
    }

    #[test]
    fn waiting_has_a_limit_and_can_be_interrupted() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let lines = Lines::new(reader);
        let interrupt = Interrupt::new(false);
        assert_eq!(lines.next(Instant::now(), &interrupt), Waited::TimedOut);
        interrupt.store(true, Ordering::Relaxed);
        let never = Instant::now() + Duration::from_secs(3600);
        assert_eq!(lines.next(never, &interrupt), Waited::Interrupted);
    }
}
