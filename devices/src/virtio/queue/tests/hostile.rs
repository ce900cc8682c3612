//! Drivers that break the rules: each breaks its own queue and nothing else.

use proptest::prelude::*;

use super::*;

const SIZE: u16 = 8;

/// Checks that `pop` gives `error`, even when the driver mends its ways.
fn is_broken(queue: &mut Queue, driver: &mut Driver, memory: &GuestMemory, error: QueueError) {
    stays_broken(queue, memory, error, || {
        for index in 0..SIZE {
            let buf = RawDescriptor { address: BUFFERS, len_bytes: 1, flags: 0, next: 0 };
            driver.write_descriptor(index, buf);
            driver.write_available(index, index);
        }
        driver.set_available_index(1);
    });
}

/// One chain with these descriptors, from descriptor 0 on.
fn raw(descriptors: &[RawDescriptor], features: u64, error: QueueError) {
    let (mut driver, mut queue, _, memory) = setup(SIZE, features);
    for (index, descriptor) in (0..).zip(descriptors) {
        driver.write_descriptor(index, *descriptor);
    }
    driver.make_available(0);
    driver.publish();
    is_broken(&mut queue, &mut driver, &memory, error);
}

fn buf(flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor { address: BUFFERS, len_bytes: 16, flags, next }
}

const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const IN_TABLE: u16 = RawDescriptor::INDIRECT;

#[test]
fn an_available_index_too_far_ahead_breaks_the_queue() {
    for available in [SIZE + 1, 1000, 0x8000, u16::MAX] {
        let (mut driver, mut queue, _, memory) = setup(SIZE, 0);
        driver.set_available_index(available);
        let error = QueueError::AvailableIndex { available, device: 0 };
        is_broken(&mut queue, &mut driver, &memory, error);
    }
}

#[test]
fn as_many_chains_as_descriptors_are_accepted_and_no_more_while_they_are_out() {
    let (mut driver, mut queue, _, memory) = setup(SIZE, 0);
    let mut chain = Chain::new();
    for _ in 0..SIZE {
        driver.add(&[Buf::readable(BUFFERS, 1)]);
    }
    driver.publish();
    for _ in 0..SIZE {
        assert_eq!(queue.pop(&mut chain), Ok(true));
    }
    // All descriptors are with the device: the driver cannot have another chain.
    driver.make_available(0);
    driver.publish();
    let error = QueueError::AvailableIndex { available: SIZE + 1, device: SIZE };
    is_broken(&mut queue, &mut driver, &memory, error);
}

#[test]
fn an_available_index_that_goes_back_breaks_the_queue() {
    let (mut driver, mut queue, _, memory) = setup(SIZE, 0);
    let mut chain = Chain::new();
    for _ in 0..3 {
        driver.add(&[Buf::readable(BUFFERS, 1)]);
        driver.publish();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        queue.push(chain.head(), 0);
        queue.publish();
        driver.take_used().unwrap();
    }
    driver.set_available_index(2);
    let error = QueueError::AvailableIndex { available: 2, device: 3 };
    is_broken(&mut queue, &mut driver, &memory, error);
}

#[test]
fn what_was_in_flight_can_still_be_returned() {
    let (mut driver, mut queue, _, _) = setup(SIZE, 0);
    let mut chain = Chain::new();
    let head = driver.add(&[Buf::writable(BUFFERS, 1)]);
    driver.publish();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    driver.make_available(SIZE);
    driver.publish();
    assert_eq!(queue.pop(&mut Chain::new()), Err(QueueError::DescriptorIndex(SIZE)));
    queue.push(head, 1);
    assert!(queue.publish());
    assert_eq!(driver.take_used().unwrap().head, head);
}

#[test]
fn descriptors_that_do_not_exist_break_the_queue() {
    raw(&[buf(NEXT, SIZE)], 0, QueueError::DescriptorIndex(SIZE));
    raw(&[buf(NEXT, u16::MAX)], 0, QueueError::DescriptorIndex(u16::MAX));
    let (mut driver, mut queue, _, memory) = setup(SIZE, 0);
    driver.make_available(u16::MAX);
    driver.publish();
    is_broken(&mut queue, &mut driver, &memory, QueueError::DescriptorIndex(u16::MAX));
}

#[test]
fn cycles_break_the_queue() {
    raw(&[buf(NEXT, 0)], 0, QueueError::ChainTooLong);
    raw(&[buf(NEXT, 1), buf(NEXT, 2), buf(NEXT, 0)], 0, QueueError::ChainTooLong);
    // One of empty buffers as well.
    let empty = RawDescriptor { len_bytes: 0, ..buf(NEXT, 0) };
    raw(&[empty], 0, QueueError::ChainTooLong);
}

#[test]
fn a_readable_descriptor_after_a_writable_one_breaks_the_queue() {
    raw(&[buf(WRITE | NEXT, 1), buf(0, 0)], 0, QueueError::ReadableAfterWritable);
}

#[test]
fn buffers_outside_ram_break_the_queue() {
    let ram = RAM_BYTES as u64;
    for (address, len_bytes) in
        [(ram, 1), (ram - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX), (1 << 63, 8)]
    {
        let (mut driver, mut queue, _, _) = setup(SIZE, 0);
        driver.add(&[Buf::writable(address, len_bytes)]);
        driver.publish();
        let popped = queue.pop(&mut Chain::new());
        assert!(matches!(popped, Err(QueueError::OutsideRam { .. })), "{address:#x} {len_bytes}");
    }
}

#[test]
fn a_buffer_that_runs_into_the_hole_between_two_regions_breaks_the_queue() {
    let ram = RAM_BYTES as u64;
    let memory = testkit::memory_with_hole(RAM_BYTES, 2 * ram);
    let mut driver = Driver::new(&memory, RINGS, SIZE, 0);
    let mut queue = driver.device_queue();
    driver.add(&[Buf::writable(ram - 8, RAM_BYTES as u32 + 16)]);
    driver.publish();
    let error = QueueError::OutsideRam { address: ram, len_bytes: ram + 8 };
    assert_eq!(queue.pop(&mut Chain::new()), Err(error));
}

/// One chain of an indirect table with these descriptors.
fn table(len_bytes: u32, entries: &[RawDescriptor], error: QueueError) {
    let (mut driver, mut queue, _, memory) = setup(SIZE, INDIRECT);
    for (at, entry) in (BUFFERS..).step_by(16).zip(entries) {
        testkit::write(&memory, at, &entry.to_bytes());
    }
    let address = BUFFERS;
    driver.write_descriptor(0, RawDescriptor { address, len_bytes, flags: IN_TABLE, next: 0 });
    driver.make_available(0);
    driver.publish();
    is_broken(&mut queue, &mut driver, &memory, error);
}

#[test]
fn an_indirect_table_of_a_bad_length_breaks_the_queue() {
    let longer = 16 * u32::from(SIZE) + 16;
    for len_bytes in [0, 1, 15, 17, 40, longer, 16 * 65536, u32::MAX, !15] {
        table(len_bytes, &[buf(0, 0)], QueueError::IndirectLength(len_bytes));
    }
}

#[test]
fn an_indirect_table_outside_ram_breaks_the_queue() {
    let address = RAM_BYTES as u64 - 16;
    let outside = RawDescriptor { address, len_bytes: 32, flags: IN_TABLE, next: 0 };
    raw(&[outside], INDIRECT, QueueError::OutsideRam { address, len_bytes: 32 });
}

#[test]
fn an_indirect_descriptor_where_none_may_be_breaks_the_queue() {
    let error = QueueError::IndirectNotAllowed;
    raw(&[buf(IN_TABLE, 0)], 0, error);
    raw(&[buf(IN_TABLE | NEXT, 1), buf(0, 0)], INDIRECT, error);
    table(32, &[buf(NEXT, 1), buf(IN_TABLE, 0)], error);
}

#[test]
fn an_indirect_table_with_a_cycle_or_a_link_out_of_it_breaks_the_queue() {
    table(32, &[buf(NEXT, 1), buf(NEXT, 0)], QueueError::ChainTooLong);
    table(32, &[buf(NEXT, 2)], QueueError::DescriptorIndex(2));
}

#[test]
fn direct_and_indirect_descriptors_together_are_no_more_than_the_queue_has() {
    let (mut driver, mut queue, _, memory) = setup(SIZE, INDIRECT);
    let bufs = [Buf::readable(BUFFERS, 1); SIZE as usize];
    driver.add_indirect(&bufs[..1], &bufs);
    driver.publish();
    is_broken(&mut queue, &mut driver, &memory, QueueError::ChainTooLong);
}

/// A descriptor that is nonsense in likely ways.
fn any_descriptor() -> impl Strategy<Value = RawDescriptor> {
    let address = prop_oneof![
        4 => 0..RAM_BYTES as u64,
        1 => RAM_BYTES as u64 - 64..RAM_BYTES as u64 + 64,
        1 => any::<u64>(),
    ];
    let len_bytes =
        prop_oneof![4 => (0u32..12).prop_map(|n| 16 * n), 2 => 0u32..5000, 1 => any::<u32>()];
    let flags = prop_oneof![6 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![6 => 0..SIZE, 1 => any::<u16>()];
    (address, len_bytes, flags, next).prop_map(|(address, len_bytes, flags, next)| RawDescriptor {
        address,
        len_bytes,
        flags,
        next,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Nothing in the rings makes the device crash, loop, or reach outside RAM; and no more chains
    /// than descriptors are ever out.
    #[test]
    fn garbage_in_the_rings_is_bounded_work_inside_ram(
        descriptors in prop::collection::vec(any_descriptor(), SIZE as usize),
        tables in prop::collection::vec(any_descriptor(), 32),
        rounds in prop::collection::vec(
            (prop::collection::vec(prop_oneof![8 => 0..SIZE, 1 => any::<u16>()], 8), 0u16..12, any::<bool>()),
            1..5,
        ),
        features in prop::sample::select(vec![0, INDIRECT, EVENT_IDX, INDIRECT | EVENT_IDX]),
    ) {
        let memory = testkit::memory(RAM_BYTES);
        let driver = Driver::new(&memory, RINGS, SIZE, features);
        let mut queue = driver.device_queue();
        for (index, descriptor) in (0..).zip(&descriptors) {
            driver.write_descriptor(index, *descriptor);
        }
        // Tables where some of the descriptors point to.
        for descriptor in descriptors.iter().filter(|d| d.address < 0xf_0000) {
            for (at, entry) in (descriptor.address..).step_by(16).zip(&tables) {
                if at > RINGS + 0x2000 {
                    testkit::write(&memory, at, &entry.to_bytes());
                }
            }
        }
        let (ram, _) = host(&memory, 0, 0);
        let ram = ram..ram + RAM_BYTES;
        let mut chain = Chain::new();
        let mut out = Vec::new();
        let mut index = 0u16;
        for (heads, advance, return_them) in rounds {
            for (slot, head) in (0..).zip(heads) {
                driver.write_available(slot, head);
            }
            index = index.wrapping_add(advance);
            driver.set_available_index(index);
            let mut pops = 0;
            while let Ok(true) = queue.pop(&mut chain) {
                pops += 1;
                out.push(chain.head());
                prop_assert!(pops <= SIZE && out.len() <= usize::from(SIZE));
                prop_assert!(chain.head() < SIZE);
                let bufs = [chain.readable(), chain.writable()].concat();
                prop_assert!(bufs.len() <= usize::from(SIZE));
                for buf in bufs {
                    let start = buf.as_ptr().addr();
                    prop_assert!(buf.len_bytes() > 0 && ram.contains(&start));
                    prop_assert!(buf.len_bytes() <= ram.end - start);
                }
            }
            if return_them {
                out.drain(..).for_each(|head| queue.push(head, 0));
                queue.publish();
            }
            queue.disable_kicks();
            queue.enable_kicks();
        }
    }

    /// Areas anywhere: either refused, or inside RAM and usable.
    #[test]
    fn any_configuration_is_refused_or_works(
        size in prop_oneof![3 => (0u32..17).prop_map(|n| (1u32 << n) as u16), 1 => any::<u16>()],
        desc in any_descriptor(),
        driver in any_descriptor(),
        device in any_descriptor(),
    ) {
        let memory = testkit::memory(RAM_BYTES);
        let config = QueueConfig {
            size,
            desc: desc.address & !0xf,
            driver: driver.address & !0x1,
            device: device.address & !0x3,
        };
        let features = QueueFeatures { event_idx: true, indirect: true, packed: false };
        if let Ok(mut queue) = Queue::new(&memory, &config, features) {
            let ram = RAM_BYTES as u64;
            prop_assert!(config.desc + 16 * u64::from(size) <= ram);
            prop_assert!(config.driver + 6 + 2 * u64::from(size) <= ram);
            prop_assert!(config.device + 6 + 8 * u64::from(size) <= ram);
            for _ in 0..size {
                queue.push(0, 0);
            }
            queue.publish();
            queue.enable_kicks();
            let _ = queue.pop(&mut Chain::new());
        }
    }
}
