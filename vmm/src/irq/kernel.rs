//! Interrupts through the in-kernel irqchip: GSIs 0 to 23 are the I/O APIC's pins, each MSI-X vector
//! has a GSI of its own above them.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::irq::{IrqLine, MsiMessage, MsiSink};
use devices::virtio::NotifyBinder;
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KvmIrqRouting,
    kvm_irq_routing_entry,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Pins of the I/O APIC.
const IOAPIC_PINS: u32 = 24;

/// The VM's GSI routing table. KVM replaces the table as a whole, so one place owns it.
pub struct Router {
    vm: Arc<VmFd>,
    state: Mutex<Table>,
}

struct Table {
    next_gsi: u32,
    msi: BTreeMap<u32, MsiMessage>,
}

impl Router {
    /// A table with the I/O APIC's pins only.
    ///
    /// # Errors
    /// KVM refused it.
    pub fn new(vm: Arc<VmFd>) -> io::Result<Arc<Self>> {
        let table = Table { next_gsi: IOAPIC_PINS, msi: BTreeMap::new() };
        table.install(&vm)?;
        Ok(Arc::new(Self { vm, state: Mutex::new(table) }))
    }

    /// A sink for the vectors of one function: `vectors` GSIs in a row, all masked.
    ///
    /// # Errors
    /// The host has no more eventfds.
    pub fn sink(self: &Arc<Self>, vectors: u16) -> io::Result<Arc<KernelMsi>> {
        let mut table = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first_gsi = table.next_gsi;
        table.next_gsi += u32::from(vectors);
        drop(table);
        let fds =
            (0..vectors).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<Result<Vec<_>, _>>()?;
        let attached = Mutex::new(vec![false; usize::from(vectors)]);
        Ok(Arc::new(KernelMsi { router: Arc::clone(self), first_gsi, fds, attached }))
    }

    /// An edge-triggered line on I/O APIC pin `gsi`.
    ///
    /// # Errors
    /// KVM refused the irqfd.
    pub fn line(&self, gsi: u32) -> io::Result<Arc<KernelLine>> {
        let fd = EventFd::new(EFD_NONBLOCK)?;
        self.vm.register_irqfd(&fd, gsi).map_err(io::Error::from)?;
        Ok(Arc::new(KernelLine(fd)))
    }

    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut table = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if table.msi.insert(gsi, message) == Some(message) {
            return Ok(());
        }
        table.install(&self.vm)
    }
}

impl Table {
    fn install(&self, vm: &VmFd) -> io::Result<()> {
        let mut entries = Vec::with_capacity(IOAPIC_PINS as usize + self.msi.len());
        for pin in 0..IOAPIC_PINS {
            let mut entry = kvm_irq_routing_entry {
                gsi: pin,
                type_: KVM_IRQ_ROUTING_IRQCHIP,
                ..Default::default()
            };
            entry.u.irqchip.irqchip = KVM_IRQCHIP_IOAPIC;
            entry.u.irqchip.pin = pin;
            entries.push(entry);
        }
        for (&gsi, message) in &self.msi {
            let mut entry =
                kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
            entry.u.msi.address_lo = message.address as u32;
            entry.u.msi.address_hi = (message.address >> 32) as u32;
            entry.u.msi.data = message.data;
            entries.push(entry);
        }
        let routing = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| io::Error::other("too many interrupt routes"))?;
        vm.set_gsi_routing(&routing).map_err(io::Error::from)
    }
}

/// The MSI-X vectors of one function, each an irqfd.
pub struct KernelMsi {
    router: Arc<Router>,
    first_gsi: u32,
    fds: Vec<EventFd>,
    attached: Mutex<Vec<bool>>,
}

impl KernelMsi {
    fn gsi(&self, vector: u16) -> u32 {
        self.first_gsi + u32::from(vector)
    }

    fn fd(&self, vector: u16) -> io::Result<&EventFd> {
        self.fds
            .get(usize::from(vector))
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
    }
}

impl MsiSink for KernelMsi {
    fn trigger(&self, vector: u16) {
        if let Some(fd) = self.fds.get(usize::from(vector)) {
            // Fails only when the counter is about to overflow: then one is pending anyway.
            let _ = fd.write(1);
        }
    }

    fn unmask(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        let fd = self.fd(vector)?;
        self.router.route(self.gsi(vector), message)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(attached) = attached.get_mut(usize::from(vector))
            && !*attached
        {
            self.router.vm.register_irqfd(fd, self.gsi(vector)).map_err(io::Error::from)?;
            *attached = true;
        }
        Ok(())
    }

    fn mask(&self, vector: u16) -> io::Result<()> {
        let fd = self.fd(vector)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(attached) = attached.get_mut(usize::from(vector))
            && *attached
        {
            self.router.vm.unregister_irqfd(fd, self.gsi(vector)).map_err(io::Error::from)?;
            *attached = false;
        }
        Ok(())
    }
}

/// One I/O APIC pin behind an irqfd.
pub struct KernelLine(EventFd);

impl IrqLine for KernelLine {
    fn pulse(&self) {
        // As for KernelMsi::trigger.
        let _ = self.0.write(1);
    }
}

/// Kicks as ioeventfds: the guest's write never reaches userspace.
pub struct IoEventFds(pub Arc<VmFd>);

impl NotifyBinder for IoEventFds {
    fn bind(&self, address: u64, kick: &EventFd) -> io::Result<()> {
        // Without a datamatch KVM takes a write of any length: the address names the queue.
        let address = IoEventAddress::Mmio(address);
        self.0.register_ioevent(kick, &address, NoDatamatch).map_err(io::Error::from)
    }

    fn unbind(&self, address: u64, kick: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        self.0.unregister_ioevent(kick, &address, NoDatamatch).map_err(io::Error::from)
    }
}
