//! The channels of a trunk on this side: the connection of each channel, and how the channel ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use dunlin_proto::fault::FaultCode;

use super::event::{ChannelId, Event};
use super::failure::Failure;
use super::site::Site;
use super::socket::Socket;

/// Channels by their numbers in the trunk.
pub(super) struct Channels {
    site: Arc<Site>,
    /// The peer's name.
    peer: String,
    open: BTreeMap<u32, Channel>,
}

struct Channel {
    socket: Arc<Socket>,
    route: String,
    consumer: Consumer,
}

enum Consumer {
    Connected,
    /// The consumer has closed the connection. If this side then aborts the channel with the fault
    /// code of this failure, the tunnel reports this failure.
    Gone(Failure),
}

impl Channels {
    pub(super) fn new(site: &Arc<Site>, peer: String) -> Self {
        Self {
            site: Arc::clone(site),
            peer,
            open: BTreeMap::new(),
        }
    }

    pub(super) fn insert(&mut self, channel: u32, socket: Arc<Socket>, route: String) {
        let one = Channel {
            socket,
            route,
            consumer: Consumer::Connected,
        };
        self.open.insert(channel, one);
    }

    pub(super) fn socket(&self, channel: u32) -> Option<Arc<Socket>> {
        let one = self.open.get(&channel)?;
        Some(Arc::clone(&one.socket))
    }

    /// The route of each channel.
    pub(super) fn routes(&self) -> Vec<String> {
        self.open.values().map(|one| one.route.clone()).collect()
    }

    /// Reports that the other end of a channel is connected.
    pub(super) fn opened(&self, channel: u32) {
        if let Some(one) = self.open.get(&channel) {
            let id = self.id(channel, one.route.clone());
            self.site.report(Event::Opened(id));
        }
    }

    /// Ends a channel after its other end could not be connected.
    pub(super) fn refused(&mut self, channel: u32, failure: Failure) {
        self.end(channel, |socket, ChannelId { route, .. }| {
            socket.fail(&failure);
            Event::Refused { route, failure }
        });
    }

    /// Notes that the consumer has closed the connection. The channel may still end cleanly.
    pub(super) fn consumer_gone(&mut self, channel: u32, failure: Failure) {
        if let Some(one) = self.open.get_mut(&channel)
            && let Consumer::Connected = one.consumer
        {
            one.consumer = Consumer::Gone(failure);
        }
    }

    /// Ends a channel after both directions have ended cleanly.
    pub(super) fn closed(&mut self, channel: u32) {
        self.end(channel, |socket, id| {
            socket.ended_well();
            Event::Closed(id)
        });
    }

    /// Ends a channel after the consumer on this side, or on the peer's side, left the last few
    /// bytes of one direction unread.
    pub(super) fn left_unread(&mut self, channel: u32, by_peer: bool) {
        self.end(channel, |socket, id| {
            socket.left_unread();
            Event::LeftUnread { id, by_peer }
        });
    }

    /// Aborts a channel on this side.
    pub(super) fn aborted(&mut self, channel: u32, failure: Failure) {
        self.end(channel, |socket, id| {
            socket.fail(&failure);
            Event::Aborted { id, failure }
        });
    }

    fn id(&self, channel: u32, route: String) -> ChannelId {
        let peer = self.peer.clone();
        ChannelId {
            route,
            channel,
            peer,
        }
    }

    /// Removes a channel and reports the event that `close` returns.
    fn end(&mut self, channel: u32, close: impl FnOnce(&Socket, ChannelId) -> Event) {
        if let Some(one) = self.open.remove(&channel) {
            let id = self.id(channel, one.route);
            self.site.report(close(&one.socket, id));
        }
    }

    /// Handles a channel that the core of this side, or the peer's tunnel, has aborted.
    pub(super) fn given_up(&mut self, channel: u32, fault: FaultCode, by_peer: bool) {
        let Some(one) = self.open.get(&channel) else {
            return;
        };
        let mut fault = fault;
        if fault == FaultCode::LeftUnread {
            // A hypervisor that has shut down only its own direction still waits for an answer, so
            // unread bytes break its channel.
            if !by_peer || one.socket.is_gone() {
                return self.left_unread(channel, by_peer);
            }
            fault = FaultCode::ChannelBroken;
        }
        let failure = match &one.consumer {
            _ if by_peer => Failure::of_peer(fault, "the peer's tunnel aborted the channel"),
            Consumer::Gone(failure) if fault == failure.code() => failure.clone(),
            _ => Failure::new(fault, "this tunnel aborted the channel"),
        };
        self.aborted(channel, failure);
    }
}
