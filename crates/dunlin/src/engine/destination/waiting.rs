//! The first phases: waiting for a source with an acceptable offer, and for the
//! description of its VM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_lane::accept::Arrival;
use dunlin_lane::control::ControlStream;
use dunlin_lane::security::acceptor;
use dunlin_linux::random;
use dunlin_proto::control::{Describe, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::negotiate::{
    Features, Opening, Refusal, SessionSecret, Supported, VERSIONS, select,
};
use tracing::field::display;
use tracing::info_span;

use super::super::control::{FromPeer, unexpected};
use super::super::control_link::{ControlLink, ControlTerms};
use super::super::fault::{Fault, OrFault, VmIs};
use super::super::journal::{DestinationRecord, Role, SessionJournal, State};
use super::super::vmm::{Builder, Offered, VmDescription};
use super::arriving::{Arriving, Attempt};
use super::event::SessionEvent;
use super::lane::DestinationMemory;
use super::lanes::Lanes;
use super::received::DestinationEvent;
use super::receiving::Receiving;
use super::refusal::{peer_of, refuse};
use super::session::Session;
use super::settled::Settled;

/// How long the source may take to describe its VM.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(10);

/// The offer is accepted, but the VM is not accepted yet. Nothing is recorded yet.
pub(super) struct Describing<'a> {
    session: Session<'a>,
    control: ControlLink,
    secret: SessionSecret,
}

impl<'a> Describing<'a> {
    /// Waits for a control lane with an acceptable offer.
    pub(super) fn await_source(mut session: Session<'a>) -> Result<Self, Settled> {
        match next_source(&mut session) {
            Ok((control, secret)) => Ok(Self {
                session,
                control,
                secret,
            }),
            Err(fault) => {
                session.close(None, std::iter::empty(), None);
                Err(Settled::Failed(fault, VmIs::AtSource))
            }
        }
    }

    /// Builds the VM that the source describes, and accepts it.
    pub(super) fn build(mut self, builder: &mut dyn Builder) -> Result<Receiving<'a>, Settled> {
        let built = info_span!("describe").in_scope(|| self.try_build(builder));
        let (attempt, lanes) = match built {
            Ok(built) => built,
            Err(fault) => return Err(self.fail(fault)),
        };
        Receiving::begin(Arriving::new(self.session, self.control, attempt, lanes))
    }

    fn try_build(&mut self, builder: &mut dyn Builder) -> Result<(Attempt, Lanes), Fault> {
        let Describe {
            vm_uuid,
            vm_name,
            page_bytes,
            paused,
            description,
            regions,
        } = self.await_description()?;
        self.session.span.record("vm", &vm_name);
        if !self
            .session
            .describe(vm_uuid, self.control.lane.stream.peer())
        {
            return Err(Fault::new(
                FaultCode::Busy,
                "this VM is already arriving in another session",
            ));
        }
        if u64::from(page_bytes) != PAGE_BYTES {
            return Err(Fault::new(
                FaultCode::DescriptionRefused,
                format!("page size {page_bytes} not supported (only {PAGE_BYTES})"),
            ));
        }
        let (security, options) = (self.control.terms.selection.security, self.session.options);
        let acceptor = acceptor(security, options.allow_plain, options.ipsec.as_ref()).or_fault(
            FaultCode::Internal,
            "cannot open lanes with the selected security",
        )?;
        let offered = Offered {
            vm: VmDescription {
                uuid: vm_uuid,
                name: vm_name,
                description,
            },
            regions: regions.regions().to_vec(),
            paused,
        };
        self.session
            .notify(DestinationEvent::Offered(offered.clone()));
        let journal = self.make_room(&offered, &builder.owner(&offered))?;
        let built = builder
            .build(&offered)
            .map_err(|refusal| Fault::new(refusal.fault, refusal.text));
        let vm = match built {
            Ok(vm) => vm,
            Err(fault) => {
                self.forget(journal);
                return Err(fault);
            }
        };
        let memory = vm.memory();
        let here = memory.regions().iter().map(|r| (r.id, r.length));
        let wanted = offered.regions.iter().map(|r| (r.id, r.length));
        if !here.eq(wanted) {
            vm.discard();
            self.forget(journal);
            return Err(Fault::new(
                FaultCode::DescriptionRefused,
                "the memory regions of the VM that was built differ from the source's",
            ));
        }
        let memory = DestinationMemory::new(memory, regions);
        let secret = self.secret.clone();
        let lanes = Lanes::new(secret, acceptor, memory, options.lanes_max);
        Ok((Attempt::new(journal, vm, offered), lanes))
    }

    fn await_description(&mut self) -> Result<Describe, Fault> {
        let until = Instant::now() + DESCRIBE_LIMIT;
        loop {
            match self.session.receive(Some(&self.control), Some(until))? {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => match message {
                    Message::Describe(described) => return Ok(described),
                    Message::Cancel { fault, text } => {
                        return Err(Fault::from_peer(Role::Source, fault, &text));
                    }
                    other => return Err(unexpected(&other, Role::Source)),
                },
                Some(SessionEvent::Control(_, FromPeer::Lost(fault))) => return Err(fault),
                Some(SessionEvent::Arrived(arrival)) => {
                    if let Some(arrival) = self.session.answer_inquiry(*arrival) {
                        self.session
                            .turn_away(arrival, "the VM has not been described yet");
                    }
                }
                Some(SessionEvent::Cancelled) => return Err(Fault::cancelled()),
                Some(_) => {}
                None => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        "the source did not describe its VM in time",
                    ));
                }
            }
        }
    }

    /// Allocates the session's journal file, so that a full disk fails the migration before
    /// anything is moved.
    fn make_room(&self, offered: &Offered, owner: &str) -> Result<SessionJournal, Fault> {
        let stream = &self.control.lane.stream;
        let record = SessionJournal::first_record(
            State::Destination(DestinationRecord::Prepared),
            self.control.terms.offer.session,
            (&offered.vm.uuid, &offered.vm.name),
            &peer_of(stream),
            owner,
        );
        let peer = stream.peer();
        let begun = SessionJournal::begin(&self.session.options.journal, record, Some(peer));
        let recorded = begun.and_then(|mut journal| match journal.write_peer(&peer.principal()) {
            Ok(()) => Ok(journal),
            Err(error) => {
                // Best effort: other processes ignore a file without a record.
                let _ = journal.forget();
                Err(error)
            }
        });
        let what = "cannot record the session at the destination";
        recorded.or_fault(FaultCode::Journal, what)
    }

    fn forget(&self, journal: SessionJournal) {
        if let Err(error) = journal.forget() {
            self.session.warn(error.to_string());
        }
    }

    fn fail(self, fault: Fault) -> Settled {
        if fault.code != FaultCode::ControlLost {
            // Best effort: the peer may have died.
            let _ = self.control.lane.send(&Message::Cancel {
                fault: fault.kind(),
                text: fault.for_peer(),
            });
        }
        self.session
            .close(Some(self.control), std::iter::empty(), None);
        Settled::Failed(fault, VmIs::AtSource)
    }
}

fn next_source(session: &mut Session<'_>) -> Result<(ControlLink, SessionSecret), Fault> {
    loop {
        let arrival = match session.receive(None, None)? {
            Some(SessionEvent::Arrived(arrival)) => *arrival,
            Some(SessionEvent::Cancelled) => return Err(Fault::cancelled()),
            _ => continue,
        };
        match session.answer_inquiry(arrival) {
            Some(Arrival::Control { stream, opening }) => {
                if let Some(agreed) = negotiate(session, stream, &opening)? {
                    return Ok(agreed);
                }
            }
            Some(other) => session.turn_away(other, "no session is in progress"),
            None => {}
        }
    }
}

fn negotiate(
    session: &Session<'_>,
    stream: ControlStream,
    opening: &Opening,
) -> Result<Option<(ControlLink, SessionSecret)>, Fault> {
    let answer = match opening {
        Opening::Offer(offer) => {
            let supported = Supported {
                versions: VERSIONS,
                features: Features::VERIFY,
                required: Features::NONE,
                plain_allowed: session.options.allow_plain,
                ipsec: session.options.ipsec.is_some(),
            };
            select(offer, &supported).map(|selection| (offer, selection))
        }
        _ => Err(Refusal {
            fault: FaultCode::Malformed,
            text: "expected an offer as the first message of a control lane".into(),
        }),
    };
    let begun = answer.and_then(|(offer, selection)| {
        let refusal = || Refusal {
            fault: FaultCode::Busy,
            text: "the session is already in progress".into(),
        };
        let begun = session.begin(offer.session).then_some((offer, selection));
        begun.ok_or_else(refusal)
    });
    let (offer, selection) = match begun {
        Ok(agreed) => agreed,
        Err(refusal) => {
            session.reject(format!("offer of {}: {refusal}", peer_of(&stream)));
            refuse(&stream, &refusal);
            session.wait_again();
            return Ok(None);
        }
    };
    let mut bytes = Vec::new();
    selection
        .encode(&mut bytes)
        .or_fault(FaultCode::Internal, "cannot encode the selection")?;
    if let Err(error) = stream.send(&bytes) {
        session.reject(format!("control lane from {}: {error}", peer_of(&stream)));
        session.wait_again();
        return Ok(None);
    }
    session.keep_settings(&stream);
    let span = &session.span;
    let hex = format_args!("{:032x}", u128::from_be_bytes(offer.session));
    span.record("session", display(hex));
    span.record("peer", peer_of(&stream));
    session.notify(DestinationEvent::Connected {
        peer: peer_of(&stream),
    });
    let mut secret = SessionSecret([0; 32]);
    random::fill(&mut secret.0).or_fault(FaultCode::Internal, "the random number source failed")?;
    let terms = ControlTerms {
        sequences: Arc::default(),
        offer: offer.clone(),
        selection,
        silence_limit: session.options.silence_limit,
    };
    let control = session.open_control(stream, terms)?;
    Ok(Some((control, secret)))
}
