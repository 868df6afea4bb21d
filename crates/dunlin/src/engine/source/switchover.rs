//! The switchover at the source: pause, last pages and state, *commit*.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use dunlin_proto::control::{Digest, Final, Message, Section};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{MAX_SECTIONS, MAX_STATE_BYTES};
use dunlin_proto::switchover::SourceEvent;
use dunlin_sys::affinity::thread_cpu_time;

use super::super::control::FromPeer;
use super::super::error::Fault;
use super::super::lock;
use super::super::memory::digest;
use super::super::report::{Downtime, Event, Iteration};
use super::super::vmm::RunState;
use super::SessionEvent;
use super::session::{Session, unexpected};

/// How long the destination may take from *final* to *ready*, and from
/// *commit* to *running*. The guest stands still meanwhile, but giving up
/// sooner would not make it run sooner: the destination may be loading.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// What came of a switchover that went through.
pub(super) struct Outcome {
    pub(super) total: Duration,
    pub(super) downtime: Downtime,
    pub(super) destination_cpu: Duration,
    pub(super) digests_equal: Option<bool>,
    pub(super) runs: bool,
}

impl Session<'_> {
    /// From pre-copy's end to *running* at the destination.
    pub(super) fn switch_over(&mut self) -> Result<Outcome, Fault> {
        let mut downtime = Downtime::default();
        self.step(SourceEvent::Converged)?;
        self.step(SourceEvent::Recorded)?;
        // Its owner may have paused it, or let it go on, since it was described.
        self.paused_by_owner = self.vm.run_state() == RunState::Paused;
        let began = Instant::now();
        self.vm.pause().map_err(|error| {
            Fault::new(FaultCode::Internal, "the guest cannot be paused").because(error)
        })?;
        downtime.pause = began.elapsed();
        self.observer.event(&Event::Paused);
        self.check_guest()?;

        let cpu = self.last_pages(began, &mut downtime)?;
        self.step(SourceEvent::FinalSent)?;
        let finalised = Instant::now();
        let theirs = self.await_ready()?;
        downtime.ready = finalised.elapsed();
        let digests_equal = self.compare(cpu, theirs)?;
        self.vm.hold().map_err(|error| {
            Fault::new(
                FaultCode::Cancelled,
                "the migration was held and then refused",
            )
            .because(error)
        })?;
        self.settle()?;
        self.check_guest()?;

        // Beyond this line the VM is the destination's.
        let action = SourceEvent::Ready { same_memory: true };
        self.step(action)?;
        self.observer.event(&Event::Committing);
        let committed = Instant::now();
        let runs = !self.paused_by_owner;
        self.control.send(&Message::Commit { run: runs })?;
        let (destination_cpu, guest) = self.await_running()?;
        self.step(SourceEvent::Running)?;
        self.step(SourceEvent::Recorded)?;
        downtime.resume = committed.elapsed();
        downtime.total = began.elapsed();
        downtime.guest = guest;
        let total = self.started.elapsed();
        self.let_go_of_guest();
        self.vm.destroy();
        // The destination runs; whether it hears of our end changes nothing.
        let _ = self.control.send(&Message::Release);
        self.observer.event(&Event::Running);
        Ok(Outcome {
            total,
            downtime,
            destination_cpu,
            digests_equal,
            runs,
        })
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
    /// lanes' ends and sends *final*. Returns where our digest will come from.
    fn last_pages(
        &mut self,
        began: Instant,
        downtime: &mut Downtime,
    ) -> Result<Option<Receiver<std::io::Result<Digest>>>, Fault> {
        lock(&self.shared.state)
            .pace
            .set_rate(self.options.last_pass_rate);
        self.fetch_logs()?;
        let bytes_before = lock(&self.shared.state).traffic().wire_bytes;
        let (iteration, pages) = self.begin_iteration(true);
        let ours = self.start_digest()?;

        let state_began = Instant::now();
        self.relinquished = true;
        self.vm.relinquish().map_err(|error| {
            Fault::new(FaultCode::Internal, "disks and devices cannot be let go").because(error)
        })?;
        let sections = self.send_state()?;
        downtime.state = state_began.elapsed();

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
        downtime.last_pages = began.elapsed().saturating_sub(downtime.pause);
        let traffic = lock(&self.shared.state).traffic();
        self.iterations.push(Iteration {
            number: iteration,
            duration: downtime.last_pages,
            pages,
            dirtied_pages: 0,
            wire_bytes: traffic.wire_bytes - bytes_before,
            predicted_downtime: self
                .iterations
                .last()
                .map_or(Duration::ZERO, |last| last.predicted_downtime),
            throttle: 0,
        });
        self.send_final(iteration, sections)?;
        Ok(ours)
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

    fn await_ready(&mut self) -> Result<Option<Digest>, Fault> {
        match self.await_answer("ready")? {
            Message::Ready { digest } => Ok(digest),
            other => Err(unexpected(&other)),
        }
    }

    fn await_running(&mut self) -> Result<(Duration, Option<Duration>), Fault> {
        match self.await_answer("running")? {
            Message::Running {
                cpu_ns,
                downtime_ns,
            } => Ok((
                Duration::from_nanos(cpu_ns),
                (downtime_ns != 0).then(|| Duration::from_nanos(downtime_ns)),
            )),
            other => Err(unexpected(&other)),
        }
    }

    fn await_answer(&mut self, what: &str) -> Result<Message, Fault> {
        let until = Instant::now() + ANSWER_LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.next_event(left)? {
                Some(SessionEvent::Control(_, FromPeer::Message(message))) => return Ok(message),
                Some(_) => self.repeat_final()?,
                None => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        format!("the destination did not answer {what}"),
                    ));
                }
            }
        }
    }

    /// Compares the digests (I3); a difference ends the migration before
    /// *commit*.
    fn compare(
        &mut self,
        ours: Option<Receiver<std::io::Result<Digest>>>,
        theirs: Option<Digest>,
    ) -> Result<Option<bool>, Fault> {
        let Some(ours) = ours else {
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
