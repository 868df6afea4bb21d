//! Checks of the invariants.

use super::channel::Over;
use super::plan::Ending;
use super::world::{World, Writing};
use crate::check::Violation;
use dunlin_proto::limits::LEAST_WINDOW_BYTES;

impl World<'_> {
    /// Checks at every step that the bytes inside the tunnel are within their bounds (I8).
    pub(super) fn look(&mut self) {
        for from in 0..2 {
            let mut sum = 0;
            for index in 0..self.channels.len() {
                let channel = &self.channels[index];
                if channel.sockets[1 - from].over.is_some() || channel.sockets[from].over.is_some()
                {
                    continue;
                }
                let inside = channel.inside(from);
                let most = self.plan.channels[index].window_bytes;
                if inside > most.max(LEAST_WINDOW_BYTES) {
                    let text = format!(
                        "channel {index} has {inside} bytes inside the tunnel (limit {most})"
                    );
                    return self.broken("I8", text);
                }
                sum += inside;
            }
            let usage = self.sides[from].usage();
            let most = self.plan.peer_bytes;
            if sum > most || usage.unacknowledged > most || usage.granted > most {
                let text = format!(
                    "all channels have {sum} bytes inside the tunnel (limit {most}): {usage:?}"
                );
                return self.broken("I8", text);
            }
        }
    }

    /// Called just before a channel's far side is connected. Each earlier channel must have
    /// delivered all bytes that were sent on it before this channel was accepted. Only if the
    /// earlier channel's consumer accepts no more bytes may some be undelivered.
    pub(super) fn check_order(&mut self, index: usize) {
        let near = self.plan.channels[index].opener;
        for (earlier, said) in self.channels[index].before.clone() {
            let one = &self.channels[earlier];
            let over = one.sockets.iter().any(|socket| socket.over.is_some());
            let far = &one.sockets[1 - near];
            if !over && (!far.open || (far.written < said && far.room() > 0)) {
                let written = far.written;
                let text = format!(
                    "channel {index} is connected after only {written} of {said} bytes of channel {earlier}"
                );
                return self.broken("order", text);
            }
        }
    }

    /// Checks a write to a socket. The piece must be the next piece of the stream.
    pub(super) fn check_piece(&mut self, writing: &Writing) {
        let piece = writing.piece;
        let channel = &self.channels[piece.channel];
        let socket = &channel.sockets[writing.side];
        let right = channel.number == Some(writing.number)
            && piece.from == 1 - writing.side
            && piece.at == socket.written
            && !socket.shut;
        if !right && socket.over.is_none() {
            let written = socket.written;
            let text = format!("{writing:?} is written at byte {written}");
            self.broken("stream", text);
        }
    }

    /// Called when a consumer receives the end of the stream. It must have received everything.
    pub(super) fn check_end(&mut self, index: usize, side: usize) {
        let channel = &self.channels[index];
        let (near, far) = (&channel.sockets[1 - side], &channel.sockets[side]);
        if !near.ended || far.written != near.talk.bytes {
            let (written, bytes) = (far.written, near.talk.bytes);
            let text = format!("channel {index} ends after {written} of {bytes} bytes");
            self.broken("stream", text);
        }
    }

    /// Called when a connection is closed. Both directions must have ended.
    pub(super) fn check_closed(&mut self, index: usize, side: usize) {
        let channel = &self.channels[index];
        let whole = |from: usize| {
            let (near, far) = (&channel.sockets[from], &channel.sockets[1 - from]);
            near.ended && far.written == near.talk.bytes && far.shut
        };
        if !whole(0) || !whole(1) {
            self.broken(
                "stream",
                format!("channel {index} is closed early at side {side}"),
            );
        }
    }

    /// Called at the deadline for a reset. If the control lane has not been lost since the reset,
    /// the tunnel must have reset the connection on this side by now.
    pub(super) fn must_be_over(&mut self, index: usize, side: usize, epoch: u32) {
        let undisturbed =
            epoch == self.control.epoch && self.control.arrives_by(self.plan).is_some();
        let socket = &self.channels[index].sockets[side];
        // If the socket was never connected, there is nothing to reset.
        if undisturbed && socket.open && socket.over.is_none() {
            self.broken(
                "abort",
                format!("channel {index} has not been reset at side {side}"),
            );
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        let none = |side: usize| self.sides[side].channels() == 0;
        none(0) && none(1) && (self.control.is_quiet() || self.control.is_over())
    }

    /// Checks after the last event that every channel has ended and that the sides use no
    /// resources.
    pub(super) fn finish(&mut self) -> Result<(), Violation> {
        for side in &mut self.sides {
            side.drain();
            while side.next_message(self.now_ns).is_some() {}
        }
        for index in 0..self.channels.len() {
            self.check_ended(index);
        }
        for side in 0..2 {
            let usage = self.sides[side].usage();
            if usage != dunlin_proto::stripe::Usage::default() {
                self.broken("I8", format!("side {side} still uses {usage:?}"));
            }
            let confirmed = !self.hopeless && self.control.arrives_by(self.plan).is_some();
            if confirmed && !self.sides[side].drained() {
                self.broken(
                    "liveness",
                    format!("side {side} still has state of ended channels"),
                );
            }
        }
        self.violation.take().map_or(Ok(()), Err)
    }

    fn check_ended(&mut self, index: usize) {
        let channel = &self.channels[index];
        let ends = [0, 1].map(|side| channel.sockets[side].over);
        let near = self.plan.channels[index].opener;
        // A channel that was never connected has no far side to end.
        let never = !channel.sockets[1 - near].open;
        match ends {
            [Some(Over::Closed), Some(_)] | [Some(_), Some(Over::Closed)] => self.tally.closed += 1,
            [Some(_), Some(_)] => self.tally.aborted += 1,
            _ if never && ends[near].is_some() => self.tally.aborted += 1,
            _ => return self.broken("liveness", self.stuck(index)),
        }
        let ending = self.plan.channels[index].ending;
        let well = ends == [Some(Over::Closed); 2];
        let began = self.channels[index].number.is_some();
        if ending == Ending::Well && !well && !self.hopeless && began {
            self.broken("stream", format!("channel {index} ended as {ends:?}"));
        }
    }

    fn stuck(&self, index: usize) -> String {
        let channel = &self.channels[index];
        let number = channel.number.unwrap_or(u32::MAX);
        let held = [0, 1].map(|side| self.sides[side].held(number));
        format!("channel {index} (number {number}) stalls, {held:?} held: {channel:?}")
    }
}
