//! MSI-X: the vector table, the pending bits, and the decision whether a vector may be delivered
//! (PCI Local Bus 3.0, 6.8.2).
//!
//! [`Msix::signal`] is on the data path: it takes no lock. Everything the guest does to the table
//! or to the control word is rare, and is serialised by one lock.
//!
//! # How nothing is lost
//! Each vector has two atomics: `live` (the sink is ready for it) and `pending`.
//!
//! * `signal` looks at `live`. If it is clear, it sets `pending` and *looks again*.
//! * Unmasking readies the sink, sets `live`, and then looks at `pending`.
//!
//! Both sides store before they load, sequentially consistent, so at least one of them sees the
//! other's store; and whoever takes `pending` (an atomic swap) delivers, so only one of them does.
//!
//! Masking clears `live` before the sink is told. A signal that saw `live` just before may still
//! reach the sink just after; [`MsiSink::trigger`] says what a sink does with it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::irq::{MsiMessage, MsiSink};

/// The capability ID of MSI-X.
pub const CAPABILITY_ID: u8 = 0x11;
/// The most vectors a function can have.
pub const MAX_VECTORS: u16 = 2048;
/// Bytes of one table entry: address low, address high, data, vector control.
pub const ENTRY_BYTES: u64 = 16;
/// Message control: MSI-X is on.
pub const CONTROL_ENABLE: u16 = 1 << 15;
/// Message control: every vector is masked, whatever its own mask bit says.
pub const CONTROL_FUNCTION_MASK: u16 = 1 << 14;

/// Vector control: the only bit that exists.
const ENTRY_MASKED: u32 = 1;

/// What the hot path sees of a vector.
#[derive(Default)]
struct Vector {
    /// The vector may be delivered and the sink has its message.
    live: AtomicBool,
    /// It was signalled while it could not be delivered.
    pending: AtomicBool,
}

/// A table entry, and what the sink knows of it.
#[derive(Clone)]
struct Entry {
    message: MsiMessage,
    masked: bool,
    /// The message the sink delivers; `None` while the vector is masked there.
    routed: Option<MsiMessage>,
}

impl Entry {
    const RESET: Entry =
        Entry { message: MsiMessage { address: 0, data: 0 }, masked: true, routed: None };

    /// The entry as the guest reads it.
    fn to_bytes(&self) -> [u8; ENTRY_BYTES as usize] {
        let control = u128::from(u32::from(self.masked) * ENTRY_MASKED);
        let words =
            u128::from(self.message.address) | u128::from(self.message.data) << 64 | control << 96;
        words.to_le_bytes()
    }

    /// Writes one of the entry's four double words.
    fn set_word(&mut self, index: u64, value: u32) {
        const LOW: u64 = 0xffff_ffff;
        let address = self.message.address;
        match index {
            // The two low bits of the address are always zero (6.8.2.3).
            0 => self.message.address = address & !LOW | u64::from(value & !0x3),
            1 => self.message.address = address & LOW | u64::from(value) << 32,
            2 => self.message.data = value,
            _ => self.masked = value & ENTRY_MASKED != 0,
        }
    }
}

/// What the guest has set.
struct Table {
    enabled: bool,
    function_mask: bool,
    entries: Vec<Entry>,
    /// A refusal of the sink was reported; a guest can repeat its cause at will.
    failure_reported: bool,
}

/// The MSI-X state of one function, shared between its configuration space, the BAR that holds the
/// table, and whoever signals.
pub struct Msix {
    sink: Arc<dyn MsiSink>,
    vectors: Box<[Vector]>,
    enabled: AtomicBool,
    table: Mutex<Table>,
}

impl Msix {
    /// A disabled function with `vectors` vectors (1 to [`MAX_VECTORS`]; the nearest is taken),
    /// all of them masked.
    pub fn new(vectors: u16, sink: Arc<dyn MsiSink>) -> Self {
        let count = usize::from(vectors.clamp(1, MAX_VECTORS));
        Msix {
            sink,
            vectors: (0..count).map(|_| Vector::default()).collect(),
            enabled: AtomicBool::new(false),
            table: Mutex::new(Table {
                enabled: false,
                function_mask: false,
                entries: vec![Entry::RESET; count],
                failure_reported: false,
            }),
        }
    }

    /// The number of vectors.
    pub fn vectors(&self) -> u16 {
        // At most MAX_VECTORS, by construction.
        self.vectors.len() as u16
    }

    /// Bytes of the table.
    pub fn table_bytes(&self) -> u64 {
        self.vectors.len() as u64 * ENTRY_BYTES
    }

    /// Bytes of the pending bit array: whole quad words (6.8.2.10).
    pub fn pba_bytes(&self) -> u64 {
        self.vectors.len().div_ceil(64) as u64 * 8
    }

    /// Whether the guest has switched MSI-X on.
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Acquire)
    }

    /// Signals `vector`: it is delivered now, or marked pending and delivered once when that becomes
    /// possible. A vector that does not exist is ignored. Takes no lock.
    #[inline]
    pub fn signal(&self, vector: u16) {
        let Some(state) = self.vectors.get(usize::from(vector)) else { return };
        if state.live.load(Ordering::SeqCst) {
            self.sink.trigger(vector);
            return;
        }
        state.pending.store(true, Ordering::SeqCst);
        if state.live.load(Ordering::SeqCst) {
            self.deliver_pending(vector, state);
        }
    }

    /// Reads the table at `offset` bytes. Bytes past its end read as zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= self.table_bytes() {
            return;
        }
        let table = self.lock();
        for (byte, at) in data.iter_mut().zip(offset..) {
            let Ok(index) = usize::try_from(at / ENTRY_BYTES) else { return };
            let Some(entry) = table.entries.get(index) else { return };
            *byte = byte_at(&entry.to_bytes(), at % ENTRY_BYTES);
        }
    }

    /// Writes the table at `offset` bytes. Only naturally aligned accesses of 4 and 8 bytes are
    /// legal (6.8.2); others, and those past the end, are ignored.
    pub fn write_table(&self, offset: u64, data: &[u8]) {
        let (low, high) = match *data {
            [a, b, c, d] => (u32::from_le_bytes([a, b, c, d]), None),
            [a, b, c, d, e, f, g, h] => {
                (u32::from_le_bytes([a, b, c, d]), Some(u32::from_le_bytes([e, f, g, h])))
            }
            _ => return,
        };
        if !offset.is_multiple_of(data.len() as u64) || offset >= self.table_bytes() {
            return;
        }
        let index = (offset / ENTRY_BYTES) as u16;
        let word = offset % ENTRY_BYTES / 4;
        let table = &mut *self.lock();
        let Some(entry) = table.entries.get_mut(usize::from(index)) else { return };
        entry.set_word(word, low);
        if let Some(high) = high {
            entry.set_word(word + 1, high);
        }
        self.refresh(table, index);
    }

    /// Reads the pending bit array at `offset` bytes. Bytes past its end read as zero.
    pub fn read_pba(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= self.pba_bytes() {
            return;
        }
        for (byte, at) in data.iter_mut().zip(offset..) {
            let first = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(8);
            for (bit, state) in self.vectors.iter().skip(first).take(8).enumerate() {
                *byte |= u8::from(state.pending.load(Ordering::SeqCst)) << bit;
            }
        }
    }

    /// The message control word: table size minus one, and the two bits a guest can set (6.8.2.3).
    pub fn control(&self) -> u16 {
        let table = self.lock();
        let mut control = self.vectors().saturating_sub(1);
        if table.enabled {
            control |= CONTROL_ENABLE;
        }
        if table.function_mask {
            control |= CONTROL_FUNCTION_MASK;
        }
        control
    }

    /// Sets the two writable bits of the message control word.
    pub fn set_control(&self, enable: bool, function_mask: bool) {
        let table = &mut *self.lock();
        table.enabled = enable;
        table.function_mask = function_mask;
        self.enabled.store(enable, Ordering::Release);
        for vector in 0..self.vectors() {
            self.refresh(table, vector);
        }
    }

    /// The state after a reset of the function: MSI-X off, every entry zero and masked, nothing
    /// pending.
    pub fn reset(&self) {
        let table = &mut *self.lock();
        table.enabled = false;
        table.function_mask = false;
        self.enabled.store(false, Ordering::Release);
        for vector in 0..self.vectors() {
            if let Some(entry) = table.entries.get_mut(usize::from(vector)) {
                entry.message = MsiMessage::default();
                entry.masked = true;
            }
            self.refresh(table, vector);
        }
        self.clear_pending();
    }

    /// Forgets what is pending: the device was reset, the function was not.
    pub fn clear_pending(&self) {
        for state in &self.vectors {
            state.pending.store(false, Ordering::SeqCst);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Every state of the table is a valid one, so a panic elsewhere does not spoil it.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver_pending(&self, vector: u16, state: &Vector) {
        if state.pending.swap(false, Ordering::SeqCst) {
            self.sink.trigger(vector);
        }
    }

    /// Makes the sink agree with the table about `vector`.
    fn refresh(&self, table: &mut Table, vector: u16) {
        let index = usize::from(vector);
        let deliverable = table.enabled && !table.function_mask;
        let (Some(state), Some(entry)) = (self.vectors.get(index), table.entries.get_mut(index))
        else {
            return;
        };
        let wanted = (deliverable && !entry.masked).then_some(entry.message);
        if wanted == entry.routed {
            return;
        }
        let result = match wanted {
            Some(message) => self.sink.unmask(vector, message),
            None => {
                state.live.store(false, Ordering::SeqCst);
                entry.routed = None;
                self.sink.mask(vector)
            }
        };
        match (result, wanted) {
            (Ok(()), Some(_)) => {
                entry.routed = wanted;
                state.live.store(true, Ordering::SeqCst);
                self.deliver_pending(vector, state);
            }
            (Ok(()), None) => {}
            (Err(error), _) => {
                // The guest's next write to the entry or the control word tries again; until then
                // its interrupts stay pending.
                state.live.store(false, Ordering::SeqCst);
                if entry.routed.take().is_some() {
                    // The new message was refused: the old one must not be delivered either.
                    let _ = self.sink.mask(vector);
                }
                report(&mut table.failure_reported, vector, &error);
            }
        }
    }
}

/// Tells of a sink's refusal, once for each function.
fn report(reported: &mut bool, vector: u16, error: &io::Error) {
    if !std::mem::replace(reported, true) {
        let told = "told once for each device";
        crate::tell(format_args!("MSI-X vector {vector} stays masked: {error} ({told})"));
    }
}

fn byte_at(bytes: &[u8], index: u64) -> u8 {
    usize::try_from(index).ok().and_then(|index| bytes.get(index)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests;
