//! The parameters of halt polling, and how they change while the VM runs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use halt_poll::{Params, Policy};
use kvm_ioctls::VmFd;

use crate::config::HaltPoll;
use crate::vm::{VmError, set_halt_poll_ns};

/// Who polls for this VM's halted vCPUs, and is told what to go by.
#[derive(Clone)]
pub enum Polling {
    /// KVM, for at most as long as it is told for this VM. What else it goes by is the host's: see
    /// [`crate::tuning`].
    Kernel(Arc<VmFd>),
    /// Each vCPU's thread.
    User(Arc<SharedParams>),
}

impl Polling {
    /// Puts the VM's own parameters in force, from the next halt on.
    ///
    /// # Errors
    /// KVM refused.
    pub fn set(&self, poll: &HaltPoll) -> Result<(), VmError> {
        match self {
            Self::Kernel(fd) => poll.halt_poll_ns.map_or(Ok(()), |max| set_halt_poll_ns(fd, max)),
            Self::User(shared) => {
                shared.set(params(poll));
                Ok(())
            }
        }
    }
}

/// The parameters of mode `user`: what is not given is Linux's default.
pub fn params(asked: &HaltPoll) -> Params {
    let default = Params::default();
    Params {
        max_ns: asked.halt_poll_ns.unwrap_or(default.max_ns),
        grow: asked.halt_poll_ns_grow.unwrap_or(default.grow),
        grow_start_ns: asked.halt_poll_ns_grow_start.unwrap_or(default.grow_start_ns),
        shrink: asked.halt_poll_ns_shrink.unwrap_or(default.shrink),
    }
}

/// What the policies of all vCPUs go by in mode `user`.
pub struct SharedParams {
    /// Counts the changes; stored after them.
    changes: AtomicU32,
    params: Mutex<Params>,
}

impl SharedParams {
    /// The parameters to begin with.
    pub fn new(params: Params) -> Self {
        Self { changes: AtomicU32::new(0), params: Mutex::new(params) }
    }

    fn get(&self) -> Params {
        *self.params.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, params: Params) {
        *self.params.lock().unwrap_or_else(PoisonError::into_inner) = params;
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// A vCPU's policy, which follows the shared parameters. A halt costs one more load, and a lock only
/// after a change.
pub struct Following {
    shared: Arc<SharedParams>,
    seen: u32,
}

impl Following {
    /// Begins with the parameters of the moment: gives the policy as well.
    pub fn new(shared: Arc<SharedParams>) -> (Self, Policy) {
        let seen = shared.changes.load(Ordering::Acquire);
        let policy = Policy::new(shared.get());
        (Self { shared, seen }, policy)
    }

    /// To be called before each halt.
    #[inline]
    pub fn follow(&mut self, policy: &mut Policy) {
        let changes = self.shared.changes.load(Ordering::Acquire);
        if changes != self.seen {
            self.seen = changes;
            policy.set_params(self.shared.get());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_takes_a_change_over_before_its_next_halt() {
        let shared = Arc::new(SharedParams::new(Params::default()));
        let mut vcpus = [(); 2].map(|()| Following::new(Arc::clone(&shared)));
        let asked = HaltPoll { halt_poll_ns: Some(7), ..HaltPoll::default() };
        Polling::User(Arc::clone(&shared)).set(&asked).unwrap();
        for (following, policy) in &mut vcpus {
            assert_eq!(policy.params(), Params::default());
            following.follow(policy);
            assert_eq!(policy.params(), Params { max_ns: 7, ..Params::default() });
        }
        let asked = HaltPoll { halt_poll_ns_shrink: Some(0), ..asked };
        Polling::User(shared).set(&asked).unwrap();
        let (following, policy) = &mut vcpus[0];
        following.follow(policy);
        assert_eq!(policy.params(), Params { max_ns: 7, shrink: 0, ..Params::default() });
    }
}
