//! Settles a session of which only the record is left after the source's process has
//! died: executes what the record requires, and asks the destination if necessary.
//!
//! ```text
//!   Doubt::taken_over ─▶ ask ─▶ AtSource, AtDestination ─▶ forget
//!                         │▲
//!                         ▼│ InDoubt: ask again
//!                     RanThenDied, InDoubt ─▶ resolve (the operator)
//! ```
//! A living process that holds a VM in doubt asks again in the same way.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_lane::policy::ClientTls;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::State;
use dunlin_proto::negotiate::{Features, LaneSecurity, Offer, SessionId, VERSIONS};
use dunlin_proto::switchover::{Source, SourceEvent as On};

use super::super::control::{ControlLane, FromPeer, Sequences};
use super::super::fault::{Fault, OrFault};
use super::super::host::Host;
use super::super::journal::{Journal, JournalError, Role, SessionJournal};
use super::super::threads::spawn;
use super::super::vmm::SourceVm;
use super::control::{another_peer, open_control};
use super::doubt::{Doubt, NO_RECORD, RETRY_FIRST, RETRY_LAST, ResolveError, VERDICT_LIMIT};
use super::options::Options;

/// How long the destination may take to close the lane after the last message.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Where the VM of a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmLocation {
    /// At the source, where it continues, unless it died with its process.
    AtSource,
    /// At the destination; the copy at the source is destroyed.
    AtDestination,
    /// It ran at the destination and no longer does. An operator decides whether the
    /// paused copy is resumed from the moment of the pause.
    RanThenDied,
    /// Unknown, for this reason.
    InDoubt(String),
}

impl Doubt {
    /// Takes over the record of a source after its process has died or released the
    /// record. `paused_by_owner`, which the record does not contain, is whether the
    /// VM's owner had paused it before the migration: then it is not resumed.
    ///
    /// # Errors
    /// [`JournalError::Held`] while the process lives; [`JournalError::Missing`], also if
    /// nothing was ever recorded; [`JournalError::Unreadable`]; [`JournalError::Io`].
    pub fn taken_over(
        journal: &Journal,
        session: SessionId,
        paused_by_owner: bool,
    ) -> Result<Self, JournalError> {
        let journal = SessionJournal::take(journal, session, Role::Source)?;
        let State::Source(record) = journal.record().state else {
            return Err(JournalError::Missing {
                path: Role::Source.name().into(),
            });
        };
        let (state, _) = Source::restarted(record);
        Ok(Self {
            journal,
            state,
            paused_by_owner,
        })
    }

    /// Executes what the record requires. If the outcome is unknown, asks the
    /// destination on separate control lanes until it answers or `options.doubt_limit`
    /// expires; of the other options, those for connections apply. It cannot be
    /// cancelled: it blocks for at most `options.doubt_limit`, plus one second for the
    /// destination to close the lane. `vm` is the VM if it lives outside the dead
    /// process; `None` if it died with that process.
    ///
    /// # Errors
    /// [`ResolveError`]: an action that follows from the answer failed.
    pub fn ask(
        &mut self,
        vm: Option<&dyn SourceVm>,
        tls: &ClientTls,
        options: &Options,
        host: &Arc<dyn Host>,
    ) -> Result<VmLocation, ResolveError> {
        if self.state == Source::InDoubt {
            return self.inquire(vm, tls, options, host);
        }
        if let State::Source(record) = self.journal.record().state {
            for action in Source::restarted(record).1 {
                // None of these actions results in an event.
                self.act(*action, vm, None)?;
            }
        }
        Ok(self.location())
    }

    fn inquire(
        &mut self,
        vm: Option<&dyn SourceVm>,
        tls: &ClientTls,
        options: &Options,
        host: &Arc<dyn Host>,
    ) -> Result<VmLocation, ResolveError> {
        let until = Instant::now() + options.doubt_limit;
        let mut pause = RETRY_FIRST;
        let mut why = None;
        loop {
            let fault = match self.inquire_once(tls, options, host, until) {
                Ok((lane, reader, answer)) => {
                    let taken = self.take(answer, vm, Some(&lane));
                    end(lane, reader, true);
                    taken?;
                    return Ok(self.location());
                }
                Err(fault) => fault,
            };
            let left = until.saturating_duration_since(Instant::now());
            // The last attempt is often cut short by this limit; the fault of an
            // earlier one says more.
            if left.is_zero() {
                let fault = why.unwrap_or(fault);
                return Ok(VmLocation::InDoubt(fault.for_peer()));
            }
            why = Some(fault);
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    fn location(&self) -> VmLocation {
        match self.state {
            Source::Released => VmLocation::AtDestination,
            Source::RanThenDied => VmLocation::RanThenDied,
            Source::Kept => VmLocation::AtSource,
            _ => VmLocation::InDoubt(NO_RECORD.into()),
        }
    }

    /// Asks once, on a control lane with a higher epoch than any before. Returns that lane, for
    /// the last message, its reader's thread and the answer.
    fn inquire_once(
        &mut self,
        tls: &ClientTls,
        options: &Options,
        host: &Arc<dyn Host>,
        until: Instant,
    ) -> Result<(Arc<ControlLane>, JoinHandle<()>, On), Fault> {
        let record = self.journal.record();
        let (session, attempt, to) = (record.session, record.attempt, record.peer.clone());
        let epoch = record.epoch.saturating_add(1);
        // Recorded first: a later process numbers its messages from this epoch.
        self.journal
            .write_epoch(epoch)
            .or_fault(FaultCode::Journal, "cannot record the inquiry")?;
        let offer = Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::NONE,
            security: LaneSecurity::Tls,
            session,
            attempt,
            epoch,
        };
        let deadline = until.min(Instant::now() + options.connect_limit);
        let (stream, _) = open_control(host, None, &to, tls, &offer, deadline)?;
        if !self.journal.is_with(stream.peer()) {
            return Err(another_peer(stream.peer(), self.journal.peer()));
        }
        let lane = Arc::new(ControlLane::new(
            stream,
            session,
            epoch,
            Arc::new(Sequences::of_epoch(epoch)),
            options.silence_limit,
        ));
        let (sender, messages) = channel();
        let same = Arc::clone(&lane);
        let body = move || {
            // Fails once the answer has been received.
            same.read(|_| Ok(false), |message| drop(sender.send(message)));
        };
        let reader = spawn(&**host, "dunlin-inquiry", body)?;
        let answered = lane.send(&Message::Inquire { attempt }).and_then(|()| {
            let until = until.min(Instant::now() + VERDICT_LIMIT);
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let message = match messages.recv_timeout(left) {
                    Ok(FromPeer::Message(message)) => message,
                    Ok(FromPeer::Lost(fault)) => return Err(fault),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                        let what = "the destination did not answer the inquiry";
                        return Err(Fault::new(FaultCode::ControlLost, what));
                    }
                };
                lane.backlog.took();
                match message {
                    Message::Answer {
                        attempt: theirs,
                        verdict,
                    } if theirs == attempt => {
                        return Ok(On::answer(attempt, theirs, verdict));
                    }
                    // Sent before the inquiry was read.
                    Message::Running { .. } => return Ok(On::Running),
                    Message::Cancel { .. } => return Ok(On::PeerCancelled),
                    Message::Refuse { fault, text } => return Err(Fault::from_peer(fault, text)),
                    // A repeated message for a source that continues, or an answer
                    // about another attempt.
                    _ => {}
                }
            }
        });
        match answered {
            Ok(answer) => Ok((lane, reader, answer)),
            Err(fault) => {
                end(lane, reader, false);
                Err(fault)
            }
        }
    }
}

/// Ends a lane. If `drain`, first gives the peer time to read the last message.
fn end(lane: Arc<ControlLane>, reader: JoinHandle<()>, drain: bool) {
    if drain && lane.stream.close().is_ok() {
        let until = Instant::now() + CLOSE_LIMIT;
        while !reader.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
    }
    lane.shutdown();
    // A panic there has no further effect.
    let _ = reader.join();
}
