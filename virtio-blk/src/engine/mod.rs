//! Who carries out requests. An engine belongs to one queue's worker and lives on its thread.

mod job;
mod null;
mod sync;
pub(crate) mod uring;

use std::sync::Arc;

use devices::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use crate::config::EngineKind;
use crate::disk::Disk;
use crate::request::{Request, Status};

/// A request that is complete.
pub(crate) struct Done {
    pub(crate) request: Request,
    pub(crate) status: Status,
}

/// Carries out requests. It owns what it was given, and a clone of the guest memory that the
/// requests' buffers are in, until it gives them back.
pub(crate) trait Engine {
    /// Begins a request; gives it back if it is complete already. What is not comes back from
    /// [`reap`](Self::reap).
    fn push(&mut self, request: Request) -> Option<Done>;

    /// Hands the kernel what was pushed since the last time: at most one system call.
    fn submit(&mut self) {}

    /// Whether [`reap`](Self::reap) may find something. No system call.
    fn ready(&mut self) -> bool {
        false
    }

    /// Adds what has completed to `done`, and gives the number of kicks that came with it.
    fn reap(&mut self, _done: &mut Vec<Done>) -> u64 {
        0
    }

    /// Submits, then sleeps until the driver kicks or something completes. Gives the number of
    /// kicks. May return early.
    fn sleep(&mut self, kick: &EventFd) -> u64 {
        kick.read().unwrap_or(0)
    }

    /// Waits for what is under way and forgets it.
    fn drain(&mut self) {}
}

/// An engine for the requests of one queue of `queue_size` descriptors, whose buffers are in
/// `memory`.
pub(crate) fn new(
    kind: EngineKind,
    disk: &Arc<Disk>,
    memory: &GuestMemory,
    queue_size: u16,
) -> Box<dyn Engine> {
    match kind {
        EngineKind::Uring => {
            Box::new(uring::Uring::new(disk.clone(), memory.clone(), u32::from(queue_size)))
        }
        EngineKind::Sync => Box::new(sync::Sync::new(disk.clone(), memory.clone())),
        EngineKind::Null => Box::new(null::Null),
    }
}
