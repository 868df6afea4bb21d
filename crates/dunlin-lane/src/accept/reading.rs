//! Reading a handshake, and why a connection is rejected.

use std::io::{self, Read};
use std::net::TcpStream;
use std::time::Duration;

use dunlin_proto::wire::DecodeError;
use thiserror::Error;

use crate::handshake::{FLIGHT_LIMIT_BYTES, HandshakeError};
use crate::record::{HEADER_BYTES, RECEIVED_RECORD_BYTES};

/// Connections that are not authenticated yet, at the same time. Each costs
/// at most [`FLIGHT_LIMIT_BYTES`](crate::handshake::FLIGHT_LIMIT_BYTES) and what rustls keeps, so that all of them
/// stay under 8 MiB.
pub const PENDING_LIMIT: usize = 64;
/// From accepting a connection to the end of its opening.
pub const OPENING_DEADLINE: Duration = Duration::from_secs(10);

/// Why a connection came to nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RejectReason {
    /// The handshake failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// It took too long.
    #[error("the peer was not done with its opening after {} s", OPENING_DEADLINE.as_secs())]
    Deadline,
    /// Too many others came after it.
    #[error("{PENDING_LIMIT} other connections wanted its place before it was authenticated")]
    Evicted,
    /// Another wants to be accepted, and nothing else is left to do it with.
    #[error(
        "its place was given to the next, since this process or host has no descriptor or memory \
         left: raise the limit of open files (`ulimit -n`), or end what holds them; {0}"
    )]
    Shortage(io::Error),
    /// The first words make no sense.
    #[error("the peer's first words are not Dunlin's: {0}")]
    Opening(#[from] DecodeError),
    /// It neither began a TLS handshake nor a plain lane.
    #[error(
        "the peer's first byte is {0:#04x}: neither TLS nor a plain lane of Dunlin; find out who connects to this port"
    )]
    Unknown(u8),
    /// The connection broke.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// Reads a handshake record by record, so that not a byte behind it is taken.
#[derive(Default)]
pub(crate) struct Reading {
    /// The record that is being read, or has been; whoever takes it empties this.
    pub(crate) record: Vec<u8>,
    /// Bytes of all whole records.
    pub(crate) received: usize,
}

impl Reading {
    /// Reads on until one whole record is there; `false` when the socket has
    /// no more for now.
    pub(crate) fn next(&mut self, mut stream: &TcpStream) -> Result<bool, RejectReason> {
        loop {
            let wanted = match self.record.first_chunk::<HEADER_BYTES>() {
                None => HEADER_BYTES - self.record.len(),
                Some(&[content_type, major, _, high, low]) => {
                    if !(20..=23).contains(&content_type) || major != 3 {
                        let start = [content_type, major, 0, high, low];
                        return Err(HandshakeError::NotTls { start }.into());
                    }
                    let whole = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
                    if whole > RECEIVED_RECORD_BYTES || self.received + whole > FLIGHT_LIMIT_BYTES {
                        return Err(HandshakeError::TooLong.into());
                    }
                    if self.record.len() == whole {
                        self.received += whole;
                        return Ok(true);
                    }
                    whole - self.record.len()
                }
            };
            let start = self.record.len();
            self.record.resize(start + wanted, 0);
            let result = stream.read(&mut self.record[start..]);
            self.record
                .truncate(start + result.as_ref().map_or(0, |&count| count));
            match result {
                Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                Ok(_) => {}
                Err(error) => return would_block(error),
            }
        }
    }
}

/// Whether an error only means that nothing is there yet.
///
/// # Errors
/// It is another error.
pub fn would_block(error: io::Error) -> Result<bool, RejectReason> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            Err(HandshakeError::PeerClosed.into())
        }
        _ => Err(error.into()),
    }
}
