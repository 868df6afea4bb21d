//! The facts that the hosts report before a VM moves: the source's VMs, the destinations' free
//! memory, and what has become of the VMs of an earlier run.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::carry::settle;
use super::host::{active, available, completed, host_uuid, measure, vms, watch, whereabouts};
use super::job::Job;
use super::plan::{Destination, Order, Vm};
use super::record::{Entry, Outcome};
use super::verdict::{Verdict, judge};
use super::virsh::Virsh;

#[derive(Debug)]
pub(super) struct Facts {
    /// VMs at the source for which this run plans a migration.
    pub(super) vms: Vec<Vm>,
    pub(super) destinations: Vec<Destination>,
    /// Results that are final before this run plans: of VMs that it cannot move, and of VMs of an
    /// earlier run.
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
    /// Adds libvirt's figures. If the entry already has a duration, keeps it.
    pub(super) fn with(mut self, job: Option<&Job>) -> Self {
        let seconds = |job: &Job| Some(job.number("time_elapsed")? as f64 / 1000.0);
        self.duration_s = self.duration_s.or_else(|| job.and_then(seconds));
        self.bytes = job.and_then(Job::bytes);
        // Until the migration has ended, the field `downtime` is only QEMU's estimate.
        let is_over = |job: &&Job| self.result == Outcome::Moved && job.is_completed();
        self.downtime_ms = job.filter(is_over).and_then(|job| job.number("downtime"));
        self
    }
}

/// Collects the facts from all hosts.
pub(super) fn gather(
    source: &Virsh,
    destinations: &[Virsh],
    order: &Order,
    reserve: u64,
    earlier: &[Entry],
) -> Result<Facts> {
    let mut hosts = BTreeMap::from([(host_uuid(source)?, source)]);
    for one in destinations {
        if let Some(same) = hosts.insert(host_uuid(one)?, one) {
            bail!(
                "{} and {} are the same host: name each host once",
                same.uri,
                one.uri
            );
        }
    }
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
        // The destination of a migration that has just begun can still lack the VM, so look in the
        // record of an earlier run, too.
        let is_it = |one: &&Entry| one.uuid == vm.uuid && one.result == Outcome::Moving;
        let at_record = earlier.iter().find(is_it);
        let at_record =
            at_record.and_then(|one| destinations.iter().position(|to| to.uri == one.to));
        match (is_leaving, at) {
            (true, _) => {
                vm.bound = at.or(at_record);
                if vm.bound.is_none() {
                    let reason = "a migration to a host that --to does not name is under way";
                    facts.entries.push(entry(&vm, "", Outcome::Stayed, reason));
                    continue;
                }
            }
            (false, Some(to)) => {
                // The VM may have arrived after the source was asked.
                if let Some(entry) = arrived(source, &destinations[to], &vm) {
                    facts.entries.push(entry);
                    continue;
                }
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

/// What became of a VM that both hosts had when they were asked, although no migration is under
/// way. `None` if the VM is at the source.
fn arrived(source: &Virsh, destination: &Virsh, vm: &Vm) -> Option<Entry> {
    let entry = |result, reason: &str| Some(entry(vm, &destination.uri, result, reason));
    match settle(source, destination, vm) {
        Verdict::Moved => {
            let mut moved = entry(Outcome::Moved, "")?;
            moved.earlier = true;
            Some(moved.with(completed(destination, &vm.uuid).as_ref()))
        }
        Verdict::Doubt(text) => entry(Outcome::Doubt, &text),
        Verdict::Off => entry(Outcome::Off, ""),
        Verdict::Stayed | Verdict::StayedPaused => None,
    }
}

/// What became of a VM that an earlier run moved, left in doubt, or was moving when that run ended.
/// `None` if there is nothing to report.
fn settled(source: &Virsh, entry: &Entry) -> Option<Entry> {
    let mut entry = entry.clone();
    entry.earlier = true;
    match entry.result {
        Outcome::Moved => Some(entry),
        Outcome::Moving | Outcome::Doubt => {
            let destination = Virsh::new(&entry.to);
            let at = [source, &destination].map(|host| whereabouts(host, &entry.uuid));
            entry.result = Outcome::Doubt;
            // The record does not state whether the VM was paused. A paused VM arrives paused, so a
            // paused copy at the destination is not a reason for doubt.
            match judge(&at[0], &at[1], true) {
                Verdict::Moved => {
                    entry.result = Outcome::Moved;
                    entry.reason.clear();
                    let job = completed(&destination, &entry.uuid);
                    entry = entry.with(job.as_ref());
                }
                Verdict::Doubt(text) => entry.reason = text,
                Verdict::Stayed | Verdict::StayedPaused | Verdict::Off => return None,
            }
            Some(entry)
        }
        _ => None,
    }
}
