//! The sending half of a data lane.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};
use dunlin_linux::interrupted::until_not_interrupted;
use dunlin_linux::ktls;
use dunlin_linux::memory::is_zero_page;
use dunlin_linux::socket::{send_now, send_space, set_pacing_rate, wait_writable};
use dunlin_linux::vectored;
use dunlin_proto::lanes::KeyUsage;
use dunlin_proto::negotiate::{LaneOpen, SessionSecret};
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::guard::LaneGuard;
use super::{
    BATCH_BYTES, CLOSE_NOTIFY, Canceller, Counters, End, HEADER_LIMIT_BYTES, Link, PAGE_BYTES,
    PAGES_PER_FRAME, PlainConsent, RECORDS_PER_FRAME, Security,
};
use crate::internals::handshake::Secured;
use crate::internals::proof::prove;
use crate::internals::record::{
    ALERT, Alert, CONTENT_BYTES, Content, HEADER_BYTES, OVERHEAD_BYTES, OpenError, OpenHalf,
    RECEIVED_RECORD_BYTES, RECORD_BYTES, RECORD_LIMIT, SealError,
};

/// Maximum duration of each read for the peer's alert after a failed write.
const REASON_WAIT: Duration = Duration::from_millis(200);

/// Maximum length of a payload that shares a record with its header. It is one page, because
/// copying a page costs less than sealing and opening one more record.
const SHARED_BYTES: usize = PAGE_BYTES;
const _: () = assert!(HEADER_LIMIT_BYTES + SHARED_BYTES <= CONTENT_BYTES);
/// The largest offset in the buffer at which the payload's first record begins. The frame's start
/// is rounded down to a multiple of [`LINE_BYTES`], so the record can begin up to `LINE_BYTES - 1`
/// bytes earlier.
///
/// Reasons for the number: the buffer begins at a page. The kernel copies fast from a frame that
/// begins at a multiple of [`LINE_BYTES`]. The payload's records then begin 97 to 512 bytes
/// after the beginning of a page, so copies from pages of guest memory are fast too. See
/// [`dunlin_linux::aligned`].
const FRONT: usize = HEADER_LIMIT_BYTES + 160;
const _: () = assert!(HEADER_LIMIT_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(FRONT >= HEADER_LIMIT_BYTES + OVERHEAD_BYTES + LINE_BYTES);
const _: () = assert!(FRONT % PAGE_BYTES > 2 * LINE_BYTES);
const _: () = assert!(FRONT % PAGE_BYTES + RECORDS_PER_FRAME * OVERHEAD_BYTES <= 512);

/// Why a frame could not be sent. The lane must be closed, because the peer may have received part
/// of the frame. After [`SendError::HeaderTooLong`] and [`SendError::PayloadTooLong`], however,
/// nothing was sent, and the lane can still be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SendError {
    /// The connection accepted no data for the stall limit.
    #[error("the peer accepted no data for {limit:?}: the peer or the network hangs")]
    Stalled {
        /// The lane's stall limit.
        limit: Duration,
    },
    /// The kernel has ended the connection, because the peer's host did not acknowledge data or
    /// keep-alive probes (`ETIMEDOUT`, or the reason that a router gave).
    #[error("the peer's host does not answer: it has failed, or the network drops packets")]
    Unanswered,
    /// This side used the lane's [`Canceller`].
    #[error("the lane was shut down on this side")]
    Cancelled,
    /// The peer sent an alert.
    #[error("the peer ended the lane with alert {0}")]
    PeerAlert(Alert),
    /// The peer closed the connection without an alert.
    #[error("the peer closed the connection without an alert: see the peer's log for the reason")]
    PeerClosed,
    /// Sealing failed. Replace the lane after [`SealError::Limit`].
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The header exceeds the limit.
    #[error("frame header of {bytes} bytes exceeds the limit of {HEADER_LIMIT_BYTES}")]
    HeaderTooLong {
        /// The header's length.
        bytes: usize,
    },
    /// The payload exceeds the limit.
    #[error("frame payload of {bytes} bytes exceeds the limit of {BATCH_BYTES}")]
    PayloadTooLong {
        /// The payload's length.
        bytes: usize,
    },
    /// The connection failed.
    #[error("the lane's connection failed: {0}")]
    Io(#[source] io::Error),
    /// An earlier error has ended this lane.
    #[error("the lane has already failed")]
    Spent,
}

/// Why data could not be added to a frame. The frame is unchanged.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// There is no space for another page: finish the frame and begin the next.
    #[error("frame is full")]
    Full,
    /// The length is not that of one page.
    #[error("invalid page length {bytes}, expected {PAGE_BYTES}")]
    Length {
        /// The given length.
        bytes: usize,
    },
}

/// The sending half of a data lane.
pub struct DataSender {
    link: Link,
    security: Security,
    /// Space for the header. If this process seals the records, followed by the contiguous records
    /// of a full frame.
    buffer: AlignedBytes,
    stall_limit: Duration,
    counters: Counters,
    spent: bool,
    guard: Option<Box<dyn LaneGuard>>,
}

/// A frame being filled. If a frame is dropped before it is finished, nothing is sent.
pub struct Frame<'a> {
    sender: &'a mut DataSender,
    /// Payload bytes added so far.
    filled: usize,
    /// The payload in guest memory, with one slice per page. Unused slices are empty.
    guest: [VolatileSlice<'a>; PAGES_PER_FRAME],
}

/// The payload of a frame, at most [`BATCH_BYTES`].
enum Payload<'p, 'm> {
    /// Pages in guest memory.
    Guest(&'p [VolatileSlice<'m>]),
    /// Memory that no other thread writes.
    Private(&'p mut [u8]),
}

impl DataSender {
    /// Returns the sending half of an encrypted lane. The lane fails if a send makes no progress
    /// for `stall_limit`.
    ///
    /// # Errors
    /// The socket's options cannot be set.
    pub fn tls(secured: Secured, stall_limit: Duration) -> Result<Self, SendError> {
        Self::new(secured.stream, secured.records.into(), stall_limit)
    }

    /// Returns the sending half of an unencrypted lane.
    ///
    /// # Errors
    /// The socket's options cannot be set.
    pub fn plain(
        stream: TcpStream,
        _: PlainConsent,
        stall_limit: Duration,
    ) -> Result<Self, SendError> {
        Self::new(stream, Security::Plain, stall_limit)
    }

    fn new(
        stream: TcpStream,
        security: Security,
        stall_limit: Duration,
    ) -> Result<Self, SendError> {
        let end = End::new(stream, security, stall_limit).map_err(SendError::Io)?;
        Self::of(end)
    }

    /// Keeps `guard` until the lane ends, and notifies it before each frame is sent.
    #[must_use]
    #[cfg(feature = "unstable-internals")]
    pub fn guarded_by(mut self, guard: Box<dyn LaneGuard>) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Begins a frame.
    #[cfg(feature = "unstable-internals")]
    pub fn frame(&mut self) -> Frame<'_> {
        Frame {
            sender: self,
            filled: 0,
            guest: [VolatileSlice::from(&mut [][..]); PAGES_PER_FRAME],
        }
    }

    /// Sends a frame without a payload.
    ///
    /// # Errors
    /// [`SendError`].
    #[cfg(feature = "unstable-internals")]
    pub fn send(&mut self, header: &[u8]) -> Result<(), SendError> {
        self.transmit(header, Payload::Guest(&[]), None)
    }

    /// Sends a frame with a payload in memory that no other thread writes, like [`Frame::finish`].
    /// If the crypto library supports it, a payload of more than a page is sealed without a copy.
    /// The payload keeps its content. The reference is mutable only because the kernel gets the
    /// payload of some lanes as a [`VolatileSlice`], like guest memory.
    ///
    /// # Errors
    /// [`SendError`]. After [`SendError::PayloadTooLong`] and [`SendError::HeaderTooLong`] nothing
    /// was sent, and the lane can still be used.
    #[cfg(feature = "unstable-internals")]
    pub fn send_with(&mut self, header: &[u8], payload: &mut [u8]) -> Result<(), SendError> {
        self.transmit(header, Payload::Private(payload), None)
    }

    /// Like [`Self::send_with`], and calls `would_block` once before the call waits for space in the
    /// connection's send buffer. If the kernel seals, `would_block` is called before the send if the
    /// send may have to wait.
    ///
    /// # Errors
    /// As for [`Self::send_with`].
    #[cfg(feature = "unstable-internals")]
    pub fn send_with_notice(
        &mut self,
        header: &[u8],
        payload: &mut [u8],
        would_block: &mut dyn FnMut(),
    ) -> Result<(), SendError> {
        self.transmit(header, Payload::Private(payload), Some(would_block))
    }

    /// Sends the lane's first message, `open`, with a proof that this side has the session's
    /// `secret`.
    ///
    /// # Errors
    /// [`SendError`].
    #[cfg(feature = "unstable-internals")]
    pub fn present(&mut self, secret: &SessionSecret, open: &LaneOpen) -> Result<(), SendError> {
        let open = LaneOpen {
            mac: prove(secret, open),
            ..open.clone()
        };
        let mut bytes = Vec::new();
        // Encoding cannot fail, because every field has a fixed length.
        open.encode(&mut bytes)
            .map_err(|error| SendError::Io(io::Error::other(error)))?;
        self.send(&bytes)
    }

    /// Returns the sending half of this end.
    pub(super) fn of(end: End) -> Result<Self, SendError> {
        let End {
            link,
            security,
            guard,
            stall_limit,
        } = end;
        // With a timeout on the socket, writes need no separate call of poll(2).
        link.stream
            .set_write_timeout(Some(stall_limit))
            .map_err(SendError::Io)?;
        let buffer_bytes = match &security {
            Security::Tls(_) => FRONT + RECORDS_PER_FRAME * RECORD_BYTES,
            Security::Kernel(_) | Security::Plain => HEADER_LIMIT_BYTES,
        };
        Ok(Self {
            link,
            security,
            buffer: AlignedBytes::zeroed(buffer_bytes, PAGE_BYTES),
            stall_limit,
            counters: Counters::default(),
            spent: false,
            guard,
        })
    }

    /// Takes this half apart.
    pub(super) fn into_end(self) -> End {
        End {
            link: self.link,
            security: self.security,
            guard: self.guard,
            stall_limit: self.stall_limit,
        }
    }

    /// Ends the lane's data. On an encrypted lane, sends close_notify; without it, the peer treats
    /// the end of the connection as a failure.
    ///
    /// # Errors
    /// [`SendError`].
    #[cfg(feature = "unstable-internals")]
    pub fn finish(mut self) -> Result<Counters, SendError> {
        if self.spent {
            return Err(SendError::Spent);
        }
        match &mut self.security {
            Security::Tls(keys) => {
                let close = keys.seal.close_notify()?;
                self.buffer[..close.len()].copy_from_slice(&close);
                self.write(0, close.len(), None)?;
            }
            Security::Kernel(_) => ktls::send_record(&*self.link.stream, ALERT, &CLOSE_NOTIFY)
                .map_err(|error| self.failure(error))?,
            Security::Plain => {}
        }
        self.link
            .stream
            .shutdown(Shutdown::Write)
            .map_err(|error| self.failure(error))?;
        Ok(self.counters)
    }

    /// Statistics of what has been sent.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The number of data records that this lane may still send; `None` if it has no limit. A full
    /// frame takes [`RECORDS_PER_FRAME`] records, plus one record for its header.
    fn records_left(&self) -> Option<u64> {
        match &self.security {
            Security::Tls(keys) => Some(keys.seal.records_left()),
            Security::Kernel(keys) => Some(RECORD_LIMIT.saturating_sub(keys.sent)),
            Security::Plain => None,
        }
    }

    /// Returns how near the lane's key is to its limit of `most` records. At the limit, the lane
    /// must be replaced.
    #[cfg(feature = "unstable-internals")]
    pub fn key_usage(&self, most: u64) -> KeyUsage {
        /// Records reserved for a chunk in progress, a mark frame and the close.
        const FOR_END: u64 = 2 * RECORDS_PER_FRAME as u64;
        let used = self.counters.records;
        if self.records_left().is_none() {
            KeyUsage::Fresh
        } else if used + FOR_END >= most {
            KeyUsage::Spent
        } else if used >= most / 8 * 7 {
            KeyUsage::NearLimit
        } else {
            KeyUsage::Fresh
        }
    }

    /// Limits this lane's rate in bytes per second; `None` removes the limit.
    ///
    /// # Errors
    /// An error from setsockopt(2).
    #[cfg(feature = "unstable-internals")]
    pub fn set_rate(&self, bytes_per_second: Option<u64>) -> io::Result<()> {
        set_pacing_rate(&*self.link.stream, bytes_per_second)
    }

    /// Returns a handle that cancels this lane from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.link.clone())
    }

    /// Returns the socket, to read its addresses or set its options.
    #[cfg(feature = "unstable-internals")]
    pub fn socket(&self) -> &TcpStream {
        &self.link.stream
    }

    /// Seals and writes the header and the payload.
    fn transmit(
        &mut self,
        header: &[u8],
        mut payload: Payload<'_, '_>,
        would_block: Option<&mut dyn FnMut()>,
    ) -> Result<(), SendError> {
        if self.spent {
            return Err(SendError::Spent);
        }
        if let Some(guard) = &self.guard {
            guard.before_send();
        }
        let bytes = header.len();
        if bytes > HEADER_LIMIT_BYTES {
            return Err(SendError::HeaderTooLong { bytes });
        }
        let filled = payload.len();
        if filled > BATCH_BYTES {
            return Err(SendError::PayloadTooLong { bytes: filled });
        }
        let Security::Tls(keys) = &mut self.security else {
            return match &mut payload {
                Payload::Guest(pages) => self.transmit_pieces(header, pages, would_block),
                Payload::Private(bytes) => {
                    let bytes = VolatileSlice::from(&mut **bytes);
                    self.transmit_pieces(header, &[bytes], would_block)
                }
            };
        };
        let shares = bytes > 0 && (1..=SHARED_BYTES).contains(&filled);
        // The number of bytes in the buffer before the payload's first record. If the header shares
        // that record, the record's overhead is not counted here.
        let before = match bytes {
            0 => 0,
            _ if shares => bytes,
            _ => OVERHEAD_BYTES + bytes,
        };
        let start = (FRONT - before) / LINE_BYTES * LINE_BYTES;
        let front = start + before;
        self.buffer[start + HEADER_BYTES..][..bytes].copy_from_slice(header);
        let mut end = front;
        // Until all of the frame is written, the lane counts as failed, because a frame that fails
        // partway must not be resent with the same sequence numbers.
        self.spent = true;
        if shares {
            end += filled + OVERHEAD_BYTES;
            let record = &mut self.buffer[start..end];
            payload.copy_to(&mut record[HEADER_BYTES + bytes..][..filled]);
            keys.seal.seal(record)?;
            self.counters.records += 1;
        } else {
            if bytes > 0 {
                keys.seal.seal(&mut self.buffer[start..front])?;
                self.counters.records += 1;
            }
            for at in (0..filled).step_by(CONTENT_BYTES) {
                let content = at..filled.min(at + CONTENT_BYTES);
                let begin = front + at / CONTENT_BYTES * RECORD_BYTES;
                end = begin + content.len() + OVERHEAD_BYTES;
                let sealed = &mut self.buffer[begin..end];
                match &payload {
                    Payload::Guest(pages) => {
                        let pages = &pages[content.start / PAGE_BYTES..content.end / PAGE_BYTES];
                        keys.seal.seal_guest(pages, sealed)?;
                    }
                    Payload::Private(bytes) => keys.seal.seal_from(&bytes[content], sealed)?,
                }
                self.counters.records += 1;
            }
        }
        self.write(start, end, would_block)?;
        self.counters.content_bytes += (bytes + filled) as u64;
        self.spent = false;
        Ok(())
    }

    /// Sends the header and the payload of a plain lane, or of one on which the kernel seals the
    /// records. The payload goes straight to the kernel and is read once. The header is sent with the
    /// payload: alone, it would wake the peer an additional time.
    fn transmit_pieces(
        &mut self,
        header: &[u8],
        payload: &[VolatileSlice<'_>],
        mut would_block: Option<&mut dyn FnMut()>,
    ) -> Result<(), SendError> {
        let bytes = header.len() + payload.iter().map(VolatileSlice::len).sum::<usize>();
        // Only the records that the kernel seals have a limit.
        if let Some(left) = self.records_left() {
            if left < bytes.div_ceil(CONTENT_BYTES) as u64 {
                return Err(SealError::Limit.into());
            }
            // The records and the kernel's buffers take more memory than the payload.
            let enough = 2 * bytes;
            let socket = &*self.link.stream;
            if let Some(would_block) = would_block.take()
                && !(send_space(socket).is_ok_and(|space| space >= enough)
                    && wait_writable(socket, Instant::now()).unwrap_or(false))
            {
                would_block();
            }
        }
        // A frame that fails partway must not be resent.
        self.spent = true;
        let lead = &mut self.buffer[..header.len()];
        lead.copy_from_slice(header);
        let mut pieces = [VolatileSlice::from(&mut [][..]); PAGES_PER_FRAME + 1];
        pieces[0] = VolatileSlice::from(lead);
        pieces[1..][..payload.len()].copy_from_slice(payload);
        let mut rest = &mut pieces[usize::from(header.is_empty())..=payload.len()];
        while !rest.is_empty() {
            let taken = until_not_interrupted(|| {
                self.counters.calls += 1;
                match &would_block {
                    Some(_) => vectored::send_now(&*self.link.stream, rest),
                    None => vectored::send(&*self.link.stream, rest),
                }
            });
            if let Err(error) = &taken
                && error.kind() == io::ErrorKind::WouldBlock
                && let Some(would_block) = would_block.take()
            {
                would_block();
                continue;
            }
            let taken = match taken {
                Ok(taken) => taken,
                Err(error) => return Err(self.failure(error)),
            };
            self.counters.wire_bytes += taken as u64;
            if let Security::Kernel(keys) = &mut self.security {
                let records = taken.div_ceil(CONTENT_BYTES) as u64;
                keys.sent += records;
                self.counters.records += records;
                self.counters.wire_bytes += records * OVERHEAD_BYTES as u64;
            }
            rest = behind(rest, taken);
        }
        self.counters.content_bytes += bytes as u64;
        self.spent = false;
        Ok(())
    }

    /// Writes a part of the buffer. Calls `would_block` once before it waits.
    fn write(
        &mut self,
        mut start: usize,
        end: usize,
        mut would_block: Option<&mut dyn FnMut()>,
    ) -> Result<(), SendError> {
        while start < end {
            let written = until_not_interrupted(|| {
                self.counters.calls += 1;
                let bytes = &self.buffer[start..end];
                match &would_block {
                    Some(_) => send_now(&*self.link.stream, bytes),
                    None => (&*self.link.stream).write(bytes),
                }
            });
            if let Err(error) = &written
                && error.kind() == io::ErrorKind::WouldBlock
                && let Some(would_block) = would_block.take()
            {
                would_block();
                continue;
            }
            let count = written.map_err(|error| self.failure(error))?;
            start += count;
            self.counters.wire_bytes += count as u64;
        }
        Ok(())
    }

    /// Converts a failed write to an error, with the peer's alert if there is one.
    fn failure(&mut self, error: io::Error) -> SendError {
        self.spent = true;
        if self.link.is_cancelled() {
            return SendError::Cancelled;
        }
        match error.kind() {
            io::ErrorKind::WouldBlock => SendError::Stalled {
                limit: self.stall_limit,
            },
            io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => SendError::Unanswered,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => match self.reason() {
                Some(alert) => SendError::PeerAlert(alert),
                None => SendError::PeerClosed,
            },
            _ => SendError::Io(error),
        }
    }

    /// Reads the peer's alert. The side that accepts a connection refuses a certificate only after
    /// this side has completed the handshake, so the reason is read here.
    fn reason(&mut self) -> Option<Alert> {
        self.link.stream.set_read_timeout(Some(REASON_WAIT)).ok()?;
        let keys = match &mut self.security {
            Security::Tls(keys) => keys,
            Security::Kernel(_) => {
                let mut alert = [0; 2];
                let received = ktls::receive(&*self.link.stream, &mut alert).ok()?;
                return match Content::of_control(received.control?, &alert[..received.bytes]) {
                    Err(OpenError::Alert { alert }) => Some(alert),
                    _ => None,
                };
            }
            Security::Plain => return None,
        };
        let record = self.buffer.get_mut(..RECEIVED_RECORD_BYTES)?;
        (&*self.link.stream)
            .read_exact(&mut record[..HEADER_BYTES])
            .ok()?;
        let header = *record.first_chunk()?;
        let bytes = OpenHalf::record_bytes(header).ok()?;
        (&*self.link.stream)
            .read_exact(&mut record[HEADER_BYTES..bytes])
            .ok()?;
        match keys.open.open(&mut record[..bytes]) {
            Err(OpenError::Alert { alert }) => Some(alert),
            _ => None,
        }
    }
}

impl<'a> Frame<'a> {
    /// Payload bytes added so far.
    pub fn payload_bytes(&self) -> usize {
        self.filled
    }

    /// Adds a page of guest memory, unless it is zero. Returns whether it was added. If the crypto
    /// library supports it, the pages of a frame with more than one page are sealed straight from
    /// guest memory, without a copy.
    ///
    /// The page is read again when [`Frame::finish`] seals the frame. If the guest writes to the
    /// page in the meantime, a dirty log that is fetched later must contain the write, as for every
    /// page that is sent.
    ///
    /// # Errors
    /// [`FrameError`]; nothing was added.
    pub fn guest_page(&mut self, page: &VolatileSlice<'a>) -> Result<bool, FrameError> {
        let bytes = page.len();
        if bytes != PAGE_BYTES {
            return Err(FrameError::Length { bytes });
        }
        let slot = self
            .guest
            .get_mut(self.filled / PAGE_BYTES)
            .ok_or(FrameError::Full)?;
        if is_zero_page(page) {
            return Ok(false);
        }
        *slot = *page;
        self.filled += PAGE_BYTES;
        Ok(true)
    }

    /// Seals the frame and sends it, header first, in as few writes as the socket allows. If the
    /// kernel seals, or if the payload is at most one page, the header shares the payload's first
    /// record. Otherwise the header has its own record before the payload. An empty header gets
    /// no record.
    ///
    /// # Errors
    /// [`SendError`]. After [`SendError::HeaderTooLong`] nothing was sent, and the lane can still
    /// be used.
    pub fn finish(self, header: &[u8]) -> Result<(), SendError> {
        let pages = &self.guest[..self.filled / PAGE_BYTES];
        self.sender.transmit(header, Payload::Guest(pages), None)
    }
}

/// Returns `pieces` without their first `bytes` bytes.
fn behind<'s, 'm>(
    pieces: &'s mut [VolatileSlice<'m>],
    mut bytes: usize,
) -> &'s mut [VolatileSlice<'m>] {
    let mut removed = 0;
    for piece in pieces.iter_mut() {
        if bytes < piece.len() {
            if let Ok(rest) = piece.offset(bytes) {
                *piece = rest;
            }
            break;
        }
        bytes -= piece.len();
        removed += 1;
    }
    &mut pieces[removed..]
}

impl Payload<'_, '_> {
    fn len(&self) -> usize {
        match self {
            Self::Guest(pages) => pages.len() * PAGE_BYTES,
            Self::Private(bytes) => bytes.len(),
        }
    }

    /// Copies the whole payload to `content`, which must have its length.
    fn copy_to(&self, content: &mut [u8]) {
        match self {
            Self::Guest(pages) => {
                for (page, slot) in pages.iter().zip(content.chunks_mut(PAGE_BYTES)) {
                    page.copy_to(slot);
                }
            }
            Self::Private(bytes) => content.copy_from_slice(bytes),
        }
    }
}
