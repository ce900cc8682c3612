//! What a thread of this process cost the host, from /proc/self/task (Linux
//! `Documentation/filesystems/proc.rst`).

use std::{fs, io};

use serde::Serialize;

/// CPU time and context switches of one thread since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ThreadCost {
    /// Time on a CPU, in nanoseconds (`schedstat`; exact).
    pub cpu_ns: u64,
    /// Of it in user mode, guest mode included, in nanoseconds (`stat`; in steps of a clock tick).
    pub cpu_user_ns: u64,
    /// Of it in the kernel, in nanoseconds (`stat`; in steps of a clock tick).
    pub cpu_system_ns: u64,
    /// Times the thread gave the CPU up.
    pub context_switches_voluntary: u64,
    /// Times the CPU was taken from it.
    pub context_switches_involuntary: u64,
}

/// Reads the cost of thread `tid` so far.
///
/// # Errors
/// The thread has ended.
pub fn cost_of(tid: i32) -> io::Result<ThreadCost> {
    let read = |file: &str| fs::read_to_string(format!("/proc/self/task/{tid}/{file}"));
    let (user_ticks, system_ticks) = parse_stat(&read("stat")?).unwrap_or_default();
    let status = read("status")?;
    // SAFETY: no memory is involved.
    let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    let ns = |ticks: u64| ticks.saturating_mul(1_000_000_000 / ticks_per_second);
    Ok(ThreadCost {
        cpu_ns: read("schedstat")?.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0),
        cpu_user_ns: ns(user_ticks),
        cpu_system_ns: ns(system_ticks),
        context_switches_voluntary: status_field(&status, "voluntary_ctxt_switches"),
        context_switches_involuntary: status_field(&status, "nonvoluntary_ctxt_switches"),
    })
}

/// Fields 14 and 15 of `stat`, counted after the name, which may hold blanks.
fn parse_stat(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn status_field(status: &str, name: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_past_a_name_with_blanks_and_brackets() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 42 17 0 0 20 0 1 0 5 0 0";
        assert_eq!(parse_stat(stat), Some((42, 17)));
    }

    #[test]
    fn this_threads_cost_is_known_and_grows_with_work() {
        // SAFETY: no memory is involved.
        let tid = unsafe { libc::gettid() };
        let before = cost_of(tid).unwrap();
        let mut sum = 0u64;
        while cost_of(tid).unwrap().cpu_ns == before.cpu_ns {
            sum = (0..100_000u64).fold(sum, |sum, n| std::hint::black_box(sum ^ n));
        }
        assert!(cost_of(tid).unwrap().cpu_ns > before.cpu_ns);
    }
}
