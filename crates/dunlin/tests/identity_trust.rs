//! Tests which peers are trusted and authorised: by bundles, pins, names and revocation lists, in
//! every layout of files. Also tests warnings before certificates expire, replaced certificates,
//! and the key exchange.
#![allow(missing_docs, clippy::unwrap_used)]

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use dunlin::engine::destination::DestinationEvent;
use dunlin::lane::handshake::{self, HandshakeError};
use dunlin::lane::identity::{
    Identity, IdentityError, IdentityErrorKind, Item, Layout, LoadOptions, Role, SettingsErrorKind,
    Warning,
};
use dunlin::lane::peers::{AuthorisedBy, Peer, Peers, Pin};
use dunlin::lane::policy::ALPN;
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::Crypto;
use dunlin_proto::control::Message;
use dunlin_proto::negotiate::LaneSecurity;
use dunlin_test_base::Scratch;
use dunlin_test_support::engine::peer::{Peer as ByHand, SESSION, lane_open, open_lane};
use dunlin_test_support::engine::{Receiving, TestBuilder, impatient};
use dunlin_test_support::identity::*;
use dunlin_test_support::lane::*;
use rustls::NamedGroup;

fn near(identity: &Identity, peers: Peers) -> ClientTls {
    identity.client(&Crypto::auto(), peers).unwrap()
}

fn far(identity: &Identity, peers: Peers) -> ServerTls {
    identity.server(&Crypto::auto(), peers).unwrap()
}

/// The reason why the source authorises the destination, and the reason why the destination
/// authorises the source.
fn let_in(near: &ClientTls, far: &ServerTls) -> [AuthorisedBy; 2] {
    let (near, far) = both_ends(near, far);
    [near.unwrap(), far.unwrap()].map(|end| end.peer.authorised_by)
}

fn with_role(host: &Host, role: Role) -> Result<(Identity, Vec<Warning>), IdentityError> {
    let options = LoadOptions {
        role: Some(role),
        ..LoadOptions::default()
    };
    Identity::load(host.directory(), options)
}

#[test]
fn a_bundle_holds_several_authorities_and_chains_may_have_intermediates() {
    let (one, two) = (Ca::root("one"), Ca::root("two"));
    let below = two.under("two below");
    let bundle = format!("one:\n{}\ntwo:\n{}", one.pem, two.pem);
    let source = Host::new(&below.issue(&wish(&[SOURCE])), &below.pem, &bundle, "");
    let destination = Host::new(&one.issue(&wish(&[DESTINATION])), "", &bundle, "");
    let (source, destination) = (source.load(), destination.load());
    assert_eq!(source.summary().unwrap().authorities, 2);
    assert_eq!(
        let_in(
            &near(&source, names(&[DESTINATION])),
            &far(&destination, Peers::AnyFromAuthority)
        ),
        [
            AuthorisedBy::Name(DESTINATION.parse().unwrap()),
            AuthorisedBy::Authority
        ]
    );
}

#[test]
fn a_pin_needs_no_authority_no_name_and_no_bundle() {
    let alone = || Host::new(&self_signed(&wish(&[])), "", "", "");
    let (source, destination) = (alone().load(), alone().load());
    let pin = |identity: &Identity| identity.summary().unwrap().pin;
    let key = |identity: &Identity| identity.summary().unwrap().key_pin.unwrap();
    let of = |pin: Pin| Peers::OneOf(vec![Peer::Pin(pin)]);
    for (of_source, of_destination) in [
        (pin(&source), pin(&destination)),
        (key(&source), key(&destination)),
    ] {
        assert_eq!(
            let_in(
                &near(&source, of(of_destination)),
                &far(&destination, of(of_source))
            ),
            [of_destination, of_source].map(AuthorisedBy::Pin)
        );
    }
    // Names need an authority, even if a pin is given too.
    let both = [Peer::Pin(pin(&source)), SOURCE.parse().unwrap()];
    for peers in [Peers::AnyFromAuthority, both.into_iter().collect()] {
        let error = source.client(&Crypto::auto(), peers.clone()).unwrap_err();
        assert!(
            matches!(error.kind(), SettingsErrorKind::NoAuthority),
            "{error}"
        );
        let error = source.server(&Crypto::auto(), peers).unwrap_err();
        assert!(
            matches!(error.kind(), SettingsErrorKind::NoAuthority),
            "{error}"
        );
    }
}

#[test]
fn a_pinned_peer_and_named_ones_stand_beside_each_other() {
    let ca = Ca::root("site");
    let member = |name| Host::new(&ca.issue(&wish(&[name])), "", &ca.pem, "").load();
    // A self-signed certificate with an allowed name.
    let pretender = Host::new(&self_signed(&wish(&[SOURCE])), "", &ca.pem, "").load();
    let pin = pretender.summary().unwrap().pin;
    let destination = member(DESTINATION);
    let peers = names(&[SOURCE, &pin.to_string()]);
    let there = far(&destination, peers);
    let here = |identity: &Identity| near(identity, names(&[DESTINATION]));
    assert_eq!(let_in(&here(&pretender), &there)[1], AuthorisedBy::Pin(pin));
    assert_eq!(
        let_in(&here(&member(SOURCE)), &there)[1],
        AuthorisedBy::Name(SOURCE.parse().unwrap())
    );
    for stranger in [
        member("other.test"),
        Host::new(&self_signed(&wish(&[SOURCE])), "", &ca.pem, "").load(),
    ] {
        both_ends(&here(&stranger), &there).1.unwrap_err();
    }
}

#[test]
fn a_wildcard_among_the_allowed_names_is_every_host_of_one_domain() {
    let ca = Ca::root("site");
    let member = |name: &str| Host::new(&ca.issue(&wish(&[name])), "", &ca.pem, "").load();
    let there = far(&member(DESTINATION), names(&["*.hosts.test"]));
    for (name, expected) in [
        ("a.hosts.test", true),
        ("*.hosts.test", true),
        ("a.b.hosts.test", false),
        ("hosts.test", false),
        ("a.others.test", false),
    ] {
        let source = near(&member(name), names(&[DESTINATION]));
        assert_eq!(both_ends(&source, &there).1.is_ok(), expected, "{name}");
    }
}

#[test]
fn a_revocation_list_is_for_its_authority_alone() {
    let (one, two) = (Ca::root("one"), Ca::root("two"));
    let bundle = one.pem.clone() + &two.pem;
    let other = one.issue(&wish(&["other.test"]));
    let list = one.revoke(&[other.serial], 2096);
    let destination = Host::new(&one.issue(&wish(&[DESTINATION])), "", &bundle, &list);
    let there = far(&destination.load(), Peers::AnyFromAuthority);
    // Both peers are accepted: the peer from the authority with a revocation list, and the peer
    // from the authority without one.
    for ca in [&one, &two] {
        let source = Host::new(&ca.issue(&wish(&[SOURCE])), "", &bundle, "").load();
        let_in(&near(&source, names(&[DESTINATION])), &there);
    }
    destination.put("ca-crl.pem", "nothing");
    let error = Identity::load(destination.directory(), LoadOptions::default()).unwrap_err();
    assert!(
        matches!(error.kind(), IdentityErrorKind::Nothing { .. }),
        "{error}"
    );
}

/// The files of a host in the layout of QEMU or libvirt, at these paths.
fn as_layout(ca: &Ca, name: &str, paths: [&str; 5]) -> Host {
    let host = Host(Scratch::new());
    let [authorities, revocations, key_directory, client, server] = paths;
    host.put(authorities, &ca.pem);
    host.put(revocations, &ca.revoke(&[1], 2096));
    for (role, for_servers) in [(client, false), (server, true)] {
        let own = ca.issue(&Wish {
            for_clients: !for_servers,
            for_servers,
            ..wish(&[name])
        });
        host.put(role, &own.certificate);
        let file = std::path::Path::new(role).file_name().unwrap();
        let key = file.to_str().unwrap().replace("cert", "key");
        let key = format!("{key_directory}{key}");
        host.put(&key, &own.key);
        set_mode(&host.path(&key), 0o600);
    }
    host
}

const QEMU: [&str; 5] = [
    "ca-cert.pem",
    "ca-crl.pem",
    "",
    "client-cert.pem",
    "server-cert.pem",
];
const LIBVIRT_USER: [&str; 5] = [
    "cacert.pem",
    "cacrl.pem",
    "",
    "clientcert.pem",
    "servercert.pem",
];
const LIBVIRT_SYSTEM: [&str; 5] = [
    "CA/cacert.pem",
    "CA/cacrl.pem",
    "libvirt/private/",
    "libvirt/clientcert.pem",
    "libvirt/servercert.pem",
];

#[test]
fn the_files_of_qemu_cloud_hypervisor_and_libvirt_load_as_they_are() {
    let ca = Ca::root("site");
    for (paths, below, layout) in [
        (QEMU, "", Layout::Qemu),
        (LIBVIRT_USER, "", Layout::Libvirt),
        (LIBVIRT_SYSTEM, "", Layout::Libvirt),
        (LIBVIRT_SYSTEM, "libvirt", Layout::Libvirt),
    ] {
        let (one, two) = (
            as_layout(&ca, SOURCE, paths),
            as_layout(&ca, DESTINATION, paths),
        );
        let load = |host: &Host, role| {
            let options = LoadOptions {
                role,
                ..LoadOptions::default()
            };
            Identity::load(&host.path(below), options)
        };
        assert_eq!(Layout::of(&one.path(below)).unwrap(), layout);
        let (source, warnings) = load(&one, Some(Role::Source)).unwrap();
        assert_eq!(warnings, [], "{paths:?}");
        let (destination, _) = load(&two, Some(Role::Destination)).unwrap();
        for identity in [&source, &destination] {
            let summary = identity.summary().unwrap();
            assert_eq!((summary.authorities, summary.revocation_lists), (1, 1));
        }
        let_in(
            &near(&source, names(&[DESTINATION])),
            &far(&destination, names(&[SOURCE])),
        );
        // This host refuses to use a source's certificate as a destination, before a peer can
        // refuse the certificate.
        let error = source
            .server(&Crypto::auto(), Peers::AnyFromAuthority)
            .unwrap_err();
        assert!(
            matches!(
                error.kind(),
                SettingsErrorKind::Identity(IdentityErrorKind::WrongPurpose { .. })
            ),
            "{error}"
        );
        let error = load(&one, None).unwrap_err();
        assert!(
            matches!(error.kind(), IdentityErrorKind::RoleNeeded { .. }),
            "{error}"
        );
    }
}

#[test]
fn a_directory_that_is_not_clear_is_asked_about() {
    let ca = Ca::root("site");
    let host = as_layout(&ca, SOURCE, QEMU);
    let own = ca.issue(&wish(&["other.test"]));
    host.put("cert.pem", &own.certificate);
    host.put("key.pem", &own.key);
    set_mode(&host.path("key.pem"), 0o600);
    let error = with_role(&host, Role::Source).unwrap_err();
    let IdentityErrorKind::SeveralLayouts { one, other, .. } = error.kind() else {
        panic!("{error}")
    };
    assert_eq!(
        [one, other].map(|layout| layout.to_string()),
        ["dunlin", "qemu"]
    );
    for (layout, name) in [("dunlin", "other.test"), ("cloud-hypervisor", SOURCE)] {
        let options = LoadOptions {
            layout: Some(layout.parse().unwrap()),
            role: Some(Role::Source),
            ..LoadOptions::default()
        };
        let (identity, _) = Identity::load(host.directory(), options).unwrap();
        assert_eq!(identity.summary().unwrap().names, [name.parse().unwrap()]);
    }
    let error = with_role(&Host(Scratch::new()), Role::Source).unwrap_err();
    assert!(
        matches!(error.kind(), IdentityErrorKind::NoLayout { .. }),
        "{error}"
    );
    "windows".parse::<Layout>().unwrap_err();
}

#[test]
fn a_certificate_that_its_own_authorities_would_not_take_is_warned_of() {
    let ca = Ca::root("site");
    let below = ca.under("rack 7");
    let own = below.issue(&wish(&[SOURCE]));
    let host = Host::new(&own, "", &ca.pem, "");
    let (_, warnings) = with_role(&host, Role::Source).unwrap();
    let [Warning::NoChain { issuer, .. }] = &warnings[..] else {
        panic!("{warnings:?}")
    };
    assert_eq!(issuer, "CN=rack 7");
    host.put("cert.pem", &(own.certificate + &below.pem));
    assert_eq!(with_role(&host, Role::Source).unwrap().1, []);
}

#[test]
fn the_end_of_a_validity_is_reported_ahead_of_time() {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let ca = Ca::root("site");
    let own = ca.issue(&wish(&[SOURCE]));
    let host = Host::new(&own, "", &ca.pem, &ca.revoke(&[1], 2090));
    let identity = host.load();
    let dates = identity.dates();
    let items: Vec<_> = dates.iter().map(|date| date.item).collect();
    assert_eq!(
        items,
        [Item::Certificate, Item::Authority, Item::RevocationList]
    );
    let (certificate, list) = (&dates[0], &dates[2]);
    assert!(list.not_after < certificate.not_after);
    assert!(list.path.ends_with("ca-crl.pem") && certificate.until.contains("2096"));
    let at = |now: SystemTime| -> Vec<(Item, Option<u64>)> {
        let warnings = identity.expiring(now).into_iter();
        let expiring = warnings.map(|warning| match warning {
            Warning::Expires { what, days } => (what.item, days),
            other => panic!("{other}"),
        });
        expiring.collect()
    };
    assert_eq!(at(list.not_after - 31 * DAY), []);
    assert_eq!(
        at(list.not_after - 30 * DAY),
        [(Item::RevocationList, Some(30))]
    );
    let expiring = at(certificate.not_after - Duration::from_secs(9));
    for expected in [(Item::Certificate, Some(0)), (Item::RevocationList, None)] {
        assert!(expiring.contains(&expected), "{expiring:?}");
    }

    // The warning begins at the earliest when a third of the certificate's lifetime is left.
    // Otherwise a certificate that is valid for a day would always cause a warning.
    let short = LoadOptions {
        warn_before: 1_000_000 * DAY,
        ..LoadOptions::default()
    };
    let (identity, warnings) = Identity::load(host.directory(), short).unwrap();
    assert_eq!(warnings, []);
    let dates = &identity.dates()[0];
    let lifetime = dates.not_after.duration_since(dates.not_before).unwrap();
    assert!(!identity.expiring(dates.not_after - lifetime / 4).is_empty());
}

#[test]
fn new_certificates_serve_new_handshakes_and_leave_a_session_its_own() {
    let ca = Ca::root("site");
    let issue = || ca.issue(&wish(&[DESTINATION]));
    let host = Host::new(&issue(), "", &ca.pem, "");
    let renewed = || {
        let own = issue();
        host.put("cert.pem", &own.certificate);
        host.put("key.pem", &own.key);
        set_mode(&host.path("key.pem"), 0o600);
        let identity = host.load();
        let fingerprint = identity.summary().unwrap().fingerprint;
        (far(&identity, names(&[SOURCE])), fingerprint)
    };
    let source = Host::new(&ca.issue(&wish(&[SOURCE])), "", &ca.pem, "").load();
    let source = near(&source, names(&[DESTINATION]));
    let seen = |to| {
        let stream = TcpStream::connect(to).unwrap();
        handshake::client(stream, &source, soon())
            .unwrap()
            .peer
            .fingerprint
    };

    let (server, first) = renewed();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let start = || {
        let listener = listener.try_clone().unwrap();
        Receiving::on(listener, &server, &impatient(), TestBuilder::default())
    };
    let receiving = start();
    assert_eq!(seen(receiving.address), first);
    let (next, second) = renewed();
    server.replace(&next);
    // The waiting receiver uses the new certificate.
    assert_eq!(seen(receiving.address), second);

    let (mut session, accept) = ByHand::accepted(receiving.address, &source);
    assert_eq!(session.stream.peer().fingerprint, second);
    let (next, third) = renewed();
    server.replace(&next);
    assert_eq!(
        seen(receiving.address),
        second,
        "the certificate changed during a session"
    );
    let open = lane_open(SESSION, &accept.secret, 1);
    let lane = open_lane(receiving.address, Some(&source), &open);
    assert_eq!(session.receive(), Some(Message::LaneUp { lane: 1 }));
    drop((lane, session));
    receiving.finish(true).0.map(|_| ()).unwrap_err();

    let receiving = start();
    assert_eq!(seen(receiving.address), third);
    let (session, _) = ByHand::source(receiving.address, &source, LaneSecurity::Tls);
    assert_eq!(session.stream.peer().fingerprint, third);
    receiving.await_event(|event| matches!(event, DestinationEvent::Connected { .. }));
    drop(session);
    receiving.finish(true).0.map(|_| ()).unwrap_err();
}

#[test]
fn a_revocation_list_that_is_read_again_holds_from_the_next_handshake_on() {
    let ca = Ca::root("site");
    let own = ca.issue(&wish(&[SOURCE]));
    let source = Host::new(&own, "", &ca.pem, "").load();
    let source = near(&source, names(&[DESTINATION]));
    let host = Host::new(&ca.issue(&wish(&[DESTINATION])), "", &ca.pem, "");
    let server = far(&host.load(), names(&[SOURCE]));
    let_in(&source, &server);
    host.put("ca-crl.pem", &ca.revoke(&[own.serial], 2096));
    let_in(&source, &server);
    server.replace(&far(&host.load(), names(&[SOURCE])));
    let error = both_ends(&source, &server).1.unwrap_err();
    assert!(matches!(error, HandshakeError::Revoked), "{error}");
}

/// Claim N2 of docs/security.
#[test]
fn the_key_exchange_is_hybrid_where_both_can_and_classic_where_one_cannot() {
    let ca = Ca::root("site");
    let source = Host::new(&ca.issue(&wish(&[SOURCE])), "", &ca.pem, "");
    let destination = Host::new(&ca.issue(&wish(&[DESTINATION])), "", &ca.pem, "").load();
    let server = far(&destination, names(&[SOURCE]));
    let (here, there) = both_ends(&near(&source.load(), names(&[DESTINATION])), &server);
    // ring has no ML-KEM, so a build with ring uses the classic key exchange.
    let best = if cfg!(feature = "aws-lc-rs") {
        NamedGroup::X25519MLKEM768
    } else {
        NamedGroup::X25519
    };
    for end in [here, there] {
        assert_eq!(end.unwrap().parameters.group, best);
    }

    let mut classic = careless_client(&source, &[ALPN]);
    let mut provider = Arc::unwrap_or_clone(Crypto::auto().rustls().unwrap());
    provider
        .kx_groups
        .retain(|group| group.name() == NamedGroup::X25519);
    let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyServer))
        .with_no_client_auth();
    config.client_auth_cert_resolver = classic.client_auth_cert_resolver;
    config.alpn_protocols = std::mem::take(&mut classic.alpn_protocols);
    let (stream, accepted) = pair();
    let calling = thread::spawn(move || drive_client(config, stream));
    let secured = handshake::server(accepted, &server, soon()).unwrap();
    assert_eq!(secured.parameters.group, NamedGroup::X25519);
    drop(secured);
    calling.join().unwrap();
}
