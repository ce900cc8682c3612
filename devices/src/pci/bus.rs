//! PCI bus 0: the host bridge at 00:00.0 and single-function devices after it, the two ways to their
//! configuration space, and the routing of memory accesses to their BARs.
//!
//! # What a hostile guest can do with BARs
//! Put them anywhere, over each other and over anything else. The routing table is rebuilt from what
//! the BARs say after each change: it never has more entries than there are BARs, a BAR that overlaps
//! one of a lower device number (or index) is not routed, and one that would wrap around the end of
//! the address space cannot exist, being aligned to its size. RAM cannot be shadowed, for accesses to
//! it never get here; fixed devices cannot, for [`MmioBus`](crate::bus::MmioBus) asks them first.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::bar::{BarAllocator, NoSpace};
use super::config::{BAR0, ConfigSpace, Identity};
use super::{BarMapping, PciDevice};
use crate::bus::BusDevice;

/// A device as the bus holds it.
pub type SharedPciDevice = Arc<Mutex<dyn PciDevice>>;

/// The first I/O port of configuration mechanism #1 (PCI Local Bus 3.0, 3.2.2.3.2).
pub const CONFIG_PORT: u16 = 0xcf8;
/// The number of its ports: address (4) and data (4).
pub const CONFIG_PORTS: u16 = 8;
/// Bytes of ECAM address space of bus 0 (PCI Express 5.0, 7.2.2).
pub const ECAM_BYTES: u64 = 1 << 20;

/// Devices a bus can have.
const MAX_DEVICES: usize = 32;
/// CONFIG_ADDRESS: translate accesses of CONFIG_DATA into configuration accesses.
const CONFIG_ENABLE: u32 = 1 << 31;
/// CONFIG_ADDRESS: the bits that exist.
const CONFIG_ADDRESS_BITS: u32 = 0x80ff_fffc;
/// BAR registers of a function.
const BAR_REGISTERS: u16 = 6;

/// Why a device cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PciError {
    /// Bus 0 has all the devices it can have.
    #[error("a PCI bus has no more than {MAX_DEVICES} devices")]
    BusFull,
    /// The address window is too small.
    #[error(transparent)]
    NoSpace(#[from] NoSpace),
}

/// The host bridge: an identity, and nothing else (Red Hat's generic PCIe host bridge).
struct HostBridge(ConfigSpace);

impl HostBridge {
    fn new() -> Self {
        HostBridge(ConfigSpace::new(&Identity {
            vendor_id: 0x1b36,
            device_id: 0x0008,
            revision: 0,
            class: 0x06_00_00,
            subsystem_vendor_id: 0x1af4,
            subsystem_id: 0x1100,
        }))
    }
}

impl PciDevice for HostBridge {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.read(offset, data);
    }
    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.0.write(offset, data);
    }
    fn mapped_bars(&self) -> Vec<BarMapping> {
        self.0.mapped_bars()
    }
    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
}

/// A routed BAR.
#[derive(Clone, Copy)]
struct Window {
    first: u64,
    last: u64,
    device: usize,
    bar: u8,
}

/// What the BARs of all devices say, and the routing made of it.
#[derive(Default)]
struct Routing {
    /// By device number.
    mapped: Vec<Vec<BarMapping>>,
    /// Sorted by address, without overlaps.
    windows: Vec<Window>,
}

impl Routing {
    /// Takes note of the BARs of `device`, and makes the routing anew.
    fn update(&mut self, device: usize, bars: Vec<BarMapping>) {
        let Some(slot) = self.mapped.get_mut(device) else { return };
        *slot = bars;
        self.windows.clear();
        for (device, bars) in self.mapped.iter().enumerate() {
            for mapping in bars {
                let Some(last) = mapping
                    .size_bytes
                    .checked_sub(1)
                    .and_then(|beyond| mapping.address.checked_add(beyond))
                else {
                    continue;
                };
                let window = Window { first: mapping.address, last, device, bar: mapping.bar };
                let at = self.windows.partition_point(|other| other.last < window.first);
                if self.windows.get(at).is_none_or(|next| next.first > last) {
                    self.windows.insert(at, window);
                }
            }
        }
    }

    /// The window in which all of `bytes` bytes at `address` lie.
    fn find(&self, address: u64, bytes: usize) -> Option<Window> {
        let last = address.checked_add(bytes.checked_sub(1)? as u64)?;
        let at = self.windows.partition_point(|window| window.last < address);
        self.windows
            .get(at)
            .filter(|window| window.first <= address && last <= window.last)
            .copied()
    }
}

/// PCI bus 0. Devices are added first; then it is shared by all vCPUs.
pub struct PciRoot {
    /// By device number; the host bridge is 0.
    devices: Vec<SharedPciDevice>,
    /// CONFIG_ADDRESS.
    address: AtomicU32,
    routing: RwLock<Routing>,
    allocator: BarAllocator,
}

impl PciRoot {
    /// A bus with the host bridge alone. `window` are the guest physical addresses for BARs: above
    /// RAM, within what the CPUs can address, and as ACPI describes them to the guest.
    pub fn new(window: RangeInclusive<u64>) -> Self {
        PciRoot {
            devices: vec![Arc::new(Mutex::new(HostBridge::new()))],
            address: AtomicU32::new(0),
            routing: RwLock::new(Routing { mapped: vec![Vec::new()], windows: Vec::new() }),
            allocator: BarAllocator::new(window),
        }
    }

    /// Adds `device`, gives its BARs addresses as firmware would, and returns its device number.
    /// Memory decoding stays off: the guest's driver switches it on.
    ///
    /// # Errors
    /// [`PciError`], if the bus or the window is full; the device is then not on the bus.
    pub fn add(&mut self, device: SharedPciDevice) -> Result<u8, PciError> {
        let number = self.devices.len();
        if number >= MAX_DEVICES {
            return Err(PciError::BusFull);
        }
        let mapped = {
            let mut device = lock(&device);
            assign_bars(&mut *device, &mut self.allocator)?;
            device.mapped_bars()
        };
        self.devices.push(device);
        let routing = self.routing.get_mut().unwrap_or_else(PoisonError::into_inner);
        routing.mapped.push(Vec::new());
        routing.update(number, mapped);
        Ok(number as u8)
    }

    /// Reads memory at `address`; false, and `data` untouched, if that is not wholly within a BAR.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((window, device)) = self.route(address, data.len()) else { return false };
        lock(device).read_bar(window.bar, address - window.first, data);
        true
    }

    /// Writes memory at `address`; false if that is not wholly within a BAR.
    pub fn write_memory(&self, address: u64, data: &[u8]) -> bool {
        let Some((window, device)) = self.route(address, data.len()) else { return false };
        lock(device).write_bar(window.bar, address - window.first, data);
        true
    }

    /// Reads configuration space through ECAM, at `offset` bytes into its area.
    pub fn read_ecam(&self, offset: u64, data: &mut [u8]) {
        self.read_config(Target::from_ecam(offset), data);
    }

    /// Writes configuration space through ECAM, at `offset` bytes into its area.
    pub fn write_ecam(&self, offset: u64, data: &[u8]) {
        self.write_config(Target::from_ecam(offset), data);
    }

    /// Reads port [`CONFIG_PORT`]` + offset`.
    pub fn read_port(&self, offset: u64, data: &mut [u8]) {
        let address = self.address.load(Ordering::Relaxed);
        match (offset, &mut *data) {
            // CONFIG_ADDRESS answers double words only.
            (0, [_, _, _, _]) => data.copy_from_slice(&address.to_le_bytes()),
            (4..8, _) => self.read_config(Target::from_ports(address, offset), data),
            _ => data.fill(0xff),
        }
    }

    /// Writes port [`CONFIG_PORT`]` + offset`.
    pub fn write_port(&self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (0, &[a, b, c, d]) => {
                let address = u32::from_le_bytes([a, b, c, d]) & CONFIG_ADDRESS_BITS;
                self.address.store(address, Ordering::Relaxed);
            }
            (4..8, _) => {
                let address = self.address.load(Ordering::Relaxed);
                self.write_config(Target::from_ports(address, offset), data);
            }
            _ => {}
        }
    }

    fn route(&self, address: u64, bytes: usize) -> Option<(Window, &SharedPciDevice)> {
        // The device's own lock comes after this one is released: a device may take long.
        let window = {
            let routing = self.routing.read().unwrap_or_else(PoisonError::into_inner);
            routing.find(address, bytes)?
        };
        Some((window, self.devices.get(window.device)?))
    }

    fn read_config(&self, target: Option<Target>, data: &mut [u8]) {
        let target = target.filter(|target| target.can_access(data.len()));
        match target.and_then(|target| Some((self.devices.get(target.device)?, target.register))) {
            Some((device, register)) => lock(device).read_config(register, data),
            None => data.fill(0xff),
        }
    }

    fn write_config(&self, target: Option<Target>, data: &[u8]) {
        let Some(target) = target.filter(|target| target.can_access(data.len())) else { return };
        let Some(device) = self.devices.get(target.device) else { return };
        let mut device = lock(device);
        let before = device.mapped_bars();
        device.write_config(target.register, data);
        let after = device.mapped_bars();
        if before != after {
            // Still under the device's lock, so that of two writers the later one is routed.
            let mut routing = self.routing.write().unwrap_or_else(PoisonError::into_inner);
            routing.update(target.device, after);
        }
    }
}

/// A register of a function on bus 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    device: usize,
    register: u16,
}

impl Target {
    /// What an ECAM offset names: bus in bits 27:20, device 19:15, function 14:12, register 11:0.
    fn from_ecam(offset: u64) -> Option<Self> {
        let function = offset >> 12;
        (function >> 8 == 0 && function & 7 == 0)
            .then_some(Target { device: (function >> 3) as usize, register: offset as u16 & 0xfff })
    }

    /// What CONFIG_ADDRESS and an offset from [`CONFIG_PORT`] (4 to 7) name.
    fn from_ports(address: u32, offset: u64) -> Option<Self> {
        let (bus, function) = (address >> 16 & 0xff, address >> 8 & 7);
        (address & CONFIG_ENABLE != 0 && bus == 0 && function == 0).then_some(Target {
            device: (address >> 11 & 0x1f) as usize,
            register: (address & 0xfc) as u16 | (offset & 3) as u16,
        })
    }

    /// An access has 1, 2 or 4 bytes and does not cross a double word.
    fn can_access(&self, bytes: usize) -> bool {
        matches!(bytes, 1 | 2 | 4) && usize::from(self.register & 3) + bytes <= 4
    }
}

/// Gives addresses to the BARs of `device`, the way firmware does it: all ones, and the size reads
/// back (PCI Local Bus 3.0, 6.2.5.1). Memory decoding must be off.
fn assign_bars(device: &mut dyn PciDevice, allocator: &mut BarAllocator) -> Result<(), NoSpace> {
    let mut index = 0;
    while index < BAR_REGISTERS {
        let low = BAR0 + index * 4;
        let high = low + 4;
        device.write_config(low, &[0xff; 4]);
        let mask = read_dword(device, low);
        // Only 64-bit memory BARs exist here: bits 2:1 are 10b, bit 0 is 0.
        if mask & 0b111 != 0b100 {
            index += 1;
            continue;
        }
        device.write_config(high, &[0xff; 4]);
        let mask = u64::from(read_dword(device, high)) << 32 | u64::from(mask & !0xf);
        // The lowest writable bit is the size.
        let address = allocator.allocate(mask & mask.wrapping_neg())?;
        device.write_config(low, &(address as u32).to_le_bytes());
        device.write_config(high, &((address >> 32) as u32).to_le_bytes());
        index += 2;
    }
    Ok(())
}

fn read_dword(device: &dyn PciDevice, register: u16) -> u32 {
    let mut data = [0; 4];
    device.read_config(register, &mut data);
    u32::from_le_bytes(data)
}

fn lock<'a>(device: &'a Mutex<dyn PciDevice + 'static>) -> MutexGuard<'a, dyn PciDevice + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Configuration mechanism #1 as a device at [`CONFIG_PORT`], [`CONFIG_PORTS`] long.
pub struct ConfigPorts(pub Arc<PciRoot>);

impl BusDevice for ConfigPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.0.read_port(offset, data);
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        self.0.write_port(offset, data);
    }
}

/// The ECAM area as a device, [`ECAM_BYTES`] long.
pub struct Ecam(pub Arc<PciRoot>);

impl BusDevice for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.0.read_ecam(offset, data);
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        self.0.write_ecam(offset, data);
    }
}

#[cfg(test)]
mod tests;
