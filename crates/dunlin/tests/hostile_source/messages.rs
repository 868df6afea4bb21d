//! Tests false control messages, from pre-copy until after *running*.

use std::time::Duration;

use dunlin::engine::vmm::FaultCode;
use dunlin_proto::control::{CONTROL_HEADER_BYTES, Message, Section};
use dunlin_proto::limits::MAX_SECTIONS;
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::hostile::*;
use dunlin_test_support::lane::soon;

use crate::{Changed, MALFORMED, out_of_turn};

/// Claim P1 of docs/security.
#[test]
fn i7_control_messages_that_lie_end_the_session() {
    for message in out_of_turn() {
        let name = message.kind().name();
        let (row, text) = (
            format!("pre-copy: {name} out of turn"),
            format!("unexpected {name}"),
        );
        refused_by_destination(&row, MALFORMED, &text, |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&message);
            liar.into()
        });
    }
    let another = "another session or epoch";
    for (row, session, epoch) in [
        ("pre-copy: another session's message", [1; 16], 1),
        ("pre-copy: a stale epoch", SESSION, 0),
        ("pre-copy: an epoch to come", SESSION, 2),
    ] {
        refused_by_destination(row, MALFORMED, another, |victim| {
            let mut liar = victim.liar();
            let honest = liar.peer.envelope;
            liar.peer.envelope.session = session;
            liar.peer.envelope.epoch = epoch;
            liar.peer.send(&Message::Ping { token: 1 });
            liar.peer.envelope = honest;
            liar.into()
        });
    }
    let release = |peer: &mut Peer| peer.encode(&Message::Release);
    let raw: [Changed<'_>; 4] = [
        ("garbage", MALFORMED, "body length", &[(3, &[255])]),
        (
            "a body of 4 GiB",
            MALFORMED,
            "body length",
            &[(0, &[255]), (1, &[255]), (2, &[255]), (3, &[255])],
        ),
        (
            "a kind that must be known",
            FaultCode::FeatureMissing,
            "message kind",
            &[(4, &[200])],
        ),
        (
            "a reserved flag",
            FaultCode::FeatureMissing,
            "message flags",
            &[(6, &[3])],
        ),
    ];
    for (lie, fault, text, changes) in raw {
        refused_by_destination(&format!("pre-copy: {lie}"), fault, text, |victim| {
            let mut liar = victim.liar();
            let mut bytes = release(&mut liar.peer);
            for (at, value) in changes {
                bytes[*at..*at + value.len()].copy_from_slice(value);
            }
            liar.peer.stream.send(&bytes).unwrap();
            liar.into()
        });
    }
}

/// Claims A8, P1 of docs/security.
#[test]
fn i7_counts_that_lie_end_the_session() {
    let text = "memory or state is missing";
    for (lie, wrong) in [
        ("more chunks than came", last(2, 1, 0)),
        ("fewer chunks than came", last(0, 1, 0)),
        ("as many chunks as there are numbers", last(u64::MAX, 1, 0)),
        ("more pages than came", last(1, 2, 0)),
        ("fewer pages than came", last(1, 0, 0)),
    ] {
        refused_by_destination(&format!("final: {lie}"), MALFORMED, text, |victim| {
            let mut liar = victim.liar();
            liar.frame(&zero_chunk(0, 0, 0));
            liar.end_lane(1);
            liar.peer.send(&wrong);
            liar.into()
        });
    }
    let text = "but the source announced";
    refused_by_destination(
        "final: a section that never came",
        MALFORMED,
        text,
        |victim| {
            let mut liar = victim.liar();
            liar.end_lane(0);
            liar.peer.send(&last(0, 0, 1));
            liar.into()
        },
    );
    let section = || {
        Message::Section(Section {
            name: "s".into(),
            instance: 0,
            version: 1,
            required: false,
            bytes: Vec::new(),
        })
    };
    refused_by_destination(
        "section: more than are counted",
        MALFORMED,
        text,
        |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&section());
            liar.conclude(0, 0);
            liar.into()
        },
    );
    refused_by_destination(
        "section: 4097 of them",
        MALFORMED,
        "state is over the limit",
        |victim| {
            let mut liar = victim.liar();
            for _ in 0..=4096 {
                liar.peer.send(&section());
            }
            liar.into()
        },
    );
}

#[test]
fn i1_a_commit_before_its_time_runs_nothing() {
    let commit = Message::Commit { run: true };
    refused_by_destination(
        "commit: before a page has come",
        MALFORMED,
        "unexpected commit",
        |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&commit);
            liar.into()
        },
    );
    refused_by_destination(
        "commit: behind final, the lane still open",
        MALFORMED,
        "unexpected commit",
        |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&last(0, 0, 0));
            liar.peer.send(&commit);
            liar.into()
        },
    );
    for (lie, message) in [
        ("release instead", Message::Release),
        ("the VM again", describe()),
        ("ready back", Message::Ready { digest: None }),
    ] {
        refused_by_destination(
            &format!("commit: {lie}"),
            MALFORMED,
            "unexpected",
            |victim| {
                let mut liar = victim.liar();
                liar.conclude(0, 0);
                liar.await_ready();
                liar.peer.send(&message);
                liar.into()
            },
        );
    }
    refused_by_destination(
        "commit: closed instead",
        FaultCode::ControlLost,
        "closed the control lane",
        |victim| {
            let mut liar = victim.liar();
            liar.conclude(0, 0);
            liar.await_ready();
            liar.peer.stream.close().unwrap();
            liar.into()
        },
    );
}

/// After *running* no message of the source affects the VM.
///
/// Claim P13 of docs/security.
#[test]
fn i1_i2_lies_after_running_change_nothing() {
    type Lie = (&'static str, fn(&mut Peer));
    let _alone = alone();
    let lies: [Lie; 5] = [
        ("commit again", |peer| {
            peer.send(&Message::Commit { run: true });
        }),
        ("cancel", |peer| {
            peer.send(&Message::Cancel {
                fault: FaultCode::Cancelled,
                text: "too late".into(),
            });
        }),
        ("final again", |peer| {
            peer.send(&last(0, 0, 0));
        }),
        ("garbage", |peer| {
            let _ = peer.stream.send(&[255; CONTROL_HEADER_BYTES]);
        }),
        ("closed instead", |peer| {
            let _ = peer.stream.close();
        }),
    ];
    for (lie, tell) in lies {
        let (result, builder) = lie_to_destination(&format!("release: {lie}"), |victim| {
            let mut liar = victim.liar();
            liar.conclude(0, 0);
            liar.await_ready();
            liar.peer.send(&Message::Commit { run: true });
            assert!(matches!(liar.peer.receive(), Some(Message::Running { .. })));
            tell(&mut liar.peer);
            while liar.peer.receive().is_some() {}
        });
        assert!(result.unwrap(), "{lie}");
        let vm = builder.built.unwrap();
        assert_eq!(runs(&vm), 1, "{lie}");
        assert!(!vm.calls().contains(&"discard"), "{lie}");
    }
}

/// Claim P7 of docs/security.
#[test]
fn i7_i8_more_state_than_the_bound_ends_it() {
    let over = "state is over the limit";
    refused_by_destination("section: more than 32 MiB", MALFORMED, over, |victim| {
        let mut liar = victim.liar();
        let section = section(1_000_000);
        // Use timeouts: TCP does not report the destination's close while the destination's receive
        // window is full.
        let limit = Some(Duration::from_millis(300));
        let socket = liar.peer.stream.socket();
        socket.set_write_timeout(limit).unwrap();
        socket.set_read_timeout(limit).unwrap();
        while liar.peer.send(&section) {}
        liar.into()
    });
    // The sections are small, but each one takes memory.
    refused_by_destination("section: one too many", MALFORMED, over, |victim| {
        let mut liar = victim.liar();
        for _ in 0..=MAX_SECTIONS {
            liar.peer.send(&section(1));
        }
        liar.into()
    });
}

fn section(bytes: usize) -> Message {
    Message::Section(Section {
        name: "much".into(),
        instance: 0,
        version: 1,
        required: false,
        bytes: vec![1; bytes],
    })
}

#[test]
fn i7_endless_pings_do_not_keep_a_session_from_its_error() {
    refused_by_destination(
        "pre-copy: 20,000 pings",
        MALFORMED,
        "unexpected release",
        |victim| {
            let mut liar = victim.liar();
            for token in 0..20_000 {
                let bytes = liar.peer.encode(&Message::Ping { token });
                liar.peer.stream.send(&bytes).unwrap();
                if token % 64 == 63 {
                    for _ in 0..64 {
                        let mut pong = [0; 48];
                        liar.peer.stream.receive_exact(&mut pong, soon()).unwrap();
                    }
                }
            }
            liar.peer.send(&Message::Release);
            liar.into()
        },
    );
}
