//! A model of the kernel's lookups: the fate of a packet, given the installed policies and SAs.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Sender;
use super::object::{Action, Association, Direction, Object, Policy, Selector};
use super::plan::Step;

/// A TCP packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) source: (IpAddr, u16),
    pub(crate) destination: (IpAddr, u16),
}

/// The fate of an outgoing packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Clear,
    Dropped,
    Sealed { spi: u32, sender: Sender },
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) policies: BTreeMap<(Direction, Selector), Policy>,
    /// Newest first, as in a chain of the kernel's hash table.
    pub(crate) associations: Vec<Association>,
}

impl Kernel {
    /// Applies a step as the kernel would; panics if the kernel would return an error.
    pub(crate) fn apply(&mut self, step: &Step) {
        match *step {
            Step::Add(Object::Policy(policy)) => {
                let key = (policy.direction, policy.selector);
                let before = self.policies.insert(key, policy);
                assert_eq!(before, None, "EEXIST: {policy}");
            }
            Step::Replace(policy) => {
                let key = (policy.direction, policy.selector);
                let before = self.policies.insert(key, policy);
                assert!(before.is_some(), "nothing to replace: {policy}");
            }
            Step::Remove(Object::Policy(policy)) => {
                let removed = self.policies.remove(&(policy.direction, policy.selector));
                assert_eq!(removed, Some(policy));
            }
            Step::Add(Object::Association(one)) => {
                let same = |other: &&Association| {
                    (other.destination, other.spi) == (one.destination, one.spi)
                };
                assert_eq!(self.associations.iter().find(same), None, "EEXIST: {one}");
                self.associations.insert(0, one);
            }
            Step::Remove(Object::Association(one)) => {
                let at = self.associations.iter().position(|other| *other == one);
                self.associations.remove(at.expect("the SA was installed"));
            }
            Step::Add(Object::Listener(_)) | Step::Remove(Object::Listener(_)) => {}
        }
    }

    fn policy(&self, direction: Direction, packet: Packet) -> Option<&Policy> {
        let matches = |policy: &&Policy| {
            let selector = &policy.selector;
            policy.direction == direction
                && selector.source == packet.source.0
                && selector.destination == packet.destination.0
                && selector.source_ports.contains(packet.source.1)
                && selector.destination_ports.contains(packet.destination.1)
        };
        let found = self.policies.values().filter(matches);
        found.min_by_key(|policy| policy.priority)
    }

    /// Returns the fate of a packet that leaves from a CPU.
    pub(crate) fn send(&self, packet: Packet, cpu: u32) -> Sent {
        let reqid = match self.policy(Direction::Out, packet).map(|one| one.action) {
            None => return Sent::Clear,
            Some(Action::Block) => return Sent::Dropped,
            Some(Action::Protect { reqid }) => reqid,
        };
        let fits = |one: &&Association| {
            one.direction == Direction::Out
                && one.reqid == reqid
                && one.destination == packet.destination.0
        };
        let fitting = || self.associations.iter().filter(fits);
        let own = fitting().find(|one| one.slot.sender == Sender::Cpu(cpu));
        let any = fitting().find(|one| !matches!(one.slot.sender, Sender::Cpu(_)));
        own.or(any).map_or(Sent::Dropped, |one| Sent::Sealed {
            spi: one.spi,
            sender: one.slot.sender,
        })
    }

    /// Whether a packet is accepted if it arrives in the clear (`None`) or with an SPI.
    pub(crate) fn receives(&self, packet: Packet, spi: Option<u32>) -> bool {
        let opened = |spi| {
            let found = self.associations.iter().find(|one| {
                one.direction == Direction::In
                    && one.spi == spi
                    && one.destination == packet.destination.0
            });
            found.map(|one| one.reqid)
        };
        let reqid = spi.map(opened);
        if reqid == Some(None) {
            return false;
        }
        match self.policy(Direction::In, packet).map(|one| one.action) {
            None => true,
            Some(Action::Block) => false,
            Some(Action::Protect { reqid: required }) => reqid.flatten() == Some(required),
        }
    }
}
