//! Tests a source that sends a false message (a *lie*), at each step of a session (invariant I7).
//! The destination ends the session with an error that names the lie and the party at fault, and
//! releases its resources. It never runs the VM without *commit*, and it receives the next VM.
//!
//! `--nocapture` prints a table of the cost of each lie.
#![allow(clippy::unwrap_used)]

mod chunks;
mod describing;
mod lanes;
mod messages;
mod opening;

use dunlin::engine::vmm::FaultCode;
use dunlin_proto::control::{Accept, ChunkSet, Message, Verdict};
use dunlin_proto::negotiate::{LaneSecurity, Opening, SessionSecret};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::hostile::*;

const MALFORMED: FaultCode = FaultCode::Malformed;

/// The name of a case, the expected fault, words of the error, and the changed bytes with their
/// offsets.
type Changed<'a> = (&'a str, FaultCode, &'a str, &'a [(usize, &'a [u8])]);

/// A source that has received *select* and has not described the VM yet.
fn selected(victim: &Victim<'_>) -> Peer {
    let (peer, answer) = Peer::source(victim.to, victim.tls, LaneSecurity::Tls);
    assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
    peer
}

/// Messages that a source must not send before *describe* or in pre-copy: messages of the
/// destination, and messages that belong to a later step.
fn out_of_turn() -> Vec<Message> {
    let sets = vec![ChunkSet { first: 0, count: 1 }];
    vec![
        Message::Commit { run: true },
        Message::Release,
        Message::Ack {
            sets: sets.clone(),
            reached: Vec::new(),
        },
        Message::LaneUp { lane: 1 },
        Message::Ready { digest: None },
        Message::Running {
            cpu_ns: 0,
            downtime_ns: 0,
        },
        Message::Accept(Accept {
            secret: SessionSecret([1; 32]),
            lanes_max: 1,
            endpoints: Vec::new(),
        }),
        Message::Answer {
            attempt: 1,
            verdict: Verdict::Running,
        },
        Message::Fenced {
            lane: 1,
            acks: sets,
        },
    ]
}
