//! Halt polling: what an idle CPU does between "nothing to do" and sleep.
//!
//! A CPU that sleeps costs nothing, but waking it takes microseconds; one that polls wakes at once,
//! but burns the time. Halt polling does both: it polls for a *window*, then sleeps, and adapts the
//! window to how long the last halts were. This crate has the parts, with the rules, names and
//! units of the Linux kernel, and without dependencies:
//!
//! * [`Policy`]: the window, grown and shrunk as KVM does on the host;
//! * [`Poller`]: one halt, which spins for the window and then sleeps on a [`WakeSource`];
//! * [`Outcome`]: what the halt came to, which the policy adapts to;
//! * [`Stats`]: KVM's counters and histograms of it;
//! * [`guest::Governor`]: the other side, the haltpoll governor by which a Linux guest polls before
//!   it halts at all;
//! * [`Clock`]: the time, real or fake;
//! * [`recording`]: halts that were recorded, and the file they are in;
//! * [`replay`]: what they would have cost with other parameters, of both sides.
//!
//! # The halt loop
//!
//! ```
//! use std::sync::atomic::{AtomicBool, Ordering};
//! use std::thread;
//! use std::time::Duration;
//!
//! use halt_poll::{MonotonicClock, Params, Policy, Poller, Stats, WakeReason, WakeSource};
//!
//! /// One flag. A wake is one store for a poller; a sleeper takes an `unpark` as well.
//! #[derive(Default)]
//! struct Doorbell {
//!     rung: AtomicBool,
//! }
//!
//! impl WakeSource for Doorbell {
//!     fn woken(&self) -> Option<WakeReason> {
//!         self.rung.load(Ordering::Acquire).then_some(WakeReason::Event)
//!     }
//!
//!     fn block(&self, timeout_ns: Option<u64>) {
//!         match timeout_ns {
//!             Some(ns) => thread::park_timeout(Duration::from_nanos(ns)),
//!             None => thread::park(),
//!         }
//!     }
//! }
//!
//! let doorbell = Doorbell::default();
//! let stats = Stats::new();
//! let idler = thread::current();
//! thread::scope(|scope| {
//!     scope.spawn(|| {
//!         doorbell.rung.store(true, Ordering::Release);
//!         idler.unpark();
//!     });
//!
//!     let clock = MonotonicClock::new();
//!     let poller = Poller::default();
//!     let mut policy = Policy::new(Params::default());
//!     // The body of the loop, once: halt, learn from it, count it.
//!     let outcome = poller.wait(&doorbell, &clock, policy.window_ns(), None);
//!     policy.update(&outcome);
//!     stats.record(&outcome);
//!     stats.set_window_ns(policy.window_ns());
//!     assert_eq!(outcome.wake, WakeReason::Event);
//! });
//! // The window was 0, so this halt did not poll; the next one may.
//! assert_eq!(stats.snapshot().halt_attempted_poll, 0);
//! ```

#![forbid(unsafe_code)]

mod clock;
pub mod guest;
mod outcome;
mod policy;
mod poller;
pub mod recording;
pub mod replay;
mod stats;

pub use clock::{Clock, FakeClock, MonotonicClock};
pub use outcome::{Outcome, WakeReason};
pub use policy::{Params, Policy};
pub use poller::{Poller, WakeSource};
pub use stats::{HISTOGRAM_BUCKETS, HistogramCounts, Stats, StatsSnapshot, histogram_bucket};
