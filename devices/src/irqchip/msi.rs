//! MSIs of one PCI function, straight to the local APICs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::message::Interrupt;
use super::shared::ApicBus;
use crate::irq::{MsiMessage, MsiSink};

// A vector's word: the lower half of the address, three flags, and the data, of which only the
// lower 16 bits mean something (SDM 11.11.2). One word, so that whoever reads it has a message
// that was really set, and no update is lost.
const ADDRESS_SHIFT: u32 = 32;
/// The vector was unmasked once: its message is one.
const KNOWN: u64 = 1 << 18;
/// It is unmasked now.
const LIVE: u64 = 1 << 17;
/// It was triggered while it was masked.
const PENDING: u64 = 1 << 16;

fn pack(message: MsiMessage) -> u64 {
    // Beyond 4 GiB there is no local APIC; address 0 is as wrong as any.
    let address = u32::try_from(message.address).unwrap_or(0);
    u64::from(address) << ADDRESS_SHIFT | KNOWN | u64::from(message.data as u16)
}

fn unpack(word: u64) -> MsiMessage {
    MsiMessage { address: word >> ADDRESS_SHIFT, data: (word as u16).into() }
}

/// The MSI-X vectors of one function. Nothing in here takes a lock.
pub struct UserMsi {
    bus: Arc<ApicBus>,
    vectors: Box<[AtomicU64]>,
}

impl UserMsi {
    pub(super) fn new(bus: Arc<ApicBus>, vectors: u16) -> Self {
        UserMsi { bus, vectors: (0..vectors).map(|_| AtomicU64::new(0)).collect() }
    }

    #[inline]
    fn send(&self, word: u64) {
        if let Some(interrupt) = Interrupt::from_msi(unpack(word)) {
            self.bus.send(&interrupt, None);
        }
    }

    /// Keeps a trigger of a vector that was seen masked for the next unmask, or delivers it if that
    /// has happened in between.
    fn keep(&self, state: &AtomicU64) {
        if state.fetch_or(PENDING, Ordering::SeqCst) & LIVE == 0 {
            return;
        }
        // Whoever clears the flag delivers.
        let word = state.fetch_and(!PENDING, Ordering::SeqCst);
        if word & PENDING != 0 {
            self.send(word);
        }
    }

    fn vector(&self, vector: u16) -> io::Result<&AtomicU64> {
        self.vectors.get(usize::from(vector)).ok_or(io::ErrorKind::InvalidInput.into())
    }
}

impl MsiSink for UserMsi {
    #[inline]
    fn trigger(&self, vector: u16) {
        let Some(state) = self.vectors.get(usize::from(vector)) else { return };
        let word = state.load(Ordering::SeqCst);
        if word & LIVE != 0 {
            return self.send(word);
        }
        if word & KNOWN != 0 {
            self.keep(state);
        }
    }

    fn unmask(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        let new = pack(message) | LIVE;
        if self.vector(vector)?.swap(new, Ordering::SeqCst) & PENDING != 0 {
            self.send(new);
        }
        Ok(())
    }

    fn mask(&self, vector: u16) -> io::Result<()> {
        self.vector(vector)?.fetch_and(!LIVE, Ordering::SeqCst);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
