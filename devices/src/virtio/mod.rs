//! Virtio 1.2: queues, the PCI transport, and what a device of any type must provide.

pub mod common_cfg;
pub mod pci;
pub mod queue;
pub mod signal;
pub mod stats;

use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::GuestMemory;
use queue::Queue;
use signal::{DeviceSignal, QueueSignal};

/// A device as the transport sees it (virtio 1.2, 2). All methods are called under the device's
/// lock, from vCPU threads; none is on the data path.
pub trait VirtioDevice: Send {
    /// The device ID (virtio 1.2, 5): 2 for a block device.
    fn device_type(&self) -> u32;
    /// The largest size of each queue, powers of two; the length is the number of queues.
    fn queue_max_sizes(&self) -> &[u16];
    /// All features offered, bits 0 to 63, `VIRTIO_F_VERSION_1` among them.
    fn features(&self) -> u64;
    /// Reads device configuration space. Bytes past its end read as zero. `features` are the
    /// negotiated ones: none before FEATURES_OK.
    fn read_config(&self, features: u64, offset: u64, data: &mut [u8]);
    /// Writes device configuration space; what is not writable is ignored. `features` are the
    /// negotiated ones.
    fn write_config(&mut self, features: u64, offset: u64, data: &[u8]);
    /// Changes whenever the driver could otherwise read a torn value (virtio 1.2, 2.5.1).
    fn config_generation(&self) -> u8;
    /// Starts taking requests from these queues. Called at DRIVER_OK with all that are enabled, and,
    /// if `VIRTIO_F_RING_RESET` was negotiated, with each one that is enabled later (2.6.1.2). No
    /// queue is given twice between two resets of its own or of the device.
    ///
    /// # Errors
    /// Why the device cannot start; the transport then sets NEEDS_RESET.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// Stops taking requests, waits for what is in flight *without posting it*, and forgets all
    /// queues. Afterwards the device touches no guest memory until it is activated again.
    fn reset(&mut self);
    /// Begins to reset one queue while others go on (virtio 1.2, 2.6.1): takes no more requests from
    /// it and posts none that are in flight. Nothing to be done if it is not active. Called only if
    /// `VIRTIO_F_RING_RESET` was negotiated.
    fn reset_queue(&mut self, _index: u16) {}
    /// Whether what [`reset_queue`](Self::reset_queue) began is done: nothing of that queue is in
    /// flight, and the device touches its memory no more.
    fn is_queue_reset(&self, _index: u16) -> bool {
        true
    }
}

/// What a device gets at DRIVER_OK, and with queues that are enabled later.
pub struct Activation {
    /// Guest RAM.
    pub memory: GuestMemory,
    /// The negotiated features.
    pub features: u64,
    /// The enabled queues, checked, in order of their index. Never empty.
    pub queues: Vec<ActiveQueue>,
    /// Configuration-change interrupts and NEEDS_RESET.
    pub device: DeviceSignal,
}

/// One enabled queue and its two notification ways.
pub struct ActiveQueue {
    /// The queue's index.
    pub index: u16,
    /// The rings.
    pub queue: Queue,
    /// Driver to device: a *blocking* eventfd. A read returns how many kicks came since the last.
    pub kick: EventFd,
    /// Device to driver.
    pub signal: QueueSignal,
}

/// Why a device could not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the device: {0}")]
pub struct ActivateError(#[from] pub io::Error);

/// Connects notification addresses to eventfds (KVM's ioeventfd).
pub trait NotifyBinder: Send + Sync {
    /// From now on a write of any length to guest physical address `address` signals `kick`.
    ///
    /// # Errors
    /// What the kernel said, if it refused.
    fn bind(&self, address: u64, kick: &EventFd) -> io::Result<()>;
    /// Ends what [`bind`](Self::bind) began, with the same arguments.
    ///
    /// # Errors
    /// What the kernel said, if it refused.
    fn unbind(&self, address: u64, kick: &EventFd) -> io::Result<()>;
}
