//! Tests peers that must be refused, and the errors of both sides, through the engine's API. A
//! table has a row for each case. `--nocapture --test-threads 1` prints the table. The tests check
//! codes, alerts, names, pins and dates in the errors, but not the advice.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use dunlin::engine::destination::DestinationEvent;
use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, source};
use dunlin::lane::control;
use dunlin::lane::identity::{Identity, LoadOptions, Role};
use dunlin::lane::peers::{Peers, Pin};
use dunlin::lane::policy::ALPN;
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::Crypto;
use dunlin_proto::control::Message;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, SessionSecret,
    VersionRange,
};
use dunlin_test_base::sockets::ReadOnce as _;
use dunlin_test_support::engine::peer::{Peer, SESSION, lane_open, open_lane};
use dunlin_test_support::engine::{Receiving, TestBuilder, TestVm, impatient, send};
use dunlin_test_support::hostile::with_causes;
use dunlin_test_support::identity::*;
use dunlin_test_support::lane::*;

/// The errors of both sides.
struct Said {
    name: &'static str,
    source: String,
    destination: String,
}

/// Prints rows, and collects their failures so that one failure does not hide another.
#[derive(Default)]
struct Table {
    wrong: Vec<String>,
}

impl Table {
    /// Checks that the source's error contains all `source_words`, and that the destination's error
    /// contains all `destination_words`.
    fn row(&mut self, said: Said, source_words: &[&str], destination_words: &[&str]) {
        let Said {
            name,
            source,
            destination,
        } = &said;
        println!("{name}\n  source:      {source}\n  destination: {destination}");
        for (side, text, words) in [
            ("source", source, source_words),
            ("destination", destination, destination_words),
        ] {
            for word in words.iter().filter(|word| !text.contains(**word)) {
                self.wrong
                    .push(format!("{name}: the {side} does not say {word:?}: {text}"));
            }
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if !thread::panicking() {
            assert!(self.wrong.is_empty(), "{:#?}", self.wrong);
        }
    }
}

fn near(host: &Host, peers: Peers) -> ClientTls {
    host.load().client(&Crypto::auto(), peers).unwrap()
}

fn far(host: &Host, peers: Peers) -> ServerTls {
    host.load().server(&Crypto::auto(), peers).unwrap()
}

/// Runs a migration that must fail before the VM is described, and returns its error.
fn migrate_error(to: &str, tls: &ClientTls) -> String {
    let vm = TestVm::new(4 << 20);
    let options = source::Options::builder()
        .connect_limit(Duration::from_secs(5))
        .build()
        .unwrap();
    let (result, _) = send(&vm, to, tls, &options, &Cancel::new());
    with_causes(&result.unwrap_err())
}

/// Runs `client` against the engine's destination.
fn at_destination(
    name: &'static str,
    server: &ServerTls,
    client: impl FnOnce(&str) -> String,
) -> Said {
    let receiving = Receiving::start(server, &impatient(), TestBuilder::default());
    let source = client(&receiving.address.to_string());
    receiving.await_event(|event| matches!(event, DestinationEvent::Rejected { .. }));
    let (_, builder, events) = receiving.finish(true);
    assert!(builder.built.is_none(), "{name}: a VM was built");
    let rejections: Vec<_> = events
        .into_iter()
        .filter_map(|event| match event {
            DestinationEvent::Rejected { reason } => Some(reason),
            DestinationEvent::Connected { .. } => panic!("{name}: accepted"),
            _ => None,
        })
        .collect();
    Said {
        name,
        source,
        destination: rejections.join(" | "),
    }
}

/// Runs the engine's source against the engine's destination.
fn meet(name: &'static str, client: &ClientTls, server: &ServerTls) -> Said {
    at_destination(name, server, |to| migrate_error(to, client))
}

/// Runs the engine's source against `server`, which returns its own error.
fn at_source(
    name: &'static str,
    client: &ClientTls,
    server: impl FnOnce(TcpStream) -> String + Send,
) -> Said {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let answering = scope.spawn(|| server(listener.accept().unwrap().0));
        let source = migrate_error(&to, client);
        Said {
            name,
            source,
            destination: answering.join().unwrap(),
        }
    })
}

struct Site {
    ca: Ca,
    source: Host,
    destination: Host,
}

impl Site {
    fn new() -> Self {
        let ca = Ca::root("site");
        let host = |name| Host::new(&ca.issue(&wish(&[name])), "", &ca.pem, "");
        Self {
            source: host(SOURCE),
            destination: host(DESTINATION),
            ca,
        }
    }

    fn near(&self) -> ClientTls {
        near(&self.source, names(&[DESTINATION]))
    }

    fn far(&self) -> ServerTls {
        far(&self.destination, names(&[SOURCE]))
    }

    /// A host that has the certificate `own` and trusts this site's authority.
    fn with(&self, own: &Issued, appended: &str) -> Host {
        Host::new(own, appended, &self.ca.pem, "")
    }
}

/// Claim A2 of docs/security.
#[test]
fn i6_certificates_that_are_not_trusted() {
    let mut table = Table::default();
    let site = Site::new();
    let other = Ca::root("another site");
    let (near_site, far_site) = (site.near(), site.far());
    let as_destination =
        |own: &Issued, appended: &str| far(&site.with(own, appended), Peers::AnyFromAuthority);
    let as_source =
        |own: &Issued, appended: &str| near(&site.with(own, appended), names(&[DESTINATION]));

    let named = other.issue(&wish(&[DESTINATION]));
    table.row(
        meet(
            "unknown authority of the destination",
            &near_site,
            &as_destination(&named, ""),
        ),
        &["unknown authority, CN=another site", "unauthorised"],
        &["UnknownCA (48)"],
    );
    table.row(
        meet(
            "unknown authority that is sent along",
            &near_site,
            &as_destination(&named, &other.pem),
        ),
        &["CN=another site"],
        &["UnknownCA (48)"],
    );
    let named = other.issue(&wish(&[SOURCE]));
    table.row(
        meet(
            "unknown authority of the source",
            &as_source(&named, ""),
            &far_site,
        ),
        &["UnknownCA (48)", "unauthorised"],
        &["unknown authority, CN=another site"],
    );

    let below = site.ca.under("rack 7");
    let named = below.issue(&wish(&[DESTINATION]));
    table.row(
        meet(
            "intermediate missing at the destination",
            &near_site,
            &as_destination(&named, ""),
        ),
        &["CN=rack 7"],
        &["UnknownCA (48)"],
    );
    let named = below.issue(&wish(&[SOURCE]));
    table.row(
        meet(
            "intermediate missing at the source",
            &as_source(&named, ""),
            &far_site,
        ),
        &["UnknownCA (48)"],
        &["CN=rack 7"],
    );

    let alone = self_signed(&wish(&[]));
    let pin = Pin::of_certificate(&chain(&site.with(&alone, ""))[0]).to_string();
    table.row(
        meet(
            "self-signed destination without SAN",
            &near_site,
            &as_destination(&alone, ""),
        ),
        &["self-signed", "not pinned here", &pin],
        &["UnknownCA (48)"],
    );
    table.row(
        meet(
            "self-signed source without SAN",
            &as_source(&alone, ""),
            &far_site,
        ),
        &["UnknownCA (48)"],
        &["self-signed", "not pinned here", &pin],
    );

    let stranger = near(&site.source, names(&["elsewhere.test", "spiffe://site/x"]));
    table.row(
        meet("wrong name of the destination", &stranger, &far_site),
        &["it has DNS destination.test, allowed are DNS elsewhere.test, URI spiffe://site/x"],
        &["CertificateUnknown (46)"],
    );
    let strict = far(&site.destination, names(&["elsewhere.test"]));
    table.row(
        meet("wrong name of the source", &near_site, &strict),
        &["CertificateUnknown (46)"],
        &["it has DNS source.test, allowed is DNS elsewhere.test"],
    );

    let zeros = format!("sha256:{}", "00".repeat(32));
    let of_destination = Pin::of_certificate(&chain(&site.destination)[0]).to_string();
    table.row(
        meet(
            "wrong pin of the destination",
            &near(&site.source, names(&[&zeros])),
            &far_site,
        ),
        &["not the pinned one", &of_destination, &zeros],
        &["CertificateUnknown (46)"],
    );
    let key = format!("spki-{zeros}");
    table.row(
        meet(
            "wrong pin of the source",
            &near_site,
            &far(&site.destination, names(&[&key])),
        ),
        &["CertificateUnknown (46)"],
        &["not the pinned one", &key],
    );

    let client_alone = site.ca.issue(&Wish {
        for_servers: false,
        ..wish(&[DESTINATION])
    });
    let config = careless_server(&site.with(&client_alone, ""), &[ALPN]);
    table.row(
        at_source(
            "a destination with a client's certificate",
            &near_site,
            |stream| drive_server(config, stream),
        ),
        &["extended key usage"],
        &["UnsupportedCertificate (43)"],
    );
    let server_alone = site.ca.issue(&Wish {
        for_clients: false,
        ..wish(&[SOURCE])
    });
    let config = careless_client(&site.with(&server_alone, ""), &[ALPN]);
    table.row(
        at_destination("a source with a server's certificate", &far_site, |to| {
            drive_client(config, TcpStream::connect(to).unwrap())
        }),
        &["UnsupportedCertificate (43)"],
        &["extended key usage"],
    );
}

#[test]
fn i6_certificates_out_of_date_or_revoked() {
    let mut table = Table::default();
    let site = Site::new();
    let (near_site, far_site) = (site.near(), site.far());
    // TLS has one alert for an expired certificate and for a certificate that is not valid yet (RFC
    // 8446, section 6.2).
    for (name, years, says) in [
        (
            "expired",
            (2001, 2020),
            "has expired (it was valid until Jan  1 00:00:00 2020",
        ),
        (
            "not yet valid",
            (2090, 2096),
            "is not valid yet (it is valid from Jan  1 00:00:00 2090",
        ),
    ] {
        let own = |name| Wish {
            years,
            ..wish(name)
        };
        let host = site.with(&site.ca.issue(&own(&[DESTINATION])), "");
        let config = careless_server(&host, &[ALPN]);
        let alert = "CertificateExpired (45)";
        table.row(
            at_source(name, &near_site, |stream| drive_server(config, stream)),
            &["the peer's certificate", says],
            &[alert],
        );
        // A pin does not extend a certificate's validity.
        let pin = Pin::of_certificate(&chain(&host)[0]).to_string();
        let config = careless_server(&host, &[ALPN]);
        let pinned = near(&site.source, names(&[&pin]));
        table.row(
            at_source(name, &pinned, |stream| drive_server(config, stream)),
            &["the peer's certificate", says],
            &[alert],
        );
        let host = site.with(&site.ca.issue(&own(&[SOURCE])), "");
        let config = careless_client(&host, &[ALPN]);
        table.row(
            at_destination(name, &far_site, |to| {
                drive_client(config, TcpStream::connect(to).unwrap())
            }),
            &[alert],
            &["the peer's certificate", says],
        );
    }

    let (bad, good) = (
        site.ca.issue(&wish(&[DESTINATION])),
        site.ca.issue(&wish(&[SOURCE])),
    );
    let list = site.ca.revoke(&[bad.serial], 2096);
    let careful = |own: &Issued, list: &str| Host::new(own, "", &site.ca.pem, list);
    let source = careful(&good, &list);
    let revoked = far(&site.with(&bad, ""), Peers::AnyFromAuthority);
    table.row(
        meet(
            "revoked destination",
            &near(&source, names(&[DESTINATION])),
            &revoked,
        ),
        &["is revoked according to a revocation list"],
        &["CertificateRevoked (44)"],
    );
    let pin = Pin::of_certificate(&chain(&site.with(&bad, ""))[0]).to_string();
    table.row(
        meet(
            "revoked destination that is pinned",
            &near(&source, names(&[&pin])),
            &revoked,
        ),
        &["is revoked according to a revocation list"],
        &["CertificateRevoked (44)"],
    );
    let (bad, good) = (
        site.ca.issue(&wish(&[SOURCE])),
        site.ca.issue(&wish(&[DESTINATION])),
    );
    let list = site.ca.revoke(&[1, bad.serial], 2096);
    let revoked = near(&site.with(&bad, ""), names(&[DESTINATION]));
    table.row(
        meet(
            "revoked source",
            &revoked,
            &far(&careful(&good, &list), Peers::AnyFromAuthority),
        ),
        &["CertificateRevoked (44)"],
        &["is revoked according to a revocation list"],
    );
    let below = site.ca.under("rack 9");
    let own = below.issue(&wish(&[SOURCE]));
    let chained = near(&site.with(&own, &below.pem), names(&[DESTINATION]));
    let (_, intermediate) = x509_parser::pem::parse_x509_pem(below.pem.as_bytes()).unwrap();
    let serial = intermediate.parse_x509().unwrap().raw_serial().to_vec();
    let serial = serial
        .iter()
        .fold(0, |serial, byte| serial << 8 | u64::from(*byte));
    let list = site.ca.revoke(&[serial], 2096);
    table.row(
        meet(
            "revoked intermediate",
            &chained,
            &far(&careful(&good, &list), Peers::AnyFromAuthority),
        ),
        &["CertificateRevoked (44)"],
        &["is revoked according to a revocation list"],
    );
    let old = site.ca.revoke(&[], 2025);
    table.row(
        meet(
            "revocation list out of date",
            &near_site,
            &far(&careful(&good, &old), Peers::AnyFromAuthority),
        ),
        &["UnknownCA (48)"],
        &[
            "this host's revocation list",
            "out of date",
            "the next one was due on Jan  1 00:00:00 2025",
        ],
    );
}

/// Claim A4 of docs/security.
#[test]
fn i6_peers_other_than_dunlin() {
    let mut table = Table::default();
    let site = Site::new();
    let (near_site, far_site) = (site.near(), site.far());
    let no_dunlin = "(not-dunlin, at fault: configuration)";
    let speaks = |words: &'static [u8]| {
        move |mut stream: TcpStream| {
            let _ = stream.read(&mut [0; 4096]);
            stream.write_all(words).unwrap();
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
            "(not a Dunlin peer)".to_owned()
        }
    };
    let http = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    table.row(
        at_source("an HTTP server", &near_site, speaks(http)),
        &["does not speak TLS", "as an HTTP server does", no_dunlin],
        &[],
    );
    table.row(
        at_source(
            "an SSH server",
            &near_site,
            speaks(b"SSH-2.0-OpenSSH_9.2\r\n"),
        ),
        &["as an SSH server does", no_dunlin],
        &[],
    );
    table.row(
        at_source("a TCP echo server", &near_site, |mut stream| {
            let mut hello = vec![0; 4096];
            let count = stream.read_once(&mut hello).unwrap();
            stream.write_all(&hello[..count]).unwrap();
            let _ = stream.read_once(&mut hello);
            "(not a Dunlin peer)".to_owned()
        }),
        &["echoes its input", no_dunlin],
        &[],
    );
    table.row(
        at_source("a peer that disconnects", &near_site, |stream| {
            drop(stream);
            "(not a Dunlin peer)".to_owned()
        }),
        &["closed the connection during the TLS handshake"],
        &[],
    );
    let config = careless_server(&site.destination, &[b"h2", b"http/1.1"]);
    table.row(
        at_source("a TLS server of another protocol", &near_site, |stream| {
            drive_server(config, stream)
        }),
        &["speaks TLS but is not Dunlin", no_dunlin],
        &[],
    );
    let config = careless_server(&site.destination, &[]);
    table.row(
        at_source("a TLS server of no protocol", &near_site, |stream| {
            drive_server(config, stream)
        }),
        &["speaks TLS but is not Dunlin", no_dunlin],
        &[],
    );

    let calls = |words: &'static [u8]| {
        move |to: &str| {
            let mut stream = TcpStream::connect(to).unwrap();
            stream.write_all(words).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
            "(not a Dunlin peer)".to_owned()
        }
    };
    table.row(
        at_destination(
            "an HTTP client",
            &far_site,
            calls(b"GET / HTTP/1.1\r\n\r\n"),
        ),
        &[],
        &["first byte is 0x47", "neither TLS nor a plain Dunlin lane"],
    );
    table.row(
        at_destination(
            "an SSH client",
            &far_site,
            calls(b"SSH-2.0-OpenSSH_9.2\r\n"),
        ),
        &[],
        &["first byte is 0x53", "neither TLS nor a plain Dunlin lane"],
    );
    for (name, protocols) in [
        ("a TLS client of another protocol", &[&b"h2"[..]][..]),
        ("a TLS client of no protocol", &[]),
    ] {
        let config = careless_client(&site.source, protocols);
        table.row(
            at_destination(name, &far_site, |to| {
                drive_client(config, TcpStream::connect(to).unwrap())
            }),
            &[],
            &["speaks TLS but is not Dunlin"],
        );
    }
}

fn refusal_of(stream: &control::ControlStream) -> String {
    let mut bytes = [0; PRELUDE_BYTES];
    stream.receive_exact(&mut bytes, soon()).unwrap();
    let prelude = Prelude::decode(&bytes).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    stream.receive_exact(&mut body, soon()).unwrap();
    match Opening::decode(&prelude, &body).unwrap() {
        Opening::Refuse(_, refusal) => {
            format!(
                "{}: {} {}",
                refusal.fault,
                refusal.text,
                refusal.fault.advice()
            )
        }
        other => panic!("{other:?}"),
    }
}

/// Claim A4 of docs/security.
#[test]
fn protocol_versions_that_have_nothing_in_common() {
    let mut table = Table::default();
    let site = Site::new();
    let (near_site, far_site) = (site.near(), site.far());
    let newer = VersionRange { min: 2, max: 3 };
    let said = at_destination("a source of a newer release", &far_site, |to| {
        let stream = TcpStream::connect(to).unwrap();
        let lane = control::client(stream, &near_site, soon()).unwrap();
        let offer = Offer {
            versions: newer,
            optional: Features::NONE,
            required: Features::NONE,
            security: LaneSecurity::Tls,
            session: SESSION,
            attempt: 1,
            epoch: 1,
        };
        let mut bytes = Vec::new();
        offer.encode(&mut bytes).unwrap();
        lane.send(&bytes).unwrap();
        refusal_of(&lane)
    });
    let speaks = "the source speaks versions 2 to 3, the destination 1";
    table.row(said, &["version-mismatch", speaks], &[speaks]);

    let said = at_source("a destination of a newer release", &near_site, |stream| {
        let lane = control::server(stream, &far_site, soon()).unwrap();
        lane.receive(&mut [0; 1], soon()).unwrap();
        let refusal = Refusal {
            fault: FaultCode::VersionMismatch,
            text: "the source speaks versions 1, the destination 2 to 3".into(),
        };
        let mut bytes = Vec::new();
        Opening::Refuse(newer, refusal).encode(&mut bytes).unwrap();
        lane.send(&bytes).unwrap();
        let _ = lane.receive(&mut [0; 512], soon());
        "(is newer)".to_owned()
    });
    table.row(said, &["version-mismatch", "the destination 2 to 3"], &[]);
}

/// Claim A7 of docs/security.
#[test]
fn i6_i7_lanes_that_do_not_belong_to_the_session() {
    let mut table = Table::default();
    let site = Site::new();
    let near_site = site.near();
    // A host of the same name, with a certificate from another authority that both sides trust.
    let other = Ca::root("other");
    let both = site.ca.pem.clone() + &other.pem;
    let twin = Host::new(&other.issue(&wish(&[SOURCE])), "", &both, "");
    let twin = near(&twin, names(&[DESTINATION]));
    site.destination.put("ca-cert.pem", &both);
    let far_site = site.far();
    let options = impatient().to_builder().lanes_max(1).build().unwrap();
    let receiving = Receiving::start(&far_site, &options, TestBuilder::default());
    let to = receiving.address;
    let (mut peer, accept) = Peer::accepted(to, &near_site);
    let good = |number| lane_open(SESSION, &accept.secret, number);
    let mut row = |name, source: Option<Message>, source_words: &[&str], words: &[&str]| {
        receiving.await_rejection(words[0]);
        let source = match source {
            Some(Message::LaneRefused { fault, text, .. }) => {
                format!("{fault}: {text} {}", fault.advice())
            }
            Some(other) => panic!("{other:?}"),
            None => "(no answer: it is not the source)".to_owned(),
        };
        let rejections = receiving.events.lock().unwrap();
        let destination = rejections.iter().rev().find_map(|event| match event {
            DestinationEvent::Rejected { reason } => Some(reason.clone()),
            _ => None,
        });
        let destination = destination.unwrap();
        table.row(
            Said {
                name,
                source,
                destination,
            },
            source_words,
            words,
        );
    };
    let wrong = SessionSecret([3; 32]);
    let _one = open_lane(to, Some(&near_site), &lane_open(SESSION, &wrong, 1));
    row(
        "a lane with a wrong secret",
        None,
        &[],
        &["lane 1: the lane's proof does not match the session's secret"],
    );
    let _two = open_lane(to, Some(&near_site), &lane_open([4; 16], &accept.secret, 2));
    let reply = peer.receive();
    row(
        "a lane of another session",
        reply,
        &["unknown-session: the lane belongs to another session"],
        &["lane 2: the lane belongs to another session"],
    );
    let _three = open_lane(to, Some(&twin), &good(3));
    let reply = peer.receive();
    row(
        "a lane of another identity",
        reply,
        &["wrong-identity", "not from the session's peer"],
        &["lane 3: the lane is not from the session's peer"],
    );
    let _four = open_lane(to, Some(&near_site), &good(4));
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 4 }));
    let _five = open_lane(to, Some(&near_site), &good(5));
    let reply = peer.receive();
    row("one lane too many", reply, &["lane-limit"], &["lane 5"]);
    drop(peer);
    receiving.finish(true).0.map(|_| ()).unwrap_err();
}

/// The errors of loading a host's own identity, for either role.
fn load_errors(host: &Host) -> (String, String) {
    let load = |role| {
        let options = LoadOptions {
            role: Some(role),
            ..LoadOptions::default()
        };
        Identity::load(host.directory(), options)
            .unwrap_err()
            .to_string()
    };
    (load(Role::Source), load(Role::Destination))
}

#[test]
fn identities_that_every_peer_would_refuse_are_refused_when_loaded() {
    let mut table = Table::default();
    let site = Site::new();
    let mut row = |name, host: &Host, words: &[&str]| {
        let (source, destination) = load_errors(host);
        let said = Said {
            name,
            source,
            destination,
        };
        table.row(said, words, words);
    };
    let fresh = || site.with(&site.ca.issue(&wish(&[SOURCE])), "");

    let host = fresh();
    set_mode(&host.path("key.pem"), 0o644);
    let words = ["key.pem", "accessible to every user", "0644"];
    row("key readable by all", &host, &words);

    let host = fresh();
    host.put("key.pem", &site.ca.issue(&wish(&[SOURCE])).key);
    set_mode(&host.path("key.pem"), 0o600);
    let words = ["key.pem does not match the certificate", "cert.pem"];
    row("key that does not match", &host, &words);

    for (name, years, words) in [
        ("expired", (2001, 2020), ["cert.pem", "expired on"]),
        (
            "not yet valid",
            (2090, 2096),
            ["cert.pem", "not valid before"],
        ),
    ] {
        let own = site.ca.issue(&Wish {
            years,
            ..wish(&[SOURCE])
        });
        row(name, &site.with(&own, ""), &words);
    }

    let own = site.ca.issue(&wish(&[SOURCE]));
    let list = site.ca.revoke(&[own.serial], 2096);
    let host = Host::new(&own, "", &site.ca.pem, &list);
    row("revoked", &host, &["cert.pem is revoked by its authority"]);

    for (label, mark) in [
        ("ENCRYPTED PRIVATE KEY", ""),
        (
            "RSA PRIVATE KEY",
            "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n",
        ),
    ] {
        let host = fresh();
        host.put(
            "key.pem",
            &format!("-----BEGIN {label}-----\n{mark}AAAA\n-----END {label}-----\n"),
        );
        set_mode(&host.path("key.pem"), 0o600);
        row("encrypted key", &host, &["key.pem is encrypted"]);
    }
}
