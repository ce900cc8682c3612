//! `cargo xtask bench`: comparisons of guests, on a machine that does nothing else.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

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
    let what = ["build", "--release", "--package", "vmm", "--bin", "pollux"];
    let status = util::cargo(&what).status().context("cargo")?;
    if !status.success() {
        bail!("pollux does not build");
    }
    Ok(util::target_dir().join("release/pollux"))
}

/// Where figures are kept.
fn bench_dir() -> Result<PathBuf> {
    let dir = util::target_dir().join("bench");
    fs::create_dir_all(&dir).context(dir.display())?;
    Ok(dir)
}

/// Keeps all figures of a bench in `target/bench/NAME.json`, and says so.
fn keep(name: &str, document: &impl Serialize) -> Result<()> {
    let path = bench_dir()?.join(name).with_extension("json");
    let mut text = serde_json::to_string_pretty(document).context("the figures")?;
    text.push('\n');
    fs::write(&path, text).context(path.display())?;
    println!("\nAll figures: {}", path.display());
    Ok(())
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    Some((values.get(middle.checked_sub(1)?)? + upper) / 2.0)
}

/// (largest - smallest) / median.
fn spread(values: &[f64]) -> f64 {
    let largest = values.iter().copied().fold(f64::NAN, f64::max);
    let smallest = values.iter().copied().fold(f64::NAN, f64::min);
    (largest - smallest) / median(values.to_vec()).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
        assert_eq!(spread(&[8.0, 10.0, 12.0]), 0.4);
    }
}
