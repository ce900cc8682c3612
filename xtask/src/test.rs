//! `cargo xtask test`: every check and every test, fastest first, and one summary.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use crate::lab;
use crate::util::{self, Context, Error, Result, bail, cargo};

mod stock;

#[cfg(test)]
mod documents;

/// Runs every check and test; the last line is `N passed, N failed`.
#[derive(clap::Args)]
pub struct Args {
    /// Run only these steps.
    #[arg(value_name = "STEP", value_parser = STEPS.map(|step| step.name))]
    steps: Vec<String>,
    /// Run only the stock-guest tests whose names contain this.
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
}

/// One step. A test that needs KVM and finds none fails.
struct Step {
    name: &'static str,
    run: fn(&mut Suite) -> Result<Tally>,
}

/// All steps, in the order in which they run.
const STEPS: [Step; 8] = [
    Step { name: "format", run: |_| check(cargo(&["fmt", "--all", "--check"])) },
    Step {
        name: "lint",
        run: |_| {
            let what = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
            check(cargo(&what))
        },
    },
    Step { name: "dependencies", run: dependencies },
    // Unit, property and documentation tests: no KVM.
    Step {
        name: "unit",
        run: |_| {
            let what = ["test", "--workspace", "--exclude", "pollux-tests", "--no-fail-fast"];
            tests(cargo(&what))
        },
    },
    // The report of `pollux bench` in a real browser.
    Step { name: "browser", run: browser },
    // Guests of a few instructions on this machine's KVM.
    Step {
        name: "tiny",
        run: |suite| {
            suite.pollux()?;
            tests(cargo(&[
                "test",
                "--package",
                "pollux-tests",
                "--lib",
                "--test",
                "tiny",
                "--test",
                "stats",
                "--test",
                "terminal",
                "--test",
                "outputs",
                "--test",
                "control",
                "--test",
                "record",
                "--test",
                "oracle",
                "--test",
                "sandbox",
            ]))
        },
    },
    // What the next step relies on: what the lab says of a command, of a hang and of itself.
    Step {
        name: "lab",
        run: |_| tests(cargo(&["test", "--package", "xtask", "lab::", "--", "--ignored"])),
    },
    // Debian's guests, in the lab where this machine's KVM cannot run them.
    Step { name: "stock", run: stock::run },
];

/// What the steps share.
struct Suite {
    filter: Option<String>,
    lab: stock::LabTally,
}

impl Suite {
    /// Builds the program under test and returns its path.
    fn pollux(&mut self) -> Result<PathBuf> {
        let status =
            cargo(&["build", "--package", "vmm", "--bin", "pollux"]).status().context("cargo")?;
        if !status.success() {
            bail!("pollux does not build");
        }
        Ok(util::target_dir().join("debug/pollux"))
    }
}

/// How many passed and failed.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Tally {
    passed: u64,
    failed: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

impl Tally {
    /// Reads a line `test result: ok. 3 passed; 0 failed; ...` of a test program.
    fn from_result_line(line: &str) -> Option<Tally> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let count = |what: &str| {
            counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
        };
        Some(Tally { passed: count("passed")?, failed: count("failed")? })
    }

    /// What a step that is one check counts as.
    fn of_check(passed: bool) -> Tally {
        Tally { passed: passed.into(), failed: (!passed).into() }
    }
}

/// `cargo xtask test`.
///
/// # Errors
/// None but those of the terminal: a step that cannot run counts as failed.
pub fn run(args: &Args) -> Result<ExitCode> {
    lab::catch_signals();
    let mut suite = Suite { filter: args.filter.clone(), lab: stock::LabTally::default() };
    let mut total = Tally::default();
    let mut report = Vec::new();
    for step in STEPS
        .iter()
        .filter(|step| args.steps.is_empty() || args.steps.iter().any(|name| name == step.name))
    {
        println!("=== {}", step.name);
        let started = Instant::now();
        let tally = (step.run)(&mut suite).unwrap_or_else(|error| {
            println!("{}: {error}", step.name);
            Tally::of_check(false)
        });
        if let Some(signal) = lab::signalled() {
            bail!("interrupted by signal {signal}");
        }
        let line = format!("{:<13} {tally} ({:.1} s)", step.name, started.elapsed().as_secs_f64());
        println!("{line}");
        report.push(line);
        total += tally;
    }
    println!("=== summary");
    for line in report {
        println!("{line}");
    }
    println!("{}", suite.lab);
    println!("{total}");
    Ok(if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A step that passes or fails as a whole.
fn check(mut command: Command) -> Result<Tally> {
    Ok(Tally::of_check(command.status().context("cargo")?.success()))
}

/// Licences, advisories and sources, where the tool for it is installed.
fn dependencies(_: &mut Suite) -> Result<Tally> {
    if util::find_program("cargo-deny").is_none() {
        println!("cargo-deny is not installed: dependencies are not checked here");
        return Ok(Tally::default());
    }
    check(cargo(&["deny", "--offline", "check", "licenses", "bans", "sources"]))
}

/// Tests that need a browser: any Chromium will do, Debian's smallest is installed if there is none.
fn browser(_: &mut Suite) -> Result<Tally> {
    if !["chromium", "chromium-browser"].iter().any(|name| util::find_program(name).is_some()) {
        util::ensure_programs(&[("chromium-headless-shell", "chromium-headless-shell")])?;
    }
    tests(cargo(&["test", "--package", "bench", "--test", "browser", "--", "--ignored"]))
}

/// Test programs run by cargo: passes their output on and adds up their results. A failure that no
/// test stands for (a test that does not compile, or that ends the process) counts as one.
fn tests(mut command: Command) -> Result<Tally> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo")?;
    let pipe = child.stdout.take().ok_or(Error("cargo has no stdout".into()))?;
    let mut tally = Tally::default();
    for line in BufReader::new(pipe).split(b'\n') {
        let line = line.context("cargo")?;
        let mut out = std::io::stdout().lock();
        out.write_all(&line).and_then(|()| out.write_all(b"\n")).context("stdout")?;
        if let Some(result) = Tally::from_result_line(&String::from_utf8_lossy(&line)) {
            tally += result;
        }
    }
    let status = child.wait().context("cargo")?;
    if !status.success() && tally.failed == 0 {
        tally.failed = 1;
    }
    if tally == Tally::default() {
        bail!("no test ran");
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_test_programs_are_counted() {
        let line = "test result: ok. 15 passed; 0 failed; 2 ignored; 0 measured; 3 filtered out; \
                    finished in 0.16s";
        assert_eq!(Tally::from_result_line(line), Some(Tally { passed: 15, failed: 0 }));
        let line = "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(Tally::from_result_line(line), Some(Tally { passed: 1, failed: 2 }));
        assert_eq!(Tally::from_result_line("test a::result ... ok"), None);
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_failure_without_a_failed_test_still_counts() {
        let passed = "echo 'test result: ok. 3 passed; 0 failed; 0 ignored'";
        assert_eq!(tests(shell(passed)).unwrap(), Tally { passed: 3, failed: 0 });
        let died = format!("{passed}; exit 101");
        assert_eq!(tests(shell(&died)).unwrap(), Tally { passed: 3, failed: 1 });
        assert!(tests(shell("exit 0")).is_err());
    }
}
