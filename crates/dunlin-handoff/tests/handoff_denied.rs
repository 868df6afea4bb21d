//! Denied keys and revocation lists in hand-offs.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use dunlin_handoff::HandoffError;
use dunlin_handoff::connect::connect;
use dunlin_lane::dial::DialCancel;
use dunlin_lane::handshake::{self, HandshakeError};
use dunlin_lane::peers::PeerRefused;
use dunlin_lane::peers::Peers;
use dunlin_lane::policy::{Bundle, HandoffTls, ServerTls, TrustPolicy};
use dunlin_lane::provider::{Crypto, Offer, Provider, TlsVersion};
use dunlin_proto::fault::FaultCode;
use dunlin_test_support::identity::{Ca, Host, denies, key_pin, wish};
use dunlin_test_support::lane::{DESTINATION, SOURCE, names, soon};

/// Connects as `near`, with the trust policy `trust`, to a server with the settings `served`.
fn outcome(near: &Host, served: &ServerTls, trust: TrustPolicy) -> Result<(), HandoffError> {
    let provider = Provider::built_in()[0];
    let ciphers = "TLS_AES_256_GCM_SHA384";
    let offer = Offer::new(TlsVersion::V1_3, ciphers, "X25519", provider).unwrap();
    let tls = HandoffTls::new(offer, trust, None, Some(&near.load())).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        // The test checks only the client's result. The server's handshake can fail, because it
        // expects a Dunlin client.
        scope.spawn(|| {
            let (accepted, _) = listener.accept().unwrap();
            drop(handshake::server(accepted, served, soon()))
        });
        let cancel = DialCancel::new().unwrap();
        connect("127.0.0.1", port, &tls, soon(), &cancel).map(drop)
    })
}

/// The denied keys of the caller's identity apply under every trust policy: whether the caller
/// trusts the peer's authority, trusts the peer's own certificate in the CA bundle, or does not
/// verify the peer at all.
#[test]
fn i6_a_hand_off_refuses_a_denied_key_under_every_trust_policy() {
    let root = Ca::root("root");
    let below = root.under("rack 9");
    let stolen = below.issue(&wish(&[DESTINATION]));
    let near = Host::new(&root.issue(&wish(&[SOURCE])), "", &root.pem, "");
    let far = Host::new(&stolen, &below.pem, &root.pem, "");
    near.put("authority.pem", &root.pem);
    near.put("itself.pem", &stolen.certificate);
    let bundle = |name: &str| {
        let bundle = Arc::new(Bundle::load(&near.path(name)).unwrap());
        TrustPolicy::Bundle(bundle, names(&[DESTINATION]))
    };
    let served = far
        .load()
        .server(&Crypto::auto(), Peers::AnyFromAuthority)
        .unwrap();
    let outcome = |trust| outcome(&near, &served, trust);
    let policies = || {
        [
            bundle("authority.pem"),
            bundle("itself.pem"),
            TrustPolicy::AnyCertificate,
        ]
    };
    let root = key_pin(&root.pem);
    for (denied, refused) in [
        (None, [false; 3]),
        (Some(key_pin(&stolen.certificate)), [true; 3]),
        (Some(key_pin(&below.pem)), [true; 3]),
        // Only the first policy builds a chain up to the root, so only that policy refuses a denied
        // root.
        (Some(root), [true, false, false]),
    ] {
        denies(&near, denied.as_slice());
        for (trust, refused) in policies().into_iter().zip(refused) {
            let what = format!("{trust:?}, denied {denied:?}");
            match outcome(trust) {
                Ok(()) => assert!(!refused, "{what}"),
                Err(error @ HandoffError::Handshake { .. }) => {
                    assert_eq!(error.code(), FaultCode::Unauthorised, "{what}");
                    let HandoffError::Handshake { source, .. } = error else {
                        unreachable!()
                    };
                    let is_denied = matches!(
                        *source,
                        HandshakeError::Peer(PeerRefused::Denied { key, .. }) if Some(key) == denied
                    );
                    assert!(refused && is_denied, "{what}: {source}");
                }
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
}

/// The revocation lists of the caller's identity apply to the server's certificate under every
/// trust policy, and to its chain if the policy builds one.
#[test]
fn i6_a_hand_off_refuses_a_revoked_server_under_every_trust_policy() {
    let root = Ca::root("root");
    let below = root.under("rack 9");
    let server = below.issue(&wish(&[DESTINATION]));
    let near = Host::new(&root.issue(&wish(&[SOURCE])), "", &root.pem, "");
    let far = Host::new(&server, &below.pem, &root.pem, "");
    near.put("authority.pem", &root.pem);
    near.put("itself.pem", &server.certificate);
    let served = far
        .load()
        .server(&Crypto::auto(), Peers::AnyFromAuthority)
        .unwrap();
    let bundle = |name: &str| {
        let bundle = Arc::new(Bundle::load(&near.path(name)).unwrap());
        TrustPolicy::Bundle(bundle, names(&[DESTINATION]))
    };
    let current = 2099;
    let past = 2025;
    let other = server.serial + 1;
    for (serial, next_update, refused) in [
        (server.serial, current, [true; 3]),
        (other, current, [false; 3]),
        // Only the first policy builds a chain, so only that policy requires a current list.
        (other, past, [true, false, false]),
    ] {
        near.put("ca-crl.pem", &below.revoke(&[serial], next_update));
        let policies = [
            bundle("authority.pem"),
            bundle("itself.pem"),
            TrustPolicy::AnyCertificate,
        ];
        for (trust, refused) in policies.into_iter().zip(refused) {
            let what = format!("{trust:?}, {serial} revoked until {next_update}");
            match outcome(&near, &served, trust) {
                Ok(()) => assert!(!refused, "{what}"),
                Err(HandoffError::Handshake { source, .. }) => {
                    let is_revocation = match next_update {
                        2099 => matches!(*source, HandshakeError::Revoked),
                        _ => matches!(*source, HandshakeError::RevocationListOutdated { .. }),
                    };
                    assert!(refused && is_revocation, "{what}: {source}");
                }
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
}
