//! What the libvirt of one host reports about the host's VMs and memory.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::job::Job;
use super::plan::Vm;
use super::verdict::Where;
use super::virsh::Virsh;

/// Number of VMs that are queried over one connection.
const BATCH: usize = 50;

/// The time over which the VMs' writes are measured, and the time limit for the result.
const SAMPLE: Duration = Duration::from_secs(1);
const SAMPLE_LIMIT: Duration = Duration::from_secs(8);

const KIB: u64 = 1 << 10;

/// What libvirt says about a VM that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) at: Where,
    pub(super) job: Option<Job>,
}

/// Memory for arriving VMs: the unused memory of the host or the memory that is not promised to its
/// VMs, whichever is smaller.
pub(super) fn available(virsh: &Virsh) -> Result<u64> {
    let stats = fields(&virsh.ask(&["nodememstats"])?);
    let of = |name: &str| stats.get(name).and_then(|text| kib(text));
    let missing = || {
        anyhow!(
            "{}: `virsh nodememstats` reports no `total` or no `free`",
            virsh.uri
        )
    };
    let total = of("total").ok_or_else(missing)?;
    let free = of("free").ok_or_else(missing)?;
    let unused = free + of("buffers").unwrap_or(0) + of("cached").unwrap_or(0);
    let there = vms(virsh, &active(virsh)?)?;
    let promised: u64 = there.iter().map(|vm| vm.memory).sum();
    Ok(unused.min(total.saturating_sub(promised)))
}

/// The UUID of the host. libvirt compares these UUIDs, and refuses a migration from a host to the
/// same host.
pub(super) fn host_uuid(virsh: &Virsh) -> Result<String> {
    let capabilities = virsh.ask(&["capabilities"])?;
    let found = capabilities.split_once("<uuid>");
    let found = found.and_then(|(_, rest)| rest.split_once("</uuid>"));
    let (uuid, _) = found
        .with_context(|| format!("{}: no UUID of the host in `virsh capabilities`", virsh.uri))?;
    Ok(uuid.to_owned())
}

/// The UUIDs of the VMs that run or are paused.
pub(super) fn active(virsh: &Virsh) -> Result<Vec<String>> {
    uuids(&virsh.ask(&["list", "--uuid"])?)
}

fn uuids(text: &str) -> Result<Vec<String>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let uuid = |line: &str| {
        let is_uuid = line.len() == 36 && line.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        is_uuid
            .then(|| line.to_owned())
            .with_context(|| format!("virsh printed {line:?} instead of a UUID"))
    };
    lines.map(uuid).collect()
}

/// The VMs with these UUIDs. VMs that have ended meanwhile are left out.
pub(super) fn vms(virsh: &Virsh, uuids: &[String]) -> Result<Vec<Vm>> {
    let mut found = Vec::new();
    for part in uuids.chunks(BATCH) {
        let ask = |uuid: &String| format!("dominfo {uuid}");
        let blocks = virsh.batch(&part.iter().map(ask).collect::<Vec<_>>())?;
        for (uuid, block) in part.iter().zip(blocks) {
            found.extend(vm(uuid, &block));
        }
    }
    Ok(found)
}

fn vm(uuid: &str, dominfo: &str) -> Option<Vm> {
    let fields = fields(dominfo);
    let field = |name: &str| fields.get(name).map(String::as_str);
    let nanoseconds = |text: &str| {
        let seconds: f64 = text.trim_end_matches('s').parse().ok()?;
        Some((seconds * 1e9) as u64)
    };
    Some(Vm {
        uuid: uuid.to_owned(),
        name: field("Name")?.to_owned(),
        memory: kib(field("Max memory")?)?,
        busy: field("CPU time").and_then(nanoseconds).unwrap_or(0),
        is_paused: field("State") == Some("paused"),
        is_persistent: field("Persistent") == Some("yes"),
        bound: None,
    })
}

/// Parses lines of the form `KEY: VALUE`. If several lines have the same key, the first one is
/// used.
fn fields(text: &str) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    for line in text.lines() {
        if let Some((key, value)) = line.split_once(':') {
            let value = value.trim().to_owned();
            fields.entry(key.trim().to_owned()).or_insert(value);
        }
    }
    fields
}

/// Parses a number of KiB, and returns it in bytes.
fn kib(text: &str) -> Option<u64> {
    let number: u64 = text.strip_suffix("KiB")?.trim().parse().ok()?;
    number.checked_mul(KIB)
}

/// Measures how busy each VM is: the rate at which it writes memory or, if libvirt does not report
/// that for every VM, the processor time that it takes.
pub(super) fn measure(virsh: &Virsh, vms: &mut [Vm]) -> Result<()> {
    let of = |command: &str, vms: &[Vm]| -> Vec<String> {
        vms.iter()
            .map(|vm| format!("{command} {}", vm.uuid))
            .collect()
    };
    // Total processor times. Only their increase from now on is compared, because the VMs have not
    // run equally long.
    let before: Vec<u64> = vms.iter().map(|vm| vm.busy).collect();
    let began = Instant::now();
    virsh.batch(&of("domdirtyrate-calc --seconds 1", vms))?;
    loop {
        thread::sleep(SAMPLE.saturating_sub(began.elapsed()).max(SAMPLE / 5));
        let stats = virsh.batch(&of("domstats --raw --dirtyrate", vms))?;
        let rates: Option<Vec<u64>> = stats.iter().map(|text| dirty_rate(text)).collect();
        if let Some(rates) = rates {
            for (vm, rate) in vms.iter_mut().zip(rates) {
                vm.busy = rate;
            }
            return Ok(());
        }
        if began.elapsed() > SAMPLE_LIMIT {
            break;
        }
    }
    let uuids: Vec<String> = vms.iter().map(|vm| vm.uuid.clone()).collect();
    let after = self::vms(virsh, &uuids)?;
    for (vm, before) in vms.iter_mut().zip(before) {
        let now = after.iter().find(|now| now.uuid == vm.uuid);
        vm.busy = now.map_or(0, |now| now.busy.saturating_sub(before));
    }
    Ok(())
}

/// The rate at which the VM writes memory, in MiB/s, if libvirt has measured it.
fn dirty_rate(domstats: &str) -> Option<u64> {
    let field = |name: &str| {
        let lines = domstats.lines().map(str::trim);
        let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        values.next()
    };
    const MEASURED: &str = "2";
    field("dirtyrate.calc_status").filter(|status| *status == MEASURED)?;
    field("dirtyrate.megabytes_per_second")?.parse().ok()
}

/// Where a VM is, according to this host's libvirt.
pub(super) fn whereabouts(virsh: &Virsh, uuid: &str) -> Where {
    let ask = || -> Result<Where> {
        let all = uuids(&virsh.ask(&["list", "--all", "--uuid"])?)?;
        if !all.iter().any(|one| one == uuid) {
            return Ok(Where::Absent);
        }
        Ok(Where::parse(&virsh.ask(&["domstate", "--reason", uuid])?))
    };
    ask().unwrap_or_else(|error| Where::Unknown(format!("{error:#}")))
}

/// What a host says about VMs that move from it, in the order of `uuids`. The entry of a VM that
/// has ended is `None`.
pub(super) fn watch(virsh: &Virsh, uuids: &[String]) -> Result<Vec<Option<Seen>>> {
    let ask = |uuid: &String| {
        [
            format!("domstate --reason {uuid}"),
            format!("domjobinfo --rawstats {uuid}"),
        ]
    };
    let blocks = virsh.batch(&uuids.iter().flat_map(ask).collect::<Vec<_>>())?;
    let seen = |pair: &[String]| {
        let [state, job] = pair else { return None };
        (!state.trim().is_empty()).then(|| Seen {
            at: Where::parse(state),
            job: Job::parse(job).ok(),
        })
    };
    Ok(blocks.chunks(2).map(seen).collect())
}

/// Whether a migration of the VM from this host is under way. libvirt keeps the job of a migration
/// that has failed in post-copy. Such a migration is not under way: only an operator can resume it.
pub(super) fn is_leaving(virsh: &Virsh, uuid: &String) -> bool {
    let seen = watch(virsh, std::slice::from_ref(uuid)).ok();
    let seen = seen.and_then(|mut seen| seen.pop().flatten());
    let failed = Where::Paused("post-copy failed".into());
    let seen = seen.filter(|seen| seen.at != failed);
    seen.is_some_and(|seen| seen.job.is_some_and(|job| job.is_leaving()))
}

/// The figures of a VM's last migration.
pub(super) fn completed(virsh: &Virsh, uuid: &str) -> Option<Job> {
    let flags = [
        "--completed",
        "--keep-completed",
        "--anystats",
        "--rawstats",
    ];
    let words = ["domjobinfo"].iter().chain(&flags).chain([&uuid]);
    let job = Job::parse(&virsh.ask(&words.copied().collect::<Vec<_>>()).ok()?).ok()?;
    // After a restart of libvirt's daemon, the output has no figures.
    job.bytes().is_some().then_some(job)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const DOMINFO: &str = "Id:             1\nName:           a: b\nUUID:           x\n\
                           State:          paused\nCPU(s):         1\nCPU time:       1.5s\n\
                           Max memory:     49152 KiB\nUsed memory:    49152 KiB\n\
                           Persistent:     yes\nAutostart:      disable\n";

    #[test]
    fn a_vm_is_read_from_its_information() {
        let vm = vm("u", DOMINFO).unwrap();
        assert_eq!(
            (&*vm.name, vm.memory, vm.busy),
            ("a: b", 48 << 20, 1_500_000_000)
        );
        assert!(vm.is_paused && vm.is_persistent);
    }

    /// Malformed text in place of virsh's output must not yield a VM or a number.
    #[test]
    fn i7_malformed_output_names_no_vm() {
        assert_eq!(vm("u", ""), None);
        assert_eq!(vm("u", &DOMINFO.replace("49152 KiB", "48 MiB")), None);
        assert_eq!(kib("18446744073709551615 KiB"), None);
        assert!(uuids("../../etc\n").is_err());
        assert!(uuids("--all\n").is_err());
        assert_eq!(dirty_rate("  dirtyrate.calc_status=1\n"), None);
    }

    #[test]
    fn a_dirty_rate_is_read_when_it_has_been_measured() {
        let stats = "Domain: 'dirtyrate.calc_status=2'\n  dirtyrate.calc_status=2\n  \
                     dirtyrate.megabytes_per_second=12\n";
        assert_eq!(dirty_rate(stats), Some(12));
    }
}
