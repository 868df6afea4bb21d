//! The switchover at the source: pause, last pages and state, *commit*.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_proto::control::{Digest, Final, Message, Section, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::switchover::{Source, SourceEvent};

use super::super::control::FromPeer;
use super::super::error::Fault;
use super::super::lock;
use super::super::memory::digest;
use super::super::report::{Event, Iteration};
use super::super::vmm::RunState;
use super::SessionEvent;
use super::session::{Session, unexpected};

/// How long the destination may take from *final* to *ready*, and from
/// *commit* to *running*. The guest stands still meanwhile, but giving up
/// sooner would not make it run sooner: the destination may be loading.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The same for the answer to an inquiry: what is asked there is known.
pub(super) const VERDICT_LIMIT: Duration = Duration::from_secs(10);

impl Session<'_> {
    /// From pre-copy's end until it is decided where the VM lives, as far as
    /// it can be.
    pub(super) fn switch_over(&mut self) -> Result<(), Fault> {
        self.take(SourceEvent::Converged)?;
        if self.state == Source::AwaitingReady {
            self.await_ready()?;
            // Beyond this line the VM is the destination's.
            self.take(SourceEvent::Ready { same_memory: true })?;
        }
        while matches!(self.state, Source::Committed | Source::InDoubt) && !self.gave_up {
            match self.await_verdict() {
                Ok(event) => {
                    let answered = matches!(event, SourceEvent::Answer { .. });
                    self.take(event)?;
                    // Asked again, it would say the same.
                    self.gave_up |= answered && self.state == Source::InDoubt;
                }
                Err(fault) => self.failed(fault),
            }
        }
        Ok(())
    }

    /// Pauses the guest and sends the rest, up to *final*.
    pub(super) fn pause_and_finish(&mut self) -> Result<(), Fault> {
        // Its owner may have paused it, or let it go on, since it was described.
        self.paused_by_owner = self.vm.run_state() == RunState::Paused;
        let began = Instant::now();
        self.paused = Some(began);
        self.vm.pause().map_err(|error| {
            Fault::new(FaultCode::Internal, "the guest cannot be paused").because(error)
        })?;
        self.downtime.pause = began.elapsed();
        self.observer.event(&Event::Paused);
        self.check_guest()?;
        self.last_pages(began)
    }

    /// Waits for *ready*, and for everything else that must be so before
    /// *commit*.
    fn await_ready(&mut self) -> Result<(), Fault> {
        let finalised = Instant::now();
        let theirs = match self.await_answer("ready", ANSWER_LIMIT)? {
            Message::Ready { digest } => digest,
            other => return Err(unexpected(&other)),
        };
        self.downtime.ready = finalised.elapsed();
        self.digests_equal = self.compare(theirs)?;
        self.vm.hold().map_err(|error| {
            Fault::new(
                FaultCode::Cancelled,
                "the migration was held and then refused",
            )
            .because(error)
        })?;
        self.settle()?;
        self.check_guest()
    }

    /// What the destination says after *commit*, as an event.
    fn await_verdict(&mut self) -> Result<SourceEvent, Fault> {
        let message = if self.state == Source::Committed {
            self.await_answer("commit", ANSWER_LIMIT)?
        } else {
            let left = self.doubt_until.map_or(VERDICT_LIMIT, |until| {
                until.saturating_duration_since(Instant::now())
            });
            self.await_answer("the inquiry", left.min(VERDICT_LIMIT))?
        };
        let event = match message {
            Message::Running {
                cpu_ns,
                downtime_ns,
            } => {
                self.destination_cpu = Duration::from_nanos(cpu_ns);
                self.downtime.guest = (downtime_ns != 0).then(|| Duration::from_nanos(downtime_ns));
                SourceEvent::Running
            }
            Message::Answer { attempt, verdict } => {
                if verdict != Verdict::Aborted {
                    // What it was lost by says no more where the VM is.
                    self.fault = None;
                }
                SourceEvent::answer(self.offer.attempt, attempt, verdict)
            }
            // It crossed the inquiry, and says nothing.
            Message::Ready { .. } if self.state == Source::InDoubt => {
                SourceEvent::Ready { same_memory: true }
            }
            other => return Err(unexpected(&other)),
        };
        let elapsed = |since: Option<Instant>| since.map_or(Duration::ZERO, |at| at.elapsed());
        self.downtime.resume = elapsed(self.committed);
        self.downtime.total = elapsed(self.paused);
        self.total = self.started.elapsed();
        Ok(event)
    }

    /// Looks at everything that has come by now: a cancellation, on either
    /// side, that came while the VMM was busy is still in time.
    fn settle(&mut self) -> Result<(), Fault> {
        while let Some(event) = self.next_event(Duration::ZERO)? {
            if let SessionEvent::Control(_, FromPeer::Message(message)) = event {
                return Err(unexpected(&message));
            }
        }
        Ok(())
    }

    /// Sends what is dirty and the state at the same time, waits for the
    /// lanes' ends and sends *final*.
    fn last_pages(&mut self, began: Instant) -> Result<(), Fault> {
        self.options.tune.detach();
        self.shared.set_rate(self.options.last_pass_rate);
        self.fetch_logs()?;
        let bytes_before = lock(&self.shared.state).traffic().wire_bytes;
        let (iteration, pages) = self.shared.begin_iteration(true);
        self.digest = self.start_digest()?;

        let state_began = Instant::now();
        self.relinquished = true;
        self.vm.deactivate().map_err(|error| {
            Fault::new(FaultCode::Internal, "disks and devices cannot be let go").because(error)
        })?;
        let sections = self.send_state()?;
        self.downtime.state = state_began.elapsed();

        while !lock(&self.shared.state).lanes.complete() {
            match self.next_event(ANSWER_LIMIT)? {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => {
                    return Err(unexpected(&message));
                }
                Some(_) => {}
                None => {
                    return Err(Fault::new(FaultCode::LaneLost, "the lanes do not end"));
                }
            }
        }
        self.downtime.last_pages = began.elapsed().saturating_sub(self.downtime.pause);
        let traffic = lock(&self.shared.state).traffic();
        self.iterations.push(Iteration {
            number: iteration,
            duration: self.downtime.last_pages,
            pages,
            dirtied_pages: 0,
            wire_bytes: traffic.wire_bytes - bytes_before,
            predicted_downtime: self
                .iterations
                .last()
                .map_or(Duration::ZERO, |last| last.predicted_downtime),
            throttle: 0,
        });
        self.send_final(iteration, sections)
    }

    /// Counts what the destination must have received.
    fn send_final(&mut self, iteration: u32, sections: u32) -> Result<(), Fault> {
        let state = lock(&self.shared.state);
        let (chunks, pages) = state.lanes.schedule().kept();
        let last = Final {
            chunks,
            iteration,
            sections,
            pages,
            fenced: state.lanes.fenced_count(),
            digest: None,
        };
        drop(state);
        self.last = Some(last.clone());
        self.control.send(&Message::Final(last))
    }

    /// A lane that was lost after *final* had counted its chunks: they have
    /// gone out again, and are counted anew.
    fn repeat_final(&mut self) -> Result<(), Fault> {
        let Some(last) = &self.last else {
            return Ok(());
        };
        let (iteration, sections) = (last.iteration, last.sections);
        let state = lock(&self.shared.state);
        let overtaken = state.lanes.fenced_count() != last.fenced && state.lanes.complete();
        drop(state);
        if overtaken {
            self.send_final(iteration, sections)?;
        }
        Ok(())
    }

    /// Hashes the memory of the paused guest on a thread of its own, where
    /// verification was agreed.
    fn start_digest(&mut self) -> Result<Option<Receiver<std::io::Result<Digest>>>, Fault> {
        if !self.options.verify {
            return Ok(None);
        }
        let (sender, receiver) = channel();
        let memory = Arc::clone(&self.memory);
        let cpu = Arc::clone(&self.cpu);
        self.spawn("dunlin-digest".into(), move || {
            // A session that has failed meanwhile needs no digest.
            let _ = sender.send(digest(&*memory, 1));
            super::session::add(&cpu, thread_cpu_time());
        })?;
        Ok(Some(receiver))
    }

    fn send_state(&mut self) -> Result<u32, Fault> {
        let sections = self.vm.save().map_err(|error| {
            Fault::new(FaultCode::Internal, "the state cannot be saved").because(error)
        })?;
        let bytes: usize = sections.iter().map(|section| section.bytes.len()).sum();
        let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
        if count > MAX_SECTIONS || bytes > MAX_STATE_BYTES {
            return Err(Fault::new(
                FaultCode::Internal,
                format!(
                    "the state has {count} sections of {bytes} bytes: more than {MAX_SECTIONS} or \
                     {MAX_STATE_BYTES}; put large state into a state-stream region"
                ),
            ));
        }
        for section in sections {
            self.control.send(&Message::Section(Section {
                name: section.name,
                instance: section.instance,
                version: section.version,
                required: section.required,
                bytes: section.bytes,
            }))?;
        }
        Ok(count)
    }

    fn await_answer(&mut self, what: &str, limit: Duration) -> Result<Message, Fault> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.next_event(left)? {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => return Ok(message),
                Some(_) if self.state == Source::AwaitingReady => self.repeat_final()?,
                Some(_) => {}
                None => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        format!("the destination did not answer {what} for {limit:?}"),
                    ));
                }
            }
        }
    }

    /// Compares the digests (I3); a difference ends the migration before
    /// *commit*.
    fn compare(&mut self, theirs: Option<Digest>) -> Result<Option<bool>, Fault> {
        let Some(ours) = self.digest.take() else {
            return Ok(None);
        };
        let ours = ours
            .recv()
            .map_err(|_| Fault::new(FaultCode::Internal, "the digest's thread panicked"))?
            .map_err(|error| {
                Fault::new(FaultCode::VerificationFailed, "guest memory cannot be read")
                    .because(error)
            })?;
        let theirs = theirs.ok_or_else(|| {
            Fault::new(
                FaultCode::Malformed,
                "the destination sent no digest although verification was agreed",
            )
        })?;
        if ours != theirs {
            return Err(Fault::new(
                FaultCode::VerificationFailed,
                "the memories differ at switchover",
            ));
        }
        Ok(Some(true))
    }
}
