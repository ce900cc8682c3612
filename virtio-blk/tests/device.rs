//! The device as a whole: features, configuration space, start, reset, broken queues, many queues.

mod rig;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use devices::testkit::status::NEEDS_RESET;
use devices::testkit::{self, AnyDriver, Buf, RawPacked};
use devices::virtio::VirtioDevice;
use rig::*;
use virtio_blk::{BlkConfig, CacheMode, EngineKind, Resize};

const F_RO: u64 = 1 << 5;
const F_FLUSH: u64 = 1 << 9;
const F_CONFIG_WCE: u64 = 1 << 11;
const F_EVENT_IDX: u64 = 1 << 29;

fn sync() -> BlkConfig {
    BlkConfig { engine: EngineKind::Sync, ..BlkConfig::default() }
}

fn config<const N: usize>(rig: &Rig, offset: u64) -> [u8; N] {
    config_with(rig, rig.features, offset)
}

fn config_with<const N: usize>(rig: &Rig, features: u64, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    rig.block.read_config(features, offset, &mut bytes);
    bytes
}

#[test]
fn what_is_offered_is_what_was_configured() {
    let always = [2, 6, 9, 10, 11, 12, 28, 32, 40];
    let bits = |bits: &[u32]| bits.iter().fold(0u64, |all, bit| all | 1 << bit);
    let all = Rig::new(on_disk(), 64, sync());
    assert_eq!(all.block.features(), bits(&always) | bits(&[13, 14, 29]));
    assert_eq!(all.block.device_type(), 2);
    let packed = BlkConfig { packed: true, event_idx: false, discard: false, ..sync() };
    let packed = Rig::new(on_disk(), 64, packed);
    assert_eq!(packed.block.features(), bits(&always) | bits(&[34]));
    let none = BlkConfig { event_idx: false, discard: false, ..sync() };
    assert_eq!(Rig::new(on_disk(), 64, none).block.features(), bits(&always));
    let readonly = BlkConfig { readonly: true, event_idx: false, ..sync() };
    assert_eq!(Rig::new(on_disk(), 64, readonly).block.features(), bits(&always) | F_RO);
}

#[test]
fn configuration_space_tells_the_disk() {
    let rig = Rig::new(on_disk(), 64, BlkConfig { queues: 3, queue_size: 128, ..sync() });
    assert_eq!(rig.block.queue_max_sizes(), [128, 128, 128]);
    assert_eq!(config(&rig, 0), 64u64.to_le_bytes(), "capacity in sectors");
    assert_eq!(config(&rig, 12), 126u32.to_le_bytes(), "seg_max: the queue size less two");
    assert_eq!(config(&rig, 20), 512u32.to_le_bytes(), "blk_size");
    assert_eq!(config(&rig, 34), 3u16.to_le_bytes(), "num_queues");
    assert_eq!(config::<8>(&rig, 68), [0; 8], "past the end there are zeros");
    assert_eq!(config::<4>(&rig, u64::MAX), [0; 4]);
}

#[test]
fn only_writeback_can_be_written_and_a_reset_restores_it() {
    let mut rig = Rig::new(on_disk(), 64, sync());
    let before = config::<72>(&rig, 0);
    for offset in (0..80).filter(|offset| *offset != 32) {
        rig.block.write_config(u64::MAX, offset, &[0xff]);
    }
    assert_eq!(config::<72>(&rig, 0), before);
    rig.block.write_config(F_FLUSH, 32, &[0]);
    assert_eq!(config(&rig, 32), [1], "not without CONFIG_WCE");
    rig.block.write_config(F_CONFIG_WCE, 32, &[0]);
    assert_eq!(config(&rig, 32), [0]);
    rig.block.reset();
    assert_eq!(config(&rig, 32), [1]);

    let through = BlkConfig { cache: CacheMode::Writethrough, ..sync() };
    assert_eq!(config(&Rig::new(on_disk(), 64, through), 32), [0]);
}

#[test]
fn a_driver_that_chooses_the_cache_mode_but_cannot_flush_finds_write_through() {
    let mut rig = Rig::new(on_disk(), 64, sync());
    for (features, writeback) in
        [(0, 1), (F_FLUSH, 1), (F_CONFIG_WCE | F_FLUSH, 1), (F_CONFIG_WCE, 0)]
    {
        assert_eq!(config_with(&rig, features, 32), [writeback], "{features:#x}");
    }
    rig.block.write_config(F_CONFIG_WCE, 32, &[1]);
    assert_eq!(config_with(&rig, F_CONFIG_WCE, 32), [0], "and cannot change that");
}

#[test]
fn a_new_size_changes_capacity_and_generation_and_interrupts() {
    let mut rig = Rig::new(on_disk(), 64, sync());
    let (generation, disk) = (rig.block.config_generation(), rig.block.handle());
    let same = Resize { old_bytes: 64 * 512, new_bytes: 64 * 512 };
    assert_eq!(disk.rescan().unwrap(), same, "nothing changed");
    config::<8>(&rig, 0);
    assert_eq!(rig.block.config_generation(), generation);
    assert_eq!(rig.signals.sink.count(0), 0);
    assert_eq!(rig.request(IN, 64, &[], SECTOR).status, IOERR);

    // Whole sectors count.
    rig.image.as_file().set_len(100 * 512 + 511).unwrap();
    assert_eq!(disk.rescan().unwrap(), Resize { new_bytes: 100 * 512, ..same });
    assert_eq!(disk.capacity_bytes(), 100 * 512);
    assert_eq!(config(&rig, 0), 100u64.to_le_bytes());
    assert_ne!(rig.block.config_generation(), generation);
    assert_eq!(rig.signals.sink.count(0), 1, "one configuration interrupt");
    assert_eq!(rig.read(64, 36), vec![0; 36 * SECTOR]);
    assert_eq!(rig.image.as_file().metadata().unwrap().len(), 100 * 512 + 511, "as it was");

    // A smaller one is told as well, and binds.
    let generation = rig.block.config_generation();
    rig.image.as_file().set_len(8 * 512).unwrap();
    assert_eq!(disk.rescan().unwrap(), Resize { old_bytes: 100 * 512, new_bytes: 8 * 512 });
    assert_eq!(config(&rig, 0), 8u64.to_le_bytes());
    assert_ne!(rig.block.config_generation(), generation);
    assert_eq!(rig.signals.sink.count(0), 2);
    assert_eq!(rig.request(IN, 7, &[], SECTOR).status, OK);
    assert_eq!(rig.request(IN, 8, &[], SECTOR).status, IOERR);
    assert_eq!(rig.request(OUT, 8, &[1; SECTOR], 0).status, IOERR);
    assert_eq!(rig.image.as_file().metadata().unwrap().len(), 8 * 512, "no write made it longer");
}

#[test]
fn a_size_that_changes_before_the_driver_is_ready_is_told_once_it_is() {
    let mut rig = Rig::new(on_disk(), 64, sync());
    rig.block.reset();
    rig.image.as_file().set_len(100 * 512).unwrap();
    rig.block.handle().rescan().unwrap();
    assert_eq!(rig.signals.sink.count(0), 0, "nobody is there to be told");
    rig.restart();
    assert_eq!(rig.signals.sink.count(0), 1);
    rig.block.reset();
    rig.restart();
    assert_eq!(rig.signals.sink.count(0), 1, "the next driver has not missed it");
}

#[test]
fn the_generation_does_not_come_round_while_the_driver_reads() {
    let rig = Rig::new(on_disk(), 64, sync());
    let (disk, file) = (rig.block.handle(), rig.image.as_file());
    let generation = rig.block.config_generation();
    let low = config::<4>(&rig, 0);
    // As many changes as there are generations, and an even number.
    for turn in 0..512 {
        file.set_len((65 + turn % 2) * 512).unwrap();
        disk.rescan().unwrap();
    }
    assert_ne!(config::<4>(&rig, 0), low);
    assert_ne!(rig.block.config_generation(), generation);
}

#[test]
fn two_halves_of_one_generation_are_of_one_capacity() {
    // Both halves of the number of sectors differ.
    let sectors = [64u64, (1 << 32) + 1];
    let rig = Rig::new(on_disk(), 64, BlkConfig { readonly: true, ..sync() });
    let (disk, file) = (rig.block.handle(), rig.image.as_file());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0..400_000 {
                file.set_len(sectors[turn % 2] * 512).unwrap();
                disk.rescan().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let generation = rig.block.config_generation();
            let (low, high) = (config::<4>(&rig, 0), config::<4>(&rig, 4));
            if rig.block.config_generation() == generation {
                let read = u64::from_le_bytes([low, high].concat().try_into().unwrap());
                assert!(sectors.contains(&read), "{read:#x}");
            }
        }
    });
}

#[test]
fn a_request_is_judged_by_the_capacity_that_was_told_before_it_was_sent() {
    let mut rig = Rig::new(on_disk(), 512, sync());
    for sectors in 512..532 {
        rig.new_arena();
        // More than one batch: when some are done, the worker is in the middle of others.
        for _ in 0..48 {
            let (bufs, ..) = rig.parts(IN, 0, &[], 512 * SECTOR);
            rig.drivers[0].add(&bufs);
        }
        rig.publish(0);
        rig.drivers[0].wait_used();
        rig.image.as_file().set_len((sectors + 1) * 512).unwrap();
        rig.block.handle().rescan().unwrap();
        let (bufs, _, status) = rig.parts(IN, sectors, &[], SECTOR);
        rig.drivers[0].add(&bufs);
        rig.publish(0);
        for _ in 0..48 {
            rig.drivers[0].wait_used();
        }
        assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "sector {sectors}");
    }
}

#[test]
fn how_long_a_worker_polls_can_be_changed_while_it_works() {
    let mut rig = Rig::new(on_disk(), 64, sync());
    let counters = rig.block.counters()[0].clone();
    let polls = || counters.polls_hit.get() + counters.polls_missed.get();
    let request = |rig: &mut Rig| {
        rig.new_arena();
        rig.read(0, 1);
    };
    (0..20).for_each(|_| request(&mut rig));
    assert_eq!(polls(), 0);
    rig.block.handle().set_io_poll_ns(1_000_000_000);
    while counters.polls_hit.get() < 20 {
        request(&mut rig);
    }
    rig.block.handle().set_io_poll_ns(0);
    // The poll that is under way goes on to its end.
    (0..2).for_each(|_| request(&mut rig));
    let before = polls();
    (0..20).for_each(|_| request(&mut rig));
    assert_eq!(polls(), before);
}

#[test]
fn a_broken_queue_asks_for_a_reset_and_works_again_after_it() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        rig.read(0, 8);
        // Far more than there are descriptors.
        rig.drivers[0].wreck();
        rig.kicks[0].write(1).unwrap();
        rig.signals.sink.wait(0, 1);
        assert_eq!(rig.signals.status() & NEEDS_RESET, NEEDS_RESET, "{name}");
        assert!(!rig.drivers[0].has_used(), "{name}");

        rig.block.reset();
        assert!(rig.block.worker_tids().is_empty(), "{name}");
        rig.restart();
        assert_eq!(rig.read(0, 64), contents(64), "{name}");
    }
}

#[test]
fn a_queue_that_breaks_while_requests_are_in_flight_ends_them_without_a_word() {
    // The way to wreck a packed ring would overwrite the request, too.
    for (name, dir, config) in settings().into_iter().filter(|(_, _, config)| !config.packed) {
        let mut rig = Rig::new(dir, 2048, config);
        for round in 0..20 {
            rig.new_arena();
            let (bufs, ..) = rig.parts(IN, 0, &[], 2048 * SECTOR);
            rig.drivers[0].add(&bufs);
            rig.publish(0);
            // At another moment of the request's life each time.
            (0..round * 1000).for_each(|_| std::hint::spin_loop());
            rig.drivers[0].wreck();
            // The completion has the worker look, unless it slept already.
            while rig.signals.status() & NEEDS_RESET == 0 && !rig.drivers[0].has_used() {
                thread::yield_now();
            }
            (0..1000).for_each(|_| thread::yield_now());
            rig.kicks[0].write(1).unwrap();
            rig.signals.sink.wait(0, round + 1);
            rig.block.reset();
            rig.signals.clear();
            rig.restart();
        }
        assert_eq!(rig.read(0, 8), contents(8), "{name}");
    }
}

#[test]
fn a_kick_without_a_request_does_nothing() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        for _ in 0..100 {
            rig.kicks[0].write(1).unwrap();
            thread::yield_now();
        }
        assert_eq!(rig.read(3, 1), contents(4)[3 * SECTOR..], "{name}");
        assert_eq!(rig.block.counters()[0].requests.get(), 1, "{name}");
        assert!(rig.signals.sink.count(1) <= 1, "{name}");
        assert_eq!(rig.signals.status() & NEEDS_RESET, 0, "{name}");
    }
}

#[test]
fn a_reset_posts_nothing_and_touches_no_memory_afterwards() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 8192, BlkConfig { event_idx: false, ..config });
        for _round in 0..20 {
            rig.new_arena();
            let mut chains = Vec::new();
            for i in 0..60u64 {
                let sectors = 128;
                let (bufs, into, _) = rig.parts(IN, i * 128, &[], sectors * SECTOR);
                rig.drivers[0].add(&bufs);
                chains.push((into, sectors * SECTOR));
            }
            rig.publish(0);
            rig.block.reset();
            // The driver reuses the memory for something else.
            while rig.drivers[0].take_used().is_some() {}
            let interrupts = rig.signals.sink.count(1);
            for &(into, bytes) in &chains {
                testkit::write(&rig.memory, into, &vec![0xee; bytes]);
            }
            thread::yield_now();
            assert!(!rig.drivers[0].has_used(), "{name}");
            assert_eq!(rig.signals.sink.count(1), interrupts, "{name}");
            for &(into, bytes) in &chains {
                assert_eq!(testkit::read(&rig.memory, into, bytes), vec![0xee; bytes], "{name}");
            }
            rig.restart();
        }
        assert_eq!(rig.read(5, 3), contents(8)[5 * SECTOR..], "{name}");
    }
}

#[test]
fn a_batch_larger_than_the_submission_queue_is_carried_out() {
    let expect = contents(1024);
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 1024, BlkConfig { queue_size: 1024, ..config });
        for turn in 0..4u64 {
            rig.new_arena();
            let mut waiting = Vec::new();
            for i in 0..340u64 {
                let sector = (i * 3 + turn) % 1000;
                let (bufs, into, status) = rig.parts(IN, sector, &[], SECTOR);
                let head = rig.drivers[0].add(&bufs);
                waiting.push((head, sector as usize, into, status));
            }
            rig.publish(0);
            for _ in 0..340 {
                let used = rig.drivers[0].wait_used();
                assert_eq!(used.written_bytes, 513, "{name}");
                let at = waiting.iter().position(|(head, ..)| *head == used.head).unwrap();
                let (_, sector, into, status) = waiting.swap_remove(at);
                let answer = rig.answer(used, into, SECTOR, status);
                assert_eq!(answer.status, OK, "{name}");
                assert_eq!(answer.data, expect[sector * SECTOR..][..SECTOR], "{name}");
            }
            rig.arena.check();
        }
    }
}

#[test]
fn a_cold_file_is_read_through_the_ring() {
    let mut rig = Rig::new(on_disk(), 4096, BlkConfig::default());
    use std::os::fd::AsRawFd;
    rig.image.as_file().sync_all().unwrap();
    for turn in 0..40u64 {
        // SAFETY: an open descriptor and no pointers.
        unsafe {
            libc::posix_fadvise(rig.image.as_file().as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED)
        };
        let sector = turn * 100;
        assert_eq!(rig.read(sector, 64), rig.on_host(sector, 64));
        // A second look, now from the page cache, longer than what is there.
        assert_eq!(rig.read(sector, 96), rig.on_host(sector, 96));
        rig.new_arena();
    }
    assert_eq!(rig.block.counters()[0].errors.get(), 0);
}

#[test]
fn each_queue_has_a_named_worker_and_they_work_at_the_same_time() {
    for (name, dir, config) in settings() {
        let config = BlkConfig { queues: 4, name: "blk7".into(), ..config };
        let mut rig = Rig::new(dir, 1024, config);
        let tids = rig.block.handle().worker_tids();
        assert_eq!(tids.len(), 4);
        for (queue, tid) in tids.iter().enumerate() {
            let comm = std::fs::read_to_string(format!("/proc/self/task/{tid}/comm")).unwrap();
            assert_eq!(comm.trim(), format!("blk7-q{queue}"), "{name}");
        }
        let mut waiting = Vec::new();
        for i in 0..80 {
            let sector = (i * 12) as u64;
            let (bufs, into, status) = rig.parts(IN, sector, &[], 8 * SECTOR);
            rig.drivers[i % 4].add(&bufs);
            waiting.push((sector as usize, into, status));
        }
        (0..4).for_each(|queue| rig.publish(queue));
        for i in 0..80 {
            assert_eq!(rig.drivers[i % 4].wait_used().written_bytes, 4097, "{name}");
        }
        for (sector, into, status) in waiting {
            assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "{name}");
            let data = testkit::read(&rig.memory, into, 8 * SECTOR);
            assert_eq!(data, contents(1024)[sector * SECTOR..][..8 * SECTOR], "{name}");
        }
        for counters in rig.block.counters() {
            assert_eq!((counters.requests.get(), counters.bytes_read.get()), (20, 20 * 4096));
            assert!(counters.kicks.get() >= 1, "{name}");
        }
        rig.arena.check();
    }
}

#[test]
fn a_worker_is_bound_to_its_cpu_and_one_that_does_not_exist_is_an_error() {
    let rig = Rig::new(on_disk(), 8, BlkConfig { pin_cpus: vec![Some(0)], ..sync() });
    let tid = rig.block.worker_tids()[0];
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
    let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap();
    assert_eq!(allowed.split_whitespace().last(), Some("0"));

    let rig = Rig::new(on_disk(), 8, sync());
    let image = tempfile::NamedTempFile::new_in(on_disk()).unwrap();
    let config = BlkConfig { path: image.path().into(), pin_cpus: vec![Some(4095)], ..sync() };
    let disk = virtio_blk::Disk::open(&config).unwrap();
    let mut block = virtio_blk::Block::new(config, disk);
    let configs = [rig.drivers[0].config()];
    let (activation, _kicks) = rig.signals.activation(&rig.memory, rig.features, &configs);
    assert!(block.activate(activation).is_err());
}

#[test]
fn polling_finds_requests_and_stopping_ends_it() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, BlkConfig { io_poll_ns: 50_000_000, ..config });
        for _ in 0..200 {
            rig.new_arena();
            assert_eq!(rig.read(3, 2), contents(5)[3 * SECTOR..], "{name}");
        }
        let counters = rig.block.counters()[0].clone();
        assert!(counters.polls_hit.get() > 0, "{name}");
        assert!(counters.kicks_suppressed.get() > 0, "{name}");
        assert!(counters.sleeps.get() < 200, "{name}");
        rig.shut_down();
    }
}

#[test]
fn no_request_is_lost_however_kicks_and_sleeps_fall() {
    for event_idx in [false, true] {
        for (name, dir, config) in settings() {
            let mut rig = Rig::new(dir, 64, BlkConfig { event_idx, ..config });
            assert_eq!(rig.features & F_EVENT_IDX != 0, event_idx);
            for turn in 0..300usize {
                rig.new_arena();
                let mut waiting = Vec::new();
                for i in 0..1 + turn % 5 {
                    let (bufs, into, _) = rig.parts(IN, (turn + i) as u64 % 60, &[], SECTOR);
                    rig.drivers[0].add(&bufs);
                    waiting.push((into, (turn + i) % 60));
                    // Every request at another moment of the worker's way to sleep.
                    (0..turn * 13 % 200).for_each(|_| std::hint::spin_loop());
                    rig.publish(0);
                }
                for _ in 0..waiting.len() {
                    rig.drivers[0].wait_used();
                }
                for (into, sector) in waiting {
                    let data = testkit::read(&rig.memory, into, SECTOR);
                    assert_eq!(data, contents(64)[sector * SECTOR..][..SECTOR], "{name}");
                }
            }
        }
    }
}

#[test]
fn interrupts_come_once_a_batch_and_only_if_wanted() {
    let mut rig = Rig::new(on_disk(), 64, BlkConfig { event_idx: false, ..sync() });
    rig.drivers[0].want_interrupts(false);
    rig.read(0, 1);
    assert_eq!(rig.signals.sink.count(1), 0);
    rig.drivers[0].want_interrupts(true);
    rig.read(0, 1);
    assert_eq!(rig.signals.sink.wait(1, 1), 1);
    let counters = rig.block.counters()[0].clone();
    rig.block.reset();
    assert_eq!(counters.interrupts.get(), 1);
    assert_eq!(counters.interrupts_suppressed.get(), 1);
}

#[test]
fn a_guest_that_scribbles_on_its_rings_harms_only_itself() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 512, config);
        let stop = AtomicBool::new(false);
        let memory = rig.memory.clone();
        let (desc, end) = (rig.drivers[0].config().desc, rig.drivers[0].config().device);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut seed = 1u64;
                while !stop.load(Ordering::Relaxed) {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let at = desc + (seed >> 33) % (end - desc);
                    testkit::write(&memory, at, &seed.to_le_bytes()[..2]);
                }
            });
            for _ in 0..50 {
                for index in 0..200u16 {
                    match &rig.drivers[0] {
                        AnyDriver::Split(driver) => driver.set_available_index(index),
                        AnyDriver::Packed(driver) => {
                            // Available in the first round, alone or chained.
                            let flags = RawPacked::AVAIL | index & 7;
                            driver.set_flags(index % driver.config().size, flags);
                        }
                    }
                    rig.kicks[0].write(1).unwrap();
                }
                rig.block.reset();
                rig.restart();
            }
            stop.store(true, Ordering::Relaxed);
        });
        rig.block.reset();
        rig.restart();
        let (bufs, into, status) = rig.parts(GET_ID, 0, &[], 20);
        let used = rig.send(&bufs);
        assert_eq!(rig.answer(used, into, 20, status).status, OK, "{name}");
    }
}

#[test]
fn the_lock_ends_with_the_device_although_a_ring_outlives_it_for_a_while() {
    for _ in 0..20 {
        let config = BlkConfig { direct: true, ..BlkConfig::default() };
        let mut rig = Rig::new(on_disk(), 64, config);
        rig.read(0, 8);
        let Rig { block, image, .. } = rig;
        let config = BlkConfig { path: image.path().to_path_buf(), ..sync() };
        assert!(virtio_blk::Disk::open(&config).is_err(), "it is locked");
        drop(block);
        virtio_blk::Disk::open(&config).unwrap();
    }
}

#[test]
fn every_request_has_a_service_time_within_what_its_driver_waited() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        let started = Instant::now();
        rig.read(0, 8);
        rig.write(8, &[1; SECTOR]);
        assert_eq!(rig.request(FLUSH, 0, &[], 0).status, OK);
        assert_eq!(rig.request(GET_ID, 0, &[], 20).status, OK);
        assert_eq!(rig.request(IN, 64, &[], SECTOR).status, IOERR);
        let no_status = rig.arena.alloc_with(&header(FLUSH, 0));
        rig.send(&[Buf::readable(no_status, 16)]);
        let waited_ns = started.elapsed().as_nanos() as u64;
        let counters = &rig.block.counters()[0];
        let times = counters.service_time_ns.snapshot();
        assert_eq!((times.count(), counters.requests.get()), (6, 6), "{name}");
        assert!(times.max > 0 && times.sum >= times.max, "{name}: {times:?}");
        assert!(times.sum <= waited_ns, "{name}: {times:?}, waited {waited_ns} ns");
    }
}
