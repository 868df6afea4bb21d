//! A revocation applies whether or not the peer sends the intermediate certificate, and a denied
//! key is refused in every certificate. Both rules apply to control lanes and data lanes, in either
//! role.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::thread;

use dunlin_lane::control;
use dunlin_lane::handshake::{self, HandshakeError};
use dunlin_lane::identity::{DENIED_FILE, Dated, Identity, IdentityErrorKind, Item, LoadOptions};
use dunlin_lane::peers::{PeerRefused, Peers, Pin};
use dunlin_lane::provider::Crypto;
use dunlin_test_support::identity::{Ca, Host, Issued, chain, denies, key_pin, self_signed, wish};
use dunlin_test_support::lane::{DESTINATION, SOURCE, names, pair, set_mode, soon};
use rcgen::CrlScope;

/// Runs four handshakes between the hosts `judge` and `peer`: for a control lane and for a data
/// lane, each with either host as the client. Returns for each handshake the error of `judge`, or
/// `None` if `judge` accepts the peer. Each of the two hosts has one identity for both roles.
fn verdicts(judge: &Host, allowed: &Peers, peer: &Host) -> Vec<Option<HandshakeError>> {
    let crypto = Crypto::auto();
    let (ours, theirs) = (judge.load(), peer.load());
    let anyone = Peers::AnyFromAuthority;
    let mut verdicts = Vec::new();
    for judge_connects in [true, false] {
        for is_control in [true, false] {
            let (near, far) = pair();
            let (client, server) = if judge_connects {
                (
                    ours.client(&crypto, allowed.clone()),
                    theirs.server(&crypto, anyone.clone()),
                )
            } else {
                (
                    theirs.client(&crypto, anyone.clone()),
                    ours.server(&crypto, allowed.clone()),
                )
            };
            let (client, server) = (client.unwrap(), server.unwrap());
            let (connected, accepted) = thread::scope(|scope| {
                let accepting = scope.spawn(|| match is_control {
                    true => control::server(far, &server, soon()).err(),
                    false => handshake::server(far, &server, soon()).err(),
                });
                let connected = match is_control {
                    true => control::client(near, &client, soon()).err(),
                    false => handshake::client(near, &client, soon()).err(),
                };
                (connected, accepting.join().unwrap())
            });
            verdicts.push(if judge_connects { connected } else { accepted });
        }
    }
    verdicts
}

fn assert_all(
    verdicts: &[Option<HandshakeError>],
    what: &str,
    fits: impl Fn(&Option<HandshakeError>) -> bool,
) {
    assert_eq!(verdicts.len(), 4);
    assert!(verdicts.iter().all(fits), "{what}: {verdicts:?}");
}

fn is_revoked(verdict: &Option<HandshakeError>) -> bool {
    matches!(verdict, Some(HandshakeError::Revoked))
}

/// Both kinds of pin for a certificate.
fn pins(host: &Host) -> [Peers; 2] {
    let leaf = &chain(host)[0];
    let pins = [Pin::of_certificate(leaf), Pin::of_key(leaf).unwrap()];
    pins.map(|pin| names(&[&pin.to_string()]))
}

/// A peer that was admitted before a reload is checked again with its chain.
#[test]
fn i6_an_admitted_peer_needs_a_chain_that_is_valid_now() {
    let (root, other) = (Ca::root("root"), Ca::root("other"));
    let below = root.under("rack 9");
    let peer = Host::new(&below.issue(&wish(&[SOURCE])), &below.pem, &root.pem, "");
    let own = root.issue(&wish(&[DESTINATION]));
    let judge = |authorities: &str, lists: &str| Host::new(&own, "", authorities, lists).load();
    let admitted = |allowed: Peers| {
        let crypto = Crypto::auto();
        let client = peer.load().client(&crypto, Peers::AnyFromAuthority);
        let server = judge(&root.pem, "").server(&crypto, allowed).unwrap();
        let (near, far) = pair();
        let accepting = thread::spawn(move || control::server(far, &server, soon()).unwrap());
        let _near = control::client(near, &client.unwrap(), soon()).unwrap();
        accepting.join().unwrap().peer().clone()
    };
    let by_name = admitted(names(&[SOURCE]));
    let revoked = judge(&root.pem, &root.revoke(&[below.serial], 2096));
    let another = judge(&root.pem, &root.revoke(&[below.serial + 1000], 2096));
    let removed = judge(&other.pem, "");
    assert_eq!(another.check_peer_chain(&by_name), Ok(()));
    let refused = revoked.check_peer_chain(&by_name);
    assert_eq!(refused, Err(PeerRefused::Revoked));
    let refused = removed.check_peer_chain(&by_name);
    assert!(matches!(refused, Err(PeerRefused::Uncertified { .. })));
    // A pinned peer needs no authority, but its chain must not be revoked.
    for pin in pins(&peer) {
        let pinned = admitted(pin);
        assert_eq!(removed.check_peer_chain(&pinned), Ok(()));
        let refused = revoked.check_peer_chain(&pinned);
        assert_eq!(refused, Err(PeerRefused::Revoked));
    }
}

/// Claim A11 of docs/security.
#[test]
fn i6_a_pinned_certificate_that_is_revoked_is_refused_with_and_without_its_intermediate() {
    let root = Ca::root("root");
    let below = root.under("rack 9");
    let (bad, good) = (below.issue(&wish(&[SOURCE])), below.issue(&wish(&[SOURCE])));
    let own = root.issue(&wish(&[DESTINATION]));
    // A list of the intermediate authority, a list of the root for another serial number, and an
    // outdated list.
    let lists = below.revoke(&[bad.serial], 2096) + &root.revoke(&[good.serial], 2096);
    let outdated = below.revoke(&[bad.serial], 2025);
    let trusting = root.pem.clone();
    let sent: [(&str, &str); 2] = [("with it", &below.pem), ("withheld", "")];
    for (lists, name) in [(lists, "in force"), (outdated, "out of date")] {
        let judge = Host::new(&own, "", &trusting, &lists);
        for (how, intermediate) in sent {
            let peer = Host::new(&bad, intermediate, &trusting, "");
            for allowed in pins(&peer) {
                let what = format!("{allowed:?}, the list {name}, the intermediate {how}");
                assert_all(&verdicts(&judge, &allowed, &peer), &what, is_revoked);
            }
            let peer = Host::new(&good, intermediate, &trusting, "");
            for allowed in pins(&peer) {
                let what = format!("another serial number, the list {name}, {how}");
                assert_all(&verdicts(&judge, &allowed, &peer), &what, Option::is_none);
            }
        }
    }
    // A newer list with the same issuer name may belong to another key, namely that of a renewed
    // authority.
    let renewed = Ca::root("rack 9");
    let lists = below.revoke_in(2023, &[bad.serial], 2096) + &renewed.revoke_in(2024, &[], 2096);
    let judge = Host::new(&own, "", &(trusting.clone() + &renewed.pem), &lists);
    for intermediate in [&*below.pem, ""] {
        let peer = Host::new(&bad, intermediate, &trusting, "");
        for allowed in pins(&peer) {
            assert_all(&verdicts(&judge, &allowed, &peer), "renewed", is_revoked);
        }
    }
    // For a pinned certificate, the list of an authority that this host does not trust applies too.
    let stranger = Ca::root("stranger");
    let bad = stranger.issue(&wish(&[SOURCE]));
    let judge = Host::new(&own, "", &trusting, &stranger.revoke(&[bad.serial], 2096));
    let peer = Host::new(&bad, "", &trusting, "");
    for allowed in pins(&peer) {
        assert_all(
            &verdicts(&judge, &allowed, &peer),
            "a stranger's",
            is_revoked,
        );
    }
}

/// An authority may have several revocation lists, each for one kind of certificate or one
/// distribution point. A certificate that any of these lists contains is refused. The expiry date
/// of a list is ignored only if a newer list has the same scope.
#[test]
fn i6_a_list_of_one_scope_neither_hides_nor_replaces_one_of_another() {
    use CrlScope::{CaCertsOnly, UserCertsOnly};
    let root = Ca::root("root");
    let below = root.under("rack 9");
    let bad = below.issue(&wish(&[SOURCE]));
    let own = root.issue(&wish(&[DESTINATION]));
    let list =
        |year, serials: &[u64], at, scope| below.revoke_for(year, serials, 2096, Some((at, scope)));
    let (here, there) = ("http://lists.test/1", "http://lists.test/2");
    for (name, lists) in [
        (
            "a newer one for authorities",
            list(2024, &[], here, CaCertsOnly) + &below.revoke_in(2023, &[bad.serial], 2096),
        ),
        (
            "a newer one of another distribution point",
            list(2023, &[bad.serial], here, UserCertsOnly) + &list(2024, &[], there, UserCertsOnly),
        ),
        (
            "a newer one without a scope",
            below.revoke_in(2024, &[], 2096) + &list(2023, &[bad.serial], here, UserCertsOnly),
        ),
        (
            "a newer one of the same scope",
            list(2023, &[bad.serial], here, UserCertsOnly) + &list(2024, &[], here, UserCertsOnly),
        ),
        (
            "an older one of the same scope",
            list(2024, &[bad.serial], here, UserCertsOnly) + &list(2023, &[], here, UserCertsOnly),
        ),
    ] {
        let judge = Host::new(&own, "", &root.pem, &lists);
        for intermediate in [&*below.pem, ""] {
            let peer = Host::new(&bad, intermediate, &root.pem, "");
            for allowed in pins(&peer) {
                assert_all(&verdicts(&judge, &allowed, &peer), name, is_revoked);
            }
        }
        let dates = judge.load().dates().to_vec();
        let is_list = |date: &&Dated| date.item == Item::RevocationList;
        // The expiry date of a list is reported unless a newer list replaces it.
        let dated = dates.iter().filter(is_list).count();
        assert_eq!(
            dated,
            if name.ends_with("same scope") { 1 } else { 2 },
            "{name}"
        );
    }
}

/// Claim A11 of docs/security.
#[test]
fn i6_a_denied_key_is_refused_in_every_certificate_and_as_an_issuer() {
    let root = Ca::root("root");
    let below = root.under("rack 9");
    let own = root.issue(&wish(&[DESTINATION]));
    let stolen = root.issue(&wish(&[SOURCE]));
    let judge = Host::new(&own, "", &root.pem, "");
    let denied = key_pin(&stolen.certificate);
    // An attacker signs a new certificate with the stolen key; no revocation list can contain it.
    let fresh = resigned(&stolen);
    let by_name = Host::new(&stolen, "", &root.pem, "");
    let by_pin = Host::new(&fresh, "", &root.pem, "");
    let issued_below = Host::new(&below.issue(&wish(&[SOURCE])), &below.pem, &root.pem, "");
    let [_, key] = pins(&by_pin);
    let cases = [
        ("by name", names(&[SOURCE]), &by_name, false),
        ("by the authority", Peers::AnyFromAuthority, &by_name, false),
        ("by its pinned key", key, &by_pin, false),
        (
            "under an intermediate",
            names(&[SOURCE]),
            &issued_below,
            true,
        ),
        (
            "pinned, under an intermediate",
            pins(&issued_below)[0].clone(),
            &issued_below,
            true,
        ),
    ];
    for (what, allowed, peer, _) in &cases {
        assert_all(&verdicts(&judge, allowed, peer), what, Option::is_none);
    }
    let below = key_pin(&below.pem);
    denies(&judge, &[denied, below]);
    assert_eq!(judge.load().summary().unwrap().denied_keys, 2);
    for (what, allowed, peer, is_issuer) in &cases {
        let wanted = if *is_issuer { below } else { denied };
        assert_all(&verdicts(&judge, allowed, peer), what, |verdict| {
            matches!(
                verdict,
                Some(HandshakeError::Peer(PeerRefused::Denied { key, issuer, list }))
                    if *key == wanted && issuer == is_issuer && *list == judge.path(DENIED_FILE)
            )
        });
    }
    // The key of the root authority is denied, although the peer does not send the root's
    // certificate.
    denies(&judge, &[key_pin(&root.pem)]);
    let verdicts_of_named = verdicts(&judge, &names(&[SOURCE]), &by_name);
    assert_all(&verdicts_of_named, "a denied root", |verdict| {
        matches!(
            verdict,
            Some(HandshakeError::Peer(PeerRefused::Denied {
                issuer: true,
                ..
            }))
        )
    });
    // After a reload without denied keys, all peers are accepted again.
    denies(&judge, &[]);
    for (what, allowed, peer, _) in &cases {
        assert_all(&verdicts(&judge, allowed, peer), what, Option::is_none);
    }
}

/// A self-signed certificate for the same key, with another name.
fn resigned(stolen: &Issued) -> Issued {
    let key = rcgen::KeyPair::from_pem(&stolen.key).unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["fresh.test".into()]).unwrap();
    params.not_after = rcgen::date_time_ymd(2096, 1, 1);
    Issued {
        certificate: params.self_signed(&key).unwrap().pem(),
        key: stolen.key.clone(),
        serial: 0,
    }
}

#[test]
fn i6_an_unreadable_list_of_denied_keys_is_an_error() {
    let root = Ca::root("root");
    let host = Host::new(&root.issue(&wish(&[SOURCE])), "", &root.pem, "");
    let load = || Identity::load(host.directory(), LoadOptions::default());
    host.put(DENIED_FILE, "spki-sha256:00\n");
    assert!(matches!(
        load().unwrap_err().kind(),
        IdentityErrorKind::BadDenied { line: 1, .. }
    ));
    host.put(DENIED_FILE, "");
    std::os::unix::fs::symlink("nowhere", host.path(DENIED_FILE)).unwrap();
    assert!(matches!(
        load().unwrap_err().kind(),
        IdentityErrorKind::Unreadable { .. }
    ));
    fs::remove_file(host.path(DENIED_FILE)).unwrap();
    assert_eq!(load().unwrap().0.summary().unwrap().denied_keys, 0);
    // A malformed list of denied keys is an error in the directory layouts of QEMU and libvirt too.
    let own = self_signed(&wish(&[SOURCE]));
    for (certificate, key) in [
        ("server-cert.pem", "server-key.pem"),
        ("servercert.pem", "serverkey.pem"),
    ] {
        let host = Host(dunlin_test_base::Scratch::new());
        host.put(certificate, &own.certificate);
        host.put(key, &own.key);
        set_mode(&host.path(key), 0o600);
        host.put(DENIED_FILE, "rubbish");
        let options = LoadOptions {
            role: Some(dunlin_lane::identity::Role::Destination),
            ..LoadOptions::default()
        };
        let error = Identity::load(host.directory(), options).unwrap_err();
        assert!(
            matches!(error.kind(), IdentityErrorKind::BadDenied { .. }),
            "{error}"
        );
    }
}
