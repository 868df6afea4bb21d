//! An accepted connection before its peer is authenticated.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::negotiate::{MAGIC, Opening, PRELUDE_BYTES, Prelude};
use dunlin_proto::wire::{DecodeError, Reader};
use rustls::{Connection, ServerConnection};

use super::arrival::{Arrival, LaneSocket, RelayArrival};
use super::reading::{OPENING_DEADLINE, Reading, RejectReason, would_block};
use crate::internals::control::ControlStream;
use crate::internals::handshake::relay::Greeting;
use crate::internals::handshake::{
    HandshakeError, Secured, check_alpn, parameters, peer_identity, records,
};
use crate::internals::policy::ServerSettings;
use crate::internals::policy::ServerTls;

/// Maximum time for a refused peer to read this side's alert.
const LINGER: Duration = Duration::from_millis(500);

/// What the connections are for.
#[derive(Clone, Copy)]
pub(super) enum Purpose<'a> {
    Lanes(&'a ServerTls),
    Relay(&'a ServerTls),
}

/// A result of accepting, for lanes or for a relay.
pub(super) enum Outcome {
    Opened(Pending),
    Rejected {
        from: SocketAddr,
        reason: RejectReason,
    },
    Starved(io::Error),
}

/// A connection until its opening message is complete.
pub(super) struct Pending {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) deadline: Instant,
    pub(super) stage: Stage,
    /// The opening message, as far as it has arrived.
    pub(super) opening: Vec<u8>,
}

pub(super) enum Stage {
    /// No byte has arrived.
    Silent,
    /// TLS: the handshake, then the opening message over TLS.
    Tls(Box<Handshake>),
    /// The opening message of a plain lane.
    Plain,
    /// The handshake of a relay's client.
    Relay(Box<Greeting>),
    /// Refused; waits for the peer to read the alert.
    Lingering,
}

pub(super) struct Handshake {
    settings: Arc<ServerSettings>,
    connection: Connection,
    pub(super) reading: Reading,
}

pub(super) enum Step {
    Wait,
    Complete,
    Refused(RejectReason),
    Gone,
}

impl Pending {
    pub(super) fn new(stream: TcpStream, from: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            from,
            deadline: Instant::now() + OPENING_DEADLINE,
            stage: Stage::Silent,
            opening: Vec::new(),
        })
    }

    /// The progress of the connection: 0 if refused, 1 if silent, 2 after the first byte, 3 after
    /// the first handshake record. A plain lane stays at 2. The connection with the least progress
    /// is evicted first, and honest TLS peers soon reach 3.
    pub(super) fn progress(&self) -> u8 {
        match &self.stage {
            Stage::Lingering => 0,
            Stage::Silent => 1,
            Stage::Plain => 2,
            Stage::Tls(handshake) if handshake.reading.received == 0 => 2,
            Stage::Relay(greeting) if greeting.is_fresh() => 2,
            Stage::Tls(_) | Stage::Relay(_) => 3,
        }
    }

    /// The time since the connection was accepted. Valid only until [`Self::linger`], which changes
    /// the deadline.
    pub(super) fn age(&self) -> Duration {
        OPENING_DEADLINE.saturating_sub(self.deadline.saturating_duration_since(Instant::now()))
    }

    pub(super) fn wants_write(&self) -> bool {
        match &self.stage {
            Stage::Tls(tls) => tls.connection.wants_write(),
            Stage::Relay(greeting) => greeting.wants_write(),
            Stage::Silent | Stage::Plain | Stage::Lingering => false,
        }
    }

    pub(super) fn lingers(&self) -> bool {
        matches!(self.stage, Stage::Lingering)
    }

    pub(super) fn rejected(self, reason: RejectReason) -> Outcome {
        Outcome::Rejected {
            from: self.from,
            reason,
        }
    }

    /// Shuts down this side's sending direction, and keeps the connection until the peer closes it
    /// or [`LINGER`] has passed. Closing a socket with unread bytes would reset the connection, and
    /// a reset discards an alert in transit.
    pub(super) fn linger(&mut self, now: Instant) {
        // This fails only if the connection has ended. In that case no peer can read the alert.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stage = Stage::Lingering;
        self.deadline = now + LINGER;
    }

    pub(super) fn advance(&mut self, purpose: Purpose<'_>) -> Step {
        match self.try_advance(purpose) {
            Ok(true) => Step::Complete,
            Ok(false) => Step::Wait,
            Err(_) if self.lingers() => Step::Gone,
            Err(reason) => Step::Refused(reason),
        }
    }

    /// Advances the connection. Returns `true` when the opening message is complete, or, for a
    /// relay, the handshake. Returns `false` if the socket would block before that.
    fn try_advance(&mut self, purpose: Purpose<'_>) -> Result<bool, RejectReason> {
        loop {
            match &mut self.stage {
                Stage::Silent => {
                    let mut first = [0];
                    match self.stream.peek(&mut first) {
                        Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                        Ok(_) => {}
                        Err(error) => return would_block(error),
                    }
                    self.stage = match (first[0], purpose) {
                        // 22 is the content type of a handshake record (RFC 8446, section 5.1).
                        (22, Purpose::Lanes(tls)) => Stage::Tls(Box::new(Handshake::new(tls)?)),
                        (22, Purpose::Relay(tls)) => Stage::Relay(Box::new(Greeting::new(tls)?)),
                        (byte, Purpose::Lanes(_)) if byte == MAGIC[0] => Stage::Plain,
                        (byte, _) => return Err(RejectReason::Unknown(byte)),
                    };
                }
                Stage::Plain => {
                    let wanted = wanted(&self.opening)?;
                    if wanted == 0 {
                        return Ok(true);
                    }
                    let mut part = vec![0; wanted];
                    match self.stream.read(&mut part) {
                        Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                        Ok(count) => self.opening.extend_from_slice(&part[..count]),
                        Err(error) => return would_block(error),
                    }
                }
                Stage::Tls(handshake) => {
                    if let Err(error) = handshake.write(&self.stream) {
                        return would_block(error);
                    }
                    if !handshake.connection.is_handshaking() {
                        // Check the protocol now, because a program other than Dunlin may never
                        // send an opening message.
                        check_alpn(&handshake.connection)?;
                        let wanted = wanted(&self.opening)?;
                        if wanted == 0 {
                            return Ok(true);
                        }
                        if handshake.take_plaintext(wanted, &mut self.opening)? {
                            continue;
                        }
                    }
                    if !handshake.reading.next(&self.stream)? {
                        return Ok(false);
                    }
                    if let Err(error) = handshake.reading.process(&mut handshake.connection) {
                        // Ignore a failure to send the alert, because the first error is the one to
                        // report.
                        let _ = handshake.write(&self.stream);
                        return Err(error.into());
                    }
                }
                Stage::Relay(greeting) => return greeting.advance(&self.stream),
                Stage::Lingering => {
                    let mut scrap = [0; 4096];
                    match self.stream.read(&mut scrap) {
                        Ok(0) => return Err(HandshakeError::PeerClosed.into()),
                        // Read only once per turn, so that a peer that never stops sending does not
                        // delay the other connections.
                        Ok(_) => return Ok(false),
                        Err(error) => return would_block(error),
                    }
                }
            }
        }
    }

    pub(super) fn arrive_relayed(self) -> RelayArrival {
        let from = self.from;
        let Stage::Relay(greeting) = self.stage else {
            let reason = HandshakeError::PeerClosed.into();
            return RelayArrival::Rejected { from, reason };
        };
        match greeting.finish(self.stream, from) {
            Ok(relayed) => RelayArrival::Secured(Box::new(relayed)),
            Err(reason) => RelayArrival::Rejected { from, reason },
        }
    }

    pub(super) fn arrive(self) -> Arrival {
        let from = self.from;
        self.try_arrive()
            .unwrap_or_else(|reason| Arrival::Rejected { from, reason })
    }

    fn try_arrive(self) -> Result<Arrival, RejectReason> {
        let mut reader = Reader::new(&self.opening);
        let prelude = Prelude::decode(&reader.array("prelude")?)?;
        let opening = Opening::decode(&prelude, reader.bytes("body", prelude.body_bytes)?)?;
        self.stream.set_nonblocking(false)?;
        let Stage::Tls(handshake) = self.stage else {
            let socket = LaneSocket::Plain(self.stream);
            return Ok(Arrival::Lane { socket, opening });
        };
        if !matches!(opening, Opening::Lane(_)) {
            let stream = ControlStream::established(
                self.stream,
                handshake.connection,
                &handshake.settings.side,
                Some(&handshake.settings),
            )?;
            return Ok(Arrival::Control { stream, opening });
        }
        let side = &handshake.settings.side;
        let peer = peer_identity(&handshake.connection, &side.trust)?;
        let parameters = parameters(&handshake.connection, side.provider)?;
        let secrets = handshake
            .connection
            .dangerous_extract_secrets()
            .map_err(HandshakeError::from)?;
        let records = records(&self.stream, secrets, parameters, side.offload)?;
        let socket = LaneSocket::Tls(Box::new(Secured {
            stream: self.stream,
            peer,
            parameters,
            records,
        }));
        Ok(Arrival::Lane { socket, opening })
    }
}

impl Handshake {
    fn new(tls: &ServerTls) -> Result<Self, HandshakeError> {
        let settings = tls.settings();
        Ok(Self {
            connection: ServerConnection::new(Arc::clone(&settings.config))?.into(),
            settings,
            reading: Reading::default(),
        })
    }

    fn write(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut stream)?;
        }
        stream.flush()
    }

    /// Moves up to `wanted` bytes of plaintext to `opening`. Returns whether any bytes were
    /// moved.
    fn take_plaintext(
        &mut self,
        wanted: usize,
        opening: &mut Vec<u8>,
    ) -> Result<bool, RejectReason> {
        let mut part = vec![0; wanted];
        match self.connection.reader().read(&mut part) {
            Ok(0) => Err(HandshakeError::PeerClosed.into()),
            Ok(count) => {
                opening.extend_from_slice(&part[..count]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// The number of missing bytes of the opening message, as far as the received part determines it.
fn wanted(opening: &[u8]) -> Result<usize, DecodeError> {
    match opening.split_first_chunk() {
        None => Ok(PRELUDE_BYTES - opening.len()),
        Some((prelude, body)) => Ok(Prelude::decode(prelude)?.body_bytes - body.len()),
    }
}
