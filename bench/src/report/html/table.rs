//! The tables of figures.

use maud::{Markup, html};

use super::super::{axis_title, failures, figure, nothing, number, setting};
use super::view::{Series, View};
use super::{disc, signed};
use crate::results::{FIGURES, Figure, Row};

/// Columns of the table that is always open: name, title's first and second line.
const MAIN: [(&str, &str, &str); 13] = [
    ("iops", "requests", "a second"),
    ("lat_mean_us", "latency", "mean, us"),
    ("lat_p50_us", "latency", "p50, us"),
    ("lat_p99_us", "latency", "p99, us"),
    ("lat_p999_us", "latency", "p99.9, us"),
    ("host_us_per_request", "host CPU", "us a request"),
    ("vcpu_us_per_request", "vCPUs", "us a request"),
    ("worker_us_per_request", "workers", "us a request"),
    ("guest_us_per_request", "guest busy", "us a request"),
    ("exits_per_request", "exits", "a request"),
    ("interrupts_per_request", "interrupts", "a request"),
    ("kicks_per_request", "kicks", "a request"),
    ("idle_host_ms_per_s", "idle host CPU", "ms a second"),
];

/// A figure's number with a narrow space between thousands.
pub fn grouped(value: f64) -> String {
    let text = number(value);
    let digits = text.len();
    if digits < 5 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text;
    }
    let space =
        |index: usize| (index > 0 && (digits - index).is_multiple_of(3)).then_some('\u{202f}');
    text.chars()
        .enumerate()
        .flat_map(|(index, digit)| space(index).into_iter().chain([digit]))
        .collect()
}

/// How a row's figure differs from the base's: better, worse, or inside the noise.
pub fn difference(row: &Row, name: &str) -> Markup {
    let Some(difference) = row.against_base.get(name).filter(|d| d.relative.is_finite()) else {
        return html! {};
    };
    let text = signed(difference.relative);
    if difference.inside_noise {
        return html! { span.diff.same title="inside the noise" { "≈ " (text) } };
    }
    let more = FIGURES.iter().find(|figure| figure.name == name).and_then(|f| f.more_is_better);
    let class = match more {
        None => "diff",
        Some(more) if more == (difference.relative > 0.0) => "diff better",
        Some(_) => "diff worse",
    };
    html! { span class=(class) { (text) } }
}

/// All settings of a workload; figures that the main table lacks in a second one.
pub fn settings(view: &View) -> Markup {
    let has = |name: &str| view.series.iter().any(|series| figure(series.row, name).is_some());
    let main: Vec<(&str, &str, &str)> = MAIN.into_iter().filter(|(name, ..)| has(name)).collect();
    let rest: Vec<&Figure> = FIGURES
        .iter()
        .filter(|figure| MAIN.iter().all(|main| main.0 != figure.name) && has(figure.name))
        .collect();
    html! {
        div.card {
            h3 { "All settings" }
            p.hint {
                "Median, difference from the base (row 1), and below them the confidence interval. "
                span.diff.better { "Better" } ", " span.diff.worse { "worse" } ", "
                span.diff.same { "≈ inside the noise" } ": no difference that was measured."
            }
            (table(view, &main))
            @if !rest.is_empty() {
                details {
                    summary { "The other figures" }
                    (table(view, &rest.iter().map(|f| (f.name, f.title, "")).collect::<Vec<_>>()))
                }
            }
        }
    }
}

fn table(view: &View, columns: &[(&str, &str, &str)]) -> Markup {
    let axes = &view.group.axes;
    let peers = view.series.iter().any(|series| series.peer);
    html! {
        div.scroll tabindex="0" role="region" aria-label={ "All settings of " (view.group.workload) } {
            table {
                thead {
                    tr {
                        th.first scope="col" { "#" }
                        @if peers { th.text.axis scope="col" { "monitor" } }
                        @for axis in axes { th.text.axis scope="col" { (axis_title(axis)) } }
                        @for (_, title, unit) in columns {
                            th scope="col" { (title) @if !unit.is_empty() { br; small { (unit) } } }
                        }
                    }
                }
                tbody {
                    @for series in &view.series { (line(series, axes, peers, columns)) }
                }
            }
        }
    }
}

fn line(series: &Series, axes: &[&str], peers: bool, columns: &[(&str, &str, &str)]) -> Markup {
    let row = series.row;
    let failed = failures(&row.runs).count();
    let dominated = row.dominated_by.is_some();
    html! {
        tr class=[dominated.then_some("dominated")] data-k=(series.number) {
            th.first scope="row" {
                (disc(series))
                span.name { (series.label) }
                @if dominated { span.mark title="dominated: another setting is nowhere worse and somewhere better" { "dominated" } }
                @if failed > 0 { span.mark.bad { (failed) " of " (row.runs.len()) " failed" } }
            }
            @if peers { td.text.axis { (row.monitor) } }
            @for axis in axes {
                td.text.axis { (row.setting.get(*axis).map(|value| setting(axis, value)).unwrap_or_default()) }
            }
            @if row.summary.is_empty() {
                td.text.nothing colspan=(columns.len().max(1)) { (nothing(row)) }
            } @else {
                @for (name, ..) in columns { (cell(row, name)) }
            }
        }
    }
}

fn cell(row: &Row, name: &str) -> Markup {
    let Some(interval) = figure(row, name) else {
        return html! { td.absent { "–" } };
    };
    html! {
        td {
            span.median { (grouped(interval.median)) }
            // Medians are below each other: the base, too, has a place for a difference.
            span.beside { (difference(row, name)) }
            @if interval.low < interval.high {
                small { (grouped(interval.low)) " – " (grouped(interval.high)) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        let cases =
            [(999.0, "999"), (1234.0, "1234"), (12_345.0, "12\u{202f}345"), (f64::NAN, "–")];
        for (value, text) in cases {
            assert_eq!(grouped(value), text);
        }
        assert_eq!(grouped(1_234_567.0), "1\u{202f}234\u{202f}567");
    }
}
