//! From single runs to what they show: medians with their confidence, the noise of equal settings,
//! differences beyond it, and settings that another one beats.

use std::collections::BTreeMap;

use crate::results::{Difference, Interval, Name, Noise, Results, Row, Run};
use crate::statistics;

/// What a setting is to buy, and what it costs: of two settings one dominates the other in these.
const LATENCY: &str = "lat_mean_us";
const COST: &str = "host_us_per_request";

/// Works out everything that follows from the runs, anew.
pub fn work_out(results: &mut Results) {
    for row in &mut results.rows {
        row.summary = summary(&row.runs);
    }
    for noise in &mut results.noise {
        let first = results.rows.iter().find(|row| row.workload == noise.workload);
        noise.relative = first.map(|row| noise_of(row, &noise.runs)).unwrap_or_default();
    }
    let rows = results.rows.clone();
    for row in &mut results.rows {
        let noise = results.noise.iter().find(|noise| noise.workload == row.workload);
        let base = rows.iter().find(|base| base.workload == row.workload);
        row.against_base = match base {
            Some(base) if base.id != row.id => against(row, base, noise),
            _ => BTreeMap::new(),
        };
        row.dominated_by = rows
            .iter()
            .find(|other| {
                other.workload == row.workload
                    && other.monitor == row.monitor
                    && dominates(other, row, noise)
            })
            .map(|other| other.id.clone());
    }
}

/// A figure's values in the runs that did not fail.
pub fn values(runs: &[Run], name: &str) -> Vec<f64> {
    let measured = runs.iter().filter(|run| run.error.is_none());
    measured.filter_map(|run| run.figures.get(name).copied()).collect()
}

fn summary(runs: &[Run]) -> BTreeMap<Name, Interval> {
    let names = runs.iter().filter(|run| run.error.is_none()).flat_map(|run| run.figures.keys());
    let mut found = BTreeMap::new();
    for name in names {
        if !found.contains_key(name) {
            found.insert(name.clone(), statistics::interval(&values(runs, name)));
        }
    }
    found
}

/// How far apart the medians of a row and of its twin may be by chance: the farther end of the confidence
/// interval of their difference, whatever its sign.
fn noise_of(row: &Row, twin: &[Run]) -> BTreeMap<Name, f64> {
    let of = |name: &Name| {
        let found = statistics::relative(&values(twin, name), &values(&row.runs, name))?;
        Some(found.low.abs().max(found.high.abs()))
    };
    let twins = summary(twin);
    twins.keys().filter_map(|name| Some((name.clone(), of(name)?))).collect()
}

fn against(row: &Row, base: &Row, noise: Option<&Noise>) -> BTreeMap<Name, Difference> {
    let of = |name: &Name| {
        let found = statistics::relative(&values(&row.runs, name), &values(&base.runs, name))?;
        let noise = noise.and_then(|noise| noise.relative.get(name)).copied().unwrap_or(0.0);
        let sure = found.low > 0.0 || found.high < 0.0;
        Some(Difference {
            relative: found.median,
            inside_noise: !sure || found.median.abs() <= noise,
        })
    };
    row.summary.keys().filter_map(|name| Some((name.clone(), of(name)?))).collect()
}

/// `one` is nowhere worse than `other` and somewhere better, both by more than the noise.
fn dominates(one: &Row, other: &Row, noise: Option<&Noise>) -> bool {
    let better = |name: &str| {
        let (one, other) = (one.summary.get(name)?, other.summary.get(name)?);
        let noise = noise.and_then(|noise| noise.relative.get(name)).copied().unwrap_or(0.0);
        let gain = 1.0 - one.median / other.median;
        Some(if gain > noise && one.high < other.low {
            1
        } else if gain >= 0.0 {
            0
        } else {
            -1
        })
    };
    match (better(LATENCY), better(COST)) {
        (Some(latency), Some(cost)) => latency >= 0 && cost >= 0 && latency + cost > 0,
        _ => false,
    }
}

/// An empty row.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    pub fn run(repeat: u32, figures: &[(&str, f64)]) -> Run {
        let figures = figures.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
        Run { repeat, boot: 0, error: None, figures, latency_us: vec![], notes: vec![] }
    }

    pub fn row(id: &str, setting: &[(&str, &str)], runs: Vec<Run>) -> Row {
        Row {
            id: id.into(),
            workload: "w".into(),
            monitor: "pollux".into(),
            setting: setting.iter().map(|&(name, value)| (name.into(), value.into())).collect(),
            command: vec![],
            guest_command: String::new(),
            skipped: None,
            runs,
            summary: BTreeMap::new(),
            against_base: BTreeMap::new(),
            dominated_by: None,
            window_us: vec![],
        }
    }

    pub fn results(rows: Vec<Row>, twin: Vec<Run>) -> Results {
        let noise = vec![Noise { workload: "w".into(), relative: BTreeMap::new(), runs: twin }];
        Results {
            schema: crate::results::SCHEMA,
            command: vec![],
            version: String::new(),
            started: String::new(),
            ended: None,
            plan: String::new(),
            name: String::new(),
            question: String::new(),
            host: serde_json::Value::Null,
            guest: serde_json::Value::Null,
            rows,
            noise,
            advice: vec![],
            notes: vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{results, row, run};
    use super::*;

    fn runs(latency: f64, cost: f64) -> Vec<Run> {
        let noisy = |n: u32| 1.0 + f64::from(n) * 0.001;
        (0..5).map(|n| run(n, &[(LATENCY, latency * noisy(n)), (COST, cost * noisy(n))])).collect()
    }

    #[test]
    fn differences_inside_the_noise_are_called_that() {
        let rows = vec![
            row("a", &[], runs(100.0, 10.0)),
            row("b", &[], runs(102.0, 10.0)),
            row("c", &[], runs(150.0, 10.0)),
        ];
        // The same setting, measured again, was 4 % slower.
        let mut results = results(rows, runs(104.0, 10.0));
        work_out(&mut results);
        let noise = results.noise[0].relative[LATENCY];
        assert!((0.035..0.05).contains(&noise), "{noise}");
        let difference = |row: usize| results.rows[row].against_base[LATENCY];
        assert!(difference(1).inside_noise && !difference(2).inside_noise);
        assert!((difference(2).relative - 0.5).abs() < 1e-9);
        assert!(results.rows[0].against_base.is_empty());
    }

    #[test]
    fn a_setting_is_dominated_only_beyond_the_noise() {
        let rows = vec![
            row("cheap", &[], runs(100.0, 10.0)),
            row("fast", &[], runs(50.0, 20.0)),
            row("worse", &[], runs(110.0, 30.0)),
            row("same", &[], runs(100.2, 10.0)),
        ];
        let mut results = results(rows, runs(101.0, 10.1));
        work_out(&mut results);
        let by: Vec<_> = results.rows.iter().map(|row| row.dominated_by.as_deref()).collect();
        assert_eq!(by, [None, None, Some("cheap"), None]);
    }

    #[test]
    fn failed_runs_are_kept_and_count_for_nothing() {
        let mut failed = run(9, &[(LATENCY, 1e9)]);
        failed.error = Some("it hung".into());
        let mut all = runs(100.0, 10.0);
        all.push(failed);
        let mut results = results(vec![row("a", &[], all)], vec![]);
        work_out(&mut results);
        assert_eq!(results.rows[0].runs.len(), 6);
        assert!(results.rows[0].summary[LATENCY].high < 200.0);
        assert!(results.noise[0].relative.is_empty());
    }
}
