//! Tests of the register file.

use super::*;
use crate::testkit;
use crate::testkit::status::*;

const OFFERED: u64 = 1 << VIRTIO_F_VERSION_1 | 0b1010;
const RAM_BYTES: usize = 1 << 16;
const GENERATION: u8 = 0x5a;

struct Registers {
    common: CommonConfig,
    memory: GuestMemory,
}

impl Registers {
    /// A device with queues of 256 and 8 descriptors and three vectors.
    fn new() -> Registers {
        Registers::offering(OFFERED)
    }

    fn offering(features: u64) -> Registers {
        let memory = testkit::memory(RAM_BYTES);
        Registers { common: CommonConfig::new(features, &[256, 8], 3), memory }
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0xee; N];
        let resetting = self.common.resetting().is_some();
        self.common.read(at, &mut data, GENERATION, resetting);
        data
    }

    fn u16(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.read(at))
    }

    fn u32(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.read(at))
    }

    fn write(&mut self, at: u64, data: &[u8]) -> Event {
        self.common.write(at, data, &self.memory)
    }

    fn set_u16(&mut self, at: u64, value: u16) -> Event {
        self.write(at, &value.to_le_bytes())
    }

    fn set_u32(&mut self, at: u64, value: u32) {
        assert_eq!(self.write(at, &value.to_le_bytes()), Event::None);
    }

    fn set_status(&mut self, status: u8) -> Event {
        self.write(offset::DEVICE_STATUS, &[status])
    }

    fn accept(&mut self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.set_u32(offset::DRIVER_FEATURE_SELECT, select);
            self.set_u32(offset::DRIVER_FEATURE, half);
        }
    }

    /// Up to FEATURES_OK.
    fn negotiated() -> Registers {
        Registers::with(OFFERED)
    }

    /// Up to FEATURES_OK, with all of these features.
    fn with(features: u64) -> Registers {
        let mut registers = Registers::offering(features);
        registers.accept(features);
        registers.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(registers.common.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
        registers
    }

    /// Good rings for the selected queue, which has at most 256 descriptors.
    fn set_addresses(&mut self) {
        for (at, address) in [(0x20, 0x1000), (0x28, 0x2000), (0x30, 0x3000)] {
            self.set_u32(at, address);
            self.set_u32(at + 4, 0);
        }
    }
}

#[test]
fn registers_are_where_the_specification_has_them() {
    let mut registers = Registers::new();
    registers.set_u32(0x00, 1);
    registers.set_u32(0x08, 1);
    registers.set_u32(0x0c, 0x1234_5678);
    registers.set_u16(0x10, 2);
    registers.set_status(ACKNOWLEDGE);
    registers.set_u16(0x16, 1);
    registers.set_u16(0x18, 4);
    registers.set_u16(0x1a, 1);
    registers.write(0x20, &0x1_0000_1110u64.to_le_bytes());
    registers.write(0x28, &0x2_0000_2220u64.to_le_bytes());
    registers.write(0x30, &0x3_0000_3330u64.to_le_bytes());
    #[rustfmt::skip]
    let expected = [
        1, 0, 0, 0,              // device_feature_select
        1, 0, 0, 0,              // device_feature: VERSION_1 is bit 32
        1, 0, 0, 0,              // driver_feature_select
        0x78, 0x56, 0x34, 0x12,  // driver_feature
        2, 0,                    // config_msix_vector
        2, 0,                    // num_queues
        1,                       // device_status
        0x5a,                    // config_generation
        1, 0,                    // queue_select
        4, 0,                    // queue_size
        1, 0,                    // queue_msix_vector
        0, 0,                    // queue_enable
        1, 0,                    // queue_notify_off
        0x10, 0x11, 0, 0, 1, 0, 0, 0,
        0x20, 0x22, 0, 0, 2, 0, 0, 0,
        0x30, 0x33, 0, 0, 3, 0, 0, 0,
    ];
    assert_eq!(registers.read::<0x38>(0), expected);
    assert_eq!(registers.read::<8>(0x34), [3, 0, 0, 0, 0, 0, 0, 0], "zero past the end");
    assert_eq!(registers.read::<8>(u64::MAX - 3), [0; 8]);
}

#[test]
fn features_are_shown_by_halves_and_nothing_lies_beyond() {
    let mut registers = Registers::new();
    for (select, expected) in [(0, 0b1010), (1, 1), (2, 0), (u32::MAX, 0)] {
        registers.set_u32(offset::DEVICE_FEATURE_SELECT, select);
        assert_eq!(registers.u32(offset::DEVICE_FEATURE), expected);
    }
    registers.accept(OFFERED);
    registers.set_u32(offset::DRIVER_FEATURE_SELECT, 2);
    registers.set_u32(offset::DRIVER_FEATURE, u32::MAX);
    assert_eq!(registers.u32(offset::DRIVER_FEATURE), 0);
    registers.set_status(FEATURES_OK);
    assert_eq!(registers.common.features(), OFFERED);
}

#[test]
fn features_ok_stays_clear_without_version_1_or_with_what_was_not_offered() {
    for refused in [0, 0b1010, OFFERED | 1, OFFERED | 1 << 33, OFFERED | 1 << 63] {
        let mut registers = Registers::new();
        registers.accept(refused);
        registers.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(registers.common.status(), ACKNOWLEDGE | DRIVER, "{refused:#x}");
        assert_eq!(registers.common.features(), 0);
        // The driver may try again.
        registers.accept(1 << VIRTIO_F_VERSION_1);
        registers.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(registers.common.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(registers.common.features(), 1 << VIRTIO_F_VERSION_1);
    }
}

#[test]
fn features_stand_after_features_ok() {
    let mut registers = Registers::negotiated();
    registers.accept(0);
    assert_eq!(registers.common.features(), OFFERED);
}

#[test]
fn driver_ok_needs_features_ok_and_comes_once() {
    let mut registers = Registers::new();
    assert_eq!(registers.set_status(ACKNOWLEDGE | DRIVER | DRIVER_OK), Event::None);
    assert_eq!(registers.common.status(), ACKNOWLEDGE | DRIVER);
    let mut registers = Registers::negotiated();
    let all = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
    assert_eq!(registers.set_status(all), Event::DriverOk);
    assert_eq!(registers.common.status(), all);
    assert_eq!(registers.set_status(all), Event::None);
}

#[test]
fn no_status_bit_is_cleared_but_by_a_reset() {
    let mut registers = Registers::negotiated();
    registers.set_status(FAILED);
    let all = ACKNOWLEDGE | DRIVER | FEATURES_OK | FAILED;
    assert_eq!(registers.common.status(), all);
    registers.common.shared_status().fetch_or(NEEDS_RESET, Ordering::SeqCst);
    registers.set_status(ACKNOWLEDGE);
    assert_eq!(registers.common.status(), all | NEEDS_RESET);
    assert_eq!(registers.set_status(0), Event::Reset);
    assert_eq!(registers.common.status(), all | NEEDS_RESET, "the device is reset first");
    registers.common.reset();
    assert_eq!(registers.common.status(), 0);
}

#[test]
fn the_driver_cannot_set_needs_reset_or_bits_that_do_not_exist() {
    let mut registers = Registers::new();
    registers.set_status(NEEDS_RESET | 0x30);
    assert_eq!(registers.common.status(), 0);
}

#[test]
fn a_queue_size_is_a_power_of_two_up_to_the_largest_or_is_ignored() {
    let mut registers = Registers::negotiated();
    assert_eq!(registers.u16(offset::QUEUE_SIZE), 256);
    for refused in [0, 3, 255, 512, 32768, 65535] {
        registers.set_u16(offset::QUEUE_SIZE, refused);
        assert_eq!(registers.u16(offset::QUEUE_SIZE), 256);
    }
    for size in [1, 128, 256] {
        registers.set_u16(offset::QUEUE_SIZE, size);
        assert_eq!(registers.u16(offset::QUEUE_SIZE), size);
    }
}

#[test]
fn the_size_of_a_packed_queue_is_any_up_to_the_largest() {
    let mut registers = Registers::with(OFFERED | 1 << VIRTIO_F_RING_PACKED);
    for refused in [0, 257, 32768, 65535] {
        registers.set_u16(offset::QUEUE_SIZE, refused);
        assert_eq!(registers.u16(offset::QUEUE_SIZE), 256);
    }
    for size in [1, 3, 100, 255, 256] {
        registers.set_u16(offset::QUEUE_SIZE, size);
        assert_eq!(registers.u16(offset::QUEUE_SIZE), size);
        registers.set_addresses();
    }
    registers.set_u16(offset::QUEUE_SIZE, 100);
    assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::None);
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 1);
}

#[test]
fn any_size_is_possible_only_once_packed_queues_are_agreed_upon() {
    let mut registers = Registers::offering(OFFERED | 1 << VIRTIO_F_RING_PACKED);
    registers.accept(OFFERED | 1 << VIRTIO_F_RING_PACKED);
    registers.set_u16(offset::QUEUE_SIZE, 100);
    assert_eq!(registers.u16(offset::QUEUE_SIZE), 256);
    registers.accept(OFFERED);
    registers.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
    registers.set_u16(offset::QUEUE_SIZE, 100);
    assert_eq!(registers.u16(offset::QUEUE_SIZE), 256);
}

#[test]
fn a_queue_that_does_not_exist_has_size_0_and_takes_nothing() {
    let mut registers = Registers::negotiated();
    for select in [2, 1000, u16::MAX] {
        registers.set_u16(offset::QUEUE_SELECT, select);
        registers.set_u16(offset::QUEUE_SIZE, 4);
        registers.set_u16(offset::QUEUE_MSIX_VECTOR, 1);
        registers.set_addresses();
        assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::None);
        assert_eq!(registers.u16(offset::QUEUE_SELECT), select);
        assert_eq!(registers.u16(offset::QUEUE_SIZE), 0);
        assert_eq!(registers.u16(offset::QUEUE_MSIX_VECTOR), NO_VECTOR);
        assert_eq!(registers.u16(offset::QUEUE_ENABLE), 0);
        assert_eq!(registers.read::<24>(offset::QUEUE_DESC), [0; 24]);
    }
}

#[test]
fn a_vector_that_does_not_exist_reads_back_as_none() {
    let mut registers = Registers::negotiated();
    for at in [offset::CONFIG_MSIX_VECTOR, offset::QUEUE_MSIX_VECTOR] {
        assert_eq!(registers.u16(at), NO_VECTOR);
        for (vector, read_back) in [(2, 2), (3, NO_VECTOR), (0, 0), (NO_VECTOR, NO_VECTOR)] {
            registers.set_u16(at, vector);
            assert_eq!(registers.u16(at), read_back);
        }
    }
}

#[test]
fn an_enabled_queue_is_not_configured_any_more_but_for_its_vector() {
    let mut registers = Registers::negotiated();
    registers.set_addresses();
    assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::None);
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 1);
    let before = registers.read::<24>(offset::QUEUE_DESC);
    registers.set_u16(offset::QUEUE_SIZE, 4);
    registers.set_u32(offset::QUEUE_DESC, 0x8000);
    registers.set_u32(offset::QUEUE_DRIVER + 4, 1);
    registers.write(offset::QUEUE_DEVICE, &[0xff; 8]);
    registers.set_u16(offset::QUEUE_ENABLE, 0);
    registers.set_u16(offset::QUEUE_MSIX_VECTOR, 2);
    assert_eq!(registers.u16(offset::QUEUE_SIZE), 256);
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 1, "a driver never writes 0");
    assert_eq!(registers.read::<24>(offset::QUEUE_DESC), before);
    assert_eq!(registers.u16(offset::QUEUE_MSIX_VECTOR), 2);
    let config = QueueConfig { size: 256, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    assert_eq!(registers.common.enabled_queues().collect::<Vec<_>>(), [(0, config)]);
}

#[test]
fn a_queue_outside_ram_or_misaligned_is_not_enabled() {
    for address in [RAM_BYTES as u32, RAM_BYTES as u32 - 16, u32::MAX, 0x1001] {
        for at in [offset::QUEUE_DESC, offset::QUEUE_DRIVER, offset::QUEUE_DEVICE] {
            let mut registers = Registers::negotiated();
            registers.set_addresses();
            registers.set_u32(at, address);
            assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::BadQueue);
            assert_eq!(registers.u16(offset::QUEUE_ENABLE), 0);
            assert_eq!(registers.common.enabled_queues().count(), 0);
        }
    }
}

#[test]
fn no_queue_is_enabled_after_driver_ok() {
    let mut registers = Registers::negotiated();
    registers.set_addresses();
    registers.set_status(DRIVER_OK);
    assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::None);
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 0);
}

const RING_RESET: u64 = OFFERED | 1 << VIRTIO_F_RING_RESET;

#[test]
fn a_queue_is_reset_and_enabled_again_while_the_device_runs() {
    let mut registers = Registers::with(RING_RESET);
    registers.set_addresses();
    registers.set_u16(offset::QUEUE_SIZE, 4);
    registers.set_u16(offset::QUEUE_MSIX_VECTOR, 1);
    registers.set_u16(offset::QUEUE_ENABLE, 1);
    registers.set_status(DRIVER_OK);
    assert_eq!(registers.u16(offset::QUEUE_RESET), 0);

    assert_eq!(registers.set_u16(offset::QUEUE_RESET, 1), Event::ResetQueue(0));
    assert_eq!(registers.u16(offset::QUEUE_RESET), 1, "it goes on");
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 0);
    assert_eq!(registers.u16(offset::QUEUE_SIZE), 256, "the defaults");
    assert_eq!(registers.u16(offset::QUEUE_MSIX_VECTOR), NO_VECTOR);
    assert_eq!(registers.read::<24>(offset::QUEUE_DESC), [0; 24]);
    registers.set_addresses();
    assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::None, "too early");
    registers.set_u16(offset::QUEUE_SELECT, 1);
    assert_eq!(registers.u16(offset::QUEUE_RESET), 0, "the other queue is not concerned");

    registers.set_u16(offset::QUEUE_SELECT, 0);
    registers.common.queue_was_reset(0);
    assert_eq!(registers.u16(offset::QUEUE_RESET), 0);
    assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::EnableQueue(0));
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 1);
    assert_eq!(registers.set_u16(offset::QUEUE_ENABLE, 1), Event::None, "it is enabled");
    assert_eq!(registers.common.status() & DRIVER_OK, DRIVER_OK);
}

#[test]
fn a_queue_is_not_reset_without_the_feature_or_by_anything_but_1() {
    for (features, value) in [(OFFERED, 1), (RING_RESET, 0), (RING_RESET, 2)] {
        let mut registers = Registers::with(features);
        registers.set_addresses();
        registers.set_u16(offset::QUEUE_ENABLE, 1);
        registers.set_status(DRIVER_OK);
        assert_eq!(registers.set_u16(offset::QUEUE_RESET, value), Event::None);
        assert_eq!(registers.u16(offset::QUEUE_RESET), 0);
        assert_eq!(registers.u16(offset::QUEUE_ENABLE), 1);
    }
    let mut registers = Registers::with(RING_RESET);
    registers.set_status(DRIVER_OK);
    registers.set_u16(offset::QUEUE_SELECT, 2);
    assert_eq!(registers.set_u16(offset::QUEUE_RESET, 1), Event::None, "no such queue");
}

#[test]
fn a_queue_reset_before_the_device_runs_is_done_at_once() {
    let mut registers = Registers::with(RING_RESET);
    registers.set_addresses();
    registers.set_u16(offset::QUEUE_ENABLE, 1);
    assert_eq!(registers.set_u16(offset::QUEUE_RESET, 1), Event::None);
    assert_eq!(registers.u16(offset::QUEUE_RESET), 0);
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 0);
    assert_eq!(registers.common.enabled_queues().count(), 0);
}

#[test]
fn a_reset_leaves_nothing() {
    let fresh = Registers::new().read::<0x38>(0);
    let mut registers = Registers::negotiated();
    registers.set_u32(offset::DEVICE_FEATURE_SELECT, 1);
    registers.set_u16(offset::CONFIG_MSIX_VECTOR, 0);
    for queue in [0, 1] {
        registers.set_u16(offset::QUEUE_SELECT, queue);
        registers.set_u16(offset::QUEUE_SIZE, 4);
        registers.set_u16(offset::QUEUE_MSIX_VECTOR, 1);
        registers.set_addresses();
        registers.set_u16(offset::QUEUE_ENABLE, 1);
    }
    registers.set_status(DRIVER_OK);
    registers.common.reset();
    assert_eq!(registers.read::<0x38>(0), fresh);
    registers.set_u16(offset::QUEUE_SELECT, 1);
    assert_eq!(registers.u16(offset::QUEUE_SIZE), 8);
    assert_eq!(registers.u16(offset::QUEUE_MSIX_VECTOR), NO_VECTOR);
    assert_eq!(registers.u16(offset::QUEUE_ENABLE), 0);
    assert_eq!(registers.common.features(), 0);
}

#[test]
fn a_write_that_is_not_one_whole_register_is_ignored() {
    let mut registers = Registers::negotiated();
    let before = registers.read::<0x38>(0);
    for at in 0..0x40 {
        for len in [1, 2, 3, 4, 5, 8, 16] {
            let natural = match at {
                offset::DEVICE_STATUS => len == 1,
                0x10 | 0x16 | 0x18 | 0x1a | 0x1c => len == 2,
                0x00 | 0x08 | 0x0c => len == 4,
                0x20 | 0x28 | 0x30 => len == 4 || len == 8,
                0x24 | 0x2c | 0x34 => len == 4,
                _ => false,
            };
            if !natural {
                assert_eq!(registers.write(at, &vec![1; len]), Event::None);
                assert_eq!(registers.read::<0x38>(0), before, "{len} bytes at {at:#x}");
            }
        }
    }
}
