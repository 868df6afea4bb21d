//! The channels of a trunk on this side: their connections, and how each ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use dunlin_proto::fault::FaultCode;

use super::event::Event;
use super::failure::Failure;
use super::site::Site;
use super::socket::Socket;

/// By their numbers in the trunk.
pub(super) struct Channels {
    site: Arc<Site>,
    open: BTreeMap<u32, Channel>,
}

struct Channel {
    socket: Arc<Socket>,
    route: String,
    /// The hypervisor that reads the connection has closed it. The channel is aborted for this
    /// reason if its end does not follow.
    gone: Option<Failure>,
}

impl Channels {
    pub(super) fn new(site: &Arc<Site>) -> Self {
        Self {
            site: Arc::clone(site),
            open: BTreeMap::new(),
        }
    }

    pub(super) fn insert(&mut self, channel: u32, socket: Arc<Socket>, route: String) {
        let one = Channel {
            socket,
            route,
            gone: None,
        };
        self.open.insert(channel, one);
    }

    pub(super) fn socket(&self, channel: u32) -> Option<Arc<Socket>> {
        let one = self.open.get(&channel)?;
        Some(Arc::clone(&one.socket))
    }

    /// The routes of all channels.
    pub(super) fn routes(&self) -> Vec<String> {
        self.open.values().map(|one| one.route.clone()).collect()
    }

    /// The channel's other half is connected.
    pub(super) fn opened(&self, channel: u32) {
        if let Some(one) = self.open.get(&channel) {
            let route = one.route.clone();
            self.site.tell(Event::Opened { route, channel });
        }
    }

    /// The channel found no other half.
    pub(super) fn refused(&mut self, channel: u32, failure: Failure) {
        self.end(channel, |socket, route| {
            socket.fail(&failure);
            Event::Refused { route, failure }
        });
    }

    /// The consumer has closed the connection; the channel's end may follow.
    pub(super) fn consumer_gone(&mut self, channel: u32, failure: Failure) {
        if let Some(one) = self.open.get_mut(&channel) {
            one.gone.get_or_insert(failure);
        }
    }

    /// Both directions have ended in order.
    pub(super) fn closed(&mut self, channel: u32) {
        self.end(channel, |socket, route| {
            socket.ended_well();
            Event::Closed { route, channel }
        });
    }

    /// The channel has ended, except for a few bytes before the end that its consumer did not
    /// read.
    pub(super) fn left_unread(&mut self, channel: u32, by_peer: bool) {
        self.end(channel, |socket, route| {
            socket.left_unread();
            Event::LeftUnread {
                route,
                channel,
                by_peer,
            }
        });
    }

    /// The channel is aborted on this side.
    pub(super) fn aborted(&mut self, channel: u32, failure: Failure) {
        self.end(channel, |socket, route| {
            socket.fail(&failure);
            Event::Aborted {
                route,
                channel,
                failure,
            }
        });
    }

    /// Removes a channel and reports how `close` has ended its connection.
    fn end(&mut self, channel: u32, close: impl FnOnce(&Socket, String) -> Event) {
        if let Some(one) = self.open.remove(&channel) {
            self.site.tell(close(&one.socket, one.route));
        }
    }

    /// One of the two tunnels has given the channel up.
    pub(super) fn given_up(&mut self, channel: u32, fault: FaultCode, by_peer: bool) {
        let Some(one) = self.open.get_mut(&channel) else {
            return;
        };
        let mut fault = fault;
        if fault == FaultCode::LeftUnread {
            // A hypervisor that has only ended its own direction waits for an answer.
            if !by_peer || one.socket.is_gone() {
                return self.left_unread(channel, by_peer);
            }
            fault = FaultCode::ChannelBroken;
        }
        let failure = match one.gone.take() {
            _ if by_peer => Failure::of_peer(fault, "the peer's tunnel gave the channel up"),
            Some(failure) if fault == failure.code() => failure,
            _ => Failure::new(fault, "this tunnel gave the channel up"),
        };
        self.aborted(channel, failure);
    }
}
