//! What a vCPU's exits bring, on the buses of a whole machine as `pollux run` makes them: ports, memory
//! and MSRs, of any size at any address. Where no device is, reads are all ones; the run ends by the
//! power registers only; and the guest's output is bounded by what it wrote.
//!
//! The vCPU itself is missing, which needs KVM: of `--halt user` its local APIC is here, and the
//! buses are reached through [`Machine`].

use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use devices::GuestMemory;
use devices::irqchip::{
    ApicConfig, IOAPIC_ADDRESS, IOAPIC_BYTES, IrqChip, LAPIC_BYTES, LocalApic, Notify, Now,
};
use devices::pci::bus::PciRoot;
use devices::power::{ACPI_POWER_PORT, ACPI_RESET_PORT, I8042_PORT, PVPANIC_PORT};
use devices::serial::SerialPort;
use devices::testkit::{self, Notifier};
use devices::virtio::pci::VirtioPci;
use tempfile::NamedTempFile;
use virtio_blk::{BlkConfig, Block, Disk, EngineKind};
use vmm::boot::layout::{
    COM1_PORT, COM2_PORT, ECAM_BYTES, ECAM_START, PCI_CONFIG_PORT, PCI_MMIO32,
};
use vmm::builder::{make_mmio, make_pio};
use vmm::lifecycle::{End, Lifecycle};
use vmm::stats::Sources;
use vmm::stats::channel::{ChannelWatcher, GuestReport, PanicWatcher};
use vmm::vcpu::run::Machine;
use vmm::vcpu::user::MSR_KVM_POLL_CONTROL;

use crate::input::Input;

const STEPS: usize = 200;
const TSC_KHZ: u32 = 2_000_000;
const ADDRESS_BITS: u8 = 40;
const RAM_BYTES: usize = 1 << 20;
const LAPIC_START: u64 = 0xfee0_0000;
/// Where 64-bit BARs are.
const WINDOW: Range<u64> = 1 << 36..1 << 37;
/// Ports with a device, and where each begins and ends.
const PORTS: [Range<u64>; 6] = [
    COM1_PORT as u64..COM1_PORT as u64 + 8,
    COM2_PORT as u64..COM2_PORT as u64 + 8,
    I8042_PORT as u64..I8042_PORT as u64 + 1,
    ACPI_POWER_PORT as u64..ACPI_POWER_PORT as u64 + 3,
    PVPANIC_PORT as u64..PVPANIC_PORT as u64 + 1,
    PCI_CONFIG_PORT as u64..PCI_CONFIG_PORT as u64 + 8,
];
/// Marks, and reports of one word, that are kept.
const MAX_KEPT: usize = 256;
/// The notation of a mark, which random bytes do not find.
const MARK: &[u8] = b"@mark m\n@fio {}\n@exit 3\nKernel panic - not syncing: x\n";

thread_local! {
    /// Made once.
    static PLACE: (GuestMemory, NamedTempFile) = {
        let shm = Path::new("/dev/shm");
        let image = if shm.is_dir() { NamedTempFile::new_in(shm) } else { NamedTempFile::new() };
        let image = image.expect("a file");
        image.as_file().set_len(1 << 16).expect("a length");
        (testkit::memory(RAM_BYTES), image)
    };
}

struct Nobody;

impl Notify for Nobody {
    fn notify(&self) {}
}

/// Counts what a port sends.
#[derive(Clone, Default)]
struct Sink(Arc<AtomicUsize>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct World {
    machine: Machine,
    lapic: LocalApic,
    _chip: IrqChip,
    sent: Sink,
    report: Arc<Mutex<GuestReport>>,
    /// Bytes written to ports.
    written: usize,
    /// Whether the power registers have ended the run, and how.
    ended: Option<Ended>,
    ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    PowerOff,
    Reset,
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = PLACE.with(|(memory, image)| World::new(memory, image));
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
        world.check();
    }
}

impl World {
    fn new(memory: &GuestMemory, image: &NamedTempFile) -> World {
        let apic = ApicConfig { tsc_khz: TSC_KHZ, physical_address_bits: ADDRESS_BITS };
        let (chip, mut lapics) = IrqChip::new(&apic, vec![Arc::new(Nobody)]);
        let disk = BlkConfig {
            path: image.path().to_path_buf(),
            engine: EngineKind::Sync,
            readonly: true,
            queues: 2,
            ..BlkConfig::default()
        };
        let block = Block::new(disk.clone(), Disk::open(&disk).expect("opens"));
        let sink = chip.msi_sink(3);
        let function = VirtioPci::new(Box::new(block), memory.clone(), sink, Notifier::new());
        let mut pci = PciRoot::new(WINDOW.start..=WINDOW.end - 1);
        pci.add(Arc::new(Mutex::new(function.expect("a function")))).expect("room for it");
        let pci = Arc::new(pci);

        let lifecycle = Arc::new(Lifecycle::new().expect("an eventfd"));
        let sent = Sink::default();
        let port = |line: u8| {
            let line = chip.line(line).expect("a pin");
            SerialPort::new(line, Box::new(sent.clone()))
        };
        let report = Arc::default();
        let sources = Sources { start: Instant::now(), vcpus: Vec::new(), disks: Vec::new() };
        let channel = ChannelWatcher { sources: Arc::new(sources), report: Arc::clone(&report) };
        let console = port(4).watched_by(Box::new(PanicWatcher(Arc::clone(&lifecycle))));
        let results = port(3).watched_by(Box::new(channel));
        let (console, results) = (Arc::new(Mutex::new(console)), Arc::new(Mutex::new(results)));
        let pio = make_pio(&pci, &lifecycle, console, Some(results)).expect("no overlap");
        let mmio = make_mmio(pci, Some(chip.ioapic())).expect("no overlap");
        let (memory, stop) = (memory.clone(), AtomicBool::new(false));
        World {
            machine: Machine { pio, mmio, memory, lifecycle, stop },
            lapic: lapics.remove(0),
            _chip: chip,
            sent,
            report,
            written: 0,
            ended: None,
            ns: 1000,
        }
    }

    fn step(&mut self, input: &mut Input) {
        match input.u8() % 8 {
            0 | 1 => self.read_port(input),
            2 | 3 => self.write_port(input),
            4 => self.memory(input, false),
            5 => self.memory(input, true),
            6 => self.msr(input),
            _ => self.say(input),
        }
    }

    fn port(input: &mut Input) -> (u16, u8) {
        let starts = PORTS.map(|range| range.start);
        let port = input.usually(&starts).wrapping_add(u64::from(input.u8() % 16)) as u16;
        (port.wrapping_sub(2), input.pick(&[1, 1, 4, 2, 8, 0]))
    }

    /// Of a string instruction.
    fn more(input: &mut Input) -> usize {
        if input.rarely(8) { input.below(64) } else { 0 }
    }

    fn read_port(&mut self, input: &mut Input) {
        let (port, item_bytes) = Self::port(input);
        let items = 1 + Self::more(input);
        let item = usize::from(item_bytes).max(1);
        let mut data = vec![0x5a; items * item];
        self.machine.read_port(port, item_bytes, &mut data);
        if !is_within(&PORTS, port.into(), item) {
            assert!(data.iter().all(|&byte| byte == 0xff), "port {port:#x}: {data:x?}");
        }
    }

    fn write_port(&mut self, input: &mut Input) {
        let (port, item_bytes) = Self::port(input);
        let item = usize::from(item_bytes).max(1);
        let count = item * (1 + Self::more(input));
        let mut data = vec![0; count];
        let first = input.usually(&[0xfe, 1, 0x34, 0x83, 0x8000_0000, 0x8000_0804, b'@'.into()]);
        let bytes = first.to_le_bytes();
        data.iter_mut().zip(bytes.iter().cycle()).for_each(|(to, from)| *to = *from);
        self.send(port, item_bytes, &data);
    }

    fn send(&mut self, port: u16, item_bytes: u8, data: &[u8]) {
        self.machine.write_port(port, item_bytes, data);
        self.written += data.len();
        for item in data.chunks(usize::from(item_bytes).max(1)) {
            if !is_within(&PORTS, port.into(), item.len()) {
                continue;
            }
            let ended = match (port, item[0]) {
                (I8042_PORT, 0xfe) | (ACPI_RESET_PORT, 1) => Ended::Reset,
                // Sleep type 5 and its enabling.
                (ACPI_POWER_PORT, value) if value & 0x3c == 0x34 => Ended::PowerOff,
                _ => continue,
            };
            self.ended.get_or_insert(ended);
        }
    }

    /// Whole lines on a serial port.
    fn say(&mut self, input: &mut Input) {
        let port = input.pick(&[COM2_PORT, COM1_PORT]);
        let count = usize::from(input.u8());
        let known = input.below(MARK.len());
        let text = if input.flag() { &MARK[known..] } else { input.bytes(count) };
        for _ in 0..=input.u8() % 16 {
            self.send(port, 1, text);
        }
    }

    fn memory(&mut self, input: &mut Input, write: bool) {
        let starts =
            [WINDOW.start, ECAM_START, IOAPIC_ADDRESS, LAPIC_START, ECAM_START + (1 << 15), 0x1000];
        let offset = if input.flag() { input.u16() } else { 0 };
        let address = input.usually(&starts).wrapping_add(u64::from(offset));
        let len = 1 + usize::from(input.u8() % 8);
        let mut data = input.u64().to_le_bytes();
        let data = &mut data[..len];
        self.ns += 100;
        let now = Now { ns: self.ns, tsc: 2 * self.ns };
        // As a vCPU's exit does it: its own local APIC first.
        let base = self.lapic.mmio_base().and_then(|base| address.checked_sub(base));
        match base.filter(|&offset| offset < LAPIC_BYTES) {
            Some(offset) if write => self.lapic.write_mmio(offset, data, now),
            Some(offset) => self.lapic.read_mmio(offset, data, now),
            None if write => self.machine.mmio.write(address, data),
            None => {
                data.fill(0x5a);
                self.machine.mmio.read(address, data);
                let ioapic = IOAPIC_ADDRESS..IOAPIC_ADDRESS + IOAPIC_BYTES;
                let devices = [ECAM_START..ECAM_START + ECAM_BYTES, ioapic, PCI_MMIO32, WINDOW];
                if !is_within(&devices, address, len) && !self.has_bar_anywhere() {
                    assert!(data.iter().all(|&byte| byte == 0xff), "{address:#x}: {data:x?}");
                }
            }
        }
    }

    /// A guest may put a BAR where RAM would be, and reach it there.
    fn has_bar_anywhere(&self) -> bool {
        let mut bar = [0; 8];
        self.machine.mmio.read(ECAM_START + (1 << 15) + 0x10, &mut bar[..4]);
        self.machine.mmio.read(ECAM_START + (1 << 15) + 0x14, &mut bar[4..]);
        !WINDOW.contains(&(u64::from_le_bytes(bar) & !0xf))
    }

    fn msr(&mut self, input: &mut Input) {
        let registers = u64::from(input.u8() % 0x41);
        let usual = [0x800 + registers, 0x1b, 0x6e0, u64::from(MSR_KVM_POLL_CONTROL), 0x10];
        let index = input.usually(&usual) as u32;
        let value = input.usually(&[0, 1, 0xfee0_0900, 0xfee0_0d00, 0xfee0_0100, 0x1ff, 0xfe]);
        self.ns += 100;
        let now = Now { ns: self.ns, tsc: 2 * self.ns };
        if LocalApic::handles_msr(index) {
            let _ = self.lapic.write_msr(index, value, now);
            let _ = self.lapic.read_msr(index, now);
        }
    }

    fn check(&self) {
        let ended = self.machine.lifecycle.ended().map(|end| match end {
            End::PowerOff => Ended::PowerOff,
            End::Reboot | End::Panic => Ended::Reset,
            other => panic!("{other:?}"),
        });
        assert_eq!(ended, self.ended);
        assert!(self.sent.0.load(Ordering::Relaxed) <= self.written);
        let report = self.report.lock().expect("no panic inside");
        assert!(report.marks.len() <= MAX_KEPT);
        assert!(report.reports.values().map(Vec::len).sum::<usize>() <= MAX_KEPT);
    }
}

/// Whether `bytes` bytes at `address` are wholly in one of the ranges.
fn is_within(ranges: &[Range<u64>], address: u64, bytes: usize) -> bool {
    let end = address.saturating_add(bytes as u64);
    ranges.iter().any(|range| range.start <= address && end <= range.end)
}
