//! Channels are opened in the order in which their connections were accepted.
//!
//! When a listener accepts a connection, the listener's earlier channels may have bytes that were
//! read but not delivered, and bytes that wait in their sockets. The new channel is connected only
//! after these bytes are delivered. Waiting bytes are counted while no lane reads the socket;
//! otherwise a lane could have read bytes without having reported them. If a lane is reading, it
//! finishes first.
//!
//! An earlier channel delays no other channel if its consumer does not read and the consumer's
//! socket is full. Without a tunnel, the consumer could not have received more either. It may even
//! be waiting for the new connection, which would otherwise wait for the consumer.

use std::collections::BTreeSet;

use super::{
    Action, Asking, Channel, Due, Ended, Inbound, Mark, OpenError, Opening, Outbound, Stage, Trunk,
    Turn,
};
use crate::fault::FaultCode;
use crate::limits::{MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_NAME_BYTES, MAX_TEXT_BYTES};
use crate::stripe::fault::PeerFault;
use crate::stripe::message::Open;

impl<T: Clone> Trunk<T> {
    /// Opens a channel for an accepted connection and returns its number. [`Action::Opened`],
    /// [`Action::Refused`] or [`Action::Abort`] follows; nothing is read before that.
    ///
    /// # Errors
    /// [`OpenError`]; nothing has changed.
    pub fn open(&mut self, opening: Opening) -> Result<u32, OpenError> {
        if self.is_over() {
            return Err(OpenError::Over);
        }
        if self.draining || self.peer_drains {
            return Err(OpenError::Draining);
        }
        if self.channels.len() + self.ended.len() >= self.config.channels {
            let channels = self.config.channels;
            return Err(OpenError::TooMany { channels });
        }
        let longest = opening.route.len().max(opening.parameter.len());
        if longest > MAX_NAME_BYTES {
            return Err(OpenError::Name);
        }
        let number = u32::try_from(self.next_own).map_err(|_| OpenError::Over)?;
        self.next_own += 2;

        let mut counting = BTreeSet::new();
        let mut barrier = Vec::new();
        for (&earlier, one) in &mut self.channels {
            if !one.ours || one.listener != opening.listener {
                continue;
            }
            if one.out.turn == Turn::Ended {
                barrier.extend(mark(earlier, &one.out, one.out.sent));
                continue;
            }
            counting.insert(earlier);
            one.out.counted_for += 1;
            if one.out.turn != Turn::Taken {
                self.actions.push_back(Action::Count(earlier));
            }
        }
        let limit = self.first_grant(opening.window_bytes);
        let asking = Asking {
            route: opening.route,
            parameter: opening.parameter,
            counting,
            barrier,
            sent: false,
        };
        let channel = Channel {
            ours: true,
            listener: opening.listener,
            stage: Stage::Opening(asking),
            window_bytes: opening.window_bytes,
            out: Outbound::new(0, false),
            inn: Inbound::new(limit),
            due: Due::default(),
        };
        self.channels.insert(number, channel);
        self.agenda.opens.insert(number);
        Ok(number)
    }

    /// Answers [`Action::Count`] with the number of bytes that can be read from the channel's
    /// socket.
    pub fn counted(&mut self, channel: u32, unread_bytes: u64) {
        let Some(one) = self.channels.get_mut(&channel) else {
            return;
        };
        // Ignore the count if a lane has taken the turn to read: the count is requested again after
        // the read. Also ignore it if no newer channel waits for it.
        if one.out.turn == Turn::Taken || one.out.counted_for == 0 {
            return;
        }
        one.out.counted_for = 0;
        let arrived = one.out.sent.saturating_add(unread_bytes);
        let arrived = arrived.min(MAX_CHANNEL_OFFSET);
        let mark = mark(channel, &one.out, arrived);
        for later in &self.agenda.opens {
            if let Some(one) = self.channels.get_mut(later)
                && let Stage::Opening(asking) = &mut one.stage
                && asking.counting.remove(&channel)
            {
                asking.barrier.extend(mark);
            }
        }
        self.queue(channel);
    }

    /// Answers [`Action::Connect`] if the target is connected. `window_bytes` is the largest window
    /// that the route allows. From now on the caller reports when the socket is readable. Returns
    /// false if the channel has ended in the meantime; in this case the caller closes the
    /// connection.
    #[must_use]
    pub fn connected(&mut self, channel: u32, window_bytes: u64) -> bool {
        let connecting = |one: &Channel<T>| matches!(one.stage, Stage::Connecting);
        if !self.channels.get(&channel).is_some_and(connecting) {
            return false;
        }
        let limit = self.first_grant(window_bytes);
        if let Some(one) = self.channels.get_mut(&channel) {
            one.stage = Stage::Open;
            one.window_bytes = window_bytes;
            one.inn.limit = limit;
            one.out.open = true;
            one.due.opened = true;
            self.agenda.news.insert(channel);
        }
        self.look_at_barriers();
        true
    }

    /// Answers [`Action::Connect`] with the reason why the target could not be connected. The text
    /// is truncated to the limit of a message.
    pub fn refuse(&mut self, channel: u32, fault: FaultCode, mut text: String, now_ns: u64) {
        let theirs = |one: &Channel<T>| !one.ours;
        if !self.channels.get(&channel).is_some_and(theirs) {
            return;
        }
        self.forget(channel, now_ns);
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        let ended = Ended {
            fault,
            refused: Some(text),
            due: true,
        };
        self.ended.insert(channel, ended);
    }

    /// Handles *open*.
    pub(super) fn asked(&mut self, open: Open, now_ns: u64) -> Result<(), PeerFault> {
        let number = open.channel;
        if self.is_ours(number) {
            return Err(PeerFault::WrongSide { channel: number });
        }
        if self.highest_theirs.is_some_and(|highest| number <= highest) {
            // The message repeats an earlier *open*, perhaps on another control lane.
            return self.answer_if_gone(number);
        }
        for mark in &open.barrier {
            if self.is_ours(mark.channel) || mark.channel >= number {
                return Err(PeerFault::Barrier {
                    channel: number,
                    earlier: mark.channel,
                });
            }
        }
        if self.ended.len() >= MAX_CHANNELS {
            return Err(PeerFault::TooManyChannels);
        }
        self.highest_theirs = Some(number);
        let full = self.channels.len() >= self.config.channels;
        let channel = Channel {
            ours: false,
            listener: 0,
            stage: Stage::Waiting {
                route: open.route,
                parameter: open.parameter,
                barrier: open.barrier,
            },
            window_bytes: 0,
            out: Outbound::new(open.limit, false),
            inn: Inbound::new(0),
            due: Due::default(),
        };
        self.channels.insert(number, channel);
        if full || self.draining {
            let text = if full {
                "channel limit reached"
            } else {
                "tunnel is shutting down"
            };
            self.refuse(number, FaultCode::Busy, text.to_owned(), now_ns);
            return Ok(());
        }
        self.waiting.insert(number);
        self.look_at_barriers();
        Ok(())
    }
}

/// Returns the mark for the bytes before `offset`; `None` if they are known to be delivered.
fn mark(channel: u32, out: &Outbound, offset: u64) -> Option<Mark> {
    let over = out.open && offset <= out.delivered;
    (!over).then_some(Mark { channel, offset })
}
