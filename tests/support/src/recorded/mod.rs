//! The recording of a session in a file: all messages of both sides, without TLS, in the order in
//! which a proxy of the test ([`relay`]) forwarded them.
//!
//! ```text
//! control source describe        lane, sender, kind of message
//! 66000000 0100…                 its bytes in hexadecimal, 32 per line
//! ```
//! A replay sends the bytes of one side. It replaces what this side cannot choose: TLS itself, the
//! proof of a lane, and the session's identifier if the other side chooses the identifier. The
//! proof depends on the secret that the other side issues.

pub mod player;
pub mod relay;

use dunlin_lane::control::ControlStream;
use dunlin_proto::control::{CONTROL_HEADER_BYTES, Header, Message};
use dunlin_proto::frame::{FRAME_HEADER_BYTES, Frame};
use dunlin_proto::negotiate::{OpeningKind, PRELUDE_BYTES, Prelude};

use crate::lane::soon;

/// The sender of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Source,
    Destination,
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// 0 for the control lane.
    pub lane: u16,
    pub from: Side,
    pub kind: String,
    pub bytes: Vec<u8>,
}

pub fn to_text(entries: &[Entry]) -> String {
    let mut text = String::new();
    for entry in entries {
        let lane = match entry.lane {
            0 => "control".to_owned(),
            lane => format!("lane-{lane}"),
        };
        text.push_str(&format!("{lane} {} {}\n", entry.from.name(), entry.kind));
        for line in entry.bytes.chunks(32) {
            text.extend(line.iter().map(|byte| format!("{byte:02x}")));
            text.push('\n');
        }
    }
    text
}

pub fn from_text(text: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let [lane, from, kind] = line.split(' ').collect::<Vec<_>>()[..] {
            let lane = lane
                .strip_prefix("lane-")
                .map_or(0, |lane| lane.parse().unwrap());
            let from = match from {
                "source" => Side::Source,
                "destination" => Side::Destination,
                other => panic!("{other}"),
            };
            entries.push(Entry {
                lane,
                from,
                kind: kind.into(),
                bytes: Vec::new(),
            });
        } else {
            let digits = (0..line.len()).step_by(2);
            let bytes = digits.map(|at| u8::from_str_radix(&line[at..at + 2], 16).unwrap());
            entries.last_mut().unwrap().bytes.extend(bytes);
        }
    }
    entries
}

/// The stage of a connection, which determines the format of its next message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Opening,
    Control,
    Data,
}

/// The kind and the bytes of the next message; `None` at the end of the connection.
pub fn read(stream: &ControlStream, stage: Stage) -> Option<(String, Vec<u8>)> {
    let more = |bytes: &mut Vec<u8>, count: usize| {
        let from = bytes.len();
        bytes.resize(from + count, 0);
        stream.receive_exact(&mut bytes[from..], soon()).ok()
    };
    let mut bytes = Vec::new();
    let kind = match stage {
        Stage::Opening => {
            more(&mut bytes, PRELUDE_BYTES)?;
            let prelude = Prelude::decode(bytes[..].try_into().unwrap()).unwrap();
            more(&mut bytes, prelude.body_bytes)?;
            match prelude.kind {
                OpeningKind::Offer => "offer",
                OpeningKind::Select => "select",
                OpeningKind::Refuse => "refuse",
                OpeningKind::Lane => "lane-open",
            }
            .to_owned()
        }
        Stage::Control => {
            more(&mut bytes, CONTROL_HEADER_BYTES)?;
            let header = Header::decode(bytes[..].try_into().unwrap()).unwrap();
            more(&mut bytes, header.body_bytes())?;
            let message = Message::decode(&header, &bytes[CONTROL_HEADER_BYTES..]).unwrap();
            // `None`: a message of a kind that this release does not have. A receiver skips it.
            message.map_or("unknown".into(), |message| {
                message.kind().name().replace(' ', "-")
            })
        }
        Stage::Data => {
            more(&mut bytes, FRAME_HEADER_BYTES)?;
            match Frame::decode(bytes[..].try_into().unwrap()).unwrap() {
                Frame::Chunk(header) => {
                    let rest = header.ranges_bytes() + header.payload_bytes() as usize;
                    more(&mut bytes, rest)?;
                    "chunk".into()
                }
                Frame::Mark { .. } => "mark".into(),
                Frame::End { .. } => "end".into(),
            }
        }
    };
    Some((kind, bytes))
}
