//! Looking after the data lanes: opening them, replacing those that are lost
//! or worn, and having lost ones fenced.
//!
//! What to do is [`Sending`](dunlin_proto::lanes::Sending)'s to say; this does
//! it. All of it happens on the session's thread, after each event.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use dunlin_proto::control::{Accept, ChunkSet, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Action, ReportError};

use super::super::error::Fault;
use super::super::lock;
use super::super::report::Event;
use super::SessionEvent;
use super::lane::Lane;
use super::session::Session;
use crate::lane::dial::{Connector, LaneDialer};
use crate::lane::identity::ClientTls;
use crate::lane::peers::Principal;

/// What every lane of the session is opened with.
pub(super) struct LaneTerms {
    pub(super) tls: ClientTls,
    pub(super) dialer: Arc<dyn LaneDialer>,
    pub(super) connector: Arc<dyn Connector>,
    pub(super) accept: Accept,
    /// Where the control lane went, for a destination that names no endpoints.
    pub(super) to: String,
    pub(super) peer: Principal,
    pub(super) events: Sender<SessionEvent>,
}

impl Session<'_> {
    /// Does what has to be done about the lanes now.
    pub(super) fn tend(&mut self) -> Result<(), Fault> {
        loop {
            let action = {
                let mut state = lock(&self.shared.state);
                let now_ns = self.shared.now_ns();
                // What nobody can confirm is not the lanes' fault.
                if self.control.is_silent() {
                    state.lanes.unheard(now_ns);
                }
                state.lanes.poll(now_ns)
            };
            match action {
                None => return Ok(()),
                Some(Action::Open(lane)) => self.open_lane(lane)?,
                Some(Action::Cut(lane)) => self.shared.cut(lane),
                Some(Action::Fence(lane)) => self.say(&Message::Fence { lane })?,
                Some(Action::GiveUp) => {
                    let fault = self.first_fault.take();
                    return Err(fault.unwrap_or_else(|| {
                        Fault::new(
                            FaultCode::LaneLost,
                            format!(
                                "every lane was lost, and none could be had for {:?}",
                                self.options.no_lane_limit
                            ),
                        )
                    }));
                }
            }
        }
    }

    /// When [`Session::tend`] has to be called next, if nothing happens.
    pub(super) fn tend_at(&self) -> Option<Instant> {
        let due_ns = lock(&self.shared.state).lanes.due_ns()?;
        Some(self.shared.instant(due_ns))
    }

    fn open_lane(&mut self, number: u16) -> Result<(), Fault> {
        let Some(terms) = &self.terms else {
            return Err(Fault::new(FaultCode::Internal, "no lanes are accepted yet"));
        };
        let endpoints = terms.accept.endpoints.as_slice();
        let endpoint = match endpoints.len() {
            0 => terms.to.clone(),
            some => endpoints[usize::from(number - 1) % some].clone(),
        };
        let lane = Lane {
            number,
            endpoint,
            tls: terms.tls.clone(),
            dialer: Arc::clone(&terms.dialer),
            connector: Arc::clone(&terms.connector),
            is_replacement: self.lanes_stood,
            version: self.selection.version,
            session: self.control.session(),
            secret: terms.accept.secret.clone(),
            peer: terms.peer.clone(),
            rate: self.options.lane_rate,
            records: self.options.records_per_lane,
            deadline: Instant::now() + self.options.connect_limit,
            memory: Arc::clone(&self.memory),
            work_queue: Arc::clone(&self.shared),
            events: terms.events.clone(),
        };
        self.shared.expect(number);
        let thread = self
            .host
            .spawn(
                format!("dunlin-lane-{number}"),
                Box::new(move || lane.run()),
            )
            .map_err(|error| {
                Fault::new(FaultCode::Kernel, "cannot start a thread").because(error)
            })?;
        self.lane_threads.insert(number, thread);
        Ok(())
    }

    /// A lane's thread is over.
    pub(super) fn lane_ended(&mut self, lane: u16, result: Result<(), Fault>) -> Result<(), Fault> {
        if let Some(thread) = self.lane_threads.remove(&lane)
            && thread.join().is_err()
        {
            return Err(Fault::new(FaultCode::Internal, "a lane's thread panicked"));
        }
        let in_order = result.is_ok();
        if let Err(fault) = result {
            // A lane that is lost can be replaced; whatever else went wrong
            // would go wrong on the next one too.
            if fault.code != FaultCode::LaneLost {
                return Err(self.reason_of_peer().unwrap_or(fault));
            }
            self.lane_faults.insert(lane, fault.for_peer());
            self.first_fault.get_or_insert(fault);
        }
        let now_ns = self.shared.now_ns();
        self.shared
            .change(|state| state.lanes.thread_ended(lane, in_order, now_ns));
        Ok(())
    }

    /// What the destination tells of lanes. False for any other message.
    pub(super) fn lane_message(&mut self, message: &Message) -> Result<bool, Fault> {
        let now_ns = self.shared.now_ns();
        match message {
            Message::LaneUp { lane } => {
                let news = self
                    .shared
                    .change(|state| state.lanes.lane_up(*lane, now_ns));
                if news.map_err(lie)? {
                    self.observer.event(&Event::LaneUp { lane: *lane });
                }
            }
            Message::LaneRefused { lane, fault, text } => {
                let refused = self
                    .shared
                    .change(|state| state.lanes.refused(*lane, now_ns));
                if !refused.map_err(lie)? {
                    return Ok(true);
                }
                let fault = Fault::told(*fault, format!("lane {lane} was refused: {text}"));
                // What a destination refuses before the first lane stands it
                // would refuse again, unless it merely has no room.
                if !self.lanes_stood && fault.code != FaultCode::LaneLimit {
                    return Err(fault);
                }
                self.observer.event(&Event::Warning(fault.for_peer()));
                self.first_fault.get_or_insert(fault);
            }
            Message::Fenced { lane, acks } => self.fenced(*lane, acks)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn fenced(&mut self, lane: u16, acks: &[ChunkSet]) -> Result<(), Fault> {
        let now_ns = self.shared.now_ns();
        let before = self.lanes_lost;
        let (pages, lost) = self
            .shared
            .change(|state| {
                let pages = state.lanes.fenced(lane, acks, now_ns)?;
                Ok((pages, state.lanes.lost_count()))
            })
            .map_err(lie)?;
        self.lanes_lost = lost;
        self.pages_again += pages;
        let why = self.lane_faults.remove(&lane);
        if before < self.lanes_lost {
            let why = why.unwrap_or_else(|| "it stood still, or the destination lost it".into());
            self.observer.event(&Event::LaneLost { lane, why });
        }
        Ok(())
    }
}

/// A report of the destination that cannot be.
fn lie(error: ReportError) -> Fault {
    Fault::new(
        FaultCode::Malformed,
        "the destination's report about a lane is wrong",
    )
    .because(error)
}
