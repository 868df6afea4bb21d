//! Handshakes: how a peer is identified and recognised again, errors on both sides, and what the
//! peer has received when a handshake fails. Also identities that must not load, and dials that
//! fail.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::control;
use dunlin_lane::dial::{
    Connector, DialCancel, DialError, LaneDialer, LaneRequest, StandardConnector, TlsDialer,
};
use dunlin_lane::handshake::{self, FLIGHT_LIMIT_BYTES, HandshakeError};
use dunlin_lane::identity::{Identity, IdentityError, IdentityErrorKind, LoadOptions, Warning};
use dunlin_lane::names::PeerName;
use dunlin_lane::peers::{AuthorisedBy, Peer, PeerRefused, Peers, Principal};
use dunlin_lane::policy::ALPN;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::provider::Crypto;
use dunlin_lane::record::Alert;
use dunlin_linux::poll::Wakeup;
use dunlin_linux::poll::{Interest, poll};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::peer::RecordedPeer;
use dunlin_proto::limits::MAX_PRINCIPAL_NAME_BYTES;
use dunlin_test_base::sockets::ReadOnce as _;
use dunlin_test_support::lane::*;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

fn client(identity: &Identity, peers: Peers) -> ClientTls {
    identity.client(&Crypto::auto(), peers).unwrap()
}

fn server(identity: &Identity, peers: Peers) -> ServerTls {
    identity.server(&Crypto::auto(), peers).unwrap()
}

type Outcome<T> = (Result<T, HandshakeError>, Result<T, HandshakeError>);

fn both_control(near: &ClientTls, far: &ServerTls) -> Outcome<control::ControlStream> {
    let (near_socket, far_socket) = pair();
    thread::scope(|scope| {
        let accept = scope.spawn(|| control::server(far_socket, far, soon()));
        let connected = control::client(near_socket, near, soon());
        (connected, accept.join().unwrap())
    })
}

/// Asserts that the client refuses a data lane and a control lane with an error for which
/// `is_reason` is true, and that the server gets `alert`.
fn assert_client_refuses(
    near: &ClientTls,
    far: &ServerTls,
    is_reason: impl Fn(&HandshakeError) -> bool,
    alert: Alert,
) {
    for (near, far) in [
        errors(both_ends(near, far)),
        errors(both_control(near, far)),
    ] {
        let (near, far) = (near.unwrap(), far.unwrap());
        assert!(is_reason(&near), "{near:?}");
        assert!(
            matches!(far, HandshakeError::PeerAlert(sent) if sent == alert),
            "{far:?}"
        );
    }
}

fn errors<T>((near, far): Outcome<T>) -> (Option<HandshakeError>, Option<HandshakeError>) {
    (near.err(), far.err())
}

fn assert_server_refuses(
    near: &ClientTls,
    far: &ServerTls,
    is_reason: impl Fn(&HandshakeError) -> bool,
) {
    for far in [
        errors(both_ends(near, far)).1,
        errors(both_control(near, far)).1,
    ] {
        let far = far.unwrap();
        assert!(is_reason(&far), "{far:?}");
    }
}

#[test]
fn each_side_gets_the_peers_names_and_the_reason_it_was_authorised() {
    let authority = Authority::new();
    let source = authority.identity(&[SOURCE, "10.1.2.3", "spiffe://site/host/7"]);
    let destination = authority.identity(&[DESTINATION]);
    let near = client(&source, names(&[DESTINATION]));
    for (allowed, by) in [
        (Peers::AnyFromAuthority, AuthorisedBy::Authority),
        (
            names(&["other.test", SOURCE]),
            AuthorisedBy::Name(PeerName::Dns(SOURCE.into())),
        ),
        (
            names(&["10.1.2.3"]),
            AuthorisedBy::Name("10.1.2.3".parse().unwrap()),
        ),
        (
            names(&["spiffe://site/host/7"]),
            AuthorisedBy::Name(PeerName::Uri("spiffe://site/host/7".into())),
        ),
    ] {
        let (connected, accepted) = both_ends(&near, &server(&destination, allowed));
        let (connected, accepted) = (connected.unwrap(), accepted.unwrap());
        assert_eq!(connected.peer.names, [PeerName::Dns(DESTINATION.into())]);
        assert_eq!(accepted.peer.authorised_by, by);
        assert_eq!(accepted.peer.names.len(), 3);
        assert!(!accepted.peer.is(&connected.peer.principal()));
    }
}

/// How a certificate was authorised determines which other certificates count as the same peer.
#[test]
fn i6_a_peer_is_recognised_by_its_pin_or_by_its_name_and_authority_after_renewals() {
    const NAME: &str = "source.hosts.test";
    let (ours, theirs) = (Authority::named("one"), Authority::named("two"));
    let far = load(&ours.host_trusting(&[DESTINATION], &[&theirs]));
    let directory = ours.host(&[NAME, "other.test"]);
    let host = load(&directory);
    let renewed = ours.identity(&[NAME]);
    let same_key = |names: &[&str]| {
        let renewed = ours.host(names);
        let (key, certificate) = ours.renew(&directory, names);
        fs::write(renewed.join("key.pem"), key).unwrap();
        fs::write(renewed.join("cert.pem"), certificate).unwrap();
        load(&renewed)
    };
    let rekeyed_alike = ours.identity(&["other.test", &NAME.to_uppercase()]);
    let same_key_other_name = same_key(&["third.test"]);
    let other_name = ours.identity(&["third.test"]);
    let other_authority = load(&theirs.host_trusting(&[NAME, "other.test"], &[&ours]));
    let wild = ours.identity(&["*.hosts.test"]);
    let nameless = ours.identity(&[]);
    let nameless_too = ours.identity(&[]);
    let summary = host.summary().unwrap();
    let (pin, key_pin) = (
        summary.pin.to_string(),
        summary.key_pin.unwrap().to_string(),
    );
    let hosts = [
        &host,
        &renewed,
        &rekeyed_alike,
        &same_key_other_name,
        &other_name,
        &other_authority,
        &wild,
        &nameless,
        &nameless_too,
    ];
    // Returns the peer's identity as the far side determines it when `peers` are allowed.
    let identify = |identity: &Identity, peers: Peers| {
        let accepted = both_control(
            &client(identity, Peers::AnyFromAuthority),
            &server(&far, peers),
        )
        .1;
        accepted.unwrap().peer().clone()
    };
    for (allowed, same) in [
        // The certificate is pinned: only that certificate matches.
        (Some(vec![&*pin]), vec![0]),
        // The key is pinned: certificates with that key match, with any name.
        (Some(vec![&*key_pin]), vec![0, 3]),
        // A name is allowed: certificates with that name from that authority match. A wildcard in a
        // certificate matches the name too.
        (Some(vec![NAME]), vec![0, 1, 2, 6]),
        // A wildcard, or any peer, is allowed: a certificate matches only if it has exactly the
        // names of the first certificate, because other hosts may share one of the names.
        (Some(vec!["*.hosts.test"]), vec![0, 2]),
        (None, vec![0, 2]),
    ] {
        let peers = allowed.map_or(Peers::AnyFromAuthority, |allowed| names(&allowed));
        let principal = identify(&host, peers).principal();
        for (number, identity) in hosts.iter().enumerate() {
            let peer = identify(identity, Peers::AnyFromAuthority);
            let expected = same.contains(&number);
            assert_eq!(peer.is(&principal), expected, "{number} as {principal:?}");
        }
    }
    // A certificate for a wildcard name does not identify any other host with a name under it.
    let principal = identify(&wild, names(&["*.hosts.test"])).principal();
    for (number, identity) in hosts.iter().enumerate() {
        assert_eq!(
            identify(identity, Peers::AnyFromAuthority).is(&principal),
            number == 6
        );
    }
    // A certificate without a name is identified by its key.
    let principal = identify(&nameless, Peers::AnyFromAuthority).principal();
    for (number, identity) in hosts.iter().enumerate() {
        assert_eq!(
            identify(identity, Peers::AnyFromAuthority).is(&principal),
            number == 7
        );
    }
    // If only the pin authorises a certificate, no trusted authority confirms its names.
    let third = Authority::named("three");
    let stranger = load(&third.host_trusting(&[NAME], &[&ours]));
    let pin = stranger.summary().unwrap().pin.to_string();
    let stranger = identify(&stranger, names(&[&pin]));
    assert_eq!(stranger.authority, None);
    for allowed in [names(&[NAME]), Peers::AnyFromAuthority] {
        assert!(!stranger.is(&identify(&host, allowed).principal()));
    }
    assert!(stranger.is(&stranger.principal()));
    // Only a pin admitted the stranger. No authority confirms its name, so a list with that name
    // does not authorise it.
    assert!(names(&[NAME]).authorise_further(&stranger).is_err());
    assert!(
        Peers::AnyFromAuthority
            .authorise_further(&stranger)
            .is_err()
    );
    assert!(names(&[&pin]).authorise_further(&stranger).is_ok());
    let issued = identify(&host, names(&["other.test"]));
    assert!(names(&[NAME]).authorise_further(&issued).is_ok());
    assert!(names(&["third.test"]).authorise_further(&issued).is_err());
}

/// Covers names that are not host names, and a name that is too long for a journal record.
#[test]
fn i6_a_peer_is_recognised_by_its_address_or_uri_or_else_by_its_certificate() {
    let (ours, theirs) = (Authority::named("one"), Authority::named("two"));
    let far = load(&ours.host_trusting(&[DESTINATION], &[&theirs]));
    let identify = |identity: &Identity, peers: Peers| {
        let accepted = both_control(
            &client(identity, Peers::AnyFromAuthority),
            &server(&far, peers),
        )
        .1;
        accepted.unwrap().peer().clone()
    };
    let uri = |bytes: usize| format!("spiffe://site/{}", "h".repeat(bytes - 14));
    let (longest, longer) = (
        uri(MAX_PRINCIPAL_NAME_BYTES),
        uri(MAX_PRINCIPAL_NAME_BYTES + 1),
    );
    for (name, another) in [
        ("192.0.2.7", "192.0.2.8"),
        ("2001:db8::7", "2001:db8::8"),
        ("spiffe://site/host/7", "spiffe://site/host/8"),
        (&longest, "spiffe://site/host/7"),
        (&longer, &longest),
    ] {
        let host = ours.identity(&[name]);
        let twin = load(&theirs.host_trusting(&[name], &[&ours]));
        let others = [ours.identity(&[name]), ours.identity(&[another]), twin];
        for allowed in [names(&[name]), Peers::AnyFromAuthority] {
            let peer = identify(&host, allowed.clone());
            let principal = peer.principal();
            let recorded = principal.encode([7; 16]).unwrap();
            let recorded = RecordedPeer::decode(&recorded, [7; 16]);
            assert_eq!(recorded, RecordedPeer::Known(principal.clone()));
            assert!(peer.is(&principal), "{principal:?}");
            let is_by_name = allowed == names(&[name]);
            let renewed = name != longer || !is_by_name;
            if is_by_name {
                let is_itself = principal == Principal::Certificate(peer.fingerprint);
                assert_eq!(is_itself, !renewed, "{principal:?}");
            }
            let recognised = others
                .each_ref()
                .map(|one| identify(one, Peers::AnyFromAuthority).is(&principal));
            assert_eq!(recognised, [renewed, false, false], "{principal:?}");
        }
    }
}

/// Claims A3, N5 of docs/security.
#[test]
fn i6_another_authority_is_refused_on_either_side_even_under_the_same_name() {
    let ours = Authority::named("one");
    let destination = server(&ours.identity(&[DESTINATION]), Peers::AnyFromAuthority);
    let source = client(&ours.identity(&[SOURCE]), names(&[DESTINATION]));
    let is_unknown: fn(&HandshakeError) -> bool =
        |error| matches!(error, HandshakeError::UnknownAuthority(_));
    let is_bad_signature: fn(&HandshakeError) -> bool =
        |error| matches!(error, HandshakeError::BadSignature);
    let (unknown_ca, decrypt_error) = (Alert(48), Alert(51));
    for (name, is_reason, alert) in [
        ("two", is_unknown, unknown_ca),
        ("one", is_bad_signature, decrypt_error),
    ] {
        let theirs = Authority::named(name);
        let stranger = server(&theirs.identity(&[DESTINATION]), Peers::AnyFromAuthority);
        assert_client_refuses(&source, &stranger, is_reason, alert);
        // A stranger that trusts `ours` but has no certificate from it.
        let directory = theirs.host(&[SOURCE]);
        fs::copy(
            ours.host(&[SOURCE]).join("ca-cert.pem"),
            directory.join("ca-cert.pem"),
        )
        .unwrap();
        let stranger = client(&load(&directory), names(&[DESTINATION]));
        assert_server_refuses(&stranger, &destination, is_reason);
    }
}

/// Claim A2 of docs/security.
#[test]
fn i6_a_wrong_name_is_refused_on_either_side_and_the_error_has_both_names() {
    let authority = Authority::new();
    let source = authority.identity(&[SOURCE]);
    let destination = authority.identity(&[DESTINATION, "192.0.2.9"]);
    let is_reason = |error: &HandshakeError, in_certificate: &[&str], expected: &[&str]| match error
    {
        HandshakeError::Peer(PeerRefused::Name { presented, allowed }) => {
            let in_certificate = in_certificate.iter().map(|name| name.parse().unwrap());
            presented.iter().cloned().eq(in_certificate)
                && names(expected) == Peers::OneOf(allowed.clone())
        }
        _ => false,
    };
    let certificate_unknown = Alert(46);
    assert_client_refuses(
        &client(&source, names(&["elsewhere.test"])),
        &server(&destination, Peers::AnyFromAuthority),
        |error| is_reason(error, &[DESTINATION, "192.0.2.9"], &["elsewhere.test"]),
        certificate_unknown,
    );
    let allowed = ["elsewhere.test", "spiffe://a/b"];
    assert_server_refuses(
        &client(&source, names(&["192.0.2.9"])),
        &server(&destination, names(&allowed)),
        |error| is_reason(error, &[SOURCE], &allowed),
    );
}

#[test]
fn i6_an_expired_certificate_does_not_load_and_is_refused_from_a_peer() {
    let authority = Authority::new();
    let directory = authority.host_until(&[DESTINATION], 2020);
    let error = Identity::load(&directory, LoadOptions::default()).unwrap_err();
    assert!(
        matches!(error.kind(), IdentityErrorKind::Expired { not_after, .. } if not_after.contains("2020")),
        "{error}"
    );

    // A peer that does not check the dates of its own certificate.
    let mut config = rustls::ServerConfig::builder_with_provider(Crypto::auto().rustls().unwrap())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain(&directory), key(&directory))
        .unwrap();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let (near, mut far) = pair();
    let peer = thread::spawn(move || {
        let mut connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
        connection.complete_io(&mut far).unwrap_err();
    });
    let source = client(&authority.identity(&[SOURCE]), names(&[DESTINATION]));
    let error = handshake::client(near, &source, soon()).unwrap_err();
    assert!(matches!(error, HandshakeError::Expired { .. }), "{error}");
    peer.join().unwrap();
}

fn chain(directory: &Path) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_file_iter(directory.join("cert.pem"))
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

fn key(directory: &Path) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_file(directory.join("key.pem")).unwrap()
}

/// Claim A3 of docs/security.
#[test]
fn i6_a_client_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let directory = authority.host(&[DESTINATION]);
    let destination = server(&load(&directory), Peers::AnyFromAuthority);
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(directory.join("ca-cert.pem")).unwrap())
        .unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(Crypto::auto().rustls().unwrap())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let (mut near, far) = pair();
    let peer = thread::spawn(move || {
        let name = DESTINATION.try_into().unwrap();
        let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        while connection.is_handshaking() {
            connection.complete_io(&mut near).unwrap();
        }
        let mut stream = rustls::Stream::new(&mut connection, &mut near);
        stream.read_once(&mut [0]).unwrap_err().to_string()
    });
    let error = handshake::server(far, &destination, soon()).unwrap_err();
    assert!(matches!(error, HandshakeError::NoCertificate), "{error}");
    assert!(peer.join().unwrap().contains("CertificateRequired"));
}

fn any_client() -> ClientTls {
    let authority = Authority::new();
    client(&authority.identity(&[SOURCE]), names(&[DESTINATION]))
}

fn any_server() -> ServerTls {
    let authority = Authority::new();
    server(&authority.identity(&[DESTINATION]), names(&[SOURCE]))
}

/// Claim N7 of docs/security.
#[test]
fn i6_a_peer_without_tls_is_an_error_and_gets_only_a_client_hello() {
    let (near, mut far) = pair();
    let peer = thread::spawn(move || {
        let mut got = vec![0; 4096];
        let count = far.read_once(&mut got).unwrap();
        got.truncate(count);
        far.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        let _ = far.read_to_end(&mut got);
        got
    });
    let error = handshake::client(near, &any_client(), soon()).unwrap_err();
    assert!(
        matches!(&error, HandshakeError::NotTls { start } if start == b"SSH-2"),
        "{error}"
    );
    let got = peer.join().unwrap();
    // Exactly one handshake record, with a ClientHello.
    assert_eq!((got[0], got[5]), (22, 1));
    assert_eq!(
        got.len(),
        5 + usize::from(u16::from_be_bytes([got[3], got[4]]))
    );

    let (mut near, far) = pair();
    near.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let error = control::server(far, &any_server(), soon()).unwrap_err();
    assert!(matches!(error, HandshakeError::NotTls { .. }), "{error}");
    let mut got = Vec::new();
    near.read_to_end(&mut got).unwrap_or_default();
    assert!(got.is_empty());
}

/// Peers that offer and accept TLS 1.2 only, with certificates of the authority.
///
/// Claim N7 of docs/security.
#[test]
fn i6_a_peer_with_an_older_tls_is_refused_on_either_side() {
    const VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS12];
    let provider = || Arc::new(rustls::crypto::ring::default_provider());
    let authority = Authority::new();
    let [near, far] = [SOURCE, DESTINATION].map(|name| authority.host(&[name]));
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(near.join("ca-cert.pem")).unwrap())
        .unwrap();
    let mut older_client = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain(&near), key(&near))
        .unwrap();
    older_client.alpn_protocols = vec![ALPN.to_vec()];
    let mut older_server = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain(&far), key(&far))
        .unwrap();
    older_server.alpn_protocols = vec![ALPN.to_vec()];
    let (older_client, older_server) = (Arc::new(older_client), Arc::new(older_server));
    let source = client(&load(&near), names(&[DESTINATION]));
    let destination = server(&load(&far), names(&[SOURCE]));
    for is_control in [false, true] {
        let (ours, theirs) = pair();
        let config = Arc::clone(&older_client);
        let name = DESTINATION.try_into().unwrap();
        let older = rustls::ClientConnection::new(config, name).unwrap();
        let older = in_handshake(older.into(), theirs);
        let error = match is_control {
            true => control::server(ours, &destination, soon()).unwrap_err(),
            false => handshake::server(ours, &destination, soon()).unwrap_err(),
        };
        assert!(matches!(error, HandshakeError::Incompatible(_)), "{error}");
        assert!(older.join().unwrap().contains("ProtocolVersion"));

        let (ours, theirs) = pair();
        let older = rustls::ServerConnection::new(Arc::clone(&older_server)).unwrap();
        let older = in_handshake(older.into(), theirs);
        let error = match is_control {
            true => control::client(ours, &source, soon()).unwrap_err(),
            false => handshake::client(ours, &source, soon()).unwrap_err(),
        };
        let protocol_version = Alert(70);
        assert!(
            matches!(error, HandshakeError::PeerAlert(alert) if alert == protocol_version),
            "{error}"
        );
        older.join().unwrap();
    }
}

/// Carries out a handshake on another thread; returns its error.
fn in_handshake(
    mut connection: rustls::Connection,
    mut stream: TcpStream,
) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        while connection.is_handshaking() {
            if let Err(error) = connection.complete_io(&mut stream) {
                return error.to_string();
            }
        }
        String::new()
    })
}

#[test]
fn i7_a_handshake_with_a_stalled_peer_ends_at_the_deadline() {
    const LIMIT: Duration = Duration::from_millis(300);
    let stalls: [fn(&mut TcpStream); 3] = [
        |_| (),
        |peer| peer.write_all(&[22, 3]).unwrap(),
        |peer| peer.write_all(&[22, 3, 3, 1, 0, 2, 0]).unwrap(),
    ];
    for stall in stalls {
        let attempts: [fn(TcpStream) -> HandshakeError; 4] = [
            |end| handshake::client(end, &any_client(), Instant::now() + LIMIT).unwrap_err(),
            |end| handshake::server(end, &any_server(), Instant::now() + LIMIT).unwrap_err(),
            |end| control::client(end, &any_client(), Instant::now() + LIMIT).unwrap_err(),
            |end| control::server(end, &any_server(), Instant::now() + LIMIT).unwrap_err(),
        ];
        for attempt in attempts {
            let (near, mut far) = pair();
            stall(&mut far);
            let begin = Instant::now();
            let error = attempt(near);
            assert!(matches!(error, HandshakeError::Deadline), "{error}");
            assert!(begin.elapsed() >= LIMIT && begin.elapsed() < LIMIT * 5);
        }
    }
}

#[test]
fn i7_a_handshake_with_a_peer_that_sends_slowly_ends_at_the_deadline() {
    let (near, mut far) = pair();
    let drip = thread::spawn(move || {
        let mut count = 0;
        let message = [22, 3, 3, 0x40, 0, 2, 0, 0x3f, 0xfc];
        for byte in message.into_iter().chain(std::iter::repeat(0)) {
            if far.write_all(&[byte]).is_err() {
                return count;
            }
            count += 1;
            thread::sleep(Duration::from_millis(20));
        }
        count
    });
    let begin = Instant::now();
    let limit = Duration::from_millis(300);
    let error = handshake::client(near, &any_client(), begin + limit).unwrap_err();
    assert!(matches!(error, HandshakeError::Deadline), "{error}");
    assert!(begin.elapsed() < limit * 3);
    assert!(drip.join().unwrap() > 5);
}

/// Claim A1 of docs/security.
#[test]
fn i7_an_endless_flight_is_refused_at_the_limit() {
    for over_control in [false, true] {
        let (near, mut far) = pair();
        let peer = thread::spawn(move || {
            // One ServerHello that claims 65,000 bytes, spread over many records.
            let mut sent = 0;
            let mut body = vec![2, 0, 0xfd, 0xe8];
            loop {
                body.resize(1000, 7);
                let record = [&[22, 3, 3, 3, 0xe8][..], &body].concat();
                if far.write_all(&record).is_err() || sent > 4 * FLIGHT_LIMIT_BYTES {
                    return;
                }
                sent += record.len();
                body.clear();
            }
        });
        let error = if over_control {
            control::client(near, &any_client(), soon()).unwrap_err()
        } else {
            handshake::client(near, &any_client(), soon()).unwrap_err()
        };
        // rustls may reject the message first; either way the handshake ends immediately.
        let text = error.to_string();
        assert!(
            matches!(error, HandshakeError::TooLong | HandshakeError::Protocol(_)),
            "{text}"
        );
        peer.join().unwrap();
    }
    // The largest length that a record's header can state, and the allowed length plus one byte.
    for length in [u16::MAX, 16_641] {
        let (near, mut far) = pair();
        let [high, low] = length.to_be_bytes();
        far.write_all(&[22, 3, 3, high, low]).unwrap();
        let error = handshake::client(near, &any_client(), soon()).unwrap_err();
        assert!(
            matches!(error, HandshakeError::TooLong),
            "{length}: {error}"
        );
    }
}

#[test]
fn a_peer_that_closes_the_connection_is_an_error_of_its_own() {
    let (near, far) = pair();
    far.shutdown(Shutdown::Both).unwrap();
    let error = handshake::client(near, &any_client(), soon()).unwrap_err();
    assert!(matches!(error, HandshakeError::PeerClosed), "{error}");
}

fn load_error(directory: &Path) -> IdentityError {
    Identity::load(directory, LoadOptions::default()).unwrap_err()
}

#[test]
fn errors_of_unusable_identities_name_the_file_and_the_remedy() {
    let authority = Authority::new();
    let fresh = || authority.host(&[SOURCE]);
    let written = |file: &str, text: &str| {
        let directory = fresh();
        fs::write(directory.join(file), text).unwrap();
        directory
    };

    let directory = fresh();
    fs::remove_file(directory.join("cert.pem")).unwrap();
    let error = load_error(&directory);
    assert!(
        matches!(error.kind(), IdentityErrorKind::NoLayout { directory: of } if *of == directory),
        "{error}"
    );

    let directory = fresh();
    fs::remove_file(directory.join("key.pem")).unwrap();
    let error = load_error(&directory);
    assert!(
        matches!(error.kind(), IdentityErrorKind::Unreadable { path, source }
            if path.ends_with("key.pem") && source.kind() == ErrorKind::NotFound),
        "{error}"
    );

    let error = load_error(&written(
        "ca-cert.pem",
        "-----BEGIN CERTIFICATE-----\n!!!\n",
    ));
    assert!(
        matches!(error.kind(), IdentityErrorKind::BadPem { path, .. } if path.ends_with("ca-cert.pem")),
        "{error}"
    );

    let error = load_error(&written("ca-cert.pem", "nothing"));
    assert!(
        matches!(error.kind(), IdentityErrorKind::Nothing { path, .. } if path.ends_with("ca-cert.pem")),
        "{error}"
    );

    let mut text = String::from("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let error = load_error(&written("ca-cert.pem", &text));
    assert!(
        matches!(error.kind(), IdentityErrorKind::BadItem { path, position: 0, .. }
            if path.ends_with("ca-cert.pem")),
        "{error}"
    );
    text.extend(std::iter::repeat_n('#', 2 << 20));
    let error = load_error(&written("ca-cert.pem", &text));
    assert!(
        matches!(error.kind(), IdentityErrorKind::TooLong { path } if path.ends_with("ca-cert.pem")),
        "{error}"
    );

    let error = load_error(&written(
        "key.pem",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
    ));
    assert!(
        matches!(error.kind(), IdentityErrorKind::Nothing { path, .. } if path.ends_with("key.pem")),
        "{error}"
    );

    let directory = fresh();
    fs::copy(fresh().join("key.pem"), directory.join("key.pem")).unwrap();
    let error = load_error(&directory);
    assert!(
        matches!(error.kind(), IdentityErrorKind::KeyMismatch { key, .. } if *key == directory.join("key.pem")),
        "{error}"
    );
}

#[test]
fn a_key_open_to_all_is_refused_and_one_open_to_the_group_is_a_warning() {
    let authority = Authority::new();
    let directory = authority.host(&[SOURCE]);
    let key = directory.join("key.pem");
    for mode in [0o604, 0o644, 0o602] {
        set_mode(&key, mode);
        let error = load_error(&directory);
        assert!(
            matches!(error.kind(), IdentityErrorKind::KeyOpenToAll { path, mode: of }
                if *path == key && of & 0o777 == mode),
            "{error}"
        );
        let allowed = LoadOptions {
            allow_key_open_to_all: true,
            ..LoadOptions::default()
        };
        Identity::load(&directory, allowed).unwrap();
    }
    set_mode(&key, 0o640);
    let (_, warnings) = Identity::load(&directory, LoadOptions::default()).unwrap();
    assert_eq!(
        warnings,
        [Warning::KeyOpenToGroup {
            path: key.clone(),
            mode: 0o640
        }]
    );
    set_mode(&key, 0o600);
    assert!(
        Identity::load(&directory, LoadOptions::default())
            .unwrap()
            .1
            .is_empty()
    );
}

#[test]
fn wildcards_match_one_label_and_the_common_name_is_ignored() {
    let authority = Authority::new();
    let source = authority.identity(&[SOURCE]);
    let destination = server(
        &authority.identity(&["*.hosts.test"]),
        Peers::AnyFromAuthority,
    );
    assert!(
        both_ends(&client(&source, names(&["a.hosts.test"])), &destination)
            .0
            .is_ok()
    );
    assert!(
        both_ends(&client(&source, names(&["a.b.hosts.test"])), &destination)
            .0
            .is_err()
    );
    // rcgen gives every certificate this common name, which must not match an allowed name.
    let common = "rcgen self signed cert";
    assert!(
        both_ends(
            &client(
                &source,
                Peers::OneOf(vec![Peer::Name(PeerName::Dns(common.into()))])
            ),
            &destination
        )
        .0
        .is_err()
    );
}

/// Dials a TLS lane to `to`, which must fail, and returns the error.
fn dial_error(
    connector: &Arc<dyn Connector>,
    to: &str,
    peer: &Principal,
    tls: &ClientTls,
    cancel: &DialCancel,
) -> DialError {
    let request = LaneRequest {
        endpoint: to,
        peer,
        tls,
        deadline: Instant::now() + Duration::from_secs(60),
        cancel,
        connector,
    };
    match TlsDialer.dial(&request) {
        Ok(_) => panic!("the dial succeeded"),
        Err(error) => error,
    }
}

/// A connector that never connects: it waits for `stop` or the deadline, and then fails.
struct NeverConnects;

impl Connector for NeverConnects {
    fn connect(&self, _: &str, deadline: Instant, stop: &Wakeup) -> std::io::Result<TcpStream> {
        let stopped = Interest::read(&stop);
        let left = deadline.saturating_duration_since(Instant::now());
        let kind = if poll(&[stopped], Some(left))?[0] {
            std::io::ErrorKind::ConnectionAborted
        } else {
            std::io::ErrorKind::TimedOut
        };
        Err(kind.into())
    }

    fn connect_from(
        &self,
        _: SocketAddr,
        _: SocketAddr,
        _: Instant,
        _: &Wakeup,
    ) -> std::io::Result<TcpStream> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn a_dial_is_cancelled_while_it_connects_and_while_the_peer_is_silent() {
    let authority = Authority::new();
    let tls = client(&authority.identity(&[SOURCE]), names(&[DESTINATION]));
    let absent = Principal::Certificate([0; 32]);
    let cancel = DialCancel::new().unwrap();
    let never: Arc<dyn Connector> = Arc::new(NeverConnects);
    let own = cancel.clone();
    let canceller = thread::spawn(move || own.cancel());
    let error = dial_error(&never, "host-b.example:4444", &absent, &tls, &cancel);
    canceller.join().unwrap();
    let is_stopped =
        |source: &std::io::Error| source.kind() == std::io::ErrorKind::ConnectionAborted;
    assert!(
        matches!(&error, DialError::Connect { source, .. } if is_stopped(source)),
        "{error:?}"
    );
    assert_eq!(error.permanent(), None);

    let cancel = DialCancel::new().unwrap();
    let sockets: Arc<dyn Connector> = Arc::new(StandardConnector);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let own = cancel.clone();
    let silent = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The handshake has begun, and this peer does not answer.
        stream.read_exact(&mut [0]).unwrap();
        own.cancel();
        stream
    });
    let begun = Instant::now();
    let error = dial_error(&sockets, &to, &absent, &tls, &cancel);
    drop(silent.join().unwrap());
    assert!(matches!(error, DialError::Handshake { .. }), "{error:?}");
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn i6_a_lane_to_another_allowed_peer_is_refused() {
    let authority = Authority::new();
    let tls = client(&authority.identity(&[SOURCE]), names(&[DESTINATION]));
    let far = server(&authority.identity(&[DESTINATION]), names(&[SOURCE]));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let answers = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        handshake::server(stream, &far, soon()).unwrap()
    });
    let sockets: Arc<dyn Connector> = Arc::new(StandardConnector);
    let other = Principal::Certificate([0; 32]);
    let cancel = DialCancel::new().unwrap();
    let error = dial_error(&sockets, &to, &other, &tls, &cancel);
    drop(answers.join().unwrap());
    assert!(matches!(error, DialError::OtherPeer { .. }), "{error:?}");
    assert_eq!(error.permanent(), Some(FaultCode::WrongIdentity));
}
