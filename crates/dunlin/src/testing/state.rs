//! Checks of CPU and device state, which is saved, loaded and saved again.

use std::collections::BTreeSet;
use std::sync::Arc;

use dunlin_proto::limits::{MAX_NAME_BYTES, MAX_SECTION_BYTES, MAX_SECTIONS, MAX_STATE_BYTES};

use super::memory::{Copy, first_written};
use super::{Effort, Violation, Vmm, broken, failed};
use crate::engine::vmm::{DestinationVm, Offered, Refusal, RunState, Section, SourceVm, VmmError};

/// Tests that a VM loads its state as it was saved, and that it refuses required
/// sections that this VMM does not support. Returns the names of the sections that
/// change by themselves, such as clocks; their bytes are not compared.
///
/// # Errors
/// The first [`Violation`].
pub fn check_state(vmm: &mut dyn Vmm, effort: &Effort) -> Result<Vec<String>, Violation> {
    let source = vmm.start().map_err(failed("Vmm::start"))?;
    std::thread::sleep(effort.between * effort.fetches);
    let moment = Moment::of(&*source, effort)?;

    // Load and save the same state twice. A section that differs between the two depends on the
    // time of the load: it contains, for example, the start of a timer.
    let again = load_and_save(vmm, &*source, &moment)?;
    let once_more = load_and_save(vmm, &*source, &moment)?;
    let mut unsteady = moment.unsteady.clone();
    for (one, other) in again.iter().zip(&once_more) {
        if labels_equal(one, other) && one.bytes != other.bytes {
            unsteady.insert(one.name.clone());
        }
    }
    same_state(&moment.sections, &again, &unsteady)?;
    refuses_unsupported_sections(vmm, &*source, &moment)?;
    Ok(unsteady.into_iter().collect())
}

/// The sections that a VM saves after it has loaded those of `moment`.
fn load_and_save(
    vmm: &mut dyn Vmm,
    source: &dyn SourceVm,
    moment: &Moment,
) -> Result<Vec<Section>, Violation> {
    let (there, as_source) = moment.load(vmm, source)?;
    if as_source.run_state() != RunState::Paused {
        return Err(broken(
            "DestinationVm::load",
            "nothing runs after it",
            format!("the guest is {:?}", as_source.run_state()),
        ));
    }
    let sections = as_source.save().map_err(failed("SourceVm::save"))?;
    there.discard();
    Ok(sections)
}

/// Memory and state of a paused VM.
pub(super) struct Moment {
    memory: Copy,
    sections: Vec<Section>,
    /// Names of sections that change while the VM is paused.
    unsteady: BTreeSet<String>,
}

impl Moment {
    /// Pauses the guest, and saves its state twice.
    pub(super) fn of(vm: &dyn SourceVm, effort: &Effort) -> Result<Self, Violation> {
        const METHOD: &str = "SourceVm::save";
        vm.pause().map_err(failed("SourceVm::pause"))?;
        let memory = Copy::of(&*vm.memory())?;
        let first = vm.save().map_err(failed(METHOD))?;
        std::thread::sleep(effort.between);
        let sections = vm.save().map_err(failed(METHOD))?;
        if let Some((region, page)) = memory.difference(&*vm.memory())? {
            return Err(broken(
                METHOD,
                "it does not write guest memory",
                format!("page {page} of region {region} changed"),
            ));
        }
        fits(&sections)?;
        let mut unsteady = BTreeSet::new();
        for (one, other) in first.iter().zip(&sections) {
            if !labels_equal(one, other) || first.len() != sections.len() {
                return Err(broken(
                    METHOD,
                    "a paused VM has the same sections every time",
                    format!("{} was replaced by {}", label(one), label(other)),
                ));
            }
            if one.bytes != other.bytes {
                unsteady.insert(one.name.clone());
            }
        }
        Ok(Self {
            memory,
            sections,
            unsteady,
        })
    }

    /// Builds the VM that `source` describes, and loads the memory and sections of this moment into
    /// it.
    pub(super) fn load(
        &self,
        vmm: &mut dyn Vmm,
        source: &dyn SourceVm,
    ) -> Result<Built, Violation> {
        let (there, as_source) = build(vmm, source)?;
        self.memory.write_to(&*there.memory())?;
        there
            .load(&self.sections)
            .map_err(failed("DestinationVm::load"))?;
        Ok((there, as_source))
    }
}

/// Checks that the sections are within the limits of the control lane.
fn fits(sections: &[Section]) -> Result<(), Violation> {
    const METHOD: &str = "SourceVm::save";
    let bytes: usize = sections.iter().map(|section| section.bytes.len()).sum();
    if sections.len() > MAX_SECTIONS as usize || bytes > MAX_STATE_BYTES {
        return Err(broken(
            METHOD,
            "there are at most 4096 sections with a total of 32 MiB",
            format!("sections: {}, bytes: {bytes}", sections.len()),
        ));
    }
    let mut names = BTreeSet::new();
    for section in sections {
        if section.name.len() > MAX_NAME_BYTES || section.bytes.len() > MAX_SECTION_BYTES {
            return Err(broken(
                METHOD,
                "a section has a name of at most 255 bytes and less than 1 MiB of content",
                format!("{} has {} bytes", label(section), section.bytes.len()),
            ));
        }
        if !names.insert((&section.name, section.instance)) {
            return Err(broken(
                METHOD,
                "each pair of name and instance is used once",
                format!("{} appears twice", label(section)),
            ));
        }
    }
    Ok(())
}

/// Checks that a VM saves the same sections that it has loaded, in any order.
fn same_state(
    before: &[Section],
    again: &[Section],
    unsteady: &BTreeSet<String>,
) -> Result<(), Violation> {
    let not_equal = |what| {
        broken(
            "DestinationVm::load",
            "a VM that has loaded a state saves the same state again",
            what,
        )
    };
    for before in before {
        let Some(after) = again.iter().find(|after| labels_equal(before, after)) else {
            return Err(not_equal(format!("{} is missing", label(before))));
        };
        if unsteady.contains(&before.name) {
            continue;
        }
        if before.bytes != after.bytes {
            let at = before.bytes.iter().zip(&after.bytes);
            let at = at.take_while(|(before, after)| before == after).count();
            return Err(not_equal(format!(
                "{} differs, first at byte {at} of {}",
                label(before),
                before.bytes.len()
            )));
        }
    }
    match again
        .iter()
        .find(|after| !before.iter().any(|before| labels_equal(before, after)))
    {
        Some(new) => Err(not_equal(format!(
            "{} was not in the loaded state",
            label(new)
        ))),
        None => Ok(()),
    }
}

fn refuses_unsupported_sections(
    vmm: &mut dyn Vmm,
    source: &dyn SourceVm,
    moment: &Moment,
) -> Result<(), Violation> {
    const METHOD: &str = "DestinationVm::load";
    const PROMISE: &str = "a required section with an unsupported name or version is refused";
    let load = |vmm: &mut dyn Vmm, sections: &[Section]| -> Result<Result<(), VmmError>, _> {
        let (there, _) = build(vmm, source)?;
        moment.memory.write_to(&*there.memory())?;
        let result = there.load(sections);
        there.discard();
        Ok::<_, Violation>(result)
    };
    let mut names = BTreeSet::new();
    for (position, section) in moment.sections.iter().enumerate() {
        if !section.required || !names.insert(&section.name) {
            continue;
        }
        let mut newer = moment.sections.clone();
        newer[position].version = u32::MAX;
        if load(vmm, &newer)?.is_ok() {
            let label = label(&newer[position]);
            return Err(broken(METHOD, PROMISE, format!("{label} was accepted")));
        }
    }
    let mut more = moment.sections.clone();
    more.push(Section {
        name: "dunlin.testing.unknown".into(),
        instance: 0,
        version: 1,
        required: true,
        bytes: vec![1, 2, 3],
    });
    if load(vmm, &more)?.is_ok() {
        let label = label(&more[more.len() - 1]);
        return Err(broken(METHOD, PROMISE, format!("{label} was accepted")));
    }
    if let Some(last) = more.last_mut() {
        last.required = false;
    }
    load(vmm, &more)?.map_err(|error| {
        broken(
            METHOD,
            "an unsupported section that is not required is skipped",
            error.to_string(),
        )
    })
}

/// A VM as seen by its destination, and the same VM as a source.
pub(super) type Built = (Arc<dyn DestinationVm>, Arc<dyn SourceVm>);

/// Builds the VM that `source` describes.
pub(super) fn build(vmm: &mut dyn Vmm, source: &dyn SourceVm) -> Result<Built, Violation> {
    const METHOD: &str = "Builder::build";
    let offered = offer(source)?;
    let refused = |refusal: Refusal| Violation::Failed {
        method: METHOD,
        source: refusal.text.into(),
    };
    let there = vmm.builder().build(&offered).map_err(refused)?;
    let memory = there.memory();
    let ours = memory.regions().iter().map(|r| (r.id, r.length));
    if !ours.eq(offered.regions.iter().map(|r| (r.id, r.length))) {
        return Err(broken(
            METHOD,
            "the VM has the regions that were offered",
            "identifiers or lengths differ",
        ));
    }
    if let Some((region, page)) = first_written(&*memory)? {
        return Err(broken(
            METHOD,
            "the VM's memory reads as zeros",
            format!("page {page} of region {region} is not zero"),
        ));
    }
    let as_source = vmm.built().ok_or_else(|| {
        broken(
            "Vmm::built",
            "it returns the VM that was built last",
            "it returns no VM",
        )
    })?;
    if as_source.run_state() == RunState::Running {
        return Err(broken(METHOD, "the VM is not started", "it runs"));
    }
    Ok((there, as_source))
}

/// The offer that a migration would make.
pub(super) fn offer(source: &dyn SourceVm) -> Result<Offered, Violation> {
    Ok(Offered {
        vm: source.describe().map_err(failed("SourceVm::describe"))?,
        regions: source.memory().regions().to_vec(),
        paused: false,
    })
}

fn labels_equal(one: &Section, other: &Section) -> bool {
    (&one.name, one.instance, one.version, one.required)
        == (&other.name, other.instance, other.version, other.required)
}

fn label(section: &Section) -> String {
    let required = if section.required { "required " } else { "" };
    format!(
        "{required}section `{}` (instance {}, version {})",
        section.name, section.instance, section.version
    )
}
