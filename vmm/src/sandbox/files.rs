//! The files that can still be opened: Landlock (Linux `Documentation/userspace-api/landlock.rst`).
//!
//! What is open stays usable. A host without Landlock goes without; `pollux doctor` says so.

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};

use crate::config::{Console, OnReboot, Stats, VmConfig, directory_of};
use crate::stats::report;
use crate::tuning;

/// A file or directory, and what may be done with it and below it.
type Right = (PathBuf, BitFlags<AccessFs>);

/// From now on the process opens only what `config` names and the statistics need.
pub(super) fn restrict(config: &VmConfig) -> Result<(), RulesetError> {
    // The newest rights that are known here; what the kernel has of them holds.
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V5))?
        .scope(Scope::from_all(ABI::V6))?
        .create()?;
    for (path, access) in rights(config) {
        // What is not there cannot be opened.
        if let Ok(path) = PathFd::new(&path) {
            ruleset = ruleset.add_rule(PathBeneath::new(path, access))?;
        }
    }
    ruleset.restrict_self().map(drop)
}

fn rights(config: &VmConfig) -> Vec<Right> {
    let read = BitFlags::from(AccessFs::ReadFile);
    let write = AccessFs::WriteFile | AccessFs::Truncate;
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    // What threads cost.
    let mut rights = vec![(PathBuf::from("/proc/self/task"), read)];
    // The host's parameters are reported, and changed if that was asked for.
    let tuned = if config.allow_host_tuning { write } else { BitFlags::EMPTY };
    rights.push((tuning::PARAMETERS.into(), read | AccessFs::ReadDir | tuned));
    if let Some(Stats::File(path)) = &config.stats {
        let (path, is_replaced) = report::destination(path);
        if is_replaced {
            // It is written beside, then put in its place.
            let replace = write | AccessFs::MakeReg | AccessFs::RemoveFile;
            rights.push((directory_of(&path), replace));
        } else {
            rights.push((path, write));
        }
    }
    if let Some(path) = &config.control {
        rights.push((directory_of(path), AccessFs::RemoveFile.into()));
    }
    if config.on_reboot == OnReboot::Restart {
        rights.extend(
            [&config.kernel].into_iter().chain(&config.initrd).map(|path| (path.clone(), read)),
        );
        rights.push((config.kvm.clone(), device));
        for disk in &config.disks {
            let writable = if disk.readonly { BitFlags::EMPTY } else { write };
            // A device's size is asked for by an ioctl; of a file the right means nothing.
            let ioctl =
                if disk.path.is_file() { BitFlags::EMPTY } else { AccessFs::IoctlDev.into() };
            rights.push((disk.path.clone(), read | writable | ioctl));
        }
        // Whether a block device can discard.
        rights.push(("/sys/devices".into(), read));
        if let Console::File(path) = &config.console {
            rights.push((path.clone(), write));
        }
        rights.extend(config.results.clone().map(|path| (path, write)));
    }
    rights
}
