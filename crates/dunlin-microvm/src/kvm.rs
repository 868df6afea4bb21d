//! Memory-safe wrappers of KVM. A [`Machine`] owns the guest memory that KVM uses, and a [`Vcpu`]
//! owns its machine, so no guest can write to unmapped memory.
//!
//! State is transferred as the bytes of the kernel's own structures ([`VcpuState`],
//! [`MachineState`]), because they are KVM's stable interface. A structure of another length is
//! rejected, except a shorter XSAVE area.

use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvm_bindings as kb;
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use dunlin_linux::mapping::TrackedMemory;

pub(crate) mod kick;
mod state;

use state::{
    Interface, KVM_GET_XSAVE2, WRITE, XSAVE_BYTES, check_length, exchange, invalid, number,
};
pub(crate) use state::{MachineState, VcpuState};

/// A virtual machine, with an interrupt controller and a timer in the kernel.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Declared before `memory`, so that the descriptor is closed before the memory is freed.
    vm: VmFd,
    memory: Arc<TrackedMemory>,
    xsave_bytes: usize,
}

impl Machine {
    /// Creates a machine with `memory`. Each region of the memory becomes one slot, numbered by its
    /// position. Dirty logging is off at first.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn new(kvm: &Kvm, memory: Arc<TrackedMemory>) -> io::Result<Self> {
        // On Intel CPUs without unrestricted guest mode, KVM needs three pages for a TSS and one
        // page for an identity map, outside guest memory. These are the usual addresses, in the
        // hole below 4 GiB.
        const TSS: usize = 0xfffb_d000;
        const IDENTITY_MAP: u64 = 0xfffb_c000;
        let vm = kvm.create_vm()?;
        vm.set_identity_map_address(IDENTITY_MAP)?;
        vm.set_tss_address(TSS)?;
        vm.create_irq_chip()?;
        vm.create_pit2(kb::kvm_pit_config {
            flags: kb::KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        })?;
        let xsave_bytes = usize::try_from(vm.check_extension_int(Cap::Xsave2))
            .unwrap_or(0)
            .max(XSAVE_BYTES);
        let machine = Self {
            vm,
            memory,
            xsave_bytes,
        };
        machine.set_dirty_logging(false)?;
        Ok(machine)
    }

    /// The guest's memory.
    pub(crate) fn memory(&self) -> &Arc<TrackedMemory> {
        &self.memory
    }

    /// Turns the log of the guest's writes on or off for every slot. A log that was off starts
    /// empty.
    ///
    /// # Errors
    /// An error from KVM_SET_USER_MEMORY_REGION. The slots before the failing slot have been
    /// changed.
    pub(crate) fn set_dirty_logging(&self, on: bool) -> io::Result<()> {
        for (slot, region) in self.memory.iter().enumerate() {
            let description = kb::kvm_userspace_memory_region {
                slot: slot as u32,
                flags: if on { kb::KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: address and length are those of a live mapping that this process owns. The
            // mapping lives as long as `memory`, which outlives the VM's descriptor in this
            // structure and each vCPU's descriptor in `Vcpu`. All access by the VMM goes through
            // vm-memory's volatile slices.
            unsafe { self.vm.set_user_memory_region(description) }?;
        }
        Ok(())
    }

    /// Reads and clears the log of one region's slot. The log has one bit per 4 KiB page, least
    /// significant bit first, in 64-bit words.
    ///
    /// # Errors
    /// An error from KVM_GET_DIRTY_LOG (ENOENT if logging is off), or `NotFound` if the region does
    /// not exist.
    pub(crate) fn take_dirty_log(&self, region: usize) -> io::Result<Vec<u64>> {
        let bytes = self
            .memory
            .iter()
            .nth(region)
            .ok_or(io::ErrorKind::NotFound)?
            .len();
        Ok(self.vm.get_dirty_log(region as u32, bytes as usize)?)
    }

    /// Adds a vCPU.
    ///
    /// # Errors
    /// An error from KVM_CREATE_VCPU.
    pub(crate) fn create_vcpu(self: &Arc<Self>, id: u64) -> io::Result<Vcpu> {
        Ok(Vcpu {
            fd: self.vm.create_vcpu(id)?,
            machine: Arc::clone(self),
        })
    }

    /// Whether KVM can run a guest at a TSC rate that differs from the host's.
    pub(crate) fn can_scale_tsc(&self) -> bool {
        self.vm.check_extension(Cap::TscControl)
    }

    /// Reads one part of the machine's state.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn read_state(&self, state: MachineState) -> io::Result<Vec<u8>> {
        let Interface { get, bytes, .. } = state.interface;
        let chip = state.chip.map(u32::to_ne_bytes).unwrap_or_default();
        exchange(self.vm.as_raw_fd(), get, &chip, bytes)
    }

    /// Sets one part of the machine's state.
    ///
    /// # Errors
    /// InvalidData for a wrong length or a wrong interrupt chip, otherwise the kernel's error.
    pub(crate) fn write_state(&self, state: MachineState, bytes: &[u8]) -> io::Result<()> {
        let Interface {
            set, bytes: length, ..
        } = state.interface;
        check_length(bytes, length)?;
        if let Some(chip) = state.chip
            && bytes[..4] != chip.to_ne_bytes()
        {
            return Err(invalid("state of a different interrupt chip".into()));
        }
        exchange(self.vm.as_raw_fd(), set, bytes, length).map(drop)
    }
}

/// A vCPU. It keeps its machine alive and therefore the guest's memory.
///
/// It dereferences to the vCPU's descriptor, for everything that only reads or sets registers. It
/// deliberately does not implement `DerefMut`: a descriptor moved to another `Vcpu` with
/// `mem::swap` could outlive the memory of its guest.
#[derive(Debug)]
pub(crate) struct Vcpu {
    /// Declared before `machine`, so that the descriptor is closed before the machine.
    fd: VcpuFd,
    machine: Arc<Machine>,
}

impl Deref for Vcpu {
    type Target = VcpuFd;

    fn deref(&self) -> &VcpuFd {
        &self.fd
    }
}

impl Vcpu {
    /// The machine that this vCPU belongs to.
    pub(crate) fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    /// Runs the guest until it needs the VMM.
    ///
    /// # Errors
    /// `Interrupted` after a kick ([`crate::kvm::kick`]) or another signal; otherwise an error from
    /// KVM_RUN.
    pub(crate) fn run(&mut self) -> io::Result<VcpuExit<'_>> {
        Ok(self.fd.run()?)
    }

    /// Lets KVM finish the port access of the last exit, without running the guest.
    ///
    /// Registers are consistent only after this call (section 5 of the kernel's KVM API,
    /// KVM_EXIT_IO).
    ///
    /// # Errors
    /// An error from KVM_RUN other than EINTR. It is also an error if KVM ran the guest.
    pub(crate) fn complete_exit(&mut self) -> io::Result<()> {
        self.fd.set_kvm_immediate_exit(1);
        let result = match self.fd.run() {
            Ok(_) => Err(io::Error::other("KVM ran the guest despite immediate_exit")),
            Err(error) if error.errno() == libc::EINTR => Ok(()),
            Err(error) => Err(error.into()),
        };
        self.fd.set_kvm_immediate_exit(0);
        result
    }

    /// Reads one part of the vCPU's state.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn read_state(&self, state: VcpuState) -> io::Result<Vec<u8>> {
        let Interface {
            mut get, mut bytes, ..
        } = state.0;
        if state == VcpuState::XSAVE && self.machine.xsave_bytes > XSAVE_BYTES {
            get = KVM_GET_XSAVE2;
            bytes = self.machine.xsave_bytes;
        }
        exchange(self.fd.as_raw_fd(), get, &[], bytes)
    }

    /// Sets one part of the vCPU's state.
    ///
    /// The XSAVE area may be shorter than this host's. The components of an XSAVE area are at fixed
    /// offsets. Components after the end of the area are in their initial state.
    ///
    /// # Errors
    /// InvalidData for a wrong length, otherwise the kernel's error.
    pub(crate) fn write_state(&self, state: VcpuState, bytes: &[u8]) -> io::Result<()> {
        let Interface {
            set,
            bytes: mut length,
            ..
        } = state.0;
        if state == VcpuState::XSAVE {
            length = self.machine.xsave_bytes;
            if bytes.len() < XSAVE_BYTES || bytes.len() > length {
                return Err(invalid(format!(
                    "XSAVE area of {} bytes out of range ({XSAVE_BYTES}–{length})",
                    bytes.len()
                )));
            }
        } else {
            check_length(bytes, length)?;
        }
        exchange(self.fd.as_raw_fd(), set, bytes, length).map(drop)
    }

    /// Returns the offset of the guest's TSC from the host's, modulo 2^64, or `None` if the kernel
    /// lacks this attribute (before Linux 5.16).
    ///
    /// # Errors
    /// An error from KVM_GET_DEVICE_ATTR.
    pub(crate) fn tsc_offset(&self) -> io::Result<Option<u64>> {
        let mut offset = 0u64;
        let attribute = tsc_offset_attribute(&raw mut offset);
        match device_attribute(&self.fd, KVM_GET_DEVICE_ATTR, &attribute) {
            Ok(()) => Ok(Some(offset)),
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the offset of the guest's TSC from the host's, modulo 2^64.
    ///
    /// # Errors
    /// `Unsupported` if KVM accepts the offset but does not keep it. This happens on a KVM without
    /// hardware virtualisation, where guests read the host's counter. Otherwise an error from
    /// KVM_SET_DEVICE_ATTR.
    pub(crate) fn set_tsc_offset(&self, offset: u64) -> io::Result<()> {
        let mut value = offset;
        let attribute = tsc_offset_attribute(&raw mut value);
        device_attribute(&self.fd, KVM_SET_DEVICE_ATTR, &attribute)?;
        if self.tsc_offset()? != Some(offset) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(())
    }
}

const KVM_SET_DEVICE_ATTR: libc::c_ulong = number(WRITE, 0xe1, size_of::<kb::kvm_device_attr>());
const KVM_GET_DEVICE_ATTR: libc::c_ulong = number(WRITE, 0xe2, size_of::<kb::kvm_device_attr>());

fn tsc_offset_attribute(value: *mut u64) -> kb::kvm_device_attr {
    kb::kvm_device_attr {
        group: kb::KVM_VCPU_TSC_CTRL,
        attr: u64::from(kb::KVM_VCPU_TSC_OFFSET),
        addr: value as u64,
        flags: 0,
    }
}

fn device_attribute(
    fd: &VcpuFd,
    ioctl: libc::c_ulong,
    attribute: &kb::kvm_device_attr,
) -> io::Result<()> {
    // SAFETY: `attribute` is a live structure of the size that the ioctl number contains. It comes
    // only from `tsc_offset_attribute`, with the address of a live u64, which has the size of
    // this attribute.
    let code = unsafe { libc::ioctl(fd.as_raw_fd(), ioctl, std::ptr::from_ref(attribute)) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dunlin_linux::mapping::{Backing, allocate};
    use std::time::Instant;

    /// Returns a machine, or `None` without KVM. In CI, it panics without KVM.
    fn machine() -> Option<Arc<Machine>> {
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => {
                panic!("CI must have /dev/kvm: {error}")
            }
            Err(error) => {
                println!("skipped, no /dev/kvm: {error}");
                return None;
            }
        };
        let memory = Arc::new(allocate(4 << 20, Backing::Private).unwrap());
        Some(Arc::new(Machine::new(&kvm, memory).unwrap()))
    }

    #[test]
    fn every_part_of_the_state_can_be_written_back() {
        let Some(machine) = machine() else { return };
        let vcpu = machine.create_vcpu(0).unwrap();
        for state in [
            VcpuState::REGISTERS,
            VcpuState::SPECIAL_REGISTERS,
            VcpuState::XSAVE,
            VcpuState::XCRS,
            VcpuState::LAPIC,
            VcpuState::DEBUG_REGISTERS,
            VcpuState::EVENTS,
            VcpuState::MP_STATE,
        ] {
            let bytes = match vcpu.read_state(state) {
                Ok(bytes) => bytes,
                // A CPU without XSAVE has no XCR0.
                Err(error) if state == VcpuState::XCRS => {
                    println!("no XCRs: {error}");
                    continue;
                }
                Err(error) => panic!("{state:?}: {error}"),
            };
            vcpu.write_state(state, &bytes).unwrap();
        }
        for state in [
            MachineState::PIC_MASTER,
            MachineState::PIC_SLAVE,
            MachineState::IOAPIC,
            MachineState::PIT,
        ] {
            let bytes = machine.read_state(state).unwrap();
            machine.write_state(state, &bytes).unwrap();
        }
        assert!(!machine.read_state(MachineState::CLOCK).unwrap().is_empty());
    }

    #[test]
    fn registers_read_back_as_they_were_set() {
        let Some(machine) = machine() else { return };
        let vcpu = machine.create_vcpu(0).unwrap();
        let mut registers = vcpu.get_regs().unwrap();
        registers.rax = 0x1122_3344_5566_7788;
        vcpu.set_regs(&registers).unwrap();
        let bytes = vcpu.read_state(VcpuState::REGISTERS).unwrap();
        assert_eq!(bytes.len(), 144);
        assert_eq!(bytes[..8], registers.rax.to_le_bytes());
    }

    #[test]
    fn i7_state_of_a_wrong_length_is_rejected() {
        let Some(machine) = machine() else { return };
        let vcpu = machine.create_vcpu(0).unwrap();
        for length in [0, 143, 145, 1 << 20] {
            let error = vcpu
                .write_state(VcpuState::REGISTERS, &vec![0; length])
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            let error = vcpu
                .write_state(VcpuState::XSAVE, &vec![0; length])
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            let error = machine
                .write_state(MachineState::PIT, &vec![0; length])
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let other = machine.read_state(MachineState::PIC_SLAVE).unwrap();
        let error = machine
            .write_state(MachineState::PIC_MASTER, &other)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn the_log_can_be_read_only_while_it_is_on() {
        let Some(machine) = machine() else { return };
        assert!(machine.take_dirty_log(0).is_err());
        machine.set_dirty_logging(true).unwrap();
        assert_eq!(machine.take_dirty_log(0).unwrap(), vec![0; 16]);
        assert!(machine.take_dirty_log(1).is_err());
        machine.set_dirty_logging(false).unwrap();
        assert!(machine.take_dirty_log(0).is_err());
    }

    #[test]
    fn the_guest_tsc_keeps_its_offset() {
        let Some(machine) = machine() else { return };
        let vcpu = machine.create_vcpu(0).unwrap();
        let Some(offset) = vcpu.tsc_offset().unwrap() else {
            println!("skipped, no TSC offset attribute");
            return;
        };
        let later = offset.wrapping_add(1 << 40);
        match vcpu.set_tsc_offset(later) {
            Ok(()) => assert_eq!(vcpu.tsc_offset().unwrap(), Some(later)),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::Unsupported);
                assert_ne!(vcpu.tsc_offset().unwrap(), Some(later));
            }
        }
    }

    #[test]
    fn a_kick_before_the_run_is_not_lost() {
        let Some(machine) = machine() else { return };
        let mut vcpu = machine.create_vcpu(0).unwrap();
        // Writes an endless loop at 0x1000, where the vCPU starts in real mode.
        vm_memory::Bytes::write_slice(
            &**machine.memory(),
            &[0xeb, 0xfe],
            vm_memory::GuestAddress(0x1000),
        )
        .unwrap();
        let mut special = vcpu.get_sregs().unwrap();
        special.cs.base = 0;
        special.cs.selector = 0;
        vcpu.set_sregs(&special).unwrap();
        let mut registers = vcpu.get_regs().unwrap();
        registers.rip = 0x1000;
        vcpu.set_regs(&registers).unwrap();

        let kick = crate::kvm::kick::Kick::default();
        let attached = kick.attach(&vcpu).unwrap();
        for _ in 0..2 {
            kick.kick();
            kick.kick();
            assert_eq!(vcpu.run().unwrap_err().kind(), io::ErrorKind::Interrupted);
            attached.take();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| kick.kick());
            assert_eq!(vcpu.run().unwrap_err().kind(), io::ErrorKind::Interrupted);
        });
        drop(attached);
        kick.kick();
    }

    /// Measures what one fetch of KVM's dirty log costs if the memory has 1 TiB and no page of it
    /// is dirty: the kernel's search of a bitmap of 32 MiB, the copy of the bitmap, and the count
    /// of its bits.
    ///
    /// `cargo test --release -p dunlin-microvm -- --ignored --nocapture dirty_log_of_1_tib`
    #[test]
    #[ignore = "a measurement, which needs a quiet machine"]
    fn the_cost_of_a_dirty_log_of_1_tib() {
        const ROUNDS: usize = 15;
        let kvm = Kvm::new().unwrap();
        let memory = Arc::new(allocate(1 << 40, Backing::Private).unwrap());
        let machine = Machine::new(&kvm, memory).unwrap();
        machine.set_dirty_logging(true).unwrap();
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            let began = Instant::now();
            let words: Vec<_> = (0..machine.memory().num_regions())
                .map(|region| machine.take_dirty_log(region).unwrap())
                .collect();
            times[0].push(began.elapsed());
            let began = Instant::now();
            let dirty: u32 = words.iter().flatten().map(|word| word.count_ones()).sum();
            times[1].push(began.elapsed());
            assert_eq!(dirty, 0);
        }
        for (what, mut times) in ["fetch", "count"].into_iter().zip(times) {
            times.sort_unstable();
            let [least, median, most] = [0, ROUNDS / 2, ROUNDS - 1].map(|at| times[at]);
            println!("{what}: {median:?} ({least:?} to {most:?})");
        }
    }
}
