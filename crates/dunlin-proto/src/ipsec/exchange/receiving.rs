//! The direction in which the peer sends.

use super::action::{Action, Breach, distinct, malformed};
use crate::fault::FaultCode;
use crate::ipsec::{Grant, LEAST_SPI, Sender, Slot};

#[derive(Debug, Default)]
pub(super) struct Receiving {
    /// 0 before the first is installed.
    epoch: u32,
    live: Vec<Grant>,
    /// The least index that is new.
    next_index: u64,
    /// The epoch before, until the peer retires it.
    previous: Option<(u32, Vec<Grant>)>,
    installing: Option<(u32, Vec<Slot>)>,
    most: usize,
}

impl Receiving {
    pub(super) fn most(&mut self, most: u16) {
        self.most = usize::from(most);
    }

    pub(super) fn live(&self) -> (u32, &[Grant]) {
        (self.epoch, &self.live)
    }

    pub(super) fn wanted(&mut self, epoch: u32, slots: Vec<Slot>) -> Result<Action, Breach> {
        let next = Some(epoch) == self.epoch.checked_add(1);
        if self.installing.is_some() || !(next || epoch == self.epoch && epoch > 0) {
            return Err(malformed("SAs are wanted of an epoch that is not next"));
        }
        if next && self.previous.is_some() {
            return Err(malformed("an epoch is begun while the last but one stands"));
        }
        let kept: &[Grant] = if next { &[] } else { &self.live };
        if kept.len() + slots.len() > self.most {
            let text = format!("more than {} SAs are wanted", self.most);
            return Err(Breach(FaultCode::LaneLimit, text));
        }
        let senders = slots.iter().map(|slot| slot.sender);
        if !distinct(senders.chain(kept.iter().map(|grant| grant.slot.sender))) {
            return Err(malformed("an SA is wanted twice"));
        }
        let fallbacks = slots.iter().filter(|slot| slot.sender == Sender::Fallback);
        let begins = slots
            .first()
            .is_some_and(|slot| slot.sender == Sender::Fallback);
        if begins != next || fallbacks.count() != usize::from(next) {
            return Err(malformed(
                "an epoch begins with its fallback, which it has once",
            ));
        }
        for slot in &slots {
            if u64::from(slot.index) < self.next_index {
                return Err(malformed("the number of an SA is used again"));
            }
            self.next_index = u64::from(slot.index) + 1;
        }
        self.installing = Some((epoch, slots.clone()));
        Ok(Action::InstallInbound { epoch, slots })
    }

    /// What was wanted is installed under these SPIs. None where nothing was, or
    /// something else.
    pub(super) fn installed(&mut self, spis: &[u32]) -> Option<(u32, Vec<(u32, u32)>)> {
        let (epoch, slots) = self.installing.take()?;
        if slots.len() != spis.len() || spis.iter().any(|spi| *spi < LEAST_SPI) {
            return None;
        }
        let grants = slots.iter().zip(spis).map(|(slot, spi)| Grant {
            slot: *slot,
            spi: *spi,
        });
        if epoch == self.epoch {
            self.live.extend(grants);
        } else {
            let before = std::mem::replace(&mut self.live, grants.collect());
            let old = std::mem::replace(&mut self.epoch, epoch);
            self.previous = (old > 0).then_some((old, before));
        }
        let indices = slots.iter().map(|slot| slot.index);
        Some((epoch, indices.zip(spis.iter().copied()).collect()))
    }

    pub(super) fn retire(&mut self, epoch: u32) -> Result<Action, Breach> {
        match self.previous.take() {
            Some((old, grants)) if old == epoch => Ok(Action::RetireInbound { epoch, grants }),
            _ => Err(malformed("an epoch is retired that is not the one before")),
        }
    }

    pub(super) fn release(&mut self, indices: &[u32]) -> Result<Action, Breach> {
        let released = |grant: &Grant| {
            grant.slot.sender != Sender::Fallback && indices.contains(&grant.slot.index)
        };
        let (grants, kept) = self
            .live
            .iter()
            .partition::<Vec<_>, _>(|grant| released(grant));
        if grants.len() != indices.len() {
            return Err(malformed("an SA is released that is not there"));
        }
        self.live = kept;
        let epoch = self.epoch;
        Ok(Action::RetireInbound { epoch, grants })
    }
}
