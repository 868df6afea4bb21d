#![allow(clippy::unwrap_used)]

use super::super::fuzz::halves_without_kernel;
use super::super::in_kernel::CALL_RECORDS;
use super::*;

/// Maximum number of records that a side seals with one key. The receiver of the records requests
/// a new key after half as many. Without a request, the sender renews its key when the records of
/// one more call could exceed the limit.
const LIMIT: u64 = 64;

/// Returns both sides of a connection.
fn pair(version: Version) -> ((Sealing, Opening), (Sealing, Opening)) {
    (
        halves_without_kernel(version, true),
        halves_without_kernel(version, true),
    )
}

/// Returns one side's receiving half in TLS 1.3.
fn open() -> Opening {
    halves_without_kernel(Version::V1_3, true).1
}

/// Delivers a key update to the other side if one is due. No kernel installs the next key; the test
/// only resets the number of records. Returns whether a key update was due.
fn renew(sealing: &mut Sealing, opening: &mut Opening) -> bool {
    let Some((content_type, update)) = sealing.renews(CALL_RECORDS).unwrap() else {
        return false;
    };
    sealing.records = 0;
    let verdict = opening.interpret(content_type, &update).unwrap();
    assert_eq!(verdict, Verdict::Renewed);
    true
}

/// Sends one record of data.
fn data(sealing: &mut Sealing, opening: &mut Opening) {
    sealing.gave(100);
    opening.came(100).unwrap();
}

#[test]
fn a_split_ticket_is_ignored_and_data_within_it_is_an_error() {
    let mut ticket = vec![4, 0, 0, 200];
    ticket.resize(204, 9);
    let mut open = open();
    for piece in [&ticket[..1], &ticket[1..100], &ticket[100..]] {
        assert_eq!(open.interpret(HANDSHAKE, piece).unwrap(), Verdict::Nothing);
    }
    // Two tickets in one record.
    let two = [&ticket[..], &ticket[..]].concat();
    assert_eq!(open.interpret(HANDSHAKE, &two).unwrap(), Verdict::Nothing);
    open.came(4).unwrap();
    // No other record may come between the parts of a message.
    open.interpret(HANDSHAKE, &ticket[..50]).unwrap();
    for between in [
        open.came(4),
        open.was_empty(),
        open.interpret(ALERT, &[1, 90]).map(|_| ()),
        open.interpret(ALERT, &[1, 0]).map(|_| ()),
    ] {
        assert!(matches!(between, Err(RelayError::Late(4))), "{between:?}");
    }
}

#[test]
fn the_longest_message_is_accepted() {
    let mut open = open();
    let mut ticket = vec![4, 0, 0xff, 0xff];
    ticket.resize(4 + MESSAGE_LIMIT_BYTES, 9);
    for piece in ticket.chunks(CONTENT_BYTES) {
        assert_eq!(open.interpret(HANDSHAKE, piece).unwrap(), Verdict::Nothing);
    }
    open.came(4).unwrap();
}

#[test]
fn i7_a_client_that_sends_a_session_ticket_is_rejected() {
    let (_, mut open) = halves_without_kernel(Version::V1_3, false);
    let ticket = open.interpret(HANDSHAKE, &[4, 0, 0, 1, 0]);
    assert!(matches!(ticket, Err(RelayError::Late(4))), "{ticket:?}");
}

#[test]
fn keys_are_renewed_at_the_limit_and_on_request() {
    let ((mut near_seal, mut near_open), (mut far_seal, mut far_open)) = pair(Version::V1_3);
    near_seal.renew_after(LIMIT);
    far_seal.renew_after(LIMIT);
    let mut renewals = 0;
    for _ in 0..200 {
        renewals += u32::from(renew(&mut near_seal, &mut far_open));
        data(&mut near_seal, &mut far_open);
    }
    assert_eq!(renewals, 4);
    // The far side requests a key, although it has no data to send.
    assert!(far_seal.is_asking());
    assert!(renew(&mut far_seal, &mut near_open));
    assert!(!far_seal.is_asking());
    assert!(
        renew(&mut near_seal, &mut far_open),
        "the near side did not answer"
    );
    assert!(!renew(&mut far_seal, &mut near_open));
}

/// A peer without data to send can request this side's next key only with a key update of its own.
/// This side must accept any number of these updates if it answers each of them.
#[test]
fn answered_key_requests_are_not_a_flood() {
    let (sealing, mut opening) = halves_without_kernel(Version::V1_3, true);
    let request = [24, 0, 0, 1, 1];
    for _ in 0..10 * LATE_RUN_LIMIT {
        let verdict = opening.interpret(HANDSHAKE, &request).unwrap();
        assert_eq!(verdict, Verdict::Renewed);
        let answer = sealing.renews(CALL_RECORDS).unwrap();
        assert_eq!(answer, Some((HANDSHAKE, vec![24, 0, 0, 1, 0])));
    }
    // Unanswered requests are a flood.
    let mut flood = Ok(Verdict::Nothing);
    for _ in 0..=2 * LATE_RUN_LIMIT {
        flood = opening.interpret(HANDSHAKE, &request);
        if flood.is_err() {
            break;
        }
    }
    assert!(matches!(flood, Err(RelayError::LateRun)), "{flood:?}");
}

/// A peer may treat a long sequence of key requests without data as an attack.
#[test]
fn key_requests_without_data_are_limited() {
    let ((mut near_seal, mut near_open), (mut far_seal, mut far_open)) = pair(Version::V1_3);
    far_seal.renew_after(4);
    let mut asked = 0;
    for _ in 0..400 {
        data(&mut near_seal, &mut far_open);
        if far_seal.is_asking() {
            asked += 1;
            assert!(renew(&mut far_seal, &mut near_open));
            assert!(renew(&mut near_seal, &mut far_open));
        }
    }
    assert_eq!(asked, ASKS_LIMIT);
    // After data from this side, requests are sent again.
    data(&mut far_seal, &mut near_open);
    for _ in 0..2 {
        data(&mut near_seal, &mut far_open);
    }
    assert!(far_seal.is_asking());
}

/// Java sends the `user_canceled` alert before every close.
#[test]
fn user_canceled_is_not_an_error_and_the_close_follows() {
    let mut open = open();
    assert_eq!(open.interpret(ALERT, &[1, 90]).unwrap(), Verdict::Nothing);
    open.came(4).unwrap();
    let mut other = halves_without_kernel(Version::V1_3, true).0;
    let (content_type, close) = other.closes();
    assert_eq!(
        open.interpret(content_type, &close).unwrap(),
        Verdict::Closed
    );
}

/// After this side's close, the peer would treat a key request as a violation and reset the
/// connection. A reset discards data in transit.
#[test]
fn no_key_is_requested_after_the_close() {
    let ((mut near_seal, _), (mut far_seal, mut far_open)) = pair(Version::V1_3);
    far_seal.renew_after(4);
    far_seal.closes();
    for _ in 0..4 {
        data(&mut near_seal, &mut far_open);
    }
    assert!(!far_seal.is_asking());
}

#[test]
fn i7_forbidden_messages_end_the_connection() {
    let update = [24, 0, 0, 1, 0];
    for (messages, what) in [
        (&[13, 0, 0, 0][..], "a request for a certificate"),
        (&[24, 0, 0, 1, 2], "an update of no kind"),
        (&[24, 0, 0, 2, 0, 0], "an update that is too long"),
        (&[&update[..], &[4]].concat(), "data after an update"),
        (&[4, 1, 0, 0], "more than the limit"),
        (&[13, 0, 0, 9], "the header of a request for a certificate"),
        (&[4, 0xff, 0xff, 0xff], "far more"),
        (&[], "nothing at all"),
    ] {
        assert!(open().interpret(HANDSHAKE, messages).is_err(), "{what}");
    }
    let mut open = open();
    let ticket = [4, 0, 0, 1, 0];
    for _ in 0..LATE_RUN_LIMIT {
        open.interpret(HANDSHAKE, &ticket).unwrap();
    }
    let run = open.interpret(HANDSHAKE, &ticket);
    assert!(matches!(run, Err(RelayError::LateRun)), "{run:?}");
    // Each message of a record counts.
    let run = self::open().interpret(HANDSHAKE, &ticket.repeat(LATE_RUN_LIMIT as usize + 1));
    assert!(matches!(run, Err(RelayError::LateRun)), "{run:?}");
}

#[test]
fn tls_1_2_ends_at_its_record_limit() {
    let (mut seal, _) = halves_without_kernel(Version::V1_2, true);
    assert_eq!(seal.renews(CALL_RECORDS).unwrap(), None);
    seal.records = RECORD_LIMIT;
    let refused = seal.renews(CALL_RECORDS);
    assert!(matches!(refused, Err(RelayError::UsedUp)), "{refused:?}");
    assert_eq!(seal.closes().0, ALERT);
}
