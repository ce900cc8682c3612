//! One run of `pollux run`: its options, its files, its end.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use tempfile::TempDir;

/// How long a guest may take before it counts as stuck. Generous: an emulated CPU is slow.
const LIMIT: Duration = Duration::from_secs(660);
/// How long `pollux` may take to stop when it is told to.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// A guest about to run.
pub struct Guest {
    command: Command,
    dir: TempDir,
    limit: Duration,
    stats: bool,
}

/// How a run ended and what it left.
#[derive(Debug)]
pub struct Outcome {
    /// The exit status of `pollux`; 128 and more: a signal killed it.
    pub status: i32,
    /// The guest's console.
    pub console: String,
    /// What the guest wrote to the results channel.
    pub results: String,
    /// What `pollux` wrote to stderr.
    pub stderr: String,
    /// The document of `--stats`, or null if there is none.
    pub stats: Json,
    /// The guest did not end in time and was stopped.
    pub stuck: bool,
}

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_path_buf)
}

/// The program under test: `POLLUX` in the environment, or the newest of the workspace's builds.
pub fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("POLLUX") {
        return path.into();
    }
    let modified = |path: &PathBuf| fs::metadata(path).and_then(|m| m.modified()).ok();
    ["debug", "release"]
        .map(|profile| workspace().join("target").join(profile).join("pollux"))
        .into_iter()
        .filter(|path| path.exists())
        .max_by_key(modified)
        .expect("no pollux is built: run `cargo build -p vmm` first")
}

/// A file that `cargo xtask guest` makes.
pub fn guest_file(name: &str) -> PathBuf {
    let path = workspace().join("target/guest").join(name);
    assert!(path.exists(), "{} is missing: run `cargo xtask guest`", path.display());
    path
}

/// A directory for this test's files, on a real file system where one is offered.
pub fn scratch() -> TempDir {
    let base = std::env::var_os("POLLUX_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
    tempfile::Builder::new().prefix("pollux-test").tempdir_in(base).expect("a scratch directory")
}

impl Guest {
    /// A guest that boots `kernel`. Console, results and statistics go to files of this run.
    pub fn new(kernel: &Path) -> Self {
        let dir = scratch();
        let mut command = Command::new(program());
        command.arg("run").arg("--kernel").arg(kernel);
        command.arg("--console").arg(format!("file={}", dir.path().join("console").display()));
        command.arg("--results").arg(dir.path().join("results"));
        Self { command, dir, limit: LIMIT, stats: true }
    }

    /// Leaves `--stats` out.
    #[must_use]
    pub fn without_stats(mut self) -> Self {
        self.stats = false;
        self
    }

    /// Adds options.
    #[must_use]
    pub fn args<S: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets a variable of `pollux`'s environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Changes how long the guest may take.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// This run's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts `pollux`; the caller sees to its end.
    pub fn spawn(mut self) -> Running {
        if self.stats {
            self.command.arg("--stats").arg(self.dir.path().join("stats"));
        }
        let child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.dir.path().join("stderr")).expect("stderr's file"))
            .spawn()
            .expect("pollux starts");
        Running { child, dir: self.dir, limit: self.limit }
    }

    /// Runs the guest to its end. A guest that takes too long is told to stop, so that the
    /// statistics say where it was.
    pub fn run(self) -> Outcome {
        self.spawn().wait()
    }
}

/// A guest that runs.
pub struct Running {
    child: Child,
    dir: TempDir,
    limit: Duration,
}

impl Drop for Running {
    /// A test that failed leaves no guest behind; one that has been waited for is gone.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// The console so far.
    pub fn console(&self) -> String {
        read(&self.dir.path().join("console"))
    }

    /// The results so far.
    pub fn results(&self) -> String {
        read(&self.dir.path().join("results"))
    }

    /// The last document of `--stats`, or null if there is none yet.
    pub fn stats(&self) -> Json {
        serde_json::from_str(&read(&self.dir.path().join("stats"))).unwrap_or(Json::Null)
    }

    /// The process of `pollux`.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends `signal` to `pollux`.
    pub fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved; the child is not yet waited for, so the pid is its own.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }

    /// Waits until `seen` holds, at most as long as the guest may take.
    pub fn wait_for(&mut self, what: &str, mut seen: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        while !seen(self) {
            assert!(
                start.elapsed() < self.limit,
                "never seen: {what}; console: {}",
                self.console()
            );
            let ended = self.child.try_wait().expect("waiting works");
            assert!(
                ended.is_none() || seen(self),
                "pollux ended before {what}: {}",
                read(&self.dir.path().join("stderr"))
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end.
    pub fn wait(mut self) -> Outcome {
        let stuck = !self.ended_within(self.limit);
        if stuck {
            self.signal(libc::SIGTERM);
            if !self.ended_within(STOP_LIMIT) {
                self.signal(libc::SIGKILL);
            }
        }
        let status = self.child.wait().expect("waiting works");
        let file = |name: &str| read(&self.dir.path().join(name));
        Outcome {
            status: status.code().or(status.signal().map(|s| 128 + s)).unwrap_or(-1),
            console: file("console"),
            results: file("results"),
            stderr: file("stderr"),
            stats: serde_json::from_str(&file("stats")).unwrap_or(Json::Null),
            stuck,
        }
    }

    fn ended_within(&mut self, limit: Duration) -> bool {
        let start = Instant::now();
        while self.child.try_wait().expect("waiting works").is_none() {
            if start.elapsed() > limit {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Outcome {
    /// Checks that the guest ended by itself with `status`.
    ///
    /// # Panics
    /// If it did not, with all there is to see.
    #[track_caller]
    pub fn expect(&self, status: i32) -> &Self {
        assert!(
            !self.stuck && self.status == status,
            "exit status {} instead of {status}{}\nstderr: {}\nstats: {:#}\nresults: {}\nconsole: {}",
            self.status,
            if self.stuck { " (stuck, stopped)" } else { "" },
            self.stderr,
            self.stats,
            self.results,
            self.console
        );
        self
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
