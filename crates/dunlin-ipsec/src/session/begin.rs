//! The start of a session, which blocks its ports and takes over ports that an earlier session left
//! blocked.

use std::net::SocketAddr;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::message::Terms;
use dunlin_proto::ipsec::object::Policy;
use dunlin_proto::ipsec::plan::{Adoption, REQID_BLOCKS, REQIDS, SessionParameters, Step, adopt};
use dunlin_proto::text::{chain, harmless};

use super::state::{Driver, Ports};
use super::system::{ends, guarded, is_of_this_host, random};
use crate::error::IpsecError;
use crate::event::Event;
use crate::record::{Owner, Record};
use crate::tables::still_used;

impl Driver {
    /// Blocks the ports if all checks succeed. If earlier sessions left some of the ports blocked,
    /// takes those ports over.
    pub(super) fn begin(&mut self, terms: &Terms) -> Result<(), IpsecError> {
        (self.admits)(&self.options, terms)?;
        let socket = self.control.socket();
        let (local, peer) = ends(socket)?;
        let (own, other) = (local.ip().to_canonical(), peer.ip().to_canonical());
        if (own, other) != (terms.other, terms.own) {
            return Err(IpsecError::Refused {
                fault: FaultCode::AddressTranslated,
                text: format!(
                    "the peer reports the addresses {} (its own) and {} (of this side), but this \
                     side sees {other} and {own}: a device on the path translates addresses",
                    terms.own, terms.other
                ),
            });
        }
        if is_of_this_host(other)? {
            return Err(IpsecError::SameHost(other));
        }
        guarded(socket)?;
        for port in [local.port(), peer.port()] {
            if terms.ports.contains(port) {
                return Err(IpsecError::CoversControl(port));
            }
        }
        let keeps_directions = self.tables.keeps_directions(terms.mode)?;
        let udp = terms
            .udp
            .zip(self.options.udp)
            .map(|(theirs, own)| (own, theirs));
        // The lock is held until the ports belong to this session.
        let _lock = self.records.lock(self.options.timeout)?;
        let mut parameters = SessionParameters {
            local: own,
            peer: other,
            ports: terms.ports,
            mode: terms.mode,
            first_reqid: REQIDS,
            udp,
        };
        self.check_control_connections(&parameters)?;
        let inheritance = self.inheritance(&parameters.begin())?;
        self.tables.check_not_covered(local, peer)?;
        self.tables
            .are_free(&parameters.begin(), &inheritance.installed)?;
        let random = || random().map(u32::from_le_bytes);
        parameters.first_reqid = self.tables.free_reqids(REQID_BLOCKS, REQIDS, random)?;
        let adoption = adopt(&parameters.begin(), &inheritance.installed);
        let connections = still_used(&adoption.in_the_way)?;
        if connections > 0 {
            return Err(IpsecError::LeftInTheWay { connections });
        }
        let mut record = self.records.create(&self.session)?;
        record.set_owner(Owner {
            pid: std::process::id(),
            mode: terms.mode,
            ports: terms.ports,
            local: SocketAddr::new(own, local.port()),
            peer: SocketAddr::new(other, peer.port()),
            name: harmless(&self.control.peer().to_string()),
        })?;
        if inheritance.protected(&adoption) {
            record.inherit()?;
        }
        self.ports = Ports::blocked(record, parameters, keeps_directions);
        self.apply(&adoption.begin)?;
        self.settle_inheritance(inheritance, &adoption)
    }

    /// Checks that no other session's control connection uses one of the ports: the new policies
    /// would block that connection, and its session would be lost. The caller holds the lock of the
    /// directory.
    fn check_control_connections(&self, parameters: &SessionParameters) -> Result<(), IpsecError> {
        let others = self.records.all()?;
        // Skip the sessions of dead processes, which have no connection, and unreadable records,
        // which name no connection.
        let kept = others.iter().flatten().filter(|(_, is_kept)| *is_kept);
        for owner in kept.filter_map(|(record, _)| record.owner()) {
            if let Some(port) =
                owner.port_among(parameters.ports, parameters.local, parameters.peer)
            {
                return Err(IpsecError::CoversOther {
                    port,
                    ports: owner.ports.to_string(),
                    pid: owner.pid,
                });
            }
        }
        Ok(())
    }

    /// Returns the policies that earlier sessions with this peer left on some of these ports, after
    /// their process or control connection died. Removes the SAs of these sessions, but not the
    /// policies that block ports. Leaves the policies, SAs and records of sessions on other ports
    /// in place.
    fn inheritance(&mut self, begin: &[Step]) -> Result<Inheritance, IpsecError> {
        let mut records = Vec::new();
        for record in self.records.left()? {
            let mut record = match record {
                Ok(record) => record,
                Err(error) => {
                    let why = chain(&error);
                    self.tell(Event::NotCleaned { why });
                    continue;
                }
            };
            if concerns(&record, begin) {
                self.tables.remove_recorded(&mut record)?;
                records.push(record);
            }
        }
        let all: Vec<Policy> = records.iter().flat_map(blocking).collect();
        Ok(Inheritance {
            installed: self.tables.installed(&all)?,
            records,
        })
    }

    /// Called after this session's policies are installed. Removes the policies of earlier sessions
    /// that this session's policies override. Also frees the other ports of earlier sessions, if no
    /// connection uses them.
    fn settle_inheritance(
        &mut self,
        inheritance: Inheritance,
        adoption: &Adoption,
    ) -> Result<(), IpsecError> {
        for mut record in inheritance.records {
            let objects = record.objects().len();
            let own = blocking(&record);
            let of_record = |policies: &[Policy]| -> Vec<Policy> {
                let is_own = |policy: &&Policy| own.contains(policy);
                policies.iter().filter(is_own).copied().collect()
            };
            let mut gone = of_record(&adoption.then);
            gone.extend(of_record(&adoption.in_the_way));
            let others = of_record(&adoption.when_quiet);
            let connections = if record.has_protected() {
                still_used(&others)?
            } else {
                0
            };
            if connections == 0 {
                gone.extend(&others);
            }
            self.tables.remove_all(&gone, &mut record)?;
            // A replaced policy now belongs to this session, so the old record must no longer list
            // it.
            record.policies_gone(|policy| replaces(&adoption.begin, policy))?;
            let path = record.path().to_owned();
            if connections == 0 {
                record.forget()?;
                self.tell(Event::Cleaned {
                    record: path,
                    objects,
                });
            } else {
                self.tell(Event::Left {
                    record: path,
                    connections,
                });
            }
        }
        Ok(())
    }
}

/// The records and policies that earlier sessions left.
struct Inheritance {
    records: Vec<Record>,
    /// The policies that block the ports of those sessions, except policies that the kernel no
    /// longer has.
    installed: Vec<Policy>,
}

impl Inheritance {
    /// Whether a connection may rely on the policies that are taken over.
    fn protected(&self, adoption: &Adoption) -> bool {
        let replaced =
            |policy: &Policy| replaces(&adoption.begin, policy) || adoption.then.contains(policy);
        self.records
            .iter()
            .any(|record| record.has_protected() && blocking(record).iter().any(replaced))
    }
}

/// Whether some packet matches both a policy of the record and a new policy.
fn concerns(record: &Record, begin: &[Step]) -> bool {
    let left = blocking(record);
    let mut own = begin.iter().filter_map(|step| step.added()?.policy());
    let meets = |own: &Policy, other: &Policy| {
        other.direction == own.direction && other.selector.meets(&own.selector)
    };
    own.any(|own| left.iter().any(|other| meets(own, other)))
}

/// Whether one of these steps replaces `policy`.
fn replaces(steps: &[Step], policy: &Policy) -> bool {
    let over = |step: &Step| matches!(step, Step::Replace(own) if own.is_in_place_of(policy));
    steps.iter().any(over)
}

/// The policies that block a session's ports after everything else has been removed.
fn blocking(record: &Record) -> Vec<Policy> {
    dunlin_proto::ipsec::plan::undo(record.objects()).when_quiet
}
