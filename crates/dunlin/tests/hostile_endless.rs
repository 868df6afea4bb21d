//! Tests peers that repeat messages without end. Only progress prolongs a limit: a message that
//! changes nothing does not.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use dunlin::engine::VmIs;
use dunlin::engine::source;
use dunlin::engine::vmm::FaultCode;
use dunlin_linux::socket::wait_readable;
use dunlin_proto::control::{Message, Verdict};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::destination::*;
use dunlin_test_support::hostile::*;
use dunlin_test_support::lane::soon;

/// The source's limit for answers, and the destination's idle limit, in these tests.
const BRIEF: Duration = Duration::from_millis(500);

/// Options with which the source waits only briefly for answers.
fn brief() -> source::Options {
    let options = hasty(false).to_builder();
    options.answer_limit(BRIEF).build().unwrap()
}

/// Sends `message` several times per [`BRIEF`], until the other side sends *cancel* or closes the
/// connection. Returns the *cancel*.
fn repeat(peer: &mut Peer, message: &Message) -> Option<Message> {
    let began = Instant::now();
    while peer.send(message) && began.elapsed() < END_LIMIT {
        let next = Instant::now() + BRIEF / 8;
        while wait_readable(peer.stream.socket(), next).unwrap() {
            match peer.receive() {
                Some(cancel @ Message::Cancel { .. }) => return Some(cancel),
                Some(_) => {}
                None => return None,
            }
        }
    }
    None
}

/// The destination reports that the lane is up, but never answers the lane's handshake. The lane
/// therefore does not end, and the source keeps receiving messages.
///
/// Claim P20 of docs/security.
#[test]
fn i2_a_destination_that_repeats_messages_in_the_last_pass_is_given_up() {
    refused_by_source(
        "last pass: lane up again and again",
        (FaultCode::LaneLost, VmIs::AtSource, "acknowledged nothing"),
        &brief(),
        |listener, tls| {
            let mut peer = described(listener, tls);
            peer.send(&Message::Accept(accept_message()));
            // The lane's connection waits in the listener's backlog.
            assert!(wait_readable(listener, soon()).unwrap());
            repeat(&mut peer, &Message::LaneUp { lane: 1 });
        },
    );
}

/// The destination has received everything.
///
/// Claim P20 of docs/security.
#[test]
fn i2_a_destination_that_repeats_messages_instead_of_ready_is_given_up() {
    refused_by_source(
        "ready: lane up again and again instead",
        (
            FaultCode::ControlLost,
            VmIs::AtSource,
            "did not answer final",
        ),
        &brief(),
        |listener, tls| {
            let mut peer = finalised(listener, tls);
            repeat(&mut peer, &Message::LaneUp { lane: 1 });
        },
    );
}

/// An answer about another attempt decides nothing.
///
/// Claim P20 of docs/security.
#[test]
fn i1_a_destination_that_repeats_answers_instead_of_running_leaves_the_vm_in_doubt() {
    refused_by_source(
        "running: answers about another attempt instead",
        (
            FaultCode::ControlLost,
            VmIs::InDoubt,
            "did not answer commit",
        ),
        &brief(),
        |listener, tls| {
            let mut peer = finalised(listener, tls);
            peer.send(&Message::Ready { digest: None });
            let commit = peer.await_message(|message| matches!(message, Message::Commit { .. }));
            assert!(commit.is_some());
            let other = Message::Answer {
                attempt: 9,
                verdict: Verdict::Running,
            };
            repeat(&mut peer, &other);
        },
    );
}

/// A source repeats *final* while a lane is open, or after *ready*.
///
/// Claim P9 of docs/security.
#[test]
fn i7_a_source_that_repeats_final_is_given_up_at_the_idle_limit() {
    let _alone = alone();
    for ready in [false, true] {
        let (client, server) = tls();
        let options = impatient().to_builder().idle_limit(BRIEF).build();
        let options = options.unwrap();
        let receiving = Receiving::start(&server, &options, TestBuilder::default());
        let victim = Victim {
            to: receiving.address,
            tls: &client,
        };
        let mut liar = victim.liar();
        if ready {
            liar.conclude(0, 0);
            liar.await_ready();
        }
        let reply = repeat(&mut liar.peer, &last(0, 0, 0));
        let Some(Message::Cancel { fault, text }) = reply else {
            panic!("no *cancel* was sent, ready: {ready}")
        };
        assert_eq!(fault, FaultCode::Standstill, "{text}");
        drop(liar);
        let (result, builder, _) = receiving.finish(false);
        assert_eq!(result.err().unwrap().code(), FaultCode::Standstill);
        assert_eq!(runs(&builder.built.unwrap()), 0);
    }
}
