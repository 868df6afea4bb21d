//! Assigns each accepted connection to a trunk or a relay, which carries it to the peer.

use std::sync::Arc;

use dunlin_proto::negotiate::LaneSecurity;

use super::failure::Failure;
use super::hub::Hub;
use super::options::{Entrance, Mode};
use super::relay::Relays;
use super::route::Destination;
use super::site::Site;
use super::socket::Socket;
use super::trunks::Trunks;

/// Clones share the trunks and relays.
#[derive(Clone)]
pub(super) struct Carriers {
    pub(super) site: Arc<Site>,
    pub(super) trunks: Arc<Trunks>,
    pub(super) relays: Arc<Relays>,
}

impl Carriers {
    /// Carries a connection in the mode of its entrance. Callers pass the connections of one
    /// listener in the order of acceptance.
    pub(super) fn carry(
        &self,
        entrance: &Entrance,
        listener: u64,
        parameter: String,
        socket: Socket,
    ) {
        let security = match entrance.mode {
            Mode::Stripe => LaneSecurity::Tls,
            Mode::StripeOverIpsec => LaneSecurity::Ipsec,
            Mode::Relay(_) | Mode::RelayAt(_) => {
                return self.relays.carry(entrance, listener, &parameter, socket);
            }
        };
        self.trunks
            .carry(entrance, security, listener, parameter, socket);
    }

    /// Returns the trunk that leads to the peer of a redirected entrance, or dials one if there is
    /// none. For a relay, also tests whether the relay's port can be reached.
    ///
    /// # Errors
    /// The peer does not answer or refuses, the trunk has lost its control lane, or the relay's
    /// port cannot be reached; `Busy` if the trunk is being dialled.
    pub(super) fn keep_up(&self, entrance: &Entrance) -> Result<Arc<Hub>, Failure> {
        let security = match entrance.mode {
            Mode::StripeOverIpsec => LaneSecurity::Ipsec,
            _ => LaneSecurity::Tls,
        };
        let hub = self.trunks.keep_up(Destination {
            to: entrance.to.clone(),
            peers: entrance.peers.clone(),
            security,
        })?;
        if let Mode::RelayAt(_) = entrance.mode {
            self.relays.test(entrance)?;
        }
        Ok(hub)
    }

    /// The number of connections that trunks and relays carry, or that wait for them.
    pub(super) fn channels(&self) -> usize {
        self.trunks.channels() + self.relays.channels()
    }
}
