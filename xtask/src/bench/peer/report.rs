//! Medians, ratios to QEMU, and what was reached.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::{median, spread};
use super::plan::{Device, Fio, Kernel, Medium, Monitor, Purpose, Run, Window};

/// One round's runs, in their order.
#[derive(Serialize)]
pub struct Round {
    /// What the monitors call themselves.
    pub versions: BTreeMap<String, String>,
    /// The guests.
    pub runs: Vec<Run>,
}

/// Everything that is compared.
#[derive(Serialize)]
pub struct Summary {
    /// fio, by where the data disk was.
    pub fio: Vec<FioRow>,
    /// Starting.
    pub boots: Vec<BootRow>,
    /// System calls.
    pub syscalls: Vec<SyscallRow>,
    /// What is to be reached.
    pub targets: Vec<Target>,
}

/// Medians of one monitor's fio runs.
#[derive(Clone, Serialize)]
pub struct FioRow {
    pub medium: Medium,
    pub monitor: Monitor,
    pub runs: usize,
    pub iops: f64,
    /// The difference between the best and the worst run, over the median.
    pub iops_spread: f64,
    pub mean_us: f64,
    pub p99_us: f64,
    /// A request.
    pub interrupts: Option<f64>,
    pub kicks: Option<f64>,
    pub exits: Option<f64>,
    pub halts: Option<f64>,
    /// All that KVM injected, the timer's too.
    pub injections: Option<f64>,
    pub vcpu_cpu_us: Option<f64>,
    pub other_cpu_us: Option<f64>,
    /// Beside guest memory.
    pub resident_mib: Option<f64>,
}

/// Medians of one way to boot.
#[derive(Clone, Serialize)]
pub struct BootRow {
    pub monitor: Monitor,
    pub kernel: Kernel,
    pub runs: usize,
    pub exec_to_init_ms: f64,
    /// The difference between the slowest and the fastest, over the median.
    pub spread: f64,
    /// Exits of all kinds, and those for guest memory that was not mapped yet.
    pub exits: Option<f64>,
    pub page_faults: Option<f64>,
    /// CPU time of all threads.
    pub cpu_ms: Option<f64>,
}

/// One monitor's system calls a request, without the vCPU's.
#[derive(Clone, Serialize)]
pub struct SyscallRow {
    pub medium: Medium,
    pub monitor: Monitor,
    pub per_request: f64,
    /// Most frequent first, those above one in a hundred requests.
    pub calls: Vec<(String, f64)>,
}

/// A figure and what it should be.
#[derive(Clone, Serialize)]
pub struct Target {
    pub what: String,
    pub limit: f64,
    /// Whether the limit is the least that will do, or the most.
    pub at_least: bool,
    pub unit: &'static str,
    pub measured: Option<f64>,
}

impl Target {
    fn is_reached(&self) -> Option<bool> {
        let measured = self.measured?;
        Some(if self.at_least { measured >= self.limit } else { measured <= self.limit })
    }

    fn verdict(&self) -> String {
        let (Some(measured), Some(reached)) = (self.measured, self.is_reached()) else {
            return "not measured".into();
        };
        if reached {
            return "reached".into();
        }
        let by = (measured - self.limit).abs();
        format!("MISSED by {by:.3} ({:.1} %)", 100.0 * by / self.limit)
    }
}

/// Puts all rounds together.
pub fn summarise(rounds: &[Round]) -> Summary {
    let runs: Vec<&Run> = rounds.iter().flat_map(|round| &round.runs).collect();
    let fio = fio_rows(&runs);
    let boots = boot_rows(&runs);
    let syscalls = syscall_rows(&runs);
    let targets = targets(&fio, &boots, &syscalls);
    Summary { fio, boots, syscalls, targets }
}

/// The distinct keys of `items`, in the order in which they first come.
fn keys<T, K: PartialEq>(items: &[&T], key: impl Fn(&T) -> K) -> Vec<K> {
    let mut found = Vec::new();
    for item in items {
        let key = key(item);
        if !found.contains(&key) {
            found.push(key);
        }
    }
    found
}

fn of_purpose<'a>(runs: &[&'a Run], purpose: Purpose) -> Vec<&'a Run> {
    runs.iter().copied().filter(|run| run.purpose == purpose).collect()
}

fn fio_rows(runs: &[&Run]) -> Vec<FioRow> {
    let runs = of_purpose(runs, Purpose::Fio);
    let row = |(medium, monitor): (Medium, Monitor)| {
        let own: Vec<&Run> = runs
            .iter()
            .copied()
            .filter(|run| (run.medium, run.monitor) == (medium, monitor))
            .collect();
        let over = |figure: &dyn Fn(&Run) -> Option<f64>| {
            median(own.iter().filter_map(|run| figure(run)).collect())
        };
        let fio = |figure: fn(&Fio) -> f64| {
            over(&move |run: &Run| run.fio.as_ref().map(figure)).unwrap_or(f64::NAN)
        };
        let window = |figure: fn(&Window) -> u64| {
            over(&move |run: &Run| Some(run.per_request(figure(run.window.as_ref()?))? / 1e3))
        };
        // Over the device's own requests: both were read at the same moment.
        let device = |figure: fn(&Device) -> u64| {
            over(&move |run: &Run| {
                let device = run.window.as_ref()?.device?;
                Some(figure(&device) as f64 / device.requests as f64)
            })
        };
        let iops: Vec<f64> = own.iter().filter_map(|run| Some(run.fio.as_ref()?.iops)).collect();
        FioRow {
            medium,
            monitor,
            runs: own.len(),
            iops: fio(|fio| fio.iops),
            iops_spread: spread(&iops),
            mean_us: fio(|fio| fio.lat_ns_mean / 1e3),
            p99_us: fio(|fio| fio.clat_ns_p99 as f64 / 1e3),
            interrupts: device(|device| device.interrupts),
            kicks: device(|device| device.kicks),
            exits: over(&|run| run.kvm_per_request("exits")),
            halts: over(&|run| run.kvm_per_request("halt_exits")),
            injections: over(&|run| run.kvm_per_request("irq_injections")),
            vcpu_cpu_us: window(|window| window.vcpu_cpu_ns),
            other_cpu_us: window(|window| window.other_cpu_ns),
            resident_mib: over(&|run| Some(run.beside_kib? as f64 / 1024.0)),
        }
    };
    keys(&runs, |run| (run.medium, run.monitor)).into_iter().map(row).collect()
}

fn boot_rows(runs: &[&Run]) -> Vec<BootRow> {
    let runs = of_purpose(runs, Purpose::Boot);
    let row = |(monitor, kernel): (Monitor, Kernel)| {
        let own: Vec<&Run> = runs
            .iter()
            .copied()
            .filter(|run| (run.monitor, run.kernel) == (monitor, kernel))
            .collect();
        let times_ms: Vec<f64> = own.iter().map(|run| run.exec_to_init_ns as f64 / 1e6).collect();
        let over = |figure: &dyn Fn(&Window) -> Option<f64>| {
            median(own.iter().filter_map(|run| figure(run.boot.as_ref()?)).collect())
        };
        let count = |name: &str| over(&|boot| boot.kvm.get(name).map(|&count| count as f64));
        BootRow {
            monitor,
            kernel,
            runs: times_ms.len(),
            spread: spread(&times_ms),
            exits: count("exits"),
            page_faults: count("pf_taken"),
            cpu_ms: over(&|boot| Some((boot.vcpu_cpu_ns + boot.other_cpu_ns) as f64 / 1e6)),
            exec_to_init_ms: median(times_ms).unwrap_or(f64::NAN),
        }
    };
    keys(&runs, |run| (run.monitor, run.kernel)).into_iter().map(row).collect()
}

fn syscall_rows(runs: &[&Run]) -> Vec<SyscallRow> {
    let row = |run: &&Run| {
        let mut calls: Vec<(String, f64)> = run
            .syscalls
            .iter()
            .flatten()
            .filter_map(|(name, &count)| Some((name.clone(), run.per_request(count)?)))
            .filter(|(_, per_request)| *per_request >= 0.01)
            .collect();
        calls.sort_by(|a, b| b.1.total_cmp(&a.1));
        let per_request = run.syscalls_per_request()?;
        Some(SyscallRow { medium: run.medium, monitor: run.monitor, per_request, calls })
    };
    of_purpose(runs, Purpose::Syscalls).iter().filter_map(row).collect()
}

/// What Pollux is to reach, as measured with Firecracker and Cloud Hypervisor beside QEMU.
fn targets(fio: &[FioRow], boots: &[BootRow], syscalls: &[SyscallRow]) -> Vec<Target> {
    let boot_ms = |monitor, kernel| {
        let row = boots.iter().find(|row| (row.monitor, row.kernel) == (monitor, kernel));
        row.map(|row| row.exec_to_init_ms)
    };
    let of = |medium, monitor| {
        fio.iter().find(|row: &&FioRow| (row.medium, row.monitor) == (medium, monitor))
    };
    let boot = |what: &str, own, qemu| Target {
        what: format!("exec to init, {what}"),
        limit: 0.68,
        at_least: false,
        unit: "x QEMU's",
        measured: ratio(boot_ms(Monitor::Pollux, own), boot_ms(Monitor::QemuThreads, qemu)),
    };
    // QEMU enters vmlinux through PVH only.
    let mut targets = vec![
        boot("bzImage", Kernel::BzImage, Kernel::BzImage),
        boot("vmlinux", Kernel::Vmlinux, Kernel::Pvh),
    ];
    for medium in keys(&fio.iter().collect::<Vec<_>>(), |row: &FioRow| row.medium) {
        let own = of(medium, Monitor::Pollux);
        let qemu = of(medium, Monitor::QemuThreads);
        let calls = syscalls
            .iter()
            .find(|row| (row.medium, row.monitor) == (medium, Monitor::Pollux))
            .map(|row| row.per_request);
        let mut add = |what: &str, limit, at_least, unit, measured| {
            let what = format!("{what}, {medium}");
            targets.push(Target { what, limit, at_least, unit, measured });
        };
        let iops = ratio(own.map(|row| row.iops), qemu.map(|row| row.iops));
        add("IOPS", 1.6, true, "x QEMU's", iops);
        add("resident beside guest", 4.2, false, "MiB", own.and_then(|row| row.resident_mib));
        add("interrupts", 1.0, false, "a request", own.and_then(|row| row.interrupts));
        add("kicks", 1.0, false, "a request", own.and_then(|row| row.kicks));
        add("exits", 3.3, false, "a request", own.and_then(|row| row.exits));
        add("worker system calls", 4.0, false, "a request", calls);
    }
    targets
}

fn ratio(own: Option<f64>, other: Option<f64>) -> Option<f64> {
    Some(own? / other?)
}

/// Prints all tables.
pub fn print(rounds: &[Round], summary: &Summary, place: &str) {
    println!("\nWhere: {place}. Medians; rounds: {}.", rounds.len());
    for (name, version) in rounds.iter().take(1).flat_map(|round| &round.versions) {
        println!("{name}: {version}");
    }
    print_fio(&summary.fio);
    print_boots(&summary.boots);
    print_syscalls(&summary.syscalls);
    println!("\nTargets");
    for target in &summary.targets {
        let Target { what, limit, at_least, unit, measured } = target;
        let bound = if *at_least { "at least" } else { "at most " };
        let measured = number(*measured, 3);
        println!("  {what:<30} {measured:>7} {unit:<9} ({bound} {limit:.2}): {}", target.verdict());
    }
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.decimals$}"))
}

fn percent(value: f64) -> String {
    format!("{:.0} %", 100.0 * value)
}

/// Prints a table with its columns aligned: the first to the left, the others to the right.
fn print_table(title: &str, head: &[&str], rows: &[Vec<String>]) {
    println!("\n{title}");
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    let width = |column: usize| {
        rows.iter().chain([&head]).filter_map(|row| row.get(column)).map(String::len).max()
    };
    for row in [&head].into_iter().chain(rows) {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = width(column).unwrap_or(0);
            line += &if column == 0 {
                format!("  {cell:<width$}")
            } else {
                format!("  {cell:>width$}")
            };
        }
        println!("{}", line.trim_end());
    }
}

fn print_fio(rows: &[FioRow]) {
    let head = [
        "",
        "runs",
        "IOPS",
        "spread",
        "x QEMU",
        "mean us",
        "p99 us",
        "intr",
        "kicks",
        "exits",
        "halts",
        "injected",
        "vCPU us",
        "other us",
        "beside MiB",
    ];
    for medium in keys(&rows.iter().collect::<Vec<_>>(), |row: &FioRow| row.medium) {
        let of_medium: Vec<&FioRow> = rows.iter().filter(|row| row.medium == medium).collect();
        let qemu = of_medium.iter().find(|row| row.monitor == Monitor::QemuThreads);
        let lines: Vec<Vec<String>> = of_medium
            .iter()
            .map(|row| {
                vec![
                    row.monitor.to_string(),
                    row.runs.to_string(),
                    number(Some(row.iops), 0),
                    percent(row.iops_spread),
                    number(qemu.map(|qemu| row.iops / qemu.iops), 2),
                    number(Some(row.mean_us), 0),
                    number(Some(row.p99_us), 0),
                    number(row.interrupts, 3),
                    number(row.kicks, 3),
                    number(row.exits, 3),
                    number(row.halts, 3),
                    number(row.injections, 3),
                    number(row.vcpu_cpu_us, 0),
                    number(row.other_cpu_us, 0),
                    number(row.resident_mib, 2),
                ]
            })
            .collect();
        let title = format!(
            "fio: 4k randread, psync, QD1, 1 vCPU; data on {medium}; counts and CPU time a request"
        );
        print_table(&title, &head, &lines);
    }
}

fn print_boots(rows: &[BootRow]) {
    let qemu = rows
        .iter()
        .find(|row| (row.monitor, row.kernel) == (Monitor::QemuThreads, Kernel::BzImage));
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                format!("{}, {}", row.monitor, row.kernel),
                row.runs.to_string(),
                number(Some(row.exec_to_init_ms), 0),
                percent(row.spread),
                number(qemu.map(|qemu| row.exec_to_init_ms / qemu.exec_to_init_ms), 2),
                number(row.cpu_ms, 0),
                number(row.exits, 0),
                number(row.page_faults, 0),
            ]
        })
        .collect();
    let head = ["", "runs", "ms", "spread", "x QEMU, bzImage", "CPU ms", "exits", "page faults"];
    print_table("From exec to the guest's first program", &head, &lines);
}

fn print_syscalls(rows: &[SyscallRow]) {
    println!("\nSystem calls a request, all threads but the vCPU's KVM_RUN (ioctl)");
    for row in rows {
        let calls: Vec<String> =
            row.calls.iter().map(|(name, count)| format!("{name} {count:.2}")).collect();
        let (monitor, medium) = (row.monitor, row.medium);
        println!("  {monitor:<13} {medium:<8} {:>5.2}: {}", row.per_request, calls.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(monitor: Monitor, purpose: Purpose, iops: f64, boot_ms: u64) -> Run {
        let pollux = monitor == Monitor::Pollux;
        Run {
            monitor,
            kernel: Kernel::BzImage,
            purpose,
            medium: Medium::Tmpfs,
            exec_to_init_ns: boot_ms * 1_000_000,
            boot: None,
            fio: Some(Fio { error: 0, ios: 1000, iops, lat_ns_mean: 2e6, clat_ns_p99: 3_000_000 }),
            window: Some(Window {
                kvm: [("exits".into(), 3200)].into(),
                vcpu_cpu_ns: 5_000_000,
                other_cpu_ns: 1_000_000,
                device: pollux.then_some(Device { requests: 1010, kicks: 1010, interrupts: 2020 }),
            }),
            beside_kib: Some(4096),
            syscalls: Some([("read".into(), 1000), ("ioctl".into(), 9)].into()),
        }
    }

    fn summary() -> Summary {
        let (pollux, qemu) = (Monitor::Pollux, Monitor::QemuThreads);
        let runs = vec![
            run(pollux, Purpose::Boot, 0.0, 60),
            run(qemu, Purpose::Boot, 0.0, 100),
            run(pollux, Purpose::Fio, 150.0, 1),
            run(qemu, Purpose::Fio, 100.0, 1),
            run(pollux, Purpose::Fio, 170.0, 1),
            run(pollux, Purpose::Syscalls, 10.0, 1),
        ];
        summarise(&[Round { versions: BTreeMap::new(), runs }])
    }

    #[test]
    fn every_target_is_judged_by_medians() {
        let targets = summary().targets;
        let of = |what: &str| targets.iter().find(|target| target.what == what).unwrap();
        assert_eq!(of("IOPS, tmpfs").measured, Some(1.6));
        assert_eq!(of("IOPS, tmpfs").is_reached(), Some(true));
        assert_eq!(of("exec to init, bzImage").measured, Some(0.6));
        assert_eq!(of("resident beside guest, tmpfs").measured, Some(4.0));
        assert_eq!(of("kicks, tmpfs").measured, Some(1.0));
        assert_eq!(of("exits, tmpfs").measured, Some(3.2));
        assert_eq!(of("worker system calls, tmpfs").measured, Some(1.0));
        assert_eq!(of("interrupts, tmpfs").is_reached(), Some(false));
        assert_eq!(of("interrupts, tmpfs").verdict(), "MISSED by 1.000 (100.0 %)");
    }

    #[test]
    fn a_target_nobody_measured_is_not_reached() {
        let targets = summarise(&[]).targets;
        assert!(targets.iter().all(|target| target.is_reached().is_none()));
    }
}
