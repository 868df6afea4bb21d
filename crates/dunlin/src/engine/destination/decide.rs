//! What the switchover's machine has decided is done here.
//!
//! [`Destination`] says what follows from an event; [`Session::take`] does it,
//! in order, until nothing more follows by itself.

use std::time::Duration;

use dunlin_proto::control::{Accept, Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{DestinationRecord, State};
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};

use super::super::control::FromPeer;
use super::super::fault::Fault;
use super::super::memory::digest;
use super::DestinationEvent;
use super::session::Session;

impl Session<'_> {
    /// Takes an event and does what follows.
    pub(super) fn take(&mut self, event: On) -> Result<(), Fault> {
        let (state, actions) = self.state.on(event).map_err(|error| {
            Fault::new(
                FaultCode::Malformed,
                "the peer broke the order of the switchover",
            )
            .because(error)
        })?;
        self.state = state;
        self.act_all(actions)
    }

    /// Begins the attempt: records *prepared* and accepts the VM.
    pub(super) fn begin(&mut self) -> Result<(), Fault> {
        let (state, actions) = Destination::begin();
        self.state = state;
        self.act_all(actions)
    }

    fn act_all(&mut self, actions: &[Do]) -> Result<(), Fault> {
        for action in actions {
            // It is the last of its list, if an event follows it.
            if let Some(event) = self.act(*action)? {
                self.take(event)?;
            }
        }
        Ok(())
    }

    /// Something failed, here or at the peer: whatever follows from that.
    pub(super) fn failed(&mut self, fault: Fault) {
        if self.state == Destination::Accepting {
            // Nothing has been promised yet.
            if fault.code != FaultCode::ControlLost {
                let _ = self.send(&Message::Cancel {
                    fault: fault.kind(),
                    text: fault.for_peer(),
                });
            }
            self.fault = Some(fault);
            self.discard();
            self.forget();
            return;
        }
        let event = match fault.code {
            _ if fault.told && self.state.may_cancel() => {
                // It goes on there, and will not ask.
                self.source_keeps = true;
                On::PeerCancelled
            }
            FaultCode::ControlLost if !fault.told => On::ControlLost,
            FaultCode::Cancelled if self.state.may_cancel() => On::Cancelled,
            _ => On::Failed,
        };
        self.fault = Some(fault);
        if let Err(impossible) = self.take(event) {
            // Every state that waits for something takes a failure.
            self.warn(format!(
                "a failure could not be taken: {}",
                impossible.for_peer()
            ));
        }
    }

    /// The source asks, on the newest control lane.
    pub(super) fn inquired(&mut self, attempt: u32) -> Result<(), Fault> {
        if self
            .offer
            .as_ref()
            .is_none_or(|ours| ours.attempt != attempt)
        {
            let what = "the source asks about another attempt than it offered";
            return Err(Fault::new(FaultCode::Malformed, what));
        }
        self.asked = true;
        if self.state.may_cancel() {
            let what = "the source lost the control lane and asks what became of its commit";
            self.fault = Some(Fault::new(FaultCode::ControlLost, what));
        }
        self.take(On::Inquired)
    }

    /// Does one thing; returns the event that it ends with, if it is one that
    /// does.
    fn act(&mut self, action: Do) -> Result<Option<On>, Fault> {
        match action {
            Do::Record(record) => return Ok(Some(self.record(record))),
            Do::SendAccept => {
                self.accepted = true;
                let accept = Message::Accept(Accept {
                    secret: self.secret.clone(),
                    lanes_max: self.options.lanes_max,
                    endpoints: self.options.endpoints.clone(),
                });
                self.tell(&accept);
            }
            Do::Refuse => {
                let (fault, text) = self.reason();
                self.tell(&Message::Refuse { fault, text });
            }
            Do::LoadState => {
                return Ok(Some(match self.load() {
                    Ok(()) => On::Loaded,
                    Err(fault) => {
                        self.fault = Some(fault);
                        On::Failed
                    }
                }));
            }
            Do::SendReady => {
                (self.observer)(&DestinationEvent::Ready);
                self.ready_sent = true;
                let digest = self.digest;
                self.tell(&Message::Ready { digest });
            }
            Do::Acquire => {
                (self.observer)(&DestinationEvent::Committed);
                return Ok(Some(self.acquire()));
            }
            Do::Resume => return Ok(Some(self.resume())),
            Do::Tell(verdict) => self.tell_verdict(verdict),
            // Done when the newest came: see `resume_control`.
            Do::CloseOld => {}
            Do::Drain => {
                for message in std::mem::take(&mut self.drained) {
                    match message {
                        FromPeer::Message(Message::Commit { run }) => {
                            self.runs = run;
                            self.take(On::Commit { run })?;
                        }
                        FromPeer::Message(Message::Cancel { .. }) => {
                            self.take(On::PeerCancelled)?
                        }
                        // Nothing else decides anything.
                        FromPeer::Message(_) | FromPeer::Lost(_) => {}
                    }
                }
                return Ok(Some(On::Drained));
            }
            Do::Close => {
                if let Some(control) = &self.control {
                    control.shutdown();
                }
            }
            Do::Discard => self.discard(),
            Do::Forget => self.forget(),
            Do::RefuseTooLate => self.warn("too late to cancel: the VM lives here".into()),
        }
        Ok(None)
    }

    fn record(&mut self, record: DestinationRecord) -> On {
        let Some(journal) = &mut self.journal else {
            return On::RecordFailed;
        };
        match journal.write(State::Destination(record)) {
            Ok(_) => {
                (self.observer)(&DestinationEvent::Recorded(record));
                On::Recorded
            }
            Err(error) => {
                let fault = Fault::new(
                    FaultCode::Journal,
                    format!("{record} could not be recorded"),
                );
                self.fault = Some(fault.because(error));
                On::RecordFailed
            }
        }
    }

    fn load(&mut self) -> Result<(), Fault> {
        let vm = self.built()?;
        if self.verifies() {
            let memory = vm.memory();
            self.digest = Some(digest(&*memory, 1).map_err(|error| {
                Fault::new(FaultCode::VerificationFailed, "guest memory cannot be read")
                    .because(error)
            })?);
        }
        vm.load(&self.sections).map_err(|error| {
            Fault::new(FaultCode::StateLoadFailed, "the state cannot be loaded").because(error)
        })?;
        self.sections = Vec::new();
        Ok(())
    }

    fn acquire(&mut self) -> On {
        let acquired = self.built().and_then(|vm| {
            vm.acquire().map_err(|error| {
                Fault::new(FaultCode::Internal, "disks and devices cannot be taken").because(error)
            })
        });
        match acquired {
            Ok(()) => On::Acquired,
            Err(fault) => {
                self.fault = Some(fault);
                On::Failed
            }
        }
    }

    fn resume(&mut self) -> On {
        let resumed = self.built().and_then(|vm| {
            vm.resume().map_err(|error| {
                Fault::new(FaultCode::Internal, "the guest cannot be started").because(error)
            })
        });
        match resumed {
            Ok(guest_downtime) => {
                self.guest_downtime = guest_downtime;
                On::Resumed
            }
            Err(fault) => {
                self.fault = Some(fault);
                On::Failed
            }
        }
    }

    fn tell_verdict(&mut self, verdict: Verdict) {
        let attempt = self.offer.as_ref().map_or(0, |ours| ours.attempt);
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let message = match verdict {
            Verdict::Running if !self.asked => Message::Running {
                cpu_ns: nanos(self.cpu_since(self.cpu_before)),
                downtime_ns: self.guest_downtime.map_or(0, nanos),
            },
            Verdict::Aborted if !self.asked => {
                let (fault, text) = self.reason();
                Message::Cancel { fault, text }
            }
            verdict => Message::Answer { attempt, verdict },
        };
        (self.observer)(&DestinationEvent::Told(verdict));
        self.tell(&message);
    }

    /// What cannot be sent, because the peer is gone, counts as sent: it asks.
    fn tell(&self, message: &Message) {
        if self.send(message).is_err()
            && let Some(control) = &self.control
        {
            control.shutdown();
        }
    }

    fn reason(&self) -> (FaultCode, String) {
        match &self.fault {
            Some(fault) => (fault.kind(), fault.for_peer()),
            None => (FaultCode::Internal, String::new()),
        }
    }

    /// No lane may write any more when the memory goes.
    fn discard(&mut self) {
        if let Some(shared) = &self.shared {
            shared.stop();
        }
        let _ = self.join_lanes();
        if let Some(vm) = self.vm.take() {
            vm.discard();
        }
    }

    /// Removes the record: nobody will ask.
    pub(super) fn forget(&mut self) {
        if let Some(journal) = self.journal.take()
            && let Err(error) = journal.forget()
        {
            self.warn(error.to_string());
        }
    }

    pub(super) fn warn(&self, text: String) {
        (self.observer)(&DestinationEvent::Warning(text));
    }
}
