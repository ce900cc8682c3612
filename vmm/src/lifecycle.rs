//! How a guest ends: the first end wins (but see [`Lifecycle::finish`]), wakes the main thread and
//! decides the exit status.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use devices::power::PowerEvent;
use serde::Serialize;
use vmm_sys_util::eventfd::EventFd;

/// Why a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "reason", content = "detail")]
pub enum End {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset.
    Reboot,
    /// The guest's kernel panicked and then asked for a reset.
    Panic,
    /// A vCPU shut down (a triple fault).
    TripleFault,
    /// KVM could not emulate an instruction.
    CannotEmulate(String),
    /// A signal asked Pollux to stop, or the user left the console.
    Stopped(String),
    /// KVM or the host failed.
    Failed(String),
}

impl End {
    /// The program's exit status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::PowerOff | Self::Reboot | Self::Stopped(_) => 0,
            Self::Failed(_) => 1,
            Self::Panic => 3,
            Self::TripleFault => 4,
            Self::CannotEmulate(_) => 5,
        }
    }

    /// What the user should read on stderr, if anything.
    pub fn message(&self) -> Option<String> {
        match self {
            Self::PowerOff | Self::Reboot => None,
            Self::Panic => Some("the guest's kernel panicked".into()),
            Self::TripleFault => Some("the guest shut down with a triple fault".into()),
            Self::Stopped(why) => Some(format!("stopped by {why}; disks are flushed")),
            Self::CannotEmulate(what) | Self::Failed(what) => Some(what.clone()),
        }
    }
}

/// Shared by the vCPUs, the power registers and the main thread.
pub struct Lifecycle {
    end: Mutex<Option<End>>,
    panicked: AtomicBool,
    wake: EventFd,
}

impl Lifecycle {
    /// A running VM.
    ///
    /// # Errors
    /// The host has no more eventfds.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK)?;
        Ok(Self { end: Mutex::new(None), panicked: AtomicBool::new(false), wake })
    }

    /// Ends the run, unless it has ended already. Being told to stop takes the place of a reboot,
    /// after which the guest might be started again.
    pub fn finish(&self, end: End) {
        let mut slot = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = matches!((&*slot, &end), (Some(End::Reboot), End::Stopped(_)));
        if slot.is_none() || goes_on {
            *slot = Some(end);
            // Cannot overflow: written twice at most.
            let _ = self.wake.write(1);
        }
    }

    /// How the run ended, if it has.
    pub fn ended(&self) -> Option<End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Readable once the run has ended.
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// The guest's kernel said that it panicked; the reset that follows is no ordinary reboot.
    pub fn note_panic(&self) {
        self.panicked.store(true, Ordering::Relaxed);
    }

    /// What a power register was told.
    pub fn power_event(&self, event: PowerEvent) {
        match event {
            PowerEvent::PowerOff => self.finish(End::PowerOff),
            PowerEvent::Panicked => self.note_panic(),
            PowerEvent::Reset if self.panicked.load(Ordering::Relaxed) => self.finish(End::Panic),
            PowerEvent::Reset => self.finish(End::Reboot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_wins_and_wakes() {
        let life = Lifecycle::new().unwrap();
        assert_eq!(life.ended(), None);
        life.finish(End::TripleFault);
        life.finish(End::PowerOff);
        assert_eq!(life.ended(), Some(End::TripleFault));
        assert_eq!(life.wake().read().unwrap(), 1);
    }

    #[test]
    fn a_stop_takes_the_place_of_a_reboot_but_of_no_other_end() {
        let stop = End::Stopped("SIGTERM".into());
        for (first, kept) in
            [(End::Reboot, &stop), (End::Panic, &End::Panic), (End::PowerOff, &End::PowerOff)]
        {
            let life = Lifecycle::new().unwrap();
            life.finish(first);
            life.finish(stop.clone());
            assert_eq!(life.ended().as_ref(), Some(kept));
        }
    }

    #[test]
    fn a_reset_after_a_panic_is_a_panic() {
        let life = Lifecycle::new().unwrap();
        life.power_event(PowerEvent::Panicked);
        assert_eq!(life.ended(), None, "the guest may still print its trace");
        life.power_event(PowerEvent::Reset);
        assert_eq!(life.ended().map(|end| end.exit_status()), Some(3));
    }
}
