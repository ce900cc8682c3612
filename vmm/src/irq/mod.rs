//! Interrupt delivery, in two ways that devices cannot tell apart: [`kernel`], the in-kernel
//! irqchip with GSI routes and irqfds; [`user`], Pollux's own local APICs and I/O APIC.

pub mod kernel;
pub mod user;

use std::io;
use std::sync::Arc;

use devices::irq::{IrqLine, MsiSink};
use devices::irqchip::IrqChip;

use kernel::Router;

/// Where a VM's interrupts go.
pub enum Interrupts {
    /// `--halt kernel` and `passthrough`.
    Kernel(Arc<Router>),
    /// `--halt user`.
    User(IrqChip),
}

impl Interrupts {
    /// A sink for the `vectors` MSI-X vectors of one function, all masked.
    ///
    /// # Errors
    /// The host has no more eventfds.
    pub fn msi_sink(&self, vectors: u16) -> io::Result<Arc<dyn MsiSink>> {
        Ok(match self {
            Self::Kernel(router) => router.sink(vectors)?,
            Self::User(chip) => chip.msi_sink(vectors),
        })
    }

    /// An edge-triggered line on I/O APIC pin `gsi`.
    ///
    /// # Errors
    /// There is no such pin, or KVM refused the irqfd.
    pub fn line(&self, gsi: u32) -> io::Result<Arc<dyn IrqLine>> {
        Ok(match self {
            Self::Kernel(router) => router.line(gsi)?,
            Self::User(chip) => {
                let pin = u8::try_from(gsi).ok().and_then(|pin| chip.line(pin));
                pin.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?
            }
        })
    }
}
