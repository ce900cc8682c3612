//! The device's side of a packed ring (virtio 1.2, 2.8).
//!
//! One ring of descriptors goes both ways. The driver makes descriptors available in order; the
//! device writes one used descriptor for each chain over the first free ones, in the order of
//! completion, and goes on by as many as the chain had. Two flag bits in each descriptor say whose
//! it is, together with a wrap counter on each side (2.8.1).
//!
//! Length, ID and flags share one aligned word of 8 bytes. The device reads and writes it with one
//! access each, so that it never sees flags without the fields they stand for, nor shows them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_PACKED_DESC_F_AVAIL, VRING_PACKED_DESC_F_USED, VRING_PACKED_EVENT_F_WRAP_CTR,
    VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE, VRING_PACKED_EVENT_FLAG_ENABLE,
};

use super::descriptor::{DESCRIPTOR_BYTES, Element, F_INDIRECT, F_NEXT, F_WRITE};
use super::ram::RamMap;
use super::{Chain, QueueConfig, QueueError, QueueFeatures};

const F_AVAIL: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const F_USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
/// Length of an event suppression structure in bytes (2.8.14).
const EVENT_BYTES: u64 = 4;
/// Values of its `flags`, which are its upper half.
const EVENT_ENABLE: u32 = VRING_PACKED_EVENT_FLAG_ENABLE << 16;
const EVENT_DISABLE: u32 = VRING_PACKED_EVENT_FLAG_DISABLE << 16;
const EVENT_DESC: u32 = VRING_PACKED_EVENT_FLAG_DESC << 16;
const EVENT_FLAGS: u32 = 3 << 16;
const EVENT_WRAP: u32 = 1 << VRING_PACKED_EVENT_F_WRAP_CTR;

/// A place in the ring, and the wrap counter there.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Position {
    slot: u16,
    wrap: bool,
}

impl Position {
    const START: Position = Position { slot: 0, wrap: true };

    /// `count` descriptors further, at most one round of `size`.
    #[inline]
    fn advanced(self, count: u16, size: u16) -> Position {
        // Sizes are at most 32768: the sum fits.
        let slot = self.slot + count;
        if slot < size {
            Position { slot, ..self }
        } else {
            Position { slot: slot - size, wrap: !self.wrap }
        }
    }

    /// How far `to` is ahead, in a world of two rounds: less than twice the size.
    #[inline]
    fn distance_to(self, to: Position, size: u16) -> u32 {
        let index = |position: Position| {
            u32::from(position.slot) + if position.wrap { 0 } else { u32::from(size) }
        };
        let (from, to) = (index(self), index(to));
        if to >= from { to - from } else { to + 2 * u32::from(size) - from }
    }
}

/// Length, ID and flags of a descriptor, copied out of guest memory.
#[derive(Clone, Copy)]
struct Rest(u64);

impl Rest {
    fn used(id: u16, written_bytes: u32, wrap: bool) -> Rest {
        let written = if written_bytes > 0 { F_WRITE } else { 0 };
        let flags = written | if wrap { F_AVAIL | F_USED } else { 0 };
        Rest(u64::from(written_bytes) | u64::from(id) << 32 | u64::from(flags) << 48)
    }

    #[inline]
    fn id(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    fn flags(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Whether the driver has made it available, where the wrap counter is `wrap` (2.8.1).
    #[inline]
    fn is_available(self, wrap: bool) -> bool {
        self.flags() & (F_AVAIL | F_USED) == if wrap { F_AVAIL } else { F_USED }
    }
}

/// A chain that is popped and not yet pushed.
#[derive(Clone, Copy, Default)]
struct Out {
    /// The driver's number of it, any 16 bits.
    id: u16,
    /// The descriptors it takes in the ring, 0 where no chain is out.
    descriptors: u16,
}

/// The three areas, resolved to host addresses, and where the device stands in them. Whoever has
/// one keeps guest memory mapped.
pub(super) struct Packed {
    /// `size` descriptors of two words.
    ring: *mut u64,
    driver_event: *mut u32,
    device_event: *mut u32,
    size: u16,
    features: QueueFeatures,
    /// The first descriptor not yet popped.
    next_available: Position,
    /// Where the next used descriptor goes.
    next_used: Position,
    /// Descriptors of the chains that are out: those between the two.
    held: u16,
    /// The chains that are out, by the number the device has given each.
    out: Box<[Out]>,
    /// Numbers not given.
    free: Vec<u16>,
    /// The first used descriptor not yet published, which hides the ones after it: it is not
    /// written before them.
    first: Option<(Position, Rest)>,
    /// The descriptors those skip.
    unpublished: u16,
    /// The device event suppression structure as it was last written.
    told: Option<u32>,
}

impl Packed {
    pub(super) fn new(
        ram: &mut RamMap,
        config: &QueueConfig,
        features: QueueFeatures,
    ) -> Result<Packed, QueueError> {
        let size = config.size;
        let ring = ram.area(config.desc, DESCRIPTOR_BYTES * u64::from(size), 16)?.cast();
        let driver_event = ram.area(config.driver, EVENT_BYTES, 4)?.cast();
        let device_event = ram.area(config.device, EVENT_BYTES, 4)?.cast();
        Ok(Packed {
            ring,
            driver_event,
            device_event,
            size,
            features,
            next_available: Position::START,
            next_used: Position::START,
            held: 0,
            out: vec![Out::default(); usize::from(size)].into(),
            free: (0..size).rev().collect(),
            first: None,
            unpublished: 0,
            told: None,
        })
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain, ram: &mut RamMap) -> Result<bool, QueueError> {
        let start = self.next_available;
        // Acquire: the rest of the chain was written before its first descriptor's flags (2.8.6).
        let rest = self.load(start, Ordering::Acquire);
        if !rest.is_available(start.wrap) {
            return Ok(false);
        }
        // Every chain that is out holds a descriptor: with a number for each of those, there is
        // none left only if there is no descriptor left either.
        let number = *self.free.last().ok_or(QueueError::NotGivenBack)?;
        chain.restart(number);
        let (id, descriptors) = self.walk(start, rest, chain, ram)?;
        self.free.pop();
        if let Some(out) = self.out.get_mut(usize::from(number)) {
            *out = Out { id, descriptors };
        }
        self.held += descriptors;
        self.next_available = start.advanced(descriptors, self.size);
        Ok(true)
    }

    /// Goes through the chain that starts with `rest` at `at`; gives its ID, which is in the last
    /// descriptor, and the number of descriptors it takes in the ring, at most those that the device
    /// does not hold.
    #[inline]
    fn walk(
        &self,
        mut at: Position,
        mut rest: Rest,
        chain: &mut Chain,
        ram: &mut RamMap,
    ) -> Result<(u16, u16), QueueError> {
        let left = self.size - self.held;
        if left == 0 {
            return Err(QueueError::NotGivenBack);
        }
        let mut taken = 1;
        loop {
            let element = self.element(at, rest);
            if element.has(F_INDIRECT) {
                // A chain is all of one kind (2.8.5, 2.8.19).
                if taken > 1 || element.has(F_NEXT) || !self.features.indirect {
                    return Err(QueueError::IndirectNotAllowed);
                }
                self.walk_table(&element, chain, ram)?;
                return Ok((rest.id(), taken));
            }
            element.append_to(chain, ram)?;
            if !element.has(F_NEXT) {
                return Ok((rest.id(), taken));
            }
            if taken == left {
                let alone = self.held == 0;
                return Err(if alone {
                    QueueError::ChainTooLong
                } else {
                    QueueError::NotGivenBack
                });
            }
            taken += 1;
            at = at.advanced(1, self.size);
            rest = self.load(at, Ordering::Relaxed);
            if !rest.is_available(at.wrap) {
                return Err(QueueError::ChainNotAvailable(at.slot));
            }
        }
    }

    /// All descriptors of an indirect table are the chain's. WRITE is the only flag that counts in
    /// there, and does not in the one that refers to the table (2.8.7).
    fn walk_table(
        &self,
        element: &Element,
        chain: &mut Chain,
        ram: &mut RamMap,
    ) -> Result<(), QueueError> {
        let table = element.indirect_table(self.size, ram)?;
        for index in 0..table.entries {
            let [address, rest] = table.get(index)?;
            let flags = Rest(rest).flags() & F_WRITE;
            Element { address, len_bytes: rest as u32, flags }.append_to(chain, ram)?;
        }
        Ok(())
    }

    /// Writes nothing a driver that keeps to the rules would look at before
    /// [`publish`](Self::publish): it looks for the next used descriptor at one place (2.8.2).
    #[inline]
    pub(super) fn push(&mut self, number: u16, written_bytes: u32) {
        let Some(out) = self.out.get_mut(usize::from(number)) else { return };
        let Out { id, descriptors } = std::mem::take(out);
        if descriptors == 0 {
            return;
        }
        self.free.push(number);
        let at = self.next_used;
        let used = Rest::used(id, written_bytes, at.wrap);
        match self.first {
            None => self.first = Some((at, used)),
            Some(_) => self.rest_cell(at).store(used.0.to_le(), Ordering::Relaxed),
        }
        self.next_used = at.advanced(descriptors, self.size);
        self.held -= descriptors;
        // Without a bound only with a driver that reuses descriptors it was not given back.
        self.unpublished = self.unpublished.saturating_add(descriptors);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let Some((at, used)) = self.first.take() else { return false };
        let count = std::mem::take(&mut self.unpublished);
        // Release: the descriptors after it, and what the device wrote to the buffers, come first.
        self.rest_cell(at).store(used.0.to_le(), Ordering::Release);
        // The driver stores its wish, fences and looks at the descriptor; the other way round here.
        // One of the two sees the other's store.
        fence(Ordering::SeqCst);
        self.wants_interrupt(at, count)
    }

    /// Whether the driver wants to be told of the `count` descriptors from `start` on (2.8.10). What
    /// makes no sense counts as a yes: an interrupt too many harms nobody.
    #[inline]
    fn wants_interrupt(&self, start: Position, count: u16) -> bool {
        let event = u32::from_le(self.driver_event().load(Ordering::Relaxed));
        match event & EVENT_FLAGS {
            EVENT_DISABLE => false,
            EVENT_DESC if self.features.event_idx => {
                let slot = (event & (EVENT_WRAP - 1)) as u16;
                let event = Position { slot, wrap: event & EVENT_WRAP != 0 };
                slot >= self.size || start.distance_to(event, self.size) < u32::from(count)
            }
            _ => true,
        }
    }

    /// With or without `EVENT_IDX` this is one store, if it was not said before: a descriptor event
    /// of the past would come true again two rounds later.
    #[inline]
    pub(super) fn disable_kicks(&mut self) {
        self.tell(EVENT_DISABLE);
    }

    /// The caller fences and looks once more.
    #[inline]
    pub(super) fn ask_for_kicks(&mut self) {
        let Position { slot, wrap } = self.next_available;
        self.tell(if self.features.event_idx {
            EVENT_DESC | u32::from(slot) | if wrap { EVENT_WRAP } else { 0 }
        } else {
            EVENT_ENABLE
        });
    }

    #[inline]
    fn tell(&mut self, event: u32) {
        if self.told != Some(event) {
            self.told = Some(event);
            self.device_event().store(event.to_le(), Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn has_available(&self) -> bool {
        let next = self.next_available;
        self.load(next, Ordering::Acquire).is_available(next.wrap)
    }

    #[inline]
    fn load(&self, at: Position, order: Ordering) -> Rest {
        Rest(u64::from_le(self.rest_cell(at).load(order)))
    }

    /// The descriptor at `at`, whose length and flags are `rest`.
    #[inline]
    fn element(&self, at: Position, rest: Rest) -> Element {
        debug_assert!(at.slot < self.size);
        // SAFETY: a slot is less than the size, and `new` found as many descriptors to be guest
        // RAM, aligned to 16, which is still mapped. Volatile, for the guest may be writing.
        let address = unsafe { self.ring.add(2 * usize::from(at.slot)).read_volatile() };
        Element { address: u64::from_le(address), len_bytes: rest.0 as u32, flags: rest.flags() }
    }

    /// The second word of a descriptor.
    #[inline]
    fn rest_cell(&self, at: Position) -> &AtomicU64 {
        debug_assert!(at.slot < self.size);
        // SAFETY: as above. All accesses of this process to this word are atomic; the guest's are
        // out of the language's sight.
        unsafe { AtomicU64::from_ptr(self.ring.add(2 * usize::from(at.slot) + 1)) }
    }

    /// What the driver wants to be told of, in one piece.
    #[inline]
    fn driver_event(&self) -> &AtomicU32 {
        // SAFETY: `new` found 4 bytes there to be guest RAM, aligned to 4, which is still mapped.
        unsafe { AtomicU32::from_ptr(self.driver_event) }
    }

    /// What the device wants to be told of, in one piece.
    #[inline]
    fn device_event(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.device_event) }
    }
}
