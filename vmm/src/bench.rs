//! `pollux bench`: what the options mean; the bench itself is the crate `bench`, which runs this
//! program again for each guest.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ::bench::Error;
use ::bench::advise::Goal;
use ::bench::peer::Peer;
use ::bench::plan::{Boots, Plan};
use ::bench::progress::Progress;
use ::bench::runner::{self, Bench, End, Options};
use ::bench::subject::Machine;
use serde_json::Value as Json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::{self, BenchArgs, Command, Refusal};
use crate::config::{VmConfig, reason};

/// What a shell makes of a program that SIGINT ended.
const INTERRUPTED: u8 = 130;
/// The data disk that is made where the user names none.
const DATA: &str = "data.img";

/// The program's exit status.
pub fn exit_status(error: &Error) -> u8 {
    match error {
        Error::Usage(_) => crate::USAGE,
        Error::Failed(_) => 1,
    }
}

/// Measures, and prints what came of it. Gives the exit status.
///
/// # Errors
/// See [`Error`].
pub fn run(args: &BenchArgs) -> Result<u8, Error> {
    let plan = plan(args)?;
    if args.print_plan {
        println(plan.to_toml().trim_end());
        return Ok(0);
    }
    let name = Path::new(&args.plan).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let out = args.out.clone().unwrap_or_else(|| format!("bench-{name}").into());
    let data = args.data.clone().unwrap_or_else(|| out.join(DATA));
    let program = std::env::current_exe()
        .map_err(|why| Error::Failed(format!("cannot tell where this program is: {why}")))?;
    let options = Options {
        name,
        machine: Machine {
            pollux: program.display().to_string(),
            kernel: args.kernel.clone(),
            initrd: args.initrd.clone(),
            root: args.root.clone(),
            data: data.clone(),
            options: args.options.clone(),
        },
        out,
        resume: args.resume,
        record: args.record,
        peers: args
            .peers
            .iter()
            .map(|peer| Peer::parse(peer))
            .collect::<Result<Vec<_>, _>>()?
            .concat(),
        goal: args.advise.as_deref().map(Goal::parse).transpose()?,
        command: std::env::args().collect(),
        plan,
    };
    for path in [Some(&args.kernel), args.initrd.as_ref(), Some(&args.root), args.data.as_ref()] {
        path.map_or(Ok(()), |path| readable(path))?;
    }
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&interrupt))
            .map_err(|why| Error::Failed(format!("cannot take signals: {why}")))?;
    }
    let mut bench = Bench::new(&options, &resolve, &interrupt)?;
    if args.data.is_none() {
        make_data(&data, &options.plan.measure.data)?;
    }
    let progress = Progress::new();
    let end = bench.run(&progress);
    progress.end();
    // Also what was measured before something failed.
    let text = runner::report(&bench.results, &options.out)?;
    println(text.trim_end());
    let out = options.out.display();
    match end? {
        End::Complete => {
            println(&format!("\nThe report is {out}/report.html."));
            Ok(0)
        }
        End::Interrupted => {
            println(&format!("\nInterrupted; what was measured is in {out}, --resume goes on."));
            Ok(INTERRUPTED)
        }
    }
}

/// Nobody to read it is no error of ours.
fn println(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// The plan with what the command line says otherwise.
fn plan(args: &BenchArgs) -> Result<Plan, Error> {
    let mut plan = Plan::open(&args.plan)?;
    if let Some(repeats) = args.repeats {
        plan.measure.repeats = repeats;
    }
    if let Some(seconds) = args.seconds {
        plan.measure.seconds = seconds;
        plan.workloads.iter_mut().for_each(|workload| workload.seconds = None);
    }
    if args.boot_each {
        plan.measure.boots = Boots::Each;
    }
    // Once more, with the same rules.
    Plan::parse(&plan.to_toml(), &format!("--plan {}", args.plan))
}

/// What a `pollux run` with these options would be.
fn resolve(options: &[String]) -> Result<Json, String> {
    let words = ["pollux", "run"].into_iter().chain(options.iter().map(String::as_str));
    match cli::parse(words.map(OsString::from)) {
        Ok(cli::Cli { command: Command::Run(args) }) => {
            let config = VmConfig::new(&args).map_err(|why| why.to_string())?;
            serde_json::to_value(config).map_err(|why| why.to_string())
        }
        Ok(_) => Err("no options of pollux run".into()),
        Err(Refusal::Text(_)) => Err("--help or --version is no setting".into()),
        Err(Refusal::Usage(line)) => Err(line),
    }
}

fn readable(path: &Path) -> Result<(), Error> {
    let wrong = |why| Error::Usage(format!("{}: {}", path.display(), reason(&why)));
    File::open(path).map(drop).map_err(wrong)
}

/// Zeros, written, so that they are in the page cache and no holes.
fn make_data(path: &PathBuf, size: &str) -> Result<(), Error> {
    let bytes = crate::config::size_bytes("measure.data", size)
        .map_err(|why| Error::Usage(why.to_string()))?;
    let make = || {
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        let mut file = File::create(path)?;
        io::copy(&mut io::Read::take(io::repeat(0), bytes), &mut file)?;
        file.sync_all()
    };
    make().map_err(|why| Error::Failed(format!("{}: {}", path.display(), reason(&why))))
}
