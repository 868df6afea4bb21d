//! The port on which the tunnel accepts the control lanes and data lanes of its peers.

use dunlin_lane::sync::lock;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::text::harmless;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use dunlin_linux::poll::Wakeup;

use super::event::Event;
use super::site::Site;
use super::trunks::Trunks;
use dunlin_lane::accept::{self, Arrival};
use dunlin_lane::peers::{PeerIdentity, Principal};
use dunlin_lane::policy::ServerTls;

/// The maximum number of control lanes that still negotiate a trunk after the peer has been
/// authenticated. Each has a thread until the negotiation ends.
const HANDSHAKES: usize = 64;
/// The maximum number of control lanes of one peer that still negotiate a trunk, so that one peer
/// cannot block others.
const OF_ONE_PEER: usize = 8;

/// The body of the port's thread.
pub(super) fn listen(
    trunks: &Arc<Trunks>,
    site: &Arc<Site>,
    listener: &TcpListener,
    tls: &ServerTls,
    stopped: &Wakeup,
) {
    let handshakes = Arc::<Mutex<Vec<Principal>>>::default();
    let result = accept::accept(listener, tls, stopped, |arrival| {
        // Connections that set up IPsec lanes belong to no trunk, so the IPsec implementation takes
        // them.
        let arrival = match &site.sealed {
            Some(lanes) => lanes.take(arrival),
            None => Some(arrival),
        };
        if let Some(arrival) = arrival {
            take(trunks, site, &handshakes, arrival);
        }
    });
    if let Err(error) = result {
        let text = format!("stopped accepting peers: {error}");
        site.report(Event::Warning(text));
    }
}

/// Handles a connection after its first message has arrived.
fn take(
    trunks: &Arc<Trunks>,
    site: &Arc<Site>,
    handshakes: &Arc<Mutex<Vec<Principal>>>,
    arrival: Arrival,
) {
    match arrival {
        Arrival::Control { stream, opening } => {
            let from = harmless(&stream.peer().to_string());
            let Some(handshake) = Handshake::begin(handshakes, stream.peer()) else {
                let why = "too many control lanes have not completed their handshake";
                return site.reject(from, FaultCode::Busy, why);
            };
            let (own, trunks) = (Arc::clone(site), Arc::clone(trunks));
            site.spawn("dunlin-handshake".to_owned(), move || {
                let _handshake = handshake;
                if let Err(failure) = trunks.accept(stream, &opening) {
                    own.reject(from, failure.code(), failure);
                }
            });
        }
        Arrival::Lane { socket, opening } => {
            if let Err((fault, why)) = trunks.accept_lane(socket, &opening) {
                site.reject("a peer that opened a lane", fault, why);
            }
        }
        Arrival::Rejected { from, reason } => {
            site.reject(from, reason.fault(), harmless(&reason.to_string()));
        }
        Arrival::Starved(error) => {
            site.cannot_accept("the tunnel", &error);
        }
    }
}

/// A control lane of `peer` that is in its handshake. Dropping this removes it from `all`.
struct Handshake {
    all: Arc<Mutex<Vec<Principal>>>,
    peer: Principal,
}

impl Handshake {
    /// Adds a handshake; `None` if a limit is reached.
    fn begin(all: &Arc<Mutex<Vec<Principal>>>, peer: &PeerIdentity) -> Option<Self> {
        let mut handshakes = lock(all);
        let theirs = handshakes.iter().filter(|one| peer.is(one)).count();
        if handshakes.len() >= HANDSHAKES || theirs >= OF_ONE_PEER {
            return None;
        }
        let peer = peer.principal();
        handshakes.push(peer.clone());
        let all = Arc::clone(all);
        Some(Self { all, peer })
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut handshakes = lock(&self.all);
        if let Some(at) = handshakes.iter().position(|one| *one == self.peer) {
            handshakes.swap_remove(at);
        }
    }
}
