//! Pollux's device models. KVM is not known here: a device reaches the machine through the traits
//! of this crate ([`irq::MsiSink`], [`virtio::NotifyBinder`]), so every one of them runs against
//! the software driver in [`testkit`].

#![warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)]
#![warn(clippy::indexing_slicing)]

use std::io::Write as _;

pub mod affinity;
pub mod bus;
pub mod irq;
pub mod irqchip;
pub mod pci;
pub mod power;
pub mod serial;
pub mod testkit;
pub mod virtio;

/// Tells the user one line, if anybody reads it: a stderr that is gone must not end the guest.
pub fn tell(what: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "pollux: {what}");
}

/// The guest's RAM. Shared; its layout never changes while a VM lives.
pub type GuestMemory = std::sync::Arc<vm_memory::GuestMemoryMmap>;
