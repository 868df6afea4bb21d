//! Reads handshake records, and defines the reasons to reject a connection.

use std::io::{self, Read};
use std::net::TcpStream;
use std::time::Duration;

use dunlin_proto::wire::DecodeError;
use rustls::Connection;
use thiserror::Error;

use crate::internals::handshake::{FLIGHT_LIMIT_BYTES, HandshakeError};
use crate::internals::record::{HEADER_BYTES, RECEIVED_RECORD_BYTES};

/// Maximum number of unauthenticated connections. Each connection uses at most
/// [`FLIGHT_LIMIT_BYTES`](crate::internals::handshake::FLIGHT_LIMIT_BYTES) plus rustls's state; all
/// of them together use less than 8 MiB.
pub const PENDING_LIMIT: usize = 64;
/// Maximum time from accepting a connection to the end of its opening message. A relay's connection
/// has no opening message, so its time ends with the handshake.
pub const OPENING_DEADLINE: Duration = Duration::from_secs(10);

/// Why a connection was rejected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RejectReason {
    /// The handshake failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The deadline passed.
    #[error("the peer did not complete its handshake and opening message within {} s", OPENING_DEADLINE.as_secs())]
    Deadline,
    /// The limit of pending connections was reached, so the connection was evicted in favour of a
    /// newer one.
    #[error(
        "the connection was closed before authentication, in favour of a newer one: limit of \
         {PENDING_LIMIT} pending connections reached"
    )]
    Evicted,
    /// Descriptors or memory ran out, so the connection was evicted in favour of a newer
    /// one.
    #[error(
        "the connection was closed before authentication, in favour of a newer one: this process \
         or host is out of file descriptors or memory; raise the limit of open files \
         (`ulimit -n`), or free descriptors and memory: {0}"
    )]
    Shortage(io::Error),
    /// The opening message is malformed.
    #[error("malformed opening message from peer: {0}")]
    Opening(#[from] DecodeError),
    /// The connection began with neither a TLS handshake nor a plain lane.
    #[error(
        "the peer's first byte is {0:#04x}, which begins neither TLS nor a plain Dunlin lane: check which program connects to this port"
    )]
    Unknown(u8),
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// Reads the records of a handshake one by one, and consumes no byte beyond the current record.
#[derive(Default)]
pub(crate) struct Reading {
    /// The record that is being read or has been read; its consumer clears it.
    pub(crate) record: Vec<u8>,
    /// Number of bytes in all complete records so far.
    pub(crate) received: usize,
}

impl Reading {
    /// Reads until one complete record is available; `false` if the socket would block.
    pub(crate) fn next(&mut self, mut stream: &TcpStream) -> Result<bool, RejectReason> {
        match self.fill(|part| stream.read(part)) {
            Ok(()) => Ok(true),
            Err(HandshakeError::Io(error)) => would_block(error),
            Err(error) => Err(error.into()),
        }
    }

    /// Calls `read` until one complete record is available. After an error of `read`, the next call
    /// of this function continues with the same record.
    pub(crate) fn fill(
        &mut self,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<(), HandshakeError> {
        loop {
            let wanted = match self.record.first_chunk::<HEADER_BYTES>() {
                None => HEADER_BYTES - self.record.len(),
                Some(&start) => {
                    let [content_type, major, _, high, low] = start;
                    // The content type must be one of the four in RFC 8446, section 5.1. The major
                    // version has been 3 since SSL 3.
                    if !(20..=23).contains(&content_type) || major != 3 {
                        return Err(HandshakeError::NotTls { start });
                    }
                    let whole = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
                    if whole > RECEIVED_RECORD_BYTES || self.received + whole > FLIGHT_LIMIT_BYTES {
                        return Err(HandshakeError::TooLong);
                    }
                    if self.record.len() == whole {
                        self.received += whole;
                        return Ok(());
                    }
                    whole - self.record.len()
                }
            };
            let start = self.record.len();
            self.record.resize(start + wanted, 0);
            let result = read(&mut self.record[start..]);
            self.record
                .truncate(start + result.as_ref().map_or(0, |&count| count));
            if result.map_err(HandshakeError::Io)? == 0 {
                return Err(HandshakeError::PeerClosed);
            }
        }
    }

    /// Passes the record to rustls.
    pub(crate) fn process(&mut self, connection: &mut Connection) -> Result<(), HandshakeError> {
        let mut unread = &self.record[..];
        while !unread.is_empty() {
            connection
                .read_tls(&mut unread)
                .map_err(HandshakeError::Io)?;
            connection.process_new_packets()?;
        }
        self.record.clear();
        Ok(())
    }
}

/// Returns `Ok(false)` if the error only means that the call must be repeated later.
///
/// # Errors
/// The reason for rejecting the connection, for every other error.
pub fn would_block(error: io::Error) -> Result<bool, RejectReason> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            Err(HandshakeError::PeerClosed.into())
        }
        _ => Err(error.into()),
    }
}
