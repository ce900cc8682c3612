//! `results.csv`: the figures, for spreadsheets and statistics programs. The columns are described in
//! docs/reports.md.

use std::collections::{BTreeMap, BTreeSet};

use crate::results::{FIGURES, Results, Row, Run};

/// The columns before the axes of settings.
const BEFORE: [&str; 4] = ["what", "workload", "row", "monitor"];
/// The columns between the axes and the figures.
const AFTER: [&str; 7] =
    ["dominated_by", "runs", "runs_failed", "repeat", "boot", "error", "command"];

/// Writes the document as CSV (RFC 4180): after the names of the columns a line a row, each followed
/// by a line for each of its runs.
///
/// # Errors
/// None that a document can bring about; those of the CSV writer.
pub fn render(results: &Results) -> Result<String, csv::Error> {
    let axes: BTreeSet<&str> =
        results.rows.iter().flat_map(|row| row.setting.keys().map(String::as_str)).collect();
    let mut out = csv::Writer::from_writer(Vec::new());
    let mut header: Vec<String> = BEFORE.map(String::from).into();
    header.extend(axes.iter().map(|axis| format!("set:{axis}")));
    header.extend(AFTER.map(String::from));
    for figure in FIGURES {
        let name = figure.name;
        header.push(name.into());
        header.extend(
            ["low", "high", "against_base", "inside_noise"].map(|end| format!("{name}:{end}")),
        );
    }
    out.write_record(&header)?;
    for row in &results.rows {
        out.write_record(summary(row, &axes))?;
        for run in &row.runs {
            out.write_record(single(row, run, &axes))?;
        }
    }
    let bytes = out.into_inner().map_err(|error| error.into_error())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn start(what: &str, row: &Row, axes: &BTreeSet<&str>) -> Vec<String> {
    let mut line = vec![what.into(), row.workload.clone(), row.id.clone(), row.monitor.clone()];
    line.extend(axes.iter().map(|axis| row.setting.get(*axis).cloned().unwrap_or_default()));
    line
}

fn summary(row: &Row, axes: &BTreeSet<&str>) -> Vec<String> {
    let mut line = start("summary", row, axes);
    let failed = super::failures(&row.runs).count();
    line.extend([
        row.dominated_by.clone().unwrap_or_default(),
        row.runs.len().to_string(),
        failed.to_string(),
        String::new(),
        String::new(),
        String::new(),
        super::shell(&row.command),
    ]);
    for figure in FIGURES {
        let interval = super::figure(row, figure.name);
        let difference =
            row.against_base.get(figure.name).filter(|difference| difference.relative.is_finite());
        line.extend([
            interval.map(|interval| interval.median.to_string()).unwrap_or_default(),
            interval.map(|interval| interval.low.to_string()).unwrap_or_default(),
            interval.map(|interval| interval.high.to_string()).unwrap_or_default(),
            difference.map(|difference| difference.relative.to_string()).unwrap_or_default(),
            difference.map(|difference| difference.inside_noise.to_string()).unwrap_or_default(),
        ]);
    }
    line
}

fn single(row: &Row, run: &Run, axes: &BTreeSet<&str>) -> Vec<String> {
    let mut line = start("run", row, axes);
    line.extend([
        String::new(),
        String::new(),
        String::new(),
        run.repeat.to_string(),
        run.boot.to_string(),
        run.error.clone().unwrap_or_default(),
        String::new(),
    ]);
    let value = |figures: &BTreeMap<String, f64>, name| {
        figures.get(name).filter(|value| value.is_finite()).map(f64::to_string).unwrap_or_default()
    };
    for figure in FIGURES {
        line.push(value(&run.figures, figure.name));
        line.extend([const { String::new() }; 4]);
    }
    line
}
