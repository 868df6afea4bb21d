//! Checks of the arrival of a VM, and of the copy left at the source.

use dunlin_proto::limits::MAX_TEXT_BYTES;

use super::control::runs;
use super::memory::{Copy, is_written};
use super::state::{Built, Moment, build, offer};
use super::{Effort, Violation, Vmm, broken, failed};
use crate::engine::vmm::{RunState, SourceVm};

/// Tests three outcomes for a VM at its destination: it is refused, it is given up after
/// its disks were acquired, and it arrives.
///
/// # Errors
/// The first [`Violation`].
pub fn check_arrival(vmm: &mut dyn Vmm, effort: &Effort) -> Result<(), Violation> {
    let source = vmm.start().map_err(failed("Vmm::start"))?;
    std::thread::sleep(effort.between * effort.fetches);
    check_refusal(vmm, &*source)?;

    // The destination gives the VM up at the last moment. The source continues.
    let (there, _) = arrive(vmm, &*source, effort)?;
    there.discard();
    drop(there);
    source
        .reactivate()
        .map_err(failed("SourceVm::reactivate"))?;
    runs(&*source, &*source.memory())?;

    // The VM arrives: it runs at the destination, and never again at the source.
    let (there, as_source) = arrive(vmm, &*source, effort)?;
    let before = Copy::of(&*source.memory())?;
    there.resume().map_err(failed("DestinationVm::resume"))?;
    let state = as_source.run_state();
    if state != RunState::Running || !is_written(&*there.memory())? {
        return Err(broken(
            "DestinationVm::resume",
            "the guest runs at the destination",
            format!("the guest is {state:?}, or writes nothing"),
        ));
    }
    there.announce();
    if let Some((region, page)) = before.difference(&*source.memory())? {
        return Err(broken(
            "DestinationVm::resume",
            "the guest runs only at the destination",
            format!("page {page} of region {region} changed at the source"),
        ));
    }
    source.destroy();
    if source.run_state() == RunState::Running {
        return Err(broken(
            "SourceVm::destroy",
            "the copy at the source never runs again",
            "it reports that it runs",
        ));
    }
    as_source.pause().map_err(failed("SourceVm::pause"))
}

/// Checks that a builder that has refused one VM still builds the next.
fn check_refusal(vmm: &mut dyn Vmm, source: &dyn SourceVm) -> Result<(), Violation> {
    let mut impossible = offer(source)?;
    impossible.vm.description.clear();
    for region in &mut impossible.regions {
        region.length = 4096;
    }
    match vmm.builder().build(&impossible) {
        // A builder that can build any offered VM has no reason to refuse.
        Ok(built) => built.discard(),
        Err(refusal) if refusal.text.is_empty() || refusal.text.len() > MAX_TEXT_BYTES => {
            return Err(broken(
                "Builder::build",
                "a refusal has a reason of at most 1024 bytes, for the source's operator",
                format!("it has {} bytes", refusal.text.len()),
            ));
        }
        Err(_) => {}
    }
    let (there, _) = build(vmm, source)?;
    there.discard();
    Ok(())
}

/// Pauses and deactivates the source, and executes all steps at the destination before the guest
/// resumes there.
fn arrive(vmm: &mut dyn Vmm, source: &dyn SourceVm, effort: &Effort) -> Result<Built, Violation> {
    let moment = Moment::of(source, effort)?;
    source
        .deactivate()
        .map_err(failed("SourceVm::deactivate"))?;
    let (there, as_source) = moment.load(vmm, source)?;
    there.acquire().map_err(failed("DestinationVm::acquire"))?;
    Ok((there, as_source))
}
