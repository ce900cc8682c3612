//! Other monitors, where they are installed: the same guest, disk and workload, as further rows.
//!
//! Their guests are not told anything while they run: each run is a boot whose command line has all
//! steps, and whose console comes back on the monitor's standard output. What the monitor costs is read
//! from its threads when the guest says that the measured time begins and ends.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::Error;
use crate::figures::{self, Reports};
use crate::guest::{Failure, PATIENCE, report};
use crate::lines::{Interrupt, Lines, Waited};
use crate::plan::{Measure, Workload};
use crate::results::Run;
use crate::setting::Setting;
use crate::subject::{Machine, steps};

/// The guest's command line, before what the workload adds. `pollux.results` has marks go to the console.
const COMMAND_LINE: &str = "console=ttyS0 reboot=k panic=-1 quiet pollux.results=/dev/ttyS0";

/// A kind of monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Qemu,
    CloudHypervisor,
    Firecracker,
}

/// A monitor, and how its disks are read where there is a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    kind: Kind,
    program: String,
    engine: Option<&'static str>,
}

impl Peer {
    /// The rows that `NAME` or `NAME=PATH` asks for.
    ///
    /// # Errors
    /// There is no such monitor, or not in this place.
    pub fn parse(text: &str) -> Result<Vec<Self>, Error> {
        let (name, path) =
            text.split_once('=').map_or((text, None), |(name, path)| (name, Some(path)));
        let wrong = |why: &str| Error::Usage(format!("--peer {text}: {why}"));
        let (kind, default, engines): (_, _, &[_]) = match name {
            "qemu" => (Kind::Qemu, "qemu-system-x86_64", &[Some("threads"), Some("io_uring")]),
            "cloud-hypervisor" => (Kind::CloudHypervisor, "cloud-hypervisor", &[None]),
            "firecracker" => (Kind::Firecracker, "firecracker", &[Some("Sync"), Some("Async")]),
            _ => return Err(wrong("not a monitor (use qemu, cloud-hypervisor or firecracker)")),
        };
        let program = path.unwrap_or(default).to_owned();
        Command::new(&program)
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(|why| wrong(&format!("{program} does not start: {why} (use {name}=PATH)")))?;
        let of = |&engine| Self { kind, program: program.clone(), engine };
        Ok(engines.iter().map(of).collect())
    }

    /// As in the results.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Qemu => "qemu",
            Kind::CloudHypervisor => "cloud-hypervisor",
            Kind::Firecracker => "firecracker",
        }
    }

    /// What is set of it.
    pub fn setting(&self) -> Setting {
        let name = if self.kind == Kind::Qemu { "aio" } else { "io_engine" };
        Setting(
            self.engine.map(|engine| (name.to_owned(), engine.to_owned())).into_iter().collect(),
        )
    }

    /// The command, and a file that it reads, if it does. `idle`: how the guest is to idle, as words of
    /// its kernel's command line.
    pub fn command(
        &self,
        machine: &Machine,
        workload: &Workload,
        measure: &Measure,
        idle: &[String],
        dir: &Path,
    ) -> (Vec<String>, Option<(String, String)>) {
        let guest = format!("report; {}", steps(workload, measure).join("; "));
        let mut line = COMMAND_LINE.to_owned();
        for word in idle {
            line = format!("{line} {word}");
        }
        let line = format!("{line} pollux.cmd=\"{guest}\"");
        match self.kind {
            Kind::Qemu => (self.qemu(machine, workload, measure, &line), None),
            Kind::CloudHypervisor => {
                (self.cloud_hypervisor(machine, workload, measure, &line), None)
            }
            Kind::Firecracker => {
                let path = dir.join("firecracker.json").display().to_string();
                let words = [&self.program, "--no-api", "--enable-pci", "--config-file", &path];
                let file = self.firecracker(machine, workload, measure, &line);
                (words.map(str::to_owned).to_vec(), Some((path, file)))
            }
        }
    }

    fn qemu(
        &self,
        machine: &Machine,
        workload: &Workload,
        measure: &Measure,
        line: &str,
    ) -> Vec<String> {
        let aio = self.engine.unwrap_or("threads");
        let file = |path: &Path| path.display().to_string().replace(',', ",,");
        let mut words: Vec<String> =
            ["-M", "q35", "-enable-kvm", "-cpu", "host", "-nodefaults", "-nographic", "-no-reboot"]
                .map(str::to_owned)
                .to_vec();
        let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
        add("-name", "bench,debug-threads=on".into());
        add("-smp", workload.cpus.to_string());
        add("-m", measure.memory.clone());
        add("-kernel", machine.kernel.display().to_string());
        if let Some(initrd) = &machine.initrd {
            add("-initrd", initrd.display().to_string());
        }
        add("-append", line.to_owned());
        add("-serial", "stdio".into());
        add("-object", "iothread,id=io".into());
        add(
            "-drive",
            format!("if=none,id=root,format=raw,readonly=on,file={}", file(&machine.root)),
        );
        add("-device", "virtio-blk-pci,drive=root,iothread=io,disable-legacy=on".into());
        add("-drive", format!("if=none,id=data,format=raw,aio={aio},file={}", file(&machine.data)));
        add(
            "-device",
            format!(
                "virtio-blk-pci,drive=data,iothread=io,disable-legacy=on,num-queues={}",
                workload.queues
            ),
        );
        words.insert(0, self.program.clone());
        words
    }

    fn cloud_hypervisor(
        &self,
        machine: &Machine,
        workload: &Workload,
        measure: &Measure,
        line: &str,
    ) -> Vec<String> {
        let mut words = vec![self.program.clone()];
        let mut add = |option: &str, values: &[String]| {
            words.push(option.to_owned());
            words.extend_from_slice(values);
        };
        add("--cpus", &[format!("boot={}", workload.cpus)]);
        add("--memory", &[format!("size={}", measure.memory)]);
        add("--kernel", &[machine.kernel.display().to_string()]);
        if let Some(initrd) = &machine.initrd {
            add("--initramfs", &[initrd.display().to_string()]);
        }
        add("--cmdline", &[line.to_owned()]);
        add(
            "--disk",
            &[
                format!("path={},readonly=on", machine.root.display()),
                format!("path={},num_queues={}", machine.data.display(), workload.queues),
            ],
        );
        add("--serial", &["file=/dev/stdout".into()]);
        add("--console", &["off".into()]);
        words
    }

    fn firecracker(
        &self,
        machine: &Machine,
        workload: &Workload,
        measure: &Measure,
        line: &str,
    ) -> String {
        let drive = |name: &str, path: &Path, read_only: bool| {
            json!({
                "drive_id": name,
                "path_on_host": path.display().to_string(),
                "is_root_device": false,
                "is_read_only": read_only,
                "io_engine": self.engine,
            })
        };
        let document = json!({
            "boot-source": {
                "kernel_image_path": machine.kernel.display().to_string(),
                "initrd_path": machine.initrd.as_ref().map(|initrd| initrd.display().to_string()),
                "boot_args": line,
            },
            "drives": [drive("root", &machine.root, true), drive("data", &machine.data, false)],
            "machine-config": {
                "vcpu_count": workload.cpus,
                "mem_size_mib": mebibytes(&measure.memory),
            },
        });
        format!("{document:#}\n")
    }

    /// One run: of that repeat, in that boot.
    ///
    /// # Errors
    /// The monitor or its guest did not do what it should.
    pub fn run(
        &self,
        machine: &Machine,
        workload: &Workload,
        measure: &Measure,
        idle: &[String],
        [repeat, boot]: [u32; 2],
        interrupt: &Interrupt,
    ) -> Result<Run, Failure> {
        let dir = tempfile::tempdir().map_err(|why| format!("no directory for files: {why}"))?;
        let (words, file) = self.command(machine, workload, measure, idle, dir.path());
        if let Some((path, text)) = file {
            fs::write(&path, text).map_err(|why| format!("{path}: {why}"))?;
        }
        let said = dir.path().join("stderr");
        let stderr = fs::File::create(&said).map_err(|why| format!("{}: {why}", said.display()))?;
        let (program, rest) = words.split_first().ok_or_else(|| "no program".to_owned())?;
        let child = Command::new(program)
            .args(rest)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|why| format!("{program} does not start: {why}"))?;
        let mut child = Ended(child);
        let Some(stdout) = child.0.stdout.take() else { return Err("no output".to_owned().into()) };
        let seconds = workload.seconds(measure) + measure.warmup_seconds + measure.idle_seconds;
        let deadline = Instant::now() + 2 * PATIENCE + Duration::from_secs_f64(seconds);
        let watched = watch(&Lines::new(stdout), child.0.id(), deadline, interrupt);
        let Watched { reports, cpu } = watched.map_err(|failure| match failure {
            Failure::Failed(why) => {
                let text = fs::read_to_string(&said).unwrap_or_default();
                let last = text.lines().last().unwrap_or_default();
                Failure::Failed(format!("{}: {why}: {last}", self.name()))
            }
            interrupted => interrupted,
        })?;
        let (mut figures, requests) = figures::of_guest(workload.kind, &reports)?;
        if let Some([start, end]) = cpu.get(figures::word(workload.kind)) {
            let micros = |of: fn(&Cpu) -> u64| {
                of(end).saturating_sub(of(start)) as f64 / 1e3 / requests.max(1.0)
            };
            figures.insert("host_us_per_request".into(), micros(|cpu| cpu.all_ns));
            figures.insert("vcpu_us_per_request".into(), micros(|cpu| cpu.vcpus_ns));
        }
        if let Some([start, end]) = cpu.get("idle") {
            let seconds = end.at.duration_since(start.at).as_secs_f64();
            let millis = |of: fn(&Cpu) -> u64| {
                of(end).saturating_sub(of(start)) as f64 / 1e6 / seconds.max(1e-3)
            };
            figures.insert("idle_host_ms_per_s".into(), millis(|cpu| cpu.all_ns));
            figures.insert("idle_vcpu_ms_per_s".into(), millis(|cpu| cpu.vcpus_ns));
        }
        let latency_us = figures::distribution(&reports);
        Ok(Run { repeat, boot, error: None, figures, latency_us, notes: Vec::new() })
    }
}

/// Ends with what it stands for.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a monitor's threads have used.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    at: Instant,
    all_ns: u64,
    vcpus_ns: u64,
}

impl Cpu {
    fn of(pid: u32) -> Self {
        let mut cpu = Self { at: Instant::now(), all_ns: 0, vcpus_ns: 0 };
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let text = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let used = text("schedstat").split_whitespace().next().and_then(|ns| ns.parse().ok());
            let used: u64 = used.unwrap_or(0);
            cpu.all_ns = cpu.all_ns.saturating_add(used);
            let name = text("comm").to_ascii_lowercase();
            if name.starts_with("cpu ") || name.contains("vcpu") {
                cpu.vcpus_ns = cpu.vcpus_ns.saturating_add(used);
            }
        }
        cpu
    }
}

/// What came of a run: the guest's last reports, and what was used at the last marks, by their name.
struct Watched {
    reports: Reports,
    cpu: std::collections::BTreeMap<String, [Cpu; 2]>,
}

/// Follows the guest's console to the end of its command.
fn watch(
    lines: &Lines,
    pid: u32,
    deadline: Instant,
    interrupt: &Interrupt,
) -> Result<Watched, Failure> {
    let mut watched = Watched { reports: Reports::new(), cpu: Default::default() };
    let mut started = std::collections::BTreeMap::new();
    loop {
        let line = match lines.next(deadline, interrupt) {
            Waited::Line(line) => line,
            Waited::Interrupted => return Err(Failure::Interrupted),
            Waited::End => return Err("it ended before its guest's command did".to_owned().into()),
            Waited::TimedOut => return Err("its guest's command does not end".to_owned().into()),
        };
        if let Some(status) = line.strip_prefix("@exit ") {
            return match status.trim() {
                "0" => Ok(watched),
                status => Err(format!("its guest's command ended with status {status}").into()),
            };
        }
        if let Some(name) = line.strip_prefix("@mark ") {
            if let Some(name) = name.strip_suffix("-start") {
                started.insert(name.to_owned(), Cpu::of(pid));
            } else if let Some(name) = name.strip_suffix("-end")
                && let Some(start) = started.remove(name)
            {
                watched.cpu.insert(name.to_owned(), [start, Cpu::of(pid)]);
            }
        } else if let Some((word, report)) = report(&line) {
            watched.reports.insert(word.to_owned(), report);
        }
    }
}

/// A size as `--memory` takes it, in MiB.
fn mebibytes(text: &str) -> u64 {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().unwrap_or(0);
    match text.get(digits.len()..) {
        Some("G" | "g") => number.saturating_mul(1024),
        Some("M" | "m") => number,
        Some("K" | "k") => number / 1024,
        _ => number >> 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    fn machine() -> (Machine, Plan) {
        let machine = Machine {
            pollux: "pollux".into(),
            kernel: "k".into(),
            initrd: Some("i".into()),
            root: "r".into(),
            data: "d".into(),
            options: Vec::new(),
        };
        let text = "[measure]\nmemory = \"1G\"\nwarmup_seconds = 0\nidle_seconds = 0\n\
                    [[workload]]\nname = \"w\"\ncpus = 2\nqueues = 2\n[[sweep]]\nhalt = \"kernel\"";
        (machine, Plan::parse(text, "p").unwrap())
    }

    fn peer(kind: Kind, engine: Option<&'static str>) -> Peer {
        Peer { kind, program: "vmm".into(), engine }
    }

    fn command(peer: &Peer) -> (String, Option<String>) {
        let (machine, plan) = machine();
        let idle = ["idle=halt".to_owned()];
        let dir = Path::new("dir");
        let (words, file) = peer.command(&machine, &plan.workloads[0], &plan.measure, &idle, dir);
        (words.join(" "), file.map(|(_, text)| text))
    }

    #[test]
    fn each_monitor_gets_the_same_guest_disk_and_workload() {
        let workload = "idle=halt pollux.cmd=\"report; fio-measure 4 /dev/vdb rw=randread bs=4k \
                        ioengine=psync iodepth=1 numjobs=1\"";
        let (qemu, _) = command(&peer(Kind::Qemu, Some("io_uring")));
        for part in [workload, "-smp 2 -m 1G", "aio=io_uring,file=d", "num-queues=2", "file=r "] {
            assert!(qemu.contains(part), "{part}: {qemu}");
        }
        let (cloud, _) = command(&peer(Kind::CloudHypervisor, None));
        for part in [workload, "boot=2", "size=1G", "--disk path=r,readonly=on path=d,num_queues=2"]
        {
            assert!(cloud.contains(part), "{part}: {cloud}");
        }
        let (words, file) = command(&peer(Kind::Firecracker, Some("Async")));
        assert_eq!(words, "vmm --no-api --enable-pci --config-file dir/firecracker.json");
        let file: serde_json::Value = serde_json::from_str(&file.unwrap()).unwrap();
        assert!(file["boot-source"]["boot_args"].as_str().unwrap().contains(workload));
        assert_eq!(file["machine-config"], json!({ "vcpu_count": 2, "mem_size_mib": 1024 }));
        assert_eq!(file["drives"][1]["io_engine"], "Async");
        assert_eq!(file["drives"][0]["is_read_only"], true);
    }

    #[test]
    fn a_monitor_that_is_not_there_is_told() {
        for (text, expected) in [
            ("xen", "not a monitor (use qemu, cloud-hypervisor or firecracker)"),
            ("qemu=/nonexistent/qemu", "/nonexistent/qemu does not start"),
        ] {
            let error = Peer::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(Peer::parse("qemu=true").unwrap().len(), 2);
    }

    /// A monitor that is a shell script: what the guest would write, and a busy thread between the marks.
    #[test]
    fn a_run_is_followed_by_its_marks_and_reports() {
        let script = "echo '@mark fio-start'; echo '@mark fio-end'; echo '@fio {\"ios\": 1}'
            echo '@mark fio-start'; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done
            echo '@mark fio-end'; echo 'text @fio'; echo '@fio {\"ios\": 2}'; echo '@exit 0'; sleep 60";
        let child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut child = Ended(child);
        let lines = Lines::new(child.0.stdout.take().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        let watched =
            watch(&lines, child.0.id(), deadline, &Interrupt::new(false)).map_err(|_| ()).unwrap();
        assert_eq!(watched.reports["fio"]["ios"], 2);
        let [start, end] = watched.cpu["fio"];
        assert!(end.all_ns > start.all_ns, "{start:?} {end:?}");
    }

    #[test]
    fn memory_is_in_mebibytes_for_firecracker() {
        for (text, expected) in [("512M", 512), ("2G", 2048), ("1048576", 1), ("2048K", 2)] {
            assert_eq!(mebibytes(text), expected, "{text}");
        }
    }
}
