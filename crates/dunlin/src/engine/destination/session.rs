//! State common to all phases at the destination, on the thread that called
//! [`Incoming::run`](super::Incoming::run).

use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin_lane::accept::{Arrival, accept};
use dunlin_lane::control::ControlStream;
use dunlin_lane::policy::ServerTls;
use dunlin_linux::affinity::thread_cpu_time;
use dunlin_linux::poll::{Waker, waker};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::{Opening, Refusal};
use dunlin_proto::observe::Observer;
use tracing::{Span, info_span};

use super::super::control::FromPeer;
use super::super::control_link::{CLOSE_LIMIT, ControlLink, ControlTerms};
use super::super::fault::{Fault, OrFault};
use super::super::host::Host;
use super::super::threads::{CpuTime, spawn};
use super::answer::{Answers, is_inquiry};
use super::event::SessionEvent;
use super::options::Options;
use super::received::DestinationEvent;
use super::refusal::{peer_of, refuse, starved};

/// Maximum number of connections that wait while the session's thread is busy, for example in the
/// VMM. Further connections are dropped. Plain lanes are not authenticated at this point, so any
/// host can open them (invariant I7).
const ARRIVALS_LIMIT: usize = 2 * MAX_LANES as usize;

/// State common to all phases, which own it in turn: *Waiting → Describing → Receiving
/// → Prepared → Running*.
pub(super) struct Session<'a> {
    pub(super) options: &'a Options,
    pub(super) host: &'a Arc<dyn Host>,
    pub(super) observer: &'a dyn Observer<DestinationEvent>,
    pub(super) tls: ServerTls,
    pub(super) listener: Arc<TcpListener>,
    events: Receiver<SessionEvent>,
    pub(super) sender: Sender<SessionEvent>,
    acceptor: Waker,
    acceptor_thread: JoinHandle<()>,
    /// The number of connections that wait for the session's thread.
    arrivals: Arc<AtomicUsize>,
    answers: Answers,
    /// Events that stay in the queue after [`Session::set_aside`] has removed older messages.
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
        let cpu_before = thread_cpu_time();
        let tls = tls.of_session();
        let (sender, events) = channel();
        let arrivals = Arc::<AtomicUsize>::default();
        let listener = Arc::new(listener);
        let (acceptor, stop) =
            waker().or_fault(FaultCode::Kernel, "cannot create a socket pair")?;
        let acceptor_thread = {
            let (tls, sender) = (tls.clone(), sender.clone());
            let arrivals = Arc::clone(&arrivals);
            let listener = Arc::clone(&listener);
            let sealed = options.ipsec.clone();
            let body = move || {
                let ended = accept(&listener, &tls, &stop, |arrival| {
                    // `take` removes the connections of keying sessions, which use the same
                    // listener.
                    let Some(arrival) = (match &sealed {
                        Some(lanes) => lanes.take(arrival),
                        None => Some(arrival),
                    }) else {
                        return;
                    };
                    if arrivals.fetch_add(1, Ordering::SeqCst) >= ARRIVALS_LIMIT {
                        arrivals.fetch_sub(1, Ordering::SeqCst);
                        return;
                    }
                    // Sending fails only after the session has ended.
                    let _ = sender.send(SessionEvent::Arrived(Box::new(arrival)));
                });
                if let Err(error) = ended {
                    let _ = sender.send(SessionEvent::AcceptorEnded(error));
                }
            };
            spawn(&**host, "dunlin-accept", body)?
        };
        Ok(Self {
            options,
            host,
            observer,
            tls,
            listener,
            events,
            sender,
            acceptor,
            acceptor_thread,
            arrivals,
            answers: Answers::new(host, &options.journal, None),
            deferred: VecDeque::new(),
            cpu: CpuTime::default(),
            cpu_before,
            span: Span::current(),
        })
    }

    /// The next event, or `None` at `until`. Replaces messages of earlier control lanes by
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
            Ok(SessionEvent::Arrived(arrival)) => {
                self.arrivals.fetch_sub(1, Ordering::SeqCst);
                Ok(Some(SessionEvent::Arrived(arrival)))
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
            } if is_inquiry(&offer) => (stream, offer),
            other => return Some(other),
        };
        let peer = peer_of(&stream);
        self.notify(DestinationEvent::Inquired { peer: peer.clone() });
        if let Err(refusal) = self.answers.begin(stream, &offer) {
            self.reject(format!("inquiry from {peer}: {refusal}"));
        }
        None
    }

    /// Removes from the event queue the messages of control lanes with an epoch below
    /// `epoch`. Their readers have been joined, so nothing more arrives from them.
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
        self.reject(match arrival {
            Arrival::Rejected { from, reason } => format!("{from}: {reason}"),
            Arrival::Control { stream, .. } => {
                let reason = format!("control lane from {}: {why}", peer_of(&stream));
                refuse(
                    &stream,
                    &Refusal {
                        fault: FaultCode::Busy,
                        text: "another VM is being received".into(),
                    },
                );
                reason
            }
            Arrival::Lane { .. } => format!("data lane: {why}"),
            Arrival::Starved(error) => starved(error).for_peer(),
        });
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
    /// acceptor. Returns the CPU time of the session.
    pub(super) fn close(
        mut self,
        control: Option<ControlLink>,
        lanes: impl Iterator<Item = JoinHandle<()>>,
    ) -> Duration {
        let _close = info_span!("close").entered();
        self.acceptor.wake();
        self.answers.end();
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
        let threads = lanes.chain([self.acceptor_thread]);
        for joined in threads.map(JoinHandle::join).chain(read) {
            if joined.is_err() {
                let text = "a thread of the session panicked".into();
                self.observer.event(&DestinationEvent::Warning(text));
            }
        }
        used(&self.cpu, self.cpu_before)
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
