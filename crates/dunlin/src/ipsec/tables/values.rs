//! The objects of a plan as the kernel has them.

use std::net::SocketAddr;

use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::object::{
    Action, Association, Direction, Encapsulation, Policy, Selector,
};
use dunlin_proto::ipsec::plan::{FIRST_PRIORITY, REQID_BLOCKS, REQIDS};
use dunlin_proto::ipsec::ports::PortBlock;
use dunlin_sys::xfrm::{
    self, Installed, KeyAndSalt, LONGEST_REPLAY_WINDOW, Network, PolicyDirection, Ports, Protocol,
    State, StateId,
};

pub(super) fn way_of(direction: Direction) -> PolicyDirection {
    match direction {
        Direction::In => PolicyDirection::In,
        Direction::Out => PolicyDirection::Out,
    }
}

fn selector_of(selector: &Selector) -> xfrm::Selector {
    let ports = |block: PortBlock| Ports {
        port: block.port,
        mask: block.mask,
    };
    xfrm::Selector {
        source: Network::one(selector.source),
        destination: Network::one(selector.destination),
        source_ports: ports(selector.source_ports),
        destination_ports: ports(selector.destination_ports),
        protocol: Protocol::TCP,
    }
}

pub(super) fn policy_of(policy: &Policy) -> xfrm::Policy {
    let Selector {
        source: from,
        destination: to,
        ..
    } = policy.selector;
    xfrm::Policy {
        selector: selector_of(&policy.selector),
        direction: way_of(policy.direction),
        action: match policy.action {
            Action::Block => xfrm::Action::Block,
            Action::Protect { reqid } => xfrm::Action::Protect { reqid, from, to },
        },
        priority: policy.priority,
    }
}

/// What would block a connection's outgoing packets alone.
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

/// An SA for a kernel that keeps directions, or for an older one.
pub(super) fn state_of(one: &Association, key: KeyAndSalt, keeps_directions: bool) -> State {
    let (direction, replay_window) = match one.direction {
        Direction::In => (xfrm::Direction::In, LONGEST_REPLAY_WINDOW),
        Direction::Out if keeps_directions => (xfrm::Direction::Out, 0),
        // That one has all SAs with extended sequence numbers have a window.
        Direction::Out => (xfrm::Direction::Out, LONGEST_REPLAY_WINDOW),
    };
    State {
        id: id_of(one),
        source: one.source,
        reqid: one.reqid,
        direction,
        // The sealing host's, so that only it says so to its kernel.
        cpu: match (one.direction, one.slot.sender) {
            (Direction::Out, Sender::Cpu(cpu)) => Some(cpu),
            _ => None,
        },
        key,
        replay_window,
        encapsulation: one.encapsulation.map(
            |Encapsulation {
                 source_port,
                 destination_port,
             }| xfrm::Encapsulation {
                source_port,
                destination_port,
            },
        ),
        // What the peer seals is taken for TCP between the two, and for nothing else.
        selector: (one.direction == Direction::In).then(|| xfrm::Selector {
            source: Network::one(one.source),
            destination: Network::one(one.destination),
            source_ports: Ports::ANY,
            destination_ports: Ports::ANY,
            protocol: Protocol::TCP,
        }),
    }
}

/// Whether what the kernel has is what was installed, by all that a record says.
pub(super) fn is_the_same(standing: &Installed, one: &Association) -> bool {
    let direction = match one.direction {
        Direction::In => xfrm::Direction::In,
        Direction::Out => xfrm::Direction::Out,
    };
    standing.source == one.source
        && standing.reqid == one.reqid
        // A kernel before 6.10 takes no notice of it.
        && standing.direction.is_none_or(|given| given == direction)
}

/// Whether some TCP packet is in both, whatever the priorities.
pub(super) fn meet(other: &xfrm::Policy, own: &xfrm::Policy) -> bool {
    let network = |other: Network, own: Network| match (other.address, own.address) {
        // The kernel writes "any" with either family's zeros.
        _ if other.prefix == 0 => true,
        (std::net::IpAddr::V4(other_address), std::net::IpAddr::V4(address)) => {
            let shift = 32 - u32::from(other.prefix.min(32));
            other_address.to_bits() >> shift == address.to_bits() >> shift
        }
        (std::net::IpAddr::V6(other_address), std::net::IpAddr::V6(address)) => {
            let shift = 128 - u32::from(other.prefix.min(128));
            other_address.to_bits() >> shift == address.to_bits() >> shift
        }
        _ => false,
    };
    let ports = |other: Ports, own: Ports| {
        let both = other.mask & own.mask;
        other.port & both == own.port & both
    };
    let (theirs, ours) = (&other.selector, &own.selector);
    let family = theirs.source.prefix > 0 || theirs.destination.prefix > 0;
    let same_family = theirs.source.address.is_ipv4() == ours.source.address.is_ipv4();
    other.direction == own.direction
        && (same_family || !family)
        && matches!(theirs.protocol, Protocol::ANY | Protocol::TCP)
        && network(theirs.source, ours.source)
        && network(theirs.destination, ours.destination)
        && ports(theirs.source_ports, ours.source_ports)
        && ports(theirs.destination_ports, ours.destination_ports)
        && !cross(other, own)
}

/// Whether only a connection from a port of one session to a port of another would be in both. It
/// is not to be, since lanes lead to a listener that is in no session; and if it were, either
/// policy has it sealed or blocked.
fn cross(other: &xfrm::Policy, own: &xfrm::Policy) -> bool {
    let is_for_ports = |policy: &xfrm::Policy| {
        let selector = &policy.selector;
        let is_sealed = match policy.action {
            xfrm::Action::Protect { reqid, .. } => reqid >= REQIDS,
            xfrm::Action::Block => true,
            xfrm::Action::Foreign => false,
        };
        is_sealed
            && (FIRST_PRIORITY..=FIRST_PRIORITY + 2 * REQID_BLOCKS).contains(&policy.priority)
            && selector.protocol == Protocol::TCP
    };
    let (theirs, ours) = (&other.selector, &own.selector);
    let any = |ports: Ports| ports.mask == 0;
    let one_end = |one: &xfrm::Selector, end: &xfrm::Selector| {
        any(one.source_ports)
            && !any(one.destination_ports)
            && !any(end.source_ports)
            && any(end.destination_ports)
    };
    is_for_ports(other)
        && is_for_ports(own)
        && (one_end(theirs, ours) || one_end(ours, theirs))
        // Of one range both ends' blocks are the same, and a connection may well be in both.
        && !overlap(theirs, ours)
}

/// Whether the blocks of two such selectors have a port in common.
fn overlap(one: &xfrm::Selector, other: &xfrm::Selector) -> bool {
    let block = |selector: &xfrm::Selector| match selector.source_ports.mask {
        0 => selector.destination_ports,
        _ => selector.source_ports,
    };
    let (one, other) = (block(one), block(other));
    let both = one.mask & other.mask;
    one.port & both == other.port & both
}

pub(super) fn describe(policy: &xfrm::Policy) -> String {
    let selector = &policy.selector;
    let network = |network: Network| format!("{}/{}", network.address, network.prefix);
    let ports = |ports: Ports| format!("{}/{:#06x}", ports.port, ports.mask);
    format!(
        "{:?} {} to {}, ports {} {}, priority {}",
        policy.direction,
        network(selector.source),
        network(selector.destination),
        ports(selector.source_ports),
        ports(selector.destination_ports),
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
            _ => unreachable!("it is a policy's"),
        }
    }

    #[test]
    fn an_outbound_sa_has_a_replay_window_where_the_kernel_has_no_directions() {
        let window = |way: &str, keeps_directions: bool| {
            let line = format!(
                "sa {way} 192.0.2.1 192.0.2.2 spi 0x00001001 reqid 65537 epoch 1 index 0 fallback"
            );
            let Object::Association(one) = line.parse().unwrap() else {
                unreachable!("it is an SA's")
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
    fn a_policy_meets_those_that_a_packet_can_be_in_with_it() {
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
            |other| other.selector.destination_ports = Ports::one(4447)
        ));
        assert!(same(
            |other| other.selector.source_ports = Ports::one(50_000)
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
        assert!(!same(|other| other.direction = PolicyDirection::In));
        assert!(!same(|other| other.selector.protocol = Protocol::UDP));
        assert!(!same(
            |other| other.selector.destination_ports = Ports::one(4448)
        ));
        assert!(!same(|other| {
            other.selector.destination = Network::one([192, 0, 2, 3].into());
        }));
    }

    /// Lanes of two migrations, or of both sides of a tunnel, are between the same addresses.
    #[test]
    fn sessions_without_a_port_in_common_stand_side_by_side() {
        let other = |ports: &str, priority: u32, change: fn(&mut xfrm::Policy)| {
            let line =
                format!("policy out 192.0.2.1 192.0.2.2 ports {ports} priority {priority} block");
            let Ok(Object::Policy(policy)) = line.parse() else {
                unreachable!("it is a policy's");
            };
            let mut policy = policy_of(&policy);
            change(&mut policy);
            meet(&policy, &own())
        };
        let same = |_: &mut xfrm::Policy| ();
        assert!(!other("24576/0xffc0 0/0x0000", 105, same));
        assert!(!other("24576/0xffc0 0/0x0000", 65_636, same));
        assert!(other("4444/0xfffc 0/0x0000", 105, same), "the same ports");
        assert!(other("4432/0xfff0 0/0x0000", 105, same), "some of them");
        assert!(other("24576/0xffc0 0/0x0000", 99, same), "nobody of ours");
        assert!(other("24576/0xffc0 0/0x0000", 65_637, same));
        assert!(other("24576/0xffc0 0/0x0000", 105, |policy| {
            policy.action = xfrm::Action::Foreign;
        }));
        let protect = |reqid| {
            let (from, to) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
            xfrm::Action::Protect { reqid, from, to }
        };
        let mut policy = own();
        policy.selector.destination_ports = Ports::ANY;
        policy.selector.source_ports = Ports::one(24_576);
        for (reqid, meets) in [(REQIDS, false), (REQIDS - 1, true)] {
            policy.action = protect(reqid);
            assert_eq!(meet(&policy, &own()), meets, "{reqid}");
        }
    }
}
