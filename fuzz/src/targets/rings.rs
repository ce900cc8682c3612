//! A queue of either format over rings that the input writes, against a plain reading of virtio 1.2,
//! 2.7 and 2.8 ([`reference`]). One thread does everything, so what the queue finds is known exactly.

mod reference;

use std::cell::RefCell;
use std::ops::Range;

use devices::GuestMemory;
use devices::virtio::queue::{Chain, GuestBuf, Queue, QueueConfig, QueueFeatures};
use reference::{Format, Found, Reference};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::input::Input;

/// RAM has a hole.
const RAM: [Range<u64>; 2] = [0..0x8000, 0xc000..0xe000];
const DESC: u64 = 0x1000;
const DRIVER: u64 = 0x2000;
const DEVICE: u64 = 0x3000;
const TABLES: u64 = 0x4000;
const SIZES: [u64; 9] = [8, 4, 16, 2, 1, 32, 3, 5, 7];
const STEPS: usize = 200;

thread_local! {
    /// Mapped once, for a mapping costs more than an input.
    static MEMORY: RefCell<Option<GuestMemory>> = const { RefCell::new(None) };
}

fn memory() -> GuestMemory {
    MEMORY.with_borrow_mut(|memory| {
        let memory = memory.get_or_insert_with(|| {
            let ranges: Vec<_> = RAM
                .iter()
                .map(|range| (GuestAddress(range.start), (range.end - range.start) as usize))
                .collect();
            vm_memory::GuestMemoryMmap::from_ranges(&ranges).expect("mmap").into()
        });
        for range in RAM {
            let zeros = vec![0; (range.end - range.start) as usize];
            memory.write_slice(&zeros, GuestAddress(range.start)).expect("in RAM");
        }
        memory.clone()
    })
}

/// A chain with the device, and what is left of it by the reference.
struct Out {
    chain: Chain,
    readable: Vec<(u64, u64)>,
    writable: Vec<(u64, u64)>,
    descriptors: u16,
    id: u16,
}

/// Where the driver is in the ring, as far as it means well.
struct Driver {
    memory: GuestMemory,
    config: QueueConfig,
    format: Format,
    /// Split: the available index. Packed: the position, in two rounds.
    next: u16,
    table: u64,
    device_area: (u64, u64),
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory = memory();
    let format =
        Format { packed: input.flag(), event_idx: input.flag(), indirect: !input.rarely(4) };
    let features = QueueFeatures {
        event_idx: format.event_idx,
        indirect: format.indirect,
        packed: format.packed,
    };
    let config = QueueConfig {
        size: input.usually(&SIZES) as u16,
        desc: input.usually(&[DESC, 0xc000, 0x7f80]),
        driver: input.usually(&[DRIVER]),
        device: input.usually(&[DEVICE]),
    };
    let sound = Reference::is_sound(&config, format, &RAM);
    let queue = Queue::new(&memory, &config, features);
    assert_eq!(queue.is_ok(), sound, "{config:?} {format:?}: {:?}", queue.err());
    let Ok(mut queue) = queue else { return };
    // Rings over each other are the guest's own fault; what is read from them is not predicted.
    if Reference::areas_overlap(&config, format) {
        for _ in 0..STEPS {
            if !matches!(queue.pop(&mut Chain::new()), Ok(true)) {
                return;
            }
        }
        return;
    }
    let reference = Reference::new(memory.clone(), config, format, &RAM);
    let device_area = reference.device_area();
    let memory_too = memory.clone();
    let driver = Driver { memory: memory_too, config, format, next: 0, table: TABLES, device_area };
    let mut world = World { queue: &mut queue, reference, driver, out: Vec::new(), memory };
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
}

struct World<'a> {
    queue: &'a mut Queue,
    reference: Reference,
    driver: Driver,
    out: Vec<Out>,
    memory: GuestMemory,
}

impl World<'_> {
    fn step(&mut self, input: &mut Input) {
        let what = input.u8() % 16;
        if what < 7 {
            self.reference.driver_writes();
        }
        match what {
            0..5 => self.driver.add(input),
            5 => self.driver.scribble(input),
            6 => self.driver.events(input),
            7..10 => self.pop(),
            10 => self.use_chain(input),
            11 | 12 => self.push(input),
            13 => {
                let interrupt = self.queue.publish();
                assert_eq!(interrupt, self.reference.publish(), "whether to interrupt");
                self.reference.check_used();
            }
            14 => {
                let available = self.queue.enable_kicks();
                assert_eq!(available, self.reference.has_available());
                self.reference.check_kicks_wanted();
            }
            _ => self.queue.disable_kicks(),
        }
    }

    fn pop(&mut self) {
        assert_eq!(self.queue.has_available(), self.reference.has_available());
        let mut chain = Chain::new();
        let popped = self.queue.pop(&mut chain);
        match self.reference.pop() {
            Found::Nothing => assert_eq!(popped, Ok(false)),
            Found::Broken(why) => {
                let error = popped.expect_err(why);
                assert!(!error.to_string().is_empty());
                // For good, whatever is in memory.
                assert_eq!(self.queue.pop(&mut chain), Err(error));
                assert!(!self.queue.has_available() && !self.queue.enable_kicks());
            }
            Found::Chain { readable, writable, id, descriptors } => {
                assert_eq!(popped, Ok(true));
                assert_eq!(self.host_runs(chain.readable()), self.expected(&readable));
                assert_eq!(self.host_runs(chain.writable()), self.expected(&writable));
                assert!(chain.head() < self.driver.config.size);
                if !self.driver.format.packed {
                    assert_eq!(chain.head(), id);
                }
                self.out.push(Out { chain, readable, writable, descriptors, id });
            }
        }
    }

    fn host_runs(&self, bufs: &[GuestBuf]) -> Vec<(usize, usize)> {
        bufs.iter().map(|buf| (buf.as_ptr().addr(), buf.len_bytes())).collect()
    }

    fn expected(&self, runs: &[(u64, u64)]) -> Vec<(usize, usize)> {
        let host = |address| {
            let host = self.memory.get_host_address(GuestAddress(address));
            host.expect("the reference knows RAM").addr()
        };
        runs.iter().map(|&(address, bytes)| (host(address), bytes as usize)).collect()
    }

    /// Reads or writes what is in front, or takes the last byte.
    fn use_chain(&mut self, input: &mut Input) {
        if self.out.is_empty() {
            return;
        }
        let index = input.below(self.out.len());
        let out = &mut self.out[index];
        let bytes = usize::from(input.u8());
        match input.u8() % 3 {
            0 => {
                let expected = reference::take_front(&mut out.readable, bytes as u64);
                let mut read = vec![0; bytes];
                assert_eq!(out.chain.read(&mut read), expected.is_some());
                if let Some(runs) = expected {
                    assert_eq!(read, read_runs(&self.memory, &runs));
                }
            }
            1 => {
                // Writes to the rings are the driver's own fault, and confuse only the reference.
                if !self.reference.spares(&out.writable) {
                    return;
                }
                let expected = reference::take_front(&mut out.writable, bytes as u64);
                let written = vec![input.u8(); bytes];
                assert_eq!(out.chain.write(&written), expected.is_some());
                if let Some(runs) = expected {
                    for run in runs {
                        let bytes = read_runs(&self.memory, &[run]);
                        assert!(bytes.iter().all(|byte| Some(byte) == written.first()));
                    }
                }
            }
            _ => {
                let last = out.chain.take_last_writable_byte();
                assert_eq!(last.is_some(), !out.writable.is_empty());
                if let Some((address, bytes)) = out.writable.pop() {
                    if bytes > 1 {
                        out.writable.push((address, bytes - 1));
                    }
                    let address = address + bytes - 1;
                    if let Some(last) = last.filter(|_| self.reference.spares(&[(address, 1)])) {
                        last.store(0x5a);
                        assert_eq!(read_runs(&self.memory, &[(address, 1)]), [0x5a]);
                    }
                }
            }
        }
    }

    fn push(&mut self, input: &mut Input) {
        if self.out.is_empty() {
            return;
        }
        let Out { chain, descriptors, id, .. } = self.out.swap_remove(input.below(self.out.len()));
        let written = u32::from(input.u16());
        self.reference.push(id, descriptors, written);
        self.queue.push(chain.head(), written);
    }
}

fn read_runs(memory: &GuestMemory, runs: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &(address, len) in runs {
        let start = bytes.len();
        bytes.resize(start + len as usize, 0);
        memory.read_slice(&mut bytes[start..], GuestAddress(address)).expect("in RAM");
    }
    bytes
}

impl Driver {
    /// Writes RAM, but not the device's area: only the device knows what is there.
    fn write(&self, address: u64, bytes: &[u8]) {
        let run = (address, bytes.len() as u64);
        if !reference::is_outside(run, self.device_area) {
            return;
        }
        let _ = self.memory.write_slice(bytes, GuestAddress(address));
    }

    /// Adds a chain, mostly as the rules are, and makes it available.
    fn add(&mut self, input: &mut Input) {
        let count = 1 + usize::from(input.u8() % 5);
        let indirect = input.u8().is_multiple_of(4);
        let readable = usize::from(input.u8()) % (count + 1);
        let mut descriptors = Vec::new();
        for index in 0..count {
            let mut flags = if index < readable { 0 } else { 2 };
            if index + 1 < count && !(indirect && self.format.packed) {
                flags |= 1;
            }
            let address = input.usually(&[0x6000, 0x6800, 0x7f00, 0x7ff8, 0xc100, 0xdf00, 0x5001]);
            let len = input.usually(&[16, 1, 0x40, 0, 0x100, 0x200, 8]) as u32;
            if input.rarely(32) {
                flags ^= input.pick(&[1, 2, 4, 5, 7]);
            }
            descriptors.push((address, len, flags));
        }
        if indirect {
            let table = self.table;
            self.table = TABLES + (self.table + 0x51 - TABLES) % 0x800;
            for (index, &(address, len, flags)) in descriptors.iter().enumerate() {
                let next = if input.rarely(64) { input.u16() } else { index as u16 + 1 };
                let raw = descriptor(address, len, flags, next, self.format.packed);
                self.write(table + 16 * index as u64, &raw);
            }
            let len = if input.rarely(32) { input.u32() } else { 16 * count as u32 };
            descriptors = vec![(table, len, 4)];
        }
        if self.format.packed {
            self.add_packed(&descriptors, input);
        } else {
            self.add_split(&descriptors, input);
        }
    }

    fn add_split(&mut self, descriptors: &[(u64, u32, u16)], input: &mut Input) {
        let size = self.config.size;
        let mut place = u16::from(input.u8()) % size;
        let head = if input.rarely(64) { input.u16() } else { place };
        for &(address, len, flags) in descriptors {
            let next = if input.rarely(64) { input.u16() } else { (place + 1) % size };
            let at = self.config.desc + 16 * u64::from(place);
            self.write(at, &descriptor(address, len, flags, next, false));
            place = (place + 1) % size;
        }
        let slot = u64::from(self.next % size);
        self.write(self.config.driver + 4 + 2 * slot, &head.to_le_bytes());
        self.next = match input.u8() {
            255 => input.u16(),
            _ => self.next.wrapping_add(1),
        };
        self.write(self.config.driver + 2, &self.next.to_le_bytes());
    }

    fn add_packed(&mut self, descriptors: &[(u64, u32, u16)], input: &mut Input) {
        let size = self.config.size;
        let id = input.u16();
        for &(address, len, flags) in descriptors {
            let (slot, odd) = (self.next % size, (self.next / size).is_multiple_of(2));
            let mut available = if odd { 1 << 7 } else { 1 << 15 };
            if input.rarely(64) {
                available = input.pick(&[0, 1 << 7, 1 << 15, 1 << 7 | 1 << 15]);
            }
            let raw = descriptor(address, len, flags | available, id, true);
            self.write(self.config.desc + 16 * u64::from(slot), &raw);
            self.next = (self.next + 1) % (2 * size);
        }
    }

    /// Writes anything anywhere.
    fn scribble(&mut self, input: &mut Input) {
        let size = u64::from(self.config.size);
        let base = input.pick(&[self.config.desc, self.config.driver, TABLES]);
        let at = base + u64::from(input.u16()) % (16 * size);
        let count = 1 + usize::from(input.u8() % 8);
        self.write(at, input.bytes(count));
    }

    /// Says which interrupts it wants.
    fn events(&mut self, input: &mut Input) {
        let value = input.u16();
        let size = u64::from(self.config.size);
        if self.format.packed {
            let flags = input.u8() % 4;
            let event = (value % (self.config.size + 1)) | (value & 0x8000);
            self.write(self.config.driver, &event.to_le_bytes());
            self.write(self.config.driver + 2, &[flags, 0]);
        } else {
            self.write(self.config.driver, &[input.u8() & 1]);
            let event = self.next.wrapping_sub(value % 8);
            self.write(self.config.driver + 4 + 2 * size, &event.to_le_bytes());
        }
    }
}

/// The 16 bytes of a descriptor; `last` is the next one's index or the ID.
fn descriptor(address: u64, len: u32, flags: u16, last: u16, packed: bool) -> [u8; 16] {
    let (third, fourth) = if packed { (last, flags) } else { (flags, last) };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&third.to_le_bytes());
    bytes[14..].copy_from_slice(&fourth.to_le_bytes());
    bytes
}
