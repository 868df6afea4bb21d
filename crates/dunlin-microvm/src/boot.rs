//! The state of a guest before its first instruction: page tables, program, parameter blocks and
//! registers.

use std::io;

use crate::kvm::Vcpu;
use dunlin_linux::mapping::{HUGE_PAGE_BYTES, PAGE_BYTES, TrackedMemory, layout as regions};
use kvm_bindings::{kvm_mp_state, kvm_segment, kvm_xcr};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::config::Config;
use crate::layout::{self, CODE, TABLES, block, block_start};

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/workload.bin"));

/// The flags of a page table entry: present, writable, accessible to privilege level 3, and marked
/// as accessed.
const TABLE: u64 = 0b10_0111;
/// The flags of an entry for a page of 2 MiB: the flags of [`TABLE`], page size and dirty.
const LARGE_PAGE: u64 = TABLE | 0b1100_0000;

/// Bytes of memory that one page directory maps.
const DIRECTORY_BYTES: u64 = 1 << 30;

/// Writes page tables, program and parameter blocks. A destination does not call this function,
/// because it receives all of them with the guest's memory.
pub(crate) fn write_memory(
    memory: &TrackedMemory,
    config: &Config,
    has_avx: bool,
) -> Result<(), GuestMemoryError> {
    let word = |address: u64, value: u64| memory.write_obj(value, GuestAddress(address));
    let pointers = TABLES + PAGE_BYTES;
    word(TABLES, pointers | TABLE)?;
    for (start, bytes) in regions(config.memory_bytes) {
        for address in (start..start + bytes).step_by(HUGE_PAGE_BYTES as usize) {
            let number = address / DIRECTORY_BYTES;
            let directory = pointers + PAGE_BYTES + number * PAGE_BYTES;
            word(pointers + number * 8, directory | TABLE)?;
            let entry = address % DIRECTORY_BYTES / HUGE_PAGE_BYTES;
            word(directory + entry * 8, address | LARGE_PAGE)?;
        }
    }
    memory.write_slice(PROGRAM, GuestAddress(CODE))?;
    for vcpu in 0..config.vcpus {
        let start = block_start(vcpu);
        let (sets, share) = layout::page_sets(config, vcpu);
        word(start + block::HAS_AVX, has_avx.into())?;
        word(start + block::SEED, config.seed)?;
        word(
            start + block::FILL_END,
            layout::frame(layout::fill_end(config)),
        )?;
        word(start + block::FILL, config.fill as u64)?;
        word(start + block::SHARE, share)?;
        for (set, at) in sets.iter().zip([block::SET_0, block::SET_1]) {
            for (index, value) in (0..).zip(set.words()) {
                word(start + at + 8 * index, value)?;
            }
        }
    }
    Ok(())
}

/// Puts a vCPU into long mode at privilege level 3, at the program's first instruction.
pub(crate) fn set_registers(vcpu: &Vcpu, index: u8, seed: u64, has_avx: bool) -> io::Result<()> {
    // The bits of CR0, CR4 and EFER (Intel SDM volume 3, sections 2.5 and 2.2.1).
    const CR0_PROTECTION: u64 = 1;
    const CR0_MONITOR: u64 = 1 << 1;
    const CR0_EXTENSION_TYPE: u64 = 1 << 4;
    const CR0_NUMERIC_ERROR: u64 = 1 << 5;
    const CR0_PAGING: u64 = 1 << 31;
    const CR4_PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
    const CR4_FXSAVE: u64 = 1 << 9;
    const CR4_SSE_EXCEPTIONS: u64 = 1 << 10;
    const CR4_XSAVE: u64 = 1 << 18;
    const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;
    /// Bit 1, which is always set, and I/O privilege level 3, with which the guest may access
    /// ports.
    const RFLAGS: u64 = 1 << 1 | 3 << 12;
    const XCR0_X87_SSE_AVX: u64 = 0b111;

    let mut special = vcpu.get_sregs()?;
    special.cr0 =
        CR0_PROTECTION | CR0_MONITOR | CR0_EXTENSION_TYPE | CR0_NUMERIC_ERROR | CR0_PAGING;
    special.cr3 = TABLES;
    special.cr4 = CR4_PHYSICAL_ADDRESS_EXTENSION | CR4_FXSAVE | CR4_SSE_EXCEPTIONS;
    if has_avx {
        special.cr4 |= CR4_XSAVE;
    }
    special.efer = EFER_LONG_MODE;
    let code = kvm_segment {
        limit: u32::MAX,
        selector: 0x33,
        type_: 0b1011,
        present: 1,
        dpl: 3,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: 0x2b,
        type_: 0b0011,
        l: 0,
        db: 1,
        ..code
    };
    special.cs = code;
    for segment in [
        &mut special.ds,
        &mut special.es,
        &mut special.fs,
        &mut special.gs,
        &mut special.ss,
    ] {
        *segment = data;
    }
    vcpu.set_sregs(&special)?;

    if has_avx {
        let mut controls = vcpu.get_xcrs()?;
        controls.nr_xcrs = 1;
        controls.xcrs[0] = kvm_xcr {
            xcr: 0,
            value: XCR0_X87_SSE_AVX,
            ..Default::default()
        };
        vcpu.set_xcrs(&controls)?;
    }

    let mut registers = vcpu.get_regs()?;
    registers.rip = CODE;
    registers.rflags = RFLAGS;
    registers.rdi = block_start(index);
    registers.r12 = seed ^ (u64::from(index) << 56);
    vcpu.set_regs(&registers)?;

    // By default, all vCPUs except the first wait for a start-up interrupt. Here, they run
    // immediately.
    vcpu.set_mp_state(kvm_mp_state {
        mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE,
    })?;
    Ok(())
}
