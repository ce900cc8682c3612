//! The program `pollux`.
fn main() {}
