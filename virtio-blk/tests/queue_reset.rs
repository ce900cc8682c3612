//! `VIRTIO_F_RING_RESET` through the whole device: one queue is reset and enabled again while the
//! other goes on (virtio 1.2, 2.6.1).

mod rig;

use std::sync::Arc;
use std::thread;

use devices::GuestMemory;
use devices::testkit::status::NEEDS_RESET;
use devices::testkit::{self, AnyDriver, Arena, Buf, Notifier, PciDriver, RecordingSink};
use devices::virtio::pci::VirtioPci;
use rig::*;
use tempfile::NamedTempFile;
use virtio_blk::{BlkConfig, Block, BlockHandle, Disk};

const SECTORS: usize = 8192;
const BAR: u64 = 0x40_0000_0000;
const SIZE: u16 = 256;

struct Machine {
    pci: PciDriver<VirtioPci>,
    handle: BlockHandle,
    sink: Arc<RecordingSink>,
    memory: GuestMemory,
    drivers: Vec<AnyDriver>,
    features: u64,
    arena_start: u64,
    _image: NamedTempFile,
}

impl Machine {
    /// A device with two queues, started.
    fn new(dir: &std::path::Path, config: BlkConfig) -> Machine {
        use std::os::unix::fs::FileExt;
        let image = NamedTempFile::new_in(dir).unwrap();
        image.as_file().write_all_at(&contents(SECTORS), 0).unwrap();
        let config = BlkConfig { path: image.path().into(), queues: 2, queue_size: SIZE, ..config };
        let disk = Disk::open(&config).unwrap();
        let block = Block::new(config, disk);
        let handle = block.handle();
        let memory = testkit::memory(128 << 20);
        let (sink, notifier) = (RecordingSink::new(), Notifier::new());
        let function =
            VirtioPci::new(Box::new(block), memory.clone(), sink.clone(), notifier.clone());
        let mut pci = PciDriver::new(function.unwrap(), Some(notifier));
        pci.map(BAR);
        let features = pci.negotiate(u64::MAX);
        pci.enable_msix();
        let mut drivers = Vec::new();
        let mut base = 0;
        for index in 0..2 {
            let driver = AnyDriver::new(&memory, base, SIZE, features);
            pci.enable_queue(index, &driver.config());
            base = driver.end();
            drivers.push(driver);
        }
        assert_eq!(pci.driver_ok() & NEEDS_RESET, 0);
        Machine { pci, handle, sink, memory, drivers, features, arena_start: base, _image: image }
    }

    fn arena(&self) -> Arena {
        Arena::new(&self.memory, self.arena_start)
    }

    /// Sends a read of these sectors without waiting; gives where the data goes.
    fn send(&mut self, arena: &mut Arena, queue: u16, sector: u64, sectors: usize) -> u64 {
        let header = arena.alloc_with(&header(IN, sector));
        let bytes = sectors * SECTOR;
        let (into, status) = (arena.alloc(bytes as u64), arena.alloc_with(&[UNTOUCHED]));
        let driver = &mut self.drivers[usize::from(queue)];
        driver.add(&[
            Buf::readable(header, 16),
            Buf::writable(into, bytes as u32),
            Buf::writable(status, 1),
        ]);
        if driver.publish() {
            self.pci.kick(queue);
        }
        into
    }

    /// Reads one sector and checks it.
    fn check(&mut self, queue: u16, sector: u64) {
        let mut arena = self.arena();
        let into = self.send(&mut arena, queue, sector, 1);
        assert_eq!(self.drivers[usize::from(queue)].wait_used().written_bytes, 513);
        let expected = contents(SECTORS)[sector as usize * SECTOR..][..SECTOR].to_vec();
        assert_eq!(testkit::read(&self.memory, into, SECTOR), expected);
    }

    /// Enables a queue again, with rings of this size in the old place.
    fn enable_again(&mut self, queue: u16, size: u16) {
        let base = self.drivers[usize::from(queue)].config().desc;
        let driver = AnyDriver::new(&self.memory, base, size, self.features);
        self.pci.enable_queue(queue, &driver.config());
        self.drivers[usize::from(queue)] = driver;
    }
}

#[test]
fn a_queue_reset_posts_nothing_afterwards_and_disturbs_no_other_queue() {
    for (name, dir, config) in settings() {
        let mut machine = Machine::new(dir, config);
        for round in 0..20u64 {
            // Long reads in queue 0, a short one in queue 1, and the reset amid them.
            let mut arena = machine.arena();
            let count = 60.min(machine.drivers[0].free() as u64 / 3);
            let sent: Vec<u64> =
                (0..count).map(|i| machine.send(&mut arena, 0, i * 128, 128)).collect();
            let other = machine.send(&mut arena, 1, round, 1);
            machine.pci.reset_queue_and_wait(0);

            // The driver uses the memory of queue 0 for something else.
            while machine.drivers[0].take_used().is_some() {}
            let interrupts = machine.sink.count(1);
            for &into in &sent {
                testkit::write(&machine.memory, into, &[0xee; 128 * SECTOR]);
            }
            assert_eq!(machine.drivers[1].wait_used().written_bytes, 513, "{name}");
            let sector = &contents(SECTORS)[round as usize * SECTOR..][..SECTOR];
            assert_eq!(testkit::read(&machine.memory, other, SECTOR), sector, "{name}");
            thread::yield_now();
            assert!(!machine.drivers[0].has_used(), "{name}");
            assert_eq!(machine.sink.count(1), interrupts, "{name}");
            for &into in &sent {
                let bytes = testkit::read(&machine.memory, into, 128 * SECTOR);
                assert!(bytes.iter().all(|byte| *byte == 0xee), "{name}");
            }
            machine.check(1, 17);

            machine.enable_again(0, if round % 2 == 0 { 64 } else { SIZE });
            machine.check(0, round);
            machine.check(1, round);
        }
        assert_eq!(machine.pci.status() & NEEDS_RESET, 0, "{name}");
        assert_eq!(machine.handle.counters()[0].errors.get(), 0, "{name}");
    }
}

#[test]
fn a_queue_that_was_reset_has_a_new_worker_in_its_place() {
    let mut machine = Machine::new(on_disk(), BlkConfig::default());
    let before = machine.handle.worker_tids();
    machine.pci.reset_queue_and_wait(0);
    assert_eq!(machine.handle.worker_tids(), before, "the place of a worker is kept");
    machine.enable_again(0, SIZE);
    let after = machine.handle.worker_tids();
    assert_eq!(after.len(), 2);
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1], before[1]);
    machine.check(0, 3);
}

#[test]
fn requests_sent_while_a_queue_is_not_enabled_wait_for_nobody_and_do_nothing() {
    for (name, dir, config) in settings() {
        let mut machine = Machine::new(dir, config);
        machine.pci.reset_queue_and_wait(1);
        let mut arena = machine.arena();
        let into = machine.send(&mut arena, 1, 0, 1);
        machine.pci.kick(1);
        machine.send(&mut arena, 0, 5, 1);
        machine.drivers[0].wait_used();
        assert!(!machine.drivers[1].has_used(), "{name}");
        assert_eq!(testkit::read(&machine.memory, into, SECTOR), vec![0; SECTOR], "{name}");
        machine.enable_again(1, SIZE);
        machine.check(1, 6);
    }
}

#[test]
fn a_broken_queue_can_be_reset_but_the_device_still_needs_its_own_reset() {
    for packed in [false, true] {
        let mut machine = Machine::new(on_disk(), BlkConfig { packed, ..BlkConfig::default() });
        machine.drivers[0].wreck();
        machine.pci.kick(0);
        machine.sink.wait(0, 1);
        machine.check(1, 9);
        machine.pci.reset_queue_and_wait(0);
        machine.check(1, 10);
        assert_ne!(machine.pci.status() & NEEDS_RESET, 0);
        machine.pci.reset();
        assert!(machine.handle.worker_tids().is_empty());
    }
}
