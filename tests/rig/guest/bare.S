# A guest for QEMU without an operating system: it writes to its pages, checks them, and reports on
# the serial line. src/guest/mod.rs describes the contents of a page and the format of the lines.
#
# It boots with PVH (Xen's docs/misc/pvh.pandoc) in 32-bit protected mode without paging. It then
# switches to long mode at privilege level 3 and stays there, because some KVMs emulate level 0. A
# guest without pages stays at level 0, reports and halts. No interrupts are handled; I/O privilege
# level 3 allows it to use ports.
#
# Guest-physical memory, identity-mapped up to 4 GiB by pages of 2 MiB. They are marked accessed and
# dirty, so the CPU never writes to the tables:
#
#     0x0010_0000   this program and its variables
#     0x001f_0000   the top of the stack
#     0x0020_0000   page tables, six pages, and the task segment, three pages
#     0x0040_0000   the workload's pages
#
# Registers in the workload:
#
#     rbp          the parameters; variables are addressed by name
#     rbx          visits left before the next read of the clock
#     all others   scratch

    .intel_syntax noprefix

    .set STACK, 0x1f0000
    .set TABLES, 0x200000
    .set GIBIBYTES, 4
    # The task segment, which is followed by a bit for each port. Zeros permit all ports, for KVMs that
    # ignore the I/O privilege level.
    .set TASK, 0x206000
    .set TASK_BYTES, 104

    # The parameters; the host writes them into the image before the start.
    .set FIRST, 16                  # address of page 0
    .set PAGES, 24                  # the number of pages
    .set HOT, 32                    # the number of pages that are written to
    .set STRIDE, 40                 # the distance between written pages, modulo HOT
    .set CONTENT, 48                # 0 zero, 1 random, 2 mixed, 3 text
    .set RATE, 56                   # visits per second; 0 for no limit
    .set SEED, 64

    .set SIGNATURE, 0x9e3779b97f4a7c15
    .set BATCH, 64                  # visits between two reads of the clock, without a limit

    .set CPUID_HYPERVISOR, 0x40000000
    .set CPUID_FREQUENCY, 0x40000010 # the clock's frequency in kHz, from hypervisors that report it

    .set PIT_COUNTER, 0x40
    .set PIT_MODE, 0x43
    .set PIT_ONE_SHOT, 0x30         # counter 0, both bytes, mode 0
    .set PIT_STATUS, 0xe2           # read back the status of counter 0; bit 7 is its output
    .set PIT_STATUS_MODE, 0x3f      # the mode in the status; without a chip, the port reads as 0 or 0xff
    .set UNKNOWN_TWENTIETH, 100000000 # of 2 GHz
    .set PIT_TWENTIETH, 59659       # a twentieth of a second, in ticks of 1 193 182 Hz

    .set SERIAL, 0x3f8
    .set SERIAL_STATUS, 0x3fd
    .set SERIAL_HAS_BYTE, 1
    .set SERIAL_TAKES_BYTE, 0x20

    .section .note.Xen, "a", @note
    .long   4, 8, 18                # lengths of name and value; XEN_ELFNOTE_PHYS32_ENTRY
    .asciz  "Xen"
    .quad   start

    .text
    .code32
    .globl  start
start:
    cli
    cld
    mov     esp, STACK
    xor     eax, eax
    mov     edi, TABLES
    mov     ecx, (2 + GIBIBYTES + 3) * 1024
    rep stosd
    mov     dword ptr [TABLES], TABLES + 0x1000 + 0x27
    mov     edi, TABLES + 0x1000
    mov     eax, TABLES + 0x2000 + 0x27
    mov     ecx, GIBIBYTES
1:  mov     [edi], eax
    add     edi, 8
    add     eax, 0x1000
    loop    1b
    mov     edi, TABLES + 0x2000
    mov     eax, 0xe7               # present, writable, user, accessed, dirty, 2 MiB
    mov     ecx, GIBIBYTES * 512
2:  mov     [edi], eax
    add     edi, 8
    add     eax, 0x200000
    loop    2b

    mov     eax, TABLES
    mov     cr3, eax
    mov     eax, 0x20               # physical address extension
    mov     cr4, eax
    mov     ecx, 0xc0000080         # EFER: long mode
    rdmsr
    or      eax, 0x100
    wrmsr
    mov     eax, cr0
    or      eax, 0x80000001
    mov     cr0, eax
    lgdt    [descriptors_register]
    push    0x08
    push    offset long_mode
    retf

    .code64
long_mode:
    lea     rbp, [parameters]
    cmp     qword ptr [rbp + PAGES], 0
    je      halt
    mov     word ptr [TASK + 102], TASK_BYTES
    mov     byte ptr [TASK + TASK_BYTES + 0x2000], 0xff
    mov     eax, 0x28
    ltr     ax
    mov     eax, 0x18 + 3
    mov     ds, eax
    mov     es, eax
    push    0x18 + 3                # stack segment
    push    STACK
    push    0x3002                  # flags: I/O privilege level 3, interrupts off
    push    0x20 + 3                # code segment
    push    offset workload
    iretq

halt:
    call    report_ready
1:  hlt
    jmp     1b

workload:
    call    measure_clock
    call    fill
    call    report_ready
    mov     rax, [rbp + HOT]
    mov     [left], rax
    call    clock
    mov     [next_beat], rax
    mov     [next_visit], rax

again:
    call    clock
    cmp     rax, [next_beat]
    jae     beat
    cmp     qword ptr [rbp + HOT], 0
    je      idle
    mov     ebx, BATCH
    cmp     qword ptr [rbp + RATE], 0
    je      visits
    cmp     rax, [next_visit]
    jb      idle
    # Drop visits that are more than a twentieth of a second overdue: a guest that was paused does
    # not catch up.
    mov     rcx, [next_visit]
    add     rcx, [period]
    mov     rdx, rax
    sub     rdx, [twentieth]
    cmp     rcx, rdx
    cmovb   rcx, rax
    mov     [next_visit], rcx
    mov     ebx, 1
visits:
    call    visit
    dec     ebx
    jnz     visits
    jmp     again
idle:
    pause
    jmp     again

report_ready:
    lea     rsi, [text_ready]
    call    print
    mov     rax, [rbp + PAGES]
    call    print_hex
    mov     rax, [rbp + HOT]
    call    print_hex
    mov     rax, [ticks]
    call    print_hex
    jmp     end_line

beat:
    add     rax, [twentieth]
    mov     [next_beat], rax
    lea     rsi, [text_beat]
    call    print
    mov     rax, [visited]
    call    print_hex
    mov     rax, [passes]
    call    print_hex
    call    end_line
    mov     edx, SERIAL_STATUS
    in      al, dx
    test    al, SERIAL_HAS_BYTE
    jz      again
    mov     edx, SERIAL
    in      al, dx
    cmp     al, 'c'
    jne     again
    call    check_all
    jmp     again

# Finishes the pass, which makes the number of visits of all hot pages equal, and checks all
# pages.
check_all:
    mov     rax, [left]
    cmp     rax, [rbp + HOT]
    je      1f
    call    visit
    jmp     check_all
1:  xor     r12d, r12d
2:  cmp     r12, [rbp + PAGES]
    jae     3f
    xor     r9d, r9d
    cmp     r12, [rbp + HOT]
    cmovb   r9, [passes]
    call    check
    inc     r12
    jmp     2b
3:  lea     rsi, [text_checked]
    call    print
    mov     rax, [rbp + PAGES]
    call    print_hex
    mov     rax, [passes]
    call    print_hex
    jmp     end_line

# Checks the next hot page, writes to it, and checks the next of the other pages.
visit:
    mov     r12, [cursor]
    mov     r9, [passes]
    call    check
    lea     rax, [r9 + 1]
    mov     [rsi], rax
    xor     rax, r9
    xor     [rsi + 4088], rax
    inc     qword ptr [visited]

    mov     rax, [cursor]
    add     rax, [rbp + STRIDE]
    cmp     rax, [rbp + HOT]
    jb      1f
    sub     rax, [rbp + HOT]
1:  mov     [cursor], rax
    dec     qword ptr [left]
    jnz     2f
    mov     rax, [rbp + HOT]
    mov     [left], rax
    inc     qword ptr [passes]
2:
    mov     r12, [rbp + HOT]
    cmp     r12, [rbp + PAGES]
    jae     4f
    mov     rax, [cold_cursor]
    add     r12, rax
    inc     rax
    xor     r9d, r9d
    lea     rcx, [r12 + 1]
    cmp     rcx, [rbp + PAGES]
    cmovae  rax, r9
    mov     [cold_cursor], rax
    call    check
4:  ret

# Checks page r12, which has been visited r9 times. Returns its address in rsi; keeps r9 and r12.
check:
    mov     rsi, r12
    shl     rsi, 12
    add     rsi, [rbp + FIRST]
    mov     r11, [rsi]
    cmp     r11, r9
    jne     wrong_count
    xor     eax, eax
    xor     r10d, r10d
    xor     r11d, r11d
    xor     r13d, r13d
    xor     r14d, r14d
1:  xor     r10, [rsi + rax]
    xor     r11, [rsi + rax + 8]
    xor     r13, [rsi + rax + 16]
    xor     r14, [rsi + rax + 24]
    xor     r10, [rsi + rax + 32]
    xor     r11, [rsi + rax + 40]
    xor     r13, [rsi + rax + 48]
    xor     r14, [rsi + rax + 56]
    add     eax, 64
    cmp     eax, 4096
    jb      1b
    xor     r11, r10
    xor     r13, r14
    xor     r11, r13
    call    signature
    cmp     r11, r8
    jne     wrong_content
    ret

# r8 = the signature of page r12: the exclusive or of its 512 words.
signature:
    xor     r8d, r8d
    mov     rax, [rbp + CONTENT]
    test    rax, rax
    jz      1f
    cmp     rax, 2
    jne     2f
    test    r12, 1
    jz      1f
2:  lea     rax, [r12 + 1]
    movabs  r8, SIGNATURE
    imul    r8, rax
    xor     r8, [rbp + SEED]
1:  ret

fill:
    xor     r12d, r12d
1:  cmp     r12, [rbp + PAGES]
    jae     5f
    call    signature
    test    r8, r8
    jz      4f
    mov     rsi, r12
    shl     rsi, 12
    add     rsi, [rbp + FIRST]
    mov     qword ptr [rsi], 0      # firmware may have used this memory
    mov     rax, r8                 # the word
    mov     r10, r8                 # the difference from the signature
    mov     ecx, 8
2:  cmp     qword ptr [rbp + CONTENT], 3
    je      3f
    mov     rdx, rax
    shl     rdx, 13
    xor     rax, rdx
    mov     rdx, rax
    shr     rdx, 7
    xor     rax, rdx
    mov     rdx, rax
    shl     rdx, 17
    xor     rax, rdx
    jmp     6f
3:  rol     rax, 8
6:  mov     [rsi + rcx], rax
    xor     r10, rax
    add     ecx, 8
    cmp     ecx, 4088
    jb      2b
    mov     [rsi + 4088], r10
4:  inc     r12
    jmp     1b
5:  ret

wrong_count:
    mov     r8, r9
wrong_content:
    lea     rsi, [text_wrong]
    call    print
    mov     rax, r12
    call    print_hex
    mov     rax, r8
    call    print_hex
    mov     rax, r11
    call    print_hex
    call    end_line
7:  pause
    jmp     7b

# Finds the clock's ticks in a twentieth of a second: as the hypervisor states them, or with the timer
# chip. Polls the chip's status, because interrupts are off. Cloud Hypervisor has no chip, and does not
# state the ticks of every clock; rates are then approximate.
measure_clock:
    mov     eax, CPUID_HYPERVISOR
    cpuid
    sub     eax, CPUID_FREQUENCY
    cmp     eax, 0xef               # the leaves of hypervisors end at 0x400000ff
    ja      3f
    mov     eax, CPUID_FREQUENCY
    cpuid
    test    eax, eax
    jz      3f
    imul    rax, rax, 50            # kHz
    jmp     4f
3:
    mov     al, PIT_ONE_SHOT
    out     PIT_MODE, al
    mov     al, PIT_TWENTIETH & 0xff
    out     PIT_COUNTER, al
    mov     al, PIT_TWENTIETH >> 8
    out     PIT_COUNTER, al
    call    clock
    mov     r8, rax
1:  mov     al, PIT_STATUS
    out     PIT_MODE, al
    in      al, PIT_COUNTER
    mov     ah, al
    and     ah, PIT_STATUS_MODE
    cmp     ah, PIT_ONE_SHOT
    jne     5f
    test    al, 0x80
    jz      1b
    call    clock
    sub     rax, r8
    jmp     4f
5:  mov     eax, UNKNOWN_TWENTIETH
4:  mov     [twentieth], rax
    imul    rax, rax, 20
    mov     [ticks], rax
    mov     rcx, [rbp + RATE]
    test    rcx, rcx
    jz      2f
    xor     edx, edx
    div     rcx
    mov     [period], rax
2:  ret

clock:
    rdtsc
    shl     rdx, 32
    or      rax, rdx
    ret

# Prints the text at rsi, up to a zero byte.
print:
    mov     al, [rsi]
    test    al, al
    jz      1f
    call    put
    inc     rsi
    jmp     print
1:  ret

# Prints a space, and rax in hexadecimal.
print_hex:
    mov     r15, rax
    mov     al, ' '
    call    put
    mov     ecx, 64
1:  sub     ecx, 4
    jz      2f
    mov     rax, r15
    shr     rax, cl
    jz      1b
2:  mov     rax, r15
    shr     rax, cl
    and     eax, 15
    mov     al, [digits + rax]
    call    put
    sub     ecx, 4
    jns     2b
    ret

end_line:
    mov     al, '\n'
put:
    mov     ah, al
    mov     edx, SERIAL_STATUS
1:  in      al, dx
    test    al, SERIAL_TAKES_BYTE
    jz      1b
    mov     edx, SERIAL
    mov     al, ah
    out     dx, al
    ret

    .data
    .balign 16
    # The marker with which the host finds the parameters.
parameters:
    .ascii  "Dunlin rig guest"
    .skip   56

    .balign 8
descriptors:
    .quad   0
    .quad   0x00209a0000000000      # 0x08: code, 64 bits, level 0
    .quad   0x0000920000000000      # 0x10: data, level 0
    .quad   0x0000f20000000000      # 0x18: data, level 3
    .quad   0x0020fa0000000000      # 0x20: code, 64 bits, level 3
    .quad   0x0000890000002068 | (TASK & 0xffffff) << 16 # 0x28: task segment
    .quad   0
descriptors_register:
    .word   . - descriptors - 1
    .long   descriptors

    .balign 8
ticks:          .quad 0             # ticks of the clock per second
twentieth:      .quad 0             # a twentieth of a second, in ticks
period:         .quad 0             # ticks from one visit to the next
next_beat:      .quad 0
next_visit:     .quad 0
cursor:         .quad 0             # the next hot page
cold_cursor:    .quad 0             # the next of the other pages, which begin at HOT
left:           .quad 0             # remaining visits of this pass
passes:         .quad 0             # completed passes over the hot pages
visited:        .quad 0

digits:         .ascii "0123456789abcdef"
text_ready:     .asciz "ready"
text_beat:      .asciz "beat"
text_checked:   .asciz "checked"
text_wrong:     .asciz "wrong"
