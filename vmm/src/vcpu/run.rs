//! The KVM_RUN loop of one vCPU and the dispatch of its exits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::{self, JoinHandle};

use devices::bus::{MmioBus, PioBus};
use devices::virtio::stats::Counter;
use devices::{GuestMemory, affinity};
use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::user::{Entry, UserApic};
use super::{emulation, halt, kick};
use crate::lifecycle::{End, Lifecycle};
use crate::sandbox::{Kind, Sandbox};
use crate::stats::sample::Sample;

/// Exits that reached userspace, by reason. KVM's own `exits` statistic counts all others too.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ExitCounters {
    /// Port reads.
    pub io_in: Counter,
    /// Port writes.
    pub io_out: Counter,
    /// Memory-mapped reads.
    pub mmio_read: Counter,
    /// Memory-mapped writes.
    pub mmio_write: Counter,
    /// HLT.
    pub hlt: Counter,
    /// Model-specific registers read.
    pub rdmsr: Counter,
    /// Model-specific registers written.
    pub wrmsr: Counter,
    /// The guest can take an interrupt, which it could not before.
    pub irq_window: Counter,
    /// KVM_RUN interrupted by a signal (a kick).
    pub intr: Counter,
    /// Everything else.
    pub other: Counter,
}

/// What all vCPUs of a VM share.
pub struct Machine {
    /// Port I/O.
    pub pio: PioBus,
    /// Memory-mapped I/O.
    pub mmio: MmioBus,
    /// Guest RAM, to read instructions from.
    pub memory: GuestMemory,
    /// How the run ends.
    pub lifecycle: Arc<Lifecycle>,
    /// Set before vCPUs are kicked for the last time.
    pub stop: AtomicBool,
}

impl Machine {
    /// Reads that one exit stands for: as many of `item_bytes` from `port` as fill `data` (a string
    /// instruction gives several).
    pub fn read_port(&self, port: u16, item_bytes: u8, data: &mut [u8]) {
        for item in data.chunks_mut(usize::from(item_bytes).max(1)) {
            self.pio.read(port, item);
        }
    }

    /// Writes of all of `data`, `item_bytes` at a time, to `port`.
    pub fn write_port(&self, port: u16, item_bytes: u8, data: &[u8]) {
        for item in data.chunks(usize::from(item_bytes).max(1)) {
            self.pio.write(port, item);
        }
    }
}

/// A vCPU, set up and not yet running.
pub struct Vcpu {
    /// Its number, from 0.
    pub index: u32,
    /// KVM's side of it.
    pub fd: VcpuFd,
    /// Its counters.
    pub counters: Arc<ExitCounters>,
    /// Its thread's id, once it has one.
    pub tid: Arc<AtomicI32>,
    /// Its answers to questions about the guest's setup.
    pub sample: Arc<Sample>,
    /// The host CPU it is pinned to.
    pub pin_cpu: Option<usize>,
    /// Its local APIC, where that is not in the kernel.
    pub user: Option<Box<UserApic>>,
}

impl Vcpu {
    /// Starts the vCPU's thread, named `vcpuN`.
    ///
    /// # Errors
    /// The host refused a thread.
    pub fn spawn(mut self, machine: Arc<Machine>, sandbox: Sandbox) -> io::Result<JoinHandle<()>> {
        let wake = self.user.as_ref().map(|user| Arc::clone(&user.wake));
        let name = format!("vcpu{}", self.index);
        let thread = thread::Builder::new().name(name).spawn(move || {
            self.tid.store(affinity::current_tid(), Ordering::Relaxed);
            let end = self.pin().or_else(|| self.confine(&sandbox)).or_else(|| self.run(&machine));
            if let Some(end) = end {
                machine.lifecycle.finish(end);
            }
            // The thread's cost is read from /proc, which forgets a thread that has ended.
            while !machine.stop.load(Ordering::Acquire) {
                self.sample.answer(&self.fd);
                thread::park();
            }
        })?;
        if let Some(wake) = wake {
            wake.attach(&thread);
        }
        Ok(thread)
    }

    fn pin(&self) -> Option<End> {
        let cpu = self.pin_cpu?;
        let error = affinity::pin_current_thread(cpu).err()?;
        Some(self.failed(&format!("cannot be pinned to CPU {cpu}: {error}")))
    }

    fn confine(&self, sandbox: &Sandbox) -> Option<End> {
        let error = sandbox.enter(Kind::Vcpu).err()?;
        Some(self.failed(&format!("has no sandbox: {error}")))
    }

    /// Runs the guest until it ends (`Some`) or Pollux stops it (`None`).
    fn run(&mut self, machine: &Machine) -> Option<End> {
        let run: *mut kvm_run = self.fd.get_kvm_run();
        // SAFETY: `run` is the mapping of `self.fd`, which outlives the attachment.
        let kicks = unsafe { kick::Attachment::new(run) };
        if let Some(user) = &mut self.user
            && let Err(error) = user.begin(&mut self.fd)
        {
            return Some(self.failed(&format!("its timer cannot be made: {error}")));
        }
        while !machine.stop.load(Ordering::Acquire) {
            if let Some(user) = &mut self.user {
                match user.prepare(&mut self.fd, &machine.stop) {
                    Ok(Entry::Enter) => {}
                    Ok(Entry::Again) => continue,
                    Err(error) => return Some(self.failed(&format!("KVM refused: {error}"))),
                }
            }
            let exit = self.fd.run();
            if let Some(user) = &mut self.user {
                // SAFETY: the mapping lives as long as `self.fd`; KVM writes it only inside
                // KVM_RUN, and `exit` borrows other members of it.
                user.leave(unsafe { &*run });
            }
            let counters = &self.counters;
            match exit {
                Ok(VcpuExit::IoIn(port, data)) => {
                    counters.io_in.add(1);
                    // SAFETY: KVM filled the io member: this is KVM_EXIT_IO.
                    let size = unsafe { (*run).__bindgen_anon_1.io.size };
                    machine.read_port(port, size, data);
                }
                Ok(VcpuExit::IoOut(port, data)) => {
                    counters.io_out.add(1);
                    // SAFETY: as above.
                    let size = unsafe { (*run).__bindgen_anon_1.io.size };
                    machine.write_port(port, size, data);
                }
                Ok(VcpuExit::MmioRead(address, data)) => {
                    counters.mmio_read.add(1);
                    if !self.user.as_mut().is_some_and(|user| user.read_mmio(address, data)) {
                        machine.mmio.read(address, data);
                    }
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    counters.mmio_write.add(1);
                    if !self.user.as_mut().is_some_and(|user| user.write_mmio(address, data)) {
                        machine.mmio.write(address, data);
                    }
                }
                Ok(VcpuExit::X86Rdmsr(msr)) => {
                    counters.rdmsr.add(1);
                    match self.user.as_mut().and_then(|user| user.read_msr(msr.index)) {
                        Some(value) => *msr.data = value,
                        None => *msr.error = 1,
                    }
                }
                Ok(VcpuExit::X86Wrmsr(msr)) => {
                    counters.wrmsr.add(1);
                    let user = self.user.as_mut();
                    let done = user.is_some_and(|user| user.write_msr(msr.index, msr.data));
                    *msr.error = u8::from(!done);
                }
                Ok(VcpuExit::Hlt) => {
                    counters.hlt.add(1);
                    let Some(user) = &mut self.user else {
                        return Some(halt::unexpected_hlt(self.index));
                    };
                    // SAFETY: as above; nothing borrows from the mapping here.
                    let interrupts_enabled = unsafe { (*run).if_flag } != 0;
                    halt::halt(user, interrupts_enabled, &machine.stop);
                }
                Ok(VcpuExit::IrqWindowOpen) => counters.irq_window.add(1),
                // The guest lowered CR8, which `leave` has taken over.
                Ok(VcpuExit::SetTpr) => counters.other.add(1),
                Ok(VcpuExit::Shutdown) => return Some(End::TripleFault),
                Ok(VcpuExit::InternalError) => {
                    let name = format!("vcpu{}", self.index);
                    let told = emulation::describe(&name, &mut self.fd, &machine.memory);
                    return Some(End::CannotEmulate(told));
                }
                Ok(VcpuExit::Intr) => counters.intr.add(1),
                Ok(VcpuExit::FailEntry(reason, cpu)) => {
                    return Some(self.failed(&format!(
                        "the CPU refused to enter the guest: reason {reason:#x} on CPU {cpu}"
                    )));
                }
                Ok(exit) => {
                    counters.other.add(1);
                    let what = format!("KVM ended the run for a reason unknown here: {exit:?}");
                    return Some(self.failed(&what));
                }
                Err(error) => match error.errno() {
                    libc::EINTR => {
                        counters.intr.add(1);
                        kicks.clear();
                        self.sample.answer(&self.fd);
                    }
                    // A vCPU that waits for SIPI may return so when it is woken.
                    libc::EAGAIN => {}
                    _ => return Some(self.failed(&format!("KVM_RUN failed: {error}"))),
                },
            }
        }
        None
    }

    fn failed(&self, what: &str) -> End {
        End::Failed(format!("vcpu{}: {what}", self.index))
    }
}
