//! The KVM_RUN loop of one vCPU and the dispatch of its exits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::{self, JoinHandle};

use devices::GuestMemory;
use devices::bus::{MmioBus, PioBus};
use devices::virtio::stats::Counter;
use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::{emulation, halt, kick};
use crate::affinity;
use crate::lifecycle::{End, Lifecycle};

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
    /// The host CPU it is pinned to.
    pub pin_cpu: Option<usize>,
}

impl Vcpu {
    /// Starts the vCPU's thread, named `vcpuN`.
    ///
    /// # Errors
    /// The host refused a thread.
    pub fn spawn(mut self, machine: Arc<Machine>) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name(format!("vcpu{}", self.index)).spawn(move || {
            self.tid.store(affinity::current_tid(), Ordering::Relaxed);
            if let Some(end) = self.pin().or_else(|| self.run(&machine)) {
                machine.lifecycle.finish(end);
            }
            // The thread's cost is read from /proc, which forgets a thread that has ended.
            while !machine.stop.load(Ordering::Acquire) {
                thread::park();
            }
        })
    }

    fn pin(&self) -> Option<End> {
        let cpu = self.pin_cpu?;
        let error = affinity::pin_current_thread(cpu).err()?;
        Some(self.failed(&format!("cannot be pinned to CPU {cpu}: {error}")))
    }

    /// Runs the guest until it ends (`Some`) or Pollux stops it (`None`).
    fn run(&mut self, machine: &Machine) -> Option<End> {
        let run: *mut kvm_run = self.fd.get_kvm_run();
        // SAFETY: `run` is the mapping of `self.fd`, which outlives the attachment.
        let kicks = unsafe { kick::Attachment::new(run) };
        while !machine.stop.load(Ordering::Acquire) {
            match self.fd.run() {
                Ok(VcpuExit::IoIn(port, data)) => {
                    self.counters.io_in.add(1);
                    // SAFETY: KVM filled the io member: this is KVM_EXIT_IO.
                    let size = unsafe { (*run).__bindgen_anon_1.io.size };
                    for item in data.chunks_mut(usize::from(size).max(1)) {
                        machine.pio.read(port, item);
                    }
                }
                Ok(VcpuExit::IoOut(port, data)) => {
                    self.counters.io_out.add(1);
                    // SAFETY: as above.
                    let size = unsafe { (*run).__bindgen_anon_1.io.size };
                    for item in data.chunks(usize::from(size).max(1)) {
                        machine.pio.write(port, item);
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => {
                    self.counters.mmio_read.add(1);
                    machine.mmio.read(address, data);
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    self.counters.mmio_write.add(1);
                    machine.mmio.write(address, data);
                }
                Ok(VcpuExit::Hlt) => {
                    self.counters.hlt.add(1);
                    return Some(halt::unexpected_hlt(self.index));
                }
                Ok(VcpuExit::Shutdown) => return Some(End::TripleFault),
                Ok(VcpuExit::InternalError) => {
                    let name = format!("vcpu{}", self.index);
                    let told = emulation::describe(&name, &mut self.fd, &machine.memory);
                    return Some(End::CannotEmulate(told));
                }
                Ok(VcpuExit::Intr) => self.counters.intr.add(1),
                Ok(VcpuExit::FailEntry(reason, cpu)) => {
                    return Some(self.failed(&format!(
                        "the CPU refused to enter the guest: reason {reason:#x} on CPU {cpu}"
                    )));
                }
                Ok(exit) => {
                    self.counters.other.add(1);
                    let what = format!("KVM ended the run for a reason unknown here: {exit:?}");
                    return Some(self.failed(&what));
                }
                Err(error) => match error.errno() {
                    libc::EINTR => {
                        self.counters.intr.add(1);
                        kicks.clear();
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
