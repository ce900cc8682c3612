//! Paths, processes and packages: what every command needs.

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// An error is one line for the person at the terminal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

/// The result of every step.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what was being done when something failed.
pub trait Context<T> {
    /// Turns the error into `what: error`.
    fn context(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl Display) -> Result<T> {
        self.map_err(|error| Error(format!("{what}: {error}")))
    }
}

/// Returns an [`Error`] from the enclosing function, with a formatted message.
macro_rules! bail {
    ($($message:tt)*) => { return Err($crate::util::Error(format!($($message)*))) };
}
pub(crate) use bail;

/// Says what is being done, one line a step.
pub fn step(what: impl Display) {
    eprintln!("  {what}");
}

/// The root of the workspace: where `cargo run` found this package, else where it was built.
pub fn workspace_root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map_or(package.clone(), Path::to_path_buf)
}

/// Cargo's target directory.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace_root().join("target"), PathBuf::from)
}

/// A cargo command at the workspace's root: the cargo that runs this program.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.current_dir(workspace_root()).args(arguments).stdin(Stdio::null());
    command
}

/// Runs a cargo command that builds the target `name`, and returns where its program is.
///
/// # Errors
/// It does not build.
pub fn build(arguments: &[&str], name: &str) -> Result<PathBuf> {
    let output = cargo(arguments)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cargo")?;
    if !output.status.success() {
        bail!("{name} does not build");
    }
    executable(&String::from_utf8_lossy(&output.stdout), name)
        .ok_or(Error(format!("cargo built no {name}")))
}

/// Where a target's program is, by cargo's messages, one a line.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    executables(messages).filter(|(target, _)| target == name).last().map(|(_, program)| program)
}

/// The targets that are programs, and where these are, by cargo's messages, one a line.
pub fn executables(messages: &str) -> impl Iterator<Item = (String, PathBuf)> {
    messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let name = message.pointer("/target/name")?.as_str()?;
        Some((name.to_owned(), message.get("executable")?.as_str()?.into()))
    })
}

/// Where `cargo xtask guest` puts kernels and images.
pub fn guest_dir() -> PathBuf {
    target_dir().join("guest")
}

/// True when running with the rights of root.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Finds a program in `PATH` or in the directories of system tools, which users often lack.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// A command for a program, found as [`find_program`] does.
pub fn command(name: &str) -> Command {
    Command::new(find_program(name).as_deref().map_or(OsStr::new(name), Path::as_os_str))
}

/// Runs a command to its end, quietly.
///
/// # Errors
/// It cannot be started or fails; the message has the last line it wrote to stderr.
pub fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a command and returns what it wrote to stdout.
///
/// # Errors
/// As [`run`].
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().context(format!("cannot run {name}"))?;
    check(&name, &output)?;
    Ok(output.stdout)
}

/// Runs a command and returns what it wrote to stdout, as text.
///
/// # Errors
/// As [`run`], or the output is not UTF-8.
pub fn output_text(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    String::from_utf8(output(command)?).context(format!("output of {name}"))
}

/// Turns a failed exit status into an error with the last thing the command said.
fn check(name: &str, output: &Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    bail!("{name} failed ({}): {}", output.status, last.trim())
}

/// Makes sure that programs exist: `(program, Debian package)`. As root, installs what is missing.
///
/// # Errors
/// Something is missing and this is not root (the message says what to install), or apt fails.
pub fn ensure_programs(wanted: &[(&str, &str)]) -> Result<()> {
    let mut missing: Vec<&str> = wanted
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|&(_, package)| package)
        .collect();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    install_packages(&missing)
}

/// Installs Debian packages on this machine.
///
/// # Errors
/// This is not root (the message says what to install), or apt fails.
pub fn install_packages(packages: &[&str]) -> Result<()> {
    if !is_root() {
        bail!("missing packages; install them with: sudo apt-get install {}", packages.join(" "));
    }
    if find_program("apt-get").is_none() {
        bail!("missing {}, and there is no apt-get to install it with", packages.join(" "));
    }
    step(format_args!("installing {}", packages.join(" ")));
    let install = || {
        run(command("apt-get")
            .args(["-qq", "-y", "--no-install-recommends", "install"])
            .args(packages)
            .env("DEBIAN_FRONTEND", "noninteractive"))
    };
    // Lists may be absent or older than the archive: fetch them and try once more.
    install().or_else(|_| apt_update().and_then(|()| install()))
}

/// Fetches apt's package lists.
///
/// # Errors
/// This is not root, or apt fails.
pub fn apt_update() -> Result<()> {
    if !is_root() {
        bail!("apt's package lists are missing or old; run: sudo apt-get update");
    }
    step("fetching package lists (apt-get update)");
    run(command("apt-get").args(["-qq", "update"]))
}

/// Makes an empty directory, in place of whatever was there.
///
/// # Errors
/// The old one cannot be removed or the new one not made.
pub fn recreate_dir(dir: &Path) -> Result<()> {
    remove_dir(dir)?;
    std::fs::create_dir_all(dir).context(dir.display())
}

/// Removes a directory and what is in it, if it is there.
///
/// # Errors
/// Something in it cannot be removed.
pub fn remove_dir(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            bail!("cannot remove {}: {error}", dir.display())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_cargos_messages() {
        let message = r#"{"reason":"compiler-artifact","target":{"name":"stock"},"executable":"/target/debug/deps/stock-1"}"#;
        assert_eq!(executable(message, "stock"), Some("/target/debug/deps/stock-1".into()));
        let library =
            r#"{"reason":"compiler-artifact","target":{"name":"stock"},"executable":null}"#;
        assert_eq!(executable(library, "stock"), None);
        let other = r#"{"target":{"name":"tiny"},"executable":"/target/debug/deps/tiny-1"}"#;
        assert_eq!(executable(other, "stock"), None);
        let bench = "not JSON\n\
            {\"target\":{\"name\":\"vmm\"},\"executable\":null}\n\
            {\"target\":{\"name\":\"wake\"},\"executable\":\"/t/wake-1\"}\n";
        assert_eq!(executable(bench, "wake"), Some("/t/wake-1".into()));
        assert_eq!(executable("", "wake"), None);
    }
}
