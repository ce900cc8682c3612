//! The example document that the tests of reports, the browser's test and the screenshots are made
//! from: two workloads, a peer, a dominated setting, failed runs, windows and advice. Its figures come
//! from a small model of a wake, not from a machine, and are the same each time.

use std::collections::BTreeMap;

use bench::results::*;
use serde_json::json;

/// A generator of pseudo-random numbers (Steele's SplitMix64).
struct Random(u64);

impl Random {
    /// Between 0 and 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Around 1, within `spread`.
    fn about(&mut self, spread: f64) -> f64 {
        1.0 + spread * (self.unit() + self.unit() - 1.0)
    }
}

/// Four digits are enough.
fn short(value: f64) -> f64 {
    if value == 0.0 {
        return 0.0;
    }
    let unit = 10f64.powf(3.0 - value.abs().log10().floor());
    (value * unit).round() / unit
}

/// A setting: `halt`, `guest-idle`, `halt-poll-ns`.
type Setting = (&'static str, &'static str, u64);

/// What a wake costs in a setting: latency and CPU time, in microseconds.
struct Wake {
    latency: f64,
    burnt: f64,
    hit: f64,
    window: f64,
}

/// A wait of `wait` microseconds.
fn wake((halt, idle, window_ns): Setting, wait: f64) -> Wake {
    let window = window_ns as f64 / 1e3;
    let sleep = if halt == "user" { 21.0 } else { 16.5 };
    let guest_polls = idle == "haltpoll";
    // The guest's driver switches host polling off while it polls itself.
    if guest_polls && wait < 200.0 {
        return Wake { latency: 1.5, burnt: wait * 0.97, hit: 0.0, window: 0.0 };
    }
    let hit = if window == 0.0 || (guest_polls && halt == "kernel") {
        0.0
    } else if window > wait {
        0.94
    } else {
        0.12
    };
    Wake {
        latency: sleep * (1.0 - hit) + if halt == "user" { 1.2 } else { 2.6 } * hit,
        burnt: hit * wait + (1.0 - hit) * window.min(wait) * 0.55 + 2.0,
        hit,
        window,
    }
}

/// The workloads: name, wait in microseconds, the rest of a request's time, settings, line of shell.
const SETTINGS: [Setting; 12] = [
    ("kernel", "halt", 0),
    ("kernel", "halt", 50_000),
    ("kernel", "halt", 200_000),
    ("kernel", "haltpoll", 0),
    ("kernel", "haltpoll", 50_000),
    ("kernel", "haltpoll", 200_000),
    ("user", "halt", 0),
    ("user", "halt", 50_000),
    ("user", "halt", 200_000),
    ("user", "haltpoll", 0),
    ("user", "haltpoll", 50_000),
    ("user", "haltpoll", 200_000),
];

fn run(random: &mut Random, repeat: u32, boot: u32, setting: Setting, disk: bool) -> Run {
    let wait = if disk { 64.0 } else { 9.0 };
    let user = setting.0 == "user";
    let Wake { latency, burnt, hit, .. } = wake(setting, wait);
    let mean = (if disk { wait } else { 2.0 * wait } + latency + if user { 9.0 } else { 6.0 })
        * random.about(0.018);
    // Sleepers have the longer tail.
    let tail = 1.0 + 0.35 * (1.0 - hit) * f64::from(u8::from(latency > 5.0));
    let shape = random.about(0.05);
    let quantiles: [(f64, f64); 17] = [
        (0.01, 0.71),
        (0.05, 0.77),
        (0.1, 0.81),
        (0.2, 0.86),
        (0.3, 0.9),
        (0.4, 0.935),
        (0.5, 0.965),
        (0.6, 1.0),
        (0.7, 1.045),
        (0.8, 1.1),
        (0.9, 1.19),
        (0.95, 1.29),
        (0.975, 1.42),
        (0.99, 1.66),
        (0.995, 1.93),
        (0.998, 2.4),
        (0.999, 2.9),
    ];
    let mut distribution: Vec<[f64; 2]> = quantiles
        .iter()
        .map(|&(q, part)| {
            let part = if part > 1.15 { part.powf(tail * shape) } else { part };
            [q, short(mean * part * random.about(0.01))]
        })
        .collect();
    distribution.sort_by(|a, b| a[1].total_cmp(&b[1]).then(a[0].total_cmp(&b[0])));
    let rising: Vec<f64> = distribution.iter().map(|point| point[1]).collect();
    distribution.sort_by(|a, b| a[0].total_cmp(&b[0]));
    distribution.iter_mut().zip(rising).for_each(|(point, us)| point[1] = us);

    let halts = if latency > 2.0 { 0.97 } else { 0.03 } * random.about(0.03);
    let (io, interrupt, other) = if user { (1.02, 1.9, 0.62) } else { (1.01, 0.11, 0.31) };
    let (io, interrupt, other) = (
        if disk { io } else { 0.02 } * random.about(0.01),
        interrupt * random.about(0.05),
        other * random.about(0.08),
    );
    let worker = if disk { 11.5 * random.about(0.03) } else { 0.0 };
    let vcpu = (13.0 + if user { 7.0 } else { 0.0 } + burnt) * random.about(0.025);
    let guest = 9.0 + if setting.1 == "haltpoll" { burnt } else { 0.0 };
    let mut figures = BTreeMap::from([
        ("iops", 1e6 / mean),
        ("lat_mean_us", mean),
        ("lat_p50_us", distribution[6][1]),
        ("lat_p99_us", distribution[13][1]),
        ("lat_p999_us", distribution[16][1]),
        ("interrupts_per_request", if disk { 1.0 } else { 1.02 }),
        ("exits_per_request", halts + io + interrupt + other),
        ("exits_halt_per_request", halts),
        ("exits_io_per_request", io),
        ("exits_interrupt_per_request", interrupt),
        ("exits_other_per_request", other),
        ("polled_per_request", hit * halts),
        ("invalid_per_request", 0.004 * random.about(0.4)),
        ("vcpu_us_per_request", vcpu),
        ("guest_us_per_request", guest * random.about(0.02)),
        ("host_us_per_request", vcpu + worker + 0.6),
        ("idle_vcpu_ms_per_s", (1.1 + setting.2 as f64 / 45e3) * random.about(0.1)),
        ("idle_host_ms_per_s", (1.5 + setting.2 as f64 / 45e3) * random.about(0.1)),
        (
            "idle_guest_ms_per_s",
            if setting.1 == "haltpoll" { 8.2 } else { 0.7 } * random.about(0.1),
        ),
    ]);
    if disk {
        figures.extend([("kicks_per_request", 1.0), ("worker_us_per_request", worker)]);
    }
    Run {
        repeat,
        boot,
        error: None,
        figures: figures.into_iter().map(|(name, value)| (name.into(), short(value))).collect(),
        latency_us: distribution,
        notes: Vec::new(),
    }
}

fn command((halt, idle, window): Setting) -> Vec<String> {
    let words = format!(
        "pollux run --kernel vmlinuz-6.12 --initrd root.cpio --cpus 1 --memory 512M \
         --disk path=root.img,readonly=on --disk path=data.img --halt {halt} --guest-idle {idle} \
         --halt-poll-ns {window} --stats stats.json"
    );
    words.split_whitespace().map(String::from).collect()
}

fn rows(random: &mut Random, workload: &str, disk: bool, boot: &mut u32) -> Vec<Row> {
    let guest_command = if disk {
        "fio --name=job --filename=/dev/vdb --rw=randread --bs=4k --iodepth=1 --direct=1 \
         --ioengine=psync --time_based --runtime=4 --output-format=json+"
    } else {
        "perf bench sched pipe -l 200000"
    };
    let settings = SETTINGS.iter().filter(|setting| disk || setting.2 != 50_000);
    let mut rows: Vec<Row> = settings
        .enumerate()
        .map(|(index, &setting)| {
            *boot += 1;
            let runs: Vec<Run> =
                (0..5).map(|repeat| run(random, repeat, *boot, setting, disk)).collect();
            let wake = wake(setting, if disk { 64.0 } else { 9.0 });
            let limit = wake.window;
            let mut window: f64 = 0.0;
            let window_us = (0..90).filter(|_| limit > 0.0 && index < 9).map(|step| {
                window = match random.unit() {
                    chance if chance < 0.10 => 0.0,
                    chance if chance < 0.3 => window,
                    _ => (window * 2.0).clamp(10.0, limit),
                };
                [short(f64::from(step) * 0.0451), window]
            });
            Row {
                id: format!("{workload}-{}-{}-{}", setting.0, setting.1, setting.2),
                workload: workload.into(),
                monitor: "pollux".into(),
                setting: BTreeMap::from([
                    ("halt".into(), setting.0.into()),
                    ("guest_idle".into(), setting.1.into()),
                    ("halt_poll_ns".into(), setting.2.to_string()),
                ]),
                command: command(setting),
                guest_command: guest_command.into(),
                skipped: None,
                window_us: window_us.collect(),
                summary: BTreeMap::new(),
                against_base: BTreeMap::new(),
                dominated_by: None,
                runs,
            }
        })
        .collect();
    if disk {
        let mut peer = rows[0].clone();
        peer.id = format!("{workload}-qemu");
        peer.monitor = "qemu".into();
        peer.setting.clear();
        peer.window_us.clear();
        peer.command =
            "qemu-system-x86_64 -M q35,accel=kvm -cpu host -m 512 -nodefaults -nographic \
                        -drive file=data.img,if=none,id=d,format=raw,cache=none,aio=io_uring \
                        -device virtio-blk-pci,drive=d"
                .split_whitespace()
                .map(String::from)
                .collect();
        for run in &mut peer.runs {
            let slower = 1.19 * random.about(0.02);
            for point in &mut run.latency_us {
                point[1] = short(point[1] * slower);
            }
            run.figures.retain(|name, _| {
                ["iops", "lat_", "host_us", "vcpu_us", "exits_per"]
                    .iter()
                    .any(|kept| name.starts_with(kept))
            });
            for (name, value) in &mut run.figures {
                *value =
                    short(if name == "iops" { *value / slower } else { *value * slower * 1.06 });
            }
        }
        rows.push(peer);
    }
    rows
}

/// The document.
pub fn example() -> Results {
    let mut random = Random(11);
    let mut boot = 0;
    let mut all = Vec::new();
    let mut noise = Vec::new();
    for (workload, disk) in [("randread-4k", true), ("pingpong", false)] {
        let mut rows = rows(&mut random, workload, disk, &mut boot);
        if disk {
            let failed = &mut rows[7].runs[3];
            failed.error = Some(
                "the guest said nothing for 30 s; its console ends with: INFO: \
                                 task fio:212 blocked for more than 10 seconds."
                    .into(),
            );
            failed.figures.clear();
            failed.latency_us.clear();
        } else {
            for run in &mut rows[7].runs {
                run.error = Some("pollux ended with status 1: vcpu1: KVM_RUN: Bad address".into());
                run.figures.clear();
                run.latency_us.clear();
            }
        }
        let runs = (0..5).map(|repeat| run(&mut random, repeat, 0, SETTINGS[0], disk)).collect();
        noise.push(Noise { workload: workload.into(), relative: BTreeMap::new(), runs });
        all.extend(rows);
    }
    let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
    let mut results = Results {
        schema: SCHEMA,
        command: words("pollux bench --kernel vmlinuz-6.12 --root root.img --plan halt --peer qemu"),
        version: "0.1.0".into(),
        started: "2026-11-30T09:14:02Z".into(),
        ended: Some("2026-11-30T09:41:37Z".into()),
        plan: "repeats = 5\n\n[[workload]]\nname = \"randread-4k\"\n\n[[workload]]\nname = \"pingpong\"\n\
               kind = \"pipe\"\n\n[[sweep]]\nhalt = [\"kernel\", \"user\"]\n\
               guest_idle = [\"halt\", \"haltpoll\"]\nhalt_poll_ns = [0, \"50us\", \"200us\"]\n"
            .into(),
        name: "halt".into(),
        question: "Who should poll while a request is under way: the guest, the host, or nobody?"
            .into(),
        host: json!({
            "kernel": "6.12.48-amd64", "cpu": "AMD EPYC 9354P 32-Core Processor", "cpus": 8,
            "is_guest": false, "kvm_modules": ["kvm_amd"],
            "kvm_parameters": {"halt_poll_ns": 200000, "halt_poll_ns_grow": 2,
                               "halt_poll_ns_grow_start": 10000, "halt_poll_ns_shrink": 0}}),
        guest: json!({"cpus": 1, "kernel": "6.12.48-cloud-amd64", "cpuidle_driver": "haltpoll",
                      "cpuidle_governor": "haltpoll", "clocksource": "kvm-clock"}),
        rows: all,
        noise,
        advice: vec![
            Advice {
                workload: "randread-4k".into(),
                goal: "balanced".into(),
                row: Some("randread-4k-kernel-haltpoll-0".into()),
                why: "The guest polls: mean latency falls by 17 % and p99 by 30 %, for 3.2 times the host \
                      CPU time a request. Host polling then adds nothing, as the guest switches it off."
                    .into(),
                pollux: words("--halt kernel --guest-idle haltpoll --halt-poll-ns 0"),
                kvm_module: words("halt_poll_ns=0"),
                guest_cmdline: words("cpuidle_haltpoll.force=1 haltpoll.guest_halt_poll_ns=200000"),
            },
            Advice {
                workload: "pingpong".into(),
                goal: "p99<20us".into(),
                row: None,
                why: "No setting reaches it.".into(),
                pollux: Vec::new(),
                kvm_module: Vec::new(),
                guest_cmdline: Vec::new(),
            },
        ],
        notes: vec![
            "The guest had host polling switched off (MSR_KVM_POLL_CONTROL) in every row with guest_idle \
             haltpoll: the host's window did nothing there."
                .into(),
            "With halt_poll_ns 50000 the window is shorter than most waits of randread: 88 % of the polls \
             burnt CPU time and ended in a sleep."
                .into(),
        ],
    };
    bench::analysis::work_out(&mut results);
    let short_all = |interval: &mut Interval| {
        for value in [&mut interval.median, &mut interval.low, &mut interval.high] {
            *value = short(*value);
        }
    };
    for row in &mut results.rows {
        row.summary.values_mut().for_each(short_all);
        row.against_base.values_mut().for_each(|other| other.relative = short(other.relative));
    }
    for noise in &mut results.noise {
        noise.relative.values_mut().for_each(|part| *part = short(*part));
    }
    results
}

/// As it stands in `example.json`: a row a line.
pub fn json(results: &Results) -> String {
    let mut value = serde_json::to_value(results).unwrap();
    let rows = std::mem::take(value["rows"].as_array_mut().unwrap());
    let rows: Vec<String> = rows.iter().map(|row| format!("\n{row}")).collect();
    value.to_string().replacen("\"rows\":[]", &format!("\"rows\":[{}\n]", rows.join(",")), 1) + "\n"
}
