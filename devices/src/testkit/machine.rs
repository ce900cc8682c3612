//! What a machine does for a device: delivers its interrupts and its notifications.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use vmm_sys_util::eventfd::EventFd;

use super::TIMEOUT;
use crate::GuestMemory;
use crate::irq::{MsiMessage, MsiSink};
use crate::pci::msix::Msix;
use crate::virtio::queue::{Queue, QueueConfig, QueueFeatures};
use crate::virtio::signal::{DeviceSignal, QueueSignal, STATUS_DRIVER_OK};
use crate::virtio::{Activation, ActiveQueue, NotifyBinder};

/// What a sink was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkEvent {
    /// The vector became deliverable with this message, or its message changed.
    Unmask(u16, MsiMessage),
    /// The vector became undeliverable.
    Mask(u16),
    /// An interrupt was delivered.
    Trigger(u16),
}

#[derive(Default)]
struct Recording {
    events: Vec<SinkEvent>,
    messages: BTreeMap<u16, MsiMessage>,
}

/// Receives a function's interrupts and remembers them in order.
#[derive(Default)]
pub struct RecordingSink {
    recording: Mutex<Recording>,
    changed: Condvar,
}

impl RecordingSink {
    /// A sink that has received nothing.
    pub fn new() -> Arc<RecordingSink> {
        Arc::default()
    }

    /// How many interrupts `vector` has received.
    pub fn count(&self, vector: u16) -> usize {
        count(&self.lock(), vector)
    }

    /// Waits until `vector` has received `at_least` interrupts in all, and gives their number.
    /// Panics after [`TIMEOUT`].
    pub fn wait(&self, vector: u16, at_least: usize) -> usize {
        let deadline = Instant::now() + TIMEOUT;
        let mut recording = self.lock();
        loop {
            let count = count(&recording, vector);
            if count >= at_least {
                return count;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "vector {vector}: {count} of {at_least} interrupts came");
            recording = self.changed.wait_timeout(recording, left).expect("no panic inside").0;
        }
    }

    /// Everything that happened, in order.
    pub fn events(&self) -> Vec<SinkEvent> {
        self.lock().events.clone()
    }

    /// The message of an unmasked vector.
    pub fn message(&self, vector: u16) -> Option<MsiMessage> {
        self.lock().messages.get(&vector).copied()
    }

    fn lock(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().expect("no panic inside")
    }
}

fn count(recording: &Recording, vector: u16) -> usize {
    recording.events.iter().filter(|event| **event == SinkEvent::Trigger(vector)).count()
}

impl MsiSink for RecordingSink {
    fn trigger(&self, vector: u16) {
        let mut recording = self.lock();
        if recording.messages.contains_key(&vector) {
            recording.events.push(SinkEvent::Trigger(vector));
            self.changed.notify_all();
        }
    }

    fn unmask(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        let mut recording = self.lock();
        recording.messages.insert(vector, message);
        recording.events.push(SinkEvent::Unmask(vector, message));
        Ok(())
    }

    fn mask(&self, vector: u16) -> io::Result<()> {
        let mut recording = self.lock();
        recording.messages.remove(&vector);
        recording.events.push(SinkEvent::Mask(vector));
        Ok(())
    }
}

/// Plays KVM's ioeventfds: addresses bound to eventfds. It refuses what KVM refuses, a second
/// binding of an address and the end of one that is not there.
#[derive(Default)]
pub struct Notifier {
    bound: Mutex<BTreeMap<u64, EventFd>>,
    original_fds: Mutex<BTreeMap<u64, i32>>,
}

impl Notifier {
    /// Nothing bound.
    pub fn new() -> Arc<Notifier> {
        Arc::default()
    }

    /// A guest's write to `address`: false if nothing is bound there, and the write would reach the
    /// monitor.
    pub fn write(&self, address: u64) -> bool {
        match self.bound.lock().expect("no panic inside").get(&address) {
            Some(kick) => {
                kick.write(1).expect("an eventfd takes a kick");
                true
            }
            None => false,
        }
    }

    /// The bound addresses, in order.
    pub fn addresses(&self) -> Vec<u64> {
        self.bound.lock().expect("no panic inside").keys().copied().collect()
    }
}

impl NotifyBinder for Notifier {
    fn bind(&self, address: u64, kick: &EventFd) -> io::Result<()> {
        let mut bound = self.bound.lock().expect("no panic inside");
        if bound.contains_key(&address) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        bound.insert(address, kick.try_clone()?);
        self.original_fds.lock().expect("no panic inside").insert(address, kick.as_raw_fd());
        Ok(())
    }

    fn unbind(&self, address: u64, kick: &EventFd) -> io::Result<()> {
        let mut original_fds = self.original_fds.lock().expect("no panic inside");
        if original_fds.get(&address) != Some(&kick.as_raw_fd()) {
            return Err(io::ErrorKind::NotFound.into());
        }
        original_fds.remove(&address);
        self.bound.lock().expect("no panic inside").remove(&address);
        Ok(())
    }
}

/// The way of a device's signals without a transport: MSI-X is on and every vector unmasked.
/// Vector 0 is that of configuration changes, vector `1 + i` that of queue `i`.
pub struct Signals {
    /// Where the interrupts arrive.
    pub sink: Arc<RecordingSink>,
    /// The vector table.
    pub msix: Arc<Msix>,
    isr: Arc<AtomicU8>,
    status: Arc<AtomicU8>,
}

impl Signals {
    /// For a device of `queues` queues whose driver is ready (DRIVER_OK is set).
    pub fn new(queues: u16) -> Signals {
        let sink = RecordingSink::new();
        let msix = Arc::new(Msix::new(queues + 1, sink.clone()));
        for vector in 0..u64::from(queues + 1) {
            msix.write_table(16 * vector, &(0xfee0_0000 + vector).to_le_bytes());
            msix.write_table(16 * vector + 8, &(0x40 + vector).to_le_bytes());
        }
        msix.set_control(true, false);
        let status = Arc::new(AtomicU8::new(STATUS_DRIVER_OK));
        Signals { sink, msix, isr: Arc::default(), status }
    }

    /// The device status: DRIVER_OK, and NEEDS_RESET once the device asked for it.
    pub fn status(&self) -> u8 {
        self.status.load(Ordering::SeqCst)
    }

    /// The device status after a reset and a new start.
    pub fn clear(&self) {
        self.status.store(STATUS_DRIVER_OK, Ordering::SeqCst);
    }

    /// The signal of queue `index`.
    pub fn queue(&self, index: u16) -> QueueSignal {
        let vector = Arc::new(AtomicU16::new(1 + index));
        QueueSignal::new(vector, self.msix.clone(), self.isr.clone())
    }

    /// The signal of configuration changes and NEEDS_RESET.
    pub fn device(&self) -> DeviceSignal {
        let (msix, isr) = (self.msix.clone(), self.isr.clone());
        DeviceSignal::new(Arc::new(AtomicU16::new(0)), msix, isr, self.status.clone())
    }

    /// What a device gets at DRIVER_OK with these queues, and the eventfds by which to kick them.
    pub fn activation(
        &self,
        memory: &GuestMemory,
        features: u64,
        configs: &[QueueConfig],
    ) -> (Activation, Vec<EventFd>) {
        let kicks: Vec<EventFd> =
            configs.iter().map(|_| EventFd::new(libc::EFD_CLOEXEC).expect("eventfd")).collect();
        let queues = configs.iter().zip(&kicks).zip(0..).map(|((config, kick), index)| {
            let queue = Queue::new(memory, config, QueueFeatures::from_bits(features));
            ActiveQueue {
                index,
                queue: queue.expect("a good configuration"),
                kick: kick.try_clone().expect("eventfd"),
                signal: self.queue(index),
            }
        });
        let queues = queues.collect();
        (Activation { memory: memory.clone(), features, queues, device: self.device() }, kicks)
    }
}
