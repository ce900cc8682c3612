//! `cargo xtask coverage`: which lines of the devices their tests run, by the compiler's own counters.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::util::{self, Context, Result, bail, cargo, command, step};

/// The crates whose lines are counted, by the tests of their own.
const CRATES: [&str; 2] = ["devices", "virtio-blk"];

/// Count which lines of `devices` and `virtio-blk` are run by the tests of these crates.
///
/// Lines of tests and of the test kit do not count. Needs the LLVM tools of the compiler's own
/// version, which Debian and apt.llvm.org have as llvm-NN.
#[derive(clap::Args)]
pub struct Args {
    /// Print the lines that no test runs, too.
    #[arg(long)]
    missed: bool,
}

/// `cargo xtask coverage`.
///
/// # Errors
/// A test failed, or a tool is missing.
pub fn run(args: &Args) -> Result<ExitCode> {
    let version = llvm_version()?;
    let (merge, show) = (format!("llvm-profdata-{version}"), format!("llvm-cov-{version}"));
    let package = format!("llvm-{version}");
    util::ensure_programs(&[(&merge, &package), (&show, &package)])?;
    let dir = util::target_dir().join("coverage");
    let counts = dir.join("counts");
    util::recreate_dir(&counts)?;
    step("running the tests of devices and virtio-blk, with counters");
    let programs = run_tests(&dir, &counts)?;
    let profile = counts.join("all.profdata");
    let mut merge = command(&merge);
    merge.args(["merge", "--sparse", "-o"]).arg(&profile);
    for entry in fs::read_dir(&counts).context(counts.display())?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "profraw") {
            merge.arg(entry.path());
        }
    }
    util::run(&mut merge)?;
    let mut show = command(&show);
    show.args(["export", "--format=lcov", "--instr-profile"]).arg(&profile);
    for (number, program) in programs.iter().enumerate() {
        if number > 0 {
            show.arg("--object");
        }
        show.arg(program);
    }
    let files = lines_by_file(&util::output_text(&mut show)?);
    print!("{}", table(&files, args.missed));
    Ok(ExitCode::SUCCESS)
}

/// The major version of the LLVM in the compiler.
fn llvm_version() -> Result<String> {
    let about = util::output_text(command("rustc").arg("-vV"))?;
    let version = about.lines().find_map(|line| line.strip_prefix("LLVM version: "));
    match version.and_then(|version| version.split('.').next()) {
        Some(major) => Ok(major.to_owned()),
        None => bail!("rustc -vV names no LLVM version"),
    }
}

/// Builds the tests, runs them, and gives their programs.
fn run_tests(dir: &Path, counts: &Path) -> Result<Vec<PathBuf>> {
    let with_counters = |extra: &[&str]| {
        let mut cargo = cargo(&["test", "--tests"]);
        cargo.args(CRATES.iter().flat_map(|name| ["--package", name])).args(extra);
        cargo.env("RUSTFLAGS", "-C instrument-coverage").env("CARGO_TARGET_DIR", dir);
        cargo.env("LLVM_PROFILE_FILE", counts.join("%p-%m.profraw"));
        cargo
    };
    let built = util::output_text(&mut with_counters(&["--no-run", "--message-format=json"]))?;
    util::run(&mut with_counters(&["--quiet"]))?;
    Ok(util::executables(&built).map(|(_, program)| program).collect())
}

/// Lines and how often each ran.
type Lines = BTreeMap<u32, u64>;

/// The lines that count of the files that count, by their paths in the workspace.
fn lines_by_file(lcov: &str) -> BTreeMap<String, Lines> {
    let root = util::workspace_root();
    let mut files = BTreeMap::<String, Lines>::new();
    let mut current = None;
    for line in lcov.lines() {
        if let Some(path) = line.strip_prefix("SF:") {
            let path = Path::new(path);
            let name = path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned();
            let end = fs::read_to_string(path).map_or(0, |text| first_line_of_tests(&text));
            current = counts(&name).then_some((name, end));
        } else if let (Some((name, end)), Some(data)) = (&current, line.strip_prefix("DA:"))
            && let Some((number, times)) = data.split_once(',')
            && let (Ok(number), Ok(times)) = (number.parse::<u32>(), times.parse::<u64>())
            && number < *end
        {
            *files.entry(name.clone()).or_default().entry(number).or_default() += times;
        }
    }
    files
}

/// Whether a file is one of a device, and not of a test.
fn counts(name: &str) -> bool {
    let of_a_test = ["/tests/", "/tests.rs", "/testkit/", "/testing.rs"];
    CRATES.iter().any(|krate| name.starts_with(&format!("{krate}/src/")))
        && !of_a_test.iter().any(|part| name.contains(part))
}

/// Where a file's own tests begin, or the line after its last.
fn first_line_of_tests(text: &str) -> u32 {
    let before = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
    u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1)
}

fn table(files: &BTreeMap<String, Lines>, missed: bool) -> String {
    let mut text = format!("{:<48} {:>6} {:>6} {:>8}\n", "", "lines", "run", "percent");
    let mut row = |name: &str, lines: usize, run: usize| {
        let percent = run as f64 * 100.0 / lines.max(1) as f64;
        text.push_str(&format!("{name:<48} {lines:>6} {run:>6} {percent:>8.1}\n"));
    };
    let ran = |lines: &Lines| lines.values().filter(|&&times| times > 0).count();
    let mut all = (0, 0);
    for krate in CRATES {
        let of = files.iter().filter(|(name, _)| name.starts_with(&format!("{krate}/")));
        let (mut lines, mut run) = (0, 0);
        for (name, counted) in of {
            row(name, counted.len(), ran(counted));
            lines += counted.len();
            run += ran(counted);
        }
        row(krate, lines, run);
        all = (all.0 + lines, all.1 + run);
    }
    row("both", all.0, all.1);
    for (name, lines) in files.iter().filter(|_| missed) {
        for (number, _) in lines.iter().filter(|&(_, &times)| times == 0) {
            text.push_str(&format!("{name}:{number}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_of_devices_before_their_own_tests_count() {
        assert!(counts("devices/src/virtio/pci.rs") && counts("virtio-blk/src/disk.rs"));
        for name in ["vmm/src/run.rs", "devices/src/testkit/mod.rs", "devices/src/pci/bus/tests.rs"]
        {
            assert!(!counts(name), "{name}");
        }
        assert_eq!(first_line_of_tests("fn a() {}\n\n#[cfg(test)]\nmod tests {}\n"), 3);
        assert_eq!(first_line_of_tests("fn a() {}\n"), 2);
    }

    #[test]
    fn the_table_sums_what_ran() {
        let lines = Lines::from([(1, 5), (2, 0), (3, 1), (4, 1)]);
        let files = BTreeMap::from([("devices/src/a.rs".to_owned(), lines)]);
        let text = table(&files, true);
        assert!(
            text.lines().any(|line| line.split_whitespace().eq(["both", "4", "3", "75.0"])),
            "{text}"
        );
        assert!(text.ends_with("devices/src/a.rs:2\n"), "{text}");
    }
}
