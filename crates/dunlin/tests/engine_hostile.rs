//! Peers that break the rules, over real sockets, in both roles (I7). Each
//! session ends with an error that names the fault, the VM is at the source,
//! and nothing hangs.
#![allow(clippy::unwrap_used)]

mod engine_support;
mod lane_support;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::destination::{self, DestinationEvent};
use dunlin::engine::source::{self, LaneSecurity};
use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, VmIs};
use dunlin::lane::identity::ClientTls;
use dunlin_proto::control::{Accept, ChunkSet, Final, Message, Section};
use dunlin_proto::frame::Frame;
use dunlin_proto::negotiate::SessionSecret;
use engine_support::peer::*;
use engine_support::*;
use lane_support::{Authority, SOURCE};

fn last(chunks: u64, pages: u64, sections: u32) -> Message {
    Message::Final(Final {
        chunks,
        iteration: 1,
        sections,
        pages,
        fenced: 0,
        digest: None,
    })
}

/// What a hostile source does once it has been accepted; it has one lane.
struct Attack<'a> {
    peer: Peer,
    accept: Accept,
    lane: Option<dunlin::lane::data::DataSender>,
    to: std::net::SocketAddr,
    tls: &'a ClientTls,
}

impl Attack<'_> {
    fn send(&mut self, frame: &[u8]) {
        self.lane.as_mut().unwrap().send(frame).unwrap();
    }

    fn end(&mut self, chunks: u64) {
        self.send(&frame(Frame::End { chunks }));
        self.lane.take().unwrap().finish().unwrap();
    }
}

/// Lets `attack` loose on a destination, which must end with `fault` and
/// words that contain `words`.
fn attack(fault: FaultCode, words: &str, attack: impl FnOnce(&mut Attack<'_>)) {
    let (client, server) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address;
    let (mut peer, accept) = Peer::accepted(to, &client);
    let lane = open_lane(to, Some(&client), &lane_open(SESSION, &accept.secret, 1));
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 1 }));
    let mut hostile = Attack {
        peer,
        accept,
        lane: Some(lane),
        to,
        tls: &client,
    };
    let began = Instant::now();
    attack(&mut hostile);
    let told = hostile
        .peer
        .await_message(|message| matches!(message, Message::Cancel { .. }));
    drop(hostile);
    let (result, builder, _) = receiving.finish(false);
    let Err(error) = result else {
        panic!("{words}: it was taken in")
    };
    assert!(began.elapsed() < Duration::from_secs(5), "{words}");
    assert_eq!(error.fault, fault, "{error}");
    let cause = error.source.as_ref().map(ToString::to_string);
    let text = format!("{error}: {cause:?}");
    assert!(text.contains(words), "{text}");
    assert_eq!(error.vm, VmIs::AtSource);
    let calls = builder.built.unwrap().calls();
    assert_eq!(calls, ["discard"], "{words}");
    if fault != FaultCode::LaneLost {
        let Some(Message::Cancel { fault: said, .. }) = told else {
            panic!("{words}: the source was not told")
        };
        assert_eq!(said, fault);
    }
}

#[test]
fn i7_a_chunk_beyond_its_region_or_of_none_is_refused() {
    attack(FaultCode::Malformed, "end of range", |hostile| {
        hostile.send(&zero_chunk(0, 0, 4 << 20));
    });
    attack(FaultCode::Malformed, "region", |hostile| {
        hostile.send(&zero_chunk(0, 7, 0));
    });
    attack(FaultCode::Malformed, "frame kind", |hostile| {
        let mut header = [0; 24];
        header[0] = 9;
        hostile.send(&header);
    });
}

#[test]
fn i7_marks_ends_and_counts_must_be_right() {
    attack(FaultCode::Malformed, "marks are out of order", |hostile| {
        hostile.send(&frame(Frame::Mark { iteration: 2 }));
    });
    attack(FaultCode::Malformed, "ends with 5 chunks", |hostile| {
        hostile.send(&zero_chunk(0, 0, 0));
        hostile.send(&frame(Frame::End { chunks: 5 }));
    });
    attack(FaultCode::Malformed, "where the source counts", |hostile| {
        hostile.send(&zero_chunk(0, 0, 0));
        hostile.end(1);
        hostile.peer.send(&last(2, 1, 0));
    });
    attack(FaultCode::LaneLost, "lane 1", |hostile| {
        hostile.lane.as_ref().unwrap().canceller().shutdown();
    });
}

#[test]
fn i7_control_messages_out_of_turn_or_of_another_session_end_it() {
    attack(FaultCode::Malformed, "commit out of turn", |hostile| {
        hostile.peer.send(&Message::Commit { run: true });
    });
    attack(FaultCode::Malformed, "ack out of turn", |hostile| {
        let sets = vec![ChunkSet { first: 0, count: 1 }];
        hostile.peer.send(&Message::Ack {
            sets,
            reached: Vec::new(),
        });
    });
    attack(FaultCode::Malformed, "another session", |hostile| {
        hostile.peer.envelope.session = [1; 16];
        hostile.peer.send(&Message::Release);
        hostile.peer.envelope.session = SESSION;
    });
    attack(FaultCode::Malformed, "makes no sense", |hostile| {
        hostile.peer.stream.send(&[0xff; 40]).unwrap();
    });
}

#[test]
fn i7_i8_more_state_than_the_bound_ends_it() {
    attack(FaultCode::Malformed, "more state", |hostile| {
        let section = Message::Section(Section {
            name: "much".into(),
            instance: 0,
            version: 1,
            required: false,
            bytes: vec![1; 1_000_000],
        });
        // The destination may close while its window is shut, and TCP tells us
        // nothing then.
        let socket = hostile.peer.stream.socket();
        socket
            .set_write_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        while hostile.peer.send(&section) {}
    });
}

#[test]
fn i7_endless_pings_do_not_keep_a_session_from_its_error() {
    attack(FaultCode::Malformed, "release out of turn", |hostile| {
        for token in 0..20_000 {
            let bytes = hostile.peer.encode(&Message::Ping { token });
            hostile.peer.stream.send(&bytes).unwrap();
            if token % 64 == 63 {
                for _ in 0..64 {
                    let mut pong = [0; 48];
                    hostile
                        .peer
                        .stream
                        .receive_exact(&mut pong, lane_support::soon())
                        .unwrap();
                }
            }
        }
        hostile.peer.send(&Message::Release);
    });
}

#[test]
fn i7_a_source_that_opens_and_ends_lane_after_lane_uses_up_nothing() {
    attack(FaultCode::Malformed, "release out of turn", |hostile| {
        let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut most = 0;
        let before = open_files();
        for number in 2..60 {
            let open = lane_open(SESSION, &hostile.accept.secret, number);
            let mut lane = open_lane(hostile.to, Some(hostile.tls), &open);
            let told = |message: &Message| !matches!(message, Message::Ack { .. });
            let up = hostile.peer.await_message(told);
            assert_eq!(up, Some(Message::LaneUp { lane: number }));
            lane.send(&frame(Frame::End { chunks: 0 })).unwrap();
            lane.finish().unwrap();
            most = most.max(open_files());
        }
        // Other tests of this process open some as well.
        assert!(most < before + 45, "{before} open files became {most}");
        hostile.peer.send(&Message::Release);
    });
}

#[test]
fn i7_lanes_that_do_not_belong_are_turned_away_and_the_session_goes_on() {
    let authority = Authority::new();
    let (client, server) = (client_of(&authority, SOURCE), server_of(&authority));
    // The same name, another certificate.
    let twin = client_of(&authority, SOURCE);
    let options = destination::Options {
        lanes_max: 2,
        allow_plain: true,
        ..impatient()
    };
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address;
    let (mut peer, accept) = Peer::accepted(to, &client);
    let good = |number| lane_open(SESSION, &accept.secret, number);
    let refused = |peer: &mut Peer, number, wanted| match peer.receive() {
        Some(Message::LaneRefused { lane, fault, .. }) => {
            assert_eq!((lane, fault), (number, wanted))
        }
        other => panic!("{other:?}"),
    };

    let _wrong = open_lane(
        to,
        Some(&client),
        &lane_open(SESSION, &SessionSecret([3; 32]), 1),
    );
    receiving.await_rejection("does not know the session's secret");
    let _foreign = open_lane(
        to,
        Some(&client),
        &lane_open([4; 16], &SessionSecret([3; 32]), 1),
    );
    receiving.await_rejection("of another session");
    let _other = open_lane(to, Some(&client), &lane_open([4; 16], &accept.secret, 1));
    refused(&mut peer, 1, FaultCode::UnknownSession);
    let _twin = open_lane(to, Some(&twin), &good(1));
    refused(&mut peer, 1, FaultCode::WrongIdentity);
    let _plain = open_lane(to, None, &good(1));
    refused(&mut peer, 1, FaultCode::SecurityNotAgreed);
    let mut newer = good(1);
    newer.version = 9;
    let _newer = open_lane(to, Some(&client), &newer);
    refused(&mut peer, 1, FaultCode::VersionMismatch);

    let mut first = open_lane(to, Some(&client), &good(1));
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 1 }));
    let _again = open_lane(to, Some(&client), &good(1));
    refused(&mut peer, 1, FaultCode::DuplicateLane);
    let mut second = open_lane(to, Some(&client), &good(2));
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 2 }));
    let _surplus = open_lane(to, Some(&client), &good(3));
    refused(&mut peer, 3, FaultCode::LaneLimit);

    first.send(&zero_chunk(0, 0, 0)).unwrap();
    for (lane, chunks) in [(&mut first, 1), (&mut second, 0)] {
        lane.send(&frame(Frame::Mark { iteration: 1 })).unwrap();
        lane.send(&frame(Frame::End { chunks })).unwrap();
    }
    first.finish().unwrap();
    second.finish().unwrap();
    peer.send(&last(1, 1, 0));
    let ready = peer.await_message(|message| !matches!(message, Message::Ack { .. }));
    assert_eq!(ready, Some(Message::Ready { digest: None }));
    peer.send(&Message::Commit { run: false });
    assert!(matches!(peer.receive(), Some(Message::Running { .. })));
    peer.send(&Message::Release);
    let (result, ..) = receiving.finish(false);
    assert!(!result.unwrap().runs);
}

#[test]
fn i7_garbage_silence_and_strangers_do_not_stop_a_migration() {
    let (client, server) = tls();
    let (stranger, _) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address;
    let silent: Vec<_> = (0..80).map(|_| TcpStream::connect(to).unwrap()).collect();
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[22; 400],
        b"DUNLIN\r\nwhat",
        &[0; 5000],
    ] {
        // It may be turned away before all of it is written.
        let _ = TcpStream::connect(to).unwrap().write_all(garbage);
    }
    // One that never stops talking gets its turn and no more.
    let flood = thread::spawn(move || {
        let mut stream = TcpStream::connect(to).unwrap();
        while stream.write_all(&[0; 65536]).is_ok() {}
    });
    let stranger = dunlin::lane::control::client(
        TcpStream::connect(to).unwrap(),
        &stranger,
        lane_support::soon(),
    );
    assert!(stranger.is_err());
    let _plain = open_lane(to, None, &lane_open(SESSION, &SessionSecret([0; 32]), 1));
    receiving.await_rejection("no session has begun");
    let vm = TestVm::new(16 << 20);
    vm.fill(1 << 20);
    let began = Instant::now();
    let (result, _) = send(&vm, &to.to_string(), &client, &verified(4), &Cancel::new());
    assert_eq!(result.unwrap().digests_equal, Some(true));
    assert!(began.elapsed() < Duration::from_secs(5));
    receiving.finish(false).0.unwrap();
    drop(silent);
    flood.join().unwrap();
}

#[test]
fn i7_a_second_source_is_told_that_the_destination_is_busy() {
    let (client, server) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address.to_string();
    let vm = TestVm::new(4 << 20);
    vm.fill(4 << 20);
    let (held, release) = (
        std::sync::mpsc::channel::<()>(),
        std::sync::mpsc::channel::<()>(),
    );
    let (began, go_on) = (held.0, release.1);
    *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
        if step == "hold" {
            began.send(()).unwrap();
            go_on.recv().unwrap();
        }
    }));
    thread::scope(|scope| {
        let first = scope.spawn(|| send(&vm, &to, &client, &verified(2), &Cancel::new()));
        held.1.recv().unwrap();
        let second = TestVm::new(4 << 20);
        second.start(16, Duration::from_micros(100));
        let (result, _) = send(&second, &to, &client, &verified(2), &Cancel::new());
        let error = result.unwrap_err();
        assert_eq!(
            (error.fault, error.vm),
            (FaultCode::Busy, VmIs::AtSource),
            "{error}"
        );
        assert!(second.goes_on());
        release.0.send(()).unwrap();
        assert_eq!(first.join().unwrap().0.unwrap().digests_equal, Some(true));
    });
    let (result, _, events) = receiving.finish(false);
    result.unwrap();
    let turned_away = |event: &DestinationEvent| matches!(event, DestinationEvent::Rejected { reason } if reason.contains(SOURCE));
    assert!(events.iter().any(turned_away), "{events:?}");
}

/// Migrates a running VM to a destination played by `play`; the migration
/// must end with `fault`, and the guest must go on.
fn betray(
    fault: FaultCode,
    words: &str,
    options: &source::Options,
    play: impl FnOnce(&TcpListener, &dunlin::lane::identity::ServerTls) + Send,
) {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(64, Duration::from_micros(100));
    let began = Instant::now();
    let error = thread::scope(|scope| {
        scope.spawn(|| play(&listener, &server));
        send(&vm, &to, &client, options, &Cancel::new())
            .0
            .unwrap_err()
    });
    assert!(began.elapsed() < Duration::from_secs(5), "{words}");
    assert_eq!((error.fault, error.vm), (fault, VmIs::AtSource), "{error}");
    let cause = error.source.as_ref().map(ToString::to_string);
    let text = format!("{error}: {cause:?}");
    assert!(text.contains(words), "{text}");
    assert!(vm.goes_on(), "{words}: the guest stands still");
    assert!(!vm.calls().contains(&"destroy"));
}

fn one_lane() -> source::Options {
    source::Options {
        lanes: 1,
        ..source::Options::default()
    }
}

fn accept_message() -> Message {
    Message::Accept(Accept {
        secret: SessionSecret([5; 32]),
        lanes_max: 4,
        endpoints: Vec::new(),
    })
}

/// Plays a destination that follows the rules until its one lane stands.
fn with_lane(
    listener: &TcpListener,
    tls: &dunlin::lane::identity::ServerTls,
) -> (Peer, dunlin::lane::data::DataReceiver) {
    let mut peer = Peer::destination(listener, tls, None);
    assert!(matches!(peer.receive(), Some(Message::Describe(_))));
    peer.send(&accept_message());
    let (lane, open) = take_lane(listener, tls);
    assert_eq!(
        open,
        lane_open(peer.envelope.session, &SessionSecret([5; 32]), 1)
    );
    peer.send(&Message::LaneUp { lane: 1 });
    (peer, lane)
}

#[test]
fn i6_a_destination_cannot_talk_the_source_out_of_tls() {
    betray(
        FaultCode::SecurityNotAgreed,
        "",
        &one_lane(),
        |listener, tls| {
            Peer::destination(listener, tls, Some(LaneSecurity::Plain)).receive();
        },
    );
}

#[test]
fn i7_an_accept_for_no_lanes_is_refused() {
    betray(
        FaultCode::Malformed,
        "number of lanes",
        &one_lane(),
        |listener, tls| {
            let mut peer = Peer::destination(listener, tls, None);
            let mut bytes = peer.encode(&accept_message());
            bytes[40 + 32..][..2].fill(0);
            peer.stream.send(&bytes).unwrap();
            peer.receive();
            peer.receive();
        },
    );
}

#[test]
fn i7_lanes_that_were_not_asked_for_are_refused() {
    betray(
        FaultCode::Malformed,
        "lane 9",
        &one_lane(),
        |listener, tls| {
            let mut peer = Peer::destination(listener, tls, None);
            peer.receive();
            peer.send(&accept_message());
            peer.send(&Message::LaneUp { lane: 9 });
            while peer.receive().is_some() {}
        },
    );
}

#[test]
fn i7_acknowledging_what_was_never_sent_is_refused() {
    betray(
        FaultCode::Malformed,
        "was never sent",
        &one_lane(),
        |listener, tls| {
            let (mut peer, _lane) = with_lane(listener, tls);
            let sets = vec![ChunkSet {
                first: u64::MAX - 9,
                count: 9,
            }];
            peer.send(&Message::Ack {
                sets,
                reached: Vec::new(),
            });
            while peer.receive().is_some() {}
        },
    );
}

#[test]
fn i7_ready_and_running_before_their_time_are_refused() {
    betray(
        FaultCode::Malformed,
        "ready out of turn",
        &one_lane(),
        |listener, tls| {
            let (mut peer, _lane) = with_lane(listener, tls);
            peer.send(&Message::Ready { digest: None });
            while peer.receive().is_some() {}
        },
    );
    betray(
        FaultCode::Malformed,
        "running out of turn",
        &one_lane(),
        |listener, tls| {
            let (mut peer, _lane) = with_lane(listener, tls);
            peer.send(&Message::Running {
                cpu_ns: 0,
                downtime_ns: 0,
            });
            while peer.receive().is_some() {}
        },
    );
}

#[test]
fn i7_a_destination_that_never_accepts_but_pings_for_ever_is_given_up() {
    let options = source::Options {
        connect_limit: Duration::from_millis(500),
        ..one_lane()
    };
    betray(
        FaultCode::ControlLost,
        "kept us waiting",
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
    // No acknowledgement comes, so that only the limit brings the switchover.
    let options = source::Options {
        time_limit: Some(Duration::from_millis(300)),
        at_time_limit: source::AtTimeLimit::Stop,
        ..one_lane()
    };
    betray(
        FaultCode::GuestPoweredOff,
        "says so",
        &options,
        |listener, tls| {
            let (mut peer, mut lane) = with_lane(listener, tls);
            // Reads until the guest is paused and everything has been sent.
            let reader = thread::spawn(move || while lane.read_exact(&mut [0; 24]).is_ok() {});
            peer.await_message(|message| matches!(message, Message::Final(_)));
            peer.send(&Message::Cancel {
                fault: FaultCode::GuestPoweredOff,
                text: "says so".into(),
            });
            while peer.receive().is_some() {}
            reader.join().unwrap();
        },
    );
}
