#![allow(clippy::unwrap_used)]

use super::*;
use crate::limits::{LANE_MAC_BYTES, SESSION_SECRET_BYTES};
use crate::wire::DecodeReason;

fn offer() -> Offer {
    Offer {
        versions: VERSIONS,
        optional: Features::VERIFY,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session: [7; SESSION_ID_BYTES],
        attempt: 1,
        epoch: 1,
    }
}

fn supported() -> Supported {
    Supported {
        versions: VERSIONS,
        features: Features::VERIFY,
        required: Features::NONE,
        plain_allowed: false,
        ipsec: false,
    }
}

/// A feature unknown to this release.
const FOREIGN: Features = Features::from_bits(1 << 40);

fn encoded(opening: &Opening) -> ([u8; PRELUDE_BYTES], Vec<u8>) {
    let mut bytes = Vec::new();
    opening.encode(&mut bytes).unwrap();
    let (prelude, body) = bytes.split_first_chunk().unwrap();
    (*prelude, body.to_vec())
}

#[test]
fn the_newest_common_version_is_selected() {
    let range = |min, max| VersionRange { min, max };
    for (source, destination, expected) in [
        (range(1, 1), range(1, 1), Some(1)),
        (range(1, 3), range(2, 5), Some(3)),
        (range(2, 5), range(1, 3), Some(3)),
        (range(1, 9), range(4, 4), Some(4)),
        (range(1, 2), range(3, 4), None),
        (range(3, 4), range(1, 2), None),
    ] {
        let offer = Offer {
            versions: source,
            ..offer()
        };
        let supported = Supported {
            versions: destination,
            ..supported()
        };
        let selected = select(&offer, &supported);
        match expected {
            Some(version) => {
                let selection = selected.unwrap();
                assert_eq!(selection.version, version);
                assert_eq!(selection.confirm(&offer), Ok(()));
            }
            None => assert_eq!(selected.unwrap_err().fault, FaultCode::VersionMismatch),
        }
    }
}

#[test]
fn features_that_one_side_lacks_are_left_out_or_refused_by_name() {
    let more = Offer {
        optional: Features::VERIFY.union(FOREIGN),
        ..offer()
    };
    assert_eq!(
        select(&more, &supported()).unwrap().features,
        Features::VERIFY
    );

    let demanding = Offer {
        required: FOREIGN,
        ..offer()
    };
    let refusal = select(&demanding, &supported()).unwrap_err();
    assert_eq!(refusal.fault, FaultCode::FeatureMissing);
    assert!(refusal.text.contains("feature 40"), "{refusal}");

    let less = Offer {
        optional: Features::NONE,
        ..offer()
    };
    let strict = Supported {
        required: Features::VERIFY,
        ..supported()
    };
    let refusal = select(&less, &strict).unwrap_err();
    assert_eq!(refusal.fault, FaultCode::FeatureMissing);
    assert!(refusal.text.contains("verify"), "{refusal}");
}

#[test]
fn i6_plain_lanes_need_both_sides_consent() {
    for (asked, allowed) in [
        (LaneSecurity::Tls, false),
        (LaneSecurity::Tls, true),
        (LaneSecurity::Plain, false),
        (LaneSecurity::Plain, true),
    ] {
        let offer = Offer {
            security: asked,
            ..offer()
        };
        let supported = Supported {
            plain_allowed: allowed,
            ..supported()
        };
        let selected = select(&offer, &supported);
        if asked == LaneSecurity::Plain && !allowed {
            assert_eq!(selected.unwrap_err().fault, FaultCode::SecurityNotAgreed);
        } else {
            assert_eq!(selected.unwrap().security, asked);
        }
    }
}

/// Claim K9 of docs/security.
#[test]
fn i6_lanes_over_ipsec_need_a_destination_that_is_prepared() {
    let offer = Offer {
        security: LaneSecurity::Ipsec,
        ..offer()
    };
    for (ipsec, plain_allowed) in [(false, true), (true, false)] {
        let supported = Supported {
            ipsec,
            plain_allowed,
            ..supported()
        };
        match select(&offer, &supported) {
            Ok(selection) => {
                assert!(ipsec);
                assert_eq!(selection.security, LaneSecurity::Ipsec);
                assert_eq!(selection.confirm(&offer), Ok(()));
            }
            Err(refusal) => {
                assert!(!ipsec);
                assert_eq!(refusal.fault, FaultCode::SecurityNotAgreed);
                assert!(refusal.text.contains("IPsec"), "{refusal}");
            }
        }
    }
}

#[test]
fn i6_a_selection_outside_the_offer_is_rejected() {
    let offer = offer();
    let good = select(&offer, &supported()).unwrap();
    assert_eq!(good.confirm(&offer), Ok(()));
    let plain = Selection {
        security: LaneSecurity::Plain,
        ..good.clone()
    };
    assert!(matches!(
        plain.confirm(&offer),
        Err(NotOffered::Security { .. })
    ));
    let newer = Selection {
        version: 2,
        ..good.clone()
    };
    assert!(matches!(
        newer.confirm(&offer),
        Err(NotOffered::Version { .. })
    ));
    let surplus = Selection {
        features: FOREIGN,
        ..good.clone()
    };
    assert_eq!(surplus.confirm(&offer), Err(NotOffered::Surplus(FOREIGN)));
    let strict = Offer {
        required: Features::VERIFY,
        ..offer
    };
    let without = Selection {
        features: Features::NONE,
        ..good
    };
    assert_eq!(
        without.confirm(&strict),
        Err(NotOffered::Missing(Features::VERIFY))
    );
}

#[test]
fn an_offer_of_a_later_release_can_be_read() {
    let later = Offer {
        versions: VersionRange { min: 1, max: 9 },
        optional: FOREIGN,
        ..offer()
    };
    let (mut prelude, mut body) = encoded(&Opening::Offer(later.clone()));
    // An optional field with tag 77 and two bytes.
    body.extend_from_slice(&[77, 0, 0, 0, 2, 0, 0, 0, 0xaa, 0xbb]);
    prelude[14..16].copy_from_slice(&u16::try_from(body.len()).unwrap().to_le_bytes());
    let header = Prelude::decode(&prelude).unwrap();
    assert_eq!(
        Opening::decode(&header, &body),
        Ok(Opening::Offer(later.clone()))
    );
    assert_eq!(select(&later, &supported()).unwrap().version, 1);

    let flags_at = body.len() - 8;
    body[flags_at] = 1;
    let error = Opening::decode(&header, &body).unwrap_err();
    assert_eq!(error.why, DecodeReason::UnknownRequiredField { tag: 77 });
    assert_eq!(error.fault(), FaultCode::FeatureMissing);
}

#[test]
fn an_unknown_lane_security_is_refused_as_missing_not_as_malformed() {
    let (prelude, mut body) = encoded(&Opening::Offer(offer()));
    body[40] = 4;
    let prelude = Prelude::decode(&prelude).unwrap();
    let error = Opening::decode(&prelude, &body).unwrap_err();
    assert_eq!(error.why, DecodeReason::Unsupported { value: 4 });
    assert_eq!(error.fault(), FaultCode::FeatureMissing);
}

#[test]
fn i7_an_invalid_prelude_is_rejected() {
    let (good, _) = encoded(&Opening::Offer(offer()));
    assert!(Prelude::decode(&good).is_ok());
    // The rejected field, its offset, and the bytes that are written there.
    for (what, at, value) in [
        ("magic", 0, *b"GE"),
        ("opening kind", 8, 0_u16.to_le_bytes()),
        ("opening kind", 8, 5_u16.to_le_bytes()),
        ("versions", 10, 0_u16.to_le_bytes()),
        ("versions", 10, 2_u16.to_le_bytes()),
        ("body length", 14, 4097_u16.to_le_bytes()),
    ] {
        let mut bad = good;
        bad[at..at + 2].copy_from_slice(&value);
        assert_eq!(Prelude::decode(&bad).unwrap_err().what, what);
    }
    // *select* and *lane open* must name exactly one version.
    let mut bad = good;
    bad[8] = 2;
    bad[12] = 2;
    assert_eq!(Prelude::decode(&bad).unwrap_err().what, "versions");
}

#[test]
fn i7_a_lane_open_has_one_length_and_never_lane_zero() {
    let open = LaneOpen {
        version: 1,
        session: [1; 16],
        lane: 9,
        direction: LaneDirection::FromDialer,
        mac: [2; LANE_MAC_BYTES],
    };
    let mut bytes = Vec::new();
    let newer = LaneOpen {
        version: 2,
        ..open.clone()
    };
    newer.encode(&mut bytes).unwrap();
    assert_eq!(bytes.len(), LANE_OPEN_BYTES + 1);
    bytes.clear();
    open.encode(&mut bytes).unwrap();
    assert_eq!(bytes.len(), LANE_OPEN_BYTES);

    let zero = LaneOpen { lane: 0, ..open };
    bytes.clear();
    assert!(zero.encode(&mut bytes).is_err());
    assert!(bytes.is_empty());

    let (mut prelude, mut body) = encoded(&Opening::Lane(LaneOpen { lane: 1, ..zero }));
    body[16] = 0;
    let header = Prelude::decode(&prelude).unwrap();
    assert_eq!(Opening::decode(&header, &body).unwrap_err().what, "lane");
    body[16] = 1;
    body.push(0);
    prelude[14] += 1;
    let header = Prelude::decode(&prelude).unwrap();
    assert_eq!(
        Opening::decode(&header, &body).unwrap_err().why,
        DecodeReason::Trailing { bytes: 1 }
    );
}

#[test]
fn the_lane_proof_covers_session_number_and_direction() {
    use LaneDirection::{FromDialer, ToDialer};
    for (version, direction, end) in [
        (1, FromDialer, &[2, 1][..]),
        (2, FromDialer, &[2, 1, 1]),
        (2, ToDialer, &[2, 1, 2]),
    ] {
        let input = LaneOpen::unproved(version, [3; 16], 0x0102, direction).mac_input();
        assert_eq!(&input[..16], b"dunlin lane open");
        assert_eq!(input[16..32], [3; 16]);
        assert_eq!(&input[32..], end);
    }
}

#[test]
fn i7_a_lane_to_the_dialer_is_named_from_version_2_on() {
    let lane = |version| LaneOpen::unproved(version, [1; 16], 5, LaneDirection::ToDialer);
    let mut bytes = Vec::new();
    assert!(lane(1).encode(&mut bytes).is_err());
    assert!(bytes.is_empty());
    let (prelude, mut body) = encoded(&Opening::Lane(lane(2)));
    let header = Prelude::decode(&prelude).unwrap();
    let decoded = Opening::decode(&header, &body);
    assert_eq!(decoded, Ok(Opening::Lane(lane(2))));
    for direction in [0, 3, 255] {
        body[18] = direction;
        let error = Opening::decode(&header, &body).unwrap_err();
        assert_eq!(error.what, "lane direction");
    }
}

#[test]
fn a_secret_does_not_print() {
    let secret = SessionSecret([0xab; SESSION_SECRET_BYTES]);
    assert_eq!(format!("{secret:?}"), "SessionSecret(..)");
}

#[test]
fn a_refusal_over_its_limit_is_not_written() {
    let refusal = Refusal {
        fault: FaultCode::Internal,
        text: "x".repeat(MAX_TEXT_BYTES + 1),
    };
    let mut bytes = vec![1, 2, 3];
    assert!(refusal.encode(VERSIONS, &mut bytes).is_err());
    assert_eq!(bytes, [1, 2, 3]);
}

#[test]
fn the_longest_refusal_that_select_makes_can_be_sent() {
    let all = Offer {
        required: Features::from_bits(u64::MAX),
        ..offer()
    };
    let refusal = select(&all, &supported()).unwrap_err();
    assert_eq!(refusal.encode(VERSIONS, &mut Vec::new()), Ok(()));
}
