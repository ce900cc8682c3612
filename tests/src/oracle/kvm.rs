//! The host's policy beside KVM's.
//!
//! A trace is one event a line:
//!
//! ```text
//! params MAX_NS GROW GROW_START_NS SHRINK     the parameters as it starts
//! changing TIME_US NAME VALUE                 a parameter of KVM is being written
//! changed TIME_US                             it has been
//! window VCPU NEW_NS OLD_NS grow|shrink       kvm:kvm_halt_poll_ns, before its halt's line
//! halt VCPU TIME_US poll|wait NS              kvm:kvm_vcpu_wakeup; TIME_US: its end
//! poll-control VCPU 0|1                       the guest wrote MSR_KVM_POLL_CONTROL
//! ```
//!
//! KVM reads the parameters when a halt begins and again when it ends. Which ones it saw cannot
//! be told when they were being written at that time; then either will do, but one of them must
//! give the window that KVM came to.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use halt_poll::{Outcome, Params, Policy, WakeReason};

use super::{field, tracefs};

/// How long after KVM read the clock at a halt's end its event may be in the trace, in µs.
const EVENT_LATENCY_US: u64 = 300;

/// The tracepoints to record, with their filters.
pub const EVENTS: [(&str, &str); 3] = [
    ("kvm/kvm_vcpu_wakeup", ""),
    ("kvm/kvm_halt_poll_ns", ""),
    ("kvm/kvm_msr", "ecx == 0x4b564d05 && write == 1"),
];

/// A change of a parameter while the guest runs, as it stands in the trace.
pub fn changing(name: &str, value: u32) -> String {
    format!("changing {name} {value}")
}

/// The end of that change.
pub const CHANGED: &str = "changed";

/// The trace in the form above. vCPU threads are named `vcpuN`.
///
/// # Panics
/// A wake that KVM calls invalid: there are none on x86.
pub fn compact(params: Params, kernel_trace: &str) -> String {
    let Params { max_ns, grow, grow_start_ns, shrink } = params;
    let mut out = format!("params {max_ns} {grow} {grow_start_ns} {shrink}\n");
    for line in tracefs::lines(kernel_trace) {
        let tracefs::Line { thread, at_us, event, text } = line;
        let vcpu = thread.strip_prefix("vcpu");
        let words: Vec<&str> = text.split([' ', ':', '(', ')']).filter(|w| !w.is_empty()).collect();
        // Writing to a String cannot fail.
        let _ = match (event, vcpu, words.as_slice()) {
            ("kvm_vcpu_wakeup", Some(vcpu), [how, "time", ns, "ns,", "polling", valid]) => {
                assert_eq!(*valid, "valid", "{text}");
                writeln!(out, "halt {vcpu} {at_us} {how} {ns}")
            }
            ("kvm_halt_poll_ns", _, ["vcpu", vcpu, "halt_poll_ns", new, how, old]) => {
                writeln!(out, "window {vcpu} {new} {old} {how}")
            }
            ("kvm_msr", Some(vcpu), ["msr_write", "4b564d05", "=", value]) => {
                let on = u8::from(*value != "0x0");
                writeln!(out, "poll-control {vcpu} {on}")
            }
            ("tracing_mark_write", _, ["changing", name, value]) => {
                writeln!(out, "changing {at_us} {name} {value}")
            }
            ("tracing_mark_write", _, [CHANGED]) => writeln!(out, "changed {at_us}"),
            _ => Ok(()),
        };
    }
    out
}

/// What the halts of a trace were.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// All of them.
    pub halts: u64,
    /// Those after which the window was larger.
    pub grown: u64,
    /// Those after which it was smaller.
    pub shrunk: u64,
    /// Those before which it was cut to a maximum that had become less than it.
    pub cut: u64,
    /// Those that ended while polling.
    pub polled: u64,
    /// Those that the guest did not allow to poll.
    pub forbidden: u64,
    /// Those during which a parameter was written.
    pub during_a_change: u64,
}

/// Parameters over time.
struct History {
    /// From when on which; between the two times, either these or those before.
    changes: Vec<(u64, u64, Params)>,
}

impl History {
    /// The parameters that a reader in this time may have seen.
    fn within(&self, from_us: u64, to_us: u64) -> Vec<Params> {
        // The last change that was over before, and all that were not.
        let over = self.changes.iter().rposition(|&(_, done_us, _)| done_us < from_us).unwrap_or(0);
        let seen = self.changes.iter().skip(over);
        seen.take_while(|&&(begun_us, ..)| begun_us <= to_us).map(|change| change.2).collect()
    }
}

/// One `window` line.
struct Window {
    new_ns: u64,
    old_ns: u64,
}

/// Runs [`Policy`] over a trace's halts and compares its window with KVM's after each.
///
/// # Errors
/// The first line where the two differ, or that cannot be read.
pub fn check(trace: &str) -> Result<Summary, String> {
    let history = history(trace)?;
    let start = history.changes.first().ok_or("no parameters")?.2;
    let mut vcpus: BTreeMap<u32, (Policy, Option<Window>)> = BTreeMap::new();
    let mut summary = Summary::default();
    for (number, line) in trace.lines().enumerate() {
        let at = |what: &str| format!("line {}: {what}: {line}", number + 1);
        let mut words = line.split_whitespace();
        let kind = words.next().ok_or_else(|| at("empty"))?;
        if matches!(kind, "params" | "changing" | "changed") {
            continue;
        }
        let vcpu = field(&mut words).ok_or_else(|| at("which vCPU"))?;
        let (policy, window) = vcpus.entry(vcpu).or_insert_with(|| (Policy::new(start), None));
        match kind {
            "window" => {
                let seen = field(&mut words).zip(field(&mut words));
                let (new_ns, old_ns) = seen.ok_or_else(|| at("no window"))?;
                *window = Some(Window { new_ns, old_ns });
            }
            "poll-control" => {
                let on: u8 = field(&mut words).ok_or_else(|| at("no value"))?;
                policy.set_poll_allowed(on == 1);
            }
            "halt" => {
                let end_us: u64 = field(&mut words).ok_or_else(|| at("no time"))?;
                let polled = words.next() == Some("poll");
                let halt_ns: u64 = field(&mut words).ok_or_else(|| at("no duration"))?;
                let start_us = end_us.saturating_sub(halt_ns.div_ceil(1000));
                let at_start = history
                    .within(start_us.saturating_sub(EVENT_LATENCY_US), start_us.saturating_add(1));
                let at_end = history.within(end_us.saturating_sub(EVENT_LATENCY_US), end_us);
                let window = window.take();
                let next = at_start
                    .iter()
                    .flat_map(|start| at_end.iter().map(move |end| (*start, *end)))
                    .find_map(|(start, end)| halted(policy, start, end, halt_ns, window.as_ref()));
                let before_ns = policy.uncut_window_ns();
                *policy = next.ok_or_else(|| {
                    at(&format!(
                        "KVM's window is not the policy's, which was {before_ns} ns before"
                    ))
                })?;
                let after_ns = policy.uncut_window_ns();
                summary.halts += 1;
                summary.polled += u64::from(polled);
                summary.forbidden += u64::from(!policy.poll_allowed());
                summary.during_a_change += u64::from(at_start.len() + at_end.len() > 2);
                if let Some(Window { new_ns, old_ns }) = window {
                    summary.grown += u64::from(new_ns > old_ns);
                    summary.shrunk += u64::from(new_ns < old_ns);
                    summary.cut += u64::from(old_ns < before_ns);
                } else {
                    summary.cut += u64::from(after_ns < before_ns);
                }
            }
            _ => return Err(at("unknown")),
        }
    }
    Ok(summary)
}

/// What `policy` becomes by a halt that began and ended under these parameters, if that is what
/// KVM came to as well. KVM tells its window only when it grows or shrinks it: when it does not,
/// it may have cut it.
fn halted(
    policy: &Policy,
    start: Params,
    end: Params,
    halt_ns: u64,
    seen: Option<&Window>,
) -> Option<Policy> {
    let mut policy = policy.clone();
    policy.set_params(start);
    policy.window_ns();
    let old_ns = policy.uncut_window_ns();
    policy.set_params(end);
    policy.update(&Outcome {
        polled_ns: None,
        blocked_ns: Some(halt_ns),
        wake: WakeReason::Event,
        valid: true,
    });
    let new_ns = policy.uncut_window_ns();
    let agrees = match seen {
        Some(window) => (window.old_ns, window.new_ns) == (old_ns, new_ns),
        None => new_ns == old_ns || (end.max_ns == 0 && new_ns == 0),
    };
    agrees.then_some(policy)
}

fn history(trace: &str) -> Result<History, String> {
    let mut changes = Vec::new();
    let mut pending: Option<(u64, Params)> = None;
    for line in trace.lines() {
        let mut words = line.split_whitespace();
        let kind = words.next();
        let mut number = || field::<u64>(&mut words).ok_or_else(|| format!("no number: {line}"));
        let in_32_bits = |value: u64| u32::try_from(value).map_err(|_| format!("too much: {line}"));
        match kind {
            Some("params") => {
                let params = Params {
                    max_ns: in_32_bits(number()?)?,
                    grow: in_32_bits(number()?)?,
                    grow_start_ns: in_32_bits(number()?)?,
                    shrink: in_32_bits(number()?)?,
                };
                changes.push((0, 0, params));
            }
            Some("changing") => {
                let begun_us = number()?;
                let name = words.next().ok_or_else(|| format!("no name: {line}"))?;
                let value = field(&mut words).ok_or_else(|| format!("no value: {line}"))?;
                let mut params = changes.last().ok_or("no parameters to change")?.2;
                *match name {
                    "halt_poll_ns" => &mut params.max_ns,
                    "halt_poll_ns_grow" => &mut params.grow,
                    "halt_poll_ns_grow_start" => &mut params.grow_start_ns,
                    "halt_poll_ns_shrink" => &mut params.shrink,
                    _ => return Err(format!("no parameter: {line}")),
                } = value;
                pending = Some((begun_us, params));
            }
            Some("changed") => {
                let (begun_us, params) = pending.take().ok_or("what has changed?")?;
                changes.push((begun_us, number()?, params));
            }
            _ => {}
        }
    }
    Ok(History { changes })
}
