//! Starts a session: blocks its ports, and takes over ports that an earlier session left blocked.

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
                let objects = record.objects().len();
                self.tables.remove_recorded(&mut record)?;
                records.push((record, objects));
            }
        }
        let all = records.iter().flat_map(|(record, _)| blocking(record));
        let all: Vec<Policy> = all.collect();
        Ok(Inheritance {
            installed: self.tables.installed(&all)?,
            records,
        })
    }

    /// Called after this session's policies are installed. Removes those policies of earlier
    /// sessions that this session's policies override. Also frees the other ports of earlier
    /// sessions, if no connection uses them.
    fn settle_inheritance(
        &mut self,
        inheritance: Inheritance,
        adoption: &Adoption,
    ) -> Result<(), IpsecError> {
        for (mut record, objects) in inheritance.records {
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
    /// The records, each with the number of its SAs and policies that the kernel still had before
    /// this process removed the SAs.
    records: Vec<(Record, usize)>,
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
            .any(|(record, _)| record.has_protected() && blocking(record).iter().any(replaced))
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Arc, Mutex, mpsc};
    use std::thread;

    use dunlin_lane::control;
    use dunlin_lane::provider::Crypto;
    use dunlin_proto::ipsec::Mode;
    use dunlin_proto::ipsec::exchange::Exchange;
    use dunlin_proto::ipsec::key::Role;
    use dunlin_proto::ipsec::object::Object;
    use dunlin_rig::hosts::Host;
    use dunlin_test_base::Scratch;
    use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, names, pair, soon};

    use super::*;
    use crate::options::Options;
    use crate::record::RecordDirectory;
    use crate::session::Beginning;

    /// The objects are recorded but not installed, so that the test runs on kernels without ESP.
    #[test]
    fn a_session_that_takes_ports_over_reports_all_removed_objects() {
        if dunlin_rig::need::hosts() {
            let host = Host::new("takes-over").unwrap();
            assert_eq!(host.run(removed).unwrap(), [3]);
        }
    }

    /// Takes over the ports of a dead process that has recorded three objects. For each
    /// event that reports removed objects, returns how many it reports.
    fn removed() -> Vec<usize> {
        let scratch = Scratch::new();
        let ports = "4444".parse().unwrap();
        let options = Options::new(Mode::Connection, ports, scratch.join("records"));
        let records = RecordDirectory::open(&options.records).unwrap();
        let mut dead = records.create(&[7; 16]).unwrap();
        let objects: [Object; 3] = [
            "policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xffff priority 103 block",
            "sa in 192.0.2.2 192.0.2.1 spi 0x00001002 reqid 65536 epoch 1 index 0 fallback",
            "sa out 192.0.2.1 192.0.2.2 spi 0x00001001 reqid 65537 epoch 1 index 2 cpu 3",
        ]
        .map(|line| line.parse().unwrap());
        dead.add(&objects).unwrap();
        drop(dead);

        let parameters = SessionParameters {
            local: "192.0.2.1".parse().unwrap(),
            peer: "192.0.2.2".parse().unwrap(),
            ports,
            mode: Mode::Connection,
            first_reqid: REQIDS,
            udp: None,
        };
        let reported = Arc::<Mutex<Vec<usize>>>::default();
        let observed = Arc::clone(&reported);
        let beginning = Beginning {
            control: control_lane(),
            session: [8; 16],
            role: Role::Responder,
            exchange: Exchange::responder(options.sas_max, None, Vec::new()),
            options,
            observer: Arc::new(move |event: &Event| match event {
                Event::Cleaned { objects, .. } => observed.lock().unwrap().push(*objects),
                other => panic!("{other}"),
            }),
            admits: |_, _| Ok(()),
        };
        let mut driver = Driver::new(beginning, Arc::default(), mpsc::channel().0).unwrap();
        let inheritance = driver.inheritance(&parameters.begin()).unwrap();
        let adoption = adopt(&parameters.begin(), &inheritance.installed);
        driver.settle_inheritance(inheritance, &adoption).unwrap();
        reported.lock().unwrap().clone()
    }

    /// One end of a control lane. The other end is closed after the handshake.
    fn control_lane() -> control::ControlStream {
        let authority = Authority::new();
        let client = authority.identity(&[SOURCE]);
        let client = client
            .client(&Crypto::auto(), names(&[DESTINATION]))
            .unwrap();
        let server = authority.identity(&[DESTINATION]);
        let server = server.server(&Crypto::auto(), names(&[SOURCE])).unwrap();
        let (near, far) = pair();
        let near = thread::spawn(move || control::client(near, &client, soon()));
        let far = control::server(far, &server, soon()).unwrap();
        near.join().unwrap().unwrap();
        far
    }
}
