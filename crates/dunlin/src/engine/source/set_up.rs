//! Setting a session up at the source: who is there, what is agreed on, what is
//! moved, over which lanes.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use dunlin_proto::control::{Accept, Describe, Message, RegionTable};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::negotiate::{Features, Offer, Opening, SessionId, VERSIONS};
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::Schedule;
use dunlin_proto::switchover::Source;

use super::super::control::{ControlLane, read_opening};
use super::super::error::Fault;
use super::super::host::Host;
use super::super::lock;
use super::super::report::{Event, Observer};
use super::super::vmm::{RunState, SourceVm};
use super::lane::{Lane, LaneShare, Shared};
use super::session::{Session, unexpected};
use super::{Options, SessionEvent};
use crate::lane::control as control_lane;
use crate::lane::handshake::HandshakeError;
use crate::lane::identity::ClientTls;

impl Session<'_> {
    /// Describes the VM, and opens the lanes side by side.
    pub(super) fn set_up(
        &mut self,
        to: &str,
        tls: &ClientTls,
        events: &Sender<SessionEvent>,
    ) -> Result<(), Fault> {
        let deadline = self.started + self.options.connect_limit;
        self.spawn_reader(events)?;
        self.control.ask()?;
        self.describe()?;
        let accept = self.await_accept(deadline)?;
        if self.options.lanes > accept.lanes_max {
            return Err(Fault::new(
                FaultCode::LaneLimit,
                format!(
                    "{} lanes were asked for and the destination takes {}",
                    self.options.lanes, accept.lanes_max
                ),
            ));
        }
        let peer = self.control.stream().peer();
        self.observer.event(&Event::Accepted {
            peer: peer
                .names
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        });
        let fingerprint = peer.fingerprint;
        {
            let mut state = lock(&self.shared.state);
            for number in 1..=self.options.lanes {
                state.schedule.open_lane(number);
                state.lanes.push(LaneShare {
                    lane: number,
                    ..LaneShare::default()
                });
            }
        }
        for number in 1..=self.options.lanes {
            let endpoint = match accept.endpoints.as_slice() {
                [] => to.to_owned(),
                some => some[usize::from(number - 1) % some.len()].clone(),
            };
            let lane = Lane {
                number,
                endpoint,
                tls: tls.clone(),
                security: self.selection.security,
                version: self.selection.version,
                session: self.control.session(),
                secret: accept.secret.clone(),
                peer_fingerprint: fingerprint,
                rate: self.options.lane_rate,
                deadline: Instant::now() + self.options.connect_limit,
                memory: Arc::clone(&self.memory),
                shared: Arc::clone(&self.shared),
                host: Arc::clone(self.host),
                events: events.clone(),
            };
            self.spawn(format!("dunlin-lane-{number}"), move || lane.run())?;
            self.lanes_running += 1;
        }
        self.await_lanes(Instant::now() + self.options.connect_limit)
    }

    pub(super) fn describe(&self) -> Result<(), Fault> {
        let described = self.vm.describe().map_err(|error| {
            Fault::new(FaultCode::Internal, "the VM cannot be described").because(error)
        })?;
        let regions = RegionTable::new(self.memory.regions().to_vec()).map_err(|error| {
            Fault::new(FaultCode::Internal, "the VM's memory cannot be described").because(error)
        })?;
        self.control.send(&Message::Describe(Describe {
            vm_uuid: described.uuid,
            vm_name: described.name,
            page_bytes: u32::try_from(PAGE_BYTES).unwrap_or(u32::MAX),
            paused: self.paused_by_owner,
            description: described.description,
            regions,
        }))
    }

    pub(super) fn await_accept(&mut self, deadline: Instant) -> Result<Accept, Fault> {
        match self.next_message(deadline)? {
            Some(Message::Accept(accept)) => Ok(accept),
            Some(other) => Err(unexpected(&other)),
            None => Err(Fault::new(
                FaultCode::ControlLost,
                "the destination kept us waiting for an answer to the VM's description",
            )),
        }
    }

    pub(super) fn await_lanes(&mut self, deadline: Instant) -> Result<(), Fault> {
        let mut waiting: BTreeSet<u16> = (1..=self.options.lanes).collect();
        while !waiting.is_empty() {
            let Some(message) = self.next_message(deadline)? else {
                return Err(Fault::new(
                    FaultCode::LaneLost,
                    format!("lanes {waiting:?} did not stand within the limit for connecting"),
                ));
            };
            match message {
                Message::LaneUp { lane } if waiting.remove(&lane) => {
                    self.observer.event(&Event::LaneUp { lane });
                }
                Message::LaneUp { lane } => {
                    return Err(Fault::new(
                        FaultCode::Malformed,
                        format!("the destination names lane {lane}, which is not being opened"),
                    ));
                }
                Message::LaneRefused { lane, fault, text } => {
                    return Err(Fault::told(
                        fault,
                        format!("lane {lane} was refused: {text}"),
                    ));
                }
                other => return Err(unexpected(&other)),
            }
        }
        Ok(())
    }
}

/// Connects the control lane and agrees on version, features and security.
pub(super) fn connect<'a>(
    vm: &'a Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &'a Options,
    host: &'a Arc<dyn Host>,
    observer: &'a dyn Observer,
    events: Receiver<SessionEvent>,
) -> Result<Session<'a>, Fault> {
    let started = Instant::now();
    let deadline = started + options.connect_limit;
    let paused_by_owner = match vm.run_state() {
        RunState::Running => false,
        RunState::Paused => true,
        RunState::PoweredOff => {
            return Err(Fault::new(
                FaultCode::GuestPoweredOff,
                "the guest is powered off",
            ));
        }
        RunState::Stopped(why) => {
            return Err(Fault::new(
                FaultCode::GuestStopped,
                format!("the guest has stopped: {why}"),
            ));
        }
    };
    let stream = host.connect(to, deadline).map_err(|error| {
        Fault::new(FaultCode::ControlLost, format!("{to} cannot be reached")).because(error)
    })?;
    let stream = control_lane::client(stream, tls, deadline).map_err(|error| {
        let code = match &error {
            HandshakeError::Deadline | HandshakeError::Io(_) | HandshakeError::PeerClosed => {
                FaultCode::ControlLost
            }
            _ => FaultCode::Unauthorised,
        };
        Fault::new(code, format!("no secure control lane to {to}")).because(error)
    })?;
    let mut session: SessionId = [0; 16];
    tls.config()
        .crypto_provider()
        .secure_random
        .fill(&mut session)
        .map_err(|_| Fault::new(FaultCode::Internal, "no random numbers can be had"))?;
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: if options.verify {
            Features::VERIFY
        } else {
            Features::NONE
        },
        security: options.security,
        session,
        attempt: 1,
        epoch: 1,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).map_err(|error| {
        Fault::new(FaultCode::Internal, "the offer cannot be sent").because(error)
    })?;
    stream.send(&bytes).map_err(|error| {
        Fault::new(FaultCode::ControlLost, "the control lane was lost").because(error)
    })?;
    let selection = match read_opening(&stream, deadline)? {
        Opening::Select(selection) => selection,
        Opening::Refuse(_, refusal) => return Err(Fault::told(refusal.fault, refusal.text)),
        _ => {
            return Err(Fault::new(
                FaultCode::Malformed,
                "the destination answered the offer with something else",
            ));
        }
    };
    selection.confirm(&offer).map_err(|error| {
        Fault::new(
            FaultCode::SecurityNotAgreed,
            "the destination's selection is not ours",
        )
        .because(error)
    })?;
    let memory = vm.memory();
    let schedule = Schedule::new(
        memory
            .regions()
            .iter()
            .map(|region| (region.id, region.pages())),
    );
    Ok(Session {
        vm,
        memory,
        options,
        host,
        observer,
        control: Arc::new(ControlLane::new(stream, session, offer.epoch)),
        selection,
        events,
        shared: Arc::new(Shared::new(schedule, Pace::new(options.rate))),
        state: Source::Live,
        paused_by_owner,
        relinquished: false,
        logs: Vec::new(),
        lanes_running: 0,
        threads: Vec::new(),
        cpu: Arc::default(),
        started,
        iterations: Vec::new(),
        bytes_per_s: 0,
        window: (started, 0),
        dirty_pages_per_s: 0,
        throttle: 0,
        control_ended: Cell::new(false),
    })
}
