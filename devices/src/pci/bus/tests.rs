//! The root bus with devices that have two BARs each.

use proptest::prelude::*;

use super::super::bar::Bar;
use super::super::config::{COMMAND_BUS_MASTER, COMMAND_MEMORY};
use super::*;
use crate::bus::MmioBus;

const WINDOW: RangeInclusive<u64> = 0x40_0000_0000..=0x40_0fff_ffff;
const BAR0_BYTES: u64 = 0x1000;
const BAR4_BYTES: u64 = 0x4000;

/// BARs read as the device's own name; writes are remembered.
struct Device {
    config: ConfigSpace,
    name: u8,
    written: Vec<(u8, u64, Vec<u8>)>,
}

impl PciDevice for Device {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
    }
    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
    }
    fn mapped_bars(&self) -> Vec<BarMapping> {
        self.config.mapped_bars()
    }
    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(self.name);
    }
    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        self.written.push((bar, offset, data.to_vec()));
    }
}

fn device(name: u8) -> Arc<Mutex<Device>> {
    let mut config = ConfigSpace::new(&Identity {
        vendor_id: 0x1af4,
        device_id: 0x1042,
        revision: 1,
        class: 0x01_80_00,
        subsystem_vendor_id: 0x1af4,
        subsystem_id: name.into(),
    });
    config.add_bar(Bar::new(0, BAR0_BYTES, false).unwrap()).unwrap();
    config.add_bar(Bar::new(4, BAR4_BYTES, true).unwrap()).unwrap();
    Arc::new(Mutex::new(Device { config, name, written: Vec::new() }))
}

/// A bus with devices named 1 and 2 at those numbers.
fn bus() -> (PciRoot, [Arc<Mutex<Device>>; 2]) {
    let mut root = PciRoot::new(WINDOW);
    let devices = [device(1), device(2)];
    for (number, device) in (1..).zip(&devices) {
        assert_eq!(root.add(device.clone()), Ok(number));
    }
    (root, devices)
}

fn ecam(device: u64, register: u64) -> u64 {
    device << 15 | register
}

fn read_ecam(root: &PciRoot, offset: u64) -> u32 {
    let mut data = [0; 4];
    root.read_ecam(offset, &mut data);
    u32::from_le_bytes(data)
}

fn set_bar(root: &PciRoot, device: u64, bar: u64, address: u64) {
    for (half, value) in [(0, address as u32), (4, (address >> 32) as u32)] {
        root.write_ecam(ecam(device, 0x10 + bar * 4 + half), &value.to_le_bytes());
    }
}

fn bar(root: &PciRoot, device: u64, bar: u64) -> u64 {
    let register = ecam(device, 0x10 + bar * 4);
    u64::from(read_ecam(root, register + 4)) << 32 | u64::from(read_ecam(root, register) & !0xf)
}

fn decode(root: &PciRoot, device: u64, on: bool) {
    let command = if on { COMMAND_MEMORY | COMMAND_BUS_MASTER } else { 0 };
    root.write_ecam(ecam(device, 4), &command.to_le_bytes());
}

/// The name of the device that answers at `address`.
fn answers(root: &PciRoot, address: u64) -> Option<u8> {
    let mut data = [0; 1];
    root.read_memory(address, &mut data).then_some(data[0])
}

#[test]
fn the_host_bridge_is_device_0_and_absent_functions_read_all_ones() {
    let (root, _) = bus();
    assert_eq!(read_ecam(&root, 0), 0x0008_1b36);
    assert_eq!(read_ecam(&root, 8), 0x0600_0000);
    assert_eq!(read_ecam(&root, ecam(1, 0)), 0x1042_1af4);
    for absent in [ecam(3, 0), ecam(31, 0), ecam(1, 1 << 12), 1 << 20, !0xfff] {
        assert_eq!(read_ecam(&root, absent), u32::MAX, "{absent:#x}");
        root.write_ecam(absent, &[0; 4]);
    }
}

#[test]
fn a_configuration_access_has_one_two_or_four_bytes_within_a_double_word() {
    let (root, _) = bus();
    for (register, bytes) in [(1, 2), (0, 1), (2, 2), (3, 1)] {
        let mut data = vec![0; bytes];
        root.read_ecam(ecam(1, register), &mut data);
        let whole = 0x1042_1af4_u32.to_le_bytes();
        assert_eq!(data, whole[register as usize..][..bytes]);
    }
    for (register, bytes) in [(3, 2), (1, 4), (0, 8), (0, 3)] {
        let mut data = vec![0; bytes];
        root.read_ecam(ecam(1, register), &mut data);
        assert_eq!(data, vec![0xff; bytes]);
        root.write_ecam(ecam(1, 4 + register), &vec![0xff; bytes]);
    }
    assert_eq!(read_ecam(&root, ecam(1, 4)), 0);
}

#[test]
fn config_address_takes_double_words_only() {
    let (root, _) = bus();
    root.write_port(0, &0xff00_08ff_u32.to_le_bytes());
    let mut address = [0; 4];
    root.read_port(0, &mut address);
    assert_eq!(u32::from_le_bytes(address), 0x8000_08fc);
    root.write_port(0, &[0; 2]);
    root.write_port(1, &[0x0e]);
    root.write_port(2, &[0; 4]);
    for (offset, bytes) in [(0, 1), (0, 2), (1, 1), (2, 2), (3, 1), (8, 1), (2, 4)] {
        let mut data = vec![0; bytes];
        root.read_port(offset, &mut data);
        assert_eq!(data, vec![0xff; bytes]);
    }
    root.read_port(0, &mut address);
    assert_eq!(u32::from_le_bytes(address), 0x8000_08fc);
}

#[test]
fn config_data_reaches_what_config_address_names_in_any_width() {
    let (root, _) = bus();
    let port = |address: u32, offset: u64, bytes: usize| {
        root.write_port(0, &address.to_le_bytes());
        let mut data = vec![0; bytes];
        root.read_port(offset, &mut data);
        data
    };
    assert_eq!(port(0x8000_0800, 4, 4), 0x1042_1af4_u32.to_le_bytes());
    assert_eq!(port(0x8000_0800, 6, 2), [0x42, 0x10]);
    assert_eq!(port(0x8000_1000, 5, 1), [0x1a]);
    assert_eq!(port(0x8000_0000, 4, 2), [0x36, 0x1b]);
    assert_eq!(port(0x0000_0800, 4, 4), [0xff; 4], "not enabled");
    assert_eq!(port(0x8001_0800, 4, 4), [0xff; 4], "bus 1");
    assert_eq!(port(0x8000_0900, 4, 4), [0xff; 4], "function 1");
    assert_eq!(port(0x8000_0800, 5, 4), [0xff; 4], "across the double word");

    port(0x8000_0804, 4, 1);
    root.write_port(4, &[0x06]);
    assert_eq!(read_ecam(&root, ecam(1, 4)), 0x6);
}

#[test]
fn bars_get_aligned_addresses_in_the_window_and_answer_once_decoding_is_on() {
    let (root, devices) = bus();
    let mut taken = Vec::new();
    for number in 1..3 {
        for (index, bytes) in [(0, BAR0_BYTES), (4, BAR4_BYTES)] {
            let address = bar(&root, number, index);
            assert!(WINDOW.contains(&address) && WINDOW.contains(&(address + bytes - 1)));
            assert_eq!(address % bytes, 0);
            assert!(taken.iter().all(|&(first, last)| address > last || address + bytes <= first));
            taken.push((address, address + bytes - 1));
            assert_eq!(answers(&root, address), None);
        }
        decode(&root, number, true);
    }
    let address = bar(&root, 2, 4);
    assert_eq!(answers(&root, address + BAR4_BYTES - 1), Some(2));
    assert!(root.write_memory(address + 0x3ff8, &[7; 8]));
    assert!(!root.write_memory(address + 0x3ffc, &[7; 8]), "across the end");
    assert_eq!(devices[1].lock().unwrap().written, [(4, 0x3ff8, vec![7; 8])]);
    decode(&root, 2, false);
    assert_eq!(answers(&root, address), None);
    assert_eq!(answers(&root, bar(&root, 1, 0)), Some(1));
}

#[test]
fn a_bar_the_guest_moves_answers_at_its_new_address_only() {
    let (root, _) = bus();
    decode(&root, 1, true);
    let old = bar(&root, 1, 0);
    set_bar(&root, 1, 0, 0x50_1234_5000);
    assert_eq!(answers(&root, old), None);
    assert_eq!(answers(&root, 0x50_1234_5fff), Some(1));
}

#[test]
fn of_overlapping_bars_the_lower_device_wins_and_the_other_returns_when_it_leaves() {
    let (root, _) = bus();
    decode(&root, 1, true);
    decode(&root, 2, true);
    let contested = 0x50_0000_0000;
    set_bar(&root, 2, 4, contested);
    assert_eq!(answers(&root, contested + 0x1000), Some(2));
    set_bar(&root, 1, 0, contested + 0x1000);
    assert_eq!(answers(&root, contested + 0x1000), Some(1));
    assert_eq!(answers(&root, contested), None);
    decode(&root, 1, false);
    assert_eq!(answers(&root, contested + 0x1000), Some(2));
    assert_eq!(answers(&root, contested), Some(2));
}

#[test]
fn a_bar_at_the_end_of_the_address_space_does_not_wrap() {
    let (root, _) = bus();
    set_bar(&root, 1, 4, u64::MAX);
    decode(&root, 1, true);
    assert_eq!(answers(&root, u64::MAX), Some(1));
    assert_eq!(answers(&root, 0), None);
    let mut data = [0; 8];
    assert!(!root.read_memory(u64::MAX - 3, &mut data));
    assert!(!root.read_memory(u64::MAX, &mut []));
}

#[test]
fn a_bar_cannot_shadow_a_fixed_device() {
    let (root, devices) = bus();
    let root = Arc::new(root);
    let mut mmio = MmioBus::new(root.clone());
    let base = 0xe000_0000;
    mmio.insert(base, ECAM_BYTES, Arc::new(Mutex::new(Ecam(root.clone())))).unwrap();
    set_bar(&root, 1, 4, base);
    decode(&root, 1, true);
    let mut data = [0; 2];
    mmio.read(base, &mut data);
    assert_eq!(data, [0x36, 0x1b]);
    mmio.write(base + ecam(1, 4), &[0; 2]);
    assert_eq!(devices[0].lock().unwrap().written, []);
    decode(&root, 1, true);
    set_bar(&root, 1, 4, 0x50_0000_0000);
    mmio.write(0x50_0000_0010, &[1, 2, 3, 4]);
    assert_eq!(devices[0].lock().unwrap().written, [(4, 0x10, vec![1, 2, 3, 4])]);
}

#[test]
fn a_full_bus_and_a_full_window_are_errors() {
    let mut root = PciRoot::new(WINDOW);
    for number in 1..32 {
        assert_eq!(root.add(device(number)), Ok(number));
    }
    assert_eq!(root.add(device(32)), Err(PciError::BusFull));

    let mut root = PciRoot::new(0x1000..=0x1fff);
    let full = PciError::NoSpace(NoSpace { size_bytes: BAR4_BYTES });
    assert_eq!(root.add(device(1)), Err(full));
    assert_eq!(read_ecam(&root, ecam(1, 0)), u32::MAX);
}

proptest! {
    #[test]
    fn random_accesses_never_panic_and_routing_stays_sorted_and_disjoint(
        accesses in prop::collection::vec((
            0u8..8,
            prop_oneof![
                (0u64..4, 0u64..0x40).prop_map(|(device, register)| ecam(device, register)),
                any::<u64>(),
            ],
            0usize..=8,
            prop_oneof![any::<u64>(), Just(u64::MAX), Just(0x5000_0000_0006)],
        ), 1..100)
    ) {
        let (root, _) = bus();
        for (kind, offset, length, value) in accesses {
            let mut data = value.to_le_bytes();
            match kind {
                0 => root.read_ecam(offset, &mut data[..length]),
                1 => root.write_port(offset % 10, &data[..length]),
                2 => root.read_port(offset % 10, &mut data[..length]),
                3 => { root.read_memory(value, &mut data[..length]); }
                4 => { root.write_memory(offset, &data[..length]); }
                _ => root.write_ecam(offset, &data[..length]),
            }
            let routing = root.routing.read().unwrap();
            prop_assert!(routing.windows.len() <= 4);
            for pair in routing.windows.windows(2) {
                prop_assert!(pair[0].last < pair[1].first);
            }
            for window in &routing.windows {
                prop_assert!(window.first <= window.last);
            }
        }
        prop_assert_eq!(read_ecam(&root, 0), 0x0008_1b36);
        prop_assert_eq!(read_ecam(&root, ecam(2, 0)), 0x1042_1af4);
    }
}
