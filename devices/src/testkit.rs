//! A driver in software.
