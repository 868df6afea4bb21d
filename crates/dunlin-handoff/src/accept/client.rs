//! A pending client: its hello or its handshake is incomplete.
//!
//! ```text
//!   nothing ─▶ part of a hello ─▶ hello ─▶ hand-off name ─▶ handshake ─▶ handed over
//!      (the bytes stay in the socket)  └─▶ other name ───────────────▶ forwarded
//! ```

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::socket::set_readable_from;
use dunlin_proto::client_hello::{Look, NoHello, look};
use dunlin_proto::limits::MAX_CLIENT_FLIGHT_BYTES;

use super::Refusal;
use super::deliver::Secured;
use super::shared::Shared;
use dunlin_lane::accept::would_block;
use dunlin_lane::handshake::FLIGHT_LIMIT_BYTES;
use dunlin_lane::handshake::relay::Greeting;

/// The time that a refused client gets to read its alert.
const LINGER: Duration = Duration::from_millis(500);
/// The codes of the alerts *decode_error* and *unrecognized_name* (RFC 8446, section 6.2).
const DECODE_ERROR: u8 = 50;
const UNRECOGNIZED_NAME: u8 = 112;

/// The buffer for a client's hello. The accepting thread uses one buffer for all clients.
pub(super) type HelloBuffer = Box<[u8; MAX_CLIENT_FLIGHT_BYTES]>;

pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) deadline: Instant,
    pub(super) began: Instant,
    /// The server name that the client requests; `None` until the hello is complete, or if it has
    /// no name.
    pub(super) name: Option<String>,
    stage: Stage,
}

enum Stage {
    /// This many bytes of the hello have arrived.
    Hello(usize),
    /// The handshake with a client that requested a hand-off name.
    Handshake(Box<Greeting>),
    /// The client is refused. The stage ends when the client has read the alert and disconnected,
    /// when this many further bytes have been discarded, or at the deadline.
    Lingering(usize),
}

/// What the accepting thread does with a client next.
pub(super) enum Step {
    Wait,
    /// Forward the client to the backend; the socket contains this many bytes of its hello.
    Forward(usize),
    /// The handshake is complete.
    Secured,
    /// Report the refusal; the client stays in [`Stage::Lingering`].
    Refused(Refusal),
    /// Drop the client: it has disconnected, or has sent too much after it was refused.
    Gone,
}

impl Client {
    pub(super) fn new(stream: TcpStream, from: SocketAddr, timeout: Duration) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let began = Instant::now();
        Ok(Self {
            stream,
            from,
            deadline: began + timeout,
            began,
            name: None,
            stage: Stage::Hello(0),
        })
    }

    /// Progress, for evictions: 0 refused, 1 silent, 2 partial hello, 3 handshake. Clients in their
    /// handshake are evicted last, because this host may already have computed a signature for
    /// them.
    pub(super) fn progress(&self) -> u8 {
        match self.stage {
            Stage::Lingering(_) => 0,
            Stage::Hello(0) => 1,
            Stage::Hello(_) => 2,
            Stage::Handshake(_) => 3,
        }
    }

    pub(super) fn lingers(&self) -> bool {
        matches!(self.stage, Stage::Lingering(_))
    }

    /// Processes all bytes that have arrived. `ended` means that no more bytes will arrive.
    pub(super) fn advance(
        &mut self,
        shared: &Shared,
        buffer: &mut HelloBuffer,
        ended: bool,
    ) -> Step {
        match &mut self.stage {
            Stage::Hello(_) => self.look(shared, buffer, ended),
            Stage::Handshake(greeting) => match greeting.advance(&self.stream) {
                Ok(true) => Step::Secured,
                Ok(false) => Step::Wait,
                Err(reason) => {
                    self.linger();
                    Step::Refused(reason.into())
                }
            },
            Stage::Lingering(budget) => drain(&self.stream, budget),
        }
    }

    /// Peeks at the bytes that have arrived, and leaves them in the socket.
    fn look(&mut self, shared: &Shared, buffer: &mut HelloBuffer, ended: bool) -> Step {
        let seen = match self.stream.peek(&mut buffer[..]) {
            // The client disconnected before it sent a byte.
            Ok(0) => return Step::Gone,
            Ok(seen) => seen,
            Err(error) => match would_block(error) {
                Ok(_) if ended => return Step::Gone,
                Ok(_) => return Step::Wait,
                Err(_) => return Step::Gone,
            },
        };
        self.stage = Stage::Hello(seen);
        let hello = match look(&buffer[..seen]) {
            Ok(Look::Hello(hello)) => hello,
            Ok(Look::Needs(_)) if ended => return self.refuse(Refusal::Disconnected, None),
            Ok(Look::Needs(least)) => {
                // Wake this thread only when `least` bytes have arrived (SO_RCVLOWAT). If they have
                // arrived in the meantime, the kernel reports the socket immediately.
                return match self.readable_from(least) {
                    Ok(()) => Step::Wait,
                    Err(error) => self.refuse(Refusal::Io(error), None),
                };
            }
            Err(NoHello::NotTls(_)) if shared.options.forwards_plain => return self.forward(seen),
            Err(error @ NoHello::NotTls(_)) => return self.refuse(Refusal::Hello(error), None),
            Err(error) => return self.refuse(Refusal::Hello(error), Some(DECODE_ERROR)),
        };
        self.name = hello.server_name;
        if self.handoff_name(shared).is_none() {
            return self.forward_if(shared, seen);
        }
        let greeting = self
            .readable_from(1)
            .map_err(Refusal::Io)
            .and_then(|()| Greeting::new(&shared.tls).map_err(Refusal::from));
        match greeting {
            Ok(greeting) => {
                self.stage = Stage::Handshake(Box::new(greeting));
                self.advance(shared, buffer, ended)
            }
            Err(refusal) => self.refuse(refusal, None),
        }
    }

    /// The index of the hand-off name that the client requests.
    pub(super) fn handoff_name(&self, shared: &Shared) -> Option<usize> {
        let name = self.name.as_deref()?;
        let mut names = shared.options.names.iter();
        names.position(|one| one.name.eq_ignore_ascii_case(name))
    }

    fn forward_if(&mut self, shared: &Shared, seen: usize) -> Step {
        match shared.options.backend {
            Some(_) => self.forward(seen),
            None => self.refuse(Refusal::UnknownName, Some(UNRECOGNIZED_NAME)),
        }
    }

    fn forward(&mut self, seen: usize) -> Step {
        match self.readable_from(1) {
            Ok(()) => Step::Forward(seen),
            Err(error) => self.refuse(Refusal::Io(error), None),
        }
    }

    fn readable_from(&self, bytes: usize) -> io::Result<()> {
        set_readable_from(&self.stream, u32::try_from(bytes).unwrap_or(u32::MAX))
    }

    fn refuse(&mut self, refusal: Refusal, alert: Option<u8>) -> Step {
        if let Some(alert) = alert {
            // A fatal alert in an unencrypted record. The send buffer is empty, so the write fails
            // only if the client has disconnected.
            let _ = (&self.stream).write(&[21, 3, 3, 0, 2, 2, alert]);
        }
        self.linger();
        Step::Refused(refusal)
    }

    /// Delays the close, because closing a socket with unread bytes resets the connection, and the
    /// reset can overtake the alert.
    fn linger(&mut self) {
        // These two calls fail only if the client has disconnected.
        let _ = self.readable_from(1);
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stage = Stage::Lingering(2 * FLIGHT_LIMIT_BYTES);
        self.deadline = Instant::now() + LINGER;
    }

    /// The connection after its handshake.
    pub(super) fn secured(self) -> Result<Secured, Refusal> {
        match self.stage {
            Stage::Handshake(greeting) => Ok(greeting.keyed(self.stream, self.from)?),
            _ => Err(Refusal::Disconnected),
        }
    }
}

/// Discards what a refused client sends.
fn drain(mut stream: &TcpStream, budget: &mut usize) -> Step {
    let mut scrap = [0; 4096];
    while *budget > 0 {
        match stream.read(&mut scrap) {
            Ok(0) => return Step::Gone,
            Ok(count) => *budget = budget.saturating_sub(count),
            Err(error) => match would_block(error) {
                Ok(_) => return Step::Wait,
                Err(_) => return Step::Gone,
            },
        }
    }
    Step::Gone
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use dunlin_proto::client_hello::Hello;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::super::Target;
    use super::super::tests::{TIMEOUT, acceptor, until};
    use super::*;
    use dunlin_lane::provider::Crypto;
    use dunlin_linux::poll::{Interest, poll};
    use dunlin_linux::socket::unread_bytes;
    use dunlin_test_support::lane::pair;

    /// The ClientHello of rustls for a server with this name or address.
    fn hello(server: &str) -> Vec<u8> {
        let config = ClientConfig::builder_with_provider(Crypto::auto().rustls().unwrap())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = server.to_owned().try_into().unwrap();
        let mut bytes = Vec::new();
        let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
        connection.write_tls(&mut bytes).unwrap();
        bytes
    }

    /// After [`Client::look`], the kernel reports the socket only when enough bytes for the next
    /// step have arrived.
    #[test]
    fn i7_a_partial_hello_is_reported_only_when_the_next_step_can_succeed() {
        let (acceptor, _events) = acceptor(Target::Tcp("127.0.0.1:9".to_owned()), 1);
        let shared = &acceptor.shared;
        let whole = hello("host-a.example");
        let in_one_byte_records: Vec<u8> = whole[5..]
            .iter()
            .flat_map(|byte| [&whole[..3], &[0, 1, *byte]].concat())
            .collect();
        for bytes in [whole, in_one_byte_records] {
            let (mut near, far) = pair();
            near.set_nodelay(true).unwrap();
            let from = far.peer_addr().unwrap();
            let mut client = Client::new(far, from, TIMEOUT).unwrap();
            let mut buffer: HelloBuffer = Box::new([0; MAX_CLIENT_FLIGHT_BYTES]);
            let (mut arrived, mut looks) = (0, 0);
            let mut least = 1;
            loop {
                // Write only a few segments: the kernel also reports a socket if its buffer is
                // nearly full.
                for (until_byte, is_reported) in [(least - 1, false), (least, true)] {
                    near.write_all(&bytes[arrived..until_byte]).unwrap();
                    arrived = until_byte;
                    until("the bytes have arrived", || {
                        unread_bytes(&client.stream).unwrap() == arrived as u64
                    });
                    let ready = poll(&[Interest::read(&client.stream)], Some(Duration::ZERO));
                    assert_eq!(ready.unwrap()[0], is_reported, "{arrived} of {least}");
                }
                looks += 1;
                match client.advance(shared, &mut buffer, false) {
                    Step::Wait => {}
                    Step::Forward(hello) => break assert_eq!(hello, bytes.len()),
                    _ => panic!("refused after {arrived} bytes"),
                }
                let Ok(Look::Needs(more)) = look(&bytes[..arrived]) else {
                    panic!("the client waits after {arrived} bytes");
                };
                least = more;
            }
            // The documentation of `client_hello` states this limit.
            assert!(looks <= 50, "{looks} looks at {} bytes", bytes.len());
        }
    }

    #[test]
    fn the_name_in_a_hello_of_rustls_is_decoded_at_its_last_byte() {
        for (server, name) in [
            ("Host-A.example", Some("host-a.example")),
            ("192.0.2.1", None),
        ] {
            let bytes = hello(server);
            let server_name = name.map(str::to_owned);
            assert_eq!(look(&bytes), Ok(Look::Hello(Hello { server_name })));
            for arrived in 0..bytes.len() {
                let Ok(Look::Needs(least)) = look(&bytes[..arrived]) else {
                    panic!("{arrived} bytes are enough");
                };
                assert!(arrived < least && least <= bytes.len());
            }
        }
        #[cfg(feature = "aws-lc-rs")]
        assert!(
            hello("a.test").len() > 1400,
            "the hello contains no post-quantum key share"
        );
    }
}
