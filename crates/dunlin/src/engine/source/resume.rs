//! A control lane that is lost while the guest runs is made anew.
//!
//! Lanes and iteration go on meanwhile. The new one has a higher epoch; over it
//! the destination repeats what it has acknowledged, and what the source had
//! asked is asked again.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::switchover::Source;
use dunlin_proto::text::harmless;

use super::super::error::Fault;
use super::super::journal::RecordedPeer;
use super::super::lock;
use super::super::report::Event;
use super::session::Session;
use super::set_up::open_control;
use crate::lane::peers::PeerIdentity;

/// Between two attempts.
const RETRY: Duration = Duration::from_millis(100);

impl Session<'_> {
    /// Whether a lost control lane can be made anew: the destination knows the
    /// session, and the guest has not been paused for it.
    pub(super) fn is_resumable(&self) -> bool {
        self.state == Source::Live && self.terms.is_some()
    }

    /// Sends a message that a new control lane would bring about again: a
    /// control lane that cannot take it is lost, and nothing else.
    pub(super) fn say(&self, message: &Message) -> Result<(), Fault> {
        match self.control.send(message) {
            Err(fault) if fault.code == FaultCode::ControlLost && self.is_resumable() => {
                // Its reader reports the loss.
                self.control.shutdown();
                Ok(())
            }
            result => result,
        }
    }

    /// Asks for the round trip, unless the last question is not answered yet.
    pub(super) fn ask_anew(&self) -> Result<(), Fault> {
        match self.control.ask_anew() {
            Err(fault) if fault.code == FaultCode::ControlLost && self.is_resumable() => {
                self.control.shutdown();
                Ok(())
            }
            result => result,
        }
    }

    /// Makes the control lane anew, or ends the migration.
    pub(super) fn resume_control(&mut self, lost: Fault) -> Result<(), Fault> {
        self.observer.event(&Event::ControlLost {
            why: lost.for_peer(),
        });
        self.end_control();
        let Some(terms) = &self.terms else {
            return Err(lost);
        };
        let (to, tls, peer) = (terms.to.clone(), terms.tls.clone(), terms.peer.clone());
        let until = Instant::now() + self.options.control_limit;
        let mut last = lost;
        let stream = loop {
            if self.cancel.is_cancelled() {
                return Err(Fault::new(FaultCode::Cancelled, "the operator cancelled"));
            }
            if Instant::now() >= until {
                return Err(given_up(last, self.options.control_limit));
            }
            // One that was tried may stand at the destination already.
            self.raise_epoch();
            let deadline = until.min(Instant::now() + self.options.connect_limit);
            let cancel = Some(self.cancel);
            match open_control(self.host, cancel, &to, &tls, &self.offer, deadline) {
                Ok((stream, _)) if !stream.peer().is(&peer) => {
                    return Err(another_peer(stream.peer(), self.journal.peer()));
                }
                Ok((stream, selection)) if selection == self.selection => break stream,
                Ok(_) => {
                    return Err(Fault::new(
                        FaultCode::SecurityNotAgreed,
                        "the destination selects otherwise than at the beginning",
                    ));
                }
                Err(fault) if fault.code == FaultCode::ControlLost => last = fault,
                Err(fault) => return Err(fault),
            }
            thread::sleep(RETRY);
        };
        self.adopt_control(stream)?;
        self.control_resumed += 1;
        let now_ns = self.shared.now_ns();
        lock(&self.shared.state).lanes.control_resumed(now_ns);
        self.observer.event(&Event::ControlResumed);
        Ok(())
    }
}

/// The host that answers is allowed, and is not the session's destination, which is `peer`.
pub(super) fn another_peer(answers: &PeerIdentity, peer: &RecordedPeer) -> Fault {
    let RecordedPeer::Known(peer) = peer else {
        let what = "the session's record does not say which host its destination is";
        return Fault::new(FaultCode::Journal, what);
    };
    Fault::new(
        FaultCode::WrongIdentity,
        format!(
            "another host answers at the destination's address: {}; the destination is {}",
            harmless(&answers.to_string()),
            harmless(&peer.to_string())
        ),
    )
}

/// What it means that the last attempt failed like this.
fn given_up(last: Fault, limit: Duration) -> Fault {
    let what = format!("the control lane was lost and could not be made anew for {limit:?}");
    let cause = last.source.as_ref();
    let refused = cause
        .and_then(|cause| cause.downcast_ref::<io::Error>())
        .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if !refused {
        return Fault { what, ..last };
    }
    Fault {
        what: format!(
            "{what}; nobody listens there any more: the destination's process has ended, or its \
             kernel has killed it for want of memory"
        ),
        at_fault: AtFault::Peer,
        ..last
    }
}
