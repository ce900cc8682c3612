//! The program `pollux`.

#[allow(dead_code, unused_imports)] // Until the machine is assembled from it.
mod boot;
mod cli;
mod config;

fn main() {}
