//! Capabilities, which belong to a thread and are inherited by those it starts (capabilities(7)).

use std::io;

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

/// Leaves the current thread what root needs to open other users' files: statistics are written, and a
/// guest that is booted anew opened, when the guest has long been running. Landlock says which files.
pub(super) fn keep_for_files() -> io::Result<()> {
    let kept = CapsHashSet::from([Capability::CAP_DAC_OVERRIDE]);
    // For good. Who may not do even this has no program to gain any by: no_new_privs sees to it.
    for capability in caps::all() {
        let _ = caps::drop(None, CapSet::Bounding, capability);
    }
    keep(&kept)
}

/// Leaves the current thread none.
pub(super) fn drop_all() -> io::Result<()> {
    keep(&CapsHashSet::new())
}

fn keep(kept: &CapsHashSet) -> io::Result<()> {
    let permitted = caps::read(None, CapSet::Permitted).map_err(error)?;
    let kept: CapsHashSet = permitted.intersection(kept).copied().collect();
    // A kernel that has no ambient ones says so.
    let _ = caps::clear(None, CapSet::Ambient);
    caps::clear(None, CapSet::Inheritable).map_err(error)?;
    caps::set(None, CapSet::Effective, &kept).map_err(error)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(error)
}

fn error(error: CapsError) -> io::Error {
    io::Error::other(error.to_string())
}
