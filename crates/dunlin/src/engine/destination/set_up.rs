//! Setting a session up at the destination: a source whose offer can be met, and
//! the VM that it describes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::control::{Describe, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::negotiate::{Features, Opening, Refusal, Supported, VERSIONS, select};
use dunlin_proto::switchover::Destination;

use super::super::control::{ControlLane, FromPeer};
use super::super::fault::Fault;
use super::super::journal::{DestinationRecord, Journal, State};
use super::super::vmm::{Builder, Offered, VmDescription};
use super::barrier::IterationBarrier;
use super::lane::DestinationMemory;
use super::session::{Session, peer_of, refuse, unexpected};
use super::{DestinationEvent, SessionEvent};
use crate::lane::accept::Arrival;
use crate::lane::control::ControlStream;

/// How long the source may take to describe its VM.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(10);

impl Session<'_> {
    /// Waits for a control lane whose offer can be met.
    pub(super) fn await_source(&mut self) -> Result<(), Fault> {
        loop {
            let Some(SessionEvent::Arrived(arrival)) = self.next_event(None)? else {
                continue;
            };
            match *arrival {
                Arrival::Control { stream, opening } => {
                    if self.negotiate(stream, &opening)? {
                        return Ok(());
                    }
                }
                other => self.turn_away(other, "no session has begun"),
            }
        }
    }

    pub(super) fn negotiate(
        &mut self,
        stream: ControlStream,
        opening: &Opening,
    ) -> Result<bool, Fault> {
        let mut bytes = Vec::new();
        let answer = match opening {
            Opening::Offer(offer) => {
                let supported = Supported {
                    versions: VERSIONS,
                    features: Features::VERIFY,
                    required: Features::NONE,
                    plain_allowed: self.options.allow_plain,
                    ipsec: self.options.ipsec.is_some(),
                };
                select(offer, &supported).map(|selection| (offer, selection))
            }
            _ => Err(Refusal {
                fault: FaultCode::Malformed,
                text: "an offer comes first on a control lane".into(),
            }),
        };
        let (offer, selection) = match answer {
            Ok(agreed) => agreed,
            Err(refusal) => {
                self.reject(format!("the offer of {}: {refusal}", peer_of(&stream)));
                refuse(&stream, &refusal);
                return Ok(false);
            }
        };
        selection.encode(&mut bytes).map_err(|error| {
            Fault::new(FaultCode::Internal, "the selection cannot be sent").because(error)
        })?;
        if let Err(error) = stream.send(&bytes) {
            self.reject(format!("the control lane of {}: {error}", peer_of(&stream)));
            return Ok(false);
        }
        self.tls.keep(&stream);
        (self.observer)(&DestinationEvent::Connected {
            peer: peer_of(&stream),
        });
        self.tls
            .config()
            .crypto_provider()
            .secure_random
            .fill(&mut self.secret.0)
            .map_err(|_| Fault::new(FaultCode::Internal, "the random number source failed"))?;
        self.selection = Some(selection);
        let sequences = Arc::clone(&self.sequences);
        let silence = self.options.silence_limit;
        let control = ControlLane::new(stream, offer.session, offer.epoch, sequences, silence);
        let control = Arc::new(control);
        self.control = Some(Arc::clone(&control));
        self.offer = Some(offer.clone());
        self.spawn_reader(&control)?;
        Ok(true)
    }

    /// Builds the VM that the source describes, and accepts it.
    pub(super) fn build(&mut self, builder: &mut dyn Builder) -> Result<Offered, Fault> {
        let until = Instant::now() + DESCRIBE_LIMIT;
        let described = loop {
            match self.next_event(Some(until))? {
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Describe(described)))) => {
                    break described;
                }
                Some(SessionEvent::Control(_, FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "the VM is not described yet");
                }
                Some(_) => {}
                None => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        "the source does not describe its VM",
                    ));
                }
            }
        };
        let Describe {
            vm_uuid,
            vm_name,
            page_bytes,
            paused,
            description,
            regions,
        } = described;
        if u64::from(page_bytes) != PAGE_BYTES {
            return Err(Fault::new(
                FaultCode::DescriptionRefused,
                format!("pages of {page_bytes} bytes are not supported: only {PAGE_BYTES}"),
            ));
        }
        let offered = Offered {
            vm: VmDescription {
                uuid: vm_uuid,
                name: vm_name,
                description,
            },
            regions: regions.regions().to_vec(),
            paused,
        };
        (self.observer)(&DestinationEvent::Offered(offered.clone()));
        self.make_room(&offered, &builder.owner(&offered))?;
        let vm = builder
            .build(&offered)
            .map_err(|refusal| Fault::new(refusal.fault, refusal.text))?;
        let memory = vm.memory();
        let built = memory.regions().iter().map(|r| (r.id, r.length));
        let wanted = offered.regions.iter().map(|r| (r.id, r.length));
        self.vm = Some(Arc::clone(&vm));
        if !built.eq(wanted) {
            return Err(Fault::new(
                FaultCode::DescriptionRefused,
                "the VM that was built here has other memory regions than the source's",
            ));
        }
        self.memory_at_destination = Some(Arc::new(DestinationMemory::new(memory, regions)));
        self.shared = Some(Arc::new(IterationBarrier::new(self.options.lanes_max)));
        self.begin()?;
        match self.state {
            Destination::Receiving => Ok(offered),
            // It has been refused.
            _ => Err(self.fault.take().unwrap_or_else(|| {
                Fault::new(FaultCode::Journal, "the session cannot be recorded")
            })),
        }
    }

    /// Makes room for the session's records: a full disk is found here, before
    /// anything is moved.
    fn make_room(&mut self, offered: &Offered, owner: &str) -> Result<(), Fault> {
        let (Some(control), Some(offer)) = (&self.control, &self.offer) else {
            return Err(Fault::new(FaultCode::Internal, "there is no control lane"));
        };
        let record = Journal::first_record(
            State::Destination(DestinationRecord::Prepared),
            offer.session,
            (&offered.vm.uuid, &offered.vm.name),
            &peer_of(control.stream()),
            owner,
        );
        let peer = control.stream().peer();
        let begun = self.options.journal.begin(record, Some(peer));
        let recorded = begun.and_then(|mut journal| match journal.write_peer(&peer.principal()) {
            Ok(()) => Ok(journal),
            Err(error) => {
                // Best effort: an empty record says nothing.
                let _ = journal.forget();
                Err(error)
            }
        });
        self.journal = Some(recorded.map_err(|error| {
            let what = "the session cannot be recorded at the destination";
            Fault::new(FaultCode::Journal, what).because(error)
        })?);
        Ok(())
    }
}
