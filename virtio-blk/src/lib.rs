//! Pollux's virtio block device (virtio 1.2, 5.2): configuration space and features, request
//! parsing, a worker thread for each queue, and the engines that carry requests out. Neither KVM
//! nor PCI is known here: the device is driven through [`devices::virtio::VirtioDevice`].

#![warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)]
#![warn(clippy::indexing_slicing)]

mod config;
mod device;
mod disk;
mod engine;
mod request;
mod worker;

pub use config::{BlkConfig, CacheMode, EngineKind};
pub use device::{Block, BlockHandle, Resize, StartThread};
pub use disk::{BLKDISCARD, BLKGETSIZE64, Disk, DiskError};
