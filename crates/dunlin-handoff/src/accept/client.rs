//! One client of whom it is not decided yet who answers, or who has not shown who it is.
//!
//! ```text
//!   nothing ─▶ part of a hello ─▶ hello ─▶ own name ─▶ handshake ─▶ handed over
//!      (all of it left in the socket)  └─▶ any other ─────────────▶ forwarded
//! ```

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::socket::set_readable_from;
use dunlin_proto::client_hello::{Look, NoHello, look};
use dunlin_proto::limits::MAX_CLIENT_FLIGHT_BYTES;

use super::deliver::Secured;
use super::{Refusal, Shared};
use dunlin_lane::accept::would_block;
use dunlin_lane::handshake::FLIGHT_LIMIT_BYTES;
use dunlin_lane::handshake::relay::Greeting;

/// How long a client that is refused may take to fetch its alert.
const LINGER: Duration = Duration::from_millis(500);
/// The alerts of those names (RFC 8446, section 6.2).
const DECODE_ERROR: u8 = 50;
const UNRECOGNIZED_NAME: u8 = 112;

/// Bytes of clients' hellos, looked at one after the other.
pub(super) type HelloBuffer = Box<[u8; MAX_CLIENT_FLIGHT_BYTES]>;

pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) deadline: Instant,
    pub(super) began: Instant,
    /// What it wants, once that is known.
    name: Option<String>,
    stage: Stage,
}

enum Stage {
    /// So many bytes of its hello have come.
    Undecided(usize),
    /// Its name is ours.
    Greeting(Box<Greeting>),
    /// Refused; waits for the client to fetch the alert, and takes no more than so much from it.
    Lingering(usize),
}

/// What becomes of it.
pub(super) enum Step {
    Wait,
    /// It goes to the old server, with a hello of so many bytes unread.
    Forward(usize),
    /// Its handshake is complete.
    Secured,
    Refused(Refusal),
    /// Nobody is there any more.
    Gone,
}

impl Client {
    pub(super) fn new(stream: TcpStream, from: SocketAddr, patience: Duration) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let began = Instant::now();
        Ok(Self {
            stream,
            from,
            deadline: began + patience,
            began,
            name: None,
            stage: Stage::Undecided(0),
        })
    }

    /// How far it has got: refused, silent, with a part of a hello, in its handshake. Whoever gets
    /// to the last has made us sign, and competes with honest clients alone.
    pub(super) fn progress(&self) -> u8 {
        match self.stage {
            Stage::Lingering(_) => 0,
            Stage::Undecided(0) => 1,
            Stage::Undecided(_) => 2,
            Stage::Greeting(_) => 3,
        }
    }

    pub(super) fn lingers(&self) -> bool {
        matches!(self.stage, Stage::Lingering(_))
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Goes on until the socket has no more. `ended` tells that nothing more will come.
    pub(super) fn advance(&mut self, shared: &Shared, desk: &mut HelloBuffer, ended: bool) -> Step {
        match &mut self.stage {
            Stage::Undecided(_) => self.look(shared, desk, ended),
            Stage::Greeting(greeting) => match greeting.advance(&self.stream) {
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

    /// Looks at what it has said so far, and leaves it there.
    fn look(&mut self, shared: &Shared, desk: &mut HelloBuffer, ended: bool) -> Step {
        let seen = match self.stream.peek(&mut desk[..]) {
            // It came and went.
            Ok(0) => return Step::Gone,
            Ok(seen) => seen,
            Err(error) => match would_block(error) {
                Ok(_) if ended => return Step::Gone,
                Ok(_) => return Step::Wait,
                Err(_) => return Step::Gone,
            },
        };
        self.stage = Stage::Undecided(seen);
        let hello = match look(&desk[..seen]) {
            Ok(Look::Hello(hello)) => hello,
            Ok(Look::Needs(_)) if ended => return self.refuse(Refusal::Closed, None),
            Ok(Look::Needs(least)) => {
                // Fewer bytes wake nobody. Asked for what has come meanwhile, the kernel tells at
                // once.
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
        if self.own(shared).is_none() {
            return self.forward_if(shared, seen);
        }
        let greeting = self
            .readable_from(1)
            .map_err(Refusal::Io)
            .and_then(|()| Greeting::new(&shared.tls).map_err(Refusal::from));
        match greeting {
            Ok(greeting) => {
                self.stage = Stage::Greeting(Box::new(greeting));
                self.advance(shared, desk, ended)
            }
            Err(refusal) => self.refuse(refusal, None),
        }
    }

    /// Which of our names it wants.
    pub(super) fn own(&self, shared: &Shared) -> Option<usize> {
        let name = self.name()?;
        let mut names = shared.options.names.iter();
        names.position(|own| own.name.eq_ignore_ascii_case(name))
    }

    fn forward_if(&mut self, shared: &Shared, seen: usize) -> Step {
        match shared.options.other {
            Some(_) => self.forward(seen),
            None => self.refuse(Refusal::Stranger, Some(UNRECOGNIZED_NAME)),
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
            // Fatal, in a record as it is before there are keys. The socket has room for it, or
            // nobody is there.
            let _ = (&self.stream).write(&[21, 3, 3, 0, 2, 2, alert]);
        }
        self.linger();
        Step::Refused(refusal)
    }

    /// Waits a moment before it is closed: closing a socket with unread bytes in it resets the
    /// connection, and a reset destroys the alert on its way.
    fn linger(&mut self) {
        // Both fail only where nobody is left to fetch it.
        let _ = self.readable_from(1);
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stage = Stage::Lingering(2 * FLIGHT_LIMIT_BYTES);
        self.deadline = Instant::now() + LINGER;
    }

    /// The connection, when its handshake is complete.
    pub(super) fn secured(self) -> Result<Secured, Refusal> {
        match self.stage {
            Stage::Greeting(greeting) => Ok(greeting.keyed(self.stream, self.from)?),
            _ => Err(Refusal::Closed),
        }
    }
}

/// Takes what comes behind a refusal.
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

    /// What rustls says first to a server of this name or address.
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

    /// The kernel reports no byte of a hello before as many are there as the last look asked for.
    #[test]
    fn i7_a_hello_that_has_half_arrived_is_reported_only_when_there_is_more_to_see() {
        let (acceptor, _events) = acceptor(Target::Tcp("127.0.0.1:9".to_owned()), 1);
        let shared = &acceptor.shared;
        let whole = hello("host-a.example");
        let in_records_of_a_byte: Vec<u8> = whole[5..]
            .iter()
            .flat_map(|byte| [&whole[..3], &[0, 1, *byte]].concat())
            .collect();
        for bytes in [whole, in_records_of_a_byte] {
            let (mut near, far) = pair();
            near.set_nodelay(true).unwrap();
            let from = far.peer_addr().unwrap();
            let mut client = Client::new(far, from, TIMEOUT).unwrap();
            let mut desk: HelloBuffer = Box::new([0; MAX_CLIENT_FLIGHT_BYTES]);
            let (mut there, mut looks) = (0, 0);
            let mut least = 1;
            loop {
                // Few segments: the kernel also reports a socket whose buffers are nearly used up.
                for (until_byte, is_reported) in [(least - 1, false), (least, true)] {
                    near.write_all(&bytes[there..until_byte]).unwrap();
                    there = until_byte;
                    until("it has come", || {
                        unread_bytes(&client.stream).unwrap() == there as u64
                    });
                    let ready = poll(&[Interest::read(&client.stream)], Some(Duration::ZERO));
                    assert_eq!(ready.unwrap()[0], is_reported, "{there} of {least}");
                }
                looks += 1;
                match client.advance(shared, &mut desk, false) {
                    Step::Wait => {}
                    Step::Forward(hello) => break assert_eq!(hello, bytes.len()),
                    _ => panic!("refused after {there} bytes"),
                }
                let Ok(Look::Needs(more)) = look(&bytes[..there]) else {
                    panic!("it waits after {there} bytes");
                };
                least = more;
            }
            // The bound that client_hello.rs names.
            assert!(looks <= 50, "{looks} looks at {} bytes", bytes.len());
        }
    }

    #[test]
    fn a_hello_of_rustls_tells_its_name_at_its_last_byte() {
        for (server, name) in [
            ("Host-A.example", Some("host-a.example")),
            ("192.0.2.1", None),
        ] {
            let bytes = hello(server);
            let server_name = name.map(str::to_owned);
            assert_eq!(look(&bytes), Ok(Look::Hello(Hello { server_name })));
            for there in 0..bytes.len() {
                let Ok(Look::Needs(least)) = look(&bytes[..there]) else {
                    panic!("{there} bytes are enough");
                };
                assert!(there < least && least <= bytes.len());
            }
        }
        #[cfg(feature = "aws-lc-rs")]
        assert!(
            hello("a.test").len() > 1400,
            "it bears a post-quantum key share"
        );
    }
}
