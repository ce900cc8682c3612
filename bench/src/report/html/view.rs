//! What a workload's plots share: which settings are drawn strongly, in which colour, by which number.

use std::collections::BTreeMap;

use super::super::{Group, POLLUX, figure};
use crate::results::{Results, Row};

/// Up to so many settings all are drawn strongly.
const FEW: usize = 8;
/// How many colours there are besides the base's: `--c1` and up, in style.css.
const COLOURS: usize = 7;

/// A workload as it is drawn.
pub struct View<'a> {
    pub group: &'a Group<'a>,
    pub series: Vec<Series<'a>>,
    /// The name of the figure of CPU time that a request costs.
    pub cost: &'static str,
}

/// What CPU time buys, as the plots of it have it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Gain {
    /// Mean latency, by which a setting is dominated or not.
    Latency,
    /// Requests a second, which depend on how many are in flight at a time.
    Iops,
}

impl Gain {
    /// The name of its figure.
    pub fn figure(self) -> &'static str {
        match self {
            Gain::Latency => "lat_mean_us",
            Gain::Iops => "iops",
        }
    }

    /// It in words.
    pub fn title(self) -> &'static str {
        match self {
            Gain::Latency => "mean latency, us",
            Gain::Iops => "requests a second",
        }
    }

    /// Whether this value is better than that.
    fn better(self, this: f64, that: f64) -> bool {
        match self {
            Gain::Latency => this < that,
            Gain::Iops => this > that,
        }
    }
}

/// A row as it is drawn.
pub struct Series<'a> {
    pub row: &'a Row,
    /// Its number for people, from 1.
    pub number: usize,
    pub label: String,
    /// Of style.css: `s0` (the base) to `s7`, or `faint`.
    pub class: String,
    /// It is among those that are drawn strongly.
    pub strong: bool,
    /// It is of another monitor.
    pub peer: bool,
}

/// The colours of settings, by label: the same in all workloads, where that can be.
#[derive(Default)]
pub struct Colours(BTreeMap<String, usize>);

impl<'a> View<'a> {
    /// Chooses what to draw strongly: all, if they are few; else the base, what is advised, and what is
    /// not dominated, or the frontier alone where that is too much.
    pub fn new(group: &'a Group<'a>, colours: &mut Colours) -> View<'a> {
        let has = |name| group.rows.iter().any(|row| figure(row, name).is_some());
        let cost = ["host_us_per_request", "vcpu_us_per_request"]
            .into_iter()
            .find(|name| has(name))
            .unwrap_or("host_us_per_request");
        let frontier = frontier(group, cost, Gain::Latency);
        let advised =
            |row: &Row| group.advice.iter().any(|advice| advice.row.as_ref() == Some(&row.id));
        let useful = |row: &Row| row.dominated_by.is_none() && figure(row, cost).is_some();
        let few = group.rows.len() <= FEW;
        let all_useful = group.rows.iter().filter(|row| useful(row)).count() <= FEW;
        let mut taken = Vec::new();
        let series = group.rows.iter().enumerate().map(|(index, row)| {
            let chosen = if all_useful { useful(row) } else { frontier.contains(&index) };
            let strong = few || index == 0 || chosen || advised(row);
            let label = group.label(row);
            let class = match (index, strong) {
                (0, _) => "s0".into(),
                (_, true) => colours.class(&label, &mut taken),
                (_, false) => "faint".into(),
            };
            Series { row, number: index + 1, label, class, strong, peer: row.monitor != POLLUX }
        });
        View { group, series: series.collect(), cost }
    }

    /// A row's series by its id.
    pub fn by_id(&self, id: &str) -> Option<&Series<'a>> {
        self.series.iter().find(|series| series.row.id == id)
    }
}

impl Colours {
    /// A setting's colour: the one it has in other workloads, unless another setting of this one has it
    /// (those in `taken`).
    fn class(&mut self, label: &str, taken: &mut Vec<usize>) -> String {
        let free = |index: &usize| !taken.contains(index);
        // With more settings than colours, the second of a colour is dashed, and so on.
        let index = match self.0.get(label).copied().filter(free) {
            Some(index) => index,
            None => (0..).find(free).unwrap_or(0),
        };
        self.0.entry(label.into()).or_insert(index);
        taken.push(index);
        let dashed = if index / COLOURS % 2 == 1 { " dashed" } else { "" };
        format!("s{}{dashed}", index % COLOURS + 1)
    }
}

/// The rows than which none has both more gain and less cost, by rising cost, as their numbers from 0; not those
/// that are dominated as far as the noise lets us know.
pub fn frontier(group: &Group<'_>, cost: &str, gain: Gain) -> Vec<usize> {
    let mut points: Vec<(usize, f64, f64)> = group
        .rows
        .iter()
        .enumerate()
        .filter(|(_, row)| row.dominated_by.is_none())
        .filter_map(|(index, row)| {
            Some((index, figure(row, cost)?.median, figure(row, gain.figure())?.median))
        })
        .collect();
    // Of equal costs the best first.
    points.sort_by(|a, b| {
        let gains = a.2.total_cmp(&b.2);
        a.1.total_cmp(&b.1).then(if gain == Gain::Latency { gains } else { gains.reverse() })
    });
    let mut best = None;
    points.retain(|(_, _, value)| {
        let better = best.is_none_or(|best| gain.better(*value, best));
        if better {
            best = Some(*value);
        }
        better
    });
    points.into_iter().map(|(index, ..)| index).collect()
}

/// How many runs there are, and how many of them failed.
pub fn runs(results: &Results) -> (usize, usize) {
    let runs = || results.rows.iter().flat_map(|row| &row.runs);
    (runs().count(), runs().filter(|run| run.error.is_some()).count())
}
