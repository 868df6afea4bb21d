//! A record that is all that a source's process has left behind: what it asks
//! for is done, the destination's answer included.
//!
//! ```text
//!   Doubt::taken_over ─▶ ask ─▶ AtSource, AtDestination ─▶ forget
//!                         │▲
//!                         ▼│ InDoubt: ask again
//!                     RanThenDied, InDoubt ─▶ resolve (the operator)
//! ```
//! A process that lives and holds a VM in doubt asks again in the same way.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::State;
use dunlin_proto::negotiate::{Features, LaneSecurity, Offer, SessionId, VERSIONS};
use dunlin_proto::switchover::{Source, SourceEvent as On};

use super::super::control::{ControlLane, FromPeer, Sequences};
use super::super::fault::{Fault, OrFault};
use super::super::host::Host;
use super::super::journal::{Journal, JournalError, Role};
use super::super::vmm::SourceVm;
use super::control::{another_peer, open_control};
use super::doubt::{Doubt, NO_RECORD, RETRY_FIRST, RETRY_LAST, ResolveError, VERDICT_LIMIT};
use super::options::Options;
use crate::lane::policy::ClientTls;

/// How long the destination may take to close the lane after the last word.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);

/// Where the VM of a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmLocation {
    /// It is the source's: it goes on there, unless it has died with the
    /// process that it lived in.
    AtSource,
    /// It is the destination's, and the copy at the source is destroyed.
    AtDestination,
    /// It ran at the destination and does not any more. Whether the paused
    /// copy goes on, from the moment of the pause, an operator decides.
    RanThenDied,
    /// Nobody knows; for this reason.
    InDoubt(String),
}

/// The lane on which the answer came, for the last word.
struct Asked {
    lane: Arc<ControlLane>,
    reader: JoinHandle<()>,
    answer: On,
}

impl Doubt {
    /// Takes over the record of a source whose process has died, or which has
    /// been told to let it go. `paused_by_owner` says whether the VM's owner
    /// had paused it before the migration, which the record does not hold: it
    /// is not resumed then.
    ///
    /// # Errors
    /// [`JournalError::Held`] while the process lives; otherwise as
    /// [`Journal::take`].
    pub fn taken_over(
        journal: &Journal,
        session: SessionId,
        paused_by_owner: bool,
    ) -> Result<Self, JournalError> {
        let journal = journal.take(session, Role::Source)?;
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

    /// Does what the record asks for. Where that is a question, the
    /// destination is asked on control lanes of their own until it answers,
    /// or `options.doubt_limit` is up; of the other options, those for
    /// connections count. Nothing cancels it before: this blocks for at most
    /// `options.doubt_limit`, the resolution of names and a second for the
    /// destination to close the lane. `vm` is the VM where it lives outside the process
    /// that has died; none if it died with that process.
    ///
    /// # Errors
    /// [`ResolveError`]: what follows from the answer could not be done.
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
                // None of them ends with an event.
                self.act(*action, vm, None)?;
            }
        }
        Ok(self.standing())
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
                Ok(asked) => {
                    let taken = self.take(asked.answer, vm, Some(&asked.lane));
                    end(asked.lane, asked.reader, true);
                    taken?;
                    return Ok(self.standing());
                }
                Err(fault) => fault,
            };
            let left = until.saturating_duration_since(Instant::now());
            // The last attempt often ends by this limit; those before say more.
            if left.is_zero() {
                let fault = why.unwrap_or(fault);
                return Ok(VmLocation::InDoubt(fault.for_peer()));
            }
            why = Some(fault);
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    fn standing(&self) -> VmLocation {
        match self.state {
            Source::Released => VmLocation::AtDestination,
            Source::RanThenDied => VmLocation::RanThenDied,
            Source::Kept => VmLocation::AtSource,
            _ => VmLocation::InDoubt(NO_RECORD.into()),
        }
    }

    /// One question, on a control lane with a higher epoch than any before.
    fn inquire_once(
        &mut self,
        tls: &ClientTls,
        options: &Options,
        host: &Arc<dyn Host>,
        until: Instant,
    ) -> Result<Asked, Fault> {
        let record = self.journal.record();
        let (session, attempt, to) = (record.session, record.attempt, record.peer.clone());
        let epoch = record.epoch.saturating_add(1);
        // Recorded first: the process after this one counts its messages from
        // the epoch on.
        self.journal
            .write_epoch(epoch)
            .or_fault(FaultCode::Journal, "the inquiry cannot be recorded")?;
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
            // Whoever has the answer listens no more.
            same.read(|_| Ok(false), |message| drop(sender.send(message)));
        };
        let reader = host
            .spawn("dunlin-inquiry".into(), Box::new(body))
            .or_fault(FaultCode::Kernel, "cannot start a thread")?;
        let answered = lane.send(&Message::Inquire { attempt }).and_then(|()| {
            let until = until.min(Instant::now() + VERDICT_LIMIT);
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let message = match messages.recv_timeout(left) {
                    Ok(FromPeer::Message(message)) => message,
                    Ok(FromPeer::Lost(fault)) => return Err(fault),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                        let what = "the destination does not answer the inquiry";
                        return Err(Fault::new(FaultCode::ControlLost, what));
                    }
                };
                lane.took();
                match message {
                    Message::Answer {
                        attempt: theirs,
                        verdict,
                    } if theirs == attempt => {
                        return Ok(On::answer(attempt, theirs, verdict));
                    }
                    // It was said before the question was read.
                    Message::Running { .. } => return Ok(On::Running),
                    Message::Cancel { .. } => {
                        return Ok(On::PeerCancelled);
                    }
                    Message::Refuse { fault, text } => return Err(Fault::told(fault, text)),
                    // What it repeats for a source that goes on, or says of
                    // another attempt.
                    _ => {}
                }
            }
        });
        match answered {
            Ok(answer) => Ok(Asked {
                lane,
                reader,
                answer,
            }),
            Err(fault) => {
                end(lane, reader, false);
                Err(fault)
            }
        }
    }
}

/// Ends a lane, where all was said after the peer has had its time to read it.
fn end(lane: Arc<ControlLane>, reader: JoinHandle<()>, said: bool) {
    if said && lane.stream().close().is_ok() {
        let until = Instant::now() + GOODBYE_LIMIT;
        while !reader.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
    }
    lane.shutdown();
    // Nothing is left to tell of a panic there.
    let _ = reader.join();
}
