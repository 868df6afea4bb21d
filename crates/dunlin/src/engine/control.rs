//! Control messages over the control lane, in both roles.
//!
//! One thread reads the messages and passes them to the session. Any thread may send. The reader
//! also keeps the lane alive: it sends a ping when nothing has arrived for a while, answers the
//! peer's pings, and gives the lane up when the peer stays silent. The session therefore stays
//! alive while its main thread is busy.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dunlin_lane::control::{ControlError, ControlStream};
use dunlin_proto::control::{CONTROL_HEADER_BYTES, Envelope, Header, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::SessionId;
use zeroize::Zeroize;

use super::fault::Fault;
use super::journal::Role;
use super::sync::{Condvar, Mutex, lock, wait};

/// After this long without a message, a side treats the control lane as lost. The side's option
/// `silence_limit` replaces this default.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// The reader sends a ping after each 1/5 of the silence limit without a message. A peer that
/// answers one ping late therefore does not count as silent.
const PING_PART: u32 = 5;

/// Maximum number of messages that the reader has delivered and the session has not taken yet. At
/// this number the reader stops reading, so the peer must stop sending. A peer that sends faster
/// than the session processes therefore costs a limited amount of memory (invariant I7).
pub(in crate::engine) const QUEUED_MESSAGES: usize = 16;

/// Sequence numbers of one session's control messages. When a new control lane replaces a lost one,
/// they continue.
#[derive(Default)]
pub(crate) struct Sequences {
    sent: Mutex<u64>,
    seen: AtomicU64,
}

impl Sequences {
    /// Sequence numbers for a process that continues the session of a dead process. The peer may
    /// still be alive, and skips a number that it has seen. The numbers therefore start above every
    /// number that the dead process can have used. This holds because a process that continues a
    /// session records its epoch before it sends, and no process sends 2^32 messages.
    pub(crate) fn of_epoch(epoch: u32) -> Self {
        Self {
            sent: Mutex::new(u64::from(epoch) << 32),
            seen: AtomicU64::new(0),
        }
    }

    /// Sequence numbers for a control lane to a destination that may be a new process. A new process
    /// at the destination numbers its messages from 1 again, so the source forgets which numbers it
    /// has seen on earlier lanes.
    pub(crate) fn with_new_peer(&self) -> Self {
        Self {
            sent: Mutex::new(*lock(&self.sent)),
            seen: AtomicU64::new(0),
        }
    }
}

/// One control lane of a session.
pub(crate) struct ControlLane {
    pub(crate) stream: ControlStream,
    pub(crate) session: SessionId,
    pub(crate) epoch: u32,
    sequences: Arc<Sequences>,
    /// The shortest round trip of any ping, in nanoseconds; 0 before the first pong. Longer round
    /// trips may show a busy process (for example one that builds a VM) rather than the network's
    /// delay.
    round_trip_ns: AtomicU64,
    /// Token of the outstanding ping: the time at which it was sent; 0 if no ping is outstanding.
    /// Only a pong with this token is measured.
    pinged: AtomicU64,
    silence_limit: Duration,
    /// When the last message arrived, in nanoseconds after `started`.
    received_ns: AtomicU64,
    pub(in crate::engine) backlog: Backlog,
    started: Instant,
}

/// Counts the messages that wait for the session, and makes the reader wait while there are too
/// many.
#[derive(Default)]
pub(in crate::engine) struct Backlog {
    queue: Mutex<Queue>,
    taken: Condvar,
}

#[derive(Default)]
struct Queue {
    messages: usize,
    closed: bool,
}

impl Backlog {
    /// Waits until another message may be delivered, and counts it. Returns early if the
    /// lane is closed.
    pub(in crate::engine) fn await_room(&self) {
        let mut queue = lock(&self.queue);
        while queue.messages >= QUEUED_MESSAGES && !queue.closed {
            queue = wait(&self.taken, queue, None);
        }
        queue.messages += 1;
    }

    /// Notes that the session has taken a message.
    pub(in crate::engine) fn took(&self) {
        let mut queue = lock(&self.queue);
        queue.messages = queue.messages.saturating_sub(1);
        drop(queue);
        self.taken.notify_all();
    }

    /// Ends every wait in [`Backlog::await_room`].
    pub(in crate::engine) fn close(&self) {
        lock(&self.queue).closed = true;
        self.taken.notify_all();
    }

    pub(in crate::engine) fn is_closed(&self) -> bool {
        lock(&self.queue).closed
    }
}

/// What the reader of a control lane delivers to the session.
#[derive(Debug)]
pub(crate) enum FromPeer {
    /// A message for the session.
    Message(Message),
    /// The lane has ended; no message follows.
    Lost(Fault),
}

impl ControlLane {
    pub(crate) fn new(
        stream: ControlStream,
        session: SessionId,
        epoch: u32,
        sequences: Arc<Sequences>,
        silence_limit: Duration,
    ) -> Self {
        Self {
            stream,
            session,
            epoch,
            sequences,
            round_trip_ns: AtomicU64::new(0),
            pinged: AtomicU64::new(0),
            silence_limit,
            received_ns: AtomicU64::new(0),
            backlog: Backlog::default(),
            started: Instant::now(),
        }
    }

    /// Whether no message has been received for twice the interval between pings. A lane that is
    /// silent for so long may be broken.
    pub(crate) fn is_silent(&self) -> bool {
        let received = Duration::from_nanos(self.received_ns.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(received) > self.silence_limit / PING_PART * 2
    }

    /// Sends one message.
    pub(crate) fn send(&self, message: &Message) -> Result<(), Fault> {
        let mut bytes = Vec::new();
        // Hold the lock during the send, so that messages are sent in the order of their sequence
        // numbers.
        let mut sent = lock(&self.sequences.sent);
        let envelope = Envelope {
            session: self.session,
            epoch: self.epoch,
            sequence: *sent + 1,
        };
        message.encode(&envelope, &mut bytes).map_err(|error| {
            Fault::new(
                FaultCode::Internal,
                format!("cannot send {}", message.kind().name()),
            )
            .because(error)
        })?;
        let result = self.stream.send(&bytes).map_err(lost);
        bytes.zeroize();
        *sent += 1;
        result
    }

    /// Round trip of the control lane; zero before it has been measured.
    pub(crate) fn round_trip(&self) -> Duration {
        Duration::from_nanos(self.round_trip_ns.load(Ordering::Relaxed))
    }

    /// Sends a ping. The time until the pong arrives is the round trip.
    pub(crate) fn ping(&self) -> Result<(), Fault> {
        let token = self.now_ns();
        self.pinged.store(token, Ordering::Relaxed);
        self.send(&Message::Ping { token })
    }

    /// Sends a ping unless one is outstanding.
    pub(crate) fn ping_again(&self) -> Result<(), Fault> {
        match self.pinged.load(Ordering::Relaxed) {
            0 => self.ping(),
            _ => Ok(()),
        }
    }

    /// Ends the lane immediately and wakes every thread that waits for it.
    pub(crate) fn shutdown(&self) {
        self.backlog.close();
        self.stream.shutdown();
    }

    /// Reads until the lane ends; runs on its own thread. Handles pings and pongs. `at_once` may
    /// handle any other message on that thread, and returns whether it did. If not, the message
    /// goes to `deliver`. The last call of `deliver` passes [`FromPeer::Lost`].
    pub(crate) fn read(
        &self,
        mut at_once: impl FnMut(&Message) -> Result<bool, Fault>,
        mut deliver: impl FnMut(FromPeer),
    ) {
        let fault = loop {
            if self.backlog.is_closed() {
                break lost(ControlError::Cancelled);
            }
            match self.read_one() {
                Ok(Some(Message::Ping { token })) => {
                    if let Err(fault) = self.send(&Message::Pong { token }) {
                        break fault;
                    }
                }
                Ok(Some(Message::Pong { token })) => {
                    if token != 0 && self.pinged.swap(0, Ordering::Relaxed) == token {
                        let round_trip = self.now_ns().saturating_sub(token).max(1);
                        let shortest = match self.round_trip_ns.load(Ordering::Relaxed) {
                            0 => round_trip,
                            before => before.min(round_trip),
                        };
                        self.round_trip_ns.store(shortest, Ordering::Relaxed);
                    }
                }
                Ok(Some(message)) => match at_once(&message) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.backlog.await_room();
                        deliver(FromPeer::Message(message));
                    }
                    Err(fault) => break fault,
                },
                Ok(None) => {}
                Err(fault) => break fault,
            }
        };
        deliver(FromPeer::Lost(fault));
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Reads the next message; `None` for a message to skip.
    fn read_one(&self) -> Result<Option<Message>, Fault> {
        let mut bytes = [0; CONTROL_HEADER_BYTES];
        self.await_bytes(&mut bytes)?;
        let header = Header::decode(&bytes).map_err(malformed)?;
        let envelope = header.envelope();
        if envelope.session != self.session || envelope.epoch != self.epoch {
            return Err(Fault::new(
                FaultCode::Malformed,
                "control message for another session or epoch",
            ));
        }
        let mut body = vec![0; header.body_bytes()];
        self.stream
            .receive_exact(&mut body, Instant::now() + self.silence_limit)
            .map_err(lost)?;
        self.received_ns.store(self.now_ns(), Ordering::Relaxed);
        let message = Message::decode(&header, &body).map_err(malformed);
        body.zeroize();
        // Skip a message with a sequence number that has been seen on this lane or an earlier one.
        let before = self
            .sequences
            .seen
            .fetch_max(envelope.sequence, Ordering::SeqCst);
        if before >= envelope.sequence {
            return Ok(None);
        }
        message
    }

    /// Reads the header of a message, and pings the peer while it waits.
    fn await_bytes(&self, bytes: &mut [u8]) -> Result<(), Fault> {
        let silent_at = Instant::now() + self.silence_limit;
        loop {
            let until = silent_at.min(Instant::now() + self.silence_limit / PING_PART);
            match self.stream.receive_exact(bytes, until) {
                Ok(()) => return Ok(()),
                Err(ControlError::Deadline) if Instant::now() < silent_at => self.ping()?,
                Err(ControlError::Deadline) => {
                    return Err(Fault::new(
                        FaultCode::ControlLost,
                        format!("the peer was silent for {:?}", self.silence_limit),
                    ));
                }
                Err(error) => return Err(lost(error)),
            }
        }
    }
}

fn lost(error: ControlError) -> Fault {
    let code = match &error {
        ControlError::PeerAlert(_) => FaultCode::Unauthorised,
        _ => FaultCode::ControlLost,
    };
    Fault::new(code, "the control lane was lost").because(error)
}

/// The fault for a message that the peer must not send at this point of the session.
pub(crate) fn unexpected(message: &Message, from: Role) -> Fault {
    let what = format!(
        "unexpected {} from the {} on the control lane",
        message.kind().name(),
        from.name()
    );
    Fault::new(FaultCode::Malformed, what)
}

fn malformed(error: dunlin_proto::wire::DecodeError) -> Fault {
    Fault::new(error.fault(), "malformed control message from peer").because(error)
}
