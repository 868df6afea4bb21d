//! A guest that does nothing but exit to the VMM. A test of `dunlin vm` uses it to measure the cost
//! of an entry into a guest.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_linux::mapping::{Backing, allocate};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress};

use crate::kvm::{Machine, Vcpu};

/// Address of the code, at which the vCPU starts in real mode.
const START: u64 = 0x1000;
/// An endless loop around `out 0x80, al`. This instruction exits to the VMM in each pass.
const CODE: [u8; 4] = [0xe6, 0x80, 0xeb, 0xfc];

/// A machine with one vCPU, which exits to the VMM in an endless loop.
#[derive(Debug)]
pub struct Entries(Vcpu);

impl Entries {
    /// Creates the machine.
    ///
    /// # Errors
    /// `/dev/kvm` cannot be opened, or another error from the kernel.
    pub fn new() -> io::Result<Self> {
        let memory = allocate(4 << 20, Backing::Private).map_err(io::Error::other)?;
        let machine = Arc::new(Machine::new(&Kvm::new()?, Arc::new(memory))?);
        let code = machine.memory().write_slice(&CODE, GuestAddress(START));
        code.map_err(io::Error::other)?;
        let vcpu = machine.create_vcpu(0)?;
        let mut special = vcpu.get_sregs()?;
        (special.cs.base, special.cs.selector) = (0, 0);
        vcpu.set_sregs(&special)?;
        let mut registers = vcpu.get_regs()?;
        registers.rip = START;
        vcpu.set_regs(&registers)?;
        Ok(Self(vcpu))
    }

    /// The time for `count` entries into the guest.
    ///
    /// # Errors
    /// An error from KVM_RUN, or an exit that the `out` instruction has not caused.
    pub fn measure(&mut self, count: u32) -> io::Result<Duration> {
        let began = Instant::now();
        for _ in 0..count {
            match self.0.run()? {
                VcpuExit::IoOut(0x80, _) => {}
                other => return Err(io::Error::other(format!("unexpected exit: {other:?}"))),
            }
        }
        Ok(began.elapsed())
    }
}
