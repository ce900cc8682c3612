//! Configuration, legal chains, and the way through them.

use proptest::prelude::*;

use super::*;
use crate::testkit::{Used, reframe};

#[test]
fn a_size_that_is_no_power_of_two_up_to_32768_is_refused() {
    let memory = testkit::memory(RAM_BYTES);
    let good = Driver::new(&memory, RINGS, 8, 0).config();
    for size in [0, 3, 7, 9, 32767, 32769, 65535] {
        let config = QueueConfig { size, ..good };
        let refused = Queue::new(&memory, &config, QueueFeatures::default()).err();
        assert_eq!(refused, Some(QueueError::Size(size)));
    }
    for size in [1, 2, 256, 32768] {
        let memory = testkit::memory(4 << 20);
        let config = QueueConfig { size, desc: 0, driver: 1 << 20, device: 2 << 20 };
        assert!(Queue::new(&memory, &config, QueueFeatures::default()).is_ok(), "{size}");
    }
}

#[test]
fn misaligned_areas_are_refused() {
    let memory = testkit::memory(RAM_BYTES);
    let good = QueueConfig { size: 8, desc: 0x1000, driver: 0x2002, device: 0x3004 };
    assert!(Queue::new(&memory, &good, QueueFeatures::default()).is_ok());
    for config in [
        QueueConfig { desc: 0x1008, ..good },
        QueueConfig { driver: 0x2001, ..good },
        QueueConfig { device: 0x3002, ..good },
    ] {
        let refused = Queue::new(&memory, &config, QueueFeatures::default()).err();
        assert!(matches!(refused, Some(QueueError::Misaligned(_))), "{config:?}");
    }
}

#[test]
fn areas_that_are_not_wholly_inside_one_region_of_ram_are_refused() {
    let ram = RAM_BYTES as u64;
    let memory = testkit::memory_with_hole(RAM_BYTES, 16 * ram);
    let good = QueueConfig { size: 8, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    // Each area takes 16, 2 or 8 bytes a descriptor, and 6 more in the rings.
    let last_fits = QueueConfig { size: 8, desc: ram - 128, driver: 0, device: 16 * ram };
    assert!(Queue::new(&memory, &last_fits, QueueFeatures::default()).is_ok());
    let outside = [ram - 16, ram, 2 * ram, 17 * ram - 16, 17 * ram, !15];
    for address in outside {
        for config in [
            QueueConfig { desc: address, ..good },
            QueueConfig { driver: address, ..good },
            QueueConfig { device: address, ..good },
        ] {
            let refused = Queue::new(&memory, &config, QueueFeatures::default()).err();
            assert!(matches!(refused, Some(QueueError::OutsideRam { .. })), "{config:x?}");
        }
    }
    // The rings' last two bytes, the event index, count as well.
    let config = QueueConfig { device: ram - 68, ..good };
    assert!(Queue::new(&memory, &config, QueueFeatures::default()).is_err());
    let config = QueueConfig { device: ram - 72, ..good };
    assert!(Queue::new(&memory, &config, QueueFeatures::default()).is_ok());
}

#[test]
fn a_chain_comes_out_as_it_went_in_and_goes_back() {
    let (mut driver, mut queue, mut arena, memory) = setup(8, 0);
    let header = arena.alloc_with(&[7; 16]);
    let data = arena.alloc(512);
    let status = arena.alloc(1);
    let bufs = [Buf::readable(header, 16), Buf::writable(data, 512), Buf::writable(status, 1)];
    let head = driver.add(&bufs);
    assert!(!queue.has_available(), "not published yet");
    assert!(driver.publish());
    assert!(queue.has_available());

    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(chain.head(), head);
    assert_eq!(seen(chain.readable()), [host(&memory, header, 16)]);
    assert_eq!(seen(chain.writable()), [host(&memory, data, 512), host(&memory, status, 1)]);
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (16, 513));
    let mut bytes = [0; 16];
    assert!(chain.read(&mut bytes));
    assert_eq!(bytes, [7; 16]);
    assert_eq!(chain.readable_bytes(), 0);
    chain.take_last_writable_byte().unwrap().store(0xa5);
    assert!(chain.write(&[1; 512]));
    assert!(chain.writable().is_empty());

    queue.push(chain.head(), 513);
    assert_eq!(driver.take_used(), None, "not published yet");
    assert!(queue.publish());
    assert_eq!(driver.take_used(), Some(Used { head, written_bytes: 513 }));
    assert_eq!(testkit::read(&memory, status, 1), [0xa5]);
    assert_eq!(testkit::read(&memory, data, 512), [1; 512]);
    arena.check();
    assert_eq!(queue.pop(&mut chain), Ok(false));
}

#[test]
fn reading_and_writing_too_much_does_nothing() {
    let (mut driver, mut queue, mut arena, memory) = setup(8, 0);
    let (a, b) = (arena.alloc_with(&[1, 2, 3]), arena.alloc_with(&[4]));
    let (c, d) = (arena.alloc(2), arena.alloc(2));
    driver.add(&[
        Buf::readable(a, 3),
        Buf::readable(b, 1),
        Buf::writable(c, 2),
        Buf::writable(d, 2),
    ]);
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    let mut bytes = [9; 5];
    assert!(!chain.read(&mut bytes));
    assert_eq!(bytes, [9; 5]);
    assert!(chain.read(&mut bytes[..2]));
    assert!(!chain.read(&mut bytes[..3]));
    assert!(chain.read(&mut bytes[2..4]));
    assert_eq!(bytes, [1, 2, 3, 4, 9]);
    assert!(!chain.write(&[7; 5]));
    assert_eq!(testkit::read(&memory, c, 2), [0, 0]);
    assert!(chain.write(&[7; 3]));
    assert_eq!(chain.writable_bytes(), 1);
    chain.take_last_writable_byte().unwrap().store(8);
    assert!(chain.take_last_writable_byte().is_none());
    assert!(!chain.write(&[1]));
    assert!(chain.write(&[]));
    assert_eq!(testkit::read(&memory, c, 2), [7, 7]);
    assert_eq!(testkit::read(&memory, d, 2), [7, 8]);
    arena.check();
}

#[test]
fn the_status_byte_is_one_byte_with_nothing_else_touched() {
    let (mut driver, mut queue, mut arena, memory) = setup(8, 0);
    for len_bytes in [1, 2, 512] {
        let status = arena.alloc_with(&vec![0x55; len_bytes as usize]);
        driver.add(&[Buf::writable(status, len_bytes)]);
        driver.publish();
        let mut chain = Chain::new();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        chain.take_last_writable_byte().unwrap().store(0);
        assert_eq!(chain.writable_bytes(), u64::from(len_bytes) - 1);
        let mut expected = vec![0x55; len_bytes as usize];
        *expected.last_mut().unwrap() = 0;
        assert_eq!(testkit::read(&memory, status, len_bytes as usize), expected);
        arena.check();
    }
}

#[test]
fn empty_descriptors_are_skipped_wherever_they_point() {
    let (mut driver, mut queue, mut arena, memory) = setup(8, 0);
    let (a, b) = (arena.alloc(4), arena.alloc(4));
    driver.add(&[
        Buf::readable(u64::MAX, 0),
        Buf::readable(a, 4),
        Buf::writable(0, 0),
        Buf::writable(b, 4),
        Buf::readable(a, 0),
    ]);
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(seen(chain.readable()), [host(&memory, a, 4)]);
    assert_eq!(seen(chain.writable()), [host(&memory, b, 4)]);
}

#[test]
fn exactly_as_many_descriptors_as_the_queue_has_are_accepted() {
    let (mut driver, mut queue, mut arena, _) = setup(16, INDIRECT);
    let at = arena.alloc(64);
    let bufs: Vec<Buf> = (0..16).map(|i| Buf::readable(at + i, 1)).collect();
    let mut chain = Chain::new();
    driver.add(&bufs);
    driver.publish();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(chain.readable().len(), 16);
    queue.push(chain.head(), 0);
    queue.publish();
    driver.take_used().unwrap();

    driver.add_indirect(&[], &bufs);
    driver.publish();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(chain.readable().len(), 16);
}

#[test]
fn descriptors_followed_by_one_indirect_table_are_accepted() {
    let (mut driver, mut queue, mut arena, memory) = setup(16, INDIRECT);
    let at = arena.alloc(64);
    let piece = |i: u64, writable| Buf { address: at + i, len_bytes: 1, writable };
    driver.add_indirect(
        &[piece(0, false), piece(1, false)],
        &[piece(2, false), piece(3, true), piece(4, true)],
    );
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(seen(chain.readable()), [0, 1, 2].map(|i| host(&memory, at + i, 1)));
    assert_eq!(seen(chain.writable()), [3, 4].map(|i| host(&memory, at + i, 1)));
}

#[test]
fn an_indirect_table_may_start_anywhere_and_its_write_flag_says_nothing() {
    for skew_bytes in 0..16 {
        let (mut driver, mut queue, mut arena, memory) = setup(16, INDIRECT);
        let data = arena.alloc(64);
        let table = arena.alloc_at(32, 16, skew_bytes);
        let first = RawDescriptor { address: data, len_bytes: 3, flags: 1, next: 1 };
        let second = RawDescriptor { address: data + 3, len_bytes: 5, flags: 2, next: 99 };
        testkit::write(&memory, table, &first.to_bytes());
        testkit::write(&memory, table + 16, &second.to_bytes());
        let flags = RawDescriptor::INDIRECT | RawDescriptor::WRITE;
        driver
            .write_descriptor(2, RawDescriptor { address: table, len_bytes: 32, flags, next: 77 });
        driver.make_available(2);
        driver.publish();
        let mut chain = Chain::new();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        assert_eq!(seen(chain.readable()), [host(&memory, data, 3)]);
        assert_eq!(seen(chain.writable()), [host(&memory, data + 3, 5)]);
    }
}

#[test]
fn a_buffer_over_two_adjacent_regions_is_two_runs() {
    let ram = RAM_BYTES as u64;
    let memory = testkit::memory_with_hole(RAM_BYTES, ram);
    let mut driver = Driver::new(&memory, RINGS, 8, 0);
    let mut queue = driver.device_queue();
    driver.add(&[Buf::writable(ram - 100, 300)]);
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(seen(chain.writable()), [host(&memory, ram - 100, 100), host(&memory, ram, 200)]);
}

#[test]
fn buffers_in_every_region_are_found() {
    let second = 4 << 30;
    let memory = testkit::memory_with_hole(RAM_BYTES, second);
    let mut driver = Driver::new(&memory, second + RINGS, 8, 0);
    let mut queue = driver.device_queue();
    let mut chain = Chain::new();
    for _ in 0..3 {
        let last = second + RAM_BYTES as u64 - 16;
        driver.add(&[Buf::readable(0, 16), Buf::readable(last, 16), Buf::writable(16, 1)]);
        driver.publish();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        assert_eq!(seen(chain.readable()), [host(&memory, 0, 16), host(&memory, last, 16)]);
        queue.push(chain.head(), 0);
        queue.publish();
        driver.take_used().unwrap();
    }
}

#[test]
fn indices_wrap_round_without_loss() {
    let (mut driver, mut queue, _, _) = setup(4, EVENT_IDX);
    let mut chain = Chain::new();
    for round in 0..50_000u32 {
        let heads = [
            driver.add(&[Buf::readable(BUFFERS, 1)]),
            driver.add(&[Buf::writable(BUFFERS, 1), Buf::writable(BUFFERS + 8, 1)]),
        ];
        driver.publish();
        for head in heads {
            assert_eq!(queue.pop(&mut chain), Ok(true));
            assert_eq!(chain.head(), head);
        }
        assert_eq!(queue.pop(&mut chain), Ok(false));
        // They come back in the other order.
        for head in [heads[1], heads[0]] {
            queue.push(head, round);
        }
        queue.publish();
        for head in [heads[1], heads[0]] {
            assert_eq!(driver.take_used(), Some(Used { head, written_bytes: round }));
        }
    }
}

proptest! {
    /// Whatever the framing and wherever the indirect table begins, the same bytes arrive.
    #[test]
    fn framing_says_nothing_about_contents(
        readable_len in 0u32..300,
        writable_len in 0u32..300,
        lens in prop::collection::vec(prop_oneof![Just(0u32), 1u32..100], 1..6),
        direct in 0usize..20,
        steps in prop::collection::vec(1usize..64, 1..5),
    ) {
        prop_assume!(readable_len + writable_len > 0 && lens.iter().any(|&len| len > 40));
        let (mut driver, mut queue, mut arena, memory) = setup(64, INDIRECT);
        let content: Vec<u8> = (0..readable_len).map(|i| i as u8).collect();
        let from = arena.alloc_with(&content);
        let to = arena.alloc(writable_len.into());
        let bufs = reframe(
            &[Buf::readable(from, readable_len), Buf::writable(to, writable_len)],
            &lens,
        );
        prop_assume!(bufs.len() <= 64);
        let direct = direct.min(bufs.len() - 1);
        driver.add_indirect(&bufs[..direct], &bufs[direct..]);
        driver.publish();
        let mut chain = Chain::new();
        prop_assert_eq!(queue.pop(&mut chain), Ok(true));
        prop_assert_eq!(chain.readable_bytes(), u64::from(readable_len));
        prop_assert_eq!(chain.writable_bytes(), u64::from(writable_len));

        let mut received = Vec::new();
        for step in steps.iter().copied().cycle() {
            let left = chain.readable_bytes() as usize;
            if left == 0 {
                break;
            }
            let mut piece = vec![0; step.min(left)];
            prop_assert!(chain.read(&mut piece));
            received.extend(piece);
        }
        prop_assert_eq!(received, content);

        let answer: Vec<u8> = (0..writable_len).map(|i| !i as u8).collect();
        let mut left = &answer[..];
        let last = chain.take_last_writable_byte();
        if let (Some(last), Some((value, rest))) = (last, left.split_last()) {
            last.store(*value);
            left = rest;
        }
        for step in steps.iter().copied().cycle() {
            if left.is_empty() {
                break;
            }
            let (now, later) = left.split_at(step.min(left.len()));
            prop_assert!(chain.write(now));
            left = later;
        }
        prop_assert_eq!(chain.writable_bytes(), 0);
        prop_assert_eq!(testkit::read(&memory, to, answer.len()), answer);
        arena.check();
    }
}
