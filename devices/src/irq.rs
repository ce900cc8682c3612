//! Where interrupts go. The in-kernel irqchip and the user-mode one both implement [`MsiSink`];
//! devices do not know which of them they have.

use std::io;

/// An MSI message as it stands in an MSI-X table entry (PCI 3.0, 6.8.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message address, both halves.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// Delivers the MSI-X vectors of one PCI function.
///
/// The MSI-X table decides *whether* a vector may be delivered; a sink only delivers. Vectors are
/// numbered from 0 within the function.
pub trait MsiSink: Send + Sync {
    /// Delivers `vector` with the message of its last [`unmask`](Self::unmask). The hot path: takes
    /// no lock and never blocks. A vector that was never unmasked is dropped. One that is being
    /// masked at this moment is either delivered or kept for the next unmask (as an eventfd keeps
    /// it), never dropped.
    fn trigger(&self, vector: u16);

    /// Makes `vector` deliverable with `message`: first the route, then the irqfd, so that nothing
    /// is delivered to the wrong place. Called again for an unmasked vector, it changes the message.
    ///
    /// # Errors
    /// What the kernel said, if it refused the route or the irqfd.
    fn unmask(&self, vector: u16, message: MsiMessage) -> io::Result<()>;

    /// Makes `vector` undeliverable: the irqfd is detached first.
    ///
    /// # Errors
    /// What the kernel said, if it refused.
    fn mask(&self, vector: u16) -> io::Result<()>;
}

/// A level of a wire-like interrupt of a legacy device (a serial port): edge triggered, one pulse.
pub trait IrqLine: Send + Sync {
    /// Pulses the line once.
    fn pulse(&self);
}
