//! From a kernel file to a vCPU that is about to execute its first instruction: the address map
//! ([`layout`]), the kernel, initrd and boot information in guest memory ([`load`]), ACPI tables
//! ([`acpi`]), and what the vCPUs start with ([`regs`], [`cpuid`], [`msrs`]).

pub mod acpi;
pub mod cmdline;
pub mod cpuid;
mod elf;
pub mod layout;
pub mod load;
pub mod msrs;
pub mod regs;

pub use load::{BootError, BootProtocol, BootRequest, Entry, Image, load};
