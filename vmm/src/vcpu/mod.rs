//! vCPU threads: [`run`] is the KVM_RUN loop, [`kick`] gets a thread out of it, [`halt`] is what
//! happens when the guest has nothing to do.

pub mod create;
pub mod emulation;
pub mod halt;
pub mod kick;
pub mod passthrough;
pub mod polling;
mod preempted;
pub mod probe;
pub mod run;
pub mod user;
