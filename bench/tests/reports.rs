//! Reports made from the example document, and from documents that have next to nothing in them or
//! mean harm.

use std::collections::BTreeMap;
use std::path::Path;

use bench::report;
use bench::results::{Advice, Difference, Interval, Noise, Results, Row, Run};

mod example;

#[test]
fn the_example_is_what_its_generator_makes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/example.json");
    let made = example::json(&example::example());
    if std::env::var_os("BENCH_WRITE_EXAMPLE").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap() == made,
        "write it anew: BENCH_WRITE_EXAMPLE=1 cargo test -p bench --test reports"
    );
}

/// The example as it is read from its file.
fn example() -> Results {
    serde_json::from_str(include_str!("data/example.json")).unwrap()
}

/// All three; what must hold for each of any document.
fn reports(results: &Results) -> (String, String, String) {
    let html = report::html::render(results);
    assert_well_formed(&html);
    for wrong in ["NaN", "inf\"", "inf ", "undefined"] {
        assert!(!html.contains(wrong), "{wrong} in the page");
    }
    let terminal = report::terminal::render(results);
    for line in terminal.lines() {
        assert!(line.chars().count() <= 120, "too wide: {line}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
    (html, report::csv::render(results).unwrap(), terminal)
}

/// Every element that is opened is closed, in order.
fn assert_well_formed(html: &str) {
    let without = |text: &str, element: &str| -> String {
        let start = format!("<{element}>");
        let mut parts = text.split(&start);
        let mut kept = parts.next().unwrap().to_string();
        for part in parts {
            kept.push_str(part.split_once(&format!("</{element}>")).expect(element).1);
        }
        kept
    };
    let text = without(&without(html, "style"), "script");
    let mut open: Vec<&str> = Vec::new();
    for tag in text.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.split([' ', '\n']).next().unwrap();
        match name.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if ["!DOCTYPE", "meta", "link", "br"].contains(&name) => (),
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

fn count(text: &str, what: &str) -> usize {
    text.matches(what).count()
}

#[test]
fn the_page_has_every_part() {
    let results = example();
    let (html, _, _) = reports(&results);
    assert_eq!(count(&html, "<svg"), 10);
    assert_eq!(count(&html, "<section class=\"workload\""), 2);
    // A line a setting that has runs, in the plots of latency.
    assert_eq!(count(&html, "<path class=\"line "), 13 + 7 + 4 + 2);
    assert_eq!(count(&html, "<tr class=\"dominated\" data-k") + count(&html, "<tr data-k"), 2 * 21);
    assert!(html.contains("1 of 5 failed") && html.contains("no run succeeded"));
    assert!(html.contains("KVM_RUN: Bad address"));
    for row in &results.rows {
        assert!(html.contains(&row.command.join(" ")), "{}", row.id);
    }
    for text in ["AMD EPYC", "6.12.48-cloud-amd64", "MSR_KVM_POLL_CONTROL", "halt_poll_ns=0"] {
        assert!(html.contains(text), "{text}");
    }
    // Nothing is fetched.
    for reference in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!html.contains(reference), "{reference}");
    }
}

#[test]
fn differences_inside_the_noise_are_said_to_be() {
    let mut results = example();
    results.rows.truncate(2);
    let difference = |inside_noise| Difference { relative: -0.25, inside_noise };
    results.rows[1].against_base = BTreeMap::from([("iops".into(), difference(true))]);
    let (html, _, terminal) = reports(&results);
    assert_eq!(
        count(&html, "<span class=\"diff same\" title=\"inside the noise\">≈ −25\u{a0}%"),
        2
    );
    assert_eq!(count(&terminal, "~"), 2, "{terminal}");
    results.rows[1].against_base = BTreeMap::from([("iops".into(), difference(false))]);
    let (html, _, terminal) = reports(&results);
    assert_eq!(count(&html, "<span class=\"diff worse\">−25\u{a0}%"), 2);
    assert_eq!(count(&terminal, "~"), 0, "{terminal}");
}

#[test]
fn csv_has_a_line_a_row_and_run_and_every_figure() {
    let results = example();
    let (_, text, _) = reports(&results);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().unwrap().clone();
    let column = |name: &str| header.iter().position(|other| other == name).expect(name);
    let lines: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let summaries: Vec<_> = lines.iter().filter(|line| &line[0] == "summary").collect();
    assert_eq!((summaries.len(), lines.len()), (21, 21 + 105));
    for (line, row) in summaries.iter().zip(&results.rows) {
        assert_eq!(line[column("row")], row.id);
        assert_eq!(
            line[column("set:halt_poll_ns")],
            *row.setting.get("halt_poll_ns").unwrap_or(&String::new())
        );
        let number = |name: &str| line[column(name)].parse::<f64>().ok();
        let interval = row.summary.get("lat_p99_us");
        assert_eq!(number("lat_p99_us"), interval.map(|interval| interval.median));
        assert_eq!(number("lat_p99_us:low"), interval.map(|interval| interval.low));
        assert_eq!(number("lat_p99_us:high"), interval.map(|interval| interval.high));
    }
    let failed = lines.iter().filter(|line| !line[column("error")].is_empty()).count();
    assert_eq!(failed, 6);
}

#[test]
fn the_terminals_table_lines_up() {
    let (_, _, text) = reports(&example());
    let lines: Vec<&str> = text.lines().collect();
    let head = lines.iter().position(|line| line.contains("IOPS")).unwrap();
    let end = |line: &str, word: &str| {
        let at = line.find(word).unwrap() + word.len();
        line[..at].chars().count()
    };
    let row = lines[head + 1];
    assert_eq!(end(lines[head], "IOPS"), end(row, "11560"), "\n{}\n{row}", lines[head]);
    assert!(lines[head + 3].contains("200 us") && lines[head + 3].starts_with("   3x"));
    assert!(text.contains("failed: row 8: repeat 4: the guest said nothing"));
    assert!(text.contains("no run succeeded"));
    assert!(text.contains("note: The guest had host polling switched off"));
    assert!(text.contains("  module kvm:      halt_poll_ns=0\n"), "{text}");
    assert!(text.contains("  guest's kernel:  cpuidle_haltpoll.force=1 "), "{text}");
}

/// Text that would end an element, an attribute, a script or a line.
const HOSTILE: &str = "</script><img src=x onerror=alert(1)>'\"&<!--\u{1b}[2J\r\n]]>\u{202e}";

#[test]
fn text_of_the_document_is_text_in_the_page() {
    let text = || HOSTILE.to_string();
    let mut results = example();
    results.rows.truncate(3);
    for (index, row) in results.rows.iter_mut().enumerate() {
        row.workload = text();
        row.id = format!("{index}{HOSTILE}");
        row.monitor = text();
        row.setting = BTreeMap::from([(text(), format!("{HOSTILE}{index}"))]);
        row.command = vec![text(), text()];
        row.guest_command = text();
        row.dominated_by = Some(text());
        row.runs[0].error = Some(text());
        row.runs[1].notes = vec![text()];
        row.summary.insert(text(), Interval { median: 1.0, low: 1.0, high: 1.0 });
    }
    results.name = text();
    results.question = text();
    results.plan = text();
    results.started = text();
    results.ended = Some(text());
    results.version = text();
    results.command = vec![text()];
    results.notes = vec![text()];
    results.host = serde_json::json!({"cpu": HOSTILE, "kernel": HOSTILE, HOSTILE: HOSTILE});
    results.guest = serde_json::json!({"kernel": [HOSTILE], "cpuidle_driver": HOSTILE});
    results.noise.truncate(1);
    results.noise[0].workload = text();
    results.advice = vec![Advice {
        workload: text(),
        goal: text(),
        row: Some(results.rows[1].id.clone()),
        why: text(),
        pollux: vec![text()],
        kvm_module: vec![text()],
        guest_cmdline: vec![text()],
    }];
    let (html, _, _) = reports(&results);
    let plain = report::html::render(&example());
    assert_eq!(count(&html, "<img"), 0);
    assert_eq!(count(&html, "<!--"), 0);
    assert_eq!(count(&html, "</script>"), count(&plain, "</script>"));
    assert!(count(&html, "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") > 30);
}

/// A document with one row, of these runs.
fn one_row(runs: Vec<Run>, summary: BTreeMap<String, Interval>) -> Results {
    let mut results = example();
    results.rows.truncate(1);
    results.noise.clear();
    results.advice.clear();
    results.notes.clear();
    results.rows[0].runs = runs;
    results.rows[0].summary = summary;
    results.rows[0].window_us.clear();
    results
}

#[test]
fn a_document_without_rows_is_a_report() {
    let mut results = one_row(Vec::new(), BTreeMap::new());
    results.rows.clear();
    results.host = serde_json::Value::Null;
    results.guest = serde_json::Value::Null;
    results.ended = None;
    let (html, csv, terminal) = reports(&results);
    assert!(html.contains("Nothing was measured") && html.contains("not finished"));
    assert_eq!((csv.lines().count(), terminal.as_str()), (1, "Nothing was measured.\n"));
}

#[test]
fn a_document_whose_runs_all_failed_says_why() {
    let mut runs = example().rows[0].runs.clone();
    for run in &mut runs {
        run.error = Some("no KVM".into());
        run.figures.clear();
        run.latency_us.clear();
    }
    let (html, _, terminal) = reports(&one_row(runs, BTreeMap::new()));
    assert!(html.contains("No run of this workload succeeded") && !html.contains("<svg"));
    let said = "repeat 1, 2, 3, 4, 5: ";
    assert!(terminal.contains(&format!("failed: row 1: {said}no KVM")), "{terminal}");
    assert_eq!((count(&html, said), count(&html, "no KVM")), (1, 1));
}

#[test]
fn one_run_of_one_setting_is_a_report() {
    let run = example().rows[0].runs[0].clone();
    let alone = |value: &f64| Interval { median: *value, low: *value, high: *value };
    let summary = run.figures.iter().map(|(name, value)| (name.clone(), alone(value))).collect();
    let (html, _, terminal) = reports(&one_row(vec![run], summary));
    assert_eq!(count(&html, "<svg"), 4);
    assert!(terminal.contains("11"), "{terminal}");
}

#[test]
fn figures_that_are_no_numbers_are_left_out() {
    for value in
        [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, -1.0, 0.0, f64::MIN_POSITIVE]
    {
        let mut results = example();
        for row in &mut results.rows {
            for interval in row.summary.values_mut() {
                *interval = Interval { median: value, low: f64::NAN, high: value };
            }
            for difference in row.against_base.values_mut() {
                difference.relative = value;
            }
            row.window_us = vec![[value, value], [1.0, value], [value, 2.0]];
            for run in &mut row.runs {
                run.figures.values_mut().for_each(|figure| *figure = value);
                run.latency_us = vec![[value, value], [0.5, value], [value, 3.0], [0.9, 4.0]];
            }
        }
        for Noise { relative, .. } in &mut results.noise {
            relative.values_mut().for_each(|part| *part = value);
        }
        reports(&results);
    }
}

#[test]
fn many_settings_and_long_names_fit() {
    let mut results = example();
    let row = results.rows[0].clone();
    let named = |index: usize| Row {
        id: index.to_string(),
        setting: BTreeMap::from([
            (
                "a-parameter-with-a-name-that-is-far-too-long-for-a-column-of-a-table".into(),
                index.to_string(),
            ),
            ("x".repeat(200), format!("{index}{}", "y".repeat(200))),
        ]),
        ..row.clone()
    };
    results.rows = (0..120).map(named).collect();
    let (html, _, _) = reports(&results);
    assert_eq!(count(&html, "<svg"), 4);
}
