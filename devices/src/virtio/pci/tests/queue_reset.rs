//! `VIRTIO_F_RING_RESET`: one queue is reset while the others go on (virtio 1.2, 2.6.1).

use super::*;

fn active(device: &Dummy) -> Vec<u16> {
    device.state().active.as_ref().unwrap().queues.iter().map(|queue| queue.index).collect()
}

#[test]
fn one_queue_is_reset_and_comes_back_with_other_rings_while_the_other_goes_on() {
    let (mut machine, _drivers) = Machine::started();
    machine.pci.kick(0);
    assert!(machine.pci.reset_queue(0), "nothing was in flight");
    assert_eq!(active(&machine.device), [1]);
    assert_eq!(machine.pci.common_u16(common::QUEUE_ENABLE), 0);
    assert_eq!(machine.device.state().resets, 1, "that of the negotiation");

    let driver = Driver::new(&machine.memory, 0x2_0000, 8, OFFERED);
    machine.pci.enable_queue(0, &driver.config());
    assert_eq!(active(&machine.device), [1, 0]);
    machine.pci.kick(0);
    let state = machine.device.state();
    let queues = &state.active.as_ref().unwrap().queues;
    assert_eq!(queues[1].queue.size(), 8);
    assert_eq!(queues[1].kick.read().unwrap(), 1, "the kick from before the reset is gone");
    queues[1].signal.signal();
    assert_eq!(machine.sink.count(1), 1);
    drop(state);
    assert_eq!(machine.pci.status() & NEEDS_RESET, 0);
}

#[test]
fn queue_reset_reads_1_until_the_device_is_done_and_the_queue_cannot_be_enabled_before() {
    let (mut machine, drivers) = Machine::started();
    machine.device.state().slow_queue_reset = true;
    assert!(!machine.pci.reset_queue(1));
    assert!(!machine.pci.reset_queue(1), "asking again changes nothing");
    machine.pci.enable_queue(1, &drivers[1].config());
    assert_eq!(machine.pci.common_u16(common::QUEUE_ENABLE), 0);
    assert_eq!(active(&machine.device), [0]);
    machine.pci.write_common(common::QUEUE_SELECT, &0u16.to_le_bytes());
    assert_eq!(machine.pci.common_u16(common::QUEUE_RESET), 0);
    assert_eq!(machine.pci.common_u16(common::QUEUE_ENABLE), 1);

    machine.device.state().resetting.clear();
    machine.pci.write_common(common::QUEUE_SELECT, &1u16.to_le_bytes());
    assert_eq!(machine.pci.common_u16(common::QUEUE_RESET), 0);
    machine.pci.enable_queue(1, &drivers[1].config());
    assert_eq!(active(&machine.device), [0, 1]);
}

#[test]
fn a_reset_of_the_device_ends_that_of_a_queue() {
    let (mut machine, _drivers) = Machine::started();
    machine.device.state().slow_queue_reset = true;
    assert!(!machine.pci.reset_queue(0));
    machine.pci.reset();
    machine.pci.write_common(common::QUEUE_SELECT, &0u16.to_le_bytes());
    assert_eq!(machine.pci.common_u16(common::QUEUE_RESET), 0);
    machine.pci.start(&machine.memory.clone(), RINGS, &[16, 8], OFFERED);
    assert_eq!(active(&machine.device), [0, 1]);
}

#[test]
fn all_queues_may_be_reset_and_a_queue_may_be_enabled_for_the_first_time() {
    let Machine { mut pci, device, memory, .. } = machine();
    let features = pci.negotiate(OFFERED);
    let first = Driver::new(&memory, RINGS, 8, features);
    let second = Driver::new(&memory, first.end(), 8, features);
    pci.enable_queue(0, &first.config());
    pci.driver_ok();
    pci.enable_queue(1, &second.config());
    assert_eq!(active(&device), [0, 1]);
    assert!(pci.reset_queue(0) && pci.reset_queue(1));
    assert!(active(&device).is_empty());
    pci.enable_queue(1, &second.config());
    assert_eq!(active(&device), [1]);
}

#[test]
fn a_queue_that_cannot_be_enabled_again_makes_the_device_need_a_reset() {
    let (mut machine, drivers) = Machine::started();
    assert!(machine.pci.reset_queue(0));
    let outside = crate::virtio::queue::QueueConfig { desc: 1 << 40, ..drivers[0].config() };
    machine.pci.enable_queue(0, &outside);
    assert_ne!(machine.pci.status() & NEEDS_RESET, 0);
    assert_eq!(machine.sink.count(0), 1);
    // Not even good rings help now.
    machine.pci.enable_queue(0, &drivers[0].config());
    assert_eq!(active(&machine.device), [1]);

    let (mut machine, drivers) = Machine::started();
    assert!(machine.pci.reset_queue(0));
    machine.device.state().refuse = true;
    machine.pci.enable_queue(0, &drivers[0].config());
    assert_ne!(machine.pci.status() & NEEDS_RESET, 0, "the device refused");
}
