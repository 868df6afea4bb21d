//! Steps of a plan, carried out on the kernel's tables: recorded before, read back
//! after, and taken back without touching what is not ours.

use std::net::UdpSocket;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::object::{
    Action, Association, Direction, Encapsulation, Listener, Object, Policy, Selector,
};
use dunlin_proto::ipsec::plan::{FIRST_PRIORITY, REQID_BLOCKS, Step, Undo, undo};
use dunlin_proto::ipsec::ports::PortBlock;
use dunlin_sys::xfrm::{
    self, Counters, Installed, KeyAndSalt, LONGEST_REPLAY_WINDOW, Network, PolicyDirection, Ports,
    Protocol, State, StateId, Xfrm,
};

use super::Hook;
use super::error::IpsecError;
use super::record::Record;
use super::sockets::connections;
use super::udp;

/// How often in a row no connection may be found before the ports are free: procfs lists
/// them in pieces, and one may be in none of them while it changes its state.
const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// The kernel's tables in the namespace of the thread that opened them.
pub(super) struct Tables {
    pub(super) xfrm: Arc<Xfrm>,
    hook: Option<Hook>,
    listener: Option<Arc<UdpSocket>>,
}

impl Tables {
    pub(super) fn open(hook: Option<Hook>) -> Result<Self, IpsecError> {
        let xfrm = Xfrm::open().map_err(kernel("the kernel's IPsec is opened"))?;
        Ok(Self {
            xfrm: Arc::new(xfrm),
            hook,
            listener: None,
        })
    }

    /// The same tables, to look at.
    pub(super) fn of(xfrm: Arc<Xfrm>) -> Self {
        Self {
            xfrm,
            hook: None,
            listener: None,
        }
    }

    /// Whether nobody has a policy for any of these packets.
    pub(super) fn are_free(&self, steps: &[Step]) -> Result<(), IpsecError> {
        let standing = self.xfrm.policies();
        let standing = standing.map_err(kernel("policies are listed"))?;
        for step in steps {
            let Step::Add(Object::Policy(own)) = step else {
                continue;
            };
            let own = policy_of(own);
            let met = standing
                .iter()
                .find(|other| meet(other, &own) && !only_crosses(other, &own));
            if let Some(other) = met {
                return Err(IpsecError::PortsTaken(describe(other)));
            }
        }
        Ok(())
    }

    /// A block of request ids that nobody uses, by numbers that `random` gives.
    pub(super) fn free_reqids(
        &self,
        blocks: u32,
        size: u32,
        mut random: impl FnMut() -> Result<u32, IpsecError>,
    ) -> Result<u32, IpsecError> {
        let states = self.xfrm.states().map_err(kernel("SAs are listed"))?;
        let policies = self
            .xfrm
            .policies()
            .map_err(kernel("policies are listed"))?;
        let of_policy = |policy: &xfrm::Policy| match policy.action {
            xfrm::Action::Protect { reqid, .. } => Some(reqid),
            _ => None,
        };
        let mut used: Vec<u32> = states.iter().map(|state| state.reqid / size).collect();
        used.extend(
            policies
                .iter()
                .filter_map(of_policy)
                .map(|reqid| reqid / size),
        );
        loop {
            let block = 1 + random()? % (blocks - 1);
            if !used.contains(&block) {
                return Ok(block * size);
            }
        }
    }

    /// Carries steps out, in order. What it was at when it failed may stand, and is in
    /// the record.
    pub(super) fn apply(
        &mut self,
        steps: &[Step],
        record: &mut Record,
        key: &dyn Fn(&Association) -> Result<KeyAndSalt, IpsecError>,
    ) -> Result<(), IpsecError> {
        let coming: Vec<Object> = steps
            .iter()
            .filter_map(|step| match step {
                // A socket goes with its process.
                Step::Add(Object::Listener(_)) | Step::Remove(_) => None,
                Step::Add(object) => Some(*object),
                Step::Replace(policy) => Some(Object::Policy(*policy)),
            })
            .collect();
        record.add(&coming)?;
        for step in steps {
            self.carry_out(step, record, key)?;
        }
        Ok(())
    }

    fn carry_out(
        &mut self,
        step: &Step,
        record: &mut Record,
        key: &dyn Fn(&Association) -> Result<KeyAndSalt, IpsecError>,
    ) -> Result<(), IpsecError> {
        self.tell(step);
        match step {
            Step::Add(Object::Policy(policy)) => {
                let added = self.xfrm.add_policy(&policy_of(policy));
                if let Err(xfrm::Error::Taken { .. }) = added {
                    // Somebody was faster: that one is not ours.
                    record.gone(&Object::Policy(*policy))?;
                    return Err(IpsecError::PortsTaken(policy.to_string()));
                }
                added.map_err(kernel(policy))?;
                self.stands(policy)
            }
            Step::Add(Object::Association(one)) => {
                let state = state_of(one, key(one)?);
                if let Err(source) = self.xfrm.add_state(&state) {
                    if is_no(&source) {
                        record.gone(&Object::Association(*one))?;
                    }
                    return Err(kernel(one)(source));
                }
                self.xfrm.verify(&state).map_err(kernel(one))
            }
            Step::Add(Object::Listener(one)) => {
                self.listener = Some(listen(one)?);
                Ok(())
            }
            Step::Replace(policy) => {
                let replaced = self.xfrm.replace_policy(&policy_of(policy));
                replaced.map_err(kernel(policy))?;
                self.stands(policy)?;
                forget_replaced(policy, record)
            }
            Step::Remove(object) => {
                self.remove(object)?;
                record.gone(object)
            }
        }
    }

    /// Whether the policies for ports stand that the record has. In the place of one that
    /// somebody has removed comes what blocks, or lets in only what an SA has opened.
    ///
    /// # Errors
    /// One is not there; it is named.
    pub(super) fn still_stand(&self, record: &Record) -> Result<(), IpsecError> {
        let mut missing = None;
        for object in record.objects() {
            let Object::Policy(policy) = object else {
                continue;
            };
            // A connection's own one is ahead of these, and without it they serve.
            let any = PortBlock::ANY;
            let selector = &policy.selector;
            if selector.source_ports != any && selector.destination_ports != any {
                continue;
            }
            let expected = policy_of(policy);
            let standing = self.xfrm.policy(&expected.selector, expected.direction);
            let standing = standing.map_err(kernel(policy))?;
            if standing.as_ref() == Some(&expected) {
                continue;
            }
            if standing.is_none() {
                let safe = match policy.direction {
                    Direction::Out => Policy {
                        action: Action::Block,
                        ..*policy
                    },
                    Direction::In => *policy,
                };
                let added = self.xfrm.add_policy(&policy_of(&safe));
                added.map_err(kernel(policy))?;
            }
            missing.get_or_insert(*policy);
        }
        match missing {
            None => Ok(()),
            Some(policy) => Err(IpsecError::Removed(policy.to_string())),
        }
    }

    /// Takes back everything that the record has, save the policies that block: these
    /// are left as steps for [`Tables::finish`], once it is quiet. A record that cannot be
    /// written any more, on a full disk, does not stop that: it names too much then, and
    /// what is gone already is not looked for in vain.
    pub(super) fn take_back(&mut self, record: &mut Record) -> Result<Undo, IpsecError> {
        let mut undo = undo(record.objects());
        let recorded = record.objects().to_vec();
        for step in std::mem::take(&mut undo.now) {
            self.tell(&step);
            match step {
                Step::Replace(policy) => {
                    let (own, way) = (policy_of(&policy), way_of(policy.direction));
                    let standing = self.xfrm.policy(&own.selector, way);
                    let standing = standing.map_err(kernel(&policy))?;
                    let is_ours = standing.is_some_and(|standing| {
                        let same = |object: &Object| {
                            matches!(object, Object::Policy(one) if policy_of(one) == standing)
                        };
                        // It may have been put there by one that died in the midst of this.
                        standing == own || recorded.iter().any(same)
                    });
                    if is_ours {
                        self.xfrm.replace_policy(&own).map_err(kernel(&policy))?;
                        self.stands(&policy)?;
                    }
                    // The record has it as one that protects, until it goes.
                }
                Step::Remove(object) => {
                    self.remove(&object)?;
                    let _ = record.gone(&object);
                }
                Step::Add(_) => {}
            }
        }
        self.listener = None;
        Ok(undo)
    }

    /// Removes what has blocked the ports since [`Tables::take_back`]; false while
    /// connections of theirs are left, which would go on in the clear. Where nothing was
    /// ever protected, those that are there were in the clear before, and go on.
    pub(super) fn finish(&mut self, undo: &Undo, record: &mut Record) -> Result<bool, IpsecError> {
        if record.has_protected() {
            for look in 0..LOOKS {
                if look > 0 {
                    thread::sleep(BETWEEN_LOOKS);
                }
                if still_used(&undo.when_quiet)? > 0 {
                    return Ok(false);
                }
            }
        }
        for step in &undo.when_quiet {
            self.tell(step);
            if let Step::Remove(object) = step {
                self.remove(object)?;
                let _ = record.gone(object);
            }
        }
        Ok(true)
    }

    /// What an SA has carried; none where it is gone.
    pub(super) fn counters(&self, one: &Association) -> Result<Option<Counters>, IpsecError> {
        let state = self.xfrm.state(&id_of(one)).map_err(kernel(one))?;
        let own = state.filter(|state| is_the_same(state, one));
        Ok(own.map(|state| state.counters))
    }

    fn tell(&self, step: &Step) {
        if let Some(hook) = &self.hook {
            hook(step);
        }
    }

    /// Whether the kernel has this policy and no other in its place.
    fn stands(&self, policy: &Policy) -> Result<(), IpsecError> {
        let expected = policy_of(policy);
        let way = way_of(policy.direction);
        let standing = self.xfrm.policy(&expected.selector, way);
        if standing.map_err(kernel(policy))? == Some(expected) {
            return Ok(());
        }
        Err(kernel(policy)(xfrm::Error::Differs { what: "the policy" }))
    }

    /// Removes this and nothing else.
    fn remove(&mut self, object: &Object) -> Result<(), IpsecError> {
        match object {
            Object::Policy(policy) => {
                let removed = self.xfrm.remove_policy(&policy_of(policy));
                removed.map(|_| ()).map_err(kernel(policy))
            }
            Object::Association(one) => {
                let standing = self.xfrm.state(&id_of(one)).map_err(kernel(one))?;
                if standing.is_some_and(|standing| is_the_same(&standing, one)) {
                    let removed = self.xfrm.remove_state(&id_of(one));
                    removed.map_err(kernel(one))?;
                }
                Ok(())
            }
            Object::Listener(_) => {
                self.listener = None;
                Ok(())
            }
        }
    }
}

/// Connections of this host whose packets these policies are for.
pub(super) fn still_used(when_quiet: &[Step]) -> Result<usize, IpsecError> {
    let selectors: Vec<Selector> = when_quiet
        .iter()
        .filter_map(|step| match step {
            Step::Remove(Object::Policy(policy)) if policy.direction == Direction::Out => {
                Some(policy.selector)
            }
            _ => None,
        })
        .collect();
    if selectors.is_empty() {
        return Ok(0);
    }
    let covered = |selector: &Selector, from: std::net::SocketAddr, to: std::net::SocketAddr| {
        selector.source == from.ip()
            && selector.destination == to.ip()
            && selector.source_ports.contains(from.port())
            && selector.destination_ports.contains(to.port())
    };
    let connections = connections()?;
    let used = connections.iter().filter(|one| {
        selectors
            .iter()
            .any(|selector| covered(selector, one.local, one.peer))
    });
    Ok(used.count())
}

/// The record has the policy, and no other of its place.
fn forget_replaced(policy: &Policy, record: &mut Record) -> Result<(), IpsecError> {
    let replaced = |object: &&Object| matches!(object, Object::Policy(other) if other.is_in_place_of(policy) && other != policy);
    let before: Vec<Object> = record.objects().iter().filter(replaced).copied().collect();
    before.iter().try_for_each(|object| record.gone(object))
}

/// Whether the kernel has surely not done what it was told. Where its answer was lost it
/// may have.
fn is_no(error: &xfrm::Error) -> bool {
    use xfrm::Error::{NoEsp, NoSuchCpu, NotPermitted, Refused, Taken};
    matches!(
        error,
        NotPermitted { .. } | NoEsp(_) | Taken { .. } | NoSuchCpu { .. } | Refused { .. }
    )
}

fn kernel(doing: impl ToString) -> impl FnOnce(xfrm::Error) -> IpsecError {
    move |source| IpsecError::Kernel {
        doing: doing.to_string(),
        source,
    }
}

fn listen(listener: &Listener) -> Result<Arc<UdpSocket>, IpsecError> {
    let socket = udp::listen((listener.address, listener.port).into());
    socket.map_err(|source| IpsecError::Resources {
        what: "the UDP port for ESP (--udp names another, if another process has it)",
        source,
    })
}

fn way_of(direction: Direction) -> PolicyDirection {
    match direction {
        Direction::In => PolicyDirection::In,
        Direction::Out => PolicyDirection::Out,
    }
}

fn selector_of(selector: &Selector) -> xfrm::Selector {
    let ports = |block: dunlin_proto::ipsec::ports::PortBlock| Ports {
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

fn policy_of(policy: &Policy) -> xfrm::Policy {
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

fn id_of(one: &Association) -> StateId {
    StateId {
        destination: one.destination,
        spi: one.spi,
    }
}

fn state_of(one: &Association, key: KeyAndSalt) -> State {
    let (direction, replay_window) = match one.direction {
        Direction::In => (xfrm::Direction::In, LONGEST_REPLAY_WINDOW),
        Direction::Out => (xfrm::Direction::Out, 0),
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
fn is_the_same(standing: &Installed, one: &Association) -> bool {
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
fn meet(other: &xfrm::Policy, own: &xfrm::Policy) -> bool {
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
}

/// Whether `other` is a policy of another session between the same two hosts, and all that is in
/// both are packets *from* the ports of one *to* those of the other. Either session seals these or
/// blocks them, so that two sessions with different ports stand side by side.
fn only_crosses(other: &xfrm::Policy, own: &xfrm::Policy) -> bool {
    let (theirs, ours) = (&other.selector, &own.selector);
    let of_sessions = FIRST_PRIORITY..=FIRST_PRIORITY + 2 * REQID_BLOCKS + 1;
    let is_any = |ports: Ports| ports.mask == 0;
    other.action != xfrm::Action::Foreign
        && of_sessions.contains(&other.priority)
        && theirs.source == ours.source
        && theirs.destination == ours.destination
        && is_any(theirs.source_ports) != is_any(theirs.destination_ports)
        && is_any(theirs.source_ports) == is_any(ours.destination_ports)
        && is_any(theirs.destination_ports) == is_any(ours.source_ports)
}

fn describe(policy: &xfrm::Policy) -> String {
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

    use super::*;

    fn own() -> xfrm::Policy {
        let line = "policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xfffc priority 103 block";
        match line.parse().unwrap() {
            Object::Policy(policy) => policy_of(&policy),
            _ => unreachable!("it is a policy's"),
        }
    }

    #[test]
    fn sessions_with_different_ports_stand_side_by_side() {
        let policy = |source: u16, destination: u16, action| xfrm::Policy {
            selector: xfrm::Selector {
                source_ports: Ports {
                    port: source,
                    mask: if source > 0 { 0xffc0 } else { 0 },
                },
                destination_ports: Ports {
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
        // The same way, and on the same ports: those who want them are in each other's way.
        assert!(!only_crosses(&policy(24_576, 0, block), &from));
        // Others' policies let packets pass.
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
}
