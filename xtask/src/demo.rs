//! `cargo xtask demo`: what polling on either side buys and costs, in one table.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::Value as Json;

use crate::guest;
use crate::lab::Lab;
use crate::measure::{self, between, documents, notes};
use crate::util::{self, Result, command, step};

/// Boot a stock Debian guest in six settings of guest and host polling, and measure each with fio.
#[derive(clap::Args)]
pub struct Args {
    /// Measure for one second a setting instead of four.
    #[arg(long)]
    quick: bool,
}

/// One row of the table.
struct Setting {
    halt: &'static str,
    guest_idle: &'static str,
    halt_poll_ns: u32,
}

const SETTINGS: [Setting; 6] = [
    Setting { halt: "kernel", guest_idle: "halt", halt_poll_ns: 0 },
    Setting { halt: "kernel", guest_idle: "halt", halt_poll_ns: 200_000 },
    Setting { halt: "kernel", guest_idle: "haltpoll", halt_poll_ns: 0 },
    Setting { halt: "kernel", guest_idle: "haltpoll", halt_poll_ns: 200_000 },
    Setting { halt: "user", guest_idle: "halt", halt_poll_ns: 0 },
    Setting { halt: "user", guest_idle: "halt", halt_poll_ns: 200_000 },
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
    let seconds = if args.quick { 1 } else { 4 };
    let documents = documents(&lab, &script(seconds), SETTINGS.len())?;
    let rows = documents.iter().map(Row::new).collect::<Result<Vec<_>>>()?;
    print!("{}", table(&SETTINGS, &rows));
    print!("{}", explanation(&lab, &rows));
    Ok(ExitCode::SUCCESS)
}

/// A shell script that runs every setting; on its output are the statistics, one document a guest.
fn script(seconds: u32) -> String {
    let mut script = format!("{}head -c {DISK_MIB}M /dev/zero >$dir/data\n", measure::SCRIPT_START);
    for (number, setting) in SETTINGS.iter().enumerate() {
        let Setting { halt, guest_idle, halt_poll_ns } = setting;
        let _ = writeln!(
            script,
            "echo '  {}/{}: halt {halt}, guest {guest_idle}, host halt_poll_ns {halt_poll_ns}' >&2\n\
             {pollux} --disk path=$dir/data --halt {halt} --guest-idle {guest_idle} \
             --halt-poll-ns {halt_poll_ns} \
             --cmdline 'quiet pollux.cmd=\"report; fio-measure {seconds}\"'",
            number + 1,
            SETTINGS.len(),
            pollux = measure::stock_guest(),
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
    /// Of the halts, those that ended while the host polled.
    polled: f64,
    vcpu_us: f64,
    worker_us: f64,
    notes: Vec<String>,
}

impl Row {
    fn new(document: &Json) -> Result<Row> {
        let fio = &document["guest"]["fio"][0];
        let figure = |name: &str| fio[name].as_f64();
        let during = |member: &str, of: &dyn Fn(&Json) -> Option<f64>| {
            between(document, ["fio-start", "fio-end"], member, of)
        };
        let queue = |name: &'static str| {
            during("queues", &move |queue| {
                if queue["disk"] == DISK { queue[name].as_f64() } else { Some(0.0) }
            })
        };
        let vcpu = |part: &'static str, name: &'static str| {
            during("vcpus", &move |vcpu| vcpu[part][name].as_f64())
        };
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
                polled: vcpu("halt", "halt_successful_poll")? / requests,
                vcpu_us: during("vcpus", &|vcpu| vcpu["cpu_ns"].as_f64())? / requests / 1e3,
                worker_us: during("workers", &|worker| {
                    let is_disk = worker["name"].as_str()?.starts_with(DISK);
                    if is_disk { worker["cpu_ns"].as_f64() } else { Some(0.0) }
                })? / requests
                    / 1e3,
                notes: notes(document),
            })
        };
        all().ok_or_else(|| measure::missing(document, fio))
    }
}

fn table(settings: &[Setting], rows: &[Row]) -> String {
    let mut text = String::from(
        "\n\
         halt    guest     host                 latency, us       per request, counts                      CPU us per request\n\
         mode    idle      halt_poll_ns   IOPS    mean    p99  interrupts  kicks  exits  halts  polled      vCPU   worker\n",
    );
    for (setting, row) in settings.iter().zip(rows) {
        let _ = writeln!(
            text,
            "{:<7} {:<9} {:>12} {:>6.0} {:>7.0} {:>6.0} {:>11.3} {:>6.3} {:>6.2} {:>6.2} {:>7.2} {:>9.0} {:>8.0}",
            setting.halt,
            setting.guest_idle,
            setting.halt_poll_ns,
            row.iops,
            row.mean_us,
            row.p99_us,
            row.interrupts,
            row.kicks,
            row.exits,
            row.halts,
            row.polled,
            row.vcpu_us,
            row.worker_us
        );
    }
    text
}

/// Where the figures come from, what that means, and what they show.
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
    text.push_str(&findings(&SETTINGS, rows));
    for (setting, row) in SETTINGS.iter().zip(rows) {
        for note in &row.notes {
            let Setting { halt, guest_idle, halt_poll_ns } = setting;
            let _ = writeln!(text, "Halt {halt}, guest {guest_idle}, host {halt_poll_ns}: {note}.");
        }
    }
    text
}

/// One sentence: what each kind of waiting did against the first row, which never polls.
fn findings(settings: &[Setting], rows: &[Row]) -> String {
    let mut parts = Vec::new();
    let Some(base) = rows.first() else { return String::new() };
    for (setting, row) in settings.iter().zip(rows).skip(1) {
        let percent = |now: f64, before: f64| (now / before - 1.0) * 100.0;
        let what = match setting {
            Setting { halt: "kernel", guest_idle: "halt", .. } => "polling in KVM",
            Setting { halt: "kernel", halt_poll_ns: 0, .. } => "polling in the guest",
            Setting { halt: "user", halt_poll_ns: 0, .. } => "halting in Pollux",
            Setting { halt: "user", .. } => "polling in Pollux",
            // The host's part is switched off by the guest's: nothing new.
            _ => continue,
        };
        let mut part = format!(
            "{what} changed mean latency by {:+.0} % and the vCPU's CPU time by {:+.0} %",
            percent(row.mean_us, base.mean_us),
            percent(row.vcpu_us, base.vcpu_us)
        );
        if setting.halt_poll_ns > 0 {
            let _ = write!(
                part,
                " ({:.0} % of its halts ended while polling)",
                row.polled / row.halts * 100.0
            );
        }
        parts.push(part);
    }
    format!("Against the first row, in this one run:\n{}.\n", parts.join(";\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_compare_with_the_row_that_never_polls() {
        let row = |mean_us, polled, vcpu_us| Row {
            iops: 1.0,
            mean_us,
            p99_us: 1.0,
            interrupts: 1.0,
            kicks: 1.0,
            exits: 1.0,
            halts: 0.5,
            polled,
            vcpu_us,
            worker_us: 1.0,
            notes: Vec::new(),
        };
        let rows = [row(100.0, 0.0, 10.0), row(80.0, 0.25, 15.0)];
        let text = findings(&SETTINGS[..2], &rows);
        assert!(text.contains("polling in KVM changed mean latency by -20 %"), "{text}");
        assert!(text.contains("+50 % (50 % of its halts ended while polling)."), "{text}");
    }
}
