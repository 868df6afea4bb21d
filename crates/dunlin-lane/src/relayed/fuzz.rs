//! The fuzz entry of a relay's records.

use dunlin_proto::fuzz::Choices;
use rustls::crypto::cipher::{AeadKey, Iv};

use super::*;
use crate::provider::CipherSuite;

/// Keys that follow each other by a number; those with an even one are ours.
struct Numbered {
    sending: u8,
    receiving: u8,
}

fn key(number: u8) -> ([u8; 32], [u8; 12]) {
    ([number; 32], [number; 12])
}

fn secrets(number: u8) -> ConnectionTrafficSecrets {
    let (key, iv) = key(number);
    ConnectionTrafficSecrets::Aes256Gcm {
        key: AeadKey::from(key),
        iv: Iv::from(iv),
    }
}

impl Renewal for Numbered {
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.sending = self.sending.wrapping_add(2);
        Ok(secrets(self.sending))
    }

    fn receiving(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.receiving = self.receiving.wrapping_add(2);
        Ok(secrets(self.receiving))
    }
}

/// A peer that holds the right keys, and says anything under them.
struct Peer {
    provider: Provider,
    key: u8,
    seal: Seal,
}

impl Peer {
    fn new(provider: Provider, is_1_3: bool) -> Self {
        let number = 1;
        let (bytes, iv) = key(number);
        let seal = if is_1_3 {
            Seal::V13(half(provider, number))
        } else {
            let seal = Seal12::new(provider, CipherSuite::Aes256Gcm, &bytes, iv, 0);
            Seal::V12(seal.expect("the key is as long as it has to be"))
        };
        Self {
            provider,
            key: number,
            seal,
        }
    }

    fn seal(&mut self, content_type: u8, content: &[u8]) -> Vec<u8> {
        let (lead, trail) = match &self.seal {
            Seal::V13(_) => (HEADER_BYTES, TRAILER_BYTES),
            Seal::V12(seal) => (seal.lead(), TAG_BYTES),
            Seal::Kernel(_) => unreachable!("no kernel is asked"),
        };
        let mut record = vec![0; lead + content.len() + trail];
        record[lead..lead + content.len()].copy_from_slice(content);
        let sealed = match &mut self.seal {
            Seal::V13(seal) => seal.seal_as(content_type, &mut record),
            Seal::V12(seal) => seal.seal(content_type, RECORD_LIMIT, &mut record),
            Seal::Kernel(_) => unreachable!("no kernel is asked"),
        };
        sealed.expect("it is short, and far from the limit");
        record
    }

    fn renew(&mut self) {
        self.key = self.key.wrapping_add(2);
        self.seal = Seal::V13(half(self.provider, self.key));
    }
}

fn half(provider: Provider, number: u8) -> SealHalf {
    let (key, iv) = key(number);
    SealHalf::new(provider, CipherSuite::Aes256Gcm, &key, iv, 0)
        .expect("the key is as long as it has to be")
}

/// What the messages of TLS itself in a record lead to, read plainly from RFC 8446: that the key is
/// renewed, and whether ours is asked for, or that they break the protocol.
fn messages(begun: &mut Vec<u8>, content: &[u8]) -> Result<Option<bool>, ()> {
    if content.is_empty() {
        return Err(());
    }
    begun.extend_from_slice(content);
    while let [kind, high, middle, low, rest @ ..] = &begun[..] {
        let length = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
        if length + 4 > MESSAGE_LIMIT_BYTES {
            return Err(());
        }
        if rest.len() < length {
            break;
        }
        match (kind, &rest[..length], rest.len() - length) {
            (4, ..) => {}
            (24, [wish @ (0 | 1)], 0) => {
                let wish = *wish == 1;
                begun.clear();
                return Ok(Some(wish));
            }
            _ => return Err(()),
        }
        begun.drain(..length + 4);
    }
    Ok(None)
}

/// Any records that an authentic peer may seal: data comes out as it was, its end is its end,
/// keys are renewed when both sides know it, and what is neither is bounded (I7).
pub fn fuzz_relayed(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let choice = choices.byte();
    let is_1_3 = choice & 1 == 0;
    let providers = Provider::built_in();
    let provider = providers[usize::from(choice >> 1) % providers.len()];
    let extracted = ExtractedSecrets {
        tx: (0, secrets(0)),
        rx: (0, secrets(1)),
    };
    let next = Box::new(Numbered {
        sending: 0,
        receiving: 1,
    });
    let (_, mut opening) =
        halves(extracted, is_1_3, provider, next).expect("the library is built in");
    let mut peer = Peer::new(provider, is_1_3);
    let mut begun = Vec::new();
    let (mut late, mut empty, mut asked) = (0, 0, false);
    while choices.more() {
        let content_type = match choices.byte() % 8 {
            0 | 1 => APPLICATION_DATA,
            2..=5 => HANDSHAKE,
            6 => ALERT,
            _ => 20,
        };
        let content: Vec<u8> = (0..choices.below(40)).map(|_| choices.byte()).collect();
        let mut record = peer.seal(content_type, &content);
        let header = *record.first_chunk().expect("a record has a header");
        let known = opening.record_bytes(header);
        let held = opening.open(&mut record);
        assert!(opening.message.len() <= MESSAGE_LIMIT_BYTES);
        let wanted = match (content_type, &content[..]) {
            (APPLICATION_DATA, _) if !begun.is_empty() => None,
            (APPLICATION_DATA, content) => {
                empty = if content.is_empty() { empty + 1 } else { 0 };
                late = if content.is_empty() { late } else { 0 };
                Some(content)
            }
            (ALERT, [_, 0]) => {
                assert!(matches!(held, Ok(Held::Closed)));
                return;
            }
            (ALERT, [1, _]) if !is_1_3 => {
                late += 1;
                Some(&[][..])
            }
            (ALERT, [_, 90]) if is_1_3 => {
                late += 1;
                Some(&[][..])
            }
            (HANDSHAKE, [0, 0, 0, 0]) if !is_1_3 => {
                late += 1;
                Some(&[][..])
            }
            (HANDSHAKE, content) if is_1_3 => {
                late += 1;
                let renewed = messages(&mut begun, content);
                if let Ok(Some(wish)) = renewed {
                    peer.renew();
                    // The first that is not answered is no flood; here none is ever.
                    if wish && !asked {
                        (asked, late) = (true, 0);
                    }
                }
                renewed.ok().map(|_| &[][..])
            }
            _ => None,
        };
        match (held, wanted) {
            (Ok(Held::Data(at)), Some(content)) if content_type == APPLICATION_DATA => {
                assert_eq!(known.ok(), Some(record.len()));
                assert_eq!(record[at], *content);
            }
            (Ok(Held::Nothing), Some(_)) if content_type != APPLICATION_DATA => {
                assert!(late <= LATE_RUN_LIMIT);
            }
            (Err(_), None) => return,
            (Err(_), Some(_)) if late > LATE_RUN_LIMIT || empty > EMPTY_RUN_LIMIT => return,
            (held, wanted) => panic!("{content_type}: {held:?} instead of {wanted:?}"),
        }
    }
}
