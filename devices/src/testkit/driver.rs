//! The driver's side of a split queue (virtio 1.2, 2.7).

use std::collections::HashMap;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::virtio::queue::{Queue, QueueConfig, QueueFeatures, need_event};

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub len_bytes: u32,
    /// The device writes it.
    pub writable: bool,
}

impl Buf {
    /// A buffer the device reads.
    pub fn readable(address: u64, len_bytes: u32) -> Buf {
        Buf { address, len_bytes, writable: false }
    }

    /// A buffer the device writes.
    pub fn writable(address: u64, len_bytes: u32) -> Buf {
        Buf { address, len_bytes, writable: true }
    }
}

/// The same bytes in other pieces: every buffer is cut so that its pieces have the lengths of
/// `lens`, over and over (2.7.4.1). A length of 0 makes an empty descriptor, which is legal; there
/// must be another length besides.
pub fn reframe(bufs: &[Buf], lens: &[u32]) -> Vec<Buf> {
    assert!(lens.iter().any(|&len| len > 0));
    let mut lens = lens.iter().copied().cycle();
    let mut pieces = Vec::new();
    for buf in bufs {
        let mut left = *buf;
        while left.len_bytes > 0 {
            let len_bytes = left.len_bytes.min(lens.next().expect("endless"));
            pieces.push(Buf { len_bytes, ..left });
            left.address += u64::from(len_bytes);
            left.len_bytes -= len_bytes;
        }
    }
    pieces
}

/// A descriptor as it stands in guest memory, sense or nonsense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub len_bytes: u32,
    /// Flags: the constants of this type.
    pub flags: u16,
    /// The next descriptor, with [`NEXT`](Self::NEXT).
    pub next: u16,
}

impl RawDescriptor {
    /// The chain continues at `next`.
    pub const NEXT: u16 = 1;
    /// The device writes the buffer.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;

    /// The 16 bytes in guest memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let word = u128::from(self.address)
            | u128::from(self.len_bytes) << 64
            | u128::from(self.flags) << 96
            | u128::from(self.next) << 112;
        word.to_le_bytes()
    }
}

/// A used element (2.7.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The head of the chain that came back.
    pub head: u16,
    /// How many bytes the device says it wrote.
    pub written_bytes: u32,
}

/// The driver's side of one split queue.
///
/// Chains are added with [`add`](Self::add) or [`add_indirect`](Self::add_indirect), become visible
/// with [`publish`](Self::publish), and come back from [`take_used`](Self::take_used).
pub struct Driver {
    memory: GuestMemory,
    config: QueueConfig,
    features: QueueFeatures,
    /// One table of `size` descriptors for each descriptor of the queue.
    indirect: u64,
    end: u64,
    free: Vec<u16>,
    /// The descriptors of each chain in flight, by head.
    in_flight: HashMap<u16, Vec<u16>>,
    next_available: u16,
    published: u16,
    next_used: u16,
}

impl Driver {
    /// Lays the rings of `size` descriptors out from guest address `base` on (rounded up to 16) and
    /// zeroes them. `features` are the negotiated features.
    pub fn new(memory: &GuestMemory, base: u64, size: u16, features: u64) -> Driver {
        let entries = u64::from(size);
        let desc = base.next_multiple_of(16);
        let driver = desc + 16 * entries;
        let device = (driver + 6 + 2 * entries).next_multiple_of(4);
        let indirect = (device + 6 + 8 * entries).next_multiple_of(16);
        super::write(memory, desc, &vec![0; (indirect - desc) as usize]);
        Driver {
            memory: memory.clone(),
            config: QueueConfig { size, desc, driver, device },
            features: QueueFeatures::from_bits(features),
            indirect,
            end: indirect + 16 * entries * entries,
            free: (0..size).rev().collect(),
            in_flight: HashMap::new(),
            next_available: 0,
            published: 0,
            next_used: 0,
        }
    }

    /// Where the rings are.
    pub fn config(&self) -> QueueConfig {
        self.config
    }

    /// The first address past the rings and the room for indirect tables. (That room is touched
    /// only by indirect chains.)
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The device's side of this queue.
    pub fn device_queue(&self) -> Queue {
        Queue::new(&self.memory, &self.config, self.features).expect("a good configuration")
    }

    /// Adds a chain of these buffers and gives its head. Not visible before
    /// [`publish`](Self::publish). Panics if there are too few descriptors.
    pub fn add(&mut self, bufs: &[Buf]) -> u16 {
        self.add_chain(bufs, &[])
    }

    /// Adds a chain of some descriptors followed by an indirect table (2.7.5.3).
    pub fn add_indirect(&mut self, direct: &[Buf], indirect: &[Buf]) -> u16 {
        assert!(!indirect.is_empty(), "an indirect table is not empty");
        self.add_chain(direct, indirect)
    }

    fn add_chain(&mut self, direct: &[Buf], indirect: &[Buf]) -> u16 {
        let count = direct.len() + usize::from(!indirect.is_empty());
        assert!(count > 0 && count <= self.free.len(), "{count} descriptors are not there");
        let taken = self.free.split_off(self.free.len() - count);
        for (i, buf) in direct.iter().enumerate() {
            self.write_descriptor(taken[i], link(buf, taken.get(i + 1).copied()));
        }
        if !indirect.is_empty() {
            let last = taken[count - 1];
            let table = self.indirect_table(last);
            for (i, buf) in indirect.iter().enumerate() {
                let next = (i + 1 < indirect.len()).then_some(i as u16 + 1);
                super::write(&self.memory, table + 16 * i as u64, &link(buf, next).to_bytes());
            }
            let len_bytes = 16 * indirect.len() as u32;
            let flags = RawDescriptor::INDIRECT;
            self.write_descriptor(
                last,
                RawDescriptor { address: table, len_bytes, flags, next: 0 },
            );
        }
        let head = taken[0];
        self.in_flight.insert(head, taken);
        self.make_available(head);
        head
    }

    /// The address of the indirect table that belongs to a descriptor.
    pub fn indirect_table(&self, descriptor: u16) -> u64 {
        self.indirect + 16 * u64::from(self.config.size) * u64::from(descriptor)
    }

    /// Puts `head` in the next available entry, whatever it is.
    pub fn make_available(&mut self, head: u16) {
        self.write_available(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Makes what was added visible. True if the device wants a kick for it (2.7.7.2, 2.7.10).
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_available);
        self.set_available_index(new);
        self.published = new;
        fence(Ordering::SeqCst);
        if old == new {
            false
        } else if self.features.event_idx {
            need_event(self.kick_event(), new, old)
        } else {
            self.used_flags() & 1 == 0
        }
    }

    /// Whether [`take_used`](Self::take_used) would give something.
    pub fn has_used(&self) -> bool {
        self.used_index() != self.next_used
    }

    /// Takes the next used element and frees its descriptors, `None` if there is none. Panics if
    /// the device returned what it was not given.
    pub fn take_used(&mut self) -> Option<Used> {
        if !self.has_used() {
            return None;
        }
        let slot = u64::from(self.next_used % self.config.size);
        let word: u64 =
            self.memory.read_obj(GuestAddress(self.config.device + 4 + 8 * slot)).expect("in RAM");
        let (id, written_bytes) = (word as u32, (word >> 32) as u32);
        let head = u16::try_from(id).expect("a descriptor's index");
        let descriptors = self.in_flight.remove(&head).expect("a chain in flight");
        self.free.extend(descriptors.into_iter().rev());
        self.next_used = self.next_used.wrapping_add(1);
        Some(Used { head, written_bytes })
    }

    /// Waits for the next used element; panics after [`TIMEOUT`](super::TIMEOUT).
    pub fn wait_used(&mut self) -> Used {
        super::wait_for("used element", || self.take_used())
    }

    /// The number of chains not yet taken back.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The number of free descriptors.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Asks for an interrupt with the next used element, or for none. With `EVENT_IDX` it holds
    /// for the elements from the next one on that were not taken yet.
    pub fn want_interrupts(&mut self, wanted: bool) {
        if self.features.event_idx {
            self.set_used_event(self.next_used.wrapping_sub(u16::from(!wanted)));
        } else {
            self.set_available_flags(u16::from(!wanted));
        }
        fence(Ordering::SeqCst);
    }

    /// Sets `used_event`: the driver wants an interrupt when the used index passes it (2.7.7).
    pub fn set_used_event(&self, index: u16) {
        self.store(self.config.driver + 4 + 2 * u64::from(self.config.size), index);
    }

    /// The device's `avail_event`: it wants a kick when the available index passes it (2.7.10).
    pub fn kick_event(&self) -> u16 {
        self.load(self.config.device + 4 + 8 * u64::from(self.config.size))
    }

    /// `used.flags`: bit 0 is NO_NOTIFY.
    pub fn used_flags(&self) -> u16 {
        self.load(self.config.device)
    }

    /// `used.idx`, the device's index.
    pub fn used_index(&self) -> u16 {
        self.load(self.config.device + 2)
    }

    /// Writes a descriptor of the queue's table, sense or nonsense.
    pub fn write_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        let at = self.config.desc + 16 * u64::from(index);
        super::write(&self.memory, at, &descriptor.to_bytes());
    }

    /// Writes an entry of the available ring; `index` counts on past the size.
    pub fn write_available(&self, index: u16, head: u16) {
        let slot = u64::from(index % self.config.size);
        self.store(self.config.driver + 4 + 2 * slot, head);
    }

    /// Writes `avail.flags`: bit 0 is NO_INTERRUPT.
    pub fn set_available_flags(&self, flags: u16) {
        self.store(self.config.driver, flags);
    }

    /// Writes `avail.idx` and nothing else.
    pub fn set_available_index(&self, index: u16) {
        self.store(self.config.driver + 2, index);
    }

    fn load(&self, address: u64) -> u16 {
        self.memory.load(GuestAddress(address), Ordering::Acquire).expect("in RAM")
    }

    fn store(&self, address: u64, value: u16) {
        self.memory.store(value, GuestAddress(address), Ordering::Release).expect("in RAM");
    }
}

fn link(buf: &Buf, next: Option<u16>) -> RawDescriptor {
    let mut flags = 0;
    if buf.writable {
        flags |= RawDescriptor::WRITE;
    }
    if next.is_some() {
        flags |= RawDescriptor::NEXT;
    }
    let next = next.unwrap_or(0);
    RawDescriptor { address: buf.address, len_bytes: buf.len_bytes, flags, next }
}
