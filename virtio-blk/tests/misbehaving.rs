//! A guest that goes on misbehaving costs its own time and nothing else. In a process of its own,
//! whose memory, threads and descriptors are counted.

mod rig;

use std::fs;

use devices::testkit::{AnyDriver, Signals};
use devices::virtio::VirtioDevice as _;
use rig::*;
use virtio_blk::BlkConfig;

/// Resident memory in KiB, threads, open descriptors.
fn footprint() -> [usize; 3] {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    };
    [field("VmRSS"), field("Threads"), fs::read_dir("/proc/self/fd").unwrap().count()]
}

/// Breaks the queue, with requests in flight and a bad one, and resets the device.
fn misbehave(rig: &mut Rig, round: u64) {
    rig.new_arena();
    // A wrecked packed ring would hide those that the device has not looked at.
    let in_flight = if matches!(rig.drivers[0], AnyDriver::Packed(_)) { 0 } else { 16 };
    for place in 0..in_flight {
        let (bufs, _, _) = rig.parts(IN, (round + place) % 64 * 8, &[], 8 * SECTOR);
        rig.drivers[0].add(&bufs);
    }
    rig.publish(0);
    rig.drivers[0].wreck();
    rig.kicks[0].write(1).unwrap();
    rig.signals.sink.wait(0, 1);
    rig.block.reset();
    // The transport's part of a reset.
    rig.signals = Signals::new(1);
    rig.restart();
}

#[test]
fn breaking_the_queue_again_and_again_makes_nothing_grow() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 1024, BlkConfig { event_idx: false, ..config });
        (0..100).for_each(|round| misbehave(&mut rig, round));
        let before = footprint();
        (0..400).for_each(|round| misbehave(&mut rig, round));
        let after = footprint();
        // A leak of one page a round would be 1600 KiB.
        assert!(after[0] < before[0] + 1024, "{name}: {before:?}, then {after:?}");
        assert_eq!(after[1..], before[1..], "{name}");
    }
}
