//! A plan: what to vary, what to do in the guest, how often. A TOML file, or one of those built in.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::setting::{self, Setting};

/// Most runs of a plan: repeats times settings times workloads.
pub const MAX_RUNS: usize = 100_000;

/// The plans that are built in, by name.
pub const BUILT_IN: [(&str, &str); 5] = [
    ("quick", include_str!("../../resources/plans/quick.toml")),
    ("halt", include_str!("../../resources/plans/halt.toml")),
    ("blk", include_str!("../../resources/plans/blk.toml")),
    ("pingpong", include_str!("../../resources/plans/pingpong.toml")),
    ("think", include_str!("../../resources/plans/think.toml")),
];

/// A plan, as its file has it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What the measurement is to answer.
    #[serde(default)]
    pub question: String,
    /// How to measure.
    #[serde(default)]
    pub measure: Measure,
    /// What is done in the guest; each with every setting.
    #[serde(rename = "workload")]
    pub workloads: Vec<Workload>,
    /// Settings: of each sweep, every combination of its values. By axis, a value or a list of values.
    #[serde(rename = "sweep")]
    pub sweeps: Vec<BTreeMap<String, Values>>,
}

/// How to measure.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Measure {
    /// How often each setting is measured, all settings in turn (A B C A B C).
    pub repeats: u32,
    /// Seconds that a workload is measured in each run; a workload may have its own.
    pub seconds: f64,
    /// Seconds of the workload before that, which are thrown away.
    pub warmup_seconds: f64,
    /// Seconds of idling that are measured after it; 0: none.
    pub idle_seconds: f64,
    /// Which settings share a boot of the guest.
    pub boots: Boots,
    /// The guest's memory, as `--memory` takes it.
    pub memory: String,
    /// The size of the data disk that is made if the user names none, as `--memory` takes it.
    pub data: String,
}

/// Which settings share a boot.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Boots {
    /// Those that differ in parameters that can be changed while the guest runs, in each repeat.
    Shared,
    /// None: each run has its own.
    Each,
}

impl Default for Measure {
    fn default() -> Self {
        Self {
            repeats: 5,
            seconds: 4.0,
            warmup_seconds: 1.0,
            idle_seconds: 1.0,
            boots: Boots::Shared,
            memory: "512M".into(),
            data: "64M".into(),
        }
    }
}

/// What is done in the guest.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// A name for tables.
    pub name: String,
    /// Which program.
    #[serde(default)]
    pub kind: Kind,
    /// fio: its `rw`.
    #[serde(default = "randread")]
    pub rw: String,
    /// fio: bytes a request, as `4k`.
    #[serde(default = "four_kib")]
    pub block_size: String,
    /// fio: requests in flight of each job. More than one takes its engine `libaio`, one `psync`.
    #[serde(default = "one")]
    pub iodepth: u32,
    /// fio: processes.
    #[serde(default = "one")]
    pub jobs: u32,
    /// fio: microseconds that a job idles between two requests.
    #[serde(default)]
    pub think_time_us: u32,
    /// pipe: messages there and back; the measured seconds follow from it.
    #[serde(default = "ten_thousand")]
    pub loops: u32,
    /// vCPUs of the guest.
    #[serde(default = "one")]
    pub cpus: u32,
    /// Queues of the data disk.
    #[serde(default = "one")]
    pub queues: u32,
    /// Seconds to measure, if not [`Measure::seconds`].
    pub seconds: Option<f64>,
}

/// The program that a workload is.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// fio on the data disk.
    #[default]
    Fio,
    /// Two processes on two vCPUs that wake each other over pipes (`perf bench sched pipe`).
    Pipe,
}

fn randread() -> String {
    "randread".into()
}

fn four_kib() -> String {
    "4k".into()
}

fn one() -> u32 {
    1
}

fn ten_thousand() -> u32 {
    10_000
}

/// A value of an axis.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// As `"200us"`.
    Text(String),
    /// As `0`.
    Number(u32),
    /// `on` or `off`.
    Switch(bool),
}

impl Value {
    /// As the option takes it.
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number) => number.to_string(),
            Self::Switch(on) => if *on { "on" } else { "off" }.into(),
        }
    }
}

/// One value, or several.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Values {
    /// The same in all settings of the sweep.
    One(Value),
    /// One after the other.
    Many(Vec<Value>),
}

impl Values {
    fn texts(&self) -> Vec<String> {
        match self {
            Self::One(value) => vec![value.text()],
            Self::Many(values) => values.iter().map(Value::text).collect(),
        }
    }
}

impl Plan {
    /// The plan that `name` names: one that is built in, or a TOML file.
    ///
    /// # Errors
    /// There is none, or it is wrong: where, and what would be right.
    pub fn open(name: &str) -> Result<Self, Error> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Self::parse(text, &format!("--plan {name}"));
        }
        let what = format!("--plan {name}");
        let text = std::fs::read_to_string(Path::new(name)).map_err(|why| {
            let names = BUILT_IN.map(|(name, _)| name).join(", ");
            Error::Usage(format!("{what}: {why} (use a TOML file, or one of {names})"))
        })?;
        Self::parse(&text, &what)
    }

    /// Parses and checks the text of a plan; `what` names it in messages.
    ///
    /// # Errors
    /// It is wrong: where, and what would be right.
    pub fn parse(text: &str, what: &str) -> Result<Self, Error> {
        let wrong = |why: String| Error::Usage(format!("{what}: {why}"));
        let plan: Self = toml::from_str(text).map_err(|why| {
            let line = why.span().and_then(|span| text.get(..span.start));
            let line = line.map_or(1, |before| before.matches('\n').count() + 1);
            wrong(format!("line {line}: {}", why.message().replace('\n', "; ")))
        })?;
        plan.check().map_err(wrong)?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), String> {
        let Measure { repeats, seconds, warmup_seconds, idle_seconds, .. } = &self.measure;
        if *repeats == 0 {
            return Err("measure.repeats = 0: nothing would be measured (use at least 1)".into());
        }
        for (name, value, least) in [
            ("seconds", *seconds, 0.1),
            ("warmup_seconds", *warmup_seconds, 0.0),
            ("idle_seconds", *idle_seconds, 0.0),
        ] {
            if !(least..=86_400.0).contains(&value) {
                return Err(format!("measure.{name} = {value}: use {least} to 86400 seconds"));
            }
        }
        if self.workloads.is_empty() || self.sweeps.is_empty() {
            return Err(
                "nothing to measure (use at least one [[workload]] and one [[sweep]])".into()
            );
        }
        for (number, workload) in self.workloads.iter().enumerate() {
            workload.check()?;
            if self.workloads.iter().take(number).any(|other| other.name == workload.name) {
                return Err(format!("workload {:?}: there are two of this name", workload.name));
            }
        }
        for axis in self.sweeps.iter().flat_map(BTreeMap::keys) {
            if !setting::AXES.iter().any(|known| known.name == axis) {
                let names: Vec<_> = setting::AXES.iter().map(|known| known.name).collect();
                return Err(format!("sweep: no such axis {axis:?} (use {})", names.join(", ")));
            }
        }
        for (axis, values) in self.sweeps.iter().flatten() {
            if values.texts().is_empty() {
                return Err(format!("sweep: {axis} has no value"));
            }
        }
        let sizes = self.sweeps.iter().map(|sweep| {
            sweep.values().map(|values| values.texts().len()).fold(1, usize::saturating_mul)
        });
        let runs = sizes
            .fold(0, usize::saturating_add)
            .saturating_mul(self.workloads.len())
            .saturating_mul(*repeats as usize);
        if runs > MAX_RUNS {
            return Err(format!("{runs} runs (use fewer values: at most {MAX_RUNS} runs)"));
        }
        Ok(())
    }

    /// All settings, in the order of the sweeps; each once. Within a sweep the first of
    /// [`setting::AXES`] changes slowest.
    pub fn settings(&self) -> Vec<Setting> {
        let mut all: Vec<Setting> = Vec::new();
        for sweep in &self.sweeps {
            let mut product = vec![Setting::default()];
            for axis in setting::AXES {
                let Some(values) = sweep.get(axis.name) else { continue };
                let values = values.texts();
                product = product
                    .iter()
                    .flat_map(|before| {
                        values.iter().map(|value| before.with(axis.name, value.clone()))
                    })
                    .collect();
            }
            for setting in product.into_iter().map(Setting::without_what_has_no_effect) {
                if !all.contains(&setting) {
                    all.push(setting);
                }
            }
        }
        all
    }

    /// As TOML that [`parse`](Self::parse) takes.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_default()
    }
}

impl Workload {
    fn check(&self) -> Result<(), String> {
        let Self { name, .. } = self;
        let wrong = |what: String| Err(format!("workload {name:?}: {what}"));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 40 || !name.chars().all(plain) {
            return wrong("its name is no word (use letters, digits, - and _, at most 40)".into());
        }
        const RW: [&str; 6] = ["randread", "randwrite", "randrw", "read", "write", "rw"];
        if !RW.contains(&self.rw.as_str()) {
            return wrong(format!("rw = {:?} (use {})", self.rw, RW.join(", ")));
        }
        let digits = self.block_size.trim_end_matches(['k', 'K', 'm', 'M']);
        if digits.is_empty() || digits.len() > 9 || !digits.bytes().all(|c| c.is_ascii_digit()) {
            return wrong(format!("block_size = {:?} (use a size, as 4k)", self.block_size));
        }
        for (what, value, most) in [
            ("iodepth", self.iodepth, 1024),
            ("jobs", self.jobs, 256),
            ("cpus", self.cpus, 254),
            ("queues", self.queues, 256),
            ("loops", self.loops, 1_000_000_000),
        ] {
            if !(1..=most).contains(&value) {
                return wrong(format!("{what} = {value} (use 1 to {most})"));
            }
        }
        if self.think_time_us > 10_000_000 {
            return wrong(format!("think_time_us = {} (at most 10 s)", self.think_time_us));
        }
        if self.seconds.is_some_and(|seconds| !(0.1..=86_400.0).contains(&seconds)) {
            return wrong("seconds: use 0.1 to 86400".into());
        }
        if self.kind == Kind::Pipe && self.cpus < 2 {
            return wrong("kind = \"pipe\" takes two vCPUs (use cpus = 2)".into());
        }
        Ok(())
    }

    /// Seconds that a run measures.
    pub fn seconds(&self, measure: &Measure) -> f64 {
        self.seconds.unwrap_or(measure.seconds)
    }

    /// What to run in the guest, a line for its shell. `seconds`: how long, for fio.
    pub fn command(&self, seconds: f64) -> String {
        match self.kind {
            Kind::Pipe => format!("pipe-measure {}", self.loops),
            Kind::Fio => {
                // fio takes whole numbers.
                let time = if seconds.fract() == 0.0 {
                    seconds.to_string()
                } else {
                    format!("{:.0}ms", seconds * 1e3)
                };
                let engine = if self.iodepth == 1 { "psync" } else { "libaio" };
                let mut line = format!(
                    "fio-measure {time} /dev/vdb rw={} bs={} ioengine={engine} iodepth={} numjobs={}",
                    self.rw, self.block_size, self.iodepth, self.jobs
                );
                if self.think_time_us > 0 {
                    line += &format!(" thinktime={}", self.think_time_us);
                }
                line
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "[[workload]]\nname = \"w\"\n[[sweep]]\nhalt = \"kernel\"\n";

    #[test]
    fn plans_that_are_built_in_are_right_and_survive_being_written() {
        for (name, _) in BUILT_IN {
            let plan = Plan::open(name).unwrap();
            assert!(!plan.question.is_empty() && plan.settings().len() > 1, "{name}");
            let again = Plan::parse(&plan.to_toml(), name).unwrap();
            assert_eq!(again.settings(), plan.settings());
            assert_eq!(again.workloads, plan.workloads);
        }
    }

    #[test]
    fn every_mistake_is_told_with_its_place() {
        let cases = [
            ("question = 1", "line 1: invalid type"),
            ("x = 1", "line 1: unknown field `x`"),
            ("[measure]\nrepeat = 1", "line 2: unknown field `repeat`"),
            ("[measure]\nrepeats = 0", "measure.repeats = 0"),
            ("[measure]\nseconds = -1.0", "measure.seconds = -1"),
            ("[measure]\nseconds = nan", "measure.seconds = NaN"),
            ("[measure]\nboots = \"some\"", "line 2: unknown variant `some`"),
            ("[[workload]]\nname = \"w\"", "two of this name"),
            ("[[workload]]\nname = \"a b\"", "its name is no word"),
            ("[[workload]]\nname = \"x\"\nrw = \"trim\"", "rw = \"trim\" (use randread"),
            ("[[workload]]\nname = \"x\"\nblock_size = \"4k; reboot\"", "block_size"),
            ("[[workload]]\nname = \"x\"\niodepth = 0", "iodepth = 0 (use 1 to 1024)"),
            ("[[workload]]\nname = \"x\"\nkind = \"pipe\"", "two vCPUs"),
            ("[[sweep]]\nhalt_poll = 1", "no such axis \"halt_poll\" (use halt, "),
            ("[[sweep]]\nhalt = []", "halt has no value"),
            ("[[sweep]]\nhalt = 1.5", "line "),
        ];
        for (text, expected) in cases {
            let plan = if text.starts_with("[[") { [SMALL, text] } else { [text, SMALL] };
            let error = Plan::parse(&plan.join("\n"), "p").unwrap_err().to_string();
            assert!(error.starts_with("p: ") && error.contains(expected), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(Plan::parse("[[sweep]]\n", "p").is_err());
        let error = Plan::open("no-such").unwrap_err().to_string();
        assert!(error.contains("or one of quick, halt"), "{error}");
    }

    #[test]
    fn a_plan_cannot_be_endless() {
        let many = (0..400).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
        let text = format!("{SMALL}halt_poll_ns = [{many}]\nio_poll_ns = [{many}]");
        let error = Plan::parse(&text, "p").unwrap_err().to_string();
        assert!(error.contains("at most 100000 runs"), "{error}");
    }

    #[test]
    fn fio_is_told_a_time_that_it_takes() {
        let plan = Plan::parse(SMALL, "p").unwrap();
        for (seconds, expected) in [(4.0, "fio-measure 4 "), (0.25, "fio-measure 250ms ")] {
            assert!(plan.workloads[0].command(seconds).starts_with(expected));
        }
    }

    #[test]
    fn settings_are_the_products_of_the_sweeps_without_repetitions() {
        let text = format!(
            "{SMALL}guest_idle = [\"halt\", \"haltpoll\"]\nguest_halt_poll_ns = [\"50us\", \"200us\"]\n\
             [[sweep]]\nhalt = \"kernel\"\nguest_idle = \"halt\"\nhalt_poll_ns = [0, \"10us\"]"
        );
        let names: Vec<String> =
            Plan::parse(&text, "p").unwrap().settings().iter().map(Setting::to_string).collect();
        let expected = [
            "halt=kernel guest_idle=halt",
            "halt=kernel guest_idle=haltpoll guest_halt_poll_ns=50us",
            "halt=kernel guest_idle=haltpoll guest_halt_poll_ns=200us",
            "halt=kernel guest_idle=halt halt_poll_ns=0",
            "halt=kernel guest_idle=halt halt_poll_ns=10us",
        ];
        assert_eq!(names, expected);
    }
}
