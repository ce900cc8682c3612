//! Serial ports.
