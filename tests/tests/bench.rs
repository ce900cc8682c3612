//! `pollux bench` where the guests do not do what they should: guests of a few instructions on this
//! machine's own KVM.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use pollux_tests::elf::{self, power_off};
use pollux_tests::guest::{program, scratch};
use serde_json::Value as Json;

fn bench(dir: &Path, kernel: &Path, options: &[&str]) -> Output {
    for disk in ["root", "data"] {
        fs::write(dir.join(disk), [0; 4096]).expect("a disk");
    }
    Command::new(program())
        .arg("bench")
        .arg("--kernel")
        .arg(kernel)
        .args(["--root", "root", "--data", "data", "--out", "out"])
        .args(options)
        .args(["--", "--boot", "linux64"])
        .current_dir(dir)
        .output()
        .expect("pollux starts")
}

#[test]
fn guests_that_fail_are_shown_and_end_the_bench() {
    let dir = scratch();
    let kernel = elf::write(dir.path(), &power_off());
    let data = dir.path().join("out/results.json");
    let results = || -> Json {
        serde_json::from_str(&fs::read_to_string(&data).expect("results")).expect("JSON")
    };

    let first = bench(dir.path(), &kernel, &["--repeats", "1"]);
    let text = String::from_utf8_lossy(&first.stderr).into_owned();
    assert_eq!(first.status.code(), Some(1), "{text}");
    let last = text.lines().last().expect("a message");
    assert!(last.contains("3 runs in a row failed: Pollux has ended"), "{text}");
    let rows = results();
    let failed = |row: usize| rows["rows"][row]["runs"][0]["error"].as_str();
    for row in 0..3 {
        assert!(failed(row).is_some_and(|why| why.contains("Pollux has ended")), "{rows:#}");
    }
    assert_eq!(failed(3), None);
    assert!(rows["ended"].is_null());
    for name in ["results.csv", "report.html"] {
        assert!(dir.path().join("out").join(name).exists(), "{name}");
    }

    // What is there is neither overwritten nor taken for another plan's.
    let refused = |options: &[&str], expected: &str| {
        let output = bench(dir.path(), &kernel, options);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(expected), "{text}");
        assert_eq!(results(), rows);
    };
    refused(&["--repeats", "1"], "there are results already (use --resume");
    refused(&["--repeats", "2", "--resume"], "of another plan");
    let again = bench(dir.path(), &kernel, &["--repeats", "1", "--resume"]);
    assert_eq!(again.status.code(), Some(1));
    assert_eq!(results()["rows"][0]["runs"].as_array().map(Vec::len), Some(1), "made again");
}
