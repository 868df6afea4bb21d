//! A relay's connection in this process, shared by two threads.
//!
//! TLS 1.3 uses the records of lanes (module `records`). TLS 1.2, which is only for older peers,
//! uses rustls, which keeps one state for both directions, behind a lock. No such lock is held
//! while a socket is read or written, so one direction continues while the other direction is
//! blocked.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::ExtractedSecrets;
use rustls::unbuffered::{ConnectionState, EncryptError, InsufficientSizeError};

use super::RelayError;
use super::records::Halves;
pub use super::records::Opened;
use crate::internals::handshake::{Renewal, Unbuffered, encode};
use crate::internals::provider::{Provider, ProviderError};
use crate::internals::record::{Alert, CONTENT_BYTES, OpenError, RECORD_LIMIT};
use crate::internals::sync::lock;

/// A connection after a complete handshake.
pub struct Session {
    version: Version,
    is_pending: AtomicBool,
}

enum Version {
    V1_2(Mutex<Box<dyn Connection>>),
    V1_3(Halves),
}

/// The connection of either role, in TLS 1.2.
trait Connection: Send {
    fn seal(&mut self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError>;

    fn open(&mut self, bytes: &mut [u8], content: &mut [u8]) -> Result<Opened, RelayError>;

    /// Records with rustls's own messages, which must be sent before any other record.
    fn pending(&mut self) -> &mut Vec<u8>;

    fn end_after(&mut self, records: u64);
}

struct Shared<C> {
    connection: C,
    pending: Vec<u8>,
    /// The input that the last [`Connection::open`] did not consume: the beginning of a record or
    /// message. rustls keeps positions in these bytes, so the next call must pass them again.
    partial: Vec<u8>,
    /// Maximum number of data records that this side seals.
    limit: u64,
    /// Sealed data records.
    sealed: u64,
    /// Whether the peer has closed its direction, or a record was invalid.
    is_over: bool,
    /// Whether this side has closed its direction. It then sends nothing more.
    is_closed: bool,
}

impl Session {
    /// Returns a connection with TLS 1.2.
    pub(crate) fn older<C: Unbuffered + Send + 'static>(connection: C) -> Self {
        let shared = Shared {
            connection,
            pending: Vec::new(),
            partial: Vec::new(),
            limit: RECORD_LIMIT,
            sealed: 0,
            is_over: false,
            is_closed: false,
        };
        Self {
            version: Version::V1_2(Mutex::new(Box::new(shared))),
            is_pending: AtomicBool::new(false),
        }
    }

    /// Returns a connection with TLS 1.3. `next` derives its next keys.
    pub(crate) fn new(
        secrets: ExtractedSecrets,
        next: Box<dyn Renewal>,
        is_client: bool,
        provider: Provider,
    ) -> Result<Self, ProviderError> {
        Ok(Self {
            version: Version::V1_3(Halves::new(secrets, next, is_client, provider)?),
            is_pending: AtomicBool::new(false),
        })
    }

    /// Makes this side renew each of its keys after `records` records, but not later than at the
    /// key's record limit. TLS 1.2 cannot renew keys, so a TLS 1.2 connection then ends with
    /// [`RelayError::UsedUp`].
    pub fn renew_after(&self, records: u64) {
        match &self.version {
            Version::V1_2(connection) => lock(connection).end_after(records),
            Version::V1_3(connection) => connection.renew_after(records),
        }
    }

    /// Seals `content` into the front of `records`, which grows as needed. If `content` is `None`,
    /// seals the close of this direction instead. Returns the number of bytes to send. Send them
    /// after the bytes of the previous call.
    ///
    /// # Errors
    /// [`RelayError`]; nothing may be sent.
    pub fn seal(&self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        self.is_pending.store(false, Ordering::SeqCst);
        match &self.version {
            Version::V1_2(connection) => lock(connection).seal(content, records),
            Version::V1_3(connection) => connection.seal(content, records),
        }
    }

    /// Opens all complete records in `bytes` and writes their content to the front of `content`,
    /// which must be at least as long as `bytes`. Pass the bytes that were not consumed to the next
    /// call, followed by the bytes that have arrived since then.
    ///
    /// # Errors
    /// [`RelayError`]; what this call wrote to `content` must not be used, and the connection opens
    /// no more records.
    pub fn open(&self, bytes: &mut [u8], content: &mut [u8]) -> Result<Opened, RelayError> {
        let (opened, is_pending) = match &self.version {
            Version::V1_2(connection) => {
                let mut connection = lock(connection);
                let opened = connection.open(bytes, content)?;
                (opened, !connection.pending().is_empty())
            }
            Version::V1_3(connection) => connection.open(bytes, content)?,
        };
        self.is_pending.store(is_pending, Ordering::SeqCst);
        Ok(opened)
    }

    /// Whether a message of TLS itself waits, such as a request for the peer's next key. Send it
    /// even if there is no content to send. The next [`Session::seal`] returns it before the
    /// content.
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::SeqCst)
    }

    /// Removes and returns the message that [`Session::is_pending`] reports. Send it in order with
    /// the bytes of [`Session::seal`].
    ///
    /// # Errors
    /// [`RelayError`]; nothing may be sent.
    pub fn take_pending(&self) -> Result<Vec<u8>, RelayError> {
        self.is_pending.store(false, Ordering::SeqCst);
        match &self.version {
            Version::V1_2(connection) => Ok(std::mem::take(lock(connection).pending())),
            Version::V1_3(connection) => connection.take_pending(),
        }
    }
}

impl<C: Unbuffered + Send> Connection for Shared<C> {
    fn seal(&mut self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        let count = content.map_or(0, |content| content.len().div_ceil(CONTENT_BYTES) as u64);
        if self.sealed + count > self.limit {
            return Err(RelayError::UsedUp);
        }
        loop {
            match self.connection.process(&mut self.partial).state? {
                ConnectionState::EncodeTlsData(mut part) => {
                    encode(&mut part, &mut self.pending).map_err(unexpected)?;
                }
                ConnectionState::TransmitTlsData(sent) => sent.done(),
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
                    self.is_closed = content.is_none();
                    return Ok(front + sealed);
                }
                state => return Err(unexpected(format!("{state:?} while sealing"))),
            }
        }
    }

    fn open(&mut self, bytes: &mut [u8], content: &mut [u8]) -> Result<Opened, RelayError> {
        if std::mem::replace(&mut self.is_over, true) {
            return Err(OpenError::Spent.into());
        }
        let mut opened = Opened::default();
        while !opened.is_over {
            let status = self.connection.process(&mut bytes[opened.taken..]);
            match status.state? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let part = record?.payload;
                        content[opened.content..][..part.len()].copy_from_slice(part);
                        opened.content += part.len();
                    }
                }
                ConnectionState::EncodeTlsData(mut part) => {
                    encode(&mut part, &mut self.pending).map_err(unexpected)?;
                }
                ConnectionState::TransmitTlsData(sent) => sent.done(),
                ConnectionState::PeerClosed | ConnectionState::Closed => opened.is_over = true,
                ConnectionState::WriteTraffic(_) => {
                    opened.taken += status.discard;
                    break;
                }
                state => return Err(unexpected(format!("{state:?} while opening"))),
            }
            opened.taken += status.discard;
        }
        self.is_over = opened.is_over;
        if self.is_closed {
            self.pending.clear();
        }
        self.partial.clear();
        self.partial.extend_from_slice(&bytes[opened.taken..]);
        Ok(opened)
    }

    fn pending(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    fn end_after(&mut self, records: u64) {
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
