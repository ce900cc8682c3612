//! Bad input of `pollux bench`: one line on stderr that names what is wrong, exit status 2, and nothing
//! is measured or made.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const PLAN: &str = "[[workload]]\nname = \"w\"\n[[sweep]]\nhalt = \"kernel\"\n";

fn place() -> TempDir {
    let place = tempfile::tempdir().unwrap();
    for name in ["kernel", "root"] {
        fs::write(place.path().join(name), "").unwrap();
    }
    place
}

fn bench(place: &Path, plan: &str, options: &str) -> Output {
    fs::write(place.join("plan.toml"), plan).unwrap();
    Command::new(env!("CARGO_BIN_EXE_pollux"))
        .args("bench --kernel kernel --root root --plan plan.toml --out out".split(' '))
        .args(options.split_whitespace())
        .current_dir(place)
        .output()
        .unwrap()
}

#[test]
fn what_is_wrong_is_told_in_one_line_before_anything_is_made() {
    let sweep = |text: &str| format!("[[workload]]\nname = \"w\"\n[[sweep]]\n{text}\n");
    let cases = [
        ("x = 1".to_owned(), "", "--plan plan.toml: line 1: unknown field `x`"),
        (sweep("halt = \"both\""), "", "setting halt=both: --halt both: "),
        (sweep("halt_poll_ns = \"5 parsecs\""), "", "--halt-poll-ns 5 parsecs: not a time"),
        (sweep("halt_poll_ns_grow = 4"), "", "--halt-poll-ns-grow"),
        (sweep("engine = \"aio\""), "", "aio"),
        (sweep("guest_idle = \"poll\"\nhalt = \"user\""), "-- --pin vcpu9=0", "--pin"),
        (PLAN.into(), "-- --no-such-option", "'--no-such-option'"),
        (PLAN.into(), "--kernel absent", "absent: no such file"),
        (PLAN.into(), "--data absent", "absent: no such file"),
        (PLAN.into(), "--repeats 0", "measure.repeats = 0"),
        (PLAN.into(), "--seconds 0", "measure.seconds = 0"),
        (PLAN.into(), "--advise soon", "--advise soon: not a goal"),
        (PLAN.into(), "--peer xen", "--peer xen: not a monitor"),
        (PLAN.into(), "--peer qemu=/absent", "/absent does not start"),
        (PLAN.into(), "--plan absent", "or one of quick, halt, blk, pingpong, think"),
    ];
    for (plan, options, expected) in cases {
        let place = place();
        // An option that the command has already is given in its place.
        let output = match options.split_once(' ') {
            Some((option @ ("--kernel" | "--plan"), value)) => {
                fs::write(place.path().join("plan.toml"), &plan).unwrap();
                let words = "bench --kernel kernel --root root --plan plan.toml --out out";
                let words =
                    words.replace(&format!("{option} kernel"), &format!("{option} {value}"));
                let words =
                    words.replace(&format!("{option} plan.toml"), &format!("{option} {value}"));
                Command::new(env!("CARGO_BIN_EXE_pollux"))
                    .args(words.split(' '))
                    .current_dir(place.path())
                    .output()
                    .unwrap()
            }
            _ => bench(place.path(), &plan, options),
        };
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{plan} {options}: {text}");
        assert!(text.contains(expected) && text.lines().count() == 1, "{plan} {options}: {text}");
        assert!(output.stdout.is_empty() && !place.path().join("out").exists(), "{options}");
    }
}

#[test]
fn a_plan_is_printed_as_it_would_be_measured() {
    let place = place();
    let output = bench(place.path(), PLAN, "--print-plan --repeats 7 --boot-each --seconds 2.5");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["repeats = 7", "seconds = 2.5", "boots = \"each\"", "halt = \"kernel\""] {
        assert!(text.contains(line), "{line}: {text}");
    }
}
