//! A snapshot as rows: one for each session, tunnel, route, listener, peer and keying session, and
//! for each process or journal that cannot be read. The most urgent row comes first.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::ipsec;
use crate::line::{MigrationLine, ProgressLine};
use crate::options::parse_rate;
use crate::sessions::{ago, meaning, to_do};
use crate::text::{clean, count};
use crate::tunnel::line::{ListenerLine, PeerLine, RouteLine, TunnelLine};
use crate::tunnel::parse_tunnel_rate;
use crate::watch::{Direction, Rates, Session, SessionLine, Snapshot};

/// Whether a row needs the operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Attention {
    #[default]
    Fine,
    /// Something may go wrong, or is slower than it could be.
    Note,
    /// Something does not work, or waits for a decision.
    Wrong,
}

/// A row of the list, and what its details show.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Identifies the row in all snapshots. Rows that need the same attention and are equally
    /// active are sorted by this key.
    pub(super) key: String,
    pub(super) what: String,
    pub(super) state: String,
    /// Whether bytes can flow: a migration is under way, a channel is open, or IPsec is up.
    pub(super) active: bool,
    pub(super) figures: Figures,
    /// What needs attention, the worst first.
    pub(super) troubles: Vec<(Attention, String)>,
    pub(super) facts: Vec<(String, String)>,
    pub(super) lanes: Vec<Lane>,
    /// The row's migration, if it can be cancelled; otherwise the reason why not.
    pub(super) cancel: Result<Cancel, String>,
    /// The row's rate, if its limit can be changed; otherwise the reason why not.
    pub(super) limit: Result<Limited, String>,
}

/// The figures of a row; bytes, bytes per second and milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) sent: Option<f64>,
    pub(super) received: Option<f64>,
    pub(super) limit: Option<u64>,
    pub(super) left: Option<u64>,
    pub(super) dirty: Option<f64>,
    pub(super) downtime_ms: Option<f64>,
}

/// A lane of a migration or of a trunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lane {
    pub(super) number: u16,
    /// `sent` or `received`.
    pub(super) way: &'static str,
    pub(super) bytes: u64,
    /// The lane's part of the bytes of all lanes of this direction, from 0 to 1.
    pub(super) share: f64,
    pub(super) rate: Option<f64>,
}

/// A migration that can be cancelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cancel {
    /// The control socket of the VM's process.
    pub(super) socket: PathBuf,
    pub(super) what: String,
    /// What happens to the VM after the cancellation.
    pub(super) then: String,
}

/// A rate that can be limited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Limited {
    /// The rate of a migration. The path is the control socket of the VM's process.
    Session(PathBuf),
    /// The rate of a route of a tunnel: the tunnel's control socket and the route's name.
    Route(PathBuf, String),
    /// The rate of a tunnel to a peer: the tunnel's control socket and the peer's selector.
    Peer(PathBuf, String),
}

impl Limited {
    /// Parses a limit in bytes per second, or `none`.
    pub(super) fn parse(&self, text: &str) -> Result<Option<u64>, String> {
        match (text, self) {
            ("none", _) => Ok(None),
            ("" | "0", _) => Err("write a rate such as 500M, or none for no limit".to_owned()),
            (rate, Self::Session(_)) => parse_rate(rate).map(Some),
            (rate, _) => parse_tunnel_rate(rate).map(Some),
        }
    }
}

impl Row {
    pub(super) fn new(key: String, what: String, state: impl Into<String>) -> Self {
        let not_here = "only a migration of `dunlin vm` can be cancelled here; cancel others in \
                        their hypervisor";
        Self {
            key,
            what,
            state: state.into(),
            active: false,
            figures: Figures::default(),
            troubles: Vec::new(),
            facts: Vec::new(),
            lanes: Vec::new(),
            cancel: Err(not_here.to_owned()),
            limit: Err("select a migration, a route or a peer to limit its rate".to_owned()),
        }
    }

    /// The attention that the row's worst trouble needs.
    pub(super) fn attention(&self) -> Attention {
        self.troubles
            .first()
            .map_or(Attention::Fine, |(worst, _)| *worst)
    }

    fn wrong(&mut self, why: Option<impl Into<String>>) {
        self.troubles
            .extend(why.map(|why| (Attention::Wrong, why.into())));
    }

    fn note(&mut self, why: impl Into<String>) {
        self.troubles.push((Attention::Note, why.into()));
    }

    fn fact(&mut self, name: &str, value: impl Into<String>) {
        self.facts.push((name.to_owned(), value.into()));
    }

    /// Adds the fields that `dunlin status --json` prints for the row, without lists and objects.
    fn facts(&mut self, line: &impl Serialize) {
        let fields = serde_json::to_value(line).unwrap_or_default();
        for (name, value) in fields.as_object().into_iter().flatten() {
            let name = name.replace('_', " ");
            let text = match value {
                Value::Number(number) if name.contains("bytes") => {
                    size(number.as_f64().unwrap_or_default())
                }
                Value::String(text) => text.clone(),
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                _ => continue,
            };
            self.fact(&name, text);
        }
    }

    /// Sorts the troubles, and makes all texts safe for a terminal: peers may have sent them.
    fn finish(mut self) -> Self {
        self.troubles.sort_by_key(|(worst, _)| Reverse(*worst));
        let texts = self.troubles.iter_mut().map(|(_, text)| text);
        let texts = texts.chain(self.facts.iter_mut().map(|(_, text)| text));
        for text in texts.chain([&mut self.what, &mut self.state]) {
            *text = clean(text);
        }
        if let Ok(cancel) = &mut self.cancel {
            cancel.what.clone_from(&self.what);
        }
        self
    }
}

/// The rows of a snapshot, in order.
pub(super) fn rows(snapshot: &Snapshot, rates: Option<&Rates>) -> Vec<Row> {
    let mut rows = Vec::new();
    for (number, failed) in snapshot.failures.iter().enumerate() {
        let mut row = Row::new(format!("0 {number}"), "journal".to_owned(), "unreadable");
        row.wrong(Some(&failed.text));
        rows.push(row);
    }
    for session in &snapshot.sessions {
        let silent = snapshot.silent.iter();
        let mut silent = silent.filter(|one| one.control == session.line.owner);
        let why = silent.next().map(|one| one.text.as_str());
        rows.push(of_session(session, why, rates));
    }
    let several = snapshot.tunnels.len() > 1;
    for tunnel in &snapshot.tunnels {
        of_tunnel(tunnel, several, rates, &mut rows);
    }
    for session in &snapshot.ipsec {
        rows.push(of_keying(session, rates));
    }
    for silent in snapshot.silent.iter().filter(|one| one.kind != "vm") {
        let key = format!("4 {}", silent.control);
        let mut row = Row::new(key, format!("{} {}", silent.kind, silent.control), "silent");
        row.wrong(Some(&silent.text));
        rows.push(row);
    }
    let mut rows: Vec<Row> = rows.into_iter().map(Row::finish).collect();
    rows.sort_by(|a, b| {
        let first = |row: &Row| (Reverse(row.attention()), Reverse(row.active));
        first(a).cmp(&first(b)).then_with(|| a.key.cmp(&b.key))
    });
    rows
}

fn of_session(session: &Session, silent: Option<&str>, rates: Option<&Rates>) -> Row {
    let line = &session.line;
    let is_source = line.role == "source";
    let live = line.live.as_ref();
    // The process may already report a later migration of the VM, in which this host has the
    // opposite role. That migration does not belong to this row.
    let migration = live
        .and_then(|live| live.migration.as_ref())
        .filter(|migration| migration.role == line.role);
    let progress = migration.and_then(|migration| migration.progress.as_ref());
    let way = if is_source { "to" } else { "from" };
    let state = match (migration, progress) {
        (Some(migration), Some(progress)) if migration.phase == "pre-copy" => {
            format!("pre-copy {}", progress.iteration)
        }
        (Some(migration), _) => migration.phase.clone(),
        (None, _) if line.resolvable => "in doubt".to_owned(),
        (None, _) => line.phase.clone(),
    };
    let key = format!("1 {} {}", line.vm, line.key());
    let what = format!("VM {} {way} {}", line.vm, without_port(&line.peer));
    let mut row = Row::new(key, what, state);
    row.active = migration.is_some();
    row.figures.limit = migration.and_then(|migration| migration.rate);
    troubles_of(session, migration, silent, &mut row);
    facts_of(line, migration, &mut row);
    if let Some(progress) = progress {
        row.figures.sent = Some(progress.bytes_per_s as f64);
        row.figures.left = Some(progress.remaining_bytes);
        // Before the end of the first iteration, the dirty rate is unknown.
        if progress.iteration > 1 {
            row.figures.dirty = Some(dirtied(progress));
            row.figures.downtime_ms = Some(progress.predicted_downtime_ms);
        }
        let rate = |lane| rates.and_then(|rates| rates.lane(line, lane));
        row.lanes = lanes(&progress.lanes, "sent", rate);
    }
    (row.cancel, row.limit) = requests_of(session, migration);
    row
}

fn facts_of(line: &SessionLine, migration: Option<&MigrationLine>, row: &mut Row) {
    row.fact("session", line.session.clone());
    row.fact("VM", format!("{} ({})", line.vm, line.uuid));
    row.fact("role", format!("{}, attempt {}", line.role, line.attempt));
    row.fact(
        "recorded",
        format!("{}, {} ago", line.phase, ago(line.recorded_ms)),
    );
    let process = line
        .live
        .as_ref()
        .map_or(String::new(), |live| format!(" {}", live.pid));
    row.fact(
        "process",
        format!("{}{process}; {}", line.process, line.owner),
    );
    if let Some(live) = &line.live {
        let memory = size_of(live.memory_bytes);
        row.fact("guest", format!("{}, {memory} of memory", live.state));
    }
    if let Some(migration) = migration {
        row.fact("under way", format!("for {:.0} s", migration.seconds));
        if migration.throttle > 0 {
            row.fact("throttle", format!("{} %", migration.throttle));
        }
    }
}

/// The lanes of one direction, each with its bytes.
fn lanes(all: &[(u16, u64)], way: &'static str, rate: impl Fn(u16) -> Option<f64>) -> Vec<Lane> {
    let sum: u64 = all.iter().map(|(_, bytes)| bytes).sum();
    let lane = |&(number, bytes): &(u16, u64)| Lane {
        number,
        way,
        bytes,
        share: bytes as f64 / sum.max(1) as f64,
        rate: rate(number),
    };
    all.iter().map(lane).collect()
}

/// Bytes that the guest dirties per second.
fn dirtied(progress: &ProgressLine) -> f64 {
    progress.dirty_pages_per_s as f64 * 4096.0
}

fn troubles_of(
    session: &Session,
    migration: Option<&MigrationLine>,
    silent: Option<&str>,
    row: &mut Row,
) {
    let line = &session.line;
    let lives = line.process == "lives";
    let waits = lives && migration.is_some();
    if let Some(recorded) = &session.recorded {
        let (entry, record) = (&recorded.entry, &recorded.record);
        let meaning = meaning(record.state, entry.lives).map(str::to_owned);
        match to_do(entry, record) {
            // The source still waits for the destination's answer. If none arrives, the VM is in
            // doubt.
            Some(_) if waits => {
                row.note("the VM is paused here until the destination reports that it runs");
            }
            Some(to_do) => {
                let since = format!("in doubt for {}", ago(record.written_ms));
                let parts = [Some(since), Some(to_do), meaning];
                row.wrong(Some(
                    parts.into_iter().flatten().collect::<Vec<_>>().join("; "),
                ));
            }
            None if !lives && line.role == "source" => row.wrong(meaning),
            None => meaning.into_iter().for_each(|meaning| row.note(meaning)),
        }
    }
    if lives && line.live.is_none() {
        row.wrong(silent);
    }
    let Some(migration) = migration else { return };
    let Some(progress) = &migration.progress else {
        return;
    };
    let (dirty, sent) = (dirtied(progress), progress.bytes_per_s as f64);
    if progress.iteration > 1 && dirty > sent && sent > 0.0 {
        let why = match migration.rate {
            Some(rate) if rate as f64 <= dirty => "; its rate limit is too low",
            _ => "",
        };
        row.note(format!(
            "does not converge: the guest dirties {}/s, the lanes carry {}/s{why}",
            size(dirty),
            size(sent)
        ));
    }
    if migration.throttle > 0 {
        row.note(format!(
            "the guest is throttled by {} %, because it dirties memory too fast",
            migration.throttle
        ));
    }
}

/// The requests that a session's process accepts now.
fn requests_of(
    session: &Session,
    migration: Option<&MigrationLine>,
) -> (Result<Cancel, String>, Result<Limited, String>) {
    let line = &session.line;
    let is_source = line.role == "source";
    let refusal = match migration {
        None if line.resolvable => {
            "too late to cancel: the VM is in doubt, and `dunlin resolve` settles it"
        }
        None => "no migration of this VM is under way",
        Some(_) if line.owner.is_empty() => {
            "the VM's process has no control socket: send it SIGINT to cancel"
        }
        Some(migration) if migration.phase == "committed" => {
            "too late to cancel: commit may have been sent, so the destination may run the VM"
        }
        Some(_) => "",
    };
    if !refusal.is_empty() {
        return (Err(refusal.to_owned()), Err(refusal.to_owned()));
    }
    let (vm, peer) = (clean(&line.vm), clean(&line.peer));
    let then = if is_source {
        format!("VM {vm} keeps running here, at the source. What was sent to {peer} is discarded.")
    } else {
        format!("VM {vm} keeps running at its source, {peer}. What has arrived here is discarded.")
    };
    let socket = PathBuf::from(&line.owner);
    let limit = if is_source {
        Ok(Limited::Session(socket.clone()))
    } else {
        Err("the source limits the rate of this migration: use `dunlin top` there".to_owned())
    };
    let what = String::new();
    (Ok(Cancel { socket, what, then }), limit)
}

/// Adds the rows of a tunnel. If `several` tunnels run here, each row has its tunnel's name.
fn of_tunnel(tunnel: &TunnelLine, several: bool, rates: Option<&Rates>, rows: &mut Vec<Row>) {
    let key = format!("2 {}", tunnel.name);
    let prefix = match several {
        true => format!("{}: ", tunnel.name),
        false => String::new(),
    };
    let what = &|what: String| format!("{prefix}{what}");
    let socket = Path::new(&tunnel.control);
    let mut all = Row::new(key.clone(), format!("tunnel {}", tunnel.name), "up");
    all.facts(tunnel);
    if let Some(redirect) = &tunnel.redirect {
        all.facts(redirect);
        match redirect.rules.state.as_str() {
            "applied" => {}
            "unknown" => all.note(redirect.rules.text()),
            _ => all.wrong(Some(redirect.rules.text())),
        }
    }
    let mut sums = (0.0, 0.0);
    for route in &tunnel.routes {
        let row = of_route(tunnel, route, rates, &key, what);
        sums.0 += row.figures.sent.unwrap_or_default();
        sums.1 += row.figures.received.unwrap_or_default();
        all.active |= row.active;
        rows.push(row);
    }
    all.figures.sent = Some(sums.0);
    all.figures.received = Some(sums.1);
    rows.push(all);
    for listener in &tunnel.listeners {
        rows.push(of_listener(
            listener,
            &key,
            what(format!("listener {}", listener.number)),
        ));
    }
    for (number, peer) in tunnel.peers.iter().enumerate() {
        let name = match peer.selector.as_str() {
            "" => &peer.peer,
            selector => selector,
        };
        let key = format!("{key} 3 {name} {number:03}");
        rows.push(of_peer(peer, key, what(format!("peer {name}")), socket));
    }
}

/// A host without its port.
fn without_port(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

fn of_route(
    tunnel: &TunnelLine,
    route: &RouteLine,
    rates: Option<&Rates>,
    key: &str,
    what: &dyn Fn(String) -> String,
) -> Row {
    let rate = |way, first| {
        let later = rates.and_then(|rates| rates.route(tunnel.pid, &route.route, way));
        Some(later.unwrap_or(first))
    };
    let to = route.to.as_deref();
    let to = to.map(|to| format!(" to {}", without_port(to)));
    let name = format!("route {}{}", route.route, to.unwrap_or_default());
    let key = format!("{key} 1 {}", route.route);
    let state = match route.channels {
        0 => "idle".to_owned(),
        open => count(open, "channel"),
    };
    let mut row = Row::new(key, what(name), state);
    row.active = route.channels > 0;
    row.figures.sent = rate(Direction::Sent, route.read_bytes_per_s);
    row.figures.received = rate(Direction::Received, route.written_bytes_per_s);
    row.figures.limit = route.limit_bytes_per_s;
    row.limit = Ok(Limited::Route(
        PathBuf::from(&tunnel.control),
        route.route.clone(),
    ));
    let lost = route.lost.as_ref();
    row.wrong(lost.map(|why| format!("does not listen now: {why}")));
    let trouble = route.trouble.as_ref();
    row.wrong(trouble.map(|why| format!("cannot connect: {why}")));
    row.facts(route);
    row
}

fn of_listener(listener: &ListenerLine, key: &str, what: String) -> Row {
    let state = match (listener.channels, listener.listens) {
        (0, true) => "listening".to_owned(),
        (open, _) => count(open, "channel"),
    };
    let mut row = Row::new(format!("{key} 2 {:06}", listener.number), what, state);
    row.active = listener.channels > 0;
    let lost = listener.lost.as_ref();
    row.wrong(lost.map(|why| format!("does not listen now: {why}")));
    row.facts(listener);
    row
}

fn of_peer(peer: &PeerLine, key: String, what: String, socket: &Path) -> Row {
    let mut row = Row::new(key, what, count(peer.lanes, "lane"));
    row.active = peer.channels > 0;
    row.figures.limit = peer.limit_bytes_per_s;
    if !peer.selector.is_empty() {
        row.limit = Ok(Limited::Peer(socket.to_owned(), peer.selector.clone()));
    }
    let refused = peer.refused.as_ref();
    row.wrong(refused.map(|why| format!("gets no new channel: {why}")));
    let trouble = peer.trouble.as_ref();
    row.wrong(trouble.map(|why| format!("lanes cannot be opened: {why}")));
    row.facts(peer);
    for way in ["sent", "received"] {
        let own = peer.by_lane.iter().filter(|lane| lane.direction == way);
        let own: Vec<_> = own.map(|lane| (lane.lane, lane.bytes)).collect();
        row.lanes.extend(lanes(&own, way, |_| None));
    }
    row
}

fn of_keying(session: &ipsec::SessionLine, rates: Option<&Rates>) -> Row {
    let ports = session.ports.clone().unwrap_or_default();
    let key = format!("3 {} {ports}", session.peer);
    let state = if session.up { "up" } else { "down" };
    let mut row = Row::new(key, format!("IPsec {}", session.peer), state);
    row.active = session.up;
    if !session.kept {
        row.wrong(Some(
            "its process died or gave the session up, and its ports stay blocked: `dunlin ipsec \
             clean` frees them",
        ));
    }
    row.facts(session);
    if let (Some(rates), Some(process)) = (rates, session.process) {
        let sum = |way| {
            let all = session
                .associations
                .iter()
                .filter(|one| one.direction == way);
            all.filter_map(|one| rates.association(process, one))
                .sum::<f64>()
        };
        row.figures.sent = Some(sum("out"));
        row.figures.received = Some(sum("in"));
    }
    row
}

pub(super) fn size_of(bytes: u64) -> String {
    size(bytes as f64)
}

/// A number of bytes in at most five characters; the units are powers of 1024, as in flags.
pub(super) fn size(bytes: f64) -> String {
    let (mut value, mut units) = (bytes, ["", "K", "M", "G", "T", "P"].iter());
    let mut unit = units.next();
    while value >= 999.5 {
        let Some(larger) = units.next() else { break };
        (value, unit) = (value / 1024.0, Some(larger));
    }
    let unit = unit.copied().unwrap_or_default();
    match value {
        small if small < 9.95 && !unit.is_empty() => format!("{small:.1}{unit}"),
        value => format!("{value:.0}{unit}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
