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
    /// The numbers (from 0) of the rows on the frontier, by rising cost.
    pub frontier: Vec<usize>,
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
        let frontier = frontier(group, cost);
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
        View { group, series: series.collect(), cost, frontier }
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

/// The rows than which none has both more requests a second and less cost, by rising cost; not those
/// that are dominated as far as the noise lets us know.
fn frontier(group: &Group<'_>, cost: &str) -> Vec<usize> {
    let mut points: Vec<(usize, f64, f64)> = group
        .rows
        .iter()
        .enumerate()
        .filter(|(_, row)| row.dominated_by.is_none())
        .filter_map(|(index, row)| {
            Some((index, figure(row, cost)?.median, figure(row, "iops")?.median))
        })
        .collect();
    points.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.2.total_cmp(&a.2)));
    let mut best = f64::NEG_INFINITY;
    points.retain(|(_, _, iops)| {
        let better = *iops > best;
        best = best.max(*iops);
        better
    });
    points.into_iter().map(|(index, ..)| index).collect()
}

/// How many runs there are, and how many of them failed.
pub fn runs(results: &Results) -> (usize, usize) {
    let runs = || results.rows.iter().flat_map(|row| &row.runs);
    (runs().count(), runs().filter(|run| run.error.is_some()).count())
}
