//! The identities of a tunnel.

use std::sync::Arc;

use dunlin_lane::identity::{Identity, SettingsError};
use dunlin_lane::peers::Peers;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::provider::Crypto;

use crate::options::{Entrance, Mode, Routes};

/// The identities of a host. A tunnel that only connects, or only accepts, may have the same
/// identity for both roles ([`Identities::connects`], [`Identities::accepts`]).
#[derive(Clone)]
pub struct Identities {
    /// The identity for connections that the tunnel dials.
    pub connecting: Arc<Identity>,
    /// The identity for connections that the tunnel accepts.
    pub accepting: Arc<Identity>,
    /// The TLS parameters to offer and accept.
    pub crypto: Crypto,
}

impl Identities {
    /// Whether a tunnel with these routes connects to peers. If not, it connects only for lanes of
    /// trunks that peers have dialled: lanes in wire version 1, and lanes over IPsec.
    #[must_use]
    pub fn connects(routes: &Routes) -> bool {
        !routes.entrances.is_empty()
    }

    /// Whether a tunnel with these routes accepts peers. If not, it accepts only lanes of trunks
    /// that it has dialled: lanes in wire version 1, and lanes over IPsec.
    #[must_use]
    pub fn accepts(routes: &Routes) -> bool {
        !routes.exits.is_empty() || !routes.relays.is_empty()
    }

    pub(crate) fn client(&self, peers: Peers) -> Result<ClientTls, SettingsError> {
        self.connecting.client(&self.crypto, peers)
    }

    /// Returns TLS settings that admit the peers of all routes that use a trunk.
    /// [`Exit::allow`](crate::Exit::allow) is checked later, when a channel is opened.
    pub(crate) fn server(&self, routes: &Routes) -> Result<ServerTls, SettingsError> {
        let is_stripe = |one: &&Entrance| !matches!(one.mode, Mode::Relay(_));
        let entrances = routes.entrances.iter().filter(is_stripe);
        let entrances = entrances.map(|one| &one.peers);
        let exits = routes.exits.iter().map(|one| &one.allow);
        let named = entrances.chain(exits).flat_map(|peers| match peers {
            Peers::OneOf(peers) => &peers[..],
            // This case is impossible, because [`Routes`] requires that a route names its peers.
            Peers::AnyFromAuthority => &[],
        });
        let mut all = Vec::new();
        for peer in named {
            if !all.contains(peer) {
                all.push(peer.clone());
            }
        }
        self.accepting.server(&self.crypto, Peers::OneOf(all))
    }
}
