//! Checks of the methods that the engine calls while the source has the VM.

use std::time::Duration;

use dunlin_proto::limits::{MAX_DESCRIPTION_BYTES, MAX_NAME_BYTES};

use super::dirty::Union;
use super::memory::{Copy, is_written, table_changes};
use super::{Effort, Violation, broken, failed};
use crate::engine::vmm::{DirtyLog, GuestMemory, RunState, SourceVm, VmDescription};

/// Tests that a VM can be described, paused, resumed and throttled while its guest writes.
/// Needs as much additional memory as the VM has. The guest is paused afterwards. Returns
/// whether the VMM supports throttling.
///
/// # Errors
/// The first [`Violation`].
pub fn check_control(vm: &dyn SourceVm, effort: &Effort) -> Result<bool, Violation> {
    let memory = vm.memory();
    let described = describe(vm)?;
    runs(vm, &*memory)?;
    for _ in 0..effort.pauses {
        std::thread::sleep(effort.between);
        check_paused(vm, &*memory, effort)?;
        runs(vm, &*memory)?;
    }
    let throttles = throttles(vm, effort)?;
    check_paused(vm, &*memory, effort)?;
    let again = describe(vm)?;
    if (described.uuid, &described.name, &described.description)
        != (again.uuid, &again.name, &again.description)
    {
        return Err(broken(
            "SourceVm::describe",
            "a VM has the same description in every attempt",
            "the description differs after some pauses",
        ));
    }
    if vm.memory().regions() != memory.regions() {
        return Err(table_changes(
            "SourceVm::memory returns memory with another table after some pauses",
        ));
    }
    let copy = Copy::of(&*memory)?;
    vm.deactivate().map_err(failed("SourceVm::deactivate"))?;
    if let Some((region, page)) = copy.difference(&*memory)? {
        return Err(broken(
            "SourceVm::deactivate",
            "it does not write guest memory",
            format!("page {page} of region {region} changed"),
        ));
    }
    vm.reactivate().map_err(failed("SourceVm::reactivate"))?;
    runs(vm, &*memory)?;
    check_paused(vm, &*memory, effort)?;
    Ok(throttles)
}

fn describe(vm: &dyn SourceVm) -> Result<VmDescription, Violation> {
    let described = vm.describe().map_err(failed("SourceVm::describe"))?;
    let (name, bytes) = (described.name.len(), described.description.len());
    if name > MAX_NAME_BYTES || bytes > MAX_DESCRIPTION_BYTES {
        return Err(broken(
            "SourceVm::describe",
            "a name has at most 255 bytes and a description at most 256 KiB",
            format!("the name has {name} bytes and the description {bytes} bytes"),
        ));
    }
    Ok(described)
}

fn is(vm: &dyn SourceVm, expected: &RunState, after: &str) -> Result<(), Violation> {
    let state = vm.run_state();
    if state == *expected {
        return Ok(());
    }
    Err(broken(
        "SourceVm::run_state",
        "it returns the guest's run state",
        format!("after {after} it returns {state:?}"),
    ))
}

/// Resumes the guest, twice, and checks that it writes.
pub(super) fn runs(vm: &dyn SourceVm, memory: &dyn GuestMemory) -> Result<(), Violation> {
    for after in ["resume", "resuming a running guest"] {
        vm.resume().map_err(failed("SourceVm::resume"))?;
        is(vm, &RunState::Running, after)?;
    }
    if !is_written(memory)? {
        return Err(Violation::NothingWritten);
    }
    Ok(())
}

/// Pauses the guest, twice, and checks that memory no longer changes.
fn check_paused(
    vm: &dyn SourceVm,
    memory: &dyn GuestMemory,
    effort: &Effort,
) -> Result<(), Violation> {
    for after in ["pause", "pausing a paused guest"] {
        vm.pause().map_err(failed("SourceVm::pause"))?;
        let copy = Copy::of(memory)?;
        is(vm, &RunState::Paused, after)?;
        let rest = effort.between * effort.fetches;
        std::thread::sleep(rest);
        if let Some((region, page)) = copy.difference(memory)? {
            return Err(broken(
                "SourceVm::pause",
                "nothing writes guest memory once it has returned",
                format!("page {page} of region {region} changed within {rest:?} after {after}"),
            ));
        }
    }
    Ok(())
}

/// Whether the VMM supports throttling. If it does, a throttled guest must write less, and a guest
/// that is no longer throttled must write more again.
fn throttles(vm: &dyn SourceVm, effort: &Effort) -> Result<bool, Violation> {
    const ROUNDS: u32 = 6;
    let set = |percent| vm.throttle(percent).unwrap_or(false);
    if !set(0) {
        return Ok(false);
    }
    let (mut full, mut slow) = (0, 0);
    for round in 0..ROUNDS {
        // The first round is not counted: the guest may not have reached its full speed yet.
        full = dirtied(vm, effort)?;
        set(99);
        slow = dirtied(vm, effort)?;
        set(0);
        if round > 0 && slow * 2 < full {
            return Ok(true);
        }
    }
    Err(broken(
        "SourceVm::throttle",
        "a throttled guest writes less, and later runs at full speed again",
        format!("{full} pages were written at full speed, and {slow} while throttled by 99 %"),
    ))
}

/// Pages that the guest writes in a tenth of a second.
fn dirtied(vm: &dyn SourceVm, effort: &Effort) -> Result<u64, Violation> {
    const WINDOW: Duration = Duration::from_millis(100);
    let mut log = Union(vm.dirty_logs());
    log.start().map_err(failed("DirtyLog::start"))?;
    // Counts in short steps: in each step, a page counts only once, even if it is written many
    // times.
    let step = effort.between.max(Duration::from_millis(1)).min(WINDOW);
    let mut pages = 0;
    for _ in 0..WINDOW.as_millis() / step.as_millis() {
        std::thread::sleep(step);
        log.fetch(&mut |_, words| {
            pages += words
                .iter()
                .map(|word| u64::from(word.count_ones()))
                .sum::<u64>();
        })
        .map_err(failed("DirtyLog::fetch"))?;
    }
    log.stop().map_err(failed("DirtyLog::stop"))?;
    Ok(pages)
}
