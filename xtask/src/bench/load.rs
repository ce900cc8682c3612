//! Whether this machine is idle: beside other work, every monitor is equally slow, and ratios say
//! nothing.

use std::fs;
use std::thread;
use std::time::Duration;

use serde::Serialize;

use crate::util::{Context, Error, Result, bail, step};

/// More than this, in busy CPUs, and the machine is not idle.
const LIMIT: f64 = 0.7;

/// How long CPUs are watched. The load average, which looks back a minute, would still show the
/// build that comes before.
const WINDOW: Duration = Duration::from_secs(4);

/// What other work there is.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Load {
    /// CPUs that were busy, on average over some seconds.
    pub busy_cpus: f64,
    /// The system's own average over one minute.
    pub average_1min: f64,
}

impl Load {
    /// Watches this machine for some seconds.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn watch() -> Result<Load> {
        let before = Ticks::read()?;
        thread::sleep(WINDOW);
        let after = Ticks::read()?;
        let average = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
        let average_1min =
            average.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(f64::NAN);
        Ok(Load { busy_cpus: before.busy_cpus_until(&after), average_1min })
    }

    /// True if what is measured now means something.
    pub fn is_idle(&self) -> bool {
        self.busy_cpus <= LIMIT
    }
}

/// Refuses a machine that has other work, unless `busy` allows it.
///
/// # Errors
/// It has.
pub fn check(busy: bool) -> Result<Load> {
    let load = Load::watch()?;
    if load.is_idle() {
        return Ok(load);
    }
    let Load { busy_cpus, average_1min } = load;
    let found = format!(
        "this machine is not idle: {busy_cpus:.1} CPUs busy (limit {LIMIT}), load average {average_1min}"
    );
    if !busy {
        bail!("{found}; ratios would mean nothing (--busy measures all the same)");
    }
    step(format_args!("WARNING: {found}; THE FIGURES MEAN NOTHING"));
    Ok(load)
}

/// Clock ticks of all CPUs since the machine started.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Ticks {
    busy: u64,
    total: u64,
    cpus: u64,
}

impl Ticks {
    fn read() -> Result<Ticks> {
        let stat = fs::read_to_string("/proc/stat").context("/proc/stat")?;
        Ticks::parse(&stat).ok_or(Error("/proc/stat: not as expected".into()))
    }

    /// The `cpu` line: user, nice, system, idle, iowait, irq, softirq, steal. The last two, guest
    /// times, are in the first two.
    fn parse(stat: &str) -> Option<Ticks> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let fields: Vec<u64> = line
            .split_whitespace()
            .take(8)
            .map(str::parse)
            .collect::<std::result::Result<_, _>>()
            .ok()?;
        let total: u64 = fields.iter().sum();
        let waiting = fields.get(3)? + fields.get(4)?;
        let cpus = stat
            .lines()
            .filter(|line| line.strip_prefix("cpu").is_some_and(|rest| !rest.starts_with(' ')))
            .count() as u64;
        Some(Ticks { busy: total - waiting, total, cpus })
    }

    fn busy_cpus_until(&self, after: &Ticks) -> f64 {
        let total = after.total.saturating_sub(self.total).max(1);
        let busy = after.busy.saturating_sub(self.busy);
        busy as f64 / total as f64 * after.cpus as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_is_neither_idle_nor_waiting() {
        let before =
            Ticks::parse("cpu  10 0 10 100 20 0 0 0 5 0\ncpu0 1\ncpu1 2\nintr 7\n").unwrap();
        assert_eq!(before, Ticks { busy: 20, total: 140, cpus: 2 });
        let after = Ticks { busy: 70, total: 240, cpus: 2 };
        assert!((before.busy_cpus_until(&after) - 1.0).abs() < 1e-9);
        assert_eq!(Ticks::parse("cpu  1 2 x\n"), None);
    }
}
