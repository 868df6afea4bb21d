//! Clients of our names: installs their keys in the kernel and passes their sockets on.

use dunlin_lane::sync::lock;
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::connect_unix;

use super::alert::internal_error;
use super::shared::Shared;
use super::{Arrived, Event, Own, Refusal};
use crate::connect::{Facts, keep_alive};
use crate::kernel::install;
use crate::pass::give;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::handshake::linger;
use dunlin_lane::kernel::{Refused, abilities};
use dunlin_lane::peers::PeerIdentity;

/// From the end of the handshake until the other program has received the socket.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to read the alert that refuses it.
const FAREWELL: Duration = Duration::from_secs(1);

/// A connection after its handshake, with the client's identity if client certificates are required.
pub(super) type Secured = (Keyed, Option<PeerIdentity>);

/// Passes a socket on, in its own thread: the receiving program may be slow.
pub(super) fn start(shared: &Arc<Shared>, own: usize, secured: Secured) {
    let from = secured.0.at;
    let name = shared.options.names[own].name.clone();
    let most = shared.options.limits.handovers;
    // A slow receiver of one name's sockets does not delay other names.
    let mut state = lock(&shared.state);
    let waiting = state.handovers.entry(own).or_default();
    // As many again may be waiting for their refusal.
    let is_told = *waiting < 2 * most;
    let is_one_too_many = *waiting >= most;
    if is_told {
        *waiting += 1;
    }
    drop(state);
    if !is_told {
        return shared.refused(from, Some(name), Refusal::Busy(most));
    }
    let (on_thread, named) = (Arc::clone(shared), name.clone());
    let body = move || {
        let delivered = match is_one_too_many {
            true => Err(give_up(&on_thread, secured.0, Refusal::Busy(most))),
            false => deliver(&on_thread, own, secured),
        };
        match delivered {
            Ok(event) => on_thread.tell(event),
            Err(refusal) => on_thread.refused(from, Some(named), refusal),
        }
        on_thread.handed(own);
    };
    let spawned = thread::Builder::new()
        .name("dunlin-handover".to_owned())
        .spawn(body);
    if let Err(error) = spawned {
        shared.handed(own);
        shared.refused(from, Some(name), Refusal::Io(error));
    }
}

fn deliver(shared: &Shared, own: usize, (keyed, peer): Secured) -> Result<Event, Refusal> {
    let Own { name, to } = &shared.options.names[own];
    let deadline = Instant::now() + TIMEOUT;
    let no_taker = |source| Refusal::NoTaker {
        to: to.clone(),
        source,
    };
    // Before the kernel gets the keys: without a receiver, the client still gets an alert.
    let taker = match connect_unix(to, deadline) {
        Ok(taker) => taker,
        Err(error) => return Err(give_up(shared, keyed, no_taker(error))),
    };
    keep_alive(&keyed.stream)?;
    if let Err(refused) = abilities(keyed.cipher()?) {
        return Err(give_up(shared, keyed, refused.into()));
    }
    let chosen = match install(&keyed, &*shared.options.inspector) {
        // The kernel has none of the keys.
        Err(refused @ Refused::Gone) => return Err(give_up(shared, keyed, refused.into())),
        chosen => chosen?,
    };
    let arrived = Arrived {
        name: name.clone(),
        facts: Facts::of(&keyed, peer),
        chosen,
    };
    let line = (shared.options.describe)(&arrived) + "\n";
    let socket = keyed.stream.as_fd();
    give(&taker, line.as_bytes(), &[socket], deadline).map_err(no_taker)?;
    Ok(Event::HandedOver {
        arrived: Box::new(arrived),
        to: to.clone(),
    })
}

/// Sends *internal_error* on a connection without keys in the kernel, and returns the reason.
fn give_up(shared: &Shared, keyed: Keyed, refusal: Refusal) -> Refusal {
    let deadline = Instant::now() + FAREWELL;
    let Keyed {
        stream,
        suite,
        secrets,
        ..
    } = keyed;
    // This fails only if the client has disconnected or does not read.
    let _ = stream.set_write_timeout(Some(FAREWELL));
    let config = shared.tls.config();
    if let Some(alert) = internal_error(secrets.tx, suite, config.crypto_provider()) {
        let _ = (&stream).write_all(&alert);
        linger(&stream, deadline);
    }
    let _ = stream.shutdown(Shutdown::Both);
    refusal
}
