//! A vCPU whose local APIC is Pollux's own (`--halt user`): what happens around KVM_RUN.

use std::arch::x86_64::_rdtsc;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use devices::irqchip::{LAPIC_BYTES, LocalApic, Now};
use devices::virtio::stats::Counter;
use halt_poll::{Clock, Policy, Poller, Stats};
use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_run, kvm_sregs};
use kvm_ioctls::{SyncReg, VcpuFd};

use crate::irq::user::{KickTimer, VcpuWake};
use crate::record::vcpu::VcpuRecorder;
use crate::stats::kvm::{Value, Values};
use crate::vcpu::polling::{Following, SharedParams};

/// `MSR_KVM_POLL_CONTROL`: bit 0 set, the host may poll (Linux `Documentation/virt/kvm/x86/msr.rst`).
pub const MSR_KVM_POLL_CONTROL: u32 = 0x4b56_4d05;
const IA32_TSC: u32 = 0x10;
/// How early a sleeper is to wake for its timer, to spin through the rest. Waking a thread costs
/// about this much.
pub const TIMER_LEAD_NS: u64 = 20_000;
/// General-purpose registers after INIT (Intel SDM vol. 3, table 10-1): RFLAGS has its fixed bit.
const RFLAGS_RESET: u64 = 2;

/// The host's time stamp counter as a clock. Its nanoseconds and the guest's deadlines are on one
/// scale, and it is read without a system call whatever clock the host's kernel prefers.
#[derive(Clone, Copy, Debug)]
pub struct TscClock {
    /// Nanoseconds a cycle, times 2^32.
    scale: u64,
}

impl TscClock {
    /// A clock for a TSC of `tsc_khz`; 0 counts as 1.
    pub fn new(tsc_khz: u32) -> Self {
        Self { scale: (1_000_000 << 32) / u64::from(tsc_khz.max(1)) }
    }

    /// The time when the time stamp counter was `tsc`, in nanoseconds.
    pub fn ns(&self, tsc: u64) -> u64 {
        ((u128::from(tsc) * u128::from(self.scale)) >> 32) as u64
    }
}

impl Clock for TscClock {
    fn now_ns(&self) -> u64 {
        self.ns(host_tsc())
    }
}

/// The host's time stamp counter.
pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 has the instruction.
    unsafe { _rdtsc() }
}

/// What others may see of a vCPU in this mode. Written by its thread alone.
#[derive(Debug)]
pub struct UserStats {
    /// Halts, with KVM's names.
    pub halts: Stats,
    /// `MSR_KVM_POLL_CONTROL` as the guest set it.
    pub poll_control: AtomicU64,
    /// Halts that a timer ended.
    pub timer_wakes: Counter,
    /// By how much these were late in sum, in nanoseconds.
    pub timer_late_ns: Counter,
    /// By how much the latest was late, in nanoseconds.
    pub timer_late_max_ns: AtomicU64,
}

impl Default for UserStats {
    fn default() -> Self {
        Self {
            halts: Stats::new(),
            poll_control: AtomicU64::new(1),
            timer_wakes: Counter::default(),
            timer_late_ns: Counter::default(),
            timer_late_max_ns: AtomicU64::new(0),
        }
    }
}

impl UserStats {
    /// The halts so far, with the names of KVM's statistics.
    pub fn halt_values(&self) -> Values {
        let halts = self.halts.snapshot();
        let numbers = [
            ("halt_attempted_poll", halts.halt_attempted_poll),
            ("halt_successful_poll", halts.halt_successful_poll),
            ("halt_poll_invalid", halts.halt_poll_invalid),
            ("halt_wakeup", halts.halt_wakeup),
            ("halt_poll_success_ns", halts.halt_poll_success_ns),
            ("halt_poll_fail_ns", halts.halt_poll_fail_ns),
            ("halt_wait_ns", halts.halt_wait_ns),
        ];
        let histograms = [
            ("halt_poll_success_hist", halts.halt_poll_success_hist),
            ("halt_poll_fail_hist", halts.halt_poll_fail_hist),
            ("halt_wait_hist", halts.halt_wait_hist),
        ];
        let numbers = numbers.map(|(name, value)| (name.to_owned(), Value::Number(value)));
        let histograms =
            histograms.map(|(name, value)| (name.to_owned(), Value::Buckets(value.to_vec())));
        numbers.into_iter().chain(histograms).collect()
    }

    /// A timer ended a halt, this much after its deadline.
    pub fn record_lateness(&self, late_ns: u64) {
        self.timer_wakes.add(1);
        self.timer_late_ns.add(late_ns);
        if late_ns > self.timer_late_max_ns.load(Ordering::Relaxed) {
            self.timer_late_max_ns.store(late_ns, Ordering::Relaxed);
        }
    }
}

/// Whether the vCPU may enter the guest now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Yes.
    Enter,
    /// Something came in between: look again.
    Again,
}

/// The local APIC of a vCPU and its halt policy. Owned by the vCPU's thread.
pub struct UserApic {
    /// The local APIC.
    pub lapic: LocalApic,
    /// How others reach this vCPU.
    pub wake: Arc<VcpuWake>,
    /// The poll window.
    pub policy: Policy,
    /// What the policy's parameters are.
    pub params: Following,
    /// The poll loop.
    pub poller: Poller,
    /// What others see.
    pub shared: Arc<UserStats>,
    /// The clock of its timers, and of its halts.
    pub clock: TscClock,
    /// Where its halts are recorded, if they are.
    pub recorder: Option<VcpuRecorder>,
    /// Frequency of the TSC, the host's and the guest's.
    pub tsc_khz: u32,
    /// Guest TSC minus host TSC.
    tsc_offset: u64,
    /// Set on the vCPU's thread.
    timer: Option<KickTimer>,
    /// An interrupt was handed to KVM that it has not yet delivered.
    queued: bool,
    /// The processor waits for a start-up message.
    waits_for_sipi: bool,
    /// IA32_APIC_BASE changed, which KVM must know for CPUID.
    base_changed: bool,
    /// The state to return to at INIT.
    reset_sregs: kvm_sregs,
}

impl UserApic {
    /// For the vCPU `fd`, fresh from its creation.
    ///
    /// # Errors
    /// KVM does not tell its registers or its TSC.
    pub fn new(
        fd: &VcpuFd,
        lapic: LocalApic,
        wake: Arc<VcpuWake>,
        params: Arc<SharedParams>,
        tsc_khz: u32,
    ) -> Result<Self, kvm_ioctls::Error> {
        let is_boot_cpu = lapic.shared().id() == 0;
        let (params, policy) = Following::new(params);
        Ok(Self {
            lapic,
            wake,
            policy,
            params,
            poller: Poller { deadline_lead_ns: TIMER_LEAD_NS },
            shared: Arc::default(),
            clock: TscClock::new(tsc_khz),
            recorder: None,
            tsc_khz,
            tsc_offset: 0,
            timer: None,
            queued: false,
            waits_for_sipi: !is_boot_cpu,
            base_changed: true,
            reset_sregs: fd.get_sregs()?,
        })
    }

    /// To be called once on the vCPU's thread, before it first enters.
    ///
    /// # Errors
    /// The host has no timer for it, or KVM does not tell the TSC.
    pub fn begin(&mut self, fd: &mut VcpuFd) -> io::Result<()> {
        fd.set_sync_valid_reg(SyncReg::VcpuEvents);
        // Linux lets a sleeper oversleep by 50 us unless it asks for less.
        // SAFETY: no memory is involved.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) };
        self.timer = Some(KickTimer::new()?);
        self.tsc_offset = tsc_offset(fd)?;
        Ok(())
    }

    /// The time on both clocks.
    pub fn now(&self) -> Now {
        let tsc = host_tsc();
        Now { ns: self.clock.ns(tsc), tsc: tsc.wrapping_add(self.tsc_offset) }
    }

    /// What to do before KVM_RUN: timers, INIT, start-up, NMI, and the next interrupt. On
    /// [`Entry::Enter`], others take this vCPU to be in the guest until [`leave`](Self::leave).
    ///
    /// # Errors
    /// KVM refused.
    pub fn prepare(
        &mut self,
        fd: &mut VcpuFd,
        stop: &AtomicBool,
    ) -> Result<Entry, kvm_ioctls::Error> {
        let now = self.now();
        self.lapic.timer_tick(now);
        if self.lapic.take_init() {
            self.reset(fd)?;
        }
        if self.waits_for_sipi {
            match self.lapic.take_sipi() {
                Some(page) => self.start(fd, page)?,
                None => {
                    let shared = self.lapic.shared();
                    let woken = || {
                        shared.sipi_pending()
                            || shared.init_pending()
                            || stop.load(Ordering::Acquire)
                    };
                    self.wake.sleep(woken, None);
                    return Ok(Entry::Again);
                }
            }
        }
        if self.base_changed {
            let mut sregs = fd.get_sregs()?;
            sregs.apic_base = self.lapic.apic_base();
            fd.set_sregs(&sregs)?;
            self.base_changed = false;
        }
        if self.lapic.take_nmi() {
            fd.nmi()?;
        }
        self.inject(fd);
        if let (Some(timer), Some(deadline_ns)) =
            (&mut self.timer, self.lapic.next_timer_deadline_ns(now))
        {
            timer.arm(deadline_ns, now.ns);
        }
        self.wake.enter();
        // What was requested before the line above, nobody may have told us: look once more.
        let window_wanted = fd.get_kvm_run().request_interrupt_window != 0;
        let shared = self.lapic.shared();
        let missed = shared.nmi_pending() || shared.init_pending();
        if missed || !window_wanted && self.lapic.pending_vector().is_some() {
            self.wake.leave();
            return Ok(Entry::Again);
        }
        Ok(Entry::Enter)
    }

    /// What to do after KVM_RUN.
    pub fn leave(&mut self, run: &kvm_run) {
        self.wake.leave();
        self.queued = false;
        self.lapic.set_cr8(run.cr8 as u8);
    }

    /// Hands KVM the next interrupt if the guest can take it, else asks for an exit when it can.
    fn inject(&mut self, fd: &mut VcpuFd) {
        fd.get_kvm_run().cr8 = u64::from(self.lapic.cr8());
        let ready = fd.get_kvm_run().ready_for_interrupt_injection != 0 && !self.queued;
        if ready
            && let Some(vector) = self.lapic.pending_vector()
            && self.lapic.accept(vector)
        {
            queue(fd, vector);
            self.queued = true;
        }
        let more = self.lapic.pending_vector().is_some();
        fd.get_kvm_run().request_interrupt_window = u8::from(more);
    }

    /// INIT: the processor is reset, and all but the boot processor wait for a start-up message.
    fn reset(&mut self, fd: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
        fd.set_sregs(&self.reset_sregs)?;
        let regs = kvm_regs { rip: 0xfff0, rflags: RFLAGS_RESET, ..kvm_regs::default() };
        fd.set_regs(&regs)?;
        self.base_changed = true;
        self.waits_for_sipi = self.lapic.shared().id() != 0;
        Ok(())
    }

    /// Start-up: real mode at the page named.
    fn start(&mut self, fd: &VcpuFd, page: u8) -> Result<(), kvm_ioctls::Error> {
        let mut sregs = self.reset_sregs;
        sregs.cs.selector = u16::from(page) << 8;
        sregs.cs.base = u64::from(page) << 12;
        fd.set_sregs(&sregs)?;
        fd.set_regs(&kvm_regs { rflags: RFLAGS_RESET, ..kvm_regs::default() })?;
        self.base_changed = true;
        self.waits_for_sipi = false;
        Ok(())
    }

    /// The guest reads a model-specific register that KVM leaves to us; `None`: it gets a
    /// general-protection exception.
    pub fn read_msr(&mut self, index: u32) -> Option<u64> {
        if index == MSR_KVM_POLL_CONTROL {
            return Some(self.shared.poll_control.load(Ordering::Relaxed));
        }
        let now = self.now();
        LocalApic::handles_msr(index).then(|| self.lapic.read_msr(index, now).ok()).flatten()
    }

    /// The guest writes a model-specific register that KVM leaves to us; false: it gets a
    /// general-protection exception.
    pub fn write_msr(&mut self, index: u32, value: u64) -> bool {
        if index == MSR_KVM_POLL_CONTROL {
            // Only bit 0 exists.
            if value > 1 {
                return false;
            }
            self.shared.poll_control.store(value, Ordering::Relaxed);
            self.policy.set_poll_allowed(value == 1);
            return true;
        }
        if !LocalApic::handles_msr(index) {
            return false;
        }
        let before = self.lapic.apic_base();
        let done = self.lapic.write_msr(index, value, self.now()).is_ok();
        self.base_changed |= before != self.lapic.apic_base();
        done
    }

    /// The offset into the local APIC's page, if `address` is there.
    fn page_offset(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.lapic.mmio_base()?)?;
        (offset < LAPIC_BYTES).then_some(offset)
    }

    /// The guest reads memory; false if it is not the local APIC's.
    pub fn read_mmio(&mut self, address: u64, data: &mut [u8]) -> bool {
        let Some(offset) = self.page_offset(address) else { return false };
        let now = self.now();
        self.lapic.read_mmio(offset, data, now);
        true
    }

    /// The guest writes memory; false if it is not the local APIC's.
    pub fn write_mmio(&mut self, address: u64, data: &[u8]) -> bool {
        let Some(offset) = self.page_offset(address) else { return false };
        let now = self.now();
        self.lapic.write_mmio(offset, data, now);
        true
    }
}

/// Has KVM deliver `vector` at the next entry: what the ioctl KVM_INTERRUPT does, but by the registers
/// that KVM_RUN itself takes over (KVM_CAP_SYNC_REGS; Linux `Documentation/virt/kvm/api.rst`, 5), so
/// that a wake costs no other system call.
fn queue(fd: &mut VcpuFd, vector: u8) {
    // As KVM left them at the last exit, which was one at which it could take an interrupt: no
    // exception and no other interrupt is on its way.
    let events = &mut fd.sync_regs_mut().events;
    events.interrupt.injected = 1;
    events.interrupt.nr = vector;
    events.interrupt.soft = 0;
    // Else KVM would also take over which NMIs wait, of which there may be more by now.
    events.flags = 0;
    fd.set_sync_dirty_reg(SyncReg::VcpuEvents);
}

/// Guest TSC minus host TSC. Errs, by the time of a system call, to the guest's being behind: a
/// timer that is told so fires late by that, never early.
fn tsc_offset(fd: &VcpuFd) -> io::Result<u64> {
    let entry = kvm_msr_entry { index: IA32_TSC, ..Default::default() };
    let mut least = None;
    for _ in 0..4 {
        let mut msrs = Msrs::from_entries(&[entry]).map_err(|_| io::ErrorKind::InvalidInput)?;
        let before = host_tsc();
        fd.get_msrs(&mut msrs).map_err(io::Error::from)?;
        let after = host_tsc();
        let guest = msrs.as_slice().first().map_or(0, |msr| msr.data);
        let took = after.wrapping_sub(before);
        if least.is_none_or(|(shortest, _)| took < shortest) {
            least = Some((took, guest.wrapping_sub(after)));
        }
    }
    Ok(least.map_or(0, |(_, offset)| offset))
}
