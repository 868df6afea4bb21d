//! Types used in requests to the kernel's IPsec (XFRM) and in its replies.

use std::fmt;
use std::net::IpAddr;

use dunlin_proto::ipsec::key::KEY_BYTES;
use dunlin_proto::ipsec::object::{Direction, Encapsulation};
use dunlin_proto::ipsec::ports::PortBlock;
use zeroize::Zeroizing;

/// The longest replay window of the kernel, in packets (`XFRMA_REPLAY_ESN_MAX`).
pub const LONGEST_REPLAY_WINDOW: u32 = 4096;
/// AES-GCM in ESP, as the kernel names it (crypto/seqiv.c, crypto/gcm.c).
pub(super) const ALGORITHM: &str = "rfc4106(gcm(aes))";
/// The length of the key and the salt together, in bits.
pub(super) const KEY_BITS: u32 = 8 * KeyAndSalt::BYTES as u32;
/// The length of the tag, in bits.
pub(super) const TAG_BITS: u32 = 128;

/// The identity of an ESP SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId {
    /// The destination of the SA's packets.
    pub destination: IpAddr,
    /// The SPI, which the receiver chose; it is in every packet (RFC 4303, section 2.1).
    pub spi: u32,
}

/// 32 bytes of key and four of salt for AES-256-GCM (RFC 4106, section 8.1). Wiped on drop.
#[derive(Clone)]
pub struct KeyAndSalt(Zeroizing<[u8; Self::BYTES]>);

impl KeyAndSalt {
    /// The length of the key and the salt together, in bytes.
    pub const BYTES: usize = KEY_BYTES;

    /// Copies the bytes; the caller must wipe the original.
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

/// An SA to install: ESP in transport mode, AES-256-GCM, extended sequence numbers starting at
/// zero. A key that has sealed anything must not be used for a second SA: nonces are sequence
/// numbers, and two packets with the same nonce reveal the authentication key and the XOR of their
/// plaintexts.
#[derive(Clone, Debug)]
pub struct State {
    /// The identity.
    pub id: StateId,
    /// The source of the SA's packets, of the same address family as the destination.
    pub source: IpAddr,
    /// The request id by which policies find the SA; not zero.
    pub reqid: u32,
    /// The direction of the SA on this host.
    pub direction: Direction,
    /// Outbound: the only CPU on which lookups find the SA. Inbound: the kernel stores the number
    /// but ignores it.
    pub cpu: Option<u32>,
    /// The key, used for this SA only.
    pub key: KeyAndSalt,
    /// Inbound: how many packets may overtake a packet before that packet counts as a replay, at
    /// most [`LONGEST_REPLAY_WINDOW`]. Outbound: must be 0 if the kernel stores the directions of
    /// SAs ([`Xfrm::probe`](super::Xfrm::probe)). An older kernel accepts any value.
    pub replay_window: u32,
    /// The UDP encapsulation of ESP (RFC 3948), if the SA has one.
    pub encapsulation: Option<Encapsulation>,
    /// The packets that the SA accepts, of those that a policy selects; `None` means all.
    pub selector: Option<Selector>,
}

/// The kernel's SA or reservation with a [`StateId`], without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The identity.
    pub id: StateId,
    /// The source of the SA's packets.
    pub source: IpAddr,
    /// The request id.
    pub reqid: u32,
    /// The direction; `None` if it was not set or the kernel is older than 6.10.
    pub direction: Option<Direction>,
    /// The CPU to which the SA belongs.
    pub cpu: Option<u32>,
    /// Whether the SA uses transport mode.
    pub transport: bool,
    /// Whether the sequence numbers of the SA have 64 bits.
    pub extended: bool,
    /// The algorithm; `None` for a reservation of the SPI, which carries nothing.
    pub algorithm: Option<Algorithm>,
    /// The replay window in packets.
    pub replay_window: u32,
    /// The sequence number of the last packet that the SA sealed.
    pub sealed: u64,
    /// The highest sequence number of the packets that the SA opened.
    pub opened: u64,
    /// The UDP encapsulation of ESP, if the SA has one.
    pub encapsulation: Option<Encapsulation>,
    /// The packets that the SA accepts; `None` means all.
    pub selector: Option<Selector>,
    /// The counters.
    pub counters: Counters,
}

/// An algorithm, named as in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithm {
    /// For instance `rfc4106(gcm(aes))`, an algorithm that both seals and authenticates.
    pub name: String,
    /// Bits of the key, including the salt.
    pub key_bits: u32,
    /// Bits of the tag.
    pub tag_bits: u32,
}

/// The counters of an SA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes. For an outbound packet, the kernel counts the bytes after the IP header, before it
    /// adds ESP.
    pub bytes: u64,
    /// Packets. A packet that is segmented after it has passed the SA counts once at the sender.
    pub packets: u64,
    /// Packets with a sequence number that was received before.
    pub replay: u32,
    /// Packets older than the replay window. With extended sequence numbers the kernel assigns such
    /// a packet to the next range of 2^32 numbers and counts an integrity failure instead.
    pub replay_window: u32,
    /// Packets that failed authentication.
    pub integrity_failed: u32,
}

impl Installed {
    /// Returns the first field that differs from `state`; the key is not compared.
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
            // A kernel before 6.10 stores no direction, so a missing direction is accepted.
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

/// The packets that a policy or an SA applies to. The source and the destination are those in the
/// packet's headers, for outbound and inbound packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Selector {
    /// The source addresses.
    pub source: Network,
    /// The destination addresses.
    pub destination: Network,
    /// The source ports.
    pub source_ports: PortBlock,
    /// The destination ports.
    pub destination_ports: PortBlock,
    /// The protocol above IP.
    pub protocol: Protocol,
}

/// Addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    /// An address in the network.
    pub address: IpAddr,
    /// The length of the prefix: at most 32 (IPv4) or 128 (IPv6).
    pub prefix: u8,
}

impl Network {
    /// Whether an address has the network's prefix.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let same = |own: u128, other: u128, all: u8| {
            let rest = u32::from(all.saturating_sub(self.prefix));
            own.checked_shr(rest) == other.checked_shr(rest)
        };
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                same(own.to_bits().into(), other.to_bits().into(), 32)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => same(own.to_bits(), other.to_bits(), 128),
            _ => false,
        }
    }

    /// A network of one address.
    #[must_use]
    pub fn one(address: IpAddr) -> Self {
        let prefix = match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        };
        Self { address, prefix }
    }
}

/// An IP protocol number, as assigned by the IANA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Protocol(pub u8);

impl Protocol {
    /// All protocols.
    pub const ANY: Self = Self(0);
    /// TCP.
    pub const TCP: Self = Self(6);
    /// UDP.
    pub const UDP: Self = Self(17);
}

/// A policy: what the kernel does with certain packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The packets.
    pub selector: Selector,
    /// The direction of the packets.
    pub direction: Direction,
    /// What the kernel does with the packets.
    pub action: Action,
    /// If several policies match a packet, the policy with the smallest number applies. If their
    /// numbers are equal, the oldest policy applies.
    pub priority: u32,
}

/// What a policy does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// The packets need an SA in transport mode with this `reqid`: outbound packets use
    /// such an SA or are dropped, and inbound packets are dropped unless they arrived
    /// through one.
    Protect {
        /// The request id of the SA.
        reqid: u32,
        /// The SA's source.
        from: IpAddr,
        /// The SA's destination.
        to: IpAddr,
    },
    /// The packets are dropped.
    Block,
    /// An action of a policy that this crate did not install: the packets pass without an SA, or
    /// need SAs of another kind.
    Foreign,
}
