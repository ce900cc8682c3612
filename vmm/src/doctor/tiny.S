# The tiny guests of `pollux doctor`, each a few instructions in 64-bit mode at privilege level 0.
# The whole image is copied to one place in guest memory and is position independent. On entry RSI
# points to zeroed memory, aligned to 64 bytes, and there is a stack. A guest ends with OUT:
#
#   port 0xf4   1 the instruction did what it should, 0 it did something else, 2 CPUID says that
#               there is no such instruction
#   port 0xf5   the vector of an exception that nobody expected

    .pushsection .rodata.tiny_guests, "a", @progbits
    .balign 16
tiny_image:

# Entry points of the IDT's gates: 16 bytes a vector, in order.
    .irp vector, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    .balign 16, 0xcc
    push \vector
    jmp tiny_exception
    .endr

tiny_exception:
    pop rax
    out 0xf5, al
    hlt
tiny_right:
    mov al, 1
    out 0xf4, al
    hlt
tiny_wrong:
    xor eax, eax
    out 0xf4, al
    hlt

# Ends the guest if the bits \mask are not set in ECX of CPUID leaf 1. A guest looks for itself, as a
# kernel does: what it sees need not be what KVM was told to show. Changes EAX, EBX, ECX and EDX.
    .macro needs_cpuid mask
    mov eax, 1
    xor ecx, ecx
    cpuid
    test ecx, \mask
    jz tiny_not_offered
    .endm
tiny_not_offered:
    mov al, 2
    out 0xf4, al
    hlt

# Nothing but arriving in 64-bit mode.
tiny_long_mode:
    jmp tiny_right

# (1, 2) is there and is exchanged for (3, 4).
tiny_cmpxchg16b:
    needs_cpuid (1 << 13)
    mov eax, 1
    mov edx, 2
    mov ebx, 3
    mov ecx, 4
    mov qword ptr [rsi], rax
    mov qword ptr [rsi + 8], rdx
    lock cmpxchg16b xmmword ptr [rsi]
    jne tiny_wrong
    cmp qword ptr [rsi], 3
    jne tiny_wrong
    cmp qword ptr [rsi + 8], 4
    jne tiny_wrong
    jmp tiny_right

# A breakpoint goes through its gate, and back. A kernel patches its own code this way.
tiny_int3:
    xor ebx, ebx
    int3
    cmp ebx, 1
    jne tiny_wrong
    jmp tiny_right
tiny_breakpoint:
    inc ebx
    iretq

# An FPU state with an MXCSR (offset 24) that is not the default goes in and comes out again.
tiny_fxrstor:
    mov word ptr [rsi], 0x37f
    mov dword ptr [rsi + 24], 0x1fa0
    fxrstor64 [rsi]
    fxsave64 [rsi + 1024]
    cmp dword ptr [rsi + 1024 + 24], 0x1fa0
    jne tiny_wrong
    jmp tiny_right

# The same with XSAVE's layout, after CR4.OSXSAVE is set: x87 and SSE state (bits 0 and 1) in XCR0, EDX:EAX and XSTATE_BV, the
# first field of the header at offset 512.
tiny_xrstor:
    needs_cpuid (1 << 26)
    mov rax, cr4
    or eax, (1 << 18)
    mov cr4, rax
    mov eax, 3
    xor edx, edx
    xor ecx, ecx
    xsetbv
    mov word ptr [rsi], 0x37f
    mov dword ptr [rsi + 24], 0x1fa0
    mov dword ptr [rsi + 512], 3
    xrstor64 [rsi]
    xsave64 [rsi + 1024]
    cmp dword ptr [rsi + 1024 + 24], 0x1fa0
    jne tiny_wrong
    jmp tiny_right
tiny_image_end:

# What the host has to know: the image's place and size, then offsets into it.
    .popsection
    .pushsection .data.rel.ro.tiny_guests, "aw", @progbits
    .balign 8
    .globl pollux_tiny_guests
pollux_tiny_guests:
    .quad tiny_image
    .quad tiny_image_end - tiny_image
    .quad tiny_breakpoint - tiny_image
    .quad tiny_long_mode - tiny_image
    .quad tiny_cmpxchg16b - tiny_image
    .quad tiny_int3 - tiny_image
    .quad tiny_fxrstor - tiny_image
    .quad tiny_xrstor - tiny_image
    .popsection
