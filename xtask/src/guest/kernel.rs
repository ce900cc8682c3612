//! What is taken out of a kernel package: the ELF image inside a bzImage, and modules in the order
//! in which they can be loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::util::{self, Context, Error, Result, bail};

/// Returns the kernel's ELF image (`vmlinux`) from a bzImage.
///
/// The payload is where the setup header says (Documentation/arch/x86/boot.rst, `payload_offset`
/// and `payload_length`, protocol 2.08 and later).
///
/// # Errors
/// Not a bzImage, a compression this does not know, or a payload that does not unpack to an ELF.
pub fn extract_vmlinux(bz_image: &[u8]) -> Result<Vec<u8>> {
    let payload = payload(bz_image).ok_or(Error("not a bzImage with a payload".into()))?;
    let (program, args, has_size) = match payload {
        [0x1f, 0x8b, ..] => ("gzip", "-dc", false),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", "-dc", true),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", "-dcq", true),
        [0x02, 0x21, 0x4c, 0x18, ..] => ("lz4", "-dcq", true),
        _ => bail!("the kernel's compression is none of gzip, xz, zstd and lz4"),
    };
    // All but gzip, which has it in its own format, are followed by the unpacked size.
    let (compressed, size) = match payload.split_last_chunk::<4>() {
        Some((data, size)) if has_size => (data, Some(u32::from_le_bytes(*size))),
        _ => (payload, None),
    };
    let elf = filter(program, args, compressed)?;
    if size.is_some_and(|size| size as usize != elf.len()) || !elf.starts_with(b"\x7fELF") {
        bail!("the kernel's payload does not unpack to an ELF image of the size it names");
    }
    Ok(elf)
}

fn payload(bz_image: &[u8]) -> Option<&[u8]> {
    let u32_at = |offset: usize| {
        bz_image.get(offset..)?.first_chunk().map(|&bytes| u32::from_le_bytes(bytes) as usize)
    };
    let version = bz_image.get(0x206..)?.first_chunk().map(|&bytes| u16::from_le_bytes(bytes))?;
    if bz_image.get(0x202..0x206)? != b"HdrS" || version < 0x208 {
        return None;
    }
    let setup_sectors = match *bz_image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = ((setup_sectors + 1) * 512).checked_add(u32_at(0x248)?)?;
    bz_image.get(start..start.checked_add(u32_at(0x24c)?)?)
}

/// Passes `input` through a program.
fn filter(program: &str, args: &str, input: &[u8]) -> Result<Vec<u8>> {
    let mut child = util::command(program)
        .arg(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context(format!("cannot run {program}"))?;
    let mut stdin = child.stdin.take().ok_or(Error(format!("{program} has no stdin")))?;
    let output = std::thread::scope(|scope| {
        // A program that gives up early closes the pipe; its exit status tells.
        scope.spawn(move || stdin.write_all(input).ok());
        child.wait_with_output()
    })
    .context(format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// The modules of one kernel: `/lib/modules/RELEASE`.
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
}

impl Modules {
    /// Looks over a directory of modules.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn open(dir: &Path) -> Result<Modules> {
        let builtin = dir.join("modules.builtin");
        let built_in = fs::read_to_string(&builtin)
            .context(builtin.display())?
            .lines()
            .map(|line| module_name(Path::new(line)))
            .collect();
        let mut files = BTreeMap::new();
        let mut pending = vec![dir.to_path_buf()];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(&dir).context(dir.display())? {
                let path = entry.context(dir.display())?.path();
                if path.is_dir() {
                    pending.push(path);
                } else if path.to_string_lossy().contains(".ko") {
                    files.insert(module_name(&path), path);
                }
            }
        }
        Ok(Modules { files, built_in })
    }

    /// Returns the modules that make `wanted` work, dependencies first, as `(name, ELF image)`.
    /// What is built into the kernel is left out.
    ///
    /// # Errors
    /// A module exists nowhere or cannot be unpacked.
    pub fn closure(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let mut loaded = Vec::new();
        for name in wanted {
            self.add(&canonical(name), &mut loaded, &mut BTreeSet::new())?;
        }
        Ok(loaded)
    }

    fn add(
        &self,
        name: &str,
        loaded: &mut Vec<(String, Vec<u8>)>,
        visited: &mut BTreeSet<String>,
    ) -> Result<()> {
        let known = loaded.iter().any(|(other, _)| other == name);
        if known || self.built_in.contains(name) || !visited.insert(name.into()) {
            return Ok(());
        }
        let path = self.files.get(name).ok_or(Error(format!("the kernel has no module {name}")))?;
        let image = read_module(path)?;
        for dependency in dependencies(&image) {
            self.add(&dependency, loaded, visited)?;
        }
        loaded.push((name.into(), image));
        Ok(())
    }
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(path).context(path.display())?;
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => filter("xz", "-dc", &bytes),
        Some("zst") => filter("zstd", "-dcq", &bytes),
        _ => Ok(bytes),
    }
}

/// The file's name without directory and extensions, in the kernel's spelling.
fn module_name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    canonical(file.split(".ko").next().unwrap_or_default())
}

/// Modules are named with `_`; their files may have `-`.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// What a module depends on: the `depends=` string of its `.modinfo` section.
fn dependencies(image: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = image.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = image[at + KEY.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    let value = String::from_utf8_lossy(value);
    value.split(',').filter(|name| !name.is_empty()).map(canonical).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage of two setup sectors whose payload is `payload`.
    fn bz_image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 3 * 512 + 16];
        image[0x1f1] = 2;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn the_payload_is_where_the_setup_header_says() {
        assert_eq!(payload(&bz_image(b"abc")), Some(&b"abc"[..]));
    }

    #[test]
    fn a_payload_that_leaves_the_file_is_refused() {
        let mut image = bz_image(b"abc");
        image.pop();
        assert_eq!(payload(&image), None);
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(payload(&image), None);
    }

    #[test]
    fn a_file_that_is_no_bz_image_is_refused() {
        assert!(extract_vmlinux(b"#!/bin/sh\n").is_err());
        assert!(extract_vmlinux(&bz_image(b"unknown compression")).is_err());
    }

    #[test]
    fn a_gzip_payload_unpacks_to_the_elf_image() {
        let elf = b"\x7fELF and the rest";
        let packed = filter("gzip", "-c", elf).unwrap();
        assert_eq!(extract_vmlinux(&bz_image(&packed)).unwrap(), elf);
        let no_elf = filter("gzip", "-c", b"text").unwrap();
        assert!(extract_vmlinux(&bz_image(&no_elf)).is_err());
    }

    #[test]
    fn dependencies_are_read_from_modinfo_in_the_kernels_spelling() {
        let image = b"x\0softdepends=no\0depends=virtio_ring,pvpanic-common\0name=a\0";
        assert_eq!(dependencies(image), ["virtio_ring", "pvpanic_common"]);
        assert!(dependencies(b"x\0depends=\0name=a\0").is_empty());
    }

    #[test]
    fn names_lose_directory_and_compression() {
        assert_eq!(module_name(Path::new("kernel/drivers/pvpanic-pci.ko.xz")), "pvpanic_pci");
    }

    #[test]
    fn dependencies_come_first_and_once_and_built_in_modules_are_left_out() {
        let dir = std::env::temp_dir().join(format!("pollux-modules-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("modules.builtin"), "kernel/ring.ko\n").unwrap();
        fs::write(dir.join("virtio.ko"), b"\0depends=ring\0").unwrap();
        fs::write(dir.join("pci.ko"), b"\0depends=virtio,ring\0").unwrap();
        fs::write(dir.join("blk.ko"), b"\0depends=virtio\0").unwrap();
        let modules = Modules::open(&dir).unwrap();
        let closure = modules.closure(&["blk", "pci", "ring"]).unwrap();
        let names: Vec<&str> = closure.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["virtio", "blk", "pci"]);
        assert!(modules.closure(&["absent"]).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
