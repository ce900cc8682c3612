//! The PCI transport of a virtio device (virtio 1.2, 4.1): modern only, MSI-X only.
//!
//! One 64-bit memory BAR holds everything, each structure in pages of its own:
//!
//! | structure | offset | length |
//! |---|---|---|
//! | common configuration | 0x0000 | 0x3c |
//! | ISR status | 0x1000 | 1 |
//! | device configuration | 0x2000 | 4 KiB |
//! | notification, one double word a queue | 0x3000 | whole pages |
//! | MSI-X table | behind it | whole pages |
//! | MSI-X pending bits | behind it | whole pages |
//!
//! While the BAR is mapped, notification addresses are bound to the queues' eventfds, so that a
//! kick does not come here. One that does (bound too late, or written through configuration space)
//! signals the same eventfd.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};
use vmm_sys_util::eventfd::EventFd;

use super::common_cfg::{CommonConfig, Event, offset};
use super::queue::{Queue, QueueError, QueueFeatures};
use super::signal::{DeviceSignal, QueueSignal};
use super::{ActivateError, Activation, ActiveQueue, NotifyBinder, VirtioDevice};
use crate::GuestMemory;
use crate::irq::MsiSink;
use crate::pci::bar::Bar;
use crate::pci::config::{
    BarOffset, CAPABILITY_VENDOR, ConfigError, ConfigSpace, Identity, STATUS, STATUS_INTERRUPT,
};
use crate::pci::msix::{MAX_VECTORS, Msix};
use crate::pci::{BarMapping, PciDevice};

/// The vendor of all virtio devices.
const VENDOR_ID: u16 = 0x1af4;
/// Modern device IDs are this and the device type (4.1.2).
const DEVICE_ID_BASE: u16 = 0x1040;
const BAR: u8 = 0;
const PAGE: u64 = 4096;
/// Bytes from one queue's notification address to the next (`notify_off_multiplier`).
const NOTIFY_STRIDE: u64 = 4;

/// `cfg_type` of the virtio capabilities (4.1.4).
const CAP_COMMON: u8 = 1;
const CAP_NOTIFY: u8 = 2;
const CAP_ISR: u8 = 3;
const CAP_DEVICE: u8 = 4;
const CAP_PCI: u8 = 5;
/// Length of a `virtio_pci_cap` in bytes. The PCI-access and notify ones have 4 more.
const CAP_BYTES: u8 = 16;
/// Length of `pci_cfg_data`, behind the PCI-access capability.
const PCI_ACCESS_DATA_BYTES: u16 = 4;

/// Why a device cannot be put on the bus.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// More queues than there are MSI-X vectors for.
    #[error("{0} queues are more than a PCI function has vectors for")]
    TooManyQueues(usize),
    /// A device type that has no PCI device ID.
    #[error("device type {0} has no PCI device ID")]
    DeviceType(u32),
    /// The configuration space cannot be built.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No eventfd.
    #[error("cannot make an eventfd: {0}")]
    EventFd(#[from] io::Error),
}

/// Why a device did not start at DRIVER_OK. The guest sees NEEDS_RESET.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("queue {0}: {1}")]
    Queue(u16, QueueError),
    #[error("cannot duplicate an eventfd: {0}")]
    EventFd(#[from] io::Error),
    #[error(transparent)]
    Activate(#[from] ActivateError),
}

/// The structures in the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Structure {
    Common,
    Isr,
    Device,
    Notify,
    MsixTable,
    MsixPending,
}

/// Where they are.
struct Layout {
    structures: [(Structure, Range<u64>); 6],
    bar_bytes: u64,
}

impl Layout {
    fn new(queues: usize, msix: &Msix) -> Layout {
        let mut end = 0;
        let mut place = |structure, len_bytes: u64| {
            let start = end;
            end += len_bytes.next_multiple_of(PAGE);
            (structure, start..start + len_bytes)
        };
        // At most MAX_VECTORS queues: nothing here comes near an overflow.
        let structures = [
            place(Structure::Common, offset::BYTES),
            place(Structure::Isr, 1),
            place(Structure::Device, PAGE),
            place(Structure::Notify, NOTIFY_STRIDE * queues.max(1) as u64),
            place(Structure::MsixTable, msix.table_bytes()),
            place(Structure::MsixPending, msix.pba_bytes()),
        ];
        Layout { structures, bar_bytes: end.next_power_of_two() }
    }

    fn range(&self, structure: Structure) -> Range<u64> {
        let found = self.structures.iter().find(|(this, _)| *this == structure);
        found.map_or(0..0, |(_, range)| range.clone())
    }

    fn bar_offset(&self, structure: Structure) -> BarOffset {
        BarOffset { bar: BAR, offset_bytes: self.range(structure).start as u32 }
    }

    /// The structure that `at` lies in, and the offset into it.
    fn locate(&self, at: u64) -> Option<(Structure, u64)> {
        let found = self.structures.iter().find(|(_, range)| range.contains(&at));
        found.map(|(structure, range)| (*structure, at - range.start))
    }
}

/// A virtio device as a PCI function.
pub struct VirtioPci {
    device: Box<dyn VirtioDevice>,
    memory: GuestMemory,
    binder: Arc<dyn NotifyBinder>,
    config: ConfigSpace,
    layout: Layout,
    /// Offset of the PCI-access capability in configuration space.
    pci_access: u16,
    common: CommonConfig,
    isr: Arc<AtomicU8>,
    msix: Arc<Msix>,
    kicks: Vec<Kick>,
    /// A failure was reported; a guest can repeat its cause at will.
    failure_reported: bool,
}

/// A queue's eventfd, which lives as long as the function.
struct Kick {
    eventfd: EventFd,
    /// The guest physical address it is bound to.
    bound: Option<u64>,
}

impl Kick {
    /// Forgets kicks from before a reset, which are for a queue that is gone. Nobody else reads.
    fn clear(&self) {
        // The write makes sure that the read finds something: the eventfd blocks.
        if self.eventfd.write(1).is_ok() {
            let _ = self.eventfd.read();
        }
    }
}

impl VirtioPci {
    /// Puts `device` behind a PCI function with a vector for each queue and one for configuration
    /// changes. Its interrupts go to `sink`, its notification addresses to `binder`.
    ///
    /// # Errors
    /// Too many queues, an impossible device type, or no eventfd to be had.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        sink: Arc<dyn MsiSink>,
        binder: Arc<dyn NotifyBinder>,
    ) -> Result<VirtioPci, TransportError> {
        let max_sizes = device.queue_max_sizes();
        let queues = max_sizes.len();
        if queues >= usize::from(MAX_VECTORS) {
            return Err(TransportError::TooManyQueues(queues));
        }
        let msix = Arc::new(Msix::new(queues as u16 + 1, sink));
        let common = CommonConfig::new(device.features(), max_sizes, msix.vectors());
        let layout = Layout::new(queues, &msix);
        let mut config = ConfigSpace::new(&identity(device.device_type())?);
        config.add_bar(Bar::new(BAR, layout.bar_bytes, false).map_err(ConfigError::from)?)?;
        let pci_access = add_capabilities(&mut config, &layout, &msix)?;
        let kicks = max_sizes
            .iter()
            .map(|_| Ok(Kick { eventfd: EventFd::new(libc::EFD_CLOEXEC)?, bound: None }))
            .collect::<io::Result<_>>()?;
        Ok(VirtioPci {
            device,
            memory,
            binder,
            config,
            layout,
            pci_access,
            common,
            isr: Arc::default(),
            msix,
            kicks,
            failure_reported: false,
        })
    }

    fn device_signal(&self) -> DeviceSignal {
        let (vector, status) = (self.common.config_vector(), self.common.shared_status());
        DeviceSignal::new(vector, self.msix.clone(), self.isr.clone(), status)
    }

    fn read_structure(&self, at: u64, data: &mut [u8]) {
        data.fill(0);
        match self.layout.locate(at) {
            Some((Structure::Common, at)) => {
                let queue = self.common.resetting();
                let resetting = queue.is_some_and(|queue| !self.device.is_queue_reset(queue));
                self.common.read(at, data, self.device.config_generation(), resetting);
            }
            // A read clears it (4.1.4.5).
            Some((Structure::Isr, _)) => {
                if let Some(byte) = data.first_mut() {
                    *byte = self.isr.swap(0, Ordering::SeqCst);
                }
            }
            Some((Structure::Device, at)) => {
                self.device.read_config(self.common.features(), at, data);
            }
            Some((Structure::MsixTable, at)) => self.msix.read_table(at, data),
            Some((Structure::MsixPending, at)) => self.msix.read_pba(at, data),
            Some((Structure::Notify, _)) | None => {}
        }
    }

    fn write_structure(&mut self, at: u64, data: &[u8]) {
        match self.layout.locate(at) {
            Some((Structure::Common, at)) => self.write_common(at, data),
            Some((Structure::Device, at)) => {
                self.device.write_config(self.common.features(), at, data);
            }
            Some((Structure::Notify, at)) => self.kick(at / NOTIFY_STRIDE),
            Some((Structure::MsixTable, at)) => self.msix.write_table(at, data),
            Some((Structure::Isr | Structure::MsixPending, _)) | None => {}
        }
    }

    fn write_common(&mut self, at: u64, data: &[u8]) {
        if let Some(queue) = self.common.resetting()
            && self.device.is_queue_reset(queue)
        {
            self.common.queue_was_reset(queue);
        }
        match self.common.write(at, data, &self.memory) {
            Event::None => {}
            Event::Reset => self.reset(),
            Event::DriverOk => self.start(),
            Event::BadQueue => self.device_signal().needs_reset(),
            Event::EnableQueue(queue) => self.start_queue(queue),
            Event::ResetQueue(queue) => self.device.reset_queue(queue),
        }
    }

    /// A notification that was not taken by an ioeventfd. The address says which queue: each has
    /// its own.
    fn kick(&self, queue: u64) {
        let kick = usize::try_from(queue).ok().and_then(|queue| self.kicks.get(queue));
        if let Some(kick) = kick {
            // Fails only if the count would pass 2^64 - 2; then a kick is there already.
            let _ = kick.eventfd.write(1);
        }
    }

    /// DRIVER_OK: gives the device its queues. With none enabled there is nothing to start.
    fn start(&mut self) {
        if self.common.needs_reset() {
            // Set while the driver was not ready for an interrupt (2.1.2).
            self.device_signal().config_changed();
            return;
        }
        self.activate(|_| true);
    }

    /// Gives a device that runs a queue that was enabled anew (2.6.1.2).
    fn start_queue(&mut self, index: u16) {
        if self.common.needs_reset() {
            return;
        }
        if let Some(kick) = self.kicks.get(usize::from(index)) {
            kick.clear();
        }
        self.activate(|this| this == index);
    }

    fn activate(&mut self, which: impl Fn(u16) -> bool) {
        let started = self.activation(which).and_then(|activation| match activation.queues.len() {
            0 => Ok(()),
            _ => Ok(self.device.activate(activation)?),
        });
        if let Err(error) = started {
            self.report(&error);
            self.device_signal().needs_reset();
        }
    }

    fn activation(&self, which: impl Fn(u16) -> bool) -> Result<Activation, StartError> {
        let features = self.common.features();
        let queue_features = QueueFeatures::from_bits(features);
        let mut queues = Vec::new();
        for (index, config) in self.common.enabled_queues().filter(|(index, _)| which(*index)) {
            let queue = Queue::new(&self.memory, &config, queue_features)
                .map_err(|error| StartError::Queue(index, error))?;
            // Both exist for every queue of the device.
            let (Some(kick), Some(vector)) =
                (self.kicks.get(usize::from(index)), self.common.queue_vector(index))
            else {
                continue;
            };
            let kick = kick.eventfd.try_clone()?;
            let signal = QueueSignal::new(vector, self.msix.clone(), self.isr.clone());
            queues.push(ActiveQueue { index, queue, kick, signal });
        }
        let device = self.device_signal();
        Ok(Activation { memory: self.memory.clone(), features, queues, device })
    }

    /// Virtio's reset (2.4): the device lets go of everything first, the status reads 0 last. The
    /// PCI function is not reset; BARs and the MSI-X table stay as they are.
    fn reset(&mut self) {
        self.device.reset();
        self.kicks.iter().for_each(Kick::clear);
        self.isr.store(0, Ordering::SeqCst);
        self.msix.clear_pending();
        self.common.reset();
    }

    /// Binds the notification addresses where the BAR now is, after ending what was bound
    /// elsewhere.
    fn bind_notifications(&mut self) {
        let notify = self.layout.range(Structure::Notify).start;
        let mapped = self.config.mapped_bars();
        let base = mapped.iter().find(|mapping| mapping.bar == BAR);
        let base = base.and_then(|mapping| mapping.address.checked_add(notify));
        let mut failure = None;
        for (kick, at) in self.kicks.iter_mut().zip((0..).step_by(NOTIFY_STRIDE as usize)) {
            let wanted = base.and_then(|base| base.checked_add(at));
            if kick.bound == wanted {
                continue;
            }
            if let Some(address) = kick.bound.take()
                && let Err(error) = self.binder.unbind(address, &kick.eventfd)
            {
                failure = Some(error);
            }
            let Some(address) = wanted else { continue };
            match self.binder.bind(address, &kick.eventfd) {
                Ok(()) => kick.bound = Some(address),
                // The kicks of this queue come through write_bar.
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            self.report(&error);
        }
    }

    fn report(&mut self, error: &dyn std::error::Error) {
        if !std::mem::replace(&mut self.failure_reported, true) {
            let device_type = self.device.device_type();
            let told = "told once for each device";
            crate::tell(format_args!("virtio device of type {device_type}: {error} ({told})"));
        }
    }

    /// The offset into the BAR and the length that the PCI-access capability selects, if a driver
    /// may access that (4.1.4.9.1).
    fn pci_access_window(&self) -> Option<(u64, usize)> {
        let mut capability = [0; CAP_BYTES as usize];
        self.config.read(self.pci_access, &mut capability);
        let [_, _, _, _, bar, _, _, _, o0, o1, o2, o3, l0, l1, l2, l3] = capability;
        let at = u64::from(u32::from_le_bytes([o0, o1, o2, o3]));
        let len_bytes = u32::from_le_bytes([l0, l1, l2, l3]);
        let legal = bar == BAR
            && matches!(len_bytes, 1 | 2 | 4)
            && at.is_multiple_of(u64::from(len_bytes))
            && at < self.layout.bar_bytes;
        legal.then_some((at, len_bytes as usize))
    }

    /// The offset of `pci_cfg_data` in configuration space.
    fn pci_access_data(&self) -> u16 {
        self.pci_access + u16::from(CAP_BYTES)
    }
}

impl PciDevice for VirtioPci {
    fn read_config(&self, at: u16, data: &mut [u8]) {
        self.config.read(at, data);
        // With MSI-X off, the PCI status tells what the ISR status does (4.1.4.5.1).
        if let Some(status) = STATUS.checked_sub(at).and_then(|at| data.get_mut(usize::from(at)))
            && !self.msix.is_enabled()
            && self.isr.load(Ordering::SeqCst) != 0
        {
            *status |= STATUS_INTERRUPT;
        }
        // A read of `pci_cfg_data` reads the BAR.
        let field = self.pci_access_data();
        let from_field = i32::from(at) - i32::from(field);
        if from_field >= 4 || from_field + data.len() as i32 <= 0 {
            return;
        }
        let Some((at, len_bytes)) = self.pci_access_window() else { return };
        let mut value = [0; 4];
        if let Some(value) = value.get_mut(..len_bytes) {
            self.read_structure(at, value);
        }
        for (byte, index) in data.iter_mut().zip(from_field..) {
            if let Some(value) = usize::try_from(index).ok().and_then(|index| value.get(index)) {
                *byte = *value;
            }
        }
    }

    fn write_config(&mut self, at: u16, data: &[u8]) {
        self.config.write(at, data);
        self.bind_notifications();
        // A write of `pci_cfg_data` writes the BAR. Of a write that is shorter than the access, the
        // other bytes are what the field last held.
        let field = self.pci_access_data();
        let end = usize::from(at) + data.len();
        if at < field + PCI_ACCESS_DATA_BYTES
            && end > usize::from(field)
            && let Some((at, len_bytes)) = self.pci_access_window()
        {
            let mut value = [0; PCI_ACCESS_DATA_BYTES as usize];
            self.config.read(field, &mut value);
            self.write_structure(at, value.get(..len_bytes).unwrap_or_default());
        }
    }

    fn mapped_bars(&self) -> Vec<BarMapping> {
        self.config.mapped_bars()
    }

    fn read_bar(&mut self, bar: u8, at: u64, data: &mut [u8]) {
        data.fill(0);
        if bar == BAR {
            self.read_structure(at, data);
        }
    }

    fn write_bar(&mut self, bar: u8, at: u64, data: &[u8]) {
        if bar == BAR {
            self.write_structure(at, data);
        }
    }
}

impl Drop for VirtioPci {
    /// The device lets go of guest memory, the machine of the eventfds and vectors.
    fn drop(&mut self) {
        self.device.reset();
        for kick in &mut self.kicks {
            if let Some(address) = kick.bound.take() {
                // Nothing is left to be done about a refusal.
                let _ = self.binder.unbind(address, &kick.eventfd);
            }
        }
        self.msix.reset();
    }
}

fn identity(device_type: u32) -> Result<Identity, TransportError> {
    let device_id = u16::try_from(device_type).ok().and_then(|id| id.checked_add(DEVICE_ID_BASE));
    let device_id = device_id.ok_or(TransportError::DeviceType(device_type))?;
    let class = match device_type {
        VIRTIO_ID_NET => 0x02_00_00,
        VIRTIO_ID_BLOCK => 0x01_80_00,
        _ => 0xff_00_00,
    };
    Ok(Identity {
        vendor_id: VENDOR_ID,
        device_id,
        // Non-transitional devices have revision 1 or higher (4.1.2.1).
        revision: 1,
        class,
        subsystem_vendor_id: VENDOR_ID,
        subsystem_id: device_id,
    })
}

/// Adds all capabilities; gives the offset of the one for access through configuration space.
fn add_capabilities(
    config: &mut ConfigSpace,
    layout: &Layout,
    msix: &Arc<Msix>,
) -> Result<u16, ConfigError> {
    for (cfg_type, structure) in [
        (CAP_COMMON, Structure::Common),
        (CAP_ISR, Structure::Isr),
        (CAP_DEVICE, Structure::Device),
    ] {
        let body = capability_body(CAP_BYTES, cfg_type, &layout.range(structure));
        config.add_capability(CAPABILITY_VENDOR, &body, &[])?;
    }
    let mut body =
        capability_body(CAP_BYTES + 4, CAP_NOTIFY, &layout.range(Structure::Notify)).to_vec();
    body.extend_from_slice(&(NOTIFY_STRIDE as u32).to_le_bytes());
    config.add_capability(CAPABILITY_VENDOR, &body, &[])?;

    let mut body = capability_body(CAP_BYTES + 4, CAP_PCI, &(0..0)).to_vec();
    body.extend_from_slice(&[0; 4]);
    // `bar`, `offset`, `length` and the data.
    let mut writable = [0xff; 18];
    writable[..6].copy_from_slice(&[0, 0, 0xff, 0, 0, 0]);
    let pci_access = config.add_capability(CAPABILITY_VENDOR, &body, &writable)?;
    config.add_msix(
        msix.clone(),
        layout.bar_offset(Structure::MsixTable),
        layout.bar_offset(Structure::MsixPending),
    )?;
    Ok(u16::from(pci_access))
}

/// A `virtio_pci_cap` (4.1.4) without its first two bytes.
fn capability_body(cap_len: u8, cfg_type: u8, place: &Range<u64>) -> [u8; CAP_BYTES as usize - 2] {
    let [o0, o1, o2, o3] = (place.start as u32).to_le_bytes();
    let [l0, l1, l2, l3] = ((place.end - place.start) as u32).to_le_bytes();
    [cap_len, cfg_type, BAR, 0, 0, 0, o0, o1, o2, o3, l0, l1, l2, l3]
}

#[cfg(test)]
mod tests;
