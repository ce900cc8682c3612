//! The backing file or block device: opening and locking it, what it is like, and the system calls
//! that change its allocation.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::config::{BlkConfig, EngineKind, SECTOR_BYTES};

/// Why a disk cannot be used: one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// An option of the disk is wrong.
    #[error("disk {}: {problem}", path.display())]
    Option {
        /// The disk.
        path: PathBuf,
        /// Which option, its value, and what would be right.
        problem: String,
    },
    /// The file cannot be used as it is.
    #[error("disk {}: {problem}", path.display())]
    Unusable {
        /// The disk.
        path: PathBuf,
        /// What is the matter and what would be right.
        problem: &'static str,
    },
    /// The operating system refused.
    #[error("disk {}: {what}: {error}", path.display())]
    Os {
        /// The disk.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
}

/// What `O_DIRECT` asks of a transfer, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectAlignment {
    /// Of each buffer's address.
    pub(crate) memory: u64,
    /// Of the offset in the file and of each buffer's length.
    pub(crate) offset: u64,
}

/// A backing file, open and locked. Shared by the workers of a device.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    /// Holds the lock and does nothing else. An io_uring keeps the files it was given open for a
    /// while after it was closed, and with them their locks: this one it never sees.
    _lock: File,
    /// Through the page cache.
    buffered: File,
    /// With `O_DIRECT`, and what that asks for.
    direct: Option<(File, DirectAlignment)>,
    kind: Kind,
    block_bytes: u32,
    physical_block_bytes: u32,
    never_waits: bool,
    can_discard: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Regular,
    BlockDevice,
}

/// Linux's `BLKGETSIZE64`, `_IOR(0x12, 114, size_t)`.
pub const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;
/// Linux's `BLKDISCARD`, `_IO(0x12, 119)`.
pub const BLKDISCARD: libc::Ioctl = 0x1277;
/// The magic number of ramfs in `statfs`, whose files never wait for a disk, as tmpfs's.
const RAMFS_MAGIC: i64 = 0x8584_58f6;

impl Disk {
    /// Opens and locks the backing file of `config`: exclusively for a writable disk, shared for a
    /// read-only one (an OFD lock, so that it ends with the process, however it ends).
    ///
    /// # Errors
    /// One line that names the file, what is the matter, and what would be right.
    pub fn open(config: &BlkConfig) -> Result<Disk, DiskError> {
        let path = config.path.as_path();
        let os = |what: &'static str, error: io::Error| DiskError::Os {
            path: path.to_path_buf(),
            what,
            error,
        };
        let unusable =
            |problem: &'static str| DiskError::Unusable { path: path.to_path_buf(), problem };

        config
            .check()
            .map_err(|problem| DiskError::Option { path: path.to_path_buf(), problem })?;
        let metadata = std::fs::metadata(path).map_err(|error| os("cannot be found", error))?;
        let kind = match metadata.file_type() {
            t if t.is_file() => Kind::Regular,
            t if t.is_block_device() => Kind::BlockDevice,
            t if t.is_dir() => {
                return Err(unusable("is a directory; give a disk image or a block device"));
            }
            _ => return Err(unusable("is neither a regular file nor a block device")),
        };
        // The superuser may write to any file, but one that nobody may write to is meant to stay.
        if !config.readonly && kind == Kind::Regular && metadata.mode() & 0o222 == 0 {
            return Err(unusable("is read-only; add readonly=on, or make it writable"));
        }
        let buffered = open(path, config.readonly, 0).map_err(|error| {
            let denied = matches!(
                error.raw_os_error(),
                Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY)
            );
            if denied && !config.readonly && open(path, true, 0).is_ok() {
                unusable("can be read but not written; add readonly=on, or make it writable")
            } else {
                os("cannot be opened", error)
            }
        })?;
        let again = |flags| {
            let file = open(path, config.readonly, flags)?;
            let (first, second) = (buffered.metadata()?, file.metadata()?);
            if (first.dev(), first.ino()) != (second.dev(), second.ino()) {
                return Err(io::Error::other("it was replaced by another file meanwhile"));
            }
            Ok(file)
        };
        let lock_file = again(0).map_err(|error| os("cannot be opened", error))?;
        lock(&lock_file, config.readonly).map_err(|error| match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) if config.readonly => {
                unusable("is being written by another process; stop that one first")
            }
            Some(libc::EAGAIN | libc::EACCES) => {
                unusable("is in use by another process; stop that one, or give each its own copy")
            }
            _ => os("cannot be locked", error),
        })?;

        let size_bytes =
            size(&buffered, kind).map_err(|error| os("its size cannot be told", error))?;
        let option = |problem: String| DiskError::Option { path: path.to_path_buf(), problem };
        let least_block_bytes = match kind {
            Kind::Regular => SECTOR_BYTES as u32,
            Kind::BlockDevice => block_ioctl(&buffered, libc::BLKSSZGET)
                .map_err(|error| os("its block size cannot be told", error))?,
        };
        let block_bytes = config.block_bytes.unwrap_or(least_block_bytes);
        if block_bytes < least_block_bytes {
            return Err(option(format!(
                "block-size={block_bytes} is less than the device's own, {least_block_bytes}"
            )));
        }
        if !size_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(option(format!(
                "its size, {size_bytes} bytes, must be a multiple of {block_bytes}"
            )));
        }
        if !config.raw && looks_like_qcow2(&buffered) {
            return Err(unusable(
                "is a qcow2 image, and Pollux takes raw ones; convert it with qemu-img convert -O raw, or \
                 give format=raw if that is a raw disk's content",
            ));
        }
        let physical_block_bytes = match kind {
            // What the file system prefers may be its own transfer size: no block is that large.
            Kind::Regular => u32::try_from(metadata.blksize().min(4096)).unwrap_or(4096),
            Kind::BlockDevice => block_ioctl(&buffered, libc::BLKPBSZGET).unwrap_or(block_bytes),
        };
        let physical_block_bytes = match physical_block_bytes {
            bytes if bytes.is_power_of_two() => bytes.clamp(block_bytes, 65536),
            _ => block_bytes,
        };
        let direct = if config.direct {
            let file = again(libc::O_DIRECT).map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL | libc::EOPNOTSUPP) => {
                    unusable("its file system has no O_DIRECT; leave out direct=on")
                }
                _ => os("cannot be opened with O_DIRECT", error),
            })?;
            let alignment = direct_alignment(&file, kind, block_bytes, metadata.blksize());
            Some((file, alignment))
        } else {
            None
        };
        let can_discard = !config.readonly
            && match kind {
                Kind::Regular => can_punch(&buffered, size_bytes),
                Kind::BlockDevice => device_discards(metadata.rdev()),
            };
        if config.engine == EngineKind::Uring {
            crate::engine::uring::check().map_err(|error| DiskError::Option {
                path: path.to_path_buf(),
                problem: format!("io_uring cannot be used here ({error}); use engine=sync"),
            })?;
        }
        Ok(Disk {
            path: path.to_path_buf(),
            never_waits: kind == Kind::Regular && in_memory(&buffered),
            _lock: lock_file,
            buffered,
            direct,
            kind,
            block_bytes,
            physical_block_bytes,
            can_discard,
        })
    }

    /// The path the disk was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size in bytes now, of whole logical blocks.
    ///
    /// # Errors
    /// What the system said.
    pub fn size_bytes(&self) -> io::Result<u64> {
        let bytes = size(&self.buffered, self.kind)?;
        Ok(bytes - bytes % u64::from(self.block_bytes.max(1)))
    }

    /// The logical block size in bytes: 512 for a file, whatever lies beneath it, if nothing else is
    /// asked for.
    pub(crate) fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// What the disk writes at once without reading first, in bytes; a power of two.
    pub(crate) fn physical_block_bytes(&self) -> u32 {
        self.physical_block_bytes
    }

    /// Whether it can give space back.
    pub(crate) fn can_discard(&self) -> bool {
        self.can_discard
    }

    /// The file lives in memory: a plain read or write never waits for a disk. (tmpfs refuses
    /// `RWF_NOWAIT`, and io_uring hands its transfers to kernel threads.)
    pub(crate) fn never_waits(&self) -> bool {
        self.never_waits
    }

    /// Whether the disk is opened with `O_DIRECT`.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// What a transfer through [`fd`](Self::fd) must be aligned to, if to anything.
    pub(crate) fn direct_alignment(&self) -> Option<DirectAlignment> {
        self.direct.as_ref().map(|(_, alignment)| *alignment)
    }

    /// For transfers, in the mode the user asked for.
    pub(crate) fn fd(&self) -> RawFd {
        self.direct.as_ref().map_or(&self.buffered, |(file, _)| file).as_raw_fd()
    }

    /// For what `O_DIRECT` cannot do: offsets between its blocks. Linux keeps both views of a file
    /// the same.
    pub(crate) fn buffered_fd(&self) -> RawFd {
        self.buffered.as_raw_fd()
    }

    /// Puts everything written so far on stable storage.
    ///
    /// # Errors
    /// What the system said; data may be lost.
    pub fn sync(&self) -> io::Result<()> {
        retry(|| {
            // SAFETY: the descriptor is ours and open.
            unsafe { libc::fdatasync(self.buffered_fd()) }
        })
    }

    /// `fallocate` with `mode` on a range of bytes.
    pub(crate) fn fallocate(&self, mode: i32, offset: u64, length: u64) -> io::Result<()> {
        let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
        let offset = i64::try_from(offset).map_err(invalid)?;
        let length = i64::try_from(length).map_err(invalid)?;
        retry(|| {
            // SAFETY: the descriptor is ours and open; the call takes no pointers.
            unsafe { libc::fallocate(self.buffered_fd(), mode, offset, length) }
        })
    }

    /// Discards a range of a block device.
    pub(crate) fn discard_device_range(&self, offset: u64, length: u64) -> io::Result<()> {
        let range = [offset, length];
        retry(|| {
            // SAFETY: BLKDISCARD reads two u64 from the pointer, which outlives the call.
            unsafe { libc::ioctl(self.buffered_fd(), BLKDISCARD, range.as_ptr()) }
        })
    }

    /// Whether the backing is a block device.
    pub(crate) fn is_block_device(&self) -> bool {
        self.kind == Kind::BlockDevice
    }
}

/// Whether it begins as images of QEMU's format do. A guest can write that to a raw disk, so this only
/// ever refuses: what a guest wrote never says how its disk is read.
fn looks_like_qcow2(file: &File) -> bool {
    let mut start = [0; 4];
    file.read_exact_at(&mut start, 0).is_ok() && start == *b"QFI\xfb"
}

fn retry(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    loop {
        if call() >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn open(path: &Path, readonly: bool, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(!readonly).custom_flags(libc::O_CLOEXEC | flags).open(path)
}

fn lock(file: &File, readonly: bool) -> io::Result<()> {
    // SAFETY: all-zero is a valid `flock`: from byte 0 to the end, and `l_pid` 0 as OFD locks ask.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = if readonly { libc::F_RDLCK } else { libc::F_WRLCK } as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open and `lock` outlives the call, which only reads it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn size(file: &File, kind: Kind) -> io::Result<u64> {
    if kind == Kind::Regular {
        return Ok(file.metadata()?.len());
    }
    let mut bytes = 0u64;
    // SAFETY: BLKGETSIZE64 writes one u64 through the pointer, which outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(bytes)
}

fn block_ioctl(file: &File, request: libc::Ioctl) -> io::Result<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: BLKSSZGET and BLKPBSZGET write one int through the pointer, which outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) } < 0 {
        return Err(io::Error::last_os_error());
    }
    match u32::try_from(value) {
        Ok(bytes) if bytes.is_power_of_two() && u64::from(bytes) >= SECTOR_BYTES => Ok(bytes),
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Asks the file for its alignment (since Linux 6.1), or guesses on the safe side.
fn direct_alignment(file: &File, kind: Kind, block: u32, io_block: u64) -> DirectAlignment {
    // SAFETY: all-zero is a valid `statx`.
    let mut told: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor, an empty path, and a buffer of the right type.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut told,
        )
    };
    let (memory, offset) =
        (u64::from(told.stx_dio_mem_align), u64::from(told.stx_dio_offset_align));
    if result == 0
        && told.stx_mask & libc::STATX_DIOALIGN != 0
        && memory.is_power_of_two()
        && offset.is_power_of_two()
    {
        return DirectAlignment { memory, offset };
    }
    let guess = match kind {
        Kind::BlockDevice => u64::from(block),
        Kind::Regular if io_block.is_power_of_two() => io_block.clamp(SECTOR_BYTES, 4096),
        Kind::Regular => 4096,
    };
    DirectAlignment { memory: guess, offset: guess }
}

/// Punches a hole behind the end of the file, which changes nothing.
fn can_punch(file: &File, size_bytes: u64) -> bool {
    let Ok(end) = i64::try_from(size_bytes) else {
        return false;
    };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the descriptor is open; the call takes no pointers.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, end, SECTOR_BYTES as i64) == 0 }
}

/// What the block layer says of a device, or of the device a partition is on.
fn device_discards(device: u64) -> bool {
    let (major, minor) = (libc::major(device), libc::minor(device));
    ["queue", "../queue"].iter().any(|queue| {
        std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{queue}/discard_max_bytes"))
            .is_ok_and(|bytes| bytes.trim() != "0")
    })
}

fn in_memory(file: &File) -> bool {
    // SAFETY: all-zero is a valid `statfs`.
    let mut told: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor and a buffer of the right type.
    let result = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut told) };
    result == 0 && matches!(told.f_type, libc::TMPFS_MAGIC | RAMFS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(bytes: u64) -> tempfile::NamedTempFile {
        // Beside the test's own program: on a disk, where the temporary directory may be a tmpfs.
        let program = std::env::current_exe().unwrap();
        let file = tempfile::NamedTempFile::new_in(program.parent().unwrap()).unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    fn config(path: &Path) -> BlkConfig {
        BlkConfig { path: path.to_path_buf(), engine: EngineKind::Sync, ..BlkConfig::default() }
    }

    fn refused(config: &BlkConfig, words: &str) {
        let error = Disk::open(config).unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} does not say {words:?}");
        assert!(error.contains(&*config.path.to_string_lossy()), "{error:?} names no file");
        assert!(!error.contains('\n'));
    }

    #[test]
    fn what_is_no_disk_is_refused_in_one_line() {
        refused(&config(Path::new("/nonexistent/disk.img")), "cannot be found");
        refused(&config(Path::new("/")), "is a directory");
        refused(&config(Path::new("/dev/null")), "neither a regular file nor a block device");
        refused(&config(image(1000).path()), "1000 bytes, must be a multiple of 512");
        let wrong = BlkConfig { queue_size: 3, ..config(image(512).path()) };
        refused(&wrong, "queue-size=3");
    }

    #[test]
    fn a_block_size_holds_for_size_and_transfers_or_is_refused() {
        let with = |path: &Path, bytes| BlkConfig { block_bytes: Some(bytes), ..config(path) };
        refused(&with(image(5 * 512).path(), 4096), "2560 bytes, must be a multiple of 4096");
        refused(&with(image(4096).path(), 1024), "block-size must be 512 or 4096");
        let file = image(2 * 4096);
        let disk = Disk::open(&with(file.path(), 4096)).unwrap();
        assert_eq!((disk.block_bytes(), disk.physical_block_bytes()), (4096, 4096));
        file.as_file().set_len(3 * 4096 + 512).unwrap();
        assert_eq!(disk.size_bytes().unwrap(), 3 * 4096, "whole blocks");
    }

    #[test]
    fn an_image_of_another_format_is_no_raw_disk_unless_that_is_said() {
        let file = image(4096);
        file.as_file().write_all_at(b"QFI\xfb", 0).unwrap();
        refused(&config(file.path()), "qemu-img convert -O raw");
        Disk::open(&BlkConfig { raw: true, ..config(file.path()) }).unwrap();
    }

    #[test]
    fn a_file_nobody_may_write_is_refused_unless_readonly() {
        let file = image(4096);
        let mut permissions = file.as_file().metadata().unwrap().permissions();
        permissions.set_readonly(true);
        file.as_file().set_permissions(permissions).unwrap();
        refused(&config(file.path()), "readonly=on");
        let disk = Disk::open(&BlkConfig { readonly: true, ..config(file.path()) }).unwrap();
        assert_eq!(disk.size_bytes().unwrap(), 4096);
        assert!(!disk.can_discard());
    }

    #[test]
    fn a_writer_excludes_everybody_and_readers_exclude_writers() {
        let file = image(4096);
        let read_write = config(file.path());
        let readonly = BlkConfig { readonly: true, ..read_write.clone() };

        let writer = Disk::open(&read_write).unwrap();
        refused(&read_write, "in use by another process");
        refused(&readonly, "is being written by another process");
        drop(writer);

        let _reader = Disk::open(&readonly).unwrap();
        let _another = Disk::open(&readonly).unwrap();
        refused(&read_write, "in use by another process");
    }

    #[test]
    fn direct_asks_for_the_alignment() {
        let file = image(4096);
        let disk = Disk::open(&BlkConfig { direct: true, ..config(file.path()) }).unwrap();
        let alignment = disk.direct_alignment().unwrap();
        assert!(alignment.memory.is_power_of_two() && alignment.offset.is_power_of_two());
        assert_ne!(disk.fd(), disk.buffered_fd());
    }

    #[test]
    fn tmpfs_never_waits_and_a_disk_may() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert!(Disk::open(&config(file.path())).unwrap().never_waits());
        assert!(!Disk::open(&config(image(512).path())).unwrap().never_waits());
    }
}
