//! Accesses without sense: nothing panics, and the rules hold after each of them.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Access {
    ReadConfig(u16, usize),
    WriteConfig(u16, Vec<u8>),
    ReadBar(u64, usize),
    WriteBar(u64, Vec<u8>),
    /// A sensible status, feature or queue write, so that the device gets anywhere.
    Status(u8),
    Features(u64),
    Queue(u16, u64),
    Map(u64),
    Window(u8, u32, u32),
}

fn any_data() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => 0u8..16, 1 => Just(0xff), 1 => any::<u8>()];
    let len = prop::sample::select(vec![1usize, 2, 4, 8, 3, 7]);
    len.prop_flat_map(move |len| prop::collection::vec(byte.clone(), len))
}

fn any_access() -> impl Strategy<Value = Access> {
    let config = prop_oneof![6 => 0u16..0x100, 1 => any::<u16>()];
    let bar = prop_oneof![
        6 => 0u64..0x40,
        1 => 0x1000u64..0x1004,
        1 => 0x2000u64..0x2010,
        1 => 0x3000u64..0x3010,
        2 => 0x4000u64..0x4040,
        1 => 0x5000u64..0x5010,
        1 => any::<u64>(),
    ];
    let features = prop_oneof![Just(OFFERED), Just(VERSION_1), any::<u64>()];
    let address = prop_oneof![Just(BAR_ADDRESS), Just(0xc000_0000), Just(0), any::<u64>()];
    prop_oneof![
        2 => (config.clone(), 1usize..9).prop_map(|(at, len)| Access::ReadConfig(at, len)),
        3 => (config, any_data()).prop_map(|(at, data)| Access::WriteConfig(at, data)),
        2 => (bar.clone(), 1usize..9).prop_map(|(at, len)| Access::ReadBar(at, len)),
        5 => (bar, any_data()).prop_map(|(at, data)| Access::WriteBar(at, data)),
        3 => prop::sample::select(vec![0, 1, 3, 11, 15, 12, 4, 64, 128, 255]).prop_map(Access::Status),
        2 => features.prop_map(Access::Features),
        3 => (0u16..3, prop_oneof![Just(RINGS), any::<u64>()]).prop_map(|(q, at)| Access::Queue(q, at)),
        1 => address.prop_map(Access::Map),
        1 => (prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0u32..0x6000, 0u32..9)
            .prop_map(|(bar, at, len)| Access::Window(bar, at, len)),
    ]
}

fn perform(pci: &mut PciDriver<VirtioPci>, access: Access) {
    match access {
        Access::ReadConfig(at, len) => pci.device.read_config(at, &mut vec![0; len]),
        Access::WriteConfig(at, data) => pci.device.write_config(at, &data),
        Access::ReadBar(at, len) => pci.device.read_bar(0, at, &mut vec![0; len]),
        Access::WriteBar(at, data) => pci.device.write_bar(0, at, &data),
        Access::Status(status) => pci.set_status(status),
        Access::Features(features) => pci.write_driver_features(features),
        Access::Queue(index, desc) => {
            let driver = desc.wrapping_add(0x2000);
            let device = desc.wrapping_add(0x4000);
            pci.enable_queue(
                index,
                &crate::virtio::queue::QueueConfig { size: 8, desc, driver, device },
            );
        }
        Access::Map(address) => pci.map(address),
        Access::Window(bar, at, len) => {
            let capability = pci.pci_access.capability;
            pci.write_config(capability + 4, &[bar]);
            pci.write_config(capability + 8, &at.to_le_bytes());
            pci.write_config(capability + 12, &len.to_le_bytes());
            pci.write_config(capability + 16, &[1, 0, 0, 0]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_sequence_of_accesses_breaks_the_rules(
        accesses in prop::collection::vec(any_access(), 1..80),
    ) {
        let Machine { mut pci, device, notifier, .. } = machine();
        let (mut resets, mut activations) = (0, 0);
        for access in accesses {
            let before = pci.status();
            let trace = format!("{access:?}, status {before:#x}");
            perform(&mut pci, access);
            let status = pci.status();
            let state = device.state();

            if state.resets == resets {
                prop_assert_eq!(before & !status, 0, "a bit was cleared: {}", trace);
            }
            prop_assert!(status & DRIVER_OK == 0 || status & FEATURES_OK != 0, "{}", trace);
            prop_assert_eq!(status & 0x30, 0, "{}", trace);
            // The dummy itself panics at two activations without a reset between them.
            let started = state.activations - activations;
            prop_assert!(started == 0 || status & DRIVER_OK != 0, "{}", trace);
            prop_assert!(state.active.is_none() || status & DRIVER_OK != 0, "{}", trace);
            if let Some(active) = &state.active {
                prop_assert_eq!(active.features & !OFFERED, 0);
                prop_assert_ne!(active.features & VERSION_1, 0);
            }
            (resets, activations) = (state.resets, state.activations);
            drop(state);

            let mapped = pci.device.mapped_bars();
            let notify = pci.notify.offset;
            let expected: Vec<u64> = mapped
                .first()
                .map(|bar| vec![bar.address + notify, bar.address + notify + 4])
                .unwrap_or_default();
            prop_assert_eq!(notifier.addresses(), expected, "{}", trace);
        }
        pci.reset();
        prop_assert!(device.state().active.is_none());
    }

    /// A select that is anything shows either a queue or nothing.
    #[test]
    fn a_queue_is_never_larger_than_its_largest(select in any::<u16>(), size in any::<u16>()) {
        let Machine { mut pci, .. } = machine();
        pci.write_common(common::QUEUE_SELECT, &select.to_le_bytes());
        pci.write_common(common::QUEUE_SIZE, &size.to_le_bytes());
        let read = pci.common_u16(common::QUEUE_SIZE);
        match MAX_SIZES.get(usize::from(select)) {
            Some(&max) => prop_assert!(read.is_power_of_two() && read <= max),
            None => prop_assert_eq!(read, 0),
        }
    }
}
