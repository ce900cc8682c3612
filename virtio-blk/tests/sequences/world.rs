//! The device, its driver, and what the models say of both.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use devices::GuestMemory;
use devices::pci::PciDevice;
use devices::testkit::model::{CommonModel, Consequence, MsixModel, NO_VECTOR};
use devices::testkit::{self, AnyDriver, Arena, Buf, Notifier, PciDriver, RecordingSink, common};
use devices::virtio::pci::VirtioPci;
use devices::virtio::queue::QueueConfig;
use devices::virtio::{VirtioDevice, stats::QueueCounters};
use tempfile::NamedTempFile;
use virtio_blk::{BlkConfig, Block, BlockHandle, Disk, EngineKind};

use crate::rig::{
    FLUSH, GET_ID, IN, IOERR, OK, OUT, SECTOR, UNSUPP, UNTOUCHED, WRITE_ZEROES, contents, header,
    on_disk, on_tmpfs, segment,
};
use crate::{Request, Step, Then};

pub(crate) const QUEUES: u16 = 2;
pub(crate) const QUEUE_SIZE: u16 = 16;
/// At first.
pub(crate) const SECTORS: usize = 128;
const VECTORS: u16 = QUEUES + 1;
const RAM_BYTES: usize = 32 << 20;
/// Rings of a queue, and its indirect tables, fit in this.
const QUEUE_BYTES: u64 = 0x4000;
const RINGS: u64 = 0x1_0000;
const ARENA: u64 = RINGS + QUEUE_BYTES * QUEUES as u64;
const BAR_ADDRESS: u64 = 0x40_0000_0000;
const SERIAL: &str = "sequences";
const INDIRECT: u64 = 1 << 28;
const WRITE_ZEROES_FEATURE: u64 = 1 << 14;
const EVENT_IDX: u64 = 1 << 29;

/// A request under way.
struct Sent {
    request: Request,
    head: u16,
    data: u64,
    data_bytes: usize,
    status: u64,
}

pub(crate) struct World {
    memory: GuestMemory,
    arena: Arena,
    pci: PciDriver<VirtioPci>,
    handle: BlockHandle,
    image: NamedTempFile,
    sink: Arc<RecordingSink>,
    notifier: Arc<Notifier>,
    common: CommonModel,
    msix: MsixModel,
    isr: u8,
    generation: u8,
    /// The configuration has changed since it was last read.
    changed: bool,
    /// The capacity changed while no driver was to be told.
    missed: bool,
    /// The device was activated since its last reset.
    told: bool,
    disk: Vec<u8>,
    /// The queues that have workers; `None` for one whose registers fit no rings of ours, or that was
    /// broken.
    live: BTreeMap<u16, Option<AnyDriver>>,
    /// Memory that nobody may write any more.
    frozen: Vec<(u64, Vec<u8>)>,
}

impl World {
    pub(crate) fn new(engine: EngineKind) -> World {
        let dir = if engine == EngineKind::Uring { on_disk() } else { on_tmpfs() };
        let image = NamedTempFile::new_in(dir).unwrap();
        image.as_file().write_all_at(&contents(SECTORS), 0).unwrap();
        let config = BlkConfig {
            path: image.path().into(),
            queues: QUEUES,
            queue_size: QUEUE_SIZE,
            engine,
            packed: true,
            serial: SERIAL.into(),
            ..BlkConfig::default()
        };
        let disk = Disk::open(&config).unwrap();
        let block = Block::new(config, disk);
        let (handle, offered) = (block.handle(), block.features());
        let memory = testkit::memory(RAM_BYTES);
        let (sink, notifier) = (RecordingSink::new(), Notifier::new());
        let function =
            VirtioPci::new(Box::new(block), memory.clone(), sink.clone(), notifier.clone());
        let ram = [(0, RAM_BYTES as u64)];
        World {
            arena: Arena::new(&memory, ARENA),
            pci: PciDriver::new(function.unwrap(), Some(notifier.clone())),
            memory,
            handle,
            image,
            sink,
            notifier,
            common: CommonModel::new(offered, &[QUEUE_SIZE; QUEUES as usize], VECTORS, &ram),
            msix: MsixModel::new(VECTORS),
            isr: 0,
            generation: 0,
            changed: false,
            missed: false,
            told: false,
            disk: contents(SECTORS),
            live: BTreeMap::new(),
            frozen: Vec::new(),
        }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        match step {
            Step::Start { features, size, resize } => self.start(*features, *size, *resize),
            Step::Status(status) => self.write(common::DEVICE_STATUS, &[*status]),
            Step::Features(features) => self.features(*features),
            Step::Configure { queue, size, vector, outside } => {
                self.configure(*queue, *size, *vector, *outside);
            }
            Step::Enable(queue) => {
                self.select(*queue);
                self.write(common::QUEUE_ENABLE, &[1, 0]);
            }
            Step::ResetQueue(queue) => self.reset_queue(*queue),
            Step::Poke { at, data } => {
                let end = at + data.len() as u64;
                let addresses = common::QUEUE_DESC..common::QUEUE_NOTIFY_DATA;
                if end <= addresses.start || *at >= addresses.end {
                    self.write(*at, data);
                }
            }
            Step::Send { queue, requests, interrupt, indirect, then } => {
                self.send(*queue, requests, *interrupt, *indirect, *then);
            }
            Step::Kick(queue) => self.kick(*queue),
            Step::Wreck(queue) => self.wreck(*queue),
            Step::Mask { vector, masked } => {
                self.pci.mask_vector(*vector, *masked);
                let at = 16 * u64::from(*vector) + 12;
                self.msix.write_table(at, &u32::from(*masked).to_le_bytes());
            }
            Step::Msix { enabled, function_mask } => self.control(*enabled, *function_mask),
            Step::Vector { queue, vector } if *queue == QUEUES => {
                self.write(common::CONFIG_MSIX_VECTOR, &vector.to_le_bytes());
            }
            Step::Vector { queue, vector } => {
                self.select(*queue);
                self.write(common::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
            }
            Step::Isr => assert_eq!(self.pci.take_isr(), std::mem::take(&mut self.isr)),
            Step::Map(true) => self.pci.map(BAR_ADDRESS),
            Step::Map(false) => self.pci.unmap(),
            Step::Resize(sectors) => self.resize(*sectors),
        }
        self.check();
    }

    /// Ends the device; whatever was frozen is still as it was, and the disk as the model has it.
    pub(crate) fn finish(self) {
        let World { pci, arena, memory, frozen, disk, image, sink, msix, .. } = self;
        let before = sink.count(0) + sink.count(1) + sink.count(2);
        drop(pci);
        assert_eq!(sink.count(0) + sink.count(1) + sink.count(2), before, "interrupts at the end");
        assert_eq!(msix.vectors.iter().map(|vector| vector.delivered).sum::<usize>(), before);
        arena.check();
        for (address, bytes) in frozen {
            let now = testkit::read(&memory, address, bytes.len());
            assert!(now == bytes, "{address:#x} was written after a reset");
        }
        let mut on_host = vec![0; disk.len()];
        image.as_file().read_exact_at(&mut on_host, 0).unwrap();
        assert!(on_host == disk, "the disk");
    }

    fn select(&mut self, queue: u16) {
        self.write(common::QUEUE_SELECT, &queue.to_le_bytes());
    }

    fn start(&mut self, features: u64, size: u16, resize: Option<usize>) {
        for status in [0, 1, 3] {
            self.write(common::DEVICE_STATUS, &[status]);
        }
        let offered = self.pci.device_features();
        for select in [0u32, 1] {
            self.common.write(common::DEVICE_FEATURE_SELECT, &select.to_le_bytes());
        }
        self.features(features & offered | 1 << 32);
        self.write(common::DEVICE_STATUS, &[11]);
        self.write(common::CONFIG_MSIX_VECTOR, &[0, 0]);
        if !self.msix.enabled {
            self.control(true, false);
            for vector in 0..u64::from(VECTORS) {
                for (word, value) in [(0, 0xfee0_0000), (8, 0x40 + vector as u32), (12, 0)] {
                    let at = 16 * vector + word;
                    self.pci.write(self.pci.msix_table, at, &u32::to_le_bytes(value));
                    self.msix.write_table(at, &u32::to_le_bytes(value));
                }
            }
        }
        for queue in 0..QUEUES {
            self.configure(queue, size, queue + 1, false);
            self.write(common::QUEUE_ENABLE, &[1, 0]);
        }
        if let Some(sectors) = resize {
            self.resize(sectors);
        }
        self.write(common::DEVICE_STATUS, &[15]);
    }

    fn features(&mut self, features: u64) {
        for (select, half) in [(0u32, features as u32), (1, (features >> 32) as u32)] {
            self.write(common::DRIVER_FEATURE_SELECT, &select.to_le_bytes());
            self.write(common::DRIVER_FEATURE, &half.to_le_bytes());
        }
    }

    fn control(&mut self, enabled: bool, function_mask: bool) {
        let control = u16::from(enabled) << 15 | u16::from(function_mask) << 14;
        self.pci.write_config(self.pci.msix_table.capability + 2, &control.to_le_bytes());
        self.msix.set_control(enabled, function_mask);
    }

    /// Where the rings of a queue lie, for the features the driver has written.
    fn layout(&self, queue: u16, size: u16) -> AnyDriver {
        let base = RINGS + QUEUE_BYTES * u64::from(queue);
        testkit::write(&self.memory, base, &[0; QUEUE_BYTES as usize]);
        AnyDriver::new(&self.memory, base, size, self.common.accepted)
    }

    fn configure(&mut self, queue: u16, size: u16, vector: u16, outside: bool) {
        self.select(queue);
        self.write(common::QUEUE_SIZE, &size.to_le_bytes());
        self.write(common::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
        let registers = self.common.queues.get(usize::from(queue));
        let Some(registers) = registers.filter(|queue| !queue.enabled) else { return };
        let mut config = self.layout(queue, registers.config.size).config();
        if outside {
            config.desc = RAM_BYTES as u64 - 16;
        }
        let QueueConfig { desc, driver, device, .. } = config;
        for (at, address) in [
            (common::QUEUE_DESC, desc),
            (common::QUEUE_DRIVER, driver),
            (common::QUEUE_DEVICE, device),
        ] {
            self.write(at, &(address as u32).to_le_bytes());
            self.write(at + 4, &((address >> 32) as u32).to_le_bytes());
        }
    }

    /// Writes the common configuration; what follows, follows in the models.
    fn write(&mut self, at: u64, data: &[u8]) {
        // Rings are made before the device looks at them.
        let consequence = self.common.clone().write(at, data);
        let starting: Vec<u16> = match consequence {
            _ if self.common.needs_reset() => Vec::new(),
            Consequence::Start => {
                let enabled = (0..).zip(&self.common.queues).filter(|(_, queue)| queue.enabled);
                enabled.map(|(index, _)| index).collect()
            }
            Consequence::StartQueue(queue) => vec![queue],
            _ => Vec::new(),
        };
        let drivers: Vec<_> = starting
            .iter()
            .map(|&queue| {
                let config = self.common.queues[usize::from(queue)].config;
                let driver = self.layout(queue, config.size);
                (queue, (driver.config() == config).then_some(driver))
            })
            .collect();

        self.pci.write_common(at, data);
        assert_eq!(self.common.write(at, data), consequence);
        match consequence {
            Consequence::Nothing => {}
            Consequence::Reset => {
                self.freeze_rings(0..QUEUES);
                self.live.clear();
                (self.told, self.missed, self.isr) = (false, false, 0);
                self.msix.forget_pending();
            }
            Consequence::Broken => self.needs_reset(),
            Consequence::Start if self.common.needs_reset() => self.config_interrupt(),
            Consequence::StartQueue(_) if self.common.needs_reset() => {}
            Consequence::ResetQueue(queue) => {
                self.wait("the end of the queue's reset", |world| {
                    world.pci.common_u16(common::QUEUE_RESET) == 0
                });
                self.freeze_rings(queue..queue + 1);
                self.live.remove(&queue);
            }
            Consequence::Start | Consequence::StartQueue(_) => {
                // Features may have changed since a queue was enabled.
                if !starting.iter().all(|queue| self.common.is_sound(*queue)) {
                    self.needs_reset();
                } else if !starting.is_empty() {
                    self.live.extend(drivers);
                    self.told = true;
                    if std::mem::take(&mut self.missed) {
                        self.config_interrupt();
                    }
                }
            }
        }
    }

    /// Nobody writes the rings of these queues any more, if they were live.
    fn freeze_rings(&mut self, queues: std::ops::Range<u16>) {
        for queue in queues.filter(|queue| self.live.contains_key(queue)) {
            let base = RINGS + QUEUE_BYTES * u64::from(queue);
            let now = testkit::read(&self.memory, base, QUEUE_BYTES as usize);
            std::thread::yield_now();
            let later = testkit::read(&self.memory, base, QUEUE_BYTES as usize);
            assert!(now == later, "the rings of queue {queue} change after its reset");
        }
    }

    fn reset_queue(&mut self, queue: u16) {
        self.select(queue);
        self.write(common::QUEUE_RESET, &[1, 0]);
    }

    fn kick(&mut self, queue: u16) {
        let offset = self.pci.notify.offset + 4 * u64::from(queue);
        let bar = self.pci.device.mapped_bars().first().map(|bar| bar.address);
        match bar {
            Some(bar) => assert!(self.notifier.write(bar + offset), "a mapped BAR is bound"),
            None => self.pci.device.write_bar(0, offset, &queue.to_le_bytes()),
        }
    }

    fn wait(&mut self, what: &str, mut done: impl FnMut(&mut World) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < testkit::TIMEOUT, "it did not come: {what}");
            std::thread::yield_now();
        }
    }

    fn counters(&self, queue: u16) -> &QueueCounters {
        &self.handle.counters()[usize::from(queue)]
    }

    /// Until the worker has sent all interrupts for what it has published: it does before it sleeps
    /// the next time, and a kick makes it sleep once more.
    fn settle(&mut self, queue: u16) {
        let before = self.counters(queue).sleeps.get();
        self.kick(queue);
        self.wait("a sleep", |world| world.counters(queue).sleeps.get() > before);
    }

    fn send(
        &mut self,
        queue: u16,
        requests: &[Request],
        interrupt: bool,
        indirect: bool,
        then: Then,
    ) {
        let Some(mut driver) = self.live.get_mut(&queue).and_then(Option::take) else { return };
        let indirect = indirect && self.common.negotiated() & INDIRECT != 0;
        driver.want_interrupts(interrupt);
        let mut sent = Vec::new();
        for (slot, request) in requests.iter().enumerate() {
            if driver.free() < 4 {
                break;
            }
            let request = placed(*request, slot);
            sent.push(self.add(&mut driver, request, indirect));
        }
        if driver.publish() {
            self.kick(queue);
        }
        match then {
            _ if sent.is_empty() => {}
            Then::Wait => {
                self.wait_all(queue, &mut driver, &sent, interrupt);
            }
            Then::ResetQueue => {
                self.select(queue);
                // It counts only if it was negotiated.
                if self.common.negotiated() & 1 << 40 == 0 {
                    self.wait_all(queue, &mut driver, &sent, interrupt);
                } else {
                    let vector = self.common.queues[usize::from(queue)].vector;
                    self.write(common::QUEUE_RESET, &[1, 0]);
                    return self.cancelled(vector, &sent, interrupt);
                }
            }
            Then::ResetDevice => {
                let vector = self.common.queues[usize::from(queue)].vector;
                self.write(common::DEVICE_STATUS, &[0]);
                return self.cancelled(vector, &sent, interrupt);
            }
        }
        self.live.insert(queue, Some(driver));
    }

    fn add(&mut self, driver: &mut AnyDriver, request: Request, indirect: bool) -> Sent {
        let (kind, sector, out, data_bytes) = match request {
            Request::Read { sector, sectors } => (IN, sector, Vec::new(), sectors * SECTOR),
            Request::Write { sector, sectors, fill } => (OUT, sector, written(sectors, fill), 0),
            Request::WriteZeroes { sector, sectors } => {
                (WRITE_ZEROES, 0, segment(sector as u64, sectors as u32, 0), 0)
            }
            Request::Flush => (FLUSH, 0, Vec::new(), 0),
            Request::GetId => (GET_ID, 0, Vec::new(), 20),
            Request::Unknown => (77, 0, Vec::new(), 0),
        };
        let head = [header(kind, sector as u64), out].concat();
        let from = self.arena.alloc_with(&head);
        let data = self.arena.alloc_with(&vec![UNTOUCHED; data_bytes]);
        let status = self.arena.alloc_with(&[UNTOUCHED]);
        let mut bufs = vec![Buf::readable(from, head.len() as u32)];
        if data_bytes > 0 {
            bufs.push(Buf::writable(data, data_bytes as u32));
        }
        bufs.push(Buf::writable(status, 1));
        let head = if indirect { driver.add_indirect(&bufs) } else { driver.add(&bufs) };
        Sent { request, head, data, data_bytes, status }
    }

    fn wait_all(&mut self, queue: u16, driver: &mut AnyDriver, sent: &[Sent], interrupt: bool) {
        let mut open: BTreeMap<u16, &Sent> = sent.iter().map(|sent| (sent.head, sent)).collect();
        while !open.is_empty() {
            let used = driver.wait_used();
            let sent = open.remove(&used.head).expect("each comes back once");
            self.answer(sent, used.written_bytes);
        }
        self.settle(queue);
        assert!(!driver.has_used());
        let vector = self.common.queues[usize::from(queue)].vector;
        let interrupts = match interrupt {
            false => 0..=0,
            true if self.common.negotiated() & EVENT_IDX != 0 => 1..=1,
            true => 1..=sent.len(),
        };
        self.interrupts(vector, interrupts);
    }

    /// Takes note of interrupts of a queue, whose number is known more or less.
    fn interrupts(&mut self, vector: u16, possible: std::ops::RangeInclusive<usize>) {
        if !self.msix.enabled {
            // Read, so that it is known; then it is as if it had never been set.
            let isr = self.pci.take_isr();
            let come = isr & !self.isr;
            assert!(if *possible.end() == 0 { come == 0 } else { come <= 1 });
            if *possible.start() > 0 {
                assert_eq!(isr & 1, 1, "used buffers");
            }
            assert_eq!(isr & 2, self.isr & 2);
            self.isr = 0;
        } else if vector != NO_VECTOR {
            let live = self.msix.is_live(vector);
            let state = &mut self.msix.vectors[usize::from(vector)];
            if live {
                let come = self.sink.count(vector) - state.delivered;
                assert!(possible.contains(&come), "{come} interrupts, {possible:?} are right");
                state.delivered += come;
            } else if possible == (0..=0) {
            } else if *possible.start() > 0 {
                state.pending = true;
            } else {
                state.pending |= self.pci.is_pending(vector);
            }
        }
    }

    /// What the driver finds, and the model's disk after it.
    fn answer(&mut self, sent: &Sent, written_bytes: u32) {
        let data = testkit::read(&self.memory, sent.data, sent.data_bytes);
        let status = testkit::read(&self.memory, sent.status, 1)[0];
        let capacity = self.disk.len() / SECTOR * SECTOR;
        let range = |sector: usize, sectors: usize| {
            let range = sector * SECTOR..(sector + sectors) * SECTOR;
            (range.end <= capacity).then_some(range)
        };
        let mut id = [0; 20];
        id[..SERIAL.len()].copy_from_slice(SERIAL.as_bytes());
        let (expected, read) = match sent.request {
            Request::Read { sector, sectors } => match range(sector, sectors) {
                Some(range) => (OK, Some(self.disk[range].to_vec())),
                None => (IOERR, None),
            },
            Request::Write { sector, sectors, fill } => match range(sector, sectors) {
                Some(range) => {
                    self.disk[range].copy_from_slice(&written(sectors, fill));
                    (OK, None)
                }
                None => (IOERR, None),
            },
            Request::WriteZeroes { sector, sectors } => match range(sector, sectors) {
                _ if self.common.negotiated() & WRITE_ZEROES_FEATURE == 0 => (UNSUPP, None),
                Some(range) => {
                    self.disk[range].fill(0);
                    (OK, None)
                }
                None => (IOERR, None),
            },
            Request::Flush => (OK, None),
            Request::GetId => (OK, Some(id.to_vec())),
            Request::Unknown => (UNSUPP, None),
        };
        assert_eq!(status, expected, "{:?}", sent.request);
        match read {
            Some(read) => {
                assert!(data == read, "{:?}", sent.request);
                assert_eq!(written_bytes as usize, sent.data_bytes + 1);
            }
            None => assert!(data.iter().all(|byte| *byte == UNTOUCHED), "{:?}", sent.request),
        }
        self.freeze(sent);
    }

    fn freeze(&mut self, sent: &Sent) {
        for (address, len) in [(sent.data, sent.data_bytes), (sent.status, 1)] {
            self.frozen.push((address, testkit::read(&self.memory, address, len)));
        }
    }

    /// Requests that a reset overtook: each was carried out or not, and is over.
    fn cancelled(&mut self, vector: u16, sent: &[Sent], interrupt: bool) {
        if self.common.status == 0 {
            // The vector's pending bit is gone, and the ISR too; delivered is delivered.
            if self.msix.enabled && vector != NO_VECTOR && self.msix.is_live(vector) {
                let most = if interrupt { sent.len() } else { 0 };
                self.interrupts(vector, 0..=most);
            }
        } else {
            self.interrupts(vector, 0..=if interrupt { sent.len() } else { 0 });
        }
        for sent in sent {
            self.freeze(sent);
            let (sector, sectors, new) = match sent.request {
                Request::Write { sector, sectors, fill } => {
                    (sector, sectors, written(sectors, fill))
                }
                Request::WriteZeroes { sector, sectors } => {
                    (sector, sectors, vec![0; sectors * SECTOR])
                }
                _ => continue,
            };
            let range = sector * SECTOR..(sector + sectors) * SECTOR;
            let Some(old) = self.disk.get_mut(range) else { continue };
            let mut now = vec![0; old.len()];
            self.image.as_file().read_exact_at(&mut now, (sector * SECTOR) as u64).unwrap();
            for ((now, old), new) in
                now.chunks(SECTOR).zip(old.chunks(SECTOR)).zip(new.chunks(SECTOR))
            {
                assert!(now == old || now == new, "a sector is as it was or as it was written");
            }
            old.copy_from_slice(&now);
        }
    }

    fn wreck(&mut self, queue: u16) {
        // The worker sends the interrupt after it has set the status. That must be seen, or it would
        // come in the middle of a later step.
        let vector = self.common.config_vector;
        let unseen = self.msix.enabled
            && self.msix.vectors.get(usize::from(vector)).is_none_or(|vector| vector.pending);
        if self.common.needs_reset() || unseen {
            return;
        }
        let Some(mut driver) = self.live.get_mut(&queue).and_then(Option::take) else { return };
        if !self.msix.enabled {
            assert_eq!(self.pci.take_isr(), std::mem::take(&mut self.isr));
        }
        driver.wreck();
        self.kick(queue);
        self.wait("DEVICE_NEEDS_RESET", |world| world.pci.status() & 64 != 0);
        self.needs_reset();
        if self.msix.enabled {
            self.wait("the configuration interrupt", |world| {
                let state = world.msix.vectors[usize::from(vector)];
                world.sink.count(vector) == state.delivered
                    && world.pci.is_pending(vector) == state.pending
            });
        } else {
            self.wait("the configuration bit", |world| world.pci.take_isr() == world.isr);
            self.isr = 0;
        }
    }

    fn needs_reset(&mut self) {
        if self.common.ask_for_reset() {
            self.config_interrupt();
        }
    }

    fn config_interrupt(&mut self) {
        self.isr |= 2;
        if self.msix.enabled && self.common.config_vector != NO_VECTOR {
            self.msix.signal(self.common.config_vector);
        }
    }

    fn resize(&mut self, sectors: usize) {
        let changes = sectors * SECTOR != self.disk.len();
        self.image.as_file().set_len((sectors * SECTOR) as u64).unwrap();
        self.handle.rescan().unwrap();
        self.disk.resize(sectors * SECTOR, 0);
        if changes {
            self.changed = true;
            if self.told {
                self.config_interrupt();
            } else {
                self.missed = true;
            }
        }
    }

    fn check(&mut self) {
        let registers: [u8; common::BYTES as usize] = self.pci.read(self.pci.common, 0);
        let expected = self.common.read(0, registers.len(), self.generation);
        assert_eq!(registers[..], expected[..], "the common configuration");
        let capacity = u64::from_le_bytes(self.pci.read(self.pci.device_config, 0));
        assert_eq!(capacity as usize * SECTOR, self.disk.len());
        // The generation goes on when a changed configuration is read.
        if std::mem::take(&mut self.changed) {
            self.generation = self.generation.wrapping_add(1);
            let [generation] = self.pci.read(self.pci.common, common::CONFIG_GENERATION);
            assert_eq!(generation, self.generation);
        }
        for (index, vector) in (0..).zip(&self.msix.vectors) {
            assert_eq!(self.sink.count(index), vector.delivered, "interrupts of vector {index}");
            let message = self.msix.is_live(index).then_some(vector.message);
            assert_eq!(self.sink.message(index), message, "the message of vector {index}");
        }
        let pending: [u8; 8] = self.pci.read(self.pci.msix_pba, 0);
        assert_eq!(pending[..], self.msix.read_pending(0, 8), "what is pending");
        let control = self.pci.config_u16(self.pci.msix_table.capability + 2);
        assert_eq!(control, self.msix.control());
        assert!(self.live.len() <= self.handle.worker_tids().len());
    }
}

/// The request in its part of the disk, so that a batch may be carried out in any order.
fn placed(request: Request, slot: usize) -> Request {
    let part = SECTORS / 4;
    let place = |sector: usize, sectors: usize| {
        let sector = if sector >= part { SECTORS * 2 - 2 + sector - part } else { sector };
        (slot * part + sector, sectors.min(part - sector % part))
    };
    match request {
        Request::Read { sector, sectors } => {
            let (sector, sectors) = place(sector, sectors);
            Request::Read { sector, sectors }
        }
        Request::Write { sector, sectors, fill } => {
            let (sector, sectors) = place(sector, sectors);
            Request::Write { sector, sectors, fill }
        }
        Request::WriteZeroes { sector, sectors } => {
            let (sector, sectors) = place(sector, sectors);
            Request::WriteZeroes { sector, sectors }
        }
        other => other,
    }
}

/// What a write brings.
fn written(sectors: usize, fill: u8) -> Vec<u8> {
    (0..sectors * SECTOR).map(|at| (at % 241) as u8 ^ fill).collect()
}
