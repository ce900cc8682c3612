//! The driver's side of a packed queue (virtio 1.2, 2.8), and of a queue of either format.

use std::collections::HashMap;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};

use super::{Buf, Driver, Used};
use crate::GuestMemory;
use crate::virtio::queue::{Queue, QueueConfig, QueueFeatures};

/// A packed descriptor as it stands in guest memory, sense or nonsense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawPacked {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub len_bytes: u32,
    /// The buffer's ID.
    pub id: u16,
    /// Flags: the constants of this type and of [`RawDescriptor`](super::RawDescriptor).
    pub flags: u16,
}

impl RawPacked {
    /// Set in available descriptors of odd rounds and in used ones of odd rounds.
    pub const AVAIL: u16 = 1 << 7;
    /// Set in available descriptors of even rounds and in used ones of odd rounds.
    pub const USED: u16 = 1 << 15;

    /// The 16 bytes in guest memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let word = u128::from(self.address)
            | u128::from(self.len_bytes) << 64
            | u128::from(self.id) << 96
            | u128::from(self.flags) << 112;
        word.to_le_bytes()
    }
}

/// A place in the ring, and the wrap counter there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPosition {
    /// Index of a descriptor.
    pub slot: u16,
    /// The wrap counter, 1 in the first round.
    pub wrap: bool,
}

impl RingPosition {
    /// As an event suppression structure has it: the wrap counter is bit 15.
    pub fn to_event(self) -> u16 {
        self.slot | u16::from(self.wrap) << 15
    }

    /// The flags of a descriptor available here.
    pub fn available(self) -> u16 {
        if self.wrap { RawPacked::AVAIL } else { RawPacked::USED }
    }

    /// The flags of a descriptor used here.
    pub fn used(self) -> u16 {
        if self.wrap { RawPacked::AVAIL | RawPacked::USED } else { 0 }
    }

    fn advance(&mut self, size: u16) {
        self.slot += 1;
        if self.slot == size {
            *self = RingPosition { slot: 0, wrap: !self.wrap };
        }
    }
}

/// The driver's side of one packed queue. It is used as [`Driver`] is.
pub struct PackedDriver {
    memory: GuestMemory,
    config: QueueConfig,
    features: QueueFeatures,
    /// One table of `size` descriptors for each ID.
    indirect: u64,
    end: u64,
    free: usize,
    ids: Vec<u16>,
    /// The number of descriptors of each chain in flight, by ID.
    in_flight: HashMap<u16, usize>,
    next: RingPosition,
    next_used: RingPosition,
    /// The descriptors added since the last publication, and the flags of those that begin a
    /// chain: they are not written yet.
    hidden: Vec<(RingPosition, Option<u16>)>,
}

impl PackedDriver {
    /// Flags of an event suppression structure: tell of everything.
    pub const EVENT_ENABLE: u16 = 0;
    /// Tell of nothing.
    pub const EVENT_DISABLE: u16 = 1;
    /// Tell of one descriptor.
    pub const EVENT_DESC: u16 = 2;

    /// Lays the areas of a queue of `size` descriptors out from guest address `base` on (rounded up
    /// to 16) and zeroes them. `features` are the negotiated features.
    pub fn new(memory: &GuestMemory, base: u64, size: u16, features: u64) -> PackedDriver {
        let entries = u64::from(size);
        let desc = base.next_multiple_of(16);
        let driver = desc + 16 * entries;
        let device = driver + 4;
        let indirect = (device + 4).next_multiple_of(16);
        super::write(memory, desc, &vec![0; (indirect - desc) as usize]);
        let start = RingPosition { slot: 0, wrap: true };
        PackedDriver {
            memory: memory.clone(),
            config: QueueConfig { size, desc, driver, device },
            features: QueueFeatures { packed: true, ..QueueFeatures::from_bits(features) },
            indirect,
            end: indirect + 16 * entries * entries,
            free: usize::from(size),
            ids: (0..size).rev().collect(),
            in_flight: HashMap::new(),
            next: start,
            next_used: start,
            hidden: Vec::new(),
        }
    }

    /// As [`Driver::config`].
    pub fn config(&self) -> QueueConfig {
        self.config
    }

    /// As [`Driver::end`].
    pub fn end(&self) -> u64 {
        self.end
    }

    /// As [`Driver::device_queue`].
    pub fn device_queue(&self) -> Queue {
        Queue::new(&self.memory, &self.config, self.features).expect("a good configuration")
    }

    /// Numbers chains with these IDs instead of those below the size, the last one first.
    pub fn use_ids(&mut self, ids: Vec<u16>) {
        self.ids = ids;
    }

    /// As [`Driver::add`]; gives the ID.
    pub fn add(&mut self, bufs: &[Buf]) -> u16 {
        assert!(!bufs.is_empty() && bufs.len() <= self.free, "{} descriptors", bufs.len());
        let id = self.ids.pop().expect("an ID");
        for (i, buf) in bufs.iter().enumerate() {
            let next = if i + 1 < bufs.len() { super::RawDescriptor::NEXT } else { 0 };
            // The ID counts in the last descriptor only.
            let chosen = if next == 0 { id } else { 0x5a5a };
            let raw = raw(buf, chosen, next);
            self.place(raw, i == 0);
        }
        self.in_flight.insert(id, bufs.len());
        id
    }

    /// Adds a chain that is one indirect table (2.8.7); gives the ID.
    pub fn add_indirect(&mut self, bufs: &[Buf]) -> u16 {
        assert!(!bufs.is_empty() && self.free > 0, "{} buffers", bufs.len());
        let id = self.ids.pop().expect("an ID");
        let table = self.indirect_table(id);
        for (at, buf) in (table..).step_by(16).zip(bufs) {
            super::write(&self.memory, at, &raw(buf, 0, 0).to_bytes());
        }
        let len_bytes = 16 * bufs.len() as u32;
        let flags = super::RawDescriptor::INDIRECT;
        self.place(RawPacked { address: table, len_bytes, id, flags }, true);
        self.in_flight.insert(id, 1);
        id
    }

    /// The address of the indirect table that belongs to an ID.
    pub fn indirect_table(&self, id: u16) -> u64 {
        let size = u64::from(self.config.size);
        self.indirect + 16 * size * (u64::from(id) % size)
    }

    /// Writes the next descriptor of the ring; makes it available unless it begins a chain.
    fn place(&mut self, descriptor: RawPacked, first: bool) {
        let at = self.next;
        let flags = descriptor.flags | at.available();
        // What is not available yet has the flags of a used one.
        let written = if first { at.used() ^ (RawPacked::AVAIL | RawPacked::USED) } else { flags };
        self.write_descriptor(at.slot, RawPacked { flags: written, ..descriptor });
        self.hidden.push((at, first.then_some(flags)));
        self.free -= 1;
        self.next.advance(self.config.size);
    }

    /// Makes what was added visible, all of it at the same moment. True if the device wants a kick
    /// for it (2.8.10).
    pub fn publish(&mut self) -> bool {
        if self.hidden.is_empty() {
            return false;
        }
        let hidden = std::mem::take(&mut self.hidden);
        for (at, flags) in hidden.iter().rev() {
            if let Some(flags) = flags {
                self.set_flags(at.slot, *flags);
            }
        }
        fence(Ordering::SeqCst);
        let (event, flags) = self.device_event();
        match flags {
            Self::EVENT_ENABLE => true,
            Self::EVENT_DISABLE => false,
            Self::EVENT_DESC => {
                assert!(self.features.event_idx, "descriptor events are not negotiated");
                assert!(event & 0x7fff < self.config.size, "no such descriptor");
                hidden.iter().any(|(at, _)| at.to_event() == event)
            }
            _ => panic!("the device wrote event flags {flags}"),
        }
    }

    /// Whether [`take_used`](Self::take_used) would give something.
    pub fn has_used(&self) -> bool {
        let at = self.next_used;
        let flags = self.load::<u64>(self.address(at.slot) + 8) >> 48;
        flags as u16 & (RawPacked::AVAIL | RawPacked::USED) == at.used()
    }

    /// As [`Driver::take_used`].
    pub fn take_used(&mut self) -> Option<Used> {
        if !self.has_used() {
            return None;
        }
        let word: u64 = self.load(self.address(self.next_used.slot) + 8);
        let (len_bytes, id, flags) = (word as u32, (word >> 32) as u16, (word >> 48) as u16);
        let descriptors = self.in_flight.remove(&id).expect("a chain in flight");
        self.ids.push(id);
        self.free += descriptors;
        for _ in 0..descriptors {
            self.next_used.advance(self.config.size);
        }
        // Without the flag, the length says nothing (2.8.4).
        let written = flags & super::RawDescriptor::WRITE != 0;
        Some(Used { head: id, written_bytes: if written { len_bytes } else { 0 } })
    }

    /// As [`Driver::wait_used`].
    pub fn wait_used(&mut self) -> Used {
        super::wait_for("used descriptor", || self.take_used())
    }

    /// As [`Driver::in_flight`].
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// As [`Driver::free`].
    pub fn free(&self) -> usize {
        self.free
    }

    /// As [`Driver::want_interrupts`].
    pub fn want_interrupts(&mut self, wanted: bool) {
        let flags = match wanted {
            false => Self::EVENT_DISABLE,
            true if self.features.event_idx => Self::EVENT_DESC,
            true => Self::EVENT_ENABLE,
        };
        self.set_driver_event(self.next_used.to_event(), flags);
        fence(Ordering::SeqCst);
    }

    /// Writes the driver event suppression structure.
    pub fn set_driver_event(&self, event: u16, flags: u16) {
        self.store(self.config.driver, u32::from(event) | u32::from(flags) << 16);
    }

    /// Position and flags of the device event suppression structure.
    pub fn device_event(&self) -> (u16, u16) {
        let word: u32 = self.load(self.config.device);
        (word as u16, (word >> 16) as u16)
    }

    /// Where the next descriptor is made available.
    pub fn next_available(&self) -> RingPosition {
        self.next
    }

    /// Where the next used descriptor is looked for.
    pub fn next_used(&self) -> RingPosition {
        self.next_used
    }

    /// Writes a descriptor, sense or nonsense; its flags last.
    pub fn write_descriptor(&self, slot: u16, descriptor: RawPacked) {
        let at = self.address(slot);
        let [bytes @ .., _, _] = descriptor.to_bytes();
        super::write(&self.memory, at, &bytes);
        self.set_flags(slot, descriptor.flags);
    }

    /// Writes the flags of a descriptor and nothing else.
    pub fn set_flags(&self, slot: u16, flags: u16) {
        self.store(self.address(slot) + 14, flags);
    }

    fn address(&self, slot: u16) -> u64 {
        self.config.desc + 16 * u64::from(slot)
    }

    fn load<T: vm_memory::AtomicAccess>(&self, address: u64) -> T {
        self.memory.load(GuestAddress(address), Ordering::Acquire).expect("in RAM")
    }

    fn store<T: vm_memory::AtomicAccess>(&self, address: u64, value: T) {
        self.memory.store(value, GuestAddress(address), Ordering::Release).expect("in RAM");
    }
}

fn raw(buf: &Buf, id: u16, flags: u16) -> RawPacked {
    let write = if buf.writable { super::RawDescriptor::WRITE } else { 0 };
    RawPacked { address: buf.address, len_bytes: buf.len_bytes, id, flags: flags | write }
}

/// The driver's side of a queue of the format that was negotiated.
pub enum AnyDriver {
    /// Of a split queue.
    Split(Driver),
    /// Of a packed queue.
    Packed(PackedDriver),
}

/// The same on either.
macro_rules! either {
    ($self:ident, $driver:ident => $call:expr) => {
        match $self {
            AnyDriver::Split($driver) => $call,
            AnyDriver::Packed($driver) => $call,
        }
    };
}

impl AnyDriver {
    /// As [`Driver::new`] or [`PackedDriver::new`].
    pub fn new(memory: &GuestMemory, base: u64, size: u16, features: u64) -> AnyDriver {
        if QueueFeatures::from_bits(features).packed {
            AnyDriver::Packed(PackedDriver::new(memory, base, size, features))
        } else {
            AnyDriver::Split(Driver::new(memory, base, size, features))
        }
    }

    /// As [`Driver::config`].
    pub fn config(&self) -> QueueConfig {
        either!(self, driver => driver.config())
    }

    /// As [`Driver::end`].
    pub fn end(&self) -> u64 {
        either!(self, driver => driver.end())
    }

    /// As [`Driver::device_queue`].
    pub fn device_queue(&self) -> Queue {
        either!(self, driver => driver.device_queue())
    }

    /// As [`Driver::add`].
    pub fn add(&mut self, bufs: &[Buf]) -> u16 {
        either!(self, driver => driver.add(bufs))
    }

    /// Adds a chain that is one indirect table.
    pub fn add_indirect(&mut self, bufs: &[Buf]) -> u16 {
        match self {
            AnyDriver::Split(driver) => driver.add_indirect(&[], bufs),
            AnyDriver::Packed(driver) => driver.add_indirect(bufs),
        }
    }

    /// As [`Driver::publish`].
    pub fn publish(&mut self) -> bool {
        either!(self, driver => driver.publish())
    }

    /// As [`Driver::has_used`].
    pub fn has_used(&self) -> bool {
        either!(self, driver => driver.has_used())
    }

    /// As [`Driver::take_used`].
    pub fn take_used(&mut self) -> Option<Used> {
        either!(self, driver => driver.take_used())
    }

    /// As [`Driver::wait_used`].
    pub fn wait_used(&mut self) -> Used {
        either!(self, driver => driver.wait_used())
    }

    /// As [`Driver::in_flight`].
    pub fn in_flight(&self) -> usize {
        either!(self, driver => driver.in_flight())
    }

    /// As [`Driver::free`].
    pub fn free(&self) -> usize {
        either!(self, driver => driver.free())
    }

    /// As [`Driver::want_interrupts`].
    pub fn want_interrupts(&mut self, wanted: bool) {
        either!(self, driver => driver.want_interrupts(wanted));
    }

    /// Breaks the queue as badly as its format allows: more is available than there is.
    pub fn wreck(&mut self) {
        match self {
            AnyDriver::Split(driver) => driver.set_available_index(5000),
            AnyDriver::Packed(driver) => {
                let mut at = driver.next_available();
                for _ in 0..driver.config.size {
                    let flags = at.available() | super::RawDescriptor::NEXT;
                    driver.write_descriptor(at.slot, RawPacked { flags, ..RawPacked::default() });
                    at.advance(driver.config.size);
                }
            }
        }
    }
}
