//! The server side: accepts sessions from authorised peers.

use dunlin_lane::sync::lock;
use dunlin_proto::text::{chain, harmless};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::Mode;
use dunlin_proto::ipsec::exchange::Exchange;
use dunlin_proto::ipsec::key::Role;
use dunlin_proto::ipsec::message::Terms;
use dunlin_proto::negotiate::{Features, Opening, Refusal, SessionId, Supported, VERSIONS, select};

use super::bound::check_source;
use super::error::IpsecError;
use super::session::{Beginning, Session, Status, clean_up_dead};
use super::tables::Tables;
use super::{Event, Observer, Options};
use dunlin_lane::accept::{Arrival, accept};
use dunlin_lane::control::ControlStream;
use dunlin_lane::fault::of_io;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::ServerTls;

/// The maximum number of simultaneous sessions.
const SESSIONS: usize = 64;
/// The maximum number of simultaneous sessions with one peer.
const OF_ONE_PEER: usize = 8;
/// The interval at which ended sessions are removed.
const TICK: Duration = Duration::from_millis(100);

/// Accepts sessions. Dropping it stops accepting, ends the open sessions, and waits until they have
/// ended.
pub struct Server {
    address: SocketAddr,
    site: Site,
    stop: Waker,
    threads: Vec<JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
}

pub(super) struct Held {
    peer: String,
    pub(super) identity: PeerIdentity,
    pub(super) session: Session,
}

/// The peer of a server's session, and the status of that session.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The peer's name, from its certificate.
    pub name: String,
    /// The status of the session; `None` until both sides have agreed on terms.
    pub status: Option<Status>,
}

impl Server {
    /// Starts to accept sessions from peers that `tls` authorises. First removes the policies and
    /// SAs that dead processes left in this network namespace, except policies that must still
    /// block ports.
    ///
    /// # Errors
    /// The kernel's IPsec is not usable or lacks ESP, the directory of records is not usable, or a
    /// descriptor or a thread is not available.
    pub fn start(
        listener: TcpListener,
        tls: ServerTls,
        options: Options,
        observer: Observer,
    ) -> Result<Self, IpsecError> {
        // Report a missing capability or missing ESP here, not when the first peer connects.
        Tables::open(None)?.have_esp()?;
        clean_up_dead(&options, &observer)?;
        let address = listener
            .local_addr()
            .map_err(IpsecError::resources("the listener"))?;
        let (stop, stopped) = waker().map_err(IpsecError::resources("a waker"))?;
        let site = Site {
            held: Arc::default(),
            options,
            observer,
        };
        let mut server = Self {
            address,
            site: site.clone(),
            stop,
            threads: Vec::new(),
            is_over: Arc::default(),
        };
        let (own, is_over) = (site.clone(), Arc::clone(&server.is_over));
        let body = move || site.take(&listener, &tls, &stopped);
        server.spawn("dunlin-ipsec-accept", body)?;
        server.spawn("dunlin-ipsec-ends", move || own.reap(&is_over))?;
        Ok(server)
    }

    fn spawn(
        &mut self,
        name: &str,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), IpsecError> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
        let thread = thread.map_err(IpsecError::resources("a thread"))?;
        self.threads.push(thread);
        Ok(())
    }

    /// The address on which the server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The open sessions.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn peers(&self) -> Result<Vec<Peer>, IpsecError> {
        self.site.peers()
    }

    /// Renews the keys of all SAs on which this side sends.
    pub fn rekey(&self) {
        self.site.rekey();
    }

    /// Stops accepting, ends all sessions, and waits until they have ended.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.wake();
        // The first thread is the accepting thread. After it has ended, no new session starts. End
        // the open sessions then, so that the second thread can remove them and end.
        for thread in self.threads.drain(..) {
            // The panic hook has printed the panic.
            let _ = thread.join();
            self.site.end();
            self.is_over.store(true, Ordering::SeqCst);
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Server")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// The state that the acceptor's threads share.
#[derive(Clone)]
pub(super) struct Site {
    pub(super) held: Arc<Mutex<Vec<Held>>>,
    pub(super) options: Options,
    pub(super) observer: Observer,
}

impl Site {
    pub(super) fn peers(&self) -> Result<Vec<Peer>, IpsecError> {
        let held = lock(&self.held);
        let peers = held.iter().map(|one| {
            Ok(Peer {
                name: one.peer.clone(),
                status: one.session.status()?,
            })
        });
        peers.collect()
    }

    pub(super) fn rekey(&self) {
        lock(&self.held).iter().for_each(|one| one.session.rekey());
    }

    pub(super) fn end(&self) {
        lock(&self.held).iter().for_each(|one| one.session.end());
    }

    /// The body of the thread that accepts peers.
    fn take(&self, listener: &TcpListener, tls: &ServerTls, stopped: &Wakeup) {
        let result = accept(listener, tls, stopped, |arrival| match arrival {
            Arrival::Control { stream, opening } => self.begin_or_reject(stream, &opening),
            Arrival::Lane { .. } => {
                let why = "a keying session has no lanes";
                self.reject("a lane", FaultCode::Malformed, why);
            }
            Arrival::Rejected { from, reason } => {
                let why = harmless(&reason.to_string());
                self.reject(&from.to_string(), reason.fault(), &why);
            }
            Arrival::Starved(error) => {
                self.reject("a connection", of_io(&error), &error.to_string());
            }
        });
        if let Err(error) = result {
            self.reject("all connections", of_io(&error), &error.to_string());
        }
    }

    pub(super) fn reject(&self, from: &str, fault: FaultCode, why: &str) {
        let (from, why) = (from.to_owned(), why.to_owned());
        self.observer.event(&Event::Rejected { from, fault, why });
    }

    /// Starts the session that an authenticated peer offers, or reports why it cannot
    /// start.
    pub(super) fn begin_or_reject(&self, control: ControlStream, opening: &Opening) {
        let from = harmless(&control.peer().to_string());
        if let Err(error) = self.begin(control, opening) {
            self.reject(&from, error.code(), &chain(&error));
        }
    }

    fn begin(&self, control: ControlStream, opening: &Opening) -> Result<(), IpsecError> {
        // Keepalive detects that the peer's host has vanished silently.
        set_liveness(control.socket(), &Liveness::default())
            .map_err(IpsecError::resources("keepalive of the control connection"))?;
        let agreed = self.answer(&control, opening);
        let mut bytes = Vec::new();
        match &agreed {
            Ok((_, selection)) => selection.encode(&mut bytes)?,
            Err(refusal) => Opening::Refuse(VERSIONS, refusal.clone()).encode(&mut bytes)?,
        }
        control.send(&bytes)?;
        let (session, _) = agreed.map_err(|refusal| {
            // This fails if the peer has already closed the connection.
            let _ = control.close();
            IpsecError::Refused {
                fault: refusal.fault,
                text: refusal.text,
            }
        })?;
        let identity = control.peer().clone();
        let peer = harmless(&identity.to_string());
        let options = self.options.clone();
        // These senders are used only if the peer requests mode cpu.
        let senders = options.senders(Mode::Cpu);
        let exchange = Exchange::responder(options.sas_max, options.udp, senders);
        let (session, _up): (Session, Receiver<()>) = Session::begin(Beginning {
            control,
            session,
            role: Role::Responder,
            exchange,
            options,
            observer: self.observer.clone(),
            admits,
        })?;
        lock(&self.held).push(Held {
            peer,
            identity,
            session,
        });
        Ok(())
    }

    fn answer(
        &self,
        control: &ControlStream,
        opening: &Opening,
    ) -> Result<(SessionId, dunlin_proto::negotiate::Selection), Refusal> {
        let refuse = |fault, text: &str| Refusal {
            fault,
            text: text.to_owned(),
        };
        let Opening::Offer(offer) = opening else {
            let text = "the first message on a control connection must be an offer";
            return Err(refuse(FaultCode::Malformed, text));
        };
        let supported = Supported {
            versions: VERSIONS,
            features: Features::IPSEC,
            required: Features::IPSEC,
            plain_allowed: false,
            ipsec: false,
        };
        let selection = select(offer, &supported)?;
        if let Ok(address) = control.socket().peer_addr() {
            let address = address.ip().to_canonical();
            let may = check_source(&self.options.bound, control.peer(), address);
            may.map_err(|error| refuse(error.code(), &error.to_string()))?;
        }
        let held = lock(&self.held);
        let peer = control.peer().principal();
        let theirs = held.iter().filter(|one| one.identity.is(&peer));
        if held.len() >= SESSIONS || theirs.count() >= OF_ONE_PEER {
            let text =
                "session limit reached, in total or with one peer: end a session, or try later";
            return Err(refuse(FaultCode::Busy, text));
        }
        Ok((offer.session, selection))
    }

    /// The body of the thread that removes ended sessions, until `is_over` is set and no session is
    /// left.
    fn reap(&self, is_over: &AtomicBool) {
        loop {
            let last = is_over.load(Ordering::SeqCst);
            self.remove_ended();
            if last && lock(&self.held).is_empty() {
                return;
            }
            thread::sleep(TICK);
        }
    }

    /// Removes ended sessions and reports each to the observer.
    pub(super) fn remove_ended(&self) {
        let mut held = lock(&self.held);
        let over = held.extract_if(.., |one| one.session.is_over());
        let over: Vec<Held> = over.collect();
        drop(held);
        for Held { peer, session, .. } in over {
            let why = session.wait().err().map(|error| chain(&error));
            self.observer.event(&Event::Over { peer, why });
        }
    }
}

/// Checks whether the peer may request these ports.
fn admits(options: &Options, terms: &Terms) -> Result<(), IpsecError> {
    let (asked, allowed) = (terms.ports, options.ports);
    if allowed.contains(asked.first()) && allowed.contains(asked.last()) {
        return Ok(());
    }
    Err(IpsecError::PortsNotAllowed {
        asked: asked.to_string(),
        allowed: allowed.to_string(),
    })
}
