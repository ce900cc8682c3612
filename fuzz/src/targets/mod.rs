//! The targets.

use std::path::PathBuf;

use crate::engine::Target;

pub mod apic;
pub mod common_config;
pub mod control;
pub mod disk;
pub mod exits;
pub mod loader;
pub mod pci_config;
pub mod rings;

/// All targets, by name.
pub const ALL: [(&str, Target); 8] = [
    ("rings", rings::run),
    ("pci-config", pci_config::run),
    ("common-config", common_config::run),
    ("apic", apic::run),
    ("loader", loader::run),
    ("disk", disk::run),
    ("control", control::run),
    ("exits", exits::run),
];

/// The target of this name.
pub fn find(name: &str) -> Option<Target> {
    ALL.iter().find(|(this, _)| *this == name).map(|(_, target)| *target)
}

/// Where the corpus of a target is.
pub fn corpus(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "corpus", name].iter().collect()
}
