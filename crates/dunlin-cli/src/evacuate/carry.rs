//! The migration of one VM: starts it, or adopts it if it is already under way, and asks both hosts
//! for the outcome.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use dunlin_lane::sync::lock;

use super::host::{completed, is_leaving, whereabouts};
use super::job::Job;
use super::plan::Vm;
use super::verdict::{Verdict, Where, judge};
use super::virsh::Virsh;

/// Time between two questions to a host.
pub(super) const INTERVAL: Duration = Duration::from_millis(200);

/// How long a host may be silent before the VM is in doubt: a restart of libvirt's daemon takes
/// less time.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// How long the two hosts may contradict each other before the VM is in doubt. After a failed
/// migration, libvirt answers the source before it removes the VM from the destination.
const CONTRADICTION_LIMIT: Duration = Duration::from_secs(10);

/// What this command has requested for a VM's migration.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub(super) is_cancelled: AtomicBool,
    /// A pause of the guest was requested, because the migration exceeded the time limit.
    pub(super) is_paused: AtomicBool,
    /// Whether the migration is over. Locked during a request, because a request after the end of
    /// the migration would pause or slow down a VM that has stayed at the source.
    pub(super) is_over: Mutex<bool>,
}

#[derive(Debug)]
pub(super) struct Carry {
    pub(super) vm: Vm,
    pub(super) source: Virsh,
    pub(super) destination: Virsh,
    /// Flags of `virsh migrate`.
    pub(super) flags: Vec<String>,
    /// The initial rate in MiB/s.
    pub(super) rate: Option<u64>,
    pub(super) downtime: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Ended {
    pub(super) verdict: Verdict,
    /// Why the VM did not move; empty if it moved or is off.
    pub(super) reason: String,
    /// The figures of the VM's migration.
    pub(super) job: Option<Job>,
    pub(super) took: Duration,
}

impl Carry {
    /// Moves the VM, and returns when the migration has ended, whatever its outcome.
    pub(super) fn run(&self, asked: &Asked) -> Ended {
        let began = Instant::now();
        let mut before = Vec::new();
        let mut reason = String::new();
        let is_new = self.vm.bound.is_none();
        // A migration that was already under way keeps its settings.
        if is_new && !asked.is_cancelled.load(Ordering::SeqCst) {
            // While this lock is held, no request changes the settings.
            let _no_request = lock(&asked.is_over);
            before = self.settings();
        }
        // If this migration fails immediately, libvirt still reports the figures of an earlier one.
        let stale = is_new.then(|| self.last_job()).flatten();
        if is_new && self.is_off() {
            return Ended {
                verdict: Verdict::Off,
                reason,
                job: None,
                took: began.elapsed(),
            };
        }
        if is_new && !asked.is_cancelled.load(Ordering::SeqCst) {
            reason = match self.migrate() {
                Ok(reason) => reason,
                Err(error) => format!("{error:#}"),
            };
        }
        let mut verdict = settle(&self.source, &self.destination, &self.vm);
        *lock(&asked.is_over) = true;
        let is_here = matches!(verdict, Verdict::Stayed | Verdict::StayedPaused);
        if is_here && !self.vm.is_paused && asked.is_paused.load(Ordering::SeqCst) {
            // Fails if libvirt has resumed the guest already.
            let _ = self.source.ask(&["resume", &self.vm.uuid]);
            verdict = settle(&self.source, &self.destination, &self.vm);
        }
        let job = match &verdict {
            Verdict::Moved => {
                completed(&self.destination, &self.vm.uuid).or_else(|| self.last_job())
            }
            _ => self.last_job().filter(|job| Some(job) != stale.as_ref()),
        };
        match &verdict {
            Verdict::Moved | Verdict::Off => reason.clear(),
            Verdict::Stayed | Verdict::StayedPaused => {
                for words in before {
                    let _ = self.call(&words);
                }
                let cause = job.as_ref().and_then(Job::error);
                if reason.is_empty() {
                    reason = cause.unwrap_or("libvirt gave no reason").to_owned();
                }
            }
            Verdict::Doubt(text) => reason = format!("{text}; {reason}"),
        }
        Ended {
            verdict,
            reason,
            job,
            took: began.elapsed(),
        }
    }

    /// Whether the VM has ended before its turn, which may come hours after the plan.
    fn is_off(&self) -> bool {
        let at = whereabouts(&self.source, &self.vm.uuid);
        matches!(at, Where::Absent | Where::Off(_))
    }

    fn last_job(&self) -> Option<Job> {
        completed(&self.source, &self.vm.uuid)
    }

    fn call(&self, words: &[String]) -> Result<String> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.source.ask(&words)
    }

    /// Limits the downtime. libvirt keeps changed settings after a migration, so this function
    /// returns the commands that restore the earlier settings.
    fn settings(&self) -> Vec<Vec<String>> {
        let uuid = self.vm.uuid.as_str();
        let mut before = Vec::new();
        let mut keep = |get: &str, set: &str| {
            if let Ok(value) = self.source.ask(&[get, uuid]) {
                let set = [set, uuid, value.trim()].map(str::to_owned);
                before.push(set.into());
            }
        };
        if self.rate.is_some() {
            keep("migrate-getspeed", "migrate-setspeed");
        }
        if let Some(limit) = self.downtime {
            keep("migrate-getmaxdowntime", "migrate-setmaxdowntime");
            let limit = limit.as_millis().to_string();
            let _ = self.source.ask(&["migrate-setmaxdowntime", uuid, &limit]);
        }
        before
    }

    /// Runs `virsh migrate`. Returns libvirt's reason if it fails, and an empty text otherwise.
    /// With `--p2p`, the source's libvirt continues if virsh or this process ends.
    fn migrate(&self) -> Result<String> {
        let mut words = vec!["migrate", "--live", "--p2p"];
        let rate = self.rate.map(|rate| rate.to_string());
        if let Some(rate) = &rate {
            words.extend(["--bandwidth", rate]);
        }
        words.extend(self.flags.iter().map(String::as_str));
        words.extend([
            "--domain",
            &self.vm.uuid,
            "--desturi",
            &self.destination.uri,
        ]);
        let answer = self.source.start(&words)?.wait(None)?;
        Ok(match answer.is_ok {
            true => String::new(),
            false => answer.reason(),
        })
    }
}

/// Waits until the migration of the VM has ended and the hosts agree where the VM is. If they do
/// not agree within a time limit, the VM is in doubt.
pub(super) fn settle(source: &Virsh, destination: &Virsh, vm: &Vm) -> Verdict {
    let mut since = Instant::now();
    loop {
        // virsh may have ended although the migration continues.
        if is_leaving(source, &vm.uuid) {
            since = Instant::now();
        } else {
            let [here, there] = [source, destination].map(|host| whereabouts(host, &vm.uuid));
            let is_silent = [&here, &there]
                .iter()
                .any(|at| matches!(at, Where::Unknown(_)));
            let limit = match is_silent {
                true => SILENCE_LIMIT,
                false => CONTRADICTION_LIMIT,
            };
            match judge(&here, &there, vm.is_paused) {
                Verdict::Doubt(_) if since.elapsed() < limit => {}
                verdict => return verdict,
            }
        }
        thread::sleep(INTERVAL);
    }
}
