//! Dialers and acceptors for the security that both sides of a session have selected.

use std::fmt;
use std::sync::Arc;

use dunlin_proto::negotiate::LaneSecurity;

use super::accept::{Arrival, LaneSocket};
use super::admit::{AdmitError, LaneAcceptor, PlainAcceptor, TlsAcceptor};
use super::data::{DataReceiver, PlainConsent};
use super::dial::{LaneDialer, PlainDialer, TlsDialer};
use super::peers::PeerIdentity;

/// Lanes that something below TCP seals (IPsec), as this process opens and accepts them.
pub trait SealedLanes: LaneAcceptor + fmt::Debug {
    /// A dialer for the lanes of one session. When it is dropped, what it has set up is taken
    /// down; that may wait until its lanes' connections have ended.
    fn dialer(&self) -> Arc<dyn LaneDialer>;

    /// Takes a connection that sets up such lanes out of what arrives at the lanes' listener, and
    /// gives back everything else.
    fn take(&self, arrival: Arrival) -> Option<Arrival>;
}

/// A dialer for lanes of the security that both sides have selected, or `None` where it is IPsec
/// and this process has no [`SealedLanes`].
pub fn dialer(
    selected: LaneSecurity,
    sealed: Option<&Arc<dyn SealedLanes>>,
) -> Option<Arc<dyn LaneDialer>> {
    match selected {
        LaneSecurity::Tls => Some(Arc::new(TlsDialer)),
        // A selection is confirmed against the offer, so both sides have consented.
        LaneSecurity::Plain => {
            let consent = PlainConsent::both(true, true)?;
            Some(Arc::new(PlainDialer::new(consent)))
        }
        LaneSecurity::Ipsec => sealed.map(|lanes| lanes.dialer()),
    }
}

/// Admits a lane of the security that both sides have selected. `allow_plain` is this side's
/// consent to lanes in the clear.
pub fn admit(
    selected: LaneSecurity,
    allow_plain: bool,
    sealed: Option<&Arc<dyn SealedLanes>>,
    socket: LaneSocket,
    is_peer: &dyn Fn(&PeerIdentity) -> bool,
) -> Result<DataReceiver, AdmitError> {
    let agreed = selected;
    match selected {
        LaneSecurity::Tls => TlsAcceptor.admit(socket, is_peer),
        LaneSecurity::Plain => match PlainConsent::both(allow_plain, true) {
            Some(consent) => PlainAcceptor::new(consent).admit(socket, is_peer),
            None => Err(AdmitError::OtherSecurity { agreed }),
        },
        LaneSecurity::Ipsec => match sealed {
            Some(lanes) => lanes.admit(socket, is_peer),
            None => Err(AdmitError::NotSealed(
                "this side is not prepared for lanes over IPsec".into(),
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipsec_lanes_have_no_dialer_where_nothing_seals_them() {
        assert!(dialer(LaneSecurity::Ipsec, None).is_none());
        assert!(dialer(LaneSecurity::Tls, None).is_some());
    }
}
