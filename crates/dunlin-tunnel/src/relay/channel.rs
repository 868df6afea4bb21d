//! A channel of a relay: the hypervisor's connection, a TLS connection, and one thread per
//! direction.
//!
//! A thread that aborts the channel shuts both sockets down, which wakes the other thread. The last
//! thread that ends closes the sockets. The code of the threads is in `process` or, if the kernel
//! seals and opens the records, in `splice`.

use dunlin_lane::sync::lock;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use dunlin_lane::peers::Peer;
use dunlin_linux::socket::{set_reset_on_close, wait_writable};
use dunlin_linux::tcp::{silence, traffic, unacknowledged_bytes};
use dunlin_proto::fault::FaultCode;

use super::life::{Inward, Life};
use crate::event::{ChannelId, Event};
use crate::failure::Failure;
use crate::rate::Pacer;
use crate::site::Site;
use crate::socket::Socket;
use crate::status::Status;
use dunlin_lane::record::Alert;
use dunlin_lane::relayed::RelayError;
use dunlin_lane::relayed::in_kernel::{Opening, Sealing};
use dunlin_lane::relayed::session::Session;
use dunlin_lane::splice::Stop;

/// How often a direction's thread checks for an abort while its consumer does not read.
///
/// Drawback: a hypervisor that does not read notices an abort up to this much later. A shutdown of
/// its socket would wake the thread immediately. But the hypervisor would then read a clean end,
/// although the channel was aborted.
pub(super) const STALL_LOOK: Duration = Duration::from_millis(20);

pub(super) struct Channel {
    pub(super) number: u32,
    pub(super) route: String,
    pub(super) peer: String,
    pub(super) selector: Peer,
    pub(super) at: SocketAddr,
    pub(super) plain: Socket,
    pub(super) tls: TcpStream,
    pub(super) life: Mutex<Life>,
    pub(super) mover: Mover,
    pub(super) site: Arc<Site>,
    /// The limit of the rate at which this side sends to the peer.
    pub(super) pacer: Arc<Pacer>,
}

/// What seals and opens the records of a channel.
pub(super) enum Mover {
    Process(Process),
    Kernel(Kernel),
}

/// This process seals and opens the records. The threads block in calls on the sockets; a shutdown
/// of the sockets ends these calls.
pub(super) struct Process {
    pub(super) session: Session,
    /// The buffer for sealed records. Its lock is held from sealing to sending, because records
    /// must be sent in the order of their numbers.
    pub(super) sending: Mutex<Vec<u8>>,
}

/// The kernel seals and opens the records. Each thread waits in poll(2) for a socket or for a
/// request to stop.
pub(super) struct Kernel {
    pub(super) sealing: Mutex<Sealing>,
    /// Only the inbound thread uses this. It holds the lock as long as it runs.
    pub(super) opening: Mutex<Opening>,
    pub(super) outward: Stop,
    pub(super) inward: Stop,
}

impl Channel {
    pub(super) fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.life)
    }

    pub(super) fn is_relaying(&self) -> bool {
        self.life().is_relaying()
    }

    pub(super) fn id(&self) -> ChannelId {
        ChannelId {
            route: self.route.clone(),
            channel: self.number,
            peer: self.peer.clone(),
        }
    }

    /// Called by each thread when it ends. The last thread reports the end of the channel.
    pub(super) fn leave(&self, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.abort(failure);
        }
        let Some(ended) = self.life().leave() else {
            return;
        };
        let id = self.id();
        self.site.report(match ended {
            Err(failure) => Event::Aborted { id, failure },
            Ok(()) => {
                self.plain.ended_well();
                Event::Closed(id)
            }
        });
    }

    /// Aborts the channel and wakes its threads. Both connections are reset when the threads have
    /// ended. Later reasons are discarded, so a thread that was woken may return any error.
    pub(super) fn abort(&self, failure: Failure) {
        let mut life = self.life();
        if !life.is_relaying() {
            return;
        }
        self.plain.fail(&failure);
        life.abort(failure);
        drop(life);
        // These calls fail only if a connection is closed.
        let _ = set_reset_on_close(&self.tls);
        let _ = self.tls.shutdown(Shutdown::Both);
        self.plain.stop_reading();
        if let Mover::Kernel(kernel) = &self.mover {
            kernel.outward.request();
            kernel.inward.request();
        }
    }

    /// Called by the watch thread when a socket has failed.
    pub(super) fn has_failed(&self, is_tls: bool) {
        if !is_tls {
            return self.abort(of_hypervisor(&self.plain.error()));
        }
        let loses_data = self.life().reset();
        if loses_data {
            return self.abort(self.closed_early());
        }
        if let Mover::Kernel(kernel) = &self.mover {
            kernel.inward.request();
        }
    }

    /// Whether the peer owes an acknowledgement and has sent nothing for `vanished`.
    pub(super) fn is_silent(&self, vanished: Duration) -> bool {
        silence(&self.tls).is_ok_and(|silent| silent.is_overdue(vanished))
    }

    /// Called by the watch thread when the peer does not answer.
    pub(super) fn has_vanished(&self) {
        self.abort(self.lost("peer vanished: sent data is not acknowledged"));
    }

    /// The sum of the bytes that the peer has acknowledged and the bytes that it has sent, and
    /// whether unacknowledged bytes wait for the peer.
    pub(super) fn progress(&self) -> (u64, bool) {
        // A socket that returns an error has failed, and no bytes wait for its peer.
        let carried = traffic(&self.tls).unwrap_or_default();
        let waiting = unacknowledged_bytes(&self.tls).unwrap_or(0);
        let bytes = carried.acknowledged_bytes + carried.received_bytes;
        (bytes, waiting > 0)
    }

    /// Reports that the peer takes no bytes on any of its connections. Does not abort the channel,
    /// because a program that does not read cannot be distinguished from a stopped process.
    pub(super) fn report_silence(&self, host_answers: bool) {
        let (at, limit) = (self.at, self.site.limits.vanished);
        let (follows, more) = match host_answers {
            true => (
                "its connections wait".to_owned(),
                ", or the program behind it reads little or nothing",
            ),
            false => (format!("counts as lost after {limit:?}"), ""),
        };
        let what = format!("the relay's peer at {at} is silent, and {follows}");
        let peer = self.peer.clone();
        self.site
            .report(Event::peer_silent(peer, host_answers, &what, more));
    }

    pub(super) fn status(&self) -> Status {
        Status {
            peer: self.peer.clone(),
            selector: self.selector.clone(),
            at: self.at,
            channels: vec![self.route.clone()],
            lanes: 1,
            by_lane: Vec::new(),
            held_bytes: 0,
            // A socket that returns an error has failed, and has no unacknowledged bytes.
            unacknowledged_bytes: unacknowledged_bytes(&self.tls).unwrap_or(0),
            rate: self.pacer.rate(),
            refused: None,
            trouble: None,
        }
    }

    pub(super) fn lost(&self, why: &str) -> Failure {
        let text = format!("connection to {} at {} lost: {why}", self.peer, self.at);
        Failure::new(FaultCode::LaneLost, text)
    }

    /// The failure if the peer has closed its connection and data of this side is lost.
    fn closed_early(&self) -> Failure {
        self.lost("closed by the peer before this side had ended its direction")
    }

    pub(super) fn of_io(&self, error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => {
                self.lost("peer vanished: keep-alive probes are not answered")
            }
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                self.lost("closed without close_notify")
            }
            _ => self.lost(&error.to_string()),
        }
    }

    pub(super) fn of_tls(&self, error: &RelayError) -> Failure {
        // A server that rejects the client's certificate after the handshake sends one of these
        // alerts.
        let code = match error {
            RelayError::PeerAlert(Alert(40..=51 | 116)) => FaultCode::Unauthorised,
            _ => FaultCode::LaneLost,
        };
        let text = format!("connection to {} at {} failed: {error}", self.peer, self.at);
        Failure::new(code, text)
    }

    /// Ends the direction to the peer, unless the channel is aborted. `send` sends the
    /// *close_notify*.
    pub(super) fn end_outward(
        &self,
        send: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if !self.life().end_outward() {
            return Ok(());
        }
        let sent = send();
        // A peer that has ended its direction and closed the connection does not need this side's
        // *close_notify*.
        if sent.is_err() && self.life().is(Inward::Ended) {
            return Ok(());
        }
        sent
    }

    /// Writes all bytes to the hypervisor, however long that takes. `is_over` means that the peer
    /// sends no bytes after these. A reset of the peer's connection then does not abort the write.
    pub(super) fn write(&self, mut content: &[u8], is_over: bool) -> Result<(), Failure> {
        while !content.is_empty() {
            match self.plain.write(content) {
                Ok(count) => content = &content[count..],
                Err(error) if is_early(&error) => {
                    if !self.is_relaying() {
                        return Ok(());
                    }
                    if !is_over && self.life().is(Inward::Reset) {
                        return Err(self.lost("connection reset"));
                    }
                    if let Mover::Kernel(_) = self.mover {
                        self.wait_for_consumer();
                    }
                }
                Err(error) => return Err(of_hypervisor(&error)),
            }
        }
        Ok(())
    }

    /// Counts bytes that were read from the hypervisor. Waits as long as the limits of the route
    /// and the peer require, or until the channel is aborted.
    pub(super) fn pace(&self, bytes: usize) {
        let until = self.plain.pacer().spend(bytes).max(self.pacer.spend(bytes));
        let Some(until) = until else { return };
        while self.is_relaying() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(STALL_LOOK));
        }
    }

    /// The size of the next read from the hypervisor.
    pub(super) fn limited(&self, most: usize) -> usize {
        self.pacer.limited(self.plain.pacer().limited(most))
    }

    /// Waits up to [`STALL_LOOK`] for the hypervisor to take bytes.
    pub(super) fn wait_for_consumer(&self) {
        // The next write reports the error.
        let _ = wait_writable(&self.plain, Instant::now() + STALL_LOOK);
    }

    /// Called when the peer has ended its direction. Ends the direction to the hypervisor, unless
    /// the channel is aborted.
    pub(super) fn end_inward(&self) -> Result<(), Failure> {
        let mut life = self.life();
        if !life.is_relaying() {
            return Ok(());
        }
        let loses_data = life.end_inward();
        drop(life);
        self.plain.end();
        match loses_data {
            true => Err(self.closed_early()),
            false => Ok(()),
        }
    }
}

/// Locks the mutex, unless another thread holds it.
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub(super) fn of_hypervisor(error: &io::Error) -> Failure {
    let what = "the hypervisor's connection failed";
    Failure::new(FaultCode::ChannelBroken, what).because(error)
}

/// Whether the error means that the socket's timeout has passed, or that a call would block. If a
/// connection fails because its peer does not answer, the error has another kind.
pub(super) fn is_early(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}
