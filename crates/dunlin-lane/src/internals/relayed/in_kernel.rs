//! A relay's connection with kernel TLS. The kernel moves data from socket to socket. This module
//! handles the records that are not data, and counts those with data.
//!
//! In TLS 1.3 the peer may send session tickets, renew its keys and request new keys from this side
//! (RFC 8446, section 4.6). This side also renews keys that reach their record limit, because a
//! relay's connection cannot be replaced. TLS 1.2 cannot renew keys, so its connections end at the
//! record limit.

use crate::internals::sync::lock;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dunlin_linux::ktls::{Direction, Version};
use rustls::ExtractedSecrets;

use super::error::{LATE_RUN_LIMIT, MESSAGE_LIMIT_BYTES, RelayError};
use crate::internals::handshake::Renewal;
use crate::internals::kernel;
use crate::internals::record::{
    ALERT, Alert, CONTENT_BYTES, Content, EMPTY_RUN_LIMIT, HANDSHAKE, OpenError, RECORD_LIMIT,
};

/// A record that is not data: content type and content, as `ktls::send_record` takes them.
pub type Control = (u8, Vec<u8>);

/// The `user_canceled` alert, a warning.
const USER_CANCELED: Alert = Alert(90);
/// Maximum number of records sent by one call: one for each slot of a pipe.
const CALL_RECORDS: u64 = 16;

/// Derives the next keys of both directions, and tracks which side requested renewal.
struct Keys {
    next: Mutex<Box<dyn Renewal>>,
    is_1_3: bool,
    /// Whether the kernel can replace keys.
    renews: bool,
    /// Whether the peer has requested this side's next key and has not received it.
    asked: AtomicBool,
    /// Whether this side must still request the peer's next key.
    asking: AtomicBool,
    /// Maximum number of data records that this side seals with one key. In TLS 1.3, this side also
    /// requests the peer's next key after it has opened half as many records.
    limit: AtomicU64,
}

/// The sending half.
pub struct Sealing {
    keys: Arc<Keys>,
    /// Records sealed with the current key.
    records: u64,
    is_closed: bool,
}

/// The receiving half.
pub struct Opening {
    keys: Arc<Keys>,
    /// Records opened with the current key.
    records: u64,
    /// An incomplete handshake message.
    pub(super) message: Vec<u8>,
    late_run: u32,
    empty_run: u32,
    asked: bool,
}

/// What a record that is not data means for the relay.
#[derive(Debug, PartialEq, Eq)]
pub enum Held {
    /// The record does not concern the other side of the relay.
    Nothing,
    /// The peer's authenticated close.
    Closed,
}

/// The result of [`Opening::interpret`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Nothing,
    Closed,
    /// Later records use the peer's next key.
    Renewed,
}

/// Returns both halves of a connection with kernel TLS. `renews` says whether the kernel can
/// replace keys.
pub fn halves(
    secrets: &ExtractedSecrets,
    version: Version,
    renews: bool,
    next: Box<dyn Renewal>,
) -> (Sealing, Opening) {
    let keys = Arc::new(Keys {
        next: Mutex::new(next),
        is_1_3: version == Version::V1_3,
        renews,
        asked: AtomicBool::new(false),
        asking: AtomicBool::new(false),
        limit: AtomicU64::new(RECORD_LIMIT),
    });
    let sealing = Sealing {
        keys: Arc::clone(&keys),
        records: secrets.tx.0,
        is_closed: false,
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

/// The number of data records in `bytes` that one call wrote; each call ends with a complete
/// record. For a read the result is 1, because a read returns bytes of only one record.
fn records_of(bytes: usize) -> u64 {
    bytes.div_ceil(CONTENT_BYTES) as u64
}

fn not_renewed(error: impl ToString) -> RelayError {
    RelayError::Renewal(error.to_string())
}

impl Sealing {
    /// Makes this side renew each of its keys after `records` records, but not later than at the
    /// key's record limit.
    pub fn renew_after(&self, records: u64) {
        let limit = records.min(RECORD_LIMIT);
        self.keys.limit.store(limit, Ordering::Relaxed);
    }

    /// Whether a request for the peer's next key should be sent now, even without data to send.
    ///
    /// Nothing may be sent after the close of a direction, because the peer would reset the
    /// connection, and the reset would discard data in transit to this side.
    pub fn is_asking(&self) -> bool {
        !self.is_closed && self.keys.asking.load(Ordering::SeqCst)
    }

    /// Counts the records for the `bytes` that one call wrote to the kernel.
    pub fn gave(&mut self, bytes: usize) {
        self.records += records_of(bytes);
    }

    /// Returns a key update that must be sent before more data, if one is due. Call
    /// [`Sealing::has_renewed`] after sending it.
    ///
    /// # Errors
    /// If an update is due: [`RelayError::UsedUp`] in TLS 1.2, which has no key update;
    /// [`RelayError::Renewal`] if the kernel cannot replace keys.
    pub fn renews(&self) -> Result<Option<Control>, RelayError> {
        let keys = &self.keys;
        let is_used_up = self.records + CALL_RECORDS > keys.limit.load(Ordering::Relaxed);
        if !keys.is_1_3 {
            return if is_used_up {
                Err(RelayError::UsedUp)
            } else {
                Ok(None)
            };
        }
        let asked = keys.asked.swap(false, Ordering::SeqCst);
        let asking = keys.asking.swap(false, Ordering::SeqCst);
        if !(is_used_up || asked || asking) {
            return Ok(None);
        }
        if !keys.renews {
            return Err(not_renewed(kernel::CANNOT_RENEW));
        }
        // RFC 8446, section 4.6.3.
        Ok(Some((HANDSHAKE, vec![24, 0, 0, 1, u8::from(asking)])))
    }

    /// Makes the kernel seal with the next key.
    ///
    /// # Errors
    /// [`RelayError::Renewal`]; nothing more may be sent.
    pub fn has_renewed(&mut self, stream: &TcpStream) -> Result<(), RelayError> {
        let secrets = lock(&self.keys.next).sending().map_err(not_renewed)?;
        kernel::renew(stream, Direction::Sending, &secrets).map_err(not_renewed)?;
        self.records = 0;
        Ok(())
    }

    /// Returns the alert that closes this direction.
    pub fn closes(&mut self) -> Control {
        self.is_closed = true;
        // Level warning, description close_notify.
        (ALERT, vec![1, 0])
    }
}

impl Opening {
    /// Counts the record for the `bytes` of data that one call read from the kernel.
    ///
    /// # Errors
    /// [`RelayError`]; the data must not be used.
    pub fn came(&mut self, bytes: usize) -> Result<(), RelayError> {
        if let Some(&kind) = self.message.first() {
            // Data must not come between the parts of a message (RFC 8446, section 5.1).
            return Err(RelayError::Late(kind));
        }
        self.late_run = 0;
        self.empty_run = 0;
        self.records += records_of(bytes);
        let limit = self.keys.limit.load(Ordering::Relaxed);
        if self.keys.renews && self.records >= limit / 2 && !self.asked {
            self.asked = true;
            self.keys.asking.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Counts a record without content.
    ///
    /// # Errors
    /// [`RelayError`] if there are too many.
    pub fn was_empty(&mut self) -> Result<(), RelayError> {
        self.empty_run += 1;
        if self.empty_run > EMPTY_RUN_LIMIT {
            return Err(OpenError::EmptyRun.into());
        }
        Ok(())
    }

    /// Processes a record that is not data.
    ///
    /// # Errors
    /// [`RelayError`]; later records must not be read.
    pub fn control(
        &mut self,
        content_type: u8,
        content: &[u8],
        stream: &TcpStream,
    ) -> Result<Held, RelayError> {
        match self.interpret(content_type, content)? {
            Verdict::Nothing => Ok(Held::Nothing),
            Verdict::Closed => Ok(Held::Closed),
            Verdict::Renewed => {
                let secrets = lock(&self.keys.next).receiving().map_err(not_renewed)?;
                kernel::renew(stream, Direction::Receiving, &secrets).map_err(not_renewed)?;
                Ok(Held::Nothing)
            }
        }
    }

    /// Converts a failed read; `None` if the error does not concern a record.
    pub fn failed(error: &io::Error) -> Option<RelayError> {
        OpenError::of_kernel(error).map(RelayError::Open)
    }

    pub(super) fn interpret(
        &mut self,
        content_type: u8,
        content: &[u8],
    ) -> Result<Verdict, RelayError> {
        if !self.keys.is_1_3 {
            return self.older(content_type, content);
        }
        match Content::of_control(content_type, content) {
            Ok(Content::Late(..)) => self.late(content),
            Ok(Content::Usual(_)) => Ok(Verdict::Closed),
            // This alert is not an error. A close or an error alert follows it; some programs send
            // it before every close (RFC 8446, section 6.1).
            Err(OpenError::Alert {
                alert: USER_CANCELED,
            }) => self.count_late().map(|()| Verdict::Nothing),
            Err(error) => Err(error.into()),
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
        loop {
            let [kind, high, middle, low, ..] = self.message[..] else {
                return Ok(Verdict::Nothing);
            };
            let whole = 4 + u32::from_be_bytes([0, high, middle, low]) as usize;
            if whole > MESSAGE_LIMIT_BYTES {
                return Err(RelayError::LateRun);
            }
            if self.message.len() < whole {
                return Ok(Verdict::Nothing);
            }
            match (kind, &self.message[4..whole]) {
                (4, _) => {}
                // No message may follow the key update in the same record, because the old key
                // sealed this record.
                (24, [requested @ (0 | 1)]) if self.message.len() == whole => {
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
                _ => return Err(RelayError::Late(kind)),
            }
            self.message.drain(..whole);
        }
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
