//! A device with split queues and one with packed queues, given the same requests: whatever the
//! driver sees of them is the same.

mod rig;

use devices::testkit::{self, Buf, reframe};
use devices::virtio::VirtioDevice;
use proptest::prelude::*;
use rig::*;
use virtio_blk::{BlkConfig, EngineKind};

const SECTORS: usize = 128;

/// A request as its bytes, whatever they mean, and how the driver sends it.
#[derive(Clone, Debug)]
struct Case {
    kind: u32,
    sector: u64,
    data_out: Vec<u8>,
    data_in: usize,
    /// The pieces the data is cut into.
    lens: Vec<u32>,
    indirect: bool,
    /// The driver wants an interrupt with it.
    interrupt: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let kind =
        prop::sample::select(vec![IN, IN, OUT, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES, 77]);
    let place = (0..SECTORS as u64 + 2, 0..6usize, any::<u8>(), any::<bool>());
    let lens = prop::collection::vec(prop_oneof![Just(512u32), 100..4000u32], 1..3);
    (kind, place, lens, any::<bool>(), any::<bool>()).prop_map(
        |(kind, (sector, sectors, fill, odd), lens, indirect, interrupt)| {
            let bytes = sectors * SECTOR + usize::from(odd && fill % 4 == 0);
            let (data_out, data_in) = match kind {
                IN => (vec![], bytes),
                OUT => ((0..bytes).map(|at| (at % 241) as u8 ^ fill).collect(), 0),
                GET_ID => (vec![], 20 + bytes % 20),
                DISCARD | WRITE_ZEROES => (segment(sector, sectors as u32, u32::from(odd)), 0),
                _ => (vec![], 0),
            };
            Case { kind, sector, data_out, data_in, lens, indirect, interrupt }
        },
    )
}

/// Adds the request; gives its head, and where its data and status will be.
fn add(rig: &mut Rig, case: &Case) -> (u16, u64, u64) {
    let (bufs, into, status) = rig.parts(case.kind, case.sector, &case.data_out, case.data_in);
    let [first, data @ .., last] = &bufs[..] else { panic!("a header and a status") };
    let bufs: Vec<Buf> =
        [*first].into_iter().chain(reframe(data, &case.lens)).chain([*last]).collect();
    let driver = &mut rig.drivers[0];
    let head = if case.indirect { driver.add_indirect(&bufs) } else { driver.add(&bufs) };
    (head, into, status)
}

/// One request after the other; the number of interrupts in the end.
fn one_by_one(rig: &mut Rig, cases: &[Case]) -> (Vec<Answer>, usize) {
    let mut answers = Vec::new();
    for case in cases {
        rig.drivers[0].want_interrupts(case.interrupt);
        let (head, into, status) = add(rig, case);
        rig.publish(0);
        let used = rig.drivers[0].wait_used();
        assert_eq!(used.head, head);
        answers.push(rig.answer(used, into, case.data_in, status));
        rig.arena.check();
    }
    // Its last interrupt comes after the used length.
    rig.block.reset();
    let interrupts = rig.signals.sink.count(1);
    rig.restart();
    (answers, interrupts)
}

/// All requests at once.
fn together(rig: &mut Rig, cases: &[Case]) -> Vec<Answer> {
    rig.new_arena();
    let sent: Vec<_> = cases.iter().map(|case| add(rig, case)).collect();
    rig.publish(0);
    let mut answers: Vec<Option<Answer>> = cases.iter().map(|_| None).collect();
    for _ in cases {
        let used = rig.drivers[0].wait_used();
        let at = sent.iter().position(|(head, ..)| *head == used.head).unwrap();
        let (_, into, status) = sent[at];
        answers[at] = Some(rig.answer(used, into, cases[at].data_in, status));
    }
    rig.arena.check();
    answers.into_iter().map(Option::unwrap).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn nothing_but_the_rings_tells_split_from_packed(
        cases in prop::collection::vec(case(), 1..40),
        event_idx in any::<bool>(),
    ) {
        for engine in [EngineKind::Uring, EngineKind::Sync] {
            let config = BlkConfig { engine, event_idx, ..BlkConfig::default() };
            let packed = BlkConfig { packed: true, ..config.clone() };
            let mut split = Rig::new(on_disk(), SECTORS, config);
            let mut packed = Rig::new(on_disk(), SECTORS, packed);
            prop_assert_eq!(split.features ^ packed.features, 1 << 34);

            let wanted = cases.iter().filter(|case| case.interrupt).count();
            let seen = one_by_one(&mut split, &cases);
            prop_assert_eq!(seen.1, wanted);
            prop_assert_eq!(seen, one_by_one(&mut packed, &cases));

            // What reads at the same time as it writes is nobody's to compare.
            let reads: Vec<Case> = cases.iter().filter(|case| case.data_out.is_empty()).cloned().collect();
            prop_assert_eq!(together(&mut split, &reads), together(&mut packed, &reads));
            prop_assert_eq!(split.on_host(0, SECTORS), packed.on_host(0, SECTORS));
            let counters = [&split, &packed].map(|rig| {
                let counters = &rig.block.counters()[0];
                [&counters.requests, &counters.bytes_read, &counters.bytes_written, &counters.errors]
                    .map(|counter| counter.get())
            });
            prop_assert_eq!(counters[0], counters[1]);
        }
    }
}

/// Requests in flight all the time, and a ring so short that it wraps at every other request.
#[test]
fn packed_rings_wrap_while_requests_are_in_flight() {
    for queue_size in [4, 8] {
        let config = BlkConfig { packed: true, queue_size, ..BlkConfig::default() };
        let mut rig = Rig::new(on_disk(), 64, config);
        let mut waiting: Vec<(u16, u64, u64)> = Vec::new();
        for turn in 0..3000u64 {
            if turn % 50 == 0 && waiting.is_empty() {
                rig.new_arena();
            }
            let (bufs, into, _) = rig.parts(IN, turn % 60, &[], SECTOR);
            if rig.drivers[0].free() < bufs.len() || turn % 50 == 49 {
                for _ in 0..waiting.len() {
                    let used = rig.drivers[0].wait_used();
                    assert_eq!(used.written_bytes, 513);
                    let at = waiting.iter().position(|(head, ..)| *head == used.head).unwrap();
                    let (_, into, sector) = waiting.swap_remove(at);
                    let data = testkit::read(&rig.memory, into, SECTOR);
                    assert_eq!(data, contents(64)[sector as usize * SECTOR..][..SECTOR]);
                }
            }
            waiting.push((rig.drivers[0].add(&bufs), into, turn % 60));
            rig.publish(0);
        }
    }
}
