//! Compares the policies of `halt-poll` with the kernel's own, halt by halt, from the kernel's
//! tracepoints: [`kvm`] for the host's, [`haltpoll`] for the guest's governor.
//!
//! Recorded traces are in `tests/data/`, in the formats that the two modules describe.

pub mod haltpoll;
pub mod kvm;
pub mod tracefs;

use std::str::SplitWhitespace;

/// The next word of a line of a trace, as a number or whatever else is wanted.
fn field<T: std::str::FromStr>(words: &mut SplitWhitespace<'_>) -> Option<T> {
    words.next()?.parse().ok()
}
