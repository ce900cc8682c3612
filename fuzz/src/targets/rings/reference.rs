//! What a device must find in the rings, and write to them.

use std::ops::Range;

use devices::GuestMemory;
use devices::virtio::queue::QueueConfig;
use vm_memory::{Bytes, GuestAddress};

/// The features that count.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub packed: bool,
    pub event_idx: bool,
    pub indirect: bool,
}

/// A run of guest memory: address and length in bytes.
type Run = (u64, u64);

/// What a pop must give.
pub enum Found {
    Nothing,
    /// The driver broke this rule.
    Broken(&'static str),
    Chain {
        readable: Vec<Run>,
        writable: Vec<Run>,
        id: u16,
        descriptors: u16,
    },
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A descriptor of either format.
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    /// The next one's index, or the ID.
    last: u16,
}

/// The device's side. Positions count descriptors (packed) or chains (split) from the start.
pub struct Reference {
    memory: GuestMemory,
    config: QueueConfig,
    format: Format,
    ram: Vec<Range<u64>>,
    broken: Option<&'static str>,
    popped: u64,
    /// Split: the driver's index as it was looked at last.
    looked: u64,
    used: u64,
    published: u64,
    /// What is not published yet: position, ID, length.
    waiting: Vec<(u64, u16, u32)>,
}

fn areas(config: &QueueConfig, format: Format) -> [(u64, u64, u64); 3] {
    let size = u64::from(config.size);
    let (driver, align, device) =
        if format.packed { (4, 4, 4) } else { (6 + 2 * size, 2, 6 + 8 * size) };
    [(config.desc, 16 * size, 16), (config.driver, driver, align), (config.device, device, 4)]
}

impl Reference {
    /// Whether there can be such a queue.
    pub fn is_sound(config: &QueueConfig, format: Format, ram: &[Range<u64>]) -> bool {
        let size = config.size;
        let areas = areas(config, format);
        let placed = |&(at, bytes, align): &(u64, u64, u64)| {
            let end = at.checked_add(bytes);
            at % align == 0
                && ram.iter().any(|ram| at >= ram.start && end.is_some_and(|end| end <= ram.end))
        };
        (1..=32768).contains(&size)
            && (format.packed || size.is_power_of_two())
            && areas.iter().all(placed)
    }

    /// Whether two of the areas share memory.
    pub fn areas_overlap(config: &QueueConfig, format: Format) -> bool {
        let mut areas = areas(config, format);
        areas.sort();
        areas.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0)
    }

    pub fn new(
        memory: GuestMemory,
        config: QueueConfig,
        format: Format,
        ram: &[Range<u64>],
    ) -> Reference {
        Reference {
            memory,
            config,
            format,
            ram: ram.to_vec(),
            broken: None,
            popped: 0,
            looked: 0,
            used: 0,
            published: 0,
            waiting: Vec::new(),
        }
    }

    fn size(&self) -> u64 {
        self.config.size.into()
    }

    /// Whether none of the runs lies in the rings or their tables.
    pub fn spares(&self, runs: &[Run]) -> bool {
        let areas = areas(&self.config, self.format);
        runs.iter().all(|&run| areas.iter().all(|&(at, bytes, _)| is_outside(run, (at, bytes))))
    }

    pub fn device_area(&self) -> Run {
        let [.., (at, bytes, _)] = areas(&self.config, self.format);
        (at, bytes)
    }

    /// The driver may write over used descriptors of a packed ring that it was not shown.
    pub fn driver_writes(&mut self) {
        if self.format.packed {
            self.waiting.clear();
        }
    }

    fn u16_at(&self, address: u64) -> u16 {
        self.memory.read_obj(GuestAddress(address)).expect("in RAM")
    }

    fn descriptor(&self, address: u64) -> Descriptor {
        let word = u128::from_le_bytes(self.memory.read_obj(GuestAddress(address)).expect("RAM"));
        let (third, fourth) = ((word >> 96) as u16, (word >> 112) as u16);
        let (flags, last) = if self.format.packed { (fourth, third) } else { (third, fourth) };
        Descriptor { address: word as u64, len: (word >> 64) as u32, flags, last }
    }

    /// Packed: whether the wrap counter is 1 there, as in the first round.
    fn is_odd_round(&self, position: u64) -> bool {
        (position / self.size()).is_multiple_of(2)
    }

    fn ring_descriptor(&self, index: u64) -> Descriptor {
        self.descriptor(self.config.desc + 16 * index)
    }

    /// Packed: whether the descriptor at this position is available (2.8.1).
    fn is_available(&self, position: u64) -> bool {
        let flags = self.ring_descriptor(position % self.size()).flags;
        let odd_round = self.is_odd_round(position);
        (flags >> 7 & 1 != 0) == odd_round && (flags >> 15 & 1 != 0) != odd_round
    }

    /// Whether a pop would find anything.
    pub fn has_available(&self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        if self.format.packed {
            self.is_available(self.popped)
        } else {
            self.u16_at(self.config.driver + 2) != self.popped as u16
        }
    }

    pub fn pop(&mut self) -> Found {
        if let Some(why) = self.broken {
            return Found::Broken(why);
        }
        let found = if self.format.packed { self.pop_packed() } else { self.pop_split() };
        if let Found::Broken(why) = found {
            self.broken = Some(why);
        }
        found
    }

    fn pop_split(&mut self) -> Found {
        if self.popped == self.looked {
            let index = self.u16_at(self.config.driver + 2);
            let ahead = u64::from(index.wrapping_sub(self.popped as u16));
            if ahead == 0 {
                return Found::Nothing;
            }
            // Of all that are out, not only of the new ones.
            if u64::from(index.wrapping_sub(self.used as u16)) > self.size() {
                return Found::Broken("more is available than there is");
            }
            self.looked = self.popped + ahead;
        }
        let head = self.u16_at(self.config.driver + 4 + 2 * (self.popped % self.size()));
        let mut chain = Parts::default();
        let mut table = (self.config.desc, self.size());
        let mut index = u64::from(head);
        let mut in_table = false;
        loop {
            if index >= table.1 {
                return Found::Broken("no such descriptor");
            }
            let descriptor = self.descriptor(table.0 + 16 * index);
            if descriptor.flags & INDIRECT != 0 {
                if in_table || !self.format.indirect || descriptor.flags & NEXT != 0 {
                    return Found::Broken("an indirect table where none is allowed");
                }
                let Some(entries) = self.table(&descriptor) else {
                    return Found::Broken("no such table");
                };
                (table, index, in_table) = ((descriptor.address, entries), 0, true);
                continue;
            }
            if chain.pieces == self.size() {
                return Found::Broken("too long");
            }
            if let Err(why) = self.piece(&descriptor, &mut chain) {
                return Found::Broken(why);
            }
            if descriptor.flags & NEXT == 0 {
                break;
            }
            index = descriptor.last.into();
        }
        self.popped += 1;
        Found::Chain {
            readable: chain.readable,
            writable: chain.writable,
            id: head,
            descriptors: 1,
        }
    }

    fn pop_packed(&mut self) -> Found {
        let start = self.popped;
        if !self.is_available(start) {
            return Found::Nothing;
        }
        let mut chain = Parts::default();
        let mut position = start;
        let id = loop {
            if position - self.used >= self.size() {
                return Found::Broken("descriptors that the device holds");
            }
            if position > start && !self.is_available(position) {
                return Found::Broken("a chain that is not all available");
            }
            let descriptor = self.ring_descriptor(position % self.size());
            position += 1;
            if descriptor.flags & INDIRECT != 0 {
                let alone = position == start + 1 && descriptor.flags & NEXT == 0;
                if !alone || !self.format.indirect {
                    return Found::Broken("an indirect table where none is allowed");
                }
                let Some(entries) = self.table(&descriptor) else {
                    return Found::Broken("no such table");
                };
                for index in 0..entries {
                    let entry = self.descriptor(descriptor.address + 16 * index);
                    if let Err(why) = self.piece(&entry, &mut chain) {
                        return Found::Broken(why);
                    }
                }
                break descriptor.last;
            }
            if let Err(why) = self.piece(&descriptor, &mut chain) {
                return Found::Broken(why);
            }
            if descriptor.flags & NEXT == 0 {
                break descriptor.last;
            }
        };
        self.popped = position;
        let descriptors = (position - start) as u16;
        Found::Chain { readable: chain.readable, writable: chain.writable, id, descriptors }
    }

    /// The number of descriptors in an indirect table, if there can be such a table.
    fn table(&self, descriptor: &Descriptor) -> Option<u64> {
        let bytes = u64::from(descriptor.len);
        let end = descriptor.address.checked_add(bytes)?;
        let in_ram = |ram: &&Range<u64>| descriptor.address >= ram.start && end <= ram.end;
        let entries = bytes / 16;
        self.ram.iter().find(in_ram)?;
        (bytes % 16 == 0 && (1..=self.size()).contains(&entries)).then_some(entries)
    }

    /// Adds a buffer, in pieces where RAM's ranges meet.
    fn piece(&self, descriptor: &Descriptor, chain: &mut Parts) -> Result<(), &'static str> {
        chain.pieces += 1;
        let bytes = u64::from(descriptor.len);
        if bytes == 0 {
            return Ok(());
        }
        let writable = descriptor.flags & WRITE != 0;
        if !writable && !chain.writable.is_empty() {
            return Err("readable after writable");
        }
        let address = descriptor.address;
        let end = address.checked_add(bytes).ok_or("past the end of memory")?;
        // The ranges here do not touch each other.
        if !self.ram.iter().any(|ram| address >= ram.start && end <= ram.end) {
            return Err("a buffer outside RAM");
        }
        let part = if writable { &mut chain.writable } else { &mut chain.readable };
        part.push((address, bytes));
        Ok(())
    }

    pub fn push(&mut self, id: u16, descriptors: u16, written: u32) {
        self.waiting.push((self.used, id, written));
        self.used += u64::from(descriptors);
    }

    /// Whether the driver wants an interrupt for what becomes visible.
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.used);
        if old == new {
            return false;
        }
        self.published = new;
        if self.format.packed && new - old > self.size() {
            // A driver that reuses what it was not given back: what was hidden goes over what came
            // after it.
            self.waiting.clear();
        }
        if !self.format.packed {
            if !self.format.event_idx {
                return self.u16_at(self.config.driver) & 1 == 0;
            }
            let event = self.u16_at(self.config.driver + 4 + 2 * self.size());
            return (old..new).any(|index| index as u16 == event);
        }
        let event = self.u16_at(self.config.driver);
        match self.u16_at(self.config.driver + 2) & 3 {
            1 => false,
            2 if self.format.event_idx => {
                let slot = u64::from(event & 0x7fff);
                let position = |at: u64| (at % self.size(), self.is_odd_round(at));
                slot >= self.size() || (old..new).any(|at| position(at) == (slot, event >> 15 != 0))
            }
            _ => true,
        }
    }

    /// What was published is in memory.
    pub fn check_used(&mut self) {
        let newest = self.waiting.len().saturating_sub(self.config.size.into());
        let waiting = std::mem::take(&mut self.waiting);
        for (position, id, written) in waiting.into_iter().skip(newest) {
            if self.format.packed {
                let used = self.ring_descriptor(position % self.size());
                let odd_round = self.is_odd_round(position);
                assert_eq!((used.last, used.len), (id, written));
                assert_eq!(used.flags >> 7 & 1 != 0, odd_round);
                assert_eq!(used.flags >> 15 & 1 != 0, odd_round);
            } else {
                let at = self.config.device + 4 + 8 * (position % self.size());
                let word: u64 = self.memory.read_obj(GuestAddress(at)).expect("in RAM");
                assert_eq!(word, u64::from(id) | u64::from(written) << 32);
            }
        }
        if !self.format.packed {
            assert_eq!(self.u16_at(self.config.device + 2), self.published as u16);
        }
    }

    /// The device has asked for kicks.
    pub fn check_kicks_wanted(&self) {
        if self.broken.is_some() {
            return;
        }
        let device = self.config.device;
        match (self.format.packed, self.format.event_idx) {
            (false, true) => {
                assert_eq!(self.u16_at(device + 4 + 8 * self.size()), self.popped as u16);
            }
            (false, false) => assert_eq!(self.u16_at(device), 0),
            (true, true) => {
                let slot = (self.popped % self.size()) as u16;
                let odd_round = self.is_odd_round(self.popped);
                assert_eq!(self.u16_at(device), slot | u16::from(odd_round) << 15);
                assert_eq!(self.u16_at(device + 2), 2);
            }
            (true, false) => assert_eq!(self.u16_at(device + 2), 0),
        }
    }
}

/// Whether two runs share nothing.
pub fn is_outside(run: Run, other: Run) -> bool {
    let end = |(at, bytes): Run| u128::from(at) + u128::from(bytes);
    end(run) <= other.0.into() || end(other) <= run.0.into()
}

/// What was found of a chain.
#[derive(Default)]
struct Parts {
    readable: Vec<Run>,
    writable: Vec<Run>,
    pieces: u64,
}

/// Takes `bytes` bytes off the front; `None`, and nothing is taken, if there are fewer.
pub fn take_front(runs: &mut Vec<Run>, mut bytes: u64) -> Option<Vec<Run>> {
    if runs.iter().map(|run| run.1).sum::<u64>() < bytes {
        return None;
    }
    let mut taken = Vec::new();
    while bytes > 0 {
        let (address, len) = runs[0];
        let now = len.min(bytes);
        taken.push((address, now));
        bytes -= now;
        if now == len {
            runs.remove(0);
        } else {
            runs[0] = (address + now, len - now);
        }
    }
    Some(taken)
}
