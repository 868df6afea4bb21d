#![allow(clippy::unwrap_used)]

use std::sync::{Arc, MutexGuard, mpsc};
use std::thread;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::PrivateKeyDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::UnbufferedStatus;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion};

use super::super::messages::ASKS_LIMIT;
use super::*;
use crate::internals::provider::{CipherSuite, Crypto, OldestTls, Provider, parts};
use crate::internals::record::{
    APPLICATION_DATA, EMPTY_RUN_LIMIT, HANDSHAKE, HEADER_BYTES, OVERHEAD_BYTES, OpenError, SealHalf,
};

const VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

/// Returns two connections after a complete handshake.
fn handshake(
    version: &'static SupportedProtocolVersion,
) -> (UnbufferedClientConnection, UnbufferedServerConnection) {
    handshake_with(version, Crypto::with(Provider::built_in()[0]))
}

fn handshake_with(
    version: &'static SupportedProtocolVersion,
    crypto: Crypto,
) -> (UnbufferedClientConnection, UnbufferedServerConnection) {
    let provider = crypto.rustls_for_relay(OldestTls::V1_2).unwrap();
    let own = rcgen::generate_simple_self_signed(["far.test".to_owned()]).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(own.cert.der().clone()).unwrap();
    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    client.enable_secret_extraction = true;
    let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .unwrap();
    server.enable_secret_extraction = true;
    server.send_tls13_tickets = 0;
    let name = "far.test".try_into().unwrap();
    let mut client = UnbufferedClientConnection::new(Arc::new(client), name).unwrap();
    let mut server = UnbufferedServerConnection::new(Arc::new(server)).unwrap();
    let (mut there, mut back) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        step(&mut client, &mut back, &mut there);
        step(&mut server, &mut there, &mut back);
    }
    assert!(!client.common().is_handshaking() && !server.common().is_handshaking());
    (client, server)
}

/// Processes `incoming` as far as possible and appends the output to `outgoing`.
fn step<C: Unbuffered>(connection: &mut C, incoming: &mut Vec<u8>, outgoing: &mut Vec<u8>) {
    loop {
        let UnbufferedStatus { discard, state } = connection.process(incoming);
        let is_done = match state.unwrap() {
            ConnectionState::EncodeTlsData(mut part) => {
                encode(&mut part, outgoing).unwrap();
                false
            }
            ConnectionState::TransmitTlsData(sent) => {
                sent.done();
                false
            }
            _ => true,
        };
        incoming.drain(..discard);
        if is_done {
            return;
        }
    }
}

fn pair(version: &'static SupportedProtocolVersion) -> (Session, Session) {
    let (client, server) = handshake(version);
    if version == &TLS12 {
        return (Session::older(client), Session::older(server));
    }
    let server = server.into_secrets().unwrap();
    let provider = Provider::built_in()[0];
    let server = Session::new(server.0, server.1, false, provider).unwrap();
    (client_session(client, provider), server)
}

fn client_session(client: UnbufferedClientConnection, provider: Provider) -> Session {
    let (secrets, next) = client.into_secrets().unwrap();
    Session::new(secrets, next, true, provider).unwrap()
}

fn sealed(session: &Session, content: Option<&[u8]>) -> Vec<u8> {
    let mut records = Vec::new();
    let count = session.seal(content, &mut records).unwrap();
    records.truncate(count);
    records
}

/// Opens `records` in parts of `part` bytes. Returns the content, and whether the direction has
/// been closed.
fn opened(session: &Session, records: &[u8], part: usize) -> (Vec<u8>, bool) {
    let (mut buffer, mut content) = (Vec::new(), Vec::new());
    for part in records.chunks(part) {
        buffer.extend_from_slice(part);
        let mut opens = vec![0; buffer.len()];
        let opened = session.open(&mut buffer, &mut opens).unwrap();
        content.extend_from_slice(&opens[..opened.content]);
        buffer.drain(..opened.taken);
        if opened.is_over {
            return (content, true);
        }
    }
    assert!(buffer.is_empty(), "unconsumed bytes remain");
    (content, false)
}

#[test]
fn data_flows_both_ways_in_any_parts_and_each_direction_closes_separately() {
    let long: Vec<u8> = (0..100_000_u32).map(|at| (at / 7) as u8).collect();
    for version in VERSIONS {
        let (near, far) = pair(version);
        for content in [&b"a page"[..], &long] {
            for part in [3, 5000, 1 << 20] {
                let records = sealed(&near, Some(content));
                assert!(opened(&far, &records, part) == (content.to_vec(), false));
                let records = sealed(&far, Some(content));
                assert!(opened(&near, &records, part) == (content.to_vec(), false));
            }
        }
        let close = sealed(&near, None);
        assert_eq!(opened(&far, &close, 4), (Vec::new(), true));
        let records = sealed(&far, Some(&long));
        assert!(opened(&near, &records, 5000) == (long.clone(), false));
        let close = sealed(&far, None);
        assert_eq!(opened(&near, &close, 1 << 20), (Vec::new(), true));
    }
}

/// A side can seal while it has received only a part of a record, or of a message.
#[test]
fn i7_a_partial_record_does_not_disturb_the_other_direction() {
    for version in VERSIONS {
        let (near, far) = pair(version);
        let records = sealed(&near, Some(b"a page"));
        let (partial, rest) = records.split_at(9);
        let mut buffer = partial.to_vec();
        let mut content = [0; 64];
        let none = far.open(&mut buffer, &mut content).unwrap();
        assert_eq!((none.taken, none.content), (0, 0));
        let back = sealed(&far, Some(b"back"));
        assert_eq!(opened(&near, &back, 1 << 20).0, b"back");
        buffer.extend_from_slice(rest);
        let page = far.open(&mut buffer, &mut content).unwrap();
        assert_eq!(&content[..page.content], b"a page");
    }
    let (near, mut seal) = session_and_peer();
    // A session ticket of 204 bytes in two records.
    let mut ticket = vec![4, 0, 0, 200];
    ticket.resize(204, 9);
    let mut record = record_of(&mut seal, HANDSHAKE, &ticket[..100]);
    near.open(&mut record, &mut [0; 200]).unwrap();
    assert!(!sealed(&near, Some(b"data")).is_empty());
    // Data must not come between the parts of a message.
    let mut record = record_of(&mut seal, APPLICATION_DATA, b"data");
    let between = near.open(&mut record, &mut [0; 200]);
    assert!(matches!(between, Err(RelayError::Late(4))), "{between:?}");
}

#[test]
fn padding_is_removed_and_empty_records_are_limited() {
    let (near, mut seal) = session_and_peer();
    // `record_of` appends the content type, here 0. The real type is the byte 0x17, and the three
    // zeros after it are padding.
    let mut record = record_of(&mut seal, 0, b"data\x17\0\0");
    let (content, is_over) = opened(&near, &record, 1 << 20);
    assert_eq!((&content[..], is_over), (&b"data"[..], false));
    let mut content = [0; 64];
    for _ in 0..EMPTY_RUN_LIMIT {
        record = record_of(&mut seal, APPLICATION_DATA, b"");
        near.open(&mut record, &mut content).unwrap();
    }
    record = record_of(&mut seal, APPLICATION_DATA, b"");
    let refused = near.open(&mut record, &mut content);
    let expected = matches!(refused, Err(RelayError::Open(OpenError::EmptyRun)));
    assert!(expected, "{refused:?}");
    record = record_of(&mut seal, APPLICATION_DATA, b"data");
    let later = near.open(&mut record, &mut content);
    let expected = matches!(later, Err(RelayError::Open(OpenError::Spent)));
    assert!(expected, "{later:?}");
}

/// The peer is rustls, which must accept and send key updates in the middle of data.
#[test]
fn rustls_as_the_peer_gets_all_data_and_every_key() {
    for &provider in Provider::built_in() {
        for suite in CipherSuite::ALL {
            let mut crypto = Crypto::with(provider);
            crypto.suites = vec![suite];
            let (client, peer) = handshake_with(&TLS13, crypto);
            exchange(&client_session(client, provider), peer);
        }
    }
}

fn exchange(near: &Session, mut peer: UnbufferedServerConnection) {
    near.renew_after(4);
    let (mut renewals, mut requests) = (0, 0);
    for number in 0..100_u32 {
        let content = number.to_be_bytes().repeat(5000);
        let mut records = sealed(near, Some(&content));
        renewals += u32::from(records.len() > content.len() + 2 * OVERHEAD_BYTES);
        let mut received = Vec::new();
        let mut answer = received_by(&mut peer, &mut records, &mut received).unwrap();
        assert!(received == content, "{number}");
        answer.extend(sent_by(&mut peer, &content));
        assert!(opened(near, &answer, 777) == (content, false), "{number}");
        // Send about half of the requests alone. `sealed` sends each of the others with the next
        // data.
        if near.is_pending() && number % 4 < 2 {
            requests += 1;
            let mut request = near.take_pending().unwrap();
            received_by(&mut peer, &mut request, &mut received).unwrap();
        }
    }
    assert!(renewals > 20 && requests > 20, "{renewals} {requests}");
    let mut close = sealed(near, None);
    assert!(received_by(&mut peer, &mut close, &mut Vec::new()).is_none());
    let later = near.seal(Some(b"data"), &mut Vec::new());
    assert!(later.is_err(), "data was sealed after the close");
}

/// Each side seals in one thread and opens in another. Both send requests for keys, as in a relay.
#[test]
fn both_directions_work_at_the_same_time_while_keys_are_renewed() {
    const PIECES: u32 = 2000;
    let (near, far) = pair(&TLS13);
    let content = |number: u32| number.to_be_bytes().repeat(1 + number as usize % 9000);
    near.renew_after(6);
    far.renew_after(6);
    let (to_far, at_far) = mpsc::channel();
    let (to_near, at_near) = mpsc::channel();
    // The lock keeps the records in the order in which they are sealed.
    let (to_far, to_near) = (Mutex::new(to_far), Mutex::new(to_near));
    let send = |session: &Session, to: &Mutex<mpsc::Sender<Vec<u8>>>| {
        let mut renewals = 0;
        for number in 0..PIECES {
            let to = lock(to);
            let content = content(number);
            let records = sealed(session, Some(&content));
            // Each piece fits into one record. A second one is a key update.
            renewals += u32::from(records.len() > content.len() + OVERHEAD_BYTES);
            to.send(records).unwrap();
        }
        assert!(renewals > PIECES / 10, "{renewals}");
    };
    let receive = |session: &Session, from: mpsc::Receiver<Vec<u8>>, back: &Mutex<_>| {
        let mut received = Vec::new();
        for number in 0..PIECES {
            let expected = content(number);
            while received.len() < expected.len() {
                let records: Vec<u8> = from.recv().unwrap();
                received.extend(opened(session, &records, 5000).0);
                let back: MutexGuard<'_, mpsc::Sender<Vec<u8>>> = lock(back);
                // The other side may have ended.
                let _ = back.send(session.take_pending().unwrap());
            }
            assert!(received.drain(..expected.len()).eq(expected), "{number}");
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| send(&near, &to_far));
        scope.spawn(|| send(&far, &to_near));
        let (far, to_near) = (&far, &to_near);
        scope.spawn(move || receive(far, at_far, to_near));
        receive(&near, at_near, &to_far);
    });
}

/// Lets `peer` process `incoming`, and appends the content to `received`. Returns the peer's own
/// messages; `None` if it has read a close.
fn received_by(
    peer: &mut UnbufferedServerConnection,
    mut incoming: &mut [u8],
    received: &mut Vec<u8>,
) -> Option<Vec<u8>> {
    let mut outgoing = Vec::new();
    loop {
        let UnbufferedStatus { discard, state } = peer.process(incoming);
        let is_done = match state.unwrap() {
            ConnectionState::ReadTraffic(mut traffic) => {
                while let Some(record) = traffic.next_record() {
                    received.extend_from_slice(record.unwrap().payload);
                }
                false
            }
            ConnectionState::EncodeTlsData(mut part) => {
                encode(&mut part, &mut outgoing).unwrap();
                false
            }
            ConnectionState::TransmitTlsData(sent) => {
                sent.done();
                false
            }
            ConnectionState::PeerClosed => return None,
            _ => true,
        };
        incoming = &mut incoming[discard..];
        if is_done {
            assert!(incoming.is_empty());
            return Some(outgoing);
        }
    }
}

fn sent_by(peer: &mut UnbufferedServerConnection, content: &[u8]) -> Vec<u8> {
    let mut records = vec![0; content.len() + 1024];
    let ConnectionState::WriteTraffic(mut traffic) = peer.process(&mut []).state.unwrap() else {
        panic!("the peer cannot send");
    };
    let count = traffic.encrypt(content, &mut records).unwrap();
    records.truncate(count);
    records
}

/// Returns a session, and the sending half of its peer.
fn session_and_peer() -> (Session, SealHalf) {
    let (client, server) = handshake(&TLS13);
    let (secrets, _) = server.into_secrets().unwrap();
    let (suite, key, iv) = parts(&secrets.tx.1).unwrap();
    let provider = Provider::built_in()[0];
    let seal = SealHalf::new(provider, suite, key, iv, secrets.tx.0).unwrap();
    (client_session(client, provider), seal)
}

fn record_of(seal: &mut SealHalf, content_type: u8, content: &[u8]) -> Vec<u8> {
    let mut record = vec![0; content.len() + OVERHEAD_BYTES];
    record[HEADER_BYTES..][..content.len()].copy_from_slice(content);
    seal.seal_as(content_type, &mut record).unwrap();
    record
}

#[test]
fn tls_1_2_ends_at_its_record_limit_and_tls_1_3_renews_keys() {
    let (near, far) = pair(&TLS12);
    near.renew_after(8);
    for _ in 0..8 {
        let records = sealed(&near, Some(b"data"));
        assert_eq!(opened(&far, &records, 1 << 20).0, b"data");
    }
    let refused = near.seal(Some(b"data"), &mut Vec::new());
    assert!(matches!(refused, Err(RelayError::UsedUp)), "{refused:?}");

    let (near, far) = pair(&TLS13);
    near.renew_after(8);
    far.renew_after(8);
    let mut asked = 0;
    for _ in 0..400 {
        let records = sealed(&near, Some(b"data"));
        assert_eq!(opened(&far, &records, 1 << 20).0, b"data");
        // The far side has no data to send a request with, so it sends the request alone.
        if far.is_pending() {
            asked += 1;
            let pending = far.take_pending().unwrap();
            assert_eq!(opened(&near, &pending, 1 << 20), (Vec::new(), false));
        }
    }
    // More requests would look like an attack.
    assert_eq!(asked, ASKS_LIMIT);
    let back = sealed(&far, Some(b"back"));
    assert_eq!(opened(&near, &back, 1 << 20).0, b"back");
}

#[test]
fn i7_every_flipped_bit_is_detected() {
    for version in VERSIONS {
        let (near, _) = pair(version);
        let whole = sealed(&near, Some(b"memory")).len();
        for at in 0..whole {
            let (near, far) = pair(version);
            let whole = sealed(&near, Some(b"memory"));
            let mut record = whole.clone();
            record[at] ^= 1;
            let mut content = vec![0; record.len()];
            let opened = far.open(&mut record, &mut content);
            let Err(error) = opened else {
                // The modified length makes the record look incomplete.
                assert_eq!(opened.unwrap(), Opened::default(), "{at} {version:?}");
                assert!((3..5).contains(&at), "{at} {version:?}");
                continue;
            };
            // The connection has failed, so even the correct record is refused.
            let again = far.open(&mut whole.clone(), &mut content);
            let is_spent = matches!(again, Err(RelayError::Open(OpenError::Spent)));
            assert!(is_spent, "{at} {version:?}: {again:?} after {error}");
        }
    }
}
