//! A writer of cpio archives in the `newc` format, the one the kernel unpacks as an initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! Everything belongs to root and has the time 0, so equal input gives equal bytes. Device nodes
//! need no privilege: they are only headers.

use crate::util::{Context, Result};

const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const REGULAR_FILE: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// An archive being written.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a directory. Parents come first.
    pub fn directory(&mut self, path: &str) -> Result<()> {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a regular file with permission bits `mode`.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.entry(path, REGULAR_FILE | mode, (0, 0), data)
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> Result<()> {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) -> Result<()> {
        let path = path.trim_start_matches('/');
        let size = u32::try_from(data.len()).context(format!("{path}: too large for cpio"))?;
        self.entries += 1;
        let links = if mode & DIRECTORY != 0 { 2 } else { 1 };
        let fields = [
            self.entries, // inode
            mode,
            0, // user
            0, // group
            links,
            0, // time of modification
            size,
            0, // major and minor number of the file system's device
            0,
            device.0,
            device.1,
            path.len() as u32 + 1,
            0, // checksum, not used by this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    /// Headers and data start at multiples of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_a_name_and_data_each_padded_to_four_bytes() {
        let mut archive = Archive::default();
        archive.file("/a", 0o644, b"hello").unwrap();
        let header = "070701000000010000\
                      81A40000000000000000000000010000000000000005\
                      000000000000000000000000000000000000000200000000";
        let mut expected = header.as_bytes().to_vec();
        expected.extend_from_slice(b"a\0hello\0\0\0");
        assert_eq!(archive.bytes, expected);
    }

    #[test]
    fn a_device_node_carries_its_numbers_in_the_header() {
        let mut archive = Archive::default();
        archive.character_device("dev/ttyS1", 4, 65).unwrap();
        assert_eq!(&archive.bytes[14..22], b"00002180");
        assert_eq!(&archive.bytes[78..94], b"0000000400000041");
    }

    #[test]
    fn an_archive_ends_with_the_trailer() {
        let bytes = Archive::default().finish().unwrap();
        assert_eq!(&bytes[110..], b"TRAILER!!!\0\0\0\0");
        assert_eq!(bytes.len() % 4, 0);
    }
}
