//! The identities of a tunnel.

use std::sync::Arc;

use dunlin_lane::identity::{Identity, SettingsError};
use dunlin_lane::peers::Peers;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::provider::Crypto;

use crate::options::{Entrance, Routes};

/// Who a host is. A tunnel both connects and accepts, and lanes are made by both
/// sides: it needs a certificate for each.
#[derive(Clone)]
pub struct Identities {
    /// For what it connects.
    pub connecting: Arc<Identity>,
    /// For what it accepts.
    pub accepting: Arc<Identity>,
    /// What is offered and chosen.
    pub crypto: Crypto,
}

impl Identities {
    pub(crate) fn client(&self, peers: Peers) -> Result<ClientTls, SettingsError> {
        self.connecting.client(&self.crypto, peers)
    }

    /// Accepts the peers of all routes; each channel's route is checked when it is opened.
    pub(crate) fn server(&self, routes: &Routes) -> Result<ServerTls, SettingsError> {
        let is_stripe = |one: &&Entrance| one.mode.security().is_some();
        let entrances = routes.entrances.iter().filter(is_stripe);
        let entrances = entrances.map(|one| &one.peers);
        let exits = routes.exits.iter().map(|one| &one.allow);
        let named = entrances.chain(exits).flat_map(|peers| match peers {
            Peers::OneOf(peers) => &peers[..],
            // Routes name their peers.
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
