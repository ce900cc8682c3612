//! Assembles a VM, in order: everything that can be wrong with what the user gave (disks, kernel,
//! initrd, command line) is found before there is a VM.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use devices::GuestMemory;
use devices::bus::{BusDevice, MmioBus, PioBus, SharedDevice};
use devices::irqchip::{IOAPIC_ADDRESS, IOAPIC_BYTES};
use devices::pci::bus::{ConfigPorts, Ecam, PciRoot};
use devices::power::{self, AcpiPower, I8042, PowerSink, PvPanic};
use devices::serial::{self, SerialPort};
use devices::virtio::pci::VirtioPci;
use kvm_bindings::{CpuId, KVM_API_VERSION};
use kvm_ioctls::Kvm;
use virtio_blk::{BlkConfig, Block, Disk, StartThread};

use crate::boot::{self, BootError, BootProtocol, BootRequest, Entry, Image, acpi, layout};
use crate::config::{Boot, ConfigError, Console, Halt, VmConfig};
use crate::irq::Interrupts;
use crate::irq::kernel::IoEventFds;
use crate::lifecycle::Lifecycle;
use crate::stats::channel::{ChannelWatcher, GuestReport, PanicWatcher};
use crate::stats::{DiskSource, Sources};
use crate::vcpu::create::{self, Created};
use crate::vcpu::passthrough;
use crate::vcpu::polling::Polling;
use crate::vcpu::run::{Machine, Vcpu};
use crate::vm::{Vm, VmError, kvm_error};

/// Why there is no VM.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The user's doing: exit status 2.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The host's doing: exit status 1.
    #[error(transparent)]
    Vm(#[from] VmError),
}

impl BuildError {
    /// The program's exit status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Vm(VmError::Memory { .. }) => 2,
            Self::Vm(_) => 1,
            Self::Config(_) => 2,
        }
    }
}

/// A VM that is ready to run.
pub struct Built {
    /// What the vCPUs share.
    pub machine: Arc<Machine>,
    /// The vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// Where interrupts go.
    pub interrupts: Interrupts,
    /// Who polls for halted vCPUs.
    pub polling: Polling,
    /// The console, which takes the user's keys.
    pub console: Arc<Mutex<SerialPort>>,
    /// The results channel, if there is one.
    pub results: Option<Arc<Mutex<SerialPort>>>,
    /// All figures.
    pub sources: Arc<Sources>,
    /// What the guest says on the results channel.
    pub guest: Arc<Mutex<GuestReport>>,
}

/// Turns an error of the devices into one of ours.
pub fn machine_error(error: impl std::fmt::Display) -> VmError {
    VmError::Machine(error.to_string())
}

/// Turns an error of the host into one of ours, for `what` could not be done.
pub fn host_error(what: &'static str) -> impl FnOnce(std::io::Error) -> VmError {
    move |why| VmError::Host { what, why }
}

/// Assembles the VM that `config` describes, whose disks' workers are started by `start_worker`.
/// `reopened`: this is a restart, files go on.
///
/// # Errors
/// See [`BuildError`].
pub fn build(
    config: &VmConfig,
    start_worker: &StartThread,
    reopened: bool,
) -> Result<Built, BuildError> {
    let disks = open_disks(config, start_worker)?;
    let kvm = open_kvm(config)?;
    let memory = crate::memory::map(&layout::ram_ranges(config.memory_bytes))?;
    let cpuid = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm_error("tell what CPUID it supports"))?;
    let window =
        layout::pci_mmio64(config.memory_bytes, physical_bits(&cpuid)).map_err(machine_error)?;
    let entry = load(config, &memory, &window)?;

    let lifecycle = Arc::new(Lifecycle::new().map_err(host_error("make an eventfd"))?);
    let vm = Vm::new(kvm, memory, config.halt, config.halt_poll.halt_poll_ns)?;
    if config.halt == Halt::Passthrough {
        passthrough::enable(&vm)?;
    }
    let Created { vcpus, sources, interrupts, polling } =
        create::create(config, &vm, &cpuid, &entry)?;
    let disk_sources = disks
        .iter()
        .zip(&config.disks)
        .map(|(block, disk)| DiskSource { name: disk.name.clone(), device: block.handle() })
        .collect();
    let sources = Arc::new(Sources { start: Instant::now(), vcpus: sources, disks: disk_sources });
    let guest = Arc::new(Mutex::new(GuestReport::default()));

    let console = make_console(config, &interrupts, &lifecycle, reopened)?;
    let results = make_results(config, &interrupts, &sources, &guest, reopened)?;
    let pci = make_pci(disks, &vm, &interrupts, window)?;
    let pio = make_pio(&pci, &lifecycle, Arc::clone(&console), results.clone())?;
    let ioapic = match &interrupts {
        Interrupts::User(chip) => Some(chip.ioapic()),
        Interrupts::Kernel(_) => None,
    };
    let mmio = make_mmio(pci, ioapic)?;

    let stop = AtomicBool::new(false);
    let machine = Arc::new(Machine { pio, mmio, memory: vm.memory, lifecycle, stop });
    Ok(Built { machine, vcpus, interrupts, polling, console, results, sources, guest })
}

fn shared<T: BusDevice + 'static>(device: T) -> Arc<Mutex<dyn BusDevice>> {
    Arc::new(Mutex::new(device))
}

fn open_kvm(config: &VmConfig) -> Result<Kvm, BuildError> {
    let path = std::ffi::CString::new(config.kvm.as_os_str().as_encoded_bytes())
        .map_err(|_| ConfigError::new("--kvm", config.kvm.display(), "not a path"))?;
    let kvm = Kvm::new_with_path(&path)
        .map_err(|error| ConfigError::kvm(&config.kvm, &std::io::Error::from(error)))?;
    if u32::try_from(kvm.get_api_version()) != Ok(KVM_API_VERSION) {
        return Err(ConfigError::not_kvm(&config.kvm).into());
    }
    config.check_cpus(kvm.get_max_vcpus())?;
    Ok(kvm)
}

/// Opens and locks the disks, in the order of the command line.
fn open_disks(config: &VmConfig, start_worker: &StartThread) -> Result<Vec<Block>, BuildError> {
    let open = |disk: &BlkConfig| {
        let file = Disk::open(disk).map_err(ConfigError::from)?;
        Ok(Block::new(disk.clone(), file).started_by(start_worker.clone()))
    };
    config.disks.iter().map(open).collect()
}

/// Physical address bits of the guest's CPU (CPUID 0x8000_0008, EAX bits 7:0).
pub fn physical_bits(cpuid: &CpuId) -> u8 {
    let leaf = cpuid.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    leaf.map_or(36, |entry| (entry.eax & 0xff) as u8)
}

/// Puts kernel, initrd, command line and ACPI tables into guest memory.
fn load(
    config: &VmConfig,
    memory: &GuestMemory,
    window: &std::ops::Range<u64>,
) -> Result<Entry, BuildError> {
    let acpi_config = acpi::AcpiConfig {
        cpus: config.cpus,
        com2: config.results.is_some(),
        pci_mmio64: window.clone(),
    };
    let rsdp = acpi::write(memory, &acpi_config).map_err(|error| config.boot_error(&error))?;
    let open = |path: &std::path::Path| {
        File::open(path)
            .map_err(|error| config.boot_error(&BootError::Read { path: path.to_owned(), error }))
    };
    let mut kernel = open(&config.kernel)?;
    let mut initrd = config.initrd.as_deref().map(open).transpose()?;
    let request = BootRequest {
        kernel: Image { file: &mut kernel, path: &config.kernel },
        initrd: initrd
            .as_mut()
            .zip(config.initrd.as_deref())
            .map(|(file, path)| Image { file, path }),
        protocol: match config.boot {
            Boot::Auto => BootProtocol::Auto,
            Boot::Linux64 => BootProtocol::Linux64,
            Boot::Pvh => BootProtocol::Pvh,
        },
        cmdline: &config.cmdline,
        rsdp,
    };
    Ok(boot::load(memory, request).map_err(|error| config.boot_error(&error))?)
}

/// COM1. Its output is watched for the kernel's last words.
fn make_console(
    config: &VmConfig,
    interrupts: &Interrupts,
    lifecycle: &Arc<Lifecycle>,
    reopened: bool,
) -> Result<Arc<Mutex<SerialPort>>, BuildError> {
    let sink: Box<dyn Write + Send> = match &config.console {
        Console::Stdio => Box::new(std::io::stdout()),
        Console::File(path) => Box::new(open_output("--console", path, reopened)?),
        Console::Off => Box::new(std::io::sink()),
    };
    let irq = interrupts.line(layout::COM1_GSI).map_err(host_error("connect COM1's interrupt"))?;
    let port = SerialPort::new(irq, sink).watched_by(Box::new(PanicWatcher(Arc::clone(lifecycle))));
    Ok(Arc::new(Mutex::new(port)))
}

/// COM2, the results channel, if there is one.
fn make_results(
    config: &VmConfig,
    interrupts: &Interrupts,
    sources: &Arc<Sources>,
    report: &Arc<Mutex<GuestReport>>,
    reopened: bool,
) -> Result<Option<Arc<Mutex<SerialPort>>>, BuildError> {
    let Some(path) = &config.results else { return Ok(None) };
    let sink = open_output("--results", path, reopened)?;
    let irq = interrupts.line(layout::COM2_GSI).map_err(host_error("connect COM2's interrupt"))?;
    let watcher = ChannelWatcher { sources: Arc::clone(sources), report: Arc::clone(report) };
    let port = SerialPort::new(irq, Box::new(sink)).watched_by(Box::new(watcher));
    Ok(Some(Arc::new(Mutex::new(port))))
}

/// Opens a file that output goes to: new, or at its end after a restart.
///
/// # Errors
/// It cannot be written, by the name of `option`.
pub fn open_output(
    option: &'static str,
    path: &std::path::Path,
    append: bool,
) -> Result<File, ConfigError> {
    let mut options = File::options();
    let options = if append { options.append(true) } else { options.write(true).truncate(true) };
    let refused = |error| ConfigError::new(option, path.display(), crate::config::reason(&error));
    // Without waiting, so that a FIFO that nobody reads is an error (ENXIO) and no hang.
    let file = options.create(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(refused)?;
    // SAFETY: changes the flags of our own descriptor. Output itself waits for its reader.
    let status = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK)
    };
    if status < 0 {
        return Err(refused(std::io::Error::last_os_error()));
    }
    Ok(file)
}

/// The PCI bus with a function for each disk.
fn make_pci(
    disks: Vec<Block>,
    vm: &Vm,
    interrupts: &Interrupts,
    window: std::ops::Range<u64>,
) -> Result<Arc<PciRoot>, VmError> {
    let mut pci = PciRoot::new(window.start..=window.end - 1);
    let binder = Arc::new(IoEventFds(Arc::clone(&vm.fd)));
    for block in disks {
        let vectors = block.counters().len() as u16 + 1;
        let sink = interrupts.msi_sink(vectors).map_err(host_error("make an eventfd"))?;
        let function =
            VirtioPci::new(Box::new(block), Arc::clone(&vm.memory), sink, Arc::clone(&binder) as _)
                .map_err(machine_error)?;
        pci.add(Arc::new(Mutex::new(function))).map_err(machine_error)?;
    }
    Ok(Arc::new(pci))
}

/// All of memory that is not RAM: ECAM, the I/O APIC if that is Pollux's own, and the BARs of `pci`.
///
/// # Errors
/// Two of them are in one place.
pub fn make_mmio(pci: Arc<PciRoot>, ioapic: Option<SharedDevice>) -> Result<MmioBus, VmError> {
    let mut mmio = MmioBus::new(Arc::clone(&pci));
    mmio.insert(layout::ECAM_START, layout::ECAM_BYTES, shared(Ecam(pci)))
        .map_err(machine_error)?;
    if let Some(ioapic) = ioapic {
        mmio.insert(IOAPIC_ADDRESS, IOAPIC_BYTES, ioapic).map_err(machine_error)?;
    }
    Ok(mmio)
}

/// All I/O ports.
///
/// # Errors
/// Two devices have the same.
pub fn make_pio(
    pci: &Arc<PciRoot>,
    lifecycle: &Arc<Lifecycle>,
    console: Arc<Mutex<SerialPort>>,
    results: Option<Arc<Mutex<SerialPort>>>,
) -> Result<PioBus, VmError> {
    let life = Arc::clone(lifecycle);
    let events: PowerSink = Arc::new(move |event| life.power_event(event));
    let mut pio = PioBus::new();
    let mut insert = |start, ports, device| pio.insert(start, ports, device).map_err(machine_error);
    insert(layout::COM1_PORT, serial::PORTS, console)?;
    if let Some(results) = results {
        insert(layout::COM2_PORT, serial::PORTS, results)?;
    }
    insert(power::I8042_PORT, 1, shared(I8042(Arc::clone(&events))))?;
    insert(
        power::ACPI_POWER_PORT,
        power::ACPI_POWER_PORTS,
        shared(AcpiPower(Arc::clone(&events))),
    )?;
    insert(power::PVPANIC_PORT, 1, shared(PvPanic(events)))?;
    insert(layout::PCI_CONFIG_PORT, 8, shared(ConfigPorts(Arc::clone(pci))))?;
    Ok(pio)
}
