//! A lane on which the peer sends. Its thread opens the records, puts the pieces in order, and
//! writes each piece that is next in its channel to the channel's socket.
//!
//! If a consumer reads slightly late, the thread waits for it, because handing the bytes to another
//! thread costs more than the wait. If the wait times out, the poller takes over and later pieces
//! are kept (I8), so a stalled channel does not stop a lane.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_linux::epoll::Readiness;
use dunlin_linux::socket::wait_writable;
use dunlin_proto::stripe::frame::{Data, FRAME_HEADER_BYTES, Frame};
use dunlin_proto::stripe::{Arrival, Delivery};

use super::failure::{Failure, OrFailure};
use super::hub::{Core, Direction, Hub};
use super::open;
use super::piece::Piece;
use super::socket::Socket;
use dunlin_lane::accept::LaneSocket;
use dunlin_lane::admit::AdmitError;
use dunlin_lane::data::{DataReceiver, ReceiveError};
use dunlin_lane::dial::LaneDialer;
use dunlin_lane::peers::PeerIdentity;
use dunlin_proto::fault::FaultCode;

/// How long a lane waits for a consumer, in total for all pieces that it writes one after another.
///
/// Formula: a consumer that has just been woken reads within tens of microseconds, and a consumer
/// that waits for a CPU runs within a few milliseconds. Drawback: a channel that stalls delays a
/// lane by this time, but only once. Alternative: without a wait, bulk transfers cost two more
/// wake-ups per piece.
const CONSUMER_WAIT: Duration = Duration::from_millis(2);

/// Starts the thread for a connection that has proved to be a lane of this trunk.
///
/// # Errors
/// Too many lanes are being admitted.
pub(super) fn start(
    hub: &Arc<Hub>,
    lane: u16,
    socket: LaneSocket,
) -> Result<(), (FaultCode, &'static str)> {
    let admitting = hub.begin_admission(Direction::In)?;
    let own = Arc::clone(hub);
    hub.spawn(format!("dunlin-lane-in-{lane}"), move || {
        let receiver = admit(&own, lane, socket);
        drop(admitting);
        if let Some(receiver) = receiver {
            run(&own, lane, receiver);
        }
    });
    Ok(())
}

/// The body of the thread of a lane that this side opens at the peer's request.
pub(super) fn open_for(hub: &Hub, lane: u16, dialer: &dyn LaneDialer) {
    let dialled = open::dial(hub, Direction::In, lane, dialer).and_then(|sender| {
        let receiver = sender.into_receiver();
        receiver.or_failure(FaultCode::LaneLost, format!("cannot use lane {lane}"))
    });
    let mut core = hub.lock();
    match dialled {
        Ok(receiver) if core.trunk.opened_for(lane) => {
            drop(core);
            run(hub, lane, receiver);
        }
        Ok(_) => core.lane_is_over(Direction::In, lane),
        Err(failure) => {
            core.lane_is_over(Direction::In, lane);
            let (code, text) = (failure.code(), failure.for_peer());
            core.trunk.not_opened(lane, code, text);
            if !core.control.is_over() {
                hub.not_opened(&mut core, Direction::In, lane, &failure);
            }
            hub.settle(&mut core);
        }
    }
}

/// Admits a lane. A lane that is not from the peer, or is not protected as agreed, is refused (I6)
/// before its number counts as used (I7). At this point only the lane's proof has been read.
fn admit(hub: &Hub, lane: u16, socket: LaneSocket) -> Option<DataReceiver> {
    let is_peer = |peer: &PeerIdentity| hub.terms.is_the_peer(peer);
    match hub.acceptor.admit(socket, &is_peer) {
        Ok(receiver) => {
            let mut core = hub.lock();
            // The core sends the reason of a refusal to the peer.
            let admitted = core.trunk.admit(lane);
            hub.settle(&mut core);
            admitted.is_ok().then_some(receiver)
        }
        Err(error) => {
            let failure = Failure::new(error.fault(), format!("lane {lane}")).because(&error);
            let is_strange = matches!(
                error,
                AdmitError::OtherPeer | AdmitError::OtherSecurity { .. }
            );
            // If `is_strange`, the lane may come from a host that is not the trunk's peer. Do not
            // refuse the lane's number, because the peer may have a lane with this number.
            if !is_strange {
                let mut core = hub.lock();
                core.trunk
                    .refuse_lane(lane, failure.code(), failure.for_peer());
                hub.settle(&mut core);
            }
            hub.site
                .reject("a peer that opened a lane", failure.code(), failure);
            None
        }
    }
}

/// The body of an admitted lane's thread.
fn run(hub: &Hub, lane: u16, receiver: DataReceiver) {
    let result = receive_all(hub, lane, receiver);
    let mut core = hub.lock();
    core.lane_is_over(Direction::In, lane);
    core.trunk.admitted_over(lane);
    hub.settle(&mut core);
    let is_over = core.control.is_over();
    drop(core);
    if let Err(error) = result
        && !is_over
    {
        let why = format!("cannot receive on the peer's lane {lane}: {error}");
        hub.lane_lost(lane, why);
    }
}

fn receive_all(hub: &Hub, lane: u16, mut receiver: DataReceiver) -> Result<(), ReceiveError> {
    let canceller = receiver.canceller();
    {
        let mut core = hub.lock();
        if core.control.is_over() {
            return Ok(());
        }
        core.lane_is_open(Direction::In, lane, canceller);
    }
    let mut header = [0; FRAME_HEADER_BYTES];
    loop {
        if !receiver.next(&mut header, None)? {
            return Err(receiver.ended_early());
        }
        match Frame::decode(&header) {
            Ok(Frame::Data(data)) => {
                let piece = hub.pool.take(data.length() as usize);
                piece.with(|bytes| receiver.read_exact(bytes))?;
                if !arrived(hub, lane, &data, piece) {
                    return Ok(());
                }
            }
            Ok(Frame::End { frames }) => {
                let mut core = hub.lock();
                match core.trunk.lane_ended(lane, frames) {
                    Ok(()) => hub.settle(&mut core),
                    Err(fault) => hub.broken(&mut core, &fault),
                }
                drop(core);
                // The peer may have closed the connection.
                let _ = receiver.close();
                return Ok(());
            }
            Err(error) => {
                let mut core = hub.lock();
                hub.broken(&mut core, &error);
                return Ok(());
            }
        }
    }
}

/// Handles a piece that has arrived completely. Returns false if the trunk has ended.
fn arrived(hub: &Hub, lane: u16, data: &Data, piece: Piece) -> bool {
    let mut core = hub.lock();
    let channel = data.channel();
    let now_ns = hub.now_ns();
    let arrival = core.trunk.arrived(lane, data, now_ns);
    let turn = match arrival {
        Ok(Arrival::Drop) => Ok(None),
        Ok(Arrival::Deliver) => Ok(Some(Delivery {
            channel,
            offset: data.offset(),
            length: data.length(),
            token: piece,
        })),
        Ok(Arrival::Keep) => core.trunk.keep(lane, data, piece, now_ns),
        Err(fault) => Err(fault),
    };
    match turn {
        Err(fault) => hub.broken(&mut core, &fault),
        Ok(turn) => {
            hub.settle(&mut core);
            let socket = core.channels.socket(channel);
            let over = core.control.is_over();
            drop(core);
            if let (Some(turn), Some(socket)) = (turn, socket) {
                deliver(hub, &socket, turn, Some(Instant::now() + CONSUMER_WAIT));
            }
            return !over;
        }
    }
    false
}

/// Writes a piece and the pieces that follow it. If the socket is full, waits for it until `until`.
/// After that time, or if `until` is `None`, the poller writes the remaining bytes.
fn deliver(hub: &Hub, socket: &Socket, turn: Delivery<Piece>, until: Option<Instant>) {
    let channel = turn.channel;
    let mut piece = turn.token;
    loop {
        let mut written = 0;
        let result = piece.with(|bytes| write(socket, bytes, until, &mut written));
        let mut core = hub.lock();
        let now_ns = hub.now_ns();
        if let Err(error) = result {
            if hub.fail(&mut core, channel, &error, now_ns) {
                // The consumer has closed its connection. The core counts the unwritten bytes and
                // all later pieces as unread, and discards them when it aborts the channel.
                let rest = piece.behind(written);
                core.trunk.wrote(channel, written as u32, rest, now_ns);
            }
            hub.settle(&mut core);
            return;
        }
        let rest = piece.behind(written);
        let is_stuck = rest.is_some();
        let next = core.trunk.wrote(channel, written as u32, rest, now_ns);
        hub.settle(&mut core);
        // Rearm the watch of the socket while the lock is held. Otherwise the thread with the next
        // turn could rearm it first, and this older request would replace the newer one.
        let wait_for = match next {
            Some(next) => {
                piece = next.token;
                continue;
            }
            None if is_stuck => Readiness::Write,
            None if until.is_none() => Readiness::Failure,
            None => return,
        };
        return hub.writes.again(socket, u64::from(channel), wait_for);
    }
}

/// Writes as much of `bytes` as the socket accepts before `until`, and adds the count to
/// `written`.
fn write(
    socket: &Socket,
    bytes: &[u8],
    until: Option<Instant>,
    written: &mut usize,
) -> io::Result<()> {
    while *written < bytes.len() {
        match socket.write(&bytes[*written..]) {
            Ok(count) => *written += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => match until {
                Some(until) if wait_writable(socket, until)? => {}
                _ => return Ok(()),
            },
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The body of the poller: continues to write to sockets that were full, and finds sockets that
/// have failed while no thread reads or writes them.
pub(super) fn poll(hub: &Hub) {
    let mut ready = Vec::new();
    loop {
        hub.writes.wait(&mut ready, None);
        if hub.lock().control.is_over() {
            return;
        }
        for one in &ready {
            let Ok(channel) = u32::try_from(one.token) else {
                continue;
            };
            let mut core = hub.lock();
            if one.failed && fails(hub, &mut core, channel) {
                continue;
            }
            let socket = core.channels.socket(channel);
            let turn = core.trunk.writable(channel);
            drop(core);
            if let (Some(socket), Some(turn)) = (socket, turn) {
                deliver(hub, &socket, turn, None);
            }
        }
    }
}

/// Fails a channel after an error of its socket, if [`Socket::tells_resets`] returns true.
/// Otherwise a lane's thread first reads the received bytes, and its next read returns the error.
/// Returns true if the channel has failed or had already ended.
fn fails(hub: &Hub, core: &mut Core, channel: u32) -> bool {
    let Some(socket) = core.channels.socket(channel) else {
        return true;
    };
    if !socket.tells_resets() {
        return false;
    }
    let error = socket.error();
    hub.fail(core, channel, &error, hub.now_ns());
    hub.settle(core);
    true
}
