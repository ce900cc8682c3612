//! From Debian packages to unpacked files: what to take, fetching it, and laying it out.
//!
//! Everything comes through apt, which checks the archive's signatures. Nothing is installed on
//! this machine and nothing here needs root, unless apt's lists must be fetched first.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::kernel::{self, Modules};
use crate::util::{self, Context, Error, Result, bail, step};

/// Links of a file system with merged `/usr`; no package brings them.
const MERGED_LINKS: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// What the guest is made of, as recorded in `versions.json`.
#[derive(Clone, Serialize, Deserialize)]
pub struct Versions {
    /// By release, such as `6.12`.
    pub kernels: BTreeMap<String, Kernel>,
    /// The root file system: package name to version.
    pub root: BTreeMap<String, String>,
}

/// A kernel package.
#[derive(Clone, Serialize, Deserialize)]
pub struct Kernel {
    /// Name of the package.
    pub package: String,
    /// Version of the package.
    pub version: String,
}

/// The lists in `resources/` that say what to take.
pub struct Lists {
    /// `(release, pattern of package names)`.
    pub kernels: Vec<(String, String)>,
    /// `(group, modules)`.
    pub modules: Vec<(String, Vec<String>)>,
    packages: Vec<String>,
    left_out: BTreeSet<String>,
    left_out_paths: Vec<String>,
}

impl Lists {
    /// Reads the lists.
    ///
    /// # Errors
    /// A file cannot be read or has a line that means nothing.
    pub fn read(resources: &Path) -> Result<Lists> {
        let (mut packages, mut left_out, mut left_out_paths) =
            (Vec::new(), BTreeSet::new(), Vec::new());
        for line in lines(&resources.join("packages.list"))? {
            match line.strip_prefix('!') {
                None => packages.push(line),
                Some(path) if path.starts_with('/') => left_out_paths.push(path.into()),
                Some(name) => drop(left_out.insert(name.into())),
            }
        }
        let kernels = lines(&resources.join("kernels.list"))?
            .iter()
            .map(|line| {
                let (release, pattern) = line
                    .split_once(' ')
                    .ok_or_else(|| Error(format!("kernels.list: '{line}' has no pattern")))?;
                Ok((release.into(), pattern.trim().into()))
            })
            .collect::<Result<_>>()?;
        let modules = lines(&resources.join("modules.list"))?
            .iter()
            .map(|line| {
                let mut words = line.split_whitespace().map(String::from);
                (words.next().unwrap_or_default(), words.collect())
            })
            .collect();
        Ok(Lists { kernels, modules, packages, left_out, left_out_paths })
    }
}

/// The lines of a list without comments and blanks.
fn lines(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).context(path.display())?;
    Ok(text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(String::from)
        .collect())
}

/// Finds the newest packages that the lists ask for.
///
/// # Errors
/// apt does not know them.
pub fn resolve(lists: &Lists) -> Result<Versions> {
    step("finding package versions");
    let kernels = lists
        .kernels
        .iter()
        .map(|(release, pattern)| Ok((release.clone(), newest_kernel(release, pattern)?)))
        .collect::<Result<_>>()?;
    // With no package installed, apt plans the whole closure.
    let plan = util::output_text(
        apt("apt-get")
            .args(["-s", "-o", "Dir::State::status=/dev/null", "-o", "Dir::Cache::pkgcache="])
            .args(["-y", "--no-install-recommends", "install"])
            .args(&lists.packages),
    )?;
    let root = plan
        .lines()
        .filter_map(planned)
        .filter(|(name, _)| !lists.left_out.contains(name))
        .collect();
    Ok(Versions { kernels, root })
}

/// Reads a line `Inst NAME (VERSION ARCHIVE...) ...` of apt's plan.
fn planned(line: &str) -> Option<(String, String)> {
    let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
    Some((name.into(), rest.split_whitespace().next()?.into()))
}

/// Finds the newest kernel package whose name matches a pattern.
///
/// # Errors
/// apt knows none.
pub fn newest_kernel(release: &str, pattern: &str) -> Result<Kernel> {
    let found = util::output_text(apt("apt-cache").args(["search", "--names-only", pattern]))?;
    let package = found
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .max_by(|a, b| compare_numbered(a, b))
        .ok_or_else(|| {
            Error(format!("apt knows no {release} kernel ({pattern}); Debian 12 has it"))
        })?;
    let record = util::output_text(apt("apt-cache").args(["show", "--no-all-versions", package]))?;
    let version = record
        .lines()
        .find_map(|line| line.strip_prefix("Version: "))
        .ok_or_else(|| Error(format!("apt has no version of {package}")))?;
    Ok(Kernel { package: package.into(), version: version.into() })
}

/// Compares names in which runs of digits count as numbers: `6.1.0-9` is before `6.1.0-10`.
fn compare_numbered(a: &str, b: &str) -> Ordering {
    let key = |name: &str| -> Vec<u64> {
        name.split(|letter: char| !letter.is_ascii_digit())
            .filter_map(|digits| digits.parse().ok())
            .collect()
    };
    key(a).cmp(&key(b)).then_with(|| a.cmp(b))
}

fn apt(program: &str) -> Command {
    let mut command = util::command(program);
    command.env("LC_ALL", "C");
    command
}

/// Fetches packages into `dir` unless they are there, and removes others. Returns their files.
///
/// # Errors
/// A download or its signature check fails.
pub fn download(versions: &Versions, dir: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let kernels = versions.kernels.values().map(|kernel| (&kernel.package, &kernel.version));
    let wanted: BTreeMap<&String, &String> = kernels.chain(&versions.root).collect();
    fs::create_dir_all(dir).context(dir.display())?;
    let mut present = package_files(dir)?;
    present.retain(|(name, version), path| {
        let keep = wanted.get(name) == Some(&version);
        keep || fs::remove_file(path).is_err()
    });
    let missing: Vec<String> = wanted
        .iter()
        .filter(|&(&name, &version)| !present.contains_key(&(name.clone(), version.clone())))
        .map(|(name, version)| format!("{name}={version}"))
        .collect();
    if !missing.is_empty() {
        step(format_args!("downloading {} packages", missing.len()));
        // apt writes into its working directory; only what it has checked moves on.
        let fresh = dir.join("partial");
        util::recreate_dir(&fresh)?;
        util::run(
            apt("apt-get")
                .current_dir(&fresh)
                .args(["-qq", "-o", "APT::Sandbox::User=root", "download"])
                .args(&missing),
        )?;
        for path in package_files(&fresh)?.into_values() {
            let target = dir.join(path.file_name().unwrap_or_default());
            fs::rename(&path, &target).context(target.display())?;
        }
        fs::remove_dir_all(&fresh).context(fresh.display())?;
        present = package_files(dir)?;
    }
    wanted
        .into_iter()
        .map(|(name, version)| match present.remove(&(name.clone(), version.clone())) {
            Some(path) => Ok((name.clone(), path)),
            None => bail!("apt-get download did not bring {name} {version}"),
        })
        .collect()
}

/// The packages in a directory, by name and version: files are called `NAME_VERSION_ARCH.deb`,
/// with the colon of an epoch written `%3a`.
fn package_files(dir: &Path) -> Result<BTreeMap<(String, String), PathBuf>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).context(dir.display())? {
        let path = entry.context(dir.display())?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut parts = file.strip_suffix(".deb").unwrap_or_default().splitn(3, '_');
        if let (Some(name), Some(version)) = (parts.next(), parts.next()) {
            files.insert((name.into(), version.replace("%3a", ":")), path);
        }
    }
    Ok(files)
}

/// Lays out kernels, modules and the root's tree in `dir`:
/// `vmlinuz-R`, `vmlinux-R`, `modules-R/{NAME.ko, GROUP.order}` and `root/`.
///
/// # Errors
/// A package does not have what it should.
pub fn unpack(
    lists: &Lists,
    versions: &Versions,
    files: &BTreeMap<String, PathBuf>,
    dir: &Path,
) -> Result<()> {
    let file_of = |name: &String| {
        files.get(name).ok_or_else(|| Error(format!("package {name} was not downloaded")))
    };
    for (release, kernel) in &versions.kernels {
        step(format_args!("unpacking kernel {release}: {} {}", kernel.package, kernel.version));
        let tree = dir.join("kernel");
        util::recreate_dir(&tree)?;
        extract(file_of(&kernel.package)?, &tree, &[])?;
        unpack_kernel(lists, release, &tree, dir)?;
        fs::remove_dir_all(&tree).context(tree.display())?;
    }
    step(format_args!("unpacking the root: {} packages", versions.root.len()));
    let root = dir.join("root");
    util::recreate_dir(&root)?;
    for link in MERGED_LINKS {
        fs::create_dir_all(root.join("usr").join(link)).context(link)?;
        symlink(format!("usr/{link}"), root.join(link)).context(link)?;
    }
    for name in versions.root.keys() {
        extract(file_of(name)?, &root, &lists.left_out_paths)?;
    }
    finish_root(&root)
}

/// Unpacks a package as dpkg would, with everything owned by whoever runs this.
fn extract(package: &Path, root: &Path, left_out: &[String]) -> Result<()> {
    let mut dpkg = util::command("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let stream = dpkg.stdout.take().ok_or(Error("dpkg-deb has no stdout".into()))?;
    let mut tar = util::command("tar");
    tar.args(["-x", "--keep-directory-symlink", "--no-same-owner", "--anchored"])
        .args(left_out.iter().map(|path| format!("--exclude=.{path}")))
        .arg("-C")
        .arg(root)
        .stdin(stream);
    let unpacked = tar.status().context("cannot run tar")?;
    let read = dpkg.wait().context("dpkg-deb")?;
    if !unpacked.success() || !read.success() {
        bail!("cannot unpack {}", package.display());
    }
    Ok(())
}

fn unpack_kernel(lists: &Lists, release: &str, tree: &Path, dir: &Path) -> Result<()> {
    let image = find(&tree.join("boot"), "vmlinuz-")?;
    let bz_image = fs::read(&image).context(image.display())?;
    let vmlinux = kernel::extract_vmlinux(&bz_image).context(image.display())?;
    fs::write(dir.join(format!("vmlinux-{release}")), vmlinux).context("vmlinux")?;
    fs::write(dir.join(format!("vmlinuz-{release}")), bz_image).context("vmlinuz")?;

    let modules = Modules::open(&find(&tree.join("lib/modules"), "")?)?;
    let target = dir.join(format!("modules-{release}"));
    util::recreate_dir(&target)?;
    for (group, wanted) in &lists.modules {
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let closure = modules.closure(&wanted).context(format!("kernel {release}"))?;
        let mut order = String::new();
        for (name, image) in closure {
            fs::write(target.join(format!("{name}.ko")), image).context(&name)?;
            order.push_str(&name);
            order.push('\n');
        }
        fs::write(target.join(format!("{group}.order")), order).context(group)?;
    }
    Ok(())
}

/// The one entry of a directory whose name starts with `prefix`.
fn find(dir: &Path, prefix: &str) -> Result<PathBuf> {
    let mut found = fs::read_dir(dir)
        .context(dir.display())?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        });
    match (found.next(), found.next()) {
        (Some(path), None) => Ok(path),
        _ => bail!("{}: not exactly one {prefix}*", dir.display()),
    }
}

/// What maintainer scripts would have made, as far as a shell, fio and perf need it.
fn finish_root(root: &Path) -> Result<()> {
    let write = |path: &str, text: &str| fs::write(root.join(path), text).context(path);
    write("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")?;
    write("etc/group", "root:x:0:\n")?;
    let bin = root.join("usr/bin");
    symlink("bash", bin.join("sh")).context("/bin/sh")?;
    let applets = util::output_text(Command::new(bin.join("busybox")).arg("--list"))?;
    for applet in applets.lines() {
        let link = bin.join(applet);
        if !link.exists() && !root.join("usr/sbin").join(applet).exists() {
            symlink("busybox", &link).context(link.display())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_in_names_compare_as_numbers() {
        let name = |abi: &str| format!("linux-image-{abi}-cloud-amd64");
        assert_eq!(compare_numbered(&name("6.1.0-9"), &name("6.1.0-10")), Ordering::Less);
        assert_eq!(
            compare_numbered(&name("6.12.117+deb12"), &name("6.12.99+deb12")),
            Ordering::Greater
        );
    }

    #[test]
    fn a_line_of_apts_plan_gives_name_and_version() {
        let line = "Inst libc6 (2.36-9+deb12u14 Debian:12.15/oldstable [amd64]) []";
        assert_eq!(planned(line), Some(("libc6".into(), "2.36-9+deb12u14".into())));
        assert_eq!(planned("Conf libc6 (2.36-9+deb12u14 Debian)"), None);
    }

    #[test]
    fn the_lists_in_resources_are_readable() {
        let lists = Lists::read(&util::workspace_root().join("resources")).unwrap();
        let releases: Vec<&str> = lists.kernels.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(releases, ["6.12", "6.1"]);
        assert!(lists.packages.contains(&"fio".into()));
        assert!(lists.left_out.contains("perl"));
        assert!(lists.left_out_paths.contains(&"/usr/share/doc".into()));
        assert!(lists.modules.iter().any(|(group, _)| group == "root"));
    }
}
