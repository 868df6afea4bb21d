//! Applies the steps of a plan to the kernel's tables: records each object first, reads it back
//! after installing it, and removes no object of another program.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::xfrm::{self, Counters, Installed, State, StateId, Xfrm};
use dunlin_proto::ipsec::Mode;
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

pub(super) use values::state_of;
use values::{connection_policy, describe, id_of, is_same, meet, only_crosses, policy_of};

/// The number of consecutive checks that must find no connection before the ports are freed. One
/// check is not enough: a connection that changes its state can be missing in the kernel's list.
const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// An SA and its counters.
#[derive(Clone, Debug)]
pub struct AssociationStatus {
    /// The SA.
    pub association: Association,
    /// The counters; `None` if the kernel no longer has the SA.
    pub counters: Option<Counters>,
}

/// The kernel's tables in the network namespace of the thread that opened them.
pub(super) struct Tables {
    pub(super) xfrm: Arc<Xfrm>,
    hook: Option<Hook>,
    listener: Option<Arc<UdpSocket>>,
}

impl Tables {
    pub(super) fn open(hook: Option<Hook>) -> Result<Self, IpsecError> {
        let xfrm = Xfrm::open().map_err(kernel("opening the kernel's IPsec"))?;
        Ok(Self {
            hook,
            ..Self::of(Arc::new(xfrm))
        })
    }

    /// Checks that the kernel has ESP, before a peer depends on it.
    pub(super) fn have_esp(&self) -> Result<(), IpsecError> {
        let has = self.xfrm.esp();
        has.map_err(kernel("probing for ESP"))
    }

    /// Returns whether the kernel stores the directions of SAs. Fails if `mode` requires an SA for
    /// each CPU and the kernel does not support per-CPU SAs.
    pub(super) fn keeps_directions(&self, mode: Mode) -> Result<bool, IpsecError> {
        let probed = self.xfrm.probe();
        let held = probed.map_err(kernel("probing for CPUs and directions of SAs"))?;
        if mode == Mode::Cpu && held.cpu != Some(0) {
            return Err(IpsecError::NoPerCpu);
        }
        Ok(held.direction == Some(Direction::In))
    }

    /// Returns tables over an open netlink socket, for reading.
    pub(super) fn of(xfrm: Arc<Xfrm>) -> Self {
        Self {
            xfrm,
            hook: None,
            listener: None,
        }
    }

    /// Checks that no packet matches both a new policy, which `steps` add, and an installed policy.
    /// Inherited policies may match. So may a policy of another session, if the only such packets
    /// go from ports of one session to ports of the other (`only_crosses`).
    pub(super) fn are_free(&self, steps: &[Step], inherited: &[Policy]) -> Result<(), IpsecError> {
        let mut installed = self.policies()?;
        let inherited: Vec<xfrm::Policy> = inherited.iter().map(policy_of).collect();
        installed.retain(|policy| !inherited.contains(policy));
        for own in steps.iter().filter_map(|step| step.added()?.policy()) {
            let own = policy_of(own);
            let met = installed
                .iter()
                .find(|other| meet(other, &own) && !only_crosses(other, &own));
            if let Some(other) = met {
                return Err(IpsecError::PortsTaken(describe(other)));
            }
        }
        Ok(())
    }

    /// Checks that no policy for specific ports covers the packets of a connection. A policy of
    /// another session covers them if the connection uses one of that session's ports.
    pub(super) fn check_not_covered(
        &self,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<(), IpsecError> {
        let installed = self.policies()?;
        let connection = connection_policy(local, peer);
        let for_ports = |policy: &&xfrm::Policy| {
            let selector = &policy.selector;
            selector.source_ports.mask > 0 || selector.destination_ports.mask > 0
        };
        let mut for_ports = installed.iter().filter(for_ports);
        let met = for_ports.find(|policy| meet(policy, &connection));
        met.map_or(Ok(()), |policy| {
            Err(IpsecError::ControlCovered {
                port: local.port(),
                by: describe(policy),
            })
        })
    }

    /// Returns those of `policies` that the kernel still has unchanged.
    pub(super) fn installed(&self, policies: &[Policy]) -> Result<Vec<Policy>, IpsecError> {
        let all = self.policies()?;
        let is_installed = |policy: &&Policy| all.contains(&policy_of(policy));
        Ok(policies.iter().filter(is_installed).copied().collect())
    }

    /// Returns the first request id of an unused block of `size` ids. `random` selects the block;
    /// `blocks` is the number of all blocks.
    pub(super) fn free_reqids(
        &self,
        blocks: u32,
        size: u32,
        mut random: impl FnMut() -> Result<u32, IpsecError>,
    ) -> Result<u32, IpsecError> {
        let states = self.xfrm.states().map_err(kernel("listing SAs"))?;
        let policies = self.policies()?;
        let of_policy = |policy: &xfrm::Policy| match policy.action {
            xfrm::Action::Protect { reqid, .. } => Some(reqid),
            _ => None,
        };
        let of_policies = policies.iter().filter_map(of_policy);
        let reqids = states.iter().map(|state| state.reqid).chain(of_policies);
        let used: Vec<u32> = reqids.map(|reqid| reqid / size).collect();
        loop {
            let block = 1 + random()? % (blocks - 1);
            if !used.contains(&block) {
                return Ok(block * size);
            }
        }
    }

    /// Performs steps in order. After a failure, the record lists every object that may be
    /// installed. `state` returns an SA in the kernel's form, with its key.
    pub(super) fn apply(
        &mut self,
        steps: &[Step],
        record: &mut Record,
        state: &dyn Fn(&Association) -> Result<State, IpsecError>,
    ) -> Result<(), IpsecError> {
        let coming: Vec<Object> = steps
            .iter()
            .filter_map(|step| match step {
                // A listener is not recorded, because its socket is closed when the process ends.
                Step::Add(Object::Listener(_)) | Step::Remove(_) => None,
                Step::Add(object) => Some(*object),
                Step::Replace(policy) => Some(Object::Policy(*policy)),
            })
            .collect();
        record.add(&coming)?;
        for step in steps {
            self.carry_out(step, record, state)?;
        }
        Ok(())
    }

    fn carry_out(
        &mut self,
        step: &Step,
        record: &mut Record,
        state: &dyn Fn(&Association) -> Result<State, IpsecError>,
    ) -> Result<(), IpsecError> {
        self.tell(step);
        match step {
            Step::Add(Object::Policy(policy)) => {
                let added = self.xfrm.add_policy(&policy_of(policy));
                if let Err(xfrm::Error::Taken { .. }) = added {
                    // Another program has already installed such a policy, which does not belong to
                    // this session.
                    record.gone(&Object::Policy(*policy))?;
                    return Err(IpsecError::PortsTaken(policy.to_string()));
                }
                added.map_err(kernel(policy))?;
                self.verify_policy(policy)
            }
            Step::Add(Object::Association(one)) => {
                let state = state(one)?;
                if let Err(source) = self.xfrm.add_state(&state) {
                    if is_refusal(&source) {
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
                self.verify_policy(policy)?;
                record.policies_gone(|other| other.is_in_place_of(policy) && other != policy)
            }
            Step::Remove(object) => {
                self.remove(object)?;
                record.gone(object)
            }
        }
    }

    /// Checks that the recorded SAs, and the recorded policies for ports, are installed. If another
    /// program removed a policy, installs a safe policy in its place. For outgoing packets, the
    /// safe policy blocks them. For incoming packets, it is the removed policy, which accepts only
    /// packets that an SA has opened.
    ///
    /// # Errors
    /// [`IpsecError::Removed`] or [`IpsecError::RemovedSa`] if an object is missing or was changed,
    /// otherwise an error from the kernel.
    pub(super) fn verify_installed(&self, record: &Record) -> Result<(), IpsecError> {
        let mut missing = None;
        // Check only the policies that apply to all connections of the session. If the policy of a
        // single connection is missing, the connection's packets still match one of these policies.
        for policy in record.policies().filter(|one| !one.is_for_connection()) {
            let installed = self.in_place_of(policy)?;
            if installed == Some(policy_of(policy)) {
                continue;
            }
            if installed.is_none() {
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
        // Ignore an error here: for example, other programs may change the list faster than it can
        // be read. The next check follows in a second.
        let Ok(states) = self.xfrm.states() else {
            return Ok(());
        };
        let states: BTreeMap<StateId, Installed> =
            states.into_iter().map(|one| (one.id, one)).collect();
        let mut associations = record.objects().iter().filter_map(Object::association);
        let lost = associations.find(|one| {
            let installed = states.get(&id_of(one));
            !installed.is_some_and(|installed| is_same(installed, one))
        });
        lost.map_or(Ok(()), |one| Err(IpsecError::RemovedSa(one.to_string())))
    }

    /// Removes everything in the record, but leaves the ports blocked: blocking policies replace
    /// the policies that let packets out. [`Tables::finish`] removes the remaining policies when no
    /// connection uses the ports. The removal continues even if the record cannot be written, for
    /// example on a full disk. The record then lists too many objects, and removing an object that
    /// is already gone has no effect.
    pub(super) fn remove_recorded(&mut self, record: &mut Record) -> Result<Undo, IpsecError> {
        let mut undo = undo(record.objects());
        let recorded: Vec<Policy> = record.policies().copied().collect();
        for step in std::mem::take(&mut undo.now) {
            self.tell(&step);
            match step {
                Step::Replace(policy) => {
                    let own = policy_of(&policy);
                    let is_ours = self.in_place_of(&policy)?.is_some_and(|installed| {
                        let same = |one: &Policy| policy_of(one) == installed;
                        // If a process died during this operation, the new policy may already be
                        // installed.
                        installed == own || recorded.iter().any(same)
                    });
                    if is_ours {
                        self.xfrm.replace_policy(&own).map_err(kernel(&policy))?;
                        self.verify_policy(&policy)?;
                    }
                    // Leave the record unchanged: it lists the original policy until the new one is
                    // removed.
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

    /// Removes the policies that have blocked the ports since [`Tables::remove_recorded`]. Returns
    /// false and changes nothing while connections use the ports, because the connections would
    /// continue in the clear. If the session never protected the ports, connections on them do not
    /// matter: they were in the clear before.
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

    /// Removes these policies.
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

    /// Returns the counters of an SA; `None` if it is gone.
    fn counters(&self, one: &Association) -> Result<Option<Counters>, IpsecError> {
        let state = self.xfrm.state(&id_of(one)).map_err(kernel(one))?;
        let own = state.filter(|state| is_same(state, one));
        Ok(own.map(|state| state.counters))
    }

    /// Returns these SAs with their counters.
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

    /// Checks that the kernel has exactly this policy.
    fn verify_policy(&self, policy: &Policy) -> Result<(), IpsecError> {
        if self.in_place_of(policy)? == Some(policy_of(policy)) {
            return Ok(());
        }
        Err(kernel(policy)(xfrm::Error::Differs { what: "the policy" }))
    }

    pub(super) fn policies(&self) -> Result<Vec<xfrm::Policy>, IpsecError> {
        self.xfrm.policies().map_err(kernel("listing policies"))
    }

    /// Returns the kernel's policy with the selector and direction of `policy`.
    fn in_place_of(&self, policy: &Policy) -> Result<Option<xfrm::Policy>, IpsecError> {
        let own = policy_of(policy);
        let installed = self.xfrm.policy(&own.selector, own.direction);
        let installed = installed.map_err(kernel(policy))?;
        Ok(installed.map(|(policy, _)| policy))
    }

    /// Removes this object and nothing else.
    fn remove(&mut self, object: &Object) -> Result<(), IpsecError> {
        match object {
            Object::Policy(policy) => {
                let removed = self.xfrm.remove_policy(&policy_of(policy));
                removed.map(|_| ()).map_err(kernel(policy))
            }
            Object::Association(one) => {
                let installed = self.xfrm.state(&id_of(one)).map_err(kernel(one))?;
                if installed.is_some_and(|installed| is_same(&installed, one)) {
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

/// Returns the number of connections of this host that these policies cover.
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

/// Whether the error shows that the kernel did not perform the request. If the kernel's answer was
/// lost, the kernel may have performed the request.
fn is_refusal(error: &xfrm::Error) -> bool {
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
        "the UDP port for ESP (if another process uses it, choose another port)",
    ))
}
