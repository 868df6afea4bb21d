//! Handles TLS's own messages on a relay's connection after the handshake, and decides when keys
//! are renewed. The records are sealed and opened elsewhere: by the kernel or in the module
//! `records`.
//!
//! In TLS 1.3 the peer may send session tickets, renew its keys and request new keys from this side
//! (RFC 8446, section 4.6). This side also renews keys that reach their record limit, because a
//! relay's connection cannot be replaced. TLS 1.2 cannot renew keys, so its connections end at the
//! record limit.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dunlin_linux::ktls::Version;
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

use super::error::{LATE_RUN_LIMIT, MESSAGE_LIMIT_BYTES, RelayError};
use crate::internals::handshake::Renewal;
use crate::internals::kernel::CANNOT_RENEW;
use crate::internals::record::{
    ALERT, Alert, CONTENT_BYTES, Content, EMPTY_RUN_LIMIT, HANDSHAKE, OpenError, RECORD_LIMIT,
};
use crate::internals::sync::lock;

/// A record that is not data: content type and content.
pub type Control = (u8, Vec<u8>);

/// The `user_canceled` alert, a warning.
const USER_CANCELED: Alert = Alert(90);
/// Maximum number of requests for the peer's next key in a row, without data from this side between
/// them. A peer may treat more requests in a row as an attack: rustls does so at 33 requests, Go's
/// crypto/tls at 17.
pub(super) const ASKS_LIMIT: u32 = 16;

/// Derives the next keys of both directions, and tracks which side requested renewal.
struct Keys {
    next: Mutex<Box<dyn Renewal>>,
    is_1_3: bool,
    /// Whether keys can be replaced, which some kernels cannot do.
    renews: bool,
    /// Whether this side is the client. Only a server sends session tickets.
    is_client: bool,
    /// Whether the peer has requested this side's next key and has not received it.
    asked: AtomicBool,
    /// Whether this side must still request the peer's next key.
    asking: AtomicBool,
    /// The number of requests for the peer's next key that this side has sealed since it last
    /// sealed data.
    asks: AtomicU32,
    /// Whether this side has closed its direction.
    is_closed: AtomicBool,
    /// Maximum number of data records that this side seals with one key. In TLS 1.3, this side also
    /// requests the peer's next key after it has opened half as many records.
    limit: AtomicU64,
}

/// The sending half.
pub struct Sealing {
    keys: Arc<Keys>,
    /// Data records sealed with the current key.
    records: u64,
}

/// The receiving half.
pub struct Opening {
    keys: Arc<Keys>,
    /// Data records opened with the current key.
    records: u64,
    /// An incomplete handshake message.
    pub(super) message: Vec<u8>,
    late_run: u32,
    empty_run: u32,
    asked: bool,
}

/// The result of [`Opening::interpret`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Nothing,
    Closed,
    /// Later records use the peer's next key.
    Renewed,
}

/// Returns both halves of a connection. `renews` says whether keys can be replaced; `next` derives
/// them.
pub(crate) fn halves(
    secrets: &ExtractedSecrets,
    version: Version,
    is_client: bool,
    renews: bool,
    next: Box<dyn Renewal>,
) -> (Sealing, Opening) {
    let keys = Arc::new(Keys {
        next: Mutex::new(next),
        is_1_3: version == Version::V1_3,
        renews,
        is_client,
        asked: AtomicBool::new(false),
        asking: AtomicBool::new(false),
        asks: AtomicU32::new(0),
        is_closed: AtomicBool::new(false),
        limit: AtomicU64::new(RECORD_LIMIT),
    });
    let sealing = Sealing {
        keys: Arc::clone(&keys),
        records: secrets.tx.0,
    };
    let opening = Opening {
        keys,
        records: secrets.rx.0,
        message: Vec::new(),
        late_run: 0,
        empty_run: 0,
        asked: false,
    };
    (sealing, opening)
}

/// The number of data records that one call wrote. `bytes` is the number of bytes that the call
/// wrote; no record has bytes of two calls. For a read the result is 1, because a read returns
/// bytes of only one record.
fn records_of(bytes: usize) -> u64 {
    bytes.div_ceil(CONTENT_BYTES) as u64
}

pub(super) fn not_renewed(error: impl ToString) -> RelayError {
    RelayError::Renewal(error.to_string())
}

impl Keys {
    /// Whether a request for the peer's next key should be sent now. After this side has closed its
    /// direction, it may send nothing: the peer would reset the connection, and the reset would
    /// discard data in transit to this side.
    fn is_asking(&self) -> bool {
        self.asking.load(Ordering::SeqCst) && !self.is_closed.load(Ordering::SeqCst)
    }
}

impl Sealing {
    /// Makes this side renew each of its keys after `records` records, but not later than at the
    /// key's record limit.
    pub fn renew_after(&self, records: u64) {
        let limit = records.min(RECORD_LIMIT);
        self.keys.limit.store(limit, Ordering::Relaxed);
    }

    /// Whether a request for the peer's next key should be sent now, even without data to send.
    pub fn is_asking(&self) -> bool {
        self.keys.is_asking()
    }

    /// Counts the records of the `bytes` of data that one call sealed.
    pub fn gave(&mut self, bytes: usize) {
        self.records += records_of(bytes);
        self.keys.asks.store(0, Ordering::Relaxed);
    }

    /// Returns a key update if one is due before the next data, which has up to `records` records.
    /// The caller sends the key update first, and seals everything after it with the next key.
    ///
    /// # Errors
    /// If an update is due: [`RelayError::UsedUp`] in TLS 1.2, which has no key update;
    /// [`RelayError::Renewal`] if keys cannot be replaced.
    pub fn renews(&self, records: u64) -> Result<Option<Control>, RelayError> {
        let keys = &self.keys;
        let limit = keys.limit.load(Ordering::Relaxed);
        let is_used_up = self.records > 0 && self.records + records > limit;
        if !keys.is_1_3 {
            return if is_used_up {
                Err(RelayError::UsedUp)
            } else {
                Ok(None)
            };
        }
        let asked = keys.asked.swap(false, Ordering::SeqCst);
        let asking = keys.asking.swap(false, Ordering::SeqCst)
            && keys.asks.load(Ordering::Relaxed) < ASKS_LIMIT;
        if !(is_used_up || asked || asking) {
            return Ok(None);
        }
        if !keys.renews {
            return Err(not_renewed(CANNOT_RENEW));
        }
        if asking {
            keys.asks.fetch_add(1, Ordering::Relaxed);
        }
        // RFC 8446, section 4.6.3.
        Ok(Some((HANDSHAKE, vec![24, 0, 0, 1, u8::from(asking)])))
    }

    /// Derives the next key, for the records after a key update.
    ///
    /// # Errors
    /// [`RelayError::Renewal`]; nothing more may be sent.
    pub(super) fn next_key(&mut self) -> Result<ConnectionTrafficSecrets, RelayError> {
        self.records = 0;
        lock(&self.keys.next).sending().map_err(not_renewed)
    }

    /// Returns the alert that closes this direction.
    pub fn closes(&mut self) -> Control {
        self.keys.is_closed.store(true, Ordering::SeqCst);
        // Level warning, description close_notify.
        (ALERT, vec![1, 0])
    }
}

impl Opening {
    /// Counts one record with `bytes` of data.
    ///
    /// # Errors
    /// [`RelayError`]; the data must not be used.
    pub fn came(&mut self, bytes: usize) -> Result<(), RelayError> {
        self.between_messages()?;
        self.late_run = 0;
        self.empty_run = 0;
        self.records += records_of(bytes);
        let limit = self.keys.limit.load(Ordering::Relaxed);
        let keys = &self.keys;
        if keys.renews
            && self.records >= limit / 2
            && !self.asked
            && keys.asks.load(Ordering::Relaxed) < ASKS_LIMIT
        {
            self.asked = true;
            keys.asking.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Counts a record without content.
    ///
    /// # Errors
    /// [`RelayError`] if there are too many.
    pub fn was_empty(&mut self) -> Result<(), RelayError> {
        self.between_messages()?;
        self.empty_run += 1;
        if self.empty_run > EMPTY_RUN_LIMIT {
            return Err(OpenError::EmptyRun.into());
        }
        Ok(())
    }

    /// Derives the peer's next key, for the records after [`Verdict::Renewed`].
    ///
    /// # Errors
    /// [`RelayError::Renewal`]; later records must not be read.
    pub(super) fn next_key(&mut self) -> Result<ConnectionTrafficSecrets, RelayError> {
        lock(&self.keys.next).receiving().map_err(not_renewed)
    }

    /// Whether a request for the peer's next key should be sent now, even without data to send.
    pub(super) fn is_asking(&self) -> bool {
        self.keys.is_asking()
    }

    /// Processes a record that is not data.
    ///
    /// # Errors
    /// [`RelayError`]; later records must not be read.
    pub(super) fn interpret(
        &mut self,
        content_type: u8,
        content: &[u8],
    ) -> Result<Verdict, RelayError> {
        if !self.keys.is_1_3 {
            return self.older(content_type, content);
        }
        if content_type != HANDSHAKE {
            self.between_messages()?;
        }
        match Content::of_control(content_type, content) {
            Ok(Content::Late(..)) => self.late(content),
            Ok(Content::Usual(_)) => {
                // A peer that has closed its direction needs no further key.
                self.keys.asking.store(false, Ordering::SeqCst);
                Ok(Verdict::Closed)
            }
            // This alert is not an error. A close or an error alert follows it; some programs send
            // it before every close (RFC 8446, section 6.1).
            Err(OpenError::Alert {
                alert: USER_CANCELED,
            }) => self.count_late().map(|()| Verdict::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// No other record may come between the parts of a message (RFC 8446, section 5.1).
    fn between_messages(&self) -> Result<(), RelayError> {
        match self.message.first() {
            Some(&kind) => Err(RelayError::Late(kind)),
            None => Ok(()),
        }
    }

    fn count_late(&mut self) -> Result<(), RelayError> {
        self.late_run += 1;
        if self.late_run > LATE_RUN_LIMIT {
            return Err(RelayError::LateRun);
        }
        Ok(())
    }

    /// Processes handshake messages of TLS 1.3: session tickets, which are ignored, and key
    /// updates.
    fn late(&mut self, content: &[u8]) -> Result<Verdict, RelayError> {
        self.count_late()?;
        if content.is_empty() {
            return Err(RelayError::Late(0));
        }
        self.message.extend_from_slice(content);
        let mut at = 0;
        while let [kind, high, middle, low, rest @ ..] = &self.message[at..] {
            let length = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
            if *kind != 24 && !(*kind == 4 && self.keys.is_client) {
                return Err(RelayError::Late(*kind));
            }
            if length > MESSAGE_LIMIT_BYTES {
                return Err(RelayError::LateRun);
            }
            let Some(message) = rest.get(..length) else {
                break;
            };
            match (*kind, message) {
                (4, _) => {}
                // No message may follow the key update in the same record, because the old key
                // sealed this record.
                (24, [requested @ (0 | 1)]) if rest.len() == length => {
                    // A request is not part of a flood if this side has answered the previous
                    // request. A peer without data to send has no other way to request this side's
                    // next key.
                    if *requested == 1 && !self.keys.asked.swap(true, Ordering::SeqCst) {
                        self.late_run = 0;
                    }
                    self.message.clear();
                    self.records = 0;
                    self.asked = false;
                    return Ok(Verdict::Renewed);
                }
                (kind, _) => return Err(RelayError::Late(kind)),
            }
            at += 4 + length;
            // The record is counted above. Count each further message in it.
            if at < self.message.len() {
                self.count_late()?;
            }
        }
        self.message.drain(..at);
        Ok(Verdict::Nothing)
    }

    /// Interprets a TLS 1.2 record that is not data.
    fn older(&mut self, content_type: u8, content: &[u8]) -> Result<Verdict, RelayError> {
        match (content_type, content) {
            (ALERT, [_, 0]) => Ok(Verdict::Closed),
            // Ignore a warning, such as the refusal of a renegotiation. Also ignore a HelloRequest,
            // as RFC 5246, section 7.4.1.1, allows.
            (ALERT, [1, _]) | (HANDSHAKE, [0, 0, 0, 0]) => {
                self.count_late().map(|()| Verdict::Nothing)
            }
            (ALERT, &[_, alert]) => Err(RelayError::PeerAlert(Alert(alert))),
            (ALERT, _) => Err(OpenError::MalformedAlert.into()),
            (HANDSHAKE, content) => {
                let message = content.first().copied().unwrap_or(0);
                Err(RelayError::Late(message))
            }
            (content_type, _) => Err(OpenError::ContentType { content_type }.into()),
        }
    }
}

#[cfg(test)]
mod tests;
