//! What leaves a host, frame by frame.
//!
//! It is looked at where it leaves. Where it arrives, the kernel may show a packet a second time
//! when it has been opened (`esp4_offload` gives it to the interface again), which is no leak.

use dunlin_rig::linux::packet::{Frame, Packets};

use super::{Host, Hosts, LANES, LINK};

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// ESP, with its SPI and the lower half of its sequence number.
    Esp {
        /// The SA.
        spi: u32,
        /// Counted by the sender.
        sequence: u32,
        /// Ports of the UDP around it.
        udp: Option<(u16, u16)>,
    },
    /// TCP or UDP, with its ports.
    Clear {
        /// The sender's.
        source: u16,
        /// The receiver's.
        destination: u16,
    },
    /// Something else: ARP, ICMP.
    Other,
}

impl Seen {
    /// Whether it is a lane's and not sealed.
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

/// Listens at the links of both hosts.
#[derive(Debug)]
pub struct Wire([Packets; 2]);

impl Wire {
    /// From now on.
    ///
    /// # Panics
    /// There is no link.
    #[must_use]
    pub fn tap(hosts: &Hosts) -> Self {
        Self([tap(&hosts.a), tap(&hosts.b)])
    }

    /// Everything that has left either host, each host's in order; none was missed.
    ///
    /// # Panics
    /// More has left than there was room for.
    #[must_use]
    pub fn left(&self) -> Vec<Seen> {
        self.0
            .iter()
            .flat_map(left)
            .map(|frame| seen(&frame))
            .collect()
    }
}

/// Listens at the link of one host.
///
/// # Panics
/// There is no link.
#[must_use]
pub fn tap(host: &Host) -> Packets {
    host.run(|| Packets::open(LINK)).expect("it has a link")
}

/// The frames that have left.
///
/// # Panics
/// More has left than there was room for.
#[must_use]
pub fn left(packets: &Packets) -> Vec<Frame> {
    let mut all = Vec::new();
    while let Some(frame) = packets.next_frame().expect("it can be read") {
        if frame.outgoing {
            all.push(frame);
        }
    }
    assert_eq!(packets.lost().expect("it counts"), 0, "frames were missed");
    all
}

/// What a frame is.
///
/// # Panics
/// It is cut short.
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
        // Four zeros after the head of UDP are an IKE message, anything else ESP (RFC 3948).
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
