//! A lane's thread at the source: connects, proves that it belongs to the
//! session, and then sends what the schedule gives it.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::lanes::{Sending, Wear};
use dunlin_proto::limits::{MAX_CHUNK_HEADER_BYTES, MAX_RANGES_PER_CHUNK, PAGE_BYTES};
use dunlin_proto::negotiate::{LaneOpen, LaneSecurity, SessionId, SessionSecret};
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::{ChunkPlan, Work};
use dunlin_sys::affinity::thread_cpu_time;
use dunlin_sys::poll::{Waker, waker};
use dunlin_sys::socket::{Liveness, set_liveness, wait_readable};

use super::super::error::Fault;
use super::super::host::Host;
use super::super::lock;
use super::super::proof::prove;
use super::super::report::Traffic;
use super::super::vmm::GuestMemory;
use super::SessionEvent;
use crate::lane::data::{
    Canceller, DataSender, PlainConsent, RECORDS_PER_FRAME, STALL_LIMIT, SendError,
};
use crate::lane::handshake;
use crate::lane::identity::ClientTls;

/// Records kept back for a chunk that is under way, a mark and the end.
const RECORDS_FOR_END: u64 = 2 * RECORDS_PER_FRAME as u64;

/// Between two looks at the connection of a lane that is not let in yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What the session's thread and its lanes share.
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Something has changed for a lane that waits.
    pub(super) changed: Condvar,
    started: Instant,
}

/// Guarded by [`Shared::state`].
pub(super) struct State {
    pub(super) lanes: Sending,
    pace: Pace,
    /// How often the cap has been changed.
    rate_changes: u64,
    /// Every lane ends at once, whatever it does.
    pub(super) stop: bool,
    /// The iteration whose last chunk has been reported as cut.
    reported: u32,
    /// What each lane has sent so far, by its number.
    pub(super) shares: BTreeMap<u16, LaneShare>,
    /// Pages that the destination has acknowledged.
    pub(super) acked_pages: u64,
}

/// One lane's share of the work.
#[derive(Default)]
pub(super) struct LaneShare {
    pub(super) traffic: Traffic,
    /// Ends the attempt to connect.
    reaching: Option<Waker>,
    /// The connection while it is being secured.
    connecting: Option<TcpStream>,
    canceller: Option<Canceller>,
    /// Its thread shall end.
    cut: bool,
    worn: bool,
}

impl LaneShare {
    fn cut(&mut self) {
        self.cut = true;
        if let Some(waker) = &self.reaching {
            waker.wake();
        }
        if let Some(stream) = &self.connecting {
            // Fails only where the connection has gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(canceller) = &self.canceller {
            canceller.shutdown();
        }
    }
}

impl Shared {
    pub(super) fn new(lanes: Sending, pace: Pace) -> Self {
        Self {
            state: Mutex::new(State {
                lanes,
                pace,
                rate_changes: 0,
                stop: false,
                reported: 0,
                shares: BTreeMap::new(),
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
        for share in state.shares.values_mut() {
            share.cut();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends one lane.
    pub(super) fn cut(&self, lane: u16) {
        if let Some(share) = lock(&self.state).shares.get_mut(&lane) {
            share.cut();
        }
        self.changed.notify_all();
    }

    /// Changes the cap over all lanes. A lane that waits for its turn under the
    /// old cap asks again under the new one: it may have been told to wait for
    /// long, and in the last pass the guest would wait with it.
    pub(super) fn set_rate(&self, bytes_per_s: Option<u64>) {
        let mut state = lock(&self.state);
        state.pace = Pace::new(bytes_per_s);
        state.rate_changes += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Takes an acknowledgement, on the thread that reads the control lane:
    /// so that none waits in a queue while the session's thread is busy.
    /// Returns whether `message` was one.
    pub(super) fn acknowledge(&self, message: &Message) -> Result<bool, Fault> {
        let Message::Ack { sets, reached } = message else {
            return Ok(false);
        };
        let mut state = lock(&self.state);
        state.acked_pages += state
            .lanes
            .acknowledge(sets, reached, self.now_ns())
            .map_err(|error| {
                Fault::new(FaultCode::Malformed, "an acknowledgement is wrong").because(error)
            })?;
        drop(state);
        self.changed.notify_all();
        Ok(true)
    }

    /// When `at_ns` is, of the time by which lanes and rates are measured.
    pub(super) fn instant(&self, at_ns: u64) -> Instant {
        self.started + Duration::from_nanos(at_ns)
    }

    /// The time by which lanes and rates are measured.
    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl State {
    /// All lanes' traffic together.
    pub(super) fn traffic(&self) -> Traffic {
        let mut sum = Traffic::default();
        for share in self.shares.values() {
            sum.add(&share.traffic);
        }
        sum
    }

    /// Bytes of guest memory by lane.
    pub(super) fn by_lane(&self) -> Vec<(u16, u64)> {
        self.shares
            .iter()
            .filter(|(_, share)| share.traffic.wire_bytes > 0)
            .map(|(&lane, share)| (lane, share.traffic.raw_pages * PAGE_BYTES))
            .collect()
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
    /// Records after which the lane is replaced.
    pub(super) records: u64,
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
        let (waker, stop) = waker().map_err(|error| {
            self.lost("no descriptors can be had for a lane")
                .because(error)
        })?;
        self.register(|share| share.reaching = Some(waker))?;
        let stream = self
            .host
            .connect_unless(&self.endpoint, self.deadline, &stop)
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
            .and_then(|same| {
                self.register(|share| {
                    share.reaching = None;
                    share.connecting = Some(same);
                })
            })?;
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
        let State { stop, shares, .. } = &mut *state;
        match shares.get_mut(&self.number) {
            Some(share) if !share.cut && !*stop => update(share),
            _ => return Err(self.lost(format!("lane {} was given up", self.number))),
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
            let wear = self.wear(&sender);
            let work = self.next(wear, sender.socket(), &mut frames.plan)?;
            // The lane's opening is no part of the migration's traffic.
            let sent = |bytes: u64| bytes.saturating_sub(opened_bytes);
            match work {
                Work::Stop => {
                    return Err(self.lost(format!("lane {} was given up", self.number)));
                }
                Work::Wait => {}
                Work::Chunk => {
                    self.send_chunk(&mut sender, &mut frames)?;
                    let wire_bytes = sent(sender.counters().wire_bytes);
                    self.account(|traffic| traffic.wire_bytes = wire_bytes);
                }
                Work::Mark(iteration) => {
                    self.send_header(&mut sender, &mut frames, Frame::Mark { iteration })?;
                }
                Work::End { chunks } => {
                    self.send_header(&mut sender, &mut frames, Frame::End { chunks })?;
                    let counters = sender.finish().map_err(|error| self.failed(error))?;
                    let wire_bytes = sent(counters.wire_bytes);
                    self.account(|traffic| traffic.wire_bytes = wire_bytes);
                    return Ok(());
                }
            }
        }
    }

    /// How far the lane's key is used up.
    fn wear(&self, sender: &DataSender) -> Wear {
        if sender.records_left().is_none() {
            return Wear::Fresh;
        }
        let used = sender.counters().records;
        if used + RECORDS_FOR_END >= self.records {
            Wear::Spent
        } else if used >= self.records / 8 * 7 {
            Wear::Worn
        } else {
            Wear::Fresh
        }
    }

    /// Waits for work; [`Work::Stop`] when the lane has been cut.
    fn next(&self, wear: Wear, socket: &TcpStream, plan: &mut ChunkPlan) -> Result<Work, Fault> {
        let mut state = lock(&self.shared.state);
        loop {
            let now_ns = self.shared.now_ns();
            let Some(share) = state.shares.get_mut(&self.number) else {
                return Ok(Work::Stop);
            };
            let wears = wear != Wear::Fresh && !std::mem::replace(&mut share.worn, true);
            if share.cut || state.stop {
                return Ok(Work::Stop);
            }
            let work = state.lanes.next(self.number, wear, now_ns, plan);
            if wears {
                // A session that is gone has set `stop`.
                let _ = self.events.send(SessionEvent::LaneWorn);
            }
            let schedule = state.lanes.schedule();
            let iteration = schedule.iteration();
            if state.reported < iteration && schedule.pending_pages() == 0 {
                state.reported = iteration;
                let _ = self.events.send(SessionEvent::Cut { iteration });
            }
            if work != Work::Wait {
                return Ok(work);
            }
            if state.lanes.schedule().course(self.number).is_some() {
                state = wait(&self.shared.changed, state);
                continue;
            }
            // The destination has not let it in yet. If the connection ends
            // before, nobody there knows which lane it was.
            state = wait_for(&self.shared.changed, state, LOOK_EVERY);
            if state.lanes.schedule().course(self.number).is_none() && has_ended(socket) {
                let what = format!("lane {} ended before it was let in", self.number);
                return Err(self.lost(what));
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
        let mut at_ns = state.pace.reserve(self.shared.now_ns(), bytes);
        let mut changes = state.rate_changes;
        state.lanes.paced(self.number, at_ns);
        loop {
            if changes != state.rate_changes {
                changes = state.rate_changes;
                at_ns = state.pace.reserve(self.shared.now_ns(), bytes);
                state.lanes.paced(self.number, at_ns);
            }
            let left = at_ns.saturating_sub(self.shared.now_ns());
            if state.stop || state.shares.get(&self.number).is_none_or(|share| share.cut) {
                return Err(self.lost(format!("lane {} was given up", self.number)));
            }
            if left == 0 {
                return Ok(());
            }
            state = wait_for(&self.shared.changed, state, Duration::from_nanos(left));
        }
    }

    fn account(&self, update: impl FnOnce(&mut Traffic)) {
        let mut state = lock(&self.shared.state);
        if let Some(share) = state.shares.get_mut(&self.number) {
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

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(PoisonError::into_inner)
}

fn wait_for<'a>(
    changed: &Condvar,
    state: MutexGuard<'a, State>,
    time: Duration,
) -> MutexGuard<'a, State> {
    changed
        .wait_timeout(state, time)
        .unwrap_or_else(PoisonError::into_inner)
        .0
}

/// Whether the peer has closed the connection or it has failed.
fn has_ended(socket: &TcpStream) -> bool {
    match wait_readable(socket, Instant::now()) {
        Ok(true) => !matches!(socket.peek(&mut [0]), Ok(1..)),
        Ok(false) => false,
        Err(_) => true,
    }
}
