//! `pollux-fuzz TARGET [--seconds N] [--seed N] [--corpus DIR] [--choose DIR]`, `pollux-fuzz TARGET FILE…`.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use pollux_fuzz::engine::{Engine, choose, name, read_corpus};
use pollux_fuzz::{coverage, targets};

const USAGE: &str = "usage: pollux-fuzz TARGET [--seconds N] [--seed N] [--corpus DIR] [--choose DIR]
       pollux-fuzz TARGET FILE...

Runs the corpus in fuzz/corpus/TARGET and in DIR, then mutations of it for N seconds (default 60); inputs
that reach something new are written to DIR. --choose: writes at most 60 inputs that reach what the corpus
reaches to another DIR, and ends. With files: runs these and ends.";
/// Inputs of a target in the repository.
const MAX_INPUTS: usize = 60;
const REPORT_EVERY: Duration = Duration::from_secs(10);

struct Arguments {
    target: String,
    seconds: u64,
    seed: u64,
    corpus: Option<PathBuf>,
    choose: Option<PathBuf>,
    files: Vec<PathBuf>,
}

fn parse() -> Option<Arguments> {
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next()?;
    let mut parsed =
        Arguments { target, seconds: 60, seed: 0, corpus: None, choose: None, files: Vec::new() };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => parsed.seconds = arguments.next()?.parse().ok()?,
            "--seed" => parsed.seed = arguments.next()?.parse().ok()?,
            "--corpus" => parsed.corpus = Some(arguments.next()?.into()),
            "--choose" => parsed.choose = Some(arguments.next()?.into()),
            option if option.starts_with('-') => return None,
            _ => parsed.files.push(argument.into()),
        }
    }
    Some(parsed)
}

fn main() -> ExitCode {
    let Some(arguments) = parse() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let Some(target) = targets::find(&arguments.target) else {
        let names: Vec<_> = targets::ALL.iter().map(|(name, _)| *name).collect();
        eprintln!("pollux-fuzz: no target {}; there are {}", arguments.target, names.join(", "));
        return ExitCode::from(2);
    };
    match run(&arguments, target) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pollux-fuzz: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments, target: fn(&[u8])) -> std::io::Result<()> {
    for file in &arguments.files {
        println!("{}", file.display());
        target(&fs::read(file)?);
    }
    if !arguments.files.is_empty() {
        return Ok(());
    }
    let mut inputs = read_corpus(&targets::corpus(&arguments.target))?;
    if let Some(directory) = &arguments.corpus {
        fs::create_dir_all(directory)?;
        inputs.extend(read_corpus(directory)?);
    }
    if let Some(directory) = &arguments.choose {
        fs::create_dir_all(directory)?;
        let chosen = choose(target, inputs, MAX_INPUTS);
        println!("{}: {} inputs", directory.display(), chosen.len());
        return chosen.iter().try_for_each(|input| fs::write(directory.join(name(input)), input));
    }
    fuzz(arguments, target, inputs)
}

fn fuzz(arguments: &Arguments, target: fn(&[u8]), inputs: Vec<Vec<u8>>) -> std::io::Result<()> {
    if coverage::edges() == 0 {
        eprintln!("pollux-fuzz: built without counters, so it is blind; use cargo xtask fuzz");
    }
    let mut engine = Engine::new(target, arguments.seed);
    // In a file, so that it is there however the program ends.
    let current = std::env::temp_dir().join(format!(
        "pollux-fuzz-{}-{}",
        arguments.target,
        std::process::id()
    ));
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(&current)?;
    tell_input_of_a_panic(&current);
    let mut length = 0;
    engine.note(move |input| {
        let written = file.write_all_at(input, 0);
        let cut = if input.len() < length { file.set_len(input.len() as u64) } else { Ok(()) };
        length = input.len();
        written.and(cut).expect("the file of the current input can be written");
    });
    if let Some(directory) = &arguments.corpus {
        engine.keep_in(directory);
    }
    let start = Instant::now();
    inputs.into_iter().for_each(|input| engine.seed(input));
    engine.seed(Vec::new());
    let end = start + Duration::from_secs(arguments.seconds);
    let mut next_report = start + REPORT_EVERY;
    loop {
        let now = Instant::now();
        if now >= next_report || now >= end {
            let report = engine.report(start);
            let rate = report.executions as f64 / report.elapsed.as_secs_f64();
            println!(
                "{}: {} s, {} executions, {rate:.0} a second, {} inputs, {} of {} edges",
                arguments.target,
                report.elapsed.as_secs(),
                report.executions,
                report.inputs,
                report.edges,
                coverage::edges(),
            );
            next_report = now + REPORT_EVERY;
        }
        if now >= end {
            break;
        }
        for _ in 0..64 {
            engine.step()?;
        }
    }
    fs::remove_file(current)
}

/// A panic ends the program: its input is then in this file.
fn tell_input_of_a_panic(current: &Path) {
    let current = current.to_path_buf();
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |information| {
        before(information);
        eprintln!("pollux-fuzz: the input is in {}", current.display());
    }));
}
