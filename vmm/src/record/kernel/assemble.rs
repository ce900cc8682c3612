//! Halts out of the kernel's events.
//!
//! KVM tells of a halt at its end (`kvm_vcpu_wakeup`), and of its window when it has grown or shrunk that,
//! just before. Who ended it has told the local APIC of an interrupt (`kvm_apic_accept_irq`): before,
//! if it was another thread of this process; after, on the vCPU's own thread, if it was its timer. An
//! interrupt of which only the injection is seen (`kvm_inj_virq`) came from elsewhere in the kernel, as
//! an irqfd's may.

use halt_poll::recording::{Halt, Source, saturated};

/// `MSR_KVM_POLL_CONTROL`: bit 0 set, the host may poll.
const POLL_ENABLED: u64 = 1;

/// What a tracepoint says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A halt of the thread's vCPU has ended.
    Wakeup { halt_ns: u64, waited: bool, valid: bool },
    /// A vCPU's window has changed; it was `old_ns` in the halt that is about to end.
    Window { vcpu: u32, new_ns: u32, old_ns: u32 },
    /// A local APIC, by its vCPU, has got an interrupt.
    Accept { vcpu: u32, vector: u8 },
    /// The thread's vCPU has been handed an interrupt.
    Inject { vector: u8 },
    /// The thread's vCPU has written `MSR_KVM_POLL_CONTROL`.
    PollControl { value: u64 },
    /// A thread is being woken, by its number in the whole system.
    Waking { pid: i32 },
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, on CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// The thread that it is of.
    pub tid: i32,
    /// The same one's number in the whole system, which in a container is another.
    pub pid: i32,
    pub what: What,
}

/// What is known of a vCPU.
struct Vcpu {
    tid: i32,
    pid: Option<i32>,
    window_ns: u32,
    /// The window of the halt that is about to end, and the one after it.
    changed: Option<(u32, u32)>,
    poll_allowed: bool,
    /// Who ends the halt, if that is seen before its end.
    source: Option<(Source, u8)>,
    waking_ns: Option<u64>,
    /// A halt that has ended by nobody knows whom yet.
    pending: Option<Halt>,
}

/// Makes halts of events.
pub struct Assembler {
    vcpus: Vec<Vcpu>,
    /// The largest window there is.
    max_ns: u32,
    /// When time begins, on CLOCK_MONOTONIC.
    origin_ns: u64,
}

impl Assembler {
    /// Time begins at `origin_ns`; the maximum window is `max_ns`, unless KVM shows a larger one.
    pub fn new(origin_ns: u64, max_ns: u32) -> Self {
        Self { vcpus: Vec::new(), max_ns, origin_ns }
    }

    /// So many new vCPUs, whose threads are not known yet.
    pub fn begin(&mut self, vcpus: usize) {
        let vcpu = |_| Vcpu {
            tid: 0,
            pid: None,
            window_ns: 0,
            changed: None,
            poll_allowed: true,
            source: None,
            waking_ns: None,
            pending: None,
        };
        self.vcpus = (0..vcpus).map(vcpu).collect();
    }

    /// The vCPUs' threads; 0 for those that do not run yet.
    pub fn set_threads(&mut self, tids: impl IntoIterator<Item = i32>) {
        for (vcpu, tid) in self.vcpus.iter_mut().zip(tids) {
            vcpu.tid = tid;
        }
    }

    /// The maximum window is another.
    pub fn set_max_ns(&mut self, max_ns: u32) {
        self.max_ns = max_ns;
    }

    /// Takes an event, no earlier than those before it. Gives the halt that is now complete, and whose it is.
    pub fn take(&mut self, event: &Event) -> Option<(u32, Halt)> {
        let thread = self.vcpus.iter().position(|vcpu| vcpu.tid == event.tid);
        let of_vcpu = thread.is_some();
        if let Some(vcpu) = thread.and_then(|index| self.vcpus.get_mut(index))
            && !matches!(event.what, What::Waking { .. })
        {
            vcpu.pid = Some(event.pid);
        }
        match event.what {
            What::Waking { pid } => {
                let woken = self.vcpus.iter_mut().find(|vcpu| vcpu.pid == Some(pid))?;
                woken.waking_ns.get_or_insert(event.time_ns);
                None
            }
            What::Window { vcpu, new_ns, old_ns } => {
                self.max_ns = self.max_ns.max(old_ns);
                self.vcpus.get_mut(vcpu as usize)?.changed = Some((old_ns, new_ns));
                None
            }
            What::Accept { vcpu, vector } if thread == Some(vcpu as usize) => {
                self.complete(thread?, Source::Timer, vector)
            }
            What::Accept { vcpu, vector } => {
                let source = if of_vcpu { Source::Ipi } else { Source::Device };
                self.vcpus.get_mut(vcpu as usize)?.source.get_or_insert((source, vector));
                None
            }
            What::Inject { vector } => self.complete(thread?, Source::Device, vector),
            What::PollControl { value } => {
                self.vcpus.get_mut(thread?)?.poll_allowed = value & POLL_ENABLED != 0;
                None
            }
            What::Wakeup { halt_ns, waited, valid } => {
                let index = thread?;
                let before = self.complete(index, Source::Unknown, 0);
                let (max_ns, origin_ns) = (self.max_ns, self.origin_ns);
                let vcpu = self.vcpus.get_mut(index)?;
                vcpu.halted(event.time_ns, halt_ns, waited, valid, max_ns, origin_ns);
                // One before that nobody explained, or this one.
                before.or_else(|| {
                    let (source, vector) = self.vcpus.get_mut(index)?.source.take()?;
                    self.complete(index, source, vector)
                })
            }
        }
    }

    /// The halts of which nobody will know more.
    pub fn finish(&mut self) -> Vec<(u32, Halt)> {
        let all = 0..self.vcpus.len();
        all.filter_map(|index| self.complete(index, Source::Unknown, 0)).collect()
    }

    /// The halt that waits to know who ended it, if there is one.
    fn complete(&mut self, index: usize, source: Source, vector: u8) -> Option<(u32, Halt)> {
        let vcpu = self.vcpus.get_mut(index)?;
        let halt = vcpu.pending.take()?;
        let (source, vector) = vcpu.source.take().unwrap_or((source, vector));
        Some((index as u32, Halt { source, vector, ..halt }))
    }
}

impl Vcpu {
    fn halted(
        &mut self,
        end_ns: u64,
        halt_ns: u64,
        waited: bool,
        valid: bool,
        max_ns: u32,
        origin_ns: u64,
    ) {
        let (window_ns, next_ns) = match self.changed.take() {
            Some((old_ns, new_ns)) => (old_ns, new_ns),
            None => {
                let cut_ns = self.window_ns.min(max_ns);
                (cut_ns, cut_ns)
            }
        };
        self.window_ns = next_ns;
        let window_ns = if self.poll_allowed { window_ns } else { 0 };
        let start_ns = end_ns.saturating_sub(halt_ns);
        // KVM does not tell how long it polled in vain: as long as it was to, unless its CPU was wanted.
        let polled_ns = if waited { halt_ns.min(window_ns.into()) } else { halt_ns };
        let woken_ns = self.waking_ns.take().filter(|&woken_ns| waited && woken_ns >= start_ns);
        self.pending = Some(Halt {
            start_ns: start_ns.saturating_sub(origin_ns),
            halt_ns,
            polled_ns: (window_ns > 0).then(|| saturated(polled_ns)),
            slept: waited,
            window_ns,
            wake_cost_ns: woken_ns.map(|woken_ns| saturated(end_ns.saturating_sub(woken_ns))),
            valid,
            poll_allowed: self.poll_allowed,
            source: Source::Unknown,
            vector: 0,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VCPU0: i32 = 100;
    const VCPU1: i32 = 101;
    const WORKER: i32 = 200;
    /// In the whole system, threads have other numbers.
    const PID: i32 = 7_000;

    /// The halts of these events: time, thread, what.
    fn halts(events: &[(u64, i32, What)]) -> Vec<(u32, Halt)> {
        let mut assembler = Assembler::new(1_000, 200_000);
        assembler.begin(2);
        assembler.set_threads([VCPU0, VCPU1]);
        let event =
            |&(time_ns, tid, what): &(u64, i32, What)| Event { time_ns, tid, pid: PID + tid, what };
        let mut halts: Vec<_> =
            events.iter().filter_map(|seen| assembler.take(&event(seen))).collect();
        halts.extend(assembler.finish());
        halts
    }

    fn slept(halt_ns: u64) -> What {
        What::Wakeup { halt_ns, waited: true, valid: true }
    }

    fn sources(halts: &[(u32, Halt)]) -> Vec<(u32, Source, u8)> {
        halts.iter().map(|(vcpu, halt)| (*vcpu, halt.source, halt.vector)).collect()
    }

    #[test]
    fn who_told_the_local_apic_ended_the_halt() {
        let halts = halts(&[
            (10_000, WORKER, What::Accept { vcpu: 0, vector: 0x22 }),
            (11_000, VCPU0, slept(5_000)),
            (11_500, VCPU0, What::Inject { vector: 0x22 }),
            (12_000, VCPU0, What::Accept { vcpu: 1, vector: 0xfd }),
            (13_000, VCPU1, slept(2_000)),
            (13_500, VCPU1, What::Inject { vector: 0xfd }),
            (20_000, VCPU0, slept(6_000)),
            (20_100, VCPU0, What::Accept { vcpu: 0, vector: 0xec }),
            (20_200, VCPU0, What::Inject { vector: 0xec }),
            (30_000, VCPU1, slept(6_000)),
            (30_200, VCPU1, What::Inject { vector: 0x23 }),
            (40_000, VCPU1, slept(1_000)),
            (50_000, VCPU1, slept(2_000)),
        ]);
        let expected = [
            (0, Source::Device, 0x22),
            (1, Source::Ipi, 0xfd),
            (0, Source::Timer, 0xec),
            (1, Source::Device, 0x23),
            (1, Source::Unknown, 0),
            (1, Source::Unknown, 0),
        ];
        assert_eq!(sources(&halts), expected);
        assert_eq!((halts[0].1.start_ns, halts[0].1.halt_ns), (5_000, 5_000));
        assert_eq!(halts.iter().map(|halt| halt.1.halt_ns).sum::<u64>(), 22_000);
    }

    #[test]
    fn waking_costs_from_the_first_wake_within_the_halt() {
        let pid = PID + VCPU0;
        let waking = |time_ns| (time_ns, WORKER, What::Waking { pid });
        let halts = halts(&[
            // The thread's number in the system is known from its first event on.
            waking(8_000),
            (10_000, VCPU0, slept(5_000)),
            waking(11_000),
            (20_000, VCPU0, slept(5_000)),
            waking(27_000),
            waking(28_000),
            (30_000, VCPU0, slept(5_000)),
            waking(37_000),
            (40_000, VCPU0, What::Wakeup { halt_ns: 5_000, waited: false, valid: true }),
        ]);
        let costs: Vec<_> = halts.iter().map(|halt| halt.1.wake_cost_ns).collect();
        assert_eq!(costs, [None, None, Some(3_000), None]);
    }

    #[test]
    fn windows_are_those_that_kvm_told_and_cut_to_the_maximum() {
        let window = |old_ns, new_ns| (1, VCPU0, What::Window { vcpu: 0, new_ns, old_ns });
        let polled = What::Wakeup { halt_ns: 9_000, waited: false, valid: true };
        let halts = halts(&[
            window(0, 10_000),
            (100_000, VCPU0, slept(50_000)),
            (200_000, VCPU0, polled),
            window(160_000, 320_000),
            (400_000, VCPU0, slept(170_000)),
            (500_000, VCPU0, polled),
            (510_000, VCPU0, What::PollControl { value: 0 }),
            (600_000, VCPU0, slept(9_000)),
            (700_000, VCPU0, What::PollControl { value: 1 }),
            window(200_000, 100_000),
            (1_600_000, VCPU0, slept(800_000)),
        ]);
        let seen: Vec<_> = halts.iter().map(|halt| (halt.1.window_ns, halt.1.polled_ns)).collect();
        let expected = [
            (0, None),
            (10_000, Some(9_000)),
            (160_000, Some(160_000)),
            (200_000, Some(9_000)),
            (0, None),
            (200_000, Some(200_000)),
        ];
        assert_eq!(seen, expected);
        assert_eq!(halts.iter().filter(|halt| !halt.1.poll_allowed).count(), 1);
        assert_eq!(halts[2].1.blocked_ns(), 10_000);
    }

    #[test]
    fn a_maximum_that_is_raised_while_the_guest_runs_cuts_no_more() {
        let mut assembler = Assembler::new(0, 0);
        assembler.begin(1);
        assembler.set_threads([VCPU0]);
        assembler.set_max_ns(200_000);
        let event = |time_ns, what| Event { time_ns, tid: VCPU0, pid: PID, what };
        let window = What::Window { vcpu: 0, new_ns: 10_000, old_ns: 0 };
        let halts = [window, slept(50_000), slept(3_000), slept(3_000)]
            .map(|what| assembler.take(&event(1_000_000, what)).map(|(_, halt)| halt.window_ns));
        assert_eq!(halts, [None, None, Some(0), Some(10_000)]);
    }

    #[test]
    fn threads_and_vcpus_that_are_none_are_passed_over() {
        let none = [
            (1, WORKER, slept(1)),
            (2, WORKER, What::Inject { vector: 1 }),
            (3, WORKER, What::PollControl { value: 0 }),
            (4, WORKER, What::Accept { vcpu: 77, vector: 1 }),
            (5, WORKER, What::Window { vcpu: 77, new_ns: 1, old_ns: 0 }),
            (6, WORKER, What::Waking { pid: WORKER }),
            (7, VCPU0, What::Inject { vector: 1 }),
        ];
        assert_eq!(halts(&none), []);
    }
}
