//! What of a vCPU's state says how it halts, and only its own thread can read: KVM gives a vCPU's
//! registers to nobody while it is in KVM_RUN. So they are read on request, when the thread is next
//! out of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde::Serialize;

use super::VcpuSource;
use crate::vcpu::user::MSR_KVM_POLL_CONTROL;

/// `MSR_KVM_ASYNC_PF_EN` (Linux `Documentation/virt/kvm/x86/msr.rst`).
const MSR_KVM_ASYNC_PF_EN: u32 = 0x4b56_4d02;
/// IA32_APIC_BASE: the local APIC is enabled (Intel SDM volume 3, 11.4.4).
const APIC_BASE_ENABLE: u64 = 1 << 11;
/// The spurious-interrupt vector register of the local APIC, and bit 8 of it, in its second byte:
/// the APIC is enabled by software (11.9).
const APIC_SPIV: usize = 0xf0;
const APIC_SPIV_ENABLE: u8 = 1;

/// How long a request waits for its answers. They come in microseconds, unless the host is busy.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// How a vCPU was set up by its guest when it was last asked. `None`: not known, or not kept by this
/// KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuestSetup {
    /// `MSR_KVM_POLL_CONTROL`: bit 0 clear, the guest does the polling and the host must not.
    pub poll_control: Option<u64>,
    /// `MSR_KVM_ASYNC_PF_EN`: bit 0 set, the guest is told of page faults that the host resolves.
    pub async_pf_control: Option<u64>,
    /// The local APIC takes interrupts.
    pub apic_enabled: Option<bool>,
}

impl GuestSetup {
    /// The guest has switched host polling off.
    pub fn polls_itself(&self) -> bool {
        self.poll_control.is_some_and(|value| value & 1 == 0)
    }

    /// A page that came cannot be told to the guest, which KVM then never lets halt: the vCPU's CPU
    /// time is that of a loop in KVM, not of polling.
    pub fn may_spin_on_page_faults(&self) -> bool {
        self.async_pf_control.is_some_and(|value| value & 1 == 1)
            && self.apic_enabled == Some(false)
    }

    fn read(fd: &VcpuFd) -> Self {
        let software = fd.get_lapic().ok().and_then(|lapic| {
            lapic.regs.get(APIC_SPIV + 1).map(|&byte| byte as u8 & APIC_SPIV_ENABLE)
        });
        let base = fd.get_sregs().ok().map(|sregs| sregs.apic_base & APIC_BASE_ENABLE);
        Self {
            poll_control: msr(fd, MSR_KVM_POLL_CONTROL),
            async_pf_control: msr(fd, MSR_KVM_ASYNC_PF_EN),
            apic_enabled: software.zip(base).map(|(software, base)| software != 0 && base != 0),
        }
    }
}

/// Reads one register; `None` if this KVM does not have it.
fn msr(fd: &VcpuFd, index: u32) -> Option<u64> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }]).ok()?;
    let read = fd.get_msrs(&mut msrs).ok()?;
    msrs.as_slice().get(..read)?.first().map(|msr| msr.data)
}

/// One vCPU's answers.
#[derive(Debug, Default)]
pub struct Sample {
    asked: AtomicBool,
    poll_control: Slot,
    async_pf_control: Slot,
    apic_enabled: Slot,
}

impl Sample {
    /// Answers, if asked. For the vCPU's thread, whenever a kick got it out of KVM_RUN and before
    /// it waits for its end.
    pub fn answer(&self, fd: &VcpuFd) {
        if self.asked.load(Ordering::Acquire) {
            let setup = GuestSetup::read(fd);
            self.poll_control.set(setup.poll_control);
            self.async_pf_control.set(setup.async_pf_control);
            self.apic_enabled.set(setup.apic_enabled.map(u64::from));
            self.asked.store(false, Ordering::Release);
        }
    }

    /// The last answer.
    pub fn get(&self) -> GuestSetup {
        GuestSetup {
            poll_control: self.poll_control.get(),
            async_pf_control: self.async_pf_control.get(),
            apic_enabled: self.apic_enabled.get().map(|enabled| enabled != 0),
        }
    }
}

/// Asks all vCPUs and waits for their answers, not for ever. `kick` gets all their threads out of
/// KVM_RUN, which ends a halt as any signal does. Where Pollux has the local APIC it knows without
/// asking.
pub fn ask(vcpus: &[VcpuSource], kick: impl FnOnce()) {
    let vcpus = || vcpus.iter().filter(|vcpu| vcpu.user.is_none());
    if vcpus().next().is_none() {
        return;
    }
    for vcpu in vcpus() {
        vcpu.sample.asked.store(true, Ordering::Release);
    }
    kick();
    let asked = Instant::now();
    let waits = || vcpus().any(|vcpu| vcpu.sample.asked.load(Ordering::Acquire));
    while waits() && asked.elapsed() < ANSWER_LIMIT {
        thread::sleep(LOOK_AGAIN);
    }
}

/// A value or nothing, in one atomic. None of the registers kept here is ever all ones.
#[derive(Debug)]
struct Slot(AtomicU64);

impl Default for Slot {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl Slot {
    fn set(&self, value: Option<u64>) {
        self.0.store(value.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn get(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|&value| value != u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vcpu(irqchip: bool) -> VcpuFd {
        let kvm = kvm_ioctls::Kvm::new().expect("this test needs /dev/kvm");
        let vm = kvm.create_vm().unwrap();
        if irqchip {
            vm.create_irq_chip().unwrap();
        }
        vm.create_vcpu(0).unwrap()
    }

    #[test]
    fn a_fresh_vcpu_lets_the_host_poll_and_has_no_page_faults_to_be_told() {
        let sample = Sample::default();
        let fd = vcpu(true);
        sample.answer(&fd);
        assert_eq!(sample.get(), GuestSetup::default(), "nobody asked");
        sample.asked.store(true, Ordering::Release);
        sample.answer(&fd);
        let setup = sample.get();
        assert_eq!((setup.poll_control, setup.async_pf_control), (Some(1), Some(0)));
        assert_eq!(setup.apic_enabled, Some(false), "software-disabled after reset");
        assert!(!setup.polls_itself() && !setup.may_spin_on_page_faults());
        assert!(!sample.asked.load(Ordering::Acquire));
    }

    #[test]
    fn the_guests_own_polling_is_seen() {
        let fd = vcpu(true);
        let off = kvm_msr_entry { index: MSR_KVM_POLL_CONTROL, data: 0, ..Default::default() };
        assert_eq!(fd.set_msrs(&Msrs::from_entries(&[off]).unwrap()).unwrap(), 1);
        let setup = GuestSetup::read(&fd);
        assert_eq!(setup.poll_control, Some(0));
        assert!(setup.polls_itself());
    }

    #[test]
    fn a_vcpu_without_an_apic_of_kvms_has_no_apic_state() {
        assert_eq!(GuestSetup::read(&vcpu(false)).apic_enabled, None);
    }

    #[test]
    fn only_page_faults_that_cannot_be_told_make_a_vcpu_spin() {
        let setup = |async_pf, apic| GuestSetup {
            async_pf_control: async_pf,
            apic_enabled: apic,
            ..GuestSetup::default()
        };
        assert!(setup(Some(0xb), Some(false)).may_spin_on_page_faults());
        for (async_pf, apic) in
            [(Some(0xb), Some(true)), (Some(0), Some(false)), (None, Some(false)), (Some(1), None)]
        {
            assert!(!setup(async_pf, apic).may_spin_on_page_faults(), "{async_pf:?} {apic:?}");
        }
    }
}
