//! Many channels over the lanes of one trunk: each byte arrives once and in order, or both sides
//! see an abort. A channel that stalls does not delay any other.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_lane::identity::DENIED_FILE;
use dunlin_lane::peers::Pin;
use dunlin_proto::fault::FaultCode;
use dunlin_test_base::sockets::ReadOnce as _;
use dunlin_test_support::lane::{Authority, load};
use dunlin_test_support::tunnel::{
    FAR, NEAR, Pair, Random, Setup, TIMEOUT, expect, fill_backlog, identities, join, send,
};
use dunlin_tunnel::{Event, Limits};
use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

/// Returns the size of a test: `usual`, or `soak` if `DUNLIN_SOAK` is 1.
fn soak(usual: usize, soak: usize) -> usize {
    match std::env::var("DUNLIN_SOAK") {
        Ok(value) if value == "1" => soak,
        _ => usual,
    }
}

/// Sends random bytes that the other end can compute. Then ends this direction or, with `aborts`,
/// closes the connection in both directions. Returns the number of bytes of the complete writes.
fn send_some(stream: &UnixStream, seed: u64, bytes: usize, aborts: bool) -> usize {
    let mut stream = stream;
    let mut content = vec![0; bytes];
    Random::new(seed).fill(&mut content);
    let mut sizes = Random::new(seed ^ 0xFACE);
    let mut sent = 0;
    while sent < bytes {
        let most = [1, 500, 20_000, 400_000][sizes.below(4) as usize];
        let count = (1 + sizes.below(most) as usize).min(bytes - sent);
        if stream.write_all(&content[sent..sent + count]).is_err() {
            return sent;
        }
        sent += count;
        if sizes.below(50) == 0 {
            thread::sleep(Duration::from_millis(sizes.below(5)));
        }
    }
    if aborts {
        let _ = stream.shutdown(Shutdown::Both);
    } else {
        let _ = stream.shutdown(Shutdown::Write);
    }
    sent
}

/// Reads until the end or an abort, and asserts that the bytes are a prefix of the bytes that were
/// sent. With `whole`, all bytes and a clean end must arrive.
fn take_some(stream: &UnixStream, seed: u64, bytes: usize, whole: bool) {
    let mut stream = stream;
    let mut all = Vec::new();
    let mut part = vec![0; 100_000];
    let mut sizes = Random::new(seed ^ 0xBEEF);
    let ended = loop {
        let most = 1 + sizes.below(part.len() as u64) as usize;
        match stream.read(&mut part[..most]) {
            Ok(0) => break true,
            Ok(count) => all.extend_from_slice(&part[..count]),
            Err(error) => {
                assert_ne!(error.kind(), ErrorKind::WouldBlock, "a channel hangs");
                break false;
            }
        }
    };
    let mut expected = vec![0; bytes];
    Random::new(seed).fill(&mut expected);
    assert!(all.len() <= expected.len());
    let first = all.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!(first, None, "first byte that differs");
    if whole {
        assert!(ended && all.len() == bytes, "{} of {bytes}", all.len());
    }
}

#[test]
fn many_channels_carry_random_bytes_both_ways_and_some_are_aborted() {
    let pair = Pair::start(&Setup::default());
    let channels = soak(16, 64);
    for round in 0..soak(1, 20) {
        let mut random = Random::new(round as u64 + 77);
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        for number in 0..channels {
            let (near, far) = pair.channel();
            // On about one channel in four, each end closes the channel early with a probability of
            // one half.
            let aborts = random.below(4) == 0;
            for (from, to) in [(&near, &far), (&far, &near)] {
                let seed = random.number();
                let bytes = random.below(soak(3, 8) as u64 * 1_000_000) as usize;
                let aborts_here = aborts && number % 2 == usize::from(seed.is_multiple_of(2));
                let (sends, takes) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                threads.push(thread::spawn(move || {
                    send_some(&sends, seed, bytes, aborts_here);
                }));
                threads.push(thread::spawn(move || {
                    take_some(&takes, seed, bytes, !aborts)
                }));
            }
        }
        join(threads);
    }
    let until = Instant::now() + Duration::from_secs(10);
    for tunnel in [&pair.near, &pair.far] {
        // Wait until no channel is open and no bytes are held.
        loop {
            let status = &tunnel.as_ref().unwrap().status()[0];
            if status.channels.is_empty() && status.held_bytes == 0 {
                break;
            }
            assert!(Instant::now() < until, "{status:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn i8_a_channel_that_stalls_fills_its_window_and_delays_no_other() {
    let window_bytes = 1 << 20;
    let pair = Pair::start(&Setup {
        window_bytes,
        ..Setup::default()
    });
    let (stalled, _never_read) = pair.channel();
    stalled
        .set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let mut taken = 0;
    let chunk = vec![1; 64 << 10];
    let error = loop {
        match (&stalled).write(&chunk) {
            Ok(count) => taken += count as u64,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    // The buffers of both sockets hold bytes in addition to the window.
    assert!(taken < window_bytes + (2 << 20), "{taken} bytes were taken");
    let held = || pair.far.as_ref().unwrap().status()[0].held_bytes;
    assert!(held() <= window_bytes, "{} bytes are held", held());
    let begin = Instant::now();
    for seed in 0..3 {
        let (near, far) = pair.channel();
        join(vec![
            send(&near, seed, 16 << 20),
            expect(&far, seed, 16 << 20),
        ]);
    }
    println!("48 MiB beside a stalled channel took {:?}", begin.elapsed());
    assert!(held() <= window_bytes);
}

/// `setup` with at most `threads` threads that send at the same time.
fn sending(threads: usize, setup: Setup) -> Setup {
    Setup {
        limits: Limits {
            sending_threads: threads,
            ..setup.limits
        },
        ..setup
    }
}

/// Bulk bytes that always wait at the sender must not keep a lane's thread from looking at other
/// channels. The limit is counted in bulk bytes, because a time would depend on the host.
#[test]
fn a_few_bytes_do_not_wait_for_a_pause_in_a_bulk_transfer() {
    let long = 32 << 20;
    let total = 64 * long;
    let mut beside_long = 0;
    for (lanes, threads) in [(1, 1), (3, 1), (3, 3)] {
        let setup = Setup {
            lanes,
            ..Setup::default()
        };
        let pair = Pair::start(&sending(threads, setup));
        let (mut near, mut far) = pair.channel();
        let (bulk, bulk_far) = pair.channel();
        let arrived = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&arrived);
        let sends = thread::spawn(move || {
            let part = vec![0; 1 << 20];
            while (&bulk).write_all(&part).is_ok() {}
        });
        let takes = thread::spawn(move || {
            let mut part = vec![0; 1 << 20];
            while let Ok(bytes @ 1..) = (&bulk_far).read(&mut part) {
                count.fetch_add(bytes as u64, Ordering::SeqCst);
                if Arc::strong_count(&count) == 1 {
                    return;
                }
            }
        });
        while arrived.load(Ordering::SeqCst) < total {
            let before = arrived.load(Ordering::SeqCst);
            near.write_all(b"?").unwrap();
            far.read_exact(&mut [0]).unwrap();
            let passed = arrived.load(Ordering::SeqCst) - before;
            beside_long += if passed > long { passed } else { 0 };
            assert!(!takes.is_finished(), "the bulk channel has ended");
        }
        drop(arrived);
        join(vec![sends, takes]);
        println!("{lanes} lanes, {threads} threads: {beside_long} bulk bytes beside long trips");
    }
    // A host that takes a processor away for a while can cause a few long trips.
    assert!(beside_long < 4 * long, "{beside_long}");
}

/// The thread of a full lane waits, and another one does its work, even if only one thread may send
/// at a time.
#[test]
fn a_full_lane_does_not_delay_other_channels() {
    // If the peer acknowledges nothing on a lane for 5 s, the lane is lost and others carry its
    // bytes. On a slow host this may happen first.
    assert!((0..3).any(|_| others_flow_beside_a_full_lane()));
}

/// Whether bytes of other channels arrived before the full lane was lost.
fn others_flow_beside_a_full_lane() -> bool {
    let setup = Setup {
        relayed: true,
        ..Setup::default()
    };
    let pair = Pair::start(&sending(1, setup));
    let relay = pair.relay.as_ref().unwrap();
    // Open all channels first: a new one waits for the bytes that earlier ones have sent.
    let (mut near, mut far) = pair.channel();
    // Together these channels have more bytes than the buffers of a lane.
    let bulk: Vec<_> = (0..32).map(|_| pair.channel()).collect();
    let mut threads = Vec::new();
    let mut stalled = None;
    for (seed, (near, far)) in bulk.iter().enumerate() {
        threads.push(send(near, seed as u64, 4 << 20));
        threads.push(expect(far, seed as u64, 4 << 20));
        if stalled.is_none() {
            let busy = relay.wait_busy(1 << 20, None);
            relay.stall(busy, true);
            stalled = Some(busy);
        }
    }
    // As long as the lane is not full, it may get the bytes of any channel.
    relay.wait_busy(32 << 20, stalled);
    for _ in 0..100 {
        near.write_all(b"?").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
    let lost = |event: &Event| matches!(event, Event::LaneLost { .. });
    let in_time = pair.near_events.count(lost) == 0;
    relay.stall(stalled.unwrap(), false);
    join(threads);
    in_time
}

/// Two tunnels that are connected through the test's own TCP relay. They detect within 2 s that
/// nothing arrives on a lane.
fn relayed() -> Setup {
    Setup {
        relayed: true,
        limits: Limits {
            vanished: Duration::from_secs(4),
            ..Limits::default()
        },
        ..Setup::default()
    }
}

#[test]
fn channels_survive_lanes_that_are_cut_or_swallowed() {
    survive_lost_lanes(&sending(1, relayed()));
}

#[test]
fn channels_survive_lost_lanes_when_every_lane_sends() {
    survive_lost_lanes(&sending(3, relayed()));
}

fn survive_lost_lanes(setup: &Setup) {
    let pair = Pair::start(setup);
    let relay = pair.relay.clone().unwrap();
    let (near, far) = pair.channel();
    let (second, second_far) = pair.channel();
    let bytes = soak(96, 512) << 20;
    let mut threads = vec![send(&near, 5, bytes), expect(&far, 5, bytes)];
    threads.push(send(&second_far, 6, bytes / 4));
    threads.push(expect(&second, 6, bytes / 4));
    let cut = relay.wait_busy(1 << 20, None);
    relay.cut(cut);
    // With one thread that sends, only one lane carries bytes at a time.
    relay.swallow(relay.wait_carrying(2 << 20, cut));
    join(threads);
    let lost = |event: &Event| matches!(event, Event::LaneLost { .. });
    assert!(
        pair.near_events.count(lost) >= 2,
        "{:#?}",
        pair.near_events.all()
    );
    assert!(relay.count() >= 6, "only {} connections", relay.count());
    let aborted = |event: &Event| matches!(event, Event::Aborted { .. });
    assert_eq!(pair.near_events.count(aborted), 0);
}

/// A lane is replaced before the record limit of its key is reached, and no bytes are lost.
#[test]
fn lanes_are_replaced_before_their_keys_are_used_up() {
    let pair = Pair::start(&Setup {
        relayed: true,
        limits: Limits {
            lane_records: 1024,
            ..Limits::default()
        },
        ..Setup::default()
    });
    let (near, far) = pair.channel();
    let bytes = 128 << 20;
    join(vec![send(&near, 11, bytes), expect(&far, 11, bytes)]);
    // The 1024 records of a lane contain at most 16 MiB, so 128 MiB need more than 8 connections.
    let relay = pair.relay.as_ref().unwrap();
    assert!(relay.count() > 8, "{} connections", relay.count());
    let lost = |event: &Event| matches!(event, Event::LaneLost { .. });
    for events in [&pair.near_events, &pair.far_events] {
        assert_eq!(events.count(lost), 0, "{:#?}", events.all());
    }
}

#[test]
fn a_control_lane_that_is_cut_is_resumed_and_bytes_continue() {
    let pair = Pair::start(&relayed());
    let relay = pair.relay.clone().unwrap();
    let (near, far) = pair.channel();
    let bytes = 64 << 20;
    let threads = vec![
        send(&near, 7, bytes),
        expect(&far, 7, bytes),
        send(&far, 8, bytes),
        expect(&near, 8, bytes),
    ];
    relay.wait_busy(4 << 20, None);
    relay.cut(0);
    let resumed = |event: &Event| matches!(event, Event::ControlResumed { .. });
    pair.near_events.wait("new control lane", resumed);
    pair.far_events.wait("new control lane", resumed);
    join(threads);
    // Channels can still be opened.
    let (near, far) = pair.channel();
    join(vec![send(&near, 9, 100), expect(&far, 9, 100)]);
}

/// The relay acknowledges everything and forwards nothing, like the host of a stopped process.
#[test]
fn a_peer_that_falls_silent_is_reported_before_its_control_lane_is_lost() {
    let pair = Pair::start(&relayed());
    let relay = pair.relay.clone().unwrap();
    let (near, far) = pair.channel();
    relay.swallow(0);
    let silent = |event: &Event| matches!(event, Event::PeerSilent { .. });
    let lost = |event: &Event| matches!(event, Event::ControlLost { .. });
    let reported = pair.near_events.wait("silence", silent);
    assert_eq!(pair.near_events.count(lost), 0, "{reported}");
    assert_eq!(reported.fault(), Some(FaultCode::ControlLost));
    let answers = matches!(
        reported,
        Event::PeerSilent {
            host_answers: true,
            ..
        }
    );
    assert!(answers, "{reported}");
    let resumed = |event: &Event| matches!(event, Event::ControlResumed { .. });
    pair.near_events.wait("new control lane", resumed);
    assert_eq!(pair.near_events.count(silent), 1);
    join(vec![send(&near, 10, 1 << 20), expect(&far, 10, 1 << 20)]);
}

/// Channels survive a reload of new certificates on either side. Every lane is then reopened with
/// the new certificates.
#[test]
fn certificates_are_renewed_under_a_channel() {
    let pair = Pair::start(&relayed());
    let relay = pair.relay.clone().unwrap();
    let (near, far) = pair.channel();
    let bytes = 64 << 20;
    let threads = vec![send(&near, 21, bytes), expect(&far, 21, bytes)];
    relay.wait_busy(4 << 20, None);
    let fresh = |name: &str| identities(pair.authority.identity(&[name]));
    let (near_tunnel, far_tunnel) = (pair.near.as_ref().unwrap(), pair.far.as_ref().unwrap());
    near_tunnel.replace(fresh(NEAR), &pair.near_routes).unwrap();
    far_tunnel.replace(fresh(FAR), &pair.far_routes).unwrap();
    for link in 0..relay.count() {
        relay.cut(link);
    }
    let resumed = |event: &Event| matches!(event, Event::ControlResumed { .. });
    pair.near_events.wait("new control lane", resumed);
    join(threads);
    let (near, far) = pair.channel();
    join(vec![send(&near, 22, 1 << 20), expect(&far, 22, 1 << 20)]);
}

/// Returns a revocation list that contains the certificate `leaf`.
fn revoke(authority: &Authority, leaf: &CertificateDer<'_>) -> String {
    let (_, leaf) = X509Certificate::from_der(leaf).unwrap();
    let revoked = RevokedCertParams {
        serial_number: SerialNumber::from(leaf.raw_serial().to_vec()),
        revocation_time: date_time_ymd(2024, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let list = CertificateRevocationListParams {
        this_update: date_time_ymd(2024, 1, 1),
        next_update: date_time_ymd(2096, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![revoked],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(&authority.issuer).unwrap().pem().unwrap()
}

/// After either side denies the peer's key, loads a revocation of the peer's certificate, or removes
/// the authority that issued it, the trunk gets no new channel.
#[test]
fn i6_a_peer_that_is_denied_or_revoked_gets_no_channel_on_its_trunk() {
    enum Change {
        Denied,
        Revoked,
        AuthorityRemoved,
    }
    let changes = [Change::Denied, Change::Revoked, Change::AuthorityRemoved];
    for (change, is_far) in changes.iter().flat_map(|one| [(one, true), (one, false)]) {
        let pair = Pair::start(&Setup::default());
        let host = |name| pair.authority.host_trusting(&[name], &[&pair.other]);
        let (near_host, far_host) = (host(NEAR), host(FAR));
        let replace = |is_far: bool| {
            let (tunnel, routes, host) = match is_far {
                true => (&pair.far, &pair.far_routes, &far_host),
                false => (&pair.near, &pair.near_routes, &near_host),
            };
            let tunnel = tunnel.as_ref().unwrap();
            tunnel.replace(identities(load(host)), routes).unwrap();
        };
        replace(true);
        replace(false);
        let (mut near, mut far) = pair.channel();
        // The first exchange opens one lane in each direction. The second exchange uses these
        // lanes, because the side that refuses the peer admits no new lane.
        let exchange = |near: &mut UnixStream, far: &mut UnixStream| {
            near.write_all(b"x").unwrap();
            far.read_exact(&mut [0]).unwrap();
            far.write_all(b"y").unwrap();
            near.read_exact(&mut [0]).unwrap();
        };
        exchange(&mut near, &mut far);
        let (judge, peer) = match is_far {
            true => (&far_host, &near_host),
            false => (&near_host, &far_host),
        };
        let pem = fs::read(peer.join("cert.pem")).unwrap();
        let leaf = CertificateDer::from_pem_slice(&pem).unwrap();
        match change {
            Change::Denied => {
                let key = Pin::of_key(&leaf).unwrap();
                fs::write(judge.join(DENIED_FILE), key.to_string()).unwrap();
            }
            Change::Revoked => {
                fs::write(judge.join("ca-crl.pem"), revoke(&pair.authority, &leaf)).unwrap();
            }
            Change::AuthorityRemoved => {
                let alone = pair.other.host(&["other.test"]);
                fs::copy(alone.join("ca-cert.pem"), judge.join("ca-cert.pem")).unwrap();
            }
        }
        replace(is_far);
        let mut refused = pair.connect();
        assert_eq!(refused.read_once(&mut [0]).unwrap_or(0), 0);
        let unauthorised = |event: &Event| matches!(event, Event::Refused { failure, .. } if failure.code() == FaultCode::Unauthorised);
        pair.near_events.wait("refusal", unauthorised);
        let opened = |event: &Event| matches!(event, Event::Opened { .. });
        assert_eq!(pair.far_events.count(opened), 1);
        // The far side reports its event on another thread.
        if is_far {
            pair.far_events
                .wait("refusal by the far side", unauthorised);
        }
        assert_eq!(pair.far_events.count(unauthorised), usize::from(is_far));
        // An open channel continues.
        exchange(&mut near, &mut far);
    }
}

#[test]
fn a_vanished_peer_is_detected_within_the_limit() {
    let pair = Pair::start(&relayed());
    let (mut near, mut far) = pair.channel();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    pair.relay.as_ref().unwrap().vanish();
    let begin = Instant::now();
    assert_eq!(near.read_once(&mut [0]).unwrap(), 0);
    assert!(
        begin.elapsed() < Duration::from_secs(8),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(far.read_once(&mut [0]).unwrap(), 0);
    assert!(
        begin.elapsed() < Duration::from_secs(10),
        "{:?}",
        begin.elapsed()
    );
    pair.near_events
        .wait("end", |event| matches!(event, Event::TrunkEnded { .. }));
}

/// If all connections to the peer are lost and its host refuses new ones, the peer's process has
/// ended, and the trunk ends after a tenth of `vanished`. If a lane is still open, the process
/// runs, and the trunk ends only after half of `vanished`.
#[test]
fn a_trunk_ends_soon_if_the_peers_process_has_ended() {
    for has_lanes in [false, true] {
        let pair = Pair::start(&Setup {
            relayed: true,
            ..Setup::default()
        });
        let (mut near, mut far) = pair.channel();
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
        let relay = pair.relay.as_ref().unwrap();
        relay.unlisten();
        let links = if has_lanes { 1 } else { relay.count() };
        let begin = Instant::now();
        (0..links).for_each(|link| relay.cut(link));
        assert_eq!(near.read_once(&mut [0]).unwrap(), 0);
        let took = begin.elapsed();
        let limits = match has_lanes {
            false => Duration::from_secs(1)..Duration::from_secs(3),
            true => Duration::from_secs(4)..Duration::from_secs(20),
        };
        assert!(limits.contains(&took), "{took:?}, {has_lanes}");
    }
}

/// A channel to a target with a full backlog, and a connect timeout of a minute.
fn unreached() -> (Pair, Vec<OwnedFd>, UnixStream) {
    let pair = Pair::start(&Setup {
        limits: Limits {
            connect: Duration::from_secs(60),
            ..Limits::default()
        },
        ..Setup::default()
    });
    let waiting = fill_backlog(&pair.target());
    let channel = pair.connect();
    // Wait for the trunk, and then for a thread that connects to the target. Such a thread alone
    // does not show that this trunk is up, because the thread may belong to another test.
    let is_up = |event: &Event| matches!(event, Event::TrunkUp { .. });
    pair.far_events.wait("trunk", is_up);
    let is_connecting = |entry: std::io::Result<fs::DirEntry>| {
        let name = fs::read_to_string(entry.unwrap().path().join("comm"));
        // A thread that has just ended has no name.
        name.is_ok_and(|name| name.starts_with("dunlin-target"))
    };
    let until = Instant::now() + TIMEOUT;
    while !fs::read_dir("/proc/self/task").unwrap().any(is_connecting) {
        assert!(Instant::now() < until, "no thread connects to the target");
        thread::sleep(Duration::from_millis(2));
    }
    (pair, waiting, channel)
}

#[test]
fn a_channel_whose_target_does_not_answer_ends_with_the_tunnel() {
    let (mut pair, _waiting, _channel) = unreached();
    let begun = Instant::now();
    drop(pair.far.take());
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_channel_whose_target_does_not_answer_ends_with_its_trunk() {
    let (mut pair, _waiting, _channel) = unreached();
    let begun = Instant::now();
    drop(pair.near.take());
    let ended = |event: &Event| matches!(event, Event::TrunkEnded { .. });
    pair.far_events.wait("end of the trunk", ended);
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}
