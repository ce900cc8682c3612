//! Each step by a system call that waits.

use std::sync::Arc;

use devices::GuestMemory;

use super::job::Job;
use super::{Done, Engine};
use crate::disk::Disk;
use crate::request::{Request, Status};

/// See the module.
pub(crate) struct Sync {
    disk: Arc<Disk>,
    /// Keeps the buffers of the requests mapped.
    _memory: GuestMemory,
}

impl Sync {
    pub(crate) fn new(disk: Arc<Disk>, memory: GuestMemory) -> Sync {
        Sync { disk, _memory: memory }
    }
}

impl Engine for Sync {
    fn push(&mut self, request: Request) -> Option<Done> {
        Some(run(Job::new(request), &self.disk))
    }
}

/// Carries out what is left of a job.
pub(super) fn run(mut job: Job, disk: &Disk) -> Done {
    let status = loop {
        let Some(step) = job.next(disk) else { break Status::Ok };
        if let Err(status) = job.advance(step.run(disk)) {
            break status;
        }
    };
    Done { request: job.into_request(), status }
}
