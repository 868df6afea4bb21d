//! The proof that a lane belongs to a session: an HMAC-SHA-256 (RFC 2104) keyed with the secret
//! that the destination issues on the control lane.

use dunlin_proto::limits::LANE_MAC_BYTES;
use dunlin_proto::negotiate::{LaneOpen, SessionId, SessionSecret, lane_mac_input};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Computes the proof of a lane.
pub fn prove(secret: &SessionSecret, session: &SessionId, lane: u16) -> [u8; LANE_MAC_BYTES] {
    mac(secret, session, lane).finalize().into_bytes().into()
}

/// Returns whether the lane's proof is valid. Compares in constant time.
pub fn is_proved(secret: &SessionSecret, open: &LaneOpen) -> bool {
    mac(secret, &open.session, open.lane)
        .verify_slice(&open.mac)
        .is_ok()
}

fn mac(secret: &SessionSecret, session: &SessionId, lane: u16) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&secret.0)
        .expect("HMAC takes keys of any length");
    mac.update(&lane_mac_input(session, lane));
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Claim A6 of docs/security.
    #[test]
    fn i7_a_proof_holds_for_its_secret_session_and_lane_only() {
        let secret = SessionSecret([1; 32]);
        let open = LaneOpen {
            version: 1,
            session: [2; 16],
            lane: 3,
            mac: prove(&secret, &[2; 16], 3),
        };
        assert!(is_proved(&secret, &open));
        assert!(!is_proved(&SessionSecret([9; 32]), &open));
        let other_lane = LaneOpen {
            lane: 4,
            ..open.clone()
        };
        assert!(!is_proved(&secret, &other_lane));
        let other_session = LaneOpen {
            session: [9; 16],
            ..open
        };
        assert!(!is_proved(&secret, &other_session));
    }
}
