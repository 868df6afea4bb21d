//! Tests a destination that sends a false message (a *lie*), at each step of a session (invariant
//! I7). The source ends the session with an error that names the lie and the party at fault, and
//! releases its resources. After a lie before *commit*, its guest continues. After a later lie the
//! guest stays paused, because the VM possibly runs at the destination. The next migration, to an
//! honest destination, succeeds.
//!
//! `--nocapture` prints a table of the cost of each lie.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::VmIs;
use dunlin::engine::source::{self, LaneSecurity};
use dunlin::engine::vmm::FaultCode;
use dunlin::lane::control;
use dunlin::lane::policy::ServerTls;
use dunlin_proto::control::{Accept, CONTROL_HEADER_BYTES, ChunkSet, Message, Verdict};
use dunlin_proto::negotiate::{
    Features, LaneDirection, LaneOpen, Opening, PRELUDE_BYTES, Selection, VERSIONS,
};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::destination::*;
use dunlin_test_support::hostile::*;
use dunlin_test_support::lane::{Authority, soon};

const MALFORMED: FaultCode = FaultCode::Malformed;

/// Options with which pre-copy is still in progress when a false message arrives. With a faster
/// pre-copy, the source would already be waiting for *ready*.
fn slow() -> source::Options {
    one_lane().to_builder().rate(Some(1 << 20)).build().unwrap()
}

fn stays(fault: FaultCode, text: &str) -> (FaultCode, VmIs, &str) {
    (fault, VmIs::AtSource, text)
}

fn out_of_turn() -> Vec<Message> {
    vec![
        Message::Ready { digest: None },
        Message::Running {
            cpu_ns: 0,
            downtime_ns: 0,
        },
        Message::Answer {
            attempt: 1,
            verdict: Verdict::Running,
        },
        Message::Commit { run: true },
        Message::Release,
        describe(),
    ]
}

/// Claim A5 of docs/security.
#[test]
fn i6_i7_a_selection_that_was_not_offered_is_refused() {
    let honest = Selection {
        version: VERSIONS.max,
        features: Features::VERIFY,
        security: LaneSecurity::Tls,
    };
    let lies = [
        (
            "a version that was not offered",
            Selection {
                version: 9,
                ..honest.clone()
            },
        ),
        (
            "a feature that was not offered",
            Selection {
                features: Features::from_bits(3),
                ..honest.clone()
            },
        ),
        (
            "a required feature left out",
            Selection {
                features: Features::NONE,
                ..honest.clone()
            },
        ),
        (
            "plain lanes instead of TLS",
            Selection {
                security: LaneSecurity::Plain,
                ..honest
            },
        ),
    ];
    for (lie, selection) in lies {
        let ends = stays(FaultCode::SecurityNotAgreed, "the destination");
        refused_by_source(
            &format!("select: {lie}"),
            ends,
            &verified(1),
            |listener, tls| {
                answer(listener, tls, &Opening::Select(selection));
            },
        );
    }
    let from_here = LaneDirection::FromDialer;
    let lane = Opening::Lane(LaneOpen::unproved(1, SESSION, 1, from_here));
    let ends = stays(MALFORMED, "unexpected answer to the offer");
    refused_by_source(
        "select: a lane's opening instead",
        ends,
        &one_lane(),
        |listener, tls| {
            answer(listener, tls, &lane);
        },
    );
    let ends = stays(MALFORMED, "malformed");
    refused_by_source("select: garbage", ends, &one_lane(), |listener, tls| {
        let stream = control::server(listener.accept().unwrap().0, tls, soon()).unwrap();
        stream.send(&[7; PRELUDE_BYTES]).unwrap();
        let _ = stream.receive(&mut [0; 4096], soon());
        let _ = stream.receive(&mut [0; 4096], soon());
    });
}

/// Answers an offer with `opening`, and waits until the source disconnects.
fn answer(listener: &TcpListener, tls: &ServerTls, opening: &Opening) {
    let stream = control::server(listener.accept().unwrap().0, tls, soon()).unwrap();
    let mut bytes = Vec::new();
    opening.encode(&mut bytes).unwrap();
    stream.send(&bytes).unwrap();
    while stream
        .receive(&mut [0; 4096], soon())
        .is_ok_and(|count| count > 0)
    {}
}

/// Claim P17 of docs/security.
#[test]
fn i7_lies_instead_of_accept_are_refused() {
    let mut messages = out_of_turn();
    messages.push(Message::LaneUp { lane: 1 });
    messages.push(Message::Fenced {
        lane: 1,
        acks: Vec::new(),
    });
    for message in messages {
        let name = message.kind().name();
        let text = match message {
            Message::LaneUp { .. } | Message::Fenced { .. } => "the destination".to_owned(),
            _ => format!("unexpected {name}"),
        };
        refused_by_source(
            &format!("accept: {name} instead"),
            stays(MALFORMED, &text),
            &one_lane(),
            |listener, tls| {
                let mut peer = described(listener, tls);
                peer.send(&message);
                until_it_hangs_up(&mut peer);
            },
        );
    }
    let sets = vec![ChunkSet { first: 0, count: 1 }];
    let ends = stays(MALFORMED, "was never sent");
    refused_by_source("accept: ack instead", ends, &one_lane(), |listener, tls| {
        let mut peer = described(listener, tls);
        peer.send(&Message::Ack {
            sets,
            reached: Vec::new(),
        });
        until_it_hangs_up(&mut peer);
    });
    let two = one_lane().to_builder().lanes(2).build().unwrap();
    let ends = stays(FaultCode::LaneLimit, "over the destination's limit");
    refused_by_source("accept: too few lanes", ends, &two, |listener, tls| {
        let mut peer = described(listener, tls);
        peer.send(&Message::Accept(Accept {
            lanes_max: 1,
            ..accept_message()
        }));
        until_it_hangs_up(&mut peer);
    });
    // The offset of the lane count in *accept*. The endpoint count follows it.
    let lanes_at = CONTROL_HEADER_BYTES + 32;
    let lies: [(&str, usize, &[u8], &str); 3] = [
        ("no lanes", lanes_at, &[0, 0], "number of lanes"),
        ("65535 lanes", lanes_at, &[255, 255], "number of lanes"),
        (
            "65535 endpoints",
            lanes_at + 2,
            &[255, 255],
            "endpoint count",
        ),
    ];
    for (lie, at, value, text) in lies {
        refused_by_source(
            &format!("accept: {lie}"),
            stays(MALFORMED, text),
            &one_lane(),
            |listener, tls| {
                let mut peer = described(listener, tls);
                let mut bytes = peer.encode(&Message::Accept(accept_message()));
                bytes[at..at + value.len()].copy_from_slice(value);
                peer.stream.send(&bytes).unwrap();
                until_it_hangs_up(&mut peer);
            },
        );
    }
}

/// Claim P18 of docs/security.
#[test]
fn i7_endpoints_that_lead_elsewhere_are_refused() {
    // Another host, which has the right name, but a certificate from an authority that the source
    // does not trust.
    let stranger = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let elsewhere = stranger.local_addr().unwrap().to_string();
    let closed = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let unused = closed.local_addr().unwrap().to_string();
    drop(closed);
    let lies = [
        ("without a listener", unused, "cannot reach"),
        (
            "that are not addresses",
            "\u{1b}[2J".to_owned(),
            "cannot reach",
        ),
        ("to a stranger", elsewhere, "cannot secure lane 1"),
    ];
    let (_, other_authority) = tls();
    thread::spawn(move || {
        while let Ok((stream, _)) = stranger.accept() {
            let _ = control::server(stream, &other_authority, soon());
        }
    });
    for (lie, endpoint, text) in lies {
        refused_by_source(
            &format!("accept: endpoints {lie}"),
            stays(FaultCode::LaneLost, text),
            &one_lane(),
            |listener, tls| {
                let mut peer = described(listener, tls);
                peer.send(&Message::Accept(Accept {
                    endpoints: vec![endpoint],
                    ..accept_message()
                }));
                until_it_hangs_up(&mut peer);
            },
        );
    }
}

/// A lane reaches a host with a certificate that has the same name but comes from another
/// authority.
///
/// Claim P18 of docs/security.
#[test]
fn i7_a_lane_to_another_host_of_the_same_name_is_refused() {
    let _alone = alone();
    let (authority, another) = (Authority::named("one"), Authority::named("two"));
    let (client, server) = trusting(&authority, &another);
    let (_, twin) = trusting(&another, &authority);
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let endpoint = other.local_addr().unwrap().to_string();
    let vm = TestVm::new(4 << 20);
    vm.start(64, Duration::from_micros(100));
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let mut peer = described(&listener, &server);
            peer.send(&Message::Accept(Accept {
                endpoints: vec![endpoint],
                ..accept_message()
            }));
            let _ = dunlin::lane::handshake::server(other.accept().unwrap().0, &twin, soon());
            until_it_hangs_up(&mut peer);
        });
        let cancel = dunlin::engine::Cancel::new();
        send(&vm, &to, &client, &one_lane(), &cancel).0.unwrap_err()
    });
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::WrongIdentity, VmIs::AtSource)
    );
    assert!(vm.goes_on());
    good_migration_of(&vm, listener, (&client, &server));
}

#[test]
fn i7_lies_about_lanes_are_refused() {
    let lies = [
        (
            "one that is not being opened",
            Message::LaneUp { lane: 9 },
            MALFORMED,
            "lane 9",
        ),
        (
            "one is refused for no reason",
            Message::LaneRefused {
                lane: 1,
                fault: FaultCode::DuplicateLane,
                text: "because".into(),
            },
            FaultCode::DuplicateLane,
            "because",
        ),
    ];
    for (lie, message, fault, text) in lies {
        refused_by_source(
            &format!("lane up: {lie}"),
            stays(fault, text),
            &one_lane(),
            |listener, tls| {
                let mut peer = described(listener, tls);
                peer.send(&Message::Accept(accept_message()));
                peer.send(&message);
                until_it_hangs_up(&mut peer);
            },
        );
    }
    for message in [Message::Accept(accept_message()), describe()] {
        let name = message.kind().name();
        refused_by_source(
            &format!("lane up: {name} again"),
            stays(MALFORMED, &format!("unexpected {name}")),
            &slow(),
            |listener, tls| {
                let (mut peer, _reader) = with_lane(listener, tls);
                peer.send(&message);
                until_it_hangs_up(&mut peer);
            },
        );
    }
}

/// Claims P17, P19 of docs/security.
#[test]
fn i7_lies_during_pre_copy_are_refused() {
    let mut lies: Vec<(String, Message, &str)> = out_of_turn()
        .into_iter()
        .map(|message| (message.kind().name().to_owned(), message, "unexpected"))
        .collect();
    let ack = |first, count| Message::Ack {
        sets: vec![ChunkSet { first, count }],
        reached: Vec::new(),
    };
    let never = "was never sent";
    lies.push((
        "ack of the last chunks that there can be".into(),
        ack(u64::MAX - 9, 9),
        never,
    ));
    lies.push(("ack of 4 Gi chunks".into(), ack(0, u32::MAX), never));
    for (lie, message, text) in lies {
        refused_by_source(
            &format!("pre-copy: {lie}"),
            stays(MALFORMED, text),
            &slow(),
            |listener, tls| {
                let (mut peer, _reader) = with_lane(listener, tls);
                peer.send(&message);
                until_it_hangs_up(&mut peer);
            },
        );
    }
    for (lie, session, epoch) in [
        ("another session's message", [1; 16], 1),
        ("a stale epoch", [0; 16], 0),
        ("an epoch to come", [0; 16], 2),
    ] {
        refused_by_source(
            &format!("pre-copy: {lie}"),
            stays(MALFORMED, "another session or epoch"),
            &slow(),
            |listener, tls| {
                let (mut peer, _reader) = with_lane(listener, tls);
                let honest = peer.envelope;
                if session != [0; 16] {
                    peer.envelope.session = session;
                }
                peer.envelope.epoch = epoch;
                peer.send(&Message::Ping { token: 1 });
                peer.envelope = honest;
                until_it_hangs_up(&mut peer);
            },
        );
    }
    let ends = stays(MALFORMED, "malformed");
    refused_by_source("pre-copy: garbage", ends, &slow(), |listener, tls| {
        let (mut peer, _reader) = with_lane(listener, tls);
        peer.stream.send(&[255; CONTROL_HEADER_BYTES]).unwrap();
        until_it_hangs_up(&mut peer);
    });
    let ends = stays(FaultCode::ControlLost, "could not be replaced");
    refused_by_source("pre-copy: closed", ends, &slow(), |listener, tls| {
        let (peer, _reader) = with_lane(listener, tls);
        peer.stream.close().unwrap();
    });
}

/// Claim P17 of docs/security.
#[test]
fn i3_i7_lies_instead_of_ready_are_refused() {
    let digest = |digest| Message::Ready { digest };
    let lies = [
        ("no digest", digest(None), MALFORMED, "sent no digest"),
        (
            "another memory's digest",
            digest(Some([1; 16])),
            FaultCode::VerificationFailed,
            "digests differ",
        ),
        (
            "running",
            Message::Running {
                cpu_ns: 1,
                downtime_ns: 1,
            },
            MALFORMED,
            "unexpected running",
        ),
        (
            "accept",
            Message::Accept(accept_message()),
            MALFORMED,
            "unexpected accept",
        ),
    ];
    for (lie, message, fault, text) in lies {
        refused_by_source(
            &format!("ready: {lie}"),
            stays(fault, text),
            &hasty(true),
            |listener, tls| {
                let mut peer = finalised(listener, tls);
                peer.send(&message);
                until_it_hangs_up(&mut peer);
            },
        );
    }
}

/// After *commit* the source neither resumes nor destroys its copy if it receives one of these lies
/// instead of *running*.
///
/// Claim P20 of docs/security.
#[test]
fn i1_lies_instead_of_running_leave_the_vm_in_doubt() {
    type Lie = (&'static str, FaultCode, &'static str, fn(&mut Peer));
    let lies: [Lie; 3] = [
        ("ready again", MALFORMED, "unexpected ready", |peer| {
            peer.send(&Message::Ready { digest: None });
        }),
        ("garbage", MALFORMED, "malformed", |peer| {
            peer.stream.send(&[255; CONTROL_HEADER_BYTES]).unwrap();
        }),
        (
            "closed",
            FaultCode::ControlLost,
            "closed the control lane",
            |peer| {
                peer.stream.close().unwrap();
            },
        ),
    ];
    for (lie, fault, text, tell) in lies {
        refused_by_source(
            &format!("running: {lie}"),
            (fault, VmIs::InDoubt, text),
            &hasty(false),
            |listener, tls| {
                let mut peer = finalised(listener, tls);
                peer.send(&Message::Ready { digest: None });
                let commit =
                    peer.await_message(|message| matches!(message, Message::Commit { .. }));
                assert_eq!(commit, Some(Message::Commit { run: true }));
                tell(&mut peer);
                until_it_hangs_up(&mut peer);
            },
        );
    }
}

/// After *commit*, *cancel* is a valid answer: the destination sends it after it has recorded
/// *aborted*.
#[test]
fn i2_a_cancel_that_crosses_commit_gives_the_vm_back() {
    refused_by_source(
        "running: cancel",
        stays(FaultCode::Cancelled, "let me go"),
        &hasty(false),
        |listener, tls| {
            let mut peer = finalised(listener, tls);
            peer.send(&Message::Ready { digest: None });
            peer.await_message(|message| matches!(message, Message::Commit { .. }));
            peer.send(&Message::Cancel {
                fault: FaultCode::Cancelled,
                text: "let me go".into(),
            });
            until_it_hangs_up(&mut peer);
        },
    );
}

/// Repeated acknowledgements of a chunk have no further effect.
#[test]
fn i8_acknowledgements_repeated_without_end_do_no_harm() {
    let ends = stays(MALFORMED, "unexpected ready");
    refused_by_source(
        "ack: one chunk 400,000 times",
        ends,
        &slow(),
        |listener, tls| {
            let (mut peer, _reader) = with_lane(listener, tls);
            let sets = vec![ChunkSet { first: 0, count: 1 }; 4000];
            thread::sleep(Duration::from_millis(100));
            for _ in 0..100 {
                peer.send(&Message::Ack {
                    sets: sets.clone(),
                    reached: Vec::new(),
                });
            }
            peer.send(&Message::Ready { digest: None });
            until_it_hangs_up(&mut peer);
        },
    );
}

/// Claim P20 of docs/security.
#[test]
fn i7_a_destination_that_never_accepts_but_pings_for_ever_is_given_up() {
    let options = one_lane()
        .to_builder()
        .connect_limit(Duration::from_millis(500))
        .build()
        .unwrap();
    let ends = stays(FaultCode::ControlLost, "did not answer");
    refused_by_source(
        "accept: pings for ever instead",
        ends,
        &options,
        |listener, tls| {
            let mut peer = Peer::destination(listener, tls, None);
            let mut token = 0;
            while peer.send(&Message::Ping { token }) {
                token += 1;
                let _ = peer.stream.receive(&mut [0; 4096], Instant::now());
            }
        },
    );
}

#[test]
fn i2_a_peer_that_says_the_guest_has_ended_does_not_keep_it_paused() {
    let ends = stays(FaultCode::GuestPoweredOff, "says so");
    refused_by_source(
        "ready: the guest has ended",
        ends,
        &hasty(false),
        |listener, tls| {
            let mut peer = finalised(listener, tls);
            peer.send(&Message::Cancel {
                fault: FaultCode::GuestPoweredOff,
                text: "says so".into(),
            });
            until_it_hangs_up(&mut peer);
        },
    );
}
