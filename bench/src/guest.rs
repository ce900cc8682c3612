//! A guest under Pollux that does one thing after another as it is told: its agent listens on the
//! results channel, and what it says comes back the same way.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::control;
use crate::figures::Reports;
use crate::lines::{Interrupt, Lines, Waited};
use crate::setting::{Place, Setting};

/// How long a guest may take to boot, and to do something beyond the time that it is to take. Generous:
/// an emulated CPU is slow.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// Where the guest's haltpoll governor has its parameters.
const GUEST_PARAMETERS: &str = "/sys/module/haltpoll/parameters";
/// What the guest runs.
pub const AGENT: &str = "quiet pollux.cmd=\"report; agent\"";

/// Why a guest did not do what it was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The user wants an end.
    Interrupted,
    /// In words.
    Failed(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// A guest that runs.
pub struct Guest<'a> {
    child: Child,
    dir: TempDir,
    lines: Lines,
    control: UnixStream,
    interrupt: &'a Interrupt,
    told: u32,
    /// What it said of itself when it had booted.
    pub itself: Json,
}

/// The options by which Pollux gets a guest that can be told; more follow. `dir` has its files.
pub fn options(dir: &Path) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    let console = format!("file={}", file("console"));
    let words = ["--results", "/dev/stdout", "--console", &console, "--control", &file("control")];
    words.map(str::to_owned).to_vec()
}

impl<'a> Guest<'a> {
    /// Runs `pollux`, whose first words are the program and `run`, and waits until its guest listens.
    ///
    /// # Errors
    /// The guest did not come so far.
    pub fn boot(pollux: &[String], interrupt: &'a Interrupt) -> Result<Self, Failure> {
        let dir = tempfile::tempdir().map_err(|why| format!("no directory for files: {why}"))?;
        let (program, words) = pollux.split_first().ok_or_else(|| "no program".to_owned())?;
        let stderr = File::create(dir.path().join("stderr"));
        let mut child = Command::new(program)
            .args(words)
            .args(options(dir.path()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr.map_err(|why| format!("no file for messages: {why}"))?)
            .spawn()
            .map_err(|why| format!("{program} does not start: {why}"))?;
        let Some(stdout) = child.stdout.take() else { return Err("no output".to_owned().into()) };
        let lines = Lines::new(stdout);
        let mut starting = Starting { child: Some(child), dir: Some(dir) };
        let deadline = Instant::now() + PATIENCE;
        let mut itself = Json::Null;
        loop {
            let line = match lines.next(deadline, interrupt) {
                Waited::Line(line) => line,
                Waited::Interrupted => return Err(Failure::Interrupted),
                Waited::End => return Err(starting.explain("Pollux has ended").into()),
                Waited::TimedOut => {
                    let why = format!("no agent listens in it after {} s", PATIENCE.as_secs());
                    return Err(starting.explain(&why).into());
                }
            };
            if let Some(("guest", report)) = report(&line) {
                itself = report;
            }
            if line.starts_with("@ready") {
                break;
            }
        }
        let path = starting.dir.as_ref().map(|dir| dir.path().join("control")).unwrap_or_default();
        let control = UnixStream::connect(path)
            .map_err(|why| starting.explain(&format!("no control socket: {why}")))?;
        match (starting.child.take(), starting.dir.take()) {
            (Some(child), Some(dir)) => {
                Ok(Self { child, dir, lines, control, interrupt, told: 0, itself })
            }
            _ => Err("no process".to_owned().into()),
        }
    }

    /// Sets what can be set while the guest runs. `config`: the setting as Pollux understands it.
    ///
    /// # Errors
    /// One side refused.
    pub fn set(&mut self, setting: &Setting, config: &Json) -> Result<(), Failure> {
        let host: serde_json::Map<String, Json> =
            setting.of(Place::Host).map(|(name, value)| (name.into(), value.into())).collect();
        if !host.is_empty() {
            self.ask(&json!({ "command": "set", "parameters": host }))?;
        }
        let mut line = Vec::new();
        for (name, _) in setting.of(Place::Guest) {
            let value = match &config["guest_halt_poll"][name] {
                Json::Bool(true) => "Y".to_owned(),
                Json::Bool(false) => "N".to_owned(),
                Json::Number(number) => number.to_string(),
                other => return Err(format!("{name} is {other}").into()),
            };
            line.push(format!("echo {value} >{GUEST_PARAMETERS}/{name}"));
        }
        if !line.is_empty() {
            self.tell(&line.join(" && "), Duration::ZERO)?;
        }
        Ok(())
    }

    /// Has the guest's shell run `command`, which is to take `takes`, and gives what it reported.
    ///
    /// # Errors
    /// It failed, or took too long.
    pub fn tell(&mut self, command: &str, takes: Duration) -> Result<Reports, Failure> {
        self.told += 1;
        let id = self.told;
        self.ask(&json!({ "command": "send", "line": format!("{id} {command}") }))?;
        let deadline = Instant::now() + takes + PATIENCE;
        let mut reports = Reports::new();
        let mut last = String::new();
        loop {
            match self.lines.next(deadline, self.interrupt) {
                Waited::Line(line) => {
                    match report(&line) {
                        Some(("done", done)) if done["id"] == id => {
                            return match done["status"].as_i64() {
                                Some(0) => Ok(reports),
                                _ => Err(format!("`{command}` failed in the guest: {last} {done}")
                                    .into()),
                            };
                        }
                        Some((word, report)) => _ = reports.insert(word.to_owned(), report),
                        None if !line.starts_with('@') => last = line,
                        None => {}
                    }
                }
                Waited::Interrupted => return Err(Failure::Interrupted),
                Waited::End => return Err(self.explain("Pollux has ended").into()),
                Waited::TimedOut => {
                    return Err(self.explain(&format!("`{command}` does not end")).into());
                }
            }
        }
    }

    /// The statistics so far.
    ///
    /// # Errors
    /// There are none to be had.
    pub fn statistics(&mut self) -> Result<Json, Failure> {
        Ok(self.ask(&json!({ "command": "stats" }))?["stats"].take())
    }

    fn ask(&mut self, request: &Json) -> Result<Json, Failure> {
        let reply = control::ask(&self.control, request)
            .map_err(|why| self.explain(&format!("no answer to {request}: {why}")))?;
        match reply["ok"].as_bool() {
            Some(true) => Ok(reply),
            _ => Err(format!("{request} was refused: {}", reply["error"]).into()),
        }
    }

    /// Ends it, and waits for its end.
    pub fn stop(mut self) {
        if self.ask(&json!({ "command": "stop" })).is_ok() {
            let deadline = Instant::now() + PATIENCE;
            while !matches!(
                self.lines.next(deadline, self.interrupt),
                Waited::End | Waited::TimedOut
            ) {
                if self.interrupt.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
            }
        }
    }

    fn explain(&mut self, what: &str) -> String {
        explain(&mut self.child, self.dir.path(), what)
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// A guest on its way: ends when it does not get there.
struct Starting {
    child: Option<Child>,
    dir: Option<TempDir>,
}

impl Starting {
    fn explain(&mut self, what: &str) -> String {
        match (&mut self.child, &self.dir) {
            (Some(child), Some(dir)) => explain(child, dir.path(), what),
            _ => what.to_owned(),
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            end(child);
        }
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// What happened, with Pollux's own words and the last ones of the guest's console.
fn explain(child: &mut Child, dir: &Path, what: &str) -> String {
    end(child);
    let last = |name: &str| {
        let bytes = fs::read(PathBuf::from(dir).join(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        line.chars().filter(|c| !c.is_control()).take(200).collect::<String>()
    };
    match (last("stderr"), last("console")) {
        (said, _) if !said.is_empty() => format!("{what}: {said}"),
        (_, console) if !console.is_empty() => format!("{what}; its console ends: {console}"),
        _ => what.to_owned(),
    }
}

/// A line `@WORD JSON`.
pub fn report(line: &str) -> Option<(&str, Json)> {
    let (word, rest) = line.strip_prefix('@')?.split_once(' ')?;
    Some((word, serde_json::from_str(rest).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_word_and_json() {
        assert_eq!(report("@fio {\"iops\": 1}"), Some(("fio", json!({ "iops": 1 }))));
        assert_eq!(report("@mark fio-start"), None);
        assert_eq!(report("text"), None);
    }

    #[test]
    fn a_pollux_that_ends_is_told_in_its_own_words() {
        let words = ["sh", "-c", "echo 'pollux: no KVM here' >&2"].map(str::to_owned);
        let interrupt = Interrupt::new(false);
        let failure = Guest::boot(&words, &interrupt).map(|_| ()).unwrap_err();
        assert_eq!(failure, Failure::Failed("Pollux has ended: pollux: no KVM here".into()));
        interrupt.store(true, std::sync::atomic::Ordering::Relaxed);
        let failure = Guest::boot(&["sleep".to_owned(), "1000".to_owned()], &interrupt);
        assert_eq!(failure.map(|_| ()).unwrap_err(), Failure::Interrupted);
    }
}
