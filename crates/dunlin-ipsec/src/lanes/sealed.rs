//! Implements the traits of `dunlin-lane` for lanes over IPsec.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use dunlin_lane::accept::{Arrival, LaneSocket};
use dunlin_lane::admit::{AdmitError, LaneAcceptor};
use dunlin_lane::data::{DataReceiver, PlainConsent, STALL_LIMIT};
use dunlin_lane::dial::LaneDialer;
use dunlin_lane::peers::PeerIdentity;
use dunlin_lane::security::SealedLanes;
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{Features, LaneSecurity, Opening};
use dunlin_proto::text::harmless;

use super::IpsecLanes;
use super::dialer::IpsecDialer;

impl SealedLanes for IpsecLanes {
    fn dialer(&self) -> Arc<dyn LaneDialer> {
        Arc::new(IpsecDialer::new(self.clone()))
    }

    /// Takes arrivals that are offers of keying sessions; returns any other arrival.
    fn take(&self, arrival: Arrival) -> Option<Arrival> {
        let Arrival::Control { stream, opening } = arrival else {
            return Some(arrival);
        };
        let is_ours =
            matches!(&opening, Opening::Offer(offer) if offer.required.contains(Features::IPSEC));
        if !is_ours {
            return Some(Arrival::Control { stream, opening });
        }
        let from = harmless(&stream.peer().to_string());
        // If the offer cannot be queued, `try_send` drops the connection, which closes it without
        // an answer.
        let offered = |offers: &SyncSender<_>| offers.try_send((stream, opening)).is_ok();
        if !self.0.offers.as_ref().is_some_and(offered) {
            let why = "too many keying sessions requested at once";
            self.0.shared.site.reject(&from, FaultCode::Busy, why);
        }
        None
    }
}

impl LaneAcceptor for IpsecLanes {
    fn admit(
        &self,
        socket: LaneSocket,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
    ) -> Result<DataReceiver, AdmitError> {
        let LaneSocket::Plain(stream) = socket else {
            let agreed = LaneSecurity::Ipsec;
            return Err(AdmitError::OtherSecurity { agreed });
        };
        self.covers(is_peer, &stream)
            .map_err(|error| AdmitError::NotSealed(error.into()))?;
        set_liveness(&stream, &Liveness::default())?;
        let consent = PlainConsent::sealed_below();
        Ok(DataReceiver::plain(stream, consent, STALL_LIMIT)?)
    }
}
