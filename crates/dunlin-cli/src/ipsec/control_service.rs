//! The control socket of `ipsec serve` and `up`: status, rekeying and end of their sessions.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin_ipsec as ipsec;
use dunlin_ipsec::{Association, Recorded, Sender};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::code::{DONE, FAILED};
use crate::control::Client;
use crate::line::print_json;
use crate::log::warn;
use crate::options::{ControlPath, IPSEC};
use crate::progress::Waiting;
use crate::published::CertificateLine;
use crate::state::StatePath;
use crate::text::{chained, clean, count};

/// Timeout for an answer. It is long because `down` waits until connections end.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// How long to wait for a status answer. After that, the sessions of a process are shown from their
/// records, or the command fails if the operator named the process.
const STATUS_LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    Status,
    Rekey,
    Down,
}

/// A session, and its SAs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionLine {
    pub(crate) peer: String,
    pub(crate) local_address: Option<String>,
    pub(crate) peer_address: Option<String>,
    pub(crate) ports: Option<String>,
    pub(crate) mode: Option<String>,
    pub(crate) up: bool,
    /// The session's process; `None` if the record does not name it.
    pub(crate) process: Option<u32>,
    /// Whether the session's process still maintains the session. If not, the process died or gave
    /// the session up.
    pub(crate) kept: bool,
    pub(crate) associations: Vec<AssociationLine>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AssociationLine {
    pub(crate) direction: String,
    /// For an SA of a CPU: that CPU, on the host that seals the packets.
    pub(crate) cpu: Option<u32>,
    /// For an SA of a connection: the connection's port at the host that seals the packets, and its
    /// port at the host that decrypts them.
    pub(crate) connection: Option<(u16, u16)>,
    pub(crate) spi: u32,
    pub(crate) epoch: u32,
    /// This counter and those below are `None` if the kernel no longer has the SA.
    pub(crate) bytes: Option<u64>,
    pub(crate) packets: Option<u64>,
    pub(crate) replayed: Option<u32>,
    pub(crate) outside_window: Option<u32>,
    pub(crate) not_authentic: Option<u32>,
}

/// A sender's CPU and connection ports, as in JSON.
pub(super) fn parts(sender: Sender) -> (Option<u32>, Option<(u16, u16)>) {
    match sender {
        Sender::Fallback => (None, None),
        Sender::Cpu(cpu) => (Some(cpu), None),
        Sender::Connection { from, to } => (None, Some((from, to))),
    }
}

pub(super) fn sender(cpu: Option<u32>, connection: Option<(u16, u16)>) -> Sender {
    match (cpu, connection) {
        (Some(cpu), _) => Sender::Cpu(cpu),
        (None, Some((from, to))) => Sender::Connection { from, to },
        (None, None) => Sender::Fallback,
    }
}

/// The answer of a process to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// For `ipsec up`, the peer's name as given on the command line; otherwise the word `serve`.
    pub(crate) name: String,
    pub(super) pid: u32,
    pub(crate) sessions: Vec<SessionLine>,
    /// When the certificates and revocation lists of `serve` expire.
    #[serde(default)]
    pub(crate) certificates: Vec<CertificateLine>,
    /// Record files of ended sessions that left their ports blocked.
    pub(super) blocked: Vec<String>,
    pub(super) failed: Option<String>,
}

impl SessionLine {
    pub(super) fn new(peer: String, status: Option<&ipsec::Status>) -> Self {
        let parameters = status.map(|status| status.parameters);
        let associations = status.into_iter().flat_map(|status| &status.associations);
        Self {
            peer,
            local_address: parameters.map(|parameters| parameters.local.to_string()),
            peer_address: parameters.map(|parameters| parameters.peer.to_string()),
            ports: parameters.map(|parameters| parameters.ports.to_string()),
            mode: parameters.map(|parameters| parameters.mode.to_string()),
            up: status.is_some_and(|status| status.up),
            process: Some(std::process::id()),
            kept: true,
            associations: associations.map(AssociationLine::new).collect(),
        }
    }

    /// Describes a session by its record, because the session's process was not queried or did not
    /// answer.
    pub(super) fn recorded(session: &Recorded) -> Self {
        let owner = session.owner.as_ref();
        let unknown = || session.record.display().to_string();
        Self {
            peer: owner.map_or_else(unknown, |owner| owner.name.clone()),
            local_address: owner.map(|owner| owner.local.ip().to_string()),
            peer_address: owner.map(|owner| owner.peer.ip().to_string()),
            ports: owner.map(|owner| owner.ports.to_string()),
            mode: owner.map(|owner| owner.mode.to_string()),
            up: session.protects,
            process: owner.map(|owner| owner.pid),
            kept: session.is_kept,
            associations: session
                .associations
                .iter()
                .map(AssociationLine::new)
                .collect(),
        }
    }

    fn print(&self) {
        println!("{}", self.head());
        for one in &self.associations {
            one.print();
        }
    }

    fn head(&self) -> String {
        let unknown = || "?".to_owned();
        let process = self.process.map_or_else(unknown, |pid| pid.to_string());
        let state = match (self.kept, self.up) {
            (true, true) => format!("up, process {process}"),
            (true, false) => format!("not up, process {process}"),
            (false, _) => format!(
                "left by process {process}, which died or gave the session up: `dunlin ipsec clean` removes it"
            ),
        };
        format!(
            "{}: ports {} between {} and {}, by {}, {state}",
            clean(&self.peer),
            self.ports.clone().unwrap_or_else(unknown),
            self.local_address.clone().unwrap_or_else(unknown),
            self.peer_address.clone().unwrap_or_else(unknown),
            self.mode.clone().unwrap_or_else(unknown),
        )
    }
}

impl AssociationLine {
    fn new(status: &ipsec::AssociationStatus) -> Self {
        let Association {
            direction,
            spi,
            epoch,
            slot,
            ..
        } = status.association;
        let counters = status.counters;
        let (cpu, connection) = parts(slot.sender);
        Self {
            direction: direction.to_string(),
            cpu,
            connection,
            spi,
            epoch,
            bytes: counters.map(|one| one.bytes),
            packets: counters.map(|one| one.packets),
            replayed: counters.map(|one| one.replay),
            outside_window: counters.map(|one| one.replay_window),
            not_authentic: counters.map(|one| one.integrity_failed),
        }
    }

    fn print(&self) {
        let sender = sender(self.cpu, self.connection);
        let carried = match (self.bytes, self.packets) {
            (Some(bytes), Some(packets)) => format!("{bytes} bytes, {}", count(packets, "packet")),
            _ => "removed by another program".to_owned(),
        };
        let errors = [
            (self.replayed, "replayed"),
            (self.outside_window, "outside the window"),
            (self.not_authentic, "not authentic"),
        ];
        let errors: String = errors
            .into_iter()
            .filter_map(|(count, what)| Some((count.filter(|count| *count > 0)?, what)))
            .map(|(count, what)| format!(", {count} {what}"))
            .collect();
        println!(
            "  {:3} {sender}: {carried}{errors} (spi {:#010x}, epoch {})",
            self.direction, self.spi, self.epoch
        );
    }
}

/// Selects processes.
#[derive(Clone, Debug, Args)]
pub(crate) struct Which {
    /// The process: `serve`, or the name of the peer that was given to `up` [default: all].
    name: Option<String>,
    #[command(flatten)]
    control: ControlPath,
}

/// End sessions.
#[derive(Debug, Args)]
pub(crate) struct Down {
    #[command(flatten)]
    which: Which,
    /// Print one JSON object per process.
    #[arg(long)]
    json: bool,
}

impl Down {
    pub(super) fn run(&self) -> Result<i32> {
        let what = "ending the sessions; connections on their ports have time to end";
        let waiting = Waiting::new(self.json, what);
        let answers = self.which.ask(Request::Down)?;
        drop(waiting);
        let mut code = DONE;
        for Answer {
            name, pid, blocked, ..
        } in &answers
        {
            if self.json {
                print_json(&json!({ "name": name, "process": pid, "blocked": blocked }));
            } else {
                println!("{}: down", clean(name));
            }
            if !blocked.is_empty() {
                if !self.json {
                    println!("{}", clean(&stay_blocked(blocked)));
                }
                code = FAILED;
            }
        }
        if answers.is_empty() && !self.json {
            println!("no sessions");
        }
        Ok(code)
    }
}

impl Which {
    fn ask(&self, request: Request) -> Result<Vec<Answer>> {
        let sockets = match &self.name {
            Some(name) => vec![self.control.ipsec(name)?],
            None => self.control.sockets_in(IPSEC),
        };
        let mut answers = Vec::new();
        for socket in sockets {
            match ask(&socket, request) {
                Ok(answer) => answers.push(answer),
                // A dead process is an error only if the operator named it.
                Err(_) if self.name.is_none() && UnixStream::connect(&socket).is_err() => {}
                // `status` continues without the answer: it shows that process's sessions from
                // their records.
                Err(error) if self.name.is_none() && matches!(request, Request::Status) => {
                    let (at, why) = (socket.display(), chained(&error));
                    warn([format!("no status from {at}: {why}")]);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(answers)
    }
}

/// The status of the process behind a control socket, answered within `limit`.
pub(crate) fn status_within(socket: &Path, limit: Duration) -> Result<Answer> {
    ask_within(socket, Request::Status, limit)
}

fn ask(socket: &Path, request: Request) -> Result<Answer> {
    let limit = match request {
        Request::Status => STATUS_LIMIT,
        Request::Rekey | Request::Down => ANSWER_LIMIT,
    };
    ask_within(socket, request, limit)
}

fn ask_within(socket: &Path, request: Request, limit: Duration) -> Result<Answer> {
    let mut client = Client::ask(socket, "keying session", &request, Some(limit))?;
    let answer: Answer = client.next()?.context(
        "the keying session's process closed the connection without an answer: it may have \
         ended",
    )?;
    match &answer.failed {
        Some(why) => bail!("{}: {}", clean(&answer.name), clean(why)),
        None => Ok(answer),
    }
}

/// Status of the sessions.
#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    which: Which,
    /// Renew the keys with which this host sends, before the sessions are printed.
    #[arg(long)]
    rekey: bool,
    /// Print one JSON object per session.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: StatePath,
}

impl Status {
    pub(crate) fn run(&self) -> Result<i32> {
        if self.rekey {
            self.which.ask(Request::Rekey)?;
        }
        let answers = self.which.ask(Request::Status)?;
        let answered: Vec<u32> = answers.iter().map(|answer| answer.pid).collect();
        let answered_sessions = answers.into_iter().flat_map(|answer| answer.sessions);
        let mut sessions: Vec<SessionLine> = answered_sessions.collect();
        if self.which.name.is_none() {
            sessions.extend(self.of_others(&answered)?);
        }
        for session in &sessions {
            if self.json {
                println!("{}", serde_json::to_string(session)?);
            } else {
                session.print();
            }
        }
        if !self.json && sessions.is_empty() {
            println!("no sessions");
        } else if !self.json {
            println!("{STEERING}");
        }
        Ok(DONE)
    }

    /// Recorded sessions that no process has reported in an answer: sessions of migrations and
    /// tunnels, of processes that do not answer, and of dead processes.
    fn of_others(&self, answered: &[u32]) -> Result<Vec<SessionLine>> {
        let records = self.state.ipsec_records()?;
        let found = match ipsec::recorded(&records) {
            Ok(found) => found,
            Err(error) => {
                warn([format!(
                    "cannot show sessions of migrations, tunnels and dead processes: {}",
                    chained(&error.into())
                )]);
                return Ok(Vec::new());
            }
        };
        let mut lines = Vec::new();
        for session in found {
            match session {
                Ok(session) if is_reported(&session, answered) => {}
                Ok(session) => lines.push(SessionLine::recorded(&session)),
                Err(error) => {
                    let why = chained(&error.into());
                    warn([format!("cannot show a session: {why}")]);
                }
            }
        }
        Ok(lines)
    }
}

/// Whether the session's process reported the session in an answer.
fn is_reported(session: &Recorded, answered: &[u32]) -> bool {
    let pid = session.owner.as_ref().map(|owner| owner.pid);
    session.is_kept && pid.is_some_and(|pid| answered.contains(&pid))
}

/// Advice on spreading received packets over CPUs; docs/ipsec/operation.md has more.
const STEERING: &str = "to spread received packets over this host's CPUs, with IF the network card: \
`ethtool -N IF rx-flow-hash esp4` (or esp6), or with --udp `ethtool -N IF rx-flow-hash udp4 sdfn`";

/// The warning about ports that are still blocked when a process ends.
pub(super) fn stay_blocked(records: &[String]) -> String {
    format!(
        "ports stay blocked (records: {}): end the connections on them and run `dunlin ipsec \
         clean`, or start the session again",
        records.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use dunlin_ipsec::AssociationStatus;

    use super::*;

    fn session(is_kept: bool) -> Recorded {
        let owner = "pid 7 mode cpu ports 24576-24639 control 192.0.2.1:40000 192.0.2.2:7400 \
                     peer host-b.example";
        let line = "sa out 192.0.2.1 192.0.2.2 spi 0x00001001 reqid 65537 epoch 1 index 2 cpu 3";
        let object: ipsec::Object = line.parse().expect("an object");
        let ipsec::Object::Association(association) = object else {
            panic!("{line}");
        };
        let gone = AssociationStatus {
            association,
            counters: None,
        };
        Recorded {
            record: "/state/ipsec/1.ipsec".into(),
            is_kept,
            owner: Some(owner.parse().expect("an owner")),
            protects: is_kept,
            associations: vec![gone],
        }
    }

    #[test]
    fn a_session_of_lanes_and_one_of_a_dead_process_are_shown() {
        let line = SessionLine::recorded(&session(true));
        assert_eq!(
            line.head(),
            "host-b.example: ports 24576-24639 between 192.0.2.1 and 192.0.2.2, by cpu, up, \
             process 7"
        );
        let object = serde_json::to_value(&line).expect("JSON");
        assert_eq!(object["process"], 7);
        assert_eq!(object["kept"], true);
        assert_eq!(object["associations"][0]["cpu"], 3);
        assert_eq!(object["associations"][0]["spi"], 0x1001);
        let left = SessionLine::recorded(&session(false)).head();
        assert!(left.contains("left by process 7"), "{left}");
        assert!(left.contains("`dunlin ipsec clean`"), "{left}");
    }

    #[test]
    fn an_answered_session_is_shown_once_and_a_left_one_always() {
        assert!(is_reported(&session(true), &[3, 7]));
        assert!(!is_reported(&session(true), &[3]));
        assert!(!is_reported(&session(false), &[7]));
        let unowned = Recorded {
            owner: None,
            ..session(true)
        };
        assert!(!is_reported(&unowned, &[7]));
    }
}
