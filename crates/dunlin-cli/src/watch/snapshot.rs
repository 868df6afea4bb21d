//! The state of all processes of this host at one time.

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, bail};
use dunlin::engine::journal::{Entry, Record, Role, SourceRecord, State};
use dunlin::engine::vmm::FaultCode;
use dunlin_lane::sync::lock;
use serde::{Deserialize, Serialize};

use crate::code::FAILED;
use crate::ipsec;
use crate::line::{FailedLine, HandoffLine, Line, MigrationLine, StatusLine};
use crate::options::{ControlPath, IPSEC, TUNNELS};
use crate::published::{self, CertificateLine, STATUS};
use crate::state::{StatePath, hex};
use crate::text::chained;
use crate::tunnel::{self, line::TunnelLine};
use crate::vm;

/// Time limit for the answer of a process. A stopped process does not answer.
pub(crate) const LIVE_LIMIT: Duration = Duration::from_secs(2);

/// Maximum number of processes that are shown. There is a limit because a member of the status
/// directory's group can create any number of sockets in the directory.
const MAX_PROCESSES: usize = 4096;

/// Maximum number of processes that are asked at the same time. Each further process is asked when one
/// of these has answered.
const ASKED_AT_ONCE: usize = 32;

/// The sessions, tunnels, keying sessions and hand-offs of this host at one time.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// When the snapshot was complete, by this host's clock.
    pub(crate) taken: SystemTime,
    /// The same time on the monotonic clock, for rates.
    pub(crate) at: Instant,
    /// The sessions in the journals ([`Snapshot::take`]), or those that processes report
    /// ([`Snapshot::published`]).
    pub(crate) sessions: Vec<Session>,
    pub(crate) tunnels: Vec<TunnelLine>,
    /// The IPsec sessions of the processes `ipsec serve` and `ipsec up`.
    pub(crate) ipsec: Vec<ipsec::SessionLine>,
    /// The processes `handoff accept`.
    pub(crate) handoffs: Vec<HandoffLine>,
    /// The identities of processes other than tunnels and hand-offs.
    pub(crate) identities: Vec<Held>,
    /// The processes that gave no valid answer in time.
    pub(crate) silent: Vec<Silent>,
    /// Why the journals could not be listed, or why single journals could not be read.
    pub(crate) failures: Vec<FailedLine>,
}

/// A session, from a journal, from its process, or from both.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) line: SessionLine,
    /// What the journal says; `None` if only the session's process reported the session.
    pub(crate) recorded: Option<Recorded>,
}

/// A session as the journal describes it.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) entry: Entry,
    /// The record of `entry`.
    pub(crate) record: Record,
}

/// A session as `dunlin status --json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionLine {
    pub(crate) session: String,
    pub(crate) role: String,
    pub(crate) phase: String,
    pub(crate) vm: String,
    pub(crate) uuid: String,
    pub(crate) peer: String,
    pub(crate) attempt: u32,
    /// `lives` or `died`.
    pub(crate) process: String,
    /// The control socket of the process that owns the VM.
    pub(crate) owner: String,
    pub(crate) started_ms: u64,
    pub(crate) recorded_ms: u64,
    /// Whether an operator may have to settle the session with `dunlin resolve`.
    pub(crate) resolvable: bool,
    /// The status that the session's process reports, if it answers.
    pub(crate) live: Option<StatusLine>,
}

impl SessionLine {
    /// Identifies the session and the role of this host in it.
    pub(crate) fn key(&self) -> String {
        format!("{} {}", self.session, self.role)
    }
}

/// The identity that a process holds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Held {
    /// `vm` or `ipsec`.
    pub(crate) kind: String,
    /// The name of the process, or of its VM; empty before the VM arrives.
    pub(crate) name: String,
    pub(crate) certificates: Vec<CertificateLine>,
}

/// A process that gave no valid answer in time.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Silent {
    /// `vm`, `tunnel`, `ipsec` or `handoff`.
    pub(crate) kind: String,
    pub(crate) control: String,
    pub(crate) text: String,
}

/// A control socket or status socket, by the kind of its process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Vm(PathBuf),
    Tunnel(PathBuf),
    Ipsec(PathBuf),
    Handoff(PathBuf),
}

enum Answer {
    Vm(Box<StatusLine>),
    Tunnel(Box<TunnelLine>),
    Ipsec(ipsec::Answer),
    Handoff(HandoffLine),
}

impl Target {
    fn path(&self) -> &Path {
        match self {
            Self::Vm(path) | Self::Tunnel(path) => path,
            Self::Ipsec(path) | Self::Handoff(path) => path,
        }
    }

    /// The process behind a status socket, by the socket's name; `None` for another name.
    fn published(socket: PathBuf) -> Option<Self> {
        let name = socket.file_name()?.to_str()?;
        let (kind, _) = name.split_once('-')?;
        match kind {
            "vm" => Some(Self::Vm(socket)),
            "tunnel" => Some(Self::Tunnel(socket)),
            "ipsec" => Some(Self::Ipsec(socket)),
            "handoff" => Some(Self::Handoff(socket)),
            _ => None,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Vm(_) => "vm",
            Self::Tunnel(_) => "tunnel",
            Self::Ipsec(_) => "ipsec",
            Self::Handoff(_) => "handoff",
        }
    }

    fn ask(&self, limit: Duration) -> Result<Answer> {
        Ok(match self {
            Self::Vm(path) => Answer::Vm(Box::new(vm::status(path, limit)?)),
            Self::Tunnel(path) => Answer::Tunnel(Box::new(tunnel::status_within(path, limit)?)),
            Self::Ipsec(path) => Answer::Ipsec(ipsec::status_within(path, limit)?),
            Self::Handoff(_) => bail!("a hand-off takes no requests"),
        })
    }

    /// Reads a status socket; `None` if its process has died.
    fn read(&self, limit: Duration) -> Result<Option<Answer>> {
        let Some(text) = published::read(self.path(), limit)? else {
            return Ok(None);
        };
        let answer = match self {
            Self::Ipsec(_) => Answer::Ipsec(serde_json::from_str(&text)?),
            _ => match (self, serde_json::from_str(&text)?) {
                (Self::Vm(_), Line::Status(status)) => Answer::Vm(status),
                (Self::Tunnel(_), Line::Tunnel(line)) => Answer::Tunnel(line),
                (Self::Handoff(_), Line::Handoff(line)) => Answer::Handoff(line),
                _ => bail!("unexpected status: the process probably runs another release"),
            },
        };
        Ok(Some(answer))
    }
}

impl Snapshot {
    /// Reads the journals, and asks the processes at their control sockets; each has `limit` to
    /// answer.
    pub(crate) fn take(state: &StatePath, control: &ControlPath, limit: Duration) -> Self {
        let (sessions, failures) = read_journals(state);
        let owners = sessions.iter().filter_map(Session::owner);
        let mut targets: Vec<Target> = owners.map(Target::Vm).collect();
        targets.extend(control.sockets_in(TUNNELS).into_iter().map(Target::Tunnel));
        // If the control path names one socket, it is treated as the socket of a tunnel.
        if control.directory().is_some() {
            targets.extend(control.sockets_in(IPSEC).into_iter().map(Target::Ipsec));
        }
        let answers = at_once(&targets, |target| target.ask(limit));
        let mut snapshot = Self {
            sessions,
            failures,
            ..Self::empty()
        };
        for (target, answer) in targets.iter().zip(answers) {
            match answer {
                Ok(Answer::Vm(status)) => {
                    for session in &mut snapshot.sessions {
                        if session.owner().as_deref() == Some(target.path()) {
                            session.line.live = Some((*status).clone());
                        }
                    }
                }
                Ok(answer) => snapshot.add(answer),
                Err(error) => snapshot.add_silent(target, &error),
            }
        }
        snapshot
    }

    /// Reads the status sockets; each process has `limit` to answer. The snapshot has only the
    /// sessions that VMs' processes report.
    pub(crate) fn published(control: &ControlPath, limit: Duration) -> Self {
        let mut targets: Vec<Target> = control
            .sockets_in(STATUS)
            .into_iter()
            .filter_map(Target::published)
            .collect();
        targets.truncate(MAX_PROCESSES);
        let answers = at_once(&targets, |target| target.read(limit));
        let mut snapshot = Self::empty();
        for (target, answer) in targets.iter().zip(answers) {
            match answer {
                Ok(Some(answer)) => snapshot.add(answer),
                // The process has died.
                Ok(None) => {}
                Err(error) => snapshot.add_silent(target, &error),
            }
        }
        snapshot
    }

    /// An empty snapshot, taken now.
    pub(crate) fn empty() -> Self {
        Self {
            taken: SystemTime::now(),
            at: Instant::now(),
            sessions: Vec::new(),
            tunnels: Vec::new(),
            ipsec: Vec::new(),
            handoffs: Vec::new(),
            identities: Vec::new(),
            silent: Vec::new(),
            failures: Vec::new(),
        }
    }

    fn add(&mut self, answer: Answer) {
        match answer {
            Answer::Vm(mut status) => {
                self.add_identity("vm", &status.name, mem::take(&mut status.certificates));
                self.sessions.extend(Session::reported(*status));
            }
            Answer::Tunnel(line) => self.tunnels.push(*line),
            Answer::Ipsec(answer) => {
                self.add_identity("ipsec", &answer.name, answer.certificates);
                self.ipsec.extend(answer.sessions);
            }
            Answer::Handoff(line) => self.handoffs.push(line),
        }
    }

    fn add_identity(&mut self, kind: &str, name: &str, certificates: Vec<CertificateLine>) {
        if !certificates.is_empty() {
            self.identities.push(Held {
                kind: kind.to_owned(),
                name: name.to_owned(),
                certificates,
            });
        }
    }

    fn add_silent(&mut self, target: &Target, error: &anyhow::Error) {
        self.silent.push(Silent {
            kind: target.kind().to_owned(),
            control: target.path().display().to_string(),
            text: chained(error),
        });
    }
}

/// Calls `ask` for every target, for several at the same time; returns the results in the order of
/// `targets`.
fn at_once<T: Sync, A: Send>(targets: &[T], ask: impl Fn(&T) -> A + Sync) -> Vec<A> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..targets.len().min(ASKED_AT_ONCE) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(target) = targets.get(index) else {
                        break;
                    };
                    let answer = ask(target);
                    lock(&answers).push((index, answer));
                }
            });
        }
    });
    let answers = answers.into_inner();
    let mut answers = answers.unwrap_or_else(PoisonError::into_inner);
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// The sessions of the journals, and the failures to read them.
fn read_journals(state: &StatePath) -> (Vec<Session>, Vec<FailedLine>) {
    let entries = match state.list() {
        Ok(entries) => entries,
        Err(error) => {
            let failed = FailedLine::from(&error.context("cannot show sessions"));
            return (Vec::new(), vec![failed]);
        }
    };
    let (mut sessions, mut failures) = (Vec::new(), Vec::new());
    for entry in entries {
        match &entry.record {
            Ok(Some(record)) => {
                let record = record.clone();
                sessions.push(Session::new(entry, record));
            }
            // The session has just started, or ended before its first record.
            Ok(None) => {}
            Err(why) => {
                let text = format!(
                    "the journal of session {} ({}) cannot be relied upon: {why}; keep the \
                     file, and find out where the VM is before you run the VM anywhere",
                    hex(&entry.session),
                    entry.role.name()
                );
                failures.push(FailedLine::new(FaultCode::Journal, "", text, FAILED));
            }
        }
    }
    (sessions, failures)
}

impl Session {
    fn new(entry: Entry, record: Record) -> Self {
        let phase = match record.state {
            State::Source(state) => state.name(),
            State::Destination(state) => state.name(),
        };
        let line = SessionLine {
            session: hex(&entry.session),
            role: entry.role.name().to_owned(),
            phase: phase.to_owned(),
            vm: record.vm_name.clone(),
            uuid: hex(&record.vm_uuid),
            peer: record.peer.clone(),
            attempt: record.attempt,
            process: if entry.lives { "lives" } else { "died" }.to_owned(),
            owner: record.owner.clone(),
            started_ms: record.started_ms,
            recorded_ms: record.written_ms,
            resolvable: is_resolvable(&entry, &record),
            live: None,
        };
        Self {
            line,
            recorded: Some(Recorded { entry, record }),
        }
    }

    /// The session of a VM's process that has reported its status. A VM that neither migrates nor is
    /// in doubt has none.
    pub(super) fn reported(status: StatusLine) -> Option<Self> {
        let migration = status.migration.clone();
        if migration.is_none() && status.state != "in-doubt" {
            return None;
        }
        let migration = migration.unwrap_or_else(|| MigrationLine {
            role: "source".to_owned(),
            phase: status.state.clone(),
            ..MigrationLine::default()
        });
        let line = SessionLine {
            session: String::new(),
            role: migration.role,
            phase: migration.phase,
            vm: status.name.clone(),
            uuid: status.uuid.clone(),
            peer: migration.peer,
            attempt: 0,
            process: "lives".to_owned(),
            owner: String::new(),
            started_ms: 0,
            recorded_ms: 0,
            resolvable: status.state == "in-doubt",
            live: Some(status),
        };
        Some(Self {
            line,
            recorded: None,
        })
    }

    /// The control socket of the session's process, if the process is alive and has one.
    fn owner(&self) -> Option<PathBuf> {
        let line = &self.line;
        (line.process == "lives" && !line.owner.is_empty()).then(|| PathBuf::from(&line.owner))
    }
}

/// Whether an operator may have to settle the session with `dunlin resolve`. This is so at a source
/// that has no outcome, or that has a report that the VM ran at the destination and died.
pub(crate) fn is_resolvable(entry: &Entry, record: &Record) -> bool {
    let undecided = State::Source(SourceRecord::Committing);
    let died = State::Source(SourceRecord::RanThenDied);
    entry.role == Role::Source && (record.state == undecided || record.state == died)
}
