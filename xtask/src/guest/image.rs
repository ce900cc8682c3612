//! The initramfs and the root file system's image.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::cpio::Archive;
use crate::util::{self, Context, Error, Result, bail};

/// Identity of the file system, and the seed of its directory hashes: fixed, so that equal trees
/// make equal images.
const ROOT_UUID: &str = "706f6c6c-7578-4000-8000-726f6f746673";
/// The block size of the file system, in bytes.
const BLOCK_BYTES: u64 = 4096;
/// Space beyond files and directories, for tables and for what a guest may add: 8 MiB.
const SPARE_BLOCKS: u64 = 2048;

/// Makes the initramfs of a kernel release from `packages`, laid out by
/// [`super::packages::unpack`], and the scripts in `resources`.
///
/// It is not compressed: unpacking it would cost an emulated or busy CPU more than reading it.
///
/// # Errors
/// A file cannot be read.
pub fn initramfs(packages: &Path, resources: &Path, release: &str) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "etc", "modules", "pollux", "proc", "root", "run", "sys", "tmp"]
    {
        archive.directory(directory)?;
    }
    // There before devtmpfs is mounted: the first line of output needs them.
    archive.character_device("dev/console", 5, 1)?;
    archive.character_device("dev/null", 1, 3)?;
    archive.character_device("dev/ttyS1", 4, 65)?;
    archive.file("bin/busybox", 0o755, &read(&packages.join("root/usr/bin/busybox"))?)?;
    archive.symlink("bin/sh", "busybox")?;
    archive.file("init", 0o755, &read(&resources.join("initramfs/init"))?)?;
    for script in sorted_files(&resources.join("pollux"))? {
        archive.file(&format!("pollux/{}", name(&script)), 0o755, &read(&script)?)?;
    }
    for file in sorted_files(&packages.join(format!("modules-{release}")))? {
        archive.file(&format!("modules/{}", name(&file)), 0o644, &read(&file)?)?;
    }
    archive.finish()
}

/// Makes the image of the root file system: the tree in `packages` with the scripts and jobs of
/// `resources` in `/pollux`. Everything in it belongs to root, whoever makes it.
///
/// # Errors
/// A file cannot be read, or a program of e2fsprogs fails.
pub fn root_file_system(packages: &Path, resources: &Path, image: &Path) -> Result<()> {
    let tree = packages.join("root");
    let own = tree.join("pollux");
    util::recreate_dir(&own)?;
    copy(&resources.join("pollux"), &own, 0o755)?;
    fs::create_dir(own.join("fio")).context("fio")?;
    copy(&resources.join("fio"), &own.join("fio"), 0o644)?;

    let paths = walk(&tree)?;
    let mut blocks = SPARE_BLOCKS;
    for path in &paths {
        let metadata = fs::symlink_metadata(path).context(path.display())?;
        blocks += metadata.len().div_ceil(BLOCK_BYTES) + 1;
    }
    // No journal: the root is mounted read-only, or under an overlay.
    util::run(
        util::command("mke2fs")
            .env("E2FSPROGS_FAKE_TIME", "1")
            .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-b"])
            .arg(BLOCK_BYTES.to_string())
            .args(["-L", "pollux", "-U", ROOT_UUID, "-E"])
            .arg(format!("root_owner=0:0,hash_seed={ROOT_UUID}"))
            .args(["-N", &(paths.len() + 1024).to_string(), "-d"])
            .args([&tree, image])
            .arg(blocks.to_string()),
    )?;
    if util::is_root() { Ok(()) } else { give_to_root(&tree, &paths, image) }
}

/// Sets the owner of every file in the image to root: mke2fs copies the owners it finds.
fn give_to_root(tree: &Path, paths: &[PathBuf], image: &Path) -> Result<()> {
    let mut requests = String::new();
    for path in paths {
        let inside = path.strip_prefix(tree).context(path.display())?.display();
        for field in ["uid", "gid"] {
            requests.push_str(&format!("set_inode_field \"/{inside}\" {field} 0\n"));
        }
    }
    let mut debugfs = util::command("debugfs")
        .args(["-w", "-f", "-"])
        .arg(image)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run debugfs")?;
    let mut stdin = debugfs.stdin.take().ok_or(Error("debugfs has no stdin".into()))?;
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(requests.as_bytes()).ok());
        debugfs.wait_with_output()
    })
    .context("debugfs")?;
    // It succeeds even if a request failed; beside its version it then says why.
    let messages = String::from_utf8_lossy(&output.stderr);
    match messages.lines().find(|line| !line.starts_with("debugfs ")) {
        None if output.status.success() => Ok(()),
        message => bail!("debugfs cannot set owners: {}", message.unwrap_or("no message")),
    }
}

/// Everything below a directory, sorted.
fn walk(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).context(dir.display())? {
            let entry = entry.context(dir.display())?;
            if entry.file_type().context(dir.display())?.is_dir() {
                pending.push(entry.path());
            }
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// The files of a directory, sorted.
pub fn sorted_files(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(walk(dir)?.into_iter().filter(|path| path.is_file()).collect())
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    for file in sorted_files(from)? {
        let target = to.join(name(&file));
        fs::copy(&file, &target).context(target.display())?;
        fs::set_permissions(&target, fs::Permissions::from_mode(mode)).context(target.display())?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).context(path.display())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
