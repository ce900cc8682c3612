//! `pollux bench`: sweeps over both sides' parameters of waiting, and what they came to.

pub mod results;
