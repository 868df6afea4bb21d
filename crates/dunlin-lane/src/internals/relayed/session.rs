//! A relay's connection with rustls, shared by two threads.
//!
//! rustls keeps one state for both directions, behind a lock. The lock is held while records are
//! sealed or opened, never while a socket is read or written, so one direction continues while the
//! other direction is blocked. rustls handles session tickets and the peer's key updates itself.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::ProtocolVersion;
use rustls::unbuffered::{ConnectionState, EncryptError, InsufficientSizeError};

use super::RelayError;
use crate::internals::handshake::{Unbuffered, encode};
use crate::internals::record::{Alert, CONTENT_BYTES, RECORD_LIMIT};
use crate::internals::sync::lock;

/// Maximum number of key requests without data from this side in between. A peer may treat a longer
/// sequence as an attack; rustls does so at 33 requests.
const ASKS_LIMIT: u32 = 16;

/// A connection after a complete handshake.
pub struct Session {
    connection: Mutex<Box<dyn Connection>>,
    is_pending: AtomicBool,
}

/// The result of [`Session::open`].
#[derive(Debug, PartialEq, Eq)]
pub struct Opened {
    /// The number of input bytes consumed: complete records.
    pub taken: usize,
    /// Whether the peer has closed its direction. The close is authenticated.
    pub is_over: bool,
}

/// The connection of either role.
trait Connection: Send {
    fn seal(&mut self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError>;

    fn open(&mut self, bytes: &mut [u8], content: &mut Vec<u8>) -> Result<Opened, RelayError>;

    /// Records with rustls's own messages, which must be sent before any other record.
    fn pending(&mut self) -> &mut Vec<u8>;

    fn renew_after(&mut self, records: u64);
}

struct Shared<C> {
    connection: C,
    pending: Vec<u8>,
    /// The input that the last [`Connection::open`] did not consume: the beginning of a record or
    /// message. rustls keeps positions in these bytes, so the next call must pass them again.
    partial: Vec<u8>,
    /// Maximum number of data records that this side seals with one key. In TLS 1.3, this side also
    /// requests the peer's next key after it has opened half as many records.
    limit: u64,
    /// Data records sealed with the current key.
    sealed: u64,
    /// Data records opened since the last request for the peer's next key.
    opened: u64,
    /// The number of requests for the peer's next key since this side last sent data.
    asks: u32,
    is_closed: bool,
}

impl Session {
    pub(crate) fn new<C: Unbuffered + Send + 'static>(connection: C) -> Self {
        let shared = Shared {
            connection,
            pending: Vec::new(),
            partial: Vec::new(),
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

    /// Makes this side renew each of its keys after `records` records, but not later than at the
    /// key's record limit. TLS 1.2 cannot renew keys, so a TLS 1.2 connection then ends with
    /// [`RelayError::UsedUp`].
    pub fn renew_after(&self, records: u64) {
        lock(&self.connection).renew_after(records);
    }

    /// Seals `content` into the front of `records`, which grows as needed. If `content` is `None`,
    /// seals the close of this direction instead. Returns the number of bytes to send. Send them
    /// after the bytes of the previous call.
    ///
    /// # Errors
    /// [`RelayError`]; nothing may be sent.
    pub fn seal(&self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        let mut connection = lock(&self.connection);
        self.is_pending.store(false, Ordering::SeqCst);
        connection.seal(content, records)
    }

    /// Opens all complete records in `bytes` and appends their content to `content`. Pass the bytes
    /// that were not consumed to the next call, followed by the bytes received since.
    ///
    /// # Errors
    /// [`RelayError`]; what this call appended to `content` must not be used.
    pub fn open(&self, bytes: &mut [u8], content: &mut Vec<u8>) -> Result<Opened, RelayError> {
        let mut connection = lock(&self.connection);
        let opened = connection.open(bytes, content)?;
        let is_pending = !connection.pending().is_empty();
        self.is_pending.store(is_pending, Ordering::SeqCst);
        Ok(opened)
    }

    /// Whether rustls itself has a message to send, such as a key update. The next
    /// [`Session::seal`] returns it before the content.
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::SeqCst)
    }

    /// Removes and returns the message that [`Session::is_pending`] reports. Send it in order with
    /// the bytes of [`Session::seal`].
    pub fn take_pending(&self) -> Vec<u8> {
        let mut connection = lock(&self.connection);
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
            match self.connection.process(&mut self.partial).state? {
                ConnectionState::EncodeTlsData(mut part) => {
                    encode(&mut part, &mut self.pending).map_err(unexpected)?;
                }
                ConnectionState::TransmitTlsData(sent) => sent.done(),
                ConnectionState::WriteTraffic(traffic)
                    if self.sealed > 0 && self.sealed + count > self.limit && content.is_some() =>
                {
                    if !is_1_3 {
                        return Err(RelayError::UsedUp);
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
                            Err(EncryptError::EncryptExhausted) => return Err(RelayError::UsedUp),
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
                // Request the peer's next key, because the peer may never renew its key by itself.
                // Nothing may be sent after this direction's close.
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
        self.partial.clear();
        self.partial.extend_from_slice(&bytes[taken..]);
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
