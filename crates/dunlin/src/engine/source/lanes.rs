//! A session with its data lanes: opens them, replaces lost and used-up lanes, and asks the
//! destination to fence lost lanes.
//!
//! [`Sending`](dunlin_proto::lanes::Sending) decides. This module executes its decisions, on the
//! session's thread, before it waits for each event.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_proto::control::{ChunkSet, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Action, ReportError};
use dunlin_proto::switchover::Source;

use super::super::control::{FromPeer, unexpected};
use super::super::fault::Fault;
use super::super::journal::Role;
use super::super::lock;
use super::super::report::Event;
use super::super::threads::spawn_counted;
use super::control::{given_up, reported};
use super::event::SessionEvent;
use super::lane::{Lane, LaneTerms};
use super::session::Session;

/// Delay between attempts to replace a lost control lane.
const RETRY: Duration = Duration::from_millis(100);

/// The data lanes.
pub(super) struct Lanes {
    pub(super) terms: Arc<LaneTerms>,
    pub(super) threads: BTreeMap<u16, JoinHandle<()>>,
    /// The reason why a lane's thread failed, kept until the lane is fenced.
    faults: BTreeMap<u16, String>,
    /// The first failure of any lane.
    pub(super) first_fault: Option<Fault>,
    pub(super) lost: u32,
    /// Pages that were sent again because their lane was lost.
    pub(super) pages_again: u64,
    /// Whether the first lanes are established. If so, a failure to open a lane counts as
    /// temporary, except if the host that answered is not the control lane's peer.
    pub(super) established: bool,
}

impl Lanes {
    pub(super) fn new(terms: LaneTerms) -> Self {
        Self {
            terms: Arc::new(terms),
            threads: BTreeMap::new(),
            faults: BTreeMap::new(),
            first_fault: None,
            lost: 0,
            pages_again: 0,
            established: false,
        }
    }
}

/// A session and its data lanes, from *accept* on.
pub(super) struct Transfer<'a> {
    pub(super) session: Session<'a>,
    pub(super) lanes: Lanes,
}

impl Transfer<'_> {
    /// Waits for an event and handles those that all phases treat alike: the end of the control
    /// lane, lane events, a cancellation, the peer's refusal. Returns [`SessionEvent::Tended`]
    /// after the end of a control lane or an event of a lane, and `None` after `wait`.
    pub(super) fn next_event(&mut self, wait: Duration) -> Result<Option<SessionEvent>, Fault> {
        let until = Instant::now() + wait;
        loop {
            self.tend()?;
            let until_tended = self.tend_at().map_or(until, |at| at.min(until));
            let left = until_tended.saturating_duration_since(Instant::now());
            let Some(event) = self.session.receive(left)? else {
                if Instant::now() < until {
                    continue;
                }
                return Ok(None);
            };
            let Some(event) = self.session.sift(event)? else {
                continue;
            };
            match event {
                SessionEvent::Control(_, FromPeer::Message(message))
                    if self.lane_message(&message)? => {}
                SessionEvent::Control(_, FromPeer::Lost(fault)) => {
                    if fault.code != FaultCode::ControlLost || !self.is_resumable() {
                        return Err(fault);
                    }
                    self.resume_control(fault)?;
                }
                SessionEvent::LaneEnded { lane, result } => self.lane_ended(lane, result)?,
                event => return Ok(Some(event)),
            }
            return Ok(Some(SessionEvent::Tended));
        }
    }

    /// Waits for an event; a message from the peer is a fault.
    pub(super) fn next_silent(&mut self, wait: Duration) -> Result<Option<SessionEvent>, Fault> {
        match self.next_event(wait)? {
            Some(SessionEvent::Control(_, FromPeer::Message(message))) => {
                Err(unexpected(&message, Role::Destination))
            }
            event => Ok(event),
        }
    }

    /// Executes the lane actions that are due.
    fn tend(&mut self) -> Result<(), Fault> {
        loop {
            let action = {
                let mut state = lock(&self.session.work_queue.state);
                let now_ns = self.session.work_queue.now_ns();
                // Acknowledgements arrive on the control lane. While it is silent, their absence
                // does not show that a data lane is stalled.
                if self.session.control.lane.is_silent() {
                    state.lanes.unheard(now_ns);
                }
                state.lanes.poll(now_ns)
            };
            match action {
                None => return Ok(()),
                Some(Action::Open(lane)) => self.open_lane(lane)?,
                Some(Action::Cut(lane)) => self.session.work_queue.cut(lane),
                Some(Action::Fence(lane)) => self.send_resumable(&Message::Fence { lane })?,
                Some(Action::GiveUp) => {
                    let fault = self.lanes.first_fault.take();
                    return Err(fault.unwrap_or_else(|| {
                        Fault::new(
                            FaultCode::LaneLost,
                            format!(
                                "no data lane was up, or a lost lane was not fenced, for {:?}",
                                self.session.options.no_lane_limit
                            ),
                        )
                    }));
                }
            }
        }
    }

    /// When to call [`Transfer::tend`] next if no event arrives.
    fn tend_at(&self) -> Option<Instant> {
        let due_ns = lock(&self.session.work_queue.state).lanes.due_ns()?;
        Some(self.session.work_queue.instant(due_ns))
    }

    fn open_lane(&mut self, number: u16) -> Result<(), Fault> {
        let lane = Lane {
            number,
            terms: Arc::clone(&self.lanes.terms),
            is_replacement: self.lanes.established,
            deadline: Instant::now() + self.session.options.connect_limit,
            work_queue: Arc::clone(&self.session.work_queue),
            events: self.session.sender.clone(),
            span: self.session.span.clone(),
        };
        self.session.work_queue.expect(number);
        let name = format!("dunlin-lane-{number}");
        let session = &self.session;
        let body = move || lane.run();
        let thread = spawn_counted(&**session.host, name, &session.cpu, body)?;
        self.lanes.threads.insert(number, thread);
        Ok(())
    }

    /// Handles the end of a lane's thread.
    fn lane_ended(&mut self, lane: u16, result: Result<(), Fault>) -> Result<(), Fault> {
        if let Some(thread) = self.lanes.threads.remove(&lane)
            && thread.join().is_err()
        {
            return Err(Fault::new(FaultCode::Internal, "a lane thread panicked"));
        }
        let in_order = result.is_ok();
        if let Err(fault) = result {
            // A lost lane can be replaced. Any other failure ends the migration.
            if fault.code != FaultCode::LaneLost {
                return Err(self.session.reason_of_peer().unwrap_or(fault));
            }
            self.lanes.faults.insert(lane, fault.for_peer());
            self.lanes.first_fault.get_or_insert(fault);
        }
        let work_queue = &self.session.work_queue;
        let now_ns = work_queue.now_ns();
        work_queue.change(|state| state.lanes.thread_ended(lane, in_order, now_ns));
        Ok(())
    }

    /// Handles a message about lanes. Returns false for any other message.
    fn lane_message(&mut self, message: &Message) -> Result<bool, Fault> {
        let work_queue = Arc::clone(&self.session.work_queue);
        let now_ns = work_queue.now_ns();
        match message {
            Message::LaneUp { lane } => {
                let news = work_queue.change(|state| state.lanes.lane_up(*lane, now_ns));
                if news.map_err(wrong_report)? {
                    self.session.observer.event(&Event::LaneUp { lane: *lane });
                }
            }
            Message::LaneRefused { lane, fault, text } => {
                let refused = work_queue.change(|state| state.lanes.refused(*lane, now_ns));
                if !refused.map_err(wrong_report)? {
                    return Ok(true);
                }
                let fault = reported(*fault, &format!("lane {lane} was refused: {text}"));
                // A destination that refuses one of the first lanes would refuse the others too.
                // The exception is a refusal because of the destination's lane limit.
                if !self.lanes.established && fault.code != FaultCode::LaneLimit {
                    return Err(fault);
                }
                self.session.warn(fault.for_peer());
                self.lanes.first_fault.get_or_insert(fault);
            }
            Message::Fenced { lane, acks } => self.fenced(*lane, acks)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn fenced(&mut self, lane: u16, acks: &[ChunkSet]) -> Result<(), Fault> {
        let work_queue = &self.session.work_queue;
        let now_ns = work_queue.now_ns();
        let before = self.lanes.lost;
        let (pages, lost) = work_queue
            .change(|state| {
                let pages = state.lanes.fenced(lane, acks, now_ns)?;
                Ok((pages, state.lanes.lost_count()))
            })
            .map_err(wrong_report)?;
        self.lanes.lost = lost;
        self.lanes.pages_again += pages;
        let why = self.lanes.faults.remove(&lane);
        if before < self.lanes.lost {
            let why =
                why.unwrap_or_else(|| "it made no progress, or the destination lost it".into());
            self.session.observer.event(&Event::LaneLost { lane, why });
        }
        Ok(())
    }

    /// Whether a lost control lane can be replaced: only before the guest is paused for
    /// the switchover.
    fn is_resumable(&self) -> bool {
        self.session.state == Source::Live
    }

    /// Sends a message that the session repeats on a new control lane. If this control lane is lost
    /// but can be replaced, the migration continues.
    fn send_resumable(&self, message: &Message) -> Result<(), Fault> {
        let control = &self.session.control;
        control.unless_resumable(control.lane.send(message), self.is_resumable())
    }

    /// Sends a ping to measure the round trip, unless one is outstanding.
    pub(super) fn ping_again(&self) -> Result<(), Fault> {
        let control = &self.session.control;
        control.unless_resumable(control.lane.ping_again(), self.is_resumable())
    }

    /// Replaces the control lane, or fails.
    fn resume_control(&mut self, lost: Fault) -> Result<(), Fault> {
        let session = &mut self.session;
        session.observer.event(&Event::ControlLost {
            why: lost.for_peer(),
        });
        session.control.lane.shutdown();
        let until = Instant::now() + session.options.control_limit;
        let mut last = lost;
        let stream = loop {
            if session.cancel.is_cancelled() {
                return Err(Fault::cancelled());
            }
            if Instant::now() >= until {
                return Err(given_up(last, session.options.control_limit));
            }
            match session.reopen_control(Some(session.cancel), &self.lanes.terms, until) {
                Ok((stream, selection)) if selection == session.control.terms.selection => {
                    break stream;
                }
                Ok(_) => {
                    return Err(Fault::new(
                        FaultCode::SecurityNotAgreed,
                        "the destination selected other terms on the new control lane",
                    ));
                }
                Err(fault) if fault.code == FaultCode::ControlLost => last = fault,
                Err(fault) => return Err(fault),
            }
            thread::sleep(RETRY);
        };
        session.adopt_control(stream)?;
        session.control_resumed += 1;
        let now_ns = session.work_queue.now_ns();
        lock(&session.work_queue.state)
            .lanes
            .control_resumed(now_ns);
        session.observer.event(&Event::ControlResumed);
        Ok(())
    }
}

/// The fault for a report that contradicts the state of the lane.
fn wrong_report(error: ReportError) -> Fault {
    Fault::new(
        FaultCode::Malformed,
        "invalid report about a lane from the destination",
    )
    .because(error)
}
