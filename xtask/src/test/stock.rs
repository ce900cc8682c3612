//! Stock-guest tests: an ordinary test program, built here and run in the lab, a few tests at a
//! time: a failure of the lab then costs a few tests' time, and starting it is paid once for them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Suite, Tally};
use crate::guest;
use crate::lab::{Lab, Options, Outcome, Stream};
use crate::util::{self, Error, Result, bail};

/// What the tests use, in the lab too, whose file system is this machine's.
const HOST_PROGRAMS: &[(&str, &str)] = &[("dmsetup", "dmsetup"), ("losetup", "mount")];

/// Tests that share one machine, at most.
const GROUP: usize = 4;
/// Machines at a time. Each keeps one CPU of this machine busy.
const MACHINES: usize = 2;
/// A test ends its guest itself after less than that.
const LIMIT_PER_TEST: Duration = Duration::from_secs(720);

/// How often the lab was used and failed.
#[derive(Clone, Copy, Default)]
pub struct LabTally {
    /// Machines started, counting those that failed.
    attempts: u64,
    /// Machines that failed: their commands ran again.
    failures: u64,
    /// Groups that no machine could run: their tests count as failed.
    lost: u64,
}

impl fmt::Display for LabTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LabTally { attempts, failures, lost } = self;
        write!(f, "lab: {attempts} attempts, {failures} lab failures, {lost} given up")
    }
}

/// Builds what the tests need, then runs them.
pub fn run(suite: &mut Suite) -> Result<Tally> {
    util::ensure_programs(HOST_PROGRAMS)?;
    let pollux = suite.pollux()?;
    guest::make(false)?;
    let what = ["test", "--package", "pollux-tests", "--test", "stock", "--no-run"];
    let program = util::build(&what, "stock")?;
    let mut names = list(&program)?;
    if let Some(filter) = &suite.filter {
        names.retain(|name| name.contains(filter));
    }
    if names.is_empty() {
        bail!("no test to run");
    }
    let lab = Lab::open(false)?;
    println!("{} tests, on {}", names.len(), lab.place());
    let group = names.len().div_ceil(MACHINES).min(GROUP);
    let runner = Runner {
        lab: &lab,
        program: &program,
        pollux: &pollux,
        shared: Mutex::new(Shared {
            waiting: names.chunks(group).map(<[String]>::to_vec).collect(),
            busy: 0,
            tally: Tally::default(),
            lab: LabTally::default(),
        }),
    };
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let workers: Vec<_> = (1..=MACHINES)
            .map(|number| {
                scope.spawn({
                    let runner = &runner;
                    move || runner.work(number)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err(Error("a worker died".into()))))
            .collect()
    });
    let shared = runner.shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    suite.lab = shared.lab;
    for result in results {
        result?;
    }
    Ok(shared.tally)
}

/// The names of a test program's tests, without those it ignores.
fn list(program: &Path) -> Result<Vec<String>> {
    let list = |arguments: &[&str]| -> Result<Vec<String>> {
        let text = util::output_text(
            std::process::Command::new(program).args(["--list", "--format=terse"]).args(arguments),
        )?;
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(String::from).collect())
    };
    let ignored = list(&["--ignored"])?;
    for name in &ignored {
        println!("test {name} ... ignored");
    }
    Ok(list(&[])?.into_iter().filter(|name| !ignored.contains(name)).collect())
}

struct Runner<'a> {
    lab: &'a Lab,
    program: &'a Path,
    pollux: &'a Path,
    shared: Mutex<Shared>,
}

struct Shared {
    waiting: VecDeque<Vec<String>>,
    /// Groups that are running: they may come back in part.
    busy: usize,
    tally: Tally,
    lab: LabTally,
}

impl Runner<'_> {
    fn shared(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs groups until none is left, nor can come back.
    fn work(&self, worker: usize) -> Result<()> {
        loop {
            let group = {
                let mut shared = self.shared();
                match shared.waiting.pop_front() {
                    Some(group) => {
                        shared.busy += 1;
                        Some(group)
                    }
                    None if shared.busy == 0 => return Ok(()),
                    None => None,
                }
            };
            let Some(group) = group else {
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            let result = self.run_group(worker, &group);
            let mut shared = self.shared();
            shared.busy -= 1;
            let (end, again) = match result {
                Ok(run) => run,
                Err(error) => {
                    shared.waiting.clear();
                    return Err(error);
                }
            };
            shared.tally += end.tally;
            shared.lab.attempts += u64::from(end.attempts);
            shared.lab.failures += u64::from(end.lab_failures);
            shared.lab.lost += u64::from(end.lost);
            if !again.is_empty() {
                shared.waiting.push_back(again);
            }
        }
    }

    /// Runs one group. Returns what it counts for, and the tests that did not get their turn.
    fn run_group(&self, worker: usize, group: &[String]) -> Result<(End, Vec<String>)> {
        let mut command: Vec<OsString> =
            vec!["env".into(), format!("POLLUX={}", self.pollux.display()).into()];
        command.push(self.program.into());
        command.extend(["--test-threads=1", "--exact"].map(OsString::from));
        command.extend(group.iter().map(OsString::from));
        let count = u32::try_from(group.len()).unwrap_or(u32::MAX);
        let options = Options { timeout: LIMIT_PER_TEST * count, ..Options::default() };
        let started = Instant::now();
        let mut lines = Lines::default();
        let mut output = String::new();
        let (outcome, attempts) = self.lab.run(&options, &command, &mut |stream, bytes| {
            for line in lines.add(stream, bytes) {
                println!("[{worker}] {line}");
                if stream == Stream::Out {
                    output.push_str(&line);
                    output.push('\n');
                } else if line.starts_with("lab: attempt ") {
                    output.clear(); // void
                }
            }
        })?;
        for line in lines.rest() {
            println!("[{worker}] {line}");
            output.push_str(&line);
            output.push('\n');
        }
        let (end, again) = judge(group, &output, &outcome, attempts);
        println!("[{worker}] {} ({:.1} s)", end.tally, started.elapsed().as_secs_f64());
        Ok((end, again))
    }
}

/// What a group counts for.
#[derive(Default, PartialEq, Eq, Debug)]
struct End {
    tally: Tally,
    attempts: u32,
    lab_failures: u32,
    lost: bool,
}

/// Counts a group's results from what the test program wrote.
///
/// A test with a line of its own counts as that says. If the program did not get to its end, the
/// first test without a result has failed, and those after it have not run.
fn judge(group: &[String], output: &str, outcome: &Outcome, attempts: u32) -> (End, Vec<String>) {
    let lab_failed = matches!(outcome, Outcome::LabFailed(_));
    let mut end =
        End { attempts, lab_failures: attempts - u32::from(!lab_failed), ..End::default() };
    if lab_failed {
        end.lost = true;
        end.tally.failed = group.len() as u64;
        return (end, Vec::new());
    }
    if let Some(tally) = output.lines().find_map(Tally::from_result_line) {
        end.tally = tally;
        // Whatever does not fit what was asked for is a failure, not a success.
        let missing = (group.len() as u64).saturating_sub(tally.passed + tally.failed);
        let silent = *outcome != Outcome::Exited(0) && tally.failed == 0;
        end.tally.failed += missing.max(silent.into());
        return (end, Vec::new());
    }
    let result_of = |name: &str| {
        output.lines().find_map(|line| line.strip_prefix(&format!("test {name} ... ")))
    };
    let mut again = Vec::new();
    let mut hung = false;
    for name in group {
        match result_of(name) {
            Some(result) if result.ends_with("ok") => end.tally.passed += 1,
            Some(_) => end.tally.failed += 1,
            // libtest runs tests in the order of their names, which is that of the list.
            None if !hung => {
                hung = true;
                end.tally.failed += 1;
            }
            None => again.push(name.clone()),
        }
    }
    (end, again)
}

/// Puts a stream's pieces together to lines.
#[derive(Default)]
struct Lines {
    out: Vec<u8>,
    err: Vec<u8>,
}

impl Lines {
    fn add(&mut self, stream: Stream, bytes: &[u8]) -> Vec<String> {
        let pending = match stream {
            Stream::Out => &mut self.out,
            Stream::Err => &mut self.err,
        };
        pending.extend(bytes);
        let mut lines = Vec::new();
        while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
        lines
    }

    /// What is left without an end of line.
    fn rest(self) -> Vec<String> {
        [self.out, self.err]
            .iter()
            .filter(|rest| !rest.is_empty())
            .map(|rest| String::from_utf8_lossy(rest).trim_end().to_owned())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).into()).collect()
    }

    #[test]
    fn a_complete_group_counts_as_its_program_says() {
        let output = "test a ... ok\ntest b ... FAILED\n\
                      test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured\n";
        let (end, again) = judge(&group(&["a", "b"]), output, &Outcome::Exited(101), 2);
        assert_eq!(end.tally, Tally { passed: 1, failed: 1 });
        assert_eq!((end.attempts, end.lab_failures, end.lost), (2, 1, false));
        assert!(again.is_empty());
    }

    #[test]
    fn a_test_that_was_asked_for_and_did_not_run_has_failed() {
        let output = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let (end, _) = judge(&group(&["a", "b"]), output, &Outcome::Exited(0), 1);
        assert_eq!(end.tally, Tally { passed: 1, failed: 1 });
    }

    #[test]
    fn a_hang_fails_one_test_and_those_after_it_get_another_machine() {
        let output = "test a ... ok\ntest b ...";
        let (end, again) = judge(&group(&["a", "b", "c"]), output, &Outcome::TimedOut, 1);
        assert_eq!(end.tally, Tally { passed: 1, failed: 1 });
        assert_eq!(again, ["c"]);
    }

    #[test]
    fn a_lost_group_has_failed() {
        let outcome = Outcome::LabFailed("L1 silent".into());
        let (end, again) = judge(&group(&["a", "b"]), "test a ... ok\n", &outcome, 3);
        assert_eq!(end.tally, Tally { passed: 0, failed: 2 });
        assert_eq!((end.attempts, end.lab_failures, end.lost), (3, 3, true));
        assert!(again.is_empty());
    }

    #[test]
    fn lines_come_whole_whatever_the_pieces() {
        let mut lines = Lines::default();
        assert!(lines.add(Stream::Out, b"test a ... ").is_empty());
        assert_eq!(lines.add(Stream::Err, b"oh\n"), ["oh"]);
        assert_eq!(lines.add(Stream::Out, b"ok\ntest b"), ["test a ... ok"]);
        assert_eq!(lines.rest(), ["test b"]);
    }
}
