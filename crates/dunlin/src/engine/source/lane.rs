//! A lane's thread at the source: connects, proves that the lane belongs to the
//! session, and sends the work that the schedule gives it.

use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use dunlin_lane::data::{DataSender, SendError};
use dunlin_lane::dial::{Connector, DialCancel, DialError, LaneDialer, LaneRequest};
use dunlin_lane::peers::Principal;
use dunlin_lane::policy::ClientTls;
use dunlin_linux::socket::wait_readable;
use dunlin_proto::control::Accept;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::limits::{
    CHUNK_PAGES, MAX_CHUNK_HEADER_BYTES, MAX_PAGES_LOOKED_AT, MAX_RANGES_PER_CHUNK, PAGE_BYTES,
};
use dunlin_proto::negotiate::{LaneDirection, LaneOpen, SessionId};
use dunlin_proto::schedule::{ChunkPlan, Work};
use tracing::{Span, info_span};

use super::super::fault::{Fault, OrFault};
use super::super::memory::region_index;
use super::super::vmm::GuestMemory;
use super::event::SessionEvent;
use super::work_queue::{WorkQueue, given_up};

/// A lane requests more pages for a chunk only if the chunk has room for at least this many pages.
/// Each request takes a lock, so requests for fewer pages are not worthwhile.
const LEAST_ROOM: u64 = CHUNK_PAGES / 4;

/// How long a lane looks for non-zero pages before it sends its chunk. The search has a limit
/// because each page in swap costs a page fault, and the destination receives nothing in the
/// meantime.
const LOOK_LIMIT: Duration = Duration::from_millis(10);

/// Parameters common to all lanes of a session.
pub(super) struct LaneTerms {
    pub(super) tls: ClientTls,
    pub(super) dialer: Arc<dyn LaneDialer>,
    pub(super) connector: Arc<dyn Connector>,
    pub(super) version: u16,
    pub(super) session: SessionId,
    pub(super) accept: Accept,
    /// The address of the control lane, used if the destination names no endpoints.
    pub(super) to: String,
    pub(super) peer: Principal,
    pub(super) rate: Option<u64>,
    /// Number of TLS records that a lane may send before a new lane replaces it.
    pub(super) records: u64,
    pub(super) memory: Arc<dyn GuestMemory>,
}

/// The state of a lane's thread.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) terms: Arc<LaneTerms>,
    /// Whether this lane is opened after the first lanes have been established.
    pub(super) is_replacement: bool,
    pub(super) deadline: Instant,
    pub(super) work_queue: Arc<WorkQueue>,
    pub(super) events: Sender<SessionEvent>,
    /// The session's span.
    pub(super) span: Span,
}

impl Lane {
    /// The thread's body. Reports the end of the lane to the session.
    pub(super) fn run(self) {
        let _lane = info_span!(parent: &self.span, "lane", lane = self.number).entered();
        let body = || {
            let sender = self.connect()?;
            self.send_all(sender)
        };
        // `body` calls the VMM's code. A panic there must be reported, otherwise the session would
        // wait for this lane forever.
        let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
            let what = format!("the thread of lane {} panicked", self.number);
            Err(Fault::new(FaultCode::Internal, what))
        });
        // Sending fails only after the session has ended.
        let _ = self.events.send(SessionEvent::LaneEnded {
            lane: self.number,
            result,
        });
    }

    fn connect(&self) -> Result<DataSender, Fault> {
        let _open = info_span!("open").entered();
        let what = "cannot create a socket pair for a lane";
        let cancel = DialCancel::new().or_fault(FaultCode::LaneLost, what)?;
        let own = cancel.clone();
        self.interrupted_by(move || own.cancel())?;
        let terms = &self.terms;
        let endpoints = terms.accept.endpoints.as_slice();
        let request = LaneRequest {
            endpoint: match endpoints.len() {
                0 => &terms.to,
                some => &endpoints[usize::from(self.number - 1) % some],
            },
            peer: &terms.peer,
            tls: &terms.tls,
            deadline: self.deadline,
            cancel: &cancel,
            connector: &terms.connector,
        };
        let dialled = terms.dialer.dial(&request);
        let mut sender = dialled.map_err(|error| self.not_opened(error))?;
        let canceller = sender.canceller();
        self.work_queue.connected(self.number, canceller.clone());
        self.interrupted_by(move || canceller.shutdown())?;
        sender
            .set_rate(terms.rate)
            .or_fault(FaultCode::LaneLost, "cannot set the lane's rate")?;
        let secret = &terms.accept.secret;
        let (version, from_here) = (terms.version, LaneDirection::FromDialer);
        let open = LaneOpen::unproved(version, terms.session, self.number, from_here);
        let presented = sender.present(secret, &open);
        presented.map_err(|error| self.failed(error))?;
        Ok(sender)
    }

    fn not_opened(&self, error: DialError) -> Fault {
        let may_retry = self.is_replacement && !matches!(error, DialError::OtherPeer { .. });
        // A permanent error of one of the first lanes applies to all lanes. An error of a later
        // lane can be temporary, except if the host that answered is not the control lane's peer.
        let code = error.permanent().filter(|_| !may_retry);
        let number = self.number;
        let fault = |what: String| Fault::new(code.unwrap_or(FaultCode::LaneLost), what);
        match error {
            DialError::Connect { endpoint, source } => {
                fault(format!("lane {number} cannot reach {endpoint}")).because(source)
            }
            DialError::Handshake { source, .. } => {
                fault(format!("cannot secure lane {number}")).because(source)
            }
            DialError::OtherPeer { .. } => fault(format!(
                "lane {number} reached a different peer than the control lane"
            )),
            other => fault(format!("cannot open lane {number}")).because(other),
        }
    }

    fn interrupted_by(&self, interrupt: impl Fn() + Send + 'static) -> Result<(), Fault> {
        self.work_queue
            .interrupted_by(self.number, Box::new(interrupt))
    }

    fn send_all(&self, mut sender: DataSender) -> Result<(), Fault> {
        let mut frames = Frames::default();
        let opened_bytes = sender.counters().wire_bytes;
        loop {
            let key_usage = sender.key_usage(self.terms.records);
            let work = self.work_queue.next(
                self.number,
                key_usage,
                &mut frames.plan,
                // Sending fails only after the session has ended.
                |event| drop(self.events.send(event)),
                || has_ended(sender.socket()),
            )?;
            // The opening of the lane does not count as traffic of the migration.
            let sent = |bytes: u64| bytes.saturating_sub(opened_bytes);
            match work {
                Work::Stop => return Err(given_up(self.number)),
                Work::Wait => {}
                Work::Chunk => {
                    self.send_chunk(&mut sender, &mut frames)?;
                    let wire_bytes = sent(sender.counters().wire_bytes);
                    self.work_queue
                        .account(self.number, |traffic| traffic.wire_bytes = wire_bytes);
                }
                Work::Mark(iteration) => {
                    self.send_header(&mut sender, &mut frames, Frame::Mark { iteration })?;
                }
                Work::End { chunks } => {
                    self.send_header(&mut sender, &mut frames, Frame::End { chunks })?;
                    let counters = sender.finish().map_err(|error| self.failed(error))?;
                    let wire_bytes = sent(counters.wire_bytes);
                    self.work_queue
                        .account(self.number, |traffic| traffic.wire_bytes = wire_bytes);
                    return Ok(());
                }
            }
        }
    }

    fn send_chunk(&self, sender: &mut DataSender, frames: &mut Frames) -> Result<(), Fault> {
        let Frames {
            plan,
            ranges,
            header,
        } = frames;
        ranges.clear();
        let mut frame = sender.frame();
        let began = Instant::now();
        let mut looked_at = 0;
        while let Some(planned) = plan.ranges.get(looked_at) {
            looked_at += 1;
            let index = region_index(&*self.terms.memory, planned.region).ok_or_else(|| {
                Fault::new(
                    FaultCode::LayoutChanged,
                    format!("memory region {} no longer exists", planned.region),
                )
            })?;
            let length = usize::try_from(planned.run.count * PAGE_BYTES).unwrap_or(usize::MAX);
            let slice = self
                .terms
                .memory
                .slice(index, planned.run.first * PAGE_BYTES, length)
                .or_fault(FaultCode::LayoutChanged, "cannot read guest memory")?;
            for page in 0..planned.run.count {
                let at = usize::try_from(page * PAGE_BYTES).unwrap_or(usize::MAX);
                let source = slice
                    .subslice(at, PAGE_BYTES as usize)
                    .or_fault(FaultCode::LayoutChanged, "cannot read guest memory")?;
                let raw = frame
                    .guest_page(&source)
                    .or_fault(FaultCode::Internal, "a chunk does not fit its frame")?;
                let encoding = if raw { Encoding::Raw } else { Encoding::Zero };
                append(ranges, planned.region, planned.run.first + page, encoding);
            }
            // If some of the chunk's pages were all zero, the frame has room for more pages. Each
            // added page may need a range of its own.
            let raw_pages = frame.payload_bytes() as u64 / PAGE_BYTES;
            let ranges_left = MAX_RANGES_PER_CHUNK - ranges.len();
            let room = (CHUNK_PAGES - raw_pages).min(ranges_left as u64);
            if looked_at == plan.ranges.len()
                && raw_pages < plan.pages
                && plan.pages < MAX_PAGES_LOOKED_AT
                && began.elapsed() < LOOK_LIMIT
                && room >= LEAST_ROOM
            {
                self.work_queue.extend(self.number, plan, room);
            }
        }
        header.clear();
        ChunkHeader::encode(plan.number, plan.iteration, ranges, header)
            .or_fault(FaultCode::Internal, "cannot encode a chunk header")?;
        let bytes = (header.len() + frame.payload_bytes()) as u64;
        self.work_queue.await_rate(self.number, bytes)?;
        frame.finish(header).map_err(|error| self.failed(error))?;
        let raw_pages = (bytes - header.len() as u64) / PAGE_BYTES;
        self.work_queue.account(self.number, |traffic| {
            traffic.raw_pages += raw_pages;
            traffic.zero_pages += plan.pages - raw_pages;
            traffic.header_bytes += header.len() as u64;
        });
        Ok(())
    }

    fn send_header(
        &self,
        sender: &mut DataSender,
        frames: &mut Frames,
        frame: Frame,
    ) -> Result<(), Fault> {
        frames.header.clear();
        frame.encode(&mut frames.header);
        sender
            .send(&frames.header)
            .map_err(|error| self.failed(error))?;
        let bytes = frames.header.len() as u64;
        self.work_queue
            .account(self.number, |traffic| traffic.header_bytes += bytes);
        Ok(())
    }

    fn failed(&self, error: SendError) -> Fault {
        let what = format!("lane {} was lost", self.number);
        Fault::new(FaultCode::LaneLost, what).because(error)
    }
}

/// Buffers that a lane's thread reuses for every chunk, to avoid allocations.
struct Frames {
    plan: ChunkPlan,
    ranges: Vec<Range>,
    header: Vec<u8>,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            plan: ChunkPlan::default(),
            ranges: Vec::with_capacity(MAX_RANGES_PER_CHUNK),
            header: Vec::with_capacity(MAX_CHUNK_HEADER_BYTES),
        }
    }
}

/// Adds one page: to the last range if the page continues that range, otherwise as a new range.
fn append(ranges: &mut Vec<Range>, region: u16, page: u64, encoding: Encoding) {
    if let Some(last) = ranges.last_mut()
        && last.region == region
        && last.encoding == encoding
        && last.offset / PAGE_BYTES + u64::from(last.page_count) == page
    {
        last.page_count += 1;
        return;
    }
    ranges.push(Range {
        region,
        encoding,
        page_count: 1,
        offset: page * PAGE_BYTES,
    });
}

/// Whether the peer has closed the connection or the connection has failed.
fn has_ended(socket: &TcpStream) -> bool {
    match wait_readable(socket, Instant::now()) {
        Ok(true) => !matches!(socket.peek(&mut [0]), Ok(1..)),
        Ok(false) => false,
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i3_a_range_is_extended_only_by_the_next_page_of_its_region_and_encoding() {
        let mut ranges = Vec::new();
        for (region, page, encoding) in [
            (0, 3, Encoding::Raw),
            (0, 4, Encoding::Raw),
            // Consecutive page numbers, but in two regions.
            (1, 5, Encoding::Raw),
            (1, 6, Encoding::Zero),
            (1, 8, Encoding::Zero),
            (1, 9, Encoding::Zero),
        ] {
            append(&mut ranges, region, page, encoding);
        }
        let range = |region, page, page_count, encoding| Range {
            region,
            encoding,
            page_count,
            offset: page * PAGE_BYTES,
        };
        assert_eq!(
            ranges,
            [
                range(0, 3, 2, Encoding::Raw),
                range(1, 5, 1, Encoding::Raw),
                range(1, 6, 1, Encoding::Zero),
                range(1, 8, 2, Encoding::Zero),
            ]
        );
    }
}
