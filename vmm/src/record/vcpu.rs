//! Halts in mode `user`, recorded by the vCPU's own thread.

use std::mem;
use std::sync::mpsc::{self, Receiver, Sender};

use halt_poll::recording::{BLOCK_BYTES, HALT_BYTES, Halt, Source};
use halt_poll::{Clock, Outcome, WakeReason};

use super::writer::{Halts, Message};
use crate::vcpu::user::UserApic;

/// A buffer takes so many halts.
const BUFFER_HALTS: usize = 1024;
const BUFFER_BYTES: usize = BLOCK_BYTES + BUFFER_HALTS * HALT_BYTES;
/// Of each vCPU: one is filled while the others are written.
const BUFFERS: usize = 4;
/// A buffer is handed over at the first halt that ends so long after its first one began, full or not:
/// a run that is killed loses no more.
const HAND_OVER_NS: u64 = 1_000_000_000;

/// The halts of one vCPU on their way to the writer.
pub struct VcpuRecorder {
    vcpu: u32,
    /// When time begins, on the vCPU's clock.
    origin_ns: u64,
    /// Room for a block's header, then halts.
    buffer: Vec<u8>,
    /// When the first of them began.
    first_ns: u64,
    lost: u64,
    to: Sender<Message>,
    /// Comes with each buffer, to give it back by.
    back: Sender<Vec<u8>>,
    empty: Receiver<Vec<u8>>,
}

impl VcpuRecorder {
    /// Records halts of `vcpu`, on whose clock time begins at `origin_ns`.
    pub(super) fn new(vcpu: u32, origin_ns: u64, to: Sender<Message>) -> Self {
        let (back, empty) = mpsc::channel();
        for _ in 1..BUFFERS {
            let _ = back.send(new_buffer());
        }
        let buffer = new_buffer();
        Self { vcpu, origin_ns, buffer, first_ns: 0, lost: 0, to, back, empty }
    }

    fn record(&mut self, mut halt: Halt) {
        halt.start_ns = halt.start_ns.wrapping_sub(self.origin_ns);
        let is_first = self.buffer.len() == BLOCK_BYTES;
        if is_first {
            self.first_ns = halt.start_ns;
        }
        let age_ns = halt.start_ns.saturating_add(halt.halt_ns).saturating_sub(self.first_ns);
        if self.buffer.len() < BUFFER_BYTES {
            self.buffer.extend_from_slice(&halt.to_bytes());
            if self.buffer.len() == BUFFER_BYTES || age_ns > HAND_OVER_NS {
                self.hand_over();
            }
        } else if self.hand_over() {
            self.first_ns = halt.start_ns;
            self.buffer.extend_from_slice(&halt.to_bytes());
        } else {
            self.lost += 1;
        }
    }

    /// Gives the buffer away, if there is another.
    fn hand_over(&mut self) -> bool {
        let Ok(mut empty) = self.empty.try_recv() else { return false };
        empty.truncate(BLOCK_BYTES);
        let buffer = mem::replace(&mut self.buffer, empty);
        self.send(buffer);
        true
    }

    fn send(&mut self, buffer: Vec<u8>) {
        let (vcpu, lost) = (self.vcpu, mem::take(&mut self.lost));
        // Without a writer there is nobody to tell.
        let _ = self.to.send(Message::Halts(Halts { vcpu, lost, buffer, back: self.back.clone() }));
    }
}

impl Drop for VcpuRecorder {
    fn drop(&mut self) {
        let buffer = mem::take(&mut self.buffer);
        self.send(buffer);
    }
}

fn new_buffer() -> Vec<u8> {
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    buffer.resize(BLOCK_BYTES, 0);
    buffer
}

/// Records a halt that has just ended. `start_ns`: when it began, on the vCPU's clock; `window_ns`: how
/// long it was to poll.
pub fn record(apic: &mut UserApic, start_ns: u64, window_ns: u64, outcome: &Outcome) {
    let mut halt = Halt::new(start_ns, window_ns, outcome);
    halt.poll_allowed = apic.policy.poll_allowed();
    match outcome.wake {
        WakeReason::Interrupted => {}
        WakeReason::Deadline => halt.vector = apic.lapic.timer_vector(),
        WakeReason::Event => {
            (halt.source, halt.vector) = match apic.lapic.pending_vector() {
                None => (Source::Other, 0),
                Some(vector) if vector == apic.lapic.timer_vector() => (Source::Timer, vector),
                Some(vector) if apic.lapic.shared().is_ipi(vector) => (Source::Ipi, vector),
                Some(vector) => (Source::Device, vector),
            };
            if halt.slept {
                let (now_ns, woken_ns) =
                    (apic.clock.now_ns(), apic.clock.ns(apic.wake.woken_tsc()));
                // One who finds the wake before it sleeps is not woken.
                let cost_ns = now_ns.checked_sub(woken_ns).filter(|_| woken_ns >= start_ns);
                halt.wake_cost_ns = cost_ns.map(halt_poll::recording::saturated);
            }
        }
    }
    if let Some(recorder) = &mut apic.recorder {
        recorder.record(halt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halt(start_ns: u64, halt_ns: u64) -> Halt {
        let outcome = Outcome {
            polled_ns: None,
            blocked_ns: Some(halt_ns),
            wake: WakeReason::Event,
            valid: true,
        };
        Halt::new(start_ns, 0, &outcome)
    }

    fn received(from: &Receiver<Message>) -> Vec<Halts> {
        let halts = |message| match message {
            Message::Halts(halts) => halts,
            Message::Flush(_) | Message::Vcpus(_) => panic!("nobody asked for it"),
        };
        from.try_iter().map(halts).collect()
    }

    fn count(halts: &Halts) -> usize {
        (halts.buffer.len() - BLOCK_BYTES) / HALT_BYTES
    }

    #[test]
    fn full_buffers_are_handed_over_and_the_rest_at_the_end() {
        let (to, from) = mpsc::channel();
        let mut recorder = VcpuRecorder::new(3, 100, to);
        for at in 0..BUFFER_HALTS as u64 * 2 + 5 {
            recorder.record(halt(100 + at, 1));
        }
        let first = received(&from);
        assert_eq!(first.iter().map(count).collect::<Vec<_>>(), [BUFFER_HALTS; 2]);
        let bytes = first[0].buffer[BLOCK_BYTES..].first_chunk().unwrap();
        assert_eq!((Halt::from_bytes(bytes).start_ns, first[0].vcpu), (0, 3));
        drop(recorder);
        assert_eq!(received(&from).iter().map(count).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn a_buffer_that_has_waited_for_long_is_handed_over() {
        let (to, from) = mpsc::channel();
        let mut recorder = VcpuRecorder::new(0, 0, to);
        recorder.record(halt(5_000, 7));
        recorder.record(halt(6_000, HAND_OVER_NS));
        recorder.record(halt(HAND_OVER_NS + 7_000, 7));
        assert_eq!(received(&from).iter().map(count).collect::<Vec<_>>(), [2]);
        recorder.record(halt(HAND_OVER_NS * 2 + 7_000, 1));
        assert_eq!(received(&from).iter().map(count).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn with_a_writer_that_does_not_keep_up_halts_are_lost_and_counted_and_memory_is_bounded() {
        let (to, from) = mpsc::channel();
        let mut recorder = VcpuRecorder::new(0, 0, to);
        let (room, more) = (BUFFERS * BUFFER_HALTS, 77);
        for at in 0..room + more {
            recorder.record(halt(at as u64, 1));
        }
        let mut full = received(&from);
        assert_eq!(full.len(), BUFFERS - 1);
        // One is written: the full one follows, and tells what came in between.
        let Halts { buffer, back, .. } = full.remove(0);
        back.send(buffer).unwrap();
        recorder.record(halt(0, 1));
        let next = received(&from);
        assert_eq!((count(&next[0]), next[0].lost), (BUFFER_HALTS, more as u64));
        drop(recorder);
        let last = received(&from);
        assert_eq!((count(&last[0]), last[0].lost), (1, 0));
    }
}
