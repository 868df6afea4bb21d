//! The accepting side of a control lane on one connection, for tests.
//! [`accept`](super::super::accept) serves all connections of a listener.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use rustls::{Connection, ServerConnection};

use super::{ControlStream, drive};
use crate::internals::handshake::{HandshakeError, linger};
use crate::internals::policy::ServerTls;

/// Performs the server's handshake on an accepted connection, and returns the control lane.
///
/// # Errors
/// [`HandshakeError`].
pub fn server(
    stream: TcpStream,
    tls: &ServerTls,
    deadline: Instant,
) -> Result<ControlStream, HandshakeError> {
    let settings = tls.settings();
    let mut connection = Connection::from(ServerConnection::new(Arc::clone(&settings.config))?);
    drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
    ControlStream::established(stream, connection, &settings.side, Some(&settings))
}
