//! Tests of queues, by what they are about. Where nothing else is said, of split ones.

mod both;
mod chains;
mod events;
mod hostile;
mod packed;
mod packed_hostile;

use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::*;
use crate::testkit::{self, AnyDriver, Arena, Buf, Driver, PackedDriver, RawDescriptor, RawPacked};

const INDIRECT: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const PACKED: u64 = 1 << VIRTIO_F_RING_PACKED;
const RAM_BYTES: usize = 1 << 20;
const RINGS: u64 = 0x1000;
/// Where the tests' buffers are, behind the rings of any queue of theirs.
const BUFFERS: u64 = 0x8_0000;

/// A queue of `size`, its driver, and room for buffers.
fn setup(size: u16, features: u64) -> (Driver, Queue, Arena, GuestMemory) {
    match setup_any(size, features) {
        (AnyDriver::Split(driver), queue, arena, memory) => (driver, queue, arena, memory),
        (AnyDriver::Packed(_), ..) => panic!("a split queue was asked for"),
    }
}

/// The same for a queue of the format that `features` say.
fn setup_any(size: u16, features: u64) -> (AnyDriver, Queue, Arena, GuestMemory) {
    let memory = testkit::memory(RAM_BYTES);
    let driver = AnyDriver::new(&memory, RINGS, size, features);
    assert!(driver.end() <= BUFFERS);
    let queue = driver.device_queue();
    let arena = Arena::new(&memory, BUFFERS);
    (driver, queue, arena, memory)
}

/// The same for a packed queue.
fn setup_packed(size: u16, features: u64) -> (PackedDriver, Queue, Arena, GuestMemory) {
    match setup_any(size, features | PACKED) {
        (AnyDriver::Packed(driver), queue, arena, memory) => (driver, queue, arena, memory),
        (AnyDriver::Split(_), ..) => panic!("a packed queue was asked for"),
    }
}

/// Checks that `pop` gives `error`, now and after the driver has mended its ways, and touches nothing
/// any more.
fn stays_broken(queue: &mut Queue, memory: &GuestMemory, error: QueueError, mend: impl FnOnce()) {
    let mut chain = Chain::new();
    assert_eq!(queue.pop(&mut chain), Err(error));
    mend();
    let before = testkit::read(memory, 0, RAM_BYTES);
    for _ in 0..3 {
        assert_eq!(queue.pop(&mut chain), Err(error));
        assert!(!queue.has_available());
        assert!(!queue.enable_kicks());
        assert!(!queue.publish());
    }
    assert!(testkit::read(memory, 0, RAM_BYTES) == before);
}

/// What a buffer is on the host.
fn host(memory: &GuestMemory, address: u64, len_bytes: usize) -> (usize, usize) {
    let at = memory.get_host_address(GuestAddress(address)).unwrap();
    (at.addr(), len_bytes)
}

fn seen(bufs: &[GuestBuf]) -> Vec<(usize, usize)> {
    bufs.iter().map(|buf| (buf.as_ptr().addr(), buf.len_bytes())).collect()
}
