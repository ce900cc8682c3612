//! A block device, a disk image and a driver in software.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::os::unix::fs::FileExt;
use std::path::Path;

use devices::GuestMemory;
use devices::testkit::{self, AnyDriver, Arena, Buf, Signals, Used};
use devices::virtio::VirtioDevice;
use tempfile::NamedTempFile;
use virtio_blk::{BlkConfig, Block, Disk, EngineKind};
use vmm_sys_util::eventfd::EventFd;

pub const SECTOR: usize = 512;
pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;
pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;
/// No device writes this status.
pub const UNTOUCHED: u8 = 0xa5;

/// Only what is touched is there; the rings of large queues lie far apart.
const RAM_BYTES: usize = 128 << 20;

/// On a disk, where `O_DIRECT` works; the temporary directory may be a tmpfs.
pub fn on_disk() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

pub fn on_tmpfs() -> &'static Path {
    Path::new("/dev/shm")
}

/// Every engine that moves data, on every kind of file, and with packed queues.
pub fn settings() -> Vec<(&'static str, &'static Path, BlkConfig)> {
    let config = |engine, direct| BlkConfig { engine, direct, ..BlkConfig::default() };
    let packed = |engine| BlkConfig { packed: true, ..config(engine, false) };
    vec![
        ("uring", on_disk(), config(EngineKind::Uring, false)),
        ("uring, direct", on_disk(), config(EngineKind::Uring, true)),
        ("uring, tmpfs", on_tmpfs(), config(EngineKind::Uring, false)),
        ("uring, tmpfs, direct", on_tmpfs(), config(EngineKind::Uring, true)),
        ("uring, packed", on_disk(), packed(EngineKind::Uring)),
        ("sync", on_disk(), config(EngineKind::Sync, false)),
        ("sync, direct", on_disk(), config(EngineKind::Sync, true)),
        ("sync, tmpfs, packed", on_tmpfs(), packed(EngineKind::Sync)),
    ]
}

pub struct Rig {
    pub memory: GuestMemory,
    pub arena: Arena,
    pub signals: Signals,
    pub drivers: Vec<AnyDriver>,
    pub kicks: Vec<EventFd>,
    pub block: Block,
    pub image: NamedTempFile,
    pub features: u64,
}

/// What came of one request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u8,
    pub data: Vec<u8>,
    pub used_bytes: u32,
}

impl Rig {
    /// With an image of pseudo-random contents, and everything the device offers accepted.
    pub fn new(dir: &Path, sectors: usize, config: BlkConfig) -> Rig {
        Rig::with_features(dir, sectors, config, u64::MAX)
    }

    /// Only the features in `accept` are accepted.
    pub fn with_features(dir: &Path, sectors: usize, config: BlkConfig, accept: u64) -> Rig {
        let image = NamedTempFile::new_in(dir).unwrap();
        image.as_file().write_all_at(&contents(sectors), 0).unwrap();
        let config = BlkConfig { path: image.path().to_path_buf(), ..config };
        let queues = config.queues;
        let queue_size = config.queue_size;
        let disk = Disk::open(&config).unwrap();
        let block = Block::new(config, disk);
        let features = block.features() & accept;
        let memory = testkit::memory(RAM_BYTES);
        let mut drivers = Vec::new();
        let mut base = 0;
        for _ in 0..queues {
            drivers.push(AnyDriver::new(&memory, base, queue_size, features));
            base = drivers.last().unwrap().end();
        }
        let arena = Arena::new(&memory, base);
        let signals = Signals::new(queues);
        let mut rig =
            Rig { memory, arena, signals, drivers, kicks: Vec::new(), block, image, features };
        rig.activate();
        rig
    }

    pub fn activate(&mut self) {
        let configs: Vec<_> = self.drivers.iter().map(AnyDriver::config).collect();
        let (activation, kicks) = self.signals.activation(&self.memory, self.features, &configs);
        self.kicks = kicks;
        self.block.activate(activation).unwrap();
    }

    /// After `block.reset()`: fresh rings in the same place, and the device started again.
    pub fn restart(&mut self) {
        for driver in &mut self.drivers {
            let config = driver.config();
            *driver = AnyDriver::new(&self.memory, config.desc, config.size, self.features);
        }
        self.activate();
    }

    pub fn publish(&mut self, queue: usize) {
        if self.drivers[queue].publish() {
            self.kicks[queue].write(1).unwrap();
        }
    }

    /// Sends a chain and waits for it.
    pub fn send(&mut self, bufs: &[Buf]) -> Used {
        let head = self.drivers[0].add(bufs);
        self.publish(0);
        let used = self.drivers[0].wait_used();
        assert_eq!(used.head, head);
        used
    }

    /// The three parts of a request in descriptors of their own; `data_in` is the length of the
    /// data the device is to write. Gives also the addresses of that data and of the status byte.
    pub fn parts(
        &mut self,
        kind: u32,
        sector: u64,
        data_out: &[u8],
        data_in: usize,
    ) -> (Vec<Buf>, u64, u64) {
        let header = self.arena.alloc_with(&header(kind, sector));
        let mut bufs = vec![Buf::readable(header, 16)];
        if !data_out.is_empty() {
            let out = self.arena.alloc_with(data_out);
            bufs.push(Buf::readable(out, data_out.len() as u32));
        }
        let into = self.arena.alloc(data_in as u64);
        if data_in > 0 {
            bufs.push(Buf::writable(into, data_in as u32));
        }
        let status = self.arena.alloc_with(&[UNTOUCHED]);
        bufs.push(Buf::writable(status, 1));
        (bufs, into, status)
    }

    /// One request, and a look at the canaries around all its buffers.
    pub fn request(&mut self, kind: u32, sector: u64, data_out: &[u8], data_in: usize) -> Answer {
        let (bufs, into, status) = self.parts(kind, sector, data_out, data_in);
        let used = self.send(&bufs);
        self.arena.check();
        self.answer(used, into, data_in, status)
    }

    pub fn answer(&self, used: Used, into: u64, data_in: usize, status: u64) -> Answer {
        Answer {
            status: testkit::read(&self.memory, status, 1)[0],
            data: testkit::read(&self.memory, into, data_in),
            used_bytes: used.written_bytes,
        }
    }

    pub fn read(&mut self, sector: u64, sectors: usize) -> Vec<u8> {
        let answer = self.request(IN, sector, &[], sectors * SECTOR);
        assert_eq!(answer.status, OK);
        answer.data
    }

    pub fn write(&mut self, sector: u64, data: &[u8]) {
        assert_eq!(self.request(OUT, sector, data, 0).status, OK);
    }

    /// What the host sees in the image.
    pub fn on_host(&self, sector: u64, sectors: usize) -> Vec<u8> {
        let mut data = vec![0; sectors * SECTOR];
        self.image.as_file().read_exact_at(&mut data, sector * SECTOR as u64).unwrap();
        data
    }

    /// Ends the device, with everything written on stable storage.
    pub fn shut_down(&mut self) {
        self.block.reset();
        self.block.handle().flush().unwrap();
    }

    /// Forgets all buffers, so that long tests do not run out of RAM.
    pub fn new_arena(&mut self) {
        let base = self.drivers.last().unwrap().end();
        self.arena = Arena::new(&self.memory, base);
    }
}

pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

/// A discard or write-zeroes segment.
pub fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// The contents of a fresh image: no byte of it is zero, no two sectors are alike.
pub fn contents(sectors: usize) -> Vec<u8> {
    (0..sectors * SECTOR).map(|at| ((at * 7 + at / SECTOR * 31) % 255) as u8 + 1).collect()
}
