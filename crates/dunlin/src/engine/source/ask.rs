//! Settles a session after the source's process has died and left only its record: executes
//! what the record requires, and asks the destination if necessary.
//!
//! ```text
//!   Doubt::taken_over ─▶ ask ─▶ AtSource, AtDestination ─▶ forget
//!                         │▲
//!                         ▼│ InDoubt: ask again
//!                     RanThenDied, InDoubt ─▶ the operator decides: resolve, or give_up if
//!                                             this process has no VM
//! ```
//! A living process that holds a VM in doubt asks again in the same way.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use dunlin_lane::policy::ClientTls;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::State;
use dunlin_proto::negotiate::{Features, LaneSecurity, Offer, SessionId, VERSIONS};
use dunlin_proto::switchover::{Source, SourceEvent as On};

use super::super::control::{FromPeer, Sequences};
use super::super::control_link::{CLOSE_LIMIT, ControlLink, ControlTerms};
use super::super::fault::{Fault, OrFault};
use super::super::host::Host;
use super::super::journal::{Journal, JournalError, Role, SessionJournal};
use super::super::threads::CpuTime;
use super::super::vmm::SourceVm;
use super::control::{another_peer, open_control, reported};
use super::doubt::{Doubt, Inquiries, NO_RECORD, ResolveError, VERDICT_LIMIT};
use super::options::Options;

/// Where the VM of a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmLocation {
    /// The VM is at the source, unless it died with its process.
    AtSource,
    /// The VM is at the destination, or an operator has given up the copy at the source. That copy is
    /// destroyed.
    AtDestination,
    /// The VM ran at the destination and no longer does. An operator decides whether the
    /// paused copy is resumed from the moment of the pause.
    RanThenDied,
    /// The location is unknown, for this reason.
    InDoubt(String),
}

impl Doubt {
    /// Takes over the record of a source after its process has died or released the record.
    /// `paused_by_owner`, which the record does not contain, says whether the VM's owner had paused
    /// the VM before the migration. If so, the VM is not resumed.
    ///
    /// # Errors
    /// [`JournalError::Held`] while the process lives; [`JournalError::Missing`], including
    /// when nothing was ever recorded; [`JournalError::Unreadable`]; [`JournalError::Io`].
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

    /// Executes what the record requires. If the outcome is unknown, asks the destination on
    /// separate control lanes until the destination answers or `options.doubt_limit` expires. Of
    /// the other options, only those for connections apply. `vm` is the VM if it ran outside the
    /// dead process, or `None` if the VM died with that process.
    ///
    /// The call cannot be cancelled. It stops asking after `options.doubt_limit`. After that, it
    /// waits at most one second for the destination to close the lane.
    ///
    /// # Errors
    /// [`ResolveError`]: an action that follows from the record or the answer failed.
    pub fn ask(
        &mut self,
        vm: Option<&dyn SourceVm>,
        tls: &ClientTls,
        options: &Options,
        host: &Arc<dyn Host>,
    ) -> Result<VmLocation, ResolveError> {
        if self.state != Source::InDoubt {
            if let State::Source(record) = self.journal.record().state {
                for action in Source::restarted(record).1 {
                    // These actions result in no event.
                    self.act(*action, vm, None)?;
                }
            }
            return Ok(self.location());
        }
        let mut inquiries = Inquiries::new(options.doubt_limit);
        let mut why = None;
        // Make at least one attempt, even if the limit is zero.
        inquiries.wait();
        loop {
            let fault = match self.inquire(tls, options, host, inquiries.until) {
                Ok((inquiry, answer)) => {
                    let taken = self.take(answer, vm, Some(&inquiry.control.lane));
                    inquiry.close();
                    taken?;
                    return Ok(self.location());
                }
                Err(fault) => fault,
            };
            // The last attempt often ends at the limit, so the fault of an earlier attempt is more
            // informative.
            if inquiries.left().is_zero() {
                let fault = why.unwrap_or(fault);
                return Ok(VmLocation::InDoubt(fault.for_peer()));
            }
            why = Some(fault);
            inquiries.wait();
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

    /// Asks once, on a control lane with a higher epoch than any before. Returns the answer, and
    /// the lane, on which the caller sends its last message.
    fn inquire(
        &mut self,
        tls: &ClientTls,
        options: &Options,
        host: &Arc<dyn Host>,
        until: Instant,
    ) -> Result<(Inquiry, On), Fault> {
        let record = self.journal.record();
        let (session, attempt, to) = (record.session, record.attempt, record.peer.clone());
        let epoch = record.epoch.saturating_add(1);
        // Record the epoch first, so that a later process uses a higher one and numbers its
        // messages above those of this process.
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
        let (stream, selection) = open_control(host, None, &to, tls, &offer, deadline)?;
        if !self.journal.is_with(stream.peer()) {
            return Err(another_peer(stream.peer(), self.journal.peer()));
        }
        let terms = ControlTerms {
            sequences: Arc::new(Sequences::of_epoch(epoch)),
            offer,
            selection,
            silence_limit: options.silence_limit,
        };
        let (sender, messages) = channel();
        let control = ControlLink::start(
            stream,
            terms,
            &**host,
            &CpuTime::default(),
            |_| Ok(false),
            // Sending does not fail, because the receiver outlives the reader.
            move |_, message| drop(sender.send(message)),
        )?;
        let inquiry = Inquiry { control, messages };
        let until = until.min(Instant::now() + VERDICT_LIMIT);
        let asked = inquiry.control.lane.send(&Message::Inquire { attempt });
        match asked.and_then(|()| inquiry.await_answer(attempt, until)) {
            Ok(answer) => Ok((inquiry, answer)),
            Err(fault) => {
                // Ignore a panic of the reader, because the fault is more informative.
                let _ = inquiry.control.end();
                Err(fault)
            }
        }
    }
}

/// A control lane for one inquiry, and what its reader delivers.
struct Inquiry {
    control: ControlLink,
    messages: Receiver<FromPeer>,
}

impl Inquiry {
    fn await_answer(&self, attempt: u32, until: Instant) -> Result<On, Fault> {
        loop {
            match self.next(until) {
                Some(FromPeer::Message(message)) => match message {
                    Message::Answer {
                        attempt: theirs,
                        verdict,
                    } if theirs == attempt => return Ok(On::answer(attempt, theirs, verdict)),
                    // The destination may have sent one of these messages before it read the
                    // inquiry.
                    Message::Running { .. } => return Ok(On::Running),
                    Message::Cancel { .. } => return Ok(On::PeerCancelled),
                    Message::Refuse { fault, text } => return Err(reported(fault, &text)),
                    // Ignore a message that the destination repeats for a source that continues the
                    // migration, and an answer about another attempt.
                    _ => {}
                },
                Some(FromPeer::Lost(fault)) => return Err(fault),
                None => {
                    let what = "the destination did not answer the inquiry";
                    return Err(Fault::new(FaultCode::ControlLost, what));
                }
            }
        }
    }

    /// What the reader delivers next; `None` after `until`, or if the reader has ended.
    fn next(&self, until: Instant) -> Option<FromPeer> {
        let left = until.saturating_duration_since(Instant::now());
        let from_peer = self.messages.recv_timeout(left).ok()?;
        self.control.took(&from_peer);
        Some(from_peer)
    }

    /// Ends the lane, after giving the peer time to read the last message.
    fn close(self) {
        if self.control.lane.stream.close().is_ok() {
            let until = Instant::now() + CLOSE_LIMIT;
            while let Some(FromPeer::Message(_)) = self.next(until) {}
        }
        // Ignore a panic of the reader, because the answer has already arrived.
        let _ = self.control.end();
    }
}
