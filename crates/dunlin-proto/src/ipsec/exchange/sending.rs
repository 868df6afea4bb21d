//! The outbound direction of a keying session: this side requests SAs, uses them and releases them.

use std::collections::{BTreeSet, VecDeque};

use super::action::{Action, Breach, distinct, malformed};
use crate::fault::FaultCode;
use crate::ipsec::message::Message;
use crate::ipsec::{Grant, Sender, Slot};
use crate::mistake::{Mistake, planted};

#[derive(Debug, Default)]
pub(super) struct Sending {
    /// The current epoch; 0 until the first granted SA is installed.
    epoch: u32,
    live: Vec<Grant>,
    next_index: u32,
    pending: Pending,
    requests: BTreeSet<Sender>,
    releases: BTreeSet<Sender>,
    rekey: bool,
    limit: usize,
}

/// The operation in progress; there is at most one.
#[derive(Debug, Default)]
enum Pending {
    #[default]
    None,
    /// The peer has not granted these SAs yet.
    Requested { epoch: u32, slots: Vec<Slot> },
    /// The caller installs these SAs.
    Installing { epoch: u32, grants: Vec<Grant> },
}

impl Pending {
    fn is_for(&self, sender: Sender) -> bool {
        match self {
            Self::None => false,
            Self::Requested { slots, .. } => slots.iter().any(|slot| slot.sender == sender),
            Self::Installing { grants, .. } => is_among(grants, sender),
        }
    }
}

fn is_among(grants: &[Grant], sender: Sender) -> bool {
    grants.iter().any(|grant| grant.slot.sender == sender)
}

impl Sending {
    pub(super) fn new(requests: BTreeSet<Sender>) -> Self {
        Self {
            requests,
            limit: 1,
            ..Self::default()
        }
    }

    /// Sets the maximum number of SAs that the peer accepts.
    pub(super) fn set_limit(&mut self, limit: u16) {
        self.limit = usize::from(limit);
    }

    /// Drops requests that the agreed terms do not support.
    pub(super) fn keep(&mut self, fits: impl Fn(Sender) -> bool) {
        self.requests.retain(|sender| fits(*sender));
    }

    pub(super) fn live(&self) -> (u32, &[Grant]) {
        (self.epoch, &self.live)
    }

    /// Returns the index of the first SA that the peer has not granted yet. `None` if no request is
    /// pending.
    pub(super) fn awaits_grant(&self) -> Option<u32> {
        match &self.pending {
            Pending::Requested { slots, .. } => slots.first().map(|slot| slot.index),
            Pending::None | Pending::Installing { .. } => None,
        }
    }

    pub(super) fn request(&mut self, sender: Sender) {
        self.releases.remove(&sender);
        // No peer accepts more SAs than this limit. The peer's own limit, which may be lower,
        // applies when the request is sent.
        if self.requests.len() < usize::from(crate::limits::MAX_SAS) {
            self.requests.insert(sender);
        }
    }

    pub(super) fn release(&mut self, sender: Sender) {
        self.requests.remove(&sender);
        let is_known = self.pending.is_for(sender) || is_among(&self.live, sender);
        if sender != Sender::Fallback && is_known {
            self.releases.insert(sender);
        }
    }

    pub(super) fn rekey(&mut self) {
        self.rekey = true;
    }

    /// Starts the next operation, if none is pending.
    pub(super) fn proceed(&mut self, actions: &mut VecDeque<Action>) -> Result<(), Breach> {
        if !matches!(self.pending, Pending::None) {
            return Ok(());
        }
        self.drop_released(actions);
        let senders = if self.epoch == 0 {
            let first = std::iter::once(Sender::Fallback);
            first.chain(self.chosen(1)).collect()
        } else if self.rekey {
            self.rekey = false;
            self.live.iter().map(|grant| grant.slot.sender).collect()
        } else {
            self.chosen(self.live.len())
        };
        if senders.is_empty() {
            return Ok(());
        }
        let first = senders.contains(&Sender::Fallback);
        let epoch = self.epoch.checked_add(u32::from(first));
        if first && planted(Mistake::SaNumberedAgain) {
            self.next_index = 0;
        }
        let slots = senders.into_iter().map(|sender| {
            let index = self.next_index;
            self.next_index = index.checked_add(1)?;
            Some(Slot { index, sender })
        });
        let (Some(epoch), Some(slots)) = (epoch, slots.collect::<Option<Vec<_>>>()) else {
            let text = "SA numbers of this session exhausted; start a new session";
            return Err(Breach(FaultCode::Internal, text.to_owned()));
        };
        actions.push_back(Action::Send(Message::Want {
            epoch,
            slots: slots.clone(),
        }));
        self.pending = Pending::Requested { epoch, slots };
        Ok(())
    }

    pub(super) fn granted(&mut self, epoch: u32, spis: &[(u32, u32)]) -> Result<Action, Breach> {
        let Pending::Requested {
            epoch: requested,
            slots,
        } = &self.pending
        else {
            return Err(malformed("unrequested SAs granted"));
        };
        let indices = slots.iter().map(|slot| slot.index);
        if *requested != epoch || !indices.eq(spis.iter().map(|(index, _)| *index)) {
            return Err(malformed("granted SAs differ from the requested ones"));
        }
        let granted = spis.iter().map(|(_, spi)| *spi);
        if !distinct(granted.chain(self.live.iter().map(|grant| grant.spi))) {
            return Err(malformed("SPI granted twice"));
        }
        let grants = slots.iter().zip(spis);
        let grants: Vec<Grant> = grants.map(|(slot, (_, spi))| slot.granted(*spi)).collect();
        self.pending = Pending::Installing {
            epoch,
            grants: grants.clone(),
        };
        let first = epoch != self.epoch;
        let known = self.live.iter().filter(|_| first);
        Ok(Action::InstallOutbound {
            epoch,
            grants,
            first,
            known: known.map(|grant| grant.slot.sender).collect(),
        })
    }

    /// Records that the granted SAs are installed.
    pub(super) fn installed(&mut self, actions: &mut VecDeque<Action>) {
        let (epoch, grants) = match std::mem::take(&mut self.pending) {
            Pending::Installing { epoch, grants } => (epoch, grants),
            other => return self.pending = other,
        };
        if epoch == self.epoch {
            self.live.extend(grants);
            return;
        }
        let before = std::mem::replace(&mut self.live, grants);
        let old = std::mem::replace(&mut self.epoch, epoch);
        if old == 0 {
            actions.push_back(Action::Send(Message::Ready));
            return;
        }
        actions.push_back(Action::RetireOutbound {
            epoch: old,
            grants: before,
            over: false,
        });
        if !planted(Mistake::RetiredBeforeSwitch) {
            actions.push_back(Action::Send(Message::Retire { epoch: old }));
        }
    }

    /// Removes and returns the requests for which the peer has room besides `held` SAs. Drops
    /// requests of senders that already have an SA, and keeps the requests for which there is no
    /// room.
    fn chosen(&mut self, held: usize) -> Vec<Sender> {
        let room = self.limit.saturating_sub(held);
        let live: BTreeSet<Sender> = self.live.iter().map(|grant| grant.slot.sender).collect();
        let requests = std::mem::take(&mut self.requests);
        let new = |sender: &Sender| *sender != Sender::Fallback && !live.contains(sender);
        let mut chosen: Vec<Sender> = requests.into_iter().filter(new).collect();
        self.requests = chosen.drain(room.min(chosen.len())..).collect();
        chosen
    }

    /// Removes released SAs.
    fn drop_released(&mut self, actions: &mut VecDeque<Action>) {
        let releases = std::mem::take(&mut self.releases);
        let (gone, kept) = std::mem::take(&mut self.live)
            .into_iter()
            .partition(|grant| releases.contains(&grant.slot.sender));
        let gone: Vec<Grant> = gone;
        self.live = kept;
        if gone.is_empty() {
            return;
        }
        let mut indices: Vec<u32> = gone.iter().map(|grant| grant.slot.index).collect();
        indices.sort_unstable();
        actions.push_back(Action::RetireOutbound {
            epoch: self.epoch,
            grants: gone,
            over: true,
        });
        actions.push_back(Action::Send(Message::Release { indices }));
    }
}
