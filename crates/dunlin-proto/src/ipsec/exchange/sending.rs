//! The direction in which this side sends.

use std::collections::{BTreeSet, VecDeque};

use super::action::{Action, Breach, distinct, malformed};
use crate::fault::FaultCode;
use crate::ipsec::message::Message;
use crate::ipsec::{Grant, Sender, Slot};
use crate::mistake::{Mistake, planted};

#[derive(Debug)]
pub(super) struct Sending {
    /// 0 before the first grant is installed.
    epoch: u32,
    live: Vec<Grant>,
    next_index: u32,
    under_way: Option<UnderWay>,
    wishes: BTreeSet<Sender>,
    releases: BTreeSet<Sender>,
    rekey: bool,
    most: usize,
}

/// SAs that are being made.
#[derive(Debug)]
struct UnderWay {
    epoch: u32,
    slots: Vec<Slot>,
    /// Once they are granted.
    grants: Option<Vec<Grant>>,
}

impl Sending {
    pub(super) fn new(wishes: BTreeSet<Sender>) -> Self {
        Self {
            epoch: 0,
            live: Vec::new(),
            next_index: 0,
            under_way: None,
            wishes,
            releases: BTreeSet::new(),
            rekey: false,
            most: 1,
        }
    }

    /// What the peer has room for.
    pub(super) fn most(&mut self, most: u16) {
        self.most = usize::from(most);
    }

    /// Forgets wishes that the agreed terms have no SA for.
    pub(super) fn keep(&mut self, fits: impl Fn(Sender) -> bool) {
        self.wishes.retain(|sender| fits(*sender));
    }

    pub(super) fn live(&self) -> (u32, &[Grant]) {
        (self.epoch, &self.live)
    }

    /// The first index that the peer has yet to grant; none where it owes nothing.
    pub(super) fn awaits_grant(&self) -> Option<u32> {
        let under_way = self.under_way.as_ref()?;
        match under_way.grants {
            Some(_) => None,
            None => under_way.slots.first().map(|slot| slot.index),
        }
    }

    pub(super) fn wish(&mut self, sender: Sender) {
        self.releases.remove(&sender);
        // More could never be had; the peer's own bound comes on top.
        if self.wishes.len() < usize::from(crate::limits::MAX_SAS) {
            self.wishes.insert(sender);
        }
    }

    pub(super) fn release(&mut self, sender: Sender) {
        self.wishes.remove(&sender);
        let pending = self.under_way.iter().flat_map(|one| &one.slots);
        let mut known = pending.chain(self.live.iter().map(|grant| &grant.slot));
        if sender != Sender::Fallback && known.any(|slot| slot.sender == sender) {
            self.releases.insert(sender);
        }
    }

    pub(super) fn rekey(&mut self) {
        self.rekey = true;
    }

    /// Begins the next thing that is to be done, if nothing is under way.
    pub(super) fn go_on(&mut self, actions: &mut VecDeque<Action>) -> Result<(), Breach> {
        if self.under_way.is_some() {
            return Ok(());
        }
        self.let_go(actions);
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
            let text = "this session has had every number that an SA can have; begin another";
            return Err(Breach(FaultCode::Internal, text.to_owned()));
        };
        actions.push_back(Action::Send(Message::Want {
            epoch,
            slots: slots.clone(),
        }));
        self.under_way = Some(UnderWay {
            epoch,
            slots,
            grants: None,
        });
        Ok(())
    }

    pub(super) fn granted(&mut self, epoch: u32, spis: &[(u32, u32)]) -> Result<Action, Breach> {
        let Some(under_way) = &mut self.under_way else {
            return Err(malformed("SAs are granted that were not wanted"));
        };
        let wanted = under_way.slots.iter().map(|slot| slot.index);
        let same = under_way.epoch == epoch && wanted.eq(spis.iter().map(|(index, _)| *index));
        if !same || under_way.grants.is_some() {
            return Err(malformed("other SAs are granted than were wanted"));
        }
        let granted = spis.iter().map(|(_, spi)| *spi);
        if !distinct(granted.chain(self.live.iter().map(|grant| grant.spi))) {
            return Err(malformed("two SAs are granted under one SPI"));
        }
        let grants = under_way.slots.iter().zip(spis);
        let grants: Vec<Grant> = grants
            .map(|(slot, (_, spi))| Grant {
                slot: *slot,
                spi: *spi,
            })
            .collect();
        under_way.grants = Some(grants.clone());
        let first = epoch != self.epoch;
        let known = self.live.iter().filter(|_| first);
        Ok(Action::InstallOutbound {
            epoch,
            grants,
            first,
            known: known.map(|grant| grant.slot.sender).collect(),
        })
    }

    /// What was granted is installed.
    pub(super) fn installed(&mut self, actions: &mut VecDeque<Action>) {
        let Some(UnderWay {
            epoch,
            grants: Some(grants),
            ..
        }) = self.under_way.take()
        else {
            return;
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

    /// Wishes that the peer has room for beside `held` SAs. The others wait for room.
    fn chosen(&mut self, held: usize) -> Vec<Sender> {
        let room = self.most.saturating_sub(held);
        let live: BTreeSet<Sender> = self.live.iter().map(|grant| grant.slot.sender).collect();
        let wishes = std::mem::take(&mut self.wishes);
        let new = |sender: &Sender| *sender != Sender::Fallback && !live.contains(sender);
        let mut chosen: Vec<Sender> = wishes.into_iter().filter(new).collect();
        self.wishes = chosen.drain(room.min(chosen.len())..).collect();
        chosen
    }

    /// Gives up what has been released.
    fn let_go(&mut self, actions: &mut VecDeque<Action>) {
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
