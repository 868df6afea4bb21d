//! The connecting side: resolves a name, connects and completes the handshake, all before one
//! deadline. [`crate::kernel`] then installs the keys in the kernel.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::socket::{Liveness, set_liveness};

use crate::error::HandoffError;
use dunlin_lane::dial::{DialCancel, connect_to_any};
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::handshake::keyed::{self, Keyed};
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::policy::HandoffTls;
use dunlin_lane::provider::{TlsVersion, group_name, suite_name};
use dunlin_lane::resolve;

/// A connection after its handshake. Dropping it closes the socket without an alert.
pub struct Connected {
    /// The negotiated parameters and the peer.
    pub info: ConnectionInfo,
    pub(super) keyed: Keyed,
    /// How long the handshake took.
    pub(super) took: Duration,
}

/// The negotiated parameters of a connection, and its peer.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    /// The peer's address.
    pub at: SocketAddr,
    /// The version of TLS.
    pub version: TlsVersion,
    /// The cipher suite's OpenSSL name.
    pub cipher: &'static str,
    /// The name of the key exchange group; `unknown` if TLS reports none.
    pub curve: &'static str,
    /// The peer's identity; `None` if certificates were not verified.
    pub peer: Option<PeerIdentity>,
}

/// Connects to `host` and performs the handshake. Returns an error when `deadline` passes or `cancel`
/// is cancelled.
///
/// # Errors
/// [`HandoffError`], after closing the connection.
pub fn connect(
    host: &str,
    port: u16,
    tls: &HandoffTls,
    deadline: Instant,
    cancel: &DialCancel,
) -> Result<Connected, HandoffError> {
    let connect_covered = || {
        let stop = cancel.wakeup();
        let addresses = resolve::host(host, port, deadline, stop).map_err(|source| {
            let host = host.to_owned();
            HandoffError::Unresolved { host, source }
        })?;
        let stream = connect_to_any(&addresses, deadline, stop).map_err(|source| {
            let to = format!("{host}:{port}");
            HandoffError::Unreachable { to, source }
        })?;
        // The stream is connected to one of `addresses`, so the list is not empty.
        let at = stream.peer_addr().unwrap_or(addresses[0]);
        cancel
            .covers(&stream)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| keep_alive(&stream))
            .map_err(|source| HandoffError::Socket { at, source })?;
        let begin = Instant::now();
        let keyed = keyed::client(stream, tls, deadline).map_err(|error| failed(at, tls, error))?;
        let leaf = keyed.certificates.first();
        let peer = leaf.and_then(|leaf| tls.identity_of(leaf));
        let info = ConnectionInfo::of(&keyed, peer);
        let took = begin.elapsed();
        Ok(Connected { info, keyed, took })
    };
    let connected = connect_covered();
    // From now on, a cancellation does not close the socket, because the caller owns it.
    cancel.release();
    if cancel.is_cancelled() {
        return Err(HandoffError::Cancelled);
    }
    connected
}

impl ConnectionInfo {
    /// Returns the parameters of `keyed`, with `peer` as the peer's identity.
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

/// Enables keep-alive. Sets no limit for unacknowledged data (TCP_USER_TIMEOUT): the programs at
/// both ends decide how long a peer may stall.
pub(super) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let liveness = Liveness {
        user_timeout: Duration::ZERO,
        ..Liveness::default()
    };
    set_liveness(stream, &liveness)
}

fn failed(at: SocketAddr, tls: &HandoffTls, error: HandshakeError) -> HandoffError {
    let version = tls.version();
    match error {
        HandshakeError::UnknownAuthority(why) => HandoffError::NotTrusted { at, why },
        HandshakeError::Incompatible(reason) => HandoffError::Incompatible {
            at,
            version,
            reason,
        },
        // handshake_failure, protocol_version, insufficient_security (RFC 8446, section 6.2).
        HandshakeError::PeerAlert(alert) if matches!(alert.0, 40 | 70 | 71) => {
            HandoffError::Incompatible {
                at,
                version,
                reason: format!(
                    "alert {alert}; a server can also send this alert if it requires a client \
                     certificate"
                ),
            }
        }
        error => HandoffError::Handshake {
            at,
            source: Box::new(error),
        },
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
    fn cancelling_a_connect_to_a_silent_peer_closes_the_connection() {
        let provider = Provider::built_in()[0];
        let ciphers = "TLS_AES_256_GCM_SHA384";
        let offer = Offer::new(TlsVersion::V1_3, ciphers, "X25519", provider).unwrap();
        let tls = HandoffTls::new(offer, TrustPolicy::AnyCertificate, None, None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cancel = DialCancel::new().unwrap();
        let begin = Instant::now();
        thread::scope(|scope| {
            let peer = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0]).unwrap();
                cancel.cancel();
                // Read until the peer has closed or reset the connection.
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let deadline = begin + Duration::from_secs(60);
            let connected = connect("127.0.0.1", port, &tls, deadline, &cancel);
            assert!(matches!(connected.map(drop), Err(HandoffError::Cancelled)));
            peer.join().unwrap();
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
