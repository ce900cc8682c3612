//! The rules of the transport, one by one.

use super::*;
use crate::testkit::{Buf, SinkEvent};
use crate::virtio::queue::{Chain, QueueConfig};
use crate::virtio::signal::NO_VECTOR;

#[test]
fn a_block_device_is_a_modern_mass_storage_function() {
    let machine = machine();
    assert_eq!(machine.pci.config_u32(0x00), 0x1042_1af4);
    assert_eq!(machine.pci.config_u32(0x08), 0x0180_0001);
    assert_eq!(machine.pci.config_u16(0x2c), 0x1af4);
    assert_eq!(machine.pci.config_u16(0x2e), 0x1042, "no legacy driver matches");
}

#[test]
fn every_structure_has_a_capability_and_pages_of_its_own() {
    let Machine { mut pci, .. } = machine();
    pci.map(BAR_ADDRESS);
    let bar = pci.device.mapped_bars()[0];
    assert_eq!((bar.bar, bar.address), (0, BAR_ADDRESS));
    let places = [pci.common, pci.isr, pci.device_config, pci.notify, pci.msix_table, pci.msix_pba];
    assert_eq!(pci.common.len_bytes, 0x3c, "up to queue_reset");
    assert_eq!(pci.isr.len_bytes, 1);
    assert_eq!(pci.notify.len_bytes, 8, "a double word a queue");
    assert_eq!(pci.msix_table.len_bytes, 48, "a vector a queue and one for configuration");
    for (i, place) in places.iter().enumerate() {
        assert_eq!(place.bar, 0);
        assert_eq!(place.offset % 4096, 0);
        assert!(place.len_bytes > 0 && place.offset + place.len_bytes <= bar.size_bytes);
        for other in &places[..i] {
            assert_ne!(place.offset / 4096, other.offset / 4096, "{place:?} {other:?}");
        }
    }
    assert_eq!(pci.config_u8(pci.notify.capability + 2), 20);
    assert_eq!(pci.config_u32(pci.notify.capability + 16), 4);
    assert_eq!(pci.config_u8(pci.pci_access.capability + 2), 20);
    assert_eq!(pci.config_u8(pci.common.capability + 2), 16);
}

#[test]
fn driver_ok_gives_the_device_its_queues() {
    let (machine, drivers) = Machine::started();
    let state = machine.device.state();
    let active = state.active.as_ref().unwrap();
    assert_eq!(active.features, OFFERED);
    let queues: Vec<_> = active.queues.iter().map(|q| (q.index, q.queue.size())).collect();
    assert_eq!(queues, [(0, 16), (1, 8)]);
    assert_eq!(drivers.len(), 2);
}

#[test]
fn a_device_has_no_queue_before_driver_ok() {
    let Machine { mut pci, device, memory, sink, .. } = machine();
    let features = pci.negotiate(OFFERED);
    pci.enable_msix();
    pci.enable_queue(0, &Driver::new(&memory, RINGS, 8, features).config());
    pci.kick(0);
    assert_eq!(device.state().activations, 0);
    assert_eq!(sink.count(1), 0);
    pci.driver_ok();
    assert_eq!(device.state().activations, 1);
}

#[test]
fn only_enabled_queues_are_given_to_the_device() {
    let Machine { mut pci, device, memory, .. } = machine();
    let features = pci.negotiate(OFFERED);
    pci.enable_queue(1, &Driver::new(&memory, RINGS, 8, features).config());
    assert_eq!(pci.driver_ok() & NEEDS_RESET, 0);
    let state = device.state();
    let queues: Vec<_> = state.active.as_ref().unwrap().queues.iter().map(|q| q.index).collect();
    assert_eq!(queues, [1]);
}

#[test]
fn driver_ok_without_queues_starts_nothing_and_harms_nothing() {
    let Machine { mut pci, device, memory, .. } = machine();
    pci.negotiate(OFFERED);
    assert_eq!(pci.driver_ok(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(device.state().activations, 0);
    pci.kick(0);
    // And the device works after a reset.
    pci.start(&memory, RINGS, &[8], OFFERED);
    assert_eq!(device.state().activations, 1);
}

#[test]
fn a_queue_outside_ram_makes_the_device_need_a_reset() {
    let Machine { mut pci, device, memory, sink, .. } = machine();
    let features = pci.negotiate(OFFERED);
    pci.enable_msix();
    pci.enable_queue(0, &Driver::new(&memory, RINGS, 8, features).config());
    let outside = QueueConfig { size: 8, desc: RAM_BYTES as u64, driver: 0, device: 0 };
    pci.enable_queue(1, &outside);
    assert_eq!(pci.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | NEEDS_RESET);
    assert_eq!(sink.count(0), 0, "the driver is not ready for interrupts");
    assert_ne!(pci.driver_ok() & NEEDS_RESET, 0);
    assert_eq!(sink.count(0), 1, "but now it is told");
    assert_eq!(device.state().activations, 0);
    pci.start(&memory, RINGS, &[8], OFFERED);
    assert_eq!(device.state().activations, 1);
}

#[test]
fn a_device_that_cannot_start_needs_a_reset_and_says_so() {
    let Machine { mut pci, device, memory, sink, .. } = machine();
    device.state().refuse = true;
    let features = pci.negotiate(OFFERED);
    pci.enable_msix();
    pci.enable_queue(0, &Driver::new(&memory, RINGS, 8, features).config());
    let status = pci.driver_ok();
    assert_eq!(status, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | NEEDS_RESET);
    assert_eq!(sink.count(0), 1);
}

#[test]
fn a_broken_queue_sets_needs_reset_and_sends_one_configuration_interrupt() {
    let (mut machine, drivers) = Machine::started();
    drivers[0].set_available_index(1000);
    let mut state = machine.device.state();
    let active = state.active.as_mut().unwrap();
    assert!(active.queues[0].queue.pop(&mut Chain::new()).is_err());
    active.device.needs_reset();
    active.device.needs_reset();
    drop(state);
    assert_ne!(machine.pci.status() & NEEDS_RESET, 0);
    assert_eq!(machine.sink.count(0), 1);
}

#[test]
fn each_queue_signals_its_own_vector() {
    let (machine, _drivers) = Machine::started();
    let state = machine.device.state();
    let active = state.active.as_ref().unwrap();
    active.queues[1].signal.signal();
    active.queues[1].signal.signal();
    active.queues[0].signal.signal();
    active.device.config_changed();
    assert_eq!([0, 1, 2].map(|vector| machine.sink.count(vector)), [1, 1, 2]);
}

#[test]
fn a_vector_may_change_while_the_device_runs() {
    let (mut machine, _drivers) = Machine::started();
    let signal = machine.device.state().active.as_ref().unwrap().queues[0].signal.clone();
    machine.pci.write_common(common::QUEUE_SELECT, &0u16.to_le_bytes());
    for (vector, counts) in [(2, [0, 0, 1]), (NO_VECTOR, [0, 0, 1]), (0, [1, 0, 1])] {
        machine.pci.write_common(common::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
        signal.signal();
        assert_eq!([0, 1, 2].map(|vector| machine.sink.count(vector)), counts);
    }
    assert_eq!(machine.pci.take_isr(), 0, "used buffers show there with INTx only");
}

#[test]
fn a_configuration_change_shows_in_the_isr_status_with_msix_too() {
    let (mut machine, _drivers) = Machine::started();
    let signal = machine.device.state().active.as_ref().unwrap().device.clone();
    for (vector, count) in [(0, 1), (NO_VECTOR, 1)] {
        machine.pci.write_common(common::CONFIG_MSIX_VECTOR, &vector.to_le_bytes());
        signal.config_changed();
        assert_eq!(machine.sink.count(0), count);
        assert_eq!(machine.pci.config_u16(0x06) & 8, 0, "no INTx is pending");
        assert_eq!(machine.pci.take_isr(), 2);
    }
}

#[test]
fn a_masked_vector_pends_and_is_delivered_once_on_unmask() {
    let (mut machine, _drivers) = Machine::started();
    let signal = machine.device.state().active.as_ref().unwrap().queues[0].signal.clone();
    machine.pci.mask_vector(1, true);
    signal.signal();
    signal.signal();
    assert!(machine.pci.is_pending(1));
    assert_eq!(machine.sink.count(1), 0);
    machine.pci.mask_vector(1, false);
    assert!(!machine.pci.is_pending(1));
    assert_eq!(machine.sink.count(1), 1);
}

#[test]
fn with_msix_off_the_isr_status_tells_and_a_read_clears_it() {
    let Machine { mut pci, device, memory, sink, .. } = machine();
    let features = pci.negotiate(OFFERED);
    pci.enable_queue(0, &Driver::new(&memory, RINGS, 8, features).config());
    pci.driver_ok();
    let state = device.state();
    let active = state.active.as_ref().unwrap();
    assert_eq!(pci.config_u16(0x06) & 8, 0);
    active.queues[0].signal.signal();
    assert_eq!(pci.config_u16(0x06) & 8, 8, "the interrupt status of the PCI header");
    assert_eq!(pci.config_u32(0x04) >> 16 & 8, 8, "whatever the width");
    assert_eq!(pci.take_isr(), 1);
    assert_eq!(pci.take_isr(), 0);
    assert_eq!(pci.config_u16(0x06) & 8, 0);
    active.device.config_changed();
    active.queues[0].signal.signal();
    assert_eq!(pci.take_isr(), 3);
    active.queues[0].signal.signal();
    drop(state);
    pci.reset();
    assert_eq!(pci.take_isr(), 0, "a reset clears it, too");
    assert_eq!(sink.events(), []);
}

#[test]
fn a_reset_leaves_nothing_behind() {
    let (mut machine, mut drivers) = Machine::started();
    machine.device.state().noisy_reset = true;
    machine.pci.mask_vector(2, true);
    machine.pci.kick(0);
    let clone = {
        let state = machine.device.state();
        state.active.as_ref().unwrap().queues[0].kick.try_clone().unwrap()
    };
    drivers[0].add(&[Buf::readable(0, 1)]);
    drivers[0].publish();

    machine.pci.reset();
    assert_eq!(machine.device.state().resets, 2, "one in the negotiation, one now");
    assert!(machine.device.state().active.is_none());
    assert_eq!(machine.pci.status(), 0, "what the device said last is gone");
    assert!(!machine.pci.is_pending(2));
    assert_eq!(machine.pci.take_isr(), 0);
    assert_eq!(machine.pci.common_u16(common::CONFIG_MSIX_VECTOR), NO_VECTOR);
    for queue in [0u16, 1] {
        machine.pci.write_common(common::QUEUE_SELECT, &queue.to_le_bytes());
        assert_eq!(machine.pci.common_u16(common::QUEUE_SIZE), MAX_SIZES[usize::from(queue)]);
        assert_eq!(machine.pci.common_u16(common::QUEUE_MSIX_VECTOR), NO_VECTOR);
        assert_eq!(machine.pci.common_u16(common::QUEUE_ENABLE), 0);
        assert_eq!(machine.pci.read::<24>(machine.pci.common, common::QUEUE_DESC), [0; 24]);
    }
    // The old kick is gone: only the new one is counted.
    machine.pci.kick(0);
    assert_eq!(clone.read().unwrap(), 1);
    // Nothing of the old ring is seen.
    let (_, drivers) = machine.pci.start(&machine.memory.clone(), RINGS, &[16, 8], OFFERED);
    let mut state = machine.device.state();
    let active = state.active.as_mut().unwrap();
    assert_eq!(active.queues[0].queue.pop(&mut Chain::new()), Ok(false));
    assert_eq!(drivers[0].used_index(), 0);
}

#[test]
fn a_reset_keeps_what_belongs_to_the_pci_function() {
    let (mut machine, _drivers) = Machine::started();
    let entry = machine.pci.read::<16>(machine.pci.msix_table, 16);
    machine.pci.reset();
    assert_eq!(machine.pci.read::<16>(machine.pci.msix_table, 16), entry);
    assert_eq!(machine.pci.config_u16(machine.pci.msix_table.capability + 2), 0x8002);
    assert_eq!(machine.pci.device.mapped_bars()[0].address, BAR_ADDRESS);
    assert_eq!(machine.notifier.addresses().len(), 2);
}

#[test]
fn a_reset_waits_for_no_kick_and_works_before_anything_else() {
    let Machine { mut pci, device, .. } = machine();
    pci.reset();
    pci.reset();
    assert_eq!(device.state().resets, 2);
}

#[test]
fn notification_addresses_are_bound_while_the_bar_is_mapped_and_follow_it() {
    let Machine { mut pci, notifier, .. } = machine();
    assert!(notifier.addresses().is_empty());
    let offset = pci.notify.offset;
    for address in [BAR_ADDRESS, 0xc000_0000, 0x1_0000_0000] {
        pci.map(address);
        assert_eq!(notifier.addresses(), [address + offset, address + offset + 4]);
        assert_eq!(pci.notify_address(1), address + offset + 4);
    }
    // A move with memory decoding on, by halves.
    pci.write_config(0x14, &2u32.to_le_bytes());
    let moved = 0x2_0000_0000 + offset;
    assert_eq!(notifier.addresses(), [moved, moved + 4]);
    pci.unmap();
    assert!(notifier.addresses().is_empty());
    pci.map(BAR_ADDRESS);
    drop(pci);
    assert!(notifier.addresses().is_empty());
}

#[test]
fn a_kick_signals_the_eventfd_of_its_queue_whichever_way_it_comes() {
    let (mut machine, _drivers) = Machine::started();
    let kicks: Vec<EventFd> = {
        let state = machine.device.state();
        let queues = &state.active.as_ref().unwrap().queues;
        queues.iter().map(|queue| queue.kick.try_clone().unwrap()).collect()
    };
    // Through the ioeventfd, the BAR, and configuration space.
    for queue in [0u16, 1] {
        let address = machine.pci.notify_address(queue);
        assert!(machine.notifier.write(address));
        let notify = machine.pci.notify;
        machine.pci.write(notify, 4 * u64::from(queue), &queue.to_le_bytes());
        access(&mut machine.pci, notify.offset as u32 + 4 * u32::from(queue), 2);
        let data = machine.pci.pci_access.capability + 16;
        machine.pci.write_config(data, &queue.to_le_bytes());
        assert_eq!(kicks[usize::from(queue)].read().unwrap(), 3);
    }
    // Addresses of no queue, and reads, do nothing.
    let notify = machine.pci.notify;
    machine.pci.write(notify, 8, &[0, 0]);
    assert_eq!(machine.pci.read::<4>(notify, 0), [0; 4]);
    for kick in kicks {
        kick.write(1).unwrap();
        assert_eq!(kick.read().unwrap(), 1);
    }
}

/// Points the PCI-access capability at the BAR.
fn access(pci: &mut PciDriver<VirtioPci>, offset: u32, len_bytes: u32) {
    let capability = pci.pci_access.capability;
    pci.write_config(capability + 4, &[0]);
    pci.write_config(capability + 8, &offset.to_le_bytes());
    pci.write_config(capability + 12, &len_bytes.to_le_bytes());
}

#[test]
fn the_bar_is_accessible_through_configuration_space_without_being_mapped() {
    let Machine { mut pci, .. } = machine();
    let data = pci.pci_access.capability + 16;
    let status = (pci.common.offset + common::DEVICE_STATUS) as u32;
    access(&mut pci, status, 1);
    pci.write_config(data, &[ACKNOWLEDGE]);
    assert_eq!(pci.config_u8(data), ACKNOWLEDGE);
    pci.write_config(data, &[ACKNOWLEDGE | DRIVER, 0xff, 0xff, 0xff]);
    assert_eq!(pci.config_u32(data), u32::from(ACKNOWLEDGE | DRIVER), "one byte was selected");
    let select = (pci.common.offset + common::DEVICE_FEATURE_SELECT) as u32;
    access(&mut pci, select, 4);
    pci.write_config(data, &1u32.to_le_bytes());
    access(&mut pci, select + 4, 4);
    assert_eq!(pci.config_u32(data), (OFFERED >> 32) as u32);
    assert_eq!(pci.config_u16(data), (OFFERED >> 32) as u16);
    let queues = (pci.common.offset + common::NUM_QUEUES) as u32;
    access(&mut pci, queues, 2);
    assert_eq!(pci.config_u16(data), 2);
}

#[test]
fn a_short_write_of_the_access_register_leaves_its_other_bytes() {
    let Machine { mut pci, .. } = machine();
    let data = pci.pci_access.capability + 16;
    let address = (pci.common.offset + common::QUEUE_DESC) as u32;
    access(&mut pci, address, 4);
    pci.write_config(data, &0x1122_3340u32.to_le_bytes());
    assert_eq!(pci.config_u32(data), 0x1122_3340);
    pci.write_config(data, &[0x50]);
    assert_eq!(pci.config_u32(data), 0x1122_3350);
    pci.write_config(data + 2, &[0x66, 0x77]);
    assert_eq!(pci.config_u32(data), 0x7766_3350);
    // Beside it nothing is written; from before it into it, the length is still 4.
    access(&mut pci, address + 4, 4);
    pci.write_config(data - 4, &4u32.to_le_bytes());
    assert_eq!(pci.config_u32(data), 0);
    pci.write_config(data - 1, &[0, 0x60]);
    assert_eq!(pci.config_u32(data), 0x7766_3360);
}

#[test]
fn an_access_through_configuration_space_that_is_not_legal_does_nothing() {
    let Machine { mut pci, .. } = machine();
    let data = pci.pci_access.capability + 16;
    let status = (pci.common.offset + common::DEVICE_STATUS) as u32;
    // Lengths that do not exist, misaligned offsets, and what is outside the BAR.
    for (offset, len_bytes) in [
        (status, 0),
        (status, 3),
        (status, 8),
        (status, u32::MAX),
        (status - 1, 2),
        (0x16, 4),
        (u32::MAX, 1),
        (u32::MAX - 3, 4),
        (0x10_0000, 4),
    ] {
        access(&mut pci, offset, len_bytes);
        pci.write_config(data, &[1, 0, 0, 0]);
        assert_eq!(pci.config_u32(data), 1, "{len_bytes} bytes at {offset:#x}: a register only");
        assert_eq!(pci.status(), 0);
    }
    access(&mut pci, status, 1);
    let capability = pci.pci_access.capability;
    for bar in [1, 5, 6, 255] {
        pci.write_config(capability + 4, &[bar]);
        pci.write_config(data, &[1]);
        assert_eq!(pci.status(), 0, "there is no BAR {bar}");
    }
}

#[test]
fn a_read_beside_the_access_register_has_no_side_effect() {
    let Machine { mut pci, device, memory, .. } = machine();
    let features = pci.negotiate(OFFERED);
    pci.enable_queue(0, &Driver::new(&memory, RINGS, 8, features).config());
    pci.driver_ok();
    device.state().active.as_ref().unwrap().queues[0].signal.signal();
    let isr = pci.isr.offset as u32;
    access(&mut pci, isr, 1);
    let data = pci.pci_access.capability + 16;
    pci.config_u32(data - 4);
    pci.config_u32(data + 4);
    assert_eq!(pci.config_u8(data), 1, "still set");
    assert_eq!(pci.config_u8(data), 0, "cleared by the read");
}

#[test]
fn device_configuration_passes_through_with_the_negotiated_features() {
    let Machine { mut pci, device, .. } = machine();
    device.state().config = [1, 2, 3, 4, 5, 6, 7, 8];
    device.state().generation = 9;
    assert_eq!(pci.read::<4>(pci.device_config, 2), [3, 4, 5, 6]);
    assert_eq!(pci.read::<4>(pci.device_config, 6), [7, 8, 0, 0]);
    assert_eq!(pci.common_u8(common::CONFIG_GENERATION), 9);
    pci.write(pci.device_config, 3, &[1]);
    pci.negotiate(VERSION_1);
    pci.write(pci.device_config, 4, &[2, 3]);
    let writes = [(0, 3, vec![1]), (VERSION_1, 4, vec![2, 3])];
    assert_eq!(device.state().config_writes, writes);
}

#[test]
fn dropping_the_function_resets_the_device_and_masks_everything() {
    let (machine, _drivers) = Machine::started();
    let Machine { pci, device, sink, notifier, .. } = machine;
    let signal = device.state().active.as_ref().unwrap().queues[0].signal.clone();
    drop(pci);
    assert!(device.state().active.is_none());
    assert!(notifier.addresses().is_empty());
    signal.signal();
    assert_eq!(sink.count(1), 0);
    assert_eq!((0..3).find(|&vector| sink.message(vector).is_some()), None);
    assert!(matches!(sink.events().last(), Some(SinkEvent::Mask(_))));
}

/// A binder that refuses everything, as a kernel out of slots does.
struct Refusal;

impl NotifyBinder for Refusal {
    fn bind(&self, _address: u64, _kick: &EventFd) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }

    fn unbind(&self, address: u64, _kick: &EventFd) -> io::Result<()> {
        panic!("{address:#x} was never bound");
    }
}

#[test]
fn kicks_work_where_no_eventfd_can_be_bound() {
    let memory = testkit::memory(RAM_BYTES);
    let device = Dummy::default();
    let (sink, binder) = (RecordingSink::new(), Arc::new(Refusal));
    let transport = VirtioPci::new(Box::new(device.clone()), memory.clone(), sink, binder);
    let mut pci = PciDriver::new(transport.unwrap(), None);
    pci.map(BAR_ADDRESS);
    pci.start(&memory, RINGS, &[8], OFFERED);
    pci.kick(0);
    let kick = device.state().active.as_ref().unwrap().queues[0].kick.try_clone().unwrap();
    assert_eq!(kick.read().unwrap(), 1);
    pci.unmap();
}
