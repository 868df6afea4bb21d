//! What carries an accepted connection to the peer: a trunk's channel or a relay.

use std::sync::Arc;

use super::options::Entrance;
use super::relay::Relays;
use super::site::Site;
use super::socket::Socket;
use super::trunks::Trunks;

/// Clones are the same ones.
#[derive(Clone)]
pub(super) struct Carriers {
    pub(super) site: Arc<Site>,
    pub(super) trunks: Arc<Trunks>,
    pub(super) relays: Arc<Relays>,
}

impl Carriers {
    /// Carries a connection as the mode of its entrance says. The connections of one listener
    /// come here in the order in which they were accepted.
    pub(super) fn carry(
        &self,
        entrance: &Entrance,
        listener: u64,
        parameter: String,
        socket: Socket,
    ) {
        match entrance.mode.security() {
            Some(security) => {
                self.trunks
                    .carry(entrance, security, listener, parameter, socket);
            }
            None => self.relays.carry(entrance, listener, &parameter, socket),
        }
    }

    /// Connections that are carried, or are about to be.
    pub(super) fn channels(&self) -> usize {
        self.trunks.channels() + self.relays.channels()
    }
}
