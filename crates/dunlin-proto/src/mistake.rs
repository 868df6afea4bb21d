//! Mistakes that can be planted in this crate's decisions, to prove that the
//! model and the simulator would find them.
//!
//! Without the feature `mistakes`, which only those tests switch on,
//! [`planted`] is a constant `false` and nothing of them is compiled in.

/// A way to get a decision wrong. Each names what is done; the comment says
/// what is right instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mistake {
    /// The source pauses and commits while its journal says *migrating*.
    /// Right: *committing* is recorded before the pause.
    PauseBeforeRecord,
    /// The source resumes when the control lane is lost after *commit*.
    /// Right: it asks.
    ResumeWithoutAsking,
    /// The source takes an answer about another attempt for one about its own.
    BelieveAnyAttempt,
    /// The source sends *release* before it recorded *released*.
    ReleaseBeforeRecord,
    /// The destination answers an inquiry while the old control lane is open.
    /// Right: it is closed and its reader joined first.
    AnswerBeforeClose,
    /// The destination answers an inquiry before it took what the old control
    /// lane's reader had read.
    AnswerBeforeDrain,
    /// The destination runs the VM before it recorded *running*.
    RunBeforeRecord,
    /// The destination tells *running* before it recorded it.
    TellBeforeRecord,
    /// The destination tells *aborted* before it recorded it.
    TellAbortedBeforeRecord,
    /// The destination, which could not take all disks and devices, tells
    /// *aborted* while it still holds some.
    TellBeforeLettingGo,
    /// A restarted destination answers *running* for a VM that died with its
    /// process. Right: *ran, then died*.
    DeadAnswersRunning,
    /// The source sends a lost lane's pages again at once. Right: when the
    /// destination has fenced it.
    NoFence,
    /// The source forgets what a lost lane took along. Right: it waits again.
    NoRedirty,
    /// A page of a dirty log is sent in the iteration before the one that it
    /// was read for, where nothing keeps it from its older version.
    CutBeforeIteration,
    /// A lane passes a mark that another has not reached.
    MarkPassedEarly,
    /// The destination acknowledges the chunk after the one that it wrote.
    WrongChunkAcknowledged,
    /// A channel of the tunnel is granted twice its window, whatever others
    /// hold. Right: all of them stay within the peer's bound.
    CreditOverWindow,
    /// A frame of the tunnel is acknowledged while its bytes are still being
    /// put aside. Right: when they are kept.
    AckBeforeKept,
    /// A channel is connected while bytes of earlier ones are on their way.
    BarrierIgnored,
    /// A channel's end is passed on before its last byte.
    EndBeforeLastByte,
    /// What has been delivered is delivered again when it comes again.
    DuplicateDelivered,
    /// What a lost lane of the tunnel carried is not sent again.
    LostChunkForgotten,
    /// An abort waits until what came before it has been delivered.
    ResetBehindData,
    /// The SAs of new keys are numbered from 0 again, and what their keys are
    /// derived from as well. Right: a session's numbers never come twice.
    SaNumberedAgain,
    /// New keys bear the request id of those before. Right: policies alone lead
    /// from one epoch's SAs to the next one's.
    RequestIdKept,
    /// The peer is told to retire an epoch while policies still lead to its SAs.
    RetiredBeforeSwitch,
    /// What is taken back goes while policies still protect. Right: they block
    /// before anything goes.
    TakenBackUnblocked,
    /// An heir removes what blocks its ports, and then shuts them by its own.
    /// Right: one is put in the other's place.
    HeirOpens,
}

impl Mistake {
    /// Every mistake in a migration.
    pub const ALL: &'static [Self] = &[
        Self::PauseBeforeRecord,
        Self::ResumeWithoutAsking,
        Self::BelieveAnyAttempt,
        Self::ReleaseBeforeRecord,
        Self::AnswerBeforeClose,
        Self::AnswerBeforeDrain,
        Self::RunBeforeRecord,
        Self::TellBeforeRecord,
        Self::TellAbortedBeforeRecord,
        Self::TellBeforeLettingGo,
        Self::DeadAnswersRunning,
        Self::NoFence,
        Self::NoRedirty,
        Self::CutBeforeIteration,
        Self::MarkPassedEarly,
        Self::WrongChunkAcknowledged,
    ];

    /// Every mistake in the tunnel.
    pub const STRIPE: &'static [Self] = &[
        Self::CreditOverWindow,
        Self::AckBeforeKept,
        Self::BarrierIgnored,
        Self::EndBeforeLastByte,
        Self::DuplicateDelivered,
        Self::LostChunkForgotten,
        Self::ResetBehindData,
    ];

    /// Every mistake in IPsec sessions.
    pub const IPSEC: &'static [Self] = &[
        Self::SaNumberedAgain,
        Self::RequestIdKept,
        Self::RetiredBeforeSwitch,
        Self::TakenBackUnblocked,
        Self::HeirOpens,
    ];
}

/// Whether the mistake is planted: never, without the feature `mistakes`.
#[cfg(not(feature = "mistakes"))]
#[must_use]
#[inline(always)]
pub const fn planted(_mistake: Mistake) -> bool {
    false
}

#[cfg(feature = "mistakes")]
pub use switch::{Planted, plant, planted};

#[cfg(feature = "mistakes")]
mod switch {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::Mistake;

    /// The mistake's number from 1, or 0. A model checker and a simulator use
    /// many threads, so that the switch is the process's.
    static SWITCH: AtomicU32 = AtomicU32::new(0);
    static TURN: Mutex<()> = Mutex::new(());

    /// While this lives, its mistake is planted, and no other can be.
    #[derive(Debug)]
    pub struct Planted {
        _turn: MutexGuard<'static, ()>,
    }

    /// Plants a mistake, or, with `None`, makes sure that there is none; waits
    /// until whoever has planted one before is done.
    #[must_use]
    pub fn plant(mistake: Option<Mistake>) -> Planted {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        SWITCH.store(mistake.map_or(0, number), Ordering::SeqCst);
        Planted { _turn: turn }
    }

    impl Drop for Planted {
        fn drop(&mut self) {
            SWITCH.store(0, Ordering::SeqCst);
        }
    }

    /// Whether the mistake is planted.
    #[must_use]
    pub fn planted(mistake: Mistake) -> bool {
        SWITCH.load(Ordering::Relaxed) == number(mistake)
    }

    fn number(mistake: Mistake) -> u32 {
        mistake as u32 + 1
    }
}
