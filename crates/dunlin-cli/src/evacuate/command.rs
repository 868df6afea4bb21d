//! The course of an evacuation: asks, plans, moves, reports.

use std::collections::BTreeMap;
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use anyhow::Result;
use dunlin_lane::sync::lock;
use dunlin_linux::signals::{EndSignal, EndSignals};
use serde_json::json;

use super::carry::{Asked, Carry, Ended, INTERVAL};
use super::facts::{entry, gather};
use super::flags::Evacuate;
use super::host::{Seen, is_leaving, watch};
use super::job::Job;
use super::plan::{Move, Plan, plan};
use super::record::{Entry, Outcome, Record};
use super::schedule::{Action, Event, Phase, Schedule};
use super::show::Show;
use super::verdict::{Verdict, Where};
use super::virsh::Virsh;
use crate::code::{CANCELLED, DONE, FAILED, IN_DOUBT, SIGNAL};
use crate::libvirt::leads_to_a_tunnel;
use crate::progress::Waiting;
use crate::text::{clean, count};

/// The highest rate that virsh takes, in MiB/s. It is libvirt's default.
const UNLIMITED: u64 = (1 << 43) - 1;

/// The number of refusals of a repeated request after which a warning is shown. Later refusals show
/// no further warning.
const REFUSALS: u32 = 5;

/// What the threads of an evacuation send to the main thread.
enum Happened {
    Seen(Vec<(usize, Seen)>),
    Ended(usize, Box<Ended>),
    /// libvirt refused a request, or virsh could not be run; with the reason.
    Refused(usize, &'static str, String),
    Signal(EndSignal),
}

impl Evacuate {
    pub(crate) fn run(&self) -> Result<i32> {
        let (sender, happened) = channel();
        let is_moving = Arc::new(AtomicBool::new(false));
        spawn("signals", {
            let (ends, sender) = (EndSignals::block()?, sender.clone());
            let is_moving = is_moving.clone();
            move || await_signals(&ends, &is_moving, &sender)
        })?;
        self.check()?;
        let mut show = Show::new(self.json);
        let source = Virsh::new(&self.from);
        let destinations: Vec<Virsh> = self.to.iter().map(|uri| Virsh::new(uri)).collect();
        let record = match self.dry_run {
            true => None,
            false => Some(Record::open(&self.state, &self.from)?),
        };
        let earlier = record.as_ref().map_or(&[][..], |record| &record.entries);
        let (plan, entries) = self.prepare(&source, &destinations, earlier, &mut show)?;
        let Some(mut record) = record else {
            return Ok(code(&entries, false));
        };
        let is_doubtful = |one: &Entry| one.result == Outcome::Doubt && !one.earlier;
        let is_halted = entries.iter().any(is_doubtful);
        record.entries = entries;
        record.write()?;
        let began = Instant::now();
        is_moving.store(true, Ordering::SeqCst);
        let to = plan.moves.iter();
        let to = to.map(|one| (one.to, one.vm.bound.is_some())).collect();
        let mut schedule = Schedule::new(self.rules(), to, is_halted);
        let hosts = (&source, &destinations[..]);
        let moves = Moves::new(self, hosts, &plan.moves, &mut record, (sender, happened));
        let signal = moves?.run(&mut schedule, &mut show)?;
        let reason = match signal {
            Some(_) => "the command was interrupted before the turn of this VM",
            None => "another VM is in doubt, so nothing more started",
        };
        for one in &plan.moves {
            if record.entries.iter().all(|entry| entry.uuid != one.vm.uuid) {
                let to = &self.to[one.to];
                let entry = entry(&one.vm, to, Outcome::NotStarted, reason);
                keep(&mut record, entry, &show);
            }
        }
        show.report(&record.entries, began.elapsed());
        let code = code(&record.entries, signal.is_some());
        if code == DONE {
            record.remove()?;
        }
        Ok(code)
    }

    /// Asks the hosts, plans the moves, and shows the plan. Returns the plan, and the VMs that are
    /// not a part of it.
    fn prepare(
        &self,
        source: &Virsh,
        destinations: &[Virsh],
        earlier: &[Entry],
        show: &mut Show,
    ) -> Result<(Plan, Vec<Entry>)> {
        let order = self.wanted_order()?;
        let facts = {
            let _waiting = Waiting::new(self.json, "asking libvirt");
            gather(source, destinations, &order, self.reserve, earlier)?
        };
        let plan = plan(facts.vms, facts.destinations.clone(), &order);
        show.plan(&plan, &facts.destinations);
        let mut entries = facts.entries;
        for one in entries.iter().filter(|one| !one.earlier) {
            show.ended(None, one);
        }
        for name in &plan.unknown {
            show.warn("unknown-vm", &format!("no VM {name} runs on {}", self.from));
        }
        self.warn_of_clear(show);
        for (vm, reason) in &plan.stays {
            entries.push(entry(vm, "", Outcome::NoRoom, reason));
        }
        Ok((plan, entries))
    }

    /// Warns if nothing encrypts the migrations, or if this host cannot check that.
    fn warn_of_clear(&self, show: &Show) {
        let is_local = self.from.contains(":///");
        if self.is_encrypted() || is_local && leads_to_a_tunnel(&self.config) {
            return;
        }
        match is_local {
            true => show.warn(
                "clear",
                "nothing on this host encrypts the migrations: memory leaves in the clear, unless the \
                 network is encrypted by other means. Run `dunlin libvirt enable`, or give --tls \
                 after --",
            ),
            false => show.warn(
                "unchecked",
                &format!(
                    "whether {} encrypts its migrations cannot be checked from here: run `dunlin libvirt \
                     status` there",
                    self.from
                ),
            ),
        }
    }
}

/// The exit code for these results.
fn code(entries: &[Entry], is_interrupted: bool) -> i32 {
    let has = |outcome| entries.iter().any(|one| one.result == outcome);
    if has(Outcome::Doubt) {
        IN_DOUBT
    } else if entries
        .iter()
        .all(|one| matches!(one.result, Outcome::Moved | Outcome::Off))
    {
        DONE
    } else if is_interrupted && !has(Outcome::Stayed) && !has(Outcome::NoRoom) {
        CANCELLED
    } else {
        FAILED
    }
}

/// A virsh command about a VM that moves.
struct Request {
    vm: usize,
    what: &'static str,
    words: Vec<String>,
    asked: Arc<Asked>,
}

/// The VMs that move.
struct Moves<'a> {
    evacuate: &'a Evacuate,
    source: &'a Virsh,
    destinations: &'a [Virsh],
    moves: &'a [Move],
    record: &'a mut Record,
    asked: Vec<Arc<Asked>>,
    phases: Vec<Phase>,
    /// The number of times that each request failed for each VM.
    refused: BTreeMap<(usize, &'static str), u32>,
    /// The figures of each VM's migration while it was under way.
    jobs: Vec<Option<Job>>,
    /// The VMs that are moving, for the thread that watches them.
    watched: Arc<Mutex<Vec<(usize, String)>>>,
    sender: Sender<Happened>,
    happened: Receiver<Happened>,
    requests: Sender<Request>,
    interrupt: Option<EndSignal>,
}

impl<'a> Moves<'a> {
    fn new(
        evacuate: &'a Evacuate,
        (source, destinations): (&'a Virsh, &'a [Virsh]),
        moves: &'a [Move],
        record: &'a mut Record,
        (sender, happened): (Sender<Happened>, Receiver<Happened>),
    ) -> Result<Self> {
        let (requests, wanted) = channel();
        let watched = Arc::new(Mutex::new(Vec::new()));
        spawn("watch", {
            let (source, watched, sender) = (source.clone(), watched.clone(), sender.clone());
            move || watch_all(&source, &watched, &sender)
        })?;
        spawn("requests", {
            let (source, sender) = (source.clone(), sender.clone());
            move || request_all(&source, &wanted, &sender)
        })?;
        Ok(Self {
            evacuate,
            source,
            destinations,
            moves,
            record,
            asked: moves.iter().map(|_| Arc::default()).collect(),
            phases: vec![Phase::Copying; moves.len()],
            refused: BTreeMap::new(),
            jobs: vec![None; moves.len()],
            watched,
            sender,
            happened,
            requests,
            interrupt: None,
        })
    }

    /// Moves all VMs; returns the signal that ended the evacuation early.
    fn run(mut self, schedule: &mut Schedule, show: &mut Show) -> Result<Option<EndSignal>> {
        let began = Instant::now();
        let mut events = vec![Event::Tick];
        loop {
            for event in events {
                for action in schedule.handle(began.elapsed(), event) {
                    self.perform(action, show)?;
                }
            }
            if schedule.is_over() {
                return Ok(self.interrupt);
            }
            events = match self.happened.recv_timeout(INTERVAL) {
                Ok(happened) => self.note(happened, schedule, show),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    vec![Event::Tick]
                }
            };
        }
    }

    /// Shows and records what has happened, and returns it as events.
    fn note(&mut self, happened: Happened, schedule: &Schedule, show: &mut Show) -> Vec<Event> {
        match happened {
            Happened::Seen(seen) => {
                let seen = seen.into_iter();
                seen.filter_map(|(vm, seen)| self.seen(vm, &seen, show))
                    .collect()
            }
            Happened::Ended(vm, ended) => {
                let is_doubtful = self.ended(vm, *ended, show);
                vec![Event::Ended { vm, is_doubtful }]
            }
            Happened::Refused(vm, what, reason) => {
                let times = self.refused.entry((vm, what)).or_default();
                *times += 1;
                // libvirt refuses these requests until QEMU has begun the migration, so the caller
                // repeats them. Warn only after several refusals.
                let is_repeated = matches!(what, "domjobabort" | "migrate-postcopy" | "suspend");
                if *times == if is_repeated { REFUSALS } else { 1 } {
                    let name = &self.moves[vm].vm.name;
                    show.warn("refused", &format!("{name}: virsh {what} failed: {reason}"));
                }
                Vec::new()
            }
            Happened::Signal(signal) => {
                self.interrupt = Some(signal);
                let finishing = schedule.finishing().len() as u64;
                let object = json!({
                    "event": "interrupted",
                    "signal": signal.name(),
                    "finishing": finishing,
                });
                let text = format!(
                    "{}: {} in switchover or post-copy will finish, the other migrations are \
                     cancelled, and none starts; a second signal ends this command at once",
                    signal.name(),
                    count(finishing, "VM"),
                );
                show.event(&object, &text);
                vec![Event::Interrupt]
            }
        }
    }

    fn seen(&mut self, vm: usize, seen: &Seen, show: &mut Show) -> Option<Event> {
        let of = &self.moves[vm].vm;
        let phase = match &seen.at {
            Where::Paused(reason) if reason.starts_with("post-copy") => Phase::Postcopy,
            // libvirt reports the reason "migrating" in two cases: this command has paused the
            // guest at its time limit, or the switchover has begun. `is_paused` tells them apart.
            Where::Paused(_) if self.asked[vm].is_paused.load(Ordering::SeqCst) => Phase::Paused,
            Where::Paused(reason) if reason == "migrating" => Phase::Switchover,
            Where::Running | Where::Paused(_) => Phase::Copying,
            _ => return None,
        };
        if phase == Phase::Switchover && self.phases[vm] != phase {
            show.switchover(&of.name, &of.uuid);
        }
        self.phases[vm] = phase;
        if let Some(job) = seen.job.as_ref().filter(|job| job.is_leaving()) {
            show.progress(vm, &of.name, &of.uuid, job);
            self.jobs[vm] = Some(job.clone());
        }
        Some(Event::Seen(vm, phase))
    }

    /// Shows and records the end of a VM's migration. Returns whether the VM is in doubt.
    fn ended(&mut self, vm: usize, ended: Ended, show: &mut Show) -> bool {
        lock(&self.watched).retain(|(watched, _)| *watched != vm);
        let is_cancelled = self.asked[vm].is_cancelled.load(Ordering::SeqCst);
        let (result, reason) = match ended.verdict {
            Verdict::Moved => (Outcome::Moved, String::new()),
            Verdict::Stayed if is_cancelled => {
                let why = match self.interrupt {
                    Some(signal) => format!("cancelled after {}", signal.name()),
                    None => "cancelled: its time limit is over".into(),
                };
                (Outcome::Cancelled, why)
            }
            Verdict::Stayed => (Outcome::Stayed, ended.reason),
            Verdict::StayedPaused => {
                let why = "it is at the source, paused: `virsh resume` lets it run";
                (Outcome::Doubt, format!("{why}; {}", ended.reason))
            }
            Verdict::Doubt(_) => (Outcome::Doubt, ended.reason),
            Verdict::Off => {
                let why = "its guest powered off, or another program stopped or moved it";
                (Outcome::Off, why.into())
            }
        };
        let one = &self.moves[vm];
        let to = &self.destinations[one.to].uri;
        let mut entry = entry(&one.vm, to, result, &reason);
        if one.vm.bound.is_none() {
            entry.duration_s = Some(ended.took.as_secs_f64());
        }
        // libvirt does not keep the figures of some migrations, such as those with post-copy. For
        // these, use the last figures from before the end.
        let entry = entry.with(ended.job.as_ref().or(self.jobs[vm].as_ref()));
        show.ended(Some(vm), &entry);
        keep(self.record, entry, show);
        result == Outcome::Doubt
    }

    fn perform(&mut self, action: Action, show: &mut Show) -> Result<()> {
        match action {
            Action::Start(vm, rate) => self.start(vm, rate, show)?,
            Action::Rate(vm, rate) => {
                // An earlier command can leave more migrations under way than the budget has MiB/s.
                // A share is 0 in that case, but the lowest rate of virsh is 1 MiB/s.
                let rate = rate.map_or(UNLIMITED, |rate| rate.max(1)).to_string();
                self.request(vm, "migrate-setspeed", &[&rate]);
                if self.carries_postcopy() {
                    self.request(vm, "migrate-setspeed", &["--postcopy", &rate]);
                }
            }
            Action::Cancel(vm) => {
                self.asked[vm].is_cancelled.store(true, Ordering::SeqCst);
                self.request(vm, "domjobabort", &[]);
            }
            Action::Postcopy(vm) => self.request(vm, "migrate-postcopy", &[]),
            Action::Pause(vm) => {
                self.asked[vm].is_paused.store(true, Ordering::SeqCst);
                self.request(vm, "suspend", &[]);
            }
        }
        Ok(())
    }

    fn carries_postcopy(&self) -> bool {
        let flags = self
            .moves
            .first()
            .map(|one| self.evacuate.flags_of(&one.vm));
        flags.is_some_and(|flags| flags.iter().any(|flag| flag == "--postcopy"))
    }

    fn request(&self, vm: usize, what: &'static str, more: &[&str]) {
        let mut words = vec![what.to_owned(), self.moves[vm].vm.uuid.clone()];
        words.extend(more.iter().map(|word| (*word).to_owned()));
        let asked = self.asked[vm].clone();
        // Cannot fail: the receiving thread lives as long as this value.
        let _ = self.requests.send(Request {
            vm,
            what,
            words,
            asked,
        });
    }

    fn start(&mut self, vm: usize, rate: Option<u64>, show: &mut Show) -> Result<()> {
        let (moves, destinations) = (self.moves, self.destinations);
        let Move { vm: of, to } = &moves[vm];
        let destination = &destinations[*to];
        let entry = entry(of, &destination.uri, Outcome::Moving, "");
        show.started(vm, &entry, of.bound.is_some());
        let mut flags = self.evacuate.flags_of(of);
        if let Some(rate) = rate.filter(|_| self.carries_postcopy()) {
            flags.extend(["--postcopy-bandwidth".to_owned(), rate.to_string()]);
        }
        let carry = Carry {
            vm: of.clone(),
            source: self.source.clone(),
            destination: destination.clone(),
            flags,
            rate,
            downtime: self.evacuate.downtime_limit,
        };
        if of.bound.is_some()
            && let Some(rate) = rate
        {
            self.request(vm, "migrate-setspeed", &[&rate.to_string()]);
        }
        // Record the VM before libvirt begins, because a later run must find it.
        keep(self.record, entry, show);
        lock(&self.watched).push((vm, of.uuid.clone()));
        let (asked, sender) = (self.asked[vm].clone(), self.sender.clone());
        spawn("carry", move || {
            let ended = Box::new(carry.run(&asked));
            let _ = sender.send(Happened::Ended(vm, ended));
        })
    }
}

/// Writes an entry to the state file. If that fails, the evacuation continues.
fn keep(record: &mut Record, entry: Entry, show: &Show) {
    if let Err(error) = record.set(entry) {
        show.warn("record", &format!("{error:#}"));
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new()
        .name(format!("evacuate-{name}"))
        .spawn(run)?;
    Ok(())
}

/// Waits for signals. If VMs are moving, the first signal makes the evacuation end early, and a
/// second signal ends the process. If none is moving, the first signal ends the process.
fn await_signals(ends: &EndSignals, is_moving: &AtomicBool, sender: &Sender<Happened>) {
    if let Ok(signal) = ends.wait() {
        if !is_moving.load(Ordering::SeqCst) {
            exit(SIGNAL + signal.number());
        }
        let _ = sender.send(Happened::Signal(signal));
    }
    if let Ok(signal) = ends.wait() {
        exit(SIGNAL + signal.number());
    }
}

/// Reports the VMs that move, until the main thread ends.
fn watch_all(source: &Virsh, watched: &Mutex<Vec<(usize, String)>>, sender: &Sender<Happened>) {
    loop {
        // The events that virsh prints identify domains by name only, so poll libvirt.
        thread::sleep(INTERVAL);
        let (numbers, uuids): (Vec<usize>, Vec<String>) = lock(watched).iter().cloned().unzip();
        // A daemon that restarts does not answer; `carry` decides how long that may take.
        let Ok(seen) = watch(source, &uuids) else {
            continue;
        };
        let seen = numbers.into_iter().zip(seen);
        let seen = seen.filter_map(|(vm, seen)| Some((vm, seen?)));
        if sender.send(Happened::Seen(seen.collect())).is_err() {
            return;
        }
    }
}

/// Passes requests to libvirt, one after the other, except those about migrations that are over.
fn request_all(source: &Virsh, wanted: &Receiver<Request>, sender: &Sender<Happened>) {
    for request in wanted {
        let is_over = lock(&request.asked.is_over);
        if *is_over {
            continue;
        }
        let words: Vec<&str> = request.words.iter().map(String::as_str).collect();
        let reason = match source.call(&words) {
            Ok(answer) if answer.is_ok => continue,
            Ok(answer) => answer.reason(),
            Err(error) => format!("{error:#}"),
        };
        // If the migration ended before the request, the refusal is expected.
        if !is_leaving(source, &request.words[1]) {
            continue;
        }
        let refused = Happened::Refused(request.vm, request.what, clean(&reason));
        if sender.send(refused).is_err() {
            return;
        }
    }
}
