//! Fuzz targets of the record layer.

use dunlin_proto::fuzz::Choices;
use vm_memory::VolatileSlice;

use super::{
    ALERT, APPLICATION_DATA, Alert, CONTENT_BYTES, EMPTY_RUN_LIMIT, HANDSHAKE, HEADER_BYTES,
    Landed, LateMessage, OVERHEAD_BYTES, OpenError, OpenHalf, Opened, SealHalf, TAG_BYTES,
};
use crate::internals::provider::{CipherSuite, Provider};

/// Returns both halves of a direction, with the library and suite that `choice` selects.
pub fn halves(choice: u8) -> (SealHalf, OpenHalf) {
    let providers = Provider::built_in();
    let provider = providers[usize::from(choice) % providers.len()];
    let suite = CipherSuite::ALL[usize::from(choice / 4) % CipherSuite::ALL.len()];
    let (iv, key) = ([3; 12], &[7; 32][..suite.key_bytes()]);
    let halves = SealHalf::new(provider, suite, key, iv, 0)
        .and_then(|seal| Ok((seal, OpenHalf::new(provider, suite, key, iv, 0)?)));
    halves.expect("the library is built in and the key has the suite's length")
}

/// Passes records over a path that drops, modifies, truncates, extends and repeats them. The
/// receiver may open only what was sealed, in order, and nothing after the first record that was
/// tampered with.
pub fn fuzz_records(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let (mut seal, mut open) = halves(choices.byte());
    let mut tampered = false;
    let mut empty = 0;
    while choices.more() {
        let (kind, value) = (choices.byte(), choices.byte());
        let content = choices.below(2048) as usize;
        let mut record = vec![value; content + OVERHEAD_BYTES];
        seal.seal(&mut record).expect("far below the record limit");
        let at = usize::from(value) * 31 % record.len();
        match kind % 16 {
            // Dropped: the next record has the wrong sequence number.
            0 => {
                tampered = true;
                continue;
            }
            1 => {
                record[at] ^= 1 << (value % 8);
                tampered = true;
            }
            2 => {
                record.truncate(at);
                tampered = true;
            }
            3 => {
                record.push(value);
                tampered = true;
            }
            // Repeated: the second copy has the wrong sequence number.
            4 => {
                let mut first = record.clone();
                let opened = open.open(&mut first);
                assert_eq!(
                    opened.is_ok(),
                    !tampered && (content > 0 || empty < EMPTY_RUN_LIMIT)
                );
                tampered = true;
            }
            _ => {}
        }
        empty = if content == 0 { empty + 1 } else { 0 };
        match open.open(&mut record) {
            Ok(Opened::Data(count)) => {
                assert!(!tampered);
                assert_eq!(count, content);
                assert!(
                    record[HEADER_BYTES..][..count]
                        .iter()
                        .all(|&byte| byte == value)
                );
            }
            Ok(Opened::Closed) => unreachable!("no close was sealed"),
            Err(_) => {
                assert!(tampered || empty > EMPTY_RUN_LIMIT);
                tampered = true;
            }
        }
    }
}

/// Opens an authentic record with any content and padding in three ways: in place, into private
/// memory and into guest memory. Compares the results with a direct implementation of RFC 8446.
pub fn fuzz_record_content(bytes: &[u8]) {
    let Some((&choice, inner)) = bytes.split_first() else {
        return;
    };
    let Some((&last, content)) = inner.split_last() else {
        return;
    };
    let mut sealed = vec![0; HEADER_BYTES + inner.len() + TAG_BYTES];
    sealed[HEADER_BYTES..][..content.len()].copy_from_slice(content);
    let (mut seal, mut open) = halves(choice);
    if seal.seal_as(last, &mut sealed).is_err() {
        assert!(inner.len() > CONTENT_BYTES + 1);
        return;
    }
    let wanted = reference(inner);
    let mut record = sealed.clone();
    let opened = open.open(&mut record);
    assert_eq!(opened, wanted);
    if let Ok(Opened::Data(count)) = opened {
        assert_eq!(record[HEADER_BYTES..][..count], inner[..count]);
    } else {
        assert_eq!(open.open(&mut sealed.clone()), Err(OpenError::Spent));
    }

    let (_, mut open) = halves(choice);
    let mut out = vec![0xee; inner.len()];
    let opened = open.open_into(&mut sealed.clone(), &mut out);
    assert_eq!(opened, wanted);
    if let Ok(Opened::Data(count)) = opened {
        assert_eq!(out[..count], inner[..count]);
    }

    let (_, mut open) = halves(choice);
    if content.is_empty() {
        return;
    }
    // Guest memory in two pieces that ignore page boundaries.
    let mut memory = vec![0xee; content.len()];
    let (left, right) = memory.split_at_mut(usize::from(choice) % content.len());
    let pages = [VolatileSlice::from(left), VolatileSlice::from(right)];
    let pages = if pages[0].is_empty() {
        &pages[1..]
    } else {
        &pages[..]
    };
    let mut record = sealed;
    match open.open_guest(&mut record, pages) {
        Ok(Landed::InGuest) => {
            assert_eq!(wanted, Ok(Opened::Data(content.len())));
            assert_eq!(memory, content);
        }
        Ok(Landed::InRecord(opened)) => {
            assert_eq!(Ok(opened), wanted);
            if let Opened::Data(count) = opened {
                assert_eq!(record[HEADER_BYTES..][..count], inner[..count]);
            }
        }
        Err(error) => assert_eq!(Err(error), wanted),
    }
}

fn reference(inner: &[u8]) -> Result<Opened, OpenError> {
    let Some(end) = inner.iter().rposition(|&byte| byte != 0) else {
        return Err(OpenError::NoContentType);
    };
    match (inner[end], &inner[..end]) {
        (APPLICATION_DATA, content) => Ok(Opened::Data(content.len())),
        (ALERT, [_, 0]) => Ok(Opened::Closed),
        (ALERT, [_, alert]) => Err(OpenError::Alert {
            alert: Alert(*alert),
        }),
        (ALERT, _) => Err(OpenError::MalformedAlert),
        (HANDSHAKE, content) => Err(OpenError::Handshake {
            message: match content.first() {
                Some(4) => LateMessage::NewSessionTicket,
                Some(24) => LateMessage::KeyUpdate,
                other => LateMessage::Other(other.copied().unwrap_or(0)),
            },
        }),
        (content_type, _) => Err(OpenError::ContentType { content_type }),
    }
}
