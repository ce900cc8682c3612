//! Parameters of the host's module `kvm`, set while a VM runs and put back afterwards: when the run
//! ends, also by a signal (which arrives as an event, see [`crate::events`]), and on a panic. They
//! hold for all VMs of the host, so this happens only with `--allow-host-tuning`.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::config::{ConfigError, HostParameter, reason};

/// Where the module has its parameters.
pub const PARAMETERS: &str = "/sys/module/kvm/parameters";

/// What is changed now, for the panic hook.
static IN_FORCE: Mutex<Option<Changes>> = Mutex::new(None);

/// Keeps the host's parameters changed while it lives. There is one at a time.
pub struct HostTuning {
    directory: PathBuf,
}

impl HostTuning {
    /// Sets `parameters` in `directory`, which is [`PARAMETERS`] but in tests. Call it once signals
    /// have become events.
    ///
    /// # Errors
    /// A parameter is not there or not ours to write, or another Pollux has changed some; nothing
    /// is changed then.
    pub fn new(directory: &Path, parameters: &[HostParameter]) -> Result<Self, ConfigError> {
        let tuning = Self { directory: directory.to_owned() };
        tuning.set(parameters)?;
        Ok(tuning)
    }

    /// Sets more parameters, or the same to other values.
    ///
    /// # Errors
    /// As [`new`](Self::new), but what was set before an error stays so.
    pub fn set(&self, parameters: &[HostParameter]) -> Result<(), ConfigError> {
        if parameters.is_empty() {
            return Ok(());
        }
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let next = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                put_back();
                next(info);
            }));
        });
        let mut changes = in_force().take().unwrap_or_default();
        let done = changes.make(&self.directory, parameters);
        // Without any, the lock goes.
        *in_force() = (!changes.changed.is_empty()).then_some(changes);
        done
    }
}

impl Drop for HostTuning {
    fn drop(&mut self) {
        put_back();
    }
}

/// The second time does nothing.
fn put_back() {
    drop(in_force().take());
}

fn in_force() -> MutexGuard<'static, Option<Changes>> {
    IN_FORCE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parameters that are changed, put back on drop.
#[derive(Default)]
struct Changes {
    changed: Vec<Change>,
    /// One Pollux at a time: a second one would take the first one's values for the host's own.
    /// Released when the file is closed, whatever becomes of the process.
    lock: Option<File>,
}

struct Change {
    path: PathBuf,
    before: String,
    ours: String,
}

impl Changes {
    fn make(&mut self, directory: &Path, parameters: &[HostParameter]) -> Result<(), ConfigError> {
        for HostParameter { option, name, value } in parameters {
            let path = directory.join(name);
            let error = |error: io::Error| {
                let problem = format!("cannot set {}: {}", path.display(), reason(&error));
                let error = ConfigError::new(option, value, problem);
                error.hint("setting parameters of the host's module kvm needs root")
            };
            if self.lock.is_none() {
                let lock = lock(directory).map_err(|why| match why {
                    TryLockError::WouldBlock => {
                        let problem = "another Pollux has changed the host's parameters";
                        ConfigError::new(option, value, problem).hint("wait for its end")
                    }
                    TryLockError::Error(why) => error(why),
                })?;
                self.lock = Some(lock);
            }
            let now = fs::read_to_string(&path).map_err(error)?.trim().to_owned();
            let ours = value.to_string();
            write(&path, &ours).map_err(error)?;
            match self.changed.iter_mut().find(|change| change.path == path) {
                Some(change) if change.ours == now => change.ours = ours,
                // Somebody else's value, which is to come back in the place of the first one.
                Some(change) => (change.before, change.ours) = (now, ours),
                None => self.changed.push(Change { path, before: now, ours }),
            }
        }
        Ok(())
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        for Change { path, before, ours } in self.changed.iter().rev() {
            // What somebody else has set meanwhile is theirs.
            let now = fs::read_to_string(path).unwrap_or_default();
            if now.trim() == ours
                && let Err(error) = write(path, before)
            {
                devices::tell(format_args!(
                    "cannot put {} back to {before}: {}",
                    path.display(),
                    reason(&error)
                ));
            }
        }
    }
}

fn lock(directory: &Path) -> Result<File, TryLockError> {
    let file = File::open(directory).map_err(TryLockError::Error)?;
    file.try_lock()?;
    Ok(file)
}

/// Writes an existing file. One write: the kernel takes each for a whole value.
fn write(path: &Path, value: &str) -> io::Result<()> {
    use io::Write;
    File::options().write(true).truncate(true).open(path)?.write_all(value.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROW: HostParameter =
        HostParameter { option: "--halt-poll-ns-grow", name: "halt_poll_ns_grow", value: 4 };
    const SHRINK: HostParameter =
        HostParameter { option: "--halt-poll-ns-shrink", name: "halt_poll_ns_shrink", value: 7 };

    /// A directory like the module's, with the values of `get`: grow 2, shrink 0.
    fn module() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(GROW.name), "2\n").unwrap();
        fs::write(directory.path().join(SHRINK.name), "0\n").unwrap();
        directory
    }

    fn get(directory: &tempfile::TempDir) -> (String, String) {
        let value = |name| fs::read_to_string(directory.path().join(name)).unwrap();
        (value(GROW.name).trim().to_owned(), value(SHRINK.name).trim().to_owned())
    }

    #[track_caller]
    fn expect(directory: &tempfile::TempDir, grow: &str, shrink: &str) {
        assert_eq!(get(directory), (grow.to_owned(), shrink.to_owned()));
    }

    fn make(module: &tempfile::TempDir, parameters: &[HostParameter]) -> Result<Changes, String> {
        let mut changes = Changes::default();
        let done = changes.make(module.path(), parameters);
        done.map(|()| changes).map_err(|error| error.to_string())
    }

    #[test]
    fn parameters_are_set_and_put_back() {
        let module = module();
        let changes = make(&module, &[GROW, SHRINK]).unwrap();
        expect(&module, "4", "7");
        drop(changes);
        expect(&module, "2", "0");
    }

    #[test]
    fn what_was_set_before_an_error_is_put_back() {
        let module = module();
        let missing = HostParameter { name: "halt_poll_ns_none", ..SHRINK };
        let error = make(&module, &[GROW, missing]).err().unwrap();
        assert!(error.starts_with("--halt-poll-ns-shrink 7: cannot set "), "{error}");
        assert!(error.contains("halt_poll_ns_none") && error.contains("root"), "{error}");
        expect(&module, "2", "0");
        assert!(!module.path().join("halt_poll_ns_none").exists(), "nothing is made");
    }

    #[test]
    fn one_pollux_at_a_time() {
        let module = module();
        let first = make(&module, &[GROW]).unwrap();
        let error = make(&module, &[SHRINK]).err().unwrap();
        assert!(error.contains("another Pollux"), "{error}");
        expect(&module, "4", "0");
        drop(first);
        drop(make(&module, &[SHRINK]).unwrap());
        expect(&module, "2", "0");
    }

    #[test]
    fn what_somebody_else_set_meanwhile_stays() {
        let module = module();
        let changes = make(&module, &[GROW, SHRINK]).unwrap();
        fs::write(module.path().join(GROW.name), "3\n").unwrap();
        drop(changes);
        expect(&module, "3", "0");
    }

    #[test]
    fn what_is_set_again_goes_back_to_what_it_was_at_first() {
        let module = module();
        let mut changes = make(&module, &[GROW]).unwrap();
        changes.make(module.path(), &[HostParameter { value: 9, ..GROW }, SHRINK]).unwrap();
        expect(&module, "9", "7");
        drop(changes);
        expect(&module, "2", "0");
    }

    #[test]
    fn what_somebody_else_set_between_two_changes_comes_back() {
        let module = module();
        let mut changes = make(&module, &[GROW]).unwrap();
        fs::write(module.path().join(GROW.name), "3\n").unwrap();
        changes.make(module.path(), &[HostParameter { value: 9, ..GROW }]).unwrap();
        drop(changes);
        expect(&module, "3", "0");
    }

    #[test]
    fn a_panic_puts_them_back_before_anything_else() {
        let module = module();
        let tuning = HostTuning::new(module.path(), &[GROW]).unwrap();
        expect(&module, "4", "0");
        std::thread::spawn(|| panic!("a bug, made for this test")).join().unwrap_err();
        expect(&module, "2", "0");
        drop(tuning);
        expect(&module, "2", "0");
    }
}
