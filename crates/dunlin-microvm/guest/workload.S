# The guest's program. It checks every page of its memory before it writes to the page.
#
# It runs in long mode at privilege level 3 from its first instruction, because some KVMs emulate
# level 0. It takes no interrupts, makes no calls and has no stack. I/O privilege level 3 allows the
# instructions `in` and `out`, which exit to the VMM.
#
# Guest-physical memory is identity-mapped by pages of 2 MiB. They are marked accessed and dirty, so
# that the CPU never writes the page tables:
#
#     0x0001_0000   page tables, up to 66 pages
#     0x0006_0000   this program
#     0x0007_0000   parameter blocks, one page for each vCPU
#     0x0008_0000   16 pages that only the VMM writes, like a device
#     0x0040_0000   the workload's pages, up to the end of memory, except for 3 to 4 GiB
#
# A page holds 512 words of 8 bytes. Word 0 counts the passes over the page. The exclusive or of
# all words is the page's signature. It is zero if the page was zero at first; otherwise it is the
# frame number times SIGNATURE, exclusive or the seed. A visit reads the whole page, checks word 0 and
# the signature, increments word 0, and changes word 511 so that the signature stays the same.
#
# Use of the registers:
#
#     rdi          this vCPU's parameter block
#     r12          the seed of the live values
#     xmm8..xmm15  the live values, which a migration must preserve; ymm8..ymm15 with AVX
#     rbx          visits left in this batch
#     rbp, rsi     during a visit: the address of the page's set, and the page's address
#     all others   scratch

    .intel_syntax noprefix
    .code64

    # Ports.
    .set PORT_BEAT, 0x500           # in: a beat; the guest reads the number of visits to make
    .set PORT_STOPPED, 0x501        # out: the guest has found an error and writes its code
    .set PORT_POWER_OFF, 0x502      # out: the guest powers off
    .set POWER_OFF, 0xffffffff      # the answer to a beat that ends the guest

    # Offsets in the parameter block. These fields are set by the VMM.
    .set HAS_AVX, 0x00
    .set SEED, 0x08
    .set FILL_END, 0x10             # frame number of the first page that was not filled
    .set FILL, 0x18                 # 0 zero, 1 random, 2 mixed, 3 sparse
    .set SHARE, 0x20                # percentage of visits that go to set 0
    .set SET_0, 0x40
    .set SET_1, 0x80
    # These fields are counters and results of the guest.
    .set SHARE_SUM, 0x28
    .set VISITS, 0xc0
    .set LAST_TSC, 0xc8
    .set BEATS, 0xd0
    .set STOP_CODE, 0xd8
    .set STOP_FRAME, 0xe0
    .set STOP_EXPECTED, 0xe8
    .set STOP_FOUND, 0xf0

    # Offsets in a set of pages. Each page is visited once in every pass.
    .set BASE, 0x00                 # number of the set's first page, counted without the hole
    .set COUNT, 0x08                # number of pages
    .set CURSOR, 0x10               # position of the next page, relative to BASE
    .set LEFT, 0x18                 # visits left in this pass
    .set PASS, 0x20                 # completed passes
    .set MULTIPLIER, 0x28           # next = (cursor * MULTIPLIER + INCREMENT) & MASK,
    .set INCREMENT, 0x30            # repeated until it is below COUNT
    .set MASK, 0x38

    .set HOLE_FRAME, 0xc0000        # 3 GiB
    .set HOLE_FRAMES, 0x40000       # 1 GiB
    .set SIGNATURE, 0x9e3779b97f4a7c15

    .set WRONG_PASS, 1
    .set WRONG_CONTENT, 2
    .set LOST_SSE, 3
    .set LOST_AVX, 4
    .set TSC_WENT_BACK, 5

# Sets xmm0 to live value number `turn`: r12 rotated right by 8 * turn bits, and its complement.
    .macro LIVE_VALUE turn
    mov     rax, r12
    ror     rax, 8 * \turn
    movq    xmm0, rax
    not     rax
    movq    xmm1, rax
    punpcklqdq xmm0, xmm1
    .endm

# Writes a live value to a register. With AVX, the upper half is the value with its two words exchanged.
    .macro PLANT turn, low, whole
    LIVE_VALUE \turn
    movdqa  \low, xmm0
    cmp     qword ptr [rdi + HAS_AVX], 0
    je      1f
    pshufd  xmm0, xmm0, 0x4e
    vinsertf128 \whole, \whole, xmm0, 1
1:
    .endm

    .macro CHECK turn, low, whole
    LIVE_VALUE \turn
    movdqa  xmm1, \low
    pcmpeqb xmm1, xmm0
    pmovmskb eax, xmm1
    movdqa  xmm1, \low
    mov     r8d, LOST_SSE
    cmp     eax, 0xffff
    jne     lost
    cmp     qword ptr [rdi + HAS_AVX], 0
    je      1f
    pshufd  xmm0, xmm0, 0x4e
    vextractf128 xmm1, \whole, 1
    movdqa  xmm2, xmm1
    pcmpeqb xmm2, xmm0
    pmovmskb eax, xmm2
    mov     r8d, LOST_AVX
    cmp     eax, 0xffff
    jne     lost
1:
    .endm

    .macro EACH_LIVE what
    \what   0, xmm8, ymm8
    \what   1, xmm9, ymm9
    \what   2, xmm10, ymm10
    \what   3, xmm11, ymm11
    \what   4, xmm12, ymm12
    \what   5, xmm13, ymm13
    \what   6, xmm14, ymm14
    \what   7, xmm15, ymm15
    .endm

    .text
    .globl  start
start:
    EACH_LIVE PLANT

beat:
    rdtsc
    shl     rdx, 32
    or      rax, rdx
    mov     r9, [rdi + LAST_TSC]
    cmp     rax, r9
    jb      tsc_went_back
    mov     [rdi + LAST_TSC], rax
    inc     qword ptr [rdi + BEATS]
    mov     edx, PORT_BEAT
    in      eax, dx
    cmp     eax, POWER_OFF
    je      power_off
    mov     ebx, eax

    EACH_LIVE CHECK
    movabs  rax, 6364136223846793005
    imul    r12, rax
    movabs  rax, 1442695040888963407
    add     r12, rax
    EACH_LIVE PLANT

    test    rbx, rbx
    jz      beat

visit:
    # Set 0 gets SHARE visits of every hundred, evenly spread.
    lea     rbp, [rdi + SET_1]
    mov     rax, [rdi + SHARE_SUM]
    add     rax, [rdi + SHARE]
    cmp     rax, 100
    jb      1f
    sub     rax, 100
    lea     rbp, [rdi + SET_0]
1:  mov     [rdi + SHARE_SUM], rax

    mov     rsi, [rbp + BASE]
    add     rsi, [rbp + CURSOR]
    cmp     rsi, HOLE_FRAME
    jb      2f
    add     rsi, HOLE_FRAMES
2:
    # r8 = the signature of frame rsi.
    xor     r8d, r8d
    cmp     rsi, [rdi + FILL_END]
    jae     4f
    mov     r9, [rdi + FILL]
    test    r9, r9
    jz      4f
    movabs  r10, SIGNATURE
    imul    r10, rsi
    cmp     r9, 2
    jb      3f
    ja      9f
    test    r10, r10            # mixed: zero where the product's top bit is set
    js      4f
    jmp     3f
9:  mov     eax, esi            # sparse: zero except for the middle page of each 2 MiB
    and     eax, 511
    cmp     eax, 256
    jne     4f
3:  mov     r8, r10
    xor     r8, [rdi + SEED]
4:
    mov     r15, rsi
    shl     rsi, 12

    mov     r9, [rbp + PASS]
    mov     r11, [rsi]
    cmp     r11, r9
    jne     wrong_pass

    pxor    xmm0, xmm0
    pxor    xmm1, xmm1
    pxor    xmm2, xmm2
    pxor    xmm3, xmm3
    xor     eax, eax
5:  pxor    xmm0, [rsi + rax]
    pxor    xmm1, [rsi + rax + 16]
    pxor    xmm2, [rsi + rax + 32]
    pxor    xmm3, [rsi + rax + 48]
    pxor    xmm0, [rsi + rax + 64]
    pxor    xmm1, [rsi + rax + 80]
    pxor    xmm2, [rsi + rax + 96]
    pxor    xmm3, [rsi + rax + 112]
    add     eax, 128
    cmp     eax, 4096
    jb      5b
    pxor    xmm0, xmm1
    pxor    xmm2, xmm3
    pxor    xmm0, xmm2
    movdqa  xmm1, xmm0
    psrldq  xmm1, 8
    pxor    xmm0, xmm1
    movq    r11, xmm0
    cmp     r11, r8
    jne     wrong_content

    lea     rax, [r9 + 1]
    mov     [rsi], rax
    xor     rax, r9
    xor     [rsi + 4088], rax

    inc     qword ptr [rdi + VISITS]
    mov     rax, [rbp + CURSOR]
    dec     qword ptr [rbp + LEFT]
    jnz     6f
    # A pass has visited every page once. The next pass starts at the same page.
    mov     rcx, [rbp + COUNT]
    mov     [rbp + LEFT], rcx
    inc     qword ptr [rbp + PASS]
    xor     eax, eax
    jmp     7f
6:  imul    rax, [rbp + MULTIPLIER]
    add     rax, [rbp + INCREMENT]
    and     rax, [rbp + MASK]
    cmp     rax, [rbp + COUNT]
    jae     6b
7:  mov     [rbp + CURSOR], rax
    dec     ebx
    jnz     visit
    jmp     beat

# Reports an error. r8: the code. r15: the frame. r9: the expected value. r11: the actual value.
wrong_pass:
    mov     r8d, WRONG_PASS
    jmp     stop
wrong_content:
    mov     r9, r8
    mov     r8d, WRONG_CONTENT
    jmp     stop
tsc_went_back:
    mov     r11, rax
    xor     r15d, r15d
    mov     r8d, TSC_WENT_BACK
    jmp     stop
lost:
    xor     r15d, r15d
    movq    r9, xmm0
    movq    r11, xmm1
    cmp     r9, r11
    jne     stop
    psrldq  xmm0, 8             # the upper half differs
    psrldq  xmm1, 8
    movq    r9, xmm0
    movq    r11, xmm1
stop:
    mov     [rdi + STOP_CODE], r8
    mov     [rdi + STOP_FRAME], r15
    mov     [rdi + STOP_EXPECTED], r9
    mov     [rdi + STOP_FOUND], r11
8:  mov     eax, r8d
    mov     edx, PORT_STOPPED
    out     dx, eax
    jmp     8b

power_off:
    mov     edx, PORT_POWER_OFF
    out     dx, eax
    jmp     power_off
