//! A relay's records in the kernel: data goes between sockets, and what is left to do are the
//! records that are no data, and counting.
//!
//! In TLS 1.3 the peer may send session tickets, renew its keys and ask for ours (RFC 8446,
//! section 4.6); and since there is nothing to put in the place of a connection whose keys are
//! worn, this side renews them too. TLS 1.2 cannot: a connection ends at its record limit.

use crate::sync::lock;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dunlin_linux::ktls::{Direction, Version};
use rustls::ExtractedSecrets;

use super::RelayError;
use crate::handshake::Renewal;
use crate::kernel;
use crate::record::{
    ALERT, Alert, CONTENT_BYTES, Content, EMPTY_RUN_LIMIT, HANDSHAKE, OpenError, RECORD_LIMIT,
};

/// A record that is no data, as `ktls::send_record` takes it.
pub type Control = (u8, Vec<u8>);

/// Handshake messages that have begun and not ended, in bytes. A session ticket may be longer by
/// its lengths' size; none that is in use comes near this.
pub(super) const MESSAGE_LIMIT_BYTES: usize = 32 << 10;
/// Messages of TLS itself without data in between: more are an attack or a fault.
pub(super) const LATE_RUN_LIMIT: u32 = 32;
/// The alert of that name, which is a warning.
const USER_CANCELED: Alert = Alert(90);
/// Records that go with one call, at most: one for each piece that a pipe holds.
const CALL_RECORDS: u64 = 16;

/// Makes the next keys of either direction, and remembers which side asked for some.
struct Keys {
    next: Mutex<Box<dyn Renewal>>,
    is_1_3: bool,
    /// The kernel can change the keys.
    renews: bool,
    /// The peer has asked for ours.
    asked: AtomicBool,
    /// We want the peer's.
    asking: AtomicBool,
    /// Records under one key, in either direction.
    limit: AtomicU64,
}

/// The sending half.
pub struct Sealing {
    keys: Arc<Keys>,
    /// Records that the key has sealed.
    records: u64,
    is_closed: bool,
}

/// The receiving half.
pub struct Opening {
    keys: Arc<Keys>,
    /// Records that the key has opened.
    records: u64,
    /// The beginning of a handshake message.
    message: Vec<u8>,
    late_run: u32,
    empty_run: u32,
    asked: bool,
}

/// What a record that is no data said.
#[derive(Debug, PartialEq, Eq)]
pub enum Held {
    /// Nothing that matters to the other side of the relay.
    Nothing,
    /// The peer's authentic end.
    Closed,
}

/// What [`Opening::judge`] found in a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Nothing,
    Closed,
    /// What follows is sealed with the peer's next key.
    Renewed,
}

/// Both halves of a connection whose keys the kernel has, and can change if it `renews` them.
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

/// The records of data that went in one call, which ends a record. A read is of one alone.
fn records_of(bytes: usize) -> u64 {
    bytes.div_ceil(CONTENT_BYTES) as u64
}

fn not_renewed(error: impl ToString) -> RelayError {
    RelayError::Renewal(error.to_string())
}

impl Sealing {
    /// Renews keys after `records` already, if that is less than they are good for.
    pub fn renew_after(&self, records: u64) {
        let limit = records.min(RECORD_LIMIT);
        self.keys.limit.store(limit, Ordering::Relaxed);
    }

    /// Whether a message of TLS itself should go out although there is no data.
    ///
    /// Behind its end a direction says nothing more: the peer reads it no further, and would reset
    /// the connection for it, and what is on its way here with it.
    pub fn is_asking(&self) -> bool {
        !self.is_closed && self.keys.asking.load(Ordering::SeqCst)
    }

    /// So many bytes were given to the kernel in one call.
    pub fn gave(&mut self, bytes: usize) {
        self.records += records_of(bytes);
    }

    /// A key update that must be sent before more data, if there is one; when it was,
    /// [`Sealing::has_renewed`] is to be called.
    ///
    /// # Errors
    /// [`RelayError::Worn`] where TLS 1.2 has no such thing.
    pub fn renews(&self) -> Result<Option<Control>, RelayError> {
        let keys = &self.keys;
        let is_worn = self.records + CALL_RECORDS > keys.limit.load(Ordering::Relaxed);
        if !keys.is_1_3 {
            return if is_worn {
                Err(RelayError::Worn)
            } else {
                Ok(None)
            };
        }
        let asked = keys.asked.swap(false, Ordering::SeqCst);
        let asking = keys.asking.swap(false, Ordering::SeqCst);
        if !(is_worn || asked || asking) {
            return Ok(None);
        }
        if !keys.renews {
            return Err(not_renewed(kernel::CANNOT_RENEW));
        }
        // RFC 8446, section 4.6.3.
        Ok(Some((HANDSHAKE, vec![24, 0, 0, 1, u8::from(asking)])))
    }

    /// Has the kernel seal with the next key.
    ///
    /// # Errors
    /// [`RelayError::Renewal`]; nothing may be sent any more then.
    pub fn has_renewed(&mut self, stream: &TcpStream) -> Result<(), RelayError> {
        let secrets = lock(&self.keys.next).sending().map_err(not_renewed)?;
        kernel::renew(stream, Direction::Sending, &secrets).map_err(not_renewed)?;
        self.records = 0;
        Ok(())
    }

    /// The alert that ends this direction.
    pub fn closes(&mut self) -> Control {
        self.is_closed = true;
        // Level warning, description close_notify.
        (ALERT, vec![1, 0])
    }
}

impl Opening {
    /// So many bytes of data came from the kernel in one call.
    ///
    /// # Errors
    /// [`RelayError`]; they are not to be used then.
    pub fn came(&mut self, bytes: usize) -> Result<(), RelayError> {
        if let Some(&kind) = self.message.first() {
            // No message may be interrupted (RFC 8446, section 5.1).
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

    /// A record without content came.
    ///
    /// # Errors
    /// [`RelayError`], for too many of them.
    pub fn was_empty(&mut self) -> Result<(), RelayError> {
        self.empty_run += 1;
        if self.empty_run > EMPTY_RUN_LIMIT {
            return Err(OpenError::EmptyRun.into());
        }
        Ok(())
    }

    /// What a record says that is no data.
    ///
    /// # Errors
    /// [`RelayError`]; nothing behind it may be looked at then.
    pub fn control(
        &mut self,
        content_type: u8,
        content: &[u8],
        stream: &TcpStream,
    ) -> Result<Held, RelayError> {
        match self.judge(content_type, content)? {
            Verdict::Nothing => Ok(Held::Nothing),
            Verdict::Closed => Ok(Held::Closed),
            Verdict::Renewed => {
                let secrets = lock(&self.keys.next).receiving().map_err(not_renewed)?;
                kernel::renew(stream, Direction::Receiving, &secrets).map_err(not_renewed)?;
                Ok(Held::Nothing)
            }
        }
    }

    /// What a failed read means, if it is about a record.
    pub fn failed(error: &io::Error) -> Option<RelayError> {
        OpenError::of_kernel(error).map(RelayError::Open)
    }

    pub(super) fn judge(
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
            // An end follows, or an abort; some programs send it before each end
            // (RFC 8446, section 6.1).
            Err(OpenError::Alert {
                alert: USER_CANCELED,
            }) => self.count_late().map(|()| Verdict::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Bytes that are kept of a message that has no end yet.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn begun(&self) -> usize {
        self.message.len()
    }

    fn count_late(&mut self) -> Result<(), RelayError> {
        self.late_run += 1;
        if self.late_run > LATE_RUN_LIMIT {
            return Err(RelayError::LateRun);
        }
        Ok(())
    }

    /// Handshake messages of TLS 1.3: session tickets, which are of no use here, and key updates.
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
                // Nothing may follow in its record, which the old key has sealed.
                (24, [wish @ (0 | 1)]) if self.message.len() == whole => {
                    // One that comes when the last was answered is no flood: a peer that has
                    // nothing to say asks for our next key in this way alone.
                    if *wish == 1 && !self.keys.asked.swap(true, Ordering::SeqCst) {
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

    /// A record of TLS 1.2 that is no data.
    fn older(&mut self, content_type: u8, content: &[u8]) -> Result<Verdict, RelayError> {
        match (content_type, content) {
            (ALERT, [_, 0]) => Ok(Verdict::Closed),
            // A warning, such as that of a renegotiation that is not wanted; and a request to
            // negotiate anew, which may be ignored (RFC 5246, section 7.4.1.1).
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
