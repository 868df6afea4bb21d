//! The control lane.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::control::{self, ControlError, ControlStream};
use dunlin_lane::provider::{Crypto, Provider};
use dunlin_test_support::lane::*;

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
    let bad_record_mac = dunlin_lane::record::Alert(20);
    assert!(
        matches!(error, ControlError::PeerAlert(alert) if alert == bad_record_mac),
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
    let certificate_unknown = dunlin_lane::record::Alert(46);
    assert!(
        matches!(error, ControlError::PeerAlert(alert) if alert == certificate_unknown),
        "{error}"
    );
    accept.join().unwrap();
}

/// Nothing may follow a partially written record, and close does not wait again for a peer that
/// does not read.
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
