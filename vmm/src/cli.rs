//! The command line: what may be said. What is *meant* by it, and every rule, is in
//! [`config`](crate::config).

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

use crate::config::one_line;

/// Pollux: a virtual machine monitor for KVM that measures what waiting costs.
#[derive(Debug, Parser)]
#[command(name = "pollux", version, about, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a Linux guest, and run it until it ends.
    ///
    /// Exit status: 0 the guest powered off or rebooted (or SIGINT or SIGTERM stopped it), 1 the
    /// host failed, 2 bad arguments, 3 the guest panicked, 4 triple fault, 5 KVM cannot emulate an
    /// instruction of the guest.
    ///
    /// Sizes are bytes, or a number with K, M or G. Times are nanoseconds, or a number with ns, us,
    /// ms or s.
    Run(Box<RunArgs>),
    /// Say what this host's KVM can do, and whether it can run a stock kernel at all.
    ///
    /// Exit status: 0 stock guests can run here, 1 they cannot.
    Doctor(DoctorArgs),
    /// Ask, change or stop a guest that runs with --control, and print the reply, which is JSON.
    ///
    /// Exit status: 0 done, 1 refused (with one line on stderr), 2 bad arguments, or nobody listens at
    /// SOCKET.
    Ctl(CtlArgs),
    /// Measure a guest in many settings of both sides, and say what waiting costs in each.
    ///
    /// The guest is one that `cargo xtask guest` makes, or has the same programs in /pollux. What was
    /// measured is kept in a directory, run by run: results.json, results.csv, report.html.
    ///
    /// Exit status: 0 all was measured, 1 the host or guest after guest failed, 2 bad arguments or
    /// plan, 130 a signal ended it (--resume goes on).
    Bench(Box<BenchArgs>),
    /// Predict what the halts that `pollux run --record` recorded would have cost with other parameters.
    ///
    /// Every combination of the values given is tried, and printed in the order of the latency that it
    /// adds. Exit status: 0 done, 2 bad arguments, or FILE is no recording that can be replayed.
    Replay(Box<ReplayArgs>),
}

/// Options of `pollux run`, as they were typed.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The guest's kernel: a bzImage, or an ELF vmlinux.
    #[arg(long, value_name = "PATH")]
    pub kernel: PathBuf,

    /// The guest's initial RAM disk.
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<PathBuf>,

    /// Added to the kernel command line, after "console=ttyS0 reboot=k panic=-1".
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub cmdline: Option<String>,

    /// How the kernel is entered: auto, linux64 or pvh.
    ///
    /// linux64 is the 64-bit entry of the Linux/x86 boot protocol; pvh is the entry that an ELF
    /// image names in its Xen note; auto is linux64 for whatever is Linux, and pvh for other ELF images.
    #[arg(long, value_name = "PROTOCOL", default_value = "auto")]
    pub boot: String,

    /// Number of vCPUs.
    #[arg(long, value_name = "N", default_value = "1")]
    pub cpus: String,

    /// The guest's memory: at least 64M, a multiple of 4K.
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub memory: String,

    /// A virtio-blk disk, /dev/vda being the first. May be given more than once.
    ///
    /// SPEC is path=PATH, and any of these, separated by commas (a comma in a value is written
    /// twice): readonly=on|off (default off), queues=N (default 1), queue-size=N (a power of two,
    /// default 256), engine=uring|sync|null (default uring; null completes every request at once and
    /// moves no data), direct=on|off (O_DIRECT, default off), cache=writeback|writethrough (default
    /// writeback), discard=on|off (default on), serial=STR (at most 20 bytes of ASCII),
    /// event-idx=on|off (VIRTIO_F_EVENT_IDX, default on), packed=on|off (packed virtqueues, default
    /// off), block-size=512|4096 (default 512 for a file, a block device's own), format=raw (also if the
    /// file looks like another format; there is no other).
    #[arg(long = "disk", value_name = "SPEC")]
    pub disks: Vec<String>,

    /// Where a halted vCPU waits: kernel, user or passthrough.
    ///
    /// kernel: KVM polls, then blocks. user: Pollux does, which also has the local APIC then.
    /// passthrough: HLT does not leave the guest, which keeps its host CPU.
    #[arg(long, value_name = "MODE", default_value = "kernel")]
    pub halt: String,

    /// The longest time that the host polls for a halted vCPU of this VM before it blocks.
    ///
    /// With --halt kernel this sets the VM's maximum window with KVM_CAP_HALT_POLL; without the
    /// option the module parameter halt_poll_ns of kvm holds. 0: no polling.
    #[arg(long, value_name = "TIME")]
    pub halt_poll_ns: Option<String>,

    /// What the host's poll window is multiplied by when it grows.
    ///
    /// This and the next two are the VM's own with --halt user. With --halt kernel they are
    /// parameters of the host's module kvm: see --allow-host-tuning.
    #[arg(long, value_name = "N")]
    pub halt_poll_ns_grow: Option<String>,

    /// The window it grows to from 0.
    #[arg(long, value_name = "TIME")]
    pub halt_poll_ns_grow_start: Option<String>,

    /// What the window is divided by when it shrinks; 0 makes it 0.
    #[arg(long, value_name = "N")]
    pub halt_poll_ns_shrink: Option<String>,

    /// Let parameters of the host's module kvm be changed while this VM runs, which affects all VMs
    /// of the host. Needs root.
    ///
    /// They are put back when Pollux ends, also by a signal or by a bug; only SIGKILL leaves them.
    #[arg(long)]
    pub allow_host_tuning: bool,

    /// How the guest idles: default, haltpoll, halt or poll.
    ///
    /// haltpoll adds cpuidle_haltpoll.force=1 to the kernel command line, halt adds idle=halt, poll
    /// adds idle=poll; default adds nothing.
    #[arg(long, value_name = "IDLE", default_value = "default")]
    pub guest_idle: String,

    /// Guest's haltpoll: the longest time it polls before HLT (the kernel's default is 200us).
    #[arg(long, value_name = "TIME")]
    pub guest_halt_poll_ns: Option<String>,

    /// Guest's haltpoll: what the window is multiplied by when it grows (the kernel's default: 2).
    #[arg(long, value_name = "N")]
    pub guest_halt_poll_grow: Option<String>,

    /// Guest's haltpoll: the window it grows to from 0 (the kernel's default is 50us).
    #[arg(long, value_name = "TIME")]
    pub guest_halt_poll_grow_start: Option<String>,

    /// Guest's haltpoll: what the window is divided by when it shrinks; 0 makes it 0 (the kernel's
    /// default: 2).
    #[arg(long, value_name = "N")]
    pub guest_halt_poll_shrink: Option<String>,

    /// Guest's haltpoll: whether the window may shrink, on or off (the kernel's default: on).
    #[arg(long, value_name = "on|off")]
    pub guest_halt_poll_allow_shrink: Option<String>,

    /// Tell the guest that its vCPUs have host CPUs of their own (KVM_HINTS_REALTIME).
    ///
    /// The guest's haltpoll driver then loads by itself.
    #[arg(long)]
    pub dedicated: bool,

    /// The longest time that a disk queue's worker polls for requests before it sleeps.
    ///
    /// The window adapts as KVM's does. 0: no polling.
    #[arg(long, value_name = "TIME", default_value = "0")]
    pub io_poll_ns: String,

    /// Pin threads to host CPUs: vcpuN=CPU, and ioN=CPU for the worker of the Nth disk queue,
    /// counted from 0 over all disks.
    #[arg(long, value_name = "vcpu0=CPU,io0=CPU,...")]
    pub pin: Option<String>,

    /// Where the first serial port (ttyS0) goes: stdio, file=PATH or off.
    #[arg(long, value_name = "CONSOLE", default_value = "stdio")]
    pub console: String,

    /// Give the guest a second serial port (ttyS1), and write what it sends there to PATH.
    #[arg(long, value_name = "PATH")]
    pub results: Option<PathBuf>,

    /// What a reboot of the guest does: exit or restart.
    #[arg(long, value_name = "ACTION", default_value = "exit")]
    pub on_reboot: String,

    /// When the guest has ended, write the statistics of both sides to PATH, as JSON (-: stdout).
    ///
    /// SIGUSR1 writes those so far while it runs: the file is replaced, stdout gets one more.
    #[arg(long, value_name = "PATH|-")]
    pub stats: Option<PathBuf>,

    /// Record every halt of every vCPU to PATH, for `pollux replay`; at most 1 GiB.
    ///
    /// Not with --halt passthrough, where HLT does not leave the guest. docs/recording.md says what is in
    /// the file.
    #[arg(long, value_name = "PATH")]
    pub record: Option<PathBuf>,

    /// Make a control socket at PATH, for its owner alone: see `pollux ctl`.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Whether the process is confined to what it needs while the guest runs: on or off.
    ///
    /// On, each thread makes only the system calls of its kind (seccomp), only files that are named
    /// here can be opened (Landlock, where the host has it), and capabilities are given up. A
    /// system call outside ends the run with a message that names it. Off is for debugging.
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub sandbox: String,

    /// The KVM device.
    #[arg(long, value_name = "PATH", default_value = "/dev/kvm")]
    pub kvm: PathBuf,
}

/// Options of `pollux bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// The guest's kernel.
    #[arg(long, value_name = "PATH")]
    pub kernel: PathBuf,

    /// Its initial RAM disk.
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<PathBuf>,

    /// The disk with its root file system, which is not written to.
    #[arg(long, value_name = "PATH")]
    pub root: PathBuf,

    /// The disk that is measured; writing workloads destroy what is on it.
    ///
    /// Without it a file of zeros is made in the directory of the results.
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,

    /// What to measure: a plan that is built in (quick, halt, blk, pingpong, think), or a TOML file.
    #[arg(long, value_name = "NAME|FILE", default_value = "quick")]
    pub plan: String,

    /// Print the plan as TOML, and do nothing.
    #[arg(long)]
    pub print_plan: bool,

    /// Where the results go (default: bench-NAME).
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Go on with the results that are in the directory; runs that failed are made again.
    #[arg(long)]
    pub resume: bool,

    /// How often each setting is measured, instead of what the plan says.
    #[arg(long, value_name = "N")]
    pub repeats: Option<u32>,

    /// How long each run is measured, instead of what the plan says.
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,

    /// Record the halts of the first repeat: the report then has the host's poll window over time.
    ///
    /// Recording makes these runs a little slower; see docs/recording.md for what it needs.
    #[arg(long)]
    pub record: bool,

    /// Say what to set for a goal, as options of Pollux, of the module kvm and of the guest's kernel:
    /// balanced, or a limit of mean, p50, p99 or p99.9, as p99<300us.
    ///
    /// The settings that do not poll are measured first and their halts recorded; replaying these tells
    /// which of the others are not worth measuring.
    #[arg(long, value_name = "GOAL")]
    pub advise: Option<String>,

    /// Run the same guest, disk and workload under another monitor too, as further rows: qemu[=PATH],
    /// cloud-hypervisor[=PATH] or firecracker[=PATH]. May be given more than once.
    ///
    /// Their guests idle as that of the first setting; how the host polls for them is the module
    /// kvm's matter.
    #[arg(long = "peer", value_name = "NAME[=PATH]")]
    pub peers: Vec<String>,

    /// Give each run a boot of its own, instead of changing parameters while a guest runs.
    #[arg(long)]
    pub boot_each: bool,

    /// Options of `pollux run` that all settings have, after `--`: as -- --pin vcpu0=2,io1=3.
    #[arg(last = true, value_name = "OPTION")]
    pub options: Vec<String>,
}

/// Options of `pollux replay`. Lists are separated by commas.
#[derive(Args, Clone, Debug)]
pub struct ReplayArgs {
    /// The PATH of `pollux run --record PATH`.
    pub file: PathBuf,

    /// The host's longest poll window (default, of this and the next three: as it was recorded).
    #[arg(long, value_name = "TIME,...")]
    pub halt_poll_ns: Option<String>,

    /// What the host's poll window is multiplied by when it grows.
    #[arg(long, visible_alias = "grow", value_name = "N,...")]
    pub halt_poll_ns_grow: Option<String>,

    /// The window it grows to from 0.
    #[arg(long, visible_alias = "grow-start", value_name = "TIME,...")]
    pub halt_poll_ns_grow_start: Option<String>,

    /// What the window is divided by when it shrinks; 0 makes it 0.
    #[arg(long, visible_alias = "shrink", value_name = "N,...")]
    pub halt_poll_ns_shrink: Option<String>,

    /// Guest's haltpoll: the longest time it polls before HLT; off: the guest has no haltpoll driver.
    ///
    /// Off is the default, unless another option of the guest's haltpoll is given; then it is 200us. With
    /// the driver the host does not poll: the driver forbids it.
    #[arg(long, value_name = "off|TIME,...")]
    pub guest_halt_poll_ns: Option<String>,

    /// Guest's haltpoll: what the window is multiplied by when it grows (default 2).
    #[arg(long, value_name = "N,...")]
    pub guest_halt_poll_grow: Option<String>,

    /// Guest's haltpoll: the window it grows to from 0 (default 50us).
    #[arg(long, value_name = "TIME,...")]
    pub guest_halt_poll_grow_start: Option<String>,

    /// Guest's haltpoll: what the window is divided by when it shrinks; 0 makes it 0 (default 2).
    #[arg(long, value_name = "N,...")]
    pub guest_halt_poll_shrink: Option<String>,

    /// Guest's haltpoll: whether the window may shrink (default on).
    #[arg(long, value_name = "on|off,...")]
    pub guest_halt_poll_allow_shrink: Option<String>,

    /// What it costs to wake a vCPU's thread that sleeps, where a recorded halt does not tell (default: the
    /// median of those that do).
    #[arg(long, value_name = "TIME")]
    pub wake_cost_ns: Option<String>,

    /// Take only halts that began so long after the VM was assembled, or later: as the time_ns of a mark
    /// in the statistics.
    #[arg(long, value_name = "TIME", default_value = "0")]
    pub from: String,

    /// Take only halts that began before.
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of `pollux doctor`.
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// The KVM device.
    #[arg(long, value_name = "PATH", default_value = "/dev/kvm")]
    pub kvm: PathBuf,
}

/// Options of `pollux ctl`.
#[derive(Args, Clone, Debug)]
pub struct CtlArgs {
    /// The PATH of `pollux run --control PATH`.
    pub socket: PathBuf,

    /// What to do.
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// The commands of a control socket.
#[derive(Clone, Debug, Subcommand)]
pub enum CtlCommand {
    /// Whether the guest runs, for how long, and what it consists of.
    Status,
    /// The statistics so far: the document of --stats.
    Stats,
    /// Look at the size of a disk's file or block device again, and tell the guest if it changed.
    ///
    /// The file is made larger (or smaller) before, by whoever owns it. The guest sees any new size; a
    /// smaller one costs it what was beyond, so shrink what is on the disk first.
    Resize {
        /// blk0, blk1, ... in the order of --disk.
        disk: String,
    },
    /// Change parameters while the guest runs: halt_poll_ns, halt_poll_ns_grow,
    /// halt_poll_ns_grow_start, halt_poll_ns_shrink, io_poll_ns.
    ///
    /// They are those of the options of these names, with the same units. With --halt kernel the middle
    /// three are the host's, and need --allow-host-tuning.
    Set {
        /// As halt_poll_ns=200us.
        #[arg(value_name = "NAME=VALUE", required = true)]
        parameters: Vec<String>,
    },
    /// Send a line to the guest, which reads it from its second serial port (ttyS1, with --results).
    Send {
        /// What to send; the end of the line is added.
        #[arg(allow_hyphen_values = true)]
        line: String,
    },
    /// End the guest at once, in order, as SIGTERM does: disks are flushed.
    Stop,
}

/// Why there is no [`Cli`].
#[derive(Debug)]
pub enum Refusal {
    /// Help or the version was asked for: text for stdout, exit status 0.
    Text(String),
    /// Bad arguments: one line for stderr, without its end, exit status 2.
    Usage(String),
}

/// Parses the command line; the first of `args` is the program's name.
///
/// # Errors
/// What to print instead, and where.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Refusal> {
    Cli::try_parse_from(args).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Refusal::Text(error.render().to_string())
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let help = error.render().to_string();
            let usage = help.lines().find_map(|line| line.strip_prefix("Usage: "));
            let usage = usage.unwrap_or("pollux COMMAND");
            Refusal::Usage(format!("no command: use {usage} (see pollux --help)"))
        }
        _ => Refusal::Usage(usage_line(&error.render().to_string())),
    })
}

/// Makes one line of clap's message: its first paragraph, and the advice if there is any.
fn usage_line(message: &str) -> String {
    let mut line = String::new();
    for paragraph in message.split("\n\n") {
        let text = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some(problem) = text.strip_prefix("error: ") {
            line.push_str(problem);
        } else if let Some(tip) = text.strip_prefix("tip: ") {
            line.push_str(&format!(" ({tip})"));
        }
    }
    one_line(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &str) -> Result<Cli, Refusal> {
        parse(words.split(' ').map(OsString::from))
    }

    fn usage(words: &str) -> String {
        match parse_words(words) {
            Err(Refusal::Usage(line)) => line,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn clap_finds_no_fault_with_the_definitions() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn every_usage_error_is_one_line_that_names_the_option() {
        let cases = [
            ("pollux", "no command"),
            ("pollux frob", "'frob'"),
            ("pollux run", "--kernel"),
            ("pollux run --kernel", "--kernel"),
            ("pollux run --kernel k --frob", "'--frob'"),
            ("pollux run --kernel k --memry 1G", "--memory"),
            ("pollux run --kernel k --memory 1G --memory 2G", "--memory"),
            ("pollux run --kernel k --memory -5", "'-5'"),
            ("pollux run --kernel k --dedicated=yes", "--dedicated"),
            ("pollux run --kernel k --halt-poll-ns-growth 2", "--halt-poll-ns-grow"),
            ("pollux run --kernel k\nj --frob\n", "--frob"),
            ("pollux doctor --frob", "'--frob'"),
            ("pollux ctl", "pollux ctl <SOCKET> <COMMAND>"),
            ("pollux ctl s", "subcommand"),
            ("pollux ctl s frob", "'frob'"),
            ("pollux ctl s resize", "<DISK>"),
            ("pollux ctl s set", "<NAME=VALUE>"),
            ("pollux ctl s stop now", "'now'"),
        ];
        for (words, expected) in cases {
            let line = usage(words);
            assert!(line.contains(expected), "{words}: {line}");
            assert!(!line.contains('\n') && !line.contains("error:"), "{words}: {line}");
        }
    }

    #[test]
    fn help_and_version_are_no_errors() {
        for words in ["pollux --help", "pollux run --help", "pollux -V", "pollux doctor -h"] {
            assert!(matches!(parse_words(words), Err(Refusal::Text(_))), "{words}");
        }
    }

    #[test]
    fn a_command_line_may_begin_with_dashes() {
        let args = ["pollux", "run", "--kernel", "k", "--cmdline", "-- sh"].map(OsString::from);
        let Command::Run(run) = parse(args).unwrap().command else { panic!() };
        assert_eq!(run.cmdline.as_deref(), Some("-- sh"));
    }

    #[test]
    fn a_request_names_the_socket_first() {
        let cli = parse_words("pollux ctl s set a=1 b=2").unwrap();
        let Command::Ctl(ctl) = cli.command else { panic!() };
        assert_eq!(ctl.socket, PathBuf::from("s"));
        let CtlCommand::Set { parameters } = ctl.command else { panic!() };
        assert_eq!(parameters, ["a=1", "b=2"]);
    }

    #[test]
    fn disks_keep_their_order() {
        let cli = parse_words("pollux run --kernel k --disk path=b --disk path=a").unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!(run.disks, ["path=b", "path=a"]);
    }
}
