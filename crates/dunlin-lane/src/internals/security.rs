//! Picks the dialer and the acceptor for the lane security that both sides of a session selected.

use std::fmt;
use std::sync::Arc;

use dunlin_proto::negotiate::LaneSecurity;
use thiserror::Error;

use super::accept::Arrival;
use super::admit::{LaneAcceptor, PlainAcceptor, TlsAcceptor};
use super::data::PlainConsent;
use super::dial::{LaneDialer, PlainDialer, TlsDialer};

/// Opens and accepts the lanes of this process that a layer below TCP (IPsec) protects.
pub trait SealedLanes: LaneAcceptor + fmt::Debug {
    /// Returns a dialer for the lanes of one session. Dropping the dialer removes what it has set
    /// up for the session; the drop may block until the connections of its lanes have closed.
    fn dialer(&self) -> Arc<dyn LaneDialer>;

    /// Consumes `arrival` if it is a connection that negotiates the protection of these lanes.
    /// Returns every other arrival.
    fn take(&self, arrival: Arrival) -> Option<Arrival>;
}

/// Why this process has no lanes with the selected security.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// IPsec is selected, but this process has no [`SealedLanes`].
    #[error("IPsec lanes are selected, but this process was not set up for them")]
    NoIpsec,
    /// Plain lanes are selected, but this side does not allow them (invariant I6).
    #[error("this side does not allow plain lanes")]
    PlainNotAllowed,
}

/// Returns a dialer for lanes with the selected security.
///
/// # Errors
/// [`Unavailable::NoIpsec`].
pub fn dialer(
    selected: LaneSecurity,
    sealed: Option<&Arc<dyn SealedLanes>>,
) -> Result<Arc<dyn LaneDialer>, Unavailable> {
    match selected {
        LaneSecurity::Tls => Ok(Arc::new(TlsDialer)),
        // The selection has been checked against the offer, so both sides have consented.
        LaneSecurity::Plain => Ok(Arc::new(PlainDialer::new(consent(true)?))),
        LaneSecurity::Ipsec => Ok(sealed.ok_or(Unavailable::NoIpsec)?.dialer()),
    }
}

/// Returns an acceptor for lanes with the selected security.
///
/// # Errors
/// [`Unavailable::NoIpsec`]; [`Unavailable::PlainNotAllowed`] for plain lanes if `allow_plain` is
/// false.
pub fn acceptor(
    selected: LaneSecurity,
    allow_plain: bool,
    sealed: Option<&Arc<dyn SealedLanes>>,
) -> Result<Arc<dyn LaneAcceptor>, Unavailable> {
    match selected {
        LaneSecurity::Tls => Ok(Arc::new(TlsAcceptor)),
        LaneSecurity::Plain => Ok(Arc::new(PlainAcceptor::new(consent(allow_plain)?))),
        LaneSecurity::Ipsec => {
            let lanes = Arc::clone(sealed.ok_or(Unavailable::NoIpsec)?);
            Ok(lanes)
        }
    }
}

/// Returns the consent of both hosts if `ours` is true. The peer has consented, because it offered
/// or confirmed plain lanes.
fn consent(ours: bool) -> Result<PlainConsent, Unavailable> {
    PlainConsent::both(ours, true).ok_or(Unavailable::PlainNotAllowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipsec_lanes_have_no_dialer_without_sealed_lanes() {
        let none = dialer(LaneSecurity::Ipsec, None).err();
        assert_eq!(none, Some(Unavailable::NoIpsec));
        assert!(dialer(LaneSecurity::Tls, None).is_ok());
    }

    #[test]
    fn i6_no_acceptor_for_ipsec_without_sealed_lanes_or_for_plain_without_consent() {
        let reason = |security, allow_plain| acceptor(security, allow_plain, None).err();
        let (no_ipsec, not_allowed) = (Unavailable::NoIpsec, Unavailable::PlainNotAllowed);
        assert_eq!(reason(LaneSecurity::Ipsec, true), Some(no_ipsec));
        assert_eq!(reason(LaneSecurity::Plain, false), Some(not_allowed));
        assert_eq!(reason(LaneSecurity::Plain, true), None);
        assert_eq!(reason(LaneSecurity::Tls, false), None);
    }
}
