//! `pollux doctor`: what this host's KVM can do, and whether it can run a stock kernel.

mod capabilities;
mod halt;
pub mod host;
mod tiny;

use std::ffi::CString;
use std::fmt;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::Kvm;
use serde::Serialize;

use crate::cli::DoctorArgs;
use crate::config::{ConfigError, one_line, reason};
use capabilities::{Capability, Need};
use halt::HaltMode;
use host::{Confinement, HaltPoll, Host, Uring};
use tiny::{Outcome, TinyRun};

/// The version of the JSON's layout: it changes when a field changes its meaning or goes away.
const SCHEMA: u32 = 1;

/// Prints what `args` ask for on stdout, and returns the program's exit status: 0 if stock guests can
/// run, 1 if not.
///
/// # Errors
/// Stdout could not be written.
pub fn run(args: &DoctorArgs) -> io::Result<u8> {
    let report = Report::new(&args.kvm);
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        report.to_string()
    };
    io::stdout().lock().write_all(text.as_bytes())?;
    Ok(if report.can_run_stock_kernel { 0 } else { 1 })
}

/// All findings. Serialised, it is what `pollux doctor --json` prints; optional fields that are
/// absent had nothing to say.
#[derive(Debug, Serialize)]
struct Report {
    /// The version of this layout, 1.
    schema: u32,
    /// The answer: every required capability is there, and every tiny guest ran well.
    can_run_stock_kernel: bool,
    /// What stands in the way, one line each; empty if nothing does.
    problems: Vec<Problem>,
    host: Host,
    kvm: KvmReport,
    halt_poll: HaltPoll,
    io_uring: Uring,
    sandbox: Confinement,
}

/// Something that keeps stock guests from running.
#[derive(Debug, Serialize)]
struct Problem {
    /// What it is.
    problem: String,
    /// What to do about it.
    advice: &'static str,
}

/// What KVM says. All is empty if its device cannot be opened.
#[derive(Debug, Serialize)]
struct KvmReport {
    /// The device.
    device: String,
    /// Why it could not be opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The modules besides `kvm` itself.
    modules: Vec<String>,
    /// The API's version: 12, on every kernel of this century.
    #[serde(skip_serializing_if = "Option::is_none")]
    api_version: Option<i32>,
    /// Number of vCPUs of one VM that KVM recommends.
    #[serde(skip_serializing_if = "Option::is_none")]
    recommended_vcpus: Option<usize>,
    /// Most vCPUs of one VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_vcpus: Option<usize>,
    capabilities: Vec<Capability>,
    tiny_guests: Vec<TinyRun>,
    /// Which values of --halt work.
    halt_modes: Vec<HaltMode>,
}

impl Report {
    /// Examines the host and the KVM device at `device`. Runs a few tiny guests, which takes a
    /// fraction of a second, or some seconds if they hang.
    fn new(device: &Path) -> Self {
        let mut problems = Vec::new();
        let mut kvm = KvmReport {
            device: device.display().to_string(),
            problem: None,
            modules: host::kvm_modules(),
            api_version: None,
            recommended_vcpus: None,
            max_vcpus: None,
            capabilities: Vec::new(),
            tiny_guests: Vec::new(),
            halt_modes: Vec::new(),
        };
        match open(device) {
            Ok(handle) => kvm.examine(&handle, &mut problems),
            Err(error) => {
                let problem = reason(&error);
                problems.push(Problem {
                    problem: format!("cannot open {}: {problem}", kvm.device),
                    advice: ConfigError::kvm_advice(&error),
                });
                kvm.problem = Some(problem);
            }
        }
        Self {
            schema: SCHEMA,
            can_run_stock_kernel: problems.is_empty(),
            problems,
            host: Host::query(),
            kvm,
            halt_poll: HaltPoll::query(),
            io_uring: Uring::query(),
            sandbox: Confinement::query(),
        }
    }
}

fn open(path: &Path) -> io::Result<Kvm> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    Kvm::new_with_path(path).map_err(io::Error::from)
}

impl KvmReport {
    fn examine(&mut self, kvm: &Kvm, problems: &mut Vec<Problem>) {
        let version = kvm.get_api_version();
        self.api_version = Some(version);
        if u32::try_from(version) != Ok(KVM_API_VERSION) {
            problems.push(Problem {
                problem: format!("{} is not a KVM device", self.device),
                advice: "name the device node of KVM, mostly /dev/kvm",
            });
            return;
        }
        self.recommended_vcpus = Some(kvm.get_nr_vcpus());
        self.max_vcpus = Some(kvm.get_max_vcpus());
        self.capabilities = capabilities::query(kvm);
        for capability in &self.capabilities {
            if let (Need::Required, Some(advice)) = (capability.need, capability.advice) {
                let problem = format!("KVM lacks {}", capability.name);
                problems.push(Problem { problem, advice });
            }
        }
        self.tiny_guests = tiny::run_all(kvm);
        self.halt_modes = halt::modes(&self.capabilities, &tiny::halt(kvm));
        let failed: Vec<&str> = self
            .tiny_guests
            .iter()
            .filter(|run| !run.outcome.is_good())
            .map(|run| run.name)
            .collect();
        if !failed.is_empty() {
            problems.push(Problem {
                problem: format!("a guest cannot execute {} in kernel mode", failed.join(", ")),
                advice: "use a KVM on hardware virtualisation (kvm_intel or kvm_amd, or nested in \
                         a VM whose host allows it), or run Pollux in an emulated machine that has \
                         one: cargo xtask lab",
            });
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guest = if self.host.is_guest { ", itself a guest" } else { "" };
        writeln!(
            f,
            "Host       Linux {} on {}, {} CPUs{guest}",
            one_line(&self.host.kernel),
            one_line(&self.host.cpu),
            self.host.cpus
        )?;
        write!(f, "{}", self.kvm)?;
        writeln!(f, "halt_poll  {}", self.halt_poll)?;
        writeln!(f, "io_uring   {}", self.io_uring)?;
        writeln!(f, "sandbox    {}", self.sandbox)?;
        if !self.kvm.capabilities.is_empty() {
            writeln!(f, "\nCapabilities")?;
        }
        for capability in &self.kvm.capabilities {
            write!(f, "{capability}")?;
        }
        if !self.kvm.tiny_guests.is_empty() {
            writeln!(f, "\nTiny guests, in kernel mode")?;
        }
        for run in &self.kvm.tiny_guests {
            let verdict = if run.outcome.is_good() { "ok" } else { "FAILS" };
            writeln!(f, "  {verdict:<6}{:<12}{}", run.name, run.purpose)?;
            if run.outcome != Outcome::Ok {
                writeln!(f, "  {:<6}{:<12}  {}", "", "", run.outcome)?;
            }
        }
        if !self.kvm.halt_modes.is_empty() {
            writeln!(f, "\nWhere a halted vCPU can wait")?;
        }
        for mode in &self.kvm.halt_modes {
            write!(f, "{mode}")?;
        }
        writeln!(f)?;
        if self.can_run_stock_kernel {
            return writeln!(f, "This KVM can run a stock kernel.");
        }
        writeln!(f, "This host cannot run a stock kernel:")?;
        for Problem { problem, advice } in &self.problems {
            writeln!(f, "  {}", one_line(problem))?;
            writeln!(f, "    what to do: {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for KvmReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KVM        {}", one_line(&self.device))?;
        if let Some(problem) = &self.problem {
            write!(f, ": {problem}")?;
        }
        if let Some(version) = self.api_version {
            write!(f, ", API version {version}")?;
        }
        if let (Some(max), Some(recommended)) = (self.max_vcpus, self.recommended_vcpus) {
            write!(f, ", at most {max} vCPUs, {recommended} recommended")?;
        }
        match self.modules.as_slice() {
            [] => writeln!(f, ", no module of it to be seen"),
            modules => writeln!(f, ", module {}", modules.join(", ")),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match (self.present, self.need) {
            (true, _) => "yes",
            (false, Need::Required) => "LACKS",
            (false, Need::Optional) => "no",
        };
        writeln!(f, "  {verdict:<6}{:<32}{}", self.name, self.purpose)?;
        match self.advice {
            Some(advice) => writeln!(f, "  {:<6}{:<32}  what to do: {advice}", "", ""),
            None => Ok(()),
        }
    }
}

impl fmt::Display for HaltPoll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = [
            ("halt_poll_ns", self.halt_poll_ns),
            ("halt_poll_ns_grow", self.halt_poll_ns_grow),
            ("halt_poll_ns_grow_start", self.halt_poll_ns_grow_start),
            ("halt_poll_ns_shrink", self.halt_poll_ns_shrink),
        ];
        let shown: Vec<String> = parameters
            .iter()
            .map(|(name, value)| match value {
                Some(value) => format!("{name} {value}"),
                None => format!("no {name}"),
            })
            .collect();
        write!(f, "{} (parameters of the module kvm)", shown.join(", "))
    }
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seccomp = if self.seccomp { "seccomp" } else { "no seccomp" };
        match self.landlock_abi {
            Some(abi) => write!(f, "{seccomp}, Landlock {abi}")?,
            None => write!(f, "{seccomp}, no Landlock")?,
        }
        self.advice.map_or(Ok(()), |advice| write!(f, "; what to do: {advice}"))
    }
}

impl fmt::Display for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self
            .operations
            .iter()
            .map(|op| format!("{}{}", if op.present { "" } else { "no " }, op.name))
            .collect();
        match (&self.problem, self.advice) {
            (Some(problem), Some(advice)) => write!(f, "{problem}; what to do: {advice}"),
            (Some(problem), None) => f.write_str(problem),
            _ => write!(f, "works: {}", words.join(", ")),
        }
    }
}
