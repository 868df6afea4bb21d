//! The connecting side: resolves a name, connects, completes the handshake and installs the keys in
//! the kernel, all before one deadline.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::socket::{Liveness, set_liveness};
use thiserror::Error;

use dunlin_lane::dial::{DialCancel, connect_to_any};
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::handshake::UntrustedReason;
use dunlin_lane::handshake::keyed::{self, Keyed};
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::HandoffTls;
use dunlin_lane::provider::{TlsVersion, group_name, suite_name};
use dunlin_lane::resolve;

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
    /// The caller cancelled it.
    #[error("cancelled before the connection was ready")]
    Cancelled,
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

/// Connects to `host` and performs the handshake, before `deadline` and unless `cancel` is cancelled.
///
/// # Errors
/// [`ConnectError`]; the connection is closed then.
pub fn connect(
    host: &str,
    port: u16,
    tls: &HandoffTls,
    deadline: Instant,
    cancel: &DialCancel,
) -> Result<Connected, ConnectError> {
    let connect_covered = || {
        let stop = cancel.wakeup();
        let addresses = resolve::host(host, port, deadline, stop).map_err(|source| {
            let host = host.to_owned();
            ConnectError::Unknown { host, source }
        })?;
        let stream = connect_to_any(&addresses, deadline, stop).map_err(|source| {
            let to = format!("{host}:{port}");
            ConnectError::Unreachable { to, source }
        })?;
        // A connection has one of the addresses.
        let at = stream.peer_addr().unwrap_or(addresses[0]);
        cancel
            .covers(&stream)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| keep_alive(&stream))
            .map_err(|source| ConnectError::Socket { at, source })?;
        let begin = Instant::now();
        let keyed = keyed::client(stream, tls, deadline).map_err(|error| failed(at, tls, error))?;
        let leaf = keyed.certificates.first();
        let peer = leaf.and_then(|leaf| tls.identity_of(leaf));
        let facts = Facts::of(&keyed, peer);
        let took = begin.elapsed();
        Ok(Connected { facts, keyed, took })
    };
    let connected = connect_covered();
    // The connection's owner closes it.
    cancel.release();
    if cancel.is_cancelled() {
        return Err(ConnectError::Cancelled);
    }
    connected
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read;
    use std::net::TcpListener;
    use std::thread;

    use dunlin_lane::policy::TrustPolicy;
    use dunlin_lane::provider::{Offer, Provider};

    use super::*;

    #[test]
    fn a_connect_is_cancelled_while_the_peer_is_silent_and_closes_the_connection() {
        let provider = Provider::built_in()[0];
        let ciphers = "TLS_AES_256_GCM_SHA384";
        let offer = Offer::new(TlsVersion::V1_3, ciphers, "X25519", provider).unwrap();
        let tls = HandoffTls::new(offer, TrustPolicy::Anybody, None, None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cancel = DialCancel::new().unwrap();
        let begin = Instant::now();
        thread::scope(|scope| {
            let peer = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0]).unwrap();
                cancel.cancel();
                // Ends when the other side has closed; a reset is an end too.
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let deadline = begin + Duration::from_secs(60);
            let connected = connect("127.0.0.1", port, &tls, deadline, &cancel);
            assert!(matches!(connected.map(drop), Err(ConnectError::Cancelled)));
            peer.join().unwrap();
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
