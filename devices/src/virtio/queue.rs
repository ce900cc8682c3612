//! (in work) Split virtqueues.

/// (in work)
pub struct Queue;
