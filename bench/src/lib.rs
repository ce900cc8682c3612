//! `pollux bench`: sweeps over both sides' parameters of waiting, and what they came to.

pub mod advise;
pub mod analysis;
pub mod choose;
pub mod control;
pub mod figures;
pub mod guest;
pub mod lines;
pub mod peer;
pub mod plan;
pub mod progress;
pub mod report;
pub mod results;
pub mod runner;
pub mod schedule;
pub mod setting;
pub mod statistics;
pub mod subject;
pub mod surprises;

/// Why there are no results, or not all: one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Bad arguments or files: exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The host, or every guest, failed: exit status 1.
    #[error("{0}")]
    Failed(String),
}
