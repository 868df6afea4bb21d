//! Data lanes: connections, and the thread at each end of them.

use std::collections::VecDeque;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::stripe::frame::{Data, Frame};
use dunlin_proto::stripe::{Arrival, Delivery, KeyUsage, Outcome, Work};

use super::channel::Piece;
use super::world::{Event, World};
use crate::plan::MS;

#[derive(Clone, Copy, Debug)]
pub(super) enum Packet {
    Open,
    /// Opens a lane on which the side that receives this packet will send.
    OpenFor,
    Data(Data, Piece),
    End(u64),
    /// The connection has ended.
    Over,
}

/// A connection for one lane.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) from: usize,
    pub(super) number: u16,
    /// Packets in flight, with arrival times.
    packets: VecDeque<(u64, Packet)>,
    last_arrival_ns: u64,
    rate: u64,
    held_until_ns: u64,
    swallows: bool,
    frames: u64,
    /// Whether the sending thread waits for work.
    waits: bool,
    sender_over: bool,
    receiver_over: bool,
    admitted: bool,
    /// Whether the receiving thread is buffering or writing a piece.
    busy: bool,
    keeping: Option<(Data, Piece)>,
    /// Whether the lane still waits for its sender: side 0 has opened the lane for side 1, and the
    /// first packet has not arrived there yet.
    is_coming: bool,
}

impl Lane {
    fn new(from: usize, number: u16, rate: u64) -> Self {
        Self {
            from,
            number,
            packets: VecDeque::new(),
            last_arrival_ns: 0,
            rate,
            held_until_ns: 0,
            swallows: false,
            frames: 0,
            waits: false,
            sender_over: false,
            receiver_over: false,
            admitted: false,
            busy: false,
            keeping: None,
            is_coming: false,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        !self.sender_over && !self.receiver_over && !self.is_coming
    }
}

impl World<'_> {
    pub(super) fn open_lane(&mut self, side: usize, number: u16) {
        let for_ns = self.plan.latency_ns * 2 + self.moment();
        self.after(for_ns, Event::LaneConnected(side, number));
    }

    pub(super) fn lane_connected(&mut self, side: usize, number: u16) {
        if self.now_ns < self.no_lanes_until_ns {
            let (fault, text) = (FaultCode::LaneLost, "no new lanes".to_owned());
            return self.sides[side].lane_failed(number, fault, text, self.now_ns);
        }
        if !self.sides[side].lane_established(number, self.now_ns) {
            return;
        }
        self.lanes.push(Lane {
            waits: true,
            ..Lane::new(side, number, self.plan.rate)
        });
        self.send_packet(self.lanes.len() - 1, Packet::Open);
    }

    /// Side 0 opens a lane on which side 1 sends.
    pub(super) fn open_lane_for(&mut self, side: usize, number: u16) {
        if side != 0 || !self.opened_for.insert(number) {
            return self.broken(
                "lanes",
                format!("side {side} opens lane {number} again, or is not side 0"),
            );
        }
        let for_ns = self.plan.latency_ns * 2 + self.moment();
        self.after(for_ns, Event::LaneConnectedFor(number));
    }

    pub(super) fn lane_connected_for(&mut self, number: u16) {
        let opener = &mut self.sides[0];
        if self.now_ns < self.no_lanes_until_ns {
            return opener.not_opened(number, FaultCode::LaneLost, "no new lanes".to_owned());
        }
        if !opener.opened_for(number) {
            return;
        }
        self.lanes.push(Lane {
            // The sender has not taken the lane yet.
            is_coming: true,
            admitted: true,
            ..Lane::new(1, number, self.plan.rate)
        });
        self.send_packet(self.lanes.len() - 1, Packet::OpenFor);
    }

    /// The first packet of a lane has arrived at the side that sends on the lane.
    fn comes(&mut self, lane: usize) {
        self.lanes[lane].is_coming = false;
        let (side, number) = (self.lanes[lane].from, self.lanes[lane].number);
        let is_awaited = self.sides[side].is_awaited(number);
        if is_awaited != self.sides[side].lane_established(number, self.now_ns) {
            return self.broken(
                "lanes",
                format!("lane {number} is awaited: {is_awaited}; established: the opposite"),
            );
        }
        if is_awaited {
            self.lanes[lane].waits = true;
        } else {
            self.say(|| format!("{side}: lane {number} is not awaited"));
            self.lanes[lane].sender_over = true;
            self.send_packet(lane, Packet::Over);
        }
    }

    fn send_packet(&mut self, lane: usize, packet: Packet) {
        let late_ns = self.random.between(0, self.plan.latency_ns / 4);
        let latency_ns = self.plan.latency_ns + late_ns;
        let one = &mut self.lanes[lane];
        if one.swallows {
            return;
        }
        let at_ns = (self.now_ns + latency_ns)
            .max(one.last_arrival_ns)
            .max(one.held_until_ns);
        one.last_arrival_ns = at_ns;
        one.packets.push_back((at_ns, packet));
        self.at(at_ns, Event::Arrives(lane));
    }

    /// Gives work to one waiting thread of this side; returns whether there was any work.
    pub(super) fn work(&mut self, side: usize) -> bool {
        let waits = |lane: &Lane| lane.from == side && lane.waits && !lane.sender_over;
        let waiting = (0..self.lanes.len()).filter(|&lane| waits(&self.lanes[lane]));
        let waiting: Vec<usize> = waiting.collect();
        if waiting.is_empty() || !self.sides[side].ready() {
            return false;
        }
        let first = self.random.below(waiting.len() as u64) as usize;
        for turn in 0..waiting.len() {
            if self.works(waiting[(first + turn) % waiting.len()]) {
                return true;
            }
        }
        false
    }

    fn works(&mut self, lane: usize) -> bool {
        let one = &self.lanes[lane];
        let (side, number) = (one.from, one.number);
        let usage = match self.plan.lane_frames {
            frames if one.frames >= frames.saturating_mul(2) => KeyUsage::Spent,
            frames if one.frames >= frames => KeyUsage::NearLimit,
            _ => KeyUsage::Fresh,
        };
        let work = self.sides[side].next(number, usage, self.now_ns);
        if work == Work::Wait {
            return false;
        }
        self.say(|| format!("{side}: lane {number}: {work:?}"));
        self.lanes[lane].waits = false;
        match work {
            Work::Again { data, token } => {
                self.tally.again += 1;
                self.send(lane, data, token);
            }
            Work::Read { channel, most } => {
                let for_ns = self.moment();
                self.after(for_ns, Event::Read(side, number, channel, most));
            }
            Work::End { frames } => {
                self.send_packet(lane, Packet::End(frames));
                self.send_packet(lane, Packet::Over);
                self.lanes[lane].sender_over = true;
                self.sides[side].lane_over(number, self.now_ns);
            }
            Work::Stop => self.sender_closes(lane),
            Work::Wait => {}
        }
        true
    }

    pub(super) fn has_read(&mut self, side: usize, number: u16, channel: u32, most: u32) {
        let outcome = self.read_socket(side, channel, most);
        let (bytes, more) = match &outcome {
            Outcome::Bytes { token, more, .. } => (Some(*token), *more),
            _ => (None, false),
        };
        let data = self.sides[side].read(number, channel, outcome, self.now_ns);
        if !more {
            self.tell_readable(self.by_number[&channel], side);
        }
        let Some(lane) = self.lane_of(side, number) else {
            return;
        };
        match (data, bytes) {
            (Some(data), Some(piece)) => self.send(lane, data, piece),
            _ => self.lanes[lane].waits = true,
        }
    }

    fn lane_of(&self, side: usize, number: u16) -> Option<usize> {
        let here = |lane: &Lane| {
            lane.from == side && lane.number == number && !lane.sender_over && !lane.is_coming
        };
        self.lanes.iter().position(here)
    }

    /// A sending thread seals and writes a piece.
    fn send(&mut self, lane: usize, data: Data, piece: Piece) {
        // The simulated wire carries values instead of bytes, so check here that the encoding can
        // be decoded.
        let frame = Frame::Data(data);
        assert_eq!(Frame::decode(&frame.to_bytes()), Ok(frame));
        self.lanes[lane].frames += 1;
        let rate = self.lanes[lane].rate;
        let for_ns = u64::from(piece.length) * 1_000_000_000 / rate;
        self.send_packet(lane, Packet::Data(data, piece));
        self.after(for_ns, Event::Free(lane));
    }

    pub(super) fn is_free(&mut self, lane: usize) {
        self.lanes[lane].waits = true;
        if self.lanes[lane].sender_over {
            return;
        }
        self.works(lane);
    }

    pub(super) fn arrives(&mut self, lane: usize) {
        let one = &mut self.lanes[lane];
        let due = one
            .packets
            .front()
            .is_some_and(|(at_ns, _)| *at_ns <= self.now_ns);
        if one.busy || one.receiver_over || !due {
            return;
        }
        let Some((_, packet)) = one.packets.pop_front() else {
            return;
        };
        let (to, number) = (1 - one.from, one.number);
        match packet {
            Packet::Open => {
                one.admitted = self.sides[to].admit(number).is_ok();
                if !one.admitted {
                    self.say(|| format!("{to}: lane {number} is turned away"));
                    return self.receiver_closes(lane);
                }
            }
            Packet::OpenFor => self.comes(lane),
            Packet::Data(data, piece) => {
                self.tally.pieces += 1;
                let arrival = self.sides[to].arrived(number, &data, self.now_ns);
                self.say(|| format!("{to}: lane {number} brings {data:?}: {arrival:?}"));
                match arrival {
                    Ok(Arrival::Deliver) => {
                        self.lanes[lane].busy = true;
                        let delivery = Delivery {
                            channel: data.channel(),
                            offset: data.offset(),
                            length: data.length(),
                            token: piece,
                        };
                        self.write(to, delivery, Some(lane));
                    }
                    Ok(Arrival::Keep) => {
                        self.lanes[lane].busy = true;
                        self.lanes[lane].keeping = Some((data, piece));
                        let long = self.random.chance(20);
                        let for_ns = self.moment() * if long { 100 } else { 1 };
                        self.after(for_ns, Event::Kept(lane));
                        if std::mem::take(&mut self.cut_at_next_keep) {
                            self.after(for_ns / 2, Event::ThreadEnds(lane));
                        }
                    }
                    Ok(Arrival::Drop) => {}
                    Err(fault) => self.broken("accused", fault.to_string()),
                }
            }
            Packet::End(frames) => {
                if let Err(fault) = self.sides[to].lane_ended(number, frames) {
                    self.broken("accused", fault.to_string());
                }
            }
            Packet::Over => return self.receiver_closes(lane),
        }
        self.after(0, Event::Arrives(lane));
    }

    pub(super) fn kept(&mut self, lane: usize) {
        let Some((data, piece)) = self.lanes[lane].keeping.take() else {
            return;
        };
        let (to, number) = (1 - self.lanes[lane].from, self.lanes[lane].number);
        if self.lanes[lane].receiver_over {
            // The thread was ended while it buffered the piece.
            return;
        }
        match self.sides[to].keep(number, &data, piece, self.now_ns) {
            Ok(Some(delivery)) => self.write(to, delivery, Some(lane)),
            Ok(None) => self.reads_on(lane),
            Err(fault) => self.broken("accused", fault.to_string()),
        }
    }

    pub(super) fn reads_on(&mut self, lane: usize) {
        self.lanes[lane].busy = false;
        self.after(0, Event::Arrives(lane));
    }

    /// The connection breaks: some packets in flight arrive, and each side detects the break
    /// independently.
    pub(super) fn cut(&mut self, lane: usize) {
        let keep = self.random.below(self.lanes[lane].packets.len() as u64 + 1);
        self.lanes[lane].packets.truncate(keep as usize);
        if self.random.chance(40) {
            // The receiver's thread is ended, whatever it is doing.
            self.receiver_closes(lane);
        } else {
            self.send_packet(lane, Packet::Over);
        }
        self.lanes[lane].swallows = true;
        let for_ns = self.random.between(0, self.plan.latency_ns * 3);
        self.after(for_ns, Event::SenderNotices(lane));
    }

    pub(super) fn sender_notices(&mut self, lane: usize) {
        if !self.lanes[lane].sender_over {
            self.lanes[lane].sender_over = true;
            let one = &self.lanes[lane];
            self.sides[one.from].lane_over(one.number, self.now_ns);
        }
    }

    pub(super) fn swallow(&mut self, lane: usize) {
        self.lanes[lane].packets.clear();
        self.lanes[lane].swallows = true;
    }

    pub(super) fn hold(&mut self, lane: usize, until_ns: u64) {
        let one = &mut self.lanes[lane];
        one.held_until_ns = until_ns;
        one.last_arrival_ns = one.last_arrival_ns.max(until_ns);
        for (at_ns, _) in &mut one.packets {
            *at_ns = (*at_ns).max(until_ns);
        }
        let packets = one.packets.len();
        for _ in 0..packets {
            self.at(until_ns, Event::Arrives(lane));
        }
    }

    pub(super) fn slow_down(&mut self, lane: usize) {
        self.lanes[lane].rate = (self.lanes[lane].rate / 30).max(100_000);
    }

    /// The trunk ends a lane.
    pub(super) fn cut_lane(&mut self, side: usize, number: u16) {
        if let Some(lane) = self.lane_of(side, number) {
            self.sender_closes(lane);
        }
    }

    fn sender_closes(&mut self, lane: usize) {
        if self.lanes[lane].sender_over {
            return;
        }
        self.lanes[lane].sender_over = true;
        if self.lanes[lane].swallows {
            // The network drops all packets, so the receiver detects the end only by its timeout.
            // Simulate this timeout: let the packet `Over` through, but only after a delay.
            self.lanes[lane].swallows = false;
            let later_ns = self.random.between(1_000 * MS, 9_000 * MS);
            self.lanes[lane].held_until_ns = self.now_ns + later_ns;
        }
        self.send_packet(lane, Packet::Over);
        let one = &self.lanes[lane];
        self.sides[one.from].lane_over(one.number, self.now_ns);
    }

    pub(super) fn receiver_closes(&mut self, lane: usize) {
        if self.lanes[lane].receiver_over {
            return;
        }
        self.lanes[lane].receiver_over = true;
        let one = &self.lanes[lane];
        if one.admitted {
            self.sides[1 - one.from].admitted_over(one.number);
        }
        if !one.sender_over {
            // *lane lost* may arrive on the control lane before this event.
            let latency_ns = self.plan.latency_ns;
            let for_ns = self.random.between(latency_ns, latency_ns * 3);
            self.after(for_ns, Event::SenderNotices(lane));
        }
    }

    /// Cuts every lane of both sides, because a trunk has ended.
    pub(super) fn cut_all(&mut self) {
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].is_alive() {
                self.cut(lane);
            } else if self.lanes[lane].is_coming {
                self.lanes[lane].receiver_over = true;
            }
        }
    }
}
