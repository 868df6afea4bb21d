//! One side of a trunk: its channels, its lanes, and its control messages.

mod arriving;
mod opening;
mod requests;
mod sending;
mod talking;
mod values;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::fault::PeerFault;
use super::inbound::Inbound;
use super::lanes::SendingLanes;
use super::message::{Mark, Message};
use super::outbound::{Outbound, Turn};
use super::receiving::ReceivingLanes;
use super::turns::Turns;
use super::window::{Pool, RoundTrip};
use crate::fault::FaultCode;
use crate::lanes::Action as LaneAction;
use crate::limits::{
    LEAST_WINDOW_BYTES, MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_LANES, MAX_STRIPE_CHUNK_BYTES,
    MAX_UNREAD_BYTES, START_WINDOW_BYTES,
};
use crate::mistake::{Mistake, planted};

pub use sending::{Outcome, Work};
pub use values::{Action, Config, Left, OpenError, Opening, Side, Usage};

/// When the channels have sent this many bytes, the trunk uses more than one lane. Fewer bytes
/// are treated as a dialogue of small messages.
const BULK_BYTES: u64 = START_WINDOW_BYTES;

#[derive(Debug)]
enum Stage {
    /// This side opened the channel; the other side has not answered.
    Opening(Asking),
    /// The other side opened the channel. Bytes of earlier channels must be delivered before the
    /// target is connected.
    Waiting {
        route: String,
        parameter: String,
        barrier: Vec<Mark>,
    },
    /// The other side opened the channel; the caller connects the target.
    Connecting,
    /// The hypervisors at both ends of the channel are connected.
    Open,
}

#[derive(Debug)]
struct Asking {
    route: String,
    parameter: String,
    /// Earlier channels for which the caller has not counted the unread bytes yet.
    counting: BTreeSet<u32>,
    barrier: Vec<Mark>,
    /// Whether *open* was sent, so that the other side may have received it.
    sent: bool,
}

/// Messages that are due for a channel.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    opened: bool,
    eof: bool,
    closed: bool,
}

#[derive(Debug)]
struct Channel<T> {
    ours: bool,
    listener: u64,
    stage: Stage,
    window_bytes: u64,
    out: Outbound,
    inn: Inbound<T>,
    due: Due,
}

/// The record of a channel that this side aborted or refused. It is kept until the other side
/// confirms the end with *gone*.
#[derive(Debug)]
struct Ended {
    fault: FaultCode,
    /// The text of *refused*; `None` for *reset*.
    refused: Option<String>,
    due: bool,
}

/// One side of a trunk. `T` is the caller's handle to bytes, such as a reference-counted buffer.
///
/// Getters: [`Trunk::usage`], [`Trunk::held`], [`Trunk::channels`],
/// [`Trunk::ready`], [`Trunk::has_work`], [`Trunk::leaving`], [`Trunk::has_message`],
/// [`Trunk::drained`], [`Trunk::due_ns`].
///
/// Commands: [`Trunk::open`], [`Trunk::counted`], [`Trunk::connected`], [`Trunk::refuse`],
/// [`Trunk::fail`], [`Trunk::left`], [`Trunk::raise_lanes`], [`Trunk::drain`], [`Trunk::end`].
///
/// Reports of threads: the thread of a lane on which this side sends calls [`Trunk::next`] and
/// [`Trunk::read`]. The thread of a lane on which this side receives calls [`Trunk::arrived`],
/// [`Trunk::keep`] and [`Trunk::wrote`]. The thread that watches sockets calls [`Trunk::readable`]
/// and [`Trunk::writable`].
///
/// Lanes: [`Trunk::lane_established`], [`Trunk::lane_failed`], [`Trunk::lane_over`],
/// [`Trunk::admit`], [`Trunk::lane_ended`], [`Trunk::admitted_over`]. Lanes that the other side
/// opens or requests: [`Trunk::is_awaited`], [`Trunk::opened_for`], [`Trunk::not_opened`]. Control
/// lane: [`Trunk::control_up`], [`Trunk::control_down`], [`Trunk::handle`], and
/// [`Trunk::next_message`] until it returns `None`.
///
/// After each of these calls, and at [`Trunk::due_ns`], the caller calls [`Trunk::poll`] until it
/// returns `None`. Times are nanoseconds of the caller's clock, from any origin.
///
/// A channel without bytes to send causes no message and no due time.
#[derive(Debug)]
pub struct Trunk<T> {
    config: Config,
    side: Side,
    channels: BTreeMap<u32, Channel<T>>,
    ended: BTreeMap<u32, Ended>,
    /// The number of the next channel of this side. When it exceeds `u32::MAX`, no channel can be
    /// opened.
    next_own: u64,
    /// The highest channel number that the other side has opened.
    highest_theirs: Option<u32>,
    /// The other side's channels that wait for earlier channels.
    waiting: BTreeSet<u32>,
    /// Channels without a consumer, each with the time until which its end may still arrive.
    leaving: BTreeMap<u32, u64>,
    turns: Turns,
    /// The number of lane threads that are reading a socket.
    reading: u64,
    lanes: SendingLanes<T>,
    arriving: ReceivingLanes,
    pool: Pool,
    round_trip: RoundTrip,
    agenda: Agenda,
    control: Control,
    /// Bytes read from sockets; 0 again when the trunk has no channel.
    busy_bytes: u64,
    idle_since_ns: u64,
    draining: bool,
    peer_drains: bool,
    /// The time by which the trunk ends, because the other side has opened no lanes.
    ends_by_ns: Option<u64>,
    /// The highest number of a lane of this side that the other side has refused or failed to open.
    last_refused: u16,
    /// The highest number of a lane that the other side has reported as failed.
    last_failed: u16,
    actions: VecDeque<Action>,
}

/// Messages that are due on the control lane.
#[derive(Debug, Default)]
struct Agenda {
    /// This side's channels for which *open* has not been sent on this control lane.
    opens: BTreeSet<u32>,
    /// Channels for which one of the messages in [`Due`] is due.
    news: BTreeSet<u32>,
    credits: BTreeSet<u32>,
    /// Channels that no longer exist, for which the other side waits for *gone*.
    gone: BTreeSet<u32>,
    refusals: VecDeque<(u16, FaultCode, String)>,
    pong: Option<u64>,
    ping_wanted: bool,
    /// The token of the newest ping: the time at which this side sent the ping.
    ping_ns: Option<u64>,
    /// Whether *drain* is due.
    drain_due: bool,
    /// Lanes for which *lane wanted* is due.
    wants: BTreeSet<u16>,
    /// *lane failed*, if it is due.
    failure: Option<Message>,
}

/// The newest control lane. In `Over` the trunk has ended and every channel is aborted; no
/// transition leads out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    Up,
    Down { since_ns: u64 },
    Over,
}

impl<T: Clone> Trunk<T> {
    /// Creates one side of a trunk. Its control lane is not up yet. Values outside the ranges of
    /// [`Config`] are clamped.
    #[must_use]
    pub fn new(side: Side, config: Config, now_ns: u64) -> Self {
        let channels = config.channels.clamp(1, MAX_CHANNELS);
        let least = channels as u64 * LEAST_WINDOW_BYTES;
        let config = Config {
            channels,
            bytes: config.bytes.max(least),
            lanes: config.lanes.clamp(1, MAX_LANES),
            lanes_max: config.lanes_max.clamp(1, MAX_LANES),
            ..config
        };
        Self {
            config,
            side,
            channels: BTreeMap::new(),
            ended: BTreeMap::new(),
            next_own: match side {
                Side::Connecting => 0,
                Side::Accepting => 1,
            },
            highest_theirs: None,
            waiting: BTreeSet::new(),
            leaving: BTreeMap::new(),
            turns: Turns::default(),
            reading: 0,
            lanes: SendingLanes::new(config.timeouts),
            arriving: ReceivingLanes::new(config.lanes_max),
            pool: Pool::new(config.bytes, channels as u64),
            round_trip: RoundTrip::default(),
            agenda: Agenda::default(),
            control: Control::Down { since_ns: now_ns },
            busy_bytes: 0,
            idle_since_ns: now_ns,
            draining: false,
            peer_drains: false,
            ends_by_ns: None,
            last_refused: 0,
            last_failed: 0,
            actions: VecDeque::new(),
        }
    }

    /// The number of live channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// The number of bytes of a channel that wait on this side for the channel's consumer.
    #[must_use]
    pub fn held(&self, channel: u32) -> Option<u64> {
        let channel = self.channels.get(&channel)?;
        Some(channel.inn.held())
    }

    /// The totals over all channels.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let inbound = || self.channels.values().map(|channel| &channel.inn);
        Usage {
            granted: inbound().map(Inbound::granted).sum(),
            held: inbound().map(Inbound::held).sum(),
            unacknowledged: self.lanes.held_bytes(),
        }
    }

    /// Whether either side drains, *drain* is not due, and no state of any channel is left.
    #[must_use]
    pub fn drained(&self) -> bool {
        let left = !self.channels.is_empty() || !self.ended.is_empty();
        (self.draining || self.peer_drains) && !left && !self.agenda.drain_due
    }

    /// Raises the lane count to at least `lanes`. The caller must not exceed the other side's
    /// limit.
    pub fn raise_lanes(&mut self, lanes: u16) {
        self.config.lanes = self.config.lanes.max(lanes.clamp(1, MAX_LANES));
    }

    /// Stops opening and accepting channels; live channels continue.
    pub fn drain(&mut self) {
        self.agenda.drain_due |= !self.draining;
        self.draining = true;
    }

    /// Aborts a channel that failed on this side. The caller closes the channel's connection. All
    /// bytes that wait are dropped. The other side receives the code if either side has sent *open*
    /// for the channel.
    pub fn fail(&mut self, channel: u32, fault: FaultCode, now_ns: u64) {
        let Some(was) = self.channels.get(&channel) else {
            return;
        };
        let unsent = matches!(&was.stage, Stage::Opening(asking) if !asking.sent);
        self.forget(channel, now_ns);
        if !unsent {
            let ended = Ended {
                fault,
                refused: None,
                due: true,
            };
            self.ended.insert(channel, ended);
        }
    }

    /// Records that the hypervisor at this end of a channel closed its connection before the
    /// channel had ended. If the hypervisor is the consumer of a channel that the other side
    /// opened, and almost nothing was left to deliver, this is not necessarily an abort: see
    /// [`Left`].
    pub fn left(&mut self, channel: u32, now_ns: u64) -> Left {
        let Some(one) = self.channels.get(&channel) else {
            return Left::Broken;
        };
        if self.leaving.contains_key(&channel) {
            return Left::Waits;
        }
        let is_little = one.inn.unread() <= MAX_UNREAD_BYTES;
        let is_known = one.inn.eof.is_some() && !one.inn.is_writing();
        let code = match (is_known, is_little) {
            // This side opened the channel, so its hypervisor is the migration's source. If the
            // source closes early, its data is incomplete, so the abort is reported immediately.
            _ if one.ours => FaultCode::ChannelBroken,
            (true, true) => FaultCode::LeftUnread,
            (false, _) if is_little || one.inn.is_writing() => {
                self.leaving
                    .insert(channel, now_ns.saturating_add(END_MAY_COME_NS));
                return Left::Waits;
            }
            _ => FaultCode::ChannelBroken,
        };
        self.fail(channel, code, now_ns);
        match code {
            FaultCode::LeftUnread => Left::Unread,
            _ => Left::Broken,
        }
    }

    /// Decides about channels without a consumer. If the channel's end arrived in time and few
    /// bytes are unread, the fault code is [`FaultCode::LeftUnread`]; otherwise it is
    /// [`FaultCode::ChannelBroken`].
    fn decide_leaving(&mut self, now_ns: u64) {
        let verdict = |channel: &u32, until_ns: &u64| {
            let one = self.channels.get(channel)?;
            match one.inn.eof {
                // A thread is still writing and will report how much the consumer took.
                _ if one.inn.is_writing() && now_ns < *until_ns => None,
                _ if one.inn.unread() > MAX_UNREAD_BYTES => Some(FaultCode::ChannelBroken),
                Some(_) => Some(FaultCode::LeftUnread),
                None => (now_ns >= *until_ns).then_some(FaultCode::ChannelBroken),
            }
        };
        let decided: Vec<(u32, FaultCode)> = self
            .leaving
            .iter()
            .filter_map(|(channel, until_ns)| Some((*channel, verdict(channel, until_ns)?)))
            .collect();
        for (channel, fault) in decided {
            self.abort(channel, fault, now_ns);
        }
    }

    /// Ends the trunk and aborts every channel.
    pub fn end(&mut self, fault: FaultCode) {
        if self.is_over() {
            return;
        }
        self.control = Control::Over;
        for &channel in self.channels.keys() {
            self.actions.push_back(Action::Abort {
                channel,
                fault,
                by_peer: false,
            });
        }
        self.channels.clear();
        self.ended.clear();
        self.waiting.clear();
        self.leaving.clear();
        self.turns = Turns::default();
        self.lanes = SendingLanes::new(self.config.timeouts);
        // Nothing more is sent. If *drain* was due, it stays due, so that `drained` still returns
        // false.
        self.agenda = Agenda {
            drain_due: self.agenda.drain_due,
            ..Agenda::default()
        };
        self.actions.push_back(Action::GiveUp(fault));
    }

    /// Whether a lane that calls [`Trunk::next`] may get work.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.has_work() || (!self.is_over() && self.lanes.leaving().next().is_some())
    }

    /// Whether there may be bytes to send, on any lane.
    #[must_use]
    pub fn has_work(&self) -> bool {
        let reads = !self.turns.is_empty() && self.may_read();
        !self.is_over() && (reads || self.lanes.has_lost())
    }

    /// Lanes that have to end. A lane is included until its thread calls [`Trunk::next`], because
    /// only this thread can end the lane.
    pub fn leaving(&self) -> impl Iterator<Item = u16> {
        self.lanes.leaving()
    }

    /// Whether this lane only has to send bytes. If not, its thread has to call [`Trunk::next`] soon,
    /// because the lane has to end or was given up.
    #[must_use]
    pub fn carries_on(&self, lane: u16) -> bool {
        let leaves = || self.lanes.leaving().any(|one| one == lane);
        !self.is_over() && self.lanes.carries(lane) && !leaves()
    }

    /// Returns the next action for the caller.
    pub fn poll(&mut self, now_ns: u64) -> Option<Action> {
        if !self.is_over() && self.actions.is_empty() {
            self.decide(now_ns);
        }
        self.actions.pop_front()
    }

    fn decide(&mut self, now_ns: u64) {
        if let Control::Down { since_ns } = self.control
            && now_ns.saturating_sub(since_ns) >= self.config.timeouts.alone_ns
        {
            return self.end(FaultCode::ControlLost);
        }
        if self.is_abandoned(now_ns) {
            return self.end(FaultCode::LaneLost);
        }
        if !self.leaving.is_empty() {
            self.decide_leaving(now_ns);
        }
        if !self.channels.is_empty() {
            let bulk = self.busy_bytes >= BULK_BYTES;
            self.lanes.want(if bulk { self.config.lanes } else { 1 });
        } else if now_ns >= self.cold_ns() {
            self.lanes.want(0);
        }
        if self.control != Control::Up {
            self.lanes.life.unheard(now_ns);
        }
        // Without a control lane no lane can be requested.
        let may_come = self.control == Control::Up || !self.asks();
        let waits = (!self.turns.is_empty() || self.lanes.has_lost()) && may_come;
        while self.actions.is_empty() {
            match self.lanes.poll(waits, now_ns) {
                Some(LaneAction::Open(lane)) if self.asks() => {
                    self.agenda.wants.insert(lane);
                }
                Some(LaneAction::Open(lane)) => self.actions.push_back(Action::OpenLane(lane)),
                Some(LaneAction::Cut(lane)) => {
                    self.agenda.wants.remove(&lane);
                    self.actions.push_back(Action::CutLane(lane));
                }
                Some(LaneAction::GiveUp) => self.without_lanes(now_ns),
                // A tunnel needs no fence for a lost lane.
                Some(LaneAction::Fence(_)) => {}
                None if self.lanes.life.is_exhausted() => return self.end(FaultCode::LaneLost),
                None => return,
            }
        }
    }

    /// The time at which [`Trunk::poll`] or [`Trunk::next_message`] may return something even if
    /// the caller reports no event until then.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        let control = match self.control {
            Control::Over => return None,
            Control::Up => self.arriving.due_ns(),
            Control::Down { since_ns } => {
                Some(since_ns.saturating_add(self.config.timeouts.alone_ns))
            }
        };
        let cold = self.channels.is_empty() && self.lanes.life.wanted() > 0;
        let cold = cold.then(|| self.cold_ns());
        let lanes = self.lanes.life.due_ns();
        let leaving = self.leaving.values().copied().min();
        let all = control.into_iter().chain(cold).chain(lanes);
        all.chain(leaving).chain(self.ends_by_ns).min()
    }

    fn cold_ns(&self) -> u64 {
        self.idle_since_ns.saturating_add(self.config.warm_ns)
    }

    /// Aborts all live channels, on both sides.
    fn abort_all(&mut self, fault: FaultCode, now_ns: u64) {
        let channels: Vec<u32> = self.channels.keys().copied().collect();
        for channel in channels {
            self.abort(channel, fault, now_ns);
        }
    }

    /// Aborts a channel on both sides.
    fn abort(&mut self, channel: u32, fault: FaultCode, now_ns: u64) {
        self.actions.push_back(Action::Abort {
            channel,
            fault,
            by_peer: false,
        });
        self.fail(channel, fault, now_ns);
    }

    /// Drops the state of a channel; no message becomes due.
    fn forget(&mut self, channel: u32, now_ns: u64) {
        let Some(was) = self.channels.remove(&channel) else {
            return;
        };
        self.pool.changed(was.inn.granted(), 0);
        self.waiting.remove(&channel);
        self.leaving.remove(&channel);
        self.agenda.opens.remove(&channel);
        self.agenda.news.remove(&channel);
        self.agenda.credits.remove(&channel);
        self.turns.remove(channel);
        self.lanes.forget(channel);
        if was.out.counted_for > 0 {
            self.uncount(channel);
        }
        if self.channels.is_empty() {
            self.busy_bytes = 0;
            self.idle_since_ns = now_ns;
        }
        self.look_at_barriers();
    }

    /// Makes later channels stop waiting for the count of a channel's unread bytes, because the
    /// channel no longer exists.
    fn uncount(&mut self, channel: u32) {
        for later in &self.agenda.opens {
            if let Some(one) = self.channels.get_mut(later)
                && let Stage::Opening(asking) = &mut one.stage
            {
                asking.counting.remove(&channel);
            }
        }
    }

    /// Connects the channels that no longer wait for bytes of earlier channels.
    fn look_at_barriers(&mut self) {
        let mut from = 0;
        while let Some(&number) = self.waiting.range(from..).next() {
            from = number.saturating_add(1);
            let Some(mut one) = self.channels.remove(&number) else {
                continue;
            };
            if let Stage::Waiting {
                route,
                parameter,
                barrier,
            } = &mut one.stage
            {
                barrier.retain(|mark| !self.is_delivered(mark));
                let free = barrier.iter().all(|mark| self.is_stuck(mark));
                if free || planted(Mistake::BarrierIgnored) {
                    self.actions.push_back(Action::Connect {
                        channel: number,
                        route: std::mem::take(route),
                        parameter: std::mem::take(parameter),
                    });
                    one.stage = Stage::Connecting;
                    self.waiting.remove(&number);
                }
            }
            self.channels.insert(number, one);
        }
    }

    /// Whether an earlier channel has delivered its bytes up to the mark. A channel that no longer
    /// exists delays no other channel.
    fn is_delivered(&self, mark: &Mark) -> bool {
        let Some(earlier) = self.channels.get(&mark.channel) else {
            return true;
        };
        matches!(earlier.stage, Stage::Open) && earlier.inn.delivered() >= mark.offset
    }

    /// Whether the socket of an earlier channel's consumer is full.
    fn is_stuck(&self, mark: &Mark) -> bool {
        let earlier = self.channels.get(&mark.channel);
        earlier.is_some_and(|earlier| earlier.inn.is_stuck())
    }

    /// Closes a channel if the messages so far show that it has ended in both directions.
    fn close_if_done(&mut self, channel: u32, now_ns: u64) {
        let Some(one) = self.channels.get(&channel) else {
            return;
        };
        let sent = one.out.closed && !one.due.eof;
        let received = one.inn.shut && !one.due.closed;
        if sent && received {
            self.forget(channel, now_ns);
            self.actions.push_back(Action::Close(channel));
        }
    }

    /// If everything before the end of the channel is written, passes the end to the consumer.
    fn shut_if_at_end(&mut self, channel: u32) {
        if let Some(one) = self.channels.get_mut(&channel)
            && one.inn.at_end()
            && !self.leaving.contains_key(&channel)
        {
            one.inn.shut = true;
            one.due.closed = true;
            self.agenda.news.insert(channel);
            self.agenda.credits.remove(&channel);
            self.actions.push_back(Action::ShutWrite(channel));
        }
    }

    /// Computes a channel's window and grants the part that is not granted yet, if that part is at
    /// least a quarter of the window. The message *credit* becomes due after a grant. It also
    /// becomes due when [`UNREPORTED_CHUNKS`] chunks have been delivered after the last *credit*.
    fn grant(&mut self, channel: u32, now_ns: u64) {
        let span_ns = self.round_trip.span_ns();
        let Some(one) = self.channels.get_mut(&channel) else {
            return;
        };
        // The known end of the channel is within the limit, so no more credit is needed.
        if one.inn.eof.is_some() {
            return;
        }
        let granted = one.inn.granted();
        let most = one.window_bytes.max(LEAST_WINDOW_BYTES);
        let window = one.inn.meter.window(span_ns, now_ns);
        let mut window = window.clamp(LEAST_WINDOW_BYTES, most);
        window = window.min(self.pool.most(granted));
        if planted(Mistake::CreditOverWindow) {
            window = most * 2;
        }
        let rise = window.saturating_sub(granted);
        let worth = rise >= window.div_ceil(4);
        if worth {
            one.inn.limit = (one.inn.limit + rise).min(MAX_CHANNEL_OFFSET);
            self.pool.changed(granted, one.inn.granted());
        }
        if worth || one.inn.unreported >= UNREPORTED_CHUNKS {
            self.agenda.credits.insert(channel);
        }
    }

    /// The first grant of a channel, before its rate is known.
    fn first_grant(&mut self, window_bytes: u64) -> u64 {
        let window = window_bytes.clamp(LEAST_WINDOW_BYTES, START_WINDOW_BYTES);
        let limit = window.min(self.pool.most(0));
        self.pool.changed(0, limit);
        limit
    }

    /// Whether one more read keeps the unacknowledged bytes within their limit (I8).
    fn may_read(&self) -> bool {
        let reading = (self.reading + 1) * u64::from(MAX_STRIPE_CHUNK_BYTES);
        self.lanes.held_bytes() + reading <= self.config.bytes
    }

    /// Queues *gone* for a channel that does not exist on this side.
    fn answer_if_gone(&mut self, channel: u32) -> Result<(), PeerFault> {
        if self.channels.contains_key(&channel) || self.ended.contains_key(&channel) {
            return Ok(());
        }
        // The limit is twice the number of channels that the other side can have at the same time.
        if self.agenda.gone.len() >= 2 * MAX_CHANNELS {
            return Err(PeerFault::TooManyChannels);
        }
        self.agenda.gone.insert(channel);
        Ok(())
    }

    /// Queues a channel for reading, if it may be read.
    fn queue(&mut self, channel: u32) {
        if let Some(one) = self.channels.get_mut(&channel)
            && one.out.turn == Turn::Held
            && one.out.room() > 0
        {
            one.out.turn = Turn::Waits;
            self.turns.add(channel, one.out.bulk);
        }
    }

    /// Whether the other side opens the lanes on which this side sends.
    fn asks(&self) -> bool {
        self.config.one_opener && self.side == Side::Accepting
    }

    /// Whether this side opens the lanes on which the other side sends.
    fn serves(&self) -> bool {
        self.config.one_opener && self.side == Side::Connecting
    }

    /// Aborts all channels, because bytes have waited too long for a lane.
    fn without_lanes(&mut self, now_ns: u64) {
        self.abort_all(FaultCode::LaneLost, now_ns);
        if self.asks() {
            // Only the other side can open lanes, and it has opened none. Drain, so that the other
            // side receives the reason for each channel before the trunk ends.
            self.drain();
            self.ends_by_ns = Some(now_ns.saturating_add(self.config.timeouts.alone_ns));
        }
    }

    /// Whether the trunk must end now, because the other side has opened no lanes.
    fn is_abandoned(&self, now_ns: u64) -> bool {
        self.ends_by_ns
            .is_some_and(|by_ns| now_ns >= by_ns || self.drained())
    }

    fn is_over(&self) -> bool {
        self.control == Control::Over
    }

    fn is_ours(&self, channel: u32) -> bool {
        channel.is_multiple_of(2) == (self.side == Side::Connecting)
    }
}

/// After this many delivered chunks a credit is due. Otherwise the limit on unconfirmed chunks
/// could stop a sender before its window is full.
const UNREPORTED_CHUNKS: usize = crate::limits::MAX_CHANNEL_CHUNKS / 4;

/// How long the end of a channel without a consumer may take to arrive. The last bytes arrive on a
/// data lane and the end on the control lane, at about the same time; no round trip lies between
/// them.
///
/// Drawback: the abort of a channel without bytes in flight is reported this much later.
const END_MAY_COME_NS: u64 = 250_000_000;

#[cfg(test)]
mod tests;
