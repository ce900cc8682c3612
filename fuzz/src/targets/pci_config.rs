//! A PCI bus with functions of the input's choice: both ways to configuration space, BARs that move
//! over each other, and MSI-X.

use std::sync::{Arc, Mutex};

use devices::pci::bar::Bar;
use devices::pci::bus::{PciError, PciRoot};
use devices::pci::config::{BarOffset, ConfigSpace, Identity};
use devices::pci::msix::Msix;
use devices::pci::{BarMapping, PciDevice};
use devices::testkit::RecordingSink;
use devices::testkit::model::MsixModel;

use crate::input::Input;

const WINDOW: std::ops::RangeInclusive<u64> = 0x40_0000_0000..=0x40_3fff_ffff;
const BYTES: usize = 256;
const STEPS: usize = 300;

/// A function whose BARs read as who they are, but for the MSI-X structures.
struct Function {
    number: u8,
    space: ConfigSpace,
    msix: Arc<Msix>,
    /// The BAR with the MSI-X structures, and where the pending bits are in it.
    msix_bar: u8,
    table: u64,
    pending: u64,
}

impl PciDevice for Function {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.space.read(offset, data);
    }
    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.space.write(offset, data);
    }
    fn mapped_bars(&self) -> Vec<BarMapping> {
        self.space.mapped_bars()
    }
    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        match offset {
            _ if bar != self.msix_bar => data.fill(signature(self.number, bar, offset)),
            at if at >= self.pending => self.msix.read_pba(at - self.pending, data),
            at if at >= self.table => self.msix.read_table(at - self.table, data),
            _ => data.fill(signature(self.number, bar, offset)),
        }
    }
    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if bar == self.msix_bar && (self.table..self.pending).contains(&offset) {
            self.msix.write_table(offset - self.table, data);
        }
    }
}

fn signature(number: u8, bar: u8, offset: u64) -> u8 {
    number.wrapping_mul(29) ^ bar.wrapping_mul(67) ^ (offset ^ offset >> 8) as u8 | 1
}

/// What the bus should show of a function.
struct Model {
    bytes: [u8; BYTES],
    writable: [u8; BYTES],
    /// Index and size of each BAR.
    bars: Vec<(u8, u64)>,
    msix: MsixModel,
    control: usize,
    msix_bar: u8,
    table: u64,
    pending: u64,
    sink: Arc<RecordingSink>,
    signal: Arc<Msix>,
}

impl Model {
    fn read(&self, register: u16, len: usize) -> Vec<u8> {
        let mut bytes = self.bytes.to_vec();
        bytes[self.control..self.control + 2].copy_from_slice(&self.msix.control().to_le_bytes());
        bytes.resize(4096 + 4, 0);
        bytes[register.into()..][..len].to_vec()
    }

    fn write(&mut self, register: u16, data: &[u8]) {
        for (&value, at) in data.iter().zip(usize::from(register)..) {
            if at >= BYTES {
                return;
            }
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
            if at == self.control + 1 {
                self.msix.set_control(value & 0x80 != 0, value & 0x40 != 0);
            }
        }
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("8 bytes"))
    }

    /// Index, first and last address of each BAR that answers.
    fn windows(&self) -> Vec<(u8, u64, u64)> {
        if self.bytes[4] & 2 == 0 {
            return Vec::new();
        }
        let place = |&(index, size): &(u8, u64)| {
            let address = self.u64_at(0x10 + 4 * usize::from(index)) & !(size - 1);
            (address != 0).then(|| (index, address, address + (size - 1)))
        };
        self.bars.iter().filter_map(place).collect()
    }
}

struct World {
    root: PciRoot,
    functions: Vec<Model>,
    address: u32,
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = World { root: PciRoot::new(WINDOW), functions: Vec::new(), address: 0 };
    for _ in 0..1 + input.u8() % 4 {
        world.add(&mut input);
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.check();
}

impl World {
    fn add(&mut self, input: &mut Input) {
        let identity = Identity {
            vendor_id: 0x1af4,
            device_id: input.u16(),
            revision: input.u8(),
            class: input.u32() & 0xff_ffff,
            subsystem_vendor_id: 0x1af4,
            subsystem_id: 7,
        };
        let vectors = 1 + input.u16() % 80;
        let sink = RecordingSink::new();
        let msix = Arc::new(Msix::new(vectors, sink.clone()));
        let mut space = ConfigSpace::new(&identity);
        let mut bars = Vec::new();
        for index in 0..6 {
            let size = input.usually(&[0x4000, 0, 0, 0x1000, 0x10_0000, 0x4000_0000, 0x3000, 8]);
            let bar = Bar::new(index, size, input.flag());
            let possible = index % 2 == 0 && size >= 4096 && size.is_power_of_two();
            assert_eq!(bar.is_ok(), possible, "BAR {index} of {size:#x} bytes");
            if let Ok(bar) = bar {
                space.add_bar(bar).expect("it is not there yet");
                space.add_bar(bar).expect_err("it is there");
                bars.push((index, size));
            }
        }
        let capability = input.usually(&[14, 0, 3, 60]) as usize % 300;
        let _ = space.add_capability(9, &vec![0x11; capability], &[0; 0]);
        let Some(&(msix_bar, size)) = bars.first() else { return };
        let table = input.usually(&[0, 0x1000, 0x800, 0x3008, 0x404]);
        let pending = table.saturating_add(16 * u64::from(vectors));
        let place = |offset| BarOffset { bar: msix_bar, offset_bytes: offset as u32 };
        let fits = pending <= u32::MAX.into()
            && table.is_multiple_of(8)
            && pending + 8 * u64::from(vectors).div_ceil(64) <= size;
        if pending > u32::MAX.into() {
            return;
        }
        let control = space.add_msix(msix.clone(), place(table), place(pending));
        let has_room = (capability + 2).next_multiple_of(4) + 12 <= BYTES - 0x40;
        assert!(if fits && has_room { control.is_ok() } else { fits || control.is_err() });
        let Ok(control) = control else { return };

        let mut first = vec![0; BYTES];
        space.read(0, &mut first);
        let number = self.functions.len() as u8 + 1;
        let function = Function { number, space, msix: msix.clone(), msix_bar, table, pending };
        let added = self.root.add(Arc::new(Mutex::new(function)));
        let added = match added {
            Ok(added) => added,
            Err(PciError::NoSpace(_)) => return,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(added, number);
        let mut model = Model {
            bytes: first.try_into().expect("256 bytes"),
            writable: [0; BYTES],
            bars,
            msix: MsixModel::new(vectors),
            control: usize::from(control) + 2,
            msix_bar,
            table,
            pending,
            sink,
            signal: msix,
        };
        model.writable[4..6].copy_from_slice(&[0x06, 0x04]);
        model.writable[0x0c] = 0xff;
        model.writable[0x3c] = 0xff;
        for &(index, size) in &model.bars {
            let at = 0x10 + 4 * usize::from(index);
            model.writable[at..at + 8].copy_from_slice(&(!(size - 1)).to_le_bytes());
            // Where the bus, which plays firmware, has put it.
            let register = Access::Ecam { device: number, register: at as u16 };
            for half in [0, 4] {
                let data = self.read(register.plus(half), 4);
                model.bytes[at + usize::from(half)..][..4].copy_from_slice(&data);
            }
            let address = model.u64_at(at) & !(size - 1);
            assert!(WINDOW.contains(&address) && WINDOW.contains(&(address + size - 1)));
        }
        self.functions.push(model);
    }

    fn step(&mut self, input: &mut Input) {
        match input.u8() % 12 {
            0..2 => {
                let at = self.access(input);
                let len = input.pick(&[4, 2, 1, 4, 8, 3]);
                self.read_and_check(at, len);
            }
            2..5 => {
                let at = self.access(input);
                let len = input.pick(&[4, 2, 1, 4, 8, 3]);
                let value = input.usually(&[u64::MAX, 0, 6, 2, 0x8000_0000_0000, 0xc000_4000]);
                self.write(at, &value.to_le_bytes()[..len]);
            }
            5..7 => self.move_bar(input),
            7 => {
                // Decoding on or off.
                let device = 1 + input.u8() % 5;
                let value = if input.rarely(3) { 0 } else { 6 };
                self.write(Access::Ecam { device, register: 4 }, &[value, 0]);
            }
            8..10 => self.memory(input),
            10 => {
                let device = 1 + input.u8() % 4;
                let Some(model) = self.functions.get_mut(usize::from(device) - 1) else { return };
                let register = model.control as u16;
                let value = u16::from(input.u8()) << 8;
                self.write(Access::Ecam { device, register }, &value.to_le_bytes());
            }
            _ => {
                let index = usize::from(input.u8()) % self.functions.len().max(1);
                let Some(model) = self.functions.get_mut(index) else { return };
                let vector = u16::from(input.u8());
                model.signal.signal(vector);
                model.msix.signal(vector);
            }
        }
    }

    fn access(&self, input: &mut Input) -> Access {
        let device = input.usually(&[1, 2, 1, 3, 4, 0, 5, 31]) as u8;
        let register = match input.u8() {
            0xf8.. => input.u16() & 0xfff,
            byte => byte.into(),
        };
        match input.u8() % 8 {
            0..4 => Access::Ecam { device: device % 32, register },
            4..7 => Access::Ports { device: device % 32, register: register & 0xff },
            _ => Access::Raw(input.u32()),
        }
    }

    fn read(&mut self, at: Access, len: usize) -> Vec<u8> {
        let mut data = vec![0xee; len];
        match at {
            Access::Ecam { device, register } => {
                self.root.read_ecam(u64::from(device) << 15 | u64::from(register), &mut data);
            }
            Access::Ports { .. } | Access::Raw(_) => {
                self.set_address(at);
                self.root.read_port(4 + u64::from(at.register() & 3), &mut data);
            }
        }
        data
    }

    fn set_address(&mut self, at: Access) {
        let address = match at {
            Access::Ports { device, register } => {
                1 << 31 | u32::from(device) << 11 | u32::from(register & 0xfc)
            }
            Access::Ecam { .. } => return,
            Access::Raw(address) => address,
        };
        self.root.write_port(0, &address.to_le_bytes());
        self.address = address & 0x80ff_fffc;
        let mut back = [0; 4];
        self.root.read_port(0, &mut back);
        assert_eq!(u32::from_le_bytes(back), self.address);
    }

    /// The function and register an access reaches, if any.
    fn reach(&self, at: Access, len: usize) -> Option<(u8, u16)> {
        let (device, register) = match at {
            Access::Ecam { device, register } | Access::Ports { device, register } => {
                (device, register)
            }
            Access::Raw(address) => {
                if address >> 31 == 0 || address >> 16 & 0xff != 0 || address >> 8 & 7 != 0 {
                    return None;
                }
                ((address >> 11 & 31) as u8, (address & 0xfc) as u16 | at.register() & 3)
            }
        };
        let legal = matches!(len, 1 | 2 | 4) && usize::from(register & 3) + len <= 4;
        (legal && usize::from(device) <= self.functions.len()).then_some((device, register))
    }

    fn read_and_check(&mut self, at: Access, len: usize) {
        let data = self.read(at, len);
        match self.reach(at, len) {
            None => assert!(data.iter().all(|byte| *byte == 0xff), "{at:x?}"),
            // The host bridge has an identity.
            Some((0, 0)) if len == 4 => assert_eq!(data, [0x36, 0x1b, 0x08, 0]),
            Some((0, _)) => {}
            Some((device, register)) => {
                let expected = self.functions[usize::from(device) - 1].read(register, len);
                assert_eq!(data, expected, "{at:x?}");
            }
        }
    }

    fn write(&mut self, at: Access, data: &[u8]) {
        match at {
            Access::Ecam { device, register } => {
                self.root.write_ecam(u64::from(device) << 15 | u64::from(register), data);
            }
            Access::Ports { .. } | Access::Raw(_) => {
                self.set_address(at);
                self.root.write_port(4 + u64::from(at.register() & 3), data);
            }
        }
        if let Some((device @ 1.., register)) = self.reach(at, data.len()) {
            self.functions[usize::from(device) - 1].write(register, data);
        }
        self.check_vectors();
    }

    /// Moves a BAR, perhaps over another.
    fn move_bar(&mut self, input: &mut Input) {
        let device = 1 + input.u8() % 4;
        let register = 0x10 + 8 * u16::from(input.u8() % 3);
        let address = match input.u8() % 4 {
            0 => self.some_window(input).map_or(0, |(_, first, _)| first),
            1 => u64::MAX << (input.u8() % 40),
            2 => 0x40_0000_0000 + 0x1000 * u64::from(input.u16() % 64),
            _ => input.usually(&[0xc000_0000, 0, 0xfee0_0000, u64::MAX]),
        };
        for (half, data) in [(0, address as u32), (4, (address >> 32) as u32)] {
            self.write(Access::Ecam { device, register: register + half }, &data.to_le_bytes());
        }
    }

    fn some_window(&self, input: &mut Input) -> Option<(u8, u64, u64)> {
        let all: Vec<_> = self.functions.iter().flat_map(Model::windows).collect();
        all.get(usize::from(input.u8()) % all.len().max(1)).copied()
    }

    /// The routing: of BARs that overlap, those of the lower device and index answer, and one that
    /// overlaps one that answers does not.
    fn routed(&self) -> Vec<(usize, u8, u64, u64)> {
        let mut routed: Vec<(usize, u8, u64, u64)> = Vec::new();
        for (index, model) in self.functions.iter().enumerate() {
            for (bar, first, last) in model.windows() {
                if routed.iter().all(|&(_, _, from, to)| last < from || to < first) {
                    routed.push((index, bar, first, last));
                }
            }
        }
        routed
    }

    fn memory(&mut self, input: &mut Input) {
        let near = self.some_window(input);
        let address = match (input.u8() % 8, near) {
            (0, Some((_, _, last))) => last.wrapping_add_signed(i64::from(input.u8()) - 8),
            (1, _) | (_, None) => input.usually(&[0, 0x40_0000_0000, u64::MAX - 3]),
            (_, Some((_, first, _))) => {
                first.wrapping_add(u64::from(input.u16()) % 0x4100).wrapping_sub(4)
            }
        };
        let len = input.pick(&[4, 8, 1, 2, 4, 3]);
        let last = address.checked_add(len as u64 - 1);
        let hit = self
            .routed()
            .into_iter()
            .find(|&(_, _, from, to)| from <= address && last.is_some_and(|last| last <= to));
        if input.flag() {
            let value = input.usually(&[0, 1, 0xfee0_0000_0041, 0x1_0000_0000]).to_le_bytes();
            assert_eq!(self.root.write_memory(address, &value[..len]), hit.is_some());
            if let Some((index, bar, first, _)) = hit {
                let (model, at) = (&mut self.functions[index], address - first);
                if bar == model.msix_bar && (model.table..model.pending).contains(&at) {
                    model.msix.write_table(at - model.table, &value[..len]);
                }
            }
            return self.check_vectors();
        }
        let mut data = vec![0xee; len];
        assert_eq!(self.root.read_memory(address, &mut data), hit.is_some());
        let Some((index, bar, first, _)) = hit else {
            return assert!(data.iter().all(|byte| *byte == 0xee), "it is left as it was");
        };
        let (model, at) = (&self.functions[index], address - first);
        let expected = match at {
            _ if bar != model.msix_bar || at < model.table => {
                vec![signature(index as u8 + 1, bar, at); len]
            }
            _ if at >= model.pending => model.msix.read_pending(at - model.pending, len),
            _ => model.msix.read_table(at - model.table, len),
        };
        assert_eq!(data, expected, "at {address:#x}");
    }

    fn check_vectors(&self) {
        for model in &self.functions {
            let delivered: usize = model.msix.vectors.iter().map(|v| v.delivered).sum();
            let triggers = model.sink.events();
            let triggers = triggers
                .iter()
                .filter(|event| matches!(event, devices::testkit::SinkEvent::Trigger(_)));
            assert_eq!(triggers.count(), delivered);
        }
    }

    fn check(&mut self) {
        self.check_vectors();
        for device in 1..=self.functions.len() as u8 {
            for register in (0..0x110).step_by(4) {
                self.read_and_check(Access::Ecam { device, register }, 4);
            }
        }
    }
}

/// A way to configuration space.
#[derive(Clone, Copy, Debug)]
enum Access {
    Ecam {
        device: u8,
        register: u16,
    },
    Ports {
        device: u8,
        register: u16,
    },
    /// CONFIG_ADDRESS as it is.
    Raw(u32),
}

impl Access {
    fn register(self) -> u16 {
        match self {
            Access::Ecam { register, .. } | Access::Ports { register, .. } => register,
            Access::Raw(address) => (address & 3) as u16,
        }
    }

    fn plus(self, bytes: u16) -> Access {
        match self {
            Access::Ecam { device, register } => {
                Access::Ecam { device, register: register + bytes }
            }
            other => other,
        }
    }
}
