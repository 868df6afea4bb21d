//! The proof that a lane belongs to a session: an HMAC-SHA-256 (RFC 2104). Its key is a secret of
//! the session. The side that admits the lane has sent this secret on the control lane.

use dunlin_proto::limits::LANE_MAC_BYTES;
use dunlin_proto::negotiate::{LaneOpen, SessionSecret};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Computes the proof of a lane; ignores `open.mac`.
pub fn prove(secret: &SessionSecret, open: &LaneOpen) -> [u8; LANE_MAC_BYTES] {
    mac(secret, open).finalize().into_bytes().into()
}

/// Returns whether the lane's proof is valid. Compares in constant time.
pub fn is_proved(secret: &SessionSecret, open: &LaneOpen) -> bool {
    mac(secret, open).verify_slice(&open.mac).is_ok()
}

fn mac(secret: &SessionSecret, open: &LaneOpen) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&secret.0)
        .expect("HMAC takes keys of any length");
    mac.update(&open.mac_input());
    mac
}

#[cfg(test)]
mod tests {
    use dunlin_proto::negotiate::LaneDirection::{FromDialer, ToDialer};

    use super::*;

    const SECRET: SessionSecret = SessionSecret([1; 32]);

    fn proved(version: u16) -> LaneOpen {
        let open = LaneOpen::unproved(version, [2; 16], 3, FromDialer);
        LaneOpen {
            mac: prove(&SECRET, &open),
            ..open
        }
    }

    /// Claim A6 of docs/security.
    #[test]
    fn i7_a_proof_holds_for_its_secret_session_and_lane_only() {
        for open in [proved(1), proved(2)] {
            assert!(is_proved(&SECRET, &open));
            assert!(!is_proved(&SessionSecret([9; 32]), &open));
            let other_lane = LaneOpen {
                lane: 4,
                ..open.clone()
            };
            assert!(!is_proved(&SECRET, &other_lane));
            let other_session = LaneOpen {
                session: [9; 16],
                ..open
            };
            assert!(!is_proved(&SECRET, &other_session));
        }
    }

    /// Claim A12 of docs/security.
    #[test]
    fn i7_a_proof_holds_for_its_direction_and_version_only() {
        let flipped = LaneOpen {
            direction: ToDialer,
            ..proved(2)
        };
        assert!(!is_proved(&SECRET, &flipped));
        for (version, other) in [(1, 2), (2, 1)] {
            let moved = LaneOpen {
                version: other,
                ..proved(version)
            };
            assert!(!is_proved(&SECRET, &moved), "{version} as {other}");
        }
    }
}
