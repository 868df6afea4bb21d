//! A lane's thread at the source: connects, proves that it belongs to the
//! session, and then sends what the schedule gives it.

use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::limits::{MAX_CHUNK_HEADER_BYTES, MAX_RANGES_PER_CHUNK, PAGE_BYTES};
use dunlin_proto::negotiate::{LaneOpen, LaneSecurity, SessionId, SessionSecret};
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::{ChunkPlan, Schedule, Work};
use dunlin_sys::affinity::thread_cpu_time;
use dunlin_sys::socket::{Liveness, set_liveness};

use super::super::error::Fault;
use super::super::host::Host;
use super::super::lock;
use super::super::proof::prove;
use super::super::report::Traffic;
use super::super::vmm::GuestMemory;
use super::SessionEvent;
use crate::lane::data::{Canceller, DataSender, PlainConsent, STALL_LIMIT, SendError};
use crate::lane::handshake;
use crate::lane::identity::ClientTls;

/// What the session's thread and its lanes share.
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Something has changed for a lane that waits.
    pub(super) changed: Condvar,
    started: Instant,
}

/// Guarded by [`Shared::state`].
pub(super) struct State {
    pub(super) schedule: Schedule,
    pub(super) pace: Pace,
    /// Every lane ends at once, whatever it does.
    pub(super) stop: bool,
    /// The iteration whose last chunk has been reported as cut.
    reported: u32,
    /// What each lane has sent so far.
    pub(super) lanes: Vec<LaneShare>,
    /// Pages that the destination has acknowledged.
    pub(super) acked_pages: u64,
}

/// One lane's share of the work.
#[derive(Default)]
pub(super) struct LaneShare {
    pub(super) lane: u16,
    pub(super) traffic: Traffic,
    /// The connection while it is being secured.
    pub(super) connecting: Option<TcpStream>,
    pub(super) canceller: Option<Canceller>,
}

impl Shared {
    pub(super) fn new(schedule: Schedule, pace: Pace) -> Self {
        Self {
            state: Mutex::new(State {
                schedule,
                pace,
                stop: false,
                reported: 0,
                lanes: Vec::new(),
                acked_pages: 0,
            }),
            changed: Condvar::new(),
            started: Instant::now(),
        }
    }

    /// Ends every lane: those that wait and those that are blocked in a call.
    pub(super) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stop = true;
        for share in &state.lanes {
            if let Some(stream) = &share.connecting {
                // Fails only where the connection has gone already.
                let _ = stream.shutdown(Shutdown::Both);
            }
            if let Some(canceller) = &share.canceller {
                canceller.shutdown();
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Takes an acknowledgement, on the thread that reads the control lane:
    /// so that none waits in a queue while the session's thread is busy.
    /// Returns whether `message` was one.
    pub(super) fn acknowledge(&self, message: &Message) -> Result<bool, Fault> {
        let Message::Ack { sets, .. } = message else {
            return Ok(false);
        };
        let mut state = lock(&self.state);
        for set in sets {
            state.acked_pages += state
                .schedule
                .acknowledge(set.first, u64::from(set.count))
                .map_err(|error| {
                    Fault::new(FaultCode::Malformed, "an acknowledgement is wrong").because(error)
                })?;
        }
        drop(state);
        self.changed.notify_all();
        Ok(true)
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl State {
    /// All lanes' traffic together.
    pub(super) fn traffic(&self) -> Traffic {
        let mut sum = Traffic::default();
        for share in &self.lanes {
            sum.add(&share.traffic);
        }
        sum
    }
}

/// Everything that a lane's thread needs.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) endpoint: String,
    pub(super) tls: ClientTls,
    pub(super) security: LaneSecurity,
    pub(super) version: u16,
    pub(super) session: SessionId,
    pub(super) secret: SessionSecret,
    pub(super) peer_fingerprint: [u8; 32],
    pub(super) rate: Option<u64>,
    pub(super) deadline: Instant,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) shared: Arc<Shared>,
    pub(super) host: Arc<dyn Host>,
    pub(super) events: Sender<SessionEvent>,
}

impl Lane {
    /// The thread's body: reports its end to the session, with the CPU time
    /// that it used.
    pub(super) fn run(self) {
        let body = || self.connect().and_then(|sender| self.send_all(sender));
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
        let stream = self
            .host
            .connect(&self.endpoint, self.deadline)
            .map_err(|error| {
                self.lost(format!(
                    "lane {} cannot reach {}",
                    self.number, self.endpoint
                ))
                .because(error)
            })?;
        set_liveness(&stream, &Liveness::default())
            .and_then(|()| stream.try_clone())
            .map_err(|error| self.lost("a lane's socket has no options").because(error))
            .and_then(|same| self.register(|share| share.connecting = Some(same)))?;
        let mut sender = self.secure(stream)?;
        sender
            .set_rate(self.rate)
            .map_err(|error| self.lost("the lane's rate cannot be set").because(error))?;
        self.register(|share| {
            share.connecting = None;
            share.canceller = Some(sender.canceller());
        })?;
        let open = LaneOpen {
            version: self.version,
            session: self.session,
            lane: self.number,
            mac: prove(&self.secret, &self.session, self.number),
        };
        let mut bytes = Vec::new();
        open.encode(&mut bytes).map_err(|error| {
            Fault::new(FaultCode::Internal, "a lane's opening cannot be sent").because(error)
        })?;
        sender.send(&bytes).map_err(|error| self.failed(error))?;
        Ok(sender)
    }

    /// Lets [`Shared::stop`] reach this lane, unless that has been called.
    fn register(&self, update: impl FnOnce(&mut LaneShare)) -> Result<(), Fault> {
        let mut state = lock(&self.shared.state);
        if state.stop {
            return Err(self.lost("the session has ended"));
        }
        if let Some(share) = state.lanes.iter_mut().find(|l| l.lane == self.number) {
            update(share);
        }
        Ok(())
    }

    fn secure(&self, stream: TcpStream) -> Result<DataSender, Fault> {
        let sender = match self.security {
            LaneSecurity::Tls => {
                let secured =
                    handshake::client(stream, &self.tls, self.deadline).map_err(|error| {
                        self.lost(format!("lane {} cannot be secured", self.number))
                            .because(error)
                    })?;
                if secured.peer.fingerprint != self.peer_fingerprint {
                    return Err(Fault::new(
                        FaultCode::WrongIdentity,
                        format!(
                            "lane {} reached a peer with another certificate than the control lane's",
                            self.number
                        ),
                    ));
                }
                DataSender::tls(secured, STALL_LIMIT)
            }
            LaneSecurity::Plain => {
                // The selection that names plain lanes was checked against our
                // own offer, so both sides have said yes.
                let consent = PlainConsent::both(true, true).ok_or_else(|| {
                    Fault::new(FaultCode::SecurityNotAgreed, "plain lanes were not agreed")
                })?;
                DataSender::plain(stream, consent, STALL_LIMIT)
            }
        };
        sender.map_err(|error| self.failed(error))
    }

    fn send_all(&self, mut sender: DataSender) -> Result<(), Fault> {
        let mut frames = Frames::default();
        let opened_bytes = sender.counters().wire_bytes;
        loop {
            let work = self.next(&mut frames.plan);
            // The lane's opening is no part of the migration's traffic.
            let sent = |bytes: u64| bytes.saturating_sub(opened_bytes);
            match work {
                None | Some(Work::Stop) => return Err(self.lost("the session has ended")),
                Some(Work::Wait) => {}
                Some(Work::Chunk) => {
                    self.send_chunk(&mut sender, &mut frames)?;
                    let wire_bytes = sent(sender.counters().wire_bytes);
                    self.account(|traffic| traffic.wire_bytes = wire_bytes);
                }
                Some(Work::Mark(iteration)) => {
                    self.send_header(&mut sender, &mut frames, Frame::Mark { iteration })?;
                }
                Some(Work::End { chunks }) => {
                    self.send_header(&mut sender, &mut frames, Frame::End { chunks })?;
                    let counters = sender.finish().map_err(|error| self.failed(error))?;
                    let wire_bytes = sent(counters.wire_bytes);
                    self.account(|traffic| traffic.wire_bytes = wire_bytes);
                    return Ok(());
                }
            }
        }
    }

    /// Waits for work; `None` when the session has ended.
    fn next(&self, plan: &mut ChunkPlan) -> Option<Work> {
        let mut state = lock(&self.shared.state);
        loop {
            if state.stop {
                return None;
            }
            let work = state.schedule.next(self.number, plan);
            let iteration = state.schedule.iteration();
            if state.reported < iteration && state.schedule.pending_pages() == 0 {
                state.reported = iteration;
                // A session that is gone has set `stop`.
                let _ = self.events.send(SessionEvent::Cut { iteration });
            }
            if work != Work::Wait {
                return Some(work);
            }
            state = wait(&self.shared.changed, state);
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
        for planned in &plan.ranges {
            let index = self.region_index(planned.region)?;
            let length = usize::try_from(planned.run.count * PAGE_BYTES).unwrap_or(usize::MAX);
            let slice = self
                .memory
                .slice(index, planned.run.first * PAGE_BYTES, length)
                .map_err(|error| {
                    Fault::new(FaultCode::LayoutChanged, "guest memory cannot be read")
                        .because(error)
                })?;
            for page in 0..planned.run.count {
                let at = usize::try_from(page * PAGE_BYTES).unwrap_or(usize::MAX);
                let source = slice.subslice(at, PAGE_BYTES as usize).map_err(|error| {
                    Fault::new(FaultCode::LayoutChanged, "guest memory cannot be read")
                        .because(error)
                })?;
                let raw = frame.guest_page(&source).map_err(|error| {
                    Fault::new(FaultCode::Internal, "a chunk does not fit its frame").because(error)
                })?;
                let encoding = if raw { Encoding::Raw } else { Encoding::Zero };
                append(ranges, planned.region, planned.run.first + page, encoding);
            }
        }
        header.clear();
        ChunkHeader::encode(plan.number, plan.iteration, ranges, header).map_err(|error| {
            Fault::new(FaultCode::Internal, "a chunk's header cannot be made").because(error)
        })?;
        let bytes = (header.len() + frame.payload_bytes()) as u64;
        self.wait_for_rate(bytes)?;
        frame.finish(header).map_err(|error| self.failed(error))?;
        let raw_pages = (bytes - header.len() as u64) / PAGE_BYTES;
        self.account(|traffic| {
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
        self.account(|traffic| traffic.header_bytes += bytes);
        Ok(())
    }

    /// Waits until the session's rate cap lets `bytes` go.
    fn wait_for_rate(&self, bytes: u64) -> Result<(), Fault> {
        let mut state = lock(&self.shared.state);
        let at_ns = state.pace.reserve(self.shared.now_ns(), bytes);
        loop {
            let left = at_ns.saturating_sub(self.shared.now_ns());
            if state.stop {
                return Err(self.lost("the session has ended"));
            }
            if left == 0 {
                return Ok(());
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, Duration::from_nanos(left))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn account(&self, update: impl FnOnce(&mut Traffic)) {
        let mut state = lock(&self.shared.state);
        if let Some(share) = state.lanes.iter_mut().find(|l| l.lane == self.number) {
            update(&mut share.traffic);
        }
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
        let code = match &error {
            SendError::PeerAlert(_) => FaultCode::Unauthorised,
            _ => FaultCode::LaneLost,
        };
        Fault::new(code, format!("lane {} was lost", self.number)).because(error)
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

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(PoisonError::into_inner)
}
