//! Encodes requests to the kernel's IPsec.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_packet_xfrm as uapi;
use uapi::{
    Address, EncapTmpl, Id, LifetimeConfig, ReplayEsn, UserPolicyId, UserPolicyInfo, UserSaId,
    UserSaInfo, UserSpiInfo, UserTemplate,
};

use dunlin_proto::ipsec::LEAST_SPI;
use dunlin_proto::ipsec::object::{Direction, Encapsulation};

use super::values::{
    ALGORITHM, Action, KEY_BITS, LONGEST_REPLAY_WINDOW, Network, Policy, Selector, State, StateId,
    TAG_BITS,
};
use crate::netlink::Request;

/// `XFRMA_SA_DIR`, one byte; netlink-packet-xfrm lacks it.
pub(super) const SA_DIRECTION: u16 = 33;
/// `XFRMA_SA_PCPU`, four bytes; netlink-packet-xfrm lacks it.
pub(super) const SA_CPU: u16 = 35;
/// The size of an algorithm's name (`struct xfrm_algo_aead`).
pub(super) const NAME_BYTES: usize = 64;

fn direction_and_cpu(request: &mut Request, direction: Direction, cpu: Option<u32>) {
    let direction = match direction {
        Direction::In => 1,
        Direction::Out => 2,
    };
    request.attribute(SA_DIRECTION, |request| request.put_bytes(&[direction]));
    if let Some(cpu) = cpu {
        request.attribute(SA_CPU, |request| request.put_bytes(&cpu.to_ne_bytes()));
    }
}

/// Requests any free SPI.
pub(super) fn allocate_spi(from: IpAddr, to: IpAddr, direction: Direction, cpu: u32) -> Request {
    let mut request = Request::new(uapi::XFRM_MSG_ALLOCSPI, 0);
    request.put(&UserSpiInfo {
        info: info(from, to, 0, 0),
        min: LEAST_SPI,
        max: u32::MAX,
    });
    direction_and_cpu(&mut request, direction, Some(cpu));
    request
}

pub(super) fn add_state(state: &State) -> Request {
    let mut request = Request::new(uapi::XFRM_MSG_NEWSA, NLM_F_ACK);
    let mut fixed = info(
        state.source,
        state.id.destination,
        state.id.spi,
        state.reqid,
    );
    fixed.flags = uapi::XFRM_STATE_ESN;
    if let Some(selector) = &state.selector {
        fixed.selector = selector_to(selector);
    }
    request.put(&fixed);
    request.attribute(uapi::XFRMA_ALG_AEAD, |request| {
        let mut name = [0; NAME_BYTES];
        name[..ALGORITHM.len()].copy_from_slice(ALGORITHM.as_bytes());
        request.put_bytes(&name);
        request.put_bytes(&KEY_BITS.to_ne_bytes());
        request.put_bytes(&TAG_BITS.to_ne_bytes());
        request.put_bytes(state.key.bytes());
    });
    let words = state.replay_window.div_ceil(32);
    request.attribute(uapi::XFRMA_REPLAY_ESN_VAL, |request| {
        request.put(&ReplayEsn {
            bmp_len: words,
            replay_window: state.replay_window,
            bmp: vec![0; words.min(LONGEST_REPLAY_WINDOW / 32) as usize],
            ..ReplayEsn::default()
        });
    });
    if let Some(Encapsulation {
        source_port,
        destination_port,
    }) = state.encapsulation
    {
        request.attribute(uapi::XFRMA_ENCAP, |request| {
            request.put(&EncapTmpl {
                encap_type: uapi::UDP_ENCAP_ESPINUDP,
                encap_sport: source_port,
                encap_dport: destination_port,
                encap_oa: Address::default(),
            });
        });
    }
    direction_and_cpu(&mut request, state.direction, state.cpu);
    request
}

pub(super) fn state_by_id(kind: u16, id: &StateId) -> Request {
    let acknowledged = match kind {
        uapi::XFRM_MSG_DELSA => NLM_F_ACK,
        _ => 0,
    };
    let mut request = Request::new(kind, acknowledged);
    request.put(&UserSaId {
        daddr: Address::from_ip(&id.destination),
        spi: id.spi,
        family: family(id.destination),
        proto: uapi::IPPROTO_ESP,
    });
    request
}

pub(super) fn add_policy(kind: u16, policy: &Policy) -> Request {
    let mut request = Request::new(kind, NLM_F_ACK);
    request.put(&UserPolicyInfo {
        selector: selector_to(&policy.selector),
        lifetime_cfg: without_limit(),
        priority: policy.priority,
        direction: direction_to(policy.direction),
        action: match policy.action {
            Action::Block => uapi::XFRM_POLICY_BLOCK,
            Action::Protect { .. } | Action::Foreign => uapi::XFRM_POLICY_ALLOW,
        },
        ..UserPolicyInfo::default()
    });
    if let Action::Protect { reqid, from, to } = policy.action {
        request.attribute(uapi::XFRMA_TMPL, |request| {
            request.put(&UserTemplate {
                id: Id {
                    daddr: Address::from_ip(&to),
                    spi: 0,
                    proto: uapi::IPPROTO_ESP,
                },
                family: family(to),
                saddr: Address::from_ip(&from),
                reqid,
                mode: uapi::XFRM_MODE_TRANSPORT,
                ..UserTemplate::default()
            });
        });
    }
    request
}

pub(super) fn policy_by_selector(kind: u16, selector: &Selector, direction: Direction) -> Request {
    let mut request = Request::new(kind, 0);
    request.put(&UserPolicyId {
        selector: selector_to(selector),
        index: 0,
        direction: direction_to(direction),
    });
    request
}

pub(super) fn policy_by_index(kind: u16, index: u32, direction: Direction) -> Request {
    let mut request = Request::new(kind, NLM_F_ACK);
    request.put(&UserPolicyId {
        index,
        direction: direction_to(direction),
        ..UserPolicyId::default()
    });
    request
}

pub(super) fn list(kind: u16) -> Request {
    Request::new(kind, NLM_F_DUMP)
}

pub(super) fn database() -> Request {
    let mut request = Request::new(uapi::XFRM_MSG_GETSADINFO, 0);
    // No flags.
    request.put_bytes(&[0; 4]);
    request
}

/// The fields that all SAs share.
fn info(from: IpAddr, to: IpAddr, spi: u32, reqid: u32) -> UserSaInfo {
    UserSaInfo {
        id: Id {
            daddr: Address::from_ip(&to),
            spi,
            proto: uapi::IPPROTO_ESP,
        },
        saddr: Address::from_ip(&from),
        lifetime_cfg: without_limit(),
        reqid,
        family: family(to),
        mode: uapi::XFRM_MODE_TRANSPORT,
        ..UserSaInfo::default()
    }
}

/// Returns a lifetime without limits. Zeros would be limits that are reached immediately.
fn without_limit() -> LifetimeConfig {
    LifetimeConfig {
        soft_byte_limit: uapi::XFRM_INF,
        hard_byte_limit: uapi::XFRM_INF,
        soft_packet_limit: uapi::XFRM_INF,
        hard_packet_limit: uapi::XFRM_INF,
        ..LifetimeConfig::default()
    }
}

fn selector_to(selector: &Selector) -> uapi::Selector {
    let network = |network: &Network| (Address::from_ip(&network.address), network.prefix);
    let (saddr, prefixlen_s) = network(&selector.source);
    let (daddr, prefixlen_d) = network(&selector.destination);
    uapi::Selector {
        daddr,
        saddr,
        dport: selector.destination_ports.port,
        dport_mask: selector.destination_ports.mask,
        sport: selector.source_ports.port,
        sport_mask: selector.source_ports.mask,
        family: family(selector.destination.address),
        prefixlen_d,
        prefixlen_s,
        proto: selector.protocol.0,
        ..uapi::Selector::default()
    }
}

pub(super) fn direction_to(direction: Direction) -> u8 {
    match direction {
        Direction::In => uapi::XFRM_POLICY_IN,
        Direction::Out => uapi::XFRM_POLICY_OUT,
    }
}

pub(super) fn family(address: IpAddr) -> u16 {
    match address {
        IpAddr::V4(_) => uapi::AF_INET,
        IpAddr::V6(_) => uapi::AF_INET6,
    }
}
