//! The receiving end of a data lane.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use thiserror::Error;
use vm_memory::VolatileSlice;

use super::{Canceller, Counters, Keys, Link, PAGE_BYTES, PlainConsent, Security};
use crate::lane::handshake::Secured;
use crate::lane::record::{
    HEADER_BYTES, Landed, OVERHEAD_BYTES, OpenError, OpenHalf, Opened, RECEIVED_RECORD_BYTES,
};

/// Bytes read from the socket at once, at most. Large enough that a system call is a small part
/// of the cost, small enough to stay in the second-level cache until it is opened.
const RECEIVE_BYTES: usize = 256 << 10;

const _: () = assert!(RECEIVE_BYTES >= 2 * RECEIVED_RECORD_BYTES);

/// Pieces of guest memory that one record is opened into at most; one that spreads further is
/// opened in place and copied. A record of a [`DataSender`](super::DataSender) holds four pages.
const TARGETS_PER_RECORD: usize = 8;

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

    /// Fills `targets`, one after the other, with the next bytes of the frame. Where the lane's
    /// crypto library can, records are opened straight into them, and nothing is copied.
    ///
    /// # Errors
    /// [`ReceiveError`]. Some targets have been filled then, and others may hold bytes that
    /// nobody sent: whatever the frame was to write must be sent again, or never be used.
    pub fn payload_into<'m>(
        &mut self,
        mut targets: impl Iterator<Item = VolatileSlice<'m>>,
    ) -> Result<(), ReceiveError> {
        let mut waiting = Targets::default();
        loop {
            if waiting.bytes == 0 {
                let Some(target) = targets.next() else {
                    return Ok(());
                };
                waiting.push(target);
                continue;
            }
            if !self.opened.is_empty() {
                let taken = waiting.fill(&self.buffer[self.opened.clone()]);
                self.opened.start += taken;
                continue;
            }
            match self.advance_into(&mut waiting, &mut targets) {
                Ok(true) => {}
                Ok(false) => return Err(self.fail(ReceiveError::ClosedInside)),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Opens the next record into the targets if it can and fits, else as [`Self::advance`].
    fn advance_into<'m>(
        &mut self,
        waiting: &mut Targets<'m>,
        targets: &mut impl Iterator<Item = VolatileSlice<'m>>,
    ) -> Result<bool, ReceiveError> {
        let (State::Open, Security::Tls(keys)) = (self.state, &mut self.security) else {
            return self.advance();
        };
        let sealed = &mut self.buffer[self.sealed.clone()];
        let Some(header) = sealed.first_chunk::<HEADER_BYTES>() else {
            return self.advance();
        };
        let bytes = OpenHalf::record_bytes(*header)?;
        let content = bytes.saturating_sub(OVERHEAD_BYTES);
        // What is shorter than a page may be an alert, and is cheap to copy.
        if !keys.opens_into_guest(content) || sealed.len() < bytes {
            return self.advance();
        }
        while waiting.bytes < content && waiting.count < TARGETS_PER_RECORD {
            let Some(target) = targets.next() else { break };
            waiting.push(target);
        }
        let mut pages = [VolatileSlice::from(&mut [][..]); TARGETS_PER_RECORD];
        let Some(count) = waiting.first_bytes(content, &mut pages) else {
            return self.advance();
        };
        let landed = keys
            .open
            .open_guest(&mut sealed[..bytes], &pages[..count])?;
        let start = self.sealed.start + HEADER_BYTES;
        self.sealed.start += bytes;
        match landed {
            Landed::InGuest => {
                waiting.drop_first(content);
                self.took_record(content);
                Ok(true)
            }
            Landed::InRecord(opened) => Ok(self.took(opened, start)),
        }
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
                return Ok(self.took(opened, start));
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

    /// Notes what a record held, whose content begins at `start`. False at a clean end.
    fn took(&mut self, opened: Opened, start: usize) -> bool {
        match opened {
            Opened::Data(count) => {
                self.opened = start..start + count;
                self.took_record(count);
                true
            }
            Opened::Closed => {
                self.state = State::Closed;
                false
            }
        }
    }

    fn took_record(&mut self, content: usize) {
        self.counters.records += 1;
        self.counters.content_bytes += content as u64;
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

impl Keys {
    /// Whether a record with so much content may be opened into guest memory.
    fn opens_into_guest(&self, content: usize) -> bool {
        content >= PAGE_BYTES && self.open.opens_into_guest()
    }
}

/// Pieces of guest memory that wait for their bytes, in order.
struct Targets<'m> {
    slots: [Option<VolatileSlice<'m>>; TARGETS_PER_RECORD],
    count: usize,
    bytes: usize,
}

impl Default for Targets<'_> {
    fn default() -> Self {
        Self {
            slots: [None; TARGETS_PER_RECORD],
            count: 0,
            bytes: 0,
        }
    }
}

impl<'m> Targets<'m> {
    /// Adds a piece behind the others; there must be room for one.
    fn push(&mut self, target: VolatileSlice<'m>) {
        if target.is_empty() {
            return;
        }
        self.bytes += target.len();
        self.slots[self.count] = Some(target);
        self.count += 1;
    }

    /// Copies as much of `content` as there is room for; returns how much that was.
    fn fill(&mut self, content: &[u8]) -> usize {
        let mut rest = content;
        while let (false, Some(target)) = (rest.is_empty(), self.slots[0]) {
            let count = rest.len().min(target.len());
            target.copy_from(&rest[..count]);
            rest = &rest[count..];
            self.drop_first(count);
        }
        content.len() - rest.len()
    }

    /// Writes the pieces that hold the first `bytes` to `pages` and returns how many those are;
    /// none when there are fewer bytes.
    fn first_bytes(
        &self,
        bytes: usize,
        pages: &mut [VolatileSlice<'m>; TARGETS_PER_RECORD],
    ) -> Option<usize> {
        let mut left = bytes;
        for (position, target) in self.slots.iter().flatten().enumerate() {
            let count = left.min(target.len());
            pages[position] = target.subslice(0, count).ok()?;
            left -= count;
            if left == 0 {
                return Some(position + 1);
            }
        }
        None
    }

    /// Takes the first `bytes` away; there must be as many.
    fn drop_first(&mut self, mut bytes: usize) {
        self.bytes -= bytes;
        let mut gone = 0;
        for slot in &mut self.slots {
            let Some(target) = slot else { break };
            if bytes < target.len() {
                *slot = target.offset(bytes).ok();
                break;
            }
            bytes -= target.len();
            *slot = None;
            gone += 1;
        }
        self.slots.rotate_left(gone);
        self.count -= gone;
    }
}
