#![allow(clippy::unwrap_used)]

use rustls::crypto::cipher::{AeadKey, Iv};

use super::*;

/// Keys that follow each other by a number.
struct Numbered(u8, u8);

fn secrets(number: u8) -> ConnectionTrafficSecrets {
    ConnectionTrafficSecrets::Aes256Gcm {
        key: AeadKey::from([number; 32]),
        iv: Iv::from([number; 12]),
    }
}

impl Renewal for Numbered {
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.0 += 2;
        Ok(secrets(self.0))
    }

    fn receiving(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.1 += 2;
        Ok(secrets(self.1))
    }
}

/// One side; what it sends with the key `sends` the other receives.
fn side(sends: u8, receives: u8, is_1_3: bool) -> (Sealing, Opening) {
    let extracted = ExtractedSecrets {
        tx: (0, secrets(sends)),
        rx: (0, secrets(receives)),
    };
    let next = Box::new(Numbered(sends, receives));
    halves(extracted, is_1_3, Provider::built_in()[0], next).unwrap()
}

fn pair(is_1_3: bool) -> ((Sealing, Opening), (Sealing, Opening)) {
    (side(0, 1, is_1_3), side(1, 0, is_1_3))
}

fn sealed(sealing: &mut Sealing, content: &[u8]) -> Vec<u8> {
    let Layout { lead, trail } = sealing.layout();
    let mut record = vec![0; lead + content.len() + trail];
    record[lead..lead + content.len()].copy_from_slice(content);
    sealing.seal(&mut record).unwrap();
    record
}

/// A record of handshake messages.
fn late(sealing: &mut Sealing, content: &[u8]) -> Vec<u8> {
    let mut record = vec![0; HEADER_BYTES + content.len() + TRAILER_BYTES];
    record[HEADER_BYTES..][..content.len()].copy_from_slice(content);
    match &mut sealing.seal {
        Seal::V13(seal) => seal.seal_late(&mut record).unwrap(),
        Seal::V12(_) => panic!("TLS 1.2 has none"),
        Seal::Kernel(_) => panic!("no kernel is asked"),
    }
    record
}

fn opened(opening: &mut Opening, mut record: Vec<u8>) -> Result<Vec<u8>, RelayError> {
    let header = *record.first_chunk().unwrap();
    assert_eq!(opening.record_bytes(header).unwrap(), record.len());
    match opening.open(&mut record)? {
        Held::Data(at) => Ok(record[at].to_vec()),
        Held::Nothing => Ok(b"nothing".to_vec()),
        Held::Closed => Ok(b"closed".to_vec()),
    }
}

#[test]
fn data_and_the_end_come_through_in_both_versions() {
    for is_1_3 in [true, false] {
        let ((mut seal, _), (_, mut open)) = pair(is_1_3);
        for content in [&b"a page"[..], &[7; 16384], b""] {
            let record = sealed(&mut seal, content);
            assert!(opened(&mut open, record).unwrap() == content);
        }
        let close = seal.close_notify().unwrap();
        assert_eq!(opened(&mut open, close).unwrap(), b"closed");
    }
}

#[test]
fn a_ticket_in_pieces_is_passed_over_and_data_may_not_come_between_them() {
    let mut ticket = vec![4, 0, 0, 200];
    ticket.resize(204, 9);
    let ((mut seal, _), (_, mut open)) = pair(true);
    for piece in [&ticket[..1], &ticket[1..100], &ticket[100..]] {
        let record = late(&mut seal, piece);
        assert_eq!(opened(&mut open, record).unwrap(), b"nothing");
    }
    // Two in one record.
    let record = late(&mut seal, &[&ticket[..], &ticket[..]].concat());
    assert_eq!(opened(&mut open, record).unwrap(), b"nothing");
    let record = sealed(&mut seal, b"data");
    assert_eq!(opened(&mut open, record).unwrap(), b"data");
    let record = late(&mut seal, &ticket[..50]);
    opened(&mut open, record).unwrap();
    let record = sealed(&mut seal, b"data");
    let between = opened(&mut open, record);
    assert!(matches!(between, Err(RelayError::Late(4))), "{between:?}");
}

#[test]
fn keys_are_renewed_by_their_age_and_when_the_peer_asks() {
    let ((mut near_seal, mut near_open), (mut far_seal, mut far_open)) = pair(true);
    near_seal.renew_after(8);
    far_seal.renew_after(8);
    let mut renewals = 0;
    for _ in 0..40 {
        if let Some(update) = near_seal.renewed(1).unwrap() {
            renewals += 1;
            assert_eq!(opened(&mut far_open, update).unwrap(), b"nothing");
        }
        let record = sealed(&mut near_seal, b"data");
        assert_eq!(opened(&mut far_open, record).unwrap(), b"data");
    }
    assert_eq!(renewals, 4);
    // The far side has asked for a key, although it had nothing to send.
    assert!(far_seal.is_asking());
    let update = far_seal.renewed(1).unwrap().unwrap();
    assert!(!far_seal.is_asking());
    opened(&mut near_open, update).unwrap();
    let answer = near_seal.renewed(1).unwrap().unwrap();
    opened(&mut far_open, answer).unwrap();
    let record = sealed(&mut near_seal, b"with the next key");
    assert_eq!(opened(&mut far_open, record).unwrap(), b"with the next key");
    let record = sealed(&mut far_seal, b"and back");
    assert_eq!(opened(&mut near_open, record).unwrap(), b"and back");
}

/// A peer that has nothing to say has nothing else to ask with.
#[test]
fn asking_for_keys_again_and_again_is_no_flood_where_each_is_answered() {
    let ((mut near_seal, mut near_open), (mut far_seal, mut far_open)) = pair(true);
    near_seal.renew_after(8);
    far_seal.renew_after(8);
    let mut asked = 0;
    while asked <= 2 * LATE_RUN_LIMIT {
        if let Some(update) = near_seal.renewed(1).unwrap() {
            opened(&mut far_open, update).unwrap();
        }
        let record = sealed(&mut near_seal, b"data");
        opened(&mut far_open, record).unwrap();
        if far_seal.is_asking() {
            asked += 1;
            let update = far_seal.renewed(1).unwrap().unwrap();
            opened(&mut near_open, update).unwrap();
        }
    }
    // Where none is answered they are one.
    let mut flood = Ok(Vec::new());
    for _ in 0..=2 * LATE_RUN_LIMIT {
        far_seal.keys.asking.store(true, Ordering::SeqCst);
        let update = far_seal.renewed(1).unwrap().unwrap();
        flood = opened(&mut near_open, update);
        if flood.is_err() {
            break;
        }
    }
    assert!(matches!(flood, Err(RelayError::LateRun)), "{flood:?}");
}

/// Java says it before each of its ends.
#[test]
fn a_cancelled_user_is_no_failure_and_the_end_comes_behind_him() {
    let ((mut seal, _), (_, mut open)) = pair(true);
    let mut record = vec![0; HEADER_BYTES + 2 + TRAILER_BYTES];
    record[HEADER_BYTES..][..2].copy_from_slice(&[1, 90]);
    match &mut seal.seal {
        Seal::V13(seal) => seal.seal_as(ALERT, &mut record).unwrap(),
        Seal::V12(_) => panic!("a pair of TLS 1.3"),
        Seal::Kernel(_) => panic!("no kernel is asked"),
    }
    assert_eq!(opened(&mut open, record).unwrap(), b"nothing");
    let last = sealed(&mut seal, b"last");
    assert_eq!(opened(&mut open, last).unwrap(), b"last");
    let close = seal.close_notify().unwrap();
    assert_eq!(opened(&mut open, close).unwrap(), b"closed");
}

/// The peer would take it for a breach, reset the connection, and lose what is on its way here.
#[test]
fn nothing_is_asked_for_behind_the_end() {
    let ((mut near_seal, _), (mut far_seal, mut far_open)) = pair(true);
    far_seal.renew_after(4);
    far_seal.close_notify().unwrap();
    for _ in 0..4 {
        let record = sealed(&mut near_seal, b"data");
        opened(&mut far_open, record).unwrap();
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
        let ((mut seal, _), (_, mut open)) = pair(true);
        let record = late(&mut seal, messages);
        assert!(opened(&mut open, record).is_err(), "{what}");
    }
    let ((mut seal, _), (_, mut open)) = pair(true);
    let ticket = [4, 0, 0, 1, 0];
    for _ in 0..LATE_RUN_LIMIT {
        let record = late(&mut seal, &ticket);
        opened(&mut open, record).unwrap();
    }
    let record = late(&mut seal, &ticket);
    let run = opened(&mut open, record);
    assert!(matches!(run, Err(RelayError::LateRun)), "{run:?}");
}

#[test]
fn tls_1_2_ends_where_its_keys_are_worn() {
    let ((mut seal, _), _) = pair(false);
    assert!(seal.renewed(u64::MAX / 2).unwrap().is_none());
    seal.seal = Seal::V12(
        Seal12::new(
            Provider::built_in()[0],
            super::super::provider::CipherSuite::Aes256Gcm,
            &[0; 32],
            [0; 12],
            RECORD_LIMIT,
        )
        .unwrap(),
    );
    let Layout { lead, trail } = seal.layout();
    let refused = seal.seal(&mut vec![0; lead + 1 + trail]);
    assert!(matches!(refused, Err(RelayError::Worn)), "{refused:?}");
    assert!(seal.close_notify().is_ok());
}
