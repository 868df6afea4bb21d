//! The data that this side's lanes send.

use super::{Trunk, Turn};
use crate::lanes::KeyUsage;
use crate::stripe::frame::Data;

/// The next task of a lane's thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work<T> {
    /// Send this piece, which a lost lane carried.
    Again {
        /// The header of the piece.
        data: Data,
        /// The caller's handle to the bytes of the piece.
        token: T,
    },
    /// Read this channel's socket: at most `most` bytes, without waiting. Report the result with
    /// [`Trunk::read`] in any case.
    Read {
        /// The channel.
        channel: u32,
        /// The number of bytes, at least one and at most [`crate::limits::MAX_STRIPE_CHUNK_BYTES`].
        most: u32,
    },
    /// Send the frame *end*, which contains this number of frames, and close the lane.
    End {
        /// The number of data frames that the lane has carried.
        frames: u64,
    },
    /// There is no work. Call again when [`Trunk::ready`] is true.
    Wait,
    /// The lane was given up. Send nothing more on it.
    Stop,
}

/// The result of reading a channel's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// Bytes were read.
    Bytes {
        /// The number of bytes, from 1 to `most` of [`Work::Read`].
        length: u32,
        /// The caller's handle to the bytes, for sending them again.
        token: T,
        /// Whether there may be more bytes to read now. If not, the caller calls
        /// [`Trunk::readable`] when more bytes can be read.
        more: bool,
    },
    /// No bytes can be read now. The caller calls [`Trunk::readable`] when there are more.
    Nothing,
    /// End of file.
    End,
}

impl<T: Clone> Trunk<T> {
    /// Records that the connection of this lane is established and *lane open* is sent. Returns
    /// false if the lane was given up in the meantime; in this case the caller closes the
    /// connection.
    pub fn lane_established(&mut self, lane: u16, now_ns: u64) -> bool {
        self.agenda.wants.remove(&lane);
        !self.is_over() && self.lanes.life.up(lane, now_ns)
    }

    /// Records that the connection of this lane has ended.
    pub fn lane_over(&mut self, lane: u16, now_ns: u64) {
        self.lanes.over(lane, now_ns);
    }

    /// Records that the channel's socket is readable.
    pub fn readable(&mut self, channel: u32) {
        if let Some(one) = self.channels.get_mut(&channel)
            && one.out.turn == Turn::Idle
        {
            one.out.turn = Turn::Held;
            one.out.bulk = false;
            self.queue(channel);
        }
    }

    /// The next task of `lane`.
    pub fn next(&mut self, lane: u16, usage: KeyUsage, now_ns: u64) -> Work<T> {
        self.lanes.life.record_usage(lane, usage);
        if let Some(frames) = self.lanes.end(lane, now_ns) {
            return Work::End { frames };
        }
        if self.is_over() || !self.lanes.carries(lane) {
            return Work::Stop;
        }
        if let Some((data, token)) = self.lanes.carry_again(lane, now_ns) {
            return Work::Again { data, token };
        }
        if !self.may_read() {
            return Work::Wait;
        }
        while let Some(channel) = self.turns.next() {
            let Some(one) = self.channels.get_mut(&channel) else {
                continue;
            };
            let most = one.out.room();
            if most == 0 {
                one.out.turn = Turn::Held;
                continue;
            }
            one.out.turn = Turn::Taken;
            self.reading += 1;
            return Work::Read { channel, most };
        }
        Work::Wait
    }

    /// Takes the result of [`Work::Read`]. The call is required even if the lane no longer exists.
    /// Returns the header to send with the bytes, or `None` if this lane has nothing to send.
    pub fn read(
        &mut self,
        lane: u16,
        channel: u32,
        outcome: Outcome<T>,
        now_ns: u64,
    ) -> Option<Data> {
        self.reading = self.reading.saturating_sub(1);
        let one = self.channels.get_mut(&channel)?;
        if one.out.turn != Turn::Taken {
            return None;
        }
        let mut sent = None;
        one.out.turn = match outcome {
            Outcome::Bytes {
                length,
                token,
                more,
            } => {
                sent = one.out.cut(channel, length).map(|data| (data, token));
                one.out.bulk = more;
                if more { Turn::Held } else { Turn::Idle }
            }
            Outcome::Nothing => Turn::Idle,
            Outcome::End => {
                one.out.eof = Some(one.out.sent);
                one.due.eof = true;
                self.agenda.news.insert(channel);
                Turn::Ended
            }
        };
        if one.out.counted_for > 0 {
            self.actions.push_back(super::Action::Count(channel));
        }
        self.queue(channel);
        let (data, token) = sent?;
        self.busy_bytes = self.busy_bytes.saturating_add(u64::from(data.length()));
        let carried = self.lanes.carry(lane, data, token, now_ns);
        carried.then_some(data)
    }
}
