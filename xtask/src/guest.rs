//! `cargo xtask guest`: stock guests from Debian packages, in `target/guest/`.
//!
//! Two stages, each redone only when what it is made from changes: *packages* are downloaded and
//! unpacked in `target/guest-packages/`; *images* are made from those and the scripts in
//! `resources/`. The second needs no network. Everything is made beside its place and moved there
//! when it is whole, under a lock, so neither a second run nor an interruption leaves half a guest.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::util::{self, Context, Result, bail, step};

pub mod cpio;
mod image;
pub mod kernel;
pub mod packages;

use packages::{Lists, Versions};

/// Options of `cargo xtask guest`.
#[derive(clap::Args)]
pub struct Args {
    /// Look for newer packages, even if the guest is complete.
    #[arg(long)]
    update: bool,
}

/// What this machine must have: program and Debian package.
const HOST_PROGRAMS: &[(&str, &str)] = &[
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("tar", "tar"),
    ("mke2fs", "e2fsprogs"),
    ("debugfs", "e2fsprogs"),
    ("gzip", "gzip"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("lz4", "lz4"),
];

/// A stage's record of itself, written when it is complete.
const RECORD: &str = "versions.json";

/// What a stage was made from.
#[derive(Serialize, Deserialize)]
struct Record {
    /// Digest of the inputs.
    inputs: String,
    #[serde(flatten)]
    versions: Versions,
}

/// Makes `target/guest/` if it is not there or not up to date.
///
/// # Errors
/// One line on what is missing or went wrong; nothing half made is left in place.
pub fn run(args: &Args) -> Result<ExitCode> {
    make(args.update)?;
    Ok(ExitCode::SUCCESS)
}

/// Makes `target/guest/` if it is not there or not up to date, or, with `update`, from the newest
/// packages. Returns the directory.
///
/// # Errors
/// As [`run`].
pub fn make(update: bool) -> Result<PathBuf> {
    let start = Instant::now();
    let guest = util::guest_dir();
    let packages = util::target_dir().join("guest-packages");
    let resources = util::workspace_root().join("resources");
    fs::create_dir_all(&guest).context(guest.display())?;
    let _lock = lock(&util::target_dir().join("guest.lock"))?;

    let lists = Lists::read(&resources)?;
    let package_inputs = package_inputs(&resources)?;
    let image_inputs = image_inputs(&resources)?;
    let current = read_record(&packages).filter(|record| record.inputs == package_inputs);
    let versions = match current {
        Some(record) if !update => record.versions,
        _ => {
            step("guest packages: new, or their lists changed");
            util::ensure_programs(HOST_PROGRAMS)?;
            make_packages(&lists, &package_inputs, update, &packages)?
        }
    };
    let inputs = digest([image_inputs, serde_json::to_string(&versions).context("versions")?]);
    let whole = files(&lists).iter().all(|file| guest.join(file).is_file());
    if whole && read_record(&guest).is_some_and(|record| record.inputs == inputs) {
        step(format_args!("guest: up to date in {}", guest.display()));
        return Ok(guest);
    }
    util::ensure_programs(HOST_PROGRAMS)?;
    make_images(&lists, &Record { inputs, versions }, &packages, &guest)?;
    step(format_args!("guest: made in {} ({:.1?})", guest.display(), start.elapsed()));
    Ok(guest)
}

/// Takes the lock that keeps two runs apart; it ends with the returned file.
fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).context(path.display())?;
    if file.try_lock().is_err() {
        step("waiting for another run of this command");
        file.lock().context(path.display())?;
    }
    Ok(file)
}

fn make_packages(lists: &Lists, inputs: &str, update: bool, dir: &Path) -> Result<Versions> {
    if update {
        util::apt_update()?;
    }
    let debs = util::target_dir().join("guest-debs");
    let fetch = || {
        let versions = packages::resolve(lists)?;
        let files = packages::download(&versions, &debs)?;
        Ok((versions, files))
    };
    // Absent lists know no package, old lists name packages that are gone.
    let (versions, files) = match fetch() {
        Err(error) if !update => {
            step(error);
            util::apt_update()?;
            fetch()?
        }
        fetched => fetched?,
    };
    let fresh = dir.with_extension("new");
    util::recreate_dir(&fresh)?;
    packages::unpack(lists, &versions, &files, &fresh)?;
    write_record(&fresh, &Record { inputs: inputs.into(), versions: versions.clone() })?;
    util::remove_dir(dir)?;
    fs::rename(&fresh, dir).context(dir.display())?;
    Ok(versions)
}

fn make_images(lists: &Lists, record: &Record, packages: &Path, guest: &Path) -> Result<()> {
    let resources = util::workspace_root().join("resources");
    let fresh = guest.with_extension("new");
    util::recreate_dir(&fresh)?;
    for (release, _) in &lists.kernels {
        step(format_args!("making initrd-{release}.img"));
        let initramfs = image::initramfs(packages, &resources, release)?;
        let path = fresh.join(format!("initrd-{release}.img"));
        fs::write(&path, initramfs).context(path.display())?;
        for kernel in [format!("vmlinuz-{release}"), format!("vmlinux-{release}")] {
            fs::hard_link(packages.join(&kernel), fresh.join(&kernel)).context(kernel)?;
        }
    }
    step("making rootfs.ext4");
    image::root_file_system(packages, &resources, &fresh.join("rootfs.ext4"))?;
    // The record goes first and comes last: without it the stage is incomplete.
    match fs::remove_file(guest.join(RECORD)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => bail!("{RECORD}: {error}"),
        _ => {}
    }
    for file in files(lists) {
        fs::rename(fresh.join(&file), guest.join(&file)).context(file)?;
    }
    write_record(&fresh, record)?;
    fs::rename(fresh.join(RECORD), guest.join(RECORD)).context(RECORD)?;
    util::remove_dir(&fresh)
}

/// The files of a guest, besides its record.
fn files(lists: &Lists) -> Vec<String> {
    let kernels = lists.kernels.iter().flat_map(|(release, _)| {
        [
            format!("vmlinuz-{release}"),
            format!("vmlinux-{release}"),
            format!("initrd-{release}.img"),
        ]
    });
    kernels.chain(["rootfs.ext4".into()]).collect()
}

fn read_record(dir: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(dir.join(RECORD)).ok()?).ok()
}

fn write_record(dir: &Path, record: &Record) -> Result<()> {
    let mut text = serde_json::to_string_pretty(record).context(RECORD)?;
    text.push('\n');
    fs::write(dir.join(RECORD), text).context(RECORD)
}

/// A digest of what decides the packages: the lists, and the code that lays them out.
fn package_inputs(resources: &Path) -> Result<String> {
    let mut inputs = vec![include_str!("guest/packages.rs").to_owned()];
    inputs.push(include_str!("guest/kernel.rs").into());
    for list in ["kernels.list", "modules.list", "packages.list"] {
        inputs.push(fs::read_to_string(resources.join(list)).context(list)?);
    }
    Ok(digest(inputs))
}

/// A digest of what else decides the images: scripts and jobs, and the code that packs them.
fn image_inputs(resources: &Path) -> Result<String> {
    let mut inputs = vec![include_str!("guest/image.rs").to_owned()];
    inputs.push(include_str!("guest/cpio.rs").into());
    for directory in ["initramfs", "pollux", "fio"] {
        for path in image::sorted_files(&resources.join(directory))? {
            inputs.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
            inputs.push(fs::read_to_string(&path).context(path.display())?);
        }
    }
    Ok(digest(inputs))
}

fn digest(inputs: impl IntoIterator<Item = String>) -> String {
    let mut hasher = DefaultHasher::new();
    for input in inputs {
        input.hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_every_input_and_on_where_one_ends() {
        let of = |inputs: &[&str]| digest(inputs.iter().map(|input| String::from(*input)));
        assert_eq!(of(&["ab", "c"]), of(&["ab", "c"]));
        assert_ne!(of(&["ab", "c"]), of(&["ab", "d"]));
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
    }

    #[test]
    fn a_record_keeps_inputs_and_versions() {
        let text = r#"{"inputs":"1f","kernels":{"6.1":{"package":"linux","version":"6.1.1"}},
            "root":{"fio":"3.33-3"}}"#;
        let record: Record = serde_json::from_str(text).unwrap();
        let again: Record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        assert_eq!(again.inputs, "1f");
        assert_eq!(again.versions.kernels["6.1"].version, "6.1.1");
        assert_eq!(again.versions.root["fio"], "3.33-3");
    }
}
