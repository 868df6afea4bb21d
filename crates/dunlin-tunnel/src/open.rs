//! How this side opens lanes: those on which it sends, and those on which the peer sends if this
//! side opens the lanes of both directions.

use std::time::{Duration, Instant};

use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{LaneDirection, LaneOpen};

use super::failure::{Failure, OrFailure};
use super::hub::{Direction, Hub};
use dunlin_lane::data::DataSender;
use dunlin_lane::dial::{DialCancel, LaneDialer, LaneRequest};
use dunlin_lane::fault::fault_behind;

/// The time limit for opening a lane, as a fraction of the time after which either side gives the
/// lane up. With a shorter limit, both sides learn the reason of the failure before that.
const PART: (u32, u32) = (3, 4);

/// Dials a lane and sends its proof. The end of the trunk cancels every step that waits.
///
/// # Errors
/// The trunk has ended, or the lane cannot be opened. In the second case, the failure's text names
/// the address and the reason.
pub(super) fn dial(
    hub: &Hub,
    direction: Direction,
    lane: u16,
    dialer: &dyn LaneDialer,
) -> Result<DataSender, Failure> {
    let terms = &hub.terms;
    let at = terms.lanes_at.to_string();
    let what = "cannot create a socket pair";
    let cancel = DialCancel::new().or_failure(FaultCode::LaneLost, what)?;
    {
        let mut core = hub.lock();
        if core.control.is_over() {
            return Err(lost(format!("lane {lane} not opened: its trunk has ended")));
        }
        core.begin_dial(direction, lane, cancel.clone());
    }
    let tls = hub.site.client_tls(terms.peer.alone())?;
    let limits = &hub.site.limits;
    let given_up = Duration::from_nanos(limits.timeouts().open_ns).min(limits.silence());
    let direction = match direction {
        Direction::Out => LaneDirection::FromDialer,
        Direction::In => LaneDirection::ToDialer,
    };
    let request = LaneRequest {
        endpoint: &at,
        peer: &terms.peer.principal(),
        tls: &tls,
        deadline: Instant::now() + given_up * PART.0 / PART.1,
        cancel: &cancel,
        connector: &hub.site.connector,
    };
    let dialled = dialer.dial(&request);
    let mut sender = dialled.map_err(|error| {
        let known = error.permanent().or_else(|| fault_behind(&error));
        let code = known.unwrap_or(FaultCode::LaneLost);
        Failure::new(code, format!("cannot open lane {lane} to {at}")).because(&error)
    })?;
    let open = LaneOpen::unproved(terms.version, terms.session, lane, direction);
    let presented = sender.present(&terms.peer_secret, &open);
    presented.map_err(|error| {
        let what = format!("cannot send on lane {lane} to {at}");
        Failure::new(FaultCode::LaneLost, what).because(&error)
    })?;
    Ok(sender)
}

pub(super) fn lost(what: String) -> Failure {
    Failure::new(FaultCode::LaneLost, what)
}
