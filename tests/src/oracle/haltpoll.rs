//! The guest's haltpoll governor beside Linux's, in a guest with one CPU.
//!
//! A trace is one event a line:
//!
//! ```text
//! params MAX_NS GROW GROW_START_NS SHRINK 0|1   the parameters from here on; last: allow_shrink
//! counts POLLS HALTS                            cpuidle's own: state0/usage and state1/usage
//! enter TIME_US STATE                           power:cpu_idle
//! leave TIME_US                                 its end
//! limit NEW_NS OLD_NS grow|shrink               power:guest_halt_poll_ns, after its `leave`
//! ```
//!
//! The governor goes by what cpuidle measured, which is a little less than the time between the
//! two events, and may be much less where the host took the CPU away in between. A residency from
//! the one to the other must explain what the governor did; how often the trace's own was enough
//! is in [`Summary::exact`].

use std::fmt::Write as _;

use halt_poll::guest::{Governor, IdleState, Idled, Params};

use super::{field, tracefs};

/// What a residency may be less than the time between its events to count as exact, in µs.
const EXACT_US: u64 = 100;

/// What the governor did in a trace.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Entries of state 0 that were foretold.
    pub polls: u64,
    /// Entries of state 1 that were foretold.
    pub halts: u64,
    /// Halts after a poll that found nothing to do.
    pub timed_out: u64,
    /// Halts after which the window was larger.
    pub grown: u64,
    /// Halts after which it was smaller.
    pub shrunk: u64,
    /// Halts whose residency by the trace's clock explains what the governor did.
    pub exact: u64,
    /// How often cpuidle's counts were compared with the trace's.
    pub counts: u64,
}

/// The trace in the form above, from what the kernel prints.
pub fn compact(kernel_trace: &str) -> String {
    let mut out = String::new();
    for line in tracefs::lines(kernel_trace) {
        let tracefs::Line { at_us, event, text, .. } = line;
        let words: Vec<&str> = text.split([' ', '(', ')', '=']).filter(|w| !w.is_empty()).collect();
        // Writing to a String cannot fail.
        let _ = match (event, words.as_slice()) {
            ("cpu_idle", ["state", "4294967295", ..]) => writeln!(out, "leave {at_us}"),
            ("cpu_idle", ["state", state, ..]) => writeln!(out, "enter {at_us} {state}"),
            ("guest_halt_poll_ns", ["halt_poll_ns", new, how, old]) => {
                writeln!(out, "limit {new} {old} {how}")
            }
            ("tracing_mark_write", ["params" | "counts", ..]) => writeln!(out, "{}", text.trim()),
            _ => Ok(()),
        };
    }
    out
}

/// The time a CPU was in an idle state.
struct Stay {
    state: IdleState,
    entered_us: u64,
    /// Once it has been left.
    micros: Option<u64>,
    /// The window before and after it, if the governor told.
    limit: Option<(u64, u64)>,
}

#[derive(Default)]
struct Replay {
    params: Option<Params>,
    /// From the first time on that the window is known to be 0.
    governor: Option<Governor>,
    stay: Option<Stay>,
    /// Entries of the two states since the last `counts`.
    entered: [u64; 2],
    counted: Option<[u64; 2]>,
    summary: Summary,
}

/// Runs [`Governor`] over a trace and compares each of its choices, windows and counts.
///
/// # Errors
/// The first line where the two differ, or that cannot be read.
pub fn check(trace: &str) -> Result<Summary, String> {
    let mut replay = Replay::default();
    for (number, line) in trace.lines().enumerate() {
        replay.line(line).map_err(|why| format!("line {}: {why}: {line}", number + 1))?;
    }
    Ok(replay.summary)
}

impl Replay {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let mut number = || field::<u64>(&mut words).ok_or_else(|| String::from("no number"));
        match kind {
            "enter" => {
                let entered_us = number()?;
                let state = match number()? {
                    0 => IdleState::Poll,
                    1 => IdleState::Halt,
                    _ => return Err("haltpoll has two states".into()),
                };
                self.enter(state, entered_us)
            }
            "leave" => {
                let left_us = number()?;
                if let Some(stay) = &mut self.stay {
                    stay.micros = Some(left_us.saturating_sub(stay.entered_us));
                }
                Ok(())
            }
            "limit" => {
                let (new_ns, old_ns) = (number()?, number()?);
                match &mut self.stay {
                    Some(stay) if self.governor.is_some() => stay.limit = Some((old_ns, new_ns)),
                    _ => self.synchronise(new_ns),
                }
                Ok(())
            }
            "params" => {
                // A halt that is over went by the old ones. Polls do not go by any.
                if self.stay.as_ref().is_some_and(|stay| stay.state == IdleState::Halt) {
                    self.reflect(None)?;
                }
                let in_32_bits = |value: u64| u32::try_from(value).map_err(|why| why.to_string());
                let params = Params {
                    guest_halt_poll_ns: in_32_bits(number()?)?,
                    guest_halt_poll_grow: in_32_bits(number()?)?,
                    guest_halt_poll_grow_start: in_32_bits(number()?)?,
                    guest_halt_poll_shrink: in_32_bits(number()?)?,
                    guest_halt_poll_allow_shrink: number()? == 1,
                };
                self.params = Some(params);
                if let Some(governor) = &mut self.governor {
                    governor.set_params(params);
                }
                Ok(())
            }
            "counts" => {
                let counted = [number()?, number()?];
                let entered = std::mem::take(&mut self.entered);
                if let Some(before) = self.counted.replace(counted) {
                    let by_cpuidle = [0, 1].map(|state| counted[state].wrapping_sub(before[state]));
                    if by_cpuidle != entered {
                        return Err(format!(
                            "cpuidle counts {by_cpuidle:?}, the trace {entered:?}"
                        ));
                    }
                    self.summary.counts += 1;
                }
                Ok(())
            }
            _ => Err("unknown".into()),
        }
    }

    /// A new governor is one whose window is 0.
    fn synchronise(&mut self, window_ns: u64) {
        if let (0, Some(params)) = (window_ns, self.params) {
            self.governor = Some(Governor::new(params));
            self.stay = None;
        }
    }

    fn enter(&mut self, state: IdleState, entered_us: u64) -> Result<(), String> {
        self.reflect(Some(state))?;
        self.entered[usize::from(state == IdleState::Halt)] += 1;
        if let Some(governor) = &self.governor {
            let foretold = governor.select(u64::MAX);
            if foretold != state {
                return Err(format!("the governor would {foretold:?}"));
            }
            match state {
                IdleState::Poll => self.summary.polls += 1,
                IdleState::Halt => self.summary.halts += 1,
            }
        }
        self.stay = Some(Stay { state, entered_us, micros: None, limit: None });
        Ok(())
    }

    /// Tells the governor how the last idle state went; `next`: the state after it, if that is
    /// known.
    fn reflect(&mut self, next: Option<IdleState>) -> Result<(), String> {
        let Some(stay) = self.stay.take() else { return Ok(()) };
        let Some(governor) = &mut self.governor else { return Ok(()) };
        let micros = stay.micros.ok_or("entered twice")?;
        let limit_ns = governor.poll_limit_ns();
        match stay.state {
            IdleState::Poll => {
                // Whether a poll longer than the limit timed out, or had just found something to
                // do, only the next state tells.
                let longer = (micros + 1) * 1000 > limit_ns;
                let timed_out = longer && next == Some(IdleState::Halt);
                self.summary.timed_out += u64::from(timed_out);
                governor.reflect(Idled::Polled { timed_out });
            }
            IdleState::Halt => {
                let max_ns = self.params.map_or(0, |params| params.guest_halt_poll_ns.into());
                let longest_ns = (micros + 1) * 1000;
                let least_exact_ns = micros.saturating_sub(EXACT_US) * 1000;
                let thresholds = [limit_ns, limit_ns + 1, max_ns, max_ns + 1, 0];
                let residency_ns = [longest_ns, least_exact_ns]
                    .into_iter()
                    .chain(thresholds)
                    .filter(|&ns| ns <= longest_ns)
                    .find(|&residency_ns| {
                        let mut tried = governor.clone();
                        tried.reflect(Idled::Halted { residency_ns });
                        let (before, after) = stay.limit.unwrap_or((limit_ns, limit_ns));
                        (before, after) == (limit_ns, tried.poll_limit_ns())
                    })
                    .ok_or_else(|| {
                        format!("after {micros} us, window {limit_ns} ns, saw {:?}", stay.limit)
                    })?;
                governor.reflect(Idled::Halted { residency_ns });
                self.summary.exact += u64::from(residency_ns >= least_exact_ns);
                self.summary.grown += u64::from(governor.poll_limit_ns() > limit_ns);
                self.summary.shrunk += u64::from(governor.poll_limit_ns() < limit_ns);
            }
        }
        Ok(())
    }
}
