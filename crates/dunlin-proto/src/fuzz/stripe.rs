//! Fuzz entries for the tunnel: its decoders, and one side of a trunk with a peer that sends
//! arbitrary messages.

use super::{Choices, as_is_and_with_its_length};
use crate::fault::FaultCode;
use crate::limits::{
    LEAST_WINDOW_BYTES, MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_CREDITS, MAX_LANES, MAX_NAME_BYTES,
    MAX_STRIPE_CHUNK_BYTES, MAX_TEXT_BYTES, MAX_TUNNEL_BODY_BYTES,
};
use crate::negotiate::SessionSecret;
use crate::stripe::frame::{Data, FRAME_HEADER_BYTES, Frame};
use crate::stripe::message::{Credit, Header, LaneAck, MESSAGE_HEADER_BYTES, Mark, Message, Open};
use crate::stripe::{
    Action, Arrival, Config, Delivery, KeyUsage, Opening, Outcome, Side, Timeouts, Trunk, Work,
};

/// Decodes a message of the tunnel, unchanged and with its length corrected.
pub fn fuzz_tunnel_message(bytes: &[u8]) {
    as_is_and_with_its_length(bytes, MESSAGE_HEADER_BYTES, message);
}

fn message(bytes: &[u8]) {
    let Some((header, body)) = bytes.split_first_chunk::<MESSAGE_HEADER_BYTES>() else {
        return;
    };
    let Ok(header) = Header::decode(header) else {
        return;
    };
    assert!(header.body_bytes() <= MAX_TUNNEL_BODY_BYTES);
    let Ok(Some(message)) = Message::decode(&header, body) else {
        return;
    };
    assert_eq!(body.len(), header.body_bytes());
    match &message {
        Message::Accept { lanes_max, .. } => assert!((1..=MAX_LANES).contains(lanes_max)),
        Message::Open(open) => {
            assert!(open.route.len() <= MAX_NAME_BYTES && open.parameter.len() <= MAX_NAME_BYTES);
            assert!(open.barrier.len() <= MAX_CHANNELS);
            assert!(open.limit <= MAX_CHANNEL_OFFSET);
        }
        Message::Refused { text, .. }
        | Message::LaneRefused { text, .. }
        | Message::LaneFailed { text, .. } => {
            assert!(text.len() <= MAX_TEXT_BYTES);
        }
        Message::Credit(credits) => assert!(credits.len() <= MAX_CREDITS),
        Message::Ack(acks) => {
            assert!(acks.len() <= usize::from(MAX_LANES));
            assert!(acks.iter().all(|ack| ack.lane != 0));
        }
        Message::Eof(mark) => assert!(mark.offset <= MAX_CHANNEL_OFFSET),
        _ => {}
    }
    let mut encoded = Vec::new();
    message
        .encode(header.epoch(), &mut encoded)
        .expect("what decodes is within every limit");
    let (again, body) = encoded
        .split_first_chunk::<MESSAGE_HEADER_BYTES>()
        .expect("a message starts with its header");
    let again = Header::decode(again).expect("the header was encoded above");
    assert_eq!(again.epoch(), header.epoch());
    assert_eq!(Message::decode(&again, body), Ok(Some(message)));
}

/// Decodes a frame of a tunnel's lane. Checks that encoding the frame again gives the same bytes,
/// and that the offset of its last byte does not overflow.
pub fn fuzz_tunnel_frame(bytes: &[u8]) {
    let Ok(header) = <&[u8; FRAME_HEADER_BYTES]>::try_from(bytes) else {
        return;
    };
    let Ok(frame) = Frame::decode(header) else {
        return;
    };
    assert_eq!(frame.to_bytes(), *header);
    if let Frame::Data(data) = frame {
        assert!((1..=MAX_STRIPE_CHUNK_BYTES).contains(&data.length()));
        assert!(data.end() > data.offset() && data.end() <= MAX_CHANNEL_OFFSET);
    }
}

const CHANNELS: usize = 4;
const LANES_MAX: usize = 3;
const BYTES: u64 = 6 * LEAST_WINDOW_BYTES;

/// Runs one side of a trunk with a peer that sends anything and a caller that makes calls in any
/// order. Checks that nothing panics, that nothing is delivered twice or out of order, that no lane
/// is opened twice, and that the buffered bytes stay within their limits (I7, I8).
pub fn fuzz_trunk(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let first = choices.byte();
    let side = match first % 2 {
        0 => Side::Connecting,
        _ => Side::Accepting,
    };
    let config = Config {
        version: 2,
        one_opener: first & 2 != 0,
        channels: CHANNELS,
        bytes: BYTES,
        lanes: 2,
        lanes_max: LANES_MAX as u16,
        timeouts: Timeouts::default(),
        ..Config::default()
    };
    let mut rig = Rig {
        trunk: Trunk::new(side, config, 0),
        now_ns: 0,
        given_up: false,
        writes: Vec::new(),
        written: std::collections::BTreeMap::new(),
        served: std::collections::BTreeSet::new(),
        ever_served: std::collections::BTreeSet::new(),
        reads: Vec::new(),
    };
    rig.trunk.control_up(0);
    while choices.more() {
        rig.step(&mut choices);
        rig.settle();
        let usage = rig.trunk.usage();
        assert!(usage.granted <= BYTES && usage.held <= usage.granted);
        assert!(usage.unacknowledged <= BYTES);
        assert!(rig.trunk.channels() <= CHANNELS);
    }
}

struct Rig {
    trunk: Trunk<u64>,
    now_ns: u64,
    given_up: bool,
    /// Deliveries that the caller has taken from the trunk and has not written yet.
    writes: Vec<Delivery<u64>>,
    /// The offset up to which each channel was written.
    written: std::collections::BTreeMap<u32, u64>,
    /// Lanes that the trunk is opening for the peer.
    served: std::collections::BTreeSet<u16>,
    /// Lanes that the trunk has ever opened for the peer.
    ever_served: std::collections::BTreeSet<u16>,
    /// Reads that the trunk has allowed and the caller has not done yet: lane, channel, maximum
    /// length.
    reads: Vec<(u16, u32, u32)>,
}

impl Rig {
    fn step(&mut self, choices: &mut Choices<'_>) {
        let channel = choices.below(12) as u32;
        let lane = choices.below(6) as u16;
        let now_ns = self.now_ns;
        let trunk = &mut self.trunk;
        match choices.byte() % 22 {
            0 => self.now_ns += choices.below(1 << 16) * 200_000,
            1 => {
                let opening = Opening {
                    listener: choices.below(2),
                    route: "r".to_owned(),
                    parameter: String::new(),
                    window_bytes: choices.number(),
                };
                let _ = trunk.open(opening);
            }
            2 => trunk.counted(channel, choices.number()),
            3 => {
                let _ = trunk.connected(channel, choices.number());
            }
            4 => trunk.refuse(channel, FaultCode::Busy, "no".repeat(700), now_ns),
            5 => trunk.fail(channel, FaultCode::Cancelled, now_ns),
            6 => {
                let _ = trunk.lane_established(lane, now_ns);
            }
            7 => trunk.lane_over(lane, now_ns),
            8 => trunk.readable(channel),
            9 => {
                let usage = [KeyUsage::Fresh, KeyUsage::NearLimit, KeyUsage::Spent]
                    [choices.below(3) as usize];
                if let Work::Read { channel, most } = trunk.next(lane, usage, now_ns) {
                    assert!((1..=MAX_STRIPE_CHUNK_BYTES).contains(&most));
                    self.reads.push((lane, channel, most));
                }
            }
            10 => self.read(choices),
            11 => {
                let _ = trunk.admit(lane);
            }
            12 | 13 => self.arrives(lane, channel, choices),
            14 => self.writes(choices),
            15 => {
                if let Some(delivery) = trunk.writable(channel) {
                    self.writes.push(delivery);
                }
            }
            // The lane's thread reports nothing before the lane is open.
            16 | 17 if self.served.contains(&lane) => {}
            16 => trunk.admitted_over(lane),
            17 => {
                if trunk.lane_ended(lane, choices.below(4)).is_err() {
                    trunk.end(FaultCode::Malformed);
                }
            }
            18 => {
                trunk.control_down(now_ns);
                trunk.control_up(now_ns);
            }
            19 => {
                if self.served.remove(&lane) && !trunk.opened_for(lane) {
                    trunk.not_opened(lane, FaultCode::LaneLost, "no".repeat(500));
                }
            }
            20 => trunk.lane_failed(lane.max(1), FaultCode::LaneLost, "no".repeat(500), now_ns),
            _ => {
                let message = any_message(channel, lane, choices);
                if trunk.handle(message, now_ns).is_err() && choices.byte() > 200 {
                    trunk.end(FaultCode::Malformed);
                }
            }
        }
    }

    fn read(&mut self, choices: &mut Choices<'_>) {
        let Some((lane, channel, most)) = self.reads.pop() else {
            return;
        };
        let sent =
            |trunk: &mut Trunk<u64>, outcome| trunk.read(lane, channel, outcome, self.now_ns);
        match choices.byte() % 4 {
            0 => assert_eq!(sent(&mut self.trunk, Outcome::End), None),
            1 => assert_eq!(sent(&mut self.trunk, Outcome::Nothing), None),
            more => {
                let length = (choices.below(u64::from(most)) as u32).max(1);
                let outcome = Outcome::Bytes {
                    length,
                    token: 0,
                    more: more == 2,
                };
                if let Some(data) = sent(&mut self.trunk, outcome) {
                    assert_eq!((data.channel(), data.length()), (channel, length));
                }
            }
        }
    }

    fn arrives(&mut self, lane: u16, channel: u32, choices: &mut Choices<'_>) {
        let offset = choices.below(64) * 8192;
        let length = (choices.below(32) as u32 + 1) * 8192;
        let Some(data) = Data::new(channel, offset, length) else {
            return;
        };
        match self.trunk.arrived(lane, &data, self.now_ns) {
            Ok(Arrival::Deliver) => self.writes.push(Delivery {
                channel,
                offset,
                length,
                token: offset,
            }),
            Ok(Arrival::Keep) => {
                let kept = self.trunk.keep(lane, &data, offset, self.now_ns);
                self.writes.extend(kept.ok().flatten());
            }
            _ => {}
        }
    }

    fn writes(&mut self, choices: &mut Choices<'_>) {
        let Some(delivery) = self.writes.pop() else {
            return;
        };
        let channel = delivery.channel;
        assert!(
            self.writes.iter().all(|other| other.channel != channel),
            "two threads have the turn of channel {channel}"
        );
        let alive = self.trunk.held(channel).is_some();
        let at = self.written.entry(channel).or_default();
        assert!(!alive || *at == delivery.offset, "out of order");
        let all = choices.byte().is_multiple_of(2);
        let bytes = if all {
            delivery.length
        } else {
            choices.below(u64::from(delivery.length)) as u32
        };
        *at += u64::from(bytes);
        let rest = (bytes < delivery.length).then_some(*at);
        let next = self.trunk.wrote(channel, bytes, rest, self.now_ns);
        self.writes.extend(next);
    }

    /// Takes all actions and messages from the trunk, as a caller does after each report.
    fn settle(&mut self) {
        while let Some(action) = self.trunk.poll(self.now_ns) {
            assert!(!self.given_up, "{action:?} after the end");
            self.given_up |= matches!(action, Action::GiveUp(_));
            if let Action::OpenLaneFor(lane) = action {
                assert!(self.ever_served.insert(lane), "lane {lane} is opened twice");
                self.served.insert(lane);
                assert!(self.served.len() <= LANES_MAX, "{:?}", self.served);
            }
        }
        while let Some(message) = self.trunk.next_message(self.now_ns) {
            let mut bytes = Vec::new();
            message
                .encode(1, &mut bytes)
                .expect("a message is within every limit");
        }
    }
}

/// Any message that a peer can send.
fn any_message(channel: u32, lane: u16, choices: &mut Choices<'_>) -> Message {
    let fault = FaultCode::Cancelled;
    let lane = lane.max(1);
    let offset = match choices.byte() % 3 {
        0 => choices.number() % MAX_CHANNEL_OFFSET,
        _ => choices.below(64) * 8192,
    };
    match choices.byte() % 17 {
        0 => Message::Accept {
            secret: SessionSecret([0; 32]),
            lanes_max: 1,
            port: 1,
        },
        1 => Message::Open(Open {
            channel,
            limit: offset,
            route: "r".to_owned(),
            parameter: "p".to_owned(),
            barrier: (0..choices.below(3))
                .map(|_| Mark {
                    channel: choices.below(12) as u32,
                    offset: choices.below(64) * 8192,
                })
                .collect(),
        }),
        2 => Message::Opened {
            channel,
            limit: offset,
        },
        3 => Message::Refused {
            channel,
            fault,
            text: String::new(),
        },
        4 | 5 => Message::Credit(vec![Credit {
            channel,
            delivered: choices.below(64) * 8192,
            limit: offset,
        }]),
        6 => Message::Ack(vec![LaneAck {
            lane,
            frames: choices.below(5),
        }]),
        7 => Message::LaneRefused {
            lane,
            fault,
            text: String::new(),
        },
        8 => Message::LaneLost(LaneAck {
            lane,
            frames: choices.below(5),
        }),
        9 => Message::Eof(Mark { channel, offset }),
        10 => Message::Closed { channel },
        11 => Message::Reset { channel, fault },
        12 => Message::Gone { channel },
        13 => Message::Pong {
            token: choices.number(),
        },
        14 => Message::LaneFailed {
            lane,
            fault,
            text: String::new(),
        },
        15 => Message::LaneWanted { lane },
        _ => Message::Ping { token: 1 },
    }
}
