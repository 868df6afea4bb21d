//! Answers inquiries about sessions that are not in progress: from [`Held`] if the VM is in this
//! process, otherwise from the journal.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;

use dunlin_lane::accept::{Arrival, accept};
use dunlin_lane::control::ControlStream;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::ServerTls;
use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_proto::control::{Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{DestinationRecord, State};
use dunlin_proto::negotiate::{
    Features, Offer, Opening, Refusal, SessionId, Supported, VERSIONS, select,
};
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};

use super::super::control::{ControlLane, SILENCE_LIMIT};
use super::super::fault::{Fault, OrFault};
use super::super::host::{Cancel, Host};
use super::super::journal::{Journal, JournalError, RecordedPeer, Role, SessionJournal};
use super::super::lock;
use super::super::sync::Mutex;
use super::refusal::refuse;

/// Maximum number of inquiries answered at the same time. Each inquiry has a thread and an
/// authenticated peer. A new inquiry displaces the oldest (invariant I7).
const ANSWERS_LIMIT: usize = 8;

const NOT_THE_PEER: &str = "the session's source has another identity";

/// What the offer on an inquiry's control lane may ask for: every feature of a migration and every
/// security, because no data lane follows.
pub(super) const INQUIRIES: Supported = Supported {
    versions: VERSIONS,
    features: Features::VERIFY,
    required: Features::NONE,
    plain_allowed: true,
    ipsec: true,
};

/// A VM that is in this process and that the source has not released yet.
pub(super) struct Held {
    session: SessionId,
    /// The only peer that may ask.
    peer: RecordedPeer,
    outcome: Outcome,
    /// `None` after [`Answering::stop`]. Also `None` after the source has released the VM: then no
    /// inquiry is left to answer.
    accepting: Option<Arc<Accepting>>,
}

/// A handle of a thread that accepts connections. Dropping the last clone stops the thread.
pub(super) struct Accepting(pub(super) Waker);

impl Accepting {
    /// Stops the thread, even if other clones of this handle exist.
    pub(super) fn stop(&self) {
        self.0.wake();
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The outcome of a session that is not in progress.
struct Outcome {
    state: Destination,
    /// The session's journal file. It is locked while the VM's process lives; without the lock,
    /// another process would consider the VM dead. `None` if the session has no record, if the
    /// source has released the VM, or if the VM has moved on to another host.
    journal: Option<SessionJournal>,
}

/// Answers to inquiries, each on its own thread.
pub(super) struct Answers {
    host: Arc<dyn Host>,
    journal: Journal,
    /// The VMs that this process has received.
    held: Vec<Arc<Mutex<Held>>>,
    in_progress: VecDeque<(Arc<ControlLane>, JoinHandle<()>)>,
}

impl Held {
    /// The VM of the session with this record. Keeps `accepting` until the source has released the
    /// VM.
    fn new(record: SessionJournal, accepting: Arc<Accepting>) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            session: record.record().session,
            peer: record.peer().clone(),
            outcome: Outcome {
                state: Destination::Running,
                journal: Some(record),
            },
            accepting: Some(accepting),
        }))
    }

    /// Whether `peer` is the session's peer.
    fn is_with(&self, peer: &PeerIdentity) -> bool {
        matches!(&self.peer, RecordedPeer::Known(principal) if peer.is(principal))
    }
}

impl Answers {
    pub(super) fn new(host: &Arc<dyn Host>, journal: &Journal) -> Self {
        Self {
            host: Arc::clone(host),
            journal: journal.clone(),
            held: Vec::new(),
            in_progress: VecDeque::new(),
        }
    }

    /// From now on, answers inquiries about the VM of the session with this record. Keeps
    /// `accepting`, and with it the thread that answers, until the source has released the VM.
    pub(super) fn hold(
        &mut self,
        record: SessionJournal,
        accepting: Arc<Accepting>,
    ) -> Arc<Mutex<Held>> {
        self.held.retain(|held| lock(held).accepting.is_some());
        let held = Held::new(record, accepting);
        self.held.push(Arc::clone(&held));
        held
    }

    /// Answers on a control lane of a session that is not in progress here.
    pub(super) fn begin(&mut self, stream: ControlStream, offer: &Offer) -> Result<(), Refusal> {
        let is_about = |held: &Held| held.session == offer.session && held.accepting.is_some();
        let mut held = self.held.iter();
        let held = held.find(|held| is_about(&lock(held))).cloned();
        let mut bytes = Vec::new();
        let agreed = match &held {
            Some(held) if !lock(held).is_with(stream.peer()) => Err(Refusal {
                fault: FaultCode::WrongIdentity,
                text: NOT_THE_PEER.into(),
            }),
            _ => select(offer, &INQUIRIES),
        };
        let selection = match agreed {
            Ok(selection) => selection,
            Err(refusal) => {
                refuse(&stream, &refusal);
                return Err(refusal);
            }
        };
        if selection.encode(&mut bytes).is_err() || stream.send(&bytes).is_err() {
            // The peer has disconnected. It will ask again.
            return Ok(());
        }
        self.in_progress.retain(|(_, thread)| !thread.is_finished());
        if self.in_progress.len() >= ANSWERS_LIMIT
            && let Some(oldest) = self.in_progress.pop_front()
        {
            end(oldest);
        }
        let peer = stream.peer().clone();
        let lane = Arc::new(ControlLane::new(
            stream,
            offer.session,
            offer.epoch,
            Arc::default(),
            SILENCE_LIMIT,
        ));
        let (same, journal) = (Arc::clone(&lane), self.journal.clone());
        let body = move || answer_on(&same, &journal, held.as_deref(), &peer);
        // If no thread can be started, the lane is dropped and the source asks again.
        if let Ok(thread) = self.host.spawn("dunlin-answer".into(), Box::new(body)) {
            self.in_progress.push_back((lane, thread));
        }
        Ok(())
    }

    /// Accepts connections and answers inquiries until `stopped`. Refuses new sessions as busy,
    /// with the text in `busy`.
    fn serve(
        &mut self,
        listener: &TcpListener,
        tls: &ServerTls,
        stopped: &Wakeup,
        busy: &str,
    ) -> io::Result<()> {
        let result = accept(listener, tls, stopped, |arrival| match arrival {
            Arrival::Control {
                stream,
                opening: Opening::Offer(offer),
            } if offer.is_inquiry() => {
                // If `begin` fails, it has already sent a refusal.
                let _ = self.begin(stream, &offer);
            }
            Arrival::Control {
                stream,
                opening: Opening::Offer(_),
            } => {
                let (fault, text) = (FaultCode::Busy, busy.into());
                refuse(&stream, &Refusal { fault, text });
            }
            _ => {}
        });
        self.end();
        result
    }

    /// Ends all answers.
    pub(super) fn end(&mut self) {
        self.in_progress.drain(..).for_each(end);
        self.held.drain(..).for_each(leak);
    }
}

/// Leaks the record of a VM that is here, so that the record stays locked while the VM's process
/// lives.
fn leak(held: Arc<Mutex<Held>>) {
    let is_recorded = lock(&held).outcome.journal.is_some();
    if is_recorded {
        std::mem::forget(held);
    }
}

fn end((lane, thread): (Arc<ControlLane>, JoinHandle<()>)) {
    lane.shutdown();
    // Ignore a panic of the answering thread: it affects only this inquiry.
    let _ = thread.join();
}

/// Answers on one control lane until the source closes it.
fn answer_on(
    lane: &ControlLane,
    journal: &Journal,
    held: Option<&Mutex<Held>>,
    peer: &PeerIdentity,
) {
    let mut from_journal = None;
    lane.read(
        |message| {
            let result = match (held, message) {
                (Some(held), Message::Inquire { attempt }) => {
                    answer_of(&mut lock(held).outcome, *attempt, lane)
                }
                (Some(held), Message::Release) => {
                    let mut held = lock(held);
                    on(&mut held.outcome, On::Release);
                    held.accepting = None;
                    Ok(())
                }
                (None, Message::Inquire { attempt }) => {
                    if from_journal.is_none() {
                        from_journal = Some(look_up(journal, lane.session, peer)?);
                    }
                    match &mut from_journal {
                        Some(found) => answer_of(found, *attempt, lane),
                        None => Ok(()),
                    }
                }
                (None, Message::Release) => {
                    if let Some(found) = &mut from_journal {
                        on(found, On::Release);
                    }
                    Ok(())
                }
                (_, message) => Err(Fault::new(
                    FaultCode::UnknownSession,
                    format!(
                        "unexpected {}: the session has already ended at the destination",
                        message.kind().name()
                    ),
                )),
            };
            if let Err(fault) = &result
                && fault.code == FaultCode::UnknownSession
            {
                // The refusal is for a source that has not sent *commit*. Such a source keeps the
                // VM.
                let _ = lane.send(&Message::Refuse {
                    fault: fault.code,
                    text: fault.for_peer(),
                });
            }
            result.map(|()| true)
        },
        |_| (),
    );
    lane.shutdown();
}

/// Reads the session's outcome from the journal, as a restarted destination does.
fn look_up(journal: &Journal, session: SessionId, peer: &PeerIdentity) -> Result<Outcome, Fault> {
    let (record, journal) = match SessionJournal::take(journal, session, Role::Destination) {
        Ok(journal) => match journal.record().state {
            State::Destination(record) if journal.is_with(peer) => (Some(record), Some(journal)),
            _ => return Err(Fault::new(FaultCode::WrongIdentity, NOT_THE_PEER)),
        },
        Err(JournalError::Missing { .. }) => (None, None),
        // The process that has the VM may have locked the record. Only that process can answer.
        Err(error) => {
            let what = "cannot take over the session's record";
            return Err(Fault::new(FaultCode::Journal, what).because(error));
        }
    };
    let (state, actions) = Destination::restarted(record);
    let mut found = Outcome { state, journal };
    act(&mut found, actions);
    Ok(found)
}

fn answer_of(outcome: &mut Outcome, attempt: u32, lane: &ControlLane) -> Result<(), Fault> {
    let ours = outcome
        .journal
        .as_ref()
        .map_or(attempt, |journal| journal.record().attempt);
    match on(outcome, On::Inquired) {
        Some(verdict) if ours == attempt => lane.send(&Message::Answer { attempt, verdict }),
        // Send no verdict if the inquiry is about another attempt, or if *aborted* could not be
        // recorded.
        _ => Err(Fault::new(
            FaultCode::Journal,
            "the inquiry is about another attempt, or the outcome could not be recorded",
        )),
    }
}

/// Applies an event; returns the verdict to send, if any.
fn on(outcome: &mut Outcome, event: On) -> Option<Verdict> {
    let (state, actions) = outcome.state.on(event).ok()?;
    outcome.state = state;
    act(outcome, actions)
}

fn act(outcome: &mut Outcome, actions: &[Do]) -> Option<Verdict> {
    let mut verdict = None;
    for action in actions {
        match action {
            Do::Record(record) => {
                let written = outcome
                    .journal
                    .as_mut()
                    .map(|journal| journal.write(State::Destination(*record)));
                let event = match written {
                    Some(Ok(())) => On::Recorded,
                    _ => On::RecordFailed,
                };
                verdict = on(outcome, event).or(verdict);
            }
            Do::Tell(reached) => verdict = Some(*reached),
            Do::Forget => {
                if let Some(journal) = outcome.journal.take() {
                    // A record that cannot be removed does no harm: it still says correctly that
                    // the VM ran here.
                    let _ = journal.forget();
                }
            }
            _ => {}
        }
    }
    verdict
}

/// Answers inquiries about a VM that has arrived here, until the source releases the VM. Uses its
/// own thread, or that of a [`Listener`](super::Listener).
///
/// If this value is dropped, the thread goes on answering, because the process must answer as long
/// as it has the VM.
pub struct Answering {
    held: Arc<Mutex<Held>>,
    /// The thread that answers only for this VM; `None` if the thread of a listener answers.
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Answering {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Answering").finish_non_exhaustive()
    }
}

impl Answering {
    /// Answers inquiries about the VM from `record`, and about other sessions from `journal`.
    pub(super) fn start(
        listener: Arc<TcpListener>,
        tls: ServerTls,
        host: &Arc<dyn Host>,
        journal: &Journal,
        record: SessionJournal,
    ) -> io::Result<Self> {
        let (stop, stopped) = waker()?;
        let mut answers = Answers::new(host, journal);
        let held = answers.hold(record, Arc::new(Accepting(stop)));
        let body = move || {
            let text = "the destination's process has already received a VM";
            // If the listener fails, inquiries stay unanswered, and a source in doubt stays in
            // doubt.
            let _ = answers.serve(&listener, &tls, &stopped, text);
        };
        let thread = Some(host.spawn("dunlin-inquiries".into(), Box::new(body))?);
        Ok(Self { held, thread })
    }

    /// The handle for inquiries about `held`, which the thread of a listener answers.
    pub(super) fn shared(held: Arc<Mutex<Held>>) -> Self {
        Self { held, thread: None }
    }

    /// Whether the source has released the VM. For a VM that did not arrive through a
    /// [`Listener`](super::Listener), also true if the listening socket has failed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.thread {
            Some(thread) => thread.is_finished(),
            None => lock(&self.held).accepting.is_none(),
        }
    }

    /// Stops answering, and leaves a record from which a later listener on this host answers that
    /// the VM does not belong to the old source. Call it after the VM has been moved away from this
    /// host, before the VM's process ends. If the record remained *running*, a later listener would
    /// answer that the VM died.
    ///
    /// # Errors
    /// The record could not be written and synced, so it may still say *running*.
    pub fn moved_on(self) -> Result<(), JournalError> {
        let journal = lock(&self.held).outcome.journal.take();
        let moved_on = State::Destination(DestinationRecord::MovedOn);
        let written = journal.map(|mut journal| journal.write(moved_on));
        self.stop();
        written.unwrap_or(Ok(()))
    }

    /// Stops answering. A source that has not received the outcome stays in doubt.
    pub fn stop(self) {
        // Release the lock before `accepting` is dropped: the drop stops the answering thread, which
        // may be waiting for the lock.
        let accepting = lock(&self.held).accepting.take();
        drop(accepting);
        if let Some(thread) = self.thread {
            // Ignore the result: only the end of the thread matters, and a panic ends it too.
            let _ = thread.join();
        }
        leak(self.held);
    }
}

/// Answers inquiries from `journal` on `listener` until `cancel` is cancelled.
pub(super) fn answer(
    listener: &TcpListener,
    tls: &ServerTls,
    journal: &Journal,
    host: &Arc<dyn Host>,
    cancel: &Cancel,
) -> Result<(), Fault> {
    const FAILED: &str = "cannot answer inquiries";
    let (wake, stopped) = waker().or_fault(FaultCode::Kernel, FAILED)?;
    let _listening = cancel.listen(move || wake.wake());
    let text = "the destination is not receiving a VM";
    Answers::new(host, journal)
        .serve(listener, tls, &stopped, text)
        .or_fault(FaultCode::Kernel, FAILED)
}
