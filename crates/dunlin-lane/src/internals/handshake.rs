//! The TLS handshake of a data lane, on a blocking socket with a deadline.
//!
//! rustls performs the handshake and returns its traffic keys. They go to the two halves of
//! [`record`](super::record), or to the kernel. Each handshake record is read exactly, first its
//! header and then its body. The peer's first data after the handshake therefore stays in the
//! socket. The kernel, if it gets the keys, opens only data that is still in the socket.
//!
//! In TLS 1.3 the client finishes before the server verifies the client's certificate. The client
//! therefore learns of a refusal later, from an alert on its lane.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;

mod error;
pub mod keyed;
pub mod relay;
mod tickets;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::interrupted::until_not_interrupted;
use dunlin_linux::ktls::{self, Version};
use dunlin_linux::socket::remaining;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};
use rustls::{
    CommonState, ConnectionTrafficSecrets, ExtractedSecrets, NamedGroup, ProtocolVersion,
};

pub use self::error::{FLIGHT_LIMIT_BYTES, HandshakeError};
use super::accept::reading::Reading;
use super::kernel;
use super::offload::Offload;
use super::peers::PeerIdentity;
use super::policy::{ALPN, ClientTls, ServerTls, Side};
use super::provider::{CipherSuite, Provider, ProviderError, parts};
use super::record::{OpenHalf, SealHalf};
use super::trust::Trust;
pub use super::trust::UntrustedReason;

/// Maximum time that a failed handshake waits for the peer to read this side's alert.
const LINGER: Duration = Duration::from_millis(500);

/// An authenticated connection with the keys of both directions.
#[derive(Debug)]
pub struct Secured {
    /// The connection. It has no timeouts set. None of the peer's data has been read, except the
    /// opening message if this side accepted the connection.
    pub stream: TcpStream,
    /// The peer.
    pub peer: PeerIdentity,
    /// The negotiated parameters.
    pub parameters: Parameters,
    /// The keys that seal and open the records, in this process or in the kernel.
    pub records: Records,
}

/// Where records are sealed and opened.
#[derive(Debug)]
pub enum Records {
    /// In this process.
    Process {
        /// Seals outgoing records.
        seal: SealHalf,
        /// Opens incoming records.
        open: OpenHalf,
    },
    /// In the kernel, which seals what is written to the socket and opens what is read.
    Kernel(InKernel),
}

/// Counts the records that the kernel seals with a connection's key, because a key has a record
/// limit.
#[derive(Debug)]
pub struct InKernel {
    /// The sequence number of the next outgoing record.
    pub(super) sent: u64,
}

/// The negotiated parameters of a handshake, for the log.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// The cipher suite.
    pub suite: CipherSuite,
    /// The key exchange.
    pub group: NamedGroup,
    /// The library that seals and opens records on this side.
    pub provider: Provider,
}

/// Makes a data lane from a connection that this side opened.
///
/// # Errors
/// [`HandshakeError`]. The connection is closed, after an alert if TLS failed.
pub fn client(
    stream: TcpStream,
    tls: &ClientTls,
    deadline: Instant,
) -> Result<Secured, HandshakeError> {
    let connection = UnbufferedClientConnection::new(tls.config.clone(), tls.server_name.clone())?;
    secure(stream, connection, &tls.side, deadline)
}

/// Makes a data lane from a connection that this side accepted.
///
/// # Errors
/// [`HandshakeError`]. The connection is closed, after an alert if TLS failed.
pub fn server(
    stream: TcpStream,
    tls: &ServerTls,
    deadline: Instant,
) -> Result<Secured, HandshakeError> {
    let settings = tls.settings();
    let connection = UnbufferedServerConnection::new(settings.config.clone())?;
    secure(stream, connection, &settings.side, deadline)
}

fn secure<C: Unbuffered>(
    stream: TcpStream,
    mut connection: C,
    side: &Side,
    deadline: Instant,
) -> Result<Secured, HandshakeError> {
    stream.set_nodelay(true).map_err(HandshakeError::Io)?;
    drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
    let peer = peer_identity(connection.common(), &side.trust)?;
    let parameters = parameters(connection.common(), side.provider)?;
    // Dunlin replaces lanes instead of renewing their keys, so it does not need the object that
    // derives the next keys.
    let (secrets, _) = connection.into_secrets()?;
    let records = records(&stream, secrets, parameters, side.offload)?;
    Ok(Secured {
        stream,
        peer,
        parameters,
        records,
    })
}

/// Returns the peer's identity after a complete handshake, and checks that the peer is Dunlin.
pub(super) fn peer_identity(
    connection: &CommonState,
    trust: &Trust,
) -> Result<PeerIdentity, HandshakeError> {
    check_alpn(connection)?;
    identity_of(connection, trust)
}

/// Checks that the peer of a complete handshake is Dunlin.
pub(super) fn check_alpn(connection: &CommonState) -> Result<(), HandshakeError> {
    match connection.alpn_protocol() {
        Some(ALPN) => Ok(()),
        _ => Err(HandshakeError::NotDunlin),
    }
}

/// Returns the peer's identity after a complete handshake; the peer may be any program.
fn identity_of(connection: &CommonState, trust: &Trust) -> Result<PeerIdentity, HandshakeError> {
    let (leaf, intermediates) = connection
        .peer_certificates()
        .and_then(<[_]>::split_first)
        .ok_or(HandshakeError::NoCertificate)?;
    trust
        .identify(leaf, intermediates)
        .map_err(HandshakeError::from)
}

/// Returns what a complete handshake negotiated.
pub(super) fn parameters(
    connection: &CommonState,
    provider: Provider,
) -> Result<Parameters, HandshakeError> {
    let suite = negotiated_suite(connection)?;
    let group = connection
        .negotiated_key_exchange_group()
        .map(|group| group.name())
        .ok_or_else(|| local("the handshake negotiated no key exchange"))?;
    Ok(Parameters {
        suite,
        group,
        provider,
    })
}

/// Returns the cipher suite that a complete handshake negotiated.
fn negotiated_suite(connection: &CommonState) -> Result<CipherSuite, HandshakeError> {
    let suite = connection.negotiated_cipher_suite();
    let suite = suite.map(|suite| suite.suite());
    suite.and_then(CipherSuite::of).ok_or_else(|| {
        local(format!(
            "the handshake negotiated suite {suite:?}, which was not offered"
        ))
    })
}

/// Returns the TLS version that a complete handshake negotiated.
fn negotiated_version(connection: &CommonState) -> Result<Version, HandshakeError> {
    match connection.protocol_version() {
        Some(ProtocolVersion::TLSv1_2) => Ok(Version::V1_2),
        Some(ProtocolVersion::TLSv1_3) => Ok(Version::V1_3),
        other => Err(local(format!(
            "the handshake negotiated version {other:?}, which was not offered"
        ))),
    }
}

/// Reads one complete handshake record before `deadline`.
pub(super) fn read_record(
    mut stream: &TcpStream,
    deadline: Instant,
    reading: &mut Reading,
) -> Result<(), HandshakeError> {
    let read = |part: &mut [u8]| {
        until_not_interrupted(|| {
            stream.set_read_timeout(Some(remaining(deadline)?))?;
            stream.read(part)
        })
    };
    reading.fill(read).map_err(|error| match error {
        HandshakeError::Io(error) => io_error(error),
        error => error,
    })
}

/// Writes all of `bytes` before `deadline`.
pub(super) fn write_all(
    mut stream: &TcpStream,
    deadline: Instant,
    mut bytes: &[u8],
) -> Result<(), HandshakeError> {
    while !bytes.is_empty() {
        let count = until_not_interrupted(|| {
            stream.set_write_timeout(Some(remaining(deadline)?))?;
            stream.write(bytes)
        });
        bytes = &bytes[count.map_err(io_error)?..];
    }
    Ok(())
}

/// Waits for at most 500 ms until the peer closes the connection, so that the peer can read this
/// side's alert. Without this wait, the close could discard the alert: closing a socket with unread
/// bytes resets the connection, and a reset discards data that the peer has not read yet.
pub fn linger(mut stream: &TcpStream, deadline: Instant) {
    let deadline = deadline.min(Instant::now() + LINGER);
    let mut budget = FLIGHT_LIMIT_BYTES;
    let mut scrap = [0; 4096];
    // This fails only if the connection has ended.
    if stream.shutdown(Shutdown::Write).is_err() {
        return;
    }
    while budget > 0 {
        let Ok(left) = remaining(deadline) else {
            return;
        };
        if stream.set_read_timeout(Some(left)).is_err() {
            return;
        }
        match stream.read(&mut scrap) {
            Ok(0) | Err(_) => return,
            Ok(count) => budget = budget.saturating_sub(count),
        }
    }
}

fn io_error(error: io::Error) -> HandshakeError {
    match error.kind() {
        // `ETIMEDOUT` is different: the kernel has ended the connection.
        io::ErrorKind::TimedOut if error.raw_os_error().is_none() => HandshakeError::Deadline,
        io::ErrorKind::WouldBlock => HandshakeError::Deadline,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => HandshakeError::PeerClosed,
        _ => HandshakeError::Io(error),
    }
}

fn local(reason: impl ToString) -> HandshakeError {
    HandshakeError::Local(reason.to_string())
}

/// Runs a handshake until it is complete, and removes the socket's timeouts at the end. If TLS
/// fails, sends the alert that rustls made.
fn drive<C: Unbuffered>(
    connection: &mut C,
    stream: &TcpStream,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    let mut reading = Reading::default();
    loop {
        match step(connection, &mut incoming, &mut outgoing) {
            Ok(Next::Go) => {}
            Ok(Next::Write) => {
                write_all(stream, deadline, &outgoing)?;
                outgoing.clear();
            }
            Ok(Next::Read) => {
                read_record(stream, deadline, &mut reading)?;
                incoming.append(&mut reading.record);
            }
            Ok(Next::Done) => {
                stream.set_read_timeout(None).map_err(HandshakeError::Io)?;
                return stream.set_write_timeout(None).map_err(HandshakeError::Io);
            }
            Err(error) => {
                // Ignore a failure to send the alert: the connection may have ended, and the first
                // error is the one to report.
                let _ = write_all(stream, deadline, &outgoing);
                return Err(error);
            }
        }
    }
}

/// The next action of a handshake.
enum Next {
    Go,
    /// Send the outgoing bytes, which are a complete flight.
    Write,
    /// Read one more record.
    Read,
    Done,
}

/// Advances a handshake by one step. If rustls fails, `outgoing` contains its alert.
fn step<C: Unbuffered>(
    connection: &mut C,
    incoming: &mut Vec<u8>,
    outgoing: &mut Vec<u8>,
) -> Result<Next, HandshakeError> {
    let UnbufferedStatus { discard, state } = connection.process(incoming);
    let mut next = Next::Go;
    match state {
        Ok(ConnectionState::EncodeTlsData(mut part)) => encode(&mut part, outgoing)?,
        Ok(ConnectionState::TransmitTlsData(sent)) => {
            sent.done();
            next = Next::Write;
        }
        Ok(ConnectionState::BlockedHandshake) => next = Next::Read,
        Ok(ConnectionState::WriteTraffic(_)) => next = Next::Done,
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
            return Err(HandshakeError::PeerClosed);
        }
        Ok(_) => return Err(local("application data during the handshake")),
        Err(error) => {
            // Ignore a failure to add the alert, because the first error is the one to report.
            let _ = add_alert(connection, outgoing);
            return Err(error.into());
        }
    }
    incoming.drain(..discard);
    match next {
        Next::Done if connection.common().is_handshaking() => Ok(Next::Read),
        Next::Done if !incoming.is_empty() => Err(local("unprocessed bytes after the handshake")),
        next => Ok(next),
    }
}

/// Appends the output that rustls queued when it failed. The loop stops when the queue is empty:
/// one more call of `process` would let rustls continue with the rest of the invalid input.
fn add_alert<C: Unbuffered>(
    connection: &mut C,
    outgoing: &mut Vec<u8>,
) -> Result<(), HandshakeError> {
    while connection.common().wants_write() {
        match connection.process(&mut []).state {
            Ok(ConnectionState::EncodeTlsData(mut part)) => encode(&mut part, outgoing)?,
            _ => break,
        }
    }
    Ok(())
}

/// Appends one message to `outgoing`. If the message does not fit, the first attempt returns the
/// required length, and the second attempt succeeds.
pub(crate) fn encode<D>(
    part: &mut EncodeTlsData<'_, D>,
    outgoing: &mut Vec<u8>,
) -> Result<(), HandshakeError> {
    let start = outgoing.len();
    loop {
        match part.encode(&mut outgoing[start..]) {
            Ok(count) => {
                outgoing.truncate(start + count);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                outgoing.resize(start + required_size, 0);
            }
            Err(error @ EncodeError::AlreadyEncoded) => return Err(local(error)),
        }
    }
}

/// Installs the keys of a completed lane handshake in the kernel or in this process.
pub(super) fn records(
    stream: &TcpStream,
    secrets: ExtractedSecrets,
    parameters: Parameters,
    offload: Offload,
) -> Result<Records, HandshakeError> {
    if kernel::choose(offload, parameters.suite)?.is_kernel
        && kernel::prepare(stream, parameters.suite, Version::V1_3)?
    {
        kernel::give(stream, &secrets, Version::V1_3)?;
        // Dunlin sends no padding. Without this option the kernel makes an additional copy of each
        // record.
        let _ = ktls::expect_no_padding(stream);
        let (sent, _) = secrets.tx;
        return Ok(Records::Kernel(InKernel { sent }));
    }
    let (seal, open) = halves(secrets, parameters.provider).map_err(local)?;
    Ok(Records::Process { seal, open })
}

/// Returns the record halves for the keys of a completed handshake.
pub(super) fn halves(
    secrets: ExtractedSecrets,
    provider: Provider,
) -> Result<(SealHalf, OpenHalf), ProviderError> {
    let (send_sequence, send) = secrets.tx;
    let (receive_sequence, receive) = secrets.rx;
    let (suite, key, iv) = parts(&send)?;
    let seal = SealHalf::new(provider, suite, key, iv, send_sequence)?;
    let (suite, key, iv) = parts(&receive)?;
    let open = OpenHalf::new(provider, suite, key, iv, receive_sequence)?;
    Ok((seal, open))
}

/// The methods that both roles' connections have; rustls has no common trait for them.
pub(crate) trait Unbuffered: Sized {
    type Data;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn common(&self) -> &CommonState;

    /// Returns the traffic keys, and the object that derives the next keys.
    fn into_secrets(self) -> Result<(ExtractedSecrets, Box<dyn Renewal>), rustls::Error>;
}

/// Derives a connection's next traffic keys (RFC 8446, section 7.2).
pub trait Renewal: Send {
    /// Derives the next sending key of this side.
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error>;

    /// Derives the peer's next sending key.
    fn receiving(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error>;
}

impl<D: Send> Renewal for KernelConnection<D> {
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.update_tx_secret().map(|(_, secrets)| secrets)
    }

    fn receiving(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.update_rx_secret().map(|(_, secrets)| secrets)
    }
}

/// Implements [`Unbuffered`] for the connection type of one role. Both types have the same
/// methods.
macro_rules! unbuffered {
    ($connection:ty, $data:ty) => {
        impl Unbuffered for $connection {
            type Data = $data;

            fn process<'c, 'i>(
                &'c mut self,
                incoming: &'i mut [u8],
            ) -> UnbufferedStatus<'c, 'i, Self::Data> {
                self.process_tls_records(incoming)
            }

            fn common(&self) -> &CommonState {
                self
            }

            fn into_secrets(self) -> Result<(ExtractedSecrets, Box<dyn Renewal>), rustls::Error> {
                let (secrets, next) = self.dangerous_into_kernel_connection()?;
                Ok((secrets, Box::new(next)))
            }
        }
    };
}

unbuffered!(UnbufferedClientConnection, ClientConnectionData);
unbuffered!(UnbufferedServerConnection, ServerConnectionData);
