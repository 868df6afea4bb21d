//! Steps of a plan, carried out on the kernel's tables: recorded before, read back
//! after, and taken back without touching what is not ours.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::xfrm::{self, Counters, Installed, KeyAndSalt, StateId, Xfrm};
use dunlin_proto::ipsec::object::{
    Action, Association, Direction, Listener, Object, Policy, Selector,
};
use dunlin_proto::ipsec::plan::{Step, Undo, undo};

use super::Hook;
use super::error::IpsecError;
use super::record::Record;
use super::sockets::connections;
use super::udp;

mod values;

use values::{
    connection_policy, describe, id_of, is_the_same, meet, only_crosses, policy_of, state_of,
};

/// How often in a row no connection may be found before the ports are free: procfs lists
/// them in pieces, and one may be in none of them while it changes its state.
const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// An SA, and what it has carried.
#[derive(Clone, Debug)]
pub struct AssociationStatus {
    /// The SA.
    pub association: Association,
    /// What it has carried; none if another program has removed it.
    pub counters: Option<Counters>,
}

/// The kernel's tables in the namespace of the thread that opened them.
pub(super) struct Tables {
    pub(super) xfrm: Arc<Xfrm>,
    hook: Option<Hook>,
    listener: Option<Arc<UdpSocket>>,
    /// Whether the kernel keeps them, once that was looked for.
    keeps_directions: Option<bool>,
}

impl Tables {
    pub(super) fn open(hook: Option<Hook>) -> Result<Self, IpsecError> {
        let xfrm = Xfrm::open().map_err(kernel("the kernel's IPsec is opened"))?;
        Ok(Self {
            xfrm: Arc::new(xfrm),
            hook,
            listener: None,
            keeps_directions: None,
        })
    }

    /// Whether the kernel has ESP at all, asked before a peer depends on it.
    pub(super) fn have_esp(&self) -> Result<(), IpsecError> {
        let has = self.xfrm.esp();
        has.map_err(kernel("the kernel's ESP is looked for"))
    }

    /// Returns an error if an SA cannot belong to one CPU.
    pub(super) fn need_per_cpu_sas(&self) -> Result<(), IpsecError> {
        let has = self.xfrm.has_per_cpu_sas();
        match has.map_err(kernel("SAs for CPUs are looked for"))? {
            true => Ok(()),
            false => Err(IpsecError::NoPerCpu),
        }
    }

    /// The same tables, to look at.
    pub(super) fn of(xfrm: Arc<Xfrm>) -> Self {
        Self {
            xfrm,
            hook: None,
            listener: None,
            keeps_directions: None,
        }
    }

    /// Whether nobody has a policy for any of these packets, but those that were inherited.
    pub(super) fn are_free(&self, steps: &[Step], inherited: &[Policy]) -> Result<(), IpsecError> {
        let standing = self.xfrm.policies();
        let mut standing = standing.map_err(kernel("policies are listed"))?;
        let inherited: Vec<xfrm::Policy> = inherited.iter().map(policy_of).collect();
        standing.retain(|policy| !inherited.contains(policy));
        for own in steps.iter().filter_map(|step| step.added()?.policy()) {
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

    /// Whether no policy for certain ports covers the packets of a connection, as another
    /// session's would that has one of its ports.
    pub(super) fn leave_alone(
        &self,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<(), IpsecError> {
        let standing = self.xfrm.policies();
        let standing = standing.map_err(kernel("policies are listed"))?;
        let connection = connection_policy(local, peer);
        let for_ports = |policy: &&xfrm::Policy| {
            let selector = &policy.selector;
            selector.source_ports.mask > 0 || selector.destination_ports.mask > 0
        };
        let mut for_ports = standing.iter().filter(for_ports);
        let met = for_ports.find(|policy| meet(policy, &connection));
        met.map_or(Ok(()), |policy| {
            Err(IpsecError::ControlCovered {
                port: local.port(),
                by: describe(policy),
            })
        })
    }

    /// Those of the policies that the kernel has just as they are.
    pub(super) fn standing(&self, policies: &[Policy]) -> Result<Vec<Policy>, IpsecError> {
        let all = self.xfrm.policies();
        let all = all.map_err(kernel("policies are listed"))?;
        let stands = |policy: &&Policy| all.contains(&policy_of(policy));
        Ok(policies.iter().filter(stands).copied().collect())
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
                let state = state_of(one, key(one)?, self.keeps_directions()?);
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

    /// Whether the policies for ports and the SAs stand that the record has. In the place of a
    /// policy that somebody has removed comes what blocks, or lets in only what an SA has opened.
    ///
    /// # Errors
    /// One is not there; it is named.
    pub(super) fn still_stand(&self, record: &Record) -> Result<(), IpsecError> {
        let mut missing = None;
        // A connection's own one is ahead of these, and without it they serve.
        for policy in record.policies().filter(|one| !one.is_for_connection()) {
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
        if let Some(policy) = missing {
            return Err(IpsecError::Removed(policy.to_string()));
        }
        // While others make many the list cannot be read; there is another look in a second.
        let Ok(states) = self.xfrm.states() else {
            return Ok(());
        };
        let states: BTreeMap<StateId, Installed> =
            states.into_iter().map(|one| (one.id, one)).collect();
        let mut associations = record.objects().iter().filter_map(Object::association);
        let lost = associations.find(|one| {
            let standing = states.get(&id_of(one));
            !standing.is_some_and(|standing| is_the_same(standing, one))
        });
        lost.map_or(Ok(()), |one| Err(IpsecError::RemovedSa(one.to_string())))
    }

    /// Takes back everything that the record has, save the policies that block: these
    /// are left as steps for [`Tables::finish`], once it is quiet. A record that cannot be
    /// written any more, on a full disk, does not stop that: it names too much then, and
    /// what is gone already is not looked for in vain.
    pub(super) fn take_back(&mut self, record: &mut Record) -> Result<Undo, IpsecError> {
        let mut undo = undo(record.objects());
        let recorded: Vec<Policy> = record.policies().copied().collect();
        for step in std::mem::take(&mut undo.now) {
            self.tell(&step);
            match step {
                Step::Replace(policy) => {
                    let own = policy_of(&policy);
                    let standing = self.xfrm.policy(&own.selector, own.direction);
                    let standing = standing.map_err(kernel(&policy))?;
                    let is_ours = standing.is_some_and(|standing| {
                        let same = |one: &Policy| policy_of(one) == standing;
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
    pub(super) fn finish(
        &mut self,
        when_quiet: &[Policy],
        record: &mut Record,
    ) -> Result<bool, IpsecError> {
        if record.has_protected() {
            for look in 0..LOOKS {
                if look > 0 {
                    thread::sleep(BETWEEN_LOOKS);
                }
                if still_used(when_quiet)? > 0 {
                    return Ok(false);
                }
            }
        }
        self.remove_all(when_quiet, record)?;
        Ok(true)
    }

    /// Removes these.
    pub(super) fn remove_all(
        &mut self,
        policies: &[Policy],
        record: &mut Record,
    ) -> Result<(), IpsecError> {
        for object in policies.iter().copied().map(Object::Policy) {
            self.tell(&Step::Remove(object));
            self.remove(&object)?;
            let _ = record.gone(&object);
        }
        Ok(())
    }

    fn keeps_directions(&mut self) -> Result<bool, IpsecError> {
        if let Some(known) = self.keeps_directions {
            return Ok(known);
        }
        let keeps = self.xfrm.keeps_directions();
        let keeps = keeps.map_err(kernel("directions of SAs are looked for"))?;
        self.keeps_directions = Some(keeps);
        Ok(keeps)
    }

    /// What an SA has carried; none where it is gone.
    fn counters(&self, one: &Association) -> Result<Option<Counters>, IpsecError> {
        let state = self.xfrm.state(&id_of(one)).map_err(kernel(one))?;
        let own = state.filter(|state| is_the_same(state, one));
        Ok(own.map(|state| state.counters))
    }

    /// These SAs, with what they have carried.
    pub(super) fn statuses<'a>(
        &self,
        associations: impl Iterator<Item = &'a Association>,
    ) -> Result<Vec<AssociationStatus>, IpsecError> {
        let statuses = associations.map(|one| {
            Ok(AssociationStatus {
                association: *one,
                counters: self.counters(one)?,
            })
        });
        statuses.collect()
    }

    fn tell(&self, step: &Step) {
        if let Some(hook) = &self.hook {
            hook(step);
        }
    }

    /// Whether the kernel has this policy and no other in its place.
    fn stands(&self, policy: &Policy) -> Result<(), IpsecError> {
        let expected = policy_of(policy);
        let standing = self.xfrm.policy(&expected.selector, expected.direction);
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
pub(super) fn still_used(policies: &[Policy]) -> Result<usize, IpsecError> {
    let leaving = policies
        .iter()
        .filter(|one| one.direction == Direction::Out);
    let selectors: Vec<Selector> = leaving.map(|policy| policy.selector).collect();
    if selectors.is_empty() {
        return Ok(0);
    }
    let covered = |selector: &Selector, from: SocketAddr, to: SocketAddr| {
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
    let replaced = |other: &&Policy| other.is_in_place_of(policy) && *other != policy;
    let before: Vec<Policy> = record.policies().filter(replaced).copied().collect();
    let mut before = before.into_iter().map(Object::Policy);
    before.try_for_each(|object| record.gone(&object))
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
    socket.map_err(IpsecError::resources(
        "the UDP port for ESP (another process may have it: choose another port)",
    ))
}
