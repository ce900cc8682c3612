//! `cargo xtask fuzz TARGET`: builds the fuzz targets with counters at every edge, and runs one.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};

use crate::util::{self, Context as _, Result, bail};

/// LLVM's pass, which the stable compiler has too, and a byte that counts for each edge.
const RUSTFLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 \
                         -Cllvm-args=-sanitizer-coverage-inline-8bit-counters";
/// Given by name, so that the flags are not for build scripts, which have nothing that takes the
/// counters.
const HOST: &str = "x86_64-unknown-linux-gnu";

/// Run a fuzz target, guided by coverage.
#[derive(clap::Args)]
pub struct Args {
    /// rings, pci-config, common-config, apic, loader, disk, control or exits.
    target: String,
    /// How long, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Of the random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where inputs that reach something new are kept [default: target/fuzz/corpus/TARGET].
    #[arg(long)]
    corpus: Option<PathBuf>,
    /// Do not fuzz: write the inputs that are worth keeping to this directory, at most 60.
    #[arg(long)]
    choose: Option<PathBuf>,
}

/// Builds and runs.
pub fn run(args: &Args) -> Result<ExitCode> {
    let target_dir = util::target_dir().join("fuzz");
    let build = ["build", "--package", "pollux-fuzz", "--profile", "fuzz", "--target", HOST];
    let built = util::cargo(&build)
        .env("CARGO_TARGET_DIR", &target_dir)
        .env("RUSTFLAGS", RUSTFLAGS)
        .status()
        .context("cargo")?;
    if !built.success() {
        bail!("pollux-fuzz does not build");
    }
    let corpus = target_dir.join("corpus").join(&args.target);
    let program = target_dir.join(HOST).join("fuzz/pollux-fuzz");
    let mut command = std::process::Command::new(&program);
    command.arg(&args.target);
    command.args(["--seconds", &args.seconds.to_string(), "--seed", &args.seed.to_string()]);
    command.arg("--corpus").arg(args.corpus.as_ref().unwrap_or(&corpus));
    if let Some(choose) = &args.choose {
        command.arg("--choose").arg(choose);
    }
    let mut fuzzing = command.stderr(Stdio::piped()).spawn().context("pollux-fuzz")?;
    if let Some(stderr) = fuzzing.stderr.take() {
        // The devices tell of each guest that misbehaves.
        let lines = BufReader::new(stderr).lines().map_while(std::io::Result::ok);
        lines.filter(|line| !line.starts_with("pollux: ")).for_each(|line| eprintln!("{line}"));
    }
    let status = fuzzing.wait().context("pollux-fuzz")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
