//! The interrupt controllers of a machine whose KVM has none: local APICs and an I/O APIC as device
//! models. They know no KVM and no clock: a vCPU's loop asks them what to inject, and tells them the
//! time. Specifications: Intel SDM vol. 3, chapter 11; Intel 82093AA (I/O APIC).
//!
//! # Who touches what
//! A [`LocalApic`] belongs to its vCPU's thread: register accesses are that vCPU's own exits, so
//! they need no lock. What others may do to it, which is to send it a message, goes to the
//! [`LapicShared`] half: request bits in atomics. Sending an IPI or an MSI is a look-up of the
//! receiver, one atomic operation in its request register, and one call of its [`Notify`]. Only
//! the I/O APIC has a lock, and only its pins, its registers, and the end of level-triggered
//! interrupts take it.
//!
//! # The loop of a vCPU
//! Before each entry: [`LocalApic::timer_tick`]; then [`LocalApic::take_init`] and
//! [`LocalApic::take_nmi`]; then, if [`LocalApic::pending_vector`] has one, either inject it and
//! [`LocalApic::accept`] it, or ask for an exit when the guest can take it. CR8 goes in from
//! [`LocalApic::cr8`] and comes back by [`LocalApic::set_cr8`]. A halted vCPU goes on when
//! [`LocalApic::has_wake_event`], at the latest at [`LocalApic::next_timer_deadline_ns`]; a running
//! one must leave the guest by then, too.

mod ioapic;
mod lapic;
mod message;
mod msi;
mod shared;
mod timer;
mod vectors;

use std::sync::{Arc, Mutex};

pub use ioapic::{IoApic, IoApicLine};
pub use lapic::LocalApic;
pub use message::{DeliveryMode, Destination, Interrupt};
pub use msi::UserMsi;
pub use shared::{ApicBus, ApicMode, LapicShared};
pub use timer::{Now, TIMER_HZ};

use crate::bus::SharedDevice;
use crate::irq::MsiMessage;

/// Where the I/O APIC's registers are.
pub const IOAPIC_ADDRESS: u64 = 0xfec0_0000;
/// Bytes of the I/O APIC's range.
pub const IOAPIC_BYTES: u64 = 0x1000;
/// Where a local APIC's page is after reset.
pub const LAPIC_ADDRESS: u64 = 0xfee0_0000;
/// Bytes of a local APIC's page.
pub const LAPIC_BYTES: u64 = 0x1000;

/// Wakes a vCPU: whether it polls, sleeps or runs in the guest, it must look at its local APIC
/// before it next sleeps or enters.
///
/// The request is stored before `notify` is called, sequentially consistent. So if `notify` reads
/// the vCPU's state (asleep, running) with the same ordering, and the vCPU stores that state with it
/// before it looks at its local APIC for the last time, then one of the two sees the other.
pub trait Notify: Send + Sync {
    /// Called by any thread, often for nothing. Must not block, and must not call the interrupt
    /// controllers.
    fn notify(&self);
}

/// The access raises a general-protection exception in the guest, with error code 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("general-protection exception")]
pub struct GeneralProtection;

/// What the local APICs must know of the machine.
#[derive(Clone, Copy, Debug)]
pub struct ApicConfig {
    /// Frequency of the guest's time stamp counter.
    pub tsc_khz: u32,
    /// Width of guest physical addresses, in bits: bits beyond it are reserved in IA32_APIC_BASE.
    pub physical_address_bits: u8,
}

/// The interrupt controllers of a machine.
pub struct IrqChip {
    bus: Arc<ApicBus>,
    ioapic: Arc<Mutex<IoApic>>,
}

impl IrqChip {
    /// An I/O APIC and one local APIC for each vCPU, in the state after reset. The APIC identifier
    /// is the vCPU's number; number 0 is the bootstrap processor. Identifiers above 254 are reached
    /// in x2APIC mode only.
    pub fn new(config: &ApicConfig, vcpus: Vec<Arc<dyn Notify>>) -> (Self, Vec<LocalApic>) {
        let shared: Vec<_> = (0..)
            .zip(vcpus)
            .map(|(id, notify)| Arc::new(LapicShared::new(id, lapic::RESET_ADDRESSING, notify)))
            .collect();
        let bus = Arc::new(ApicBus::new(shared));
        let ioapic = Arc::new(Mutex::new(IoApic::new(Arc::clone(&bus))));
        let lapics = bus
            .lapics()
            .iter()
            .map(|shared| {
                LocalApic::new(config, Arc::clone(shared), Arc::clone(&bus), Arc::clone(&ioapic))
            })
            .collect();
        (IrqChip { bus, ioapic }, lapics)
    }

    /// The way to the local APICs.
    pub fn bus(&self) -> &Arc<ApicBus> {
        &self.bus
    }

    /// The I/O APIC, to be put at [`IOAPIC_ADDRESS`].
    pub fn ioapic(&self) -> SharedDevice {
        self.ioapic.clone()
    }

    /// The wire to pin `pin` of the I/O APIC; `None` if there is no such pin.
    pub fn line(&self, pin: u8) -> Option<Arc<IoApicLine>> {
        (pin < ioapic::PINS).then(|| Arc::new(IoApicLine::new(Arc::clone(&self.ioapic), pin)))
    }

    /// A sink for the `vectors` MSI-X vectors of one function, all masked.
    pub fn msi_sink(&self, vectors: u16) -> Arc<UserMsi> {
        Arc::new(UserMsi::new(Arc::clone(&self.bus), vectors))
    }

    /// Delivers one MSI; true if a local APIC accepted it. Takes no lock.
    pub fn deliver(&self, message: MsiMessage) -> bool {
        Interrupt::from_msi(message).is_some_and(|interrupt| self.bus.send(&interrupt, None))
    }
}

#[cfg(test)]
mod testing;
