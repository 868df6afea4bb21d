//! The control lane.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::control::{self, ControlError, ControlStream, OpenError};
use dunlin_lane::dial::{DialCancel, DialError, StandardConnector};
use dunlin_lane::policy::ServerTls;
use dunlin_lane::provider::{Crypto, Provider};
use dunlin_lane::record::Alert;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, Selection, SessionId,
    VERSIONS,
};
use dunlin_test_support::lane::*;
use rustix::net::sockopt;

fn lane() -> (Arc<ControlStream>, Arc<ControlStream>) {
    lane_by(Crypto::auto())
}

fn lane_by(crypto: Crypto) -> (Arc<ControlStream>, Arc<ControlStream>) {
    let authority = Authority::new();
    let client = authority
        .identity(&[SOURCE])
        .client(&crypto, names(&[DESTINATION]))
        .unwrap();
    let server = authority
        .identity(&[DESTINATION])
        .server(&crypto, names(&[SOURCE]))
        .unwrap();
    let (near, far) = pair();
    let accept = thread::spawn(move || control::server(far, &server, soon()).unwrap());
    let near = control::client(near, &client, soon()).unwrap();
    (Arc::new(near), Arc::new(accept.join().unwrap()))
}

#[test]
fn both_ends_export_the_same_key_and_each_lane_a_different_one() {
    for &provider in Provider::built_in() {
        let (near, far) = lane_by(Crypto::with(provider));
        let export = |end: &ControlStream, context: &[u8]| {
            let mut key = [0; 64];
            end.export(b"EXPORTER-test", Some(context), &mut key)
                .unwrap();
            key
        };
        assert_eq!(export(&near, b"a"), export(&far, b"a"));
        assert_ne!(export(&near, b"a"), export(&near, b"b"));
        assert_ne!(export(&near, b"a"), export(&lane().0, b"a"));
        near.send(b"after the export").unwrap();
        let mut got = [0; 16];
        far.receive_exact(&mut got, soon()).unwrap();
        assert_eq!(&got, b"after the export");
    }
}

#[test]
fn long_messages_cross_and_those_of_several_senders_do_not_interleave() {
    const PARTS: usize = 40;
    const PART_BYTES: usize = 100_000;
    let (near, far) = lane();
    let ends = [(near.clone(), far.clone()), (far, near)];
    thread::scope(|scope| {
        for (sender, receiver) in &ends {
            for sender_number in 1..=2 {
                scope.spawn(move || {
                    for _ in 0..PARTS {
                        sender.send(&vec![sender_number; PART_BYTES]).unwrap();
                    }
                });
            }
            scope.spawn(move || {
                let mut part = vec![0; PART_BYTES];
                for _ in 0..2 * PARTS {
                    receiver.receive_exact(&mut part, soon()).unwrap();
                    assert!(part.iter().all(|byte| *byte == part[0]));
                }
            });
        }
    });
}

#[test]
fn a_receive_that_times_out_loses_nothing() {
    let (near, far) = lane();
    let begin = Instant::now();
    let limit = Duration::from_millis(60);
    let error = far.receive_exact(&mut [0; 4], begin + limit).unwrap_err();
    assert!(matches!(error, ControlError::Deadline), "{error}");
    assert!(begin.elapsed() >= limit);
    near.send(b"late").unwrap();
    let mut got = [0; 4];
    far.receive_exact(&mut got, soon()).unwrap();
    assert_eq!(&got, b"late");
    // A receive after its deadline still returns bytes that have arrived.
    near.send(b"more").unwrap();
    let limit = soon();
    while let Err(error) = far.receive_exact(&mut got, Instant::now()) {
        assert!(matches!(error, ControlError::Deadline), "{error}");
        assert!(Instant::now() < limit, "received bytes are not returned");
        thread::yield_now();
    }
    assert_eq!(&got, b"more");
}

#[test]
fn shutdown_wakes_the_receiver_while_another_thread_sends() {
    let (near, far) = lane();
    let waiting = thread::spawn({
        let far = far.clone();
        move || {
            far.receive(&mut [0; 9], Instant::now() + Duration::from_secs(60))
                .unwrap_err()
        }
    });
    thread::sleep(Duration::from_millis(50));
    // The receiver holds no lock that a sender needs.
    far.send(b"sent while the other waits").unwrap();
    far.shutdown();
    // The receive ends before its deadline.
    let error = waiting.join().unwrap();
    assert!(matches!(error, ControlError::Cancelled), "{error}");
    assert!(matches!(far.send(b"x"), Err(ControlError::Cancelled)));
    let mut got = [0; 26];
    near.receive_exact(&mut got, soon()).unwrap();
    assert!(matches!(
        near.receive(&mut [0; 9], soon()),
        Err(ControlError::Truncated)
    ));
}

#[test]
fn i7_a_close_a_close_inside_a_message_and_a_lost_connection_differ() {
    let (near, far) = lane();
    near.send(b"last").unwrap();
    near.close().unwrap();
    let mut got = [0; 4];
    far.receive_exact(&mut got, soon()).unwrap();
    assert!(matches!(far.receive(&mut got, soon()), Ok(0)));
    assert!(matches!(
        far.receive_exact(&mut got, soon()),
        Err(ControlError::Closed)
    ));
    // The other direction is still open.
    far.send(b"answer").unwrap();
    near.receive_exact(&mut [0; 6], soon()).unwrap();

    let (near, far) = lane();
    near.send(b"half").unwrap();
    near.close().unwrap();
    let error = far.receive_exact(&mut [0; 8], soon()).unwrap_err();
    assert!(matches!(error, ControlError::Truncated), "{error}");

    let (near, far) = lane();
    near.send(b"half").unwrap();
    drop(near);
    let error = far.receive_exact(&mut [0; 8], soon()).unwrap_err();
    assert!(matches!(error, ControlError::Truncated), "{error}");
}

#[test]
fn i7_injected_bytes_end_the_lane_on_both_sides() {
    let (near, far) = lane();
    let mut socket = near.socket();
    socket
        .write_all(&[
            23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
        ])
        .unwrap();
    let error = far.receive(&mut [0; 9], soon()).unwrap_err();
    assert!(matches!(error, ControlError::Tls(_)), "{error}");
    let error = near.receive(&mut [0; 9], soon()).unwrap_err();
    // Alert 20 is bad_record_mac.
    assert!(
        matches!(error, ControlError::PeerAlert(Alert(20))),
        "{error}"
    );
}

#[test]
fn a_refused_certificate_reaches_the_source_at_its_first_receive() {
    let authority = Authority::new();
    let crypto = Crypto::auto();
    let client = authority.identity(&["stranger.test"]);
    let client = client.client(&crypto, names(&[DESTINATION])).unwrap();
    let server = authority
        .identity(&[DESTINATION])
        .server(&crypto, names(&[SOURCE]))
        .unwrap();
    let (near, far) = pair();
    let accept = thread::spawn(move || control::server(far, &server, soon()).unwrap_err());
    let near = control::client(near, &client, soon()).unwrap();
    let _ = near.send(b"hello");
    let error = near.receive(&mut [0; 9], soon()).unwrap_err();
    // The alerts for a certificate that is not allowed.
    assert!(
        matches!(error, ControlError::PeerAlert(Alert(42 | 46 | 49))),
        "{error}"
    );
    accept.join().unwrap();
}

/// A peer that sends one byte at a time must not hold this side longer than its deadline.
#[test]
fn i7_a_deadline_for_all_bytes_ends_a_slow_message() {
    let (near, far) = lane();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let slow = thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) && far.send(b"x").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let deadline = Instant::now() + Duration::from_millis(200);
    let error = near.receive_exact_by(&mut [0; 4096], deadline).unwrap_err();
    assert!(matches!(error, ControlError::Stalled), "{error}");
    stop.store(true, Ordering::Relaxed);
    slow.join().unwrap();
}

/// After a partially written record this side must not send anything. If the peer does not read,
/// closing must not wait for it a second time.
#[test]
fn after_a_stalled_write_nothing_is_sent_and_receiving_still_works() {
    const STALL: Duration = Duration::from_millis(300);
    let (near, far) = lane();
    near.socket().set_write_timeout(Some(STALL)).unwrap();
    let stalled = |result| matches!(result, Err(ControlError::Stalled));
    loop {
        if let Err(error) = near.send(&[7; 100_000]) {
            assert!(matches!(error, ControlError::Stalled), "{error}");
            break;
        }
    }
    let began = Instant::now();
    assert!(stalled(near.send(b"more")));
    assert!(stalled(near.close()));
    assert!(began.elapsed() < STALL, "{:?}", began.elapsed());
    far.send(b"read").unwrap();
    let mut got = [0; 4];
    near.receive_exact(&mut got, soon()).unwrap();
    assert_eq!(&got, b"read");
}

/// Opens a control lane to a new listener; `peer` serves the accepted connection.
fn opened(
    cancel: &DialCancel,
    peer: impl FnOnce(TcpStream, &ServerTls) + Send,
) -> Result<(ControlStream, Selection), OpenError> {
    let authority = Authority::new();
    let crypto = Crypto::auto();
    let near = authority.identity(&[SOURCE]);
    let far = authority.identity(&[DESTINATION]);
    let tls = near.client(&crypto, names(&[DESTINATION])).unwrap();
    let server = far.server(&crypto, names(&[SOURCE])).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session: SessionId::default(),
        attempt: 1,
        epoch: 1,
    };
    thread::scope(|scope| {
        let endpoint = listener.local_addr().unwrap().to_string();
        let limit = Instant::now() + Duration::from_secs(60);
        scope.spawn(|| peer(listener.accept().unwrap().0, &server));
        control::open(&endpoint, &StandardConnector, &tls, &offer, limit, cancel)
    })
}

/// Serves one connection: reads the offer and answers with `answer`.
fn answering(answer: Vec<u8>) -> impl FnOnce(TcpStream, &ServerTls) + Send {
    move |stream, tls| {
        let control = control::server(stream, tls, soon()).unwrap();
        let mut prelude = [0; PRELUDE_BYTES];
        control.receive_exact(&mut prelude, soon()).unwrap();
        let prelude = Prelude::decode(&prelude).unwrap();
        let mut body = vec![0; prelude.body_bytes];
        control.receive_exact(&mut body, soon()).unwrap();
        control.send(&answer).unwrap();
    }
}

#[test]
fn an_opened_control_lane_is_confirmed_and_detects_a_dead_peer() {
    let selection = Selection {
        version: VERSIONS.max,
        features: Features::NONE,
        security: LaneSecurity::Tls,
    };
    let mut bytes = Vec::new();
    selection.encode(&mut bytes).unwrap();
    let cancel = DialCancel::new().unwrap();
    let (control, selected) = opened(&cancel, answering(bytes)).unwrap();
    assert_eq!(selected, selection);
    assert!(sockopt::socket_keepalive(control.socket()).unwrap());
    assert!(sockopt::tcp_user_timeout(control.socket()).unwrap() > 0);
    cancel.release();
}

#[test]
fn an_answer_other_than_an_offered_selection_opens_no_control_lane() {
    let cancel = DialCancel::new().unwrap();
    let by = |answer: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        answer(&mut bytes);
        opened(&cancel, answering(bytes)).unwrap_err()
    };
    let refusal = |bytes: &mut Vec<u8>| {
        let refusal = Refusal {
            fault: FaultCode::PortsTaken,
            text: String::new(),
        };
        Opening::Refuse(VERSIONS, refusal).encode(bytes).unwrap();
    };
    let error = by(&refusal);
    assert!(matches!(error, OpenError::Refused(_)), "{error:?}");
    assert_eq!(error.fault(), FaultCode::PortsTaken);

    let plain = |bytes: &mut Vec<u8>| {
        let selection = Selection {
            version: VERSIONS.max,
            features: Features::NONE,
            security: LaneSecurity::Plain,
        };
        selection.encode(bytes).unwrap();
    };
    let error = by(&plain);
    assert!(matches!(error, OpenError::NotOffered(_)), "{error:?}");
    assert_eq!(error.fault(), FaultCode::SecurityNotAgreed);

    let error = by(&|bytes| bytes.extend([7; PRELUDE_BYTES]));
    assert!(matches!(error, OpenError::Malformed(_)), "{error:?}");
}

#[test]
fn opening_a_control_lane_is_cancelled_while_the_peer_is_silent() {
    let cancel = DialCancel::new().unwrap();
    let silent = |mut stream: TcpStream, _: &ServerTls| {
        stream.read_exact(&mut [0]).unwrap();
        cancel.cancel();
        let _ = stream.read_to_end(&mut Vec::new());
    };
    let begin = Instant::now();
    let error = opened(&cancel, silent).unwrap_err();
    let is_handshake = matches!(error, OpenError::Dial(DialError::Handshake { .. }));
    assert!(is_handshake, "{error:?}");
    assert!(begin.elapsed() < Duration::from_secs(30));

    let cancel = DialCancel::new().unwrap();
    let after_the_offer = |stream, tls: &ServerTls| {
        let control = control::server(stream, tls, soon()).unwrap();
        control.receive_exact(&mut [0], soon()).unwrap();
        cancel.cancel();
        while control
            .receive(&mut [0; 64], soon())
            .is_ok_and(|count| count > 0)
        {}
    };
    let error = opened(&cancel, after_the_offer).unwrap_err();
    assert!(matches!(error, OpenError::Control(_)), "{error:?}");
    assert!(begin.elapsed() < Duration::from_secs(30));
}
