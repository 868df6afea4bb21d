//! A lane that this side sends on. Its thread opens or admits the lane, reads the sockets of
//! channels in turn, and seals and sends the bytes.
//!
//! One of the threads without work watches all sockets, and itself sends the bytes that it reads. A
//! request and its answer therefore cost one wake-up per side. The other threads wait until there
//! is more work than one thread can do. They also wait until fewer threads send than there are
//! processors for them. A thread that waits because its lane is full gives up its place.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_linux::epoll::{Readiness, Ready};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::stripe::frame::{Data, Frame};
use dunlin_proto::stripe::{KeyUsage, Outcome, Work};

use super::failure::{Failure, OrFailure};
use super::hub::{Core, Direction, Hub, Locked};
use super::open::{self, lost};
use super::piece::{PIECE_BYTES, Piece};
use super::socket::Socket;
use dunlin_lane::accept::LaneSocket;
use dunlin_lane::data::{DataSender, SendError};
use dunlin_lane::dial::LaneDialer;
use dunlin_lane::peers::PeerIdentity;

/// After a read of at least this many bytes, the next lane with a free thread reads the socket
/// again, without waiting for an event. The thread that made the first read needs a while to send
/// the bytes, so another thread watches the sockets in the meantime.
const MUCH_BYTES: usize = 16 * 1024;

/// The body of a lane's thread, from dialling to the end.
pub(super) fn run(hub: &Hub, lane: u16, dialer: &dyn LaneDialer) {
    let dialled = open::dial(hub, Direction::Out, lane, dialer);
    match dialled.and_then(|sender| established(hub, lane, sender)) {
        Ok(sender) => carry(hub, lane, sender),
        Err(failure) => {
            let mut core = hub.lock();
            core.lane_is_over(Direction::Out, lane);
            let (code, text) = (failure.code(), failure.for_peer());
            core.trunk.lane_failed(lane, code, text, hub.now_ns());
            if !core.control.is_over() {
                hub.not_opened(&mut core, Direction::Out, lane, &failure);
            }
            hub.settle(&mut core);
            core.promote();
        }
    }
}

/// Starts the thread for a connection that has proved to be a lane on which this side sends. The
/// peer opened it at this side's request.
///
/// # Errors
/// The lane was not requested, has already arrived or is too late, or too many lanes are being
/// admitted.
pub(super) fn start(
    hub: &Arc<Hub>,
    lane: u16,
    socket: LaneSocket,
) -> Result<(), (FaultCode, &'static str)> {
    if !hub.lock().trunk.is_awaited(lane) {
        let why = "this side does not wait for this lane: it was not requested, has already \
                   arrived or is too late";
        return Err((FaultCode::DuplicateLane, why));
    }
    let admitting = hub.begin_admission(Direction::Out)?;
    let own = Arc::clone(hub);
    hub.spawn(format!("dunlin-lane-{lane}"), move || {
        let sender = admit(&own, lane, socket);
        drop(admitting);
        match sender {
            Ok(sender) => carry(&own, lane, sender),
            // The request stays open until its timeout, because the peer itself may still open the
            // lane.
            Err(failure) => own
                .site
                .reject("a peer that opened a lane", failure.code(), failure),
        }
    });
    Ok(())
}

/// Admits a lane on which this side sends. A lane that is not from the peer, or is not protected as
/// agreed, is refused (I6).
fn admit(hub: &Hub, lane: u16, socket: LaneSocket) -> Result<DataSender, Failure> {
    let is_peer = |peer: &PeerIdentity| hub.terms.is_the_peer(peer);
    let admitted = hub
        .acceptor
        .admit(socket, &is_peer)
        .map_err(|error| Failure::new(error.fault(), format!("lane {lane}")).because(&error))?;
    let sender = admitted.into_sender();
    let sender = sender.or_failure(FaultCode::LaneLost, format!("lane {lane}"))?;
    established(hub, lane, sender)
}

/// Reports to the core that a lane is open.
fn established(hub: &Hub, lane: u16, sender: DataSender) -> Result<DataSender, Failure> {
    let mut core = hub.lock();
    if !core.trunk.lane_established(lane, hub.now_ns()) {
        return Err(lost(format!("lane {lane} was opened too late")));
    }
    core.lane_is_open(Direction::Out, lane, sender.canceller());
    hub.settle(&mut core);
    Ok(sender)
}

/// Sends on an open lane until it ends.
fn carry(hub: &Hub, lane: u16, sender: DataSender) {
    let result = send_all(hub, lane, sender);
    let mut core = hub.lock();
    core.lane_is_over(Direction::Out, lane);
    core.trunk.lane_over(lane, hub.now_ns());
    hub.settle(&mut core);
    core.promote();
    let is_over = core.control.is_over();
    drop(core);
    if let Err(failure) = result
        && !is_over
    {
        hub.lane_lost(lane, failure.to_string());
    }
}

fn failed(lane: u16, error: &SendError) -> Failure {
    Failure::new(FaultCode::LaneLost, format!("cannot send on lane {lane}")).because(error)
}

fn send_all(hub: &Hub, lane: u16, mut sender: DataSender) -> Result<(), Failure> {
    let fresh = || hub.pool.take(PIECE_BYTES);
    let mut scratch = fresh();
    let mut ready = Vec::new();
    let records = hub.site.limits.lane_records;
    let _member = Member::join(hub);
    loop {
        let (work, socket) = next(hub, lane, sender.key_usage(records), &mut ready);
        let sent = match work {
            Work::Stop | Work::Wait => {
                let what = format!(
                    "lane {lane} abandoned: the peer reported its loss, or acknowledged nothing in time"
                );
                return Err(Failure::new(FaultCode::LaneLost, what));
            }
            Work::End { frames } => {
                // The lane may be full.
                let _blocked = Blocked::begin(hub);
                let header = Frame::End { frames }.to_bytes();
                let ended = sender.send(&header).and_then(|()| match sender.finish() {
                    // The peer closes the connection when it has read the end of the lane, so the
                    // close on this side can fail. Ignore that failure: bytes that the peer has not
                    // acknowledged are sent again in any case.
                    Err(SendError::Io(_) | SendError::PeerClosed) => Ok(()),
                    result => result.map(drop),
                });
                return ended.map_err(|error| failed(lane, &error));
            }
            Work::Again { data, token } => send(hub, &mut sender, &data, &token, &mut None),
            Work::Read { channel, most } => {
                let most = most as usize;
                let (found, mut idle) = read(hub, lane, channel, most, socket, &mut scratch);
                let sent = found.map_or(Ok(()), |(data, piece)| {
                    send(hub, &mut sender, &data, &piece, &mut idle)
                });
                // Rearm the socket only after the send: the peer waits for the piece, but no thread
                // waits for the socket to be watched again.
                watch_again(hub, channel, idle);
                sent
            }
        };
        if let Err(error) = sent {
            return Err(failed(lane, &error));
        }
    }
}

/// One of the threads that [`super::hub::Senders`] counts, until it is dropped. A thread that panics
/// must not keep its place.
struct Member<'a>(&'a Hub);

impl<'a> Member<'a> {
    fn join(hub: &'a Hub) -> Self {
        hub.lock().senders.count += 1;
        Self(hub)
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        let mut core = self.0.lock();
        core.senders.count -= 1;
        if core.senders.count == 0 {
            // No thread remains that would wait for the delayed channels.
            release(self.0, &mut core, None);
        }
        self.0.settle(&mut core);
        core.promote();
    }
}

/// Rearms the watch of the delayed channels that may be read at `now`, or of all delayed channels
/// if `now` is `None`. Returns how long the next delayed channel has to wait.
fn release(hub: &Hub, core: &mut Core, now: Option<Instant>) -> Option<Duration> {
    if core.delayed.is_empty() {
        return None;
    }
    let mut delayed = std::mem::take(&mut core.delayed);
    delayed.retain(|(until, channel)| {
        let waits = now.is_some_and(|now| *until > now);
        if !waits {
            watch_again(hub, *channel, core.channels.socket(*channel));
        }
        waits
    });
    core.delayed = delayed;
    let next = core.delayed.iter().map(|(until, _)| *until).min();
    next.zip(now).map(|(next, now)| next.duration_since(now))
}

/// Delays the next read of a channel until `until`.
fn delay(core: &mut Core, channel: u32, until: Instant) {
    let is_next = core.delayed.iter().all(|(other, _)| *other > until);
    core.delayed.push((until, channel));
    if is_next {
        // Otherwise the thread that watches the sockets would wait for too long.
        core.wake_watcher();
    }
}

/// Waits until the lane has work.
fn next(
    hub: &Hub,
    lane: u16,
    usage: KeyUsage,
    ready: &mut Vec<Ready>,
) -> (Work<Piece>, Option<Arc<Socket>>) {
    let mut core = hub.lock();
    loop {
        if core.has_to_follow(lane) {
            core = follow(hub, core);
            continue;
        }
        if !core.senders.watched && core.trunk.has_work() {
            // While channels with many bytes keep all threads busy, none of the threads waits for
            // sockets. So look here for channels with few bytes, which go first.
            hub.reads.wait(ready, Some(Duration::ZERO));
            take_ready(&mut core, ready);
        }
        let delayed = release(hub, &mut core, Some(Instant::now()));
        let work = core.trunk.next(lane, usage, hub.now_ns());
        hub.settle(&mut core);
        match work {
            // All threads of sending lanes were just woken, because lanes may have to end. This
            // lane may be one of them, so ask for work again.
            Work::Wait if hub.wake_now(&mut core) => {}
            Work::Wait if core.senders.watched => core = follow(hub, core),
            Work::Wait => {
                core.senders.watched = true;
                drop(core);
                hub.reads.wait(ready, delayed);
                core = hub.lock();
                core.senders.watched = false;
                core.senders.woken = false;
                take_ready(&mut core, ready);
            }
            Work::Read { channel, .. } => {
                return (work, core.channels.socket(channel));
            }
            _ => {
                core.promote();
                return (work, None);
            }
        }
    }
}

/// Waits until another thread wakes this one.
fn follow<'a>(hub: &Hub, mut core: Locked<'a>) -> Locked<'a> {
    core.senders.followers += 1;
    let mut core = core.wait(&hub.idle, None);
    core.senders.followers -= 1;
    core.senders.woken = false;
    core
}

/// Reports readable sockets to the core.
pub(super) fn take_ready(core: &mut Core, ready: &[Ready]) {
    for one in ready {
        if let Ok(channel) = u32::try_from(one.token) {
            core.trunk.readable(channel);
        }
    }
}

/// Rearms the watch of a channel's socket. Call this only after the read was reported to the core:
/// until then the core ignores a report that the socket is readable.
fn watch_again(hub: &Hub, channel: u32, socket: Option<Arc<Socket>>) {
    if let Some(socket) = socket {
        let token = u64::from(channel);
        hub.reads.again(&*socket, token, Readiness::Read);
    }
}

/// Reads a channel's socket once and reports the result to the core. Returns the piece to send, and
/// the socket if it has no more bytes for now.
fn read(
    hub: &Hub,
    lane: u16,
    channel: u32,
    most: usize,
    socket: Option<Arc<Socket>>,
    scratch: &mut Piece,
) -> (Option<(Data, Piece)>, Option<Arc<Socket>>) {
    let most = most.min(PIECE_BYTES);
    let result = match &socket {
        Some(socket) => {
            let most = hub.pacer.limited(socket.pacer().limited(most));
            scratch.with(|bytes| socket.read(&mut bytes[..most]))
        }
        None => Err(io::ErrorKind::NotConnected.into()),
    };
    let mut much = false;
    let mut idle = false;
    let mut broken = None;
    let mut until = None;
    let outcome = match result {
        Ok(0) => Outcome::End,
        Ok(count) => {
            let spent = socket.as_ref().and_then(|one| one.pacer().spend(count));
            until = spent.max(hub.pacer.spend(count));
            much = count >= MUCH_BYTES && until.is_none();
            idle = !much && until.is_none();
            let whole = std::mem::replace(scratch, hub.pool.take(PIECE_BYTES));
            Outcome::Bytes {
                length: count as u32,
                token: whole.fitted(count),
                more: much,
            }
        }
        Err(error) => {
            idle = error.kind() == io::ErrorKind::WouldBlock;
            broken = (!idle).then_some(error);
            Outcome::Nothing
        }
    };
    let piece = match &outcome {
        Outcome::Bytes { token, .. } => Some(token.clone()),
        _ => None,
    };
    let mut core = hub.lock();
    let now_ns = hub.now_ns();
    if let Some(error) = broken {
        hub.fail(&mut core, channel, &error, now_ns);
    }
    let data = core.trunk.read(lane, channel, outcome, now_ns);
    if let Some(until) = until {
        delay(&mut core, channel, until);
    }
    hub.settle(&mut core);
    if much {
        core.promote();
    }
    drop(core);
    (data.zip(piece), socket.filter(|_| idle))
}

/// Seals a piece and its header as one frame, and writes the frame. If the lane is full, another
/// thread takes over the sockets while this one waits, and the watch of the socket `idle` is rearmed.
fn send(
    hub: &Hub,
    sender: &mut DataSender,
    data: &Data,
    piece: &Piece,
    idle: &mut Option<Arc<Socket>>,
) -> Result<(), SendError> {
    let header = Frame::Data(*data).to_bytes();
    let mut blocked = None;
    piece.with(|bytes| {
        sender.send_with_notice(&header, bytes, &mut || {
            watch_again(hub, data.channel(), idle.take());
            blocked = Some(Blocked::begin(hub));
        })
    })
}

/// A thread that waits because its lane is full. It cannot watch the sockets.
struct Blocked<'a>(&'a Hub);

impl<'a> Blocked<'a> {
    fn begin(hub: &'a Hub) -> Self {
        let mut core = hub.lock();
        core.senders.blocked += 1;
        core.wake_senders();
        core.promote();
        Self(hub)
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        self.0.lock().senders.blocked -= 1;
    }
}
