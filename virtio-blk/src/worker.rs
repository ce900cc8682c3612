//! The thread of one queue: takes requests, has its engine carry them out, and gives them back.
//!
//! One turn is a batch: whatever has completed and whatever is new, one publication in the used
//! ring, one decision about the interrupt. With nothing to do, the worker first polls for as long
//! as its window says, then asks for kicks, looks once more (a chain that came before the driver
//! saw the request would come without a kick), and sleeps. Kicks stay suppressed all the while it
//! is awake.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use devices::virtio::queue::{Chain, GuestByte, Queue, QueueError};
use devices::virtio::signal::{DeviceSignal, QueueSignal};
use devices::virtio::stats::QueueCounters;
use halt_poll::{Outcome, Params, Policy, WakeReason};
use vmm_sys_util::eventfd::EventFd;

use crate::device::Shared;
use crate::engine::{Done, Engine};
use crate::request::{Action, Limits, Parsed, Request, Status};

/// The most requests taken in one turn, so that those an engine completes at once do not wait long
/// for their publication.
const MAX_BATCH: usize = 32;

/// What a worker works with.
pub(crate) struct Worker {
    pub(crate) queue: Queue,
    pub(crate) kick: EventFd,
    pub(crate) signal: QueueSignal,
    pub(crate) device: DeviceSignal,
    pub(crate) engine: Box<dyn Engine>,
    pub(crate) counters: Arc<QueueCounters>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) limits: Limits,
    pub(crate) stop: Arc<AtomicBool>,
    /// How long to poll before a sleep; its maximum is looked up before each.
    pub(crate) policy: Policy,
    /// Chains to be filled again, so that their memory is not allocated anew.
    pub(crate) spare: Vec<Chain>,
    /// Empty between turns.
    pub(crate) done: Vec<Done>,
    pub(crate) service: ServiceTimes,
}

/// Measures service times with one look at the clock a batch at each end.
pub(crate) struct ServiceTimes {
    /// When the chain with this head was taken; stale where there is none under way.
    begun: Vec<Instant>,
    /// Of the chains that went back since the last publication.
    finished: Vec<Instant>,
}

impl ServiceTimes {
    /// For a queue of `queue_size` descriptors.
    pub(crate) fn new(queue_size: u16) -> ServiceTimes {
        let begun = vec![Instant::now(); usize::from(queue_size)];
        ServiceTimes { begun, finished: Vec::new() }
    }

    fn begin(&mut self, head: u16, now: Instant) {
        if let Some(begun) = self.begun.get_mut(usize::from(head)) {
            *begun = now;
        }
    }

    fn finish(&mut self, head: u16) {
        self.finished.extend(self.begun.get(usize::from(head)));
    }

    fn record(&mut self, counters: &QueueCounters) {
        if self.finished.is_empty() {
            return;
        }
        let now = Instant::now();
        for begun in self.finished.drain(..) {
            counters.service_time_ns.record(nanoseconds(now.duration_since(begun)));
        }
    }
}

impl Worker {
    /// Works until told to stop, or until the queue breaks, which ends the same way.
    pub(crate) fn run(mut self) {
        if let Err(_error) = self.work() {
            // Nothing can be taken from a broken queue, and what is under way has no driver to
            // come back to before a reset.
            self.device.needs_reset();
            self.engine.drain();
            while !self.stopped() {
                let _ = self.kick.read();
            }
        }
        // Not posted: the driver may have given the memory to something else.
        self.engine.drain();
    }

    fn work(&mut self) -> Result<(), QueueError> {
        let mut kicked = true;
        self.queue.disable_kicks();
        while !self.stopped() {
            if self.turn(kicked)? {
                kicked = false;
                continue;
            }
            kicked = self.idle();
            self.queue.disable_kicks();
        }
        Ok(())
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// One batch. False if there was nothing to do.
    fn turn(&mut self, kicked: bool) -> Result<bool, QueueError> {
        // What the last turn left for the sleep to submit, if there is no sleep now.
        if self.queue.has_available() {
            self.engine.submit();
        }
        let kicks = self.engine.reap(&mut self.done);
        self.counters.kicks.add(kicks);
        let mut pushed = self.done.len();
        let mut done = std::mem::take(&mut self.done);
        for done in done.drain(..) {
            self.complete(done);
        }
        self.done = done;

        let mut popped = 0;
        let mut now = None;
        let mut broken = Ok(());
        while popped < MAX_BATCH {
            let mut chain = self.spare.pop().unwrap_or_default();
            match self.queue.pop(&mut chain) {
                Ok(true) => {}
                Ok(false) => {
                    self.spare.push(chain);
                    break;
                }
                Err(error) => {
                    broken = Err(error);
                    break;
                }
            }
            popped += 1;
            // After the load that found the chain: what was told before it was sent holds for it.
            self.limits.capacity_sectors = self.shared.capacity_sectors.load(Ordering::Relaxed);
            self.limits.writeback = self.shared.writeback.load(Ordering::Relaxed);
            self.service.begin(chain.head(), *now.get_or_insert_with(Instant::now));
            pushed += usize::from(self.begin(chain));
        }
        if popped > 0 && !kicked && kicks == 0 {
            self.counters.kicks_suppressed.add(1);
        }
        self.service.record(&self.counters);
        if self.queue.publish() {
            self.counters.interrupts.add(1);
            self.signal.signal();
        } else if pushed > 0 {
            self.counters.interrupts_suppressed.add(1);
        }
        broken.map(|()| popped > 0 || pushed > 0)
    }

    /// Begins what a chain asks for. True if it went back at once.
    fn begin(&mut self, chain: Chain) -> bool {
        match Request::parse(chain, &self.limits) {
            Parsed::Start(request) => match self.engine.push(request) {
                Some(done) => {
                    self.complete(done);
                    true
                }
                None => false,
            },
            Parsed::Answer { chain, status, answer, written_bytes } => {
                let adjacent = chain.writable().is_empty();
                self.finish(chain, status, answer, written_bytes, adjacent);
                true
            }
            Parsed::NoStatus(chain) => {
                self.counters.errors.add(1);
                self.give_back(chain, 0);
                true
            }
        }
    }

    fn complete(&mut self, done: Done) {
        let Done { request, status } = done;
        let mut data_bytes = 0;
        let mut adjacent = request.chain.writable().is_empty();
        if status == Status::Ok {
            match &request.action {
                Action::Read(range) => {
                    // All of the chain's writable bytes. Used lengths have 32 bits.
                    data_bytes = u32::try_from(range.length_bytes).unwrap_or(u32::MAX);
                    adjacent = true;
                    self.counters.bytes_read.add(range.length_bytes);
                }
                Action::Write { range, .. } => self.counters.bytes_written.add(range.length_bytes),
                Action::Flush => self.counters.flushes.add(1),
                Action::Discard { .. } | Action::WriteZeroes { .. } => {}
            }
        }
        let Request { chain, status: byte, .. } = request;
        self.finish(chain, byte, status, data_bytes, adjacent);
    }

    /// Writes the status and gives the chain back. Its used length counts from the first writable
    /// byte without a gap (virtio 1.2, 2.7.8.2): `data_bytes`, and the status byte if it comes
    /// right after them (`adjacent`).
    fn finish(
        &mut self,
        chain: Chain,
        byte: GuestByte,
        status: Status,
        data_bytes: u32,
        adjacent: bool,
    ) {
        byte.store(status as u8);
        if status != Status::Ok {
            self.counters.errors.add(1);
        }
        self.give_back(chain, data_bytes.saturating_add(u32::from(adjacent)));
    }

    fn give_back(&mut self, chain: Chain, written_bytes: u32) {
        self.counters.requests.add(1);
        self.service.finish(chain.head());
        self.queue.push(chain.head(), written_bytes);
        self.spare.push(chain);
    }

    /// Polls, then sleeps, until there may be something to do. True if kicks came.
    fn idle(&mut self) -> bool {
        let max_ns = self.shared.io_poll_ns.load(Ordering::Relaxed);
        self.policy.set_params(Params { max_ns, ..self.policy.params() });
        let start = (max_ns > 0).then(Instant::now);
        let window_ns = self.policy.window_ns();
        let mut polled_ns = None;
        if let Some(start) = start
            && window_ns > 0
        {
            self.engine.submit();
            let hit = self.spin(start, Duration::from_nanos(window_ns));
            polled_ns = Some(nanoseconds(start.elapsed()));
            if hit {
                self.counters.polls_hit.add(1);
                self.learn(polled_ns, None);
                return false;
            }
            self.counters.polls_missed.add(1);
        }
        if self.queue.enable_kicks() {
            return false;
        }
        self.counters.sleeps.add(1);
        let kicks = self.engine.sleep(&self.kick);
        if let Some(start) = start {
            let blocked_ns = nanoseconds(start.elapsed()).saturating_sub(polled_ns.unwrap_or(0));
            self.learn(polled_ns, Some(blocked_ns));
        }
        // The last kick is the stopper's.
        self.counters.kicks.add(kicks.saturating_sub(u64::from(self.stopped())));
        kicks > 0
    }

    fn spin(&mut self, start: Instant, window: Duration) -> bool {
        loop {
            if self.queue.has_available() || self.engine.ready() || self.stopped() {
                return true;
            }
            if start.elapsed() >= window {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    fn learn(&mut self, polled_ns: Option<u64>, blocked_ns: Option<u64>) {
        let wake = WakeReason::Event;
        self.policy.update(&Outcome { polled_ns, blocked_ns, wake, valid: true });
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
