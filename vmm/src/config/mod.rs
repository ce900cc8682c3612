//! The validated configuration of a VM. Every rule about options and every message about a broken
//! one is here; all of them hold before anything is created.

mod disk;
mod error;
mod files;
mod halt;
mod idle;
mod live;
mod pin;
mod units;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};
use virtio_blk::BlkConfig;

pub use error::{ConfigError, one_line, reason};
pub use files::directory_of;
pub use halt::{Halt, HaltPoll, HostParameter};
pub use idle::{GuestHaltPoll, GuestIdle};
pub use pin::Pinning;
pub use units::{long_time_ns, number, size_bytes, switch, time_ns};

use crate::boot::{BootError, acpi};
use crate::cli::RunArgs;

/// The least memory of a VM, in bytes: below it a stock kernel finds no room to unpack itself.
pub const MEMORY_MIN_BYTES: u64 = 64 << 20;
/// PCI bus 0 has 32 slots, and the host bridge is in the first.
const DISKS_MAX: usize = 31;
/// Memory is a multiple of this, in bytes: the size of a page.
pub const MEMORY_ALIGN_BYTES: u64 = 4 << 10;
const NAME_OF_KVM: &str = "name the device node of KVM, mostly /dev/kvm";
/// What every kernel command line begins with: the console is the first serial port, a reboot goes
/// through the keyboard controller, and a panic reboots at once, so that it ends the guest.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1";

/// Everything that was asked for, in one piece, validated. Serialised, it is the `config` part of
/// the statistics.
#[derive(Clone, Debug, Serialize)]
pub struct VmConfig {
    /// The KVM device.
    #[serde(serialize_with = "path_as_text")]
    pub kvm: PathBuf,
    /// The kernel image.
    #[serde(serialize_with = "path_as_text")]
    pub kernel: PathBuf,
    /// The initial RAM disk.
    #[serde(serialize_with = "path_as_text_if_any")]
    pub initrd: Option<PathBuf>,
    /// The whole kernel command line: the defaults, how to idle, then the user's words, which may
    /// end in `-- ARGUMENTS-OF-INIT`.
    pub cmdline: String,
    /// How the kernel is entered.
    pub boot: Boot,
    /// Number of vCPUs, at least 1. [`check_cpus`](Self::check_cpus) compares it with KVM's limit.
    pub cpus: u32,
    /// Guest RAM, in bytes.
    pub memory_bytes: u64,
    /// The disks, in the order of their PCI slots, ready to be opened: with their names, their poll
    /// window and the host CPUs of their workers.
    #[serde(serialize_with = "disk::serialize")]
    pub disks: Vec<BlkConfig>,
    /// Where a halted vCPU waits.
    pub halt: Halt,
    /// How long it polls before it waits.
    #[serde(flatten)]
    pub halt_poll: HaltPoll,
    /// Parameters of the host's module may be changed while the VM runs.
    pub allow_host_tuning: bool,
    /// How the guest idles. Already in [`cmdline`](Self::cmdline).
    pub guest_idle: GuestIdle,
    /// Parameters of the guest's haltpoll governor. Already in [`cmdline`](Self::cmdline).
    pub guest_halt_poll: GuestHaltPoll,
    /// Set `KVM_HINTS_REALTIME` in the guest's CPUID.
    pub dedicated: bool,
    /// The maximum poll window of a disk queue's worker, in nanoseconds; 0 for none.
    pub io_poll_ns: u32,
    /// Which threads run on which host CPUs.
    pub pin: Pinning,
    /// Where the first serial port goes.
    pub console: Console,
    /// Where the second serial port goes, if there is one.
    #[serde(serialize_with = "path_as_text_if_any")]
    pub results: Option<PathBuf>,
    /// What a reboot of the guest does.
    pub on_reboot: OnReboot,
    /// Where the statistics go.
    pub stats: Option<Stats>,
    /// Where halts are recorded, if they are.
    #[serde(serialize_with = "path_as_text_if_any")]
    pub record: Option<PathBuf>,
    /// Where the control socket is, if there is one.
    #[serde(serialize_with = "path_as_text_if_any")]
    pub control: Option<PathBuf>,
    /// The process is confined while the guest runs.
    pub sandbox: bool,
}

/// `--boot`: how the kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Boot {
    /// As the image prefers.
    Auto,
    /// The 64-bit entry of the Linux/x86 boot protocol.
    Linux64,
    /// The entry of the image's `XEN_ELFNOTE_PHYS32_ENTRY` note.
    Pvh,
}

/// `--console`: where the first serial port goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Console {
    /// This process's terminal, in both directions.
    Stdio,
    /// Output to a file, no input.
    File(#[serde(serialize_with = "path_as_text")] PathBuf),
    /// Output is dropped, no input.
    Off,
}

/// `--on-reboot`: what a reboot of the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnReboot {
    /// Ends the program.
    Exit,
    /// Boots the guest anew.
    Restart,
}

/// `--stats`: where the statistics go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stats {
    /// Standard output, after the guest's end.
    Stdout,
    /// A file, made anew.
    File(#[serde(serialize_with = "path_as_text")] PathBuf),
}

impl VmConfig {
    /// Reads and validates the options, then looks at the files they name.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn new(args: &RunArgs) -> Result<Self, ConfigError> {
        let config = Self::parse(args)?;
        config.check_files()?;
        Ok(config)
    }

    fn parse(args: &RunArgs) -> Result<Self, ConfigError> {
        let cpus = units::number("--cpus", &args.cpus)?;
        if cpus == 0 {
            return Err(ConfigError::new("--cpus", 0, "no vCPU at all").hint("use at least 1"));
        }
        let memory_bytes = units::size_bytes("--memory", &args.memory)?;
        check_memory(&args.memory, memory_bytes)?;
        let mut disks =
            args.disks.iter().map(|spec| disk::parse(spec)).collect::<Result<Vec<_>, _>>()?;
        let io_poll_ns = units::time_ns("--io-poll-ns", &args.io_poll_ns)?;
        if disks.len() > DISKS_MAX {
            return Err(ConfigError::new(
                "--disk",
                disks.len(),
                "disks are more than fit on PCI bus 0",
            )
            .hint(format!("use at most {DISKS_MAX}")));
        }
        let (halt, halt_poll) = halt::parse(args)?;
        if let (Halt::Passthrough, Some(path)) = (halt, &args.record) {
            let problem = "with --halt passthrough HLT does not leave the guest, so there is no halt to \
                           record";
            return Err(ConfigError::new("--record", path.display(), problem)
                .hint("use --halt kernel or user"));
        }
        let (guest_idle, guest_halt_poll) = idle::parse(args)?;
        let queues = disks.iter().map(|disk| u32::from(disk.queues)).sum();
        let pin = match &args.pin {
            None => Pinning::default(),
            Some(text) => {
                let usable = pin::usable_cpus().map_err(|e| {
                    let problem = format!("cannot tell the host's CPUs: {}", reason(&e));
                    ConfigError::new("--pin", text, problem)
                })?;
                Pinning::parse(text, cpus, queues, &usable)?
            }
        };
        let mut io_cpus = (0..queues).map(|queue| pin.io.get(&queue).copied());
        for (index, disk) in disks.iter_mut().enumerate() {
            disk.name = format!("blk{index}");
            disk.io_poll_ns = io_poll_ns;
            disk.pin_cpus = io_cpus.by_ref().take(disk.queues.into()).collect();
        }
        let cmdline = std::iter::once(DEFAULT_CMDLINE.to_owned())
            .chain(idle::kernel_arguments(guest_idle, &guest_halt_poll))
            .chain(args.cmdline.clone())
            .collect::<Vec<_>>()
            .join(" ");
        Ok(Self {
            kvm: args.kvm.clone(),
            kernel: args.kernel.clone(),
            initrd: args.initrd.clone(),
            cmdline,
            boot: units::choice(
                "--boot",
                &args.boot,
                &[("auto", Boot::Auto), ("linux64", Boot::Linux64), ("pvh", Boot::Pvh)],
            )?,
            cpus,
            memory_bytes,
            disks,
            halt,
            halt_poll,
            allow_host_tuning: args.allow_host_tuning,
            guest_idle,
            guest_halt_poll,
            dedicated: args.dedicated,
            io_poll_ns,
            pin,
            console: parse_console(&args.console)?,
            results: args.results.clone(),
            on_reboot: units::choice(
                "--on-reboot",
                &args.on_reboot,
                &[("exit", OnReboot::Exit), ("restart", OnReboot::Restart)],
            )?,
            stats: args.stats.as_deref().map(|path| match path.to_str() {
                Some("-") => Stats::Stdout,
                _ => Stats::File(path.to_owned()),
            }),
            record: args.record.clone(),
            control: args.control.clone(),
            sandbox: units::choice("--sandbox", &args.sandbox, &[("on", true), ("off", false)])?,
        })
    }

    /// Looks at the files that are named: what is read is there, what is written can be. Disks are
    /// looked at by who opens them.
    fn check_files(&self) -> Result<(), ConfigError> {
        let mut inputs = vec![("--kernel", self.kernel.as_path())];
        inputs.extend(self.initrd.as_deref().map(|path| ("--initrd", path)));
        for (option, path) in &inputs {
            files::check_input(option, path)?;
        }
        disk::check_shared(&self.disks)?;
        inputs.extend(self.disks.iter().map(|disk| ("--disk", disk.path.as_path())));

        let mut outputs = Vec::new();
        if let Console::File(path) = &self.console {
            outputs.push(("--console", path.as_path()));
        }
        outputs.extend(self.results.as_deref().map(|path| ("--results", path)));
        if let Some(Stats::File(path)) = &self.stats {
            outputs.push(("--stats", path));
        }
        outputs.extend(self.record.as_deref().map(|path| ("--record", path)));
        outputs.extend(self.control.as_deref().map(|path| ("--control", path)));
        for (option, path) in &outputs {
            files::check_output(option, path)?;
        }
        files::check_overlap(&inputs, &outputs)
    }

    /// Parameters of the host's module to be set while the VM runs: none without the user's consent.
    pub fn host_parameters(&self) -> Vec<HostParameter> {
        halt::host_parameters(self.halt, &self.halt_poll)
    }

    /// Tells what keeps the guest from booting, by the option that is to blame.
    pub fn boot_error(&self, error: &BootError) -> ConfigError {
        let text = error.to_string();
        match error {
            BootError::Cmdline(_) => return ConfigError::new("--cmdline", &self.cmdline, text),
            BootError::MemoryTooSmall { .. } => {
                return ConfigError::new("--memory", self.memory_bytes, text);
            }
            BootError::TooManyCpus { .. } => return ConfigError::new("--cpus", self.cpus, text),
            _ => {}
        }
        // All others are about a file, and their text begins with its path.
        for (option, path) in [("--kernel", Some(&self.kernel)), ("--initrd", self.initrd.as_ref())]
        {
            let Some(path) = path.map(|path| path.display().to_string()) else { continue };
            let problem = text.strip_prefix(&path).and_then(|rest| rest.strip_prefix(": "));
            if let Some(problem) = problem {
                return ConfigError::new(option, path, problem);
            }
        }
        ConfigError::new("--kernel", self.kernel.display(), text)
    }

    /// Compares the number of vCPUs with the most that KVM makes in one VM.
    ///
    /// # Errors
    /// There are more.
    pub fn check_cpus(&self, kvm_max: usize) -> Result<(), ConfigError> {
        // APIC identifiers of the ACPI tables end there.
        let max = kvm_max.min(acpi::MAX_CPUS as usize);
        if usize::try_from(self.cpus).is_ok_and(|cpus| cpus <= max) {
            return Ok(());
        }
        Err(ConfigError::new("--cpus", self.cpus, "more than one VM can have here")
            .hint(format!("use at most {max}")))
    }
}

impl ConfigError {
    /// The KVM device at `path` could not be opened.
    pub fn kvm(path: &Path, error: &io::Error) -> Self {
        Self::new("--kvm", path.display(), reason(error)).hint(Self::kvm_advice(error))
    }

    /// What was opened at `path` does not speak KVM's API.
    pub fn not_kvm(path: &Path) -> Self {
        Self::new("--kvm", path.display(), "not a KVM device").hint(NAME_OF_KVM)
    }

    /// What to do about a KVM device that could not be opened.
    pub fn kvm_advice(error: &io::Error) -> &'static str {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                "load kvm_intel or kvm_amd; turn on virtualisation in the firmware, or nested \
                 virtualisation for this VM in its host"
            }
            Some(libc::EACCES | libc::EPERM) => {
                "join the group that owns it, mostly kvm, and log in again; in a container, pass \
                 the device in"
            }
            _ => NAME_OF_KVM,
        }
    }
}

fn check_memory(text: &str, bytes: u64) -> Result<(), ConfigError> {
    let error = |problem: &str| ConfigError::new("--memory", text, problem);
    if bytes < MEMORY_MIN_BYTES {
        return Err(error("too little for a Linux guest").hint("use at least 64M"));
    }
    if !bytes.is_multiple_of(MEMORY_ALIGN_BYTES) {
        return Err(error("not a multiple of the page size").hint("use a multiple of 4K"));
    }
    // Half of what the CPU can address is left for devices, whose windows lie above RAM.
    let max_bytes = 1u64 << (physical_address_bits() - 1);
    if bytes > max_bytes {
        return Err(error("more than this CPU can address beside devices")
            .hint(format!("use at most {}G", max_bytes >> 30)));
    }
    Ok(())
}

/// The width of a physical address of this CPU, which is that of its guests: 32 to 52 bits.
fn physical_address_bits() -> u32 {
    let leaf = 0x8000_0008;
    if std::arch::x86_64::__cpuid(0x8000_0000).eax < leaf {
        return 36;
    }
    (std::arch::x86_64::__cpuid(leaf).eax & 0xff).clamp(36, 52)
}

fn parse_console(text: &str) -> Result<Console, ConfigError> {
    match text {
        "stdio" => Ok(Console::Stdio),
        "off" => Ok(Console::Off),
        _ => match text.strip_prefix("file=") {
            Some(path) if !path.is_empty() => Ok(Console::File(path.into())),
            _ => Err(ConfigError::new("--console", text, "not one of its values")
                .hint("use stdio, file=PATH or off")),
        },
    }
}

/// JSON has no other strings than Unicode ones; a path that is none keeps what can be kept.
pub(crate) fn path_as_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

fn path_as_text_if_any<S: Serializer>(
    path: &Option<PathBuf>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::cli::{self, Command};

    /// Options as if typed after `pollux run --kernel vmlinuz`.
    pub(super) fn run_args(words: &[&str]) -> RunArgs {
        let line = ["pollux", "run", "--kernel", "vmlinuz"].iter().chain(words).map(OsString::from);
        match cli::parse(line).unwrap().command {
            Command::Run(args) => *args,
            _ => panic!("not run"),
        }
    }

    fn parse(words: &str) -> Result<VmConfig, String> {
        VmConfig::parse(&run_args(&words.split_whitespace().collect::<Vec<_>>()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_are_those_of_the_help() {
        let config = parse("").unwrap();
        assert_eq!((config.cpus, config.memory_bytes), (1, 512 << 20));
        assert_eq!((config.halt, config.halt_poll), (Halt::Kernel, HaltPoll::default()));
        assert_eq!((config.boot, config.on_reboot), (Boot::Auto, OnReboot::Exit));
        assert_eq!((config.console, config.io_poll_ns), (Console::Stdio, 0));
        assert_eq!(config.cmdline, DEFAULT_CMDLINE);
        assert_eq!(config.kvm, Path::new("/dev/kvm"));
    }

    #[test]
    fn the_users_words_come_last_so_that_they_win_and_may_end_in_those_of_init() {
        let args = run_args(&["--guest-idle", "halt", "--cmdline", "root=/dev/vda -- sh"]);
        assert_eq!(
            VmConfig::parse(&args).unwrap().cmdline,
            format!("{DEFAULT_CMDLINE} idle=halt root=/dev/vda -- sh")
        );
    }

    #[test]
    fn at_least_one_vcpu_and_no_more_than_kvm_makes() {
        assert_eq!(parse("--cpus 0").unwrap_err(), "--cpus 0: no vCPU at all (use at least 1)");
        assert!(parse("--cpus two").unwrap_err().contains("not a number"));
        let config = parse("--cpus 8").unwrap();
        assert!(config.check_cpus(8).is_ok());
        assert!(config.check_cpus(7).unwrap_err().to_string().contains("use at most 7"));
    }

    #[test]
    fn memory_has_a_least_a_most_and_a_multiple() {
        for (text, expected) in [
            ("0", "at least 64M"),
            ("67104768", "at least 64M"),
            ("67108865", "multiple of 4K"),
            ("8388608G", "more than this CPU can address"),
            ("12Q", "not a size"),
        ] {
            let message = parse(&format!("--memory {text}")).unwrap_err();
            assert!(message.starts_with(&format!("--memory {text}: ")), "{message}");
            assert!(message.contains(expected), "{message}");
        }
        assert_eq!(parse("--memory 64M").unwrap().memory_bytes, MEMORY_MIN_BYTES);
        assert_eq!(parse("--memory 5G").unwrap().memory_bytes, 5 << 30);
    }

    #[test]
    fn words_that_are_no_value_of_their_option_are_answered_with_those_that_are() {
        for (option, expected) in [
            ("--boot", "auto, linux64 or pvh"),
            ("--halt", "kernel, user or passthrough"),
            ("--guest-idle", "default, haltpoll, halt or poll"),
            ("--console", "stdio, file=PATH or off"),
            ("--on-reboot", "exit or restart"),
        ] {
            let message = parse(&format!("{option} frob")).unwrap_err();
            assert!(message.starts_with(&format!("{option} frob: ")), "{message}");
            assert!(message.contains(expected), "{message}");
        }
        assert!(parse("--console file=").is_err());
    }

    #[test]
    fn times_of_options_are_nanoseconds_with_or_without_a_unit() {
        let config = parse("--halt-poll-ns 200us --io-poll-ns 50000").unwrap();
        assert_eq!((config.halt_poll.halt_poll_ns, config.io_poll_ns), (Some(200_000), 50_000));
        assert_eq!(parse("--halt-poll-ns 0").unwrap().halt_poll.halt_poll_ns, Some(0));
        assert!(parse("--halt-poll-ns 5s").unwrap_err().starts_with("--halt-poll-ns 5s: "));
        assert!(parse("--io-poll-ns x").unwrap_err().starts_with("--io-poll-ns x: "));
    }

    #[test]
    fn pins_count_the_queues_of_all_disks() {
        let disks = "--disk path=a,queues=2 --disk path=b";
        let cpu = pin::usable_cpus().unwrap()[0];
        let config = parse(&format!("{disks} --pin io2={cpu} --io-poll-ns 1us")).unwrap();
        assert_eq!(config.disks[0].pin_cpus, [None, None]);
        assert_eq!(config.disks[1].pin_cpus, [Some(cpu)]);
        assert_eq!(config.disks[1].name, "blk1");
        assert_eq!(config.disks[1].io_poll_ns, 1000);
        assert!(parse(&format!("{disks} --pin io3={cpu}")).unwrap_err().contains("io2"));
    }

    #[test]
    fn a_missing_kvm_and_a_forbidden_one_come_with_what_to_do() {
        for (errno, expected) in [(libc::ENOENT, "kvm_intel"), (libc::EACCES, "group")] {
            let error = io::Error::from_raw_os_error(errno);
            let message = ConfigError::kvm(Path::new("/dev/kvm"), &error).to_string();
            assert!(message.starts_with("--kvm /dev/kvm: "), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn the_configuration_serialises_with_the_names_of_the_options() {
        let words = "--stats - --console file=log --disk path=a,queue-size=8 --guest-idle haltpoll";
        let json = serde_json::to_value(parse(words).unwrap()).unwrap();
        assert_eq!(json["stats"], "stdout");
        assert_eq!(json["console"]["file"], "log");
        assert_eq!(json["disks"][0]["queue_size"], 8);
        assert_eq!(json["guest_idle"], "haltpoll");
        assert_eq!(json["initrd"], serde_json::Value::Null);
    }
}
