//! Fuzz target: records from a relay's peer, after the kernel or this process has opened them.

use dunlin_linux::ktls::Version;
use dunlin_proto::fuzz::Choices;
use rustls::crypto::cipher::{AeadKey, Iv};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

use super::RelayError;
use super::error::{LATE_RUN_LIMIT, MESSAGE_LIMIT_BYTES};
use super::messages::{Opening, Sealing, Verdict, halves};
use crate::internals::handshake::Renewal;
use crate::internals::record::{ALERT, APPLICATION_DATA, EMPTY_RUN_LIMIT, HANDSHAKE};

/// Returns no keys, because this fuzz target has no kernel in which to install them.
struct NoKeys;

impl Renewal for NoKeys {
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        Err(rustls::Error::HandshakeNotComplete)
    }

    fn receiving(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        Err(rustls::Error::HandshakeNotComplete)
    }
}

/// Returns both halves of a connection that is treated as one with kernel TLS. No kernel has its
/// keys.
pub(super) fn halves_without_kernel(version: Version, is_client: bool) -> (Sealing, Opening) {
    let secrets = || ConnectionTrafficSecrets::Aes256Gcm {
        key: AeadKey::from([0; 32]),
        iv: Iv::from([0; 12]),
    };
    let extracted = ExtractedSecrets {
        tx: (0, secrets()),
        rx: (0, secrets()),
    };
    halves(
        &extracted,
        version,
        is_client,
        version == Version::V1_3,
        Box::new(NoKeys),
    )
}

/// A direct implementation of RFC 8446 for the TLS messages in a record. `Ok(Some(_))`: the peer
/// has renewed its key; the value says whether it requests a new key from this side. `Err`: the
/// messages violate the protocol. Adds the number of messages after the first to `late`.
fn messages(
    partial: &mut Vec<u8>,
    content: &[u8],
    is_client: bool,
    late: &mut u32,
) -> Result<Option<bool>, ()> {
    if content.is_empty() {
        return Err(());
    }
    partial.extend_from_slice(content);
    while let [kind, high, middle, low, rest @ ..] = &partial[..] {
        let length = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
        let is_allowed = *kind == 24 || (*kind == 4 && is_client);
        if length > MESSAGE_LIMIT_BYTES || !is_allowed {
            return Err(());
        }
        if rest.len() < length {
            break;
        }
        match (kind, &rest[..length], rest.len() - length) {
            (4, ..) => {}
            (24, [requested @ (0 | 1)], 0) => {
                let requested = *requested == 1;
                partial.clear();
                return Ok(Some(requested));
            }
            _ => return Err(()),
        }
        *late += u32::from(rest.len() > length);
        partial.drain(..length + 4);
    }
    Ok(None)
}

/// Processes any records that an authentic peer may seal. Checks that a close ends the connection,
/// that the direct implementation `messages` finds the same key renewals, and that all other
/// messages use a bounded amount of memory (invariant I7).
pub fn fuzz_relayed(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let choice = choices.byte();
    let (is_1_3, is_client) = (choice & 1 == 0, choice & 2 == 0);
    let version = if is_1_3 { Version::V1_3 } else { Version::V1_2 };
    let (_, mut opening) = halves_without_kernel(version, is_client);
    let mut partial = Vec::new();
    let (mut late, mut empty, mut asked) = (0, 0, false);
    while choices.more() {
        let content_type = match choices.byte() % 8 {
            0 | 1 => APPLICATION_DATA,
            2..=5 => HANDSHAKE,
            6 => ALERT,
            _ => 20,
        };
        let content: Vec<u8> = (0..choices.below(40)).map(|_| choices.byte()).collect();
        if content_type == APPLICATION_DATA {
            let came = if content.is_empty() {
                empty += 1;
                opening.was_empty()
            } else {
                (late, empty) = (0, 0);
                opening.came(content.len())
            };
            let is_bad = empty > EMPTY_RUN_LIMIT || !partial.is_empty();
            assert_eq!(came.is_err(), is_bad, "{came:?}");
            if is_bad {
                return;
            }
            continue;
        }
        late += 1;
        let is_between = is_1_3 && content_type != HANDSHAKE && !partial.is_empty();
        let wanted = match (content_type, &content[..]) {
            _ if is_between => None,
            (ALERT, [_, 0]) => Some(Verdict::Closed),
            (ALERT, [1, _]) if !is_1_3 => Some(Verdict::Nothing),
            (ALERT, [_, 90]) if is_1_3 => Some(Verdict::Nothing),
            (HANDSHAKE, [0, 0, 0, 0]) if !is_1_3 => Some(Verdict::Nothing),
            (HANDSHAKE, content) if is_1_3 => {
                match messages(&mut partial, content, is_client, &mut late) {
                    Ok(Some(requested)) => {
                        // The first request is legitimate. Every further one is not, because this
                        // test never answers a request.
                        if requested && !asked && late <= LATE_RUN_LIMIT {
                            (asked, late) = (true, 0);
                        }
                        Some(Verdict::Renewed)
                    }
                    Ok(None) => Some(Verdict::Nothing),
                    Err(()) => None,
                }
            }
            _ => None,
        };
        let verdict = opening.interpret(content_type, &content);
        assert!(opening.message.len() < 4 + MESSAGE_LIMIT_BYTES);
        match (verdict, wanted) {
            (Ok(Verdict::Closed), Some(Verdict::Closed)) | (Err(_), None) => return,
            (Err(RelayError::LateRun), Some(_)) if late > LATE_RUN_LIMIT => return,
            (Ok(verdict), Some(wanted)) => {
                assert_eq!(verdict, wanted);
                assert!(late <= LATE_RUN_LIMIT, "a flood");
            }
            (verdict, wanted) => panic!("{content_type}: {verdict:?} instead of {wanted:?}"),
        }
    }
}
