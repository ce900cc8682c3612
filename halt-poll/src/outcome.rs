//! What one halt came to.

/// What ended a halt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeReason {
    /// Something to do arrived: an interrupt for a vCPU, a request for an I/O worker.
    Event,
    /// The deadline passed: the halted CPU's own timer.
    Deadline,
    /// The waiting thread is wanted for something else, such as a signal or a request to stop.
    Interrupted,
}

/// One halt, from the moment there was nothing to do until the wake. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// How long it polled, or `None` if it did not poll at all (the window was 0).
    pub polled_ns: Option<u64>,
    /// How long it slept after that, or `None` if it did not have to sleep: then the poll succeeded.
    pub blocked_ns: Option<u64>,
    /// What ended the halt.
    pub wake: WakeReason,
    /// False if the wake turned out to be for nothing, for instance because another CPU had taken
    /// the work already. The poller says true; whoever finds out otherwise clears it before
    /// [`Policy::update`](crate::Policy::update). (KVM has invalid wakes on s390 only.)
    pub valid: bool,
}

impl Outcome {
    /// The whole halt, polling and sleeping: the duration KVM's policy goes by (`halt_ns`).
    pub fn halt_ns(&self) -> u64 {
        self.polled_ns.unwrap_or(0).saturating_add(self.blocked_ns.unwrap_or(0))
    }

    /// Whether a poll was tried and the halt ended without sleeping.
    pub fn poll_succeeded(&self) -> bool {
        self.polled_ns.is_some() && self.blocked_ns.is_none()
    }
}
