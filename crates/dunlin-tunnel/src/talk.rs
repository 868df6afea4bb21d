//! The control lane of a trunk: one thread says what there is to say and
//! keeps the time, one reads; and a lane that is lost is made anew.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use dunlin_proto::fault::FaultCode;
use dunlin_proto::stripe::message::{Header, MESSAGE_HEADER_BYTES, Message};
use zeroize::Zeroize;

use super::dial;
use super::event::Event;
use super::failure::Failure;
use super::hub::{Core, Hub};
use super::{receive, send};
use dunlin_lane::control::{ControlError, ControlStream};

/// Messages are gathered up to this for one write.
const BATCH_BYTES: usize = 32 * 1024;
/// The peer is asked whether it is there after this part of the time that it may be silent.
const ASK_PART: u32 = 5;
/// A trunk that carries nothing is kept for so long by the side that made it: longer than
/// its lanes are kept, so that the next migration finds it warm.
const IDLE: Duration = Duration::from_secs(60);
/// Between attempts to make a control lane anew.
const REDIAL: Duration = Duration::from_millis(200);

/// The trunk's own thread: starts the others, and joins them when it is over.
pub(super) fn run(hub: &Arc<Hub>) {
    let (poller, reader) = (Arc::clone(hub), Arc::clone(hub));
    let control = hub.lock().control.clone();
    let started = hub.spawn("dunlin-poller".to_owned(), move || receive::poll(&poller))
        && control.is_some_and(|control| {
            hub.spawn("dunlin-control".to_owned(), move || {
                read(&reader, &control, 1);
            })
        });
    if !started {
        hub.end(FaultCode::Kernel);
    }
    let fault = talk(hub);
    let control = hub.lock().control.take();
    if let Some(control) = control {
        // The peer hears that nothing more comes; it may be gone.
        let _ = control.close();
        control.shutdown();
    }
    hub.join();
    hub.leave_dialer();
    hub.site.forget(hub, fault);
}

/// Says what there is to say until the trunk is over.
fn talk(hub: &Arc<Hub>) -> FaultCode {
    let mut batch = Vec::new();
    let mut ready = Vec::new();
    let mut idle_since = Instant::now();
    loop {
        let mut core = hub.lock();
        core.talker_waits = false;
        if core.senders == 0 {
            // Nobody else looks, and what waits for a lane must be known.
            ready.clear();
            let _ = hub.reads.wait(&mut ready, Some(Duration::ZERO));
            send::take_ready(hub, &mut core, &ready);
        }
        let mine = hub.terms.redial.is_some();
        if core.trunk.channels() > 0 {
            idle_since = Instant::now();
        } else if mine && idle_since.elapsed() >= IDLE {
            core.trunk.end(FaultCode::Ended);
        }
        if (mine || hub.site.is_draining()) && core.trunk.drained() {
            core.trunk.end(FaultCode::Ended);
        }
        hub.settle(&mut core);
        if !take_messages(hub, &mut core, &mut batch) {
            return FaultCode::Internal;
        }
        // Behind all that may have ended it: nothing wakes this thread again.
        if let Some(fault) = core.over {
            return fault;
        }
        if !batch.is_empty() {
            let (control, epoch) = (core.control.clone(), core.epoch);
            drop(core);
            let sent = control.map_or(Ok(()), |control| control.send(&batch));
            if let Err(error) = sent {
                lost(hub, epoch, &error);
            }
            continue;
        }
        let due_ns = core.trunk.due_ns();
        let due = due_ns.map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(hub.now_ns())));
        let cold =
            (mine && core.trunk.channels() == 0).then(|| IDLE.saturating_sub(idle_since.elapsed()));
        let wait = due.into_iter().chain(cold).min();
        core.talker_waits = true;
        core.talk_by_ns = due_ns;
        match wait {
            Some(wait) => {
                let waited = hub.talk.wait_timeout(core, wait);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            }
            None => drop(hub.talk.wait(core).unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

/// Encodes what there is to say. False where it cannot be.
fn take_messages(hub: &Arc<Hub>, core: &mut Core, batch: &mut Vec<u8>) -> bool {
    batch.clear();
    while batch.len() < BATCH_BYTES {
        let Some(message) = core.trunk.next_message(hub.now_ns()) else {
            break;
        };
        if let Err(error) = message.encode(core.epoch, batch) {
            let text = format!("{} cannot be sent: {error}", message.kind());
            hub.site.tell(Event::Warning(text));
            core.trunk.end(FaultCode::Internal);
            hub.settle(core);
            return false;
        }
    }
    // Saying the last of a channel ends it.
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
                if core.epoch != epoch {
                    return;
                }
                match core.trunk.handle(message, hub.now_ns()) {
                    Ok(()) => hub.settle(&mut core),
                    Err(fault) => return hub.broken(&mut core, &fault),
                }
            }
            Ok(None) => {}
            Err(Broken::Lane(error)) => return lost(hub, epoch, &error),
            Err(Broken::Words(error)) => {
                let mut core = hub.lock();
                return hub.broken(&mut core, &error);
            }
        }
    }
}

enum Broken {
    Lane(ControlError),
    Words(dunlin_proto::wire::DecodeError),
}

impl From<ControlError> for Broken {
    fn from(error: ControlError) -> Self {
        Self::Lane(error)
    }
}

impl From<dunlin_proto::wire::DecodeError> for Broken {
    fn from(error: dunlin_proto::wire::DecodeError) -> Self {
        Self::Words(error)
    }
}

/// The next message; `None` for one that may be skipped.
fn read_one(
    hub: &Hub,
    control: &ControlStream,
    epoch: u32,
    body: &mut Vec<u8>,
) -> Result<Option<Message>, Broken> {
    let silence = hub.site.limits.silence();
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    let silent_at = Instant::now() + silence;
    loop {
        let until = silent_at.min(Instant::now() + silence / ASK_PART);
        match control.receive_exact(&mut bytes, until) {
            Ok(()) => break,
            Err(ControlError::Deadline) if Instant::now() < silent_at => {
                // The core takes the answer for one to nothing, and it is: that it
                // comes is all that counts.
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
    control.receive_exact(body, Instant::now() + silence)?;
    let message = Message::decode(&header, body);
    body.zeroize();
    Ok(message?)
}

/// The control lane of this epoch is over.
fn lost(hub: &Arc<Hub>, epoch: u32, error: &ControlError) {
    let mut core = hub.lock();
    if core.epoch != epoch || core.over.is_some() {
        return;
    }
    let Some(control) = core.control.take() else {
        return;
    };
    control.shutdown();
    if matches!(error, ControlError::Closed) {
        // It says that it has ended.
        core.trunk.end(FaultCode::Ended);
        return hub.settle(&mut core);
    }
    core.trunk.control_down(hub.now_ns());
    hub.settle(&mut core);
    drop(core);
    let peer = hub.peer_name();
    let failure = Failure::of_control(error);
    hub.site.tell(Event::ControlLost { peer, failure });
    if hub.terms.redial.is_some() {
        let again = Arc::clone(hub);
        hub.spawn("dunlin-redial".to_owned(), move || redial(&again, epoch));
    }
}

/// Makes the control lane anew until it stands or nothing is left to make it for.
fn redial(hub: &Arc<Hub>, epoch: u32) {
    let mut next = epoch;
    loop {
        if hub.lock().over.is_some() {
            return;
        }
        next = next.saturating_add(1);
        match dial::resume(hub, next) {
            Ok(control) => {
                up(hub, control, next);
                return;
            }
            Err(failure) if failure.code() == FaultCode::UnknownSession => {
                // Another process than before answers.
                return hub.end(FaultCode::UnknownSession);
            }
            // The core gives up when it has waited long enough.
            Err(_) => std::thread::sleep(REDIAL),
        }
    }
}

/// A control lane of a higher epoch stands. False where it comes too late.
pub(super) fn up(hub: &Arc<Hub>, control: ControlStream, epoch: u32) -> bool {
    let mut core = hub.lock();
    if core.over.is_some() || epoch <= core.epoch {
        return false;
    }
    let control = Arc::new(control);
    if let Some(old) = core.control.replace(Arc::clone(&control)) {
        old.shutdown();
    }
    core.epoch = epoch;
    core.trunk.control_up(hub.now_ns());
    let reader = Arc::clone(hub);
    let started = hub.spawn("dunlin-control".to_owned(), move || {
        read(&reader, &control, epoch);
    });
    if !started {
        core.trunk.end(FaultCode::Kernel);
    }
    hub.settle(&mut core);
    drop(core);
    let peer = hub.peer_name();
    hub.site.tell(Event::ControlResumed { peer });
    true
}
