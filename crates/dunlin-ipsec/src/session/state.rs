//! The state of a session's thread, and helpers that all of its steps use.

use std::collections::BTreeSet;
use std::sync::mpsc::Sender as Channel;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dunlin_lane::control::ControlStream;
use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::exchange::{Awaited, Exchange};
use dunlin_proto::ipsec::key::{EXPORTER_LABEL, Role, context};
use dunlin_proto::ipsec::message::Terms;
use dunlin_proto::ipsec::object::{Association, Direction};
use dunlin_proto::ipsec::plan::{SessionParameters, Step};
use dunlin_proto::negotiate::SessionId;
use zeroize::Zeroizing;

use super::shared::{Beginning, SharedStatus};
use crate::error::IpsecError;
use crate::event::{Event, Observer};
use crate::options::Options;
use crate::record::{Record, RecordDirectory};
use crate::tables::{Tables, state_of};
use crate::xfrm::KeyAndSalt;

/// Groups of steps, each with the time at which it is due.
pub(super) type Late = Vec<(Instant, Vec<Step>)>;

/// The state of a session's thread.
pub(super) struct Driver {
    pub(super) control: Arc<ControlStream>,
    pub(super) session: SessionId,
    pub(super) role: Role,
    pub(super) exchange: Exchange,
    pub(super) options: Options,
    pub(super) observer: Observer,
    pub(super) admits: fn(&Options, &Terms) -> Result<(), IpsecError>,
    pub(super) tables: Tables,
    pub(super) records: RecordDirectory,
    pub(super) ports: Ports,
    pub(super) shared: Arc<Mutex<SharedStatus>>,
    pub(super) tell_up: Channel<()>,
    /// What the exchange waits for, and since when.
    pub(super) waits_since: Option<(Awaited, Instant)>,
    pub(super) sending: Sending,
    pub(super) rekeyed: Instant,
}

/// The ports of the session: free until the exchange begins, then blocked until the session ends.
pub(super) enum Ports {
    /// The exchange has not begun: the ports are as they were before the session.
    Free,
    Blocked(Box<Blocked>),
}

/// Ports that pass packets only through an SA of the session, and the policies and SAs that are
/// installed for the ports.
pub(super) struct Blocked {
    pub(super) record: Record,
    pub(super) parameters: SessionParameters,
    /// Whether the kernel stores the direction of each SA (`XFRMA_SA_DIR`).
    keeps_directions: bool,
    /// SAs to remove later, and the time of each removal. The earliest is first.
    pub(super) late: Late,
    /// Connections for which an SA was requested.
    pub(super) known: BTreeSet<Sender>,
    /// When the policies and SAs were last verified.
    pub(super) verified: Instant,
}

impl Ports {
    pub(super) fn blocked(
        record: Record,
        parameters: SessionParameters,
        keeps_directions: bool,
    ) -> Self {
        Self::Blocked(Box::new(Blocked {
            record,
            parameters,
            keeps_directions,
            late: Vec::new(),
            known: BTreeSet::new(),
            verified: Instant::now(),
        }))
    }
}

/// Whether messages can still be sent to the peer. A failure is final.
pub(super) enum Sending {
    Works,
    /// A send has failed, so nothing more is sent. The values are the error and its time.
    Failed(IpsecError, Instant),
}

impl Driver {
    pub(super) fn new(
        beginning: Beginning,
        shared: Arc<Mutex<SharedStatus>>,
        tell_up: Channel<()>,
    ) -> Result<Self, IpsecError> {
        let options = beginning.options;
        let tables = Tables::open(options.before_change.clone())?;
        Ok(Self {
            control: Arc::new(beginning.control),
            session: beginning.session,
            role: beginning.role,
            exchange: beginning.exchange,
            observer: beginning.observer,
            admits: beginning.admits,
            records: RecordDirectory::open(&options.records)?,
            tables,
            options,
            ports: Ports::Free,
            shared,
            tell_up,
            waits_since: None,
            sending: Sending::Works,
            rekeyed: Instant::now(),
        })
    }

    pub(super) fn apply(&mut self, steps: &[Step]) -> Result<(), IpsecError> {
        let Ports::Blocked(blocked) = &mut self.ports else {
            return Err(IpsecError::Ended);
        };
        let (control, session, role) = (&self.control, &self.session, self.role);
        let keeps_directions = blocked.keeps_directions;
        let state = |one: &Association| {
            let sender = match one.direction {
                Direction::Out => role,
                Direction::In => role.peer(),
            };
            let context = context(session, sender, one.slot.index, one.epoch);
            let mut key = Zeroizing::new([0; KeyAndSalt::BYTES]);
            control.export(EXPORTER_LABEL, Some(&context), &mut *key)?;
            Ok(state_of(one, KeyAndSalt::from(key), keeps_directions))
        };
        self.tables.apply(steps, &mut blocked.record, &state)
    }

    pub(super) fn parameters(&mut self) -> Result<SessionParameters, IpsecError> {
        Ok(self.blocked()?.parameters)
    }

    /// # Errors
    /// The exchange has not begun.
    pub(super) fn blocked(&mut self) -> Result<&mut Blocked, IpsecError> {
        match &mut self.ports {
            Ports::Blocked(blocked) => Ok(blocked),
            Ports::Free => Err(IpsecError::Ended),
        }
    }

    pub(super) fn tell(&self, event: Event) {
        self.observer.event(&event);
    }
}
