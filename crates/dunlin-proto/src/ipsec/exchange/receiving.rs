//! The inbound direction.

use super::action::{Action, Breach, distinct, malformed};
use crate::fault::FaultCode;
use crate::ipsec::{Grant, LEAST_SPI, Sender, Slot};

#[derive(Debug, Default)]
pub(super) struct Receiving {
    /// The current epoch; 0 until the first SAs are installed.
    epoch: u32,
    live: Vec<Grant>,
    /// The smallest unused index.
    next_index: u64,
    /// The previous epoch, until the peer retires it.
    previous: Option<(u32, Vec<Grant>)>,
    installing: Option<(u32, Vec<Slot>)>,
    limit: usize,
}

impl Receiving {
    pub(super) fn set_limit(&mut self, limit: u16) {
        self.limit = usize::from(limit);
    }

    pub(super) fn live(&self) -> (u32, &[Grant]) {
        (self.epoch, &self.live)
    }

    pub(super) fn wanted(&mut self, epoch: u32, slots: Vec<Slot>) -> Result<Action, Breach> {
        let next = Some(epoch) == self.epoch.checked_add(1);
        if self.installing.is_some() || !(next || epoch == self.epoch && epoch > 0) {
            return Err(malformed("SAs requested for an unexpected epoch"));
        }
        if next && self.previous.is_some() {
            return Err(malformed(
                "new epoch requested before the previous one is retired",
            ));
        }
        let kept: &[Grant] = if next { &[] } else { &self.live };
        if kept.len() + slots.len() > self.limit {
            let text = format!("SA limit {} exceeded", self.limit);
            return Err(Breach(FaultCode::LaneLimit, text));
        }
        let senders = slots.iter().map(|slot| slot.sender);
        if !distinct(senders.chain(kept.iter().map(|grant| grant.slot.sender))) {
            return Err(malformed("SA requested twice"));
        }
        let fallbacks = slots.iter().filter(|slot| slot.sender == Sender::Fallback);
        let begins = slots
            .first()
            .is_some_and(|slot| slot.sender == Sender::Fallback);
        if begins != next || fallbacks.count() != usize::from(next) {
            return Err(malformed(
                "the first SA of an epoch, and no other, must be the fallback",
            ));
        }
        for slot in &slots {
            if u64::from(slot.index) < self.next_index {
                return Err(malformed("SA number reused"));
            }
            self.next_index = u64::from(slot.index) + 1;
        }
        self.installing = Some((epoch, slots.clone()));
        Ok(Action::InstallInbound { epoch, slots })
    }

    /// Records that the requested SAs are installed with these SPIs. Returns `None` if nothing was
    /// requested, if the number of SPIs differs from the request, or if an SPI is reserved.
    pub(super) fn installed(&mut self, spis: &[u32]) -> Option<(u32, Vec<(u32, u32)>)> {
        let (epoch, slots) = self.installing.take()?;
        if slots.len() != spis.len() || spis.iter().any(|spi| *spi < LEAST_SPI) {
            return None;
        }
        let grants = slots.iter().zip(spis).map(|(slot, spi)| slot.granted(*spi));
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
            _ => Err(malformed("retired epoch is not the previous one")),
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
            return Err(malformed("released SA does not exist"));
        }
        self.live = kept;
        let epoch = self.epoch;
        Ok(Action::RetireInbound { epoch, grants })
    }
}
