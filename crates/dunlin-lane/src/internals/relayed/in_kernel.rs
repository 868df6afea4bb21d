//! A relay's connection with kernel TLS. The kernel moves data from socket to socket. The records
//! that are not data come to this process, and the module `messages` interprets them.

use std::io;
use std::net::TcpStream;

use dunlin_linux::ktls::Direction;

use super::RelayError;
pub use super::messages::{Control, Opening, Sealing};
use super::messages::{Verdict, not_renewed};
use crate::internals::kernel;
use crate::internals::record::OpenError;

/// Maximum number of records sent by one call: one for each slot of a pipe.
pub const CALL_RECORDS: u64 = 16;

/// What a record that is not data means for the relay.
#[derive(Debug, PartialEq, Eq)]
pub enum Held {
    /// The record does not concern the other side of the relay.
    Nothing,
    /// The peer's authenticated close.
    Closed,
}

impl Sealing {
    /// Makes the kernel seal with the next key. Call this after the key update is sent.
    ///
    /// # Errors
    /// [`RelayError::Renewal`]; nothing more may be sent.
    pub fn has_renewed(&mut self, stream: &TcpStream) -> Result<(), RelayError> {
        let secrets = self.next_key()?;
        kernel::renew(stream, Direction::Sending, &secrets).map_err(not_renewed)
    }
}

impl Opening {
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
                let secrets = self.next_key()?;
                kernel::renew(stream, Direction::Receiving, &secrets).map_err(not_renewed)?;
                Ok(Held::Nothing)
            }
        }
    }

    /// Converts a failed read; `None` if the error does not concern a record.
    pub fn failed(error: &io::Error) -> Option<RelayError> {
        OpenError::of_kernel(error).map(RelayError::Open)
    }
}
