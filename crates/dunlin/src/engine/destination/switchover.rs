//! The switchover at the destination: waiting for *commit*, and after it for
//! *release*.

use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::{Destination, DestinationEvent as Step};

use super::super::control::FromPeer;
use super::super::fault::Fault;
use super::session::{Session, unexpected};
use super::{DestinationEvent, SessionEvent};

/// How long after *running* the source may take to let go, while its control
/// lane stands.
const RELEASE_LIMIT: Duration = Duration::from_secs(60);

impl Session<'_> {
    /// Loads the state, answers *ready*, and waits until it is decided where
    /// the VM lives. Everything that fails up to that is taken in here.
    pub(super) fn switch_over(&mut self) -> Result<(), Fault> {
        self.take(Step::Complete)?;
        self.progressed = Instant::now();
        while self.state == Destination::Prepared {
            self.await_commit()?;
        }
        if self.state != Destination::Running {
            return Ok(());
        }
        // From here on the source changes nothing any more: it may have died.
        if self.runs
            && let Some(vm) = &self.vm
        {
            vm.announce();
        }
        (self.observer)(&DestinationEvent::Running { runs: self.runs });
        if let Err(fault) = self.await_release() {
            self.warn(format!(
                "the source did not confirm that it let go of the VM: {}",
                fault.for_peer()
            ));
        }
        Ok(())
    }

    fn await_commit(&mut self) -> Result<(), Fault> {
        let event = self.next_event(Some(self.idle_until()))?;
        self.progress(event.as_ref())?;
        match event {
            Some(SessionEvent::Control(_, FromPeer::Message(Message::Commit { run }))) => {
                self.runs = run;
                self.take(Step::Commit { run })
            }
            // It crossed a late fence: everything has come.
            Some(SessionEvent::Control(_, FromPeer::Message(Message::Final(_)))) => Ok(()),
            Some(SessionEvent::Control(_, FromPeer::Message(other))) => Err(unexpected(&other)),
            Some(SessionEvent::Arrived(arrival)) => {
                self.turn_away(*arrival, "a session is under way");
                Ok(())
            }
            Some(_) | None => Ok(()),
        }
    }

    fn await_release(&mut self) -> Result<(), Fault> {
        let until = Instant::now() + RELEASE_LIMIT;
        loop {
            match self.next_event(Some(until))? {
                Some(SessionEvent::Control(_, FromPeer::Message(Message::Release))) => {
                    return self.take(Step::Release);
                }
                Some(SessionEvent::Control(_, FromPeer::Message(other))) => {
                    return Err(unexpected(&other));
                }
                Some(SessionEvent::Arrived(arrival)) => {
                    self.turn_away(*arrival, "a session is under way");
                }
                Some(SessionEvent::Cancelled) => self.take(Step::Cancelled)?,
                Some(_) => {}
                None => {
                    return Err(Fault::new(FaultCode::ControlLost, "no release came"));
                }
            }
        }
    }
}
