//! Fuzz target: certificates that peers present. Also a constructor of peers for tests.

use rustls::pki_types::CertificateDer;

use super::{AuthorisedBy, Peer, PeerIdentity, Peers};
use crate::internals::names::PeerName;

impl PeerIdentity {
    /// A peer for tests that compare peers.
    pub fn test(authorised_by: AuthorisedBy, authority: u8, names: &[&str]) -> Self {
        let name = |name: &&str| PeerName::Dns((*name).to_owned());
        Self {
            fingerprint: [0; 32],
            names: names.iter().map(name).collect(),
            authorised_by,
            authority: Some([authority; 32]),
            leaf: CertificateDer::from(Vec::new()),
            intermediates: Vec::new(),
        }
    }
}

/// Checks for any certificate that only listed peers are admitted, and that text printed about it
/// contains no control characters.
pub fn fuzz_certificate(bytes: &[u8]) {
    let leaf = CertificateDer::from(bytes);
    let allowed = PeerName::Dns("source.test".to_owned());
    let known = Peers::OneOf(vec![Peer::Name(allowed.clone())]);
    let text = match known.authorise(&leaf) {
        Ok(by) => {
            assert_eq!(by, AuthorisedBy::Name(allowed));
            let needle = b".test";
            assert!(
                bytes
                    .windows(needle.len())
                    .any(|part| part.eq_ignore_ascii_case(needle))
            );
            PeerIdentity::of(&leaf, &[], by, None).to_string()
        }
        Err(refused) => refused.to_string(),
    };
    assert!(!text.chars().any(char::is_control), "{text:?}");
}
