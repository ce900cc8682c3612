//! `cargo xtask demo`: what polling on either side buys and costs, in one table.

use std::io::Write as _;
use std::process::ExitCode;

use crate::guest;
use crate::lab::Lab;
use crate::measure;
use crate::util::{self, Context, Result, command, step};

/// Boot a stock Debian guest in six settings of guest and host polling, and measure each with fio:
/// `pollux bench --plan quick`, where stock guests run.
#[derive(clap::Args)]
pub struct Args {
    /// Measure each setting once, for one second.
    #[arg(long)]
    quick: bool,
}

/// Guests that the plan boots at most, which bounds how long it may take.
const GUESTS: usize = 16;

/// `cargo xtask demo`.
///
/// # Errors
/// Something cannot be built or made, or a guest did not do what it should.
pub fn run(args: &Args) -> Result<ExitCode> {
    step("building pollux (release)");
    util::run(
        command("cargo")
            .args(["build", "--quiet", "--release", "--package", "vmm"])
            .current_dir(util::workspace_root()),
    )?;
    guest::make(false)?;
    let lab = Lab::open(false)?;
    let out = util::target_dir().join("bench/quick");
    let bench = format!(
        "'{pollux}' bench --plan quick --kernel '{guest}/vmlinuz-6.12' --initrd '{guest}/initrd-6.12.img' \
         --root '{guest}/rootfs.ext4' --data $dir/data --out '{out}'{quick}",
        pollux = util::target_dir().join("release/pollux").display(),
        guest = util::guest_dir().display(),
        out = out.display(),
        quick = if args.quick { " --repeats 1 --seconds 1" } else { "" },
    );
    step(format_args!("running pollux bench --plan quick on {}", lab.place()));
    let script = format!(
        "{}head -c 64M /dev/zero >$dir/data\nrm -rf '{}'\n{bench}\n",
        measure::SCRIPT_START,
        out.display()
    );
    let table = measure::output(&lab, &script, GUESTS)?;
    std::io::stdout().write_all(&table).context("standard output")?;
    if matches!(lab, Lab::Emulated(_)) {
        println!(
            "\nRan on {}: its CPUs are emulated, so times are no machine's, and only ratios within this table \
             mean\nsomething. Interrupts and kicks a request are what they would be anywhere; exits and halts \
             come close, for\ntimer interrupts go with time.",
            lab.place()
        );
    }
    Ok(ExitCode::SUCCESS)
}
