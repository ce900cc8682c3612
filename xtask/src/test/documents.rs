//! What docs/conformance.md names is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::util;

/// The text of every Rust file below `dir`.
fn sources(dir: &Path, text: &mut String) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// What stands between backquotes.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn what_the_overview_of_conformance_names_is_there() {
    let root = util::workspace_root();
    let document = fs::read_to_string(root.join("docs/conformance.md")).unwrap();
    let mut text = String::new();
    for krate in ["devices/src", "virtio-blk", "tests"] {
        sources(&root.join(krate), &mut text);
    }
    let tests: BTreeSet<&str> = text
        .split("#[test]")
        .skip(1)
        .filter_map(|after| after.split("fn ").nth(1)?.split('(').next())
        .collect();
    let at = |name: &str| match name {
        "pci.rs" | "common_cfg.rs" | "signal.rs" => root.join("devices/src/virtio").join(name),
        "msix.rs" => root.join("devices/src/pci").join(name),
        _ if name.starts_with("queue/") => root.join("devices/src/virtio").join(name),
        _ => root.join(name),
    };
    let mut statements = 0;
    for line in document.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").collect();
        let [_, _, place, shown] = cells[..] else { continue };
        for name in quoted(place).filter(|name| name.ends_with(".rs")) {
            assert!(at(name).exists(), "{name}: {line}");
        }
        if shown.trim() != "shown by" {
            statements += 1;
            let mut named = quoted(shown).peekable();
            assert!(named.peek().is_some() || shown.contains("not by a test"), "{line}");
            named.for_each(|name| assert!(tests.contains(name), "there is no test {name}"));
        }
    }
    assert!(statements > 60, "{statements}");
}
