//! The kernel's tracepoints: their numbers, and where their fields are (Linux
//! `Documentation/trace/events.rst`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where tracefs is mounted.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// A tracepoint of this kernel.
pub struct Tracepoint {
    /// Its number, which is the type of its samples.
    pub id: u16,
    format: String,
    path: PathBuf,
}

/// Where a field is in a sample's raw data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    offset: usize,
    size: usize,
}

impl Tracepoint {
    /// Looks up `name`, as in `kvm/kvm_vcpu_wakeup`.
    ///
    /// # Errors
    /// The file that cannot be read, and why.
    pub fn find(name: &str) -> Result<Self, (PathBuf, io::Error)> {
        let root = TRACEFS.iter().map(Path::new).find(|root| root.join("events").exists());
        let path = root.unwrap_or(Path::new(TRACEFS[0])).join("events").join(name);
        let read = |file: &str| {
            let path = path.join(file);
            fs::read_to_string(&path).map_err(|why| (path, why))
        };
        let id = read("id")?;
        let format = read("format")?;
        let id =
            id.trim().parse().map_err(|_| (path.join("id"), io::ErrorKind::InvalidData.into()))?;
        Ok(Self { id, format, path })
    }

    /// The field of that name.
    ///
    /// # Errors
    /// This kernel's tracepoint has none.
    pub fn field(&self, name: &str) -> Result<Field, (PathBuf, io::Error)> {
        let missing = || (self.path.join("format"), io::Error::other(format!("no field {name}")));
        self.format.lines().find_map(|line| field(line, name)).ok_or_else(missing)
    }
}

/// Reads a line as `field:unsigned int new; offset:16; size:4; signed:0;`.
fn field(line: &str, name: &str) -> Option<Field> {
    let mut parts = line.trim().split(';').map(str::trim);
    let declaration = parts.next()?.strip_prefix("field:")?;
    if declaration.split_whitespace().last()? != name {
        return None;
    }
    let offset = parts.next()?.strip_prefix("offset:")?.parse().ok()?;
    let size = parts.next()?.strip_prefix("size:")?.parse().ok()?;
    Some(Field { offset, size })
}

impl Field {
    /// The field's value, a number of at most 8 bytes; 0 if the data ends before.
    pub fn of(self, raw: &[u8]) -> u64 {
        let bytes = raw.get(self.offset..).and_then(|rest| rest.get(..self.size));
        let bytes = bytes.unwrap_or_default();
        bytes.iter().take(8).rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name_and_read_in_their_size() {
        let format = "format:\n\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
                      \tfield:bool waited;\toffset:16;\tsize:1;\tsigned:0;\n";
        let id = 7;
        let tracepoint = Tracepoint { id, format: format.into(), path: "t".into() };
        let waited = tracepoint.field("waited").unwrap();
        assert_eq!(waited, Field { offset: 16, size: 1 });
        let mut raw = [0; 20];
        raw[4..6].copy_from_slice(&[0x34, 0x12]);
        raw[16] = 1;
        assert_eq!(tracepoint.field("common_pid").unwrap().of(&raw), 0x1234);
        assert_eq!((waited.of(&raw), waited.of(&raw[..16])), (1, 0));
        let (path, why) = tracepoint.field("pid").unwrap_err();
        assert_eq!((path, why.to_string()), ("t/format".into(), "no field pid".into()));
    }
}
