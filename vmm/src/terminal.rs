//! The user's terminal in raw mode, and back: on return, on panic and on the signals that end
//! Pollux (which arrive as events, see [`crate::run`]).

use std::io;
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use libc::{STDIN_FILENO, TCSANOW, termios};

/// The terminal's settings from before, while it is raw.
static SAVED: Mutex<Option<termios>> = Mutex::new(None);

/// Keeps the terminal on stdin raw while it lives. Where stdin is no terminal it does nothing.
pub struct RawTerminal(());

impl RawTerminal {
    /// Makes the terminal raw: every key goes to the guest, Ctrl-C too. Output stays processed, so
    /// that Pollux's own lines look right.
    ///
    /// # Errors
    /// The terminal refused its settings.
    pub fn enter() -> io::Result<Self> {
        let mut found = MaybeUninit::<termios>::uninit();
        // SAFETY: the pointer is to a termios; the call fills it or fails.
        if unsafe { libc::tcgetattr(STDIN_FILENO, found.as_mut_ptr()) } != 0 {
            return Ok(Self(()));
        }
        // SAFETY: filled by the successful call above.
        let before = unsafe { found.assume_init() };
        let mut raw = before;
        // SAFETY: `raw` is a valid termios.
        unsafe { libc::cfmakeraw(&mut raw) };
        raw.c_oflag = before.c_oflag;
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        // SAFETY: `raw` is a valid termios.
        if unsafe { libc::tcsetattr(STDIN_FILENO, TCSANOW, &raw) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            next(info);
        }));
        Ok(Self(()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back; the second time does nothing.
fn restore() {
    if let Some(before) = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // SAFETY: `before` came from tcgetattr. A terminal that is gone needs no restoring.
        unsafe { libc::tcsetattr(STDIN_FILENO, TCSANOW, &before) };
    }
}

/// Finds `Ctrl-A x` (leave) in what the user types; `Ctrl-A Ctrl-A` sends one Ctrl-A.
#[derive(Debug, Default)]
pub struct Escape {
    pending: bool,
}

/// What the user typed.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    /// Bytes for the guest.
    Guest(Vec<u8>),
    /// `Ctrl-A x`: leave.
    Leave,
}

impl Escape {
    const CTRL_A: u8 = 1;

    /// Filters `bytes`.
    pub fn filter(&mut self, bytes: &[u8]) -> Typed {
        let mut out = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            match (std::mem::take(&mut self.pending), byte) {
                (true, b'x') => return Typed::Leave,
                (false, Self::CTRL_A) => self.pending = true,
                (true, Self::CTRL_A) | (false, _) => out.push(byte),
                (true, _) => out.extend([Self::CTRL_A, byte]),
            }
        }
        Typed::Guest(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_a_x_leaves_and_ctrl_a_twice_sends_one() {
        let mut escape = Escape::default();
        assert_eq!(escape.filter(b"ab\x01"), Typed::Guest(b"ab".to_vec()));
        assert_eq!(escape.filter(b"\x01c"), Typed::Guest(b"\x01c".to_vec()));
        assert_eq!(escape.filter(b"\x01q"), Typed::Guest(b"\x01q".to_vec()));
        assert_eq!(escape.filter(b"\x01"), Typed::Guest(Vec::new()));
        assert_eq!(escape.filter(b"xyz"), Typed::Leave);
    }
}
