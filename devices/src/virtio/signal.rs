//! The device's notifications to the driver (virtio 1.2, 2.9, 4.1.5.1 and 4.1.5.3).
//!
//! A signal takes no lock. With MSI-X on, it goes to the vector the driver chose; with MSI-X off,
//! it only sets the ISR bit: this machine has no INTx lines. A configuration change sets its ISR bit
//! in any case (4.1.4.5.1).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_NEEDS_RESET};

use crate::pci::msix::Msix;

/// `VIRTIO_MSI_NO_VECTOR`: events without an interrupt (virtio 1.2, 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;
/// ISR status bit 0: a queue has used buffers (virtio 1.2, 4.1.4.5).
pub const ISR_QUEUE: u8 = 1;
/// ISR status bit 1: the configuration changed.
pub const ISR_CONFIG: u8 = 2;
/// Device status: the driver is ready (virtio 1.2, 2.1).
pub const STATUS_DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
/// Device status: the device met an error that only a reset cures.
pub const STATUS_NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET as u8;

/// A vector the driver may choose anew at any time, and where it leads.
#[derive(Clone)]
struct Source {
    vector: Arc<AtomicU16>,
    msix: Arc<Msix>,
    isr: Arc<AtomicU8>,
}

impl Source {
    #[inline]
    fn signal(&self, isr_bit: u8) {
        if !self.msix.is_enabled() {
            self.isr.fetch_or(isr_bit, Ordering::SeqCst);
            return;
        }
        let vector = self.vector.load(Ordering::Relaxed);
        if vector != NO_VECTOR {
            self.msix.signal(vector);
        }
    }
}

/// Tells the driver that a queue has used buffers.
#[derive(Clone)]
pub struct QueueSignal(Source);

impl QueueSignal {
    /// `vector` is the queue's MSI-X vector or [`NO_VECTOR`]; `isr` the device's ISR status.
    pub fn new(vector: Arc<AtomicU16>, msix: Arc<Msix>, isr: Arc<AtomicU8>) -> QueueSignal {
        QueueSignal(Source { vector, msix, isr })
    }

    /// Sends one used-buffer notification: the hot path.
    #[inline]
    pub fn signal(&self) {
        self.0.signal(ISR_QUEUE);
    }
}

/// Tells the driver that something about the whole device changed.
#[derive(Clone)]
pub struct DeviceSignal {
    source: Source,
    status: Arc<AtomicU8>,
}

impl DeviceSignal {
    /// `vector` is that of configuration changes or [`NO_VECTOR`]; `status` the device status.
    pub fn new(
        vector: Arc<AtomicU16>,
        msix: Arc<Msix>,
        isr: Arc<AtomicU8>,
        status: Arc<AtomicU8>,
    ) -> DeviceSignal {
        DeviceSignal { source: Source { vector, msix, isr }, status }
    }

    /// Sends a configuration-change notification. The device has changed its configuration, and
    /// its generation, before.
    pub fn config_changed(&self) {
        self.source.isr.fetch_or(ISR_CONFIG, Ordering::SeqCst);
        self.source.signal(ISR_CONFIG);
    }

    /// Reports an error that only a reset cures: sets DEVICE_NEEDS_RESET and, if the driver is
    /// ready, sends a configuration-change notification (virtio 1.2, 2.1.2).
    pub fn needs_reset(&self) {
        let before = self.status.fetch_or(STATUS_NEEDS_RESET, Ordering::SeqCst);
        if before & STATUS_DRIVER_OK != 0 && before & STATUS_NEEDS_RESET == 0 {
            self.config_changed();
        }
    }
}
