//! The smallest ELF kernels: a handful of plain instructions, entered by the 64-bit Linux boot
//! protocol. They run on every KVM, also on one that cannot run a stock kernel.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the code is loaded, and entered.
const LOAD_ADDRESS: u64 = 0x10_0000;
const HEADER_BYTES: u16 = 64;
const PROGRAM_HEADER_BYTES: u16 = 56;

/// An ELF64 executable that is `code` and nothing else.
pub fn image(code: &[u8]) -> Vec<u8> {
    let offset = u64::from(HEADER_BYTES + PROGRAM_HEADER_BYTES);
    let mut elf = Vec::new();
    elf.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0"); // 64 bit, little-endian, version 1
    elf.extend(2u16.to_le_bytes()); // ET_EXEC
    elf.extend(62u16.to_le_bytes()); // EM_X86_64
    elf.extend(1u32.to_le_bytes()); // version
    elf.extend(LOAD_ADDRESS.to_le_bytes()); // entry
    elf.extend(u64::from(HEADER_BYTES).to_le_bytes()); // program headers
    elf.extend(0u64.to_le_bytes()); // section headers
    elf.extend(0u32.to_le_bytes()); // flags
    elf.extend(HEADER_BYTES.to_le_bytes());
    elf.extend(PROGRAM_HEADER_BYTES.to_le_bytes());
    elf.extend(1u16.to_le_bytes()); // program headers: one
    elf.extend([0; 6]); // no section headers
    elf.extend(1u32.to_le_bytes()); // PT_LOAD
    elf.extend(7u32.to_le_bytes()); // RWX
    elf.extend(offset.to_le_bytes());
    elf.extend(LOAD_ADDRESS.to_le_bytes()); // virtual address
    elf.extend(LOAD_ADDRESS.to_le_bytes()); // physical address
    elf.extend((code.len() as u64).to_le_bytes()); // in the file
    elf.extend((code.len() as u64).to_le_bytes()); // in memory
    elf.extend(4096u64.to_le_bytes()); // alignment
    elf.extend(code);
    elf
}

/// Writes [`image`] into `dir`.
///
/// # Panics
/// If the directory cannot be written.
pub fn write(dir: &Path, code: &[u8]) -> PathBuf {
    let path = dir.join("tiny");
    fs::write(&path, image(code)).expect("the kernel can be written");
    path
}

/// `out port, value` (one byte).
pub fn out(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee] // mov dx, port; mov al, value; out dx, al
}

/// Writes `text` to the serial port at `port`.
pub fn print(port: u16, text: &str) -> Vec<u8> {
    text.bytes().flat_map(|byte| out(port, byte)).collect()
}

/// Powers off by the ACPI sleep control register, which is at port 0x600.
pub fn power_off() -> Vec<u8> {
    const SLEEP_ENABLE: u8 = 1 << 5;
    const TYPE_S5: u8 = 5 << 2;
    [out(0x600, SLEEP_ENABLE | TYPE_S5), spin()].concat()
}

/// Resets by the keyboard controller, as Linux does with `reboot=k`.
pub fn reset() -> Vec<u8> {
    [out(0x64, 0xfe), spin()].concat()
}

/// `jmp .`: waits to be stopped.
pub fn spin() -> Vec<u8> {
    vec![0xeb, 0xfe]
}

/// A triple fault: an undefined instruction without an interrupt table.
pub fn triple_fault() -> Vec<u8> {
    let mut code = vec![0x6a, 0, 0x6a, 0]; // push 0; push 0: an empty table at 0
    code.extend([0x0f, 0x01, 0x1c, 0x24]); // lidt [rsp]
    code.extend([0x0f, 0x0b]); // ud2
    code
}

/// Runs into an instruction that no KVM emulates: x87 (`dd 00`) on memory-mapped I/O.
pub fn not_emulated() -> Vec<u8> {
    // mov eax, 0xd000_0000 (zero-extends); fninit; fld qword [rax]
    vec![0xb8, 0, 0, 0, 0xd0, 0xdb, 0xe3, 0xdd, 0x00]
}

/// Writes a model-specific register.
pub fn write_msr(index: u32, value: u64) -> Vec<u8> {
    let mut code = vec![0xb9]; // mov ecx, index
    code.extend(index.to_le_bytes());
    code.push(0xb8); // mov eax, the low half
    code.extend((value as u32).to_le_bytes());
    code.push(0xba); // mov edx, the high half
    code.extend(((value >> 32) as u32).to_le_bytes());
    code.extend([0x0f, 0x30]); // wrmsr
    code
}
