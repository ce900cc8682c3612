//! `results.json`: everything that was measured, and what was made of it. The other reports are made
//! from this document alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// The version of the document. It changes when a field changes its meaning or goes away.
pub const SCHEMA: u32 = 1;

/// A figure's name, as `lat_p99_us`: what [`FIGURES`] has.
pub type Name = String;

/// What a figure is, and which of two is the better.
pub struct Figure {
    /// Its name in the document, with its unit.
    pub name: &'static str,
    /// For people: what it is, with its unit.
    pub title: &'static str,
    /// Whether more is better; `None`: neither is.
    pub more_is_better: Option<bool>,
}

const fn figure(name: &'static str, title: &'static str, more: Option<bool>) -> Figure {
    Figure { name, title, more_is_better: more }
}

/// Every figure there may be, in the order of tables. A figure that a monitor or workload does not have
/// is absent.
///
/// A *request* is what the workload does again and again: a read or write of the disk, or a message
/// over a pipe and its answer. `exits_*` are the parts of `exits_per_request`.
pub const FIGURES: &[Figure] = &[
    figure("iops", "requests a second", Some(true)),
    figure("lat_mean_us", "mean latency, us", Some(false)),
    figure("lat_p50_us", "median latency, us", Some(false)),
    figure("lat_p99_us", "p99 latency, us", Some(false)),
    figure("lat_p999_us", "p99.9 latency, us", Some(false)),
    figure("interrupts_per_request", "interrupts a request", Some(false)),
    figure("kicks_per_request", "kicks a request", Some(false)),
    figure("exits_per_request", "exits a request", Some(false)),
    figure("exits_halt_per_request", "exits for HLT a request", None),
    figure("exits_io_per_request", "exits for ports and memory a request", None),
    figure("exits_interrupt_per_request", "exits for interrupts a request", None),
    figure("exits_other_per_request", "other exits a request", None),
    figure("polled_per_request", "halts that ended while the host polled, a request", None),
    figure("invalid_per_request", "polls of the host that ended for nothing, a request", None),
    figure("timer_wakes_per_request", "halts that a timer ended, a request", None),
    figure("preemptions_per_s", "times a second that the CPU was taken from a thread", Some(false)),
    figure("ipi_free_per_request", "wakes without an interrupt, a request", None),
    figure("vcpu_us_per_request", "CPU time of vCPU threads a request, us", Some(false)),
    figure("worker_us_per_request", "CPU time of disk workers a request, us", Some(false)),
    figure("guest_us_per_request", "busy time of the guest's CPUs a request, us", Some(false)),
    figure("host_us_per_request", "CPU time of the whole monitor a request, us", Some(false)),
    figure("idle_vcpu_ms_per_s", "CPU time of vCPU threads a second of idling, ms", Some(false)),
    figure(
        "idle_host_ms_per_s",
        "CPU time of the whole monitor a second of idling, ms",
        Some(false),
    ),
    figure(
        "idle_guest_ms_per_s",
        "busy time of the guest's CPUs a second of idling, ms",
        Some(false),
    ),
];

/// The document.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The command that made it, word by word.
    pub command: Vec<String>,
    /// The version of Pollux.
    pub version: String,
    /// When it began and ended: RFC 3339, UTC. No end: it was interrupted, or goes on.
    pub started: String,
    /// See `started`.
    pub ended: Option<String>,
    /// The plan, as TOML that `--plan` takes.
    pub plan: String,
    /// The plan's name and question.
    pub name: String,
    /// See `name`.
    pub question: String,
    /// The host, as in the statistics of `pollux run`.
    pub host: Json,
    /// What the guest said of itself (`@guest`).
    pub guest: Json,
    /// One a workload and setting, in the order of the plan; peers' rows last.
    pub rows: Vec<Row>,
    /// How much equal settings differed, by workload.
    pub noise: Vec<Noise>,
    /// What to set, one a workload; empty if nobody asked.
    pub advice: Vec<Advice>,
    /// Surprises, in words, each told once.
    pub notes: Vec<String>,
}

/// One setting under one workload.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Row {
    /// Unique in the document.
    pub id: String,
    /// The workload's name.
    pub workload: String,
    /// `pollux`, `qemu`, `cloud-hypervisor` or `firecracker`.
    pub monitor: String,
    /// What was set, by name, as text: only what the plan varies.
    pub setting: BTreeMap<String, String>,
    /// The command that repeats it: the monitor's, word by word.
    pub command: Vec<String>,
    /// What is done in the guest: a line for its shell.
    pub guest_command: String,
    /// Why it was not measured, if nobody wanted to: what replay predicts of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Single runs, in the order in which they were made; failed ones too.
    pub runs: Vec<Run>,
    /// Over the runs that did not fail.
    pub summary: BTreeMap<Name, Interval>,
    /// Against the workload's first row, which is the base.
    pub against_base: BTreeMap<Name, Difference>,
    /// Another row's id that is nowhere worse and somewhere better, beyond the noise, in latency
    /// (`lat_mean_us`) and CPU time a request (`host_us_per_request`): nobody should use this setting.
    pub dominated_by: Option<String>,
    /// The host's poll window over time, if it was recorded: seconds since the start, microseconds.
    pub window_us: Vec<[f64; 2]>,
}

/// One run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Run {
    /// Which of the repeats, from 0.
    pub repeat: u32,
    /// Which boot of a guest, from 0 over the whole bench: runs of one boot share it.
    pub boot: u32,
    /// Why there are no figures, if it failed.
    pub error: Option<String>,
    /// What was measured.
    pub figures: BTreeMap<Name, f64>,
    /// The latency's distribution: quantile (0 to 1), microseconds; rising.
    pub latency_us: Vec<[f64; 2]>,
    /// What the statistics of `pollux run` said in words.
    pub notes: Vec<String>,
}

/// A median, with a 95 % confidence interval from the bootstrap.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Interval {
    /// The median.
    pub median: f64,
    /// The interval's ends; both are the median if there is one run only.
    pub low: f64,
    /// See `low`.
    pub high: f64,
}

/// What a row's median is, compared with another's.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Difference {
    /// This row's median over the base's, less 1: 0.1 is 10 % more.
    pub relative: f64,
    /// It is not more than equal settings differ by, or its confidence interval has 0 in it.
    pub inside_noise: bool,
}

/// How much two equal settings differed: the first row of a workload, measured twice in every repeat.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Noise {
    /// The workload.
    pub workload: String,
    /// By figure, how far apart the two medians may be by chance alone, as a part of the median.
    pub relative: BTreeMap<Name, f64>,
    /// The second of the pair: its runs.
    pub runs: Vec<Run>,
}

/// What to set for a workload.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Advice {
    /// The workload.
    pub workload: String,
    /// What was asked for, as `p99<300us`.
    pub goal: String,
    /// The row that serves it best; none if no row reaches the goal.
    pub row: Option<String>,
    /// In words: the measured gain and price.
    pub why: String,
    /// The parameters as options of `pollux run`.
    pub pollux: Vec<String>,
    /// As options of the module `kvm`, `NAME=VALUE`; empty where they do not hold.
    pub kvm_module: Vec<String>,
    /// As the guest's kernel command line.
    pub guest_cmdline: Vec<String>,
}
