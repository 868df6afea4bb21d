//! A file can have several revocation lists of one authority, for example after a new list was
//! appended. The newest list applies, wherever it is in the file.
#![allow(clippy::unwrap_used)]

use std::thread;

use dunlin_lane::handshake::{self, HandshakeError};
use dunlin_lane::identity::{Identity, Item, LoadOptions};
use dunlin_lane::provider::Crypto;
use dunlin_test_support::identity::{Ca, Host, Issued, wish};
use dunlin_test_support::lane::{DESTINATION, SOURCE, names, pair, soon};

/// Runs a handshake. Returns the destination's error if the destination refuses the source.
fn accept(source: &Identity, destination: &Identity) -> Result<(), HandshakeError> {
    let crypto = Crypto::auto();
    let near = source.client(&crypto, names(&[DESTINATION])).unwrap();
    let far = destination.server(&crypto, names(&[SOURCE])).unwrap();
    let (near_socket, far_socket) = pair();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| handshake::server(far_socket, &far, soon()));
        // The source's handshake ends before the destination verifies the source's certificate.
        let _connected = handshake::client(near_socket, &near, soon());
        accepted.join().unwrap().map(drop)
    })
}

#[test]
fn i6_the_newest_list_of_an_authority_applies() {
    let (ca, other) = (Ca::root("one"), Ca::root("other"));
    let bundle = ca.pem.clone() + &other.pem;
    let issue = || ca.issue(&wish(&[SOURCE]));
    let (revoked, good) = (issue(), issue());
    let load = |own: &Issued| Host::new(own, "", &bundle, "").load();
    let sources = (load(&revoked), load(&good));
    // The old list has expired and does not contain the certificate.
    let old = ca.revoke_in(2010, &[], 2012);
    let new = ca.revoke_in(2024, &[revoked.serial], 2096);
    let others = other.revoke_in(2005, &[], 2095);
    for lists in [
        [&old, &new, &others],
        [&new, &others, &old],
        [&others, &old, &new],
    ] {
        let text: String = lists.map(String::as_str).concat();
        let host = Host::new(&ca.issue(&wish(&[DESTINATION])), "", &bundle, &text);
        let options = LoadOptions::default();
        let (destination, warnings) = Identity::load(host.directory(), options).unwrap();
        let error = accept(&sources.0, &destination).unwrap_err();
        assert!(matches!(error, HandshakeError::Revoked), "{error}");
        accept(&sources.1, &destination).unwrap();
        // There is no warning about the expiry of the replaced list.
        assert!(warnings.is_empty(), "{warnings:?}");
        let dates = destination.dates().iter();
        let lists = dates.filter(|date| date.item == Item::RevocationList);
        let mut until: Vec<_> = lists.map(|date| date.until.clone()).collect();
        until.sort();
        assert!(
            matches!(&until[..], [one, two] if one.contains("2095") && two.contains("2096")),
            "{until:?}"
        );
    }
}
