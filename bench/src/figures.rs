//! What one run came to: the guest's report and the differences between two marks of Pollux's
//! statistics, a request or a second of idling.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::plan::Kind;
use crate::results::Name;

/// The data disk in the statistics.
pub const DATA_DISK: &str = "blk1";

/// The guest's reports of one run, by their word, without `@`.
pub type Reports = BTreeMap<String, Json>;

/// The statistics between two marks of the same name's edge: `NAME-start` and `NAME-end`, the last of each.
struct Between<'a> {
    start: &'a Json,
    end: &'a Json,
}

impl<'a> Between<'a> {
    fn new(document: &'a Json, name: &str) -> Option<Self> {
        let last = |edge: &str| {
            let name = format!("{name}-{edge}");
            document["marks"].as_array()?.iter().rev().find(|mark| mark["name"] == name)
        };
        Some(Self { start: last("start")?, end: last("end")? })
    }

    fn seconds(&self) -> Option<f64> {
        Some((self.end["time_ns"].as_f64()? - self.start["time_ns"].as_f64()?) / 1e9)
    }

    /// How much `of` grew, summed over all elements of `member`. What is not there counts as 0.
    fn sum(&self, member: &str, of: impl Fn(&Json) -> Option<f64>) -> f64 {
        let at = |mark: &Json| -> f64 {
            mark[member].as_array().into_iter().flatten().filter_map(&of).sum()
        };
        at(self.end) - at(self.start)
    }

    /// The same; none if no element has it.
    fn counted(&self, member: &str, of: impl Fn(&Json) -> Option<f64>) -> Option<f64> {
        let elements = self.end[member].as_array()?;
        elements.iter().any(|element| of(element).is_some()).then(|| self.sum(member, of))
    }

    fn vcpu(&self, part: &str, name: &str) -> Option<f64> {
        self.counted("vcpus", |vcpu| vcpu[part][name].as_f64())
    }

    fn queue(&self, name: &str) -> Option<f64> {
        self.counted("queues", |queue| {
            (queue["disk"] == DATA_DISK).then(|| queue[name].as_f64())?
        })
    }

    fn cpu_ns(&self, member: &str) -> Option<f64> {
        self.counted(member, |thread| thread["cpu_ns"].as_f64())
    }
}

/// What a run of Pollux came to. `document`: its statistics after the run.
///
/// # Errors
/// What is missing.
pub fn of_pollux(
    kind: Kind,
    document: &Json,
    reports: &Reports,
) -> Result<BTreeMap<Name, f64>, String> {
    let (mut figures, requests) = of_guest(kind, reports)?;
    let name = word(kind);
    let run = Between::new(document, name).ok_or_else(|| format!("no marks of {name}"))?;
    // Of fio, only the disk knows how many requests there were between the marks.
    let requests = match kind {
        Kind::Fio => run.queue("requests").unwrap_or(0.0),
        Kind::Pipe => requests,
    };
    if requests <= 0.0 {
        return Err("no request was counted".into());
    }
    let mut put = |name: &str, value: Option<f64>| {
        if let Some(value) = value {
            figures.insert(name.to_owned(), value);
        }
    };
    let a_request = |value: Option<f64>| value.map(|value| value / requests);
    if kind == Kind::Fio {
        put("interrupts_per_request", a_request(run.queue("interrupts")));
        put("kicks_per_request", a_request(run.queue("kicks")));
    }
    let exits = |names: &[&str]| {
        run.counted("vcpus", |vcpu| {
            let found = names.iter().filter_map(|&name| vcpu["exits"][name].as_f64());
            vcpu["exits"]["exits"].as_f64().map(|_| found.sum())
        })
    };
    let (all, halt) = (exits(&["exits"]), exits(&["halt_exits"]));
    let (ports, interrupt) = (
        exits(&["io_exits", "mmio_exits"]),
        exits(&["irq_exits", "irq_window_exits", "nmi_window_exits"]),
    );
    let known = [halt, ports, interrupt].into_iter().flatten().sum::<f64>();
    put("exits_per_request", a_request(all));
    put("exits_halt_per_request", a_request(halt));
    put("exits_io_per_request", a_request(ports));
    put("exits_interrupt_per_request", a_request(interrupt));
    put("exits_other_per_request", a_request(all.map(|all| (all - known).max(0.0))));
    put("polled_per_request", a_request(run.vcpu("halt", "halt_successful_poll")));
    put("invalid_per_request", a_request(run.vcpu("halt", "halt_poll_invalid")));
    put("timer_wakes_per_request", a_request(run.vcpu("timer", "wakes")));
    let taken = |member: &str| {
        run.counted(member, |thread| thread["context_switches_involuntary"].as_f64())
    };
    let seconds = run.seconds().filter(|&seconds| seconds > 0.0);
    let preemptions = taken("vcpus").map(|vcpus| vcpus + taken("workers").unwrap_or(0.0));
    put("preemptions_per_s", preemptions.zip(seconds).map(|(taken, seconds)| taken / seconds));
    let (vcpus, workers) = (run.cpu_ns("vcpus"), run.cpu_ns("workers"));
    let micros = |ns: Option<f64>| a_request(ns).map(|ns| ns / 1e3);
    put("vcpu_us_per_request", micros(vcpus));
    put("worker_us_per_request", micros(workers));
    put("host_us_per_request", micros(vcpus.map(|vcpus| vcpus + workers.unwrap_or(0.0))));

    if let Some(idle) = Between::new(document, "idle").filter(|_| reports.contains_key("idle")) {
        let seconds = idle.seconds().filter(|&seconds| seconds > 0.0);
        let a_second = |ns: Option<f64>| Some(ns? / 1e6 / seconds?);
        let (vcpus, workers) = (idle.cpu_ns("vcpus"), idle.cpu_ns("workers"));
        put("idle_vcpu_ms_per_s", a_second(vcpus));
        put("idle_host_ms_per_s", a_second(vcpus.map(|vcpus| vcpus + workers.unwrap_or(0.0))));
        let busy_ns = reports["idle"]["guest_busy_ms"].as_f64().map(|ms| ms * 1e6);
        put("idle_guest_ms_per_s", a_second(busy_ns));
    }
    Ok(figures)
}

/// When the workload ran, from mark to mark: nanoseconds since the VM was assembled.
pub fn span_ns(kind: Kind, document: &Json) -> Option<[u64; 2]> {
    let run = Between::new(document, word(kind))?;
    Some([run.start["time_ns"].as_u64()?, run.end["time_ns"].as_u64()?])
}

/// How many requests a run had.
pub fn requests(kind: Kind, document: &Json, reports: &Reports) -> Option<f64> {
    match kind {
        Kind::Fio => Between::new(document, word(kind))?.queue("requests"),
        Kind::Pipe => reports.get("pipe")?["loops"].as_f64(),
    }
}

/// The word of a workload's report and of its marks.
pub fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Fio => "fio",
        Kind::Pipe => "pipe",
    }
}

/// What the guest says of a run, whoever its monitor is, and how many requests it counted.
///
/// # Errors
/// What is missing.
pub fn of_guest(kind: Kind, reports: &Reports) -> Result<(BTreeMap<Name, f64>, f64), String> {
    let word = word(kind);
    let report = reports.get(word).ok_or_else(|| format!("the guest sent no @{word}"))?;
    let figure = |name: &str| {
        report[name].as_f64().ok_or_else(|| format!("no {name} in the guest's @{word}: {report}"))
    };
    let mut figures = BTreeMap::new();
    let mut put = |name: &str, value: f64| figures.insert(name.to_owned(), value);
    let requests = match kind {
        Kind::Fio => {
            if report["error"].as_f64() != Some(0.0) {
                return Err(format!("fio failed: {report}"));
            }
            put("iops", figure("iops")?);
            put("lat_mean_us", figure("lat_ns_mean")? / 1e3);
            for (name, from) in [
                ("lat_p50_us", "clat_ns_p50"),
                ("lat_p99_us", "clat_ns_p99"),
                ("lat_p999_us", "clat_ns_p999"),
            ] {
                put(name, figure(from)? / 1e3);
            }
            figure("ios")?
        }
        Kind::Pipe => {
            let (loops, seconds) = (figure("loops")?, figure("seconds")?);
            if loops <= 0.0 || seconds <= 0.0 {
                return Err(format!("nothing was measured: {report}"));
            }
            put("iops", loops / seconds);
            put("lat_mean_us", seconds / loops * 1e6);
            if let Some(wakes) = report["wakes_without_ipi"].as_f64() {
                put("ipi_free_per_request", wakes / loops);
            }
            loops
        }
    };
    if requests > 0.0 {
        put("guest_us_per_request", figure("guest_busy_ms")? * 1e3 / requests);
    }
    Ok((figures, requests))
}

/// The latency's distribution as the guest reports it: quantile, microseconds.
pub fn distribution(reports: &Reports) -> Vec<[f64; 2]> {
    let quantiles = reports.get("fio").and_then(|fio| fio["clat_ns_quantiles"].as_array());
    let pair = |pair: &Json| Some([pair[0].as_f64()?, pair[1].as_f64()? / 1e3]);
    quantiles.into_iter().flatten().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn mark(name: &str, n: u32, requests: u32) -> Json {
        json!({
            "name": name, "time_ns": u64::from(n) * 1_000_000_000,
            "vcpus": [{
                "cpu_ns": n * 1_000_000,
                "context_switches_involuntary": n * 3,
                "timer": { "wakes": n * 2 },
                "exits": { "exits": n * 100, "halt_exits": n * 10, "io_exits": n, "mmio_exits": n * 9,
                    "irq_exits": n * 20 },
                "halt": { "halt_successful_poll": n * 5, "halt_poll_invalid": 0 }
            }],
            "queues": [
                { "disk": "blk0", "requests": n * 7, "interrupts": n, "kicks": n },
                { "disk": "blk1", "requests": requests, "interrupts": requests, "kicks": requests / 2 }
            ],
            "workers": [{ "cpu_ns": n * 500_000 }]
        })
    }

    fn fio() -> Json {
        json!({
            "error": 0, "ios": 100, "iops": 50.0, "lat_ns_mean": 20_000.0, "clat_ns_p50": 15_000,
            "clat_ns_p99": 90_000, "clat_ns_p999": 99_000, "guest_busy_ms": 1,
            "clat_ns_quantiles": [[0.5, 15_000], [0.99, 90_000]]
        })
    }

    #[test]
    fn figures_are_differences_between_the_last_marks_a_request() {
        let document = json!({ "marks": [
            mark("fio-start", 1, 1), mark("fio-end", 9, 900),
            mark("fio-start", 10, 1000), mark("fio-end", 12, 1100),
            mark("idle-start", 12, 1100), mark("idle-end", 14, 1100),
        ]});
        let reports = Reports::from([
            ("fio".to_owned(), fio()),
            ("idle".to_owned(), json!({ "guest_busy_ms": 20 })),
        ]);
        let figures = of_pollux(Kind::Fio, &document, &reports).unwrap();
        for (name, expected) in [
            ("iops", 50.0),
            ("lat_mean_us", 20.0),
            ("lat_p99_us", 90.0),
            ("interrupts_per_request", 1.0),
            ("kicks_per_request", 0.5),
            ("exits_per_request", 2.0),
            ("exits_halt_per_request", 0.2),
            ("exits_io_per_request", 0.2),
            ("exits_interrupt_per_request", 0.4),
            ("exits_other_per_request", 1.2),
            ("polled_per_request", 0.1),
            ("timer_wakes_per_request", 0.04),
            ("preemptions_per_s", 3.0),
            ("vcpu_us_per_request", 20.0),
            ("worker_us_per_request", 10.0),
            ("host_us_per_request", 30.0),
            ("guest_us_per_request", 10.0),
            ("idle_vcpu_ms_per_s", 1.0),
            ("idle_host_ms_per_s", 1.5),
            ("idle_guest_ms_per_s", 10.0),
        ] {
            let found = figures.get(name).copied().unwrap_or(f64::NAN);
            assert!((found - expected).abs() < 1e-9, "{name}: {found}");
            assert!(crate::results::FIGURES.iter().any(|figure| figure.name == name), "{name}");
        }
        assert_eq!(distribution(&reports), [[0.5, 15.0], [0.99, 90.0]]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let document = json!({ "marks": [] });
        let error = |reports: &Reports| of_pollux(Kind::Fio, &document, reports).unwrap_err();
        assert!(error(&Reports::new()).contains("@fio"));
        let mut reports = Reports::from([("fio".to_owned(), json!({ "error": 5 }))]);
        assert!(error(&reports).contains("fio failed"));
        reports.insert("fio".into(), json!({ "error": 0 }));
        assert!(error(&reports).contains("no iops"));
        reports.insert("fio".into(), fio());
        assert!(error(&reports).contains("no marks of fio"));
        let document = json!({ "marks": [mark("fio-start", 1, 1), mark("fio-end", 1, 1)] });
        let error = of_pollux(Kind::Fio, &document, &reports).unwrap_err();
        assert!(error.contains("no request"), "{error}");
    }

    /// A KVM without binary statistics counts no exits: then there is no figure, not a 0.
    #[test]
    fn what_a_kvm_does_not_count_is_left_out() {
        let bare = |name: &str, requests: u32| {
            let mut mark = mark(name, 1, requests);
            mark["vcpus"][0]["exits"] = json!({ "userspace_hlt": 4 });
            mark["vcpus"][0]["halt"] = json!({});
            mark
        };
        let document = json!({ "marks": [bare("fio-start", 1), bare("fio-end", 9)] });
        let reports = Reports::from([("fio".to_owned(), fio())]);
        let figures = of_pollux(Kind::Fio, &document, &reports).unwrap();
        assert!(!figures.contains_key("exits_per_request"));
        assert!(!figures.contains_key("polled_per_request"));
        assert!(!figures.contains_key("idle_vcpu_ms_per_s"));
    }
}
