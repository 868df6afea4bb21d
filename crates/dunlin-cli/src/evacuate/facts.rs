//! What the hosts say before anything moves: the VMs, the room for them, and what an earlier run left.

use anyhow::Result;

use super::host::{active, available, completed, measure, vms, watch, whereabouts};
use super::job::Job;
use super::plan::{Destination, Order, Vm};
use super::record::{Entry, Outcome};
use super::verdict::{Verdict, judge};
use super::virsh::Virsh;

#[derive(Debug)]
pub(super) struct Facts {
    /// VMs that can be planned.
    pub(super) vms: Vec<Vm>,
    pub(super) destinations: Vec<Destination>,
    /// VMs that run here and cannot be planned, and VMs of an earlier run.
    pub(super) entries: Vec<Entry>,
}

/// An entry without figures.
pub(super) fn entry(vm: &Vm, to: &str, result: Outcome, reason: &str) -> Entry {
    Entry {
        uuid: vm.uuid.clone(),
        name: vm.name.clone(),
        to: to.to_owned(),
        result,
        reason: reason.to_owned(),
        duration_s: None,
        bytes: None,
        downtime_ms: None,
        earlier: false,
    }
}

impl Entry {
    /// Takes the figures of libvirt.
    pub(super) fn with(mut self, job: Option<&Job>) -> Self {
        let seconds = |job: &Job| Some(job.number("time_elapsed")? as f64 / 1000.0);
        self.duration_s = self.duration_s.or_else(|| job.and_then(seconds));
        self.bytes = job.and_then(Job::bytes);
        // Before the end of the migration, the field is the downtime that QEMU expects.
        let is_over = |job: &&Job| self.result == Outcome::Moved && job.is_completed();
        self.downtime_ms = job.filter(is_over).and_then(|job| job.number("downtime"));
        self
    }
}

/// Asks all hosts.
pub(super) fn gather(
    source: &Virsh,
    destinations: &[Virsh],
    order: &Order,
    reserve: u64,
    earlier: &[Entry],
) -> Result<Facts> {
    let here = active(source)?;
    let mut found = vms(source, &here)?;
    let mut facts = Facts {
        vms: Vec::new(),
        destinations: Vec::new(),
        entries: Vec::new(),
    };
    let mut there = Vec::new();
    for one in destinations {
        facts.destinations.push(Destination {
            uri: one.uri.clone(),
            free: available(one)?.saturating_sub(reserve),
        });
        there.push(active(one)?);
    }
    if *order == Order::Busiest {
        measure(source, &mut found)?;
    }
    let uuids: Vec<String> = found.iter().map(|vm| vm.uuid.clone()).collect();
    let seen = watch(source, &uuids)?;
    for (mut vm, seen) in found.into_iter().zip(seen) {
        let is_leaving = seen
            .and_then(|seen| seen.job)
            .is_some_and(|job| job.is_leaving());
        let at = there.iter().position(|there| there.contains(&vm.uuid));
        match (is_leaving, at) {
            (true, Some(to)) => vm.bound = Some(to),
            (true, None) => {
                let reason = "a migration to a host that --to does not name is under way";
                facts.entries.push(entry(&vm, "", Outcome::Stayed, reason));
                continue;
            }
            (false, Some(to)) => {
                let reason = "both hosts have an active VM with this UUID";
                let to = &destinations[to].uri;
                facts.entries.push(entry(&vm, to, Outcome::Doubt, reason));
                continue;
            }
            (false, None) => {}
        }
        facts.vms.push(vm);
    }
    let left = earlier.iter().filter(|one| !here.contains(&one.uuid));
    facts
        .entries
        .extend(left.filter_map(|one| settled(source, one)));
    Ok(facts)
}

/// What became of a VM that an earlier run has moved, or was moving when that run ended. `None` if
/// there is nothing to report.
fn settled(source: &Virsh, entry: &Entry) -> Option<Entry> {
    let mut entry = entry.clone();
    entry.earlier = true;
    match entry.result {
        Outcome::Moved => Some(entry),
        Outcome::Moving | Outcome::Doubt => {
            let destination = Virsh::new(&entry.to);
            let at = [source, &destination].map(|host| whereabouts(host, &entry.uuid));
            entry.result = Outcome::Doubt;
            // A paused VM arrives paused.
            match judge(&at[0], &at[1], true) {
                Verdict::Moved => {
                    entry.result = Outcome::Moved;
                    entry.reason.clear();
                    let job = completed(&destination, &entry.uuid);
                    entry = entry.with(job.as_ref());
                }
                Verdict::Doubt(text) => entry.reason = text,
                Verdict::Stayed | Verdict::StayedPaused => return None,
            }
            Some(entry)
        }
        _ => None,
    }
}
