//! The control socket of `ipsec serve` and `up`: how they stand, and that they end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::ipsec::{self, Association, Direction, Sender};
use serde::{Deserialize, Serialize};

use crate::code::{DONE, FAILED};
use crate::control::{Socket, read_request};
use crate::display::clean;
use crate::options::ControlPath;
use crate::service::say;

/// How long an answer may take: `down` waits for connections to end.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    Status,
    Rekey,
    Down,
}

/// A session, and its SAs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SessionLine {
    peer: String,
    local_address: Option<String>,
    peer_address: Option<String>,
    ports: Option<String>,
    mode: Option<String>,
    up: bool,
    associations: Vec<AssociationLine>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AssociationLine {
    direction: String,
    /// Of the host that seals.
    cpu: Option<u32>,
    /// The connection's ports at the host that seals and at the one that opens.
    connection: Option<(u16, u16)>,
    spi: u32,
    epoch: u32,
    /// None of the following where somebody has removed it.
    bytes: Option<u64>,
    packets: Option<u64>,
    replayed: Option<u32>,
    outside_window: Option<u32>,
    not_authentic: Option<u32>,
}

/// What a process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    name: String,
    pid: u32,
    sessions: Vec<SessionLine>,
    /// Records of sessions that are over whose ports stay blocked.
    blocked: Vec<String>,
    failed: Option<String>,
}

impl SessionLine {
    pub(super) fn new(peer: String, status: Option<&ipsec::Status>) -> Self {
        let layout = status.map(|status| status.layout);
        let associations = status.into_iter().flat_map(|status| &status.associations);
        Self {
            peer,
            local_address: layout.map(|layout| layout.local.to_string()),
            peer_address: layout.map(|layout| layout.peer.to_string()),
            ports: layout.map(|layout| layout.ports.to_string()),
            mode: layout.map(|layout| layout.mode.to_string()),
            up: status.is_some_and(|status| status.up),
            associations: associations.map(AssociationLine::new).collect(),
        }
    }

    fn print(&self) {
        let unknown = || "?".to_owned();
        println!(
            "{}: ports {} between {} and {}, by {}, {}",
            clean(&self.peer),
            self.ports.clone().unwrap_or_else(unknown),
            self.local_address.clone().unwrap_or_else(unknown),
            self.peer_address.clone().unwrap_or_else(unknown),
            self.mode.clone().unwrap_or_else(unknown),
            if self.up { "up" } else { "not up" }
        );
        for one in &self.associations {
            one.print();
        }
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
        Self {
            direction: match direction {
                Direction::In => "in",
                Direction::Out => "out",
            }
            .to_owned(),
            cpu: match slot.sender {
                Sender::Cpu(cpu) => Some(cpu),
                _ => None,
            },
            connection: match slot.sender {
                Sender::Connection { from, to } => Some((from, to)),
                _ => None,
            },
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
        let whom = match (self.cpu, self.connection) {
            (Some(cpu), _) => format!("CPU {cpu}"),
            (None, Some((from, to))) => format!("connection {from} to {to}"),
            (None, None) => "fallback".to_owned(),
        };
        let carried = match (self.bytes, self.packets) {
            (Some(bytes), Some(packets)) => format!("{bytes} bytes, {packets} packets"),
            _ => "removed by somebody".to_owned(),
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
            "  {:3} {whom}: {carried}{errors} (spi {:#010x}, epoch {})",
            self.direction, self.spi, self.epoch
        );
    }
}

/// What a process does when it is asked.
pub(super) trait Asked: Send + Sync {
    fn sessions(&self) -> Result<Vec<SessionLine>>;
    fn rekey(&self);
    /// Returns when it is over.
    fn down(&self);
    /// Records of sessions that are over whose ports stay blocked.
    fn blocked(&self) -> Vec<String>;
}

/// Answers at a socket for as long as that is there.
pub(super) fn serve(socket: &Socket, name: String, asked: Arc<dyn Asked>) -> Result<()> {
    socket.serve(
        move |connection| {
            if let Err(error) = answer(connection, &name, &*asked) {
                say(&format!("a request was not answered: {error:#}"));
            }
        },
        say,
    )
}

fn answer(mut connection: &UnixStream, name: &str, asked: &dyn Asked) -> Result<()> {
    let mut requests = BufReader::new(connection.try_clone()?);
    let Some(request) = read_request(&mut requests)? else {
        return Ok(());
    };
    match request {
        Request::Status => {}
        Request::Rekey => asked.rekey(),
        Request::Down => asked.down(),
    }
    let sessions = asked.sessions();
    let failed = sessions.as_ref().err().map(|error| format!("{error:#}"));
    let answer = Answer {
        name: name.to_owned(),
        pid: std::process::id(),
        sessions: sessions.unwrap_or_default(),
        blocked: asked.blocked(),
        failed,
    };
    writeln!(connection, "{}", serde_json::to_string(&answer)?)?;
    Ok(())
}

/// Which processes are asked.
#[derive(Clone, Debug, Args)]
pub(super) struct Which {
    /// The one of this name: the peer of `up`, or `serve` [default: all].
    name: Option<String>,
    #[command(flatten)]
    control: ControlPath,
}

impl Which {
    fn ask(&self, request: Request) -> Result<Vec<Answer>> {
        let sockets = match &self.name {
            Some(name) => vec![self.control.ipsec(name)?],
            None => self.control.all_ipsec(),
        };
        let mut answers = Vec::new();
        for socket in sockets {
            match ask(&socket, request) {
                Ok(answer) => answers.push(answer),
                // Of one that has died, where nobody has asked for just that one.
                Err(_) if self.name.is_none() && UnixStream::connect(&socket).is_err() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(answers)
    }
}

fn ask(socket: &Path, request: Request) -> Result<Answer> {
    let mut stream = UnixStream::connect(socket).with_context(|| {
        format!(
            "nobody answers at {}: does `dunlin ipsec serve` or `up` run, and is --control the same?",
            socket.display()
        )
    })?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    writeln!(stream, "{}", serde_json::to_string(&request)?)?;
    let mut text = String::new();
    BufReader::new(stream).read_line(&mut text)?;
    let answer: Answer = serde_json::from_str(&text)
        .context("that process answered something else: is it of another release?")?;
    match &answer.failed {
        Some(why) => bail!("{}: {}", clean(&answer.name), clean(why)),
        None => Ok(answer),
    }
}

/// How the sessions stand.
#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    which: Which,
    /// Renew the keys of what this host sends, first.
    #[arg(long)]
    rekey: bool,
    /// One JSON object a session.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(crate) fn run(&self) -> Result<i32> {
        if self.rekey {
            self.which.ask(Request::Rekey)?;
        }
        let answers = self.which.ask(Request::Status)?;
        for session in answers.iter().flat_map(|answer| &answer.sessions) {
            if self.json {
                println!("{}", serde_json::to_string(session)?);
            } else {
                session.print();
            }
        }
        if !self.json && answers.iter().all(|answer| answer.sessions.is_empty()) {
            println!("no sessions");
        } else if !self.json {
            println!("{STEERING}");
        }
        Ok(DONE)
    }
}

/// What spreads what a host receives over its CPUs; docs/ipsec.md has more.
const STEERING: &str = "to spread what is received over this host's CPUs, IF being the network card: \
`ethtool -N IF rx-flow-hash esp4` (or esp6), or with --udp `ethtool -N IF rx-flow-hash udp4 sdfn`";

/// End sessions.
#[derive(Debug, Args)]
pub(crate) struct Down {
    #[command(flatten)]
    which: Which,
}

impl Down {
    pub(crate) fn run(&self) -> Result<i32> {
        let answers = self.which.ask(Request::Down)?;
        let mut code = DONE;
        for answer in &answers {
            println!("{}: down", clean(&answer.name));
            if !answer.blocked.is_empty() {
                println!("{}", clean(&stay_blocked(&answer.blocked)));
                code = FAILED;
            }
        }
        if answers.is_empty() {
            println!("no sessions");
        }
        Ok(code)
    }
}

/// What is said of ports that are not free when a process ends.
pub(super) fn stay_blocked(records: &[String]) -> String {
    format!(
        "ports stay blocked, by {}: end the connections on them and say `dunlin ipsec clean`, or \
         begin the session anew",
        records.join(", ")
    )
}
