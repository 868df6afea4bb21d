//! Picks the dialer and the acceptor for the lane security that both sides of a session selected.

use std::fmt;
use std::sync::Arc;

use dunlin_proto::negotiate::LaneSecurity;

use super::accept::Arrival;
use super::admit::{LaneAcceptor, PlainAcceptor, TlsAcceptor};
use super::data::PlainConsent;
use super::dial::{LaneDialer, PlainDialer, TlsDialer};

/// Lanes that a layer below TCP protects (IPsec), as this process opens and accepts them.
pub trait SealedLanes: LaneAcceptor + fmt::Debug {
    /// Returns a dialer for the lanes of one session. Dropping the dialer tears down its setup; the
    /// drop may block until the connections of its lanes have closed.
    fn dialer(&self) -> Arc<dyn LaneDialer>;

    /// Consumes `arrival` if it is a connection that negotiates the protection of such lanes;
    /// returns every other connection that arrives at the lane listener.
    fn take(&self, arrival: Arrival) -> Option<Arrival>;
}

/// Returns a dialer for lanes with the selected security. `None` if that is IPsec and this process
/// has no [`SealedLanes`].
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

/// Returns an acceptor for lanes with the selected security. `None` if that is IPsec and this
/// process has no [`SealedLanes`], or if it is plain and `allow_plain` is false.
pub fn acceptor(
    selected: LaneSecurity,
    allow_plain: bool,
    sealed: Option<&Arc<dyn SealedLanes>>,
) -> Option<Arc<dyn LaneAcceptor>> {
    match selected {
        LaneSecurity::Tls => Some(Arc::new(TlsAcceptor)),
        LaneSecurity::Plain => {
            let consent = PlainConsent::both(allow_plain, true)?;
            Some(Arc::new(PlainAcceptor::new(consent)))
        }
        LaneSecurity::Ipsec => Some(Arc::clone(sealed?) as Arc<dyn LaneAcceptor>),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipsec_lanes_have_no_dialer_without_sealed_lanes() {
        assert!(dialer(LaneSecurity::Ipsec, None).is_none());
        assert!(dialer(LaneSecurity::Tls, None).is_some());
    }

    #[test]
    fn i6_no_acceptor_for_ipsec_without_sealed_lanes_or_for_plain_without_consent() {
        assert!(acceptor(LaneSecurity::Ipsec, true, None).is_none());
        assert!(acceptor(LaneSecurity::Plain, false, None).is_none());
        assert!(acceptor(LaneSecurity::Plain, true, None).is_some());
        assert!(acceptor(LaneSecurity::Tls, false, None).is_some());
    }
}
