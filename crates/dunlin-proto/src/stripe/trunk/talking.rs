//! The control messages of a trunk. Every message states a current value.

use super::{Action, Control, Stage, Trunk};
use crate::fault::FaultCode;
use crate::limits::MAX_CREDITS;
use crate::mistake::{Mistake, planted};
use crate::stripe::fault::PeerFault;
use crate::stripe::message::{Credit, LaneAck, Mark, Message, Open};

/// If the last *ping* is at least this old when a *credit* is sent, a new *ping* becomes due. Pings
/// measure the round trip.
const PING_NS: u64 = 1_000_000_000;

impl<T: Clone> Trunk<T> {
    /// Records that a control lane is up, the first or a later one. All current values are sent
    /// again.
    pub fn control_up(&mut self, now_ns: u64) {
        if self.is_over() {
            return;
        }
        self.control = Control::Up;
        self.agenda.ping_wanted = true;
        self.agenda.ping_ns = None;
        self.agenda.drain_due |= self.draining;
        self.arriving.resend_all();
        self.lanes.resumed(now_ns);
        self.ask_again();
        for ended in self.ended.values_mut() {
            ended.due = true;
        }
        for (&number, one) in &mut self.channels {
            match &one.stage {
                Stage::Opening(asking) => {
                    self.agenda.opens.insert(number);
                    if asking.sent {
                        self.agenda.credits.insert(number);
                    }
                }
                Stage::Open => {
                    one.due.opened = !one.ours;
                    one.due.eof = one.out.eof.is_some();
                    one.due.closed = one.inn.shut;
                    self.agenda.news.insert(number);
                    if one.inn.eof.is_none() {
                        self.agenda.credits.insert(number);
                    }
                }
                Stage::Waiting { .. } | Stage::Connecting => {}
            }
        }
    }

    /// Records that the control lane is lost.
    pub fn control_down(&mut self, now_ns: u64) {
        if self.control == Control::Up {
            self.control = Control::Down { since_ns: now_ns };
        }
    }

    /// Whether [`Trunk::next_message`] may return a message.
    #[must_use]
    pub fn has_message(&self, now_ns: u64) -> bool {
        let acks = self.arriving.due_ns();
        self.control == Control::Up
            && (self.agenda.pong.is_some()
                || self.agenda.ping_wanted
                || self.agenda.drain_due
                || !self.agenda.opens.is_empty()
                || !self.agenda.gone.is_empty()
                || !self.agenda.refusals.is_empty()
                || !self.agenda.wants.is_empty()
                || self.agenda.failure.is_some()
                || !self.agenda.news.is_empty()
                || !self.agenda.credits.is_empty()
                || acks.is_some_and(|due_ns| due_ns <= now_ns)
                || self.ended.values().any(|ended| ended.due))
    }

    /// The next message for the control lane.
    pub fn next_message(&mut self, now_ns: u64) -> Option<Message> {
        if self.control != Control::Up {
            return None;
        }
        if let Some(token) = self.agenda.pong.take() {
            return Some(Message::Pong { token });
        }
        if std::mem::take(&mut self.agenda.ping_wanted) {
            self.agenda.ping_ns = Some(now_ns);
            return Some(Message::Ping { token: now_ns });
        }
        if let Some(open) = self.next_open() {
            return Some(open);
        }
        if let Some(lane) = self.agenda.wants.pop_first() {
            return Some(Message::LaneWanted { lane });
        }
        if let Some((&channel, ended)) = self.ended.iter_mut().find(|(_, ended)| ended.due) {
            ended.due = false;
            let fault = ended.fault;
            return Some(match ended.refused.clone() {
                Some(text) => Message::Refused {
                    channel,
                    fault,
                    text,
                },
                None => Message::Reset { channel, fault },
            });
        }
        if let Some(channel) = self.agenda.gone.pop_first() {
            return Some(Message::Gone { channel });
        }
        if let Some((lane, fault, text)) = self.agenda.refusals.pop_front() {
            return Some(Message::LaneRefused { lane, fault, text });
        }
        if let Some(lost) = self.arriving.take_lost() {
            return Some(Message::LaneLost(lost));
        }
        if let Some(failure) = self.agenda.failure.take() {
            return Some(failure);
        }
        if let Some(news) = self.next_news(now_ns) {
            return Some(news);
        }
        if let Some(credits) = self.next_credits(now_ns) {
            return Some(credits);
        }
        if let Some(acks) = self.arriving.take_acks(now_ns) {
            return Some(Message::Ack(acks));
        }
        std::mem::take(&mut self.agenda.drain_due).then_some(Message::Drain)
    }

    /// *open* is sent in the order of channel numbers, because the other side treats a number below
    /// the highest one as a channel that has ended.
    fn next_open(&mut self) -> Option<Message> {
        let &channel = self.agenda.opens.first()?;
        let one = self.channels.get_mut(&channel)?;
        let limit = one.inn.limit;
        let Stage::Opening(asking) = &mut one.stage else {
            return None;
        };
        if !asking.counting.is_empty() {
            return None;
        }
        asking.sent = true;
        let open = Open {
            channel,
            limit,
            route: asking.route.clone(),
            parameter: asking.parameter.clone(),
            barrier: asking.barrier.clone(),
        };
        self.agenda.opens.remove(&channel);
        Some(Message::Open(open))
    }

    fn next_news(&mut self, now_ns: u64) -> Option<Message> {
        while let Some(&channel) = self.agenda.news.first() {
            if let Some(one) = self.channels.get_mut(&channel) {
                if std::mem::take(&mut one.due.opened) {
                    let limit = one.inn.limit;
                    return Some(Message::Opened { channel, limit });
                }
                if std::mem::take(&mut one.due.eof) {
                    let offset = one.out.sent;
                    self.close_if_done(channel, now_ns);
                    return Some(Message::Eof(Mark { channel, offset }));
                }
                if std::mem::take(&mut one.due.closed) {
                    self.close_if_done(channel, now_ns);
                    return Some(Message::Closed { channel });
                }
            }
            self.agenda.news.remove(&channel);
        }
        None
    }

    fn next_credits(&mut self, now_ns: u64) -> Option<Message> {
        let mut credits = Vec::new();
        while credits.len() < MAX_CREDITS
            && let Some(channel) = self.agenda.credits.pop_first()
        {
            if let Some(one) = self.channels.get_mut(&channel) {
                one.inn.unreported = 0;
                credits.push(Credit {
                    channel,
                    delivered: one.inn.delivered(),
                    limit: one.inn.limit,
                });
            }
        }
        if credits.is_empty() {
            return None;
        }
        self.arriving.send_along();
        let measured = self.agenda.ping_ns.unwrap_or(0);
        self.agenda.ping_wanted |= now_ns.saturating_sub(measured) >= PING_NS;
        Some(Message::Credit(credits))
    }

    /// Handles a message of the other side. A late message of an older control lane is harmless.
    /// After the end of the trunk, messages are ignored.
    ///
    /// # Errors
    /// The peer violates the protocol. The caller then calls [`Trunk::end`].
    pub fn handle(&mut self, message: Message, now_ns: u64) -> Result<(), PeerFault> {
        if self.is_over() {
            return Ok(());
        }
        match message {
            Message::Open(open) => self.asked(open, now_ns)?,
            Message::Opened { channel, limit } => self.opened(channel, limit)?,
            Message::Refused {
                channel,
                fault,
                text,
            } => {
                if !self.is_ours(channel) {
                    return Err(PeerFault::Impossible { channel });
                }
                self.was_opened(channel)?;
                if self.channels.contains_key(&channel) {
                    self.forget(channel, now_ns);
                    self.actions.push_back(Action::Refused {
                        channel,
                        fault,
                        text,
                    });
                }
                self.ended.remove(&channel);
                self.answer_if_gone(channel)?;
            }
            Message::Credit(credits) => {
                for credit in credits {
                    self.credited(&credit)?;
                }
            }
            Message::Ack(acks) => {
                for LaneAck { lane, frames } in acks {
                    self.lanes.acknowledged(lane, frames, now_ns)?;
                }
            }
            Message::LaneRefused { lane, fault, text } => {
                self.lane_refused(lane, fault, text, now_ns)?;
            }
            Message::LaneWanted { lane } => self.wanted(lane)?,
            Message::LaneFailed { lane, fault, text } => self.peer_lane_failed(lane, fault, text),
            Message::LaneLost(LaneAck { lane, frames }) => {
                self.lanes.acknowledged(lane, frames, now_ns)?;
                self.lanes.lose(lane, now_ns);
            }
            Message::Eof(mark) => self.peer_ends(&mark)?,
            Message::Closed { channel } => {
                self.was_opened(channel)?;
                if let Some(one) = self.channels.get_mut(&channel) {
                    if one.out.eof.is_none() {
                        return Err(PeerFault::Impossible { channel });
                    }
                    one.out.closed = true;
                    self.close_if_done(channel, now_ns);
                }
            }
            Message::Reset { channel, fault } => self.reset(channel, fault, now_ns)?,
            Message::Gone { channel } => self.confirmed(channel, now_ns)?,
            Message::Ping { token } => self.agenda.pong = Some(token),
            Message::Pong { token } => {
                if self.agenda.ping_ns == Some(token) {
                    let round_trip_ns = now_ns.saturating_sub(token);
                    self.round_trip.measured(round_trip_ns, now_ns);
                }
            }
            Message::Drain => self.peer_drains = true,
            Message::Accept { .. } => {}
        }
        Ok(())
    }

    fn opened(&mut self, channel: u32, limit: u64) -> Result<(), PeerFault> {
        if !self.is_ours(channel) {
            return Err(PeerFault::Impossible { channel });
        }
        self.was_opened(channel)?;
        let Some(one) = self.channels.get_mut(&channel) else {
            return Ok(());
        };
        if let Stage::Opening(asking) = &one.stage {
            if !asking.sent {
                return Err(PeerFault::Impossible { channel });
            }
            one.stage = Stage::Open;
            one.out.open = true;
            self.agenda.opens.remove(&channel);
            self.actions.push_back(Action::Opened(channel));
        }
        one.out.limit = one.out.limit.max(limit);
        self.queue(channel);
        Ok(())
    }

    fn credited(&mut self, credit: &Credit) -> Result<(), PeerFault> {
        let channel = credit.channel;
        self.was_opened(channel)?;
        if let Some(one) = self.channels.get_mut(&channel) {
            one.out.credited(channel, credit.delivered, credit.limit)?;
            self.queue(channel);
        }
        Ok(())
    }

    fn peer_ends(&mut self, mark: &Mark) -> Result<(), PeerFault> {
        let channel = mark.channel;
        self.was_opened(channel)?;
        match self.channels.get_mut(&channel) {
            // Before *opened*, the other side sends neither data nor an end on a channel.
            Some(one) if !matches!(one.stage, Stage::Open) => {
                Err(PeerFault::Impossible { channel })
            }
            Some(one) => {
                one.inn.ends(channel, mark.offset)?;
                self.agenda.credits.remove(&channel);
                self.shut_if_at_end(channel);
                Ok(())
            }
            None => self.answer_if_gone(channel),
        }
    }

    /// Handles *reset*.
    fn reset(&mut self, channel: u32, fault: FaultCode, now_ns: u64) -> Result<(), PeerFault> {
        if self.was_opened(channel).is_err() {
            if self.is_ours(channel) {
                return Err(PeerFault::UnknownChannel { channel });
            }
            // The *open* of the channel was lost with a control lane, so this message is the first
            // with the channel's number.
            self.highest_theirs = Some(channel);
        }
        if let Some(one) = self.channels.get(&channel) {
            if planted(Mistake::ResetBehindData) && one.inn.waits() {
                return Ok(());
            }
            // The peer's consumer may leave bytes unread only on a channel that this side opened,
            // and only after this side has read its own hypervisor's stream to the end. Otherwise
            // the channel is broken.
            let fault = match fault {
                FaultCode::LeftUnread if !one.ours || one.out.eof.is_none() => {
                    FaultCode::ChannelBroken
                }
                other => other,
            };
            self.forget(channel, now_ns);
            self.actions.push_back(Action::Abort {
                channel,
                fault,
                by_peer: true,
            });
        }
        self.ended.remove(&channel);
        self.answer_if_gone(channel)
    }

    /// Handles *gone*, which means that the other side keeps no state for the channel.
    fn confirmed(&mut self, channel: u32, now_ns: u64) -> Result<(), PeerFault> {
        self.was_opened(channel)?;
        self.ended.remove(&channel);
        let Some(one) = self.channels.get(&channel) else {
            return Ok(());
        };
        // The other side may forget a channel without waiting for this side's confirmation only if
        // the channel has ended in both directions.
        if one.out.eof.is_none() || !one.inn.shut {
            return Err(PeerFault::Impossible { channel });
        }
        self.forget(channel, now_ns);
        self.actions.push_back(Action::Close(channel));
        Ok(())
    }
}
