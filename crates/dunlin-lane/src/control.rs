//! The control lane: a stream of few bytes, secured by rustls from beginning to end, because only
//! rustls's buffered connection can export keys.
//!
//! Any thread may send; one thread at a time receives. Neither holds the connection's lock while
//! it waits for the socket, so a peer that reads slowly delays no one's receiving.

use crate::sync::lock;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use dunlin_linux::socket::wait_readable;
use rustls::{ClientConnection, Connection, ServerConnection};
use thiserror::Error;

use super::handshake::{
    self, HandshakeError, Parameters, linger, parameters, peer_identity, read_record,
};
use super::peers::PeerIdentity;
use super::policy::ServerSettings;
use super::policy::{ClientTls, ServerTls};
use super::provider::Provider;
use super::record::{Alert, RECEIVED_RECORD_BYTES};
use super::trust::Trust;

/// How long one write, or one object that has begun to arrive, may stand still.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Why the control lane failed. It is at its end, save for [`ControlError::Deadline`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Nothing came in time. Nothing is lost: ask again.
    #[error("no control message came before the deadline")]
    Deadline,
    /// Something came, and then no more, or the peer does not take what we send.
    #[error("the peer stopped in the middle of a control message: it hangs, or the network does")]
    Stalled,
    /// The peer said that it is done.
    #[error("the peer has closed the control lane")]
    Closed,
    /// The connection ended without the peer's saying so.
    #[error(
        "the control lane was cut: the peer died, or someone ended the connection; it did not close it"
    )]
    Truncated,
    /// [`ControlStream::shutdown`] was called here.
    #[error("the control lane was shut down on this side")]
    Cancelled,
    /// The peer gave up and said why.
    #[error("the peer ended the control lane with the alert {0}")]
    PeerAlert(Alert),
    /// The peer's records do not hold.
    #[error(
        "a record on the control lane is not acceptable, changed on the way or a breach of protocol: {0}"
    )]
    Tls(#[source] rustls::Error),
    /// The connection broke.
    #[error("the control lane's connection failed: {0}")]
    Io(#[source] io::Error),
}

/// An authenticated control lane.
pub struct ControlStream {
    stream: TcpStream,
    /// Guards rustls's state; held for computation, never across a wait.
    connection: Mutex<Connection>,
    /// Sealed bytes on their way out. Its holder seals and writes, so records leave in order.
    outgoing: Mutex<Outgoing>,
    /// Bytes of the socket that rustls has not taken yet.
    incoming: Mutex<Incoming>,
    cancelled: AtomicBool,
    peer: PeerIdentity,
    parameters: Parameters,
    /// What it was made with, on the side that accepted.
    settings: Option<Arc<ServerSettings>>,
}

/// Sealed bytes on their way to the socket.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    /// A write failed, perhaps in the middle of a record: nothing can be sent after it.
    has_failed: bool,
}

/// Makes the control lane of a connection that this side opened.
///
/// # Errors
/// [`HandshakeError`].
pub fn client(
    stream: TcpStream,
    tls: &ClientTls,
    deadline: Instant,
) -> Result<ControlStream, HandshakeError> {
    let connection = ClientConnection::new(tls.config.clone(), tls.server_name.clone())?;
    ControlStream::new(
        stream,
        connection.into(),
        &tls.trust,
        tls.provider,
        deadline,
    )
}

/// Makes the control lane of a connection that this side accepted.
///
/// # Errors
/// [`HandshakeError`].
pub fn server(
    stream: TcpStream,
    tls: &ServerTls,
    deadline: Instant,
) -> Result<ControlStream, HandshakeError> {
    let settings = tls.settings();
    let connection = ServerConnection::new(Arc::clone(&settings.config))?;
    let lane = ControlStream::new(
        stream,
        connection.into(),
        &settings.trust,
        settings.provider,
        deadline,
    )?;
    Ok(lane.made_with(settings))
}

impl ControlStream {
    fn new(
        stream: TcpStream,
        mut connection: Connection,
        trust: &Trust,
        provider: Provider,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        stream.set_nodelay(true).map_err(HandshakeError::Io)?;
        drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
        Self::established(stream, connection, trust, provider)
    }

    /// The control lane on a connection whose handshake is complete.
    pub(super) fn established(
        stream: TcpStream,
        connection: Connection,
        trust: &Trust,
        provider: Provider,
    ) -> Result<Self, HandshakeError> {
        let peer = peer_identity(&connection, trust)?;
        let parameters = parameters(&connection, provider)?;
        stream
            .set_read_timeout(Some(STALL_LIMIT))
            .map_err(HandshakeError::Io)?;
        stream
            .set_write_timeout(Some(STALL_LIMIT))
            .map_err(HandshakeError::Io)?;
        Ok(Self {
            stream,
            connection: Mutex::new(connection),
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            cancelled: AtomicBool::new(false),
            peer,
            parameters,
            settings: None,
        })
    }

    /// The same, and what it was made with on the side that accepted.
    pub(super) fn made_with(mut self, settings: Arc<ServerSettings>) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Who the peer is.
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// What was negotiated.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The socket, for its addresses and options.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends all of `bytes`, from any thread. What one call sends stays together.
    ///
    /// # Errors
    /// [`ControlError`]; an unknown part of `bytes` has been sent then.
    pub fn send(&self, mut bytes: &[u8]) -> Result<(), ControlError> {
        let mut outgoing = lock(&self.outgoing);
        while !bytes.is_empty() {
            // rustls takes 64 KiB at most before its queue must be emptied.
            let taken = lock(&self.connection)
                .writer()
                .write(bytes)
                .map_err(ControlError::Io)?;
            bytes = &bytes[taken..];
            self.flush(&mut outgoing)?;
        }
        Ok(())
    }

    /// Waits for bytes until `deadline` and returns how many were put into `buffer`, at least
    /// one; zero is the peer's clean end. One thread at a time.
    ///
    /// # Errors
    /// [`ControlError::Deadline`] loses nothing; every other error is the lane's end.
    pub fn receive(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, ControlError> {
        let mut incoming = lock(&self.incoming);
        loop {
            if let Some(count) = self.decrypted(buffer)? {
                return Ok(count);
            }
            if incoming.is_empty() {
                if !wait_readable(&self.stream, deadline).map_err(ControlError::Io)? {
                    return Err(ControlError::Deadline);
                }
                let count = incoming
                    .fill(&self.stream)
                    .map_err(|error| self.broken(error))?;
                if count == 0 {
                    // No close_notify came before the end.
                    return Err(self.broken(io::ErrorKind::UnexpectedEof.into()));
                }
            }
            self.decrypt(&mut incoming)?;
        }
    }

    /// Fills `buffer`. The deadline is for the first byte; once that has come, each further part
    /// may take [`STALL_LIMIT`].
    ///
    /// # Errors
    /// [`ControlError::Deadline`] when nothing came: nothing is lost. [`ControlError::Closed`]
    /// when the peer closed before the first byte, [`ControlError::Truncated`] when after it.
    pub fn receive_exact(&self, buffer: &mut [u8], deadline: Instant) -> Result<(), ControlError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let until = if filled == 0 {
                deadline
            } else {
                Instant::now() + STALL_LIMIT
            };
            match self.receive(&mut buffer[filled..], until) {
                Ok(0) if filled == 0 => return Err(ControlError::Closed),
                Ok(0) => return Err(ControlError::Truncated),
                Ok(count) => filled += count,
                Err(ControlError::Deadline) if filled > 0 => return Err(ControlError::Stalled),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Keying material that both ends of this connection, and nobody else, can derive
    /// (RFC 8446, section 7.5), as long as `out`.
    ///
    /// # Errors
    /// [`ControlError::Tls`] when `out` is longer than the suite can derive.
    pub fn export(
        &self,
        label: &[u8],
        context: Option<&[u8]>,
        out: &mut [u8],
    ) -> Result<(), ControlError> {
        lock(&self.connection)
            .export_keying_material(out, label, context)
            .map(|_| ())
            .map_err(ControlError::Tls)
    }

    /// Tells the peer that nothing more will be sent. Receiving stays possible.
    ///
    /// # Errors
    /// [`ControlError`] when the peer could not be told.
    pub fn close(&self) -> Result<(), ControlError> {
        let mut outgoing = lock(&self.outgoing);
        lock(&self.connection).send_close_notify();
        self.flush(&mut outgoing)?;
        self.stream
            .shutdown(Shutdown::Write)
            .map_err(|error| self.broken(error))
    }

    /// Ends the lane at once, from any thread: whoever waits in it gets
    /// [`ControlError::Cancelled`], and the peer sees a cut.
    pub fn shutdown(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        // Fails only when the connection is gone already, which wakes everybody too.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Plaintext that rustls holds; `None` when there is none.
    fn decrypted(&self, buffer: &mut [u8]) -> Result<Option<usize>, ControlError> {
        match lock(&self.connection).reader().read(buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// Gives rustls what has come. Called only when its plaintext is used up, so one record's
    /// worth is all it ever holds.
    fn decrypt(&self, incoming: &mut Incoming) -> Result<(), ControlError> {
        let processed = {
            let mut connection = lock(&self.connection);
            incoming.feed(&mut connection).map_err(ControlError::Io)?;
            connection.process_new_packets()
        };
        // A reply, of a key update, or the alert that goes with an error. Whoever sends right now
        // takes it along.
        match self.outgoing.try_lock() {
            Ok(mut outgoing) if !outgoing.has_failed => {
                let flushed = self.flush(&mut outgoing);
                if processed.is_ok() {
                    flushed?;
                }
            }
            Ok(_) | Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {}
        }
        match processed {
            Ok(_) => Ok(()),
            Err(rustls::Error::AlertReceived(alert)) => {
                Err(ControlError::PeerAlert(Alert(alert.into())))
            }
            Err(error) => Err(ControlError::Tls(error)),
        }
    }

    /// Writes everything that rustls has sealed.
    fn flush(&self, outgoing: &mut Outgoing) -> Result<(), ControlError> {
        if outgoing.has_failed {
            return Err(ControlError::Stalled);
        }
        let bytes = &mut outgoing.bytes;
        loop {
            {
                let mut connection = lock(&self.connection);
                while connection.wants_write() {
                    connection.write_tls(bytes).map_err(ControlError::Io)?;
                }
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let written = self.write_all(bytes);
            bytes.clear();
            outgoing.has_failed = written.is_err();
            written?;
        }
    }

    fn write_all(&self, mut bytes: &[u8]) -> Result<(), ControlError> {
        while !bytes.is_empty() {
            match (&self.stream).write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
        Ok(())
    }

    fn broken(&self, error: io::Error) -> ControlError {
        if self.cancelled.load(Ordering::SeqCst) {
            return ControlError::Cancelled;
        }
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ControlError::Stalled,
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => ControlError::Truncated,
            _ => ControlError::Io(error),
        }
    }
}

impl std::fmt::Debug for ControlStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlStream")
            .field("peer", &self.peer)
            .field("parameters", &self.parameters)
            .finish_non_exhaustive()
    }
}

/// Ciphertext between the socket and rustls, one record's worth.
struct Incoming {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Incoming {
    fn default() -> Self {
        Self {
            bytes: vec![0; RECEIVED_RECORD_BYTES].into(),
            start: 0,
            end: 0,
        }
    }
}

impl Incoming {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Reads once from a socket that is readable; zero at its end.
    fn fill(&mut self, mut stream: &TcpStream) -> io::Result<usize> {
        self.start = 0;
        self.end = 0;
        loop {
            match stream.read(&mut self.bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => {
                    self.end = result?;
                    return Ok(self.end);
                }
            }
        }
    }

    fn feed(&mut self, connection: &mut Connection) -> io::Result<()> {
        self.start += connection.read_tls(&mut &self.bytes[self.start..self.end])?;
        Ok(())
    }
}

/// Runs a handshake to its end; on an error of TLS the peer gets its alert.
fn drive(
    connection: &mut Connection,
    stream: &TcpStream,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let mut record = Vec::new();
    let mut received = 0;
    loop {
        write(connection, stream, deadline)?;
        if !connection.is_handshaking() {
            return Ok(());
        }
        record.clear();
        read_record(stream, deadline, &mut record, &mut received)?;
        let mut unread = &record[..];
        while !unread.is_empty() {
            connection
                .read_tls(&mut unread)
                .map_err(HandshakeError::Io)?;
            if let Err(error) = connection.process_new_packets() {
                // Best effort: the first error is the one to report.
                let _ = write(connection, stream, deadline);
                return Err(error.into());
            }
        }
    }
}

fn write(
    connection: &mut Connection,
    stream: &TcpStream,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let mut outgoing = Vec::new();
    while connection.wants_write() {
        connection
            .write_tls(&mut outgoing)
            .map_err(HandshakeError::Io)?;
    }
    handshake::write_all(stream, deadline, &outgoing)
}

impl ServerTls {
    /// Keeps the settings that the session's control lane was made with for all that belongs to
    /// the session.
    pub fn keep(&self, control: &ControlStream) {
        if let Some(settings) = &control.settings {
            self.keep_settings(settings);
        }
    }
}
