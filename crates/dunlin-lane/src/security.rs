//! Dialers and acceptors for the security that both sides of a session have selected.

use std::fmt;
use std::sync::Arc;

use dunlin_proto::negotiate::LaneSecurity;

use super::accept::Arrival;
use super::admit::{LaneAcceptor, PlainAcceptor, TlsAcceptor};
use super::data::PlainConsent;
use super::dial::{LaneDialer, PlainDialer, TlsDialer};

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

/// An acceptor for lanes of the security that both sides have selected, or `None` where it is IPsec
/// and this process has no [`SealedLanes`], or plain and this side does not `allow_plain`.
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
    fn ipsec_lanes_have_no_dialer_where_nothing_seals_them() {
        assert!(dialer(LaneSecurity::Ipsec, None).is_none());
        assert!(dialer(LaneSecurity::Tls, None).is_some());
    }

    #[test]
    fn i6_ipsec_and_plain_lanes_have_no_acceptor_without_what_they_need() {
        assert!(acceptor(LaneSecurity::Ipsec, true, None).is_none());
        assert!(acceptor(LaneSecurity::Plain, false, None).is_none());
        assert!(acceptor(LaneSecurity::Plain, true, None).is_some());
        assert!(acceptor(LaneSecurity::Tls, false, None).is_some());
    }
}
