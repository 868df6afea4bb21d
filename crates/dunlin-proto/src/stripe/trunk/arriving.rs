//! The data that arrives on the other side's lanes.

use super::Trunk;
use crate::fault::FaultCode;
use crate::mistake::{Mistake, planted};
use crate::stripe::fault::PeerFault;
use crate::stripe::frame::Data;
use crate::stripe::inbound::{Arrival, Delivery};

impl<T: Clone> Trunk<T> {
    /// Admits a lane of the other side with a valid proof.
    ///
    /// # Errors
    /// The reason why the lane is refused. The caller closes the connection. The other side
    /// receives the reason, unless the trunk has ended or this side opens the other side's lanes.
    pub fn admit(&mut self, lane: u16) -> Result<(), FaultCode> {
        let admitted = match self.is_over() {
            true => Err(FaultCode::ControlLost),
            // This side opens the other side's lanes.
            false if self.serves() => return Err(FaultCode::Malformed),
            false => self.arriving.admit(lane),
        };
        if let Err(fault) = admitted {
            let text = "lane number was used before, or too many lanes are open";
            self.refuse_lane(lane, fault, text.to_owned());
        }
        admitted
    }

    /// Sends the peer the reason why its lane is refused. The lane has not been admitted; the
    /// caller closes the connection.
    pub fn refuse_lane(&mut self, lane: u16, fault: FaultCode, text: String) {
        let refusals = &mut self.agenda.refusals;
        if lane != 0 && refusals.len() < usize::from(self.config.lanes_max) {
            refusals.push_back((lane, fault, text));
        }
    }

    /// Records that the payload of a piece has arrived completely on an admitted lane. The return
    /// value decides what the caller does with the piece. After [`Arrival::Deliver`] the caller
    /// writes the piece immediately, so the piece needs no buffer of its own.
    ///
    /// # Errors
    /// The peer violates the protocol. The caller then calls [`Trunk::end`].
    pub fn arrived(&mut self, lane: u16, data: &Data, now_ns: u64) -> Result<Arrival, PeerFault> {
        let arrival = self.place(lane, data)?;
        if arrival != Arrival::Keep || planted(Mistake::AckBeforeKept) {
            self.arriving.safe(lane, u64::from(data.length()), now_ns);
        }
        Ok(arrival)
    }

    fn place(&mut self, lane: u16, data: &Data) -> Result<Arrival, PeerFault> {
        let channel = data.channel();
        if let Some(one) = self.channels.get_mut(&channel) {
            if !self.arriving.is_open(lane) {
                // This side has given up the lane, so the other side sends the pieces again.
                return Ok(Arrival::Drop);
            }
            return one.inn.arrived(data);
        }
        self.was_opened(channel)?;
        Ok(Arrival::Drop)
    }

    /// Stores the buffer into which the caller copied a piece after [`Arrival::Keep`]. If all
    /// earlier pieces have been written in the meantime, returns the piece, and the caller writes
    /// it.
    ///
    /// # Errors
    /// The peer violates the protocol. The caller then calls [`Trunk::end`].
    pub fn keep(
        &mut self,
        lane: u16,
        data: &Data,
        token: T,
        now_ns: u64,
    ) -> Result<Option<Delivery<T>>, PeerFault> {
        let open = self.arriving.is_open(lane);
        if !planted(Mistake::AckBeforeKept) {
            self.arriving.safe(lane, u64::from(data.length()), now_ns);
        }
        match self.channels.get_mut(&data.channel()) {
            Some(one) if open => one.inn.keep(data, token),
            _ => Ok(None),
        }
    }

    /// Records that the thread that writes to the channel's socket has written `bytes`; `rest`
    /// holds the bytes that the socket did not accept. Returns the piece that the thread writes
    /// next; after `None` it stops writing. [`Trunk::writable`] later returns the bytes in `rest`.
    pub fn wrote(
        &mut self,
        channel: u32,
        bytes: u32,
        rest: Option<T>,
        now_ns: u64,
    ) -> Option<Delivery<T>> {
        let span_ns = self.round_trip.span_ns();
        let one = self.channels.get_mut(&channel)?;
        let granted = one.inn.granted();
        let next = one.inn.wrote(channel, bytes, rest);
        one.inn.meter.add(u64::from(bytes), span_ns, now_ns);
        self.pool.changed(granted, one.inn.granted());
        self.shut_if_at_end(channel);
        self.grant(channel, now_ns);
        self.look_at_barriers();
        next
    }

    /// Records that the channel's socket is writable again. Returns the piece that the caller
    /// writes. No other thread writes to the socket until [`Trunk::wrote`] has returned `None`.
    pub fn writable(&mut self, channel: u32) -> Option<Delivery<T>> {
        let one = self.channels.get_mut(&channel)?;
        one.inn.writable(channel)
    }

    /// Records that a lane of the other side ends after `frames` data frames.
    ///
    /// # Errors
    /// A different number of frames has arrived, so the peer violates the protocol.
    pub fn lane_ended(&mut self, lane: u16, frames: u64) -> Result<(), PeerFault> {
        self.arriving.ended(lane, frames)
    }

    /// Records that the connection of the other side's lane has ended. The lane's thread reports
    /// nothing more.
    pub fn admitted_over(&mut self, lane: u16) {
        self.arriving.over(lane);
    }

    /// Checks that the channel was opened at some time. It may have ended since.
    pub(super) fn was_opened(&self, channel: u32) -> Result<(), PeerFault> {
        let ever = if self.is_ours(channel) {
            u64::from(channel) < self.next_own
        } else {
            self.highest_theirs
                .is_some_and(|highest| channel <= highest)
        };
        if ever {
            return Ok(());
        }
        Err(PeerFault::UnknownChannel { channel })
    }
}
