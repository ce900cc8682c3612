//! `cargo xtask COMMAND`: what a developer of Pollux does with one command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod coverage;
mod demo;
mod fuzz;
mod guest;
mod lab;
mod measure;
mod test;
mod util;

/// Pollux's developer commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Coverage(coverage::Args),
    Demo(demo::Args),
    Fuzz(fuzz::Args),
    /// Make the stock guests in target/guest/ from Debian packages.
    Guest(guest::Args),
    Lab(lab::Args),
    Test(test::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Coverage(args) => coverage::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Guest(args) => guest::run(&args),
        Command::Lab(args) => lab::run(&args),
        Command::Test(args) => test::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        ExitCode::FAILURE
    })
}
