//! MSI-X against a sink that remembers what it was told.

use std::sync::Weak;
use std::sync::atomic::AtomicU32;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Unmask(u16, MsiMessage),
    Mask(u16),
    Trigger(u16),
}

#[derive(Default)]
struct FakeSink {
    calls: Mutex<Vec<Call>>,
    refuse: AtomicBool,
}

impl FakeSink {
    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    fn answer(&self, call: Call) -> io::Result<()> {
        self.calls.lock().unwrap().push(call);
        if self.refuse.load(Ordering::SeqCst) {
            return Err(io::Error::other("refused"));
        }
        Ok(())
    }
}

impl MsiSink for FakeSink {
    fn trigger(&self, vector: u16) {
        self.calls.lock().unwrap().push(Call::Trigger(vector));
    }
    fn unmask(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        self.answer(Call::Unmask(vector, message))
    }
    fn mask(&self, vector: u16) -> io::Result<()> {
        self.answer(Call::Mask(vector))
    }
}

const MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_1000, data: 0x41 };

fn function(vectors: u16) -> (Arc<FakeSink>, Msix) {
    let sink = Arc::new(FakeSink::default());
    let msix = Msix::new(vectors, sink.clone());
    (sink, msix)
}

fn write_word(msix: &Msix, vector: u16, word: u64, value: u32) {
    msix.write_table(u64::from(vector) * ENTRY_BYTES + word * 4, &value.to_le_bytes());
}

fn read_word(msix: &Msix, vector: u16, word: u64) -> u32 {
    let mut data = [0xff; 4];
    msix.read_table(u64::from(vector) * ENTRY_BYTES + word * 4, &mut data);
    u32::from_le_bytes(data)
}

fn set_message(msix: &Msix, vector: u16, message: MsiMessage) {
    msix.write_table(u64::from(vector) * ENTRY_BYTES, &message.address.to_le_bytes());
    write_word(msix, vector, 2, message.data);
}

fn set_masked(msix: &Msix, vector: u16, masked: bool) {
    write_word(msix, vector, 3, u32::from(masked));
}

fn is_pending(msix: &Msix, vector: u16) -> bool {
    let mut byte = [0];
    msix.read_pba(u64::from(vector / 8), &mut byte);
    byte[0] >> (vector % 8) & 1 != 0
}

#[test]
fn an_unmasked_vector_is_delivered_at_once_and_leaves_no_pending_bit() {
    let (sink, msix) = function(2);
    msix.set_control(true, false);
    set_message(&msix, 1, MESSAGE);
    set_masked(&msix, 1, false);
    msix.signal(1);
    assert_eq!(sink.take(), [Call::Unmask(1, MESSAGE), Call::Trigger(1)]);
    assert!(!is_pending(&msix, 1));
}

#[test]
fn a_masked_vector_is_pending_and_delivered_once_on_unmask_after_its_route() {
    let (sink, msix) = function(70);
    msix.set_control(true, false);
    set_message(&msix, 69, MESSAGE);
    for _ in 0..3 {
        msix.signal(69);
    }
    assert!(is_pending(&msix, 69));
    assert!(!is_pending(&msix, 68));
    assert_eq!(sink.take(), []);

    set_masked(&msix, 69, false);
    assert_eq!(sink.take(), [Call::Unmask(69, MESSAGE), Call::Trigger(69)]);
    assert!(!is_pending(&msix, 69));

    set_masked(&msix, 69, true);
    set_masked(&msix, 69, false);
    assert_eq!(sink.take(), [Call::Mask(69), Call::Unmask(69, MESSAGE)]);
}

#[test]
fn the_function_mask_and_the_enable_bit_hold_back_every_vector() {
    for (enable, function_mask) in [(false, false), (false, true), (true, true)] {
        let (sink, msix) = function(2);
        for vector in 0..2 {
            set_message(&msix, vector, MESSAGE);
            set_masked(&msix, vector, false);
        }
        msix.set_control(enable, function_mask);
        msix.signal(0);
        assert_eq!(sink.take(), [], "enable {enable}, function mask {function_mask}");
        assert!(is_pending(&msix, 0));

        msix.set_control(true, false);
        assert_eq!(
            sink.take(),
            [Call::Unmask(0, MESSAGE), Call::Trigger(0), Call::Unmask(1, MESSAGE)]
        );
        msix.set_control(enable, function_mask);
        assert_eq!(sink.take(), [Call::Mask(0), Call::Mask(1)]);
    }
}

#[test]
fn the_sink_is_told_of_a_new_message_of_an_unmasked_vector_and_of_no_unchanged_one() {
    let (sink, msix) = function(1);
    msix.set_control(true, false);
    set_message(&msix, 0, MESSAGE);
    set_masked(&msix, 0, false);
    sink.take();
    write_word(&msix, 0, 2, MESSAGE.data);
    msix.set_control(true, false);
    assert_eq!(sink.take(), []);
    write_word(&msix, 0, 2, 0x55);
    assert_eq!(sink.take(), [Call::Unmask(0, MsiMessage { data: 0x55, ..MESSAGE })]);
}

#[test]
fn entries_start_masked_and_reset_masks_and_forgets_everything() {
    let (sink, msix) = function(3);
    assert!((0..3).all(|vector| read_word(&msix, vector, 3) == 1));

    msix.set_control(true, false);
    set_message(&msix, 0, MESSAGE);
    set_masked(&msix, 0, false);
    msix.signal(1);
    sink.take();
    msix.reset();
    assert_eq!(sink.take(), [Call::Mask(0)]);
    assert!(!msix.is_enabled());
    assert_eq!(msix.control(), 2);
    for vector in 0..3 {
        assert!(!is_pending(&msix, vector));
        let words: Vec<u32> = (0..4).map(|word| read_word(&msix, vector, word)).collect();
        assert_eq!(words, [0, 0, 0, 1]);
    }
    msix.set_control(true, false);
    for vector in 0..3 {
        set_masked(&msix, vector, false);
    }
    assert!(!sink.take().iter().any(|call| matches!(call, Call::Trigger(_))));
}

#[test]
fn only_the_mask_bit_of_vector_control_is_writable() {
    let (_, msix) = function(1);
    write_word(&msix, 0, 3, u32::MAX);
    assert_eq!(read_word(&msix, 0, 3), 1);
    write_word(&msix, 0, 3, !1);
    assert_eq!(read_word(&msix, 0, 3), 0);
    msix.write_table(0, &u64::MAX.to_le_bytes());
    assert_eq!(read_word(&msix, 0, 0), !3);
    assert_eq!(read_word(&msix, 0, 1), u32::MAX);
}

#[test]
fn an_eight_byte_write_sets_data_and_mask_together() {
    let (sink, msix) = function(1);
    msix.set_control(true, false);
    msix.write_table(0, &MESSAGE.address.to_le_bytes());
    msix.write_table(8, &u64::from(MESSAGE.data).to_le_bytes());
    assert_eq!(sink.take(), [Call::Unmask(0, MESSAGE)]);
    let mut data = [0; 8];
    msix.read_table(8, &mut data);
    assert_eq!(u64::from_le_bytes(data), u64::from(MESSAGE.data));
}

#[test]
fn illegal_table_writes_change_nothing() {
    let (_, msix) = function(2);
    set_message(&msix, 0, MESSAGE);
    let snapshot = |msix: &Msix| {
        let mut table = [0; 32];
        msix.read_table(0, &mut table);
        table
    };
    let before = snapshot(&msix);
    msix.write_table(0, &[0xaa]);
    msix.write_table(0, &[0xaa; 2]);
    msix.write_table(2, &[0xaa; 4]);
    msix.write_table(4, &[0xaa; 8]);
    msix.write_table(32, &[0xaa; 4]);
    msix.write_table(u64::MAX - 7, &[0xaa; 8]);
    msix.write_table(0, &[]);
    assert_eq!(snapshot(&msix), before);
}

#[test]
fn reads_past_the_end_give_zero() {
    let (_, msix) = function(1);
    for offset in [16, 17, u64::MAX - 7, u64::MAX] {
        let mut data = [0xff; 8];
        msix.read_table(offset, &mut data);
        assert_eq!(data, [0; 8]);
        data = [0xff; 8];
        msix.read_pba(offset, &mut data);
        assert_eq!(data, [0; 8]);
    }
    let mut data = [0xff; 8];
    msix.read_table(12, &mut data);
    assert_eq!(data, [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_vector_the_sink_refuses_stays_pending_until_it_accepts() {
    let (sink, msix) = function(1);
    sink.refuse.store(true, Ordering::SeqCst);
    msix.set_control(true, false);
    set_masked(&msix, 0, false);
    msix.signal(0);
    assert!(is_pending(&msix, 0));
    assert!(!sink.take().contains(&Call::Trigger(0)));
    sink.refuse.store(false, Ordering::SeqCst);
    set_masked(&msix, 0, false);
    assert_eq!(sink.take(), [Call::Unmask(0, MsiMessage::default()), Call::Trigger(0)]);
}

#[test]
fn a_refused_new_message_stops_delivery_of_the_old_one() {
    let (sink, msix) = function(1);
    msix.set_control(true, false);
    set_message(&msix, 0, MESSAGE);
    set_masked(&msix, 0, false);
    sink.take();
    sink.refuse.store(true, Ordering::SeqCst);
    write_word(&msix, 0, 2, 0x55);
    msix.signal(0);
    assert_eq!(sink.take(), [Call::Unmask(0, MsiMessage { data: 0x55, ..MESSAGE }), Call::Mask(0)]);
    assert!(is_pending(&msix, 0));
}

#[test]
fn vectors_that_do_not_exist_are_ignored() {
    let (sink, msix) = function(1);
    msix.set_control(true, false);
    msix.signal(1);
    msix.signal(u16::MAX);
    assert_eq!(sink.take(), []);
    assert_eq!(Msix::new(0, sink.clone()).vectors(), 1);
    assert_eq!(Msix::new(u16::MAX, sink).control(), 2047);
}

/// Counts deliveries. Like an eventfd, it forgets none that arrives while the vector is masked.
#[derive(Default)]
struct CountingSink(AtomicU32);

impl MsiSink for CountingSink {
    fn trigger(&self, _vector: u16) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn unmask(&self, _vector: u16, _message: MsiMessage) -> io::Result<()> {
        Ok(())
    }
    fn mask(&self, _vector: u16) -> io::Result<()> {
        Ok(())
    }
}

/// Signals its vector in the middle of each mask and unmask.
#[derive(Default)]
struct Interloper {
    msix: Mutex<Weak<Msix>>,
    delivered: AtomicU32,
}

impl Interloper {
    fn signal(&self) -> io::Result<()> {
        let msix = self.msix.lock().unwrap().upgrade();
        msix.unwrap().signal(0);
        Ok(())
    }
}

impl MsiSink for Interloper {
    fn trigger(&self, _vector: u16) {
        self.delivered.fetch_add(1, Ordering::SeqCst);
    }
    fn unmask(&self, _vector: u16, _message: MsiMessage) -> io::Result<()> {
        self.signal()
    }
    fn mask(&self, _vector: u16) -> io::Result<()> {
        self.signal()
    }
}

#[test]
fn a_signal_in_the_middle_of_a_mask_or_unmask_waits_for_the_end_of_the_unmask() {
    let sink = Arc::new(Interloper::default());
    let msix = Arc::new(Msix::new(1, sink.clone()));
    *sink.msix.lock().unwrap() = Arc::downgrade(&msix);
    msix.set_control(true, false);
    set_masked(&msix, 0, false);
    assert_eq!(sink.delivered.load(Ordering::SeqCst), 1);
    set_masked(&msix, 0, true);
    assert_eq!(sink.delivered.load(Ordering::SeqCst), 1);
    assert!(is_pending(&msix, 0));
    set_masked(&msix, 0, false);
    assert_eq!(sink.delivered.load(Ordering::SeqCst), 2, "both signals, one pending bit");
    assert!(!is_pending(&msix, 0));
}

/// A meeting point of two threads that leaves both of them running, unlike a barrier that sleeps:
/// what they do next overlaps within nanoseconds.
#[derive(Default)]
struct Meeting(AtomicU32);

impl Meeting {
    /// Waits until both have come for the `round`th time, from 1.
    fn meet(&self, round: u32) {
        self.0.fetch_add(1, Ordering::SeqCst);
        let mut spins = 0_u32;
        while self.0.load(Ordering::SeqCst) < 2 * round {
            spins += 1;
            if spins.is_multiple_of(100) {
                // The other one may need this CPU.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// Lets `signal` race with `change` many times, from the state `prepare` makes, and checks after
/// each race, the vector being unmasked then, that the signal was delivered exactly once. The two
/// start a varying time apart.
fn race(prepare: fn(&Msix), change: fn(&Msix)) {
    const ROUNDS: u32 = 20_000;
    let sink = Arc::new(CountingSink::default());
    let msix = Msix::new(1, sink.clone());
    msix.set_control(true, false);
    let mut wrong = Vec::new();
    let (start, end) = (Meeting::default(), Meeting::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                start.meet(round);
                (0..round % 128).for_each(|_| std::hint::black_box(()));
                msix.signal(0);
                end.meet(round);
            }
        });
        for round in 1..=ROUNDS {
            prepare(&msix);
            start.meet(round);
            change(&msix);
            end.meet(round);
            msix.set_control(true, false);
            set_masked(&msix, 0, false);
            // Asserted later: the other thread must not be left waiting.
            let delivered = sink.0.swap(0, Ordering::SeqCst);
            if delivered != 1 || is_pending(&msix, 0) {
                wrong.push((round, delivered));
            }
            msix.clear_pending();
        }
    });
    assert_eq!(wrong, [], "rounds and how often the signal was delivered in them");
}

#[test]
fn a_signal_racing_with_an_unmask_is_delivered_exactly_once() {
    race(|msix| set_masked(msix, 0, true), |msix| set_masked(msix, 0, false));
}

#[test]
fn a_signal_racing_with_a_mask_is_delivered_exactly_once() {
    race(|msix| set_masked(msix, 0, false), |msix| set_masked(msix, 0, true));
}

#[test]
fn a_signal_racing_with_the_function_mask_is_delivered_exactly_once() {
    race(|msix| msix.set_control(true, true), |msix| msix.set_control(true, false));
}

proptest! {
    #[test]
    fn random_accesses_never_panic_and_keep_reserved_bits(
        accesses in prop::collection::vec(
            (any::<u8>(), prop_oneof![0u64..0x60, any::<u64>()], 0usize..=8, any::<u64>()), 1..64)
    ) {
        let (_, msix) = function(5);
        for (kind, offset, length, value) in accesses {
            let bytes = value.to_le_bytes();
            let mut out = bytes;
            match kind % 6 {
                0 => msix.read_table(offset, &mut out[..length]),
                1 => msix.read_pba(offset, &mut out[..length]),
                2 => msix.signal(offset as u16),
                3 => msix.set_control(value & 1 != 0, value & 2 != 0),
                _ => msix.write_table(offset, &bytes[..length]),
            }
            for vector in 0..5 {
                prop_assert_eq!(read_word(&msix, vector, 0) & 3, 0);
                prop_assert_eq!(read_word(&msix, vector, 3) & !1, 0);
            }
            prop_assert_eq!(msix.control() & 0x7ff, 4);
            let mut beyond = [0xff; 8];
            msix.read_pba(msix.pba_bytes(), &mut beyond);
            prop_assert_eq!(beyond, [0; 8]);
        }
    }
}
