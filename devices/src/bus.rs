//! Port and memory-mapped I/O dispatch: which device an access of a vCPU goes to.
//!
//! Both buses are built once, by one thread, and then shared: a look-up takes no lock, only the
//! device found has one. Where there is no device, reads give all ones and writes go nowhere, as on
//! a real machine. An access that is not wholly within one device's range counts as such.

use std::sync::{Arc, Mutex, PoisonError};

use crate::pci::bus::PciRoot;

/// A device at fixed addresses.
pub trait BusDevice: Send {
    /// Reads `data.len()` bytes (1 to 8), `offset` bytes into the device's range. All of `data` is
    /// to be filled, little-endian.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Writes `data` (1 to 8 bytes), `offset` bytes into the device's range.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A device as a bus holds it.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

/// Why a device cannot be put on a bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// The range is empty or goes past the last address.
    #[error("{bytes:#x} bytes at {start:#x} are no range of addresses")]
    BadRange {
        /// First address.
        start: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// Another device is there.
    #[error("{bytes:#x} bytes at {start:#x} overlap the device at {other:#x}")]
    Overlap {
        /// First address.
        start: u64,
        /// Length in bytes.
        bytes: u64,
        /// First address of the other device.
        other: u64,
    },
}

struct Range {
    first: u64,
    last: u64,
    device: SharedDevice,
}

/// Ranges of addresses, sorted, without overlaps.
#[derive(Default)]
struct Ranges(Vec<Range>);

impl Ranges {
    fn insert(
        &mut self,
        start: u64,
        bytes: u64,
        limit: u64,
        device: SharedDevice,
    ) -> Result<(), BusError> {
        let last = bytes
            .checked_sub(1)
            .and_then(|beyond| start.checked_add(beyond))
            .filter(|&last| last <= limit)
            .ok_or(BusError::BadRange { start, bytes })?;
        let at = self.0.partition_point(|range| range.last < start);
        if let Some(next) = self.0.get(at).filter(|next| next.first <= last) {
            return Err(BusError::Overlap { start, bytes, other: next.first });
        }
        self.0.insert(at, Range { first: start, last, device });
        Ok(())
    }

    /// The device with all of `bytes` bytes at `address`, and the offset in it.
    fn find(&self, address: u64, bytes: usize) -> Option<(&SharedDevice, u64)> {
        let last = address.checked_add(bytes.checked_sub(1)? as u64)?;
        let at = self.0.partition_point(|range| range.last < address);
        let range = self.0.get(at)?;
        (range.first <= address && last <= range.last)
            .then(|| (&range.device, address - range.first))
    }

    fn read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((device, offset)) = self.find(address, data.len()) else { return false };
        device.lock().unwrap_or_else(PoisonError::into_inner).read(offset, data);
        true
    }

    fn write(&self, address: u64, data: &[u8]) -> bool {
        let Some((device, offset)) = self.find(address, data.len()) else { return false };
        device.lock().unwrap_or_else(PoisonError::into_inner).write(offset, data);
        true
    }
}

/// I/O port space.
#[derive(Default)]
pub struct PioBus(Ranges);

impl PioBus {
    /// A bus without devices.
    pub fn new() -> Self {
        PioBus::default()
    }

    /// Puts `device` at `ports` ports from `start`.
    ///
    /// # Errors
    /// [`BusError`], if the range is no range or is taken.
    pub fn insert(&mut self, start: u16, ports: u16, device: SharedDevice) -> Result<(), BusError> {
        self.0.insert(start.into(), ports.into(), u16::MAX.into(), device)
    }

    /// An IN instruction of `data.len()` bytes.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        if !self.0.read(port.into(), data) {
            data.fill(0xff);
        }
    }

    /// An OUT instruction.
    pub fn write(&self, port: u16, data: &[u8]) {
        self.0.write(port.into(), data);
    }
}

/// Guest physical memory other than RAM: fixed devices, then the BARs of PCI devices.
pub struct MmioBus {
    fixed: Ranges,
    pci: Arc<PciRoot>,
}

impl MmioBus {
    /// A bus without fixed devices. What none of them claims goes to the BARs of `pci`.
    pub fn new(pci: Arc<PciRoot>) -> Self {
        MmioBus { fixed: Ranges::default(), pci }
    }

    /// Puts `device` at `bytes` bytes from `start`.
    ///
    /// # Errors
    /// [`BusError`], if the range is no range or is taken.
    pub fn insert(&mut self, start: u64, bytes: u64, device: SharedDevice) -> Result<(), BusError> {
        self.fixed.insert(start, bytes, u64::MAX, device)
    }

    /// A read of `data.len()` bytes at guest physical `address`.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        if !self.fixed.read(address, data) && !self.pci.read_memory(address, data) {
            data.fill(0xff);
        }
    }

    /// A write at guest physical `address`.
    pub fn write(&self, address: u64, data: &[u8]) {
        if !self.fixed.write(address, data) {
            self.pci.write_memory(address, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads as its offset, and remembers writes.
    #[derive(Default)]
    struct Recorder(Vec<(u64, Vec<u8>)>);

    impl BusDevice for Recorder {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            for (byte, value) in data.iter_mut().zip(offset..) {
                *byte = value as u8;
            }
        }
        fn write(&mut self, offset: u64, data: &[u8]) {
            self.0.push((offset, data.to_vec()));
        }
    }

    fn recorder() -> Arc<Mutex<Recorder>> {
        Arc::default()
    }

    #[test]
    fn an_access_reaches_the_device_with_the_offset_in_its_range() {
        let device = recorder();
        let mut bus = PioBus::new();
        bus.insert(0x3f8, 8, device.clone()).unwrap();
        let mut data = [0; 2];
        bus.read(0x3fd, &mut data);
        assert_eq!(data, [5, 6]);
        bus.write(0x3f8, b"a");
        assert_eq!(device.lock().unwrap().0, [(0, b"a".to_vec())]);
    }

    #[test]
    fn unknown_addresses_and_partial_ones_read_all_ones_and_ignore_writes() {
        let device = recorder();
        let mut bus = PioBus::new();
        bus.insert(0x3f8, 8, device.clone()).unwrap();
        for port in [0, 0x3f5, 0x3f7, 0x3fd, 0x3ff, 0x400, 0xfffd, 0xffff] {
            let mut data = [0; 4];
            bus.read(port, &mut data);
            assert_eq!(data, [0xff; 4], "port {port:#x}");
            bus.write(port, &data);
        }
        bus.read(0x3f8, &mut []);
        assert_eq!(device.lock().unwrap().0, []);
    }

    #[test]
    fn overlapping_and_impossible_ranges_are_errors() {
        let mut bus = PioBus::new();
        bus.insert(0x60, 5, recorder()).unwrap();
        bus.insert(0x70, 1, recorder()).unwrap();
        for (start, ports) in [(0x60, 1), (0x5f, 2), (0x64, 1), (0x50, 0x40)] {
            assert_eq!(
                bus.insert(start, ports, recorder()),
                Err(BusError::Overlap { start: start.into(), bytes: ports.into(), other: 0x60 })
            );
        }
        for (start, ports) in [(0x80, 0), (0xffff, 2)] {
            assert_eq!(
                bus.insert(start, ports, recorder()),
                Err(BusError::BadRange { start: start.into(), bytes: ports.into() })
            );
        }
        bus.insert(0x65, 11, recorder()).unwrap();
        bus.insert(0xffff, 1, recorder()).unwrap();
    }

    #[test]
    fn the_last_address_is_usable_and_nothing_wraps() {
        let pci = Arc::new(PciRoot::new(1 << 32..=u64::MAX));
        let mut bus = MmioBus::new(pci);
        bus.insert(u64::MAX - 7, 8, recorder()).unwrap();
        let start = u64::MAX - 3;
        assert_eq!(bus.insert(start, 8, recorder()), Err(BusError::BadRange { start, bytes: 8 }));
        let mut data = [0; 4];
        bus.read(u64::MAX - 3, &mut data);
        assert_eq!(data, [4, 5, 6, 7]);
        bus.read(u64::MAX - 2, &mut data);
        assert_eq!(data, [0xff; 4]);
    }

    #[test]
    fn both_buses_can_be_shared_by_vcpus() {
        fn shared<T: Send + Sync>() {}
        shared::<PioBus>();
        shared::<MmioBus>();
    }
}
