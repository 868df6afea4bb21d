//! Which session gets a connection, if one listener serves several sessions (I1, I7).
//!
//! The listener has a fixed number of *slots*. A slot is free, or belongs to one session from the
//! session's offer to its end:
//!
//! ```text
//!   open ──▶ free ──▶ of a session ──▶ of a session with a VM
//!              ▲            │                    │
//!              └──── end ───┴────────────────────┘
//! ```
//! After a session has ended, its slot is *idle* until the caller calls [`Sessions::wait`] or
//! [`Sessions::close`]. Because the caller may close the slot, an offer takes an idle slot only if
//! no other slot is free.
//!
//! A session has at most one slot, and a VM has at most one session: a second session of the same
//! VM is refused.
//!
//! Getters: [`Sessions::slot_of`]. Commands: [`Sessions::open`], [`Sessions::close`],
//! [`Sessions::wait`], [`Sessions::begin`], [`Sessions::describe`], [`Sessions::refuse`],
//! [`Sessions::end`]. Event: [`Sessions::offered`].

use std::collections::BTreeMap;

use crate::negotiate::{Offer, SessionId};

/// The slots of a listener.
#[derive(Clone, Debug, Default)]
pub struct Sessions {
    slots: BTreeMap<u64, Slot>,
    /// The number of the next slot. A number is never used again.
    next: u64,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    session: Option<Session>,
    /// Whether a session of this slot has ended and no receiver waits for the next one yet.
    idle: bool,
}

#[derive(Clone, Debug)]
struct Session {
    id: SessionId,
    /// The UUID of the VM, after the source has described it.
    vm: Option<[u8; 16]>,
}

/// Where an offer belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// To this slot's session, which may have begun with this offer.
    Slot(u64),
    /// To no session: the offer is an inquiry about a session that has ended. The journal has the
    /// answer.
    Inquiry,
    /// To no session: the offer would begin a session, but no slot is free.
    Full,
}

impl Offer {
    /// Whether the offer can only belong to a session that already exists. Only the first control
    /// lane of an attempt, which has epoch 1, can begin a session.
    #[must_use]
    pub fn is_inquiry(&self) -> bool {
        self.epoch > 1
    }
}

impl Sessions {
    /// Adds a free slot; returns its number.
    pub fn open(&mut self) -> u64 {
        let slot = self.next;
        self.next += 1;
        self.slots.insert(slot, Slot::default());
        slot
    }

    /// Removes a slot.
    pub fn close(&mut self, slot: u64) {
        self.slots.remove(&slot);
    }

    /// Notes that a receiver now waits for the next session of a slot.
    pub fn wait(&mut self, slot: u64) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.idle = false;
        }
    }

    /// Decides where an offer belongs. An offer that begins a session takes the free slot with the
    /// lowest number, and an idle one only if all free slots are idle.
    pub fn offered(&mut self, offer: &Offer) -> Route {
        if let Some(slot) = self.slot_of(&offer.session) {
            return Route::Slot(slot);
        }
        if offer.is_inquiry() {
            return Route::Inquiry;
        }
        let free = self.slots.iter().filter(|(_, slot)| slot.session.is_none());
        let Some((&slot, _)) = free.min_by_key(|(number, slot)| (slot.idle, **number)) else {
            return Route::Full;
        };
        self.begin(slot, offer.session);
        Route::Slot(slot)
    }

    /// The slot of this session.
    #[must_use]
    pub fn slot_of(&self, id: &SessionId) -> Option<u64> {
        let is_it = |slot: &Slot| slot.session.as_ref().is_some_and(|s| s.id == *id);
        let found = self.slots.iter().find(|(_, slot)| is_it(slot));
        found.map(|(slot, _)| *slot)
    }

    /// Gives a free slot to a session. Returns false, and changes nothing, if the slot does not
    /// exist or belongs to another session, or if the session has another slot.
    pub fn begin(&mut self, slot: u64, id: SessionId) -> bool {
        match self.slot_of(&id) {
            Some(found) => return found == slot,
            None => match self.slots.get_mut(&slot) {
                Some(slot) if slot.session.is_none() => {
                    slot.session = Some(Session { id, vm: None });
                }
                _ => return false,
            },
        }
        true
    }

    /// Gives the VM with this UUID to the session of `slot`.
    ///
    /// # Errors
    /// Another session has the VM. Nothing has changed; the error is the slot of that session.
    pub fn describe(&mut self, slot: u64, vm: [u8; 16]) -> Result<(), u64> {
        let has = |slot: &Slot| slot.session.as_ref().is_some_and(|s| s.vm == Some(vm));
        let mut others = self.slots.iter().filter(|(one, _)| **one != slot);
        if let Some((other, _)) = others.find(|(_, slot)| has(slot)) {
            return Err(*other);
        }
        let slot = self.slots.get_mut(&slot);
        if let Some(session) = slot.and_then(|slot| slot.session.as_mut()) {
            session.vm = Some(vm);
        }
        Ok(())
    }

    /// Frees a slot after its offer was refused. Its receiver waits for the next offer.
    pub fn refuse(&mut self, slot: u64) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.session = None;
        }
    }

    /// Frees a slot after its session has ended. The slot is idle.
    pub fn end(&mut self, slot: u64) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.session = None;
            slot.idle = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::negotiate::{Features, LaneSecurity, VERSIONS};

    fn offer(session: u8, epoch: u32) -> Offer {
        Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::NONE,
            security: LaneSecurity::Tls,
            session: [session; 16],
            attempt: 1,
            epoch,
        }
    }

    /// Two free slots.
    fn two() -> (Sessions, u64, u64) {
        let mut sessions = Sessions::default();
        let (first, second) = (sessions.open(), sessions.open());
        (sessions, first, second)
    }

    #[test]
    fn i7_an_offer_takes_a_free_slot_and_is_refused_without_one() {
        let (mut sessions, first, second) = two();
        assert_eq!(sessions.offered(&offer(1, 1)), Route::Slot(first));
        assert_eq!(sessions.offered(&offer(2, 1)), Route::Slot(second));
        assert_eq!(sessions.offered(&offer(3, 1)), Route::Full);
        // A session that has a slot keeps it, at any epoch.
        assert_eq!(sessions.offered(&offer(2, 1)), Route::Slot(second));
        assert_eq!(sessions.offered(&offer(2, 7)), Route::Slot(second));
        sessions.end(first);
        assert_eq!(sessions.offered(&offer(3, 1)), Route::Slot(first));
        // A closed slot gets no session, and its number is not used again.
        sessions.close(first);
        assert_eq!(sessions.slot_of(&[3; 16]), None);
        assert_eq!(sessions.offered(&offer(4, 1)), Route::Full);
        assert!(!sessions.begin(first, [4; 16]));
        assert_eq!(sessions.open(), second + 1);
    }

    #[test]
    fn an_offer_takes_an_idle_slot_only_if_no_other_is_free() {
        let (mut sessions, first, second) = two();
        assert_eq!(sessions.offered(&offer(1, 1)), Route::Slot(first));
        sessions.refuse(first);
        assert_eq!(sessions.offered(&offer(2, 1)), Route::Slot(first));
        sessions.end(first);
        assert_eq!(sessions.offered(&offer(3, 1)), Route::Slot(second));
        assert_eq!(sessions.offered(&offer(4, 1)), Route::Slot(first));
        sessions.end(first);
        sessions.end(second);
        sessions.wait(second);
        assert_eq!(sessions.offered(&offer(5, 1)), Route::Slot(second));
    }

    #[test]
    fn an_inquiry_takes_no_slot() {
        let (mut sessions, ..) = two();
        assert_eq!(sessions.offered(&offer(1, 2)), Route::Inquiry);
        assert_eq!(sessions.slot_of(&[1; 16]), None);
    }

    #[test]
    fn a_session_has_one_slot() {
        let (mut sessions, first, second) = two();
        assert!(sessions.begin(first, [1; 16]) && sessions.begin(first, [1; 16]));
        assert!(!sessions.begin(second, [1; 16]) && !sessions.begin(first, [2; 16]));
        assert_eq!(sessions.slot_of(&[1; 16]), Some(first));
        assert_eq!(sessions.slot_of(&[2; 16]), None);
    }

    #[test]
    fn i1_a_vm_has_one_session() {
        let (mut sessions, first, second) = two();
        assert!(sessions.begin(first, [1; 16]) && sessions.begin(second, [2; 16]));
        assert_eq!(sessions.describe(first, [7; 16]), Ok(()));
        assert_eq!(sessions.describe(second, [7; 16]), Err(first));
        assert_eq!(sessions.describe(second, [8; 16]), Ok(()));
        // The session that has ended no longer has the VM.
        sessions.end(first);
        assert!(sessions.begin(first, [3; 16]));
        assert_eq!(sessions.describe(second, [7; 16]), Ok(()));
        assert_eq!(sessions.describe(first, [7; 16]), Err(second));
    }
}
