//! Creates the vCPUs and what interrupts them.

use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use devices::irqchip::{ApicConfig, IrqChip, LocalApic, Notify};
use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, VcpuFd};

use super::polling::{Polling, SharedParams, params};
use super::probe;
use super::run::Vcpu;
use super::user::UserApic;
use crate::boot::cpuid::{self, CpuidConfig};
use crate::boot::{Entry, msrs, regs};
use crate::builder::{host_error, machine_error, physical_bits};
use crate::config::{Halt, VmConfig};
use crate::irq::Interrupts;
use crate::irq::kernel::Router;
use crate::irq::user::VcpuWake;
use crate::stats::VcpuSource;
use crate::stats::kvm::KvmStats;
use crate::stats::sample::Sample;
use crate::vm::{Vm, VmError, kvm_error};

/// Paravirtual features that KVM can provide only with its own local APIC: bits of CPUID
/// 0x4000_0001 EAX (Linux `Documentation/virt/kvm/x86/cpuid.rst`).
const NEED_KERNEL_APIC: u32 = 1 << 4 // asynchronous page faults
    | 1 << 6 // PV EOI
    | 1 << 7 // PV unhalt
    | 1 << 10 // asynchronous page faults as exits
    | 1 << 11 // PV IPIs
    | 1 << 13 // PV yield
    | 1 << 14 // asynchronous page faults by interrupt
    | 1 << 15; // MSI extended destination

/// The vCPUs, ready to run.
pub struct Created {
    /// The vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// Where their figures come from.
    pub sources: Vec<VcpuSource>,
    /// Where interrupts go.
    pub interrupts: Interrupts,
    /// Who polls for halted vCPUs.
    pub polling: Polling,
}

/// Creates all vCPUs of `vm`. The boot CPU starts as `entry` says, the others wait for its INIT and
/// start-up message.
///
/// # Errors
/// KVM or the host refused.
pub fn create(
    config: &VmConfig,
    vm: &Vm,
    supported: &CpuId,
    entry: &Entry,
) -> Result<Created, VmError> {
    let user_apic = config.halt == Halt::User;
    let cpuid_config = CpuidConfig {
        cpus: config.cpus,
        tsc_deadline_timer: if user_apic {
            probe::tsc_deadline_exits(&vm.kvm)
        } else {
            vm.kvm.check_extension(Cap::TscDeadlineTimer)
        },
        x2apic: true,
        pmu: false,
        withheld_kvm_features: if user_apic { NEED_KERNEL_APIC } else { 0 },
        dedicated: config.dedicated,
    };
    let fds = (0..config.cpus)
        .map(|index| vm.fd.create_vcpu(u64::from(index)).map_err(kvm_error("create a vCPU")))
        .collect::<Result<Vec<_>, _>>()?;
    let (interrupts, polling, mut apics) = if user_apic {
        let params = Arc::new(SharedParams::new(params(&config.halt_poll)));
        let (interrupts, apics) = user_apics(&params, &fds, physical_bits(supported))?;
        (interrupts, Polling::User(params), apics)
    } else {
        let router = Router::new(Arc::clone(&vm.fd)).map_err(host_error("route interrupts"))?;
        let polling = Polling::Kernel(Arc::clone(&vm.fd));
        (Interrupts::Kernel(router), polling, Vec::new().into_iter())
    };

    let mut vcpus = Vec::with_capacity(fds.len());
    let mut sources = Vec::with_capacity(fds.len());
    for (index, fd) in (0..).zip(fds) {
        let cpuid = cpuid::for_vcpu(supported, &cpuid_config, index).map_err(machine_error)?;
        fd.set_cpuid2(&cpuid).map_err(kvm_error("set a vCPU's CPUID"))?;
        msrs::set(&fd).map_err(machine_error)?;
        fd.set_fpu(&regs::fpu()).map_err(kvm_error("set a vCPU's FPU state"))?;
        let user = apics.next();
        if index == 0 {
            set_boot_registers(&fd, entry)?;
        }
        let (counters, tid) = (Arc::default(), Arc::new(AtomicI32::new(0)));
        let sample = Arc::<Sample>::default();
        sources.push(VcpuSource {
            index,
            counters: Arc::clone(&counters),
            tid: Arc::clone(&tid),
            kvm: KvmStats::open(&fd).ok(),
            user: user.as_ref().map(|user| Arc::clone(&user.shared)),
            sample: Arc::clone(&sample),
        });
        let pin_cpu = config.pin.vcpus.get(&index).copied();
        vcpus.push(Vcpu { index, fd, counters, tid, sample, pin_cpu, user });
    }
    Ok(Created { vcpus, sources, interrupts, polling })
}

/// Pollux's own interrupt controllers for vCPUs that were just created.
fn user_apics(
    params: &Arc<SharedParams>,
    fds: &[VcpuFd],
    physical_address_bits: u8,
) -> Result<(Interrupts, std::vec::IntoIter<Box<UserApic>>), VmError> {
    let tsc_khz = match fds.first() {
        Some(fd) => fd.get_tsc_khz().map_err(kvm_error("tell the TSC's frequency"))?,
        None => 0,
    };
    let wakes: Vec<_> = fds.iter().map(|_| Arc::new(VcpuWake::default())).collect();
    let notify = wakes.iter().map(|wake| Arc::clone(wake) as Arc<dyn Notify>).collect();
    let (chip, lapics) = IrqChip::new(&ApicConfig { tsc_khz, physical_address_bits }, notify);
    let apic = |((fd, lapic), wake): ((&VcpuFd, LocalApic), Arc<VcpuWake>)| {
        UserApic::new(fd, lapic, wake, Arc::clone(params), tsc_khz)
            .map(Box::new)
            .map_err(kvm_error("tell a vCPU's registers"))
    };
    let apics = fds.iter().zip(lapics).zip(wakes).map(apic).collect::<Result<Vec<_>, _>>()?;
    Ok((Interrupts::User(chip), apics.into_iter()))
}

fn set_boot_registers(fd: &VcpuFd, entry: &Entry) -> Result<(), VmError> {
    let created = fd.get_sregs().map_err(kvm_error("read a vCPU's registers"))?;
    fd.set_sregs(&regs::sregs(entry, created)).map_err(kvm_error("set a vCPU's registers"))?;
    fd.set_regs(&regs::regs(entry)).map_err(kvm_error("set a vCPU's registers"))
}
