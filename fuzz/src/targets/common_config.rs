//! A virtio PCI function with a device that does nothing: the common configuration, queue set-up,
//! notifications, MSI-X and resets, against the models of the test kit.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::GuestMemory;
use devices::pci::PciDevice;
use devices::testkit::model::{CommonModel, Consequence, MsixModel, NO_VECTOR};
use devices::testkit::{self, Notifier, PciDriver, RecordingSink, common};
use devices::virtio::pci::VirtioPci;
use devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice};

use crate::input::Input;

const RAM_BYTES: u64 = 0x1_0000;
const VERSION_1: u64 = 1 << 32;
const OFFERED: u64 = VERSION_1 | 1 << 40 | 1 << 34 | 1 << 29 | 1 << 28 | 1 << 5;
const MAX_SIZES: [u16; 3] = [256, 8, 64];
const BAR_ADDRESS: u64 = 0x40_0000_0000;
const STEPS: usize = 200;

/// What the device was given.
#[derive(Default)]
struct State {
    queues: Vec<ActiveQueue>,
    device: Option<devices::virtio::signal::DeviceSignal>,
    features: u64,
    refuse: bool,
    generation: u8,
}

#[derive(Clone, Default)]
struct Device(Arc<Mutex<State>>);

impl Device {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VirtioDevice for Device {
    fn device_type(&self) -> u32 {
        2
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &MAX_SIZES
    }
    fn features(&self) -> u64 {
        OFFERED
    }
    fn read_config(&self, _features: u64, offset: u64, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = at as u8 ^ 0x5a;
        }
    }
    fn write_config(&mut self, features: u64, _offset: u64, _data: &[u8]) {
        assert_eq!(features & !OFFERED, 0);
    }
    fn config_generation(&self) -> u8 {
        self.state().generation
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut state = self.state();
        if state.refuse {
            state.queues.clear();
            return Err(std::io::Error::other("refused").into());
        }
        for queue in activation.queues {
            assert!(state.queues.iter().all(|other| other.index != queue.index), "given twice");
            state.queues.push(queue);
        }
        state.features = activation.features;
        state.device = Some(activation.device);
        Ok(())
    }
    fn reset(&mut self) {
        let mut state = self.state();
        state.queues.clear();
        state.device = None;
    }
    fn reset_queue(&mut self, index: u16) {
        self.state().queues.retain(|queue| queue.index != index);
    }
}

thread_local! {
    /// Mapped once; nothing in it changes.
    static MEMORY: GuestMemory = testkit::memory(RAM_BYTES as usize);
}

struct World {
    pci: PciDriver<VirtioPci>,
    device: Device,
    sink: Arc<RecordingSink>,
    notifier: Arc<Notifier>,
    common: CommonModel,
    msix: MsixModel,
    isr: u8,
    /// The queues that the device should have.
    active: Vec<u16>,
    /// Kicks that no worker has read.
    kicks: [u64; MAX_SIZES.len()],
    /// The common configuration is written through configuration space (4.1.4.9).
    window: bool,
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (device, sink, notifier) = (Device::default(), RecordingSink::new(), Notifier::new());
    let memory = MEMORY.with(Clone::clone);
    let function = VirtioPci::new(Box::new(device.clone()), memory, sink.clone(), notifier.clone());
    let vectors = MAX_SIZES.len() as u16 + 1;
    let mut world = World {
        pci: PciDriver::new(function.expect("an eventfd"), Some(notifier.clone())),
        device,
        sink,
        notifier,
        common: CommonModel::new(OFFERED, &MAX_SIZES, vectors, &[(0, RAM_BYTES)]),
        msix: MsixModel::new(vectors),
        isr: 0,
        active: Vec::new(),
        kicks: [0; MAX_SIZES.len()],
        window: false,
    };
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
        world.check();
    }
    let World { pci, device, notifier, .. } = world;
    drop(pci);
    assert!(device.state().queues.is_empty() && notifier.addresses().is_empty());
}

impl World {
    fn step(&mut self, input: &mut Input) {
        match input.u8() % 20 {
            0..4 => self.good_register(input),
            4 => {
                let at = u64::from(input.u8() % 0x48);
                let len = input.pick(&[1, 2, 4, 8, 3, 5, 6, 7]);
                let mut data = input.bytes(len).to_vec();
                data.resize(len, 0);
                self.write_common(at, &data);
            }
            5 | 6 => self.read_common(u64::from(input.u8() % 0x48), input.pick(&[4, 2, 1, 8, 3])),
            7 => {
                let statuses = [0, 1, 3, 11, 15, 0x83, 4, 12, 8, 0x40, 0xff];
                self.write_common(common::DEVICE_STATUS, &[input.usually(&statuses) as u8]);
            }
            8 => self.features(input.usually(&[OFFERED, OFFERED & !(1 << 34), VERSION_1, 0])),
            9 | 10 => self.queue(input),
            11 => self.set_up(input),
            12 => {
                let index = u16::from(input.u8() % 4);
                self.kick(index, input.flag());
            }
            13 => self.table(input),
            14 => {
                let (enabled, mask) = (!input.rarely(4), input.rarely(4));
                let control = u16::from(enabled) << 15 | u16::from(mask) << 14;
                let at = self.pci.msix_table.capability + 2;
                self.pci.write_config(at, &control.to_le_bytes());
                self.msix.set_control(enabled, mask);
            }
            15 | 16 => self.signal(input),
            17 => {
                let isr = self.pci.take_isr();
                assert_eq!(isr, std::mem::take(&mut self.isr));
            }
            18 => {
                let address = input.usually(&[BAR_ADDRESS, 0, 0xc000_0000]);
                if input.flag() { self.pci.map(address) } else { self.pci.unmap() }
            }
            _ => {
                self.window = input.flag();
                let mut state = self.device.state();
                state.generation = state.generation.wrapping_add(1);
                state.refuse = input.rarely(8);
            }
        }
    }

    /// A register with its own width and a value that may make sense.
    fn good_register(&mut self, input: &mut Input) {
        let (at, len) = input.pick(&[
            (common::QUEUE_SELECT, 2),
            (common::QUEUE_SIZE, 2),
            (common::QUEUE_MSIX_VECTOR, 2),
            (common::QUEUE_ENABLE, 2),
            (common::QUEUE_RESET, 2),
            (common::CONFIG_MSIX_VECTOR, 2),
            (common::DRIVER_FEATURE_SELECT, 4),
            (common::DEVICE_FEATURE_SELECT, 4),
            (common::DRIVER_FEATURE, 4),
            (common::QUEUE_DESC, 4),
            (common::QUEUE_DRIVER + 4, 4),
            (common::QUEUE_DEVICE, 8),
        ]);
        let value = input.usually(&[1, 0, 2, 8, 4, 3, 0x1000, 0xffff, 16, 5]);
        self.write_common(at, &value.to_le_bytes()[..len]);
    }

    fn write_common(&mut self, at: u64, data: &[u8]) {
        let refuse = self.device.state().refuse;
        if self.window && matches!(data.len(), 1 | 2 | 4) && at.is_multiple_of(data.len() as u64) {
            let window = self.pci.pci_access.capability;
            self.pci.write_config(window + 4, &[0]);
            self.pci.write_config(window + 8, &(at as u32).to_le_bytes());
            self.pci.write_config(window + 12, &(data.len() as u32).to_le_bytes());
            self.pci.write_config(window + 16, data);
        } else {
            self.pci.write_common(at, data);
        }
        let starting = match self.common.write(at, data) {
            Consequence::Nothing => return,
            Consequence::Reset => {
                self.active.clear();
                self.kicks = [0; MAX_SIZES.len()];
                self.isr = 0;
                self.msix.forget_pending();
                return;
            }
            Consequence::Broken => return self.needs_reset(),
            Consequence::ResetQueue(index) => return self.active.retain(|other| *other != index),
            Consequence::Start if self.common.needs_reset() => return self.config_interrupt(),
            Consequence::StartQueue(_) if self.common.needs_reset() => return,
            Consequence::Start => {
                (0..).zip(&self.common.queues).filter(|(_, q)| q.enabled).map(|(i, _)| i).collect()
            }
            Consequence::StartQueue(index) => {
                self.kicks[usize::from(index)] = 0;
                vec![index]
            }
        };
        // Features may have changed since a queue was enabled.
        let sound = starting.iter().all(|index| self.common.is_sound(*index));
        if starting.is_empty() {
        } else if !sound || refuse {
            if sound {
                self.active.clear();
            }
            self.needs_reset();
        } else {
            self.active.extend(starting);
        }
    }

    fn read_common(&mut self, at: u64, len: usize) {
        let mut data = vec![0xee; len];
        self.pci.device.read_bar(0, at, &mut data);
        let generation = self.device.state().generation;
        assert_eq!(data, self.common.read(at, len, generation), "at {at:#x}");
    }

    fn features(&mut self, features: u64) {
        for (select, half) in [(0u32, features as u32), (1, (features >> 32) as u32)] {
            self.write_common(common::DRIVER_FEATURE_SELECT, &select.to_le_bytes());
            self.write_common(common::DRIVER_FEATURE, &half.to_le_bytes());
        }
    }

    /// A queue in a good place, mostly.
    fn queue(&mut self, input: &mut Input) {
        let index = u16::from(input.u8() % 4);
        self.write_common(common::QUEUE_SELECT, &index.to_le_bytes());
        let size = input.usually(&[8, 4, 16, 7, 64, 1]) as u16;
        self.write_common(common::QUEUE_SIZE, &size.to_le_bytes());
        let vector = input.usually(&[u64::from(index) + 1, 0, 0xffff, 9]) as u16;
        self.write_common(common::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
        let base = 0x1000 + 0x3000 * u64::from(index);
        let desc = input.usually(&[base, base, base, base + 8, RAM_BYTES - 0x80]);
        for (at, address) in [
            (common::QUEUE_DESC, desc),
            (common::QUEUE_DRIVER, base + 0x1000),
            (common::QUEUE_DEVICE, base + 0x2000),
        ] {
            self.write_common(at, &address.to_le_bytes());
        }
        if !input.rarely(4) {
            self.write_common(common::QUEUE_ENABLE, &[1, 0]);
        }
    }

    /// From reset to DRIVER_OK.
    fn set_up(&mut self, input: &mut Input) {
        for status in [0, 1, 3] {
            self.write_common(common::DEVICE_STATUS, &[status]);
        }
        self.features(input.usually(&[OFFERED, OFFERED & !(1 << 34), VERSION_1]));
        self.write_common(common::DEVICE_STATUS, &[11]);
        for _ in 0..input.u8() % 4 {
            self.queue(input);
        }
        self.write_common(common::CONFIG_MSIX_VECTOR, &[0, 0]);
        self.write_common(common::DEVICE_STATUS, &[15]);
    }

    fn table(&mut self, input: &mut Input) {
        let vector = u64::from(input.u8() % 5);
        let (word, len) =
            input.pick(&[(12, 4), (12, 4), (12, 4), (0, 4), (4, 4), (8, 4), (8, 8), (0, 8)]);
        let value = input.usually(&[0, 1, 0xfee0_0000, 0x41]).to_le_bytes();
        let at = 16 * vector + word;
        self.pci.write(self.pci.msix_table, at, &value[..len]);
        // Past the end of the table are the pending bits, or nothing.
        if at < self.pci.msix_table.len_bytes {
            self.msix.write_table(at, &value[..len]);
        }
    }

    /// The device signals a queue, or a change, or a failure.
    fn signal(&mut self, input: &mut Input) {
        let what = input.u8() % 8;
        let state = self.device.state();
        if what < 5 {
            let index = usize::from(input.u8()) % state.queues.len().max(1);
            let Some(queue) = state.queues.get(index) else { return };
            queue.signal.signal();
            let vector = self.common.queues[usize::from(queue.index)].vector;
            drop(state);
            self.interrupt(vector, 1);
        } else if let Some(device) = state.device.clone() {
            drop(state);
            if what < 7 {
                device.config_changed();
                self.config_interrupt();
            } else {
                device.needs_reset();
                self.needs_reset();
            }
        }
    }

    fn needs_reset(&mut self) {
        if self.common.ask_for_reset() {
            self.config_interrupt();
        }
    }

    fn config_interrupt(&mut self) {
        // With MSI-X, too.
        self.isr |= 2;
        self.interrupt(self.common.config_vector, 2);
    }

    fn interrupt(&mut self, vector: u16, isr_bit: u8) {
        if !self.msix.enabled {
            self.isr |= isr_bit;
        } else if vector != NO_VECTOR {
            self.msix.signal(vector);
        }
    }

    /// A notification: the queue's worker finds as many as came since it last looked.
    fn kick(&mut self, index: u16, bound: bool) {
        let offset = self.pci.notify.offset + 4 * u64::from(index);
        let bar = self.pci.device.mapped_bars().first().map(|bar| bar.address);
        let known = usize::from(index) < MAX_SIZES.len();
        match bar.filter(|_| bound) {
            Some(bar) => assert_eq!(self.notifier.write(bar + offset), known),
            None => self.pci.device.write_bar(0, offset, &[0; 2]),
        }
        let Some(kicks) = self.kicks.get_mut(usize::from(index)) else { return };
        *kicks += 1;
        let state = self.device.state();
        if let Some(queue) = state.queues.iter().find(|queue| queue.index == index) {
            assert_eq!(queue.kick.read().ok(), Some(std::mem::take(kicks)));
        }
    }

    fn check(&mut self) {
        self.read_common(0, common::BYTES as usize);
        let state = self.device.state();
        let mut active: Vec<u16> = state.queues.iter().map(|queue| queue.index).collect();
        for queue in &state.queues {
            assert_eq!(
                queue.queue.size(),
                self.common.queues[usize::from(queue.index)].config.size
            );
        }
        if !active.is_empty() {
            assert_eq!(state.features, self.common.negotiated());
        }
        drop(state);
        active.sort();
        self.active.sort();
        assert_eq!(active, self.active, "the queues the device has");

        for (index, vector) in (0..).zip(&self.msix.vectors) {
            assert_eq!(self.sink.count(index), vector.delivered, "vector {index}");
            let message = self.msix.is_live(index).then_some(vector.message);
            assert_eq!(self.sink.message(index), message, "vector {index}");
        }
        let pending: [u8; 8] = self.pci.read(self.pci.msix_pba, 0);
        assert_eq!(pending[..], self.msix.read_pending(0, 8));
        let table: [u8; 64] = self.pci.read(self.pci.msix_table, 0);
        assert_eq!(table[..], self.msix.read_table(0, 64));
        assert_eq!(self.pci.config_u16(self.pci.msix_table.capability + 2), self.msix.control());

        let notify = self.pci.notify.offset;
        let bars = self.pci.device.mapped_bars();
        let bound = bars.first().map_or(Vec::new(), |bar| {
            (0..MAX_SIZES.len() as u64).map(|i| bar.address + notify + 4 * i).collect()
        });
        assert_eq!(self.notifier.addresses(), bound);
    }
}
