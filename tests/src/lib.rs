//! Runs the program `pollux` the way a user does, for the integration tests beside this crate.

pub mod ctl;
pub mod elf;
pub mod guest;
pub mod oracle;
pub mod schema;
pub mod verify;

pub use guest::{Guest, Outcome};
