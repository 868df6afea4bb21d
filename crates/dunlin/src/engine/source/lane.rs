//! A lane's thread at the source: connects, proves that it belongs to the
//! session, and then sends what the schedule gives it.

use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_linux::socket::wait_readable;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::limits::{
    CHUNK_PAGES, MAX_CHUNK_HEADER_BYTES, MAX_PAGES_LOOKED_AT, MAX_RANGES_PER_CHUNK, PAGE_BYTES,
};
use dunlin_proto::negotiate::{SessionId, SessionSecret};
use dunlin_proto::schedule::{ChunkPlan, Work};

use super::super::fault::{Fault, OrFault};
use super::super::vmm::GuestMemory;
use super::event::SessionEvent;
use super::work_queue::{WorkQueue, given_up};
use crate::lane::data::{DataSender, SendError};
use crate::lane::dial::{Connector, DialCancel, DialError, LaneDialer, LaneRequest, LaneTicket};
use crate::lane::peers::Principal;
use crate::lane::policy::ClientTls;

/// Pages for which there must be room in a chunk before more are asked for: a lock is taken for it.
const LEAST_ROOM: u64 = CHUNK_PAGES / 4;

/// How long a lane looks for pages that are not zero before it sends its chunk. Pages that are
/// swapped out take a fault each, and the destination hears nothing meanwhile.
const LOOK_LIMIT: Duration = Duration::from_millis(10);

/// Everything that a lane's thread needs.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) endpoint: String,
    pub(super) tls: ClientTls,
    pub(super) dialer: Arc<dyn LaneDialer>,
    pub(super) connector: Arc<dyn Connector>,
    /// Whether others have stood before.
    pub(super) is_replacement: bool,
    pub(super) version: u16,
    pub(super) session: SessionId,
    pub(super) secret: SessionSecret,
    pub(super) peer: Principal,
    pub(super) rate: Option<u64>,
    /// Records after which the lane is replaced.
    pub(super) records: u64,
    pub(super) deadline: Instant,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) work_queue: Arc<WorkQueue>,
    pub(super) events: Sender<SessionEvent>,
}

impl Lane {
    /// The thread's body: reports its end to the session, with the CPU time
    /// that it used.
    pub(super) fn run(self) {
        let body = || {
            let sender = self.connect()?;
            self.send_all(sender)
        };
        // The VMM's memory is called in here; the session must hear of a
        // panic in it, or it would wait for this lane for ever.
        let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
            let what = format!("the thread of lane {} panicked", self.number);
            Err(Fault::new(FaultCode::Internal, what))
        });
        // A session that is gone needs no report.
        let _ = self.events.send(SessionEvent::LaneEnded {
            lane: self.number,
            result,
            cpu: thread_cpu_time(),
        });
    }

    fn connect(&self) -> Result<DataSender, Fault> {
        let cancel = DialCancel::new().map_err(|error| {
            self.lost("cannot create an eventfd for a lane")
                .because(error)
        })?;
        let own = cancel.clone();
        self.interrupted_by(move || own.cancel())?;
        let request = LaneRequest {
            endpoint: &self.endpoint,
            peer: &self.peer,
            tls: &self.tls,
            deadline: self.deadline,
            cancel: &cancel,
            connector: &self.connector,
        };
        let dialled = self.dialer.dial(&request);
        let mut sender = dialled.map_err(|error| self.not_opened(error))?;
        let canceller = sender.canceller();
        self.interrupted_by(move || canceller.shutdown())?;
        sender
            .set_rate(self.rate)
            .map_err(|error| self.lost("the lane's rate cannot be set").because(error))?;
        let ticket = LaneTicket {
            version: self.version,
            session: self.session,
            secret: &self.secret,
            lane: self.number,
        };
        let presented = ticket.present(&mut sender);
        presented.map_err(|error| self.failed(error))?;
        Ok(sender)
    }

    fn not_opened(&self, error: DialError) -> Fault {
        let is_worth_another_try =
            self.is_replacement && !matches!(error, DialError::OtherPeer { .. });
        // What hinders the first lanes hinders all; later ones can be tried again.
        let code = error.permanent().filter(|_| !is_worth_another_try);
        let number = self.number;
        let fault = |what: String| Fault::new(code.unwrap_or(FaultCode::LaneLost), what);
        match error {
            DialError::Connect { endpoint, source } => {
                fault(format!("lane {number} cannot reach {endpoint}")).because(source)
            }
            DialError::Handshake { source, .. } => {
                fault(format!("lane {number} cannot be secured")).because(source)
            }
            DialError::OtherPeer { .. } => fault(format!(
                "lane {number} reached another peer than the control lane"
            )),
            other => fault(format!("lane {number} cannot be opened")).because(other),
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
            let wear = sender.key_usage(self.records);
            let work = self.work_queue.next(
                self.number,
                wear,
                &mut frames.plan,
                // A session that is gone has stopped the lanes.
                |event| drop(self.events.send(event)),
                || has_ended(sender.socket()),
            )?;
            // The lane's opening is no part of the migration's traffic.
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
            let index = self.region_index(planned.region)?;
            let length = usize::try_from(planned.run.count * PAGE_BYTES).unwrap_or(usize::MAX);
            let slice = self
                .memory
                .slice(index, planned.run.first * PAGE_BYTES, length)
                .or_fault(FaultCode::LayoutChanged, "guest memory cannot be read")?;
            for page in 0..planned.run.count {
                let at = usize::try_from(page * PAGE_BYTES).unwrap_or(usize::MAX);
                let source = slice
                    .subslice(at, PAGE_BYTES as usize)
                    .or_fault(FaultCode::LayoutChanged, "guest memory cannot be read")?;
                let raw = frame
                    .guest_page(&source)
                    .or_fault(FaultCode::Internal, "a chunk does not fit its frame")?;
                let encoding = if raw { Encoding::Raw } else { Encoding::Zero };
                append(ranges, planned.region, planned.run.first + page, encoding);
            }
            // Zero pages have left room for others. Each may need a range of its own.
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
            .or_fault(FaultCode::Internal, "a chunk's header cannot be made")?;
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

    fn region_index(&self, id: u16) -> Result<usize, Fault> {
        self.memory
            .regions()
            .iter()
            .position(|region| region.id == id)
            .ok_or_else(|| Fault::new(FaultCode::LayoutChanged, "a region has gone"))
    }

    fn lost(&self, what: impl Into<String>) -> Fault {
        Fault::new(FaultCode::LaneLost, what)
    }

    fn failed(&self, error: SendError) -> Fault {
        self.lost(format!("lane {} was lost", self.number))
            .because(error)
    }
}

/// What a lane's thread keeps from chunk to chunk, so that none allocates.
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

/// Adds one page to the ranges, to the last one where it fits.
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

/// Whether the peer has closed the connection or it has failed.
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
    fn i3_a_range_goes_on_with_the_next_page_of_its_region_and_encoding_alone() {
        let mut ranges = Vec::new();
        for (region, page, encoding) in [
            (0, 3, Encoding::Raw),
            (0, 4, Encoding::Raw),
            // Their numbers follow each other, and they lie in two regions.
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
