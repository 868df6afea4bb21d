//! Virtual time, and the queue of events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use dunlin_proto::fault::FaultCode;
use dunlin_proto::stripe::{Action, Config, Opening, Side, Timeouts, Trunk};

use super::channel::{Channel, Over, Piece, Socket};
use super::control::Control;
use super::lane::Lane;
use super::plan::{CHANNELS, Ending, Plan, StrikeKind};
use crate::check::Violation;
use crate::plan::MS;
use crate::random::Random;

/// The virtual time after which a run is stopped. A channel that has not ended by then is a
/// violation.
const LONGEST_NS: u64 = 400_000 * MS;

/// Statistics of one run, or of many.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// The number of runs.
    pub runs: u64,
    /// The number of events.
    pub steps: u64,
    /// Virtual time in nanoseconds.
    pub virtual_ns: u64,
    /// The number of channels that ended well on at least one side.
    pub closed: u64,
    /// The number of other channels that ended.
    pub aborted: u64,
    /// The number of pieces that arrived.
    pub pieces: u64,
    /// The number of pieces that were resent.
    pub again: u64,
    /// The number of control lanes that were replaced.
    pub resumed: u64,
    /// The number of messages on control lanes.
    pub messages: u64,
}

impl Tally {
    /// Adds another tally to this one.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.steps += other.steps;
        self.virtual_ns += other.virtual_ns;
        self.closed += other.closed;
        self.aborted += other.aborted;
        self.pieces += other.pieces;
        self.again += other.again;
        self.resumed += other.resumed;
        self.messages += other.messages;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A side's timer fires.
    Wake(usize),
    Accept(usize),
    Says(usize, usize),
    Takes(usize, usize),
    Connected(usize, usize),
    LaneConnected(usize, u16),
    /// Side 0 has connected a lane on which side 1 sends.
    LaneConnectedFor(u16),
    /// A sending thread has read a socket.
    Read(usize, u16, u32, u32),
    /// A sending thread is free again.
    Free(usize),
    /// The next packet of a connection may have arrived.
    Arrives(usize),
    /// A receiving thread has buffered a piece.
    Kept(usize),
    /// The write with this number is done.
    Wrote(u64),
    /// A receiving thread is ended, whatever it is doing.
    ThreadEnds(usize),
    /// The sender of a connection detects that the connection has ended.
    SenderNotices(usize),
    Message(usize),
    ControlNotices(usize, u32),
    ControlUp(u32),
    Resets(usize, usize),
    /// The deadline by which a side must have been informed of a reset.
    MustBeOver(usize, usize, u32),
    Strike(usize),
}

/// A write to a socket, by a receiving thread or by the socket watcher.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writing {
    pub(super) side: usize,
    pub(super) number: u32,
    pub(super) piece: Piece,
    pub(super) connection: Option<usize>,
}

type Line<'a> = &'a mut (dyn FnMut(&str) + 'a);

pub(super) struct World<'a> {
    pub(super) plan: &'a Plan,
    pub(super) random: Random,
    pub(super) now_ns: u64,
    pub(super) sides: [Trunk<Piece>; 2],
    pub(super) channels: Vec<Channel>,
    /// Maps each channel number on the wire to the channel's index.
    pub(super) by_number: BTreeMap<u32, usize>,
    pub(super) lanes: Vec<Lane>,
    /// The numbers of the lanes that side 0 has opened for side 1.
    pub(super) opened_for: BTreeSet<u16>,
    pub(super) control: Control,
    pub(super) writings: BTreeMap<u64, Writing>,
    pub(super) no_lanes_until_ns: u64,
    pub(super) no_control_until_ns: u64,
    pub(super) cut_at_next_keep: bool,
    /// Whether channels may have been given up for lack of lanes or a control lane.
    pub(super) hopeless: bool,
    pub(super) tally: Tally,
    pub(super) violation: Option<Violation>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    next_event: u64,
    pub(super) next_writing: u64,
    wakes_ns: [Option<u64>; 2],
    line: Option<Line<'a>>,
}

impl<'a> World<'a> {
    pub(super) fn new(plan: &'a Plan, line: Option<Line<'a>>) -> Self {
        let config = Config {
            channels: CHANNELS,
            bytes: plan.peer_bytes,
            lanes: plan.lanes,
            version: 2,
            one_opener: plan.one_opener,
            lanes_max: plan.lanes * 4,
            timeouts: Timeouts::default(),
            ..Config::default()
        };
        let side = |side| Trunk::new(side, config, 0);
        let channels = plan.channels.iter().map(|channel| {
            let talk = |side: usize| channel.talks[usize::from(side != channel.opener)];
            Channel {
                number: None,
                sockets: [Socket::new(talk(0)), Socket::new(talk(1))],
                before: Vec::new(),
            }
        });
        let mut world = Self {
            plan,
            random: Random::new(plan.seed, 101),
            now_ns: 0,
            sides: [side(Side::Connecting), side(Side::Accepting)],
            channels: channels.collect(),
            by_number: BTreeMap::new(),
            lanes: Vec::new(),
            opened_for: BTreeSet::new(),
            control: Control::default(),
            writings: BTreeMap::new(),
            no_lanes_until_ns: 0,
            no_control_until_ns: 0,
            cut_at_next_keep: false,
            hopeless: false,
            tally: Tally {
                runs: 1,
                ..Tally::default()
            },
            violation: None,
            events: BinaryHeap::new(),
            next_event: 0,
            next_writing: 0,
            wakes_ns: [None; 2],
            line,
        };
        world.at(0, Event::ControlUp(1));
        for (index, channel) in plan.channels.iter().enumerate() {
            world.at(channel.at_ns, Event::Accept(index));
        }
        for (index, strike) in plan.strikes.iter().enumerate() {
            world.at(strike.at_ns, Event::Strike(index));
        }
        world
    }

    pub(super) fn play(mut self) -> Result<Tally, Violation> {
        while let Some(Reverse((at_ns, _, event))) = self.events.pop() {
            self.now_ns = at_ns;
            self.tally.steps += 1;
            self.happens(event);
            self.look();
            if let Some(violation) = self.violation {
                return Err(violation);
            }
            if self.now_ns > LONGEST_NS {
                break;
            }
            if self.channels.iter().all(Channel::is_over) && self.is_quiet() {
                break;
            }
        }
        self.finish()?;
        self.tally.virtual_ns = self.now_ns;
        Ok(self.tally)
    }

    pub(super) fn at(&mut self, at_ns: u64, event: Event) {
        let at_ns = at_ns.max(self.now_ns);
        self.events.push(Reverse((at_ns, self.next_event, event)));
        self.next_event += 1;
    }

    pub(super) fn after(&mut self, for_ns: u64, event: Event) {
        self.at(self.now_ns + for_ns, event);
    }

    /// A short random delay of a thread.
    pub(super) fn moment(&mut self) -> u64 {
        match self.random.below(50) {
            0 => self.random.between(0, 3 * MS),
            _ => self.random.between(0, 60_000),
        }
    }

    pub(super) fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(line) = &mut self.line {
            let ms = self.now_ns as f64 / MS as f64;
            line(&format!("{ms:10.3} {}", text()));
        }
    }

    pub(super) fn broken(&mut self, invariant: &'static str, text: String) {
        self.say(|| format!("BROKEN {invariant}: {text}"));
        if self.violation.is_none() {
            let at_ns = self.now_ns;
            self.violation = Some(Violation {
                invariant,
                text,
                at_ns,
            });
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Wake(side) => {
                self.wakes_ns[side] = None;
            }
            Event::Accept(channel) => self.accept(channel),
            Event::Says(channel, side) => self.says(channel, side),
            Event::Takes(channel, side) => self.takes(channel, side),
            Event::Connected(channel, side) => self.connected(channel, side),
            Event::LaneConnected(side, lane) => self.lane_connected(side, lane),
            Event::LaneConnectedFor(lane) => self.lane_connected_for(lane),
            Event::Read(side, lane, number, most) => self.has_read(side, lane, number, most),
            Event::Free(lane) => self.is_free(lane),
            Event::Arrives(lane) => self.arrives(lane),
            Event::Kept(lane) => self.kept(lane),
            Event::Wrote(writing) => self.wrote(writing),
            Event::ThreadEnds(lane) => self.receiver_closes(lane),
            Event::SenderNotices(lane) => self.sender_notices(lane),
            Event::Message(side) => self.hears(side),
            Event::ControlNotices(side, epoch) => self.control_notices(side, epoch),
            Event::ControlUp(epoch) => self.control_up(epoch),
            Event::Resets(channel, side) => self.resets(channel, side),
            Event::MustBeOver(channel, side, epoch) => self.must_be_over(channel, side, epoch),
            Event::Strike(strike) => self.strike(strike),
        }
        for side in 0..2 {
            self.drive(side);
        }
    }

    /// Executes the actions that the trunk of `side` requests, sends its messages, and gives work
    /// to its lanes.
    fn drive(&mut self, side: usize) {
        loop {
            while let Some(action) = self.sides[side].poll(self.now_ns) {
                self.act(side, action);
            }
            while let Some(message) = self.sides[side].next_message(self.now_ns) {
                self.send_message(side, &message);
            }
            if !self.work(side) {
                break;
            }
        }
        while let Some(action) = self.sides[side].poll(self.now_ns) {
            self.act(side, action);
        }
        if let Some(due_ns) = self.sides[side].due_ns() {
            let due_ns = due_ns.max(self.now_ns + 1);
            if self.wakes_ns[side].is_none_or(|wake_ns| due_ns < wake_ns) {
                self.wakes_ns[side] = Some(due_ns);
                self.at(due_ns, Event::Wake(side));
            }
        }
    }

    fn act(&mut self, side: usize, action: Action) {
        self.say(|| format!("{side}: {action:?}"));
        match action {
            Action::Connect { channel, .. } => {
                let index = self.by_number[&channel];
                self.check_order(index);
                let for_ns = self.random.between(0, 3 * MS);
                self.after(for_ns, Event::Connected(index, side));
            }
            Action::Count(channel) => {
                let socket = &self.channels[self.by_number[&channel]].sockets[side];
                let unread = socket.unread();
                self.sides[side].counted(channel, unread);
            }
            Action::Opened(channel) => {
                let index = self.by_number[&channel];
                self.channels[index].sockets[side].open = true;
                self.tell_readable(index, side);
            }
            Action::Refused { channel, .. } => self.is_over(channel, side, Over::Refused),
            Action::ShutWrite(channel) => {
                let index = self.by_number[&channel];
                self.check_end(index, side);
                self.channels[index].sockets[side].shut = true;
            }
            Action::Close(channel) => {
                self.check_closed(self.by_number[&channel], side);
                self.is_over(channel, side, Over::Closed);
            }
            Action::Abort { channel, .. } => self.is_over(channel, side, Over::Aborted),
            Action::OpenLane(lane) => self.open_lane(side, lane),
            Action::OpenLaneFor(lane) => self.open_lane_for(side, lane),
            Action::CutLane(lane) => self.cut_lane(side, lane),
            Action::LaneRefused { .. } | Action::LaneFailed { .. } => {}
            Action::GiveUp(_) => self.give_up(side),
        }
    }

    fn is_over(&mut self, number: u32, side: usize, over: Over) {
        let index = self.by_number[&number];
        let socket = &mut self.channels[index].sockets[side];
        if let Some(before) = socket.over {
            self.broken(
                "sim",
                format!("channel {number} ended twice; the first end was {before:?}"),
            );
            return;
        }
        socket.over = Some(over);
    }

    fn accept(&mut self, index: usize) {
        let channel = self.plan.channels[index];
        let side = channel.opener;
        let earlier = |other: usize| {
            let plan = &self.plan.channels[other];
            let one = &self.channels[other];
            plan.opener == side
                && plan.listener == channel.listener
                && one.number.is_some()
                && one.sockets[side].over.is_none()
        };
        let before = (0..self.channels.len()).filter(|&other| earlier(other));
        let before: Vec<_> = before
            .map(|other| (other, self.channels[other].sockets[side].said))
            .collect();
        let opening = Opening {
            listener: channel.listener,
            route: "route".to_owned(),
            parameter: index.to_string(),
            window_bytes: channel.window_bytes,
        };
        match self.sides[side].open(opening) {
            Ok(number) => {
                self.say(|| format!("{side}: accepts {index} as channel {number}"));
                self.channels[index].number = Some(number);
                self.channels[index].before = before;
                self.by_number.insert(number, index);
                self.after(0, Event::Says(index, side));
                if let Ending::Reset {
                    side: who,
                    after_ns,
                } = channel.ending
                {
                    let who = if who == 0 { side } else { 1 - side };
                    self.after(after_ns, Event::Resets(index, who));
                }
            }
            Err(error) => {
                self.say(|| format!("{side}: {error}"));
                for socket in &mut self.channels[index].sockets {
                    socket.over = Some(Over::Refused);
                }
            }
        }
    }

    fn connected(&mut self, index: usize, side: usize) {
        let Some(number) = self.channels[index].number else {
            return;
        };
        if self.channels[index].sockets[side].over.is_some() {
            return;
        }
        if self.plan.channels[index].ending == Ending::Refused {
            self.channels[index].sockets[side].over = Some(Over::Refused);
            let text = "no program accepts".to_owned();
            self.sides[side].refuse(number, FaultCode::Unauthorised, text, self.now_ns);
            return;
        }
        let window_bytes = self.plan.channels[index].window_bytes;
        if !self.sides[side].connected(number, window_bytes) {
            return self.broken("sim", format!("channel {number} ended without a report"));
        }
        self.channels[index].sockets[side].open = true;
        self.after(0, Event::Says(index, side));
        self.tell_readable(index, side);
    }

    /// The program that owns the connection resets it.
    fn resets(&mut self, index: usize, side: usize) {
        let channel = &mut self.channels[index];
        let connected = side == self.plan.channels[index].opener || channel.sockets[side].open;
        let Some(number) = channel.number.filter(|_| connected) else {
            return;
        };
        if channel.sockets[side].over.is_some() {
            return;
        }
        channel.sockets[side].over = Some(Over::Aborted);
        self.say(|| format!("{side}: channel {number} is reset by its owner"));
        self.sides[side].fail(number, FaultCode::Cancelled, self.now_ns);
        if let Some(by_ns) = self.control.arrives_by(self.plan) {
            let epoch = self.control.epoch;
            self.after(by_ns, Event::MustBeOver(index, 1 - side, epoch));
        }
    }

    fn strike(&mut self, index: usize) {
        let strike = self.plan.strikes[index];
        self.say(|| format!("STRIKE {strike:?}"));
        let until_ns = self.now_ns + strike.for_ns;
        let timeout_ns = Timeouts::default().alone_ns;
        match strike.kind {
            // Cut a lane while its thread buffers a piece, which is the most critical moment.
            StrikeKind::LaneCut if self.random.chance(40) => self.cut_at_next_keep = true,
            StrikeKind::LaneCut => self.on_lane(|world, lane| world.cut(lane)),
            StrikeKind::LaneSwallowed => self.on_lane(|world, lane| world.swallow(lane)),
            StrikeKind::LaneHeld => self.on_lane(|world, lane| world.hold(lane, until_ns)),
            StrikeKind::LaneSlow => self.on_lane(|world, lane| world.slow_down(lane)),
            StrikeKind::ControlCut => self.cut_control(),
            StrikeKind::NoNewLanes => {
                self.no_lanes_until_ns = self.no_lanes_until_ns.max(until_ns);
                self.hopeless |= strike.for_ns * 2 >= timeout_ns;
            }
            StrikeKind::NoControl => {
                self.no_control_until_ns = self.no_control_until_ns.max(until_ns);
                self.hopeless |= strike.for_ns * 2 >= timeout_ns;
                self.cut_control();
            }
        }
    }

    fn on_lane(&mut self, strike: impl FnOnce(&mut Self, usize)) {
        let lanes = (0..self.lanes.len()).filter(|&lane| self.lanes[lane].is_alive());
        let lanes: Vec<usize> = lanes.collect();
        if !lanes.is_empty() {
            let lane = self.random.pick(&lanes);
            strike(self, lane);
        }
    }
}
