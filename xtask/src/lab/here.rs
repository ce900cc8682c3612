//! Runs a command on this machine, as the emulated machine would.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Attempt, Options, Outcome, SCRATCH_VARIABLE, Sink, Stream, process};
use crate::util::{self, Context, Error, Result};

const TICK: Duration = Duration::from_millis(50);

/// True if this machine's KVM can run a stock kernel: `pollux doctor` says so.
pub fn can_run_stock_kernels() -> bool {
    let built = ["release", "debug"]
        .map(|profile| util::target_dir().join(profile).join("pollux"))
        .into_iter()
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .max();
    let Some((_, pollux)) = built else { return false };
    Command::new(pollux)
        .arg("doctor")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a command once.
///
/// # Errors
/// It cannot be started.
pub fn attempt(options: &Options, command: &[OsString], sink: &mut Sink) -> Result<Attempt> {
    let (program, arguments) = command.split_first().ok_or(Error("no command".into()))?;
    let scratch = Scratch::create()?;
    let mut child = Command::new(program);
    child
        .args(arguments)
        .env(SCRATCH_VARIABLE, &scratch.0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    process::die_with_parent(&mut child);
    let started = Instant::now();
    let mut child = child.spawn().context(program.display())?;
    let (sender, chunks) = mpsc::channel();
    if let Some(pipe) = child.stdout.take() {
        pass_on(pipe, Stream::Out, sender.clone());
    }
    if let Some(pipe) = child.stderr.take() {
        pass_on(pipe, Stream::Err, sender);
    }
    // Ends when both pipes are closed; a child that closes them early is waited for below.
    let mut cut_short = None;
    let mut open = true;
    let status = loop {
        if open {
            match chunks.recv_timeout(TICK) {
                Ok((stream, chunk)) => sink(stream, &chunk),
                Err(RecvTimeoutError::Disconnected) => open = false,
                Err(RecvTimeoutError::Timeout) => {}
            }
        } else {
            thread::sleep(TICK);
        }
        if let Some(status) = child.try_wait().context("the command")? {
            break status;
        }
        let timed_out = started.elapsed() > options.timeout;
        if let Some(outcome) = process::signalled()
            .map(Outcome::Interrupted)
            .or_else(|| timed_out.then_some(Outcome::TimedOut))
        {
            cut_short = Some(outcome);
            process::kill_group(child.id());
            break child.wait().context("the command")?;
        }
    };
    // What is on its way; whoever else holds the pipes is not waited for.
    while let Ok((stream, chunk)) = chunks.recv_timeout(TICK) {
        sink(stream, &chunk);
    }
    let outcome = cut_short.unwrap_or_else(|| Outcome::Exited(process::exit_status(status)));
    Ok(Attempt { outcome, boot_time: None, run_time: started.elapsed() })
}

/// A directory for a command's files, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn create() -> Result<Scratch> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("scratch-{}-{number}", std::process::id());
        let path = util::target_dir().join("lab").join(name);
        util::recreate_dir(&path)?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn pass_on(
    mut pipe: impl Read + Send + 'static,
    stream: Stream,
    sender: mpsc::Sender<(Stream, Vec<u8>)>,
) {
    thread::spawn(move || {
        let mut buffer = [0; 16 << 10];
        while let Ok(count @ 1..) = pipe.read(&mut buffer) {
            if sender.send((stream, buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    });
}
