//! Records of the process to which `handoff --fallback process` leaves a connection. They go with
//! that fallback.

use crate::sync::lock;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

use super::RelayError;
use super::in_kernel::{LATE_RUN_LIMIT, MESSAGE_LIMIT_BYTES};
use crate::handshake::Renewal;
use crate::provider::parts;
use crate::provider::{Provider, ProviderError};
use crate::record::{
    ALERT, ALERT_ROOM, APPLICATION_DATA, Alert, Content, EMPTY_RUN_LIMIT, HANDSHAKE, HEADER_BYTES,
    OpenError, OpenHalf, Opened, RECORD_LIMIT, SealError, SealHalf, TAG_BYTES, TRAILER_BYTES,
};
use crate::record12::{Open12, Seal12};

/// A key update (RFC 8446, section 4.6.3) without its one byte.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

/// Makes the next keys of either direction, and remembers who wants some.
struct Keys {
    next: Mutex<Box<dyn Renewal>>,
    provider: Provider,
    /// The peer has asked for ours.
    asked: AtomicBool,
    /// We want the peer's.
    asking: AtomicBool,
    /// Records under one key, in either direction.
    limit: AtomicU64,
}

/// The sending half.
pub struct Sealing {
    seal: Seal,
    keys: Arc<Keys>,
    is_closed: bool,
}

enum Seal {
    V13(SealHalf),
    V12(Seal12),
}

/// The receiving half.
pub struct Opening {
    open: Open,
    keys: Arc<Keys>,
    /// The beginning of a handshake message.
    message: Vec<u8>,
    late_run: u32,
    empty_run: u32,
    asked: bool,
}

enum Open {
    V13(OpenHalf),
    V12(Open12),
}

/// How a record lies in memory.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Bytes before the content.
    pub lead: usize,
    /// Bytes behind it.
    pub trail: usize,
}

/// What a record held.
#[derive(Debug, PartialEq, Eq)]
pub enum Held {
    /// Data, there in the record.
    Data(Range<usize>),
    /// Nothing for whoever is behind the relay.
    Nothing,
    /// The peer's authentic end.
    Closed,
}

/// Both halves, from the keys of a handshake. `is_1_3` tells the version.
pub fn halves(
    secrets: ExtractedSecrets,
    is_1_3: bool,
    provider: Provider,
    next: Box<dyn Renewal>,
) -> Result<(Sealing, Opening), ProviderError> {
    let ((sent, sending), (opened, receiving)) = (secrets.tx, secrets.rx);
    let (seal, open) = if is_1_3 {
        (
            Seal::V13(seal_1_3(provider, &sending, sent)?),
            Open::V13(open_1_3(provider, &receiving, opened)?),
        )
    } else {
        let (suite, key, iv) = parts(&sending)?;
        let seal = Seal12::new(provider, suite, key, iv, sent)?;
        let (suite, key, iv) = parts(&receiving)?;
        let open = Open12::new(provider, suite, key, iv, opened)?;
        (Seal::V12(seal), Open::V12(open))
    };
    Ok(assemble(seal, open, provider, next))
}

fn assemble(
    seal: Seal,
    open: Open,
    provider: Provider,
    next: Box<dyn Renewal>,
) -> (Sealing, Opening) {
    let keys = Arc::new(Keys {
        next: Mutex::new(next),
        provider,
        asked: AtomicBool::new(false),
        asking: AtomicBool::new(false),
        limit: AtomicU64::new(RECORD_LIMIT),
    });
    let opening = Opening {
        open,
        keys: Arc::clone(&keys),
        message: Vec::new(),
        late_run: 0,
        empty_run: 0,
        asked: false,
    };
    let sealing = Sealing {
        seal,
        keys,
        is_closed: false,
    };
    (sealing, opening)
}

fn seal_1_3(
    provider: Provider,
    secrets: &ConnectionTrafficSecrets,
    sequence: u64,
) -> Result<SealHalf, ProviderError> {
    let (suite, key, iv) = parts(secrets)?;
    SealHalf::new(provider, suite, key, iv, sequence)
}

fn open_1_3(
    provider: Provider,
    secrets: &ConnectionTrafficSecrets,
    sequence: u64,
) -> Result<OpenHalf, ProviderError> {
    let (suite, key, iv) = parts(secrets)?;
    OpenHalf::new(provider, suite, key, iv, sequence)
}

fn not_renewed(error: impl ToString) -> RelayError {
    RelayError::Renewal(error.to_string())
}

impl Sealing {
    /// How its records lie in memory.
    pub fn layout(&self) -> Layout {
        match &self.seal {
            Seal::V13(_) => Layout {
                lead: HEADER_BYTES,
                trail: TRAILER_BYTES,
            },
            Seal::V12(seal) => Layout {
                lead: seal.lead(),
                trail: TAG_BYTES,
            },
        }
    }

    /// Seals one record of data in place, laid out as [`Self::layout`] says.
    ///
    /// # Errors
    /// [`RelayError`]; nothing of the record may be sent then.
    pub fn seal(&mut self, record: &mut [u8]) -> Result<(), RelayError> {
        match &mut self.seal {
            Seal::V13(seal) => seal.seal(record).map_err(RelayError::Seal),
            Seal::V12(seal) => seal
                .seal(APPLICATION_DATA, RECORD_LIMIT, record)
                .map_err(|error| match error {
                    SealError::Limit => RelayError::Worn,
                    error => RelayError::Seal(error),
                }),
        }
    }

    /// A key update that must be sent before `records` more, if there is one; what is sealed
    /// behind it is sealed with the new key.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn renewed(&mut self, records: u64) -> Result<Option<Vec<u8>>, RelayError> {
        let Seal::V13(seal) = &mut self.seal else {
            return Ok(None);
        };
        let keys = &self.keys;
        let is_worn = seal.sequence() + records > keys.limit.load(Ordering::Relaxed);
        let asked = keys.asked.swap(false, Ordering::SeqCst);
        let asking = keys.asking.swap(false, Ordering::SeqCst);
        if !(is_worn || asked || asking) {
            return Ok(None);
        }
        let mut record = vec![0; HEADER_BYTES + KEY_UPDATE.len() + 1 + TRAILER_BYTES];
        record[HEADER_BYTES..][..KEY_UPDATE.len()].copy_from_slice(&KEY_UPDATE);
        record[HEADER_BYTES + KEY_UPDATE.len()] = u8::from(asking);
        seal.seal_late(&mut record).map_err(RelayError::Seal)?;
        let mut next = lock(&keys.next);
        let secrets = next.sending().map_err(not_renewed)?;
        *seal = seal_1_3(keys.provider, &secrets, 0).map_err(not_renewed)?;
        Ok(Some(record))
    }

    /// The alert that ends this direction.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn close_notify(&mut self) -> Result<Vec<u8>, RelayError> {
        // Level warning, description close_notify.
        self.alert([1, 0])
    }

    /// The alert that gives the connection up for a reason of our own.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn internal_error(&mut self) -> Result<Vec<u8>, RelayError> {
        // Level fatal, description internal_error.
        self.alert([2, 80])
    }

    fn alert(&mut self, alert: [u8; 2]) -> Result<Vec<u8>, RelayError> {
        self.is_closed = true;
        let sealed = match &mut self.seal {
            Seal::V13(seal) => seal.alert(alert).map(|record| record.to_vec()),
            Seal::V12(seal) => {
                let mut record = vec![0; seal.lead() + 2 + TAG_BYTES];
                record[seal.lead()..][..2].copy_from_slice(&alert);
                let limit = RECORD_LIMIT + ALERT_ROOM;
                seal.seal(ALERT, limit, &mut record).map(|()| record)
            }
        };
        sealed.map_err(RelayError::Seal)
    }
}

impl Opening {
    /// The length of the whole record that begins with `header`, at most
    /// [`RECEIVED_RECORD_BYTES`](super::record::RECEIVED_RECORD_BYTES).
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn record_bytes(&self, header: [u8; HEADER_BYTES]) -> Result<usize, RelayError> {
        let bytes = match &self.open {
            Open::V13(_) => OpenHalf::record_bytes(header)?,
            Open::V12(open) => open.record_bytes(header)?,
        };
        Ok(bytes)
    }

    /// Opens one whole record in place.
    ///
    /// # Errors
    /// [`RelayError`]; nothing behind the record may be looked at then.
    pub fn open(&mut self, record: &mut [u8]) -> Result<Held, RelayError> {
        let held = match &mut self.open {
            Open::V13(open) => match open.open_any(record)? {
                Content::Usual(Opened::Closed) => Held::Closed,
                Content::Usual(Opened::Data(count)) => {
                    let limit = self.keys.limit.load(Ordering::Relaxed);
                    if open.sequence() >= limit / 2 && !self.asked {
                        self.asked = true;
                        self.keys.asking.store(true, Ordering::SeqCst);
                    }
                    Held::Data(HEADER_BYTES..HEADER_BYTES + count)
                }
                // An end follows, or an abort; some programs say it before each end
                // (RFC 8446, section 6.1).
                Content::Canceled => {
                    self.count_late()?;
                    Held::Nothing
                }
                Content::Late(count, _) => {
                    self.late(&record[HEADER_BYTES..][..count])?;
                    Held::Nothing
                }
            },
            Open::V12(open) => {
                let (content_type, at) = open.open(record)?;
                self.older(content_type, record, at)?
            }
        };
        if let Held::Data(at) = &held {
            if !self.message.is_empty() {
                // No message may be interrupted (RFC 8446, section 5.1).
                return Err(RelayError::Late(self.message[0]));
            }
            if !at.is_empty() {
                self.late_run = 0;
            }
        }
        Ok(held)
    }

    fn count_late(&mut self) -> Result<(), RelayError> {
        self.late_run += 1;
        if self.late_run > LATE_RUN_LIMIT {
            return Err(RelayError::LateRun);
        }
        Ok(())
    }

    /// Handshake messages of TLS 1.3: session tickets, which are of no use here, and key updates.
    fn late(&mut self, content: &[u8]) -> Result<(), RelayError> {
        self.count_late()?;
        if content.is_empty() {
            return Err(RelayError::Late(0));
        }
        self.message.extend_from_slice(content);
        loop {
            let [kind, high, middle, low, ..] = self.message[..] else {
                return Ok(());
            };
            let whole = 4 + u32::from_be_bytes([0, high, middle, low]) as usize;
            if whole > MESSAGE_LIMIT_BYTES {
                return Err(RelayError::LateRun);
            }
            if self.message.len() < whole {
                return Ok(());
            }
            match (kind, &self.message[4..whole]) {
                (4, _) => {}
                // Nothing may follow in its record, which the old key has sealed.
                (24, [wish @ (0 | 1)]) if self.message.len() == whole => {
                    // One that comes when the last was answered is no flood: a peer that has
                    // nothing to say asks for our next key in this way alone.
                    if *wish == 1 && !self.keys.asked.swap(true, Ordering::SeqCst) {
                        self.late_run = 0;
                    }
                    self.renew()?;
                }
                _ => return Err(RelayError::Late(kind)),
            }
            self.message.drain(..whole);
        }
    }

    fn renew(&mut self) -> Result<(), RelayError> {
        let keys = &self.keys;
        let mut next = lock(&keys.next);
        let secrets = next.receiving().map_err(not_renewed)?;
        drop(next);
        self.open = Open::V13(open_1_3(keys.provider, &secrets, 0).map_err(not_renewed)?);
        self.asked = false;
        Ok(())
    }

    /// A record of TLS 1.2.
    fn older(
        &mut self,
        content_type: u8,
        record: &[u8],
        at: Range<usize>,
    ) -> Result<Held, RelayError> {
        match (content_type, &record[at.clone()]) {
            (APPLICATION_DATA, content) => {
                self.empty_run = if content.is_empty() {
                    self.empty_run + 1
                } else {
                    0
                };
                if self.empty_run > EMPTY_RUN_LIMIT {
                    return Err(OpenError::EmptyRun.into());
                }
                Ok(Held::Data(at))
            }
            (ALERT, [_, 0]) => Ok(Held::Closed),
            // A warning, such as that of a renegotiation that is not wanted.
            (ALERT, [1, _]) => self.count_late().map(|()| Held::Nothing),
            (ALERT, &[_, alert]) => Err(RelayError::PeerAlert(Alert(alert))),
            (ALERT, _) => Err(OpenError::MalformedAlert.into()),
            // A request to negotiate anew may be ignored (RFC 5246, section 7.4.1.1).
            (HANDSHAKE, [0, 0, 0, 0]) => self.count_late().map(|()| Held::Nothing),
            (HANDSHAKE, content) => {
                let message = content.first().copied().unwrap_or(0);
                Err(RelayError::Late(message))
            }
            (content_type, _) => Err(OpenError::ContentType { content_type }.into()),
        }
    }
}
