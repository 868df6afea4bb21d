//! The control lane, and its replacement.

use std::collections::VecDeque;

use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};

use super::plan::Plan;
use super::world::{Event, World};
use crate::plan::MS;

/// The control lane that is established or being opened.
#[derive(Clone, Debug, Default)]
pub(super) struct Control {
    pub(super) epoch: u32,
    established: bool,
    /// For each side, whether it uses this epoch's control lane.
    up: [bool; 2],
    /// Messages in flight to each side, with arrival time and epoch.
    packets: [VecDeque<(u64, u32, Vec<u8>)>; 2],
    /// For each side, whether it has given up.
    over: [bool; 2],
}

impl Control {
    /// The maximum delay of a message that is sent now; `None` if its arrival is not certain.
    pub(super) fn arrives_by(&self, plan: &Plan) -> Option<u64> {
        let sure = self.established && self.up == [true, true] && self.over == [false, false];
        sure.then_some(plan.latency_ns * 2 + MS)
    }

    pub(super) fn is_over(&self) -> bool {
        self.over == [true, true]
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.packets.iter().all(VecDeque::is_empty)
    }
}

impl World<'_> {
    pub(super) fn send_message(&mut self, side: usize, message: &Message) {
        self.say(|| format!("{side}: says {message:?}"));
        self.tally.messages += 1;
        let mut bytes = Vec::new();
        let epoch = self.control.epoch;
        if let Err(error) = message.encode(epoch, &mut bytes) {
            return self.broken("sim", error.to_string());
        }
        if !self.control.established || !self.control.up[side] {
            return;
        }
        let late_ns = self.random.between(0, self.plan.latency_ns / 4);
        let to = 1 - side;
        let last_ns = self.control.packets[to]
            .back()
            .map_or(0, |(at_ns, ..)| *at_ns);
        let at_ns = (self.now_ns + self.plan.latency_ns + late_ns).max(last_ns);
        self.control.packets[to].push_back((at_ns, epoch, bytes));
        self.at(at_ns, Event::Message(to));
    }

    pub(super) fn hears(&mut self, side: usize) {
        let packets = &mut self.control.packets[side];
        if packets
            .front()
            .is_none_or(|(at_ns, ..)| *at_ns > self.now_ns)
        {
            return;
        }
        let Some((_, epoch, bytes)) = packets.pop_front() else {
            return;
        };
        if self.control.over[side] || (!self.control.up[side] && epoch == self.control.epoch) {
            return;
        }
        let decoded =
            bytes
                .split_first_chunk::<MESSAGE_HEADER_BYTES>()
                .and_then(|(header, body)| {
                    let header = Header::decode(header).ok()?;
                    Message::decode(&header, body).ok()?
                });
        let Some(message) = decoded else {
            return self.broken("accused", "cannot decode a message".to_owned());
        };
        if let Err(fault) = self.sides[side].handle(message.clone(), self.now_ns) {
            self.broken("accused", format!("{fault}, by {message:?}"));
        }
    }

    /// The connection breaks; some messages in flight still arrive, before or after a side
    /// detects the break.
    pub(super) fn cut_control(&mut self) {
        if !self.control.established {
            return;
        }
        self.control.established = false;
        for side in 0..2 {
            let keep = self
                .random
                .below(self.control.packets[side].len() as u64 + 1);
            self.control.packets[side].truncate(keep as usize);
            let for_ns = self.random.between(0, self.plan.latency_ns * 3);
            self.after(for_ns, Event::ControlNotices(side, self.control.epoch));
        }
        let for_ns = self.plan.latency_ns * 3 + self.random.between(0, 300 * MS);
        self.after(for_ns, Event::ControlUp(self.control.epoch + 1));
    }

    pub(super) fn control_notices(&mut self, side: usize, epoch: u32) {
        if epoch == self.control.epoch && self.control.up[side] {
            self.control.up[side] = false;
            self.sides[side].control_down(self.now_ns);
        }
    }

    pub(super) fn control_up(&mut self, epoch: u32) {
        if self.control.over.contains(&true) {
            return;
        }
        if self.now_ns < self.no_control_until_ns {
            return self.after(100 * MS, Event::ControlUp(epoch));
        }
        self.tally.resumed += u64::from(epoch > 1);
        self.say(|| format!("control lane {epoch} is up"));
        self.control.epoch = epoch;
        self.control.established = true;
        // The readers of the old lane are joined. Messages of the old lane that are still in flight
        // are usually lost, but sometimes they are processed later.
        let late = self.random.chance(30);
        for side in 0..2 {
            if !late {
                self.control.packets[side].clear();
            }
            self.control.up[side] = true;
            self.sides[side].control_up(self.now_ns);
        }
    }

    /// Records that a side has given up. The other side detects this, because all connections end.
    pub(super) fn give_up(&mut self, side: usize) {
        self.control.over[side] = true;
        self.control.established = false;
        self.cut_all();
        let other = 1 - side;
        if self.control.up[other] {
            self.control.up[other] = false;
            self.sides[other].control_down(self.now_ns);
        }
    }
}
