//! What a source asks of its VM while it lives here.

use std::time::Duration;

use dunlin_proto::limits::{MAX_DESCRIPTION_BYTES, MAX_NAME_BYTES};

use super::memory::{Copy, is_written, table_changes};
use super::{Effort, Violation, broken, failed};
use crate::engine::vmm::{GuestMemory, RunState, SourceVm, VmDescription};

/// Tests how a VM is described, paused, resumed and throttled, its guest
/// writing all the while. Needs as much memory again. The guest is paused
/// afterwards. Returns whether the VMM throttles.
///
/// # Errors
/// The first [`Violation`].
pub fn check_control(vm: &dyn SourceVm, effort: &Effort) -> Result<bool, Violation> {
    let memory = vm.memory();
    let described = describe(vm)?;
    runs(vm, &*memory)?;
    for _ in 0..effort.pauses {
        std::thread::sleep(effort.between);
        stands_still(vm, &*memory, effort)?;
        runs(vm, &*memory)?;
    }
    let throttles = throttles(vm, effort)?;
    stands_still(vm, &*memory, effort)?;
    let again = describe(vm)?;
    if (described.uuid, &described.name, &described.description)
        != (again.uuid, &again.name, &again.description)
    {
        return Err(broken(
            "SourceVm::describe",
            "a VM is described in the same way while it is moved",
            "after some pauses it says something else",
        ));
    }
    if vm.memory().regions() != memory.regions() {
        return Err(table_changes(
            "SourceVm::memory gives another one after some pauses",
        ));
    }
    let copy = Copy::of(&*memory)?;
    vm.deactivate().map_err(failed("SourceVm::deactivate"))?;
    if let Some((region, page)) = copy.difference(&*memory)? {
        return Err(broken(
            "SourceVm::deactivate",
            "it writes no guest memory, which is being sent",
            format!("page {page} of region {region} is another after it"),
        ));
    }
    vm.reactivate().map_err(failed("SourceVm::reactivate"))?;
    runs(vm, &*memory)?;
    stands_still(vm, &*memory, effort)?;
    Ok(throttles)
}

fn describe(vm: &dyn SourceVm) -> Result<VmDescription, Violation> {
    let described = vm.describe().map_err(failed("SourceVm::describe"))?;
    let (name, bytes) = (described.name.len(), described.description.len());
    if name > MAX_NAME_BYTES || bytes > MAX_DESCRIPTION_BYTES {
        return Err(broken(
            "SourceVm::describe",
            "a name has at most 255 bytes and a description 256 KiB",
            format!("they have {name} and {bytes} bytes"),
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
        "it tells where the guest stands",
        format!("after {after} it says {state:?}"),
    ))
}

/// Resumes the guest, twice, and sees it write.
pub(super) fn runs(vm: &dyn SourceVm, memory: &dyn GuestMemory) -> Result<(), Violation> {
    for after in ["resume", "resuming a guest that runs"] {
        vm.resume().map_err(failed("SourceVm::resume"))?;
        is(vm, &RunState::Running, after)?;
    }
    if !is_written(memory)? {
        return Err(Violation::NothingWritten);
    }
    Ok(())
}

/// Pauses the guest, twice, and sees that memory does not change any more.
fn stands_still(
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

/// Whether the VMM throttles; it must then make a difference, in both
/// directions.
fn throttles(vm: &dyn SourceVm, effort: &Effort) -> Result<bool, Violation> {
    const ROUNDS: u32 = 6;
    let set = |percent| vm.throttle(percent).unwrap_or(false);
    if !set(0) {
        return Ok(false);
    }
    let (mut full, mut slow) = (0, 0);
    for round in 0..ROUNDS {
        // The first shows nothing: the guest may come to full speed only now.
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
        "a throttled guest writes less and comes to full speed again",
        format!("{full} pages were written at full speed and {slow} throttled by 99 %"),
    ))
}

/// Pages that the guest writes in some tenths of a second.
fn dirtied(vm: &dyn SourceVm, effort: &Effort) -> Result<u64, Violation> {
    const WINDOW: Duration = Duration::from_millis(100);
    let log_failed = |step| move |source| Violation::Log { step, source };
    let mut logs = vm.dirty_logs();
    for log in &mut logs {
        log.start().map_err(log_failed("start"))?;
    }
    // Short steps, or a page that is written often counts as one that is not.
    let step = effort.between.max(Duration::from_millis(1)).min(WINDOW);
    let mut pages = 0;
    for _ in 0..WINDOW.as_millis() / step.as_millis() {
        std::thread::sleep(step);
        for log in &mut logs {
            log.fetch(&mut |_, words| {
                pages += words
                    .iter()
                    .map(|word| u64::from(word.count_ones()))
                    .sum::<u64>();
            })
            .map_err(log_failed("be read"))?;
        }
    }
    for log in &mut logs {
        log.stop().map_err(log_failed("stop"))?;
    }
    Ok(pages)
}
