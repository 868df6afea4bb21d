//! State common to all phases at the destination, on the thread that called
//! [`Incoming::run`](super::Incoming::run).

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_lane::accept::{Arrival, accept};
use dunlin_lane::control::ControlStream;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::ServerTls;
use dunlin_linux::affinity::thread_cpu_time;
use dunlin_linux::poll::{Waker, waker};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Opening, SessionId};
use dunlin_proto::observe::Observer;
use tracing::{Span, info_span};

use super::super::control::FromPeer;
use super::super::control_link::{CLOSE_LIMIT, ControlLink, ControlTerms};
use super::super::fault::{Fault, OrFault};
use super::super::host::Host;
use super::super::journal::SessionJournal;
use super::super::threads::{CpuTime, spawn};
use super::answer::{Accepting, Answering, Answers};
use super::event::{Inbox, SessionEvent};
use super::options::Options;
use super::pacer::{Pacer, Share};
use super::received::DestinationEvent;
use super::refusal::{peer_of, turn_away};
use super::router::Router;

/// Where a session's connections come from.
enum Accepts {
    /// From a thread of the session.
    Own {
        listener: Arc<TcpListener>,
        stop: Waker,
        thread: JoinHandle<()>,
        tls: ServerTls,
        answers: Answers,
    },
    /// From a listener that serves other sessions too.
    Shared(RouterSlot),
}

/// The place of one session at a listener that several sessions share.
#[derive(Clone)]
pub(super) struct RouterSlot {
    pub(super) router: Arc<Router>,
    pub(super) accepting: Arc<Accepting>,
    pub(super) slot: u64,
}

/// State common to all phases, which own it in turn: *Waiting → Describing → Receiving
/// → Prepared → Running*.
pub(super) struct Session<'a> {
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a dyn Observer<DestinationEvent>,
    events: Receiver<SessionEvent>,
    pub(super) sender: Sender<SessionEvent>,
    accepts: Accepts,
    inbox: Inbox,
    /// The session's part of the rate cap, if there is one.
    pub(super) share: Option<Share>,
    /// Events that [`Session::set_aside`] has read from `events` without removing them. The session
    /// handles them before those in `events`.
    deferred: VecDeque<SessionEvent>,
    /// CPU time of the session's threads.
    pub(super) cpu: CpuTime,
    /// CPU time of the calling thread before the session.
    cpu_before: Duration,
    /// The `tracing` span that contains the lanes' spans.
    pub(super) span: Span,
}

impl<'a> Session<'a> {
    /// Starts accepting on `listener`.
    pub(super) fn start(
        listener: TcpListener,
        tls: &ServerTls,
        options: &'a Options,
        host: &'a Arc<dyn Host>,
        observer: &'a dyn Observer<DestinationEvent>,
    ) -> Result<Self, Fault> {
        let tls = tls.of_session();
        let (sender, events) = channel();
        let inbox = Inbox::new(sender.clone());
        let listener = Arc::new(listener);
        let (stop, stopped) = waker().or_fault(FaultCode::Kernel, "cannot create a socket pair")?;
        let thread = {
            let (tls, inbox) = (tls.clone(), inbox.clone());
            let listener = Arc::clone(&listener);
            let sealed = options.ipsec.clone();
            let body = move || {
                let ended = accept(&listener, &tls, &stopped, |arrival| {
                    // `take` removes the connections of keying sessions, which use the same
                    // listener.
                    let arrival = match &sealed {
                        Some(lanes) => lanes.take(arrival),
                        None => Some(arrival),
                    };
                    if let Some(arrival) = arrival {
                        inbox.push(SessionEvent::Arrived(Box::new(arrival)));
                    }
                });
                if let Err(error) = ended {
                    inbox.fail(error);
                }
            };
            spawn(&**host, "dunlin-accept", body)?
        };
        let accepts = Accepts::Own {
            listener,
            stop,
            thread,
            tls,
            answers: Answers::new(host, &options.journal),
        };
        Ok(Self::new(
            options,
            host,
            observer,
            (sender, events),
            inbox,
            accepts,
        ))
    }

    /// Starts waiting in a slot of a listener that serves several sessions.
    pub(super) fn wait(
        of: RouterSlot,
        options: &'a Options,
        host: &'a Arc<dyn Host>,
        observer: &'a dyn Observer<DestinationEvent>,
    ) -> Result<Self, Fault> {
        let (sender, events) = channel();
        let inbox = of.router.wait(of.slot, sender.clone())?;
        let accepts = Accepts::Shared(of);
        Ok(Self::new(
            options,
            host,
            observer,
            (sender, events),
            inbox,
            accepts,
        ))
    }

    fn new(
        options: &'a Options,
        host: &'a Arc<dyn Host>,
        observer: &'a dyn Observer<DestinationEvent>,
        (sender, events): (Sender<SessionEvent>, Receiver<SessionEvent>),
        inbox: Inbox,
        accepts: Accepts,
    ) -> Self {
        let share = match &accepts {
            Accepts::Own { .. } => options.rate.map(|rate| Share {
                pacer: Pacer::new(rate),
                session: 0,
            }),
            Accepts::Shared(of) => of.router.pacer.clone().map(|pacer| Share {
                pacer,
                session: of.slot,
            }),
        };
        Self {
            options,
            host,
            observer,
            events,
            sender,
            accepts,
            inbox,
            share,
            deferred: VecDeque::new(),
            cpu: CpuTime::default(),
            cpu_before: thread_cpu_time(),
            span: Span::current(),
        }
    }

    /// The next event, or `None` at `until`. Replaces messages of earlier control lanes with
    /// [`SessionEvent::Tended`]. A failed listener ends the session.
    pub(super) fn receive(
        &mut self,
        control: Option<&ControlLink>,
        until: Option<Instant>,
    ) -> Result<Option<SessionEvent>, Fault> {
        let event = match (self.deferred.pop_front(), until) {
            (Some(event), _) => Ok(event),
            (None, None) => self.events.recv().map_err(Into::into),
            (None, Some(until)) => {
                let left = until.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left)
            }
        };
        match event {
            Ok(SessionEvent::Control(epoch, from_peer)) => {
                let Some(control) = control.filter(|control| control.lane.epoch == epoch) else {
                    return Ok(Some(SessionEvent::Tended));
                };
                control.took(&from_peer);
                Ok(Some(SessionEvent::Control(epoch, from_peer)))
            }
            Ok(event @ (SessionEvent::Arrived(_) | SessionEvent::OfferedAgain(_))) => {
                self.inbox.took();
                Ok(Some(event))
            }
            Ok(SessionEvent::Notice(event)) => {
                self.inbox.took();
                self.notify(event);
                Ok(Some(SessionEvent::Tended))
            }
            Ok(SessionEvent::AcceptorEnded(error)) => {
                Err(Fault::new(FaultCode::Kernel, "the listener failed").because(error))
            }
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Fault::new(FaultCode::Internal, "no session thread runs"))
            }
        }
    }

    /// If `arrival` is an inquiry about another session, answers it. Otherwise returns `arrival`.
    pub(super) fn answer_inquiry(&mut self, arrival: Arrival) -> Option<Arrival> {
        let (stream, offer) = match arrival {
            Arrival::Control {
                stream,
                opening: Opening::Offer(offer),
            } if offer.is_inquiry() => (stream, offer),
            other => return Some(other),
        };
        if let Accepts::Shared(of) = &self.accepts {
            of.router.answer(stream, &offer);
            return None;
        }
        let peer = peer_of(&stream);
        self.notify(DestinationEvent::Inquired { peer: peer.clone() });
        if let Accepts::Own { answers, .. } = &mut self.accepts
            && let Err(refusal) = answers.begin(stream, &offer)
        {
            self.reject(format!("inquiry from {peer}: {refusal}"));
        }
        None
    }

    /// Notes that the session with this id begins. Returns false if another session of the same
    /// listener has this id.
    pub(super) fn begin(&self, session: SessionId) -> bool {
        match &self.accepts {
            Accepts::Own { .. } => true,
            Accepts::Shared(of) => of.router.begin(of.slot, session),
        }
    }

    /// Notes that the offer was refused, so that the session waits for another one.
    pub(super) fn wait_again(&self) {
        if let Accepts::Shared(of) = &self.accepts {
            of.router.free(of.slot);
        }
    }

    /// Assigns the VM with this UUID to the session. Returns false if another session of the same
    /// listener already has the VM. `peer` is the source.
    pub(super) fn describe(&self, vm: [u8; 16], peer: &PeerIdentity) -> bool {
        match &self.accepts {
            Accepts::Own { .. } => true,
            Accepts::Shared(of) => of.router.describe(of.slot, vm, peer),
        }
    }

    /// Uses the TLS settings with which `stream` was accepted for the session's later handshakes. A
    /// shared listener uses its newest settings for every handshake, because it cannot tell to
    /// which session a connection belongs.
    pub(super) fn keep_settings(&self, stream: &ControlStream) {
        if let Accepts::Own { tls, .. } = &self.accepts {
            tls.keep(stream);
        }
    }

    /// Removes the messages of control lanes with an epoch below `epoch` from the event queue, and
    /// returns them. The threads that read these lanes have been joined, so no more messages
    /// follow.
    pub(super) fn set_aside(&mut self, epoch: u32) -> Vec<FromPeer> {
        let mut read = Vec::new();
        let deferred = std::mem::take(&mut self.deferred);
        for event in deferred.into_iter().chain(self.events.try_iter()) {
            match event {
                SessionEvent::Control(from, from_peer) if from < epoch => read.push(from_peer),
                event => self.deferred.push_back(event),
            }
        }
        read
    }

    /// Closes an arriving connection that is not accepted now. `why` is for the log.
    pub(super) fn turn_away(&self, arrival: Arrival, why: &str) {
        self.reject(turn_away(arrival, why));
    }

    pub(super) fn reject(&self, reason: String) {
        self.notify(DestinationEvent::Rejected { reason });
    }

    pub(super) fn notify(&self, event: DestinationEvent) {
        self.observer.event(&event);
    }

    pub(super) fn warn(&self, text: String) {
        self.notify(DestinationEvent::Warning(text));
    }

    /// Stops accepting, and ends the control lane and every thread: `lanes`, the reader and the
    /// acceptor. Returns the CPU time of the session. If the VM has arrived and its source may still
    /// ask about it, `record` is the session's record, and inquiries are answered from now on.
    pub(super) fn close(
        mut self,
        control: Option<ControlLink>,
        lanes: impl Iterator<Item = JoinHandle<()>>,
        record: Option<SessionJournal>,
    ) -> (Duration, Option<io::Result<Answering>>) {
        let _close = info_span!("close").entered();
        let (record, held) = self.stop_accepting(record);
        let read = control.map(|control| {
            // Best effort: the peer may have died. A peer that is alive closes the lane next.
            let _ = control.lane.stream.close();
            let until = Instant::now() + CLOSE_LIMIT;
            // The limit also ends the wait for a peer that keeps sending.
            while !control.has_ended() && Instant::now() < until {
                if !matches!(self.receive(Some(&control), Some(until)), Ok(Some(_))) {
                    break;
                }
            }
            control.end()
        });
        let (thread, listening) = match self.accepts {
            Accepts::Own {
                listener,
                thread,
                tls,
                ..
            } => (Some(thread), Some((listener, tls))),
            Accepts::Shared(_) => (None, None),
        };
        let threads = lanes.chain(thread);
        for joined in threads.map(JoinHandle::join).chain(read) {
            if joined.is_err() {
                let text = "a thread of the session panicked".into();
                self.observer.event(&DestinationEvent::Warning(text));
            }
        }
        let answering = match (record, listening) {
            (Some(record), Some((listener, tls))) => {
                let journal = &self.options.journal;
                Some(Answering::start(listener, tls, self.host, journal, record))
            }
            _ => held.map(Ok),
        };
        (used(&self.cpu, self.cpu_before), answering)
    }

    /// Stops accepting. A shared listener keeps `record`, and uses it to answer inquiries.
    /// Otherwise returns `record`.
    fn stop_accepting(
        &mut self,
        record: Option<SessionJournal>,
    ) -> (Option<SessionJournal>, Option<Answering>) {
        match (&mut self.accepts, record) {
            (Accepts::Own { stop, answers, .. }, record) => {
                stop.wake();
                answers.end();
                (record, None)
            }
            (Accepts::Shared(of), Some(record)) => {
                let accepting = Arc::clone(&of.accepting);
                (None, Some(of.router.hold(of.slot, record, accepting)))
            }
            (Accepts::Shared(of), None) => {
                of.router.end(of.slot);
                (None, None)
            }
        }
    }

    /// A control lane on `stream`, with a thread that reads it.
    pub(super) fn open_control(
        &self,
        stream: ControlStream,
        terms: ControlTerms,
    ) -> Result<ControlLink, Fault> {
        let events = self.sender.clone();
        ControlLink::start(
            stream,
            terms,
            &**self.host,
            &self.cpu,
            |_| Ok(false),
            move |epoch, from_peer| {
                // Sending fails only after the session has ended.
                let _ = events.send(SessionEvent::Control(epoch, from_peer));
            },
        )
    }

    /// CPU time of the session so far.
    pub(super) fn cpu_used(&self) -> Duration {
        used(&self.cpu, self.cpu_before)
    }
}

fn used(cpu: &CpuTime, before: Duration) -> Duration {
    thread_cpu_time().saturating_sub(before) + cpu.used()
}
