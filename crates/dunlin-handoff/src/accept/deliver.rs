//! Clients of a name that is ours: their keys to the kernel, their sockets to whoever takes them.

use std::io::Write;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::ktls::Version;
use dunlin_linux::socket::connect_unix;

use super::{Arrived, Event, Offload, Own, Refusal, Shared};
use crate::carry::{self, CarryError, NotRenewed};
use crate::connect::{Facts, keep_alive};
use crate::pass::give;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::handshake::linger;
use dunlin_lane::kernel::{Chosen, Refused, abilities, takes};
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::provider::parts;
use dunlin_lane::provider::{self, TlsVersion, group_name, suite_name};
use dunlin_lane::relayed::halves;

/// From a complete handshake until the socket is taken.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a client has for the alert with which it is given up.
const FAREWELL: Duration = Duration::from_secs(1);

/// A connection whose handshake is complete, and whose it is if the client was asked.
pub(super) type Secured = (Keyed, Option<PeerIdentity>);

/// Hands a socket over, on a thread of its own: whoever takes it may be slow.
pub(super) fn start(shared: &Arc<Shared>, own: usize, secured: Secured) {
    let from = secured.0.at;
    let name = shared.options.names[own].name.clone();
    let most = shared.options.limits.handovers;
    // Whoever takes the sockets of one name and is slow costs those of others nothing.
    let mut state = shared.lock();
    let waiting = state.handovers.entry(own).or_default();
    // As many again may be about to be told that they are too many.
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
            true => {
                give_up(secured.0);
                Err(Refusal::Busy(most))
            }
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
    let deadline = Instant::now() + PATIENCE;
    let no_taker = |source| Refusal::NoTaker {
        to: to.clone(),
        source,
    };
    // First: a client that nobody takes can still be told so.
    let taker = match connect_unix(to, deadline) {
        Ok(taker) => taker,
        Err(error) => {
            give_up(keyed);
            return Err(no_taker(error));
        }
    };
    keep_alive(&keyed.stream)?;
    let facts = Facts {
        at: keyed.at,
        version: keyed.version,
        cipher: suite_name(keyed.suite),
        curve: keyed.group.map_or("unknown", group_name),
        peer,
    };
    let give = |socket: &dyn AsFd, offload: Offload| {
        let arrived = Arrived {
            name: name.clone(),
            facts,
            offload,
        };
        let line = (shared.options.line)(&arrived) + "\n";
        give(&taker, line.as_bytes(), &[socket.as_fd()], deadline).map_err(no_taker)?;
        Ok(Event::HandedOver {
            arrived: Box::new(arrived),
            to: to.clone(),
        })
    };
    let (suite, _, _) = parts(&keyed.secrets.tx.1).map_err(CarryError::from)?;
    let refused = match abilities(suite) {
        Ok(_) => {
            let version = match keyed.version {
                TlsVersion::V1_2 => Version::V1_2,
                TlsVersion::V1_3 => Version::V1_3,
            };
            if takes(&keyed.stream, &keyed.secrets, version)? {
                let chosen = Chosen::of(&keyed.stream, suite, &*shared.options.inspector);
                return give(&keyed.stream, Offload::Kernel(chosen));
            }
            // Nothing of it is the kernel's, so others may still use the keys.
            Refused::Gone
        }
        Err(refused) => refused,
    };
    match &shared.options.fallback {
        Some(program) => {
            let carried = carry::spawn(program(), keyed, deadline)?;
            give(&carried, Offload::Process)
        }
        None => {
            give_up(keyed);
            Err(refused.into())
        }
    }
}

/// Ends a connection whose keys nobody else has, with the alert *internal_error*.
fn give_up(keyed: Keyed) {
    let deadline = Instant::now() + FAREWELL;
    let is_1_3 = keyed.version == TlsVersion::V1_3;
    let provider = provider::auto().provider;
    let Ok((mut sealing, _)) = halves(keyed.secrets, is_1_3, provider, Box::new(NotRenewed)) else {
        return;
    };
    // All of it fails only where nobody is left to be told, or does not read.
    let _ = keyed.stream.set_write_timeout(Some(FAREWELL));
    if let Ok(alert) = sealing.internal_error() {
        let _ = (&keyed.stream).write_all(&alert);
        linger(&keyed.stream, deadline);
    }
    let _ = keyed.stream.shutdown(Shutdown::Both);
}
