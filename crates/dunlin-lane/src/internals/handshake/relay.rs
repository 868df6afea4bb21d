//! The handshake of a relay. The peer is another program, so no ALPN is sent, and any version that
//! both sides allow may be negotiated ([`policy`](super::super::policy)).

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use dunlin_linux::ktls::Version;
use dunlin_proto::client_hello::{Look, look};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;

use super::keyed::{self, Keyed};
use super::{
    HandshakeError, Next, Unbuffered, drive, identity_of, linger, local, negotiated_suite,
    negotiated_version, step,
};
use crate::internals::accept::reading::{Reading, RejectReason, would_block};
use crate::internals::kernel;
use crate::internals::peers::PeerIdentity;
use crate::internals::policy::{ClientTls, ServerSettings, ServerTls, Side};
use crate::internals::relayed::Records;
use crate::internals::relayed::messages::halves;
use crate::internals::relayed::session::Session;

/// A connection to an authenticated peer, which may be a program other than Dunlin.
pub struct Relayed {
    /// A blocking socket without timeouts, from which none of the peer's data has been
    /// read.
    pub stream: TcpStream,
    /// The peer's address.
    pub at: SocketAddr,
    /// The peer.
    pub peer: PeerIdentity,
    /// The keys that seal and open the records, in this process or in the kernel.
    pub records: Records,
    /// On the accepting side, the server name for which the client asked (SNI), if any.
    pub asked_for: Option<String>,
}

/// Runs the handshake on a connection that this side opened.
///
/// # Errors
/// [`HandshakeError`]. The connection is closed, after an alert if TLS failed.
pub fn client(
    stream: TcpStream,
    tls: &ClientTls,
    deadline: Instant,
) -> Result<Relayed, HandshakeError> {
    // Read the address now, because it cannot be read after the peer resets the connection.
    let at = stream.peer_addr().map_err(HandshakeError::Io)?;
    stream.set_nodelay(true).map_err(HandshakeError::Io)?;
    let mut connection =
        UnbufferedClientConnection::new(tls.config.clone(), tls.server_name.clone())?;
    drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
    finish((stream, at), connection, &tls.side, true)
}

fn finish<C: Unbuffered + Send + 'static>(
    (stream, at): (TcpStream, SocketAddr),
    connection: C,
    side: &Side,
    is_client: bool,
) -> Result<Relayed, HandshakeError> {
    let common = connection.common();
    let peer = identity_of(common, &side.trust)?;
    let version = negotiated_version(common)?;
    let suite = negotiated_suite(common)?;
    let records = if kernel::choose_for_relay(side.offload, suite, version)?.is_kernel
        && kernel::prepare(&stream, suite, version)?
    {
        let (secrets, next) = connection.into_secrets()?;
        kernel::give(&stream, &secrets, version)?;
        let renews = kernel::abilities(suite).is_ok_and(|abilities| abilities.renews_keys);
        let renews = renews && version == Version::V1_3;
        let (sealing, opening) = halves(&secrets, version, is_client, renews, next);
        Records::Kernel(sealing, opening)
    } else if version == Version::V1_3 {
        let (secrets, next) = connection.into_secrets()?;
        let session = Session::new(secrets, next, is_client, side.provider);
        Records::Process(session.map_err(local)?)
    } else {
        Records::Process(Session::older(connection))
    };
    Ok(Relayed {
        stream,
        at,
        peer,
        records,
        asked_for: None,
    })
}

/// The accepting side of a relay's handshake. One thread can advance many such handshakes in turn.
pub struct Greeting {
    settings: Arc<ServerSettings>,
    connection: UnbufferedServerConnection,
    /// The client's first records, until they contain its hello.
    hello: Option<Vec<u8>>,
    /// The server name in the hello.
    asked_for: Option<String>,
    reading: Reading,
    /// Complete records that rustls has not processed.
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Greeting {
    /// Returns a handshake that has not begun.
    ///
    /// # Errors
    /// The settings are inconsistent.
    pub fn new(tls: &ServerTls) -> Result<Self, HandshakeError> {
        let settings = tls.settings();
        Ok(Self {
            connection: UnbufferedServerConnection::new(Arc::clone(&settings.config))?,
            settings,
            hello: Some(Vec::new()),
            asked_for: None,
            reading: Reading::default(),
            incoming: Vec::new(),
            outgoing: Vec::new(),
        })
    }

    /// Whether no complete record has arrived.
    pub(crate) fn is_fresh(&self) -> bool {
        self.reading.received == 0
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Advances the handshake until the socket would block (`false`) or the handshake is complete
    /// (`true`).
    pub fn advance(&mut self, stream: &TcpStream) -> Result<bool, RejectReason> {
        loop {
            if let Err(error) = self.flush(stream) {
                return would_block(error);
            }
            match step(&mut self.connection, &mut self.incoming, &mut self.outgoing) {
                Ok(Next::Go | Next::Write) => {}
                Ok(Next::Done) => return Ok(true),
                Ok(Next::Read) => {
                    if !self.reading.next(stream)? {
                        return Ok(false);
                    }
                    self.look_at_hello();
                    self.incoming.append(&mut self.reading.record);
                }
                Err(error) => {
                    // Ignore a failure to send the alert, because the first error is the one to
                    // report.
                    let _ = self.flush(stream);
                    return Err(error.into());
                }
            }
        }
    }

    /// Reads the server name as soon as the hello is complete. rustls does not report the name for
    /// an [`UnbufferedServerConnection`].
    fn look_at_hello(&mut self) {
        let Some(hello) = &mut self.hello else { return };
        hello.extend_from_slice(&self.reading.record);
        match look(hello) {
            Ok(Look::Needs(_)) => return,
            Ok(Look::Hello(hello)) => self.asked_for = hello.server_name,
            // rustls reports the error.
            Err(_) => {}
        }
        self.hello = None;
    }

    fn flush(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        while !self.outgoing.is_empty() {
            let count = stream.write(&self.outgoing)?;
            self.outgoing.drain(..count);
        }
        Ok(())
    }

    /// Returns the connection of a complete handshake for a hand-off, and the client's identity if
    /// the client presented a certificate.
    pub fn keyed(
        self,
        stream: TcpStream,
        at: SocketAddr,
    ) -> Result<(Keyed, Option<PeerIdentity>), RejectReason> {
        stream.set_nonblocking(false)?;
        let keyed = keyed::finish(stream, at, self.connection)?;
        let peer = keyed.certificates.split_first();
        let peer = peer.map(|(leaf, issuers)| self.settings.side.trust.identify(leaf, issuers));
        let peer = peer.transpose().map_err(HandshakeError::from)?;
        Ok((keyed, peer))
    }

    /// Returns the connection of a complete handshake.
    pub(crate) fn finish(self, stream: TcpStream, at: SocketAddr) -> Result<Relayed, RejectReason> {
        stream.set_nonblocking(false)?;
        let relayed = finish((stream, at), self.connection, &self.settings.side, false)?;
        Ok(Relayed {
            asked_for: self.asked_for,
            ..relayed
        })
    }
}
