//! Serves one listener for several sessions.
//!
//! One thread accepts and authenticates all connections, and passes each to the session that
//! [`Sessions`] names. It never waits for a session: each session has a bounded queue
//! ([`Inbox`]), so a session that hangs or is flooded delays no other (invariants I7, I8). Inquiries
//! about sessions that have ended are answered here.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use dunlin_lane::accept::{Arrival, accept};
use dunlin_lane::control::ControlStream;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::ServerTls;
use dunlin_linux::poll::waker;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Offer, Opening, Refusal, SessionId};
use dunlin_proto::sessions::{Route, Sessions};

use super::super::fault::{Fault, OrFault};
use super::super::host::Host;
use super::super::journal::SessionJournal;
use super::super::lock;
use super::super::sync::Mutex;
use super::super::threads::spawn;
use super::answer::{Accepting, Answering, Answers};
use super::event::{Inbox, SessionEvent};
use super::options::Options;
use super::pacer::Pacer;
use super::received::DestinationEvent;
use super::refusal::{peer_of, refuse, turn_away};

/// The listener's thread, and the sessions that it serves.
pub(super) struct Router {
    table: Mutex<Table>,
    /// Answers to inquiries, including those about VMs that have arrived.
    answers: Mutex<Answers>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The rate cap of all sessions, if there is one.
    pub(super) pacer: Option<Arc<Pacer>>,
}

#[derive(Default)]
struct Table {
    sessions: Sessions,
    slots: BTreeMap<u64, Slot>,
    /// Why the listener has failed.
    failed: Option<String>,
}

#[derive(Default)]
struct Slot {
    /// The queue of the session that waits or runs. `None` between two sessions.
    inbox: Option<Inbox>,
    /// An offer that arrived between two sessions.
    early: Option<Box<Arrival>>,
}

impl Router {
    /// Starts accepting on `listener`, until the last clone of the returned [`Accepting`] is
    /// dropped.
    pub(super) fn start(
        listener: TcpListener,
        tls: &ServerTls,
        options: &Options,
        host: &Arc<dyn Host>,
    ) -> Result<(Arc<Self>, Arc<Accepting>), Fault> {
        let (stop, stopped) = waker().or_fault(FaultCode::Kernel, "cannot create a socket pair")?;
        let router = Arc::new(Self {
            table: Mutex::default(),
            answers: Mutex::new(Answers::new(host, &options.journal)),
            thread: Mutex::default(),
            pacer: options.rate.map(Pacer::new),
        });
        let (tls, sealed, same) = (tls.of_session(), options.ipsec.clone(), Arc::clone(&router));
        let thread = spawn(&**host, "dunlin-accept", move || {
            let ended = accept(&listener, &tls, &stopped, |arrival| {
                // `take` removes the connections of keying sessions, which use the same listener.
                let arrival = match &sealed {
                    Some(lanes) => lanes.take(arrival),
                    None => Some(arrival),
                };
                if let Some(arrival) = arrival {
                    same.deliver(arrival);
                }
            });
            same.ended(ended);
        })?;
        *lock(&router.thread) = Some(thread);
        Ok((router, Arc::new(Accepting(stop))))
    }

    /// Waits for the end of the listener's thread. The caller has already requested its stop.
    pub(super) fn join(&self) {
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // Ignore the result: only the end of the thread matters, and a panic ends it too.
            let _ = thread.join();
        }
    }

    fn ended(&self, result: io::Result<()>) {
        if let Err(error) = result {
            let mut table = lock(&self.table);
            for inbox in table.inboxes() {
                inbox.fail(io::Error::new(error.kind(), error.to_string()));
            }
            table.failed = Some(error.to_string());
        }
        lock(&self.answers).end();
    }

    /// Passes a connection to its session.
    fn deliver(&self, arrival: Arrival) {
        match arrival {
            Arrival::Control {
                stream,
                opening: Opening::Offer(offer),
            } => self.offered(stream, offer),
            Arrival::Control { stream, .. } => {
                let peer = peer_of(&stream);
                let refusal = Refusal {
                    fault: FaultCode::Malformed,
                    text: "expected an offer as the first message of a control lane".into(),
                };
                refuse(&stream, &refusal);
                self.reject(format!("control lane from {peer}: {refusal}"));
            }
            Arrival::Lane {
                socket,
                opening: Opening::Lane(open),
            } => {
                let table = lock(&self.table);
                let found = table.sessions.slot_of(&open.session);
                let opening = Opening::Lane(open);
                let arrival = Arrival::Lane { socket, opening };
                match found.and_then(|slot| table.slots.get(&slot)?.inbox.as_ref()) {
                    Some(inbox) => drop(inbox.push(SessionEvent::Arrived(Box::new(arrival)))),
                    None => table.reject(turn_away(arrival, "no such session is in progress")),
                }
            }
            // Descriptors or memory ran out. Inform every session, because a session without a lane
            // would otherwise wait for one in vain.
            Arrival::Starved(error) => {
                let again = || io::Error::new(error.kind(), error.to_string());
                for inbox in lock(&self.table).inboxes() {
                    let arrival = Box::new(Arrival::Starved(again()));
                    inbox.push(SessionEvent::Arrived(arrival));
                }
            }
            other => self.reject(turn_away(other, "expected a lane's opening")),
        }
    }

    fn offered(&self, stream: ControlStream, offer: Offer) {
        let mut table = lock(&self.table);
        let is_new = table.sessions.slot_of(&offer.session).is_none();
        let route = table.sessions.offered(&offer);
        let arrival = |stream| Arrival::Control {
            stream,
            opening: Opening::Offer(offer.clone()),
        };
        match route {
            Route::Slot(slot) => {
                if !table.pass(slot, arrival(stream)) && is_new {
                    table.sessions.refuse(slot);
                }
            }
            Route::Full => table.reject(turn_away(
                arrival(stream),
                "this listener serves no more sessions at once",
            )),
            Route::Inquiry => {
                drop(table);
                self.answer(stream, &offer);
            }
        }
    }

    /// Answers an inquiry about a session that is not in progress.
    pub(super) fn answer(&self, stream: ControlStream, offer: &Offer) {
        let peer = peer_of(&stream);
        lock(&self.table).tell(DestinationEvent::Inquired { peer: peer.clone() });
        // Release the lock of `answers` before `reject` locks the table, because `hold` locks the
        // table before `answers`.
        let begun = lock(&self.answers).begin(stream, offer);
        if let Err(refusal) = begun {
            self.reject(format!("inquiry from {peer}: {refusal}"));
        }
    }

    fn reject(&self, reason: String) {
        lock(&self.table).reject(reason);
    }

    /// Adds a slot; returns its number.
    pub(super) fn open(&self) -> u64 {
        let mut table = lock(&self.table);
        let slot = table.sessions.open();
        table.slots.insert(slot, Slot::default());
        slot
    }

    /// Removes a slot. An offer that waits for it goes to another slot, or is refused if none is
    /// free.
    pub(super) fn close(&self, slot: u64) {
        let mut table = lock(&self.table);
        table.sessions.close(slot);
        let early = table.slots.remove(&slot).and_then(|slot| slot.early);
        drop(table);
        if let Some(arrival) = early {
            self.deliver(*arrival);
        }
    }

    /// Registers a session that waits in `slot`. Returns the queue; its events go to `sender`.
    pub(super) fn wait(&self, slot: u64, sender: Sender<SessionEvent>) -> Result<Inbox, Fault> {
        let mut table = lock(&self.table);
        if let Some(why) = &table.failed {
            let failed = Fault::new(FaultCode::Kernel, "the listener failed");
            return Err(failed.because(why.clone()));
        }
        let inbox = Inbox::new(sender);
        table.sessions.wait(slot);
        let slot = table.slots.entry(slot).or_default();
        slot.inbox = Some(inbox.clone());
        if let Some(arrival) = slot.early.take() {
            inbox.push(SessionEvent::Arrived(arrival));
        }
        Ok(inbox)
    }

    /// Gives the slot to a session. Returns false if the session has another slot.
    pub(super) fn begin(&self, slot: u64, session: SessionId) -> bool {
        lock(&self.table).sessions.begin(slot, session)
    }

    /// Frees a slot for the next offer, after an offer was refused.
    pub(super) fn free(&self, slot: u64) {
        lock(&self.table).sessions.refuse(slot);
    }

    /// Assigns a VM to the session of `slot`. Returns false if another session already has the VM.
    /// The other session ends if it has lost its control lane and `peer` is its source.
    pub(super) fn describe(&self, slot: u64, vm: [u8; 16], peer: &PeerIdentity) -> bool {
        let mut table = lock(&self.table);
        let Err(other) = table.sessions.describe(slot, vm) else {
            return true;
        };
        let inbox = table
            .slots
            .get(&other)
            .and_then(|other| other.inbox.as_ref());
        if let Some(inbox) = inbox {
            inbox.push(SessionEvent::OfferedAgain(Box::new(peer.clone())));
        }
        false
    }

    /// Takes the session out of its slot. The session gets no more connections.
    pub(super) fn end(&self, slot: u64) {
        lock(&self.table).end(slot);
    }

    /// Like [`Router::end`], for a session that has received a VM: from now on, answers inquiries
    /// about it from `record`.
    pub(super) fn hold(
        &self,
        slot: u64,
        record: SessionJournal,
        accepting: Arc<Accepting>,
    ) -> Answering {
        let mut table = lock(&self.table);
        let held = lock(&self.answers).hold(record, accepting);
        table.end(slot);
        Answering::shared(held)
    }
}

impl Table {
    /// Passes an offer to the session of `slot`, or keeps the offer for the next session. A further
    /// offer of the same session replaces a kept offer, because the source has given up the kept
    /// one. Returns false if the offer was dropped.
    fn pass(&mut self, slot: u64, arrival: Arrival) -> bool {
        let Some(slot) = self.slots.get_mut(&slot) else {
            return false;
        };
        let arrival = Box::new(arrival);
        match &slot.inbox {
            Some(inbox) => inbox.push(SessionEvent::Arrived(arrival)),
            None => {
                slot.early = Some(arrival);
                true
            }
        }
    }

    fn end(&mut self, slot: u64) {
        self.sessions.end(slot);
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.inbox = None;
        }
    }

    fn inboxes(&self) -> impl Iterator<Item = &Inbox> {
        self.slots.values().filter_map(|slot| slot.inbox.as_ref())
    }

    /// Passes an event that concerns no session to one session's observer, if there is a session.
    fn tell(&self, event: DestinationEvent) {
        if let Some(inbox) = self.inboxes().next() {
            inbox.push(SessionEvent::Notice(event));
        }
    }

    fn reject(&self, reason: String) {
        self.tell(DestinationEvent::Rejected { reason });
    }
}
