//! Files that options name: whether they are there and can be used as they will be.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::ConfigError;
use super::error::reason;

/// What a file is, whatever name it goes by: its device and inode, or the device it stands for.
pub(super) type Identity = (u64, u64);

/// The identity of what is at `path`, if there is anything.
pub(super) fn identity(path: &Path) -> Option<Identity> {
    let metadata = fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        // Two device nodes may stand for one device. No file system has this device number.
        Some((u64::MAX, metadata.rdev()))
    } else {
        Some((metadata.dev(), metadata.ino()))
    }
}

/// Checks a file that will be read from its beginning to its end.
pub(super) fn check_input(option: &'static str, path: &Path) -> Result<(), ConfigError> {
    let error = |problem: String| ConfigError::new(option, path.display(), problem);
    let metadata = fs::metadata(path).map_err(|e| error(reason(&e)))?;
    if metadata.is_dir() {
        return Err(error("is a directory".to_owned()));
    }
    if !metadata.is_file() {
        return Err(error("not a regular file".to_owned()));
    }
    File::open(path).map(drop).map_err(|e| error(format!("cannot be read: {}", reason(&e))))
}

/// Checks a file that will be written: it is there and can be, or its directory lets it be made.
/// Makes nothing.
pub(super) fn check_output(option: &'static str, path: &Path) -> Result<(), ConfigError> {
    let error = |problem: String| ConfigError::new(option, path.display(), problem);
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(error("is a directory".to_owned())),
        Ok(metadata) if metadata.file_type().is_block_device() => {
            Err(error("is a block device".to_owned()).hint("name a file"))
        }
        Ok(_) => access(path, libc::W_OK)
            .map_err(|e| error(format!("cannot be written: {}", reason(&e)))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            if path.file_name().is_none() {
                return Err(error("not the name of a file".to_owned()));
            }
            let directory = directory_of(path);
            access(&directory, libc::W_OK | libc::X_OK).map_err(|e| {
                error(format!("cannot be made in {}: {}", directory.display(), reason(&e)))
            })
        }
        Err(e) => Err(error(reason(&e))),
    }
}

/// Refuses an output that is the same file as an input or as another output. Each comes with the
/// option that names it.
pub(super) fn check_overlap(
    inputs: &[(&'static str, &Path)],
    outputs: &[(&'static str, &Path)],
) -> Result<(), ConfigError> {
    let mut taken: Vec<_> =
        inputs.iter().filter_map(|(option, path)| Some((*option, place(path)?))).collect();
    for (option, path) in outputs {
        let Some(place) = place(path) else { continue };
        if let Some((other, _)) = taken.iter().find(|(_, taken)| *taken == place) {
            return Err(ConfigError::new(
                option,
                path.display(),
                format!("is the file of {other} as well"),
            )
            .hint("give each a file of its own"));
        }
        taken.push((option, place));
    }
    Ok(())
}

/// Where a file's data is: the file itself if it is there, else its directory and name. `None` for
/// what keeps nothing, such as a terminal or `/dev/null`, and can be shared.
fn place(path: &Path) -> Option<(Identity, OsString)> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Some((identity(path)?, OsString::new())),
        Ok(_) => None,
        Err(_) => Some((identity(&directory_of(path))?, path.file_name()?.to_owned())),
    }
}

/// The directory that a file is in.
pub fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Asks the kernel, which knows of read-only file systems and immutable files as well.
fn access(path: &Path, mode: libc::c_int) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a C string that outlives the call, which keeps no pointer to it.
    let status = unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), mode, libc::AT_EACCESS) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(result: Result<(), ConfigError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn an_input_is_a_regular_file_that_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("vmlinuz");
        let missing = message(check_input("--kernel", &file));
        assert_eq!(missing, format!("--kernel {}: no such file or directory", file.display()));
        fs::write(&file, "x").unwrap();
        assert!(check_input("--kernel", &file).is_ok());
        assert!(message(check_input("--kernel", directory.path())).contains("is a directory"));
        assert!(message(check_input("--kernel", &file.join("x"))).contains("not a directory"));
        assert!(message(check_input("--kernel", Path::new("/dev/null"))).contains("not a regular"));
        assert!(check_input("--kernel", Path::new("")).is_err());
    }

    #[test]
    fn an_output_can_be_made_and_is_not_made_yet() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("out.json");
        assert!(check_output("--stats", &file).is_ok());
        assert!(!file.exists());
        fs::write(&file, "old").unwrap();
        assert!(check_output("--stats", &file).is_ok());
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert!(check_output("--stats", Path::new("/dev/null")).is_ok());
        assert!(check_output("--stats", Path::new("plain-name-in-this-directory")).is_ok());
        for path in [directory.path().join("no/out"), file.join("out"), directory.path().into()] {
            assert!(check_output("--stats", &path).is_err(), "{}", path.display());
        }
        for path in ["", "..", "no/.."] {
            assert!(check_output("--stats", Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn no_output_is_another_output_or_an_input() {
        let directory = tempfile::tempdir().unwrap();
        let (disk, out) = (directory.path().join("disk"), directory.path().join("out"));
        fs::write(&disk, [0; 512]).unwrap();
        let input = [("--disk", disk.as_path())];
        let error = message(check_overlap(&input, &[("--stats", &disk)]));
        assert!(error.contains("is the file of --disk as well"), "{error}");
        let roundabout = directory.path().join("./out");
        let error = check_overlap(&input, &[("--stats", &out), ("--results", &roundabout)]);
        assert!(message(error).contains("--stats as well"));
        assert!(check_overlap(&input, &[("--stats", &out)]).is_ok());
        let null = Path::new("/dev/null");
        assert!(check_overlap(&input, &[("--stats", null), ("--results", null)]).is_ok());
    }
}
