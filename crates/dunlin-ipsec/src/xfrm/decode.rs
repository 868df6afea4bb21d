//! Decodes the kernel's answers. Unused attributes are skipped. A key in an answer is compared in
//! place, without a copy.

use std::net::IpAddr;

use netlink_packet_core::NlasIterator;
use netlink_packet_xfrm as uapi;
use uapi::{
    Address, EncapTmpl, ReplayEsn, UserPolicyInfo, UserSaInfo, UserTemplate,
    XFRM_USER_POLICY_INFO_LEN, XFRM_USER_SA_INFO_LEN, XFRM_USER_TEMPLATE_LEN,
};

use super::encode::{NAME_BYTES, SA_CPU, SA_DIRECTION};
use super::values::{
    Action, Algorithm, Counters, Installed, KeyAndSalt, Network, Policy, Protocol, Selector,
    StateId,
};
use crate::netlink;
use dunlin_proto::ipsec::object::{Direction, Encapsulation};
use dunlin_proto::ipsec::ports::PortBlock;

const CUT_SHORT: &str = "truncated";
/// Parses `struct xfrm_usersa_info` and its attributes; `None` for an SA of a protocol other than
/// ESP.
pub(super) fn state(body: &[u8]) -> Result<Option<Installed>, &'static str> {
    let (fixed, attributes) = body
        .split_at_checked(XFRM_USER_SA_INFO_LEN)
        .ok_or(CUT_SHORT)?;
    let fixed = UserSaInfo::parse(fixed).map_err(|_| CUT_SHORT)?;
    if fixed.id.proto != uapi::IPPROTO_ESP {
        return Ok(None);
    }
    let mut installed = Installed {
        id: StateId {
            destination: address(fixed.family, &fixed.id.daddr)?,
            spi: fixed.id.spi,
        },
        source: address(fixed.family, &fixed.saddr)?,
        reqid: fixed.reqid,
        direction: None,
        cpu: None,
        transport: fixed.mode == uapi::XFRM_MODE_TRANSPORT,
        extended: fixed.flags & uapi::XFRM_STATE_ESN != 0,
        algorithm: None,
        replay_window: fixed.replay_window.into(),
        sealed: 0,
        opened: 0,
        encapsulation: None,
        selector: Some(selector(&fixed.selector)?).filter(|given| !is_all(given)),
        counters: Counters {
            bytes: fixed.lifetime_cur.bytes,
            packets: fixed.lifetime_cur.packets,
            replay: fixed.stats.replay,
            replay_window: fixed.stats.replay_window,
            integrity_failed: fixed.stats.integrity_failed,
        },
    };
    // For algorithms other than AEAD, only their presence is recorded.
    let other = |name: &str| Algorithm {
        name: name.to_owned(),
        key_bits: 0,
        tag_bits: 0,
    };
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(|_| CUT_SHORT)?;
        let value = attribute.value();
        match attribute.kind() {
            SA_DIRECTION => {
                installed.direction = match value.first() {
                    Some(1) => Some(Direction::In),
                    Some(2) => Some(Direction::Out),
                    _ => None,
                }
            }
            SA_CPU => installed.cpu = Some(number(value, 0)?),
            uapi::XFRMA_ALG_AEAD => installed.algorithm = Some(algorithm(value)?),
            uapi::XFRMA_ALG_CRYPT | uapi::XFRMA_ALG_AUTH | uapi::XFRMA_ALG_AUTH_TRUNC => {
                installed.algorithm.get_or_insert_with(|| other("another"));
            }
            uapi::XFRMA_REPLAY_ESN_VAL => {
                let replay = ReplayEsn::parse(value).map_err(|_| CUT_SHORT)?;
                let wide = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
                installed.replay_window = replay.replay_window;
                installed.sealed = wide(replay.oseq_hi, replay.oseq);
                installed.opened = wide(replay.seq_hi, replay.seq);
            }
            uapi::XFRMA_ENCAP => {
                let encapsulation = EncapTmpl::parse(value).map_err(|_| CUT_SHORT)?;
                installed.encapsulation = Some(Encapsulation {
                    source_port: encapsulation.encap_sport,
                    destination_port: encapsulation.encap_dport,
                });
            }
            _ => {}
        }
    }
    Ok(Some(installed))
}

/// Returns whether the SA in `body` has this key, in constant time.
pub(super) fn has_key(body: &[u8], key: &KeyAndSalt) -> bool {
    let attributes = body.get(XFRM_USER_SA_INFO_LEN..).unwrap_or_default();
    NlasIterator::new(attributes)
        .map_while(Result::ok)
        .filter(|attribute| attribute.kind() == uapi::XFRMA_ALG_AEAD)
        .any(|attribute| {
            let held = attribute.value().get(NAME_BYTES + 8..);
            held.and_then(|rest| rest.first_chunk::<{ KeyAndSalt::BYTES }>())
                .is_some_and(|held| {
                    let pairs = held.iter().zip(key.bytes());
                    pairs.fold(0, |differing, (one, other)| differing | (one ^ other)) == 0
                })
        })
}

/// Parses the start of `struct xfrm_algo_aead`.
fn algorithm(value: &[u8]) -> Result<Algorithm, &'static str> {
    let name = value.get(..NAME_BYTES).ok_or(CUT_SHORT)?;
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(Algorithm {
        name: String::from_utf8_lossy(name).into_owned(),
        key_bits: number(value, NAME_BYTES)?,
        tag_bits: number(value, NAME_BYTES + 4)?,
    })
}

/// Parses `struct xfrm_userpolicy_info` and its attributes, with the kernel's index; `None` for the
/// policy of a single socket or of forwarded packets.
pub(super) fn policy(body: &[u8]) -> Result<Option<(Policy, u32)>, &'static str> {
    let (fixed, attributes) = body
        .split_at_checked(XFRM_USER_POLICY_INFO_LEN)
        .ok_or(CUT_SHORT)?;
    let fixed = UserPolicyInfo::parse(fixed).map_err(|_| CUT_SHORT)?;
    let direction = match fixed.direction {
        uapi::XFRM_POLICY_IN => Direction::In,
        uapi::XFRM_POLICY_OUT => Direction::Out,
        _ => return Ok(None),
    };
    let selector = selector(&fixed.selector)?;
    let mut templates = 0;
    let mut protects = None;
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.map_err(|_| CUT_SHORT)?;
        if attribute.kind() == uapi::XFRMA_TMPL {
            for template in attribute.value().chunks(XFRM_USER_TEMPLATE_LEN) {
                templates += 1;
                protects = protect(template)?;
            }
        }
    }
    let action = match (fixed.action, templates, protects) {
        (uapi::XFRM_POLICY_BLOCK, ..) => Action::Block,
        (uapi::XFRM_POLICY_ALLOW, 1, Some(protect)) => protect,
        _ => Action::Foreign,
    };
    let policy = Policy {
        selector,
        direction,
        action,
        priority: fixed.priority,
    };
    Ok(Some((policy, fixed.index)))
}

/// Returns the action of a template, if it has the form that this crate creates.
fn protect(template: &[u8]) -> Result<Option<Action>, &'static str> {
    let template = UserTemplate::parse(template).map_err(|_| CUT_SHORT)?;
    if template.id.proto != uapi::IPPROTO_ESP
        || template.mode != uapi::XFRM_MODE_TRANSPORT
        || template.optional != 0
        || template.id.spi != 0
    {
        return Ok(None);
    }
    Ok(Some(Action::Protect {
        reqid: template.reqid,
        from: address(template.family, &template.saddr)?,
        to: address(template.family, &template.id.daddr)?,
    }))
}

/// Whether a selector matches all packets. The kernel reports such a selector, with only an address
/// family, for an SA without a selector.
fn is_all(selector: &Selector) -> bool {
    selector.source.prefix == 0
        && selector.destination.prefix == 0
        && selector.source_ports == PortBlock::ANY
        && selector.destination_ports == PortBlock::ANY
        && selector.protocol == Protocol::ANY
}

fn selector(selector: &uapi::Selector) -> Result<Selector, &'static str> {
    Ok(Selector {
        source: Network {
            address: address(selector.family, &selector.saddr)?,
            prefix: selector.prefixlen_s,
        },
        destination: Network {
            address: address(selector.family, &selector.daddr)?,
            prefix: selector.prefixlen_d,
        },
        source_ports: PortBlock {
            port: selector.sport,
            mask: selector.sport_mask,
        },
        destination_ports: PortBlock {
            port: selector.dport,
            mask: selector.dport_mask,
        },
        protocol: Protocol(selector.proto),
    })
}

fn address(family: u16, address: &Address) -> Result<IpAddr, &'static str> {
    match family {
        uapi::AF_INET | uapi::AF_UNSPEC => Ok(address.to_ipv4().into()),
        uapi::AF_INET6 => Ok(address.to_ipv6().into()),
        _ => Err("unknown address family"),
    }
}

fn number(value: &[u8], at: usize) -> Result<u32, &'static str> {
    let bytes = netlink::number(value, at).ok_or(CUT_SHORT)?;
    Ok(u32::from_ne_bytes(bytes))
}
