//! What CPUID tells each vCPU: what KVM supports, with the topology of this guest in it.
//!
//! The guest is one package of N cores with one thread each. KVM passes parts of the host's own
//! topology and caches through, and where the host is itself emulated they can be absent, in which
//! case the guest would read another leaf's bytes in their place. So every leaf that depends on the
//! topology is written here, and cache leaves that cannot be true are replaced.
//!
//! Leaves are those of Intel SDM volume 2 (CPUID) and AMD APM volume 3, appendix E.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use thiserror::Error;

/// What of the guest's CPU is not KVM's to know.
#[derive(Clone, Debug)]
pub struct CpuidConfig {
    /// Number of vCPUs.
    pub cpus: u32,
    /// The local APIC has the TSC-deadline timer (`KVM_CAP_TSC_DEADLINE_TIMER`, or our own).
    pub tsc_deadline_timer: bool,
    /// The local APIC has x2APIC mode.
    pub x2apic: bool,
    /// The guest gets a performance monitoring unit.
    pub pmu: bool,
    /// Bits of leaf 0x4000_0001 EAX (`KVM_FEATURE_*`) to withhold.
    pub withheld_kvm_features: u32,
    /// Sets `KVM_HINTS_REALTIME`: vCPUs are never preempted for long, so the guest may spin.
    pub dedicated: bool,
}

/// Why there is no CPUID for this guest.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CpuidError {
    /// Too few or too many entries.
    #[error("CPUID of the guest would have {0} entries, more than KVM takes")]
    TooManyEntries(usize),
}

const LEAF_VENDOR: u32 = 0;
const LEAF_FEATURES: u32 = 1;
const LEAF_CACHES: u32 = 4;
const LEAF_MWAIT: u32 = 5;
const LEAF_PMU: u32 = 0xa;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_EXTENDED_MAX: u32 = 0x8000_0000;
const LEAF_EXTENDED_FEATURES: u32 = 0x8000_0001;
const LEAF_AMD_L1: u32 = 0x8000_0005;
const LEAF_AMD_L2_L3: u32 = 0x8000_0006;
const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;
const LEAF_SVM: u32 = 0x8000_000a;
const LEAF_AMD_CACHES: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
const LEAF_AMD_PMU: u32 = 0x8000_0022;
const LEAF_AMD_TOPOLOGY_V2: u32 = 0x8000_0026;

// Leaf 1.
const ECX_MONITOR: u32 = 1 << 3;
const ECX_VMX: u32 = 1 << 5;
const ECX_PDCM: u32 = 1 << 15;
const ECX_X2APIC: u32 = 1 << 21;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HTT: u32 = 1 << 28;
const CLFLUSH_UNITS: u32 = CACHE_LINE_BYTES / 8;
// Leaf 0x8000_0001 ECX.
const ECX_CMP_LEGACY: u32 = 1 << 1;
const ECX_SVM: u32 = 1 << 2;
/// Core, northbridge and L3 performance counters.
const ECX_AMD_PMU: u32 = 1 << 23 | 1 << 24 | 1 << 28;
// Leaf 0x4000_0001 EAX.
const KVM_FEATURE_ASYNC_PF: u32 = 1 << 4;
const KVM_FEATURE_ASYNC_PF_INT: u32 = 1 << 14;
// Leaf 0x4000_0001 EDX.
const KVM_HINTS_REALTIME: u32 = 1;

// Leaves 0xb and 0x1f: level types.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

const CACHE_LINE_BYTES: u32 = 64;
/// 16 ways in leaf 0x8000_0006.
const AMD_16_WAYS: u32 = 8;
/// Far more cache levels than any CPU has.
const MAX_CACHES: usize = 8;

/// One cache in the encoding that leaves 4 and 0x8000_001d share.
#[derive(Clone, Copy)]
struct Cache {
    /// 1 data, 2 instructions, 3 both.
    kind: u32,
    level: u32,
    ways: u32,
    sets: u32,
}

impl Cache {
    fn bytes(self) -> u32 {
        self.ways * self.sets * CACHE_LINE_BYTES
    }

    /// EAX to EDX, without who shares it.
    fn registers(self) -> [u32; 4] {
        const SELF_INITIALIZING: u32 = 1 << 8;
        let eax = self.kind | self.level << 5 | SELF_INITIALIZING;
        [eax, (self.ways - 1) << 22 | (CACHE_LINE_BYTES - 1), self.sets - 1, 0]
    }
}

fn is_line_size(bytes: u32) -> bool {
    matches!(bytes, 32 | 64 | 128)
}

fn set_bits(register: &mut u32, bits: u32, on: bool) {
    if on {
        *register |= bits;
    } else {
        *register &= !bits;
    }
}

/// What a plain server core has: 32 KiB + 32 KiB, 1 MiB, and 16 MiB shared.
const MODEL_CACHES: [Cache; 4] = [
    Cache { kind: 1, level: 1, ways: 8, sets: 64 },
    Cache { kind: 2, level: 1, ways: 8, sets: 64 },
    Cache { kind: 3, level: 2, ways: 16, sets: 1024 },
    Cache { kind: 3, level: 3, ways: 16, sets: 16384 },
];

/// The CPUID of the vCPU whose APIC identifier is `apic_id`, made of what KVM supports.
///
/// # Errors
/// [`CpuidError::TooManyEntries`].
pub fn for_vcpu(
    supported: &CpuId,
    config: &CpuidConfig,
    apic_id: u32,
) -> Result<CpuId, CpuidError> {
    let mut leaves = Leaves(supported.as_slice().to_vec());
    let is_amd = leaves.is_amd();
    leaves.set_features(config, apic_id);
    leaves.set_topology(config, apic_id);
    if is_amd {
        leaves.set_amd(config, apic_id);
    } else {
        leaves.set_caches(LEAF_CACHES, config);
    }
    leaves.set_kvm(config);
    let entries = leaves.0.len();
    CpuId::from_entries(&leaves.0).map_err(|_| CpuidError::TooManyEntries(entries))
}

/// Bits of an APIC identifier that number the cores: enough for `cpus`.
fn core_bits(cpus: u32) -> u32 {
    cpus.max(1).next_power_of_two().trailing_zeros()
}

struct Leaves(Vec<kvm_cpuid_entry2>);

impl Leaves {
    fn get(&self, leaf: u32) -> Option<&kvm_cpuid_entry2> {
        self.0.iter().find(|entry| entry.function == leaf && entry.index == 0)
    }

    fn get_mut(&mut self, leaf: u32) -> Option<&mut kvm_cpuid_entry2> {
        self.0.iter_mut().find(|entry| entry.function == leaf && entry.index == 0)
    }

    fn remove(&mut self, leaf: u32) {
        self.0.retain(|entry| entry.function != leaf);
    }

    /// Puts `registers` (EAX to EDX) in place of all of `leaf`, one a subleaf.
    fn replace(&mut self, leaf: u32, subleaves: &[[u32; 4]], has_subleaves: bool) {
        self.remove(leaf);
        let flags = if has_subleaves { KVM_CPUID_FLAG_SIGNIFCANT_INDEX } else { 0 };
        let entries =
            subleaves.iter().zip(0..).map(|(&[eax, ebx, ecx, edx], index)| kvm_cpuid_entry2 {
                function: leaf,
                index,
                flags,
                eax,
                ebx,
                ecx,
                edx,
                ..Default::default()
            });
        self.0.extend(entries);
    }

    fn is_amd(&self) -> bool {
        self.get(LEAF_VENDOR).is_some_and(|leaf| {
            let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
            vendor == b"AuthenticAMD" || vendor == b"HygonGenuine"
        })
    }

    fn max_basic(&self) -> u32 {
        self.get(LEAF_VENDOR).map_or(0, |leaf| leaf.eax)
    }

    fn set_features(&mut self, config: &CpuidConfig, apic_id: u32) {
        if let Some(leaf) = self.get_mut(LEAF_FEATURES) {
            let clflush = match leaf.ebx >> 8 & 0xff {
                0 => CLFLUSH_UNITS,
                units => units,
            };
            // The number of identifiers, not of CPUs: a power of two.
            let ids = (1 << core_bits(config.cpus)).min(255);
            leaf.ebx = apic_id << 24 | ids << 16 | clflush << 8 | leaf.ebx & 0xff;
            set_bits(&mut leaf.edx, EDX_HTT, config.cpus > 1);
            set_bits(&mut leaf.ecx, ECX_HYPERVISOR, true);
            set_bits(&mut leaf.ecx, ECX_X2APIC, config.x2apic);
            set_bits(&mut leaf.ecx, ECX_TSC_DEADLINE, config.tsc_deadline_timer);
            // No nested guests, and no waiting that KVM cannot see.
            set_bits(&mut leaf.ecx, ECX_MONITOR | ECX_VMX, false);
            if !config.pmu {
                set_bits(&mut leaf.ecx, ECX_PDCM, false);
            }
        }
        self.remove(LEAF_MWAIT);
        if !config.pmu {
            self.remove(LEAF_PMU);
        }
    }

    /// Leaves 0xb and 0x1f, where the CPU has them at all.
    fn set_topology(&mut self, config: &CpuidConfig, apic_id: u32) {
        let levels = [
            [0, 1, LEVEL_THREAD << 8, apic_id],
            [core_bits(config.cpus), config.cpus, LEVEL_CORE << 8 | 1, apic_id],
            [0, 0, 2, apic_id],
        ];
        for leaf in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
            if self.max_basic() >= leaf {
                self.replace(leaf, &levels, true);
            }
        }
    }

    /// Rewrites who shares what in a cache leaf, and all of it if it cannot be true.
    fn set_caches(&mut self, leaf: u32, config: &CpuidConfig) {
        let mut caches: Vec<[u32; 4]> = self
            .0
            .iter()
            .filter(|entry| entry.function == leaf && entry.eax & 0x1f != 0)
            .map(|entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
            .collect();
        let is_sane = |&[eax, ebx, ..]: &[u32; 4]| {
            (1..=3).contains(&(eax & 0x1f))
                && (1..=4).contains(&(eax >> 5 & 7))
                && is_line_size((ebx & 0xfff) + 1)
        };
        if caches.is_empty() || caches.len() > MAX_CACHES || !caches.iter().all(is_sane) {
            caches = MODEL_CACHES.map(Cache::registers).to_vec();
        }
        let ids = 1_u32 << core_bits(config.cpus);
        for [eax, ..] in &mut caches {
            let level = *eax >> 5 & 7;
            // Caches up to level 2 belong to one core. Bits 31:26 number the cores of the package
            // for Intel and are reserved for AMD, whose sharing is by CPUs and not by identifiers.
            let (shared_by, cores) = match (leaf, level) {
                (LEAF_CACHES, 3..) => (ids, ids.min(64)),
                (LEAF_CACHES, _) => (1, ids.min(64)),
                (_, 3..) => (config.cpus, 1),
                _ => (1, 1),
            };
            *eax = *eax & 0x3fff | (shared_by - 1) << 14 | (cores - 1) << 26;
        }
        caches.push([0; 4]);
        self.replace(leaf, &caches, true);
    }

    fn set_amd(&mut self, config: &CpuidConfig, apic_id: u32) {
        if let Some(leaf) = self.get_mut(LEAF_EXTENDED_FEATURES) {
            set_bits(&mut leaf.ecx, ECX_SVM, false);
            set_bits(&mut leaf.ecx, ECX_CMP_LEGACY, config.cpus > 1);
            if !config.pmu {
                set_bits(&mut leaf.ecx, ECX_AMD_PMU, false);
            }
        }
        self.remove(LEAF_SVM);
        if !config.pmu {
            self.remove(LEAF_AMD_PMU);
        }
        // Says nothing that leaf 0xb does not.
        self.remove(LEAF_AMD_TOPOLOGY_V2);
        self.set_amd_legacy_caches();
        if let Some(leaf) = self.get_mut(LEAF_ADDRESS_SIZES) {
            leaf.ecx = core_bits(config.cpus) << 12 | config.cpus.saturating_sub(1) & 0xff;
        }
        // Even without TOPOEXT, since there are C libraries that read them without asking.
        self.set_caches(LEAF_AMD_CACHES, config);
        // One thread a core (EBX 15:8), one node (ECX).
        self.replace(LEAF_AMD_TOPOLOGY, &[[apic_id, apic_id & 0xff, 0, 0]], false);
        if let Some(leaf) = self.get_mut(LEAF_EXTENDED_MAX) {
            leaf.eax = leaf.eax.max(LEAF_AMD_TOPOLOGY);
        }
    }

    /// The older description of AMD caches, replaced where a line size cannot be true.
    fn set_amd_legacy_caches(&mut self) {
        let [l1, _, l2, l3] = MODEL_CACHES;
        let is_sane = |descriptor: u32| is_line_size(descriptor & 0xff);
        if let Some(leaf) = self.get_mut(LEAF_AMD_L1)
            && !(is_sane(leaf.ecx) && is_sane(leaf.edx))
        {
            let descriptor = l1.bytes() >> 10 << 24 | l1.ways << 16 | 1 << 8 | CACHE_LINE_BYTES;
            (leaf.ecx, leaf.edx) = (descriptor, descriptor);
        }
        // An L3 need not exist.
        if let Some(leaf) = self.get_mut(LEAF_AMD_L2_L3)
            && !(is_sane(leaf.ecx) && (leaf.edx == 0 || is_sane(leaf.edx)))
        {
            let common = AMD_16_WAYS << 12 | 1 << 8 | CACHE_LINE_BYTES;
            leaf.ecx = l2.bytes() >> 10 << 16 | common;
            leaf.edx = l3.bytes() >> 19 << 18 | common;
        }
    }

    fn set_kvm(&mut self, config: &CpuidConfig) {
        if let Some(leaf) = self.get_mut(LEAF_KVM_FEATURES) {
            set_bits(&mut leaf.eax, config.withheld_kvm_features, false);
            // Told by exception alone, the guest can wait for ever, and its vCPU spin in KVM.
            if leaf.eax & KVM_FEATURE_ASYNC_PF_INT == 0 {
                set_bits(&mut leaf.eax, KVM_FEATURE_ASYNC_PF, false);
            }
            set_bits(&mut leaf.edx, KVM_HINTS_REALTIME, config.dedicated);
        }
    }
}

#[cfg(test)]
mod tests;
