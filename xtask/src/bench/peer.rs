//! `cargo xtask bench peer`: the same guest under Pollux and under QEMU, side by side in one lab run
//! a round, Pollux before and after QEMU, so that a drift of the machine is seen.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

use super::load::{self, Load};
use crate::guest;
use crate::lab::{Lab, Options, Outcome, Stream};
use crate::util::{self, Context, Error, Result, bail, step};

mod inside;
mod monitors;
mod plan;
mod probe;
mod report;

use plan::{Line, Medium, Plan};

/// What this machine must have: program and Debian package.
const HOST_PROGRAMS: &[(&str, &str)] =
    &[("qemu-system-x86_64", "qemu-system-x86"), ("strace", "strace")];

/// Pollux beside QEMU: IOPS, latency, start-up, memory, and what a request costs.
///
/// A round is one run of the lab: every way to boot, then fio under Pollux, QEMU and Pollux again;
/// the first round counts system calls as well. The table has medians over all rounds. The machine
/// must have nothing else to do.
#[derive(clap::Args)]
pub struct Args {
    /// Rounds.
    #[arg(long, value_name = "TIMES", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Where the data disk is.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tmpfs,scratch")]
    on: Vec<Medium>,
    /// How long fio runs.
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// Passes over all ways to boot in a round.
    #[arg(long, value_name = "TIMES", default_value_t = 3)]
    boots: u32,
    /// The guest's kernel.
    #[arg(long, value_name = "RELEASE", default_value = "6.12")]
    kernel: String,
    /// How the lab's machine is emulated.
    #[arg(long, value_name = "ACCEL", default_value_t = Options::default().accel)]
    accel: String,
    /// Measure beside other work, too. The figures mean nothing, and say so.
    #[arg(long)]
    busy: bool,
}

/// Options of the part in the lab.
#[derive(clap::Args)]
pub struct InsideArgs {
    /// A [`Plan`], in JSON.
    plan: String,
}

/// What is kept in `target/bench/peer.json`.
#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    place: &'a str,
    accel: &'a str,
    /// Before each round.
    load: &'a [Load],
    idle: bool,
    rounds: &'a [report::Round],
    summary: &'a report::Summary,
}

/// `cargo xtask bench peer`.
///
/// # Errors
/// Something is missing, a guest failed, or the machine is not idle.
pub fn run(args: &Args) -> Result<ExitCode> {
    util::ensure_programs(HOST_PROGRAMS)?;
    let pollux = super::build_pollux()?;
    let guest = guest::make(false)?;
    let lab = Lab::open(false)?;
    let program = std::env::current_exe().context("this program's path")?;
    let mut loads = Vec::new();
    let mut rounds = Vec::new();
    for number in 1..=args.repeats {
        loads.push(load::check(args.busy)?);
        let plan = Plan {
            pollux: pollux.clone(),
            guest: guest.clone(),
            release: args.kernel.clone(),
            seconds: args.seconds,
            media: args.on.clone(),
            boots: args.boots,
            syscalls: number == 1,
        };
        step(format_args!("round {number} of {}, on {}", args.repeats, lab.place()));
        rounds.push(round(&lab, args, &plan, &program)?);
    }
    let idle = loads.iter().all(Load::is_idle);
    let summary = report::summarise(&rounds);
    report::print(&rounds, &summary, lab.place());
    if !idle {
        println!("\nNOT IDLE: other work ran on this machine. No figure above means anything.");
    }
    let document = Document {
        schema: 1,
        place: lab.place(),
        accel: &args.accel,
        load: &loads,
        idle,
        rounds: &rounds,
        summary: &summary,
    };
    super::keep("peer", &document)?;
    Ok(ExitCode::SUCCESS)
}

/// One round in the lab.
fn round(lab: &Lab, args: &Args, plan: &Plan, program: &PathBuf) -> Result<report::Round> {
    let json = serde_json::to_string(plan).context("the plan")?;
    let command: Vec<OsString> =
        vec![program.into(), "bench".into(), "peer-inside".into(), json.into()];
    let options = Options {
        accel: args.accel.clone(),
        timeout: Duration::from_secs(1800),
        ..Options::default()
    };
    let mut text = Vec::new();
    let (outcome, attempts) = lab.run(&options, &command, &mut |stream, bytes| match stream {
        Stream::Out => text.extend_from_slice(bytes),
        Stream::Err => eprint!("{}", String::from_utf8_lossy(bytes)),
    })?;
    if outcome != Outcome::Exited(0) {
        let kept = super::bench_dir()?.join("peer-unfinished.jsonl");
        fs::write(&kept, text).context(kept.display())?;
        let kept = kept.display();
        bail!("the round failed after {attempts} attempts: {outcome:?}; what it measured: {kept}");
    }
    collect(&String::from_utf8_lossy(&text))
}

/// The runs of a round: of its last attempt, which is complete.
fn collect(text: &str) -> Result<report::Round> {
    let mut round = None;
    let mut complete = false;
    // The last line of an attempt that was cut off may be half a line, with the next behind it.
    for line in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match line {
            Line::Begin { versions } => round = Some(report::Round { versions, runs: Vec::new() }),
            Line::Run(run) => round.as_mut().into_iter().for_each(|r| r.runs.push((*run).clone())),
            Line::End => complete = true,
        }
    }
    round.filter(|_| complete).ok_or(Error("the lab's part said too little".into()))
}

/// The part that runs in the lab.
///
/// # Errors
/// A guest did not do what it should.
pub fn run_inside(args: &InsideArgs) -> Result<ExitCode> {
    let plan = serde_json::from_str(&args.plan).context("the plan")?;
    inside::run(&plan)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_that_was_cut_off_leaves_nothing_behind() {
        let run = r#"{"run":{"monitor":"pollux","kernel":"bz-image","purpose":"boot","medium":"tmpfs","exec_to_init_ns":1}}"#;
        let text = format!(
            "{{\"begin\":{{\"versions\":{{}}}}}}\n{run}\n{run}\n{{\"run\n\
             {{\"begin\":{{\"versions\":{{\"qemu\":\"7\"}}}}}}\n{run}\n"
        );
        assert!(collect(&text).is_err(), "not complete");
        let round = collect(&(text + "\"end\"\n")).unwrap();
        assert_eq!((round.runs.len(), round.versions["qemu"].as_str()), (1, "7"));
    }
}
