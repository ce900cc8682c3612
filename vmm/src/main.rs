//! The program `pollux`.

mod cli;
mod config;

fn main() {}
