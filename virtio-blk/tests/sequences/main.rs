//! Whole sequences of what a driver may do, in any order, on a real device behind the real
//! transport: configure, enable, send requests, mask and unmask, resize, reset a queue or the device
//! with requests under way, and begin again. After each step, all registers, interrupts, answers and
//! the disk are as the reference models say ([`devices::testkit::model`]).
//!
//! `POLLUX_CASES=100000 cargo test -p virtio-blk --test sequences` runs for hours.

#[path = "../rig/mod.rs"]
mod rig;
mod world;

use proptest::prelude::*;
use virtio_blk::EngineKind;
use world::{QUEUE_SIZE, QUEUES, SECTORS, World};

/// Of sequences, if `POLLUX_CASES` does not say.
const CASES: u32 = 400;

/// What a request asks for. Those of a batch have parts of the disk of their own.
#[derive(Clone, Copy, Debug)]
enum Request {
    Read { sector: usize, sectors: usize },
    Write { sector: usize, sectors: usize, fill: u8 },
    WriteZeroes { sector: usize, sectors: usize },
    Flush,
    GetId,
    Unknown,
}

/// What happens after a batch was made available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// The driver waits for all answers.
    Wait,
    /// It resets the queue at once.
    ResetQueue,
    /// It resets the device at once.
    ResetDevice,
}

/// One step.
#[derive(Clone, Debug)]
enum Step {
    /// From reset to DRIVER_OK, with all queues; the disk may get another size on the way.
    Start { features: u64, size: u16, resize: Option<usize> },
    /// The status is written.
    Status(u8),
    /// The driver's features are written.
    Features(u64),
    /// Size, addresses and vector of a queue are written.
    Configure { queue: u16, size: u16, vector: u16, outside: bool },
    /// `queue_enable` is written.
    Enable(u16),
    /// `queue_reset` is written, and awaited.
    ResetQueue(u16),
    /// The common configuration is written in any way, but for addresses.
    Poke { at: u64, data: Vec<u8> },
    /// A batch of requests.
    Send { queue: u16, requests: Vec<Request>, interrupt: bool, indirect: bool, then: Then },
    /// A kick without a request.
    Kick(u16),
    /// A queue is broken by its driver.
    Wreck(u16),
    /// A vector is masked or unmasked.
    Mask { vector: u16, masked: bool },
    /// The control word of MSI-X is written.
    Msix { enabled: bool, function_mask: bool },
    /// The vector of a queue, or (past the last) of configuration changes.
    Vector { queue: u16, vector: u16 },
    /// The ISR status is read.
    Isr,
    /// The BAR is mapped or unmapped, and with it the notifications.
    Map(bool),
    /// The disk has another size now.
    Resize(usize),
}

fn request() -> impl Strategy<Value = Request> {
    // Some of them are past the end.
    let place = || (0..SECTORS / 4 + 4, 1..9usize);
    prop_oneof![
        4 => place().prop_map(|(sector, sectors)| Request::Read { sector, sectors }),
        4 => (place(), any::<u8>())
            .prop_map(|((sector, sectors), fill)| Request::Write { sector, sectors, fill }),
        1 => place().prop_map(|(sector, sectors)| Request::WriteZeroes { sector, sectors }),
        1 => Just(Request::Flush),
        1 => Just(Request::GetId),
        1 => Just(Request::Unknown),
    ]
}

fn features() -> impl Strategy<Value = u64> {
    // Packed, EVENT_IDX, indirect and queue resets on or off, the rest on.
    let toggled = prop::sample::subsequence(vec![34u32, 29, 28, 40], 0..=4);
    let off = |bits: Vec<u32>| bits.into_iter().fold(u64::MAX, |all, bit| all & !(1 << bit));
    prop_oneof![9 => toggled.prop_map(off), 1 => any::<u64>()]
}

fn step() -> impl Strategy<Value = Step> {
    let queue = || prop_oneof![20 => 0..QUEUES, 1 => Just(QUEUES), 1 => any::<u16>()];
    let active = || 0..QUEUES;
    let vector = || prop_oneof![8 => 0..QUEUES + 1, 1 => Just(0xffffu16), 1 => any::<u16>()];
    let size = || {
        let any = 0..QUEUE_SIZE + 2;
        prop_oneof![4 => Just(QUEUE_SIZE), 3 => Just(8u16), 2 => Just(4u16), 1 => any]
    };
    let sectors = || SECTORS / 2..2 * SECTORS;
    let statuses = vec![0u8, 1, 3, 11, 15, 11, 15, 15, 4, 12, 0x80, 0x40, 0xff];
    let then = prop_oneof![6 => Just(Then::Wait), 1 => Just(Then::ResetQueue), 1 => Just(Then::ResetDevice)];
    let data = prop_oneof![
        3 => (0..4u16).prop_map(|value| value.to_le_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..9),
    ];
    prop_oneof![
        6 => (features(), size(), prop::option::weighted(0.2, sectors()))
            .prop_map(|(features, size, resize)| Step::Start { features, size, resize }),
        3 => prop::sample::select(statuses).prop_map(Step::Status),
        1 => features().prop_map(Step::Features),
        2 => (queue(), size(), vector(), prop::bool::weighted(0.1)).prop_map(
            |(queue, size, vector, outside)| Step::Configure { queue, size, vector, outside }
        ),
        3 => queue().prop_map(Step::Enable),
        2 => queue().prop_map(Step::ResetQueue),
        1 => (0..0x40u64, data).prop_map(|(at, data)| Step::Poke { at, data }),
        20 => (
            active(), prop::collection::vec(request(), 1..5), prop::bool::weighted(0.8),
            any::<bool>(), then,
        ).prop_map(|(queue, requests, interrupt, indirect, then)| {
            Step::Send { queue, requests, interrupt, indirect, then }
        }),
        1 => active().prop_map(Step::Kick),
        1 => active().prop_map(Step::Wreck),
        5 => (0..QUEUES + 1, any::<bool>())
            .prop_map(|(vector, masked)| Step::Mask { vector, masked }),
        3 => (prop::bool::weighted(0.8), prop::bool::weighted(0.3))
            .prop_map(|(enabled, function_mask)| Step::Msix { enabled, function_mask }),
        2 => (0..QUEUES + 1, vector()).prop_map(|(queue, vector)| Step::Vector { queue, vector }),
        1 => Just(Step::Isr),
        1 => any::<bool>().prop_map(Step::Map),
        1 => sectors().prop_map(Step::Resize),
    ]
}

fn cases() -> u32 {
    let given = std::env::var("POLLUX_CASES");
    given.map_or(CASES, |cases| cases.parse().expect("POLLUX_CASES is a number"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn whatever_a_driver_does_it_sees_what_the_specification_says(
        uring in any::<bool>(),
        first in (features(), Just(QUEUE_SIZE)),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let engine = if uring { EngineKind::Uring } else { EngineKind::Sync };
        let mut world = World::new(engine);
        // Most sequences need a device that runs.
        world.step(&Step::Start { features: first.0, size: first.1, resize: None });
        for step in &steps {
            world.step(step);
        }
        world.finish();
    }
}
