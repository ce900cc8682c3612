//! The kernel's trace buffer: which events it takes, and what it took.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the kernel's tracing is.
const TRACEFS: &str = "/sys/kernel/tracing";
/// Enough for some minutes of halts of a few vCPUs.
const BUFFER_KIB: u32 = 16 << 10;

/// A recording; while there is one, no other tool can trace. Ends when dropped.
pub struct Recording {
    events: Vec<PathBuf>,
}

/// One line of the trace: who, when and what.
pub struct Line<'a> {
    /// The thread's name, without its number.
    pub thread: &'a str,
    /// Microseconds since some start.
    pub at_us: u64,
    /// The tracepoint.
    pub event: &'a str,
    /// What it says.
    pub text: &'a str,
}

impl Recording {
    /// Starts with an empty buffer. `events`: as in `kvm/kvm_vcpu_wakeup`, each with a filter or "".
    ///
    /// # Panics
    /// The kernel cannot trace these, or we may not.
    pub fn start(events: &[(&str, &str)]) -> Self {
        if !Path::new(TRACEFS).join("trace").exists() {
            let mount = ["-t", "tracefs", "tracefs", TRACEFS];
            assert!(Command::new("mount").args(mount).status().expect("mount").success());
        }
        set("tracing_on", "0");
        set("current_tracer", "nop");
        set("trace_clock", "mono");
        set("buffer_size_kb", &BUFFER_KIB.to_string());
        set("trace", "");
        let mut recording = Self { events: Vec::new() };
        for (event, filter) in events {
            let dir = PathBuf::from("events").join(event);
            if !filter.is_empty() {
                set(dir.join("filter"), filter);
            }
            set(dir.join("enable"), "1");
            recording.events.push(dir);
        }
        set("tracing_on", "1");
        recording
    }

    /// Puts a line of our own between the events.
    pub fn mark(&self, text: &str) {
        set("trace_marker", text);
    }

    /// What was recorded, as the kernel prints it.
    ///
    /// # Panics
    /// Events were lost: the buffer was too small.
    pub fn text(&self) -> String {
        set("tracing_on", "0");
        let text = fs::read_to_string(Path::new(TRACEFS).join("trace")).expect("the trace");
        let counts = text.lines().find(|line| line.contains("entries-in-buffer/entries-written"));
        let counts = counts.and_then(|line| line.split_whitespace().nth(2)).expect("counts");
        let (kept, written) = counts.split_once('/').expect("two counts");
        assert_eq!(kept, written, "the trace buffer was too small");
        text
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        set("tracing_on", "0");
        for dir in &self.events {
            set(dir.join("enable"), "0");
            set(dir.join("filter"), "0");
        }
    }
}

fn set(file: impl AsRef<Path>, value: &str) {
    let path = Path::new(TRACEFS).join(file);
    fs::write(&path, value).unwrap_or_else(|why| panic!("{} = {value}: {why}", path.display()));
}

/// The events in a trace as the kernel prints it; other lines are left out.
pub fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    text.lines().filter_map(|line| {
        // `  vcpu0-123     [000] d..1.    12.345678: kvm_vcpu_wakeup: wait time …`
        let (thread, rest) = line.split_once(" [")?;
        let (thread, _) = thread.trim().rsplit_once('-')?;
        let (time, rest) = rest.split_once(": ")?;
        let (seconds, micros) = time.rsplit_once(' ')?.1.split_once('.')?;
        let at_us = seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?;
        let (event, text) = rest.split_once(": ")?;
        Some(Line { thread, at_us, event, text })
    })
}
