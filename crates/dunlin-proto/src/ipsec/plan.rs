//! What one side installs, in which order, and in which order it takes it back.
//!
//! # In
//!
//! 1. [`SessionParameters::begin`]: a policy for every selector and direction. Outgoing packets
//!    of the ports are *blocked*; incoming ones are *protect*: taken only from an SA,
//!    of which there is none yet. From here on nothing of the ports leaves this host
//!    in the clear, and nothing in the clear is taken in. (The listener for ESP in
//!    UDP stands here too.)
//! 2. [`SessionParameters::inbound`]: the SAs of what the peer sends. Only when they stand is the
//!    peer told their SPIs.
//! 3. [`SessionParameters::outbound`]: the SAs of what this side sends, the fallback first, since
//!    the kernel may take a younger fallback for the better one; then the outgoing
//!    policies are *replaced* by ones that protect. A host holds one policy for a
//!    direction and selector, and replaces it in one step: a packet meets either.
//!
//! Later SAs of an epoch are found by the policies that are there; one for a single
//! connection brings its own policy, ahead of those. New keys are [`SessionParameters::outbound`]
//! once more, under a request id of their own, so that one replacement moves everything
//! to them and neither set is ever mixed with the other; [`SessionParameters::retire`] takes the
//! old SAs back.
//!
//! # Back
//!
//! [`undo`] goes the other way: outgoing policies block again, then the connections'
//! own policies go, the outbound SAs, the inbound ones. What is left blocks the ports.
//! These policies go last, and only while *no connection of the ports is left on this
//! host*: one that still has unacknowledged bytes would send them again, in the clear.
//! Whoever ends such a connection (its owner, or TCP's own time-outs) lets them go.
//!
//! Either side may be killed between any two of these steps. What it leaves blocks or
//! protects; the next process takes it back by the same order.
//!
//! # Request ids
//!
//! A session has a block of [`REQIDS`] of them. All its inbound SAs bear the first, so
//! that an incoming policy need not change with epochs. Outbound SAs bear one for each
//! epoch, or for each connection and epoch.

pub(super) mod adopt;

use std::net::IpAddr;

pub use self::adopt::{Adoption, adopt};
use super::object::{
    Action, Association, Direction, Encapsulation, Listener, Object, Policy, Selector,
};
use super::ports::{PortBlock, PortRange};
use super::{Grant, Mode, Sender};
use crate::mistake::{Mistake, planted};

/// The least priority of policies. Each session has two of its own behind it, so that
/// none takes another's policy for its own: at most 65,634, where strongSwan's begin
/// in the hundreds of thousands and `ip xfrm` has 0 unless told otherwise.
pub const FIRST_PRIORITY: u32 = 100;
/// Request ids of one session, beginning at a multiple of this.
pub const REQIDS: u32 = 1 << 16;
/// Blocks of request ids that there are, counted from 1; the first numbers are for
/// people.
pub const REQID_BLOCKS: u32 = 1 << 15;
/// Source ports that SAs in UDP are spread over.
pub const UDP_SOURCE_PORTS: u16 = 1024;

/// The UDP ports of ESP in UDP, where that is agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Udp {
    /// Where a side opens what the other seals.
    pub listener: u16,
    /// The first of [`UDP_SOURCE_PORTS`] that its own SAs seal from: each SA has
    /// its own, by which the other side's network card tells them apart.
    pub first_source: u16,
}

/// Everything that the objects of a session follow from, beside SPIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionParameters {
    /// This host.
    pub local: IpAddr,
    /// The other one.
    pub peer: IpAddr,
    /// The ports: a connection is the session's if either of its ports is one of them.
    pub ports: PortRange,
    /// How traffic is spread.
    pub mode: Mode,
    /// The first of the session's request ids.
    pub first_reqid: u32,
    /// This side's and the peer's UDP ports.
    pub udp: Option<(Udp, Udp)>,
}

/// One change of the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Install something that must not be there.
    Add(Object),
    /// Put a policy in the place of ours with its direction and selector.
    Replace(Policy),
    /// Remove this and nothing else.
    Remove(Object),
}

/// How everything is taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undo {
    /// At once, in this order.
    pub now: Vec<Step>,
    /// Policies to remove when no connection of the ports is left on this host.
    pub when_quiet: Vec<Policy>,
}

impl Step {
    /// What it adds.
    #[must_use]
    pub fn added(&self) -> Option<&Object> {
        match self {
            Self::Add(object) => Some(object),
            _ => None,
        }
    }
}

impl SessionParameters {
    /// What stands before everything else.
    #[must_use]
    pub fn begin(&self) -> Vec<Step> {
        let priority = self.priority();
        let policy = |direction, action| {
            move |selector| {
                Step::Add(Object::Policy(Policy {
                    direction,
                    selector,
                    action,
                    priority,
                }))
            }
        };
        let required = Action::Protect {
            reqid: self.first_reqid,
        };
        let out = self.selectors(self.local, self.peer);
        let out = out.into_iter().map(policy(Direction::Out, Action::Block));
        let inward = self.selectors(self.peer, self.local);
        let inward = inward.into_iter().map(policy(Direction::In, required));
        let listener = self.udp.map(|(own, _)| {
            Step::Add(Object::Listener(Listener {
                address: self.local,
                port: own.listener,
            }))
        });
        out.chain(inward).chain(listener).collect()
    }

    /// The SAs of what the peer sends.
    #[must_use]
    pub fn inbound(&self, epoch: u32, grants: &[Grant]) -> Vec<Step> {
        let add = |grant: &Grant| Step::Add(Object::Association(self.incoming(epoch, grant)));
        grants.iter().map(add).collect()
    }

    /// The SAs of what this side sends, and the policies that lead to them. `first`
    /// says that they are an epoch's first, fallback included: then the policies for
    /// ports are replaced. A connection that had an SA in the epoch before is in
    /// `known`.
    #[must_use]
    pub fn outbound(
        &self,
        epoch: u32,
        grants: &[Grant],
        first: bool,
        known: &[Sender],
    ) -> Vec<Step> {
        let add = |grant: &Grant| Step::Add(Object::Association(self.outgoing(epoch, grant)));
        let fallback = |grant: &&Grant| grant.slot.sender == Sender::Fallback;
        let mut steps: Vec<Step> = grants.iter().filter(fallback).map(add).collect();
        let others = grants.iter().filter(|grant| !fallback(grant));
        steps.extend(others.map(add));
        // A connection's own ones first: none goes over to the fallback in between.
        for grant in grants {
            if let Some(policy) = self.own_policy(epoch, grant) {
                steps.push(if known.contains(&grant.slot.sender) {
                    Step::Replace(policy)
                } else {
                    Step::Add(Object::Policy(policy))
                });
            }
        }
        if first {
            let action = Action::Protect {
                reqid: self.reqid_of_epoch(epoch),
            };
            let selectors = self.selectors(self.local, self.peer);
            steps.extend(selectors.into_iter().map(|selector| {
                Step::Replace(Policy {
                    direction: Direction::Out,
                    selector,
                    action,
                    priority: self.priority(),
                })
            }));
        }
        steps
    }

    /// Takes outbound SAs back that nothing is to be sent by any more. With `over`,
    /// their connections are over too, and so are the policies for these.
    #[must_use]
    pub fn retire(&self, epoch: u32, grants: &[Grant], over: bool) -> Vec<Step> {
        let policies = grants
            .iter()
            .filter_map(|grant| self.own_policy(epoch, grant));
        let policies = policies.map(|policy| Step::Remove(Object::Policy(policy)));
        let outgoing =
            |grant: &Grant| Step::Remove(Object::Association(self.outgoing(epoch, grant)));
        let policies = policies.filter(|_| over);
        policies.chain(grants.iter().rev().map(outgoing)).collect()
    }

    /// Takes inbound SAs back that the peer sends nothing by any more.
    #[must_use]
    pub fn retire_inbound(&self, epoch: u32, grants: &[Grant]) -> Vec<Step> {
        let incoming =
            |grant: &Grant| Step::Remove(Object::Association(self.incoming(epoch, grant)));
        grants.iter().rev().map(incoming).collect()
    }

    /// Whether a connection with these ports, of whichever side, is the session's.
    #[must_use]
    pub fn covers(&self, one: u16, other: u16) -> bool {
        self.ports.contains(one) || self.ports.contains(other)
    }

    /// All selectors of packets from one host to the other.
    fn selectors(&self, source: IpAddr, destination: IpAddr) -> Vec<Selector> {
        let selector = |source_ports, destination_ports| Selector {
            source,
            destination,
            source_ports,
            destination_ports,
        };
        let both = |block| {
            [
                selector(PortBlock::ANY, block),
                selector(block, PortBlock::ANY),
            ]
        };
        self.ports.blocks().into_iter().flat_map(both).collect()
    }

    fn own_policy(&self, epoch: u32, grant: &Grant) -> Option<Policy> {
        let Sender::Connection { from, to } = grant.slot.sender else {
            return None;
        };
        Some(Policy {
            direction: Direction::Out,
            selector: Selector {
                source: self.local,
                destination: self.peer,
                source_ports: PortBlock::only(from),
                destination_ports: PortBlock::only(to),
            },
            action: Action::Protect {
                reqid: self.reqid_of(epoch, grant),
            },
            priority: self.priority() - 1,
        })
    }

    fn outgoing(&self, epoch: u32, grant: &Grant) -> Association {
        let ports = self.udp.map(|(own, peer)| (own, peer.listener));
        Association {
            direction: Direction::Out,
            source: self.local,
            destination: self.peer,
            reqid: self.reqid_of(epoch, grant),
            ..association(epoch, grant, ports)
        }
    }

    fn incoming(&self, epoch: u32, grant: &Grant) -> Association {
        let ports = self.udp.map(|(own, peer)| (peer, own.listener));
        Association {
            direction: Direction::In,
            source: self.peer,
            destination: self.local,
            reqid: self.first_reqid,
            ..association(epoch, grant, ports)
        }
    }

    /// Of the policies for ports; one less is that of policies for a connection, which
    /// is ahead of them.
    fn priority(&self) -> u32 {
        FIRST_PRIORITY + 2 * (self.first_reqid / REQIDS) + 1
    }

    /// Two epochs stand at the same time, and never more.
    fn reqid_of_epoch(&self, epoch: u32) -> u32 {
        if planted(Mistake::RequestIdKept) {
            return self.first_reqid + 1;
        }
        self.first_reqid + 1 + epoch % 2
    }

    /// Connections of one session that have one number differ by more than 65,000
    /// in age; should both live, the younger one's SA carries them both.
    fn reqid_of(&self, epoch: u32, grant: &Grant) -> u32 {
        const FIRST: u32 = 4;
        match grant.slot.sender {
            Sender::Fallback | Sender::Cpu(_) => self.reqid_of_epoch(epoch),
            Sender::Connection { .. } => {
                self.first_reqid + FIRST + grant.slot.index % (REQIDS - FIRST)
            }
        }
    }
}

/// What both ends know of an SA.
fn association(epoch: u32, grant: &Grant, ports: Option<(Udp, u16)>) -> Association {
    // Both are set by the callers, which know them.
    let nowhere = IpAddr::from([0, 0, 0, 0]);
    Association {
        direction: Direction::In,
        source: nowhere,
        destination: nowhere,
        spi: grant.spi,
        reqid: 0,
        epoch,
        slot: grant.slot,
        encapsulation: ports.map(|(sealing, destination_port)| Encapsulation {
            // Below 65536: `first_source` leaves room for all of them.
            source_port: sealing.first_source
                + (grant.slot.index % u32::from(UDP_SOURCE_PORTS)) as u16,
            destination_port,
        }),
    }
}

/// How to take back what a process has recorded as installed, itself or one that has
/// died: in any order, and with both of two policies of which one was to replace the
/// other.
#[must_use]
pub fn undo(installed: &[Object]) -> Undo {
    let policies = || installed.iter().filter_map(Object::policy).copied();
    let associations = |direction| {
        let of = move |object: &&Object| {
            let association = object.association();
            association.is_some_and(|one| one.direction == direction)
        };
        installed.iter().rev().filter(of).copied()
    };
    let mut undo = Undo::default();
    let for_ports = |policy: &Policy| !policy.is_for_connection();
    for policy in policies().filter(for_ports) {
        let blocking = Policy {
            action: Action::Block,
            ..policy
        };
        let step = Step::Replace(blocking);
        let blocks = policy.lets_out() && !planted(Mistake::TakenBackUnblocked);
        if blocks && !undo.now.contains(&step) {
            undo.now.push(step);
        }
    }
    let remove = |object| Step::Remove(object);
    let own = policies().filter(|policy| !for_ports(policy));
    undo.now.extend(own.map(Object::Policy).map(remove));
    undo.now.extend(associations(Direction::Out).map(remove));
    undo.now.extend(associations(Direction::In).map(remove));
    let listeners = installed
        .iter()
        .filter(|one| matches!(one, Object::Listener(_)));
    undo.now.extend(listeners.copied().map(remove));
    for direction in [Direction::In, Direction::Out] {
        for policy in policies().filter(for_ports) {
            // The outgoing ones block by now.
            let action = match direction {
                Direction::Out => Action::Block,
                Direction::In => policy.action,
            };
            let left = Policy { action, ..policy };
            if policy.direction == direction && !undo.when_quiet.contains(&left) {
                undo.when_quiet.push(left);
            }
        }
    }
    undo
}

#[cfg(test)]
pub(super) mod tests;
