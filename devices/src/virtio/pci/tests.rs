//! Tests of the transport with a device that does next to nothing.

mod garbage;
mod queue_reset;
mod rules;

use std::sync::{Mutex, MutexGuard};

use virtio_bindings::virtio_config::{VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1};

use super::*;
use crate::testkit::status::*;
use crate::testkit::{self, Driver, Notifier, PciDriver, RecordingSink, common};

const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
const OFFERED: u64 = VERSION_1 | 1 << 5 | 1 << 28 | 1 << 29 | 1 << VIRTIO_F_RING_RESET;
const MAX_SIZES: [u16; 2] = [256, 8];
const RAM_BYTES: usize = 1 << 20;
const RINGS: u64 = 0x1000;
const BAR_ADDRESS: u64 = 0x40_0000_0000;

/// What the dummy was told, and what it does.
#[derive(Default)]
struct State {
    active: Option<Activation>,
    activations: usize,
    resets: usize,
    refuse: bool,
    /// Signals everything while it is being reset.
    noisy_reset: bool,
    config: [u8; 8],
    config_writes: Vec<(u64, u64, Vec<u8>)>,
    generation: u8,
    /// Queues whose reset was begun and is not done.
    resetting: Vec<u16>,
    /// The reset of a queue goes on until the test ends it.
    slow_queue_reset: bool,
}

#[derive(Clone, Default)]
struct Dummy(Arc<Mutex<State>>);

impl Dummy {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl VirtioDevice for Dummy {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &MAX_SIZES
    }

    fn features(&self) -> u64 {
        OFFERED
    }

    fn read_config(&self, _features: u64, offset: u64, data: &mut [u8]) {
        let config = self.state().config;
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = config.get(at as usize).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, features: u64, offset: u64, data: &[u8]) {
        self.state().config_writes.push((features, offset, data.to_vec()));
    }

    fn config_generation(&self) -> u8 {
        self.state().generation
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut state = self.state();
        assert!(!activation.queues.is_empty());
        state.activations += 1;
        if state.refuse {
            return Err(io::Error::other("refused").into());
        }
        for queue in &activation.queues {
            assert!(!state.resetting.contains(&queue.index), "activated during its reset");
        }
        match &mut state.active {
            None => state.active = Some(activation),
            Some(active) => {
                for queue in activation.queues {
                    let again = active.queues.iter().any(|this| this.index == queue.index);
                    assert!(!again, "activated twice without a reset");
                    active.queues.push(queue);
                }
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        let mut state = self.state();
        state.resets += 1;
        if let (true, Some(active)) = (state.noisy_reset, &state.active) {
            active.queues.iter().for_each(|queue| queue.signal.signal());
            active.device.needs_reset();
        }
        state.active = None;
        state.resetting.clear();
    }

    fn reset_queue(&mut self, index: u16) {
        let mut state = self.state();
        if let Some(active) = &mut state.active {
            active.queues.retain(|queue| queue.index != index);
        }
        if state.slow_queue_reset && !state.resetting.contains(&index) {
            state.resetting.push(index);
        }
    }

    fn is_queue_reset(&self, index: u16) -> bool {
        !self.state().resetting.contains(&index)
    }
}

struct Machine {
    pci: PciDriver<VirtioPci>,
    device: Dummy,
    sink: Arc<RecordingSink>,
    notifier: Arc<Notifier>,
    memory: GuestMemory,
}

fn machine() -> Machine {
    let memory = testkit::memory(RAM_BYTES);
    let device = Dummy::default();
    let (sink, notifier) = (RecordingSink::new(), Notifier::new());
    let transport =
        VirtioPci::new(Box::new(device.clone()), memory.clone(), sink.clone(), notifier.clone());
    let pci = PciDriver::new(transport.unwrap(), Some(notifier.clone()));
    Machine { pci, device, sink, notifier, memory }
}

impl Machine {
    /// Mapped, with both queues started.
    fn started() -> (Machine, Vec<Driver>) {
        let mut machine = machine();
        machine.pci.map(BAR_ADDRESS);
        let (_, drivers) = machine.pci.start(&machine.memory.clone(), RINGS, &[16, 8], OFFERED);
        (machine, drivers)
    }
}
