//! `cargo xtask demo`: what polling on either side buys and costs, in one table.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::Value as Json;

use crate::guest;
use crate::lab::{self, Lab, Options, Stream};
use crate::util::{self, Context, Error, Result, bail, command, step};

/// Boot a stock Debian guest in four settings of guest and host polling, and measure each with fio.
#[derive(clap::Args)]
pub struct Args {
    /// Measure for one second a setting instead of four.
    #[arg(long)]
    quick: bool,
}

/// One row of the table.
struct Setting {
    guest_idle: &'static str,
    halt_poll_ns: u32,
}

const SETTINGS: [Setting; 4] = [
    Setting { guest_idle: "halt", halt_poll_ns: 0 },
    Setting { guest_idle: "halt", halt_poll_ns: 200_000 },
    Setting { guest_idle: "haltpoll", halt_poll_ns: 0 },
    Setting { guest_idle: "haltpoll", halt_poll_ns: 200_000 },
];

/// Megabytes of the disk that fio reads.
const DISK_MIB: u32 = 64;
/// The disk that fio reads, and its queue.
const DISK: &str = "blk1";

/// `cargo xtask demo`.
///
/// # Errors
/// Something cannot be built or made, or a guest did not do what it should.
pub fn run(args: &Args) -> Result<ExitCode> {
    step("building pollux (release)");
    util::run(
        command("cargo")
            .args(["build", "--quiet", "--release", "--package", "vmm"])
            .current_dir(util::workspace_root()),
    )?;
    guest::make(false)?;
    let lab = Lab::open(false)?;
    step(format_args!("running {} guests on {}", SETTINGS.len(), lab.place()));
    let documents = measure(&lab, if args.quick { 1 } else { 4 })?;
    let rows = documents.iter().map(Row::new).collect::<Result<Vec<_>>>()?;
    print!("{}", table(&SETTINGS, &rows));
    print!("{}", explanation(&lab, &rows));
    Ok(ExitCode::SUCCESS)
}

/// Runs all settings, one after the other in one place, and gives the statistics of each.
fn measure(lab: &Lab, seconds: u32) -> Result<Vec<Json>> {
    let script = script(seconds);
    let shell: Vec<OsString> = ["sh", "-ec", &script].map(OsString::from).to_vec();
    let mut documents = Vec::new();
    let options = Options { scratch_mib: 0, ..Options::default() };
    let (outcome, _) = lab.run(&options, &shell, &mut |stream, bytes| match stream {
        Stream::Out => documents.extend_from_slice(bytes),
        Stream::Err => eprint!("{}", String::from_utf8_lossy(bytes)),
    })?;
    if outcome != lab::Outcome::Exited(0) {
        bail!("the guests did not run: {outcome:?}");
    }
    let documents = serde_json::Deserializer::from_slice(&documents)
        .into_iter::<Json>()
        .collect::<std::result::Result<Vec<_>, _>>()
        .context("the statistics of pollux")?;
    if documents.len() != SETTINGS.len() {
        bail!("{} guests reported, not {}", documents.len(), SETTINGS.len());
    }
    Ok(documents)
}

/// A shell script that runs every setting; on its output are the statistics, one document a guest.
fn script(seconds: u32) -> String {
    let pollux = util::target_dir().join("release/pollux");
    let guest = util::guest_dir();
    let mut script = format!(
        "dir=$(mktemp -d); trap 'rm -rf $dir' EXIT\n\
         head -c {DISK_MIB}M /dev/zero >$dir/data\n"
    );
    for (number, setting) in SETTINGS.iter().enumerate() {
        let Setting { guest_idle, halt_poll_ns } = setting;
        let _ = write!(
            script,
            "echo '  {}/{}: guest {guest_idle}, host halt_poll_ns {halt_poll_ns}' >&2\n\
             '{pollux}' run --kernel '{guest}/vmlinuz-6.12' --initrd '{guest}/initrd-6.12.img' \
             --disk 'path={guest}/rootfs.ext4,readonly=on' --disk path=$dir/data --console off \
             --guest-idle {guest_idle} --halt-poll-ns {halt_poll_ns} --results $dir/results --stats - \
             --cmdline 'quiet pollux.cmd=\"report; fio-measure {seconds}\"'\n",
            number + 1,
            SETTINGS.len(),
            pollux = pollux.display(),
            guest = guest.display(),
        );
    }
    script
}

/// What one guest did between fio's start and its end, a request where that makes sense.
struct Row {
    iops: f64,
    mean_us: f64,
    p99_us: f64,
    interrupts: f64,
    kicks: f64,
    exits: f64,
    halts: f64,
    vcpu_us: f64,
    worker_us: f64,
    notes: Vec<String>,
}

impl Row {
    fn new(document: &Json) -> Result<Row> {
        let fio = &document["guest"]["fio"][0];
        let figure = |name: &str| fio[name].as_f64();
        let during = |member: &str, of: &dyn Fn(&Json) -> Option<f64>| {
            let at = |mark: &str| {
                let marks = document["marks"].as_array()?;
                let mark = marks.iter().find(|found| found["name"] == mark)?;
                mark[member].as_array()?.iter().map(of).sum::<Option<f64>>()
            };
            Some(at("fio-end")? - at("fio-start")?)
        };
        let queue = |name: &'static str| {
            during("queues", &move |queue| {
                if queue["disk"] == DISK { queue[name].as_f64() } else { Some(0.0) }
            })
        };
        let vcpu = |part: &'static str, name: &'static str| {
            during("vcpus", &move |vcpu| vcpu[part][name].as_f64())
        };
        let note = |note: &Json| note.as_str().map(str::to_owned);
        let all = || {
            let requests = queue("requests").filter(|&requests| requests > 0.0)?;
            Some(Row {
                iops: figure("iops")?,
                mean_us: figure("lat_ns_mean")? / 1e3,
                p99_us: figure("clat_ns_p99")? / 1e3,
                interrupts: queue("interrupts")? / requests,
                kicks: queue("kicks")? / requests,
                exits: vcpu("exits", "exits")? / requests,
                halts: vcpu("exits", "halt_exits")? / requests,
                vcpu_us: during("vcpus", &|vcpu| vcpu["cpu_ns"].as_f64())? / requests / 1e3,
                worker_us: during("workers", &|worker| {
                    let is_disk = worker["name"].as_str()?.starts_with(DISK);
                    if is_disk { worker["cpu_ns"].as_f64() } else { Some(0.0) }
                })? / requests
                    / 1e3,
                notes: document["notes"].as_array()?.iter().filter_map(note).collect(),
            })
        };
        let missing = || {
            Error(format!(
                "a guest did not report its figures: end {}, its command's exit status {}, fio {fio}",
                document["end"], document["guest_exit_status"]
            ))
        };
        all().ok_or_else(missing)
    }
}

fn table(settings: &[Setting], rows: &[Row]) -> String {
    let mut text = String::from(
        "\n\
         guest      host                  latency, us       per request, counts               CPU us per request\n\
         idle       halt_poll_ns    IOPS    mean     p99  interrupts  kicks  exits  halts      vCPU   worker\n",
    );
    for (setting, row) in settings.iter().zip(rows) {
        let _ = writeln!(
            text,
            "{:<10} {:>12} {:>7.0} {:>7.0} {:>7.0} {:>11.3} {:>6.3} {:>6.2} {:>6.2} {:>9.0} {:>8.0}",
            setting.guest_idle,
            setting.halt_poll_ns,
            row.iops,
            row.mean_us,
            row.p99_us,
            row.interrupts,
            row.kicks,
            row.exits,
            row.halts,
            row.vcpu_us,
            row.worker_us
        );
    }
    text
}

/// Where the figures come from, and what that means.
fn explanation(lab: &Lab, rows: &[Row]) -> String {
    let mut text = format!(
        "\n4 KiB random reads, one at a time (fio, psync), of a disk in the host's page cache; Debian's \
         6.12 kernel, 1 vCPU.\nRan on {}: ",
        lab.place()
    );
    text.push_str(match lab {
        Lab::Here => "times are this machine's own; repeat them before you believe a difference.\n",
        Lab::Emulated(_) => {
            "its CPU is emulated, so times are no machine's, and only ratios within this table \
             mean\nsomething. Interrupts and kicks per request are what they would be anywhere; exits and halts come close, for\ntimer interrupts go with time.\n"
        }
    });
    for (setting, row) in SETTINGS.iter().zip(rows) {
        for note in &row.notes {
            let Setting { guest_idle, halt_poll_ns } = setting;
            let _ = writeln!(text, "Guest {guest_idle}, host {halt_poll_ns}: {note}.");
        }
    }
    text
}
