//! What one side installs, and the order of the installations and removals.
//!
//! # Installing
//!
//! 1. [`SessionParameters::begin`]: a policy for every selector and direction. Outgoing packets of
//!    the ports are *blocked*. Incoming packets are *protected*, that is, accepted only from an SA,
//!    and there is no SA yet. From here on no packet of the ports leaves this host in the clear,
//!    and none is accepted in the clear. (The listener for ESP in UDP is opened here too.)
//! 2. [`SessionParameters::inbound`]: the inbound SAs. Their SPIs are sent to the peer only after
//!    they are installed.
//! 3. [`SessionParameters::outbound`]: the outbound SAs. The fallback is installed first, because
//!    the kernel might prefer a fallback that is newer than the other SAs. Then the outgoing
//!    policies are *replaced* by policies that protect. The kernel has one policy for a direction
//!    and selector and replaces it atomically: a packet matches either the old or the new one.
//!
//! A later SA of the same epoch needs no new policy, because the existing policies find it by its
//! request id. Only an SA for a single connection gets its own policy, which takes precedence over
//! the others. For new keys, [`SessionParameters::outbound`] uses another request id. One
//! replacement of the policies then moves all traffic to the new SAs, and the two sets of SAs never
//! mix. [`SessionParameters::retire`] removes the old SAs.
//!
//! # Removing
//!
//! [`undo`] reverses the order: outgoing policies block again, then the connections' own policies
//! are removed, then the outbound SAs, then the inbound SAs, then the listener. The remaining
//! policies block the ports. They are removed last, and only when *no connection of the ports is
//! left on this host*: a connection with unacknowledged bytes would retransmit them in the clear.
//! If there are such connections, the policies stay until each connection is closed by its owner or
//! timed out by TCP.
//!
//! Either side may be killed between any two of these steps. The objects that remain still block or
//! protect the ports. The next process removes them in the same order.
//!
//! # Request ids
//!
//! A session has a block of [`REQIDS`] request ids. All its inbound SAs use the first id, so that
//! incoming policies stay the same in all epochs. Outbound SAs use one id for each epoch, or for
//! each connection and epoch.

pub(super) mod adopt;

use std::net::IpAddr;

pub use self::adopt::{Adoption, adopt};
use super::object::{
    Action, Association, Direction, Encapsulation, Listener, Object, Policy, Selector,
};
use super::ports::{PortBlock, PortRange};
use super::{Grant, Mode, Sender};
use crate::mistake::{Mistake, planted};

/// The lower bound for priorities of policies. Each session has two priorities of its own, with
/// values between this bound and 65,635. So no session mistakes another session's policy for its
/// own.
/// strongSwan's priorities start in the hundreds of thousands, and the default of `ip xfrm` is 0.
pub const FIRST_PRIORITY: u32 = 100;
/// The number of request ids of a session. The first id is a multiple of this number.
pub const REQIDS: u32 = 1 << 16;
/// The number of blocks of request ids. Sessions do not use block 0, which is left to
/// administrators.
pub const REQID_BLOCKS: u32 = 1 << 15;
/// The number of source ports over which SAs in UDP are spread.
pub const UDP_SOURCE_PORTS: u16 = 1024;

/// The ports of one side for ESP in UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Udp {
    /// The port on which the side receives what the other side seals.
    pub listener: u16,
    /// The first of [`UDP_SOURCE_PORTS`] source ports of the side's own SAs. Each SA has its own
    /// source port, so that the other side's network card can distinguish the SAs.
    pub first_source: u16,
}

/// The parameters that determine the objects of a session, except for the SPIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionParameters {
    /// The address of this host.
    pub local: IpAddr,
    /// The address of the other host.
    pub peer: IpAddr,
    /// The session's ports. A connection belongs to the session if one or both of its ports are
    /// among them.
    pub ports: PortRange,
    /// How traffic is spread over SAs.
    pub mode: Mode,
    /// The first of the session's request ids.
    pub first_reqid: u32,
    /// The UDP ports of this side and of the peer.
    pub udp: Option<(Udp, Udp)>,
}

/// One change of the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Installs an object that must not exist yet.
    Add(Object),
    /// Installs this policy in place of the one that has the same direction and selector. This
    /// session or an earlier one installed that one.
    Replace(Policy),
    /// Removes this object and nothing else.
    Remove(Object),
}

/// The removal of all objects of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undo {
    /// Steps to apply immediately, in this order.
    pub now: Vec<Step>,
    /// Policies to remove when no connection on the ports is left on this host.
    pub when_quiet: Vec<Policy>,
}

impl Step {
    /// Returns the object that the step adds.
    #[must_use]
    pub fn added(&self) -> Option<&Object> {
        match self {
            Self::Add(object) => Some(object),
            _ => None,
        }
    }
}

impl SessionParameters {
    /// Returns the steps that install the initial policies.
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

    /// Returns the steps that install inbound SAs.
    #[must_use]
    pub fn inbound(&self, epoch: u32, grants: &[Grant]) -> Vec<Step> {
        let associations = self.associations(Direction::In, epoch, grants);
        associations.map(Step::Add).collect()
    }

    /// Returns the steps that install outbound SAs and the policies that use them. `first` means
    /// that the SAs are the first of an epoch and include the fallback. In this case the steps
    /// replace the policies for the session's ports. `known` lists the senders that had an SA in
    /// the previous epoch. If such a sender is a connection, the steps replace its policy instead
    /// of adding one.
    #[must_use]
    pub fn outbound(
        &self,
        epoch: u32,
        grants: &[Grant],
        first: bool,
        known: &[Sender],
    ) -> Vec<Step> {
        let mut grants = grants.to_vec();
        grants.sort_by_key(|grant| grant.slot.sender != Sender::Fallback);
        let associations = self.associations(Direction::Out, epoch, &grants);
        let mut steps: Vec<Step> = associations.map(Step::Add).collect();
        // The policies of connections come first. If the policies of the ports came first, a
        // connection without a policy of its own would use the fallback until it gets one.
        for grant in &grants {
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

    /// Returns the steps that remove unused outbound SAs. `over` means that the connections of
    /// these SAs have ended. In this case the steps also remove the policies of these connections.
    #[must_use]
    pub fn retire(&self, epoch: u32, grants: &[Grant], over: bool) -> Vec<Step> {
        let policies = grants
            .iter()
            .filter_map(|grant| self.own_policy(epoch, grant));
        let policies = policies.map(|policy| Step::Remove(Object::Policy(policy)));
        let policies = policies.filter(|_| over);
        let associations = self.associations(Direction::Out, epoch, grants).rev();
        policies.chain(associations.map(Step::Remove)).collect()
    }

    /// Returns the steps that remove inbound SAs that the peer no longer uses.
    #[must_use]
    pub fn retire_inbound(&self, epoch: u32, grants: &[Grant]) -> Vec<Step> {
        let associations = self.associations(Direction::In, epoch, grants);
        associations.rev().map(Step::Remove).collect()
    }

    /// Whether a connection between these two ports, in either order, belongs to the session.
    #[must_use]
    pub fn covers(&self, one: u16, other: u16) -> bool {
        self.ports.contains(one) || self.ports.contains(other)
    }

    /// Returns all selectors of packets from one host to the other.
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

    fn association(&self, direction: Direction, epoch: u32, grant: &Grant) -> Association {
        let (source, destination, reqid) = match direction {
            Direction::Out => (self.local, self.peer, self.reqid_of(epoch, grant)),
            Direction::In => (self.peer, self.local, self.first_reqid),
        };
        let encapsulation = self.udp.map(|(own, peer)| {
            let (sealing, opening) = match direction {
                Direction::Out => (own, peer),
                Direction::In => (peer, own),
            };
            Encapsulation {
                // The sum is below 65536, because `first_source` leaves room for all source ports.
                source_port: sealing.first_source
                    + (grant.slot.index % u32::from(UDP_SOURCE_PORTS)) as u16,
                destination_port: opening.listener,
            }
        });
        Association {
            direction,
            source,
            destination,
            spi: grant.spi,
            reqid,
            epoch,
            slot: grant.slot,
            encapsulation,
        }
    }

    /// The SAs of one direction, as objects.
    fn associations(
        &self,
        direction: Direction,
        epoch: u32,
        grants: &[Grant],
    ) -> impl DoubleEndedIterator<Item = Object> {
        let object = move |grant| Object::Association(self.association(direction, epoch, grant));
        grants.iter().map(object)
    }

    /// The priority of policies for ports. Policies for a connection have a number that is lower by
    /// one, so they take precedence.
    fn priority(&self) -> u32 {
        FIRST_PRIORITY + 2 * (self.first_reqid / REQIDS) + 1
    }

    /// Two request ids alternate, because at most two epochs exist at the same time.
    fn reqid_of_epoch(&self, epoch: u32) -> u32 {
        if planted(Mistake::RequestIdKept) {
            return self.first_reqid + 1;
        }
        self.first_reqid + 1 + epoch % 2
    }

    /// Two connections of a session have the same request id only if more than 65,000 other SAs
    /// were requested between them. If both connections still exist, the newer SA carries the
    /// traffic of both.
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

/// Returns the steps that remove the objects that this process or a dead one has recorded as
/// installed. The objects may be in any order. If one policy was about to replace another, the
/// objects include both policies.
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
            // The steps in `undo.now` make the outgoing policies block again.
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
