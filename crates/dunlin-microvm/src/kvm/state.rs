//! The pieces of KVM's state, and the ioctls that move them as plain bytes.

use std::io;
use std::os::fd::RawFd;

use kvm_bindings as kb;

/// A piece of a vCPU's state, as the structure that KVM reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VcpuState {
    /// `struct kvm_regs`.
    Registers,
    /// `struct kvm_sregs`.
    SpecialRegisters,
    /// `struct kvm_xsave`: x87, SSE, AVX and what else the host has.
    Xsave,
    /// `struct kvm_xcrs`.
    Xcrs,
    /// `struct kvm_lapic_state`.
    Lapic,
    /// `struct kvm_debugregs`.
    DebugRegisters,
    /// `struct kvm_vcpu_events`.
    Events,
    /// `struct kvm_mp_state`.
    MpState,
}

impl VcpuState {
    /// The ioctl that reads, the one that sets, and the bytes both move.
    pub(super) fn interface(self) -> (libc::c_ulong, libc::c_ulong, usize) {
        match self {
            Self::Registers => both::<kb::kvm_regs>(0x81, 0x82),
            Self::SpecialRegisters => both::<kb::kvm_sregs>(0x83, 0x84),
            Self::Xsave => (
                number(READ, 0xa4, XSAVE_BYTES),
                number(WRITE, 0xa5, XSAVE_BYTES),
                XSAVE_BYTES,
            ),
            Self::Xcrs => both::<kb::kvm_xcrs>(0xa6, 0xa7),
            Self::Lapic => both::<kb::kvm_lapic_state>(0x8e, 0x8f),
            Self::DebugRegisters => both::<kb::kvm_debugregs>(0xa1, 0xa2),
            Self::Events => both::<kb::kvm_vcpu_events>(0x9f, 0xa0),
            Self::MpState => both::<kb::kvm_mp_state>(0x98, 0x99),
        }
    }
}

/// A piece of the machine's state, as the structure that KVM reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MachineState {
    /// `struct kvm_irqchip` of the first 8259.
    PicMaster,
    /// `struct kvm_irqchip` of the second 8259.
    PicSlave,
    /// `struct kvm_irqchip` of the IOAPIC.
    Ioapic,
    /// `struct kvm_pit_state2`.
    Pit,
    /// `struct kvm_clock_data`.
    Clock,
}

impl MachineState {
    pub(super) fn interface(self) -> (libc::c_ulong, libc::c_ulong, usize) {
        let chip_bytes = size_of::<kb::kvm_irqchip>();
        match self {
            Self::PicMaster | Self::PicSlave | Self::Ioapic => (
                number(READ | WRITE, 0x62, chip_bytes),
                // Declared with _IOR in the kernel, though it writes.
                number(READ, 0x63, chip_bytes),
                chip_bytes,
            ),
            Self::Pit => both::<kb::kvm_pit_state2>(0x9f, 0xa0),
            Self::Clock => {
                let bytes = size_of::<kb::kvm_clock_data>();
                (number(READ, 0x7c, bytes), number(WRITE, 0x7b, bytes), bytes)
            }
        }
    }

    pub(super) fn chip(self) -> Option<u32> {
        match self {
            Self::PicMaster => Some(kb::KVM_IRQCHIP_PIC_MASTER),
            Self::PicSlave => Some(kb::KVM_IRQCHIP_PIC_SLAVE),
            Self::Ioapic => Some(kb::KVM_IRQCHIP_IOAPIC),
            Self::Pit | Self::Clock => None,
        }
    }
}

/// Bytes of `struct kvm_xsave` before Linux 5.17, and the least since.
pub(super) const XSAVE_BYTES: usize = 4096;

const READ: u32 = 2;
pub(super) const WRITE: u32 = 1;
pub(super) const KVM_GET_XSAVE2: libc::c_ulong = number(READ, 0xcf, XSAVE_BYTES);

/// An ioctl's number, as `_IOC` of asm-generic/ioctl.h makes it.
pub(super) const fn number(direction: u32, ioctl: u32, bytes: usize) -> libc::c_ulong {
    ((direction << 30) | ((bytes as u32) << 16) | (kb::KVMIO << 8) | ioctl) as libc::c_ulong
}

const fn both<T>(get: u32, set: u32) -> (libc::c_ulong, libc::c_ulong, usize) {
    let bytes = size_of::<T>();
    (number(READ, get, bytes), number(WRITE, set, bytes), bytes)
}

/// Room for one of KVM's structures, aligned as the strictest of them.
pub(super) struct Buffer(Vec<u64>);

impl Buffer {
    pub(super) fn zeroed(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(8)])
    }

    pub(super) fn fill(&mut self, bytes: &[u8]) {
        for (word, chunk) in self.0.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = word.to_ne_bytes();
            whole[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(whole);
        }
    }

    pub(super) fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(length);
        bytes
    }

    /// Hands the buffer to an ioctl that moves at most `bytes`.
    pub(super) fn exchange(
        &mut self,
        fd: RawFd,
        ioctl: libc::c_ulong,
        bytes: usize,
    ) -> io::Result<()> {
        assert!(self.0.len() * 8 >= bytes, "the buffer holds the structure");
        // SAFETY: the descriptor is a live KVM descriptor of the kind the number is for. The kernel
        // moves no more than the structure's size, which both callers give as `bytes` and which
        // lies inside the buffer (for XSAVE the size that KVM_CAP_XSAVE2 gave for this VM); every
        // bit pattern is valid in the words it writes.
        let code = unsafe { libc::ioctl(fd, ioctl, self.0.as_mut_ptr()) };
        if code < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

pub(super) fn check_length(bytes: &[u8], length: usize) -> io::Result<()> {
    if bytes.len() == length {
        return Ok(());
    }
    Err(invalid(format!(
        "{} bytes where KVM takes {length}",
        bytes.len()
    )))
}

pub(super) fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
