//! What to set: of the rows that were measured, the one that serves a goal best.

use std::fmt::Write as _;

use serde_json::Value as Json;

use crate::Error;
use crate::results::{Advice, Results, Row};
use crate::setting::Setting;

/// CPU time a request, the price of everything.
const COST: &str = "host_us_per_request";
const IDLE_COST: &str = "idle_host_ms_per_s";
const LATENCY: &str = "lat_mean_us";

/// What the user wants.
#[derive(Clone, Debug, PartialEq)]
pub enum Goal {
    /// The least product of mean latency and CPU time a request.
    Balanced,
    /// A figure below a limit, at the least CPU time a request.
    Below {
        /// The figure.
        figure: &'static str,
        /// The limit, in its unit.
        limit: f64,
        /// As it was typed.
        text: String,
    },
}

/// Latencies that may be limited, as users and the document call them.
const LIMITED: [(&str, &str); 4] = [
    ("mean", "lat_mean_us"),
    ("p50", "lat_p50_us"),
    ("p99", "lat_p99_us"),
    ("p99.9", "lat_p999_us"),
];

impl Goal {
    /// `balanced`, or as `p99<300us`.
    ///
    /// # Errors
    /// It is neither.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text == "balanced" {
            return Ok(Self::Balanced);
        }
        let below = || {
            let (name, limit) = text.split_once('<')?;
            let (_, figure) = LIMITED.iter().find(|(known, _)| *known == name.trim())?;
            let limit = limit.trim();
            let digits = limit.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let micros = match limit.get(digits.len()..)? {
                "ns" => 1e-3,
                "us" => 1.0,
                "ms" => 1e3,
                "s" => 1e6,
                _ => return None,
            };
            let limit =
                digits.parse::<f64>().ok().filter(|limit| limit.is_finite() && *limit > 0.0)?;
            Some(Self::Below { figure, limit: limit * micros, text: text.to_owned() })
        };
        below().ok_or_else(|| {
            let names = LIMITED.map(|(name, _)| name).join(", ");
            Error::Usage(format!(
                "--advise {text}: not a goal (use balanced, or a limit as p99<300us; of {names})"
            ))
        })
    }

    fn text(&self) -> &str {
        match self {
            Self::Balanced => "balanced",
            Self::Below { text, .. } => text,
        }
    }

    /// Of two rows the better one has the lower rank; none: out of the question.
    fn rank(&self, row: &Row) -> Option<f64> {
        let median = |name: &str| row.summary.get(name).map(|found| found.median);
        match self {
            Self::Balanced => Some(median(LATENCY)? * median(COST)?),
            // Not the median: half of the runs would be above the limit.
            Self::Below { figure, limit, .. } => {
                (row.summary.get(*figure)?.high < *limit).then(|| median(COST))?
            }
        }
    }
}

/// Advice for each workload. `config`: what Pollux makes of a row's setting.
pub fn advise(
    results: &Results,
    goal: &Goal,
    config: &dyn Fn(&Row) -> Option<Json>,
) -> Vec<Advice> {
    let workloads = results.noise.iter().map(|noise| &noise.workload);
    workloads.map(|workload| for_workload(results, workload, goal, config)).collect()
}

fn for_workload(
    results: &Results,
    workload: &str,
    goal: &Goal,
    config: &dyn Fn(&Row) -> Option<Json>,
) -> Advice {
    let rows =
        || results.rows.iter().filter(|row| row.workload == workload && row.monitor == "pollux");
    let noise = |name: &str| {
        let noise = results.noise.iter().find(|noise| noise.workload == workload);
        noise.and_then(|noise| noise.relative.get(name)).copied().unwrap_or(0.0)
    };
    let base = rows().next();
    let ranked = rows().filter_map(|row| Some((goal.rank(row)?, row)));
    let mut best = ranked.min_by(|a, b| a.0.total_cmp(&b.0));
    // What is not better than the base by more than the noise is no reason to set anything.
    if let (Some((rank, row)), Some(base)) = (best, base)
        && row.id != base.id
        && let Some(rank_of_base) = goal.rank(base)
    {
        let noise = match goal {
            Goal::Balanced => (1.0 + noise(LATENCY)) * (1.0 + noise(COST)) - 1.0,
            Goal::Below { .. } => noise(COST),
        };
        if 1.0 - rank / rank_of_base <= noise {
            best = Some((rank_of_base, base));
        }
    }
    let mut advice = Advice {
        workload: workload.to_owned(),
        goal: goal.text().to_owned(),
        row: None,
        why: String::new(),
        pollux: Vec::new(),
        kvm_module: Vec::new(),
        guest_cmdline: Vec::new(),
    };
    let Some((_, row)) = best else {
        advice.why = why_none(goal, rows());
        return advice;
    };
    advice.why = why(goal, row, base);
    advice.row = Some(row.id.clone());
    let setting = Setting(row.setting.clone());
    advice.pollux = setting.options();
    if !setting.disk_options().is_empty() {
        advice.pollux.extend(["--disk".into(), format!("path=DISK{}", setting.disk_options())]);
    }
    if let Some(config) = config(row) {
        advice.kvm_module = kvm_module(&config);
        advice.guest_cmdline = guest_cmdline(&config);
    }
    advice
}

fn why_none<'a>(goal: &Goal, rows: impl Iterator<Item = &'a Row>) -> String {
    let Goal::Below { figure, .. } = goal else {
        return "nothing was measured".into();
    };
    let measured = rows.filter_map(|row| Some((row.summary.get(*figure)?, row)));
    match measured.min_by(|a, b| a.0.high.total_cmp(&b.0.high)) {
        None => "nothing was measured".into(),
        Some((found, row)) => format!(
            "no setting reaches it; the nearest is {:.1} us (95 % interval {:.1} to {:.1}) with {}",
            found.median,
            found.low,
            found.high,
            Setting(row.setting.clone())
        ),
    }
}

/// Gain and price, as measured.
fn why(goal: &Goal, row: &Row, base: Option<&Row>) -> String {
    let mut text = String::new();
    let median = |row: &Row, name: &str| row.summary.get(name).map(|found| found.median);
    if let Goal::Below { figure, .. } = goal
        && let Some(found) = row.summary.get(*figure)
    {
        let _ = write!(
            text,
            "{:.1} us (95 % interval {:.1} to {:.1}); ",
            found.median, found.low, found.high
        );
    }
    match base.filter(|base| base.id != row.id) {
        None => text.push_str("the first setting; no other is better by more than the noise"),
        Some(base) => {
            let _ = write!(text, "against {}: ", Setting(base.setting.clone()));
            let mut parts = Vec::new();
            for (name, title) in [
                (LATENCY, "mean latency"),
                ("lat_p99_us", "p99"),
                (COST, "CPU a request"),
                (IDLE_COST, "CPU while idle"),
            ] {
                let Some(difference) = row.against_base.get(name) else { continue };
                let noise = if difference.inside_noise { " (inside the noise)" } else { "" };
                parts.push(format!("{title} {:+.0} %{noise}", difference.relative * 100.0));
            }
            text.push_str(&parts.join(", "));
        }
    }
    if let Some(cost) = median(row, COST) {
        let _ = write!(text, "; {cost:.1} us of CPU a request");
    }
    if let Some(idle) = median(row, IDLE_COST) {
        let _ = write!(text, ", {idle:.0} ms of CPU a second while idle");
    }
    text
}

/// Where KVM polls, its module's parameters do the same for every VM of the host.
fn kvm_module(config: &Json) -> Vec<String> {
    const NAMES: [&str; 4] =
        ["halt_poll_ns", "halt_poll_ns_grow", "halt_poll_ns_grow_start", "halt_poll_ns_shrink"];
    if config["halt"] != "kernel" {
        return Vec::new();
    }
    let given = |name: &&str| Some(format!("{name}={}", config[*name].as_u64()?));
    NAMES.iter().filter_map(given).collect()
}

/// The words of the guest's command line that say how it idles.
pub fn guest_cmdline(config: &Json) -> Vec<String> {
    let words = config["cmdline"].as_str().unwrap_or_default().split_whitespace();
    let idles = |word: &&str| {
        ["idle=", "cpuidle_haltpoll.", "haltpoll."].iter().any(|start| word.starts_with(start))
    };
    words.filter(idles).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::testing::{results, row, run};
    use crate::analysis::work_out;
    use serde_json::json;

    fn measured(rows: &[(&str, f64, f64)]) -> Results {
        let runs = |latency: f64, cost: f64| {
            let jitter = |n: u32| 1.0 + f64::from(n) * 0.001;
            let figures = |n: u32| {
                [(LATENCY, latency), ("lat_p99_us", latency * 2.0), (COST, cost)]
                    .map(|(name, value)| (name, value * jitter(n)))
            };
            (0..5).map(|n| run(n, &figures(n))).collect::<Vec<_>>()
        };
        let rows = rows.iter().map(|&(id, latency, cost)| {
            row(id, &[("halt", "kernel"), ("halt_poll_ns", id)], runs(latency, cost))
        });
        let mut results = results(rows.collect(), runs(101.0, 10.1));
        work_out(&mut results);
        results
    }

    fn advice(results: &Results, goal: &str) -> Advice {
        let config = |row: &Row| {
            Some(json!({
                "halt": "kernel",
                "halt_poll_ns": row.setting["halt_poll_ns"].parse::<u64>().unwrap(),
                "halt_poll_ns_grow": null,
                "cmdline": "console=ttyS0 idle=halt quiet"
            }))
        };
        advise(results, &Goal::parse(goal).unwrap(), &config).remove(0)
    }

    #[test]
    fn goals_are_balanced_or_a_limit_with_a_unit() {
        let below = |text: &str| match Goal::parse(text).unwrap() {
            Goal::Below { figure, limit, .. } => (figure, limit),
            Goal::Balanced => panic!("{text}"),
        };
        assert_eq!(below("p99<300us"), ("lat_p99_us", 300.0));
        assert_eq!(below("p99.9 < 1.5ms"), ("lat_p999_us", 1500.0));
        for wrong in ["", "fast", "p98<1us", "p99<1", "p99>1us", "p99<-1us", "p99<xus", "mean<1h"] {
            let error = Goal::parse(wrong).unwrap_err().to_string();
            assert!(error.contains("not a goal (use balanced"), "{error}");
        }
    }

    #[test]
    fn a_limit_is_reached_as_cheaply_as_possible() {
        let results = measured(&[("0", 100.0, 10.0), ("5", 50.0, 15.0), ("6", 40.0, 30.0)]);
        let advice = |goal| advice(&results, goal);
        let found = advice("p99<120us");
        assert_eq!(found.row.as_deref(), Some("5"));
        assert_eq!(found.pollux, ["--halt", "kernel", "--halt-poll-ns", "5"]);
        assert_eq!(found.kvm_module, ["halt_poll_ns=5"]);
        assert_eq!(found.guest_cmdline, ["idle=halt"]);
        assert!(found.why.contains("mean latency -50 %"), "{}", found.why);
        assert!(found.why.contains("CPU a request +50 %"), "{}", found.why);
        assert_eq!(advice("p99<90us").row.as_deref(), Some("6"));
        let none = advice("p99<10us");
        assert_eq!(none.row, None);
        assert!(none.why.contains("the nearest is 80."), "{}", none.why);
    }

    #[test]
    fn balance_is_worth_a_change_only_beyond_the_noise() {
        let clear = measured(&[("0", 100.0, 10.0), ("5", 50.0, 12.0)]);
        assert_eq!(advice(&clear, "balanced").row.as_deref(), Some("5"));
        let same = measured(&[("0", 100.0, 10.0), ("5", 99.5, 10.0)]);
        let found = advice(&same, "balanced");
        assert_eq!(found.row.as_deref(), Some("0"));
        assert!(found.why.contains("no other is better"), "{}", found.why);
    }
}
