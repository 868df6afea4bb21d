//! The control lane: a stream with little data. The lane's records are always sealed and opened by
//! rustls, never by the kernel, because only rustls's buffered connection can export keys.
//!
//! Any thread may send; one thread at a time receives. No thread holds the connection's lock while
//! it waits for the socket, so a send that waits for a slow peer does not delay receiving.

#[cfg(any(test, feature = "fuzzing"))]
mod fuzz;
mod request;

use crate::internals::sync::lock;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use dunlin_linux::interrupted::until_not_interrupted;
use dunlin_linux::socket::wait_readable;
use rustls::{ClientConnection, Connection};
use thiserror::Error;

use super::accept::reading::Reading;
use super::handshake::{self, HandshakeError, linger, peer_identity, read_record};
use super::peers::PeerIdentity;
use super::policy::{ClientTls, ServerSettings, ServerTls, Side};
use super::record::{Alert, RECEIVED_RECORD_BYTES};

#[cfg(any(test, feature = "fuzzing"))]
pub use fuzz::server;
pub use request::{OpenError, open};

/// Maximum time without progress in a write, or in a message that has partly arrived.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Why the control lane failed. Every error of sending and receiving, except
/// [`ControlError::Deadline`], ends the lane.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No message arrived in time. No data is lost; the caller may retry.
    #[error("no control message arrived before the deadline")]
    Deadline,
    /// A message stopped partway, the peer stopped reading, or an earlier write failed.
    #[error("the control lane stalled in the middle of a message: the peer or the network hangs")]
    Stalled,
    /// The kernel has ended the connection, because the peer's host did not acknowledge data or
    /// keep-alive probes (`ETIMEDOUT`, or the reason that a router gave).
    #[error("the peer's host does not answer: it has failed, or the network drops packets")]
    Unanswered,
    /// The peer closed the lane.
    #[error("the peer closed the control lane")]
    Closed,
    /// The connection ended without a close from the peer.
    #[error("the control lane ended without a close: the peer died, or the connection was reset")]
    Truncated,
    /// This side called [`ControlStream::shutdown`].
    #[error("the control lane was shut down on this side")]
    Cancelled,
    /// The peer sent an alert.
    #[error("the peer ended the control lane with alert {0}")]
    PeerAlert(Alert),
    /// A record from the peer is invalid.
    #[error(
        "invalid record on the control lane (modified in transit, or a protocol violation by the peer): \
         {0}"
    )]
    Tls(#[source] rustls::Error),
    /// The connection failed.
    #[error("the control lane's connection failed: {0}")]
    Io(#[source] io::Error),
}

/// An authenticated control lane.
pub struct ControlStream {
    stream: TcpStream,
    /// rustls's state. A thread locks it only to compute, never while it waits for the socket.
    connection: Mutex<Connection>,
    /// Sealed bytes to be sent. The thread that holds the lock both seals and writes, which keeps
    /// records in order.
    outgoing: Mutex<Outgoing>,
    /// Bytes from the socket that rustls has not processed.
    incoming: Mutex<Incoming>,
    cancelled: AtomicBool,
    peer: PeerIdentity,
    /// The settings of the handshake; `None` on the connecting side.
    settings: Option<Arc<ServerSettings>>,
}

/// Sealed bytes to be sent.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    /// A write failed, possibly in the middle of a record, so nothing more can be sent.
    has_failed: bool,
}

/// Makes the control lane from a connection that this side opened.
///
/// # Errors
/// [`HandshakeError`].
pub fn client(
    stream: TcpStream,
    tls: &ClientTls,
    deadline: Instant,
) -> Result<ControlStream, HandshakeError> {
    let connection = ClientConnection::new(tls.config.clone(), tls.server_name.clone())?;
    let mut connection = Connection::from(connection);
    drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
    ControlStream::established(stream, connection, &tls.side, None)
}

impl ControlStream {
    /// Returns the control lane on a connection after a complete handshake. On the accepting side,
    /// `settings` are the settings of that handshake.
    pub(super) fn established(
        stream: TcpStream,
        connection: Connection,
        side: &Side,
        settings: Option<&Arc<ServerSettings>>,
    ) -> Result<Self, HandshakeError> {
        let peer = peer_identity(&connection, &side.trust)?;
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
            settings: settings.cloned(),
        })
    }

    /// The peer.
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// Returns the socket, to read its addresses or set its options.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends all of `bytes`, from any thread. Calls do not interleave.
    ///
    /// # Errors
    /// [`ControlError`]. Part of `bytes` may have been sent.
    pub fn send(&self, mut bytes: &[u8]) -> Result<(), ControlError> {
        let mut outgoing = lock(&self.outgoing);
        while !bytes.is_empty() {
            // rustls buffers at most 64 KiB until its output is written.
            let taken = lock(&self.connection)
                .writer()
                .write(bytes)
                .map_err(ControlError::Io)?;
            bytes = &bytes[taken..];
            self.flush(&mut outgoing)?;
        }
        Ok(())
    }

    /// Waits for data until `deadline` and returns the number of bytes written to `buffer`. Zero
    /// means that the peer closed the lane. One thread at a time may call this.
    ///
    /// # Errors
    /// After [`ControlError::Deadline`] no data is lost; every other error ends the lane.
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
                    // The connection ended without close_notify.
                    return Err(self.broken(io::ErrorKind::UnexpectedEof.into()));
                }
            }
            self.decrypt(&mut incoming)?;
        }
    }

    /// Fills `buffer`. The deadline applies to the first byte; each further read may take
    /// [`STALL_LIMIT`].
    ///
    /// # Errors
    /// [`ControlError::Deadline`] if nothing arrived; no data is lost. [`ControlError::Stalled`] if
    /// a further read took too long. [`ControlError::Closed`] if the peer closed the lane before
    /// the first byte, [`ControlError::Truncated`] if it closed the lane after the first byte.
    pub fn receive_exact(&self, buffer: &mut [u8], deadline: Instant) -> Result<(), ControlError> {
        self.fill(buffer, deadline, || Instant::now() + STALL_LIMIT)
    }

    /// Fills `buffer`. The deadline applies to every byte, so that a peer that sends slowly holds
    /// the caller no longer than a silent one.
    ///
    /// # Errors
    /// Those of [`ControlStream::receive_exact`].
    pub fn receive_exact_by(
        &self,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), ControlError> {
        self.fill(buffer, deadline, || deadline)
    }

    fn fill(
        &self,
        buffer: &mut [u8],
        first: Instant,
        further: impl Fn() -> Instant,
    ) -> Result<(), ControlError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let until = if filled == 0 { first } else { further() };
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

    /// Exports keying material of the length of `out`, which only the two ends of this connection
    /// can derive (RFC 8446, section 7.5).
    ///
    /// # Errors
    /// [`ControlError::Tls`] if `out` is longer than the suite can derive.
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

    /// Sends close_notify. Receiving remains possible.
    ///
    /// # Errors
    /// [`ControlError`] if close_notify could not be sent.
    pub fn close(&self) -> Result<(), ControlError> {
        let mut outgoing = lock(&self.outgoing);
        lock(&self.connection).send_close_notify();
        self.flush(&mut outgoing)?;
        self.stream
            .shutdown(Shutdown::Write)
            .map_err(|error| self.broken(error))
    }

    /// Ends the lane immediately, from any thread. Threads that wait on the lane get
    /// [`ControlError::Cancelled`]; on the peer, the connection ends without a close.
    pub fn shutdown(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        // This fails only if the connection has already ended, and that end also wakes waiting
        // threads.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Reads plaintext that rustls has buffered; `None` if there is none.
    fn decrypted(&self, buffer: &mut [u8]) -> Result<Option<usize>, ControlError> {
        match lock(&self.connection).reader().read(buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// Passes received bytes to rustls. Called only when rustls has no plaintext left, so the
    /// buffer in rustls never exceeds the size of one record.
    fn decrypt(&self, incoming: &mut Incoming) -> Result<(), ControlError> {
        let processed = {
            let mut connection = lock(&self.connection);
            incoming.feed(&mut connection).map_err(ControlError::Io)?;
            connection.process_new_packets()
        };
        // rustls may have queued a reply to a key update, or the alert for an error. If another
        // thread is sending, that thread or the next send also sends the queued bytes.
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

    /// Writes all bytes that rustls has sealed.
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
            // The socket's timeout limits each write.
            let written = (&self.stream).write_all(bytes);
            bytes.clear();
            outgoing.has_failed = written.is_err();
            written.map_err(|error| self.broken(error))?;
        }
    }

    fn broken(&self, error: io::Error) -> ControlError {
        if self.cancelled.load(Ordering::SeqCst) {
            return ControlError::Cancelled;
        }
        match error.kind() {
            io::ErrorKind::WouldBlock => ControlError::Stalled,
            io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => ControlError::Unanswered,
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
            .finish_non_exhaustive()
    }
}

/// A buffer for ciphertext between the socket and rustls, as long as the longest record.
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

    /// Reads once from a readable socket. Returns zero at the end of the connection.
    fn fill(&mut self, mut stream: &TcpStream) -> io::Result<usize> {
        self.start = 0;
        self.end = 0;
        self.end = until_not_interrupted(|| stream.read(&mut self.bytes))?;
        Ok(self.end)
    }

    fn feed(&mut self, connection: &mut Connection) -> io::Result<()> {
        self.start += connection.read_tls(&mut &self.bytes[self.start..self.end])?;
        Ok(())
    }
}

/// Runs a handshake to completion. If TLS fails, sends the alert.
fn drive(
    connection: &mut Connection,
    stream: &TcpStream,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    stream.set_nodelay(true).map_err(HandshakeError::Io)?;
    let mut reading = Reading::default();
    loop {
        write(connection, stream, deadline)?;
        if !connection.is_handshaking() {
            return Ok(());
        }
        read_record(stream, deadline, &mut reading)?;
        if let Err(error) = reading.process(connection) {
            // Ignore a failure to send the alert, because the first error is the one to report.
            let _ = write(connection, stream, deadline);
            return Err(error);
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
    /// Makes all later handshakes of the session use the settings of its control lane, `control`.
    /// If this side opened that lane, the lane has no such settings, and the call has no effect.
    #[cfg(feature = "unstable-internals")]
    pub fn keep(&self, control: &ControlStream) {
        if let Some(settings) = &control.settings {
            self.keep_settings(settings);
        }
    }
}
