//! The handshake of a hand-off. It results in the socket and the connection's keys, for the kernel
//! or for the process that relays the connection.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::{CipherSuite, ExtractedSecrets, NamedGroup};

use super::{HandshakeError, Unbuffered, drive, linger, local, negotiated_version, tickets};
use crate::internals::kernel::{Refused, failed};
use crate::internals::policy::HandoffTls;
use crate::internals::provider::parts;
use crate::internals::provider::{self, TlsVersion};

/// A connection after a complete handshake.
pub struct Keyed {
    /// A blocking socket without timeouts, from which none of the peer's data has been
    /// read.
    pub stream: TcpStream,
    /// The peer's address.
    pub at: SocketAddr,
    /// The peer's certificate chain, if it presented one.
    pub certificates: Vec<CertificateDer<'static>>,
    /// The protocol version.
    pub version: TlsVersion,
    /// The cipher suite.
    pub suite: CipherSuite,
    /// The key exchange group, if one was negotiated.
    pub group: Option<NamedGroup>,
    /// The traffic keys of both directions.
    pub secrets: ExtractedSecrets,
}

/// Runs the handshake on a connection that this side opened.
///
/// # Errors
/// [`HandshakeError`]. The connection is closed, after an alert if TLS failed.
pub fn client(
    stream: TcpStream,
    tls: &HandoffTls,
    deadline: Instant,
) -> Result<Keyed, HandshakeError> {
    // Read the address now, because it cannot be read after the peer resets the connection.
    let at = stream.peer_addr().map_err(HandshakeError::Io)?;
    let mut connection =
        UnbufferedClientConnection::new(tls.config.clone(), tls.server_name.clone())?;
    drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
    finish(stream, at, connection)
}

impl Keyed {
    /// The cipher suite that the keys are for.
    pub fn cipher(&self) -> Result<provider::CipherSuite, Refused> {
        parts(&self.secrets.tx.1)
            .map(|(cipher, _, _)| cipher)
            .map_err(failed)
    }

    /// Consumes a TLS 1.3 server's session tickets until none has arrived for `quiet` or the
    /// server's data begins. If a program without TLS code read the socket, the tickets would make
    /// the read fail with EIO.
    ///
    /// # Errors
    /// [`HandshakeError`].
    pub fn take_tickets(
        &mut self,
        quiet: Duration,
        deadline: Instant,
    ) -> Result<(), HandshakeError> {
        let (first, secrets) = &self.secrets.rx;
        let taken = tickets::take(&self.stream, (*first, secrets), quiet, deadline)?;
        self.secrets.rx.0 += taken;
        Ok(())
    }
}

pub(super) fn finish<C: Unbuffered>(
    stream: TcpStream,
    at: SocketAddr,
    connection: C,
) -> Result<Keyed, HandshakeError> {
    let common = connection.common();
    let version = negotiated_version(common)?;
    let suite = common
        .negotiated_cipher_suite()
        .ok_or_else(|| local("no cipher suite was negotiated"))?
        .suite();
    let group = common
        .negotiated_key_exchange_group()
        .map(|group| group.name());
    let certificates = common.peer_certificates().unwrap_or_default();
    let certificates = certificates
        .iter()
        .map(|one| one.clone().into_owned())
        .collect();
    // The socket's owner cannot renew keys, so the object that derives the next keys is not needed.
    let (secrets, _) = connection.into_secrets()?;
    Ok(Keyed {
        stream,
        at,
        certificates,
        version,
        suite,
        group,
        secrets,
    })
}
