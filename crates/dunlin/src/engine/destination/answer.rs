//! Inquiries about sessions that are not under way: answered from the journal,
//! or, for a VM that lives in this process, by who holds it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;

use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_proto::control::{Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{DestinationRecord, State};
use dunlin_proto::negotiate::{
    Features, Offer, Opening, Refusal, SessionId, Supported, VERSIONS, select,
};
use dunlin_proto::switchover::{Destination, DestinationAction as Do, DestinationEvent as On};

use super::super::control::{ControlLane, SILENCE_LIMIT};
use super::super::error::MigrateError;
use super::super::fault::{Fault, VmIs};
use super::super::host::{Cancel, Host};
use super::super::journal::{Journal, JournalError, RecordedPeer, Role, SessionJournal};
use super::super::lock;
use super::super::sync::Mutex;
use super::refusal::refuse;
use crate::lane::accept::{Arrival, accept};
use crate::lane::control::ControlStream;
use crate::lane::peers::PeerIdentity;
use crate::lane::policy::ServerTls;

/// Inquiries that are being answered at the same time. Each has a thread, and
/// its peer is authenticated; the oldest goes when another comes (I7).
const ANSWERS_LIMIT: usize = 8;

const NOT_THE_PEER: &str = "it is not the peer of this session";

/// What a control lane for an inquiry may ask for: anything, since no data lane
/// follows.
pub(super) const INQUIRIES: Supported = Supported {
    versions: VERSIONS,
    features: Features::VERIFY,
    required: Features::NONE,
    plain_allowed: true,
    ipsec: true,
};

/// A VM that lives in this process, of whose session the source has not let
/// go.
pub(super) struct Held {
    session: SessionId,
    /// The only peer that may ask.
    peer: RecordedPeer,
    known: Known,
    /// Woken when there is nothing left to answer.
    done: Arc<Waker>,
}

/// What is known of a session that is not under way.
struct Known {
    state: Destination,
    /// Locked as long as the VM's process lives, so that no other takes the VM for dead. None: no
    /// record of the session exists, or it was released or moved on since.
    journal: Option<SessionJournal>,
}

/// Answers to inquiries, each on a thread of its own.
#[derive(Default)]
pub(super) struct Answers {
    under_way: VecDeque<(Arc<ControlLane>, JoinHandle<()>)>,
}

/// Whether a control lane can only be about a session that began before.
pub(super) fn is_inquiry(offer: &Offer) -> bool {
    offer.epoch > 1
}

impl Held {
    /// Whether `peer` is the session's own.
    fn is_with(&self, peer: &PeerIdentity) -> bool {
        matches!(&self.peer, RecordedPeer::Known(principal) if peer.is(principal))
    }
}

impl Answers {
    /// Answers on a control lane whose session is not under way here.
    pub(super) fn begin(
        &mut self,
        host: &Arc<dyn Host>,
        journal: &Journal,
        held: Option<&Arc<Mutex<Held>>>,
        stream: ControlStream,
        offer: &Offer,
    ) -> Result<(), Refusal> {
        let held = held
            .filter(|held| lock(held).session == offer.session)
            .cloned();
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
            // It is gone, and asks again.
            return Ok(());
        }
        self.under_way.retain(|(_, thread)| !thread.is_finished());
        if self.under_way.len() >= ANSWERS_LIMIT
            && let Some(oldest) = self.under_way.pop_front()
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
        let (same, journal) = (Arc::clone(&lane), journal.clone());
        let body = move || answer_on(&same, &journal, held.as_deref(), &peer);
        // Without a thread the lane is dropped; the source asks again.
        if let Ok(thread) = host.spawn("dunlin-answer".into(), Box::new(body)) {
            self.under_way.push_back((lane, thread));
        }
        Ok(())
    }

    /// Accepts until `stopped`. Gives inquiries to `begin`, and refuses new sessions with `busy`.
    fn serve(
        &mut self,
        listener: &TcpListener,
        tls: &ServerTls,
        stopped: &Wakeup,
        busy: &str,
        begin: impl Fn(&mut Self, ControlStream, &Offer),
    ) -> io::Result<()> {
        accept(listener, tls, stopped, |arrival| match arrival {
            Arrival::Control {
                stream,
                opening: Opening::Offer(offer),
            } if is_inquiry(&offer) => begin(self, stream, &offer),
            Arrival::Control {
                stream,
                opening: Opening::Offer(_),
            } => {
                let (fault, text) = (FaultCode::Busy, busy.into());
                refuse(&stream, &Refusal { fault, text });
            }
            _ => {}
        })
    }

    /// Ends them all.
    pub(super) fn end(&mut self) {
        self.under_way.drain(..).for_each(end);
    }
}

fn end((lane, thread): (Arc<ControlLane>, JoinHandle<()>)) {
    lane.shutdown();
    // Nothing is left to tell of a panic there.
    let _ = thread.join();
}

/// Answers what comes on one control lane, until the source closes it.
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
                    answer_of(&mut lock(held).known, *attempt, lane)
                }
                (Some(held), Message::Release) => {
                    let mut held = lock(held);
                    on(&mut held.known, On::Release);
                    held.done.wake();
                    Ok(())
                }
                (None, Message::Inquire { attempt }) => {
                    if from_journal.is_none() {
                        from_journal = Some(look_up(journal, lane.session(), peer)?);
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
                        "the session is over here, and takes no {}",
                        message.kind().name()
                    ),
                )),
            };
            if let Err(fault) = &result
                && fault.code == FaultCode::UnknownSession
            {
                // A source that has not sent *commit* goes on by itself.
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

/// The session as a restarted destination knows it.
fn look_up(journal: &Journal, session: SessionId, peer: &PeerIdentity) -> Result<Known, Fault> {
    let (record, journal) = match journal.take(session, Role::Destination) {
        Ok(journal) => match journal.record().state {
            State::Destination(record) if journal.is_with(peer) => (Some(record), Some(journal)),
            _ => return Err(Fault::new(FaultCode::WrongIdentity, NOT_THE_PEER)),
        },
        Err(JournalError::Missing { .. }) => (None, None),
        // Who holds the VM answers, or nobody does.
        Err(error) => {
            let what = "the session's record cannot be had";
            return Err(Fault::new(FaultCode::Journal, what).because(error));
        }
    };
    let (state, actions) = Destination::restarted(record);
    let mut found = Known { state, journal };
    act(&mut found, actions);
    Ok(found)
}

fn answer_of(known: &mut Known, attempt: u32, lane: &ControlLane) -> Result<(), Fault> {
    let ours = known
        .journal
        .as_ref()
        .map_or(attempt, |journal| journal.record().attempt);
    match on(known, On::Inquired) {
        Some(verdict) if ours == attempt => lane.send(&Message::Answer { attempt, verdict }),
        // *aborted* could not be recorded, and is told to nobody.
        _ => Err(Fault::new(FaultCode::Journal, "there is no answer")),
    }
}

/// Takes an event; returns what is to be told.
fn on(known: &mut Known, event: On) -> Option<Verdict> {
    let (state, actions) = known.state.on(event).ok()?;
    known.state = state;
    act(known, actions)
}

fn act(known: &mut Known, actions: &[Do]) -> Option<Verdict> {
    let mut told = None;
    for action in actions {
        match action {
            Do::Record(record) => {
                let written = known
                    .journal
                    .as_mut()
                    .map(|journal| journal.write(State::Destination(*record)));
                let event = match written {
                    Some(Ok(_)) => On::Recorded,
                    _ => On::RecordFailed,
                };
                told = on(known, event).or(told);
            }
            Do::Tell(verdict) => told = Some(*verdict),
            Do::Forget => {
                if let Some(journal) = known.journal.take() {
                    // Left behind it says *running*, which is true.
                    let _ = journal.forget();
                }
            }
            _ => {}
        }
    }
    told
}

/// Answers inquiries about a VM that has arrived and of which the source has
/// not let go, on a thread of its own.
///
/// It ends by itself when the source lets go. Dropped it goes on answering as
/// long as the process lives, as it should while the VM does.
pub struct Answering {
    stop: Arc<Waker>,
    thread: JoinHandle<()>,
    held: Arc<Mutex<Held>>,
}

impl fmt::Debug for Answering {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Answering").finish_non_exhaustive()
    }
}

impl Answering {
    /// Answers about the running VM that `record` is about; `journal` has the other sessions.
    pub(super) fn start(
        listener: Arc<TcpListener>,
        tls: ServerTls,
        host: &Arc<dyn Host>,
        journal: Journal,
        record: SessionJournal,
    ) -> io::Result<Self> {
        let (stop, stopped) = waker()?;
        let stop = Arc::new(stop);
        let held = Arc::new(Mutex::new(Held {
            session: record.record().session,
            peer: record.peer().clone(),
            known: Known {
                state: Destination::Running,
                journal: Some(record),
            },
            done: Arc::clone(&stop),
        }));
        let (same, host_there) = (Arc::clone(&held), Arc::clone(host));
        let body = move || {
            let mut answers = Answers::default();
            let text = "this process has taken its VM in";
            let ended = answers.serve(&listener, &tls, &stopped, text, |answers, stream, offer| {
                // The refusal has been sent.
                let _ = answers.begin(&host_there, &journal, Some(&same), stream, offer);
            });
            // A listener that fails answers nobody; the source stays in doubt.
            drop(ended);
            answers.end();
            // The record's lock says that the VM's process lives, so that it stays locked until the
            // process ends, unless `moved_on` takes it first.
            let is_recorded = lock(&same).known.journal.is_some();
            if is_recorded {
                std::mem::forget(same);
            }
        };
        let thread = host.spawn("dunlin-inquiries".into(), Box::new(body))?;
        Ok(Self { stop, thread, held })
    }

    /// Whether the source has let go, or the listener has failed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// To be called when the VM has been moved on from here, before its process
    /// ends: answers no more, and leaves a record from which whoever listens
    /// on this host later answers that the VM is not the old source's. With
    /// *running* left instead, the VM would be taken for dead.
    ///
    /// # Errors
    /// The record cannot be written: *running* stays.
    pub fn moved_on(self) -> Result<(), JournalError> {
        let journal = lock(&self.held).known.journal.take();
        let written = journal.map(|mut journal| {
            journal.write(State::Destination(DestinationRecord::MovedOn))?;
            Ok(())
        });
        self.stop();
        written.unwrap_or(Ok(()))
    }

    /// Answers no more. A source that has not let go stays in doubt.
    pub fn stop(self) {
        self.stop.wake();
        // Nothing is left to tell of a panic there.
        let _ = self.thread.join();
    }
}

/// Answers inquiries from `journal` on `listener` until `stop` is cancelled:
/// for a host that takes in no VM at the moment. [`super::receive`] does so
/// too, while it waits and while it takes in another VM.
///
/// # Errors
/// The listener or a descriptor cannot be had.
pub fn answer(
    listener: &TcpListener,
    tls: &ServerTls,
    journal: &Journal,
    host: &Arc<dyn Host>,
    stop: &Cancel,
) -> Result<(), MigrateError> {
    let failed = |error| {
        Fault::new(FaultCode::Kernel, "inquiries cannot be answered")
            .because(error)
            .into_error(VmIs::AtSource)
    };
    let (wake, stopped) = waker().map_err(failed)?;
    stop.listen(move || wake.wake());
    let mut answers = Answers::default();
    let text = "no VM is taken in here at the moment";
    let result = answers.serve(listener, tls, &stopped, text, |answers, stream, offer| {
        // The refusal has been sent.
        let _ = answers.begin(host, journal, None, stream, offer);
    });
    answers.end();
    stop.unlisten();
    result.map_err(failed)
}
