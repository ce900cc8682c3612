//! The table for a terminal: no wider than 120 columns, without colours.

use super::{Group, POLLUX, axis_title, causes, figure, groups, noise_in_words, setting};
use crate::results::{Results, Row};

/// How wide all of it may be.
const WIDTH: usize = 120;

/// A column of figures.
struct Column {
    /// What it and its neighbours have in common: in full, and short.
    over: [&'static str; 2],
    title: &'static str,
    /// The figure; the second if no row has the first.
    names: [&'static str; 2],
    /// Digits after the point; `None`: as the column's values need.
    decimals: Option<usize>,
}

const fn column(
    over: [&'static str; 2],
    title: &'static str,
    name: &'static str,
    decimals: Option<usize>,
) -> Column {
    Column { over, title, names: [name, name], decimals }
}

const LATENCY: [&str; 2] = ["latency, us", "us"];
const COUNTS: [&str; 2] = ["per request, counts", "counts"];
const CPU: [&str; 2] = ["CPU us per request", "CPU us"];

const COLUMNS: [Column; 12] = [
    column([""; 2], "IOPS", "iops", None),
    column(LATENCY, "mean", "lat_mean_us", None),
    column(LATENCY, "p99", "lat_p99_us", None),
    column(COUNTS, "intr", "interrupts_per_request", Some(3)),
    column(COUNTS, "kicks", "kicks_per_request", Some(3)),
    column(COUNTS, "exits", "exits_per_request", Some(2)),
    column(COUNTS, "halts", "exits_halt_per_request", Some(2)),
    column(COUNTS, "polled", "polled_per_request", Some(2)),
    column(CPU, "vCPU", "vcpu_us_per_request", None),
    column(CPU, "worker", "worker_us_per_request", None),
    column(CPU, "guest", "guest_us_per_request", None),
    Column {
        over: ["idle"; 2],
        title: "ms/s",
        names: ["idle_host_ms_per_s", "idle_vcpu_ms_per_s"],
        decimals: None,
    },
];

/// Writes the document's tables, one a workload; below each what is said of noise and of runs that
/// failed; surprises and advice at the end. Each line ends with a line feed.
pub fn render(results: &Results) -> String {
    let mut out = Vec::new();
    for group in groups(results) {
        if !out.is_empty() {
            out.push(String::new());
        }
        table(&group, &mut out);
    }
    if out.is_empty() {
        out.push("Nothing was measured.".into());
    }
    for note in &results.notes {
        wrapped("note: ", note, &mut out);
    }
    for advice in &results.advice {
        let text = format!("{}, {}: {}", advice.workload, advice.goal, advice.why);
        wrapped("advice: ", &text, &mut out);
        for (whose, words) in [
            ("  pollux run:      ", super::shell(&advice.pollux)),
            ("  module kvm:      ", advice.kvm_module.join(" ")),
            ("  guest's kernel:  ", advice.guest_cmdline.join(" ")),
        ] {
            if !words.is_empty() {
                wrapped(whose, &words, &mut out);
            }
        }
    }
    out.iter().flat_map(|line| [line.trim_end(), "\n"]).collect()
}

/// Text of the document as one line: what would move a terminal's cursor or change its colours is a
/// blank.
fn clean(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

fn columns_of(text: &str) -> usize {
    text.chars().count()
}

/// Adds a text in lines that are not too long, the first after `lead`, the others below its end.
fn wrapped(lead: &str, text: &str, out: &mut Vec<String>) {
    let room = WIDTH - columns_of(lead);
    let mut line = lead.to_string();
    let mut empty = true;
    let text = clean(text);
    // A word that is longer than a line is cut.
    let words = text.split_whitespace().flat_map(|word| {
        let letters: Vec<char> = word.chars().collect();
        letters.chunks(room).map(|part| part.iter().collect::<String>()).collect::<Vec<_>>()
    });
    for word in words {
        if !empty && columns_of(&line) + 1 + columns_of(&word) > WIDTH {
            out.push(std::mem::replace(&mut line, " ".repeat(columns_of(lead))));
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(&word);
        empty = false;
    }
    out.push(line);
}

/// A table's columns, made: all lines, the titles' first, are equally wide.
fn columns(cells: &[Vec<String>]) -> Vec<String> {
    let lines = cells.first().map_or(0, Vec::len);
    let widths: Vec<usize> = cells
        .iter()
        .map(|column| column.iter().map(|cell| columns_of(cell)).max().unwrap_or(0))
        .collect();
    let line = |index: usize| {
        let cells =
            cells.iter().zip(&widths).map(|(column, width)| format!("{:<width$}", column[index]));
        cells.collect::<Vec<_>>().join("  ")
    };
    (0..lines).map(line).collect()
}

/// What stands before the figures: the settings by axis. A peer that has none of them is named there
/// instead.
fn settings(group: &Group) -> Vec<String> {
    let bare = |row: &Row| !group.axes.iter().any(|axis| row.setting.contains_key(*axis));
    let mut cells: Vec<Vec<String>> = Vec::new();
    if group.rows.iter().any(|row| row.monitor != POLLUX && !bare(row)) {
        let monitors = group.rows.iter().map(|row| clean(&row.monitor));
        cells.push(["monitor".into()].into_iter().chain(monitors).collect());
    }
    for axis in &group.axes {
        let values = group.rows.iter().map(|row| match row.setting.get(*axis) {
            Some(value) => clean(&setting(axis, value)),
            None if row.monitor != POLLUX && bare(row) => String::new(),
            None => "-".into(),
        });
        cells.push([clean(axis_title(axis))].into_iter().chain(values).collect());
    }
    let mut lines = columns(&cells);
    let wide = lines.first().map_or(0, |line| columns_of(line));
    for (row, line) in group.rows.iter().zip(lines.iter_mut().skip(1)) {
        if row.monitor != POLLUX && bare(row) {
            *line = format!("{:<wide$}", clean(&row.monitor));
        }
    }
    lines
}

/// A column as text, its title first, each with a blank before it. Where any figure is inside the
/// noise, each has `~` or a blank behind it.
fn figures(group: &Group, column: &Column) -> Option<Vec<String>> {
    let has = |name: &&&str| group.rows.iter().any(|row| figure(row, name).is_some());
    let name = *column.names.iter().find(has)?;
    let same = |row: &Row| row.against_base.get(name).is_some_and(|other| other.inside_noise);
    let marked = group.rows.iter().any(|row| same(row) && figure(row, name).is_some());
    let values: Vec<Option<f64>> =
        group.rows.iter().map(|row| figure(row, name).map(|interval| interval.median)).collect();
    let most = values.iter().flatten().fold(0.0f64, |most, value| most.max(value.abs()));
    let decimals = match most {
        _ if most >= 1000.0 => 0,
        _ if column.decimals.is_some() => column.decimals.unwrap_or(0),
        _ if most >= 100.0 => 0,
        _ if most >= 10.0 => 1,
        _ => 2,
    };
    let with_mark = |text: String, mark| if marked { format!("{text}{mark}") } else { text };
    let title = with_mark(column.title.into(), ' ');
    let cells = group.rows.iter().zip(values).map(|(row, value)| match value {
        None => with_mark("-".into(), ' '),
        Some(value) => {
            let mark = if same(row) { '~' } else { ' ' };
            let digits = if value.abs() < 1e7 {
                format!("{value:.decimals$}")
            } else {
                format!("{value:.1e}")
            };
            with_mark(digits, mark)
        }
    });
    let lines: Vec<String> = [title].into_iter().chain(cells).collect();
    let wide = lines.iter().map(|line| columns_of(line)).max().unwrap_or(0).max(5) + 1;
    Some(lines.into_iter().map(|line| format!("{line:>wide$}")).collect())
}

fn table(group: &Group, out: &mut Vec<String>) {
    let mut shown: Vec<(&Column, Vec<String>)> =
        COLUMNS.iter().filter_map(|column| Some((column, figures(group, column)?))).collect();
    let needed: usize = shown.iter().map(|(_, lines)| columns_of(&lines[0])).sum();
    let key = group.rows.len().to_string().len();
    wrapped("", group.workload, out);
    let mut left: Vec<String> = settings(group);
    let fits = left.iter().map(|line| 2 + key + 2 + columns_of(line)).max().unwrap_or(0);
    if fits + needed > WIDTH {
        // The settings need lines of their own.
        for (index, row) in group.rows.iter().enumerate() {
            wrapped(&format!("  {:>key$}  ", index + 1), &group.label(row), out);
        }
        left.clear();
    }
    if fits + needed + shown.len() <= WIDTH {
        // There is room for two blanks between columns.
        shown.iter_mut().flat_map(|(_, lines)| lines).for_each(|line| line.insert(0, ' '));
    }
    let widths: Vec<usize> = shown.iter().map(|(_, lines)| columns_of(&lines[0])).collect();
    left.resize(group.rows.len() + 1, String::new());
    for (index, line) in left.iter_mut().enumerate() {
        let number = if index == 0 { "#".into() } else { index.to_string() };
        let dominated = index > 0 && group.rows[index - 1].dominated_by.is_some();
        *line = format!("  {number:>key$}{} {line}", if dominated { 'x' } else { ' ' });
    }

    // What neighbours have in common stands above them, at the right end.
    let mut over = " ".repeat(columns_of(&left[0]));
    let mut index = 0;
    while index < shown.len() {
        let titles = shown[index].0.over;
        let end =
            index + shown[index..].iter().take_while(|column| column.0.over == titles).count();
        let width: usize = widths[index..end].iter().sum();
        let title = titles.iter().find(|title| columns_of(title) < width).unwrap_or(&"");
        over.push_str(&format!("{title:>width$}"));
        index = end;
    }
    out.push(over);
    for (index, mut line) in left.into_iter().enumerate() {
        if index > 0 && group.rows[index - 1].summary.is_empty() {
            line.push_str(&format!("  {}", super::nothing(group.rows[index - 1])));
        } else {
            line.extend(shown.iter().map(|(_, lines)| lines[index].as_str()));
        }
        out.push(line);
    }
    below(group, out);
}

/// What the table's marks mean, the noise, and the runs that failed.
fn below(group: &Group, out: &mut Vec<String>) {
    let same = |row: &Row| row.against_base.values().any(|difference| difference.inside_noise);
    let mut marks = Vec::new();
    if group.rows.iter().any(|row| row.dominated_by.is_some()) {
        marks.push("x: dominated, another row is nowhere worse and somewhere better");
    }
    if group.rows.iter().any(|row| same(row)) {
        marks.push("~: differs from row 1 by no more than the noise");
    }
    if !marks.is_empty() {
        wrapped("  ", &marks.join("; "), out);
    }
    if let Some(noise) = group.noise {
        wrapped("  noise: ", &noise_in_words(noise), out);
    }
    for (index, row) in group.rows.iter().enumerate() {
        for (repeats, why) in causes(row) {
            wrapped(&format!("  failed: row {}: ", index + 1), &format!("{repeats}: {why}"), out);
        }
    }
}
