//! A split and a packed queue, driven alike: neither the device nor the driver can tell.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::testkit::reframe;

const SIZE: u16 = 8;
const RAM: usize = 4 << 20;

/// What the driver or the device does next.
#[derive(Clone, Debug)]
enum Step {
    /// The driver adds a request of so many readable and writable bytes, cut into pieces.
    Add { readable: u32, writable: u32, lens: Vec<u32>, indirect: bool },
    /// The driver makes what it added available.
    Publish,
    /// The device takes at most so many chains.
    Pop(usize),
    /// The device gives a chain back, one of those it has, having written so many bytes.
    Push { choice: usize, written: u32 },
    /// The device makes what it gave back visible; whether the driver wants an interrupt with it.
    PublishUsed { interrupt: bool },
    /// The driver takes everything back.
    Take,
    /// The device wants kicks or not.
    Kicks(bool),
}

fn any_step() -> impl Strategy<Value = Step> {
    let lens = prop::collection::vec(prop_oneof![1 => Just(0u32), 4 => 1u32..200], 1..4);
    prop_oneof![
        4 => (1u32..300, 0u32..300, lens, any::<bool>()).prop_map(
            |(readable, writable, lens, indirect)| Step::Add { readable, writable, lens, indirect }
        ),
        3 => Just(Step::Publish),
        4 => (1usize..6).prop_map(Step::Pop),
        4 => (any::<usize>(), 0u32..300)
            .prop_map(|(choice, written)| Step::Push { choice, written }),
        3 => any::<bool>().prop_map(|interrupt| Step::PublishUsed { interrupt }),
        3 => Just(Step::Take),
        2 => any::<bool>().prop_map(Step::Kicks),
    ]
}

/// What a step shows: the driver and the device see nothing else of the rings.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// Whether a kick is due; unknown if the device does not want any, for that is a hint.
    Kick(Option<bool>),
    /// The bytes to be read, and how many can be written, of each chain.
    Popped(Vec<(Vec<u8>, u64)>),
    Interrupt(bool),
    /// The request's number, the used length, and the bytes it brought.
    Taken(Vec<(usize, u32, Vec<u8>)>),
    AvailableNow(bool),
}

/// A queue with both its sides.
struct World {
    memory: GuestMemory,
    arena: Arena,
    driver: AnyDriver,
    queue: Queue,
    /// Chains with the device, and the numbers of their requests.
    out: Vec<(Chain, usize)>,
    /// Requests available and not popped.
    available: VecDeque<usize>,
    added: VecDeque<usize>,
    /// The driver's number, and where the answer goes, of each request that is not back.
    requests: Vec<(usize, u16, u64, u32)>,
    count: usize,
    event_idx: bool,
    /// The device has asked for kicks, and has not had the one it asked for.
    kicks_on: bool,
}

impl World {
    fn new(features: u64) -> World {
        let memory = testkit::memory(RAM);
        let driver = AnyDriver::new(&memory, RINGS, SIZE, features);
        let arena = Arena::new(&memory, driver.end());
        let queue = driver.device_queue();
        World {
            memory,
            arena,
            driver,
            queue,
            out: Vec::new(),
            available: VecDeque::new(),
            added: VecDeque::new(),
            requests: Vec::new(),
            count: 0,
            event_idx: features & EVENT_IDX != 0,
            kicks_on: false,
        }
    }

    fn step(&mut self, step: &Step) -> Option<Seen> {
        match step {
            Step::Add { readable, writable, lens, indirect } => {
                self.add(*readable, *writable, lens, *indirect);
                None
            }
            Step::Publish => {
                self.available.append(&mut self.added);
                let kick = self.driver.publish();
                let due = self.kicks_on.then_some(kick);
                self.kicks_on &= !(kick && self.event_idx);
                Some(Seen::Kick(due))
            }
            Step::Pop(most) => Some(Seen::Popped(self.pop(*most))),
            Step::Push { choice, written } => {
                if !self.out.is_empty() {
                    let (mut chain, number) = self.out.remove(choice % self.out.len());
                    let written = u64::from(*written).min(chain.writable_bytes()) as usize;
                    assert!(chain.write(&answer(number, written)));
                    self.queue.push(chain.head(), written as u32);
                }
                None
            }
            Step::PublishUsed { interrupt } => {
                self.driver.want_interrupts(*interrupt);
                Some(Seen::Interrupt(self.queue.publish()))
            }
            Step::Take => Some(Seen::Taken(self.take())),
            Step::Kicks(true) => {
                let available = self.queue.enable_kicks();
                // What is there already is not kicked for, and a worker does not wait for it.
                self.kicks_on = !available;
                Some(Seen::AvailableNow(available))
            }
            Step::Kicks(false) => {
                self.kicks_on = false;
                self.queue.disable_kicks();
                None
            }
        }
    }

    fn add(&mut self, readable: u32, writable: u32, lens: &[u32], indirect: bool) {
        if lens.iter().all(|len| *len < 64) {
            return;
        }
        let content: Vec<u8> = (0..readable).map(|i| (i as usize + self.count) as u8).collect();
        let from = self.arena.alloc_with(&content);
        let to = self.arena.alloc(writable.into());
        let bufs = [Buf::readable(from, readable), Buf::writable(to, writable)];
        let bufs = reframe(&bufs, lens);
        let needs = if indirect { 1 } else { bufs.len() };
        if bufs.len() > usize::from(SIZE) || needs > self.driver.free() {
            return;
        }
        let head = if indirect { self.driver.add_indirect(&bufs) } else { self.driver.add(&bufs) };
        self.requests.push((self.count, head, to, writable));
        self.added.push_back(self.count);
        self.count += 1;
    }

    fn pop(&mut self, most: usize) -> Vec<(Vec<u8>, u64)> {
        let mut popped = Vec::new();
        for _ in 0..most {
            assert_eq!(self.queue.has_available(), !self.available.is_empty());
            let mut chain = Chain::new();
            if !self.queue.pop(&mut chain).expect("a driver that keeps to the rules") {
                break;
            }
            let mut bytes = vec![0; chain.readable_bytes() as usize];
            assert!(chain.read(&mut bytes));
            popped.push((bytes, chain.writable_bytes()));
            self.out.push((chain, self.available.pop_front().expect("in order")));
        }
        popped
    }

    fn take(&mut self) -> Vec<(usize, u32, Vec<u8>)> {
        let mut taken = Vec::new();
        while let Some(used) = self.driver.take_used() {
            let at = self.requests.iter().position(|(_, head, ..)| *head == used.head);
            let (number, _, to, writable) = self.requests.remove(at.expect("a request"));
            let bytes = testkit::read(&self.memory, to, writable as usize);
            let (written, rest) = bytes.split_at(used.written_bytes as usize);
            assert_eq!(written, answer(number, written.len()), "what came back");
            assert!(rest.iter().all(|byte| *byte == 0), "nothing past the used length");
            taken.push((number, used.written_bytes, bytes));
        }
        self.arena.check();
        taken
    }
}

/// What the device writes for a request, never zero.
fn answer(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number + 3 * i) as u8 | 1).collect()
}

#[test]
fn making_a_queue_and_finding_it_empty_touches_no_memory() {
    for format in [0, PACKED] {
        let (_driver, mut queue, _, memory) = setup_any(8, EVENT_IDX | format);
        let before = testkit::read(&memory, 0, RAM_BYTES);
        assert_eq!(queue.pop(&mut Chain::new()), Ok(false));
        assert!(!queue.has_available());
        assert!(!queue.publish());
        assert!(testkit::read(&memory, 0, RAM_BYTES) == before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// The same requests on both, with the device answering in any order: the same data, used
    /// lengths, interrupts and kicks, whatever the two sides want to be told of.
    #[test]
    fn a_packed_queue_does_what_a_split_one_does(
        steps in prop::collection::vec(any_step(), 1..200),
        event_idx in any::<bool>(),
    ) {
        let features = INDIRECT | if event_idx { EVENT_IDX } else { 0 };
        let (mut split, mut packed) = (World::new(features), World::new(features | PACKED));
        for (at, step) in steps.iter().enumerate() {
            let seen = (split.step(step), packed.step(step));
            prop_assert_eq!(&seen.0, &seen.1, "step {}: {:?}", at, step);
        }
    }
}
