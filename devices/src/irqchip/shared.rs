//! The part of a local APIC that other threads touch, and the bus on which messages find their
//! receivers. No locks: a receiver is found by loads, and a message is one atomic operation in the
//! receiver's state and one call of its [`Notify`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Notify;
use super::message::{BROADCAST, DeliveryMode, Destination, FIRST_LEGAL_VECTOR, Interrupt};
use super::vectors::AtomicVectorSet;

/// How a local APIC can be reached, by bits 11 and 10 of IA32_APIC_BASE (SDM 11.12.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApicMode {
    /// Not at all.
    Disabled,
    /// By a page of memory-mapped registers.
    XApic,
    /// By model-specific registers.
    X2Apic,
}

/// The logical identifier of an x2APIC: cluster in the upper half, one bit in the lower
/// (SDM 11.12.10.2).
pub(super) fn x2apic_logical_id(id: u32) -> u32 {
    (id >> 4) << 16 | 1 << (id & 0xf)
}

/// What senders must know of a receiver; it fits one word, so that they see a consistent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addressing {
    pub mode: ApicMode,
    /// Bit 8 of the spurious-interrupt vector register: fixed interrupts are accepted.
    pub software_enabled: bool,
    /// The xAPIC's logical destinations are flat, not clustered.
    pub flat: bool,
    /// The xAPIC's logical identifier, bits 31:24 of its register.
    pub logical_id: u8,
    pub task_priority: u8,
}

impl Addressing {
    const MODE_SHIFT: u32 = 16;
    const SOFTWARE_ENABLED: u32 = 1 << 18;
    const FLAT: u32 = 1 << 19;

    fn pack(self) -> u32 {
        let mode = match self.mode {
            ApicMode::Disabled => 0,
            ApicMode::XApic => 1,
            ApicMode::X2Apic => 2,
        };
        let mut word = u32::from(self.logical_id) | u32::from(self.task_priority) << 8;
        word |= mode << Self::MODE_SHIFT;
        if self.software_enabled {
            word |= Self::SOFTWARE_ENABLED;
        }
        if self.flat {
            word |= Self::FLAT;
        }
        word
    }

    #[inline]
    fn unpack(word: u32) -> Self {
        Addressing {
            mode: match word >> Self::MODE_SHIFT & 3 {
                0 => ApicMode::Disabled,
                1 => ApicMode::XApic,
                _ => ApicMode::X2Apic,
            },
            software_enabled: word & Self::SOFTWARE_ENABLED != 0,
            flat: word & Self::FLAT != 0,
            logical_id: word as u8,
            task_priority: (word >> 8) as u8,
        }
    }

    /// Whether the logical destination `destination` includes this APIC, whose identifier is `id`.
    fn matches_logical(self, id: u32, destination: u32) -> bool {
        if destination == BROADCAST {
            return true;
        }
        if self.mode == ApicMode::X2Apic {
            let own = x2apic_logical_id(id);
            return destination >> 16 == own >> 16 && destination & own & 0xffff != 0;
        }
        let Ok(destination) = u8::try_from(destination) else { return false };
        if self.flat {
            self.logical_id & destination != 0
        } else {
            self.logical_id >> 4 == destination >> 4 && self.logical_id & destination & 0xf != 0
        }
    }
}

// Requests of other threads to the owner that are not vectors.
const NMI: u32 = 1 << 0;
const INIT: u32 = 1 << 1;
const SIPI: u32 = 1 << 2;
const ILLEGAL_VECTOR: u32 = 1 << 3;
const SIPI_VECTOR_SHIFT: u32 = 8;
const SIPI_FIELDS: u32 = SIPI | 0xff << SIPI_VECTOR_SHIFT;

/// The part of a local APIC that any thread may touch.
#[repr(align(128))]
pub struct LapicShared {
    /// Interrupt request register.
    pub(super) irr: AtomicVectorSet,
    /// Trigger mode register: the vectors that came level triggered.
    pub(super) tmr: AtomicVectorSet,
    /// The vectors that came from another local APIC, when they last came from anywhere.
    ipis: AtomicVectorSet,
    requests: AtomicU32,
    addressing: AtomicU32,
    id: u32,
    notify: Arc<dyn Notify>,
}

impl LapicShared {
    pub(super) fn new(id: u32, addressing: Addressing, notify: Arc<dyn Notify>) -> Self {
        LapicShared {
            irr: AtomicVectorSet::default(),
            tmr: AtomicVectorSet::default(),
            ipis: AtomicVectorSet::default(),
            requests: AtomicU32::new(0),
            addressing: AtomicU32::new(addressing.pack()),
            id,
            notify,
        }
    }

    /// The APIC identifier: the vCPU's number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether `vector` was last requested by a local APIC, and not by a device.
    pub fn is_ipi(&self, vector: u8) -> bool {
        self.ipis.contains(vector)
    }

    /// Whether a non-maskable interrupt waits to be taken.
    pub fn nmi_pending(&self) -> bool {
        self.requests.load(Ordering::SeqCst) & NMI != 0
    }

    /// Whether an INIT waits to be taken.
    pub fn init_pending(&self) -> bool {
        self.requests.load(Ordering::SeqCst) & INIT != 0
    }

    /// Whether a start-up message waits to be taken.
    pub fn sipi_pending(&self) -> bool {
        self.requests.load(Ordering::SeqCst) & SIPI != 0
    }

    fn take(&self, request: u32) -> bool {
        // Mostly there is nothing, and a load is cheaper than a locked operation.
        self.requests.load(Ordering::SeqCst) & request != 0
            && self.requests.fetch_and(!request, Ordering::SeqCst) & request != 0
    }

    pub(super) fn take_nmi(&self) -> bool {
        self.take(NMI)
    }

    pub(super) fn take_init(&self) -> bool {
        self.take(INIT)
    }

    pub(super) fn take_illegal_vector(&self) -> bool {
        self.take(ILLEGAL_VECTOR)
    }

    pub(super) fn take_sipi(&self) -> Option<u8> {
        if !self.sipi_pending() {
            return None;
        }
        let old = self.requests.fetch_and(!SIPI_FIELDS, Ordering::SeqCst);
        (old & SIPI != 0).then_some((old >> SIPI_VECTOR_SHIFT) as u8)
    }

    #[inline]
    fn addressing(&self) -> Addressing {
        Addressing::unpack(self.addressing.load(Ordering::SeqCst))
    }

    /// Tells senders; only the owner calls it.
    pub(super) fn publish(&self, addressing: Addressing) {
        let word = addressing.pack();
        if self.addressing.load(Ordering::Relaxed) != word {
            self.addressing.store(word, Ordering::SeqCst);
        }
    }

    /// Sets the request bit of `vector`; true if it was set before. Does not notify.
    ///
    /// An illegal vector becomes an error of the receiver (SDM 11.5.3, receive illegal vector).
    pub(super) fn request(&self, vector: u8, level: bool) -> Requested {
        if vector < FIRST_LEGAL_VECTOR {
            self.requests.fetch_or(ILLEGAL_VECTOR, Ordering::SeqCst);
            return Requested::Illegal;
        }
        self.tmr.assign(vector, level);
        if self.irr.insert(vector) { Requested::New } else { Requested::Again }
    }

    /// Takes a message that is addressed to this APIC; true if it was accepted. `from` is who sends it:
    /// the owner itself needs no notification.
    #[inline]
    fn receive(&self, interrupt: &Interrupt, addressing: Addressing, from: Option<u32>) -> bool {
        let (accepted, news) = match interrupt.mode {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => {
                if !addressing.software_enabled {
                    return false;
                }
                self.ipis.assign(interrupt.vector, from.is_some());
                match self.request(interrupt.vector, interrupt.level) {
                    Requested::New => (true, true),
                    // Whoever set the bit notifies, or has done so.
                    Requested::Again => (true, false),
                    Requested::Illegal => (false, true),
                }
            }
            DeliveryMode::Nmi => (true, self.requests.fetch_or(NMI, Ordering::SeqCst) & NMI == 0),
            DeliveryMode::Init => {
                // A start-up message from before the INIT is void.
                let set = |old: u32| Some(old & !SIPI_FIELDS | INIT);
                let _ = self.requests.fetch_update(Ordering::SeqCst, Ordering::SeqCst, set);
                (true, true)
            }
            DeliveryMode::StartUp => {
                let sipi = SIPI | u32::from(interrupt.vector) << SIPI_VECTOR_SHIFT;
                let set = |old: u32| Some(old & !SIPI_FIELDS | sipi);
                let _ = self.requests.fetch_update(Ordering::SeqCst, Ordering::SeqCst, set);
                (true, true)
            }
            DeliveryMode::Smi | DeliveryMode::ExtInt => (false, false),
        };
        if news && from != Some(self.id) {
            self.notify.notify();
        }
        accepted
    }
}

/// What became of a request for a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Requested {
    New,
    /// It was requested already: the two have become one.
    Again,
    Illegal,
}

/// The local APICs of a machine by identifier, and the way messages take to them.
pub struct ApicBus {
    lapics: Box<[Arc<LapicShared>]>,
}

impl ApicBus {
    /// Local APICs whose identifiers are their positions.
    pub(super) fn new(lapics: Vec<Arc<LapicShared>>) -> Self {
        ApicBus { lapics: lapics.into_boxed_slice() }
    }

    /// The local APICs, by identifier.
    pub fn lapics(&self) -> &[Arc<LapicShared>] {
        &self.lapics
    }

    /// Sends a message; true if a local APIC accepted it. Takes no lock. `from` is the identifier of
    /// the APIC whose owner sends it, if one does: the shorthands refer to it, and it is not
    /// notified of what it sends to itself.
    #[inline]
    pub fn send(&self, interrupt: &Interrupt, from: Option<u32>) -> bool {
        let only = match interrupt.destination {
            Destination::Physical(id) if id != BROADCAST => Some(id),
            Destination::Myself => match from {
                Some(id) => Some(id),
                None => return false,
            },
            _ => None,
        };
        if let Some(id) = only {
            let lapic = usize::try_from(id).ok().and_then(|index| self.lapics.get(index));
            let Some(lapic) = lapic else { return false };
            let addressing = lapic.addressing();
            return addressing.mode != ApicMode::Disabled
                && lapic.receive(interrupt, addressing, from);
        }
        let targets = self.lapics.iter().filter_map(|lapic| {
            let addressing = lapic.addressing();
            let matches = addressing.mode != ApicMode::Disabled
                && match interrupt.destination {
                    Destination::Logical(id) => addressing.matches_logical(lapic.id, id),
                    Destination::AllButSelf => from != Some(lapic.id),
                    _ => true,
                };
            matches.then_some((lapic, addressing))
        });
        let deliver = |(lapic, addressing): (&Arc<LapicShared>, Addressing)| {
            lapic.receive(interrupt, addressing, from)
        };
        if interrupt.mode == DeliveryMode::LowestPriority {
            // Among equals the vector decides, so that an interrupt stays on its CPU and different
            // ones are spread: the nearest identifier by exclusive or.
            let near = |id: u32| id ^ u32::from(interrupt.vector);
            return targets
                .filter(|(_, addressing)| addressing.software_enabled)
                .min_by_key(|(lapic, addressing)| (addressing.task_priority >> 4, near(lapic.id)))
                .is_some_and(deliver);
        }
        targets.fold(false, |accepted, target| deliver(target) | accepted)
    }
}

#[cfg(test)]
mod tests;
