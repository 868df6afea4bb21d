//! The receiving end of a data lane.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use dunlin_linux::ktls::{self, Received};
use dunlin_linux::socket::unread_bytes;
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::{
    CLOSE_NOTIFY, Canceller, Counters, Keys, Link, PAGE_BYTES, PAGES_PER_FRAME, PlainConsent,
    Security,
};
use crate::handshake::Secured;
use crate::record::{
    ALERT, CONTENT_BYTES, Content, HEADER_BYTES, Landed, OVERHEAD_BYTES, OpenError, OpenHalf,
    Opened, RECEIVED_RECORD_BYTES,
};

/// Bytes read from the socket at once, at most. Large enough that a system call is a small part
/// of the cost, small enough to stay in the second-level cache until it is opened.
const RECEIVE_BYTES: usize = 256 << 10;

const _: () = assert!(RECEIVE_BYTES >= 2 * RECEIVED_RECORD_BYTES);

/// Pieces of guest memory that one record is opened into at most; one that spreads further is
/// opened in place and copied. A record of a [`DataSender`](super::DataSender) holds four pages.
const TARGETS_PER_RECORD: usize = 8;

/// What is looked at of a record that is no data: more than an alert's two bytes is no alert.
const CONTROL_START: usize = 3;

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
        Self::new(secured.stream, secured.records.into(), stall_limit)
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
            match self.advance(header.len()) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // Part of a record is here, so a frame has begun.
                Err(error @ ReceiveError::Stalled { .. }) if self.has_begun() => {
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
            let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
            if self.opened.is_empty() {
                match self.advance(wanted) {
                    Ok(true) => {}
                    Ok(false) => return Err(self.fail(ReceiveError::ClosedInside)),
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
        if let Security::Kernel(_) = &self.security {
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
                Ok(false) => return Err(self.fail(ReceiveError::ClosedInside)),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// The same where the kernel opens, which it does where the targets lie.
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
            if self.state != State::Open {
                return Err(ReceiveError::Spent);
            }
            let mut pieces = [VolatileSlice::from(&mut [][..]); PAGES_PER_FRAME];
            let wanted = waiting.bytes;
            let count = waiting.first_bytes(wanted, &mut pieces).unwrap_or(0);
            let read = self.read_opened(|stream| ktls::receive_into(stream, &pieces[..count]));
            match read {
                Ok(Received {
                    bytes,
                    control: None,
                }) => waiting.drop_first(bytes),
                // Its bytes stand where pages belong, which the caller will never use or have
                // sent again.
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
                    let error = match self.control(content_type, &start[..filled]) {
                        Ok(_) => ReceiveError::ClosedInside,
                        Err(error) => error,
                    };
                    return Err(self.fail(error));
                }
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Opens the next record into the targets if it can and fits, else as [`Self::advance`].
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
        // What is shorter than a page may be an alert, and is cheap to copy.
        if !keys.opens_into_guest(content) || sealed.len() < bytes {
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

    /// Opens the next record, or reads from the socket once. False at a clean end. From the kernel
    /// no more is read than is `wanted`: what follows can go straight to where it belongs.
    fn advance(&mut self, wanted: usize) -> Result<bool, ReceiveError> {
        match self.state {
            State::Open => {}
            State::Closed => return Ok(false),
            State::Failed => return Err(ReceiveError::Spent),
        }
        let keys = match &mut self.security {
            Security::Tls(keys) => keys,
            Security::Kernel(_) => return self.advance_by_kernel(wanted),
            Security::Plain => return self.advance_plain(),
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

    fn advance_by_kernel(&mut self, wanted: usize) -> Result<bool, ReceiveError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let room = wanted.min(buffer.len());
        let read = self.read_opened(|stream| ktls::receive(stream, &mut buffer[..room]));
        self.buffer = buffer;
        let Received { bytes, control } = read?;
        let Some(content_type) = control else {
            self.opened = 0..bytes;
            return Ok(true);
        };
        let mut start = [0; CONTROL_START];
        let count = bytes.min(CONTROL_START);
        start[..count].copy_from_slice(&self.buffer[..count]);
        self.control(content_type, &start[..count])
    }

    /// Whether something of the next frame has come, although nothing of it can be read yet.
    fn has_begun(&self) -> bool {
        match &self.security {
            // The kernel keeps a record until it is whole.
            Security::Kernel(_) => unread_bytes(&*self.link.stream).is_ok_and(|bytes| bytes > 0),
            _ => !self.sealed.is_empty(),
        }
    }

    /// Reads once what the kernel has opened, which is something or an error.
    fn read_opened(
        &mut self,
        read: impl FnMut(&TcpStream) -> io::Result<Received>,
    ) -> Result<Received, ReceiveError> {
        let received = self.read_once(read)?;
        let content = received.bytes as u64;
        match received.control {
            None if content == 0 && self.link.is_cancelled() => Err(ReceiveError::Cancelled),
            None if content == 0 => Err(ReceiveError::Truncated),
            None => {
                // The kernel does not say how many records they came in: at least so many.
                let records = content.div_ceil(CONTENT_BYTES as u64);
                self.counters.records += records;
                self.counters.content_bytes += content;
                self.counters.wire_bytes += content + records * OVERHEAD_BYTES as u64;
                Ok(received)
            }
            Some(_) => Ok(received),
        }
    }

    /// What a record means that is no data and begins with `start`. False at a clean end.
    fn control(&mut self, content_type: u8, start: &[u8]) -> Result<bool, ReceiveError> {
        let mut content = [0; CONTROL_START];
        let mut count = start.len();
        content[..count].copy_from_slice(start);
        if content_type == ALERT && count == 1 {
            // Whoever asks for a byte gets no more of it; the rest waits.
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
        loop {
            self.counters.calls += 1;
            match read(&self.link.stream) {
                Ok(came) => return Ok(came),
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
                        _ => match OpenError::of_kernel(&error) {
                            Some(record) => record.into(),
                            None => ReceiveError::Io(error),
                        },
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
    fn first_bytes(&self, bytes: usize, pages: &mut [VolatileSlice<'m>; ROOM]) -> Option<usize> {
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
