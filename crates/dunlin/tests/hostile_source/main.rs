//! A source that lies, at each step of a session (I7): the destination ends it
//! with an error that names the lie and who is at fault, keeps nothing, never runs
//! the VM without *commit*, and receives the next one.
//!
//! What each lie costs is printed as a table: `--nocapture` shows it.
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

/// What is wrong with some bytes, the fault and words that must come of it, and
/// what is put where.
type Changed<'a> = (&'a str, FaultCode, &'a str, &'a [(usize, &'a [u8])]);

/// A source that has been selected and has described nothing yet.
fn selected(victim: &Victim<'_>) -> Peer {
    let (peer, answer) = Peer::source(victim.to, victim.tls, LaneSecurity::Tls);
    assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
    peer
}

/// The words of the other role, and some of this one at the wrong time.
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
