//! One function that runs all checks of a VMM.

use super::arrival::check_arrival;
use super::control::check_control;
use super::dirty::{Seen, check_dirty_logs};
use super::memory::check_memory;
use super::state::check_state;
use super::{Effort, Violation, Vmm, failed};

/// Observations about a VMM that keeps its contracts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Conformance {
    /// Figures of the VM's dirty logs.
    pub dirty: Seen,
    /// Whether the VMM can throttle the guest.
    pub throttles: bool,
    /// Names of the sections with content that changes while the guest is paused or after
    /// each load, such as clocks and timers. The check cannot compare their loaded content
    /// with the saved content, so there should be few.
    pub unsteady: Vec<String>,
}

/// Tests everything that a VMM implements. Needs the memory of four VMs that `vmm` starts.
///
/// # Errors
/// The first [`Violation`].
pub fn check_vmm(vmm: &mut dyn Vmm, effort: &Effort) -> Result<Conformance, Violation> {
    let vm = vmm.start().map_err(failed("Vmm::start"))?;
    // Check the pause first, because every other check relies on it.
    let throttles = check_control(&*vm, effort)?;
    check_memory(&*vm.memory())?;
    let dirty = check_dirty_logs(&*vm, effort)?;
    drop(vm);
    let unsteady = check_state(vmm, effort)?;
    check_arrival(vmm, effort)?;
    Ok(Conformance {
        dirty,
        throttles,
        unsteady,
    })
}
