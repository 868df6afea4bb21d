//! The frames that leave a host.
//!
//! Frames are captured where they leave a host. A capture where they arrive may also show the
//! decrypted packet, because `esp4_offload` passes that packet to the interface again. This is not
//! a leak.

use dunlin_rig::linux::packet::{Frame, Packets};

use super::{Host, Hosts, LANES, LINK};

/// The type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// ESP, with its SPI and the lower half of its sequence number.
    Esp {
        /// The SPI.
        spi: u32,
        /// The lower half of the sequence number.
        sequence: u32,
        /// The UDP ports of sender and receiver, if ESP is sent in UDP.
        udp: Option<(u16, u16)>,
    },
    /// TCP or UDP, with its ports.
    Clear {
        /// The port of the sender.
        source: u16,
        /// The port of the receiver.
        destination: u16,
    },
    /// Any other frame, for instance ARP or ICMP.
    Other,
}

impl Seen {
    /// Returns whether the frame belongs to a lane and is not encrypted.
    #[must_use]
    pub fn is_leak(self) -> bool {
        match self {
            Self::Clear {
                source,
                destination,
            } => LANES.contains(source) || LANES.contains(destination),
            _ => false,
        }
    }
}

/// A tap on the links of both hosts.
#[derive(Debug)]
pub struct Wire([Packets; 2]);

impl Wire {
    /// Starts the tap.
    ///
    /// # Panics
    /// A host has no link.
    #[must_use]
    pub fn tap(hosts: &Hosts) -> Self {
        Self([tap(&hosts.a), tap(&hosts.b)])
    }

    /// Returns all frames that have left either host since the last call. The frames of each host
    /// are in order.
    ///
    /// # Panics
    /// Frames were lost for lack of buffer space.
    #[must_use]
    pub fn left(&self) -> Vec<Seen> {
        self.0
            .iter()
            .flat_map(left)
            .map(|frame| seen(&frame))
            .collect()
    }
}

/// Starts a tap on the link of one host.
///
/// # Panics
/// The host has no link.
#[must_use]
pub fn tap(host: &Host) -> Packets {
    host.run(|| Packets::open(LINK))
        .expect("the host has a link")
}

/// Returns the frames that have left the host since the last call.
///
/// # Panics
/// Frames were lost for lack of buffer space.
#[must_use]
pub fn left(packets: &Packets) -> Vec<Frame> {
    let mut all = Vec::new();
    while let Some(frame) = packets.next_frame().expect("the socket is readable") {
        if frame.outgoing {
            all.push(frame);
        }
    }
    assert_eq!(
        packets.lost().expect("the socket counts lost frames"),
        0,
        "frames were missed"
    );
    all
}

/// Returns the type of a frame.
///
/// # Panics
/// The frame is truncated.
#[must_use]
pub fn seen(frame: &Frame) -> Seen {
    let (ethernet, rest) = frame.bytes.split_at(14);
    let (protocol, inner) = match ethernet[12..] {
        [0x08, 0x00] => (rest[9], &rest[usize::from(rest[0] & 15) * 4..]),
        [0x86, 0xdd] => (rest[6], &rest[40..]),
        _ => return Seen::Other,
    };
    let port = |at: usize| u16::from_be_bytes([inner[at], inner[at + 1]]);
    let esp = |from: &[u8], udp| Seen::Esp {
        spi: word(from, 0),
        sequence: word(from, 4),
        udp,
    };
    match protocol {
        50 => esp(inner, None),
        // Four zero bytes after the UDP header mark an IKE message. Any other value marks ESP (RFC
        // 3948).
        17 if [port(0), port(2)].contains(&super::ENCAPSULATED) && word(inner, 8) != 0 => {
            esp(&inner[8..], Some((port(0), port(2))))
        }
        6 | 17 => Seen::Clear {
            source: port(0),
            destination: port(2),
        },
        _ => Seen::Other,
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
