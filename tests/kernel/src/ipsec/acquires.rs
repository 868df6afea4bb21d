//! Policies that request SAs from a key manager (`XFRM_MSG_ACQUIRE`). Dunlin installs no such
//! policies, because they drop packets (test `p09_acquire`). Instead it adds each SA before the SA
//! is needed.

use std::io;
use std::net::IpAddr;

use dunlin_ipsec::xfrm::{Action, Direction, Policy};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkBuffer, NetlinkMessage, NetlinkPayload, NlasIterator,
};
use netlink_packet_xfrm as uapi;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_XFRM};
use uapi::policy::ModifyMessage;
use uapi::{Address, Id, LifetimeConfig, UserPolicyInfo, UserTemplate, XfrmAttrs, XfrmMessage};

/// The attribute `XFRMA_SA_PCPU`, a number of four bytes. The crate netlink-packet-xfrm lacks it.
const SA_CPU: u16 = 35;
/// The flag `XFRM_POLICY_CPU_ACQUIRE`: a CPU without an SA requests one (since Linux 6.13).
const CPU_ACQUIRE: u8 = 4;

/// Adds an outbound policy with `CPU_ACQUIRE` in the calling thread's namespace.
///
/// # Errors
/// Errors from socket(2) and from the kernel.
///
/// # Panics
/// The policy does not require an SA, or is not outbound.
pub fn add_acquiring_policy(policy: &Policy) -> io::Result<()> {
    let Action::Protect { reqid, from, to } = policy.action else {
        panic!("the policy does not require an SA");
    };
    assert_eq!(policy.direction, Direction::Out);
    let family = match to {
        IpAddr::V4(_) => uapi::AF_INET,
        IpAddr::V6(_) => uapi::AF_INET6,
    };
    let selector = &policy.selector;
    let info = UserPolicyInfo {
        selector: uapi::Selector {
            daddr: Address::from_ip(&selector.destination.address),
            saddr: Address::from_ip(&selector.source.address),
            dport: selector.destination_ports.port,
            dport_mask: selector.destination_ports.mask,
            sport: selector.source_ports.port,
            sport_mask: selector.source_ports.mask,
            family,
            prefixlen_d: selector.destination.prefix,
            prefixlen_s: selector.source.prefix,
            proto: selector.protocol.0,
            ..uapi::Selector::default()
        },
        lifetime_cfg: LifetimeConfig {
            soft_byte_limit: uapi::XFRM_INF,
            hard_byte_limit: uapi::XFRM_INF,
            soft_packet_limit: uapi::XFRM_INF,
            hard_packet_limit: uapi::XFRM_INF,
            ..LifetimeConfig::default()
        },
        priority: policy.priority,
        direction: uapi::XFRM_POLICY_OUT,
        action: uapi::XFRM_POLICY_ALLOW,
        flags: CPU_ACQUIRE,
        ..UserPolicyInfo::default()
    };
    let template = UserTemplate {
        id: Id {
            daddr: Address::from_ip(&to),
            spi: 0,
            proto: uapi::IPPROTO_ESP,
        },
        family,
        saddr: Address::from_ip(&from),
        reqid,
        mode: uapi::XFRM_MODE_TRANSPORT,
        ..UserTemplate::default()
    };
    let mut message = NetlinkMessage::from(XfrmMessage::AddPolicy(ModifyMessage {
        user_policy_info: info,
        nlas: vec![XfrmAttrs::Template(vec![template])],
    }));
    message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_XFRM)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&bytes, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<XfrmMessage>::deserialize(&answer).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
        NetlinkPayload::Error(_) => Ok(()),
        other => Err(io::Error::other(format!("{other:?}"))),
    }
}

/// Receives the kernel's requests for SAs in one network namespace. While its socket is open, the
/// kernel waits for an answer to each request.
pub struct Acquires(Socket);

impl std::fmt::Debug for Acquires {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Acquires").finish()
    }
}

impl Acquires {
    /// Opens a socket in the calling thread's namespace.
    ///
    /// # Errors
    /// Errors from socket(2), bind(2) and setsockopt(2).
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_XFRM)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        socket.add_membership(uapi::XFRMNLGRP_ACQUIRE)?;
        socket.set_non_blocking(true)?;
        Ok(Self(socket))
    }

    /// Returns the CPUs for which SAs have been requested since the last call. `None` means a
    /// request of an SA for all CPUs.
    ///
    /// # Errors
    /// Errors from recv(2), or `InvalidData` for a malformed message.
    pub fn asked(&self) -> io::Result<Vec<Option<u32>>> {
        let mut all = Vec::new();
        let mut room = vec![0; 4096];
        loop {
            let length = match self.0.recv(&mut &mut room[..], 0) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(all),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let unreadable = || io::Error::from(io::ErrorKind::InvalidData);
            let message = NetlinkBuffer::new_checked(room.get(..length).ok_or_else(unreadable)?)
                .map_err(|_| unreadable())?;
            if message.message_type() != uapi::XFRM_MSG_ACQUIRE {
                continue;
            }
            let attributes = message
                .payload()
                .get(uapi::XFRM_USER_ACQUIRE_LEN..)
                .ok_or_else(unreadable)?;
            let cpu = NlasIterator::new(attributes)
                .map_while(Result::ok)
                .find(|attribute| attribute.kind() == SA_CPU)
                .and_then(|attribute| attribute.value().first_chunk().copied())
                .map(u32::from_ne_bytes);
            all.push(cpu);
        }
    }
}
