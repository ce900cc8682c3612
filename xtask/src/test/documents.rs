//! Checks docs/conformance.md against the code, so that it cannot rot: whoever renames a function or a
//! test that it names has to change it as well.

use std::collections::BTreeMap;
use std::path::Path;

use crate::util;

/// How a row says that no test shows its statement.
const NO_TEST: &str = "no test";

/// A statement: its section, where it is implemented, and what shows it.
struct Row<'a> {
    section: &'a str,
    code: &'a str,
    tests: &'a str,
}

/// The rows of the tables with four columns, which are those of statements.
fn rows(page: &str) -> Vec<Row<'_>> {
    page.lines()
        .filter_map(|line| {
            let inner = line.strip_prefix("| ")?.strip_suffix(" |")?;
            let [section, _, code, tests] = inner.split(" | ").collect::<Vec<_>>()[..] else {
                return None;
            };
            section.starts_with(|c: char| c.is_ascii_digit()).then_some(Row {
                section,
                code,
                tests,
            })
        })
        .collect()
}

/// What the labels at the page's end refer to: `[label]: path`.
fn labels(page: &str) -> BTreeMap<&str, &str> {
    let label = |line| str::split_once(str::strip_prefix(line, "[")?, "]: ");
    page.lines().filter_map(label).collect()
}

/// The names in a cell `[label] `name`, `name`, [label] `name``, each with its label.
fn names(cell: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for part in cell.split('[').skip(1) {
        let (label, rest) = part.split_once(']').unwrap_or((part, ""));
        let of_label = rest.split('`').skip(1).step_by(2);
        found.extend(of_label.map(|name| (label, name)));
    }
    found
}

/// Whether `source` has a function of that name; a test, if that is asked for.
fn has_function(source: &str, name: &str, is_test: bool) -> bool {
    let mut attributes = "";
    source.lines().map(str::trim_start).any(|line| {
        let found = line.split_once("fn ").is_some_and(|(_, signature)| {
            signature.strip_prefix(name).is_some_and(|rest| rest.starts_with(['(', '<']))
        });
        let found = found && (!is_test || attributes == "#[test]");
        attributes = line;
        found
    })
}

/// Everything that is wrong with the page, one line each.
fn complaints(page: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let labels = labels(page);
    let mut wrong = Vec::new();
    let mut check = |section: &str, cell: &str, is_test: bool| {
        let names = names(cell);
        if names.is_empty() && !(is_test && cell == NO_TEST) {
            wrong.push(format!("{section}: {cell:?} names nothing"));
        }
        for (label, name) in names {
            let source = labels.get(label).and_then(|path| read(path));
            match source {
                None => wrong.push(format!("{section}: [{label}] is no file")),
                Some(source) if !has_function(&source, name, is_test) => {
                    wrong.push(format!("{section}: [{label}] has no `{name}`"));
                }
                Some(_) => {}
            }
        }
    };
    let rows = rows(page);
    for row in &rows {
        check(row.section, row.code, false);
        check(row.section, row.tests, true);
    }
    let untested = rows.iter().filter(|row| row.tests == NO_TEST).count();
    let counts = format!("It is {} statements, of which {untested} have no test", rows.len());
    if !page.contains(&counts) {
        wrong.push(format!("the page does not say: {counts}"));
    }
    wrong
}

#[test]
fn what_the_page_on_conformance_names_exists() {
    let docs = util::workspace_root().join("docs");
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let page = read(&docs.join("conformance.md")).expect("docs/conformance.md");
    let wrong = complaints(&page, |path| read(&docs.join(path)));
    assert!(wrong.is_empty(), "docs/conformance.md:\n{}", wrong.join("\n"));
}

#[test]
fn what_does_not_exist_is_complained_about() {
    let page = "It is 3 statements, of which 1 have no test\n\
        | section | a device | where | test |\n|---|---|---|---|\n\
        | 1.1 | must | [a] `code`, `other` | [a] `shows`, [b] `shows` |\n\
        | 1.2 | must | [a] `code` | no test |\n\
        | 1.3 | must | [a] `code` | |\n\
        [a]: ../a.rs\n[b]: ../b.rs\n";
    let source = "    pub fn code(&self) {}\n#[test]\nfn shows() {}\n";
    let read = |path: &str| (path == "../a.rs").then(|| source.to_owned());
    let page = page.replace("| |", "| none |");
    assert_eq!(
        complaints(&page, read),
        ["1.1: [a] has no `other`", "1.1: [b] is no file", "1.3: \"none\" names nothing",]
    );
    let untested = page.replace("`shows`, [b]", "`code`, [b]");
    assert!(complaints(&untested, read).contains(&"1.1: [a] has no `code`".to_owned()));
    let more = format!("{page}| 1.4 | must | [a] `code` | no test |\n");
    assert!(complaints(&more, read)[3].starts_with("the page does not say: It is 4"));
}
