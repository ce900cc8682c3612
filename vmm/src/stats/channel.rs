//! The results channel (`--results`): everything the guest writes to its second serial port goes to
//! the file; lines that begin with `@` mean something to Pollux as well.
//!
//! * `@mark NAME`: take a snapshot of all figures now, under that name;
//! * `@exit N`: the exit status of the guest's command;
//! * `@WORD JSON`: a report of the guest's, such as `@guest` (its settings) and `@fio` (what it
//!   measured).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use devices::serial::LineWatcher;
use serde::Serialize;
use serde_json::Value as Json;

use super::{Snapshot, Sources};
use crate::lifecycle::Lifecycle;

/// A guest may set this many marks; further ones are ignored, so that it cannot make Pollux grow.
const MAX_MARKS: usize = 256;
/// A guest may make this many reports.
const MAX_REPORTS: usize = 256;

/// What the guest said on the results channel.
#[derive(Debug, Default)]
pub struct GuestReport {
    /// Its reports by their word, each in order.
    pub reports: BTreeMap<String, Vec<Json>>,
    /// Of the last `@exit` line.
    pub exit_status: Option<i32>,
    /// Of `@mark` lines, in order.
    pub marks: Vec<Mark>,
}

impl GuestReport {
    fn add(&mut self, word: &str, rest: &str) {
        let Some(word) = word.strip_prefix('@') else { return };
        let count: usize = self.reports.values().map(Vec::len).sum();
        if count < MAX_REPORTS
            && let Ok(report) = serde_json::from_str::<Json>(rest)
        {
            self.reports.entry(word.to_owned()).or_default().push(report);
        }
    }
}

/// All figures when the guest set a mark.
#[derive(Debug, Serialize)]
pub struct Mark {
    /// The name the guest gave.
    pub name: String,
    /// The figures.
    #[serde(flatten)]
    pub snapshot: Snapshot,
}

/// Watches the results channel.
pub struct ChannelWatcher {
    /// Where marks take their figures from.
    pub sources: Arc<Sources>,
    /// What was found.
    pub report: Arc<Mutex<GuestReport>>,
}

impl LineWatcher for ChannelWatcher {
    fn line(&mut self, line: &[u8]) {
        let Ok(line) = std::str::from_utf8(line) else { return };
        let Some((word, rest)) = line.trim_end().split_once(' ') else { return };
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        match word {
            "@mark" if report.marks.len() < MAX_MARKS => {
                let snapshot = self.sources.snapshot();
                report.marks.push(Mark { name: rest.to_owned(), snapshot });
            }
            "@exit" => report.exit_status = rest.parse().ok(),
            _ => report.add(word, rest),
        }
    }
}

/// Watches the console for the kernel's last words, where the guest has no pvpanic driver.
pub struct PanicWatcher(pub Arc<Lifecycle>);

impl LineWatcher for PanicWatcher {
    fn line(&mut self, line: &[u8]) {
        if is_panic(line) {
            self.0.note_panic();
        }
    }
}

/// The line the kernel begins a panic with: the words at its start or after a timestamp.
fn is_panic(line: &[u8]) -> bool {
    const WORDS: &[u8] = b"Kernel panic - not syncing";
    let line = line.trim_ascii_start();
    let after_stamp = match line.strip_prefix(b"[") {
        Some(rest) => rest.iter().position(|&b| b == b']').and_then(|end| rest.get(end + 1..)),
        None => Some(line),
    };
    after_stamp.is_some_and(|text| text.trim_ascii_start().starts_with(WORDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_own_panic_line_counts() {
        assert!(is_panic(b"[    2.084] Kernel panic - not syncing: Attempted to kill init!\r"));
        assert!(is_panic(b"Kernel panic - not syncing: VFS"));
        assert!(!is_panic(b"echo Kernel panic - not syncing"));
        assert!(!is_panic(b"[broken"));
    }

    #[test]
    fn lines_are_taken_by_their_word_and_bounded() {
        let sources = Arc::new(Sources {
            start: std::time::Instant::now(),
            vcpus: Vec::new(),
            disks: Vec::new(),
        });
        let report = Arc::new(Mutex::new(GuestReport::default()));
        let mut watcher = ChannelWatcher { sources, report: Arc::clone(&report) };
        let guest = "@guest {\"driver\":\"haltpoll\"}";
        for line in ["@mark a", guest, "@guest {", "@exit 7\r", "x", "x {}"] {
            watcher.line(line.as_bytes());
        }
        for _ in 0..2 * MAX_MARKS {
            watcher.line(b"@mark b");
            watcher.line(b"@fio {}");
        }
        let report = report.lock().unwrap();
        assert_eq!(report.marks[0].name, "a");
        assert_eq!(report.marks.len(), MAX_MARKS);
        assert_eq!(report.reports["guest"], [serde_json::json!({"driver": "haltpoll"})]);
        assert_eq!(report.reports["fio"].len() + 1, MAX_REPORTS);
        assert_eq!(report.reports.len(), 2);
        assert_eq!(report.exit_status, Some(7));
    }
}
