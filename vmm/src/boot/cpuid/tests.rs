//! CPUs made by hand: leaf, subleaf, EAX to EDX.

use super::*;

const AMD: [u32; 3] = [0x6874_7541, 0x444d_4163, 0x6974_6e65];
const INTEL: [u32; 3] = [0x756e_6547, 0x6c65_746e, 0x4965_6e69];

const ECX_TOPOEXT: u32 = 1 << 22;

fn cpu(vendor: [u32; 3], leaves: &[[u32; 6]]) -> CpuId {
    let [ebx, ecx, edx] = vendor;
    let mut all = vec![
        [0, 0, 0x1f, ebx, ecx, edx],
        [1, 0, 0x0061_0f01, 0x0910_0800, ECX_VMX | ECX_MONITOR | ECX_PDCM, 0x0178_bbff],
        [5, 0, 0x40, 0x40, 3, 0],
        [0xa, 0, 0x0730_0402, 0, 0, 0],
        [0x4000_0001, 0, 0x0100_7efb, 0, 0, 0],
        [0x8000_0000, 0, 0x8000_0008, 0, 0, 0],
    ];
    all.extend(leaves);
    let entries: Vec<_> = all
        .into_iter()
        .map(|[function, index, eax, ebx, ecx, edx]| kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        })
        .collect();
    CpuId::from_entries(&entries).unwrap()
}

/// As `amd` below, with `caches` for leaf 0x8000_001d and `l1` and `l2` for the older leaves.
fn amd_with(l1: u32, l2: u32, caches: &[[u32; 4]]) -> CpuId {
    let mut leaves = vec![
        [0x8000_0001, 0, 0, 0, ECX_SVM | ECX_TOPOEXT | ECX_AMD_PMU, 0],
        [0x8000_0005, 0, 0xff48, 0xff40, l1, l1],
        [0x8000_0006, 0, 0, 0x4200_4200, l2, 0],
        [0x8000_0008, 0, 0x3028, 0x200, 0xf00f, 0],
        [0x8000_000a, 0, 1, 0x10, 0, 0x1bcff],
        [0x8000_001e, 0, 9, 0x109, 0x307, 0],
        [0x8000_0022, 0, 1, 6, 0, 0],
        [0x8000_0026, 0, 1, 2, 0x100, 9],
    ];
    leaves.extend((0..).zip(caches).map(|(i, &[a, b, c, d])| [LEAF_AMD_CACHES, i, a, b, c, d]));
    cpu(AMD, &leaves)
}

fn amd() -> CpuId {
    amd_with(0x2008_0140, 0x0200_6140, &[])
}

fn config(cpus: u32) -> CpuidConfig {
    CpuidConfig {
        cpus,
        tsc_deadline_timer: true,
        x2apic: true,
        pmu: false,
        withheld_kvm_features: 0,
        dedicated: false,
    }
}

fn leaf(cpuid: &CpuId, function: u32, index: u32) -> Option<[u32; 4]> {
    cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == function && entry.index == index)
        .map(|entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
}

/// Level, kind, bytes, line size and number of sharers of each cache in `function`.
fn caches(cpuid: &CpuId, function: u32) -> Vec<(u32, u32, u32, u32, u32)> {
    (0..)
        .map_while(|index| leaf(cpuid, function, index))
        .take_while(|registers| registers[0] & 0x1f != 0)
        .map(|[eax, ebx, ecx, _]| {
            let line_bytes = (ebx & 0xfff) + 1;
            let bytes = ((ebx >> 22) + 1) * ((ebx >> 12 & 0x3ff) + 1) * line_bytes * (ecx + 1);
            (eax >> 5 & 7, eax & 0x1f, bytes, line_bytes, (eax >> 14 & 0xfff) + 1)
        })
        .collect()
}

const KIB: u32 = 1 << 10;
const MODEL: [(u32, u32, u32, u32, u32); 4] = [
    (1, 1, 32 * KIB, 64, 1),
    (1, 2, 32 * KIB, 64, 1),
    (2, 3, 1024 * KIB, 64, 1),
    (3, 3, 16384 * KIB, 64, 4),
];

#[test]
fn apic_identifiers_agree_in_every_leaf() {
    let cpuid = for_vcpu(&amd(), &config(4), 3).unwrap();
    assert_eq!(leaf(&cpuid, 1, 0).unwrap()[1], 3 << 24 | 4 << 16 | 8 << 8);
    for (function, index) in [(0xb, 0), (0xb, 1), (0x1f, 0), (0x1f, 1)] {
        assert_eq!(leaf(&cpuid, function, index).unwrap()[3], 3);
    }
    assert_eq!(leaf(&cpuid, 0x8000_001e, 0), Some([3, 3, 0, 0]));
}

#[test]
fn the_topology_is_one_package_of_single_threaded_cores() {
    for (cpus, bits, ids) in [(1, 0, 1), (2, 1, 2), (3, 2, 4), (4, 2, 4), (5, 3, 8), (254, 8, 255)]
    {
        let cpuid = for_vcpu(&amd(), &config(cpus), 0).unwrap();
        assert_eq!(leaf(&cpuid, 0xb, 0), Some([0, 1, 0x100, 0]));
        assert_eq!(leaf(&cpuid, 0xb, 1), Some([bits, cpus, 0x201, 0]));
        assert_eq!(leaf(&cpuid, 0xb, 2), Some([0, 0, 2, 0]));
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).unwrap()[2], bits << 12 | (cpus - 1));
        let [_, ebx, _, edx] = leaf(&cpuid, 1, 0).unwrap();
        assert_eq!((ebx >> 16 & 0xff, edx >> 28 & 1), (ids, u32::from(cpus > 1)), "{cpus} CPUs");
    }
}

#[test]
fn features_that_the_guest_cannot_use_are_cleared() {
    let cpuid = for_vcpu(&amd(), &config(2), 0).unwrap();
    let ecx = leaf(&cpuid, 1, 0).unwrap()[2];
    assert_eq!(ecx & (ECX_VMX | ECX_MONITOR | ECX_PDCM), 0);
    assert_eq!(ecx, ECX_HYPERVISOR | ECX_X2APIC | ECX_TSC_DEADLINE);
    assert_eq!(leaf(&cpuid, 0x8000_0001, 0).unwrap()[2], ECX_TOPOEXT | ECX_CMP_LEGACY);
    for function in [5, 0xa, 0x8000_000a, 0x8000_0022, 0x8000_0026] {
        assert_eq!(leaf(&cpuid, function, 0), None, "{function:#x}");
    }
}

#[test]
fn a_guest_with_a_pmu_keeps_its_leaves() {
    let config = CpuidConfig { pmu: true, ..config(2) };
    let cpuid = for_vcpu(&amd(), &config, 0).unwrap();
    assert_eq!(leaf(&cpuid, 0xa, 0).unwrap()[0], 0x0730_0402);
    assert_eq!(leaf(&cpuid, 0x8000_0022, 0), Some([1, 6, 0, 0]));
    assert_eq!(leaf(&cpuid, 0x8000_0001, 0).unwrap()[2] & ECX_AMD_PMU, ECX_AMD_PMU);
    assert_eq!(leaf(&cpuid, 1, 0).unwrap()[2] & ECX_PDCM, ECX_PDCM);
}

#[test]
fn timer_and_x2apic_are_offered_only_where_they_are() {
    let config = CpuidConfig { tsc_deadline_timer: false, x2apic: false, ..config(1) };
    let ecx = leaf(&for_vcpu(&amd(), &config, 0).unwrap(), 1, 0).unwrap()[2];
    assert_eq!(ecx, ECX_HYPERVISOR);
}

#[test]
fn kvm_features_can_be_withheld_and_the_realtime_hint_set() {
    let features = |config| leaf(&for_vcpu(&amd(), &config, 0).unwrap(), 0x4000_0001, 0).unwrap();
    assert_eq!(features(config(1)), [0x0100_7efb, 0, 0, 0]);
    let config =
        CpuidConfig { withheld_kvm_features: 1 << 6 | 1 << 4, dedicated: true, ..config(1) };
    assert_eq!(features(config), [0x0100_7eab, 0, 0, 1]);
}

#[test]
fn page_faults_that_can_be_told_by_exception_only_are_not_offered() {
    let by_interrupt_withheld = CpuidConfig { withheld_kvm_features: 1 << 14, ..config(1) };
    for (config, offered) in [(config(1), true), (by_interrupt_withheld, false)] {
        let eax = leaf(&for_vcpu(&amd(), &config, 0).unwrap(), 0x4000_0001, 0).unwrap()[0];
        assert_eq!(eax & 1 << 4 != 0, offered);
    }
}

#[test]
fn absent_amd_caches_are_made_up_and_announced() {
    let cpuid = for_vcpu(&amd(), &config(4), 0).unwrap();
    assert_eq!(caches(&cpuid, LEAF_AMD_CACHES), MODEL);
    assert_eq!(leaf(&cpuid, LEAF_EXTENDED_MAX, 0).unwrap()[0], 0x8000_001e);
    let last = cpuid.as_slice().iter().filter(|entry| entry.function == LEAF_AMD_CACHES);
    assert!(last.clone().all(|entry| entry.flags == KVM_CPUID_FLAG_SIGNIFCANT_INDEX));
    assert_eq!(last.count(), 5, "the fifth says that there are no more");
}

#[test]
fn amd_caches_are_there_even_without_topology_extensions() {
    let bare = cpu(AMD, &[[0x8000_0001, 0, 0, 0, 0, 0]]);
    let cpuid = for_vcpu(&bare, &config(4), 2).unwrap();
    assert_eq!(caches(&cpuid, LEAF_AMD_CACHES), MODEL);
    assert_eq!(leaf(&cpuid, 0x8000_001e, 0), Some([2, 2, 0, 0]));
}

#[test]
fn an_impossible_cache_line_replaces_all_caches() {
    // Line sizes of 2697 and 0 + 1 bytes, a level 0, a type 4.
    for registers in
        [[0x121, 0x01c0_0a88, 63, 0], [0x121, 0, 63, 0], [0x101, 63, 63, 0], [0x124, 63, 63, 0]]
    {
        let sane = [0x122, 0x01c0_003f, 63, 0];
        let cpuid = for_vcpu(&amd_with(0, 0, &[sane, registers]), &config(4), 0).unwrap();
        assert_eq!(caches(&cpuid, LEAF_AMD_CACHES), MODEL, "{registers:x?}");
    }
}

#[test]
fn sane_caches_stay_and_only_who_shares_them_changes() {
    // The host's L2 is shared by two threads, its L3 by sixteen.
    let l2 = [0x4000 | 0x143, 0x01c0_003f, 1023, 2];
    let l3 = [15 << 14 | 0x163, 0x03c0_003f, 32767, 1];
    for (cpus, sharers) in [(1, 1), (3, 3), (4, 4)] {
        let cpuid = for_vcpu(&amd_with(0, 0, &[l2, l3]), &config(cpus), 0).unwrap();
        let expected = [(2, 3, 512 * KIB, 64, 1), (3, 3, 32768 * KIB, 64, sharers)];
        assert_eq!(caches(&cpuid, LEAF_AMD_CACHES), expected);
        assert_eq!(leaf(&cpuid, LEAF_AMD_CACHES, 0).unwrap()[3], 2);
    }
}

#[test]
fn older_amd_cache_leaves_are_repaired_only_when_they_cannot_be_true() {
    let kept = for_vcpu(&amd(), &config(1), 0).unwrap();
    assert_eq!(leaf(&kept, 0x8000_0005, 0), Some([0xff48, 0xff40, 0x2008_0140, 0x2008_0140]));
    assert_eq!(leaf(&kept, 0x8000_0006, 0), Some([0, 0x4200_4200, 0x0200_6140, 0]));
    let repaired = for_vcpu(&amd_with(0x89, 0, &[]), &config(1), 0).unwrap();
    // 32 KiB in 8 ways; 1 MiB and 32 times 512 KiB in 16 ways.
    assert_eq!(leaf(&repaired, 0x8000_0005, 0), Some([0xff48, 0xff40, 0x2008_0140, 0x2008_0140]));
    assert_eq!(leaf(&repaired, 0x8000_0006, 0), Some([0, 0x4200_4200, 0x0400_8140, 0x0080_8140]));
}

#[test]
fn intel_caches_are_shared_by_identifiers_and_count_the_cores() {
    let host =
        [[4, 0, 0x1c00_4121, 0x01c0_003f, 63, 0], [4, 1, 0x1c03_c163, 0x02c0_003f, 16383, 4]];
    let cpuid = for_vcpu(&cpu(INTEL, &host), &config(3), 0).unwrap();
    let expected = [(1, 1, 32 * KIB, 64, 1), (3, 3, 12288 * KIB, 64, 4)];
    assert_eq!(caches(&cpuid, LEAF_CACHES), expected);
    for index in [0, 1] {
        assert_eq!(leaf(&cpuid, LEAF_CACHES, index).unwrap()[0] >> 26, 3);
    }
    assert_eq!(leaf(&cpuid, 0x8000_001d, 0), None);
    assert_eq!(caches(&for_vcpu(&cpu(INTEL, &[]), &config(3), 0).unwrap(), LEAF_CACHES), MODEL);
}

#[test]
fn a_cpu_without_topology_leaves_gets_none() {
    let mut old = cpu(INTEL, &[]);
    old.as_mut_slice()[0].eax = 0xa;
    let cpuid = for_vcpu(&old, &config(2), 0).unwrap();
    assert_eq!((leaf(&cpuid, 0xb, 0), leaf(&cpuid, 0x1f, 0)), (None, None));
}

#[test]
fn more_entries_than_kvm_takes_are_refused() {
    let many: Vec<_> = (0..250).map(|index| [0xd, index, 0, 0, 0, 0]).collect();
    let error = for_vcpu(&cpu(AMD, &many), &config(1), 0).unwrap_err();
    assert!(matches!(error, CpuidError::TooManyEntries(257..)), "{error}");
}
