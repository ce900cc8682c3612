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

/// Halts for ever, woken by a periodic timer of its local APIC, `period_ns` apart.
pub fn halts_with_timer(period_ns: u32) -> Vec<u8> {
    const VECTOR: u8 = 0x40;
    // Where nothing else is: the stack grows down from the interrupt table.
    const TABLE: u32 = 0x20_0000;
    // The 64-bit code segment that Pollux's boot sets up.
    const CODE_SELECTOR: u8 = 0x10;
    let gate = TABLE + u32::from(VECTOR) * 16;
    let store = |address: u32, value: [u8; 4]| {
        let mut code = vec![0xc7, 0x04, 0x25]; // mov dword [address], value
        code.extend(address.to_le_bytes());
        code.extend(value);
        code
    };
    // The gate's handler address is that of the instruction after all this, found at run time.
    let mut code = vec![0x48, 0x8d, 0x05, 0, 0, 0, 0]; // lea rax, [rip + handler]
    code.extend([0x66, 0x89, 0x04, 0x25]); // mov [gate], ax
    code.extend(gate.to_le_bytes());
    code.extend([0x66, 0xc7, 0x04, 0x25]); // mov word [gate + 2], selector
    code.extend((gate + 2).to_le_bytes());
    code.extend([CODE_SELECTOR, 0]);
    code.extend(store(gate + 4, [0, 0x8e, 0, 0])); // present, interrupt gate; bits 16 to 31 follow
    code.extend([0xc1, 0xe8, 16]); // shr eax, 16
    code.extend([0x66, 0x89, 0x04, 0x25]); // mov [gate + 6], ax
    code.extend((gate + 6).to_le_bytes());
    code.extend(store(gate + 8, [0; 4]));
    code.extend([0x68]); // push TABLE: the base, as 8 bytes
    code.extend(TABLE.to_le_bytes());
    code.extend([0x66, 0x68, 0xff, 0x0f]); // push word 0xfff: the limit
    code.extend([0x0f, 0x01, 0x1c, 0x24]); // lidt [rsp]
    code.extend(write_msr(0x1b, 0xfee0_0d00)); // IA32_APIC_BASE: x2APIC, enabled, boot CPU
    code.extend(write_msr(0x80f, 0x1ff)); // spurious-interrupt vector: enabled
    code.extend(write_msr(0x83e, 0xb)); // the timer's clock is not divided
    code.extend(write_msr(0x832, 0x2_0000 | u64::from(VECTOR))); // periodic
    code.extend(write_msr(0x838, u64::from(period_ns)));
    let halt = code.len();
    code.extend([0xbc]); // mov esp, TABLE
    code.extend(TABLE.to_le_bytes());
    code.extend([0xfb, 0xf4, 0xeb, 0xfd]); // sti; hlt; jmp to the hlt
    let handler = code.len();
    code.extend(write_msr(0x80b, 0)); // end of interrupt
    // Some KVMs cannot emulate IRET: back by a jump, with a fresh stack.
    let back = halt as i32 - (code.len() as i32 + 5);
    code.push(0xe9);
    code.extend(back.to_le_bytes());
    let distance = (handler - 7) as u32;
    code[3..7].copy_from_slice(&distance.to_le_bytes());
    code
}
