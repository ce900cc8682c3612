//! Halt polling.
