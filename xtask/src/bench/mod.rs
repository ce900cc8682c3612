//! `cargo xtask bench`: comparisons of guests, on a machine that does nothing else.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use crate::util::{self, Context, Result, bail};

mod load;
mod peer;
mod pingpong;
mod wake;

/// Measures guests.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    Peer(peer::Args),
    Pingpong(pingpong::Args),
    Wake(wake::Args),
    /// The part of `peer` that runs where the guests run.
    #[command(hide = true)]
    PeerInside(peer::InsideArgs),
}

/// `cargo xtask bench`.
///
/// # Errors
/// Something could not be measured.
pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.bench {
        Bench::Peer(args) => peer::run(args),
        Bench::Pingpong(args) => pingpong::run(args),
        Bench::Wake(args) => wake::run(args),
        Bench::PeerInside(args) => peer::run_inside(args),
    }
}

/// Builds what is measured, with optimisation, and returns its path.
fn build_pollux() -> Result<PathBuf> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()))
        .current_dir(util::workspace_root())
        .args(["build", "--release", "--package", "vmm", "--bin", "pollux"])
        .stdin(Stdio::null())
        .status()
        .context("cargo")?;
    if !status.success() {
        bail!("pollux does not build");
    }
    Ok(util::target_dir().join("release/pollux"))
}
