//! Converts the objects of a plan to the kernel's form.

use std::net::SocketAddr;

use crate::xfrm::{
    self, Installed, KeyAndSalt, LONGEST_REPLAY_WINDOW, Network, Protocol, State, StateId,
};
use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::object::{Action, Association, Direction, Policy, Selector};
use dunlin_proto::ipsec::plan::{FIRST_PRIORITY, REQID_BLOCKS};
use dunlin_proto::ipsec::ports::PortBlock;

pub(super) fn policy_of(policy: &Policy) -> xfrm::Policy {
    let Selector {
        source: from,
        destination: to,
        source_ports,
        destination_ports,
    } = policy.selector;
    xfrm::Policy {
        selector: xfrm::Selector {
            source: Network::one(from),
            destination: Network::one(to),
            source_ports,
            destination_ports,
            protocol: Protocol::TCP,
        },
        direction: policy.direction,
        action: match policy.action {
            Action::Block => xfrm::Action::Block,
            Action::Protect { reqid } => xfrm::Action::Protect { reqid, from, to },
        },
        priority: policy.priority,
    }
}

/// Returns a policy for only the outgoing packets of a connection. It is compared with other
/// policies, and never installed.
pub(super) fn connection_policy(local: SocketAddr, peer: SocketAddr) -> xfrm::Policy {
    policy_of(&Policy {
        direction: Direction::Out,
        selector: Selector {
            source: local.ip().to_canonical(),
            destination: peer.ip().to_canonical(),
            source_ports: PortBlock::only(local.port()),
            destination_ports: PortBlock::only(peer.port()),
        },
        action: Action::Block,
        priority: 0,
    })
}

pub(super) fn id_of(one: &Association) -> StateId {
    StateId {
        destination: one.destination,
        spi: one.spi,
    }
}

/// Returns an SA in the form for a kernel that stores directions, or for an older one.
pub(crate) fn state_of(one: &Association, key: KeyAndSalt, keeps_directions: bool) -> State {
    let replay_window = match one.direction {
        Direction::Out if keeps_directions => 0,
        // A kernel without directions requires a window for every SA with extended sequence
        // numbers.
        _ => LONGEST_REPLAY_WINDOW,
    };
    State {
        id: id_of(one),
        source: one.source,
        reqid: one.reqid,
        direction: one.direction,
        // The CPU is a CPU of the sealing host, so only that host sets it.
        cpu: match (one.direction, one.slot.sender) {
            (Direction::Out, Sender::Cpu(cpu)) => Some(cpu),
            _ => None,
        },
        key,
        replay_window,
        encapsulation: one.encapsulation,
        // A packet that the peer has sealed is accepted only if it contains TCP between the two
        // hosts.
        selector: (one.direction == Direction::In).then(|| xfrm::Selector {
            source: Network::one(one.source),
            destination: Network::one(one.destination),
            source_ports: PortBlock::ANY,
            destination_ports: PortBlock::ANY,
            protocol: Protocol::TCP,
        }),
    }
}

/// Whether the kernel's SA has the source, the request id and the direction of `one`. The caller
/// has found this SA by the destination and the SPI of `one`.
pub(super) fn is_same(installed: &Installed, one: &Association) -> bool {
    installed.source == one.source
        && installed.reqid == one.reqid
        // A kernel before 6.10 ignores the direction.
        && installed.direction.is_none_or(|given| given == one.direction)
}

/// Whether some TCP packet matches both policies, regardless of priorities.
pub(super) fn meet(other: &xfrm::Policy, own: &xfrm::Policy) -> bool {
    // The kernel represents "any address" as zeros, of either address family.
    let network = |other: Network, own: Network| other.prefix == 0 || other.contains(own.address);
    let (theirs, ours) = (&other.selector, &own.selector);
    let family = theirs.source.prefix > 0 || theirs.destination.prefix > 0;
    let same_family = theirs.source.address.is_ipv4() == ours.source.address.is_ipv4();
    other.direction == own.direction
        && (same_family || !family)
        && matches!(theirs.protocol, Protocol::ANY | Protocol::TCP)
        && network(theirs.source, ours.source)
        && network(theirs.destination, ours.destination)
        && theirs.source_ports.meets(ours.source_ports)
        && theirs.destination_ports.meets(ours.destination_ports)
}

/// Whether `other` is a policy of another session between the same two hosts, and the only packets
/// that match both policies go *from* ports of one session *to* ports of the other session. Both
/// policies seal or block such packets, so two sessions with different ports can coexist.
pub(super) fn only_crosses(other: &xfrm::Policy, own: &xfrm::Policy) -> bool {
    let (theirs, ours) = (&other.selector, &own.selector);
    let of_sessions = FIRST_PRIORITY..=FIRST_PRIORITY + 2 * REQID_BLOCKS + 1;
    let is_any = |ports: PortBlock| ports.mask == 0;
    other.action != xfrm::Action::Foreign
        && of_sessions.contains(&other.priority)
        && theirs.source == ours.source
        && theirs.destination == ours.destination
        && is_any(theirs.source_ports) != is_any(theirs.destination_ports)
        && is_any(theirs.source_ports) == is_any(ours.destination_ports)
        && is_any(theirs.destination_ports) == is_any(ours.source_ports)
}

pub(super) fn describe(policy: &xfrm::Policy) -> String {
    let selector = &policy.selector;
    let network = |network: Network| format!("{}/{}", network.address, network.prefix);
    format!(
        "{:?} {} to {}, ports {} {}, priority {}",
        policy.direction,
        network(selector.source),
        network(selector.destination),
        selector.source_ports,
        selector.destination_ports,
        policy.priority
    )
    .to_lowercase()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use dunlin_proto::ipsec::object::Object;

    use super::*;

    fn own() -> xfrm::Policy {
        let line = "policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xfffc priority 103 block";
        match line.parse().unwrap() {
            Object::Policy(policy) => policy_of(&policy),
            _ => unreachable!("the line is a policy's"),
        }
    }

    #[test]
    fn an_outbound_sa_has_a_replay_window_if_the_kernel_has_no_directions() {
        let window = |way: &str, keeps_directions: bool| {
            let line = format!(
                "sa {way} 192.0.2.1 192.0.2.2 spi 0x00001001 reqid 65537 epoch 1 index 0 fallback"
            );
            let Object::Association(one) = line.parse().unwrap() else {
                unreachable!("the line is an SA's")
            };
            let key = KeyAndSalt::new(&[7; KeyAndSalt::BYTES]);
            state_of(&one, key, keeps_directions).replay_window
        };
        assert_eq!(
            (window("in", true), window("out", true)),
            (LONGEST_REPLAY_WINDOW, 0)
        );
        assert_eq!(window("in", false), LONGEST_REPLAY_WINDOW);
        assert_eq!(window("out", false), LONGEST_REPLAY_WINDOW);
    }

    #[test]
    fn sessions_with_different_ports_coexist() {
        let policy = |source: u16, destination: u16, action| xfrm::Policy {
            selector: xfrm::Selector {
                source_ports: PortBlock {
                    port: source,
                    mask: if source > 0 { 0xffc0 } else { 0 },
                },
                destination_ports: PortBlock {
                    port: destination,
                    mask: if destination > 0 { 0xffc0 } else { 0 },
                },
                ..own().selector
            },
            action,
            ..own()
        };
        let block = xfrm::Action::Block;
        let (from, to) = (policy(24_576, 0, block), policy(0, 24_640, block));
        for (one, other) in [(from, to), (to, from)] {
            assert!(meet(&one, &other) && only_crosses(&one, &other));
        }
        // Two policies with the same direction and ports conflict.
        assert!(!only_crosses(&policy(24_576, 0, block), &from));
        // Policies of other programs may let packets pass.
        assert!(!only_crosses(
            &policy(24_576, 0, xfrm::Action::Foreign),
            &to
        ));
        let mut foreign = from;
        foreign.priority = 0;
        assert!(!only_crosses(&foreign, &to));
        let mut wide = from;
        wide.selector.source.prefix = 24;
        assert!(!only_crosses(&wide, &to));
        let all = policy(0, 0, block);
        assert!(!only_crosses(&all, &to) && !only_crosses(&to, &all));
    }

    #[test]
    fn a_policy_meets_policies_that_match_a_common_packet() {
        let same = |change: fn(&mut xfrm::Policy)| {
            let mut other = own();
            change(&mut other);
            meet(&other, &own())
        };
        let any = |network: &mut Network| network.prefix = 0;
        assert!(same(|_| ()));
        assert!(same(|other| other.priority = 900_000));
        assert!(same(|other| other.selector.protocol = Protocol::ANY));
        assert!(same(
            |other| other.selector.destination_ports = PortBlock::only(4447)
        ));
        assert!(same(
            |other| other.selector.source_ports = PortBlock::only(50_000)
        ));
        assert!(same(|other| other.selector.source.prefix = 24));
        assert!(meet(
            &{
                let mut other = own();
                any(&mut other.selector.source);
                any(&mut other.selector.destination);
                other
            },
            &own()
        ));
        assert!(!same(|other| other.direction = Direction::In));
        assert!(!same(|other| other.selector.protocol = Protocol::UDP));
        assert!(!same(
            |other| other.selector.destination_ports = PortBlock::only(4448)
        ));
        assert!(!same(|other| {
            other.selector.destination = Network::one([192, 0, 2, 3].into());
        }));
    }
}
