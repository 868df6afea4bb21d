//! Tests floods of connections: a thousand connections that are silent or send garbage, clients
//! that connect without end, and an authenticated host that connects repeatedly. `--nocapture`
//! prints the figures.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::Migration;
use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, Event, destination};
use dunlin::lane::control;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, VERSIONS,
};
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::{Before, alone, open_files, threads};
use dunlin_test_support::lane::soon;

/// The number of connections that a flood keeps open. It is low enough that this process needs no
/// more than the usual thousand descriptors.
const HELD: usize = 300;

/// Connects as an unauthenticated client, and sends one of several texts or nothing.
fn stranger(to: SocketAddr, number: u64) -> Option<TcpStream> {
    // A listener with a full backlog answers late.
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(5)).ok()?;
    let words: &[u8] = match number % 4 {
        0 | 1 => b"",
        2 => b"GET / HTTP/1.1\r\n\r\n",
        // The beginning of a handshake.
        _ => &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3],
    };
    let _ = stream.write_all(words);
    Some(stream)
}

/// Migrates a VM of 48 MiB, half of it filled, at 32 MiB/s at most. Returns the time until the VM
/// was accepted, and the total time.
fn migrate(to: SocketAddr, client: &dunlin::lane::policy::ClientTls) -> (Duration, Duration) {
    let vm = TestVm::new(48 << 20);
    vm.fill(24 << 20);
    vm.start(64, Duration::from_millis(1));
    let options = verified(2)
        .to_builder()
        .rate(Some(32 << 20))
        .build()
        .unwrap();
    let began = Instant::now();
    let accepted_ns = AtomicU64::new(0);
    let observe = |event: &Event| {
        if matches!(event, Event::Accepted { .. }) {
            accepted_ns.store(began.elapsed().as_nanos() as u64, Ordering::SeqCst);
        }
    };
    let report = Migration::builder(vm.clone(), to.to_string(), client)
        .options(options)
        .observer(&observe)
        .run();
    let report = report.unwrap();
    assert_eq!(report.digests_equal, Some(true));
    let accepted = Duration::from_nanos(accepted_ns.load(Ordering::SeqCst));
    (accepted, report.total)
}

/// The time of a migration without a flood.
fn undisturbed(
    client: &dunlin::lane::policy::ClientTls,
    server: &dunlin::lane::policy::ServerTls,
) -> Duration {
    let receiving = Receiving::start(server, &impatient(), TestBuilder::default());
    let (_, took) = migrate(receiving.address, client);
    receiving.finish(false).0.unwrap();
    took
}

/// Checks that the session takes at most 1.5 times as long as without the flood, plus 500 ms. Some
/// delay is expected, because the flood's clients run on the same CPUs.
fn assert_undisturbed(took: Duration, quiet: Duration) {
    assert!(
        took < quiet * 3 / 2 + Duration::from_millis(500),
        "{took:?}, {quiet:?}"
    );
}

/// Claims A1, N11 of docs/security.
#[test]
fn i7_a_thousand_strangers_do_not_disturb_a_session() {
    let _alone = alone();
    let (client, server) = tls();
    let options = impatient();
    let quiet = undisturbed(&client, &server);
    let (before, threads_before) = (Before::now(), threads());
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address;
    let (flooded, most_files, most_threads, flood_took) = thread::scope(|scope| {
        let migrating = scope.spawn(|| migrate(to, &client));
        receiving
            .await_event(|event| matches!(event, destination::DestinationEvent::LaneUp { .. }));
        let began = Instant::now();
        let mut held = VecDeque::new();
        let (mut most_files, mut most_threads) = (0, 0);
        for number in 0..1000 {
            held.extend(stranger(to, number));
            if held.len() > HELD {
                held.pop_front();
            }
            most_files = most_files.max(open_files());
            most_threads = most_threads.max(threads());
        }
        let flood_took = began.elapsed();
        // The unauthenticated clients stay connected until the session has ended.
        let flooded = migrating.join().unwrap().1;
        (flooded, most_files, most_threads, flood_took)
    });
    receiving.finish(false).0.unwrap();
    let peak = before.peak_bytes();
    println!(
        "a thousand strangers in {flood_took:?}: the session took {flooded:?} instead of \
         {quiet:?}; {} descriptors more at the most, {HELD} of them the strangers' own; \
         {} KiB of memory more, with 96 MiB of guests",
        most_files - before.files,
        peak >> 10
    );
    assert_undisturbed(flooded, quiet);
    // This process has descriptors for the flood's own connections, for the pending connections and
    // for the session.
    assert!(most_files < before.files + HELD + 64 + 40, "{most_files}");
    // All threads belong to the session or to this test, and none to an unauthenticated client.
    let most_threads = most_threads - threads_before;
    assert!(most_threads < 32, "{most_threads} threads");
    assert!(peak < (96 + 32) << 20, "{peak}");
}

/// Clients connect faster than they are rejected.
///
/// Claim N11 of docs/security.
#[test]
fn i7_an_authorised_peer_starts_within_a_second_of_a_flood() {
    let _alone = alone();
    let (client, server) = tls();
    let options = impatient();
    let mut slowest = Duration::ZERO;
    for _ in 0..3 {
        let before = Before::now();
        let receiving = Receiving::start(&server, &options, TestBuilder::default());
        let to = receiving.address;
        let (stop, came) = (AtomicBool::new(false), AtomicU64::new(0));
        let most_files = AtomicUsize::new(0);
        let accepted = thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut held = VecDeque::new();
                    while !stop.load(Ordering::SeqCst) {
                        held.extend(stranger(to, came.fetch_add(1, Ordering::SeqCst)));
                        if held.len() > HELD / 2 {
                            held.pop_front();
                        }
                        most_files.fetch_max(open_files(), Ordering::SeqCst);
                    }
                });
            }
            while came.load(Ordering::SeqCst) < HELD as u64 {
                thread::sleep(Duration::from_millis(1));
            }
            let migrating = scope.spawn(|| migrate(to, &client).0);
            let accepted = migrating.join();
            stop.store(true, Ordering::SeqCst);
            accepted
        });
        let Ok(accepted) = accepted else {
            receiving.cancel.cancel();
            panic!(
                "the authorised peer was rejected among {} other clients",
                came.load(Ordering::SeqCst)
            );
        };
        receiving.finish(false).0.unwrap();
        let (peak, files) = (before.peak_bytes(), most_files.into_inner() - before.files);
        println!(
            "accepted after {accepted:?} among {} strangers; {files} descriptors more at the most, \
             {HELD} of them the strangers' own; {} KiB of memory more, with 96 MiB of guests",
            came.load(Ordering::SeqCst),
            peak >> 10
        );
        assert!(files < HELD + 64 + 40, "{files}");
        assert!(peak < (96 + 32) << 20, "{peak}");
        slowest = slowest.max(accepted);
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
}

/// An authorised host requests sessions repeatedly while another session runs.
///
/// Claim P10 of docs/security.
#[test]
fn i7_an_authenticated_flood_is_refused_as_busy() {
    let _alone = alone();
    let (client, server) = tls();
    let options = impatient();
    let quiet = undisturbed(&client, &server);
    let before = Before::now();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address;
    let (stop, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    let (busy, most_files) = (AtomicU64::new(0), AtomicUsize::new(0));
    let took = thread::scope(|scope| {
        let migrating = scope.spawn(|| migrate(to, &client).1);
        receiving
            .await_event(|event| matches!(event, destination::DestinationEvent::LaneUp { .. }));
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let refused = ask(to, &client);
                    asked.fetch_add(1, Ordering::SeqCst);
                    // If no answer has arrived, the destination has dropped this connection,
                    // because too many were waiting.
                    if let Some(fault) = refused {
                        assert_eq!(fault, FaultCode::Busy);
                        busy.fetch_add(1, Ordering::SeqCst);
                    }
                    most_files.fetch_max(open_files(), Ordering::SeqCst);
                }
            });
        }
        let took = migrating.join().unwrap();
        stop.store(true, Ordering::SeqCst);
        took
    });
    receiving.finish(false).0.unwrap();
    let (peak, files) = (before.peak_bytes(), most_files.into_inner() - before.files);
    println!(
        "{} sessions asked for by an authorised host: the one under way took {took:?} instead of \
         {quiet:?}; {files} descriptors more at the most; {} KiB of memory more, with 96 MiB of \
         guests",
        asked.load(Ordering::SeqCst),
        peak >> 10
    );
    assert_undisturbed(took, quiet);
    assert!(busy.into_inner() > 0);
    assert!(files < 64 + 40, "{files}");
    assert!(peak < (96 + 32) << 20, "{peak}");
}

/// Asks for a session; returns the fault code of the refusal, if an answer arrives.
fn ask(to: SocketAddr, tls: &dunlin::lane::policy::ClientTls) -> Option<FaultCode> {
    let stream = TcpStream::connect_timeout(&to, Duration::from_secs(5)).ok()?;
    let stream = control::client(stream, tls, soon()).ok()?;
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session: [8; 16],
        attempt: 1,
        epoch: 1,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).unwrap();
    stream.send(&bytes).ok()?;
    let mut prelude = [0; PRELUDE_BYTES];
    stream.receive_exact(&mut prelude, soon()).ok()?;
    let prelude = Prelude::decode(&prelude).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    stream.receive_exact(&mut body, soon()).ok()?;
    match Opening::decode(&prelude, &body).unwrap() {
        Opening::Refuse(_, refusal) => Some(refusal.fault),
        other => panic!("{other:?}"),
    }
}

/// Claim H3 of docs/security.
#[test]
fn i7_garbage_silence_and_strangers_do_not_stop_a_migration() {
    let _alone = alone();
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
        // The destination may reject the connection before all bytes are written.
        let _ = TcpStream::connect(to).unwrap().write_all(garbage);
    }
    // A client that never stops sending is rejected once, like any other client.
    let flood = thread::spawn(move || {
        let mut stream = TcpStream::connect(to).unwrap();
        while stream.write_all(&[0; 65536]).is_ok() {}
    });
    let stranger =
        dunlin::lane::control::client(TcpStream::connect(to).unwrap(), &stranger, soon());
    assert!(stranger.is_err());
    let _plain = peer::open_lane(
        to,
        None,
        &peer::lane_open(
            peer::SESSION,
            &dunlin_proto::negotiate::SessionSecret([0; 32]),
            1,
        ),
    );
    receiving.await_rejection("no session is in progress");
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
