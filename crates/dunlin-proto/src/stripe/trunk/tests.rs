#![allow(clippy::unwrap_used)]

use super::*;
use crate::limits::{MAX_CHANNEL_CHUNKS, MAX_STRIPE_CHUNK_BYTES};
use crate::stripe::frame::Data;
use crate::stripe::message::{Credit, LaneAck, Message, Open};
use crate::stripe::{ACK_DELAY_NS, Arrival, KeyUsage, PeerFault, Timeouts};

const MS: u64 = 1_000_000;
const CHUNK: u32 = MAX_STRIPE_CHUNK_BYTES;

/// Two sides that receive each other's messages immediately, and their actions.
struct Pair {
    sides: [Trunk<u64>; 2],
    actions: [Vec<Action>; 2],
    now_ns: u64,
    /// The number of messages sent.
    sent: usize,
    /// The listener of the next channel.
    listener: u64,
}

fn abort(channel: u32, fault: FaultCode, by_peer: bool) -> Action {
    Action::Abort {
        channel,
        fault,
        by_peer,
    }
}

impl Pair {
    fn new() -> Self {
        Self::with(Config::default())
    }

    fn with(config: Config) -> Self {
        let side = |side| Trunk::new(side, config, 0);
        let mut pair = Self {
            sides: [side(Side::Connecting), side(Side::Accepting)],
            actions: [vec![], vec![]],
            now_ns: 0,
            sent: 0,
            listener: 1,
        };
        pair.resume();
        pair
    }

    fn resume(&mut self) {
        for side in &mut self.sides {
            side.control_up(self.now_ns);
        }
        self.settle();
    }

    /// Delivers all messages and collects all actions.
    fn settle(&mut self) {
        let mut more = true;
        while more {
            more = false;
            for side in 0..2 {
                while let Some(action) = self.sides[side].poll(self.now_ns) {
                    self.actions[side].push(action);
                }
                let has_message = self.sides[side].has_message(self.now_ns);
                while let Some(message) = self.sides[side].next_message(self.now_ns) {
                    assert!(has_message, "has_message is false before {message:?}");
                    self.sent += 1;
                    more = true;
                    self.sides[1 - side].handle(message, self.now_ns).unwrap();
                }
            }
        }
    }

    fn did(&mut self, side: usize) -> Vec<Action> {
        self.settle();
        std::mem::take(&mut self.actions[side])
    }

    /// Side 0 opens a channel for a new listener, and side 1 connects it. Makes sure that a lane is
    /// open in each direction.
    fn channel(&mut self) -> u32 {
        let channel = self.sides[0].open(opening(self.listener)).unwrap();
        self.listener += 10;
        self.settle();
        assert!(self.sides[1].connected(channel, DEFAULT_WINDOW));
        self.settle();
        for side in 0..2 {
            if self.sides[side].lane_established(1, self.now_ns) {
                self.sides[1 - side].admit(1).unwrap();
            }
            self.did(side);
        }
        channel
    }

    /// Reads up to `length` bytes of the channel with the next turn.
    fn reads(&mut self, side: usize, lane: u16, length: u32, more: bool) -> Option<Data> {
        let work = self.sides[side].next(lane, KeyUsage::Fresh, self.now_ns);
        let Work::Read { channel, most } = work else {
            return None;
        };
        let outcome = Outcome::Bytes {
            length: length.min(most),
            token: 0,
            more,
        };
        self.sides[side].read(lane, channel, outcome, self.now_ns)
    }

    /// Delivers a piece to a consumer that takes all of it.
    fn delivers(&mut self, side: usize, lane: u16, data: &Data) {
        let arrival = self.sides[side].arrived(lane, data, self.now_ns);
        assert_eq!(arrival, Ok(Arrival::Deliver));
        let next = self.sides[side].wrote(data.channel(), data.length(), None, self.now_ns);
        assert_eq!(next, None);
    }

    fn ends(&mut self, side: usize, channel: u32) {
        self.sides[side].readable(channel);
        let work = self.sides[side].next(1, KeyUsage::Fresh, self.now_ns);
        assert!(matches!(work, Work::Read { channel: read, .. } if read == channel));
        let nothing = self.sides[side].read(1, channel, Outcome::End, self.now_ns);
        assert_eq!(nothing, None);
    }
}

const DEFAULT_WINDOW: u64 = crate::limits::DEFAULT_WINDOW_BYTES;

fn opening(listener: u64) -> Opening {
    Opening {
        listener,
        route: "ram".to_owned(),
        parameter: "web".to_owned(),
        window_bytes: DEFAULT_WINDOW,
    }
}

fn piece(channel: u32, offset: u64, length: u32) -> Data {
    Data::new(channel, offset, length).unwrap()
}

#[test]
fn a_channel_is_carried_and_ends_both_ways() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let data = pair.reads(0, 1, 1000, false).unwrap();
    pair.delivers(1, 1, &data);
    pair.ends(0, channel);
    assert_eq!(pair.did(1), [Action::ShutWrite(channel)]);
    // The other direction is still open.
    pair.sides[1].readable(channel);
    let data = pair.reads(1, 1, 5, false).unwrap();
    pair.delivers(0, 1, &data);
    pair.ends(1, channel);
    assert_eq!(
        pair.did(0),
        [Action::ShutWrite(channel), Action::Close(channel)]
    );
    assert_eq!(pair.did(1), [Action::Close(channel)]);
    pair.now_ns += ACK_DELAY_NS;
    pair.settle();
    for side in &pair.sides {
        assert_eq!((side.channels(), side.usage()), (0, Usage::default()));
    }
}

#[test]
fn an_idle_channel_costs_no_message_and_no_time() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let data = pair.reads(0, 1, 1000, false).unwrap();
    pair.delivers(1, 1, &data);
    pair.now_ns += ACK_DELAY_NS;
    pair.settle();
    let sent = pair.sent;
    pair.now_ns += 3_600_000 * MS;
    pair.settle();
    assert_eq!(pair.sent, sent);
    for side in &pair.sides {
        assert_eq!((side.due_ns(), side.ready()), (None, false));
    }
}

#[test]
fn a_few_bytes_wait_for_no_bulk_channel() {
    let mut pair = Pair::new();
    let bulk: Vec<u32> = (0..20).map(|_| pair.channel()).collect();
    let dialogue = pair.channel();
    for channel in &bulk {
        pair.sides[0].readable(*channel);
    }
    // A channel that had nothing to send gets one turn with priority. The bulk channels use theirs
    // here.
    for _ in 0..3 * bulk.len() {
        assert_eq!(pair.reads(0, 1, 1000, true).unwrap().length(), 1000);
    }
    pair.sides[0].readable(dialogue);
    assert_eq!(pair.reads(0, 1, 5, false).unwrap().channel(), dialogue);
    assert_ne!(pair.reads(0, 1, 1000, true).unwrap().channel(), dialogue);
}

#[test]
fn i8_a_consumer_that_stalls_stops_its_channel_at_the_window_and_no_other() {
    let mut pair = Pair::new();
    let (stalled, other) = (pair.channel(), pair.channel());
    let mut sent = 0;
    pair.sides[0].readable(stalled);
    while let Some(data) = pair.reads(0, 1, CHUNK, true) {
        let arrival = pair.sides[1].arrived(1, &data, 0).unwrap();
        if arrival == Arrival::Deliver {
            // The socket is full.
            assert_eq!(pair.sides[1].wrote(stalled, 0, Some(0), 0), None);
        } else {
            assert_eq!(pair.sides[1].keep(1, &data, sent, 0), Ok(None));
        }
        sent += u64::from(data.length());
        pair.settle();
    }
    assert_eq!(sent, START_WINDOW_BYTES);
    assert_eq!(pair.sides[1].held(stalled), Some(sent));
    // The receiver has acknowledged these bytes, so the sender no longer keeps them.
    pair.now_ns += ACK_DELAY_NS;
    pair.settle();
    assert_eq!(pair.sides[0].usage().unacknowledged, 0);
    pair.sides[0].readable(other);
    assert_eq!(pair.reads(0, 1, 10, false).unwrap().channel(), other);
    // Sending continues when the consumer reads.
    let mut delivery = pair.sides[1].writable(stalled);
    while let Some(next) = delivery {
        delivery = pair.sides[1].wrote(stalled, next.length, None, pair.now_ns);
    }
    pair.settle();
    assert_eq!(pair.reads(0, 1, 10, false).unwrap().channel(), stalled);
}

#[test]
fn i8_a_sender_of_single_bytes_is_stopped_by_the_chunk_limit() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let mut pieces = Vec::new();
    while let Some(data) = pair.reads(0, 1, 1, true) {
        pieces.push(data);
    }
    assert_eq!(pieces.len(), MAX_CHANNEL_CHUNKS);
    for data in &pieces {
        pair.delivers(1, 1, data);
    }
    pair.settle();
    assert!(pair.reads(0, 1, 1, true).is_some());
}

#[test]
fn windows_grow_with_the_delivered_rate_up_to_the_routes_window() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    // The window grows to what is delivered in about 10 ms: 256 KiB per 100 µs are 25 MiB in 10 ms.
    for _ in 0..1000 {
        pair.now_ns += MS / 10;
        let data = pair.reads(0, 1, CHUNK, true).unwrap();
        pair.delivers(1, 1, &data);
        pair.settle();
    }
    let granted = pair.sides[1].channels[&channel].inn.granted();
    assert!((12 << 20..=DEFAULT_WINDOW).contains(&granted), "{granted}");
    // At a lower rate, the receiver grants only the minimum window.
    for _ in 0..200 {
        pair.now_ns += 20 * MS;
        let data = pair.reads(0, 1, 100_000, true).unwrap();
        pair.delivers(1, 1, &data);
        pair.settle();
    }
    let granted = pair.sides[1].channels[&channel].inn.granted();
    assert!(granted <= LEAST_WINDOW_BYTES, "{granted}");
}

#[test]
fn an_abort_overtakes_waiting_bytes_and_drops_them() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    for offset in 0..3 {
        let data = pair.reads(0, 1, 100, true).unwrap();
        // The first piece does not arrive, so the later pieces wait for it.
        if offset > 0 {
            assert_eq!(pair.sides[1].arrived(1, &data, 0), Ok(Arrival::Keep));
            assert_eq!(pair.sides[1].keep(1, &data, 0, 0), Ok(None));
        }
    }
    pair.sides[0].fail(channel, FaultCode::Cancelled, 0);
    let fault = FaultCode::Cancelled;
    assert_eq!(pair.did(1), [abort(channel, fault, true)]);
    for side in &pair.sides {
        assert_eq!((side.channels(), side.usage()), (0, Usage::default()));
    }
    // Side 1 has confirmed the abort, so side 0 has forgotten the channel.
    assert!(pair.sides[0].ended.is_empty());
    assert_eq!(pair.sides[1].wrote(channel, 100, None, 0), None);
}

/// If the other side has ended the channel and at most a few bytes before the end are unread, a
/// consumer that closes its connection has finished, not failed.
#[test]
fn a_consumer_that_leaves_a_few_bytes_before_the_end_unread_aborts_nothing() {
    const MOST: u32 = MAX_UNREAD_BYTES as u32;
    // For each case: the number of unread bytes at the end, whether the end is known when the
    // consumer closes, whether the end arrives at all, and the immediate and the final result.
    for (unread, known, comes, at_once, verdict) in [
        (0, true, true, Left::Unread, FaultCode::LeftUnread),
        (MOST, true, true, Left::Unread, FaultCode::LeftUnread),
        (MOST + 1, true, true, Left::Broken, FaultCode::ChannelBroken),
        (0, false, true, Left::Waits, FaultCode::LeftUnread),
        (MOST, false, true, Left::Waits, FaultCode::LeftUnread),
        (0, false, false, Left::Waits, FaultCode::ChannelBroken),
        (MOST, false, false, Left::Waits, FaultCode::ChannelBroken),
        (
            MOST + 1,
            false,
            true,
            Left::Broken,
            FaultCode::ChannelBroken,
        ),
    ] {
        let case = format!("{unread} {known} {comes}");
        let mut pair = Pair::new();
        let channel = pair.channel();
        pair.sides[0].readable(channel);
        let taken = pair.reads(0, 1, 1000, true).unwrap();
        pair.delivers(1, 1, &taken);
        if unread > 0 {
            let rest = pair.reads(0, 1, unread, true).unwrap();
            let arrival = pair.sides[1].arrived(1, &rest, 0).unwrap();
            assert_eq!(arrival, Arrival::Deliver, "{case}");
            // The socket is full.
            assert_eq!(pair.sides[1].wrote(channel, 0, Some(0), 0), None);
        }
        if known {
            pair.ends(0, channel);
            let shut = match unread {
                0 => vec![Action::ShutWrite(channel)],
                _ => vec![],
            };
            assert_eq!(pair.did(1), shut, "{case}");
        }
        assert_eq!(pair.sides[1].left(channel, pair.now_ns), at_once, "{case}");
        if !known && comes {
            pair.ends(0, channel);
        }
        if at_once == Left::Waits {
            if !comes {
                pair.now_ns = ACK_DELAY_NS;
                assert_eq!(pair.did(1), vec![], "{case}");
                assert_eq!(pair.sides[1].due_ns(), Some(END_MAY_COME_NS), "{case}");
                pair.now_ns = END_MAY_COME_NS;
            }
            assert_eq!(pair.did(1), [abort(channel, verdict, false)], "{case}");
        }
        assert_eq!(pair.did(0), [abort(channel, verdict, true)], "{case}");
        assert_eq!(pair.sides[1].left(channel, pair.now_ns), Left::Broken);
        for side in &pair.sides {
            assert_eq!((side.channels(), side.usage()), (0, Usage::default()));
        }
    }
}

/// If more than a few bytes arrive after the consumer has closed, the channel is aborted
/// immediately, because the consumer had not read to the end.
#[test]
fn more_bytes_for_a_consumer_that_has_closed_are_an_abort_at_once() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    assert_eq!(pair.sides[1].left(channel, 0), Left::Waits);
    pair.sides[0].readable(channel);
    let data = pair.reads(0, 1, MAX_UNREAD_BYTES as u32 + 1, true).unwrap();
    let arrival = pair.sides[1].arrived(1, &data, 0).unwrap();
    assert_eq!(arrival, Arrival::Deliver);
    assert_eq!(pair.sides[1].left(channel, 0), Left::Waits);
    assert_eq!(pair.sides[1].wrote(channel, 0, Some(0), 0), None);
    let broken = FaultCode::ChannelBroken;
    assert_eq!(pair.did(1), [abort(channel, broken, false)]);
    assert_eq!(pair.did(0), [abort(channel, broken, true)]);
}

/// A consumer can close its connection while a thread writes to it. The unread bytes are counted
/// after the write.
#[test]
fn unread_bytes_are_judged_when_no_thread_writes() {
    for (written, fault) in [
        (CHUNK, FaultCode::LeftUnread),
        (0, FaultCode::ChannelBroken),
    ] {
        for known in [true, false] {
            let mut pair = Pair::new();
            let channel = pair.channel();
            pair.sides[0].readable(channel);
            let data = pair.reads(0, 1, CHUNK, true).unwrap();
            let arrival = pair.sides[1].arrived(1, &data, 0).unwrap();
            assert_eq!(arrival, Arrival::Deliver);
            if known {
                pair.ends(0, channel);
                assert_eq!(pair.did(1), []);
            }
            assert_eq!(pair.sides[1].left(channel, 0), Left::Waits);
            assert_eq!(pair.did(1), []);
            let rest = (written == 0).then_some(0);
            assert_eq!(pair.sides[1].wrote(channel, written, rest, 0), None);
            if !known && written > 0 {
                assert_eq!(pair.did(1), []);
                pair.ends(0, channel);
            }
            assert_eq!(pair.did(1), [abort(channel, fault, false)]);
            assert_eq!(pair.did(0), [abort(channel, fault, true)]);
        }
    }
}

/// Side 0 opened the channel for the source hypervisor. If this hypervisor closes its connection
/// before the end of its stream, side 0 immediately reports an abort. If side 0 has not read the
/// stream to its end, a *reset* with the code `LeftUnread` from side 1 is an abort too.
#[test]
fn a_source_that_has_closed_has_aborted_whatever_the_peer_reports() {
    let broken = FaultCode::ChannelBroken;
    let mut pair = Pair::new();
    let channel = pair.channel();
    assert_eq!(pair.sides[0].left(channel, 0), Left::Broken);
    assert_eq!(pair.did(1), [abort(channel, broken, true)]);

    // The result is the same if the other side has ended its direction before.
    let channel = pair.channel();
    pair.ends(1, channel);
    assert_eq!(pair.did(0), [Action::ShutWrite(channel)]);
    assert_eq!(pair.sides[0].left(channel, 0), Left::Broken);
    assert_eq!(pair.did(1), [abort(channel, broken, true)]);

    let channel = pair.channel();
    let fault = FaultCode::LeftUnread;
    let reset = Message::Reset { channel, fault };
    pair.sides[0].handle(reset, 0).unwrap();
    assert_eq!(pair.sides[0].poll(0), Some(abort(channel, broken, true)));
}

#[test]
fn i7_protocol_violations_are_refused() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    let far = &mut pair.sides[1];
    assert_eq!(
        far.arrived(1, &piece(channel, 500, 100), 0),
        Ok(Arrival::Keep)
    );
    assert_eq!(far.keep(1, &piece(channel, 500, 100), 0, 0), Ok(None));
    assert_eq!(
        far.arrived(1, &piece(channel, 500, 100), 0),
        Ok(Arrival::Drop)
    );
    for data in [
        piece(channel, 550, 100),
        piece(channel, 450, 100),
        piece(channel, 500, 99),
        piece(channel, 400, 300),
    ] {
        let refused = far.arrived(1, &data, 0);
        assert!(
            matches!(refused, Err(PeerFault::Overlap { .. })),
            "{data:?}"
        );
    }
    let beyond = far.arrived(1, &piece(channel, START_WINDOW_BYTES, 1), 0);
    assert!(matches!(beyond, Err(PeerFault::OverLimit { .. })));
    let unknown = far.arrived(1, &piece(channel + 2, 0, 1), 0);
    assert_eq!(
        unknown,
        Err(PeerFault::UnknownChannel {
            channel: channel + 2
        })
    );
    let eof = |offset| Message::Eof(Mark { channel, offset });
    for offset in [599, START_WINDOW_BYTES + 1] {
        assert!(far.handle(eof(offset), 0).is_err());
    }
    assert_eq!(far.handle(eof(600), 0), Ok(()));
    assert!(far.handle(eof(601), 0).is_err());
    let behind = far.arrived(1, &piece(channel, 600, 1), 0);
    assert!(matches!(behind, Err(PeerFault::BehindEnd { .. })));
    for message in [
        Message::Gone { channel },
        Message::Closed { channel },
        Message::Credit(vec![Credit {
            channel,
            delivered: 1,
            limit: 1,
        }]),
        Message::Ack(vec![LaneAck { lane: 1, frames: 1 }]),
        Message::LaneLost(LaneAck { lane: 9, frames: 0 }),
        Message::Opened { channel, limit: 1 },
        Message::Open(Open {
            channel: 1,
            limit: 0,
            route: String::new(),
            parameter: String::new(),
            barrier: vec![],
        }),
        Message::Open(Open {
            channel: 8,
            limit: 0,
            route: String::new(),
            parameter: String::new(),
            barrier: vec![Mark {
                channel: 8,
                offset: 0,
            }],
        }),
    ] {
        assert!(far.handle(message.clone(), 0).is_err(), "{message:?}");
    }
}

#[test]
fn late_bytes_for_a_channel_that_no_longer_exists_are_dropped() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[1].fail(channel, FaultCode::Cancelled, 0);
    pair.settle();
    let late = piece(channel, 0, 100);
    assert_eq!(pair.sides[1].arrived(1, &late, 0), Ok(Arrival::Drop));
    assert_eq!(pair.sides[0].arrived(1, &late, 0), Ok(Arrival::Drop));
}

#[test]
fn a_lost_lanes_chunks_are_resent_first_in_order_and_once() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let first: Vec<Data> = (0..3)
        .map(|_| pair.reads(0, 1, 100, true).unwrap())
        .collect();
    pair.delivers(1, 1, &first[0]);
    pair.sides[0].lane_over(1, 0);
    // The loss delays the next attempt to open a lane.
    pair.now_ns += 100 * MS;
    assert_eq!(pair.did(0), [Action::OpenLane(2)]);
    assert!(pair.sides[0].lane_established(2, pair.now_ns));
    pair.sides[1].admit(2).unwrap();
    for data in &first {
        let work = pair.sides[0].next(2, KeyUsage::Fresh, pair.now_ns);
        let again = Work::Again {
            data: *data,
            token: 0,
        };
        assert_eq!(work, again);
    }
    assert_eq!(pair.sides[1].arrived(2, &first[0], 0), Ok(Arrival::Drop));
    pair.delivers(1, 2, &first[1]);
    // The lost lane's copy arrives late.
    assert_eq!(pair.sides[1].arrived(1, &first[1], 0), Ok(Arrival::Drop));
    pair.delivers(1, 2, &first[2]);
    assert_eq!(pair.reads(0, 2, 100, true).unwrap().offset(), 300);
}

#[test]
fn a_lane_that_acknowledges_nothing_is_given_up() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    pair.reads(0, 1, 100, false).unwrap();
    let timeout_ns = Timeouts::default().progress_ns;
    assert_eq!(pair.sides[0].due_ns(), Some(timeout_ns));
    pair.now_ns = timeout_ns;
    let did = pair.did(0);
    assert_eq!(did, [Action::CutLane(1)]);
}

#[test]
fn a_lane_with_a_used_up_key_is_replaced_before_it_ends() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let data = pair.reads(0, 1, 100, true).unwrap();
    pair.delivers(1, 1, &data);
    let work = pair.sides[0].next(1, KeyUsage::NearLimit, 0);
    assert!(
        matches!(work, Work::Read { .. }),
        "the lane has stopped sending: {work:?}"
    );
    pair.sides[0].read(1, channel, Outcome::Nothing, 0);
    assert_eq!(pair.did(0), [Action::OpenLane(2)]);
    assert!(pair.sides[0].lane_established(2, 0));
    let work = pair.sides[0].next(1, KeyUsage::NearLimit, 0);
    assert_eq!(work, Work::End { frames: 1 });
    assert_eq!(pair.sides[0].next(1, KeyUsage::NearLimit, 0), Work::Stop);
    pair.sides[0].lane_over(1, 0);
    assert_eq!(pair.sides[1].lane_ended(1, 1), Ok(()));
    pair.sides[1].admitted_over(1);
    pair.settle();
    assert_eq!(
        pair.sides[0].usage(),
        Usage {
            granted: pair.sides[0].usage().granted,
            ..Usage::default()
        }
    );
    assert!(!pair.sides[0].ready());
}

#[test]
fn a_later_channel_waits_for_bytes_that_a_lane_is_reading() {
    let mut pair = Pair::new();
    let first = pair.channel();
    pair.sides[0].readable(first);
    let work = pair.sides[0].next(1, KeyUsage::Fresh, 0);
    assert!(matches!(work, Work::Read { .. }));
    let second = pair.sides[0].open(opening(1)).unwrap();
    let another = pair.sides[0].open(opening(2)).unwrap();
    // A lane is reading, so this count is ignored.
    pair.sides[0].counted(first, 7);
    assert_eq!(pair.did(1), []);
    let outcome = Outcome::Bytes {
        length: 100,
        token: 0,
        more: true,
    };
    let data = pair.sides[0].read(1, first, outcome, 0).unwrap();
    assert_eq!(pair.did(0), [Action::Count(first)]);
    // Nothing is read until the bytes are counted.
    assert_eq!(pair.sides[0].next(1, KeyUsage::Fresh, 0), Work::Wait);
    pair.sides[0].counted(first, 50);
    let connects = |channel| Action::Connect {
        channel,
        route: "ram".to_owned(),
        parameter: "web".to_owned(),
    };
    assert_eq!(pair.did(1), [connects(another)]);
    pair.delivers(1, 1, &data);
    assert_eq!(pair.did(1), []);
    let data = pair.reads(0, 1, 50, false).unwrap();
    pair.delivers(1, 1, &data);
    assert_eq!(pair.did(1), [connects(second)]);
}

#[test]
fn a_later_channel_does_not_wait_for_a_consumer_that_does_not_read() {
    let mut pair = Pair::new();
    let first = pair.channel();
    pair.sides[0].readable(first);
    let data = pair.reads(0, 1, 100, false).unwrap();
    let second = pair.sides[0].open(opening(1)).unwrap();
    assert_eq!(pair.did(0), [Action::Count(first)]);
    pair.sides[0].counted(first, 0);
    assert_eq!(pair.did(1), []);
    assert_eq!(pair.sides[1].arrived(1, &data, 0), Ok(Arrival::Deliver));
    assert_eq!(pair.did(1), []);
    assert_eq!(pair.sides[1].wrote(first, 10, Some(10), 0), None);
    let did = pair.did(1);
    assert!(matches!(did[..], [Action::Connect { channel, .. }] if channel == second));
}

#[test]
fn a_refusal_is_repeated_until_it_is_confirmed() {
    let mut pair = Pair::new();
    let channel = pair.sides[0].open(opening(1)).unwrap();
    pair.settle();
    let text = "é".repeat(600);
    pair.sides[1].refuse(channel, FaultCode::Unauthorised, text, 0);
    // The refusal is lost with the control lane.
    let lost = pair.sides[1].next_message(0);
    assert!(matches!(lost, Some(Message::Refused { .. })));
    assert_eq!(pair.sides[0].channels(), 1);
    pair.resume();
    let did = pair.did(0);
    let refused = Action::Refused {
        channel,
        fault: FaultCode::Unauthorised,
        text: "é".repeat(512),
    };
    assert!(did.contains(&refused), "{did:?}");
    assert!(pair.sides[1].ended.is_empty());
}

#[test]
fn a_target_that_connects_too_late_is_closed() {
    let mut pair = Pair::new();
    let channel = pair.sides[0].open(opening(1)).unwrap();
    pair.settle();
    pair.sides[0].fail(channel, FaultCode::Cancelled, 0);
    pair.settle();
    assert!(!pair.sides[1].connected(channel, DEFAULT_WINDOW));
}

/// A process that was stopped, for example by SIGSTOP, could receive no acknowledgements. When it
/// continues, its lanes do not time out for lack of acknowledgements.
#[test]
fn a_side_that_was_stopped_gives_no_lane_up() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let data = pair.reads(0, 1, 100, false).unwrap();
    pair.settle();
    pair.now_ns = 60_000 * MS;
    assert_eq!(pair.did(0), []);
    pair.delivers(1, 1, &data);
    pair.now_ns += ACK_DELAY_NS;
    pair.settle();
    assert_eq!(pair.sides[0].usage().unacknowledged, 0);
}

/// While the control lane is down, no lane times out for lack of acknowledgements, which only the
/// control lane carries. The timeouts restart when the control lane is up again.
#[test]
fn lanes_do_not_time_out_while_the_control_lane_is_down() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    pair.reads(0, 1, 100, false).unwrap();
    let timeouts = Timeouts::default();
    // Shorter than the timeout of the trunk, longer than the timeout of a lane.
    let away_ns = timeouts.alone_ns - MS;
    assert!(away_ns > timeouts.progress_ns);
    pair.sides[0].control_down(pair.now_ns);
    for _ in 0..away_ns / MS {
        pair.now_ns += MS;
        assert_eq!(pair.sides[0].poll(pair.now_ns), None, "{}", pair.now_ns);
    }
    pair.resume();
    let due_ns = pair.now_ns + timeouts.progress_ns;
    assert_eq!(pair.sides[0].due_ns(), Some(due_ns));
    assert_eq!(pair.did(0), []);
    pair.now_ns = due_ns;
    assert_eq!(pair.did(0), [Action::CutLane(1)]);
}

/// The timeout of a lane that is being opened restarts with the new control lane.
#[test]
fn the_timeout_for_opening_a_lane_restarts_with_a_new_control_lane() {
    let mut pair = Pair::new();
    pair.sides[0].open(opening(1)).unwrap();
    assert_eq!(pair.did(0), [Action::OpenLane(1)]);
    let open_ns = Timeouts::default().open_ns;
    pair.sides[0].control_down(0);
    pair.now_ns = open_ns - MS;
    pair.resume();
    assert_eq!(pair.did(0), []);
    let due_ns = pair.now_ns + open_ns;
    assert_eq!(pair.sides[0].due_ns(), Some(due_ns));
    pair.now_ns = due_ns;
    assert_eq!(pair.did(0)[0], Action::CutLane(1));
}

/// The last acknowledgement of an ended lane is sent only once, and it can be lost with the control
/// lane. The sender therefore sends the lane's unacknowledged frames again as soon as the next
/// control lane is up, and does not wait for the lane's timeout.
#[test]
fn an_ended_lane_is_lost_when_the_control_lane_is_resumed() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].readable(channel);
    let first = pair.reads(0, 1, 100, true).unwrap();
    pair.delivers(1, 1, &first);
    pair.now_ns += ACK_DELAY_NS;
    pair.settle();
    let second = pair.reads(0, 1, 100, true).unwrap();
    let end = Work::End { frames: 2 };
    assert_eq!(pair.sides[0].next(1, KeyUsage::Spent, pair.now_ns), end);
    pair.sides[0].lane_over(1, pair.now_ns);
    assert_eq!(pair.did(0), [Action::OpenLane(2)]);
    assert!(pair.sides[0].lane_established(2, pair.now_ns));
    pair.sides[1].admit(2).unwrap();
    // The frame arrives, the other side forgets the lane, and its messages about the lane are lost.
    pair.delivers(1, 1, &second);
    pair.sides[1].lane_ended(1, 2).unwrap();
    pair.sides[1].admitted_over(1);
    while pair.sides[1].next_message(pair.now_ns).is_some() {}
    for side in &mut pair.sides {
        side.control_down(pair.now_ns);
    }
    // The frame on lane 2, which is still open, is not sent again when the control lane resumes.
    pair.reads(0, 2, 100, false).unwrap();
    pair.now_ns += Timeouts::default().progress_ns + MS;
    assert_eq!(pair.sides[0].usage().unacknowledged, 200);
    pair.resume();
    assert_eq!(pair.did(0), []);
    let again = Work::Again {
        data: second,
        token: 0,
    };
    let work = pair.sides[0].next(2, KeyUsage::Fresh, pair.now_ns);
    assert_eq!(work, again);
    let work = pair.sides[0].next(2, KeyUsage::Fresh, pair.now_ns);
    assert_eq!(work, Work::Wait, "more than the ended lane carried");
}

#[test]
fn a_side_that_missed_an_orderly_end_receives_gone() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.ends(0, channel);
    pair.settle();
    pair.ends(1, channel);
    // The *eof* arrives, and the *closed* that answers it is lost.
    let eof = pair.sides[1].next_message(0).unwrap();
    pair.sides[0].handle(eof, 0).unwrap();
    let lost = pair.sides[0].next_message(0);
    assert_eq!(lost, Some(Message::Closed { channel }));
    assert_eq!(pair.sides[0].channels(), 0);
    assert_eq!(pair.sides[1].channels(), 1);
    pair.resume();
    assert!(pair.did(1).contains(&Action::Close(channel)));
    assert_eq!(pair.sides[1].channels(), 0);
}

#[test]
fn without_a_lane_for_too_long_channels_are_aborted_on_both_sides() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].lane_over(1, 0);
    pair.now_ns = 100 * MS;
    pair.settle();
    // Without bytes to send, no timeout runs.
    pair.now_ns += 2 * Timeouts::default().alone_ns;
    pair.settle();
    assert_eq!(pair.sides[0].channels(), 1);
    pair.sides[0].readable(channel);
    pair.settle();
    // Poll all the time: a caller that polls only at the end is treated as if it had been stopped.
    let until_ns = pair.now_ns + Timeouts::default().alone_ns;
    while pair.now_ns < until_ns {
        assert!(pair.sides[0].channels() == 1 && pair.actions[1].is_empty());
        pair.now_ns += 1_000 * MS;
        pair.settle();
    }
    let fault = FaultCode::LaneLost;
    assert!(pair.did(0).contains(&abort(channel, fault, false)));
    assert!(pair.did(1).contains(&abort(channel, fault, true)));
    assert!(
        pair.sides[0].open(opening(1)).is_ok(),
        "no channel can be opened after the abort"
    );
}

#[test]
fn without_a_control_lane_for_too_long_the_trunk_is_over() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].control_down(7);
    pair.now_ns = Timeouts::default().alone_ns + 7;
    assert_eq!(pair.sides[0].due_ns(), Some(pair.now_ns));
    let fault = FaultCode::ControlLost;
    let over = [abort(channel, fault, false), Action::GiveUp(fault)];
    assert_eq!(pair.did(0), over);
    assert_eq!(pair.sides[0].due_ns(), None);
    assert_eq!(pair.sides[0].open(opening(1)), Err(OpenError::Over));
}

#[test]
fn a_control_lane_does_not_bring_back_a_trunk_that_is_over() {
    let mut pair = Pair::new();
    pair.channel();
    pair.sides[0].end(FaultCode::Ended);
    let side = &mut pair.sides[0];
    side.control_up(pair.now_ns);
    assert!(!side.has_message(pair.now_ns));
    assert_eq!(side.next_message(pair.now_ns), None);
    assert_eq!(side.open(opening(1)), Err(OpenError::Over));
}

#[test]
fn a_trunk_without_unused_channel_numbers_opens_no_channel() {
    let mut pair = Pair::new();
    let (side, last) = (&mut pair.sides[0], u32::MAX - 1);
    side.next_own = u64::from(last);
    assert!(side.was_opened(last).is_err());
    assert_eq!(side.open(opening(1)), Ok(last));
    assert_eq!(side.open(opening(2)), Err(OpenError::Over));
    assert_eq!(side.was_opened(last), Ok(()));
}

#[test]
fn i8_channels_are_limited() {
    let config = Config {
        channels: 3,
        ..Config::default()
    };
    let mut pair = Pair::with(config);
    for _ in 0..3 {
        pair.channel();
    }
    let error = pair.sides[0].open(opening(1));
    assert_eq!(error, Err(OpenError::TooMany { channels: 3 }));
    // A side enforces its own limit on a peer with a higher limit.
    pair.sides[0].config.channels = 4;
    let channel = pair.sides[0].open(opening(3)).unwrap();
    let did = pair.did(0);
    assert!(matches!(did[..], [Action::Refused { channel: which, .. }] if which == channel));
}

#[test]
fn a_side_that_drains_ends_with_its_last_channel() {
    let mut pair = Pair::new();
    let channel = pair.channel();
    pair.sides[0].drain();
    pair.settle();
    for side in &mut pair.sides {
        assert_eq!(side.open(opening(1)), Err(OpenError::Draining));
        assert!(!side.drained());
    }
    pair.ends(0, channel);
    pair.ends(1, channel);
    pair.settle();
    assert!(pair.sides.iter().all(Trunk::drained));
}

#[test]
fn lanes_are_opened_for_the_load_and_kept_for_a_while() {
    let mut pair = Pair::new();
    assert_eq!(pair.did(0), []);
    let channel = pair.sides[0].open(opening(1)).unwrap();
    assert_eq!(pair.did(0), [Action::OpenLane(1)]);
    assert!(pair.sides[1].connected(channel, DEFAULT_WINDOW));
    assert!(pair.sides[0].lane_established(1, 0));
    pair.sides[1].admit(1).unwrap();
    pair.sides[0].readable(channel);
    pair.did(0);
    while let Some(data) = pair.reads(0, 1, CHUNK, true) {
        pair.delivers(1, 1, &data);
    }
    let did = pair.did(0);
    assert_eq!(did, [2, 3, 4].map(Action::OpenLane), "bulk uses all lanes");
    pair.sides[0].fail(channel, FaultCode::Cancelled, 0);
    pair.settle();
    assert_eq!(pair.sides[0].next(1, KeyUsage::Fresh, 0), Work::Wait);
    let warm_ns = Config::default().warm_ns;
    for lane in [2, 3, 4] {
        pair.sides[0].lane_over(lane, 0);
    }
    pair.now_ns = warm_ns;
    pair.settle();
    let work = pair.sides[0].next(1, KeyUsage::Fresh, pair.now_ns);
    assert!(matches!(work, Work::End { .. }));
}

mod requests;
