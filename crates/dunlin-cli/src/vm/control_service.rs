//! State of a VM's process, and the operations that each state permits.
//!
//! ```text
//!  vm receive: Waiting ──▶ Arriving ──▶ Vm ◀── vm run
//!                 ▲            │         │
//!                 └── failed ──┘         ├ moving ──▶ moved: the process ends
//!                                        └ in doubt: paused until resolved
//! ```
//! One lock serialises requests, signals, the arrival of a VM, and the end of a VM that powers off
//! or fails.

use dunlin_lane::sync::{lock, wait};
use std::mem;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::ValueEnum;
use dunlin::engine::Cancel;
use dunlin::engine::destination::DestinationEvent;
use dunlin::engine::journal::{Journal, Role, SourceRecord, State};
use dunlin::engine::source::{self, VmLocation};
use dunlin::engine::{Host, StandardHost};
use dunlin_linux::signals::{EndSignal, EndSignals};
use dunlin_microvm::{Movable, Vm, VmState};

use super::moving::{COMMITTED, Moving};
use crate::code::{DONE, FAILED, SIGNAL};
use crate::control::{self, Socket};
use crate::identity::{Common, client_tls};
use crate::line::{FailedLine, Line, MigrationLine, StatusLine, millis};
use crate::output::put;
use crate::published::CertificateLine;
use crate::service::start;
use crate::state::hex;
use crate::text::clean;
use crate::vm::request::Decision;

/// How a process prints lines about its VMs.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
    /// Whether the process can own several VMs. If so, each line about a VM names it.
    pub(crate) several: bool,
}

/// The state of one VM of this process.
pub(crate) struct ControlService {
    output: Output,
    /// The journal of this process's sessions.
    pub(super) journal: Journal,
    /// Directory with records of the policies and SAs that this process installs for lanes
    /// over IPsec.
    pub(super) ipsec_records: PathBuf,
    /// The directory of the history of migrations.
    pub(super) history: Option<PathBuf>,
    state: Mutex<Now>,
    changed: Condvar,
    /// Path of this process's control socket.
    owner: Mutex<String>,
}

#[derive(Default)]
struct Now {
    holds: Holds,
    phase: Phase,
    ending: Ending,
    /// Number of the current attempt to receive a VM, counted from 1. An attempt includes the wait
    /// for its source.
    attempt: u64,
    cancel: Cancel,
}

/// The phase of the VM that is here.
#[derive(Default)]
enum Phase {
    /// No migration away from here is under way, and no earlier migration left the VM in doubt.
    #[default]
    Idle,
    Moving(Arc<Moving>),
    /// As the source, this process began to send *commit*. It got no answer, or the answer that the
    /// VM ran at the destination and died there. The copy here stays paused.
    InDoubt {
        record: Record,
        /// Whether this process has got a signal to end after the migration left the VM in doubt.
        signalled: bool,
    },
}

/// The record of the session that left a VM in doubt.
enum Record {
    /// The record, locked by this process. The lock shows other processes that this process is
    /// alive.
    Held(Box<source::Doubt>),
    /// A request has taken the record, and queries the destination.
    InUse,
    /// This process found no record of the session in the journal, or could not lock the record.
    /// The next request searches again.
    Missing,
}

impl Record {
    fn location(&self) -> &'static str {
        let died = State::Source(SourceRecord::RanThenDied);
        match self {
            Self::Held(own) if own.record().state == died => "ran-then-died",
            _ => "in-doubt",
        }
    }
}

/// Whether this process has been asked to end.
#[derive(Clone, Copy, Default)]
enum Ending {
    #[default]
    No,
    /// The first signal that asked this process to end.
    By(EndSignal),
}

#[derive(Default)]
enum Holds {
    #[default]
    Waiting,
    Arriving(Box<Arriving>),
    Vm(Arc<Movable>),
}

struct Arriving {
    line: StatusLine,
    migration: MigrationLine,
    since: Instant,
}

/// Commands to a VM.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Command {
    Pause,
    Resume,
    PowerOff,
}

impl ControlService {
    pub(crate) fn new(
        output: Output,
        journal: Journal,
        ipsec_records: PathBuf,
        history: Option<PathBuf>,
    ) -> Arc<Self> {
        Arc::new(Self {
            output,
            journal,
            ipsec_records,
            history,
            state: Mutex::default(),
            changed: Condvar::new(),
            owner: Mutex::default(),
        })
    }

    /// Creates the state for another VM of this process.
    pub(crate) fn another(&self) -> Arc<Self> {
        let (journal, records) = (self.journal.clone(), self.ipsec_records.clone());
        Self::new(self.output, journal, records, self.history.clone())
    }

    /// Path of the control socket; empty before there is one.
    pub(crate) fn owner(&self) -> String {
        lock(&self.owner).clone()
    }

    /// Serves the control socket until `socket` is dropped.
    pub(crate) fn serve(self: &Arc<Self>, socket: &Socket) -> Result<()> {
        *lock(&self.owner) = socket.path.display().to_string();
        socket.serve(self)
    }

    /// At the first signal, ends this process cleanly, or only warns if the process keeps a VM in
    /// doubt. At the second signal, ends the process immediately. `services` are those of all VMs
    /// of this process.
    pub(crate) fn watch(services: Vec<Arc<Self>>, signals: EndSignals) -> Result<()> {
        start("signals", move || {
            while let Ok(signal) = signals.wait() {
                for service in &services {
                    service.end(signal);
                }
            }
        })?;
        Ok(())
    }

    fn end(&self, signal: EndSignal) {
        let name = signal.name();
        let mut state = lock(&self.state);
        if let Phase::InDoubt { signalled, .. } = &mut state.phase {
            if mem::replace(signalled, true) {
                std::process::exit(SIGNAL + signal.number());
            }
            return self.warn(&format!(
                "{name}: this process keeps the paused copy of a VM that may run elsewhere, and \
                 stays until `dunlin resolve`; a second signal ends it anyway"
            ));
        }
        if let Ending::By(_) = mem::replace(&mut state.ending, Ending::By(signal)) {
            std::process::exit(SIGNAL + signal.number());
        }
        if let Some(moving) = state.under_way() {
            self.warn(&match moving.ask_to_end() {
                Ok(()) => format!("{name}: cancelling the migration, then ending"),
                Err(_) => format!(
                    "{name}: too late to cancel the migration; ending after the destination's \
                     answer"
                ),
            });
        } else if state.held().is_none() {
            state.cancel.cancel();
        }
        self.changed.notify_all();
    }

    /// Logs a warning, and prints it for the operator.
    pub(crate) fn warn(&self, text: &str) {
        tracing::warn!("{text}");
        Line::Warning { text: text.into() }.say(self.output.json);
    }

    // Methods for the arrival of a VM.

    /// Prepares for the next attempt to receive a VM; `None` if this process is ending.
    pub(crate) fn next_attempt(&self) -> Option<Cancel> {
        let mut state = lock(&self.state);
        state.attempt += 1;
        state.holds = Holds::Waiting;
        state.cancel = Cancel::new();
        self.changed.notify_all();
        matches!(state.ending, Ending::No).then(|| state.cancel.clone())
    }

    /// The signal that asked this process to end, if any.
    pub(crate) fn ending(&self) -> Option<EndSignal> {
        match lock(&self.state).ending {
            Ending::By(signal) => Some(signal),
            Ending::No => None,
        }
    }

    /// Whether a source has connected and its attempt has not ended.
    pub(crate) fn is_arriving(&self) -> bool {
        matches!(lock(&self.state).holds, Holds::Arriving(_))
    }

    /// Updates the state with an event of the arrival.
    pub(crate) fn observe(&self, event: &DestinationEvent) {
        let mut state = lock(&self.state);
        match (event, &mut state.holds) {
            (DestinationEvent::Connected { peer }, holds) => {
                *holds = Holds::Arriving(Box::new(Arriving {
                    line: StatusLine {
                        uuid: hex(&[0; 16]),
                        pid: std::process::id(),
                        state: "arriving".into(),
                        ..StatusLine::default()
                    },
                    migration: MigrationLine {
                        role: "destination".into(),
                        peer: peer.clone(),
                        phase: "connecting".into(),
                        ..MigrationLine::default()
                    },
                    since: Instant::now(),
                }));
            }
            (DestinationEvent::Offered(offered), Holds::Arriving(arriving)) => {
                let line = &mut arriving.line;
                line.name.clone_from(&offered.vm.name);
                line.uuid = hex(&offered.vm.uuid);
                line.memory_bytes = offered.regions.iter().map(|region| region.length).sum();
                arriving.migration.phase = "pre-copy".into();
            }
            (DestinationEvent::Ready, Holds::Arriving(arriving)) => {
                arriving.migration.phase = "switchover".into();
            }
            (DestinationEvent::LaneLost { .. }, Holds::Arriving(arriving)) => {
                arriving.migration.lanes_lost += 1;
            }
            (DestinationEvent::Running { .. }, Holds::Arriving(arriving)) => {
                arriving.migration.phase = COMMITTED.into();
            }
            _ => {}
        }
    }

    // Methods for the VM that is here.

    /// Takes the VM: from now on it has a status and accepts commands. If a signal came too late to
    /// cancel the VM's arrival, only warns.
    pub(crate) fn hold(&self, vm: &Arc<Movable>) {
        let mut state = lock(&self.state);
        if matches!(state.holds, Holds::Arriving(_))
            && let Ending::By(signal) = mem::take(&mut state.ending)
        {
            self.warn(&format!(
                "{}: too late to cancel: the VM is here and stays; a second signal ends it",
                signal.name()
            ));
        }
        state.holds = Holds::Vm(Arc::clone(vm));
        self.changed.notify_all();
    }

    /// Waits until the VM ends or moves away, or until a signal ends this process. Returns the exit
    /// code. The caller has passed the VM to `hold` before.
    pub(crate) fn keep(self: &Arc<Self>, vm: &Arc<Movable>) -> Result<i32> {
        let (service, watched) = (Arc::clone(self), Arc::clone(vm));
        start("vm-watch", move || {
            let hour = Duration::from_secs(3600);
            while !watched.vm().wait_until_ended(hour).has_ended() {}
            // The loop below checks the VM and begins to wait without releasing this lock in
            // between, so it does not miss this notification.
            let _state = lock(&service.state);
            service.changed.notify_all();
        })?;
        let mut state = lock(&self.state);
        let (how, code) = loop {
            if state.under_way().is_none() {
                match (vm.vm().state(), state.ending) {
                    (ended @ (VmState::Moved | VmState::PoweredOff), _) => {
                        break (ended.to_string(), DONE);
                    }
                    (ended, _) if ended.has_ended() => break (ended.to_string(), FAILED),
                    (_, Ending::By(signal)) => {
                        break (format!("ended by {}", signal.name()), DONE);
                    }
                    (_, Ending::No) => {}
                }
            }
            state = wait(&self.changed, state, None);
        };
        drop(state);
        let name = &vm.vm().config().name;
        let Output { json, several } = self.output;
        // With several VMs, do not wait here: requests to the other VMs would prolong the wait.
        if !several {
            control::drain();
        }
        if json {
            let line = Line::Ended { state: how, code };
            line.say_of(several.then_some(name), json);
        } else {
            put(&format!("{}: {}", clean(name), clean(&how)));
        }
        Ok(code)
    }

    /// Drops the VM, which has ended or moved away, so that its memory is free for other VMs of
    /// this process.
    pub(crate) fn release(&self) {
        lock(&self.state).holds = Holds::Waiting;
    }

    /// Status of this process and its VM.
    pub(crate) fn status(&self) -> Result<StatusLine> {
        let state = lock(&self.state);
        match &state.holds {
            Holds::Waiting => bail!("this process has no VM now"),
            Holds::Arriving(arriving) => Ok(arriving.status()),
            Holds::Vm(vm) => {
                let mut line = status_of(vm.vm());
                line.migration = state.under_way().map(|moving| moving.line());
                if let Phase::InDoubt { .. } = state.phase {
                    line.state = "in-doubt".into();
                }
                Ok(line)
            }
        }
    }

    /// Where the VM of this process is, as one of the values of [`FailedLine::vm`].
    pub(super) fn location(&self) -> &'static str {
        let state = lock(&self.state);
        match (&state.holds, &state.phase) {
            (Holds::Waiting, _) => "",
            (Holds::Arriving(arriving), _) if arriving.migration.phase == COMMITTED => {
                "at-destination"
            }
            (Holds::Arriving(_), _) => "at-source",
            (Holds::Vm(vm), _) if vm.vm().state() == VmState::Moved => "at-destination",
            (_, Phase::Moving(moving)) if moving.is_committed() => "in-doubt",
            (_, Phase::InDoubt { record, .. }) => record.location(),
            (Holds::Vm(_), _) => "at-source",
        }
    }

    /// The status for the status socket, with the certificates of the process's identity. A process
    /// without a VM has the state `waiting`.
    pub(crate) fn report(&self, certificates: Vec<CertificateLine>) -> String {
        let mut status = self.status().unwrap_or_else(|_| StatusLine {
            pid: std::process::id(),
            state: "waiting".into(),
            ..StatusLine::default()
        });
        status.certificates = certificates;
        Line::Status(Box::new(status)).to_json()
    }

    /// Carries out a command, unless a migration or an unresolved doubt forbids it.
    pub(crate) fn command(&self, command: Command) -> Result<()> {
        let state = lock(&self.state);
        let vm = state.vm()?;
        // If the VM were resumed after *commit*, it could run twice (I1).
        if state.under_way().is_some() && !matches!(command, Command::PowerOff) {
            bail!("the VM is being migrated: wait until the migration ends");
        }
        match command {
            Command::Pause => vm.vm().pause()?,
            Command::Resume => vm.vm().resume()?,
            Command::PowerOff => vm.vm().ask_power_off(),
        }
        Ok(())
    }

    /// Reserves the VM for the migration `moving`.
    pub(crate) fn begin(&self, moving: &Arc<Moving>) -> Result<Arc<Movable>> {
        let mut state = lock(&self.state);
        let vm = Arc::clone(state.vm()?);
        if state.under_way().is_some() {
            bail!("the VM is already being migrated");
        }
        if let Ending::By(_) = state.ending {
            bail!("the VM's process is ending");
        }
        state.phase = Phase::Moving(Arc::clone(moving));
        Ok(vm)
    }

    /// Ends the migration `moving`, which has reserved the VM.
    pub(crate) fn finish(&self, moving: &Moving, line: Line) {
        let mut state = lock(&self.state);
        state.phase = Phase::Idle;
        if let Line::Failed(failed) = &line
            && matches!(&*failed.vm, "in-doubt" | "ran-then-died")
            && let Some(vm) = state.held()
        {
            state.phase = Phase::InDoubt {
                record: self.record_of(vm),
                signalled: false,
            };
            // If the process was asked to end, it now waits for an operator's decision instead.
            state.ending = Ending::No;
        }
        moving.end(line);
        self.changed.notify_all();
    }

    /// The record of the session that left this VM in doubt. Another process may have a VM with the
    /// same UUID in doubt, so the record must name this process.
    fn record_of(&self, vm: &Movable) -> Record {
        let owner = self.owner();
        let found = self.journal.list().unwrap_or_else(|error| {
            self.warn(&format!("cannot read the journal: {error}"));
            Vec::new()
        });
        found
            .into_iter()
            .rev()
            .filter(|entry| {
                entry.role == Role::Source
                    && matches!(&entry.record, Ok(Some(record))
                        if record.owner == owner
                            && record.vm_uuid == vm.vm().config().uuid
                            && matches!(record.state, State::Source(
                                SourceRecord::Committing | SourceRecord::RanThenDied)))
            })
            .find_map(|entry| source::Doubt::taken_over(&self.journal, entry.session, false).ok())
            .map_or(Record::Missing, |record| Record::Held(record.into()))
    }

    /// Carries out the operator's decision about a VM in doubt, after recording it.
    pub(crate) fn resolve(&self, session: [u8; 16], decision: Decision) -> Result<()> {
        let mut state = lock(&self.state);
        let (vm, mut record) = self.take_doubt(&mut state, session)?;
        let resolution = match decision {
            Decision::RunHere => source::Resolution::RunHere,
            Decision::Destroy => source::Resolution::Destroy,
        };
        let resolved = record.resolve(&*vm, resolution);
        self.put_back(&mut state, record, resolved.is_ok());
        Ok(resolved?)
    }

    /// Queries the destination about a VM in doubt and acts on the answer.
    pub(crate) fn ask_destination(
        &self,
        session: [u8; 16],
        common: &Common,
        options: &source::Options,
    ) -> Result<VmLocation> {
        let (vm, mut record) = self.take_doubt(&mut lock(&self.state), session)?;
        let host: Arc<dyn Host> = Arc::new(StandardHost);
        let asked = client_tls(common, &record.record().peer)
            .and_then(|(tls, _)| Ok(record.ask(Some(&*vm), &tls, options, &host)?));
        let over = matches!(asked, Ok(VmLocation::AtSource | VmLocation::AtDestination));
        self.put_back(&mut lock(&self.state), record, over);
        asked
    }

    /// Takes the record of the session that left the VM in doubt; returns the VM and the record.
    fn take_doubt(
        &self,
        state: &mut Now,
        session: [u8; 16],
    ) -> Result<(Arc<Movable>, Box<source::Doubt>)> {
        let Some(vm) = state.held().map(Arc::clone) else {
            bail!("this process has no VM now");
        };
        let Phase::InDoubt { record, .. } = &mut state.phase else {
            bail!("nothing is in doubt: the VM is {} here", vm.vm().state());
        };
        if let Record::Missing = record {
            *record = self.record_of(&vm);
        }
        match mem::replace(record, Record::InUse) {
            Record::Held(own) if own.record().session == session => return Ok((vm, own)),
            other => *record = other,
        }
        if let Record::Held(_) = record {
            bail!("another session left this VM in doubt: see `dunlin status`");
        }
        bail!(
            "this process has no record of the session, or is already querying its destination: check \
             that --state-dir is that of the VM's process"
        );
    }

    /// Ends the doubt if `over`; otherwise stores the record again.
    fn put_back(&self, state: &mut Now, record: Box<source::Doubt>, over: bool) {
        if !over {
            if let Phase::InDoubt { record: place, .. } = &mut state.phase {
                *place = Record::Held(record);
            }
            return;
        }
        state.phase = Phase::Idle;
        // The record is not needed any more: no peer queries a source that has decided.
        if let Err(error) = record.forget() {
            self.warn(&format!(
                "cannot remove the session from the journal: {error}"
            ));
        }
        self.changed.notify_all();
    }

    /// The migration under way.
    pub(crate) fn moving(&self) -> Result<Arc<Moving>> {
        match lock(&self.state).under_way() {
            Some(moving) => Ok(Arc::clone(moving)),
            None => bail!("the VM is not being migrated"),
        }
    }

    /// Cancels the migration or arrival and waits for its end.
    ///
    /// # Errors
    /// The reason why the migration or arrival was not cancelled.
    pub(crate) fn cancel(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if let Phase::InDoubt { .. } = state.phase {
            bail!(
                "too late to cancel: the VM is in doubt, because the destination may have \
                 received commit; see `dunlin status` and `dunlin resolve`"
            );
        }
        if let Some(moving) = state.under_way().cloned() {
            drop(state);
            moving.ask_to_end()?;
            return match moving.wait() {
                Line::Failed(FailedLine { vm, fault, .. })
                    if vm == "at-source" && fault == "cancelled" =>
                {
                    Ok(())
                }
                Line::Failed(failed) => bail!("the migration itself failed: {}", failed.text),
                // The migration's thread could not be started.
                Line::Warning { text } => bail!("{text}"),
                _ => bail!("too late to cancel: the VM has moved"),
            };
        }
        match &state.holds {
            Holds::Arriving(arriving) if arriving.migration.phase != COMMITTED => {
                state.cancel.cancel()
            }
            Holds::Arriving(_) => bail!("too late to cancel: the VM is here"),
            _ => bail!("no migration is under way"),
        }
        let attempt = state.attempt;
        while state.attempt == attempt && matches!(state.holds, Holds::Arriving(_)) {
            state = wait(&self.changed, state, None);
        }
        if matches!(state.holds, Holds::Vm(_)) {
            bail!("too late to cancel: the VM is here");
        }
        Ok(())
    }
}

impl Now {
    /// The VM, if it is here.
    fn held(&self) -> Option<&Arc<Movable>> {
        match &self.holds {
            Holds::Vm(vm) => Some(vm),
            Holds::Waiting | Holds::Arriving(_) => None,
        }
    }

    /// The VM, if it accepts commands.
    fn vm(&self) -> Result<&Arc<Movable>> {
        match (&self.holds, &self.phase) {
            (Holds::Vm(_), Phase::InDoubt { .. }) => bail!(
                "the VM is in doubt: the destination may have received commit and may run the \
                 VM, so the VM must not be changed here; see `dunlin status` and `dunlin resolve`"
            ),
            (Holds::Vm(vm), _) => Ok(vm),
            (Holds::Arriving(_), _) => bail!("the VM is still arriving"),
            (Holds::Waiting, _) => bail!("this process has no VM now"),
        }
    }

    fn under_way(&self) -> Option<&Arc<Moving>> {
        match &self.phase {
            Phase::Moving(moving) => Some(moving),
            _ => None,
        }
    }
}

impl Arriving {
    fn status(&self) -> StatusLine {
        let mut line = self.line.clone();
        line.migration = Some(MigrationLine {
            seconds: self.since.elapsed().as_secs_f64(),
            ..self.migration.clone()
        });
        line
    }
}

/// Status of a VM of this process.
fn status_of(vm: &Vm) -> StatusLine {
    let stats = vm.stats();
    StatusLine {
        name: vm.config().name.clone(),
        uuid: hex(&vm.config().uuid),
        pid: std::process::id(),
        state: vm.state().to_string(),
        memory_bytes: vm.config().memory_bytes,
        pages_checked: stats.pages_checked,
        beats: stats.beats,
        full_passes: vm.full_passes(),
        downtime_ms: stats.downtime.map(millis),
        largest_gap_ms: millis(stats.largest_gap),
        ..StatusLine::default()
    }
}
