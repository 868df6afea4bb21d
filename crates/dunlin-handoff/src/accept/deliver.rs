//! Serves clients of hand-off names: installs their keys in the kernel and passes their sockets to
//! the receivers.

use dunlin_lane::sync::lock;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::connect_unix;

use super::alert::internal_error;
use super::shared::Shared;
use super::{Arrived, Event, HandoffName, Refusal};
use crate::connect::{ConnectionInfo, keep_alive};
use crate::kernel::install;
use crate::pass::send_sockets;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::handshake::linger;
use dunlin_lane::kernel::{Refused, abilities};
use dunlin_lane::peers::PeerIdentity;

/// Time limit from the end of the handshake until the receiver has the socket.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a refused client has to read its alert.
const ALERT_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection after its handshake, and the client's identity if client certificates are required.
pub(super) type Secured = (Keyed, Option<PeerIdentity>);

/// Passes a socket to its receiver, in a new thread because the receiver may be slow.
pub(super) fn start(shared: &Arc<Shared>, index: usize, secured: Secured) {
    let from = secured.0.at;
    let name = shared.options.names[index].name.clone();
    let most = shared.options.limits.handovers;
    // Hand-overs are counted per name, so that a slow receiver of one name does not delay other
    // names.
    let mut state = lock(&shared.state);
    let waiting = state.handovers.entry(index).or_default();
    // Besides `most` hand-overs, up to `most` refused clients may wait until they have read their
    // alert. The connections of further clients are closed without an alert.
    let gets_alert = *waiting < 2 * most;
    let is_excess = *waiting >= most;
    if gets_alert {
        *waiting += 1;
    }
    drop(state);
    if !gets_alert {
        return shared.refused(from, Some(name), Refusal::ReceiverBusy(most));
    }
    let (on_thread, named) = (Arc::clone(shared), name.clone());
    let body = move || {
        let delivered = match is_excess {
            true => Err(reject(&on_thread, secured.0, Refusal::ReceiverBusy(most))),
            false => deliver(&on_thread, index, secured),
        };
        match delivered {
            Ok(event) => on_thread.report(&event),
            Err(refusal) => on_thread.refused(from, Some(named), refusal),
        }
        on_thread.end_handover(index);
    };
    let spawned = thread::Builder::new()
        .name("dunlin-handover".to_owned())
        .spawn(body);
    if let Err(error) = spawned {
        shared.end_handover(index);
        shared.refused(from, Some(name), Refusal::Io(error));
    }
}

fn deliver(shared: &Shared, index: usize, (keyed, peer): Secured) -> Result<Event, Refusal> {
    let HandoffName { name, to } = &shared.options.names[index];
    let deadline = Instant::now() + TIMEOUT;
    let no_receiver = |source| Refusal::NoReceiver {
        to: to.clone(),
        source,
    };
    // Connect before the keys are in the kernel. If there is no receiver, this process can then
    // still send the client an alert.
    let receiver = match connect_unix(to, deadline, shared.stop.wakeup()) {
        Ok(receiver) => receiver,
        Err(error) => {
            let refusal = match error.kind() {
                io::ErrorKind::ConnectionAborted => Refusal::Aborted,
                _ => no_receiver(error),
            };
            return Err(reject(shared, keyed, refusal));
        }
    };
    keep_alive(&keyed.stream)?;
    if let Err(refused) = abilities(keyed.cipher()?) {
        return Err(reject(shared, keyed, refused.into()));
    }
    let chosen = match install(&keyed, &*shared.options.inspector) {
        // The kernel has neither of the two keys, so this process can still send an alert.
        Err(refused @ Refused::Gone) => return Err(reject(shared, keyed, refused.into())),
        chosen => chosen?,
    };
    let arrived = Arrived {
        name: name.clone(),
        info: ConnectionInfo::of(&keyed, peer),
        chosen,
    };
    let line = (shared.options.describe)(&arrived) + "\n";
    let socket = keyed.stream.as_fd();
    send_sockets(&receiver, line.as_bytes(), &[socket], deadline).map_err(no_receiver)?;
    Ok(Event::HandedOver {
        arrived: Box::new(arrived),
        to: to.clone(),
    })
}

/// Sends the alert *internal_error* on a connection that has no keys in the kernel, and closes the
/// connection. Returns `refusal`.
fn reject(shared: &Shared, keyed: Keyed, refusal: Refusal) -> Refusal {
    let deadline = Instant::now() + ALERT_TIMEOUT;
    let Keyed {
        stream,
        suite,
        secrets,
        ..
    } = keyed;
    // Ignore a failure to send the alert: the client has disconnected or does not read.
    let _ = stream.set_write_timeout(Some(ALERT_TIMEOUT));
    let config = shared.tls.config();
    if let Some(alert) = internal_error(secrets.tx, suite, config.crypto_provider()) {
        let _ = (&stream).write_all(&alert);
        linger(&stream, deadline);
    }
    let _ = stream.shutdown(Shutdown::Both);
    refusal
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;
    use std::os::unix::net::UnixListener;

    use dunlin_lane::handshake::keyed;
    use dunlin_lane::policy::{HandoffTls, TrustPolicy};
    use dunlin_proto::fault::FaultCode;
    use dunlin_test_base::Scratch;
    use dunlin_test_support::tunnel::fill_backlog;

    use super::super::Target;
    use super::super::tests::{TIMEOUT, acceptor_of, offer, until};
    use super::*;

    #[test]
    fn an_acceptor_that_ends_refuses_a_client_whose_receiver_does_not_accept() {
        let scratch = Scratch::new();
        let path = scratch.join("receiver");
        let _receiver = UnixListener::bind(&path).unwrap();
        let _queue = fill_backlog(&path);
        let own = HandoffName {
            name: "own.test".to_owned(),
            to: path,
        };
        let unused = Target::Tcp("127.0.0.1:9".to_owned());
        let (acceptor, refusals) = acceptor_of(vec![own], unused, 1);
        let tls =
            HandoffTls::new(offer(), TrustPolicy::AnyCertificate, Some("own.test"), None).unwrap();
        let near = TcpStream::connect(acceptor.address()).unwrap();
        let mut near = keyed::client(near, &tls, Instant::now() + TIMEOUT)
            .unwrap()
            .stream;
        until("the client waits for its receiver", || {
            !lock(&acceptor.shared.state).handovers.is_empty()
        });
        // End the client's stream, so that the acceptor does not wait until the client has read the
        // alert.
        near.shutdown(Shutdown::Write).unwrap();
        drop(acceptor);
        assert_eq!(refusals.recv_timeout(TIMEOUT), Ok(FaultCode::Ended));
        let mut alert = Vec::new();
        near.read_to_end(&mut alert).unwrap();
        assert!(!alert.is_empty());
    }
}
