//! A driver in software. It plays guest in tests: builds rings and chains in guest memory, drives a
//! virtio PCI device through its configuration space and BARs, and receives its interrupts. No KVM.
//!
//! * [`memory`], [`Arena`]: guest RAM, and buffers in it with canaries around them.
//! * [`Driver`], [`PackedDriver`]: the driver's side of one queue, split or packed, well behaved or
//!   (with the raw accessors) not; [`AnyDriver`] is one of the two.
//! * [`PciDriver`]: the driver's side of the virtio PCI transport.
//! * [`RecordingSink`], [`Notifier`]: what the machine does with interrupts and notifications.
//! * [`status`]: the bits of the device status.
//! * [`model`]: what the specifications say that a driver sees.
//! * [`Signals`]: what a device is activated with, without a transport.
//!
//! Everything here panics when what it expects does not happen: a panic is a failed test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "test support: a panic is the failed test, and nothing here runs in the program"
)]

mod arena;
mod driver;
mod machine;
pub mod model;
mod packed;
mod pci;
pub mod status;

use std::time::{Duration, Instant};

pub use arena::{Arena, memory, memory_with_hole, read, write};
pub use driver::{Buf, Driver, RawDescriptor, Used, reframe};
pub use machine::{Notifier, RecordingSink, Signals, SinkEvent};
pub use packed::{AnyDriver, PackedDriver, RawPacked, RingPosition};
pub use pci::{Location, PciDriver};

pub use crate::virtio::common_cfg::offset as common;

/// How long the waits of this module last before they panic: far longer than anything takes, so
/// that a slow machine fails no test.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Asks until there is an answer; panics after [`TIMEOUT`].
fn wait_for<T>(what: &str, mut answer: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = answer() {
            return answer;
        }
        assert!(start.elapsed() < TIMEOUT, "it did not come: {what}");
        std::thread::yield_now();
    }
}
