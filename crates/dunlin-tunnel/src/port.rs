//! The port for the peers: their control lanes and lanes.

use dunlin_lane::sync::lock;
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

/// Control lanes whose handshake is under way at the same time. Their peers are authenticated;
/// each has a thread until the handshake has ended.
const HANDSHAKES: usize = 64;
/// And those of one peer, so that none keeps others out.
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
        // Sessions that protect lanes exist apart from trunks.
        let arrival = match &site.sealed {
            Some(lanes) => lanes.take(arrival),
            None => Some(arrival),
        };
        if let Some(arrival) = arrival {
            take(trunks, site, &handshakes, arrival);
        }
    });
    if let Err(error) = result {
        let text = format!("no peer can reach this tunnel any more: {error}");
        site.tell(Event::Warning(text));
    }
}

/// A connection to the port has sent what it is.
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
                let why = "too many control lanes are in their handshakes".to_owned();
                return site.tell(Event::Rejected { from, why });
            };
            let (own, trunks) = (Arc::clone(site), Arc::clone(trunks));
            site.spawn("dunlin-handshake".to_owned(), move || {
                let _handshake = handshake;
                if let Err(failure) = trunks.accept(stream, &opening) {
                    let why = failure.to_string();
                    own.tell(Event::Rejected { from, why });
                }
            });
        }
        Arrival::Lane { socket, opening } => {
            if let Err(why) = trunks.accept_lane(socket, &opening) {
                let from = "a lane".to_owned();
                let why = why.to_owned();
                site.tell(Event::Rejected { from, why });
            }
        }
        Arrival::Rejected { from, reason } => site.tell(Event::Rejected {
            from: from.to_string(),
            why: harmless(&reason.to_string()),
        }),
        Arrival::Starved(error) => {
            let text = format!("no connection can be accepted for want of descriptors: {error}");
            site.tell(Event::Warning(text));
        }
    }
}

/// The peer of a control lane whose handshake is under way.
struct Handshake {
    all: Arc<Mutex<Vec<Principal>>>,
    peer: Principal,
}

impl Handshake {
    /// One more, if there is room for it.
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
