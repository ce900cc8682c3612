//! Tests of the register file.
