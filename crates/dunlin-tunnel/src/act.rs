//! What the core of a trunk has decided is done here: none of it waits, and what may wait gets a
//! thread.

use std::sync::Arc;

use dunlin_lane::accept::LaneSocket;
use dunlin_linux::socket::unread_bytes;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::stripe::Action;

use super::event::Event;
use super::failure::Failure;
use super::hub::{Core, Hub, Way};
use super::{receive, send, target};

impl Hub {
    pub(super) fn act(self: &Arc<Self>, core: &mut Core, action: Action, now_ns: u64) {
        match action {
            Action::Connect {
                channel,
                route,
                parameter,
            } => {
                let mut refuse = |code, text: &str| {
                    core.trunk.refuse(channel, code, text.to_owned(), now_ns);
                };
                if core.connecting >= self.site.limits.channels {
                    let text = "too many connections to targets are being made";
                    return refuse(FaultCode::Busy, text);
                }
                let hub = Arc::clone(self);
                let body = move || target::connect(&hub, channel, &route, &parameter);
                if self.spawn(format!("dunlin-target-{channel}"), body) {
                    core.connecting += 1;
                } else {
                    refuse(FaultCode::TargetUnreachable, "cannot start a thread");
                }
            }
            Action::Count(channel) => {
                if let Some(one) = core.channels.get(&channel) {
                    // A socket that cannot tell has failed, and has nothing.
                    let unread = unread_bytes(&*one.socket).unwrap_or(0);
                    core.trunk.counted(channel, unread);
                }
            }
            Action::Opened(channel) => self.watch(core, channel, now_ns),
            Action::Refused {
                channel,
                fault,
                text,
            } => {
                if let Some(one) = core.channels.remove(&channel) {
                    let failure = Failure::told(fault, &text);
                    one.socket.fail(&failure);
                    let route = one.route;
                    self.site.tell(Event::Refused { route, failure });
                }
            }
            Action::ShutWrite(channel) => {
                if let Some(one) = core.channels.get(&channel) {
                    one.socket.end();
                }
            }
            Action::Close(channel) => {
                if let Some(one) = core.channels.remove(&channel) {
                    one.socket.ended_well();
                    let route = one.route;
                    self.site.tell(Event::Closed { route, channel });
                }
            }
            Action::Abort {
                channel,
                fault,
                by_peer,
            } => {
                let Some(one) = core.channels.get_mut(&channel) else {
                    return;
                };
                let mut fault = fault;
                if fault == FaultCode::LeftUnread {
                    // A hypervisor that has only ended its own direction waits for an answer.
                    if !by_peer || one.socket.is_gone() {
                        return self.close_unread(core, channel, by_peer);
                    }
                    fault = FaultCode::ChannelBroken;
                }
                let failure = match one.left.take() {
                    _ if by_peer => Failure::told(fault, "the peer's tunnel gave the channel up"),
                    Some(failure) if fault == failure.code() => failure,
                    _ => Failure::new(fault, "this tunnel gave the channel up"),
                };
                self.close_badly(core, channel, failure);
            }
            Action::OpenLane(lane) => {
                let hub = Arc::clone(self);
                let opened =
                    self.spawn(format!("dunlin-lane-{lane}"), move || send::run(&hub, lane));
                if !opened {
                    core.trunk.lane_over(lane, now_ns);
                }
            }
            Action::CutLane(lane) => {
                if let Some(dial) = core.dials.remove(&lane) {
                    dial.cancel();
                }
                if let Some(cut) = core.cutters.remove(&(Way::Out, lane)) {
                    cut();
                }
                self.wake_all_lanes();
            }
            Action::LaneRefused { lane, fault, text } => {
                let why = Failure::told(fault, &text).to_string();
                self.site.tell(Event::LaneLost { lane, why });
            }
            Action::GiveUp(fault) => {
                core.over = Some(fault);
                for dial in std::mem::take(&mut core.dials).into_values() {
                    dial.cancel();
                }
                for cut in std::mem::take(&mut core.cutters).into_values() {
                    cut();
                }
                self.wake_all_lanes();
                self.write_waker.wake();
            }
        }
    }

    /// A lane of the peer that has proved itself.
    pub(super) fn take_lane(self: &Arc<Self>, lane: u16, socket: LaneSocket) {
        let hub = Arc::clone(self);
        let started = self.spawn(format!("dunlin-lane-in-{lane}"), move || {
            receive::run(&hub, lane, socket);
        });
        if !started {
            let mut core = self.lock();
            core.trunk.admitted_over(lane);
            self.settle(&mut core);
        }
    }
}
