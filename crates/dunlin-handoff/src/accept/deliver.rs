//! Serves clients of hand-off names: installs their keys in the kernel and passes their sockets to
//! the receivers.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::connect_unix;

use super::alert::internal_error;
use super::handovers::Admission;
use super::shared::Shared;
use super::{Arrived, Event, HandoffName, Refusal};
use crate::connect::{ConnectionInfo, keep_alive};
use crate::kernel::install;
use crate::pass::send_sockets;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::handshake::linger;
use dunlin_lane::kernel::{Refused, abilities};
use dunlin_lane::peers::PeerIdentity;

/// Time limit from the end of the handshake until this process has sent the receiver the socket and
/// the line that describes it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a refused client has to read its alert.
const ALERT_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection after its handshake, and the client's identity if client certificates are required.
pub(super) type Secured = (Keyed, Option<PeerIdentity>);

/// Passes a client's socket to its receiver, or refuses the client.
pub(super) fn start(shared: &Arc<Shared>, index: usize, secured: Secured) {
    let from = secured.0.at;
    begin(
        shared,
        index,
        from,
        move |shared, passed, excess| match excess {
            Some(refusal) => Err(reject(shared, secured.0, refusal)),
            None => deliver(shared, index, secured, passed),
        },
    );
}

/// Runs `work` for a client of the name `index`, in a new thread because the receiver may be slow.
/// In its second argument, `work` stores the connection on which it passes a socket.
///
/// Hand-overs are counted per name, so that the receiver of one name does not delay other names. If
/// the name has too many, the client is refused: `work` gets the refusal as its third argument and
/// sends an alert. If too many such alerts are already under way, `work` does not run, and the
/// client is refused without an alert.
fn begin<W>(shared: &Arc<Shared>, index: usize, from: SocketAddr, work: W)
where
    W: FnOnce(&Shared, &mut Option<UnixStream>, Option<Refusal>) -> Result<Event, Refusal>
        + Send
        + 'static,
{
    let name = shared.options.names[index].name.clone();
    let busy = || Refusal::ReceiverBusy(shared.options.limits.handovers);
    let admission = shared.begin_handover(index);
    let excess = match admission {
        Admission::HandOver => None,
        Admission::Alert => Some(busy()),
        Admission::Close => return shared.refused(from, Some(name), busy()),
    };
    let (on_thread, named) = (Arc::clone(shared), name.clone());
    let body = move || {
        let mut passed = None;
        match work(&on_thread, &mut passed, excess) {
            Ok(event) => on_thread.report(&event),
            Err(refusal) => on_thread.refused(from, Some(named), refusal),
        }
        on_thread.end_handover(index, admission, passed);
    };
    let spawned = thread::Builder::new()
        .name("dunlin-handover".to_owned())
        .spawn(body);
    if let Err(error) = spawned {
        shared.end_handover(index, admission, None);
        shared.refused(from, Some(name), Refusal::Io(error));
    }
}

fn deliver(
    shared: &Shared,
    index: usize,
    (keyed, peer): Secured,
    passed: &mut Option<UnixStream>,
) -> Result<Event, Refusal> {
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
    pass(receiver, &line, keyed.stream.as_fd(), deadline, passed).map_err(no_receiver)?;
    Ok(Event::HandedOver {
        arrived: Box::new(arrived),
        to: to.clone(),
    })
}

/// Sends the socket and the line that describes it, and ends the stream. Stores the connection in
/// `passed` even after an error, because a part of the line, with the socket, may have been sent.
fn pass(
    receiver: UnixStream,
    line: &str,
    socket: BorrowedFd<'_>,
    deadline: Instant,
    passed: &mut Option<UnixStream>,
) -> io::Result<()> {
    let sent = send_sockets(&receiver, line.as_bytes(), &[socket], deadline);
    // For the receiver, a shutdown is the same as a close. The call fails only if the receiver has
    // closed its end.
    let _ = receiver.shutdown(Shutdown::Both);
    *passed = Some(receiver);
    sent
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
    use dunlin_lane::sync::lock;
    use dunlin_linux::fdpass;
    use dunlin_proto::fault::FaultCode;
    use dunlin_test_base::Scratch;
    use dunlin_test_support::tunnel::fill_backlog;

    use super::super::tests::{TIMEOUT, acceptor_of, offer, until};
    use super::super::{Acceptor, Limits, Target};
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

    /// Passes a plain socket to the receiver of the name `index`, like [`start`] after the keys are
    /// installed. Returns after the thread has ended.
    fn hand_over(acceptor: &Acceptor, index: usize) {
        let shared = &acceptor.shared;
        let (socket, _other) = UnixStream::pair().unwrap();
        let from = SocketAddr::from(([192, 0, 2, 7], 50_412));
        begin(shared, index, from, move |shared, passed, excess| {
            if let Some(refusal) = excess {
                return Err(refusal);
            }
            let (to, deadline) = (&shared.options.names[index].to, Instant::now() + TIMEOUT);
            let receiver = connect_unix(to, deadline, shared.stop.wakeup())?;
            pass(receiver, "line", socket.as_fd(), deadline, passed)?;
            Ok(Event::Forwarded { from, name: None })
        });
        until("the thread of the hand-over ends", || {
            lock(&shared.state).handover_threads() == 0
        });
    }

    /// Takes a line with its socket, and reads the end of the stream. Fails if a part has not arrived
    /// yet.
    fn take(receiver: &UnixListener) {
        let from = receiver.accept().unwrap().0;
        from.set_nonblocking(true).unwrap();
        let received = fdpass::receive(&from, &mut [0; 8]).unwrap();
        assert_eq!((received.bytes, received.descriptors.len()), (4, 1));
        assert_eq!(fdpass::receive(&from, &mut [0; 8]).unwrap().bytes, 0);
    }

    /// Claim F9 of docs/security.
    #[test]
    fn i7_a_receiver_that_reads_nothing_holds_a_limited_number_of_sockets() {
        const SLOW: usize = 0;
        const OWN: usize = 1;
        let scratch = Scratch::new();
        let names = ["slow.test", "own.test"].map(|name| HandoffName {
            name: name.to_owned(),
            to: scratch.join(name),
        });
        let receivers = names.each_ref().map(|name| {
            let receiver = UnixListener::bind(&name.to).unwrap();
            rustix::net::listen(&receiver, 4096).unwrap();
            receiver
        });
        let [slow, own] = &receivers;
        let unused = Target::Tcp("127.0.0.1:9".to_owned());
        let (acceptor, refusals) = acceptor_of(names.to_vec(), unused, 1);
        let hand_over = |index| {
            hand_over(&acceptor, index);
            refusals.try_recv().ok()
        };
        let most = Limits::default().handovers;
        for _ in 0..most {
            assert_eq!(hand_over(SLOW), None);
        }
        let busy = Some(FaultCode::TargetUnreachable);
        assert_eq!(hand_over(SLOW), busy);
        assert_eq!(hand_over(OWN), None);
        take(own);
        // A hand-over ends when all of its line was read, even if the receiver keeps the connection
        // open.
        let reads = slow.accept().unwrap().0;
        for expected in [busy, None, busy] {
            fdpass::receive(&reads, &mut [0; 2]).unwrap();
            assert_eq!(hand_over(SLOW), expected);
        }
        // A hand-over also ends when the receiver closes the connection.
        drop(slow.accept().unwrap());
        assert_eq!(hand_over(SLOW), None);
        for _ in 0..most {
            take(slow);
        }
        // Even if no further client arrives, the accepting thread closes a connection after the
        // receiver has read the line. While connections are open, it limits each of its waits, so
        // that it checks them in time. In this test another thread begins the hand-overs during an
        // unlimited wait, so wake the accepting thread.
        acceptor.shared.waker.wake();
        until("the connections are closed", || {
            lock(&acceptor.shared.state).handovers.is_empty()
        });
        // An unread line does not delay the end of the acceptor, and the receiver can still read it
        // afterwards.
        assert_eq!(hand_over(SLOW), None);
        assert_eq!(acceptor.drain(TIMEOUT), 0);
        take(slow);
    }
}
