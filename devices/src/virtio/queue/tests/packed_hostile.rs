//! Drivers of packed queues that break the rules: each breaks its own queue and nothing else.

use proptest::prelude::*;

use super::*;
use crate::testkit::RingPosition;

const SIZE: u16 = 8;
const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const IN_TABLE: u16 = RawDescriptor::INDIRECT;
const AVAIL: u16 = RawPacked::AVAIL;
const USED: u16 = RawPacked::USED;

fn buf(flags: u16) -> RawPacked {
    RawPacked { address: BUFFERS, len_bytes: 16, id: 0, flags }
}

/// Checks that `pop` gives `error`, even when the driver mends its ways.
fn is_broken(queue: &mut Queue, driver: &PackedDriver, memory: &GuestMemory, error: QueueError) {
    stays_broken(queue, memory, error, || {
        for slot in 0..SIZE {
            driver.write_descriptor(slot, buf(AVAIL));
        }
    });
}

/// A ring that starts with these descriptors.
fn raw(descriptors: &[RawPacked], features: u64, error: QueueError) {
    let (driver, mut queue, _, memory) = setup_packed(SIZE, features);
    for (slot, descriptor) in (0..).zip(descriptors) {
        driver.write_descriptor(slot, *descriptor);
    }
    is_broken(&mut queue, &driver, &memory, error);
}

#[test]
fn a_chain_longer_than_the_queue_breaks_it() {
    // The driver makes a second round before the first one came back.
    raw(&[buf(AVAIL | NEXT); SIZE as usize], 0, QueueError::ChainTooLong);
    let empty = RawPacked { len_bytes: 0, ..buf(AVAIL | NEXT) };
    raw(&[empty; SIZE as usize], 0, QueueError::ChainTooLong);
}

#[test]
fn more_descriptors_than_a_queue_has_may_come_back_between_two_publications() {
    // A driver that does not wait for them: more than 16 bits count, in the largest queue.
    const LARGEST: u16 = 32768;
    let memory = testkit::memory(1 << 20);
    let driver = PackedDriver::new(&memory, RINGS, LARGEST, 0);
    let mut queue = driver.device_queue();
    let mut chain = Chain::new();
    for available in [AVAIL, USED, AVAIL] {
        for slot in 0..LARGEST {
            let next = if slot + 1 < LARGEST { NEXT } else { 0 };
            driver.write_descriptor(slot, RawPacked { len_bytes: 0, ..buf(available | next) });
        }
        assert_eq!(queue.pop(&mut chain), Ok(true));
        queue.push(chain.head(), 0);
    }
    assert!(queue.publish());
}

#[test]
fn descriptors_that_the_device_holds_cannot_be_made_available() {
    let (driver, mut queue, _, memory) = setup_packed(SIZE, 0);
    let mut chain = Chain::new();
    for slot in 0..SIZE {
        driver.write_descriptor(slot, buf(AVAIL));
        assert_eq!(queue.pop(&mut chain), Ok(true));
    }
    assert_eq!(queue.pop(&mut chain), Ok(false));
    driver.write_descriptor(0, buf(USED));
    is_broken(&mut queue, &driver, &memory, QueueError::NotGivenBack);

    // Nor be the rest of a chain.
    let (driver, mut queue, _, memory) = setup_packed(SIZE, 0);
    for _ in 0..2 {
        (0..3).for_each(|slot| driver.write_descriptor(slot, buf(AVAIL)));
    }
    for _ in 0..3 {
        assert_eq!(queue.pop(&mut chain), Ok(true));
    }
    (3..SIZE).for_each(|slot| driver.write_descriptor(slot, buf(AVAIL | NEXT)));
    driver.write_descriptor(0, buf(USED));
    is_broken(&mut queue, &driver, &memory, QueueError::NotGivenBack);
}

#[test]
fn a_chain_that_goes_on_in_a_descriptor_of_the_wrong_round_breaks_the_queue() {
    for flags in [0, USED, AVAIL | USED] {
        let error = QueueError::ChainNotAvailable(1);
        raw(&[buf(AVAIL | NEXT), buf(flags)], 0, error);
    }
}

#[test]
fn wrap_counters_of_the_wrong_round_make_nothing_available() {
    for flags in [0, USED, AVAIL | USED] {
        let (driver, mut queue, _, _) = setup_packed(SIZE, 0);
        driver.write_descriptor(0, buf(flags));
        assert_eq!(queue.pop(&mut Chain::new()), Ok(false));
        assert!(!queue.has_available() && !queue.enable_kicks());
    }
}

#[test]
fn what_was_in_flight_can_still_be_returned() {
    let (mut driver, mut queue, _, _) = setup_packed(SIZE, 0);
    let mut chain = Chain::new();
    let id = driver.add(&[Buf::writable(BUFFERS, 1)]);
    driver.publish();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    driver.write_descriptor(1, buf(AVAIL | IN_TABLE));
    assert_eq!(queue.pop(&mut Chain::new()), Err(QueueError::IndirectNotAllowed));
    queue.push(chain.head(), 1);
    assert!(queue.publish());
    assert_eq!(driver.take_used().unwrap().head, id);
}

#[test]
fn a_readable_descriptor_after_a_writable_one_breaks_the_queue() {
    let error = QueueError::ReadableAfterWritable;
    raw(&[buf(AVAIL | WRITE | NEXT), buf(AVAIL)], 0, error);
    table(32, &[buf(WRITE), buf(0)], error);
}

#[test]
fn buffers_outside_ram_break_the_queue() {
    let ram = RAM_BYTES as u64;
    for (address, len_bytes) in
        [(ram, 1), (ram - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX), (1 << 63, 8)]
    {
        let (driver, mut queue, _, _) = setup_packed(SIZE, 0);
        driver.write_descriptor(0, RawPacked { address, len_bytes, ..buf(AVAIL | WRITE) });
        let popped = queue.pop(&mut Chain::new());
        assert!(matches!(popped, Err(QueueError::OutsideRam { .. })), "{address:#x} {len_bytes}");
    }
}

/// A chain that is an indirect table with these entries.
fn table(len_bytes: u32, entries: &[RawPacked], error: QueueError) {
    let (driver, mut queue, _, memory) = setup_packed(SIZE, INDIRECT);
    for (at, entry) in (BUFFERS..).step_by(16).zip(entries) {
        testkit::write(&memory, at, &entry.to_bytes());
    }
    driver.write_descriptor(0, RawPacked { len_bytes, ..buf(AVAIL | IN_TABLE) });
    is_broken(&mut queue, &driver, &memory, error);
}

#[test]
fn an_indirect_table_of_a_bad_length_breaks_the_queue() {
    let longer = 16 * u32::from(SIZE) + 16;
    for len_bytes in [0, 1, 15, 17, 40, longer, 16 * 65536, u32::MAX, !15] {
        table(len_bytes, &[buf(0)], QueueError::IndirectLength(len_bytes));
    }
}

#[test]
fn an_indirect_table_outside_ram_breaks_the_queue() {
    let address = RAM_BYTES as u64 - 16;
    let outside = RawPacked { address, len_bytes: 32, ..buf(AVAIL | IN_TABLE) };
    raw(&[outside], INDIRECT, QueueError::OutsideRam { address, len_bytes: 32 });
}

#[test]
fn an_indirect_descriptor_where_none_may_be_breaks_the_queue() {
    let error = QueueError::IndirectNotAllowed;
    raw(&[buf(AVAIL | IN_TABLE)], 0, error);
    raw(&[buf(AVAIL | IN_TABLE | NEXT), buf(AVAIL)], INDIRECT, error);
    raw(&[buf(AVAIL | NEXT), buf(AVAIL | IN_TABLE)], INDIRECT, error);
}

#[test]
fn chains_that_are_not_out_cannot_be_pushed() {
    let (mut driver, mut queue, _, memory) = setup_packed(SIZE, 0);
    let mut chain = Chain::new();
    driver.add(&[Buf::readable(BUFFERS, 1)]);
    driver.publish();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    queue.push(chain.head(), 0);
    queue.publish();
    let before = testkit::read(&memory, 0, RAM_BYTES);
    for number in [chain.head(), 3, SIZE, u16::MAX] {
        queue.push(number, 1);
        assert!(!queue.publish());
    }
    assert!(testkit::read(&memory, 0, RAM_BYTES) == before);
}

/// A descriptor that is nonsense in likely ways, available in one of two rounds more often than
/// not.
fn any_descriptor() -> impl Strategy<Value = RawPacked> {
    let address = prop_oneof![
        4 => 0..RAM_BYTES as u64,
        1 => RAM_BYTES as u64 - 64..RAM_BYTES as u64 + 64,
        1 => any::<u64>(),
    ];
    let len_bytes =
        prop_oneof![4 => (0u32..12).prop_map(|n| 16 * n), 2 => 0u32..5000, 1 => any::<u32>()];
    let round = prop::sample::select(vec![AVAIL, AVAIL, USED, USED, 0, AVAIL | USED]);
    let flags = prop_oneof![
        6 => (0u16..8, round).prop_map(|(flags, round)| flags | round),
        1 => any::<u16>(),
    ];
    (address, len_bytes, any::<u16>(), flags)
        .prop_map(|(address, len_bytes, id, flags)| RawPacked { address, len_bytes, id, flags })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Nothing in the ring makes the device crash, loop, or reach outside RAM; and no more chains
    /// than descriptors are ever out.
    #[test]
    fn garbage_in_the_ring_is_bounded_work_inside_ram(
        size in 1u16..=SIZE,
        tables in prop::collection::vec(any_descriptor(), 32),
        rounds in prop::collection::vec(
            (
                prop::collection::vec(any_descriptor(), SIZE as usize),
                any::<u32>(),
                prop::collection::vec(any::<u16>(), 0..8),
            ),
            1..6,
        ),
        features in prop::sample::select(vec![0, INDIRECT, EVENT_IDX, INDIRECT | EVENT_IDX]),
    ) {
        let (driver, mut queue, _, memory) = setup_packed(size, features);
        let (ram, _) = host(&memory, 0, 0);
        let ram = ram..ram + RAM_BYTES;
        let mut chain = Chain::new();
        let mut out: Vec<u16> = Vec::new();
        for (descriptors, event, returned) in rounds {
            for (slot, descriptor) in (0..size).zip(&descriptors) {
                driver.write_descriptor(slot, *descriptor);
                if descriptor.address < 0xf_0000 && descriptor.address > RINGS + 0x2000 {
                    for (at, entry) in (descriptor.address..).step_by(16).zip(&tables) {
                        testkit::write(&memory, at, &entry.to_bytes());
                    }
                }
            }
            driver.set_driver_event(event as u16, (event >> 16) as u16);
            while let Ok(true) = queue.pop(&mut chain) {
                prop_assert!(!out.contains(&chain.head()) && chain.head() < size);
                out.push(chain.head());
                prop_assert!(out.len() <= usize::from(size));
                let bufs = [chain.readable(), chain.writable()].concat();
                prop_assert!(bufs.len() <= usize::from(size));
                for buf in bufs {
                    let start = buf.as_ptr().addr();
                    prop_assert!(buf.len_bytes() > 0 && ram.contains(&start));
                    prop_assert!(buf.len_bytes() <= ram.end - start);
                }
            }
            for choice in returned {
                if !out.is_empty() {
                    let head = out.swap_remove(usize::from(choice) % out.len());
                    queue.push(head, u32::from(choice));
                }
            }
            queue.publish();
            queue.disable_kicks();
            queue.enable_kicks();
        }
    }

    /// Areas anywhere: either refused, or inside RAM and usable.
    #[test]
    fn any_configuration_is_refused_or_works(
        size in prop_oneof![3 => 0u16..300, 1 => any::<u16>()],
        areas in prop::array::uniform3(any_descriptor()),
    ) {
        let memory = testkit::memory(RAM_BYTES);
        let [desc, driver, device] = areas.map(|area| area.address);
        let config = QueueConfig { size, desc: desc & !0xf, driver: driver & !3, device: device & !3 };
        let features = QueueFeatures { event_idx: true, indirect: true, packed: true };
        if let Ok(mut queue) = Queue::new(&memory, &config, features) {
            let ram = RAM_BYTES as u64;
            prop_assert!(size > 0 && config.desc + 16 * u64::from(size) <= ram);
            prop_assert!(config.driver + 4 <= ram && config.device + 4 <= ram);
            // The last descriptor of the ring, available in its first round.
            let at = RingPosition { slot: 0, wrap: true };
            testkit::write(&memory, config.desc + 14, &at.available().to_le_bytes());
            let mut chain = Chain::new();
            if let Ok(true) = queue.pop(&mut chain) {
                queue.push(chain.head(), 0);
                queue.publish();
            }
            queue.enable_kicks();
        }
    }
}
