//! Keys that this host denies, in any certificate: the file `denied` beside an identity.
//!
//! A revocation list names certificates. It cannot stop an attacker that has stolen a key pinned on
//! this host, because the attacker can sign a new certificate with that key. A denied key is
//! refused in the peer's certificate, in every intermediate that the peer sends, and in the trust
//! anchor.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rustls::pki_types::CertificateDer;

use super::identity::error::IdentityErrorKind;
use super::peers::{Peer, PeerRefused, Pin};

/// The denied keys of one file.
#[derive(Clone, Debug, Default)]
pub(super) struct Denied {
    keys: HashSet<Pin>,
    path: PathBuf,
}

impl Denied {
    /// Parses `text`, the content of the file at `path`. Each line holds the pin of a key
    /// (`spki-sha256:…`); `#` starts a comment.
    ///
    /// # Errors
    /// [`IdentityErrorKind::BadDenied`] with the line number.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Self, IdentityErrorKind> {
        let bad = |line: usize, reason: &'static str| IdentityErrorKind::BadDenied {
            path: path.to_owned(),
            line: line + 1,
            reason,
        };
        let text = std::str::from_utf8(text).map_err(|error| {
            let valid = &text[..error.valid_up_to()];
            let line = valid.iter().filter(|byte| **byte == b'\n').count();
            bad(line, "it is not UTF-8")
        })?;
        let mut keys = HashSet::new();
        for (number, line) in text.lines().enumerate() {
            let pin = line.split('#').next().unwrap_or_default().trim();
            if pin.is_empty() {
                continue;
            }
            match pin.parse() {
                Ok(Peer::Pin(pin @ Pin::Key(_))) => keys.insert(pin),
                Ok(Peer::Pin(Pin::Certificate(_))) => {
                    return Err(bad(
                        number,
                        "it pins a certificate, but a new certificate for the same key would still be accepted",
                    ));
                }
                _ => return Err(bad(number, "it is not the pin of a key")),
            };
        }
        Ok(Self {
            keys,
            path: path.to_owned(),
        })
    }

    /// The number of denied keys.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Checks the keys of all certificates that a peer sent.
    ///
    /// # Errors
    /// [`PeerRefused::Denied`].
    pub(super) fn check(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), PeerRefused> {
        if self.keys.is_empty() {
            return Ok(());
        }
        let leaf = [leaf].into_iter().map(|leaf| (leaf, false));
        let issuers = intermediates.iter().map(|issuer| (issuer, true));
        for (certificate, issuer) in leaf.chain(issuers) {
            // A certificate that cannot be parsed is skipped here. If it is the leaf, the handshake
            // fails later; if it is an intermediate, no chain uses it.
            if let Some(key) = Pin::of_key(certificate).filter(|key| self.keys.contains(key)) {
                return Err(PeerRefused::Denied {
                    key,
                    issuer,
                    list: self.path.clone(),
                });
            }
        }
        Ok(())
    }

    /// Checks the key of the trust anchor.
    ///
    /// # Errors
    /// [`PeerRefused::Denied`].
    pub(super) fn check_authority(&self, key: &[u8; 32]) -> Result<(), PeerRefused> {
        let key = Pin::Key(*key);
        if !self.keys.contains(&key) {
            return Ok(());
        }
        Err(PeerRefused::Denied {
            key,
            issuer: true,
            list: self.path.clone(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const KEY: &str =
        "spki-sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    #[test]
    fn comments_and_empty_lines_deny_nothing() {
        let text = format!("# stolen in May\n\n  {KEY}  # host-c\n{KEY}\n");
        let denied = Denied::parse(Path::new("denied"), text.as_bytes()).unwrap();
        assert_eq!(denied.len(), 1);
        // Editors and tools differ in line ends, letter case and colons, so all these forms are
        // accepted. A colon between only some of the digits is an error.
        let colons = KEY.replacen("0011", "00:11", 1);
        assert!(Denied::parse(Path::new("denied"), colons.as_bytes()).is_err());
        let (prefix, digits) = KEY.split_once(':').unwrap();
        let pairs: Vec<_> = digits.as_bytes().chunks(2).collect();
        let colons = String::from_utf8(pairs.join(&b':')).unwrap();
        for text in [
            format!("{KEY}\r\n"),
            format!("{prefix}:{}", digits.to_uppercase()),
            format!("{prefix}:{colons}"),
        ] {
            let other = Denied::parse(Path::new("denied"), text.as_bytes()).unwrap();
            assert_eq!(other.keys, denied.keys, "{text}");
        }
        let denied = Denied::parse(Path::new("denied"), b"").unwrap();
        assert_eq!(denied.len(), 0);
    }

    #[test]
    fn a_line_without_a_key_is_an_error_with_its_number() {
        let certificate = KEY.replacen("spki-", "", 1);
        let short = &KEY[..KEY.len() - 1];
        let latin = b"# caf\xe9".as_slice();
        let latin_third = b"#\n\n# caf\xe9\n".as_slice();
        for (text, at) in [
            (format!("{KEY}\n{certificate}\n").as_bytes(), 2),
            (format!("#\n\n{short}").as_bytes(), 3),
            (b"host-a.example", 1),
            (latin, 1),
            (latin_third, 3),
        ] {
            match Denied::parse(Path::new("denied"), text) {
                Err(IdentityErrorKind::BadDenied { line, .. }) => assert_eq!(line, at),
                other => panic!("{other:?}"),
            }
        }
    }
}
