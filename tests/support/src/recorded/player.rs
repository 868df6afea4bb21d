//! Replays one side of a recorded session.
//!
//! The player sends a recorded message as soon as the other side has sent everything that precedes
//! the message in the recording. The player compares counts: on each lane, the other side must have
//! sent at least as many messages of each kind. Acknowledgements, pings and pongs are not counted,
//! because their number may differ. Unknown messages are not counted either.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use dunlin_lane::control::{self, ControlStream};
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_proto::control::CONTROL_HEADER_BYTES;
use dunlin_proto::limits::{LANE_MAC_BYTES, SESSION_ID_BYTES};
use dunlin_proto::negotiate::{PRELUDE_BYTES, SessionSecret};

use super::{Entry, Side, Stage, read};
use crate::engine::peer::lane_open;
use crate::lane::soon;

const LIMIT: Duration = Duration::from_secs(10);

/// The kinds of messages for which a replay does not wait.
const ANY_NUMBER: [&str; 4] = ["ack", "ping", "pong", "unknown"];

/// The messages that have been received from the other side.
#[derive(Default)]
struct Heard {
    counts: Mutex<HashMap<(u16, String), usize>>,
    all: Mutex<Vec<Entry>>,
    changed: Condvar,
}

impl Heard {
    fn hear(&self, entry: Entry) {
        let mut counts = self.counts.lock().unwrap();
        *counts.entry((entry.lane, entry.kind.clone())).or_default() += 1;
        self.all.lock().unwrap().push(entry);
        self.changed.notify_all();
    }

    /// Waits until at least the wanted number of messages of each lane and kind has been received.
    fn wait(&self, wanted: &HashMap<(u16, String), usize>, before: &str) {
        let counts = self.counts.lock().unwrap();
        let missing = |counts: &mut HashMap<(u16, String), usize>| {
            let has = |what| counts.get(what).copied().unwrap_or(0);
            wanted.iter().any(|(what, count)| has(what) < *count)
        };
        let waited = self.changed.wait_timeout_while(counts, LIMIT, missing);
        let (counts, timeout) = waited.unwrap();
        assert!(
            !timeout.timed_out(),
            "timeout before {before}: received {:?}, expected {wanted:?}",
            *counts
        );
    }

    fn first(&self, kind: &str) -> Vec<u8> {
        let all = self.all.lock().unwrap();
        all.iter()
            .find(|entry| entry.kind == kind)
            .unwrap()
            .bytes
            .clone()
    }
}

/// Starts a thread that receives the messages of a connection until the connection ends.
fn listen(stream: &Arc<ControlStream>, lane: u16, from: Side, mut at: Stage, heard: &Arc<Heard>) {
    let (stream, heard) = (Arc::clone(stream), Arc::clone(heard));
    thread::spawn(move || {
        while let Some((kind, bytes)) = read(&stream, at) {
            heard.hear(Entry {
                lane,
                from,
                kind,
                bytes,
            });
            if at == Stage::Opening {
                at = Stage::Control;
            }
        }
    });
}

/// Replays `side` of a recording. Calls `say` with each message that this side has to send.
fn play(recording: &[Entry], side: Side, heard: &Heard, mut say: impl FnMut(&Entry)) {
    let mut wanted = HashMap::new();
    for entry in recording {
        if entry.from == side {
            heard.wait(&wanted, &entry.kind);
            say(entry);
        } else if !ANY_NUMBER.contains(&&*entry.kind) {
            *wanted.entry((entry.lane, entry.kind.clone())).or_default() += 1;
        }
    }
    heard.wait(&wanted, "the end");
}

/// Replays the source against a destination.
pub fn source(recording: &[Entry], to: SocketAddr, tls: &ClientTls) {
    let heard = Arc::<Heard>::default();
    let connect = || {
        let stream = TcpStream::connect(to).unwrap();
        Arc::new(control::client(stream, tls, soon()).unwrap())
    };
    let mut lanes = HashMap::new();
    play(recording, Side::Source, &heard, |entry| {
        let mut bytes = entry.bytes.clone();
        if entry.kind == "lane-open" {
            // Compute the proof with the secret of this session, the first field of *accept*.
            let accept = heard.first("accept");
            let secret = accept[CONTROL_HEADER_BYTES..].first_chunk().unwrap();
            let session = bytes[PRELUDE_BYTES..].first_chunk().unwrap();
            let open = lane_open(*session, &SessionSecret(*secret), entry.lane);
            let proof = bytes.len() - LANE_MAC_BYTES;
            bytes[proof..].copy_from_slice(&open.mac);
        }
        let stream = lanes.entry(entry.lane).or_insert_with(&connect);
        stream.send(&bytes).unwrap();
        match &*entry.kind {
            "offer" => listen(stream, 0, Side::Destination, Stage::Opening, &heard),
            "end" => stream.close().unwrap(),
            _ => {}
        }
    });
    lanes[&0].close().unwrap();
}

/// Replays the destination for one source.
pub fn destination(recording: &[Entry], listener: TcpListener, tls: &ServerTls) {
    let heard = Arc::<Heard>::default();
    let opened = Arc::<Mutex<HashMap<u16, Arc<ControlStream>>>>::default();
    let (ears, lanes, tls) = (Arc::clone(&heard), Arc::clone(&opened), tls.clone());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = Arc::new(control::server(stream.unwrap(), &tls, soon()).unwrap());
            let (kind, bytes) = read(&stream, Stage::Opening).unwrap();
            let (lane, stage) = match &*kind {
                "offer" => (0, Stage::Control),
                _ => (u16::from_le_bytes([bytes[32], bytes[33]]), Stage::Data),
            };
            lanes.lock().unwrap().insert(lane, Arc::clone(&stream));
            ears.hear(Entry {
                lane,
                from: Side::Source,
                kind,
                bytes,
            });
            listen(&stream, lane, Side::Source, stage, &ears);
        }
    });
    let mut secret = None;
    play(recording, Side::Destination, &heard, |entry| {
        let mut bytes = entry.bytes.clone();
        let offer = heard.first("offer");
        // The session's identifier follows the features. The source in this replay has chosen it.
        let session = &offer[PRELUDE_BYTES + 16..][..SESSION_ID_BYTES];
        if entry.kind != "select" {
            // The session's identifier is the last field of a control message's header.
            bytes[CONTROL_HEADER_BYTES - SESSION_ID_BYTES..CONTROL_HEADER_BYTES]
                .copy_from_slice(session);
        }
        if entry.kind == "accept" {
            secret = bytes[CONTROL_HEADER_BYTES..].first_chunk().copied();
        }
        if entry.kind == "lane-up" {
            let lane =
                u16::from_le_bytes([bytes[CONTROL_HEADER_BYTES], bytes[CONTROL_HEADER_BYTES + 1]]);
            let opening = heard.first("lane-open");
            let open = lane_open(
                session.try_into().unwrap(),
                &SessionSecret(secret.unwrap()),
                lane,
            );
            assert!(opening.ends_with(&open.mac), "the source's proof is wrong");
        }
        let control = Arc::clone(&opened.lock().unwrap()[&0]);
        control.send(&bytes).unwrap();
    });
    for lane in opened.lock().unwrap().values() {
        // The source may have closed the connection already.
        let _ = lane.close();
    }
}
