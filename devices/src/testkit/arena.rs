//! Guest RAM for tests.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::GuestMemory;

/// Bytes of canary before and after each allocation.
const CANARY_BYTES: u64 = 64;

/// Guest RAM of `bytes` bytes from address 0, zeroed.
pub fn memory(bytes: usize) -> GuestMemory {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).expect("mmap"))
}

/// Guest RAM in two regions: `bytes` bytes from address 0, and as many from `second`.
pub fn memory_with_hole(bytes: usize, second: u64) -> GuestMemory {
    let ranges = [(GuestAddress(0), bytes), (GuestAddress(second), bytes)];
    Arc::new(GuestMemoryMmap::from_ranges(&ranges).expect("mmap"))
}

/// The `len_bytes` bytes at `address`.
pub fn read(memory: &GuestMemory, address: u64, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    memory.read_slice(&mut bytes, GuestAddress(address)).expect("in RAM");
    bytes
}

/// Writes `bytes` at `address`.
pub fn write(memory: &GuestMemory, address: u64, bytes: &[u8]) {
    memory.write_slice(bytes, GuestAddress(address)).expect("in RAM");
}

/// Hands out buffers in guest RAM, each between two canaries: a device that writes past what it was
/// given is found by [`check`](Self::check).
pub struct Arena {
    memory: GuestMemory,
    next: u64,
    given: Vec<(u64, u64)>,
}

impl Arena {
    /// Buffers from guest address `start` on.
    pub fn new(memory: &GuestMemory, start: u64) -> Arena {
        Arena { memory: memory.clone(), next: start, given: Vec::new() }
    }

    /// A zeroed buffer of `len_bytes` bytes; its address is a multiple of 16.
    pub fn alloc(&mut self, len_bytes: u64) -> u64 {
        self.alloc_at(len_bytes, 16, 0)
    }

    /// A zeroed buffer whose address is `skew_bytes` past a multiple of `align_bytes`.
    pub fn alloc_at(&mut self, len_bytes: u64, align_bytes: u64, skew_bytes: u64) -> u64 {
        let address = (self.next + CANARY_BYTES).next_multiple_of(align_bytes) + skew_bytes;
        write(&self.memory, address, &vec![0; len_bytes as usize]);
        for canary in [address - CANARY_BYTES, address + len_bytes] {
            write(&self.memory, canary, &canary_of(canary));
        }
        self.next = address + len_bytes + CANARY_BYTES;
        self.given.push((address, len_bytes));
        address
    }

    /// A buffer with these contents.
    pub fn alloc_with(&mut self, bytes: &[u8]) -> u64 {
        let address = self.alloc(bytes.len() as u64);
        write(&self.memory, address, bytes);
        address
    }

    /// Panics if a byte around any of the buffers changed.
    pub fn check(&self) {
        for &(address, len_bytes) in &self.given {
            for canary in [address - CANARY_BYTES, address + len_bytes] {
                assert_eq!(
                    read(&self.memory, canary, CANARY_BYTES as usize),
                    canary_of(canary),
                    "the canary at {canary:#x} next to {len_bytes} bytes at {address:#x} is dead"
                );
            }
        }
    }
}

fn canary_of(address: u64) -> Vec<u8> {
    (address..address + CANARY_BYTES).map(|at| (at.wrapping_mul(0x9d) as u8) | 1).collect()
}
