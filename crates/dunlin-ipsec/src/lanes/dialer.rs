//! The side that opens lanes over IPsec. It starts keying sessions with a peer. Each session
//! protects a range of ports, from which the lanes connect.

use std::collections::HashMap;
use std::mem;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::SessionId;

use super::session::{LaneError, LaneSession, ProtectedLane, check_limits};
use super::{IpsecLanes, Shared};
use crate::PortRange;
use crate::dial;
use crate::error::IpsecError;
use crate::session::{ends, random};
use dunlin_lane::data::{DataSender, PlainConsent, STALL_LIMIT};
use dunlin_lane::dial::{DialError, LaneDialer, LaneRequest};
use dunlin_lane::peers::Principal;
use dunlin_lane::sync::{lock, wait};

/// How many blocks of ports to try before giving up.
const BLOCKS_TRIED: usize = 8;
/// How many sessions to try for one lane if all ports of a session are in use.
const SESSIONS_TRIED: usize = 3;
/// The interval at which a lane that waits for a session checks for cancellation.
const STEP: Duration = Duration::from_millis(50);

/// Opens lanes over IPsec. Dropping the dialer ends its sessions. Before the end of a session, the
/// drop waits for at most `quiet_wait` (see [`Options`](crate::Options)) until the session's
/// connections are closed.
#[derive(Debug)]
pub struct IpsecDialer {
    lanes: IpsecLanes,
    /// The sessions for each endpoint and its required peer.
    toward: Mutex<HashMap<Destination, Toward>>,
    changed: Condvar,
}

/// An endpoint and the peer that must answer there.
type Destination = (String, Principal);

#[derive(Debug, Default)]
struct Toward {
    /// Whether a thread is setting up a session.
    is_making: bool,
    /// The newest session is last; earlier ones have no free port or have ended.
    sessions: Vec<Arc<LaneSession>>,
    /// Ports of ended sessions. Connections from these ports may still exist. Therefore these ports
    /// are reused only when no other block of ports is left.
    over: Vec<PortRange>,
}

impl Toward {
    /// Removes ended sessions and shuts down their lanes.
    fn retire(&mut self) {
        let over = self.sessions.extract_if(.., |one| one.cut_if_over());
        for session in over {
            if !self.over.contains(&session.ports) {
                self.over.push(session.ports);
            }
        }
    }
}

impl LaneDialer for IpsecDialer {
    fn dial(&self, request: &LaneRequest<'_>) -> Result<DataSender, DialError> {
        let connected = self.connect(request).map_err(|error| DialError::Sealed {
            endpoint: request.endpoint.to_owned(),
            permanent: error.permanent(),
            source: Box::new(error),
        });
        let ProtectedLane { stream, hold } = connected?;
        set_liveness(&stream, &Liveness::default())?;
        let consent = PlainConsent::sealed_below();
        Ok(DataSender::plain(stream, consent, STALL_LIMIT)?.guarded_by(Box::new(hold)))
    }
}

impl IpsecDialer {
    /// Creates a dialer without a session; the first lane starts one.
    #[must_use]
    pub fn new(lanes: IpsecLanes) -> Self {
        Self {
            lanes,
            toward: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Opens a connection to the request's endpoint, over an existing or a new session with the
    /// request's peer. Must be called on the thread of the lane, because mode cpu pins the calling
    /// thread to one CPU.
    ///
    /// # Errors
    /// [`LaneError`]. If the deadline has passed or the request was cancelled, a session that is
    /// still being set up is abandoned.
    pub fn connect(&self, request: &LaneRequest<'_>) -> Result<ProtectedLane, LaneError> {
        let mut tried = 0;
        loop {
            let session = self.session(request)?;
            tried += 1;
            match session.connect(&self.shared().cpus, &self.shared().site.observer, request) {
                Err(LaneError::NoPort { .. }) if tried < SESSIONS_TRIED => {
                    session.is_full.store(true, Ordering::Relaxed);
                }
                other => return other,
            }
        }
    }

    fn shared(&self) -> &Shared {
        &self.lanes.0.shared
    }

    /// Returns the newest session, or starts one if there is none or the newest is full. Other
    /// callers for the same endpoint and peer wait while the session starts.
    fn session(&self, request: &LaneRequest<'_>) -> Result<Arc<LaneSession>, LaneError> {
        let to = || (request.endpoint.to_owned(), request.peer.clone());
        let mut toward = lock(&self.toward);
        let over = loop {
            let one = toward.entry(to()).or_default();
            one.retire();
            if let Some(newest) = one.sessions.last()
                && !newest.is_full.load(Ordering::Relaxed)
            {
                return Ok(Arc::clone(newest));
            }
            if !one.is_making {
                one.is_making = true;
                break one.over.clone();
            }
            toward = wait(&self.changed, toward, Some(STEP));
            check_limits(request)?;
        };
        drop(toward);
        let made = self.make(request, &over).map(Arc::new);
        let mut toward = lock(&self.toward);
        let one = toward.entry(to()).or_default();
        one.is_making = false;
        if let Ok(begun) = &made {
            one.sessions.push(Arc::clone(begun));
            lock(&self.shared().begun).push(Arc::downgrade(begun));
        }
        drop(toward);
        self.changed.notify_all();
        made
    }

    fn make(
        &self,
        request: &LaneRequest<'_>,
        over: &[PortRange],
    ) -> Result<LaneSession, LaneError> {
        let shared = self.shared();
        let (mut later, mut blocks) = shared
            .free_blocks()
            .into_iter()
            .partition::<Vec<_>, _>(|block| over.contains(block));
        let cancelled_or = |error: IpsecError| match (check_limits(request), error) {
            (Err(why), IpsecError::Ended) => why,
            (_, error) => error.into(),
        };
        for _ in 0..BLOCKS_TRIED {
            check_limits(request)?;
            let session: SessionId = random()?;
            if blocks.is_empty() {
                mem::swap(&mut blocks, &mut later);
            }
            if blocks.is_empty() {
                break;
            }
            let chosen = u64::from_le_bytes(*session.last_chunk().unwrap_or(&[0; 8]));
            let ports = blocks.swap_remove((chosen % blocks.len() as u64) as usize);
            let mut options = shared.site.options.clone();
            let left = request.deadline.saturating_duration_since(Instant::now());
            let limit = options.timeout.min(left);
            (options.ports, options.timeout) = (ports, limit);
            let connector = &**request.connector;
            let to = request.endpoint;
            let opened = dial::open((to, connector), request.tls, session, limit, request.cancel);
            let control = opened.map_err(cancelled_or)?;
            if !control.peer().is(request.peer) {
                let to = to.to_owned();
                return Err(LaneError::OtherPeer { to });
            }
            let (local, peer) = ends(control.socket())?;
            let observer = &shared.site.observer;
            let given_up = || check_limits(request).is_err();
            match dial::begin(control, session, &options, observer, &given_up) {
                Ok(session) => {
                    return Ok(LaneSession::new(session, &options, local, peer));
                }
                // These ports conflict with another session or policy on one of the two hosts, for
                // instance because the other host opens lanes too. Try other ports.
                Err(error) if error.code() == FaultCode::PortsTaken => {}
                Err(error) => return Err(cancelled_or(error)),
            }
        }
        let ports = shared.site.options.ports.to_string();
        Err(LaneError::NoPort { ports })
    }
}
