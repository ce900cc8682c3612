//! Port and memory-mapped I/O dispatch.
