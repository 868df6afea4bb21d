//! The handshake of a data lane, on a blocking socket and against a deadline.
//!
//! rustls negotiates; its traffic keys are then taken out of it and become the two halves of
//! [`record`](super::record). Records are read exactly, header and then body, so that not a byte
//! of the peer's first data is swallowed here, which matters as soon as the kernel is to read on.
//!
//! In TLS 1.3 the side that connects is done before the other has seen its certificate. A refusal
//! therefore reaches a source later, as an alert on its lane.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;

mod error;
pub mod keyed;
pub mod relay;
mod tickets;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use dunlin_linux::ktls::{self, Version};
use dunlin_linux::socket::remaining;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};
use rustls::{CommonState, ConnectionTrafficSecrets, ExtractedSecrets, NamedGroup};

pub use self::error::{FLIGHT_LIMIT_BYTES, HandshakeError};
use super::kernel;
use super::offload::Offload;
use super::peers::PeerIdentity;
use super::policy::{ALPN, ClientTls, ServerTls};
use super::provider::{CipherSuite, Provider, ProviderError, parts};
use super::record::{HEADER_BYTES, OpenHalf, RECEIVED_RECORD_BYTES, SealHalf};
use super::trust::Trust;
pub use super::trust::UntrustedReason;

/// How long a failed handshake waits for its alert to be taken, at most.
const LINGER: Duration = Duration::from_millis(500);

/// A connection whose peer is authenticated, with the keys of both directions.
#[derive(Debug)]
pub struct Secured {
    /// The connection; it has no time-outs set, and none of the peer's data has been read.
    pub stream: TcpStream,
    /// Who the peer is.
    pub peer: PeerIdentity,
    /// What was negotiated.
    pub parameters: Parameters,
    /// Who seals what we send and opens what the peer sends, with the keys.
    pub records: Records,
}

/// The keys of both directions.
#[derive(Debug)]
pub enum Records {
    /// In this process.
    Process {
        /// Seals what we send.
        seal: SealHalf,
        /// Opens what the peer sends.
        open: OpenHalf,
    },
    /// In the kernel: what is written to the socket is sealed, what is read is opened.
    Kernel(InKernel),
}

/// How far the keys that the kernel has are used up.
#[derive(Debug)]
pub struct InKernel {
    /// The number of the next record sent.
    pub(super) sent: u64,
}

/// What a handshake agreed on, for the log.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// The cipher suite.
    pub suite: CipherSuite,
    /// The key exchange.
    pub group: NamedGroup,
    /// The library that seals and opens on this side.
    pub provider: Provider,
}

/// Makes a data lane of a connection that this side opened.
///
/// # Errors
/// [`HandshakeError`]; the connection is closed then, after the peer was told why.
pub fn client(
    stream: TcpStream,
    tls: &ClientTls,
    deadline: Instant,
) -> Result<Secured, HandshakeError> {
    let connection = UnbufferedClientConnection::new(tls.config.clone(), tls.server_name.clone())
        .map_err(HandshakeError::from)?;
    secure(
        stream,
        connection,
        &tls.trust,
        (tls.provider, tls.offload),
        deadline,
    )
}

/// Makes a data lane of a connection that this side accepted.
///
/// # Errors
/// [`HandshakeError`]; the connection is closed then, after the peer was told why.
pub fn server(
    stream: TcpStream,
    tls: &ServerTls,
    deadline: Instant,
) -> Result<Secured, HandshakeError> {
    let settings = tls.settings();
    let connection =
        UnbufferedServerConnection::new(settings.config.clone()).map_err(HandshakeError::from)?;
    secure(
        stream,
        connection,
        &settings.trust,
        (settings.provider, settings.offload),
        deadline,
    )
}

fn secure<C: Unbuffered>(
    stream: TcpStream,
    mut connection: C,
    trust: &Trust,
    (provider, offload): (Provider, Offload),
    deadline: Instant,
) -> Result<Secured, HandshakeError> {
    stream.set_nodelay(true).map_err(HandshakeError::Io)?;
    drive(&mut connection, &stream, deadline).inspect_err(|_| linger(&stream, deadline))?;
    let peer = peer_identity(connection.common(), trust)?;
    let parameters = parameters(connection.common(), provider)?;
    // No key is ever renewed: lanes are replaced instead.
    let (secrets, _) = connection.into_secrets()?;
    let records = records(&stream, secrets, parameters, offload)?;
    stream.set_read_timeout(None).map_err(HandshakeError::Io)?;
    stream.set_write_timeout(None).map_err(HandshakeError::Io)?;
    Ok(Secured {
        stream,
        peer,
        parameters,
        records,
    })
}

/// The identity of a peer whose handshake is complete, and that it is Dunlin.
pub(super) fn peer_identity(
    connection: &CommonState,
    trust: &Trust,
) -> Result<PeerIdentity, HandshakeError> {
    if connection.alpn_protocol() != Some(ALPN) {
        return Err(HandshakeError::NotDunlin);
    }
    identified(connection, trust)
}

/// The identity of a peer whose handshake is complete, whatever it is.
fn identified(connection: &CommonState, trust: &Trust) -> Result<PeerIdentity, HandshakeError> {
    let (leaf, intermediates) = connection
        .peer_certificates()
        .and_then(<[_]>::split_first)
        .ok_or(HandshakeError::NoCertificate)?;
    trust
        .identify(leaf, intermediates)
        .map_err(HandshakeError::from)
}

/// What a complete handshake agreed on.
pub(super) fn parameters(
    connection: &CommonState,
    provider: Provider,
) -> Result<Parameters, HandshakeError> {
    let suite = negotiated_suite(connection)?;
    let group = connection
        .negotiated_key_exchange_group()
        .map(|group| group.name())
        .ok_or_else(|| local("no key exchange took place"))?;
    Ok(Parameters {
        suite,
        group,
        provider,
    })
}

/// The cipher suite of a complete handshake, by its cipher.
fn negotiated_suite(connection: &CommonState) -> Result<CipherSuite, HandshakeError> {
    let suite = connection.negotiated_cipher_suite();
    let suite = suite.map(|suite| suite.suite());
    suite
        .and_then(CipherSuite::of)
        .ok_or_else(|| local(format!("suite {suite:?} was negotiated and never offered")))
}

/// Reads one whole record of the handshake and appends it to `incoming`. `received` counts what
/// the peer has sent so far.
pub(super) fn read_record(
    mut stream: &TcpStream,
    deadline: Instant,
    incoming: &mut Vec<u8>,
    received: &mut usize,
) -> Result<(), HandshakeError> {
    let mut read = |mut part: &mut [u8]| -> Result<(), HandshakeError> {
        while !part.is_empty() {
            stream
                .set_read_timeout(Some(remaining(deadline).map_err(io_error)?))
                .map_err(HandshakeError::Io)?;
            match stream.read(part) {
                Ok(0) => return Err(HandshakeError::PeerClosed),
                Ok(count) => part = &mut part[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(io_error(error)),
            }
        }
        Ok(())
    };
    let mut header = [0; HEADER_BYTES];
    read(&mut header)?;
    let [content_type, major, _, high, low] = header;
    // The four types of RFC 8446, section 5.1; the major version has been 3 since SSL 3.
    if !(20..=23).contains(&content_type) || major != 3 {
        return Err(HandshakeError::NotTls { start: header });
    }
    let body = usize::from(u16::from_be_bytes([high, low]));
    *received += HEADER_BYTES + body;
    if HEADER_BYTES + body > RECEIVED_RECORD_BYTES || *received > FLIGHT_LIMIT_BYTES {
        return Err(HandshakeError::TooLong);
    }
    incoming.extend_from_slice(&header);
    let start = incoming.len();
    incoming.resize(start + body, 0);
    read(&mut incoming[start..])
}

/// Writes all of `bytes` before `deadline`.
pub(super) fn write_all(
    mut stream: &TcpStream,
    deadline: Instant,
    mut bytes: &[u8],
) -> Result<(), HandshakeError> {
    while !bytes.is_empty() {
        stream
            .set_write_timeout(Some(remaining(deadline).map_err(io_error)?))
            .map_err(HandshakeError::Io)?;
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(io_error(error)),
        }
    }
    Ok(())
}

/// Lets the peer take our alert. Closing a socket with unread bytes in it resets the connection,
/// and a reset destroys what the peer has not read yet.
pub fn linger(mut stream: &TcpStream, deadline: Instant) {
    let deadline = deadline.min(Instant::now() + LINGER);
    let mut budget = FLIGHT_LIMIT_BYTES;
    let mut scrap = [0; 4096];
    // Any failure here means that nobody is left to listen.
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
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => HandshakeError::Deadline,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => HandshakeError::PeerClosed,
        _ => HandshakeError::Io(error),
    }
}

fn local(reason: impl ToString) -> HandshakeError {
    HandshakeError::Local(reason.to_string())
}

/// Runs a handshake to its end. On an error of TLS the peer gets its alert.
fn drive<C: Unbuffered>(
    connection: &mut C,
    stream: &TcpStream,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    let mut received = 0;
    loop {
        match step(connection, &mut incoming, &mut outgoing) {
            Ok(Next::Go) => {}
            Ok(Next::Write) => {
                write_all(stream, deadline, &outgoing)?;
                outgoing.clear();
            }
            Ok(Next::Read) => read_record(stream, deadline, &mut incoming, &mut received)?,
            Ok(Next::Done) => return Ok(()),
            Err(error) => {
                // Best effort: the peer may be gone, and the first error is the one to report.
                let _ = write_all(stream, deadline, &outgoing);
                return Err(error);
            }
        }
    }
}

/// What a handshake needs next.
enum Next {
    Go,
    /// The outgoing bytes are a whole flight.
    Write,
    /// One more record.
    Read,
    Done,
}

/// Takes a handshake one step on. Its alert is among the outgoing bytes if it fails.
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
        Ok(_) => return Err(local("data appeared during a handshake without early data")),
        Err(error) => {
            // Best effort: the first error is the one to report.
            let _ = add_alert(connection, outgoing);
            return Err(error.into());
        }
    }
    incoming.drain(..discard);
    match next {
        Next::Done if connection.common().is_handshaking() => Ok(Next::Read),
        Next::Done if !incoming.is_empty() => {
            Err(local("bytes were left over after the handshake"))
        }
        next => Ok(next),
    }
}

/// Adds what rustls queued when it failed. While something is queued, rustls returns it and reads
/// no input; after that it would go on with the rest of the spoilt input.
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

/// Appends one message to `outgoing`; its length is only known once it did not fit.
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

/// Gives the keys of a lane's finished handshake to whoever is to use them.
pub(super) fn records(
    stream: &TcpStream,
    secrets: ExtractedSecrets,
    parameters: Parameters,
    offload: Offload,
) -> Result<Records, HandshakeError> {
    if kernel::choose(offload, parameters.suite)?.is_kernel
        && kernel::takes(stream, &secrets, Version::V1_3)?
    {
        // Dunlin pads nothing. A kernel without this option copies each record once more.
        let _ = ktls::expect_no_padding(stream);
        let (sent, _) = secrets.tx;
        return Ok(Records::Kernel(InKernel { sent }));
    }
    let (seal, open) = halves(secrets, parameters.provider).map_err(local)?;
    Ok(Records::Process { seal, open })
}

/// The record halves for the keys of a finished handshake.
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

/// The two roles' connections, which rustls gives no common trait.
pub(crate) trait Unbuffered: Sized {
    type Data;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn common(&self) -> &CommonState;

    /// The traffic keys, and what makes those that follow them.
    fn into_secrets(self) -> Result<(ExtractedSecrets, Box<dyn Renewal>), rustls::Error>;
}

/// Makes a connection's next traffic keys (RFC 8446, section 7.2).
pub trait Renewal: Send {
    /// Those that this side seals with.
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error>;

    /// Those that the peer seals with.
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

/// The two roles' connections have the same methods.
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
