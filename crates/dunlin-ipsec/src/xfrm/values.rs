//! What is asked of the kernel's IPsec, and what it says it has.

use std::fmt;
use std::net::IpAddr;

use dunlin_proto::ipsec::object::{Direction, Encapsulation};
use dunlin_proto::ipsec::ports::PortBlock;
use zeroize::Zeroizing;

/// The longest replay window of the kernel, in packets (`XFRMA_REPLAY_ESN_MAX`).
pub const LONGEST_REPLAY_WINDOW: u32 = 4096;
/// AES-GCM in ESP, as the kernel names it (crypto/seqiv.c, crypto/gcm.c).
pub(super) const ALGORITHM: &str = "rfc4106(gcm(aes))";
/// Of the key and the salt.
pub(super) const KEY_BITS: u32 = 8 * KeyAndSalt::BYTES as u32;
/// Of the tag.
pub(super) const TAG_BITS: u32 = 128;

/// What an SA of ESP is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId {
    /// Where its packets go.
    pub destination: IpAddr,
    /// The number that the receiver gave it, in every packet (RFC 4303, section 2.1).
    pub spi: u32,
}

/// 32 bytes of key and four of salt for AES-256-GCM (RFC 4106, section 8.1). Wiped when it goes.
#[derive(Clone)]
pub struct KeyAndSalt(Zeroizing<[u8; Self::BYTES]>);

impl KeyAndSalt {
    /// How long both are together.
    pub const BYTES: usize = 36;

    /// Takes a copy; wiping the original is the caller's.
    #[must_use]
    pub fn new(bytes: &[u8; Self::BYTES]) -> Self {
        Self(Zeroizing::new(*bytes))
    }

    pub(super) fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl From<Zeroizing<[u8; Self::BYTES]>> for KeyAndSalt {
    fn from(bytes: Zeroizing<[u8; Self::BYTES]>) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for KeyAndSalt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("KeyAndSalt(..)")
    }
}

/// An SA as it is to be: ESP in transport mode, AES-256-GCM, extended sequence numbers from zero
/// on. A key that has sealed anything may not be given to a second one: its nonces are the
/// sequence numbers, and two packets with one nonce give the key away.
#[derive(Clone, Debug)]
pub struct State {
    /// What it is known by.
    pub id: StateId,
    /// Where its packets come from; of the same family as the destination.
    pub source: IpAddr,
    /// What policies ask for; anything but zero.
    pub reqid: u32,
    /// Which way it is used here.
    pub direction: Direction,
    /// Outbound: the only CPU that uses it. Inbound the kernel keeps the number and ignores it.
    pub cpu: Option<u32>,
    /// The key, for this SA alone.
    pub key: KeyAndSalt,
    /// Inbound: how many packets may overtake another before that one is taken for a replay, at
    /// most [`LONGEST_REPLAY_WINDOW`]. Outbound: 0, or any where the
    /// kernel keeps no direction ([`Xfrm::keeps_directions`](super::Xfrm::keeps_directions)).
    pub replay_window: u32,
    /// ESP within UDP (RFC 3948).
    pub encapsulation: Option<Encapsulation>,
    /// The packets that it is for, within those that a policy names; `None` is all.
    pub selector: Option<Selector>,
}

/// What the kernel has under a [`StateId`], as it says itself; without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// What it is known by.
    pub id: StateId,
    /// Where its packets come from.
    pub source: IpAddr,
    /// What policies ask for.
    pub reqid: u32,
    /// Which way it is used; `None` where nobody has said, or the kernel is older than 6.10.
    pub direction: Option<Direction>,
    /// The CPU that it belongs to.
    pub cpu: Option<u32>,
    /// Whether it is in transport mode.
    pub transport: bool,
    /// Whether its sequence numbers have 64 bits.
    pub extended: bool,
    /// How it seals; `None` is a reservation of the SPI, which carries nothing.
    pub algorithm: Option<Algorithm>,
    /// In packets.
    pub replay_window: u32,
    /// The last sequence number that it sealed.
    pub sealed: u64,
    /// The highest sequence number that it opened.
    pub opened: u64,
    /// ESP within UDP.
    pub encapsulation: Option<Encapsulation>,
    /// The packets that it is for; `None` is all.
    pub selector: Option<Selector>,
    /// What it has carried.
    pub counters: Counters,
}

/// An algorithm as the kernel names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithm {
    /// For instance `rfc4106(gcm(aes))`; the name of one that both seals and authenticates.
    pub name: String,
    /// Bits of key, the salt among them.
    pub key_bits: u32,
    /// Bits of the tag.
    pub tag_bits: u32,
}

/// What an SA has carried and refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes; outbound those behind the IP header, before ESP is put around them.
    pub bytes: u64,
    /// Packets. One that is cut into segments behind the SA counts once at the sender.
    pub packets: u64,
    /// Packets whose sequence number had come before.
    pub replay: u32,
    /// Packets that were later than the replay window. With extended sequence numbers such a packet
    /// is taken for one of the next 2^32, and counts as one that did not open.
    pub replay_window: u32,
    /// Packets that did not open.
    pub integrity_failed: u32,
}

impl Installed {
    /// What of it is not as `state` says; the key is not looked at.
    #[must_use]
    pub fn difference(&self, state: &State) -> Option<&'static str> {
        let aead = Algorithm {
            name: ALGORITHM.to_owned(),
            key_bits: KEY_BITS,
            tag_bits: TAG_BITS,
        };
        let checks = [
            (self.id == state.id, "the destination or the SPI"),
            (self.source == state.source, "the source"),
            (self.reqid == state.reqid, "the reqid"),
            // A kernel before 6.10 passes over it. It has no SAs of one CPU either.
            (
                self.direction.is_none_or(|given| given == state.direction),
                "the direction",
            ),
            (self.cpu == state.cpu, "the CPU"),
            (self.transport, "the mode"),
            (self.extended, "the sequence numbers"),
            (self.algorithm.as_ref() == Some(&aead), "the algorithm"),
            (
                self.replay_window == state.replay_window,
                "the replay window",
            ),
            (
                self.encapsulation == state.encapsulation,
                "the encapsulation",
            ),
            (self.selector == state.selector, "the selector"),
        ];
        checks
            .into_iter()
            .find_map(|(holds, what)| (!holds).then_some(what))
    }
}

/// The packets that a policy or an SA is for, as they go on the wire: source and destination are
/// the packet's, in whichever direction it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Selector {
    /// Where they come from.
    pub source: Network,
    /// Where they go.
    pub destination: Network,
    /// Ports at the source.
    pub source_ports: PortBlock,
    /// Ports at the destination.
    pub destination_ports: PortBlock,
    /// What is above IP.
    pub protocol: Protocol,
}

/// Addresses with a common beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    /// One of them.
    pub address: IpAddr,
    /// How many bits they have in common; at most 32 and 128.
    pub prefix: u8,
}

impl Network {
    /// One address alone.
    #[must_use]
    pub fn one(address: IpAddr) -> Self {
        let prefix = match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        };
        Self { address, prefix }
    }
}

/// A number of the IANA's list of protocols above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Protocol(pub u8);

impl Protocol {
    /// All of them.
    pub const ANY: Self = Self(0);
    /// TCP.
    pub const TCP: Self = Self(6);
    /// UDP.
    pub const UDP: Self = Self(17);
}

/// What is to become of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// Which packets.
    pub selector: Selector,
    /// On which way.
    pub direction: Direction,
    /// What is to become of them.
    pub action: Action,
    /// Of several policies that fit a packet the one with the smallest number holds; of equal
    /// ones the one that was there first.
    pub priority: u32,
}

/// What a policy does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// They need an SA in transport mode with this `reqid`: outbound they go by one or not at all,
    /// inbound they have come by one or are dropped.
    Protect {
        /// What the SA is asked for by.
        reqid: u32,
        /// The SA's source.
        from: IpAddr,
        /// The SA's destination.
        to: IpAddr,
    },
    /// They are dropped.
    Block,
    /// Something that is not made here, read back: packets pass, or need other SAs.
    Foreign,
}
