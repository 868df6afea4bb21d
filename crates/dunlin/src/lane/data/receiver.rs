//! The receiving end of a data lane.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::{Canceller, Counters, Keys, Link, PlainConsent, Security};
use crate::lane::handshake::Secured;
use crate::lane::record::{HEADER_BYTES, OpenError, OpenHalf, Opened, RECEIVED_RECORD_BYTES};

/// Bytes read from the socket at once, at most. Large enough that a system call is a small part
/// of the cost, small enough to stay in the second-level cache until it is opened.
const RECEIVE_BYTES: usize = 256 << 10;

const _: () = assert!(RECEIVE_BYTES >= 2 * RECEIVED_RECORD_BYTES);

/// Why a data lane ended other than cleanly. The lane must be given up, save for
/// [`ReceiveError::Idle`], which loses nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The connection ended without the peer's saying so.
    #[error(
        "the lane was cut: the peer died, or someone ended the connection; it did not close it"
    )]
    Truncated,
    /// The peer closed the lane in the middle of something.
    #[error("the peer closed the lane in the middle of a frame: it broke the protocol")]
    ClosedInside,
    /// The rest of something does not come.
    #[error(
        "nothing came for {limit:?} in the middle of a frame: the peer hangs, or the network does"
    )]
    Stalled {
        /// The limit set for this lane.
        limit: Duration,
    },
    /// No frame came for longer than the caller wanted to wait.
    #[error("no frame came for {limit:?}")]
    Idle {
        /// The limit given with the call.
        limit: Duration,
    },
    /// The lane's [`Canceller`] was used.
    #[error("the lane was shut down on this side")]
    Cancelled,
    /// A record could not be opened.
    #[error(transparent)]
    Record(#[from] OpenError),
    /// The connection broke.
    #[error("the lane's connection failed: {0}")]
    Io(#[source] io::Error),
    /// An earlier error or the close ended this lane.
    #[error("the lane has already ended")]
    Spent,
}

/// The receiving end of a data lane.
pub struct DataReceiver {
    link: Link,
    security: Security,
    buffer: Box<[u8]>,
    /// What came and is not opened yet.
    sealed: Range<usize>,
    /// What is opened and not taken yet; stands before `sealed`.
    opened: Range<usize>,
    stall_limit: Duration,
    counters: Counters,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Closed,
    Failed,
}

impl DataReceiver {
    /// The receiving end of an encrypted lane. Inside a frame, no progress for `stall_limit` is
    /// an error.
    ///
    /// # Errors
    /// [`ReceiveError::Io`] when the socket's options cannot be set.
    pub fn tls(secured: Secured, stall_limit: Duration) -> Result<Self, ReceiveError> {
        let Secured {
            stream, seal, open, ..
        } = secured;
        Self::new(
            stream,
            Security::Tls(Box::new(Keys { seal, open })),
            stall_limit,
        )
    }

    /// The receiving end of a lane in the clear.
    ///
    /// # Errors
    /// [`ReceiveError::Io`] when the socket's options cannot be set.
    pub fn plain(
        stream: TcpStream,
        _: PlainConsent,
        stall_limit: Duration,
    ) -> Result<Self, ReceiveError> {
        Self::new(stream, Security::Plain, stall_limit)
    }

    fn new(
        stream: TcpStream,
        security: Security,
        stall_limit: Duration,
    ) -> Result<Self, ReceiveError> {
        // The socket's own time-out costs no system call per read.
        stream
            .set_read_timeout(Some(stall_limit))
            .map_err(ReceiveError::Io)?;
        Ok(Self {
            link: Link::new(stream).map_err(ReceiveError::Io)?,
            security,
            buffer: vec![0; RECEIVE_BYTES].into(),
            sealed: 0..0,
            opened: 0..0,
            stall_limit,
            counters: Counters::default(),
            state: State::Open,
        })
    }

    /// Fills `header` with the beginning of the next frame; false when the peer closed the lane
    /// cleanly instead. Waits as long as the lane lives, or for `idle_limit` (in steps of the
    /// stall limit) if there is one. On a plain lane any end between frames counts as clean.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub fn next(
        &mut self,
        header: &mut [u8],
        idle_limit: Option<Duration>,
    ) -> Result<bool, ReceiveError> {
        if header.is_empty() {
            return Ok(true);
        }
        let begin = Instant::now();
        while self.opened.is_empty() {
            match self.advance() {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // Part of a record is here, so a frame has begun.
                Err(error @ ReceiveError::Stalled { .. }) if !self.sealed.is_empty() => {
                    return Err(self.fail(error));
                }
                Err(ReceiveError::Stalled { .. }) => match idle_limit {
                    Some(limit) if begin.elapsed() >= limit => {
                        return Err(ReceiveError::Idle { limit });
                    }
                    _ => {}
                },
                Err(error) => return Err(self.fail(error)),
            }
        }
        self.read_exact(header)?;
        Ok(true)
    }

    /// Fills `out` with what follows in the frame.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub fn read_exact(&mut self, mut out: &mut [u8]) -> Result<(), ReceiveError> {
        let bytes = out.len() as u64;
        self.payload(bytes, |part| {
            let (filled, rest) = std::mem::take(&mut out).split_at_mut(part.len());
            filled.copy_from_slice(part);
            out = rest;
        })
    }

    /// Hands the next `bytes` of the frame to `take`, piece by piece and in order, from where they
    /// were opened. The pieces have any length; those of a [`DataSender`](super::DataSender)'s
    /// pages end where a page ends, and a peer of another make may cut elsewhere.
    ///
    /// # Errors
    /// [`ReceiveError`]; some of the pieces have been handed out then.
    pub fn payload(
        &mut self,
        mut bytes: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), ReceiveError> {
        while bytes > 0 {
            if self.opened.is_empty() {
                match self.advance() {
                    Ok(true) => {}
                    Ok(false) => return Err(self.fail(ReceiveError::ClosedInside)),
                    Err(error) => return Err(self.fail(error)),
                }
                continue;
            }
            let count = usize::try_from(bytes)
                .unwrap_or(usize::MAX)
                .min(self.opened.len());
            let part = self.opened.start..self.opened.start + count;
            self.opened.start = part.end;
            take(&self.buffer[part]);
            bytes -= count as u64;
        }
        Ok(())
    }

    /// Answers the peer's close, or tells it early that nothing more will be read. A peer that is
    /// gone already needs no answer.
    ///
    /// # Errors
    /// What the socket says; the lane is closed in any case.
    pub fn close(mut self) -> io::Result<Counters> {
        match self.answer() {
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::NotConnected
                        | io::ErrorKind::BrokenPipe
                        | io::ErrorKind::ConnectionReset
                ) =>
            {
                Err(error)
            }
            _ => Ok(self.counters),
        }
    }

    /// What has been received.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// A handle to end this lane from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.link.clone())
    }

    /// The socket, for its addresses and options.
    pub fn socket(&self) -> &TcpStream {
        &self.link.stream
    }

    fn answer(&mut self) -> io::Result<()> {
        if let Security::Tls(keys) = &mut self.security {
            let close = keys.seal.close_notify().map_err(io::Error::other)?;
            self.link.stream.set_write_timeout(Some(self.stall_limit))?;
            (&*self.link.stream).write_all(&close)?;
        }
        self.link.stream.shutdown(Shutdown::Write)
    }

    /// Opens the next record, or reads from the socket once. False at a clean end.
    fn advance(&mut self) -> Result<bool, ReceiveError> {
        match self.state {
            State::Open => {}
            State::Closed => return Ok(false),
            State::Failed => return Err(ReceiveError::Spent),
        }
        let Security::Tls(keys) = &mut self.security else {
            return self.advance_plain();
        };
        let sealed = &mut self.buffer[self.sealed.clone()];
        if let Some(header) = sealed.first_chunk::<HEADER_BYTES>() {
            let bytes = OpenHalf::record_bytes(*header)?;
            if let Some(record) = sealed.get_mut(..bytes) {
                let opened = keys.open.open(record)?;
                let start = self.sealed.start + HEADER_BYTES;
                self.sealed.start += bytes;
                match opened {
                    Opened::Data(count) => {
                        self.opened = start..start + count;
                        self.counters.records += 1;
                        self.counters.content_bytes += count as u64;
                    }
                    Opened::Closed => self.state = State::Closed,
                }
                return Ok(opened != Opened::Closed);
            }
        }
        // The part of a record that is here moves to the front, so every read has the whole
        // buffer before it, and always the same, cached bytes.
        self.buffer.copy_within(self.sealed.clone(), 0);
        self.sealed = 0..self.sealed.len();
        if self.fill()? == 0 {
            return Err(if self.link.is_cancelled() {
                ReceiveError::Cancelled
            } else {
                ReceiveError::Truncated
            });
        }
        Ok(true)
    }

    fn advance_plain(&mut self) -> Result<bool, ReceiveError> {
        self.sealed = 0..0;
        let count = self.fill()?;
        if count == 0 {
            if self.link.is_cancelled() {
                return Err(ReceiveError::Cancelled);
            }
            self.state = State::Closed;
            return Ok(false);
        }
        self.sealed = count..count;
        self.opened = 0..count;
        self.counters.content_bytes += count as u64;
        Ok(true)
    }

    /// Reads once behind what is there; zero at the connection's end.
    fn fill(&mut self) -> Result<usize, ReceiveError> {
        loop {
            self.counters.calls += 1;
            match (&*self.link.stream).read(&mut self.buffer[self.sealed.end..]) {
                Ok(count) => {
                    self.sealed.end += count;
                    self.counters.wire_bytes += count as u64;
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(match error.kind() {
                        _ if self.link.is_cancelled() => ReceiveError::Cancelled,
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                            ReceiveError::Stalled {
                                limit: self.stall_limit,
                            }
                        }
                        io::ErrorKind::ConnectionReset => ReceiveError::Truncated,
                        _ => ReceiveError::Io(error),
                    });
                }
            }
        }
    }

    fn fail(&mut self, error: ReceiveError) -> ReceiveError {
        self.state = State::Failed;
        error
    }
}
