//! Pollux's device models. KVM is not known here: a device reaches the machine through the traits
//! of this crate ([`irq::MsiSink`], [`virtio::NotifyBinder`]), so every one of them runs against
//! the software driver in [`testkit`].

#![warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)]
#![warn(clippy::indexing_slicing)]

pub mod bus;
pub mod irq;
pub mod irqchip;
pub mod pci;
pub mod power;
pub mod serial;
pub mod testkit;
pub mod virtio;

/// The guest's RAM. Shared; its layout never changes while a VM lives.
pub type GuestMemory = std::sync::Arc<vm_memory::GuestMemoryMmap>;
