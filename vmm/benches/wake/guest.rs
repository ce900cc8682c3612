//! The guest: a few plain instructions, which run on every KVM, also on one that cannot run a stock
//! kernel. It halts, counts what wakes it, and halts again.

use std::sync::atomic::Ordering;

use devices::GuestMemory;
use vm_memory::{Bytes, GuestAddress};

/// The vector that wakes it.
pub const VECTOR: u8 = 0x40;
/// Where the image is loaded and entered.
const LOAD_ADDRESS: u64 = 0x10_0000;
/// Of the interrupt table in the image.
const TABLE_OFFSET: usize = 0x1000;
/// The words it shares with us, a cache line each.
const SHARED: u64 = 0x10_2000;
/// The 64-bit code segment that Pollux's boot sets up.
const CODE_SELECTOR: u16 = 0x10;

/// The shared words.
#[derive(Clone, Copy)]
pub enum Word {
    /// How often it was about to halt.
    Halts = 0,
    /// How often it was woken: the first instruction of its interrupt handler.
    Wakes = 64,
    /// Set by us: how long it polls before it halts, in cycles of its TSC.
    PollCycles = 128,
    /// Set by us: its timer's period, in counts of its local APIC; 0 for none.
    TimerPeriod = 192,
}

/// A word as it is now.
pub fn load(memory: &GuestMemory, word: Word) -> u64 {
    memory.load(GuestAddress(SHARED + word as u64), Ordering::Acquire).expect("RAM")
}

/// Sets a word.
pub fn store(memory: &GuestMemory, word: Word, value: u64) {
    memory.store(value, GuestAddress(SHARED + word as u64), Ordering::Release).expect("RAM");
}

// The handler does not return: it goes back to the loop by a jump, for some KVMs cannot emulate IRET.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".global wake_guest_start, wake_guest_handler, wake_guest_end",
    "wake_guest_start:",
    "lidt [rip + 90f]",
    "mov ebx, 0x102000",
    "xor r12d, r12d",
    // The local APIC in x2APIC mode, enabled.
    "mov ecx, 0x1b",
    "rdmsr",
    "or eax, 0xc00",
    "wrmsr",
    "xor edx, edx",
    "mov ecx, 0x80f",
    "mov eax, 0x1ff",
    "wrmsr",
    // Its timer, if wanted: periodic, not divided.
    "mov rsi, [rbx + 192]",
    "test rsi, rsi",
    "jz 20f",
    "mov ecx, 0x83e",
    "mov eax, 0xb",
    "wrmsr",
    "mov ecx, 0x832",
    "mov eax, 0x20040",
    "wrmsr",
    "mov ecx, 0x838",
    "mov eax, esi",
    "wrmsr",
    "20:",
    "mov esp, 0x109000",
    "inc r12",
    "mov [rbx], r12",
    "sti",
    // Polls first, if wanted.
    "mov rsi, [rbx + 128]",
    "test rsi, rsi",
    "jz 40f",
    "rdtsc",
    "shl rdx, 32",
    "lea rdi, [rax + rdx]",
    "30:",
    "rdtsc",
    "shl rdx, 32",
    "add rax, rdx",
    "sub rax, rdi",
    "cmp rax, rsi",
    "jb 30b",
    "40:",
    "hlt",
    "jmp 40b",
    "wake_guest_handler:",
    "mov [rbx + 64], r12",
    "mov ecx, 0x80b",
    "xor eax, eax",
    "xor edx, edx",
    "wrmsr",
    "jmp 20b",
    "90:",
    ".word 0xfff",
    ".quad 0x101000",
    "wake_guest_end:",
    ".popsection",
);

unsafe extern "C" {
    static wake_guest_start: u8;
    static wake_guest_handler: u8;
    static wake_guest_end: u8;
}

/// The guest as an ELF kernel.
pub fn elf() -> Vec<u8> {
    let start = &raw const wake_guest_start;
    // SAFETY: the three symbols are of one object, in this order, which is never written.
    let (code, handler) = unsafe {
        let bytes = (&raw const wake_guest_end).offset_from(start) as usize;
        let handler = (&raw const wake_guest_handler).offset_from(start) as u64;
        (std::slice::from_raw_parts(start, bytes), handler)
    };
    let mut image = code.to_vec();
    image.resize(TABLE_OFFSET + 0x1000, 0);
    let gate = TABLE_OFFSET + usize::from(VECTOR) * 16;
    let handler = LOAD_ADDRESS + handler;
    image[gate..gate + 2].copy_from_slice(&(handler as u16).to_le_bytes());
    image[gate + 2..gate + 4].copy_from_slice(&CODE_SELECTOR.to_le_bytes());
    image[gate + 5] = 0x8e; // present, interrupt gate
    image[gate + 6..gate + 8].copy_from_slice(&((handler >> 16) as u16).to_le_bytes());
    pollux_tests::elf::image(&image)
}
