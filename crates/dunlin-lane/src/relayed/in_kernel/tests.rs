#![allow(clippy::unwrap_used)]

use super::super::fuzz::halves_without_kernel;
use super::*;

/// The peer asks for a key at half of it, and gets one after all but a call's records of it.
const LIMIT: u64 = 64;

/// Two sides of a connection.
fn pair(version: Version) -> ((Sealing, Opening), (Sealing, Opening)) {
    (
        halves_without_kernel(version),
        halves_without_kernel(version),
    )
}

/// One side's opening half in TLS 1.3.
fn open() -> Opening {
    halves_without_kernel(Version::V1_3).1
}

/// Has the other side take a key update that is due, as it is after the kernel has its next key.
fn renew(sealing: &mut Sealing, opening: &mut Opening) -> bool {
    let Some((content_type, update)) = sealing.renews().unwrap() else {
        return false;
    };
    sealing.records = 0;
    let verdict = opening.judge(content_type, &update).unwrap();
    assert_eq!(verdict, Verdict::Renewed);
    true
}

/// Sends one record of data.
fn data(sealing: &mut Sealing, opening: &mut Opening) {
    sealing.gave(100);
    opening.came(100).unwrap();
}

#[test]
fn a_ticket_in_pieces_is_passed_over_and_data_may_not_come_between_them() {
    let mut ticket = vec![4, 0, 0, 200];
    ticket.resize(204, 9);
    let mut open = open();
    for piece in [&ticket[..1], &ticket[1..100], &ticket[100..]] {
        assert_eq!(open.judge(HANDSHAKE, piece).unwrap(), Verdict::Nothing);
    }
    // Two in one record.
    let two = [&ticket[..], &ticket[..]].concat();
    assert_eq!(open.judge(HANDSHAKE, &two).unwrap(), Verdict::Nothing);
    open.came(4).unwrap();
    open.judge(HANDSHAKE, &ticket[..50]).unwrap();
    let between = open.came(4);
    assert!(matches!(between, Err(RelayError::Late(4))), "{between:?}");
}

#[test]
fn keys_are_renewed_by_their_age_and_when_the_peer_asks() {
    let ((mut near_seal, mut near_open), (mut far_seal, mut far_open)) = pair(Version::V1_3);
    near_seal.renew_after(LIMIT);
    far_seal.renew_after(LIMIT);
    let mut renewals = 0;
    for _ in 0..200 {
        renewals += u32::from(renew(&mut near_seal, &mut far_open));
        data(&mut near_seal, &mut far_open);
    }
    assert_eq!(renewals, 4);
    // The far side asks for a key, although it has nothing to send.
    assert!(far_seal.is_asking());
    assert!(renew(&mut far_seal, &mut near_open));
    assert!(!far_seal.is_asking());
    assert!(
        renew(&mut near_seal, &mut far_open),
        "the near side answers"
    );
    assert!(!renew(&mut far_seal, &mut near_open));
}

/// A peer that has nothing to say has nothing else to ask with.
#[test]
fn asking_for_keys_again_and_again_is_no_flood_where_each_is_answered() {
    let ((mut near_seal, mut near_open), (mut far_seal, mut far_open)) = pair(Version::V1_3);
    near_seal.renew_after(LIMIT);
    far_seal.renew_after(LIMIT);
    let mut asked = 0;
    for _ in 0..10_000 {
        renew(&mut near_seal, &mut far_open);
        data(&mut near_seal, &mut far_open);
        if far_seal.is_asking() {
            asked += 1;
            assert!(renew(&mut far_seal, &mut near_open));
        }
    }
    assert!(asked > 2 * LATE_RUN_LIMIT, "{asked}");
    // Where none is answered they are one.
    let mut flood = Ok(Verdict::Nothing);
    for _ in 0..=2 * LATE_RUN_LIMIT {
        flood = near_open.judge(HANDSHAKE, &[24, 0, 0, 1, 1]);
        if flood.is_err() {
            break;
        }
    }
    assert!(matches!(flood, Err(RelayError::LateRun)), "{flood:?}");
}

/// Java says it before each of its ends.
#[test]
fn a_cancelled_user_is_no_failure_and_the_end_comes_behind_him() {
    let mut open = open();
    assert_eq!(open.judge(ALERT, &[1, 90]).unwrap(), Verdict::Nothing);
    open.came(4).unwrap();
    let mut other = halves_without_kernel(Version::V1_3).0;
    let (content_type, close) = other.closes();
    assert_eq!(open.judge(content_type, &close).unwrap(), Verdict::Closed);
}

/// The peer would take it for a breach, reset the connection, and lose what is on its way here.
#[test]
fn nothing_is_asked_for_behind_the_end() {
    let ((mut near_seal, _), (mut far_seal, mut far_open)) = pair(Version::V1_3);
    far_seal.renew_after(4);
    far_seal.closes();
    for _ in 0..4 {
        data(&mut near_seal, &mut far_open);
    }
    assert!(!far_seal.is_asking());
}

#[test]
fn i7_messages_that_nobody_may_send_end_the_connection() {
    let update = [24, 0, 0, 1, 0];
    for (messages, what) in [
        (&[13, 0, 0, 0][..], "a request for a certificate"),
        (&[24, 0, 0, 1, 2], "an update of no kind"),
        (&[24, 0, 0, 2, 0, 0], "an update that is too long"),
        (&[&update[..], &[4]].concat(), "something behind an update"),
        (&[4, 0, 0x80, 0], "more than is kept"),
        (&[4, 0xff, 0xff, 0xff], "far more"),
        (&[], "nothing at all"),
    ] {
        assert!(open().judge(HANDSHAKE, messages).is_err(), "{what}");
    }
    let mut open = open();
    let ticket = [4, 0, 0, 1, 0];
    for _ in 0..LATE_RUN_LIMIT {
        open.judge(HANDSHAKE, &ticket).unwrap();
    }
    let run = open.judge(HANDSHAKE, &ticket);
    assert!(matches!(run, Err(RelayError::LateRun)), "{run:?}");
}

#[test]
fn tls_1_2_ends_where_its_keys_are_worn() {
    let (mut seal, _) = halves_without_kernel(Version::V1_2);
    assert_eq!(seal.renews().unwrap(), None);
    seal.records = RECORD_LIMIT;
    let refused = seal.renews();
    assert!(matches!(refused, Err(RelayError::Worn)), "{refused:?}");
    assert_eq!(seal.closes().0, ALERT);
}
