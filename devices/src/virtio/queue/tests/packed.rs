//! Packed queues: configuration, legal chains, used descriptors, events.

use super::*;
use crate::testkit::{RingPosition, Used};

const FEATURES: QueueFeatures = QueueFeatures { event_idx: false, indirect: false, packed: true };
const WRITE: u16 = RawDescriptor::WRITE;

/// Adds a chain of `descriptors`, pops it and pushes it; not published.
fn use_one(driver: &mut PackedDriver, queue: &mut Queue, descriptors: usize) -> u16 {
    let id = driver.add(&vec![Buf::writable(BUFFERS, 1); descriptors]);
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    queue.push(chain.head(), 1);
    id
}

/// The second word of a descriptor: length, ID and flags.
fn rest(memory: &GuestMemory, slot: u64) -> (u32, u16, u16) {
    let bytes = testkit::read(memory, RINGS + 16 * slot + 8, 8);
    let word = u64::from_le_bytes(bytes.try_into().unwrap());
    (word as u32, (word >> 32) as u16, (word >> 48) as u16)
}

#[test]
fn any_size_up_to_32768_is_accepted() {
    let memory = testkit::memory(1 << 20);
    for (size, accepted) in
        [(0, false), (1, true), (3, true), (100, true), (32768, true), (32769, false)]
    {
        let config = QueueConfig { size, desc: 0, driver: 0xf_0000, device: 0xf_0004 };
        assert_eq!(Queue::new(&memory, &config, FEATURES).is_ok(), accepted, "{size}");
    }
}

#[test]
fn misaligned_areas_and_areas_outside_ram_are_refused() {
    let ram = RAM_BYTES as u64;
    let memory = testkit::memory(RAM_BYTES);
    let good = QueueConfig { size: 8, desc: ram - 128, driver: ram - 4, device: 0x3004 };
    assert!(Queue::new(&memory, &good, FEATURES).is_ok());
    for config in [
        QueueConfig { desc: 0x1008, ..good },
        QueueConfig { driver: 0x2002, ..good },
        QueueConfig { device: 0x3006, ..good },
    ] {
        let refused = Queue::new(&memory, &config, FEATURES).err();
        assert!(matches!(refused, Some(QueueError::Misaligned(_))), "{config:x?}");
    }
    for config in [
        QueueConfig { desc: ram - 112, ..good },
        QueueConfig { driver: ram, ..good },
        QueueConfig { device: !3, ..good },
    ] {
        let refused = Queue::new(&memory, &config, FEATURES).err();
        assert!(matches!(refused, Some(QueueError::OutsideRam { .. })), "{config:x?}");
    }
}

#[test]
fn a_chain_comes_out_as_it_went_in_and_goes_back_in_one_descriptor() {
    let (mut driver, mut queue, mut arena, memory) = setup_packed(8, 0);
    let (header, data) = (arena.alloc_with(&[7; 16]), arena.alloc(512));
    let id = driver.add(&[Buf::readable(header, 16), Buf::writable(data, 512)]);
    assert!(!queue.has_available(), "not published yet");
    assert!(driver.publish());
    assert!(queue.has_available());
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!(seen(chain.readable()), [host(&memory, header, 16)]);
    assert_eq!(seen(chain.writable()), [host(&memory, data, 512)]);
    assert!(chain.write(&[1; 512]));
    let second = rest(&memory, 1);
    queue.push(chain.head(), 512);
    assert!(!driver.has_used(), "not published yet");
    assert!(queue.publish());
    assert_eq!(rest(&memory, 0), (512, id, WRITE | RawPacked::AVAIL | RawPacked::USED));
    assert_eq!(rest(&memory, 1), second, "the rest of the chain is skipped");
    assert_eq!(driver.take_used(), Some(Used { head: id, written_bytes: 512 }));
    assert_eq!(testkit::read(&memory, data, 512), [1; 512]);
    assert_eq!(queue.pop(&mut chain), Ok(false));
    arena.check();
}

#[test]
fn the_write_flag_says_whether_the_length_counts() {
    let (mut driver, mut queue, _, memory) = setup_packed(8, 0);
    let mut chain = Chain::new();
    for (slot, (written_bytes, flag)) in [(0, 0), (5, WRITE)].into_iter().enumerate() {
        driver.add(&[Buf::writable(BUFFERS, 8)]);
        driver.publish();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        queue.push(chain.head(), written_bytes);
        queue.publish();
        let (len_bytes, _, flags) = rest(&memory, slot as u64);
        assert_eq!((len_bytes, flags & WRITE), (written_bytes, flag));
    }
}

#[test]
fn chains_go_on_past_the_end_of_the_ring_in_both_rounds() {
    let (mut driver, mut queue, _, memory) = setup_packed(5, 0);
    let mut chain = Chain::new();
    // Three descriptors at a time in a ring of five: every offset, with both wrap counters.
    for round in 0..100u64 {
        let bufs = [0, 1, 2].map(|i| Buf::readable(BUFFERS + 64 * round + i, 1));
        let id = driver.add(&bufs);
        driver.publish();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        let expected = [0, 1, 2].map(|i| host(&memory, BUFFERS + 64 * round + i, 1));
        assert_eq!(seen(chain.readable()), expected);
        queue.push(chain.head(), round as u32);
        queue.publish();
        assert_eq!(driver.take_used(), Some(Used { head: id, written_bytes: round as u32 }));
    }
}

#[test]
fn chains_come_back_in_any_order_while_their_descriptors_are_used_again() {
    let (mut driver, mut queue, _, _) = setup_packed(4, 0);
    let mut chains = [(); 4].map(|()| Chain::new());
    let ids: Vec<u16> = (0..4).map(|_| driver.add(&[Buf::readable(BUFFERS, 1)])).collect();
    driver.publish();
    for chain in &mut chains {
        assert_eq!(queue.pop(chain), Ok(true));
    }
    assert_eq!(queue.pop(&mut Chain::new()), Ok(false), "no descriptor is left");
    // The last one goes back into the first descriptor, which is used again at once: two chains
    // that are out began there.
    queue.push(chains[3].head(), 40);
    queue.publish();
    assert_eq!(driver.take_used(), Some(Used { head: ids[3], written_bytes: 40 }));
    let next = driver.add(&[Buf::readable(BUFFERS, 1)]);
    driver.publish();
    assert_eq!(queue.pop(&mut chains[3]), Ok(true));
    for (chain, id) in [(&chains[1], ids[1]), (&chains[3], next), (&chains[0], ids[0])] {
        queue.push(chain.head(), u32::from(id));
        queue.publish();
        assert_eq!(driver.take_used(), Some(Used { head: id, written_bytes: u32::from(id) }));
    }
}

#[test]
fn any_16_bits_are_an_id_even_twice_at_once() {
    let (mut driver, mut queue, _, memory) = setup_packed(8, 0);
    driver.use_ids(vec![8, 0x8000, u16::MAX]);
    for id in [u16::MAX, 0x8000, 8] {
        assert_eq!(use_one(&mut driver, &mut queue, 1), id);
        queue.publish();
        assert_eq!(driver.take_used().unwrap().head, id);
        driver.use_ids(vec![8, 0x8000].into_iter().filter(|next| *next < id).collect());
    }
    // A driver that gives two chains the same ID gets both of them back.
    let mut chains = [Chain::new(), Chain::new()];
    for (slot, chain) in (3..).zip(&mut chains) {
        let (address, flags) = (BUFFERS, RawPacked::AVAIL);
        driver.write_descriptor(slot, RawPacked { address, len_bytes: 4, id: 77, flags });
        assert_eq!(queue.pop(chain), Ok(true));
    }
    assert_ne!(chains[0].head(), chains[1].head());
    chains.iter().for_each(|chain| queue.push(chain.head(), 4));
    queue.publish();
    assert_eq!([rest(&memory, 3).1, rest(&memory, 4).1], [77, 77]);
}

#[test]
fn a_batch_is_hidden_until_its_first_descriptor_is_used_and_that_is_written_last() {
    let (mut driver, mut queue, _, memory) = setup_packed(8, 0);
    let ids = [1, 2, 1].map(|descriptors| use_one(&mut driver, &mut queue, descriptors));
    let used = RawPacked::AVAIL | RawPacked::USED;
    let is_used = |slot| rest(&memory, slot).2 & used == used;
    assert_eq!([0, 1, 2, 3].map(is_used), [false, true, false, true]);
    assert!(!driver.has_used());
    assert!(queue.publish());
    assert!(is_used(0));
    assert_eq!(ids.map(|_| driver.take_used().unwrap().head), ids);
}

#[test]
fn indirect_tables_have_only_the_write_flag_and_no_ids() {
    for skew_bytes in [0, 1, 8, 15] {
        let (driver, mut queue, mut arena, memory) = setup_packed(8, INDIRECT);
        let data = arena.alloc(64);
        let table = arena.alloc_at(48, 16, skew_bytes);
        // Flags that would chain, nest or hide a descriptor say nothing in here.
        let nonsense = RawDescriptor::NEXT | RawDescriptor::INDIRECT | RawPacked::USED;
        for (i, flags) in [(0, 0), (1, nonsense), (2, WRITE | nonsense)] {
            let address = data + 8 * i;
            let entry = RawPacked { address, len_bytes: 3, id: 9, flags };
            testkit::write(&memory, table + 16 * i, &entry.to_bytes());
        }
        let flags = RawDescriptor::INDIRECT | WRITE | RawPacked::AVAIL;
        let refers = RawPacked { address: table, len_bytes: 48, id: 5, flags };
        driver.write_descriptor(0, refers);
        let mut chain = Chain::new();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        let expected = [host(&memory, data, 3), host(&memory, data + 8, 3)];
        assert_eq!(seen(chain.readable()), expected);
        assert_eq!(seen(chain.writable()), [host(&memory, data + 16, 3)]);
        queue.push(chain.head(), 3);
        queue.publish();
        assert_eq!(rest(&memory, 0), (3, 5, WRITE | RawPacked::AVAIL | RawPacked::USED));
        // A table takes one descriptor of the ring, whatever its length.
        driver.write_descriptor(1, refers);
        assert_eq!(queue.pop(&mut chain), Ok(true));
    }
}

#[test]
fn exactly_as_many_descriptors_as_the_queue_has_are_accepted() {
    let (mut driver, mut queue, mut arena, _) = setup_packed(16, INDIRECT);
    let at = arena.alloc(64);
    let bufs: Vec<Buf> = (0..16).map(|i| Buf::readable(at + i, 1)).collect();
    let mut chain = Chain::new();
    for indirect in [false, true, false] {
        if indirect {
            driver.add_indirect(&bufs);
        } else {
            driver.add(&bufs);
        }
        driver.publish();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        assert_eq!(chain.readable().len(), 16);
        queue.push(chain.head(), 0);
        queue.publish();
        driver.take_used().unwrap();
    }
}

#[test]
fn the_flags_decide_about_interrupts() {
    for (features, flags, interrupt) in [
        (0, PackedDriver::EVENT_ENABLE, true),
        (0, PackedDriver::EVENT_DISABLE, false),
        (EVENT_IDX, PackedDriver::EVENT_ENABLE, true),
        (EVENT_IDX, PackedDriver::EVENT_DISABLE, false),
    ] {
        let (mut driver, mut queue, _, _) = setup_packed(8, features);
        driver.set_driver_event(0x7fff, flags);
        use_one(&mut driver, &mut queue, 2);
        assert_eq!(queue.publish(), interrupt, "{features:#x} {flags}");
        assert!(!queue.publish(), "nothing was pushed since");
    }
}

#[test]
fn a_batch_is_one_decision_by_whether_it_passed_the_drivers_descriptor() {
    // Two rounds and a half of a ring of five, by two chains of three descriptors in all.
    for start in 0..12u16 {
        for ahead in 0..10u16 {
            let (mut driver, mut queue, _, _) = setup_packed(5, EVENT_IDX);
            for _ in 0..start {
                use_one(&mut driver, &mut queue, 1);
                queue.publish();
                driver.take_used().unwrap();
            }
            let event = (start + ahead) % 10;
            let event = RingPosition { slot: event % 5, wrap: event < 5 };
            driver.set_driver_event(event.to_event(), PackedDriver::EVENT_DESC);
            use_one(&mut driver, &mut queue, 2);
            use_one(&mut driver, &mut queue, 1);
            assert_eq!(queue.publish(), ahead < 3, "from {start}, {ahead} ahead");
        }
    }
}

#[test]
fn events_without_sense_are_taken_for_a_wish_to_be_told() {
    for (features, event, flags) in [
        // Descriptor events that were not negotiated, flags that do not exist, a descriptor that
        // does not exist, and reserved bits.
        (0, 7, PackedDriver::EVENT_DESC),
        (EVENT_IDX, 7, 3),
        (0, 0x8000, 3),
        (EVENT_IDX, 8, PackedDriver::EVENT_DESC),
        (EVENT_IDX, 0xffff, PackedDriver::EVENT_DESC),
        (EVENT_IDX, 0, 0xfffc),
    ] {
        let (mut driver, mut queue, _, _) = setup_packed(8, features);
        driver.set_driver_event(event, flags);
        use_one(&mut driver, &mut queue, 1);
        assert!(queue.publish(), "{event:#x} {flags:#x}");
    }
    let (mut driver, mut queue, _, _) = setup_packed(8, 0);
    driver.set_driver_event(0, 0xfffd);
    use_one(&mut driver, &mut queue, 1);
    assert!(!queue.publish(), "reserved bits are ignored");
}

#[test]
fn kicks_are_switched_by_the_flags_or_asked_for_by_descriptor() {
    for (features, flags) in
        [(0, PackedDriver::EVENT_ENABLE), (EVENT_IDX, PackedDriver::EVENT_DESC)]
    {
        let (mut driver, mut queue, _, _) = setup_packed(3, features);
        let mut chain = Chain::new();
        for _ in 0..10 {
            queue.disable_kicks();
            queue.disable_kicks();
            assert_eq!(driver.device_event().1, PackedDriver::EVENT_DISABLE);
            driver.add(&[Buf::readable(BUFFERS, 1)]);
            assert!(!driver.publish(), "no kick comes for this one");
            assert!(queue.enable_kicks(), "but it is seen");
            assert_eq!(queue.pop(&mut chain), Ok(true));
            queue.push(chain.head(), 0);
            queue.publish();
            driver.take_used().unwrap();
            assert!(!queue.enable_kicks());
            let next = driver.next_available().to_event();
            let asked = if features == 0 { 0 } else { next };
            assert_eq!(driver.device_event(), (asked, flags));
            driver.add(&[Buf::readable(BUFFERS, 1)]);
            assert!(driver.publish());
            assert_eq!(queue.pop(&mut chain), Ok(true));
            queue.push(chain.head(), 0);
            queue.publish();
            driver.take_used().unwrap();
        }
    }
}
