//! Fuzz targets, and what runs them.
//!
//! A target is a function of bytes. It reads them as a script ([`input`]): mostly what a driver that
//! means well would do, so that it gets deep, with nonsense in between. It drives the real code, and
//! panics if that breaks a rule.
//!
//! [`engine`] mutates inputs and keeps those that reach something new, which it knows from the
//! counters that the compiler puts into the code ([`coverage`]). `cargo xtask fuzz` builds with them;
//! without, as in `cargo test`, the engine mutates the corpus blindly.

pub mod coverage;
pub mod engine;
pub mod input;
pub mod targets;
