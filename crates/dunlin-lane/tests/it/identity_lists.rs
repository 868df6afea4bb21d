//! Several revocation lists of one authority in a file, as where the new one is added to the old:
//! the newest counts, wherever it stands.
#![allow(clippy::unwrap_used)]

use std::thread;

use dunlin_lane::handshake;
use dunlin_lane::identity::{Identity, Item, LoadOptions};
use dunlin_lane::provider::Crypto;
use dunlin_test_support::identity::{Ca, Host, Issued, wish};
use dunlin_test_support::lane::{DESTINATION, SOURCE, names, pair, soon};

/// Whether a destination lets a source in; what it says if not.
fn let_in(source: &Identity, destination: &Identity) -> Result<(), String> {
    let crypto = Crypto::auto();
    let near = source.client(&crypto, names(&[DESTINATION])).unwrap();
    let far = destination.server(&crypto, names(&[SOURCE])).unwrap();
    let (near_socket, far_socket) = pair();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| handshake::server(far_socket, &far, soon()));
        // It is done before the destination has looked at its certificate.
        let _connected = handshake::client(near_socket, &near, soon());
        let accepted = accepted.join().unwrap();
        accepted.map(drop).map_err(|error| error.to_string())
    })
}

#[test]
fn i6_of_several_lists_of_an_authority_the_newest_counts() {
    let (ca, other) = (Ca::root("one"), Ca::root("other"));
    let bundle = ca.pem.clone() + &other.pem;
    let issue = || ca.issue(&wish(&[SOURCE]));
    let (revoked, good) = (issue(), issue());
    let load = |own: &Issued| Host::new(own, "", &bundle, "").load();
    let sources = (load(&revoked), load(&good));
    // The old one knew nothing of it, and is long past its time.
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
        let why = let_in(&sources.0, &destination).unwrap_err();
        assert!(why.contains("revoked"), "{why}");
        assert_eq!(let_in(&sources.1, &destination), Ok(()));
        // Nor is anybody warned of the end of what was replaced.
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
