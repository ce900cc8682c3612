//! What the program `pollux` is made of. [`main`] is the program; the rest is public so that benches
//! measure the real halt and interrupt paths.

pub mod bench;
pub mod boot;
pub mod builder;
pub mod cli;
pub mod config;
pub mod control;
pub mod doctor;
pub mod events;
pub mod input;
pub mod irq;
pub mod lifecycle;
pub mod memory;
pub mod record;
pub mod replay;
pub mod run;
pub mod sandbox;
pub mod stats;
pub mod terminal;
pub mod tuning;
pub mod vcpu;
pub mod vm;

use std::io::Write;
use std::process::ExitCode;

use cli::{Command, Refusal, RunArgs};
use config::VmConfig;

/// Bad arguments, whatever is wrong with them.
const USAGE: u8 = 2;

/// The program.
pub fn main() -> ExitCode {
    let status = match cli::parse(std::env::args_os()) {
        Ok(cli) => match cli.command {
            Command::Run(args) => run(&args),
            Command::Doctor(args) => match doctor::run(&args) {
                Ok(status) => status,
                Err(error) => complain(&error, 1),
            },
            Command::Replay(args) => match replay::run(&args) {
                Ok(()) => 0,
                Err(error) => complain(&error, USAGE),
            },
            Command::Bench(args) => match bench::run(&args) {
                Ok(status) => status,
                Err(error) => complain(&error, bench::exit_status(&error)),
            },
            Command::Ctl(args) => match control::client::run(&args) {
                Ok(()) => 0,
                Err(error) => complain(&error, error.exit_status()),
            },
        },
        Err(Refusal::Text(text)) => {
            // Nobody to read it is no error of ours.
            let _ = std::io::stdout().write_all(text.as_bytes());
            0
        }
        Err(Refusal::Usage(line)) => complain(&line, USAGE),
    };
    ExitCode::from(status)
}

fn run(args: &RunArgs) -> u8 {
    let config = match VmConfig::new(args) {
        Ok(config) => config,
        Err(error) => return complain(&error, USAGE),
    };
    match run::run(&config) {
        Ok(end) => {
            if let Some(message) = end.message() {
                complain(&message, 0);
            }
            end.exit_status()
        }
        Err(error) => complain(&error, error.exit_status()),
    }
}

/// One line on stderr.
fn complain(what: &dyn std::fmt::Display, status: u8) -> u8 {
    devices::tell(what);
    status
}
