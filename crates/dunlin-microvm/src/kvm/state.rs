//! The parts of KVM's state, and the ioctls that transfer these parts as plain bytes.

use std::io;
use std::os::fd::RawFd;

use kvm_bindings as kb;

/// The ioctls that read and set a part of the state, and the number of bytes that each of them
/// transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) get: libc::c_ulong,
    pub(super) set: libc::c_ulong,
    pub(super) bytes: usize,
}

/// A part of a vCPU's state, as the structure that KVM reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VcpuState(pub(super) Interface);

impl VcpuState {
    pub(crate) const REGISTERS: Self = Self(both::<kb::kvm_regs>(0x81, 0x82));
    pub(crate) const SPECIAL_REGISTERS: Self = Self(both::<kb::kvm_sregs>(0x83, 0x84));
    /// `struct kvm_xsave`: the vCPU's x87, SSE and AVX registers, and its other XSAVE components.
    pub(crate) const XSAVE: Self = Self(of_bytes(XSAVE_BYTES, 0xa4, 0xa5));
    pub(crate) const XCRS: Self = Self(both::<kb::kvm_xcrs>(0xa6, 0xa7));
    pub(crate) const LAPIC: Self = Self(both::<kb::kvm_lapic_state>(0x8e, 0x8f));
    pub(crate) const DEBUG_REGISTERS: Self = Self(both::<kb::kvm_debugregs>(0xa1, 0xa2));
    pub(crate) const EVENTS: Self = Self(both::<kb::kvm_vcpu_events>(0x9f, 0xa0));
    pub(crate) const MP_STATE: Self = Self(both::<kb::kvm_mp_state>(0x98, 0x99));
}

/// A part of the machine's state, as the structure that KVM reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MachineState {
    pub(super) interface: Interface,
    /// The number of the interrupt chip, which is the first field of its structure. `None` for
    /// other parts.
    pub(super) chip: Option<u32>,
}

impl MachineState {
    pub(crate) const PIC_MASTER: Self = Self::chip(kb::KVM_IRQCHIP_PIC_MASTER);
    pub(crate) const PIC_SLAVE: Self = Self::chip(kb::KVM_IRQCHIP_PIC_SLAVE);
    pub(crate) const IOAPIC: Self = Self::chip(kb::KVM_IRQCHIP_IOAPIC);
    pub(crate) const PIT: Self = Self::single(both::<kb::kvm_pit_state2>(0x9f, 0xa0));
    pub(crate) const CLOCK: Self = Self::single(both::<kb::kvm_clock_data>(0x7c, 0x7b));

    /// `struct kvm_irqchip` of one of the interrupt chips.
    const fn chip(chip: u32) -> Self {
        let bytes = size_of::<kb::kvm_irqchip>();
        Self {
            interface: Interface {
                get: number(READ | WRITE, 0x62, bytes),
                // The kernel declares this ioctl with _IOR, although it sets the state.
                set: number(READ, 0x63, bytes),
                bytes,
            },
            chip: Some(chip),
        }
    }

    const fn single(interface: Interface) -> Self {
        Self {
            interface,
            chip: None,
        }
    }
}

/// Size of `struct kvm_xsave` in bytes, before Linux 5.17. From Linux 5.17 on, the structure has at
/// least this size.
pub(super) const XSAVE_BYTES: usize = 4096;

const READ: u32 = 2;
pub(super) const WRITE: u32 = 1;
pub(super) const KVM_GET_XSAVE2: libc::c_ulong = number(READ, 0xcf, XSAVE_BYTES);

/// Returns the number of an ioctl, computed like `_IOC` of asm-generic/ioctl.h.
pub(super) const fn number(direction: u32, ioctl: u32, bytes: usize) -> libc::c_ulong {
    ((direction << 30) | ((bytes as u32) << 16) | (kb::KVMIO << 8) | ioctl) as libc::c_ulong
}

const fn both<T>(get: u32, set: u32) -> Interface {
    of_bytes(size_of::<T>(), get, set)
}

const fn of_bytes(bytes: usize, get: u32, set: u32) -> Interface {
    Interface {
        get: number(READ, get, bytes),
        set: number(WRITE, set, bytes),
        bytes,
    }
}

/// Calls an ioctl with a buffer that starts with `given`. Returns the buffer's content after the
/// call. The ioctl transfers at most `bytes` bytes. The buffer has the alignment of KVM's most
/// strictly aligned structure.
pub(super) fn exchange(
    fd: RawFd,
    ioctl: libc::c_ulong,
    given: &[u8],
    bytes: usize,
) -> io::Result<Vec<u8>> {
    let mut words = vec![0_u64; bytes.div_ceil(8)];
    for (word, chunk) in words.iter_mut().zip(given.chunks(8)) {
        let mut whole = [0; 8];
        whole[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(whole);
    }
    // SAFETY: `fd` is a live KVM descriptor of the kind that this ioctl applies to. The kernel
    // transfers at most the size of the ioctl's structure. All callers pass that size as `bytes`
    // (for XSAVE, the size that KVM_CAP_XSAVE2 returned for this VM), and the buffer is at least
    // that long. Every bit pattern is valid in the words that the kernel writes.
    let code = unsafe { libc::ioctl(fd, ioctl, words.as_mut_ptr()) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut moved: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    moved.truncate(bytes);
    Ok(moved)
}

pub(super) fn check_length(bytes: &[u8], length: usize) -> io::Result<()> {
    if bytes.len() == length {
        return Ok(());
    }
    Err(invalid(format!(
        "state of {} bytes; KVM expects {length} bytes",
        bytes.len()
    )))
}

pub(super) fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
