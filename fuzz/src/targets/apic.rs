//! Local APICs and an I/O APIC as their guest uses them: registers by memory and by MSRs, IPIs, MSIs,
//! pins, timers, and a vCPU's loop. Every vector in service and every mode change is followed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use devices::bus::SharedDevice;
use devices::irq::{IrqLine, MsiMessage, MsiSink};
use devices::irqchip::{
    ApicConfig, ApicMode, IoApicLine, IrqChip, LocalApic, Notify, Now, UserMsi,
};

use crate::input::Input;

const TSC_KHZ: u32 = 2_000_000;
const ADDRESS_BITS: u8 = 46;
const STEPS: usize = 150;
const PINS: u8 = 24;
const MSI_VECTORS: u16 = 3;

// Registers, by number: 16 bytes of the page or one MSR each.
const TPR: u64 = 0x08;
const PPR: u64 = 0x0a;
const EOI: u64 = 0x0b;
const LDR: u64 = 0x0d;
const DFR: u64 = 0x0e;
const SVR: u64 = 0x0f;
const ISR: u64 = 0x10;
const TMR: u64 = 0x18;
const IRR: u64 = 0x20;
const ESR: u64 = 0x28;
const ICR: u64 = 0x30;
const ICR_HIGH: u64 = 0x31;
const LVT_TIMER: u64 = 0x32;
const INITIAL_COUNT: u64 = 0x38;
const CURRENT_COUNT: u64 = 0x39;
const DIVIDE: u64 = 0x3e;
const SELF_IPI: u64 = 0x3f;
const APIC_BASE: u32 = 0x1b;
const TSC_DEADLINE: u32 = 0x6e0;

#[derive(Default)]
struct Notified(AtomicUsize);

impl Notify for Notified {
    fn notify(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A vCPU, and the vectors it has in service.
struct Cpu {
    lapic: LocalApic,
    in_service: BTreeSet<u8>,
    notified: Arc<Notified>,
}

struct World {
    chip: IrqChip,
    cpus: Vec<Cpu>,
    ioapic: SharedDevice,
    lines: Vec<Arc<IoApicLine>>,
    sink: Arc<UserMsi>,
    ns: u64,
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let notified: Vec<Arc<Notified>> = (0..1 + input.u8() % 4).map(|_| Arc::default()).collect();
    let config = ApicConfig { tsc_khz: TSC_KHZ, physical_address_bits: ADDRESS_BITS };
    let notify = notified.iter().map(|notified| notified.clone() as Arc<dyn Notify>).collect();
    let (chip, lapics) = IrqChip::new(&config, notify);
    assert!(chip.line(PINS).is_none());
    let cpus = lapics
        .into_iter()
        .zip(notified)
        .map(|(lapic, notified)| Cpu { lapic, in_service: BTreeSet::new(), notified })
        .collect();
    let mut world = World {
        ioapic: chip.ioapic(),
        lines: (0..PINS).filter_map(|pin| chip.line(pin)).collect(),
        sink: chip.msi_sink(MSI_VECTORS),
        chip,
        cpus,
        ns: 1000,
    };
    if !input.rarely(8) {
        for cpu in &mut world.cpus {
            let now = Now { ns: 1000, tsc: 2000 };
            cpu.lapic.write_mmio(16 * SVR, &0x1ff_u32.to_le_bytes(), now);
        }
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    for index in 0..world.cpus.len() {
        world.check(index);
    }
}

fn mode_of(base: u64) -> ApicMode {
    match (base >> 11 & 1, base >> 10 & 1) {
        (0, _) => ApicMode::Disabled,
        (_, 0) => ApicMode::XApic,
        _ => ApicMode::X2Apic,
    }
}

/// Whether a software write of IA32_APIC_BASE from `old` to `new` is possible (SDM 11.12.5).
fn base_may_change(old: u64, new: u64) -> bool {
    let legal = new >> ADDRESS_BITS == 0 && new & 0x2ff == 0;
    let impossible = matches!(
        (mode_of(old), new >> 11 & 1, new >> 10 & 1),
        (_, 0, 1) | (ApicMode::Disabled, 1, 1) | (ApicMode::X2Apic, 1, 0)
    );
    legal && !impossible
}

impl World {
    fn now(&self) -> Now {
        Now { ns: self.ns, tsc: self.ns.saturating_mul(u64::from(TSC_KHZ) / 1_000_000) }
    }

    fn step(&mut self, input: &mut Input) {
        let cpu = usize::from(input.u8()) % self.cpus.len();
        match input.u8() % 20 {
            0..4 => self.write(cpu, input),
            4 => self.read(cpu, input),
            5 => self.ipi(cpu, input),
            6..9 => self.enter(cpu),
            9 => self.end_of_interrupt(cpu),
            10 => self.set_base(cpu, input),
            11 => self.timer(cpu, input),
            12 => self.pass_time(cpu, input),
            13 => self.msi(input),
            14 => self.sink(input),
            15 | 16 => self.redirection(input),
            17 => {
                let pin = usize::from(input.u8() % PINS);
                match input.u8() % 4 {
                    0 => self.lines[pin].pulse(),
                    what => self.lines[pin].set_level(what != 1),
                }
            }
            18 => self.raw_ioapic(input),
            _ => self.check(cpu),
        }
    }

    /// A register, read whichever way the mode has.
    fn register(&mut self, cpu: usize, register: u64) -> Option<u64> {
        let now = self.now();
        let lapic = &mut self.cpus[cpu].lapic;
        match lapic.mode() {
            ApicMode::Disabled => None,
            ApicMode::XApic => {
                let mut data = [0; 4];
                lapic.read_mmio(16 * register, &mut data, now);
                Some(u32::from_le_bytes(data).into())
            }
            ApicMode::X2Apic => lapic.read_msr(0x800 + register as u32, now).ok(),
        }
    }

    fn set_register(&mut self, cpu: usize, register: u64, value: u64) -> bool {
        let now = self.now();
        let lapic = &mut self.cpus[cpu].lapic;
        match lapic.mode() {
            ApicMode::Disabled => false,
            ApicMode::XApic => {
                lapic.write_mmio(16 * register, &(value as u32).to_le_bytes(), now);
                true
            }
            ApicMode::X2Apic => lapic.write_msr(0x800 + register as u32, value, now).is_ok(),
        }
    }

    fn write(&mut self, cpu: usize, input: &mut Input) {
        let registers =
            [TPR, SVR, LDR, DFR, ESR, LVT_TIMER, 0x33, 0x34, 0x35, 0x36, 0x37, DIVIDE, SELF_IPI];
        let register = match input.u8() {
            0xe0.. => input.u8().into(),
            byte => registers[usize::from(byte) % registers.len()],
        };
        let value =
            input.usually(&[0x1ff, 0x30, 0, 0x41, 0x1_00ec, 0x2_00ec, 0x4_00ec, 0x0100_0000, 0xb]);
        if register == EOI {
            return self.end_of_interrupt(cpu);
        }
        let before = self.register(cpu, register);
        let now = self.now();
        if input.rarely(8) {
            // The way that the mode does not have, or of a wrong shape.
            let bytes = value.to_le_bytes();
            let len = input.pick(&[1, 2, 8, 3, 4]);
            let lapic = &mut self.cpus[cpu].lapic;
            if lapic.mode() != ApicMode::XApic {
                lapic.write_mmio(16 * register, &bytes[..len], now);
                let mut data = vec![0; len];
                lapic.read_mmio(16 * register, &mut data, now);
                assert!(data.iter().all(|byte| *byte == 0xff));
            } else {
                let msr = 0x800 + register as u32;
                assert!(lapic.write_msr(msr, value, now).is_err());
                assert!(lapic.read_msr(msr, now).is_err());
                let offset = 16 * register + u64::from(input.u8() % 16);
                if len != 4 || offset % 16 != 0 {
                    lapic.write_mmio(offset, &bytes[..len], now);
                }
            }
            if register < 0x40 && register != CURRENT_COUNT && register != ESR {
                assert_eq!(self.register(cpu, register), before, "register {register:#x}");
            }
            return;
        }
        let done = self.set_register(cpu, register, value);
        if self.cpus[cpu].lapic.mode() == ApicMode::X2Apic && value > u64::from(u32::MAX) {
            assert!(!done || register == ICR, "{register:#x} has 32 bits");
        }
        if done && register == TPR {
            assert_eq!(self.register(cpu, TPR), Some(value & 0xff));
            assert_eq!(self.cpus[cpu].lapic.cr8(), (value as u8) >> 4);
        }
        self.check(cpu);
    }

    fn read(&mut self, cpu: usize, input: &mut Input) {
        let now = self.now();
        let lapic = &mut self.cpus[cpu].lapic;
        let len = input.pick(&[4, 1, 2, 8, 16]);
        let mut data = vec![0x77; len];
        lapic.read_mmio(input.usually(&[0x20, 0x30, 0x80, 0xd0, 0x390, 0xfff]), &mut data, now);
        let msr = input.usually(&[0x802, 0x803, 0x80d, 0x839, 0x8ff, 0x1b, 0x6e0]) as u32;
        let value = lapic.read_msr(msr, now);
        assert!(value.is_err() || LocalApic::handles_msr(msr));
        if let (Some(current), Some(initial)) =
            (self.register(cpu, CURRENT_COUNT), self.register(cpu, INITIAL_COUNT))
        {
            assert!(current <= initial, "{current:#x} of {initial:#x}");
        }
    }

    fn ipi(&mut self, cpu: usize, input: &mut Input) {
        let vector = u64::from(input.u8());
        let mode = input.pick(&[0, 0, 0, 1, 2, 3, 4, 5, 6, 7]) << 8;
        let shorthand = u64::from(input.u8() % 4) << 18;
        let extra = input.usually(&[0, 1 << 14, 1 << 11, 1 << 15 | 1 << 14, 1 << 15, 1 << 12]);
        let low = vector | mode | shorthand | extra & 0xffff_ffff;
        let to = input.usually(&[0, 1, 2, 3, 0xff, 5]) & 0xff;
        if self.cpus[cpu].lapic.mode() == ApicMode::X2Apic {
            let to = if to == 0xff { 0xffff_ffff } else { to };
            let sent = self.set_register(cpu, ICR, to << 32 | low);
            if !sent {
                assert_ne!(low & 0xfff3_2000, 0, "no reserved bit is set");
            }
        } else {
            self.set_register(cpu, ICR_HIGH, to << 24);
            self.set_register(cpu, ICR, low);
        }
        self.check(cpu);
    }

    /// What a vCPU's loop does before it enters the guest.
    fn enter(&mut self, cpu: usize) {
        let now = self.now();
        let Cpu { lapic, in_service, .. } = &mut self.cpus[cpu];
        lapic.timer_tick(now);
        if lapic.take_init() {
            in_service.clear();
            assert_eq!(lapic.pending_vector(), None);
        }
        lapic.take_sipi();
        let nmi = lapic.shared().nmi_pending();
        assert_eq!(lapic.take_nmi(), nmi);
        assert!(!lapic.shared().nmi_pending());
        if let Some(vector) = lapic.pending_vector() {
            assert!(vector >= 16, "vector {vector} is reserved");
            assert!(vector >> 4 > lapic.processor_priority() >> 4);
            assert!(lapic.has_wake_event(true));
            assert!(lapic.accept(vector));
            assert!(in_service.insert(vector), "it was in service, and so not let through");
            assert!(!lapic.accept(vector));
            assert!(lapic.processor_priority() >> 4 >= vector >> 4);
        }
        self.check(cpu);
    }

    fn end_of_interrupt(&mut self, cpu: usize) {
        let highest = self.cpus[cpu].in_service.last().copied();
        if self.set_register(cpu, EOI, 0)
            && let Some(vector) = highest
        {
            self.cpus[cpu].in_service.remove(&vector);
        }
        self.check(cpu);
    }

    fn set_base(&mut self, cpu: usize, input: &mut Input) {
        let now = self.now();
        let Cpu { lapic, in_service, .. } = &mut self.cpus[cpu];
        let old = lapic.apic_base();
        let value = input.usually(&[
            0xfee0_0c00,
            0xfee0_0800,
            0xfee0_0000,
            0xfee0_0900,
            0xfee0_0400,
            0x1234_5800,
            1 << 50,
        ]);
        let result = lapic.write_msr(APIC_BASE, value, now);
        assert_eq!(result.is_ok(), base_may_change(old, value), "{old:#x} to {value:#x}");
        let expected = if result.is_ok() { value } else { old };
        assert_eq!(lapic.apic_base(), expected);
        assert_eq!(lapic.mode(), mode_of(expected));
        let page = (lapic.mode() == ApicMode::XApic).then_some(expected & !0xfff);
        assert_eq!(lapic.mmio_base(), page);
        if lapic.mode() == ApicMode::Disabled {
            if result.is_ok() {
                in_service.clear();
            }
            assert_eq!(lapic.pending_vector(), None);
        }
    }

    fn timer(&mut self, cpu: usize, input: &mut Input) {
        let now = self.now();
        let count = input.usually(&[100, 1, 0, 0xffff_ffff, 5000]);
        match input.u8() % 4 {
            0 => {
                let mode = input.pick(&[0, 0x2_0000, 0x4_0000]);
                self.set_register(cpu, LVT_TIMER, mode | 0xec);
            }
            1 => {
                let lapic = &mut self.cpus[cpu].lapic;
                let deadline = if count > 5000 { count } else { now.tsc.saturating_add(count) };
                assert!(lapic.write_msr(TSC_DEADLINE, deadline, now).is_ok());
                let read = lapic.read_msr(TSC_DEADLINE, now);
                assert!(read == Ok(0) || read == Ok(deadline) && deadline > now.tsc);
            }
            2 => drop(self.set_register(cpu, DIVIDE, count & 0xb)),
            _ => drop(self.set_register(cpu, INITIAL_COUNT, count & 0xffff_ffff)),
        }
        self.check(cpu);
    }

    /// To a timer's deadline, or anywhere.
    fn pass_time(&mut self, cpu: usize, input: &mut Input) {
        let far = input.usually(&[1, 50, 1000, 100_000, 1 << 40]);
        let deadline = self.cpus[cpu].lapic.next_timer_deadline_ns(self.now());
        assert!(deadline.is_none_or(|deadline| deadline >= self.ns));
        let to_deadline = input.flag();
        match deadline.filter(|deadline| to_deadline && *deadline < 1 << 62) {
            Some(deadline) => {
                self.ns = deadline;
                let now = self.now();
                let lapic = &mut self.cpus[cpu].lapic;
                assert!(lapic.timer_tick(now), "it has expired at its deadline");
                let next = lapic.next_timer_deadline_ns(now);
                assert!(next.is_none_or(|next| next > self.ns), "and will not again at once");
            }
            None => {
                self.ns = self.ns.saturating_add(far);
                let now = self.now();
                self.cpus[cpu].lapic.timer_tick(now);
            }
        }
    }

    fn message(input: &mut Input) -> MsiMessage {
        let to = input.usually(&[0, 1, 2, 3, 0xff, 9]) & 0xff;
        let flags = input.pick(&[0, 0, 0, 4, 8, 12]);
        let base = input.usually(&[0xfee0_0000]);
        let mode = input.pick(&[0, 0, 0, 0x100, 0x400, 0x500, 0x600, 0x700, 0x300, 0x8000, 0xc000]);
        MsiMessage { address: base | to << 12 | flags, data: u32::from(input.u8()) | mode }
    }

    fn msi(&mut self, input: &mut Input) {
        let message = Self::message(input);
        let accepted = self.chip.deliver(message);
        let to = (message.address >> 12 & 0xff) as usize;
        let plain = message.address & 0xffff_ffff_fff0_0fff == 0xfee0_0000 && message.data < 0x100;
        if !plain || to == 0xff {
            return;
        }
        let vector = message.data as u8;
        let Some(enabled) = (to < self.cpus.len()).then(|| self.register(to, SVR)).flatten() else {
            return assert!(!accepted, "{message:x?}");
        };
        let possible = vector >= 16 && enabled & 0x100 != 0;
        assert_eq!(accepted, possible, "{message:x?}");
        if accepted {
            let word = self.register(to, IRR + u64::from(vector / 32));
            assert_ne!(word.unwrap_or(0) >> (vector % 32) & 1, 0, "it is requested");
            assert_ne!(self.cpus[to].notified.0.load(Ordering::Relaxed), 0);
        }
    }

    fn sink(&mut self, input: &mut Input) {
        let vector = u16::from(input.u8()) % (MSI_VECTORS + 1);
        match input.u8() % 3 {
            0 => self.sink.trigger(vector),
            1 => assert_eq!(self.sink.mask(vector).is_ok(), vector < MSI_VECTORS),
            _ => {
                let unmasked = self.sink.unmask(vector, Self::message(input));
                assert_eq!(unmasked.is_ok(), vector < MSI_VECTORS);
            }
        }
    }

    fn ioapic_write(&mut self, register: u8, value: u32) {
        let mut ioapic = self.ioapic.lock().expect("no panic inside");
        ioapic.write(0, &[register, 0, 0, 0]);
        ioapic.write(0x10, &value.to_le_bytes());
    }

    fn ioapic_read(&mut self, register: u8) -> u32 {
        let mut ioapic = self.ioapic.lock().expect("no panic inside");
        ioapic.write(0, &[register, 0, 0, 0]);
        let mut data = [0; 4];
        ioapic.read(0x10, &mut data);
        u32::from_le_bytes(data)
    }

    fn redirection(&mut self, input: &mut Input) {
        let pin = input.u8() % PINS;
        let mode = input.pick(&[0, 0, 0, 0x100, 0x400, 0x500, 0x700, 0x300]);
        let extra = input.pick(&[0, 0x8000, 0x8000, 0x1_0000, 0x800, 0x8800, 0x5000]);
        let low = u32::from(input.u8()) | mode | extra;
        let to = (input.usually(&[0, 1, 2, 0xff, 7]) as u32) << 24;
        self.ioapic_write(0x11 + 2 * pin, to);
        self.ioapic_write(0x10 + 2 * pin, low);
        assert_eq!(self.ioapic_read(0x11 + 2 * pin), to);
        let read = self.ioapic_read(0x10 + 2 * pin);
        assert_eq!(read & !0x5000, low & 0x1_ffff & !0x5000);
        self.check_pins();
    }

    fn raw_ioapic(&mut self, input: &mut Input) {
        let offset = input.usually(&[0, 0x10, 0x40, 0x20]);
        let len = input.pick(&[4, 1, 8, 2]);
        let mut data = input.u64().to_le_bytes();
        {
            let mut ioapic = self.ioapic.lock().expect("no panic inside");
            ioapic.write(offset, &data[..len]);
            ioapic.read(offset, &mut data[..len]);
        }
        assert_eq!(self.ioapic_read(1), 0x17_0020, "the version and the last pin");
        self.check_pins();
    }

    fn check_pins(&mut self) {
        for pin in 0..PINS {
            let low = self.ioapic_read(0x10 + 2 * pin);
            assert_eq!(low & 0x1000, 0, "nothing waits to be sent");
            // An edge is sent and forgotten.
            assert!(low & 0x4000 == 0 || low & 0x8000 != 0, "pin {pin}: {low:#x}");
        }
    }

    /// In service is what was accepted and not ended, and the priorities follow.
    fn check(&mut self, cpu: usize) {
        if self.cpus[cpu].lapic.mode() == ApicMode::Disabled {
            return;
        }
        // An illegal vector that came is found here, and may request the error interrupt.
        self.cpus[cpu].lapic.pending_vector();
        let mut requested = BTreeSet::new();
        let mut in_service = BTreeSet::new();
        for word in 0..8 {
            let isr = self.register(cpu, ISR + word).expect("there in both modes");
            let irr = self.register(cpu, IRR + word).expect("there in both modes");
            self.register(cpu, TMR + word).expect("there in both modes");
            for bit in 0..32 {
                let vector = (32 * word + bit) as u8;
                if isr >> bit & 1 != 0 {
                    in_service.insert(vector);
                }
                if irr >> bit & 1 != 0 {
                    requested.insert(vector);
                }
            }
        }
        assert_eq!(in_service, self.cpus[cpu].in_service, "in service");
        assert!(requested.first().is_none_or(|vector| *vector >= 16));
        let tpr = self.register(cpu, TPR).expect("there in both modes") as u8;
        let ppr = self.register(cpu, PPR).expect("there in both modes") as u8;
        let highest = in_service.last().copied().unwrap_or(0);
        let expected = if tpr >> 4 >= highest >> 4 { tpr } else { highest & 0xf0 };
        assert_eq!(ppr, expected, "the processor's priority");
        let next = requested.last().copied().filter(|vector| vector >> 4 > ppr >> 4);
        assert_eq!(self.cpus[cpu].lapic.pending_vector(), next);
    }
}
