//! A relay's connection whose records rustls seals and opens, shared by two threads.
//!
//! rustls keeps one state for both directions, behind a lock. The lock is held while records are
//! sealed or opened and never while a socket is read or written, so each direction flows while
//! the other is blocked. rustls handles session tickets and the peer's key updates itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use rustls::ProtocolVersion;
use rustls::unbuffered::{ConnectionState, EncryptError, InsufficientSizeError};

use super::RelayError;
use crate::handshake::{Unbuffered, encode};
use crate::record::{Alert, CONTENT_BYTES, RECORD_LIMIT};
use crate::sync::lock;

/// Requests for the peer's next key without data of ours in between. A peer may take more for an
/// attack; rustls does so at 33.
const ASKS_LIMIT: u32 = 16;

/// A connection whose handshake is complete.
pub struct Session {
    connection: Mutex<Box<dyn Connection>>,
    is_pending: AtomicBool,
}

/// What [`Session::open`] did.
#[derive(Debug, PartialEq, Eq)]
pub struct Opened {
    /// The bytes of whole records, which are not needed any more.
    pub taken: usize,
    /// Whether the peer has ended its direction. This end is authentic.
    pub is_over: bool,
}

/// Either role's connection.
trait Connection: Send {
    fn seal(&mut self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError>;

    fn open(&mut self, bytes: &mut [u8], content: &mut Vec<u8>) -> Result<Opened, RelayError>;

    /// Records of rustls's own that must be sent before any other.
    fn pending(&mut self) -> &mut Vec<u8>;

    fn renew_after(&mut self, records: u64);
}

struct Shared<C> {
    connection: C,
    pending: Vec<u8>,
    /// What [`Connection::open`] was last given and has not taken: the start of a record or of a
    /// message. rustls keeps positions in it and must see it in every call.
    begun: Vec<u8>,
    /// Records under one key, in either direction.
    limit: u64,
    /// Data records sealed with this key.
    sealed: u64,
    /// Data records opened since the peer was last asked for its next key.
    opened: u64,
    /// How often it was asked since this side last sent data.
    asks: u32,
    is_closed: bool,
}

impl Session {
    pub(crate) fn new<C: Unbuffered + Send + 'static>(connection: C) -> Self {
        let shared = Shared {
            connection,
            pending: Vec::new(),
            begun: Vec::new(),
            limit: RECORD_LIMIT,
            sealed: 0,
            opened: 0,
            asks: 0,
            is_closed: false,
        };
        Self {
            connection: Mutex::new(Box::new(shared)),
            is_pending: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn Connection>> {
        lock(&self.connection)
    }

    /// Renews keys after `records` if that is fewer than they are good for. TLS 1.2 cannot renew
    /// keys: the connection ends with [`RelayError::Worn`].
    pub fn renew_after(&self, records: u64) {
        self.lock().renew_after(records);
    }

    /// Seals `content`, or the end of this direction, into the front of `records`, which grows as
    /// needed. Returns the bytes to send, which follow those of the call before.
    ///
    /// # Errors
    /// [`RelayError`]; nothing may be sent then.
    pub fn seal(&self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        let mut connection = self.lock();
        self.is_pending.store(false, Ordering::SeqCst);
        connection.seal(content, records)
    }

    /// Opens all whole records in `bytes` and appends their content. The next call gets what this
    /// one has not taken, and more behind it.
    ///
    /// # Errors
    /// [`RelayError`]; nothing of the content may be used then.
    pub fn open(&self, bytes: &mut [u8], content: &mut Vec<u8>) -> Result<Opened, RelayError> {
        let mut connection = self.lock();
        let opened = connection.open(bytes, content)?;
        let is_pending = !connection.pending().is_empty();
        self.is_pending.store(is_pending, Ordering::SeqCst);
        Ok(opened)
    }

    /// Whether rustls has a message of its own to send, such as a key update. The next
    /// [`Session::seal`] returns it in front of the content.
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::SeqCst)
    }

    /// That message alone. It goes where [`Session::seal`]'s bytes go, in order with them.
    pub fn take_pending(&self) -> Vec<u8> {
        let mut connection = self.lock();
        self.is_pending.store(false, Ordering::SeqCst);
        std::mem::take(connection.pending())
    }
}

impl<C: Unbuffered + Send> Shared<C> {
    fn is_1_3(&self) -> bool {
        self.connection.common().protocol_version() == Some(ProtocolVersion::TLSv1_3)
    }
}

impl<C: Unbuffered + Send> Connection for Shared<C> {
    fn seal(&mut self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        let is_1_3 = self.is_1_3();
        let count = content.map_or(0, |content| content.len().div_ceil(CONTENT_BYTES) as u64);
        loop {
            match self.connection.process(&mut self.begun).state? {
                ConnectionState::EncodeTlsData(mut part) => {
                    encode(&mut part, &mut self.pending).map_err(unexpected)?;
                }
                ConnectionState::TransmitTlsData(sent) => sent.done(),
                ConnectionState::WriteTraffic(traffic)
                    if self.sealed > 0 && self.sealed + count > self.limit && content.is_some() =>
                {
                    if !is_1_3 {
                        return Err(RelayError::Worn);
                    }
                    traffic.refresh_traffic_keys()?;
                    self.sealed = 0;
                }
                ConnectionState::WriteTraffic(mut traffic) => {
                    let front = self.pending.len();
                    records.resize(records.len().max(front), 0);
                    records[..front].copy_from_slice(&self.pending);
                    let sealed = loop {
                        let room = &mut records[front..];
                        let sealed = match content {
                            Some(content) => traffic.encrypt(content, room),
                            None => traffic.queue_close_notify(room),
                        };
                        match sealed {
                            Ok(sealed) => break sealed,
                            Err(EncryptError::InsufficientSize(InsufficientSizeError {
                                required_size,
                            })) => records.resize(front + required_size, 0),
                            Err(EncryptError::EncryptExhausted) => return Err(RelayError::Worn),
                        }
                    };
                    self.pending.clear();
                    self.sealed += count;
                    self.asks = 0;
                    self.is_closed = content.is_none();
                    return Ok(front + sealed);
                }
                state => return Err(unexpected(format!("{state:?} while sealing"))),
            }
        }
    }

    fn open(&mut self, bytes: &mut [u8], content: &mut Vec<u8>) -> Result<Opened, RelayError> {
        let is_1_3 = self.is_1_3();
        let mut taken = 0;
        let is_over = loop {
            let status = self.connection.process(&mut bytes[taken..]);
            match status.state? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        content.extend_from_slice(record?.payload);
                        self.opened += 1;
                    }
                }
                ConnectionState::EncodeTlsData(mut part) => {
                    encode(&mut part, &mut self.pending).map_err(unexpected)?;
                }
                ConnectionState::TransmitTlsData(sent) => sent.done(),
                ConnectionState::PeerClosed | ConnectionState::Closed => break true,
                // The peer need not renew its keys unasked. Behind the end of this direction
                // nothing may be sent.
                ConnectionState::WriteTraffic(traffic)
                    if is_1_3
                        && !self.is_closed
                        && self.asks < ASKS_LIMIT
                        && self.opened >= self.limit / 2 =>
                {
                    self.opened = 0;
                    self.asks += 1;
                    traffic.refresh_traffic_keys()?;
                    self.sealed = 0;
                }
                ConnectionState::WriteTraffic(_) => {
                    taken += status.discard;
                    break false;
                }
                state => return Err(unexpected(format!("{state:?} while opening"))),
            }
            taken += status.discard;
        };
        self.begun.clear();
        self.begun.extend_from_slice(&bytes[taken..]);
        Ok(Opened { taken, is_over })
    }

    fn pending(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    fn renew_after(&mut self, records: u64) {
        self.limit = records.min(RECORD_LIMIT);
    }
}

fn unexpected(what: impl ToString) -> RelayError {
    RelayError::Tls(rustls::Error::General(what.to_string()))
}

impl From<rustls::Error> for RelayError {
    fn from(error: rustls::Error) -> Self {
        match error {
            rustls::Error::AlertReceived(alert) => Self::PeerAlert(Alert(alert.into())),
            error => Self::Tls(error),
        }
    }
}

#[cfg(test)]
mod tests;
