//! Reports for people and for other programs, made from the document [`Results`] alone.
//!
//! What all of them share is here: rows by workload, the axes that vary, names of settings, and how a
//! figure is written.

use std::collections::BTreeSet;

use crate::results::{Advice, Interval, Noise, Results, Row, Run};
use crate::setting::AXES;

pub mod csv;
pub mod html;
pub mod terminal;

/// The rows of one workload, and what was found out about it.
struct Group<'a> {
    workload: &'a str,
    /// The first is the base.
    rows: Vec<&'a Row>,
    /// The axes whose values differ between these rows.
    axes: Vec<&'a str>,
    noise: Option<&'a Noise>,
    advice: Vec<&'a Advice>,
}

/// The workloads, in the document's order.
fn groups(results: &Results) -> Vec<Group<'_>> {
    let mut workloads: Vec<&str> = Vec::new();
    for row in &results.rows {
        if !workloads.contains(&row.workload.as_str()) {
            workloads.push(&row.workload);
        }
    }
    workloads
        .into_iter()
        .map(|workload| {
            let rows: Vec<&Row> =
                results.rows.iter().filter(|row| row.workload == workload).collect();
            Group {
                workload,
                axes: varying(&rows),
                rows,
                noise: results.noise.iter().find(|noise| noise.workload == workload),
                advice: results.advice.iter().filter(|a| a.workload == workload).collect(),
            }
        })
        .collect()
}

/// The axes whose values differ, in the order of tables. A peer's row need not have an axis; a row of Pollux that lacks one
/// differs from those that have it.
fn varying<'a>(rows: &[&'a Row]) -> Vec<&'a str> {
    let names: BTreeSet<&str> =
        rows.iter().flat_map(|row| row.setting.keys().map(String::as_str)).collect();
    let differs = |name: &&str| {
        let values: BTreeSet<Option<&String>> = rows
            .iter()
            .map(|row| (*row, row.setting.get(*name)))
            .filter(|(row, value)| value.is_some() || row.monitor == POLLUX)
            .map(|(_, value)| value)
            .collect();
        values.len() > 1
    };
    let mut axes: Vec<&str> = names.into_iter().filter(differs).collect();
    axes.sort_by_key(|axis| {
        AXES.iter().position(|known| known.name == *axis).unwrap_or(AXES.len())
    });
    axes
}

/// What [`Row::monitor`] says of a row of our own.
const POLLUX: &str = "pollux";

impl Group<'_> {
    /// What sets a row apart from the others, in one line.
    fn label(&self, row: &Row) -> String {
        let monitor = (row.monitor != POLLUX).then(|| row.monitor.clone());
        let axes = self.axes.iter().filter_map(|axis| {
            let value = row.setting.get(*axis)?;
            let word = value.starts_with(|first: char| first.is_ascii_alphabetic());
            Some(match word && !["on", "off", "yes", "no", "default", "auto"].contains(&&**value) {
                true => value.clone(),
                false => format!("{} {}", axis_title(axis), setting(axis, value)),
            })
        });
        let parts: Vec<String> = monitor.into_iter().chain(axes).collect();
        if parts.is_empty() { "as it is".into() } else { parts.join(" · ") }
    }
}

/// An axis without the unit that [`setting`] gives its values.
fn axis_title(axis: &str) -> &str {
    axis.strip_suffix("_ns").or(axis.strip_suffix("-ns")).unwrap_or(axis)
}

/// A setting's value: nanoseconds in the unit that suits them, all else as it is.
fn setting(axis: &str, value: &str) -> String {
    let Some(ns) = (axis_title(axis) != axis).then(|| value.parse::<u64>().ok()).flatten() else {
        return value.into();
    };
    match ns {
        0 => "0".into(),
        _ if ns % 1_000_000 == 0 => format!("{} ms", ns / 1_000_000),
        _ if ns % 1_000 == 0 => format!("{} us", ns / 1_000),
        _ => format!("{ns} ns"),
    }
}

/// A row's figure, unless it has none that can be drawn or written.
fn figure(row: &Row, name: &str) -> Option<Interval> {
    let found = row.summary.get(name).filter(|interval| interval.median.is_finite())?;
    let or_median = |end: f64| if end.is_finite() { end } else { found.median };
    Some(Interval {
        median: found.median,
        low: or_median(found.low).min(found.median),
        high: or_median(found.high).max(found.median),
    })
}

/// Why a row has no figures.
fn nothing(row: &Row) -> String {
    match &row.skipped {
        Some(why) if row.runs.is_empty() => format!("not measured: {why}"),
        _ => "no run succeeded".into(),
    }
}

/// The runs that failed, with why.
fn failures(runs: &[Run]) -> impl Iterator<Item = (&Run, &str)> {
    runs.iter().filter_map(|run| Some((run, run.error.as_deref()?)))
}

/// Why a row's runs failed: each cause once, with the repeats it ended, as `repeat 1, 4`.
fn causes(row: &Row) -> Vec<(String, &str)> {
    let mut causes: Vec<(String, &str)> = Vec::new();
    for (run, why) in failures(&row.runs) {
        let repeat = u64::from(run.repeat) + 1;
        match causes.iter_mut().find(|cause| cause.1 == why) {
            Some((repeats, _)) => repeats.push_str(&format!(", {repeat}")),
            None => causes.push((format!("repeat {repeat}"), why)),
        }
    }
    causes
}

/// A figure with three digits that count, or all of those before the point.
fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        "–".into()
    } else if size >= 1e9 {
        format!("{value:.2e}")
    } else {
        let decimals = match size {
            _ if size >= 99.95 || size == 0.0 => 0,
            _ if size >= 9.995 => 1,
            _ => 2,
        };
        // No `-0.00`.
        let text = format!("{value:.decimals$}");
        match text.strip_prefix('-') {
            Some(rest) if rest.parse() == Ok(0.0) => rest.into(),
            _ => text,
        }
    }
}

/// A difference: `+12 %`, `-0.4 %`, or how many times as much.
fn percent(relative: f64) -> String {
    if !relative.is_finite() {
        return "–".into();
    }
    let percent = relative * 100.0;
    match percent.abs() {
        size if size >= 1000.0 => format!("×{}", number(relative + 1.0)),
        size if size >= 9.95 => format!("{percent:+.0} %"),
        size if size < 0.05 => "0 %".into(),
        _ => format!("{percent:+.1} %"),
    }
}

/// The command as a shell takes it.
fn shell(words: &[String]) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "%+,-./:=@_".contains(letter);
    let quote = |(index, word): (usize, &String)| {
        // The first word with a `=` would be a variable.
        let safe =
            !word.is_empty() && word.chars().all(plain) && (index > 0 || !word.contains('='));
        if safe { word.clone() } else { format!("'{}'", word.replace('\'', r"'\''")) }
    };
    words.iter().enumerate().map(quote).collect::<Vec<_>>().join(" ")
}

/// In words: how far equal settings may be apart in a workload.
fn noise_in_words(noise: &Noise) -> String {
    let said: Vec<String> = [
        ("iops", "in IOPS"),
        ("lat_mean_us", "in mean latency"),
        ("lat_p99_us", "in p99"),
        ("host_us_per_request", "in host CPU a request"),
    ]
    .iter()
    .filter_map(|(name, what)| {
        let part = noise.relative.get(*name).filter(|part| part.is_finite())?;
        Some(format!("{} {what}", percent(part.abs()).trim_start_matches('+')))
    })
    .collect();
    let failed = failures(&noise.runs).count();
    if said.is_empty() {
        let why = match failed {
            0 => "the base was not measured twice".into(),
            _ => format!("measuring the base for a second time failed ({failed} runs)"),
        };
        return format!("Not known: {why}.");
    }
    let failed = match failed {
        0 => String::new(),
        _ => format!(" Of the base's second runs {failed} failed."),
    };
    let judged = match noise.relative.get("lat_mean_us").or(noise.relative.get("iops")) {
        Some(part) if part.abs() < 0.03 => "Quiet",
        Some(part) if part.abs() < 0.10 => "Some noise",
        _ => "Noisy",
    };
    format!(
        "{judged}: two equal settings may differ by {} by chance alone.{failed}",
        said.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_with_the_digits_that_count() {
        let cases = [
            (0.0, "0"),
            (-0.001, "0.00"),
            (0.123, "0.12"),
            (9.994, "9.99"),
            (12.34, "12.3"),
            (99.96, "100"),
            (123_456.7, "123457"),
            (1e12, "1.00e12"),
            (f64::NAN, "–"),
            (f64::INFINITY, "–"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
        let cases = [(0.1234, "+12 %"), (-0.012, "-1.2 %"), (0.0001, "0 %"), (41.0, "×42.0")];
        for (value, text) in cases {
            assert_eq!(percent(value), text);
        }
    }

    #[test]
    fn commands_are_quoted_for_a_shell() {
        let words = ["fio", "path=a,b", "a b", "it's", "", "$(x)", "é"].map(String::from);
        assert_eq!(shell(&words), r"fio path=a,b 'a b' 'it'\''s' '' '$(x)' 'é'");
        assert_eq!(shell(&["A=1".into(), "A=1".into()]), "'A=1' A=1");
    }

    #[test]
    fn nanoseconds_are_written_in_the_unit_that_suits_them() {
        let written = ["0", "200000", "2000000", "1500", "1501", "200us"]
            .map(|value| setting("halt_poll_ns", value));
        assert_eq!(written, ["0", "200 us", "2 ms", "1500 ns", "1501 ns", "200us"]);
        assert_eq!(setting("queues", "1000"), "1000");
        assert_eq!(axis_title("halt-poll-ns"), "halt-poll");
    }
}
