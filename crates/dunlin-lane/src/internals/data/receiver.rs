//! The receiving half of a data lane.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};
use dunlin_linux::interrupted::until_not_interrupted;
use dunlin_linux::ktls::{self, Received};
use dunlin_linux::socket::{let_receive_window_grow, unread_bytes};
use dunlin_linux::{tcp, vectored};
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::guard::LaneGuard;
use super::{
    CLOSE_NOTIFY, Canceller, Counters, End, Link, PAGE_BYTES, PAGES_PER_FRAME, PlainConsent,
    Security,
};
use crate::internals::handshake::Secured;
use crate::internals::record::{
    ALERT, CONTENT_BYTES, Content, HEADER_BYTES, Landed, OVERHEAD_BYTES, OpenError, OpenHalf,
    Opened, RECEIVED_RECORD_BYTES, TAG_BYTES,
};

/// Maximum number of bytes per read from the socket: large enough to make system calls a small part
/// of the cost, small enough to stay in the second-level cache until opened.
const RECEIVE_BYTES: usize = 256 << 10;

const _: () = assert!(RECEIVE_BYTES >= 2 * RECEIVED_RECORD_BYTES + LINE_BYTES);

/// Maximum number of pieces of guest memory into which one record is opened. A record that spans
/// more pieces is opened in the receive buffer and then copied. A record of a
/// [`DataSender`](super::DataSender) holds four pages. If the sender's kernel seals it, the record
/// can begin in the middle of a page. Its bytes then belong to five pages.
const TARGETS_PER_RECORD: usize = 8;

/// The number of bytes to read from a record that is not data. An alert has two bytes, so a third
/// byte shows that the record is malformed.
const CONTROL_START: usize = 3;

/// Maximum number of bytes of the next frame's header that are read together with the end of a
/// payload. With a call of its own for each header, a plain lane needed about 8 % more CPU time.
const HEADER_AHEAD_BYTES: usize = 64;

/// With at least this round trip, a connection's receive window may grow to [`LONG_WINDOW_BYTES`]
/// before anything is read.
const LONG_ROUND_TRIP: Duration = Duration::from_millis(5);

/// By default the window grows to 64 KiB, and then more slowly than the sender's congestion window,
/// so it limits the lane in its first round trips. 1 MiB leaves the kernel's tuning enough time. A
/// value near the system's limit may end the tuning, because the kernel then enlarges the buffer no
/// further.
const LONG_WINDOW_BYTES: u32 = 1 << 20;

/// What a read returns at the end of a plain lane's connection.
const END: Received = Received {
    bytes: 0,
    control: None,
};

/// Why a call on a data lane failed. Only [`ReceiveError::Idle`] does not end the lane: no data is
/// lost, and the caller may read on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The connection ended without a close from the peer.
    #[error("the lane ended without a close: the peer died, or the connection was reset")]
    Truncated,
    /// The peer closed the lane in the middle of a frame.
    #[error("the peer closed the lane in the middle of a frame, which violates the protocol")]
    ClosedInside,
    /// The rest of a frame does not arrive.
    #[error("no data for {limit:?} in the middle of a frame: the peer or the network hangs")]
    Stalled {
        /// The lane's stall limit.
        limit: Duration,
    },
    /// The kernel has ended the connection, because the peer's host did not acknowledge data or
    /// keep-alive probes (`ETIMEDOUT`, or the reason that a router gave).
    #[error("the peer's host does not answer: it has failed, or the network drops packets")]
    Unanswered,
    /// No frame arrived within the caller's limit.
    #[error("no frame arrived for {limit:?}")]
    Idle {
        /// The limit of the call.
        limit: Duration,
    },
    /// This side used the lane's [`Canceller`].
    #[error("the lane was shut down on this side")]
    Cancelled,
    /// A record could not be opened.
    #[error(transparent)]
    Record(#[from] OpenError),
    /// The connection failed.
    #[error("the lane's connection failed: {0}")]
    Io(#[source] io::Error),
    /// An earlier error, or the close, has ended this lane.
    #[error("the lane has already ended")]
    Spent,
}

/// The receiving half of a data lane.
pub struct DataReceiver {
    link: Link,
    security: Security,
    /// Kept until the lane ends.
    guard: Option<Box<dyn LaneGuard>>,
    buffer: AlignedBytes,
    /// Received bytes that are not opened yet.
    sealed: Range<usize>,
    /// The range of opened bytes that are not consumed yet; precedes `sealed`.
    opened: Range<usize>,
    /// The length of the last frame's header, which is probably that of the next one.
    header_bytes: usize,
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

fn let_window_grow(stream: &TcpStream) -> io::Result<()> {
    if tcp::round_trip(stream)? >= LONG_ROUND_TRIP {
        let_receive_window_grow(stream, LONG_WINDOW_BYTES)?;
    }
    Ok(())
}

impl DataReceiver {
    /// Returns the receiving half of an encrypted lane. The lane fails if a frame that has begun
    /// makes no progress for `stall_limit`.
    ///
    /// # Errors
    /// The socket's options cannot be set.
    pub fn tls(secured: Secured, stall_limit: Duration) -> Result<Self, ReceiveError> {
        Self::new(secured.stream, secured.records.into(), stall_limit)
    }

    /// Returns the receiving half of an unencrypted lane.
    ///
    /// # Errors
    /// The socket's options cannot be set.
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
        let end = End::new(stream, security, stall_limit).map_err(ReceiveError::Io)?;
        Self::of(end)
    }

    /// Returns the receiving half of this end.
    pub(super) fn of(end: End) -> Result<Self, ReceiveError> {
        let End {
            link,
            security,
            guard,
            stall_limit,
        } = end;
        // With a timeout on the socket, reads need no separate call of poll(2).
        link.stream
            .set_read_timeout(Some(stall_limit))
            .map_err(ReceiveError::Io)?;
        let_window_grow(&link.stream).map_err(ReceiveError::Io)?;
        Ok(Self {
            link,
            security,
            guard,
            buffer: AlignedBytes::zeroed(RECEIVE_BYTES, LINE_BYTES),
            sealed: 0..0,
            opened: 0..0,
            header_bytes: 0,
            stall_limit,
            counters: Counters::default(),
            state: State::Open,
        })
    }

    /// Takes this half apart; `None` if bytes have been read from the connection, because they
    /// would be lost.
    pub(super) fn into_end(self) -> Option<End> {
        let is_untouched = self.state == State::Open
            && self.counters == Counters::default()
            && self.sealed.is_empty();
        is_untouched.then_some(End {
            link: self.link,
            security: self.security,
            guard: self.guard,
            stall_limit: self.stall_limit,
        })
    }

    /// Fills `header` with the beginning of the next frame; returns false if the peer closed the
    /// lane cleanly. Waits without limit, or until `idle_limit` has passed. The wait can exceed
    /// `idle_limit` by up to the lane's stall limit. On a plain lane, an end of the connection
    /// between two frames counts as a clean close.
    ///
    /// # Errors
    /// [`ReceiveError`].
    #[cfg(feature = "unstable-internals")]
    pub fn next(
        &mut self,
        header: &mut [u8],
        idle_limit: Option<Duration>,
    ) -> Result<bool, ReceiveError> {
        if header.is_empty() {
            return Ok(true);
        }
        self.header_bytes = header.len();
        let begin = Instant::now();
        let mut had_begun = false;
        while self.opened.is_empty() {
            match self.advance(header.len()) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // Part of a record has arrived, so a frame has begun.
                Err(error @ ReceiveError::Stalled { .. }) if self.has_begun() => {
                    // The kernel may have received this part after the read had timed out.
                    if !matches!(self.security, Security::Kernel(_)) || had_begun {
                        return Err(self.fail(error));
                    }
                    had_begun = true;
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

    /// Fills `out` with the next bytes of the frame. If the crypto library supports it, records are
    /// opened straight into `out`, without a copy. For this, `out` needs space for the record's
    /// content and one more byte; with less space the record is copied.
    ///
    /// # Errors
    /// [`ReceiveError`]. `out` then holds undefined bytes.
    #[cfg(feature = "unstable-internals")]
    pub fn read_exact(&mut self, mut out: &mut [u8]) -> Result<(), ReceiveError> {
        if out.len() >= PAGE_BYTES && !matches!(self.security, Security::Tls(_)) {
            return self.payload_by_kernel(std::iter::once(VolatileSlice::from(out)));
        }
        while !out.is_empty() {
            let count = if self.opened.is_empty() {
                match self.advance_out(out) {
                    Ok(Some(count)) => count,
                    Ok(None) => return Err(self.fail(self.early_end())),
                    Err(error) => return Err(self.fail(error)),
                }
            } else {
                let count = out.len().min(self.opened.len());
                let part = self.opened.start..self.opened.start + count;
                self.opened.start = part.end;
                out[..count].copy_from_slice(&self.buffer[part]);
                count
            };
            out = &mut out[count..];
        }
        Ok(())
    }

    /// Opens the next record into `out` if it has enough space, and returns the length of the
    /// content; otherwise works like [`Self::advance`] and returns 0. Returns `None` at a clean
    /// close.
    fn advance_out(&mut self, out: &mut [u8]) -> Result<Option<usize>, ReceiveError> {
        if let (State::Open, Security::Tls(keys)) = (self.state, &mut self.security) {
            let sealed = &mut self.buffer[self.sealed.clone()];
            if let Some(header) = sealed.first_chunk::<HEADER_BYTES>() {
                let bytes = OpenHalf::record_bytes(*header)?;
                let inner_bytes = bytes - HEADER_BYTES - TAG_BYTES;
                if let (Some(record), Some(inner)) =
                    (sealed.get_mut(..bytes), out.get_mut(..inner_bytes))
                {
                    let opened = keys.open.open_into(record, inner)?;
                    self.sealed.start += bytes;
                    let Opened::Data(count) = opened else {
                        self.state = State::Closed;
                        return Ok(None);
                    };
                    self.count_record(count);
                    return Ok(Some(count));
                }
            }
        }
        Ok(self.advance(out.len())?.then_some(0))
    }

    /// Passes the next `bytes` of the frame to `take`, in order, in pieces that refer to the opened
    /// records. Pieces may have any length and may end within a page.
    ///
    /// # Errors
    /// [`ReceiveError`]; `take` may have received some of the pieces.
    #[cfg(feature = "unstable-internals")]
    pub fn payload(
        &mut self,
        mut bytes: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), ReceiveError> {
        while bytes > 0 {
            let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
            if self.opened.is_empty() {
                match self.advance(wanted) {
                    Ok(true) => {}
                    Ok(false) => return Err(self.fail(self.early_end())),
                    Err(error) => return Err(self.fail(error)),
                }
                continue;
            }
            let count = wanted.min(self.opened.len());
            let part = self.opened.start..self.opened.start + count;
            self.opened.start = part.end;
            take(&self.buffer[part]);
            bytes -= count as u64;
        }
        Ok(())
    }

    /// Fills `targets` in order with the next bytes of the frame. If the crypto library supports
    /// it, records are opened straight into the targets, without a copy.
    ///
    /// # Errors
    /// [`ReceiveError`]. Targets may then be partly filled, or contain bytes that the peer never
    /// sent. Before the targets are used, the peer must send the frame's whole content again.
    #[cfg(feature = "unstable-internals")]
    pub fn payload_into<'m>(
        &mut self,
        mut targets: impl Iterator<Item = VolatileSlice<'m>>,
    ) -> Result<(), ReceiveError> {
        if !matches!(self.security, Security::Tls(_)) {
            return self.payload_by_kernel(targets);
        }
        let mut waiting = Targets::<TARGETS_PER_RECORD>::default();
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
                Ok(false) => return Err(self.fail(self.early_end())),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Like [`Self::payload_into`], but the kernel writes into the targets: the bytes of a plain
    /// lane, or the content of the records that it opens. On a plain lane, the read of the last
    /// target also reads the next frame's header, if it has arrived. The kernel would open the
    /// whole record of that header into a buffer of its own, and copy the content from there.
    fn payload_by_kernel<'m>(
        &mut self,
        mut targets: impl Iterator<Item = VolatileSlice<'m>>,
    ) -> Result<(), ReceiveError> {
        let mut waiting = Targets::<PAGES_PER_FRAME>::default();
        loop {
            while waiting.count < PAGES_PER_FRAME {
                let Some(target) = targets.next() else { break };
                waiting.push(target);
            }
            if waiting.bytes == 0 {
                return Ok(());
            }
            if !self.opened.is_empty() {
                let taken = waiting.fill(&self.buffer[self.opened.clone()]);
                self.opened.start += taken;
                continue;
            }
            match self.state {
                State::Open => {}
                State::Closed => return Err(self.fail(self.early_end())),
                State::Failed => return Err(ReceiveError::Spent),
            }
            let mut pieces = [VolatileSlice::from(&mut [][..]); PAGES_PER_FRAME + 1];
            let wanted = waiting.bytes;
            let count = waiting.first_bytes(wanted, &mut pieces).unwrap_or(0);
            let mut header = [0; HEADER_AHEAD_BYTES];
            let reads_ahead =
                waiting.count < PAGES_PER_FRAME && matches!(self.security, Security::Plain);
            if reads_ahead {
                let ahead = self.header_bytes.min(HEADER_AHEAD_BYTES);
                pieces[count] = VolatileSlice::from(&mut header[..ahead]);
            }
            match self.read_content(&pieces[..count + usize::from(reads_ahead)]) {
                Ok(END) => return Err(self.fail(self.early_end())),
                Ok(Received {
                    bytes,
                    control: None,
                }) => {
                    let ahead = bytes.saturating_sub(wanted);
                    waiting.drop_first(bytes - ahead);
                    self.opened = 0..ahead;
                    self.buffer[..ahead].copy_from_slice(&header[..ahead]);
                }
                // The record is not data, but its bytes are now in guest pages. The error below
                // makes the caller discard these pages' content.
                Ok(Received {
                    bytes,
                    control: Some(content_type),
                }) => {
                    let mut start = [0; CONTROL_START];
                    let mut filled = 0;
                    for piece in &pieces[..count] {
                        let left = bytes.min(CONTROL_START) - filled;
                        filled += piece.copy_to(&mut start[filled..][..left]);
                    }
                    let error = match self.control(content_type, start, filled) {
                        Ok(_) => ReceiveError::ClosedInside,
                        Err(error) => error,
                    };
                    return Err(self.fail(error));
                }
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Opens the next record into the targets if possible; otherwise works like
    /// [`Self::advance`].
    fn advance_into<'m>(
        &mut self,
        waiting: &mut Targets<'m, TARGETS_PER_RECORD>,
        targets: &mut impl Iterator<Item = VolatileSlice<'m>>,
    ) -> Result<bool, ReceiveError> {
        let wanted = waiting.bytes;
        let (State::Open, Security::Tls(keys)) = (self.state, &mut self.security) else {
            return self.advance(wanted);
        };
        let sealed = &mut self.buffer[self.sealed.clone()];
        let Some(header) = sealed.first_chunk::<HEADER_BYTES>() else {
            return self.advance(wanted);
        };
        let bytes = OpenHalf::record_bytes(*header)?;
        let content = bytes.saturating_sub(OVERHEAD_BYTES);
        // A record shorter than a page may be an alert, and is cheap to copy.
        if content < PAGE_BYTES || !keys.open.opens_into_guest() || sealed.len() < bytes {
            return self.advance(wanted);
        }
        while waiting.bytes < content && waiting.count < TARGETS_PER_RECORD {
            let Some(target) = targets.next() else { break };
            waiting.push(target);
        }
        let mut pages = [VolatileSlice::from(&mut [][..]); TARGETS_PER_RECORD];
        let Some(count) = waiting.first_bytes(content, &mut pages) else {
            return self.advance(wanted);
        };
        let landed = keys
            .open
            .open_guest(&mut sealed[..bytes], &pages[..count])?;
        let start = self.sealed.start + HEADER_BYTES;
        self.sealed.start += bytes;
        match landed {
            Landed::InGuest => {
                waiting.drop_first(content);
                self.count_record(content);
                Ok(true)
            }
            Landed::InRecord(opened) => Ok(self.record_opened(opened, start)),
        }
    }

    /// Sends close_notify, either as the reply to the peer's close or to announce early that this
    /// side no longer reads. If the peer's connection has already ended, no reply is needed.
    ///
    /// # Errors
    /// The socket's error; the lane is closed in any case.
    #[cfg(feature = "unstable-internals")]
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

    /// Statistics of what has been received.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns a handle that cancels this lane from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.link.clone())
    }

    fn answer(&mut self) -> io::Result<()> {
        self.link.stream.set_write_timeout(Some(self.stall_limit))?;
        match &mut self.security {
            Security::Tls(keys) => {
                let close = keys.seal.close_notify().map_err(io::Error::other)?;
                (&*self.link.stream).write_all(&close)?;
            }
            Security::Kernel(_) => ktls::send_record(&*self.link.stream, ALERT, &CLOSE_NOTIFY)?,
            Security::Plain => {}
        }
        self.link.stream.shutdown(Shutdown::Write)
    }

    /// Opens the next record, or reads from the socket once. Returns false at a clean close.
    /// Unless this process opens the records, reads at most `wanted` bytes, so that the following
    /// bytes can go straight to their target.
    fn advance(&mut self, wanted: usize) -> Result<bool, ReceiveError> {
        match self.state {
            State::Open => {}
            State::Closed => return Ok(false),
            State::Failed => return Err(ReceiveError::Spent),
        }
        let keys = match &mut self.security {
            Security::Tls(keys) => keys,
            Security::Kernel(_) | Security::Plain => return self.advance_by_kernel(wanted),
        };
        let sealed = &mut self.buffer[self.sealed.clone()];
        if let Some(header) = sealed.first_chunk::<HEADER_BYTES>() {
            let bytes = OpenHalf::record_bytes(*header)?;
            if let Some(record) = sealed.get_mut(..bytes) {
                let opened = keys.open.open(record)?;
                let start = self.sealed.start + HEADER_BYTES;
                self.sealed.start += bytes;
                return Ok(self.record_opened(opened, start));
            }
        }
        // Move the partial record to the front, so that every read has almost the whole buffer
        // available and reuses the same cached bytes. The read begins at a cache line.
        let bytes = self.sealed.len();
        let start = bytes.next_multiple_of(LINE_BYTES) - bytes;
        self.buffer.copy_within(self.sealed.clone(), start);
        self.sealed = start..start + bytes;
        if self.fill()? == 0 {
            return Err(if self.link.is_cancelled() {
                ReceiveError::Cancelled
            } else {
                ReceiveError::Truncated
            });
        }
        Ok(true)
    }

    /// Stores the position of an opened record's content, which begins at `start`. Returns false at
    /// a clean close.
    fn record_opened(&mut self, opened: Opened, start: usize) -> bool {
        match opened {
            Opened::Data(count) => {
                self.opened = start..start + count;
                self.count_record(count);
                true
            }
            Opened::Closed => {
                self.state = State::Closed;
                false
            }
        }
    }

    fn count_record(&mut self, content: usize) {
        self.counters.records += 1;
        self.counters.content_bytes += content as u64;
    }

    fn advance_by_kernel(&mut self, wanted: usize) -> Result<bool, ReceiveError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let room = wanted.min(buffer.len());
        let read = self.read_content(&[VolatileSlice::from(&mut buffer[..room])]);
        self.buffer = buffer;
        let received = read?;
        if received == END {
            self.state = State::Closed;
            return Ok(false);
        }
        let Received { bytes, control } = received;
        let Some(content_type) = control else {
            self.opened = 0..bytes;
            return Ok(true);
        };
        let mut start = [0; CONTROL_START];
        let count = bytes.min(CONTROL_START);
        start[..count].copy_from_slice(&self.buffer[..count]);
        self.control(content_type, start, count)
    }

    /// The error of an end that the peer should not have caused yet. A plain lane has no
    /// authenticated close, so there the peer may have died.
    #[cfg(feature = "unstable-internals")]
    #[must_use]
    pub fn ended_early(&self) -> ReceiveError {
        self.early_end()
    }

    fn early_end(&self) -> ReceiveError {
        match self.security {
            Security::Plain => ReceiveError::Truncated,
            _ => ReceiveError::ClosedInside,
        }
    }

    /// Whether part of the next frame has arrived, although none of it can be read yet.
    fn has_begun(&self) -> bool {
        match &self.security {
            // The kernel returns a record only after all of it has arrived, so check for unread
            // bytes.
            Security::Kernel(_) => unread_bytes(&*self.link.stream).is_ok_and(|bytes| bytes > 0),
            _ => !self.sealed.is_empty(),
        }
    }

    /// Reads once from the socket of a plain lane, or of one on which the kernel opens the records.
    /// Returns data, or a record of another type. The end of a plain lane's connection is [`END`],
    /// that of another lane's connection is an error.
    fn read_content(&mut self, into: &[VolatileSlice<'_>]) -> Result<Received, ReceiveError> {
        let is_plain = matches!(self.security, Security::Plain);
        let received = self.read_once(|stream| match is_plain {
            true => vectored::receive(stream, into).map(|bytes| Received {
                bytes,
                control: None,
            }),
            false => ktls::receive_into(stream, into),
        })?;
        let content = received.bytes as u64;
        match received.control {
            None if content == 0 && self.link.is_cancelled() => Err(ReceiveError::Cancelled),
            None if content == 0 && !is_plain => Err(ReceiveError::Truncated),
            None => {
                // The kernel does not report the number of records, so count the minimum.
                let records = match is_plain {
                    true => 0,
                    false => content.div_ceil(CONTENT_BYTES as u64),
                };
                self.counters.records += records;
                self.counters.content_bytes += content;
                self.counters.wire_bytes += content + records * OVERHEAD_BYTES as u64;
                Ok(received)
            }
            Some(_) => Ok(received),
        }
    }

    /// Interprets a record that is not data and begins with the first `count` bytes of `content`.
    /// Returns false at a clean close.
    fn control(
        &mut self,
        content_type: u8,
        mut content: [u8; CONTROL_START],
        mut count: usize,
    ) -> Result<bool, ReceiveError> {
        if content_type == ALERT && count == 1 {
            // The caller read only one byte, so the second byte of the alert is still in the
            // socket.
            let rest = &mut content[1..];
            count += self.read_once(|stream| ktls::receive(stream, rest))?.bytes;
        }
        match Content::of_control(content_type, &content[..count])?.of_lane()? {
            Opened::Closed => {
                self.state = State::Closed;
                Ok(false)
            }
            Opened::Data(_) => Ok(true),
        }
    }

    /// Reads once and appends to the buffered bytes; returns zero at the connection's end.
    fn fill(&mut self) -> Result<usize, ReceiveError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let end = self.sealed.end;
        let read = self.read_once(|mut stream| stream.read(&mut buffer[end..]));
        self.buffer = buffer;
        let count = read?;
        self.sealed.end += count;
        self.counters.wire_bytes += count as u64;
        Ok(count)
    }

    fn read_once<T>(
        &mut self,
        mut read: impl FnMut(&TcpStream) -> io::Result<T>,
    ) -> Result<T, ReceiveError> {
        let result = until_not_interrupted(|| {
            self.counters.calls += 1;
            read(&self.link.stream)
        });
        result.map_err(|error| match error.kind() {
            _ if self.link.is_cancelled() => ReceiveError::Cancelled,
            io::ErrorKind::WouldBlock => ReceiveError::Stalled {
                limit: self.stall_limit,
            },
            io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => ReceiveError::Unanswered,
            io::ErrorKind::ConnectionReset => ReceiveError::Truncated,
            _ => match OpenError::of_kernel(&error) {
                Some(record) => record.into(),
                None => ReceiveError::Io(error),
            },
        })
    }

    fn fail(&mut self, error: ReceiveError) -> ReceiveError {
        self.state = State::Failed;
        error
    }
}

/// Pieces of guest memory to be filled in order.
struct Targets<'m, const ROOM: usize> {
    slots: [Option<VolatileSlice<'m>>; ROOM],
    count: usize,
    bytes: usize,
}

impl<const ROOM: usize> Default for Targets<'_, ROOM> {
    fn default() -> Self {
        Self {
            slots: [None; ROOM],
            count: 0,
            bytes: 0,
        }
    }
}

impl<'m, const ROOM: usize> Targets<'m, ROOM> {
    /// Appends a piece; there must be space for it.
    fn push(&mut self, target: VolatileSlice<'m>) {
        if target.is_empty() {
            return;
        }
        self.bytes += target.len();
        self.slots[self.count] = Some(target);
        self.count += 1;
    }

    /// Copies as much of `content` as fits, and returns the number of bytes copied.
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

    /// Stores in `pages` the pieces that the first `bytes` bytes fill, and returns the number of
    /// these pieces; `None` if all pieces together hold fewer bytes.
    fn first_bytes(&self, bytes: usize, pages: &mut [VolatileSlice<'m>]) -> Option<usize> {
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

    /// Removes the first `bytes` bytes; the pieces must hold at least that many.
    fn drop_first(&mut self, mut bytes: usize) {
        self.bytes -= bytes;
        let mut removed = 0;
        for slot in &mut self.slots {
            let Some(target) = slot else { break };
            if bytes < target.len() {
                *slot = target.offset(bytes).ok();
                break;
            }
            bytes -= target.len();
            *slot = None;
            removed += 1;
        }
        self.slots.rotate_left(removed);
        self.count -= removed;
    }
}
