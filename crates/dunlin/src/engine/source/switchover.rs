//! The switchover at the source: pause, last pages and state, until *commit*.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use dunlin_proto::control::{Digest, Final, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::switchover::{SourceAction as Do, SourceEvent};
use tracing::info_span;

use super::super::control::{FromPeer, unexpected};
use super::super::fault::{Fault, OrFault};
use super::super::journal::Role;
use super::super::lock;
use super::super::memory::digest;
use super::super::report::{Event, Iteration};
use super::super::threads::spawn_counted;
use super::super::vmm::RunState;
use super::committed::{Committed, not_answered};
use super::event::SessionEvent;
use super::guest::{LoggedGuest, PausedGuest, check_guest};
use super::lanes::Transfer;
use super::phase::{Done, Phase, failed, take};
use super::session::Session;
use super::settled::{Figures, Settled};

/// Pauses the guest, and sends the last pages and the state.
pub(super) struct Switchover<'a> {
    transfer: Transfer<'a>,
    guest: PausedGuest,
    figures: Figures,
}

/// What the switchover needs after it has sent the last pages and the state.
struct Sent {
    /// When the guest was paused.
    paused: Instant,
    /// Receives the source's digest, if verification was negotiated.
    digest: Option<Receiver<std::io::Result<Digest>>>,
    /// The most recent *final*.
    last: Final,
}

impl<'a> Phase<'a> for Switchover<'a> {
    fn session(&mut self) -> &mut Session<'a> {
        &mut self.transfer.session
    }

    fn act(&mut self, action: Do) -> Done {
        let session = &mut self.transfer.session;
        match action {
            Do::ResumeGuest => {
                session.vm_is = self.guest.resume(session);
                Done::Yes
            }
            other => session.act(other),
        }
    }
}

impl<'a> Switchover<'a> {
    pub(super) fn new(
        transfer: Transfer<'a>,
        logged: LoggedGuest,
        iterations: Vec<Iteration>,
    ) -> Self {
        Self {
            transfer,
            guest: PausedGuest {
                logged,
                deactivated: false,
            },
            figures: Figures {
                iterations,
                ..Figures::default()
            },
        }
    }

    /// Pauses the guest and sends everything that *commit* requires.
    pub(super) fn prepare(mut self) -> Result<Committed<'a>, Settled> {
        let agreed = self.pause_and_finish().and_then(|sent| {
            take(&mut self, SourceEvent::FinalSent)?;
            let paused = sent.paused;
            self.await_ready(sent)?;
            // From here on it is too late to cancel.
            let rest = take(&mut self, SourceEvent::Ready { same_memory: true })?;
            Ok((paused, rest))
        });
        match agreed {
            Ok((paused, rest)) => {
                let (transfer, guest, figures) = (self.transfer, self.guest, self.figures);
                Ok(Committed::new(transfer, guest, figures, paused, rest))
            }
            Err(fault) => {
                failed(&mut self, fault);
                Err(Settled::kept(self.transfer, self.guest.logged))
            }
        }
    }

    /// Pauses the guest and sends all remaining data, up to *final*.
    fn pause_and_finish(&mut self) -> Result<Sent, Fault> {
        let session = &mut self.transfer.session;
        // The owner may have paused or resumed the VM after the source described it.
        session.paused_by_owner = session.vm.run_state() == RunState::Paused;
        let paused = Instant::now();
        info_span!("pause")
            .in_scope(|| session.vm.pause())
            .or_fault(FaultCode::Internal, "cannot pause the guest")?;
        self.figures.downtime.pause = paused.elapsed();
        session.observer.event(&Event::Paused);
        check_guest(&**session.vm)?;
        let sent = self.last_pages(paused)?;
        let lane = &self.transfer.session.control.lane;
        lane.send(&Message::Final(sent.last.clone()))?;
        Ok(sent)
    }

    /// Sends the dirty pages and the state concurrently, and waits for the lanes to
    /// end.
    fn last_pages(&mut self, paused: Instant) -> Result<Sent, Fault> {
        let session = &self.transfer.session;
        session.options.tune.detach();
        let work_queue = Arc::clone(&session.work_queue);
        work_queue.set_rate(session.options.last_pass_rate);
        self.guest.logged.fetch(session)?;
        let bytes_before = lock(&work_queue.state).traffic().wire_bytes;
        let (iteration, pages) = work_queue.begin_iteration(true);
        let _last_pages = info_span!("last-pages", iteration).entered();
        let verify = session.options.verify;
        let digest = verify.then(|| self.start_digest()).transpose()?;

        let state_began = Instant::now();
        let state = info_span!("state").entered();
        self.guest.deactivated = true;
        let session = &self.transfer.session;
        session
            .vm
            .deactivate()
            .or_fault(FaultCode::Internal, "cannot release disks and devices")?;
        let sections = self.send_state()?;
        self.figures.downtime.state = state_began.elapsed();
        drop(state);

        self.await_lanes_end()?;
        let duration = paused.elapsed();
        let downtime = &mut self.figures.downtime;
        downtime.last_pages = duration.saturating_sub(downtime.pause);
        let traffic = lock(&work_queue.state).traffic();
        let iterations = &mut self.figures.iterations;
        iterations.push(Iteration {
            number: iteration,
            duration: downtime.last_pages,
            pages,
            dirtied_pages: 0,
            wire_bytes: traffic.wire_bytes - bytes_before,
            predicted_downtime: iterations
                .last()
                .map_or(Duration::ZERO, |last| last.predicted_downtime),
            throttle: 0,
        });
        Ok(Sent {
            paused,
            digest,
            last: self.count(iteration, sections),
        })
    }

    /// Waits until every lane has ended. The time limit starts anew only if a page is acknowledged
    /// for the first time, because a destination could send all other messages forever.
    fn await_lanes_end(&mut self) -> Result<(), Fault> {
        let work_queue = Arc::clone(&self.transfer.session.work_queue);
        let limit = self.transfer.session.options.answer_limit;
        let (mut acked_pages, mut until) = (None, Instant::now());
        loop {
            let state = lock(&work_queue.state);
            let (is_complete, acked) = (state.lanes.complete(), Some(state.acked_pages));
            drop(state);
            if is_complete {
                return Ok(());
            }
            if std::mem::replace(&mut acked_pages, acked) != acked {
                until = Instant::now() + limit;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = format!("the destination acknowledged nothing for {limit:?}");
                return Err(Fault::new(FaultCode::LaneLost, what));
            }
            self.transfer.next_silent(left)?;
        }
    }

    /// Returns the totals of what the destination must have received.
    fn count(&self, iteration: u32, sections: u32) -> Final {
        let state = lock(&self.transfer.session.work_queue.state);
        let (chunks, pages) = state.lanes.schedule().kept();
        Final {
            chunks,
            iteration,
            sections,
            pages,
            fenced: state.lanes.fenced_count(),
            digest: None,
        }
    }

    /// Hashes the memory of the paused guest on its own thread.
    fn start_digest(&mut self) -> Result<Receiver<std::io::Result<Digest>>, Fault> {
        let (sender, receiver) = channel();
        let session = &mut self.transfer.session;
        let memory = Arc::clone(&session.memory);
        let body = move || {
            // Sending fails only after the session has ended.
            let _ = sender.send(digest(&*memory, 1));
        };
        let thread = spawn_counted(&**session.host, "dunlin-digest", &session.cpu, body)?;
        session.threads.push(thread);
        Ok(receiver)
    }

    /// Waits for *ready* and for the other conditions of *commit*.
    fn await_ready(&mut self, mut sent: Sent) -> Result<(), Fault> {
        let _ready = info_span!("ready").entered();
        let finalised = Instant::now();
        let until = finalised + self.transfer.session.options.answer_limit;
        let theirs = loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.transfer.next_event(left)? {
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Ready { digest }))) => {
                    break digest;
                }
                Some(SessionEvent::Control(_, FromPeer::Message(other))) => {
                    return Err(unexpected(&other, Role::Destination));
                }
                Some(_) => self.repeat_final(&mut sent.last)?,
                None => return Err(not_answered("final")),
            }
        };
        self.figures.downtime.ready = finalised.elapsed();
        self.figures.digests_equal = compare(sent.digest, theirs)?;
        let session = &self.transfer.session;
        session.vm.hold().or_fault(
            FaultCode::Cancelled,
            "the VMM aborted the migration before commit",
        )?;
        // Process the events that arrived while one of the VMMs was busy: a cancellation among them
        // is still in time.
        while self.transfer.next_silent(Duration::ZERO)?.is_some() {}
        check_guest(&**self.transfer.session.vm)?;
        Ok(())
    }

    /// Sends *final* again if lanes were fenced after the last *final* and all lanes have ended:
    /// chunks may have been sent again, which changes the totals.
    fn repeat_final(&self, last: &mut Final) -> Result<(), Fault> {
        let state = lock(&self.transfer.session.work_queue.state);
        let overtaken = state.lanes.fenced_count() != last.fenced && state.lanes.complete();
        drop(state);
        if !overtaken {
            return Ok(());
        }
        *last = self.count(last.iteration, last.sections);
        let lane = &self.transfer.session.control.lane;
        lane.send(&Message::Final(last.clone()))
    }

    fn send_state(&self) -> Result<u32, Fault> {
        let session = &self.transfer.session;
        let sections = session
            .vm
            .save()
            .or_fault(FaultCode::Internal, "cannot save the state")?;
        let bytes: usize = sections.iter().map(|section| section.bytes.len()).sum();
        let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
        if count > MAX_SECTIONS || bytes > MAX_STATE_BYTES {
            return Err(Fault::new(
                FaultCode::Internal,
                format!(
                    "state over a limit: section count {count} (limit {MAX_SECTIONS}), {bytes} \
                     bytes (limit {MAX_STATE_BYTES}); put large state into a state-stream region"
                ),
            ));
        }
        for section in sections {
            session.control.lane.send(&Message::Section(section))?;
        }
        Ok(count)
    }
}

/// Compares the digests (invariant I3). A difference ends the migration before *commit*.
fn compare(
    ours: Option<Receiver<std::io::Result<Digest>>>,
    theirs: Option<Digest>,
) -> Result<Option<bool>, Fault> {
    let Some(ours) = ours else {
        return Ok(None);
    };
    let ours = ours
        .recv()
        .map_err(|_| Fault::new(FaultCode::Internal, "the digest thread panicked"))?
        .or_fault(FaultCode::VerificationFailed, "cannot read guest memory")?;
    let theirs = theirs.ok_or_else(|| {
        Fault::new(
            FaultCode::Malformed,
            "the destination sent no digest although verification was negotiated",
        )
    })?;
    if ours != theirs {
        return Err(Fault::new(
            FaultCode::VerificationFailed,
            "memory digests differ at switchover",
        ));
    }
    Ok(Some(true))
}
