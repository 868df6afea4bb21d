//! The talker of a trunk, the reader of its control lane, and the resumption of a lost control
//! lane. The talker sends the trunk's messages, runs its timers and starts its threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::fault::FaultCode;
use dunlin_proto::stripe::ACK_DELAY_NS;
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};
use dunlin_proto::wire::DecodeError;
use thiserror::Error;
use zeroize::Zeroize;

use super::control::Control;
use super::event::Event;
use super::failure::Failure;
use super::handshake::Selected;
use super::hub::{Core, Dial, Hub, Start, Talker};
use super::route::Destination;
use super::terms::Origin;
use super::{exit, receive, send};
use dunlin_lane::control::{ControlError, ControlStream};
use dunlin_lane::dial::LaneDialer;
use dunlin_linux::tcp::silence;

/// Maximum size of a batch of messages for one write.
const BATCH_BYTES: usize = 32 * 1024;
/// While no message arrives, the reader sends a ping after each fifth of the permitted silence.
const ASK_PART: u32 = 5;
/// Delay between attempts to redial a control lane.
const REDIAL: Duration = Duration::from_millis(200);

/// Messages for one write.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    /// Whether one of the messages acknowledges frames.
    acknowledges: bool,
}

/// Runs a trunk until it has ended and its threads are joined. Returns the reason why it
/// ended.
pub(super) fn run(hub: &Arc<Hub>, dialer: &Arc<dyn LaneDialer>) -> FaultCode {
    let poller = Arc::clone(hub);
    let mut started = hub.spawn("dunlin-poller".to_owned(), move || receive::poll(&poller));
    if let Control::Up { epoch, stream } = &hub.lock().control {
        started &= spawn_reader(hub, stream, *epoch);
    }
    if !started {
        hub.end(FaultCode::Kernel);
    }
    let fault = talk(hub, dialer);
    let control = hub.lock().control.close();
    if let Some(control) = control {
        // Send a clean end. This fails if the peer has closed the connection.
        let _ = control.close();
        control.shutdown();
    }
    hub.threads.join();
    fault
}

/// Sends messages and starts threads until the trunk has ended.
fn talk(hub: &Arc<Hub>, dialer: &Arc<dyn LaneDialer>) -> FaultCode {
    let mut batch = Batch::default();
    let mut ready = Vec::new();
    let (idle, mut idle_since) = (hub.site.limits.idle, Instant::now());
    let mut has_acknowledged = false;
    loop {
        let mut core = hub.lock();
        core.talker = Talker::Runs;
        if core.senders.count == 0 {
            // No lane's thread watches the sockets, so check here whether a lane is needed.
            hub.reads.wait(&mut ready, Some(Duration::ZERO));
            send::take_ready(&mut core, &ready);
        }
        let mine = hub.terms.is_dialled();
        if core.trunk.channels() > 0 || hub.is_kept() {
            idle_since = Instant::now();
        } else if mine && idle_since.elapsed() >= idle {
            core.trunk.end(FaultCode::Ended);
        }
        if (mine || hub.site.is_draining()) && core.trunk.drained() {
            core.trunk.end(FaultCode::Ended);
        }
        hub.settle(&mut core);
        if !take_messages(hub, &mut core, &mut batch) {
            return FaultCode::Internal;
        }
        let starts = std::mem::take(&mut core.starts);
        let has_started = !starts.is_empty();
        for one in starts {
            start(hub, &mut core, dialer, one);
            hub.settle(&mut core);
        }
        // Check after every call that may have ended the trunk, because nothing wakes this thread
        // again.
        if let Some(fault) = core.control.fault() {
            return fault;
        }
        if !batch.bytes.is_empty() {
            let Control::Up { epoch, stream } = &core.control else {
                continue;
            };
            let (epoch, stream) = (*epoch, Arc::clone(stream));
            drop(core);
            if let Err(error) = stream.send(&batch.bytes) {
                lost(hub, epoch, error);
            }
            has_acknowledged |= batch.acknowledges;
            continue;
        }
        // If a thread could not be started, the core may have a message about that for the peer.
        if has_started || !core.starts.is_empty() {
            continue;
        }
        let mut until_ns = core.trunk.due_ns();
        if std::mem::take(&mut has_acknowledged) {
            // Bytes are arriving, so another acknowledgement will probably be due in about
            // `ACK_DELAY_NS`. Set the timer for it now. Otherwise the next frame would wake this
            // thread only to set the timer.
            let look_ns = hub.now_ns().saturating_add(ACK_DELAY_NS);
            until_ns = Some(until_ns.map_or(look_ns, |due_ns| due_ns.min(look_ns)));
        }
        let due = until_ns.map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(hub.now_ns())));
        let cold =
            (mine && core.trunk.channels() == 0).then(|| idle.saturating_sub(idle_since.elapsed()));
        let wait = due.into_iter().chain(cold).min();
        core.talker = Talker::Waits { until_ns };
        drop(core.wait(&hub.talk, wait));
    }
}

/// Starts a thread that the core requested.
fn start(hub: &Arc<Hub>, core: &mut Core, dialer: &Arc<dyn LaneDialer>, one: Start) {
    let own = Arc::clone(hub);
    match one {
        Start::Lane(lane) => {
            let dialer = Arc::clone(dialer);
            let body = move || send::run(&own, lane, &*dialer);
            if !hub.spawn(format!("dunlin-lane-{lane}"), body) {
                let text = "cannot start a thread".to_owned();
                core.trunk
                    .lane_failed(lane, FaultCode::Kernel, text, hub.now_ns());
            }
        }
        Start::LaneFor(lane) => {
            let dialer = Arc::clone(dialer);
            let body = move || receive::open_for(&own, lane, &*dialer);
            if !hub.spawn(format!("dunlin-lane-in-{lane}"), body) {
                let text = "cannot start a thread".to_owned();
                core.trunk.not_opened(lane, FaultCode::Kernel, text);
            }
        }
        Start::Target {
            channel,
            route,
            parameter,
        } => {
            let body = move || exit::connect(&own, channel, &route, &parameter);
            if !hub.spawn(format!("dunlin-target-{channel}"), body) {
                core.connecting -= 1;
                let (code, text) = (FaultCode::TargetUnreachable, "cannot start a thread");
                core.trunk
                    .refuse(channel, code, text.to_owned(), hub.now_ns());
            }
        }
    }
}

/// Encodes the messages that are due. Returns false if one of them cannot be encoded.
fn take_messages(hub: &Arc<Hub>, core: &mut Core, batch: &mut Batch) -> bool {
    batch.bytes.clear();
    batch.acknowledges = false;
    let Control::Up { epoch, .. } = core.control else {
        return true;
    };
    while batch.bytes.len() < BATCH_BYTES {
        let Some(message) = core.trunk.next_message(hub.now_ns()) else {
            break;
        };
        batch.acknowledges |= matches!(message, Message::Ack(_));
        if let Err(error) = message.encode(epoch, &mut batch.bytes) {
            let text = format!("cannot encode {}: {error}", message.kind());
            hub.site.report(Event::Warning(text));
            core.trunk.end(FaultCode::Internal);
            hub.settle(core);
            return false;
        }
    }
    // The core ends a channel when its last message is taken, so carry out the core's decisions.
    hub.settle(core);
    true
}

/// Reads a control lane until it ends.
fn read(hub: &Arc<Hub>, control: &ControlStream, epoch: u32) {
    let mut body = Vec::new();
    loop {
        match read_one(hub, control, epoch, &mut body) {
            Ok(Some(message)) => {
                let mut core = hub.lock();
                if !core.control.is_up(epoch) {
                    return;
                }
                match core.trunk.handle(message, hub.now_ns()) {
                    Ok(()) => hub.settle(&mut core),
                    Err(fault) => return hub.broken(&mut core, &fault),
                }
            }
            Ok(None) => {}
            Err(Broken::Lane(error)) => return lost(hub, epoch, error),
            Err(Broken::Message(error)) => {
                let mut core = hub.lock();
                return hub.broken(&mut core, &error);
            }
        }
    }
}

/// Why no message can be read.
#[derive(Debug, Error)]
enum Broken {
    #[error(transparent)]
    Lane(#[from] ControlError),
    #[error(transparent)]
    Message(#[from] DecodeError),
}

/// Reads the next message; `None` for a message that may be skipped.
fn read_one(
    hub: &Hub,
    control: &ControlStream,
    epoch: u32,
    body: &mut Vec<u8>,
) -> Result<Option<Message>, Broken> {
    let limit = hub.site.limits.silence();
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    let silent_at = Instant::now() + limit;
    let mut asked = 0;
    loop {
        let until = silent_at.min(Instant::now() + limit / ASK_PART);
        match control.receive_exact(&mut bytes, until) {
            Ok(()) => break,
            Err(ControlError::Deadline) if Instant::now() < silent_at => {
                asked += 1;
                if asked == 2 {
                    report_silence(hub, control);
                }
                // The core ignores the pong, because the core did not send this ping. Only the
                // arrival of the pong matters.
                let mut ask = Vec::new();
                if (Message::Ping { token: 0 }).encode(epoch, &mut ask).is_ok() {
                    control.send(&ask)?;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    let header = Header::decode(&bytes)?;
    body.resize(header.body_bytes(), 0);
    control.receive_exact(body, Instant::now() + limit)?;
    let message = Message::decode(&header, body);
    body.zeroize();
    Ok(message?)
}

/// Reports that the peer has not answered the first ping. Does not end the trunk yet: from here, a
/// process that only lacks processor time looks the same as a stopped one.
fn report_silence(hub: &Hub, control: &ControlStream) {
    // The peer's kernel acknowledges the ping even if the peer's process does not run.
    let host_answers = silence(control.socket()).is_ok_and(|found| found.unacknowledged == 0);
    let limit = hub.site.limits.silence();
    let what = format!("the peer's tunnel is silent, and counts as lost after {limit:?}");
    let peer = hub.terms.peer_name();
    hub.site
        .report(Event::peer_silent(peer, host_answers, &what, ""));
}

/// Handles the loss of the control lane of this epoch.
fn lost(hub: &Arc<Hub>, epoch: u32, error: ControlError) {
    let mut core = hub.lock();
    let Some(stream) = core.control.lose(epoch) else {
        return;
    };
    stream.shutdown();
    if matches!(error, ControlError::Closed) {
        // A clean end means that the peer has ended the trunk.
        core.trunk.end(FaultCode::Ended);
        return hub.settle(&mut core);
    }
    core.trunk.control_down(hub.now_ns());
    hub.settle(&mut core);
    drop(core);
    let peer = hub.terms.peer_name();
    let failure = Failure::from(error);
    hub.site.report(Event::ControlLost { peer, failure });
    if hub.terms.is_dialled() {
        let again = Arc::clone(hub);
        hub.spawn("dunlin-redial".to_owned(), move || redial(&again, epoch));
    }
}

/// Dials the control lane until it is up or the trunk has ended. If no lane is open and the peer's
/// host refuses the connections for some time, the peer's process has ended. This function then
/// ends the trunk.
fn redial(hub: &Arc<Hub>, epoch: u32) {
    let Origin::Dialled(to) = &hub.terms.origin else {
        return;
    };
    let mut next = epoch;
    let mut refused_since = None;
    while !hub.lock().control.is_over() {
        next = next.saturating_add(1);
        let deadline = Instant::now() + hub.site.limits.silence();
        let dialled = dial_again(hub, to, next, deadline);
        hub.lock().dials.remove(&Dial::Control);
        match dialled {
            Ok(control) => return resume(hub, control, next),
            Err(failure) if failure.code() == FaultCode::UnknownSession => {
                // The process that answers is not the process that had the trunk.
                return hub.end(FaultCode::UnknownSession);
            }
            Err(failure) => {
                let now = Instant::now();
                let is_refused = failure.is_connection_refused();
                refused_since = is_refused.then(|| refused_since.unwrap_or(now));
                let limit = hub.site.limits.refused();
                let is_gone = refused_since.is_some_and(|since| now - since >= limit);
                if is_gone && !hub.has_lane() {
                    return hub.end(FaultCode::ControlLost);
                }
                // Retry until the core ends the trunk after its timeout.
                std::thread::sleep(REDIAL);
            }
        }
    }
}

/// Opens the control lane of epoch `next`, unless the trunk ends in the meantime.
fn dial_again(
    hub: &Hub,
    to: &Destination,
    next: u32,
    deadline: Instant,
) -> Result<ControlStream, Failure> {
    let dialling = hub.site.dials.begin()?;
    {
        let mut core = hub.lock();
        if let Some(fault) = core.control.fault() {
            return Err(Failure::new(fault, "the trunk has ended"));
        }
        core.dials.insert(Dial::Control, dialling.cancel.clone());
    }
    Selected::dial(&hub.site, dialling, to, hub.terms.session, next, deadline)?.resumed(&hub.terms)
}

/// Replaces the control lane with one of a higher epoch. A control lane that arrives too late is
/// dropped.
pub(super) fn resume(hub: &Arc<Hub>, control: ControlStream, epoch: u32) {
    let stream = Arc::new(control);
    let mut core = hub.lock();
    if !core.control.resume(epoch, &stream) {
        return;
    }
    core.trunk.control_up(hub.now_ns());
    if !spawn_reader(hub, &stream, epoch) {
        core.trunk.end(FaultCode::Kernel);
    }
    hub.settle(&mut core);
    drop(core);
    let peer = hub.terms.peer_name();
    hub.site.report(Event::ControlResumed { peer });
}

fn spawn_reader(hub: &Arc<Hub>, stream: &Arc<ControlStream>, epoch: u32) -> bool {
    let (own, stream) = (Arc::clone(hub), Arc::clone(stream));
    hub.spawn("dunlin-control".to_owned(), move || {
        read(&own, &stream, epoch);
    })
}
