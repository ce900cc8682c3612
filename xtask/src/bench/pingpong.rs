//! `cargo xtask bench pingpong`: two processes that wake each other across two vCPUs, with polling on
//! neither side, on the host's and on the guest's: the comparison by which Linux's haltpoll governor
//! was proposed in 2019.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde::Serialize;
use serde_json::Value as Json;

use crate::guest;
use crate::lab::Lab;
use crate::measure::{self, between, documents, notes};
use crate::util::{Result, step};

use super::load::{self, Load};

/// Ping-pong over pipes on two vCPUs, for three settings of host and guest polling in KVM, and two of
/// Pollux's own.
///
/// Every setting runs once a round, in turn, all rounds in one run of the lab. The table has medians. The
/// machine must have nothing else to do.
#[derive(clap::Args)]
pub struct Args {
    /// Rounds.
    #[arg(long, value_name = "TIMES", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Round trips a run.
    #[arg(long, value_name = "COUNT", default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..))]
    loops: u32,
    /// Measure beside other work, too. The times mean nothing, and say so.
    #[arg(long)]
    busy: bool,
}

#[derive(Clone, Copy, Serialize)]
struct Setting {
    halt: &'static str,
    halt_poll_ns: u32,
    guest_halt_poll_ns: u32,
}

const SETTINGS: [Setting; 5] = [
    Setting { halt: "kernel", halt_poll_ns: 0, guest_halt_poll_ns: 0 },
    Setting { halt: "kernel", halt_poll_ns: 300_000, guest_halt_poll_ns: 0 },
    Setting { halt: "kernel", halt_poll_ns: 0, guest_halt_poll_ns: 300_000 },
    Setting { halt: "user", halt_poll_ns: 0, guest_halt_poll_ns: 0 },
    Setting { halt: "user", halt_poll_ns: 300_000, guest_halt_poll_ns: 0 },
];

/// One guest's figures, a round trip where that makes sense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Run {
    us: f64,
    exits: f64,
    halts: f64,
    /// Halts that ended while the host polled.
    polled: f64,
    /// Wakes of a CPU that polled: a store instead of an interrupt.
    without_ipi: f64,
    /// CPU time of both vCPUs.
    vcpu_us: f64,
}

/// What is kept in `target/bench/pingpong.json`.
#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    place: &'a str,
    load: Load,
    loops: u32,
    settings: &'a [Setting],
    /// By setting, then by round.
    runs: &'a [Vec<Run>],
}

/// `cargo xtask bench pingpong`.
///
/// # Errors
/// A guest failed, or the machine is not idle.
pub fn run(args: &Args) -> Result<ExitCode> {
    super::build_pollux()?;
    guest::make(false)?;
    let lab = Lab::open(false)?;
    let load = load::check(args.busy)?;
    step(format_args!("{} rounds of {} guests on {}", args.repeats, SETTINGS.len(), lab.place()));
    let all = documents(&lab, &script(args), SETTINGS.len() * args.repeats as usize)?;
    let mut runs = vec![Vec::new(); SETTINGS.len()];
    for (number, document) in all.iter().enumerate() {
        runs[number % SETTINGS.len()].push(Run::new(document)?);
    }
    print!("{}", table(&runs));
    println!(
        "\nMedians of {} runs; a round trip is two wakes. Ran on {}.",
        args.repeats,
        lab.place()
    );
    for (setting, document) in SETTINGS.iter().zip(&all) {
        for note in notes(document) {
            println!(
                "Guest {}, host {}: {note}.",
                setting.guest_halt_poll_ns, setting.halt_poll_ns
            );
        }
    }
    if !load.is_idle() {
        println!("\nNOT IDLE: other work ran on this machine. No time above means anything.");
    }
    let document = Document {
        schema: 1,
        place: lab.place(),
        load,
        loops: args.loops,
        settings: &SETTINGS,
        runs: &runs,
    };
    super::keep("pingpong", &document)?;
    Ok(ExitCode::SUCCESS)
}

fn script(args: &Args) -> String {
    let mut script = String::from(measure::SCRIPT_START);
    for round in 1..=args.repeats {
        for setting in &SETTINGS {
            let Setting { halt, halt_poll_ns, guest_halt_poll_ns } = setting;
            let idle = match guest_halt_poll_ns {
                0 => "--guest-idle halt".to_owned(),
                ns => format!("--guest-idle haltpoll --guest-halt-poll-ns {ns}"),
            };
            let _ = writeln!(
                script,
                "echo '  round {round}: halt {halt}, host {halt_poll_ns}, guest {guest_halt_poll_ns}' >&2\n\
                 {pollux} --cpus 2 --halt {halt} --halt-poll-ns {halt_poll_ns} {idle} \
                 --cmdline 'quiet pollux.cmd=\"report; pipe-measure {loops}\"'",
                pollux = measure::stock_guest(),
                loops = args.loops,
            );
        }
    }
    script
}

impl Run {
    fn new(document: &Json) -> Result<Self> {
        let pipe = &document["guest"]["pipe"][0];
        let loops = pipe["loops"].as_f64().filter(|&loops| loops > 0.0);
        let vcpus = |of: &dyn Fn(&Json) -> Option<f64>| {
            Some(between(document, ["pipe-start", "pipe-end"], "vcpus", of)? / loops?)
        };
        let all = || {
            Some(Self {
                us: pipe["seconds"].as_f64()? / loops? * 1e6,
                exits: vcpus(&|vcpu| vcpu["exits"]["exits"].as_f64())?,
                halts: vcpus(&|vcpu| vcpu["exits"]["halt_exits"].as_f64())?,
                polled: vcpus(&|vcpu| vcpu["halt"]["halt_successful_poll"].as_f64())?,
                without_ipi: pipe["wakes_without_ipi"].as_f64()? / loops?,
                vcpu_us: vcpus(&|vcpu| vcpu["cpu_ns"].as_f64())? / 1e3,
            })
        };
        all().ok_or_else(|| measure::missing(document, pipe))
    }
}

/// The median of a figure over all runs.
fn median(runs: &[Run], of: impl Fn(&Run) -> f64) -> f64 {
    super::median(runs.iter().map(of).collect()).unwrap_or(f64::NAN)
}

fn table(runs: &[Vec<Run>]) -> String {
    let mut text = String::from(
        "\n\
         halt    host          guest               time of a round trip       per round trip\n\
         mode    halt_poll_ns  halt_poll_ns      us  spread  x first row   exits  halts  polled  wakes without IPI  vCPUs us\n",
    );
    let first = runs.first().map_or(f64::NAN, |runs| median(runs, |run| run.us));
    for (setting, runs) in SETTINGS.iter().zip(runs) {
        let us = median(runs, |run| run.us);
        let spread = super::spread(&runs.iter().map(|run| run.us).collect::<Vec<_>>());
        let _ = writeln!(
            text,
            "{:<7} {:>12}  {:>12}  {:>6.0}  {:>4.0} %  {:>11.2}  {:>6.2}  {:>5.2}  {:>6.2}  {:>17.2}  {:>8.0}",
            setting.halt,
            setting.halt_poll_ns,
            setting.guest_halt_poll_ns,
            us,
            spread * 100.0,
            us / first,
            median(runs, |run| run.exits),
            median(runs, |run| run.halts),
            median(runs, |run| run.polled),
            median(runs, |run| run.without_ipi),
            median(runs, |run| run.vcpu_us),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_are_those_between_the_marks_a_round_trip() {
        let mark = |name: &str, n: u32| {
            json!({ "name": name, "vcpus": [{
                "exits": { "exits": 10 * n, "halt_exits": 4 * n },
                "halt": { "halt_successful_poll": 2 * n }, "cpu_ns": 6000 * n,
            }]})
        };
        let document = json!({
            "marks": [mark("pipe-start", 1), mark("pipe-end", 3)],
            "guest": { "pipe": [{ "loops": 2, "seconds": 0.5, "wakes_without_ipi": 6 }] },
        });
        let run = Run::new(&document).unwrap();
        let expected = Run {
            us: 250_000.0,
            exits: 10.0,
            halts: 4.0,
            polled: 2.0,
            without_ipi: 3.0,
            vcpu_us: 6.0,
        };
        assert_eq!(run, expected);
        assert!(Run::new(&json!({})).is_err());
    }

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        let runs = [4.0, 1.0, 2.0, 100.0].map(|us| Run { us, ..Run::default() });
        assert_eq!(median(&runs, |run| run.us), 3.0);
        assert_eq!(median(&runs[..3], |run| run.us), 2.0);
    }
}
