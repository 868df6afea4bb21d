//! A vCPU's thread: runs the guest, answers its beats (regular messages to the VMM), and parks on
//! request.

use dunlin::lane::sync::lock;
use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use crate::kvm::Vcpu;
use crate::kvm::kick::{Attached, Kick};
use kvm_ioctls::VcpuExit;
use vm_memory::{Bytes, GuestAddress};

use crate::common::Common;
use crate::control::{Stop, StopCode, VmState};
use crate::layout::{POWER_OFF_ANSWER, block, block_start, port};
use crate::pace::Pacer;

/// One vCPU, shared by its thread and the rest of the machine. The lock protects the registers. The
/// vCPU's thread holds the lock while the guest runs.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) kick: Kick,
    vcpu: Mutex<Vcpu>,
}

impl Slot {
    pub(crate) fn new(vcpu: Vcpu) -> Self {
        Self {
            kick: Kick::default(),
            vcpu: Mutex::new(vcpu),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vcpu> {
        lock(&self.vcpu)
    }
}

/// State shared by the vCPU threads of a machine.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) common: Common,
    pub(crate) slots: Vec<Slot>,
}

impl Shared {
    /// Makes every vCPU leave the guest.
    pub(crate) fn kick_all(&self) {
        self.slots.iter().for_each(|slot| slot.kick.kick());
    }

    /// Returns the word at offset `word` of a vCPU's parameter block.
    pub(crate) fn counter(&self, vcpu: u8, word: u64) -> u64 {
        self.common
            .memory
            .read_obj(GuestAddress(block_start(vcpu) + word))
            .expect("parameter blocks lie within the smallest memory")
    }

    /// Returns the sum over all vCPUs of the counter at offset `word` of the parameter block.
    pub(crate) fn total(&self, word: u64) -> u64 {
        (0..self.slots.len() as u8)
            .map(|vcpu| self.counter(vcpu, word))
            .fold(0, u64::wrapping_add)
    }

    fn end(&self, state: VmState) {
        self.common.control.end(state, || self.kick_all());
    }

    fn stop(&self, vcpu: u8) -> VmState {
        let word = |index: u64| self.counter(vcpu, block::STOP + 8 * index);
        VmState::Stopped(Stop {
            vcpu,
            code: StopCode::from(word(0)),
            frame: word(1),
            expected: word(2),
            found: word(3),
        })
    }
}

/// The main function of a vCPU's thread.
pub(crate) fn thread(shared: &Shared, index: u8) {
    let slot = &shared.slots[usize::from(index)];
    let attached = slot.kick.attach(&slot.lock());
    let mut pacer = Pacer::new(shared.common.pace, Instant::now());
    while shared.common.control.wait_to_run() {
        match &attached {
            Ok(attached) => {
                let mut vcpu = slot.lock();
                pacer.restart(Instant::now());
                run(shared, index, &mut vcpu, attached, &mut pacer);
                // KVM may not have finished the port access of the last exit.
                if let Err(error) = vcpu.complete_exit() {
                    shared.end(VmState::Failed(format!(
                        "KVM cannot finish the last exit of vCPU {index}: {error}"
                    )));
                }
            }
            Err(error) => shared.end(VmState::Failed(format!(
                "cannot set up the interruption of vCPU {index}: {error}"
            ))),
        }
        shared.common.control.park();
    }
}

/// Runs the guest until the vCPU must park.
fn run(shared: &Shared, index: u8, vcpu: &mut Vcpu, attached: &Attached<'_>, pacer: &mut Pacer) {
    while shared.common.control.may_run() {
        match vcpu.run() {
            Ok(VcpuExit::IoIn(port::BEAT, data)) => {
                let answer = beat(shared, index, pacer).to_le_bytes();
                // The guest's `in eax` instruction reads four bytes.
                data.iter_mut()
                    .zip(answer)
                    .for_each(|(to, from)| *to = from);
            }
            Ok(VcpuExit::IoOut(port::STOPPED, _)) => shared.end(shared.stop(index)),
            Ok(VcpuExit::IoOut(port::POWER_OFF, _)) => shared.end(VmState::PoweredOff),
            Ok(exit) => {
                let why = described(&exit);
                shared.end(VmState::Failed(format!(
                    "vCPU {index} left the guest: {why}"
                )));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => attached.take(),
            Err(error) => shared.end(VmState::Failed(format!(
                "KVM cannot run vCPU {index}: {error}"
            ))),
        }
    }
}

/// Describes an exit for which the VMM has no device, without the guest's data.
fn described(exit: &VcpuExit<'_>) -> String {
    match exit {
        VcpuExit::IoIn(port, _) => format!("it read from port {port:#x}"),
        VcpuExit::IoOut(port, _) => format!("it wrote to port {port:#x}"),
        VcpuExit::MmioRead(address, _) => format!("it read from {address:#x}, outside its memory"),
        VcpuExit::MmioWrite(address, _) => format!("it wrote to {address:#x}, outside its memory"),
        exit @ (VcpuExit::FailEntry(..)
        | VcpuExit::MemoryFault { .. }
        | VcpuExit::Unsupported(_)) => {
            format!("{exit:?}")
        }
        // The fields of all other exits contain the guest's registers, so return only the name.
        exit => {
            let name = format!("{exit:?}");
            let end = name.find(|c: char| !c.is_alphanumeric());
            name[..end.unwrap_or(name.len())].to_owned()
        }
    }
}

/// Returns the answer to a beat: the number of visits that the vCPU may make, or
/// [`POWER_OFF_ANSWER`].
fn beat(shared: &Shared, index: u8, pacer: &mut Pacer) -> u32 {
    let tsc = shared.counter(index, block::LAST_TSC);
    let visits = || shared.total(block::VISITS);
    shared
        .common
        .beat(index, tsc, visits, pacer)
        .unwrap_or(POWER_OFF_ANSWER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Claim H4 of docs/security.
    #[test]
    fn i6_an_exit_is_described_without_the_guests_data() {
        let mut data = [0xa5; 8];
        for (exit, text) in [
            (
                VcpuExit::IoOut(0x80, &data.clone()),
                "it wrote to port 0x80",
            ),
            (
                VcpuExit::MmioWrite(0xd000_0000, &data.clone()),
                "it wrote to 0xd0000000, outside its memory",
            ),
            (VcpuExit::IoIn(0x80, &mut data), "it read from port 0x80"),
            (VcpuExit::SystemEvent(2, &[0xa5a5]), "SystemEvent"),
            (VcpuExit::Shutdown, "Shutdown"),
            (VcpuExit::Unsupported(37), "Unsupported(37)"),
        ] {
            assert_eq!(described(&exit), text);
        }
    }
}
