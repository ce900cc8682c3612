//! ACPI tables of a hardware-reduced machine (ACPI 6.5, 4.1): no fixed hardware but a sleep and a
//! reset register, no SCI, no FACS. What can be found otherwise (the I/O APIC's routing is the
//! identity, processors are in the MADT) is not said twice, for the guest reads all of it at boot.

use std::ops::Range;

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, EISAName, Else, Equal,
    IO, If, Interrupt, Memory32Fixed, Method, Name, Or, Package, Path, ResourceTemplate, Return,
    Scope, Uuid, ZERO,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use devices::{power, serial};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::layout;
use super::load::BootError;

/// The most vCPUs there can be: local APIC identifiers are below 255 (the broadcast), and one is
/// kept free as other monitors do.
pub const MAX_CPUS: u32 = 254;

const OEM_ID: [u8; 6] = *b"POLLUX";
const OEM_TABLE_ID: [u8; 8] = *b"POLLUXVM";
const OEM_REVISION: u32 = 1;
const DSDT_REVISION: u8 = 2;
const SDT_HEADER_BYTES: u32 = 36;
const TABLE_ALIGN: u64 = 16;

// IAPC_BOOT_ARCH (ACPI 6.5, table 5.11). Bit 1 is clear: there is an i8042 to reset the machine by,
// but no keyboard behind it that would be worth the guest's probing.
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;
const BOOT_ARCH_NO_CMOS_RTC: u16 = 1 << 5;

/// `_OSC` of a PCI host bridge (PCI Firmware 3.2, 4.5.1).
const OSC_PCI_UUID: &str = "33db4d5b-1ff7-401c-9657-7441c03dd766";
/// Control field: the guest may use the PCI Express capability. There is nothing else to give.
const OSC_CONTROL_PCIE_CAPABILITY: u8 = 1 << 4;
/// Status in the first dword: unrecognized UUID.
const OSC_STATUS_BAD_UUID: u8 = 1 << 2;

/// What the tables describe.
#[derive(Clone, Debug)]
pub struct AcpiConfig {
    /// Number of vCPUs; their APIC identifiers are 0 to `cpus` - 1.
    pub cpus: u32,
    /// Whether there is a COM2.
    pub com2: bool,
    /// The 64-bit PCI window.
    pub pci_mmio64: Range<u64>,
}

/// Writes the tables to [`layout::ACPI_TABLES`] and returns the address of the RSDP.
///
/// # Errors
/// [`BootError::TooManyCpus`]; [`BootError::MemoryTooSmall`] if there is no RAM in that place.
pub fn write(memory: &GuestMemoryMmap, config: &AcpiConfig) -> Result<u64, BootError> {
    let bytes = tables(config)?;
    memory
        .write_slice(&bytes, GuestAddress(layout::ACPI_TABLES.start))
        .map_err(|_| BootError::MemoryTooSmall { memory_bytes: 0 })?;
    Ok(layout::ACPI_TABLES.start)
}

/// All tables as they lie in memory from [`layout::ACPI_TABLES`] on, the RSDP first.
fn tables(config: &AcpiConfig) -> Result<Vec<u8>, BootError> {
    let too_many = BootError::TooManyCpus { cpus: config.cpus, max_cpus: MAX_CPUS };
    let cpus = u8::try_from(config.cpus).ok().filter(|cpus| u32::from(*cpus) <= MAX_CPUS);
    let Some(cpus) = cpus else { return Err(too_many) };

    let start = layout::ACPI_TABLES.start;
    let mut bytes = vec![0; Rsdp::len()];
    let mut place = |table: &dyn Aml| {
        bytes.resize((bytes.len() as u64).next_multiple_of(TABLE_ALIGN) as usize, 0);
        let address = start + bytes.len() as u64;
        table.to_aml_bytes(&mut bytes);
        address
    };
    let dsdt = place(&Raw(dsdt(config).as_slice()));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(place(&fadt(dsdt)));
    xsdt.add_entry(place(&madt(cpus)));
    xsdt.add_entry(place(&mcfg()));
    let xsdt = place(&xsdt);

    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    bytes[..rsdp.len()].copy_from_slice(&rsdp);
    if bytes.len() as u64 > layout::ACPI_TABLES.end - start {
        return Err(too_many);
    }
    Ok(bytes)
}

/// Bytes that are a table already.
struct Raw<'a>(&'a [u8]);

impl Aml for Raw<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(self.0);
    }
}

fn io_register(port: u16) -> GAS {
    GAS::new(GasSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into())
}

/// Fixed ACPI Description Table (ACPI 6.5, 5.2.9).
fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::Headless)
        // "Not a fixed feature": there are no buttons.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = (BOOT_ARCH_NO_VGA | BOOT_ARCH_NO_CMOS_RTC).into();
    fadt.reset_reg = io_register(power::ACPI_RESET_PORT);
    fadt.reset_value = power::ACPI_RESET_VALUE;
    fadt.sleep_control_reg = io_register(power::ACPI_POWER_PORT);
    fadt.sleep_status_reg = io_register(power::ACPI_SLEEP_STATUS_PORT);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"POLLUX\0\0").into();
    fadt.finalize()
}

/// Multiple APIC Description Table (ACPI 6.5, 5.2.12).
fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
        LocalInterruptController::Address(layout::LAPIC_START as u32),
    );
    for id in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC_START as u32, 0));
    madt
}

/// PCI Express memory-mapped configuration space (PCI Firmware 3.2, 4.1.2).
fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(layout::ECAM_START, 0, 0, layout::ECAM_LAST_BUS);
    mcfg
}

/// Differentiated System Description Table: the devices, and S5.
fn dsdt(config: &AcpiConfig) -> Sdt {
    let mut devices = pci_root(&config.pci_mmio64);
    devices.extend(ecam_reservation());
    devices.extend(serial_port("COM1", 1, layout::COM1_PORT, layout::COM1_GSI));
    if config.com2 {
        devices.extend(serial_port("COM2", 2, layout::COM2_PORT, layout::COM2_GSI));
    }
    devices.extend(pvpanic());

    let mut dsdt =
        Sdt::new(*b"DSDT", SDT_HEADER_BYTES, DSDT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    dsdt.append_slice(&Scope::raw("_SB_".into(), devices));
    // SLP_TYP for PM1a and PM1b, and two reserved (ACPI 6.5, 7.4.2).
    let s5 = Package::new(vec![&power::ACPI_SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO]);
    dsdt.append_slice(&aml(&Name::new("_S5_".into(), &s5)));
    dsdt
}

fn aml(object: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    object.to_aml_bytes(&mut bytes);
    bytes
}

fn pci_root(mmio64: &Range<u64>) -> Vec<u8> {
    let buses = AddressSpace::new_bus_number(0_u16, layout::ECAM_LAST_BUS.into());
    let config_ports = IO::new(layout::PCI_CONFIG_PORT, layout::PCI_CONFIG_PORT, 1, 8);
    let mmio32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        layout::PCI_MMIO32.start as u32,
        (layout::PCI_MMIO32.end - 1) as u32,
        None,
    );
    let mmio64 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        mmio64.start,
        mmio64.end - 1,
        None,
    );
    let resources = ResourceTemplate::new(vec![&buses, &config_ports, &mmio32, &mmio64]);
    aml(&Device::new(
        "PCI0".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_SEG".into(), &ZERO),
            &Name::new("_BBN".into(), &ZERO),
            &Name::new("_CRS".into(), &resources),
            &Raw(&osc()),
        ],
    ))
}

/// Without `_OSC` Linux takes the bridge for conventional PCI, and says so.
fn osc() -> Vec<u8> {
    let status: Path = "CDW1".into();
    let control: Path = "CDW3".into();
    let is_pci = aml(&Equal::new(&Arg(0), &Uuid::new(OSC_PCI_UUID)));
    let grant = aml(&And::new(&control, &control, &OSC_CONTROL_PCIE_CAPABILITY));
    let control_field = aml(&CreateDWordField::new(&control, &Arg(3), &8_u8));
    let refuse = aml(&Or::new(&status, &status, &OSC_STATUS_BAD_UUID));
    let body = [
        aml(&CreateDWordField::new(&status, &Arg(3), &ZERO)),
        aml(&If::new(&Raw(&is_pci), vec![&Raw(&control_field), &Raw(&grant)])),
        aml(&Else::new(vec![&Raw(&refuse)])),
        aml(&Return::new(&Arg(3))),
    ]
    .concat();
    aml(&Method::new("_OSC".into(), 4, true, vec![&Raw(&body)]))
}

/// Linux uses an ECAM only if a motherboard resource or the memory map reserves it.
fn ecam_reservation() -> Vec<u8> {
    let ecam = Memory32Fixed::new(true, layout::ECAM_START as u32, layout::ECAM_BYTES as u32);
    aml(&Device::new(
        "MBRD".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ecam])),
        ],
    ))
}

/// A 16550 with an edge-triggered, active-high interrupt.
fn serial_port(name: &str, uid: u8, port: u16, gsi: u32) -> Vec<u8> {
    let ports = IO::new(port, port, 1, serial::PORTS as u8);
    let interrupt = Interrupt::new(true, true, false, false, gsi);
    aml(&Device::new(
        name.into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &uid),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports, &interrupt])),
        ],
    ))
}

fn pvpanic() -> Vec<u8> {
    let port = IO::new(power::PVPANIC_PORT, power::PVPANIC_PORT, 1, 1);
    aml(&Device::new(
        "PVPN".into(),
        vec![
            &Name::new("_HID".into(), &"QEMU0001"),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&port])),
        ],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(cpus: u32, com2: bool) -> AcpiConfig {
        AcpiConfig { cpus, com2, pci_mmio64: 4 << 30..68 << 30 }
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn u32_at(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    fn u64_at(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    /// The table at a guest-physical address.
    fn table(bytes: &[u8], address: u64) -> &[u8] {
        let table = &bytes[(address - layout::ACPI_TABLES.start) as usize..];
        &table[..u32_at(table, 4) as usize]
    }

    /// Follows the pointers from the RSDP, as a guest does: the tables of the XSDT, and the DSDT.
    fn walk(bytes: &[u8]) -> Vec<&[u8]> {
        let xsdt = table(bytes, u64_at(bytes, 24));
        let mut tables = vec![xsdt];
        for entry in xsdt[36..].chunks(8) {
            let found = table(bytes, u64_at(entry, 0));
            tables.push(found);
            if found.starts_with(b"FACP") {
                tables.push(table(bytes, u64_at(found, 140)));
            }
        }
        tables
    }

    fn find<'a>(bytes: &'a [u8], signature: &[u8]) -> &'a [u8] {
        walk(bytes).into_iter().find(|table| table.starts_with(signature)).unwrap()
    }

    fn has(bytes: &[u8], part: &[u8]) -> bool {
        bytes.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn every_table_is_reached_from_the_rsdp_and_sums_to_zero() {
        let bytes = tables(&config(4, true)).unwrap();
        assert!(bytes.starts_with(b"RSD PTR "));
        assert_eq!((sum(&bytes[..20]), sum(&bytes[..36]), bytes[15]), (0, 0, 2));
        let tables = walk(&bytes);
        let signatures: Vec<_> = tables.iter().map(|table| &table[..4]).collect();
        assert_eq!(signatures, [b"XSDT", b"FACP", b"DSDT", b"APIC", b"MCFG"]);
        for table in tables {
            assert_eq!(sum(table), 0, "{:?}", &table[..4]);
            let offset = table.as_ptr().addr() - bytes.as_ptr().addr();
            assert_eq!(offset as u64 % TABLE_ALIGN, 0, "{:?}", &table[..4]);
        }
    }

    #[test]
    fn the_fadt_describes_hardware_reduced_acpi_with_its_three_registers() {
        let bytes = tables(&config(1, false)).unwrap();
        let fadt = find(&bytes, b"FACP");
        let flags = u32_at(fadt, 112);
        assert_eq!((flags >> 20 & 1, flags >> 10 & 1), (1, 1), "HW_REDUCED, RESET_REG_SUP");
        // System I/O, 8 bits.
        for (offset, port) in [(116, 0x602), (244, 0x600), (256, 0x601)] {
            assert_eq!(fadt[offset..offset + 2], [1, 8]);
            assert_eq!(u64_at(fadt, offset + 4), port);
        }
        assert_eq!(fadt[128], 1, "RESET_VALUE");
    }

    #[test]
    fn the_madt_has_an_entry_for_every_cpu_and_the_io_apic() {
        let bytes = tables(&config(3, false)).unwrap();
        let madt = find(&bytes, b"APIC");
        assert_eq!(u32_at(madt, 36), 0xfee0_0000);
        let ids: Vec<_> = (0..3).map(|cpu| &madt[44 + cpu * 8..][..8]).collect();
        assert_eq!(
            ids,
            [[0, 8, 0, 0, 1, 0, 0, 0], [0, 8, 1, 1, 1, 0, 0, 0], [0, 8, 2, 2, 1, 0, 0, 0]]
        );
        let io_apic = &madt[44 + 3 * 8..];
        assert_eq!((&io_apic[..3], u32_at(io_apic, 4)), (&[1, 12, 0][..], 0xfec0_0000));
        assert_eq!(io_apic.len(), 12);
    }

    #[test]
    fn com2_and_pvpanic_are_described_only_where_they_are() {
        let with = tables(&config(1, true)).unwrap();
        let without = tables(&config(1, false)).unwrap();
        assert!(has(find(&with, b"DSDT"), b"COM2"));
        assert!(!has(find(&without, b"DSDT"), b"COM2"));
        assert!(has(find(&without, b"DSDT"), b"COM1"));
        assert!(has(find(&without, b"DSDT"), b"QEMU0001"));
    }

    #[test]
    fn up_to_254_cpus_fit_and_more_are_refused() {
        let bytes = tables(&config(254, true)).unwrap();
        let place = layout::ACPI_TABLES.end - layout::ACPI_TABLES.start;
        assert!(bytes.len() as u64 <= place);
        let error = tables(&config(255, true)).unwrap_err();
        assert_eq!(error.to_string(), "ACPI tables for 255 CPUs: at most 254 CPUs are possible");
    }

    /// By hand, with `iasl` (Debian: acpica-tools): `cargo test -p vmm -- --ignored iasl`.
    #[test]
    #[ignore = "needs iasl"]
    fn iasl_compiles_what_it_disassembles() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = tables(&config(4, true)).unwrap();
        for table in walk(&bytes) {
            let name = String::from_utf8_lossy(&table[..4]).to_lowercase();
            let binary = directory.path().join(format!("{name}.aml"));
            std::fs::write(&binary, table).unwrap();
            let run = |argument: &str, path: &std::path::Path| {
                let output = std::process::Command::new("iasl")
                    .current_dir(&directory)
                    .arg(argument)
                    .arg(path)
                    .output()
                    .expect("iasl runs");
                let text = String::from_utf8_lossy(&output.stdout).into_owned()
                    + &String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{name}: {text}");
                text
            };
            run("-d", &binary);
            let text = run("-vs", &binary.with_extension("dsl"));
            // Of a data table iasl says nothing when it is right.
            let has_verdict = name == "dsdt";
            assert!(!has_verdict || text.contains("0 Errors, 0 Warnings, 0 Remarks"), "{text}");
        }
    }
}
