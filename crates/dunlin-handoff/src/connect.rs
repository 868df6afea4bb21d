//! The connecting side: resolves a name, connects, completes the handshake and installs the keys in
//! the kernel, all before one deadline.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{Liveness, remaining, set_liveness};
use thiserror::Error;

use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::handshake::UntrustedReason;
use dunlin_lane::handshake::keyed::{self, Keyed};
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::HandoffTls;
use dunlin_lane::provider::{TlsVersion, group_name, suite_name};

/// Each address of a name gets an equal share of the remaining time, and at least this much, so that
/// one unreachable address does not use it all.
const LEAST_SHARE: Duration = Duration::from_millis(200);

/// Why there is no connection. Nothing but handshake messages has been sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The name does not resolve.
    #[error("{host} has no address: {source}; correct the name, or the host's resolver")]
    Unknown {
        /// The name.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// No address accepted the connection in time.
    #[error(
        "{to} cannot be reached: {source}; see that it listens there and that no firewall is between"
    )]
    Unreachable {
        /// Name and port.
        to: String,
        /// The error of the last address.
        source: io::Error,
    },
    /// The peer's certificate is not trusted by the CA bundle.
    #[error("the certificate that {at} shows is not among the trusted ones, and none of them vouches for it: {}", unissued(.why))]
    NotTrusted {
        /// The peer's address.
        at: SocketAddr,
        /// Why the certificate is not trusted.
        why: Option<UntrustedReason>,
    },
    /// The handshake failed.
    #[error("no TLS with {at}: {source}")]
    Handshake {
        /// The peer's address.
        at: SocketAddr,
        /// Why.
        source: Box<HandshakeError>,
    },
    /// The peer supports no offered version, cipher or curve.
    #[error(
        "no TLS with {at}: it takes none of what was offered ({reason}); it must allow {version} with one of the ciphers and one of the curves that were asked for"
    )]
    NothingInCommon {
        /// The peer's address.
        at: SocketAddr,
        /// The version offered.
        version: TlsVersion,
        /// The peer's alert.
        reason: String,
    },
    /// A socket operation failed.
    #[error("the socket to {at} cannot be set up: {source}")]
    Socket {
        /// The peer's address.
        at: SocketAddr,
        /// The error.
        source: io::Error,
    },
}

/// A connection with an authenticated peer. Dropping it closes it without an alert.
pub struct Connected {
    /// What the handshake established.
    pub facts: Facts,
    pub(super) keyed: Keyed,
    /// How long the handshake took.
    pub(super) took: Duration,
}

/// What a handshake established.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The peer's address.
    pub at: SocketAddr,
    /// The version of TLS.
    pub version: TlsVersion,
    /// The cipher suite's OpenSSL name.
    pub cipher: &'static str,
    /// The key exchange.
    pub curve: &'static str,
    /// The peer's identity; `None` if certificates were not verified.
    pub peer: Option<PeerIdentity>,
}

/// Connects to `host` and performs the handshake, before `deadline`. Nothing cancels it before: while
/// the resolver or the peer does not answer, it blocks until then.
///
/// # Errors
/// [`ConnectError`]; the connection is closed then.
pub fn connect(
    host: &str,
    port: u16,
    tls: &HandoffTls,
    deadline: Instant,
) -> Result<Connected, ConnectError> {
    let addresses = addresses(host, port, deadline)?;
    let stream = reach(&addresses, deadline).map_err(|source| ConnectError::Unreachable {
        to: format!("{host}:{port}"),
        source: plain(source),
    })?;
    // The first address; an empty list has failed before.
    let at = stream.peer_addr().unwrap_or(addresses[0]);
    stream
        .set_nodelay(true)
        .and_then(|()| keep_alive(&stream))
        .map_err(|source| ConnectError::Socket { at, source })?;
    let begin = Instant::now();
    let keyed = keyed::client(stream, tls, deadline).map_err(|error| failed(at, tls, error))?;
    let leaf = keyed.certificates.first();
    let peer = leaf.and_then(|leaf| tls.identity_of(leaf));
    let facts = Facts::of(&keyed, peer);
    Ok(Connected {
        facts,
        keyed,
        took: begin.elapsed(),
    })
}

impl Facts {
    /// Combines the parameters of `keyed` with `peer`, as the caller identified it.
    pub(super) fn of(keyed: &Keyed, peer: Option<PeerIdentity>) -> Self {
        Self {
            at: keyed.at,
            version: keyed.version,
            cipher: suite_name(keyed.suite),
            curve: keyed.group.map_or("unknown", group_name),
            peer,
        }
    }
}

/// Sets keep-alive alone, and no bound on unacknowledged data: the programs at both ends decide how
/// long a peer may stall.
pub(super) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let liveness = Liveness {
        user_timeout: Duration::ZERO,
        ..Liveness::default()
    };
    set_liveness(stream, &liveness)
}

/// The addresses of a name, at least one. The resolver has no deadline, so it is asked on a
/// thread that may outlast this.
fn addresses(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>, ConnectError> {
    let bare = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let unknown = |source| ConnectError::Unknown {
        host: host.to_owned(),
        source,
    };
    let (sender, found) = mpsc::channel();
    let name = bare.to_owned();
    thread::Builder::new()
        .name("dunlin-resolver".into())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs();
            // Fails only if the caller has stopped waiting.
            let _ = sender.send(found.map(Iterator::collect::<Vec<_>>));
        })
        .map_err(unknown)?;
    let left = remaining(deadline).map_err(unknown)?;
    let found = found
        .recv_timeout(left)
        .map_err(|_| unknown(io::Error::other("the resolver did not answer in time")))?
        .map_err(unknown)?;
    if found.is_empty() {
        return Err(unknown(io::ErrorKind::NotFound.into()));
    }
    Ok(found)
}

/// The first of `addresses` that answers.
fn reach(addresses: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (index, address) in addresses.iter().enumerate() {
        let left = remaining(deadline)?;
        let others = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        let share = (left / others).max(LEAST_SHARE).min(left);
        match TcpStream::connect_timeout(address, share) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Replaces the kernel's text for a timeout.
fn plain(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
        }
        _ => error,
    }
}

fn failed(at: SocketAddr, tls: &HandoffTls, error: HandshakeError) -> ConnectError {
    let version = tls.version();
    match error {
        HandshakeError::UnknownAuthority(why) => ConnectError::NotTrusted { at, why },
        HandshakeError::Incompatible(reason) => ConnectError::NothingInCommon {
            at,
            version,
            reason,
        },
        // handshake_failure, protocol_version, insufficient_security (RFC 8446, section 6.2).
        HandshakeError::PeerAlert(alert) if matches!(alert.0, 40 | 70 | 71) => {
            ConnectError::NothingInCommon {
                at,
                version,
                reason: format!("alert {alert}, which may also mean that it wants a certificate"),
            }
        }
        error => ConnectError::Handshake {
            at,
            source: Box::new(error),
        },
    }
}

fn unissued(why: &Option<UntrustedReason>) -> String {
    match why {
        Some(UntrustedReason::SelfSigned { pin }) => {
            format!("it is signed with its own key, {pin}; if it is the right one, append it there")
        }
        Some(UntrustedReason::ByStranger { authority }) => {
            format!("its authority is {authority}; if that is to be trusted, append it there")
        }
        Some(UntrustedReason::BrokenOff { issuer }) => format!(
            "it was issued by {issuer}, whose certificate the peer did not send; if that is to be \
             trusted, append it there"
        ),
        None => "it comes from an unknown authority".to_owned(),
    }
}
