//! Type 0 configuration space (PCI Local Bus 3.0, 6.1): 256 bytes of which a guest can change the
//! bits a mask allows, with 64-bit BARs and a list of capabilities.
//!
//! There are no INTx interrupts (the interrupt pin is 0) and no expansion ROM. The extended space of
//! PCI Express (256 to 4095) reads as zero: an empty list of extended capabilities.

use std::sync::Arc;

use super::bar::Bar;
use super::msix::{self, Msix};
use super::{BarMapping, bar};

/// Bytes of the space that are not always zero.
const BYTES: usize = 256;

/// Offsets in the header (6.1, figure 6-1).
const VENDOR_ID: u16 = 0x00;
const DEVICE_ID: u16 = 0x02;
const COMMAND: u16 = 0x04;
pub(crate) const STATUS: u16 = 0x06;
const REVISION: u16 = 0x08;
const CACHE_LINE_SIZE: u16 = 0x0c;
const SUBSYSTEM_VENDOR_ID: u16 = 0x2c;
const SUBSYSTEM_ID: u16 = 0x2e;
const CAPABILITIES: u16 = 0x34;
const INTERRUPT_LINE: u16 = 0x3c;
/// The first BAR.
pub(super) const BAR0: u16 = 0x10;

/// Where the first capability goes.
const FIRST_CAPABILITY: u16 = 0x40;

/// Command: the memory BARs answer.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: the function may access memory (and send MSIs).
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Command: no INTx.
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Status: the function has an INTx interrupt pending.
pub(crate) const STATUS_INTERRUPT: u8 = 1 << 3;
/// Status: there is a capability list.
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// The capability ID of a vendor's own capability; virtio's all are (virtio 1.2, 4.1.4).
pub const CAPABILITY_VENDOR: u8 = 0x09;

/// Who a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor_id: u16,
    /// Device ID.
    pub device_id: u16,
    /// Revision ID.
    pub revision: u8,
    /// Base class, sub-class and programming interface, 24 bits: 0x060000 is a host bridge.
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor_id: u16,
    /// Subsystem ID.
    pub subsystem_id: u16,
}

/// Where a structure lies in a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarOffset {
    /// BAR index.
    pub bar: u8,
    /// Offset in bytes, a multiple of 8.
    pub offset_bytes: u32,
}

/// Why a configuration space cannot be built as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No such BAR can exist.
    #[error(transparent)]
    Bar(#[from] bar::BarError),
    /// The BAR's registers are taken.
    #[error("BAR {0} is there already")]
    BarTaken(u8),
    /// The capability list is full.
    #[error("no room for a capability of {0} bytes")]
    NoRoom(usize),
    /// The MSI-X table or pending bits do not lie wholly in a BAR of the function, 8-byte aligned.
    #[error("MSI-X structures do not fit BAR {} at {:#x}", .0.bar, .0.offset_bytes)]
    MsixPlace(BarOffset),
}

/// The MSI-X capability: its control word lives in [`Msix`].
struct MsixCapability {
    /// Offset of the message control word.
    control: u16,
    msix: Arc<Msix>,
}

/// The configuration space of one function.
pub struct ConfigSpace {
    bytes: [u8; BYTES],
    /// The bits a guest can write.
    writable: [u8; BYTES],
    bars: Vec<Bar>,
    /// Offset of the byte that points to the next capability.
    link: u16,
    /// Offset of the first byte free for capabilities.
    free: u16,
    msix: Option<MsixCapability>,
}

impl ConfigSpace {
    /// A space without BARs and capabilities, decoding nothing.
    pub fn new(identity: &Identity) -> Self {
        let mut space = ConfigSpace {
            bytes: [0; BYTES],
            writable: [0; BYTES],
            bars: Vec::new(),
            link: CAPABILITIES,
            free: FIRST_CAPABILITY,
            msix: None,
        };
        let class = identity.class << 8 | u32::from(identity.revision);
        space.set(VENDOR_ID, &identity.vendor_id.to_le_bytes());
        space.set(DEVICE_ID, &identity.device_id.to_le_bytes());
        space.set(REVISION, &class.to_le_bytes());
        space.set(SUBSYSTEM_VENDOR_ID, &identity.subsystem_vendor_id.to_le_bytes());
        space.set(SUBSYSTEM_ID, &identity.subsystem_id.to_le_bytes());
        let command = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE;
        space.allow(COMMAND, &command.to_le_bytes());
        space.allow(CACHE_LINE_SIZE, &[0xff]);
        space.allow(INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Adds a BAR, with no address yet.
    ///
    /// # Errors
    /// [`ConfigError::BarTaken`], if there is one with its index.
    pub fn add_bar(&mut self, bar: Bar) -> Result<(), ConfigError> {
        if self.bars.iter().any(|other| other.index() == bar.index()) {
            return Err(ConfigError::BarTaken(bar.index()));
        }
        self.set(bar.register(), &bar.type_bits().to_le_bytes());
        self.allow(bar.register(), &bar.writable_bits().to_le_bytes());
        self.bars.push(bar);
        self.bars.sort_by_key(Bar::index);
        Ok(())
    }

    /// Appends a capability (6.7) and returns its offset. `body` is what follows the ID and the
    /// link, the first two bytes; `writable` are the bits of `body` a guest can change, zeroes where
    /// it is shorter.
    ///
    /// # Errors
    /// [`ConfigError::NoRoom`], if it does not fit behind the others.
    pub fn add_capability(
        &mut self,
        id: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<u8, ConfigError> {
        let length = body.len().saturating_add(2);
        let no_room = ConfigError::NoRoom(length);
        let start = u8::try_from(self.free).map_err(|_| no_room)?;
        if length > BYTES - usize::from(start) || writable.len() > body.len() {
            return Err(no_room);
        }
        let at = u16::from(start);
        self.set(self.link, &[start]);
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.allow(at + 2, writable);
        self.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.link = at + 1;
        self.free = at + (length as u16).next_multiple_of(4);
        Ok(start)
    }

    /// Appends the MSI-X capability (6.8.2) of `msix`, whose table and pending bits lie at `table`
    /// and `pba`, and returns its offset. The guest's writes of the control word go to `msix`.
    ///
    /// # Errors
    /// [`ConfigError::MsixPlace`], if a structure is not inside a BAR added before;
    /// [`ConfigError::NoRoom`].
    pub fn add_msix(
        &mut self,
        msix: Arc<Msix>,
        table: BarOffset,
        pba: BarOffset,
    ) -> Result<u8, ConfigError> {
        for (place, bytes) in [(table, msix.table_bytes()), (pba, msix.pba_bytes())] {
            let end = u64::from(place.offset_bytes) + bytes;
            let fits = |bar: &Bar| bar.index() == place.bar && end <= bar.size_bytes();
            if place.offset_bytes % 8 != 0 || !self.bars.iter().any(fits) {
                return Err(ConfigError::MsixPlace(place));
            }
        }
        let mut body = [0; 10];
        let words = [table, pba].map(|place| place.offset_bytes | u32::from(place.bar));
        let fields = words.iter().flat_map(|word| word.to_le_bytes());
        for (byte, value) in body.iter_mut().skip(2).zip(fields) {
            *byte = value;
        }
        let start = self.add_capability(msix::CAPABILITY_ID, &body, &[])?;
        self.msix = Some(MsixCapability { control: u16::from(start) + 2, msix });
        Ok(start)
    }

    /// Reads `data.len()` bytes at `offset`. What is not there reads as zero.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(usize::from(offset)..) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
        if let Some(capability) = &self.msix {
            let control = capability.msix.control().to_le_bytes();
            for (value, at) in control.into_iter().zip(capability.control..) {
                let place = at.checked_sub(offset).and_then(|at| data.get_mut(usize::from(at)));
                if let Some(byte) = place {
                    *byte = value;
                }
            }
        }
    }

    /// Writes `data` at `offset`: the bits that can be written, and no others.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        for (&value, at) in data.iter().zip(usize::from(offset)..) {
            if let (Some(byte), Some(&mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = *byte & !mask | value & mask;
            }
        }
        self.write_msix_control(offset, data);
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        u16::from_le_bytes(self.get(COMMAND))
    }

    /// The BARs that answer now, in order of their index.
    pub fn mapped_bars(&self) -> Vec<BarMapping> {
        if self.command() & COMMAND_MEMORY == 0 {
            return Vec::new();
        }
        self.bars
            .iter()
            .filter_map(|bar| bar.mapping(u64::from_le_bytes(self.get(bar.register()))))
            .collect()
    }

    /// Passes a write of the upper byte of MSI-X message control on, which has both writable bits.
    fn write_msix_control(&self, offset: u16, data: &[u8]) {
        let Some(MsixCapability { control, msix }) = &self.msix else { return };
        let upper = (control + 1).checked_sub(offset).and_then(|at| data.get(usize::from(at)));
        if let Some(&byte) = upper {
            let value = u16::from(byte) << 8;
            msix.set_control(
                value & msix::CONTROL_ENABLE != 0,
                value & msix::CONTROL_FUNCTION_MASK != 0,
            );
        }
    }

    fn get<const N: usize>(&self, offset: u16) -> [u8; N] {
        self.bytes
            .get(usize::from(offset)..)
            .and_then(<[u8]>::first_chunk)
            .copied()
            .unwrap_or([0; N])
    }

    fn set(&mut self, offset: u16, values: &[u8]) {
        for (byte, value) in self.bytes.iter_mut().skip(offset.into()).zip(values) {
            *byte = *value;
        }
    }

    fn allow(&mut self, offset: u16, masks: &[u8]) {
        for (byte, mask) in self.writable.iter_mut().skip(offset.into()).zip(masks) {
            *byte = *mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use proptest::prelude::*;

    use super::*;
    use crate::irq::{MsiMessage, MsiSink};

    struct NoSink;
    impl MsiSink for NoSink {
        fn trigger(&self, _vector: u16) {}
        fn unmask(&self, _vector: u16, _message: MsiMessage) -> io::Result<()> {
            Ok(())
        }
        fn mask(&self, _vector: u16) -> io::Result<()> {
            Ok(())
        }
    }

    const IDENTITY: Identity = Identity {
        vendor_id: 0x1af4,
        device_id: 0x1042,
        revision: 1,
        class: 0x01_80_00,
        subsystem_vendor_id: 0x1af4,
        subsystem_id: 0x1100,
    };
    const BAR_BYTES: u64 = 0x8000;

    fn at(bar: u8, offset_bytes: u32) -> BarOffset {
        BarOffset { bar, offset_bytes }
    }

    /// A function with a BAR, a vendor capability of which the last four bytes are writable, and
    /// MSI-X with three vectors.
    fn function() -> (ConfigSpace, Arc<Msix>) {
        let mut space = ConfigSpace::new(&IDENTITY);
        space.add_bar(Bar::new(0, BAR_BYTES, false).unwrap()).unwrap();
        let body = [20, 5, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut writable = [0; 18];
        writable[14..].fill(0xff);
        assert_eq!(space.add_capability(CAPABILITY_VENDOR, &body, &writable), Ok(0x40));
        let msix = Arc::new(Msix::new(3, Arc::new(NoSink)));
        assert_eq!(space.add_msix(msix.clone(), at(0, 0x4000), at(0, 0x6000)), Ok(0x54));
        (space, msix)
    }

    fn read(space: &ConfigSpace, offset: u16) -> u32 {
        let mut data = [0xff; 4];
        space.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(space: &mut ConfigSpace, offset: u16, value: u32) {
        space.write(offset, &value.to_le_bytes());
    }

    #[test]
    fn the_header_says_who_the_function_is_and_has_no_interrupt_pin() {
        let (space, _) = function();
        assert_eq!(read(&space, 0x00), 0x1042_1af4);
        assert_eq!(read(&space, 0x04), 0x0010_0000);
        assert_eq!(read(&space, 0x08), 0x0180_0001);
        assert_eq!(read(&space, 0x0c), 0);
        assert_eq!(read(&space, 0x2c), 0x1100_1af4);
        assert_eq!(read(&space, 0x30), 0);
        assert_eq!(read(&space, 0x34), 0x40);
        assert_eq!(read(&space, 0x3c), 0);
    }

    #[test]
    fn all_ones_in_a_bar_read_back_as_its_size_mask_in_either_half() {
        let (mut space, _) = function();
        assert_eq!(read(&space, 0x10), 0x4);
        write(&mut space, 0x10, u32::MAX);
        assert_eq!(read(&space, 0x10), 0xffff_8004);
        assert_eq!(read(&space, 0x14), 0);
        write(&mut space, 0x14, u32::MAX);
        assert_eq!(read(&space, 0x14), u32::MAX);
        write(&mut space, 0x18, u32::MAX);
        assert_eq!(read(&space, 0x18), 0, "there is no BAR 2");
    }

    #[test]
    fn a_bar_is_mapped_while_decoding_is_on_and_moves_with_its_halves() {
        let (mut space, _) = function();
        write(&mut space, 0x10, 0xc000_8000);
        write(&mut space, 0x14, 0x12);
        assert_eq!(space.mapped_bars(), []);
        space.write(0x04, &[0x06]);
        let mapping = BarMapping { bar: 0, address: 0x12_c000_8000, size_bytes: BAR_BYTES };
        assert_eq!(space.mapped_bars(), [mapping]);
        space.write(0x13, &[0xd0]);
        assert_eq!(space.mapped_bars()[0].address, 0x12_d000_8000);
        write(&mut space, 0x14, 0);
        write(&mut space, 0x10, 0);
        assert_eq!(space.mapped_bars(), []);
    }

    #[test]
    fn only_memory_decode_bus_master_and_intx_disable_of_the_command_are_writable() {
        let (mut space, _) = function();
        write(&mut space, 0x04, u32::MAX);
        assert_eq!(read(&space, 0x04), 0x0010_0406);
        assert_eq!(space.command(), 0x0406);
    }

    #[test]
    fn capabilities_are_linked_in_order_and_end() {
        let (mut space, _) = function();
        assert_eq!(read(&space, 0x40), 0x0514_5409);
        assert_eq!(read(&space, 0x54), 0x0002_0011);
        assert_eq!(read(&space, 0x58), 0x4000);
        assert_eq!(read(&space, 0x5c), 0x6000);
        write(&mut space, 0x50, 0x1234_5678);
        assert_eq!(read(&space, 0x50), 0x1234_5678);
        write(&mut space, 0x4c, u32::MAX);
        assert_eq!(read(&space, 0x4c), 0);
    }

    #[test]
    fn the_msix_control_word_reaches_the_vectors_in_any_width() {
        let (mut space, msix) = function();
        write(&mut space, 0x54, u32::MAX);
        assert_eq!(read(&space, 0x54), 0xc002_0011);
        assert!(msix.is_enabled());
        space.write(0x56, &[0x00, 0x80]);
        assert_eq!(msix.control(), 0x8002);
        space.write(0x57, &[0x40]);
        assert_eq!(msix.control(), 0x4002);
        space.write(0x56, &[0xff]);
        assert_eq!(msix.control(), 0x4002);
        msix.reset();
        let mut control = [0xff; 2];
        space.read(0x56, &mut control);
        assert_eq!(control, [2, 0]);
    }

    #[test]
    fn the_extended_space_is_empty() {
        let (mut space, _) = function();
        for offset in [0x100, 0xffc, 0xffe, u16::MAX] {
            write(&mut space, offset, u32::MAX);
            assert_eq!(read(&space, offset), 0);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (mut space, msix) = function();
        assert_eq!(space.add_bar(Bar::new(0, 4096, false).unwrap()), Err(ConfigError::BarTaken(0)));
        for place in [at(0, 4), at(0, 0x7ff8), at(2, 0)] {
            let error = space.add_msix(msix.clone(), at(0, 0), place);
            assert_eq!(
                error,
                if place == at(0, 0x7ff8) { Ok(0x60) } else { Err(ConfigError::MsixPlace(place)) }
            );
            assert_eq!(
                space.add_msix(msix.clone(), place, at(0, 0)),
                Err(ConfigError::MsixPlace(place))
            );
        }
        assert_eq!(space.add_capability(9, &[0; 255], &[]), Err(ConfigError::NoRoom(257)));
        assert_eq!(space.add_capability(9, &[0; 2], &[0; 3]), Err(ConfigError::NoRoom(4)));
        while space.add_capability(9, &[0; 14], &[]).is_ok() {}
        while space.add_capability(9, &[0; 2], &[]).is_ok() {}
        assert_eq!(space.add_capability(9, &[], &[]), Err(ConfigError::NoRoom(2)));
    }

    proptest! {
        #[test]
        fn random_accesses_never_panic_and_keep_read_only_bits(
            accesses in prop::collection::vec(
                (prop_oneof![0u16..0x110, any::<u16>()], 0usize..=8, any::<u64>()), 1..64)
        ) {
            let (mut space, _) = function();
            let fixed: Vec<u8> = space.bytes.iter().zip(&space.writable)
                .map(|(byte, mask)| byte & !mask).collect();
            for (offset, length, value) in accesses {
                space.write(offset, &value.to_le_bytes()[..length]);
                let mut data = value.to_le_bytes();
                space.read(offset, &mut data[..length]);
                for mapping in space.mapped_bars() {
                    prop_assert_eq!(mapping.address % mapping.size_bytes, 0);
                    prop_assert!(mapping.address.checked_add(mapping.size_bytes - 1).is_some());
                }
            }
            let now: Vec<u8> = space.bytes.iter().zip(&space.writable)
                .map(|(byte, mask)| byte & !mask).collect();
            prop_assert_eq!(fixed, now);
            prop_assert_eq!(read(&space, 0x54) & 0x3fff_ffff, 0x0002_0011);
        }
    }
}
