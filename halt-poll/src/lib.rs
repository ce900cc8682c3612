//! Halt polling: how long an idle CPU polls for work before it sleeps, decided as KVM decides it.

mod outcome;
mod policy;

pub use outcome::{Outcome, WakeReason};
pub use policy::{Params, Policy};
