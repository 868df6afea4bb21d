//! Mistakes that tests plant in this crate's decisions, to prove that the model
//! and the simulator find them.
//!
//! Only those tests enable the feature `mistakes`. Without it, [`planted`] is a
//! constant `false` and no mistake is compiled in.

macro_rules! mistakes {
    ($( $(#[$list_doc:meta])* $list:ident { $( $(#[$doc:meta])* $mistake:ident, )* } )*) => {
        /// A wrong decision. The variant names the mistake; its comment adds the correct
        /// behaviour if that is not obvious.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Mistake {
            $( $( $(#[$doc])* $mistake, )* )*
        }

        impl Mistake {
            $( $(#[$list_doc])* pub const $list: &'static [Self] = &[$(Self::$mistake,)*]; )*
        }
    };
}

mistakes! {
    /// Every mistake in a migration.
    ALL {
        /// The source pauses and commits while its journal says *migrating*.
        /// Right: *committing* is recorded before the pause.
        PauseBeforeRecord,
        /// The source resumes when the control lane is lost after *commit*.
        /// Right: it inquires.
        ResumeWithoutAsking,
        /// The source accepts an answer about another attempt as one about its own.
        BelieveAnyAttempt,
        /// The source sends *release* before it has recorded *released*.
        ReleaseBeforeRecord,
        /// The destination answers an inquiry while the old control lane is open. Right:
        /// the old control lane is closed and its reader joined first.
        AnswerBeforeClose,
        /// The destination answers an inquiry before it has processed what the old
        /// control lane's reader had read.
        AnswerBeforeDrain,
        /// The destination runs the VM before it has recorded *running*.
        RunBeforeRecord,
        /// The destination sends *running* before it has recorded it.
        TellBeforeRecord,
        /// The destination sends *aborted* before it has recorded it.
        TellAbortedBeforeRecord,
        /// The destination could not acquire all disks and devices and sends
        /// *aborted* while it still holds some.
        TellBeforeLettingGo,
        /// A restarted destination answers *running* for a VM that died with its
        /// process. Right: *ran, then died*.
        DeadAnswersRunning,
        /// The source resends a lost lane's pages immediately. Right: after the
        /// destination has fenced the lane.
        NoFence,
        /// The source forgets the pages of a lost lane. Right: they become pending again.
        NoRedirty,
        /// Pages from a dirty log are sent in the iteration before the one for
        /// which the log was read, so nothing orders them after their older
        /// versions.
        CutBeforeIteration,
        /// A lane passes a mark that another has not reached.
        MarkPassedEarly,
        /// The destination acknowledges the chunk that follows the written one.
        WrongChunkAcknowledged,
    }
    /// Every mistake in the tunnel.
    STRIPE {
        /// A tunnel channel is granted twice its window regardless of the other
        /// channels. Right: all channels together stay within the peer's bound.
        CreditOverWindow,
        /// A tunnel frame is acknowledged while its bytes are still being buffered.
        /// Right: afterwards.
        AckBeforeKept,
        /// A channel is connected while bytes of earlier channels are in flight.
        BarrierIgnored,
        /// A channel's end is forwarded before its last byte.
        EndBeforeLastByte,
        /// Duplicate bytes are delivered twice.
        DuplicateDelivered,
        /// The chunks of a lost tunnel lane are not resent.
        LostChunkForgotten,
        /// An abort waits until all earlier bytes are delivered.
        ResetBehindData,
    }
    /// Every mistake in keying sessions.
    IPSEC {
        /// The SAs of new keys are numbered from 0 again, and so are the inputs of
        /// their key derivation. Right: a session never reuses a number.
        SaNumberedAgain,
        /// New keys keep the request id of the previous ones. Right: only policies
        /// lead from one epoch's SAs to the next.
        RequestIdKept,
        /// This side asks the peer to retire an epoch while policies still lead to its SAs.
        RetiredBeforeSwitch,
        /// IPsec state is removed while policies still protect traffic. Right: the policies
        /// block first.
        TakenBackUnblocked,
        /// A successor removes the policies that block its ports before it installs
        /// its own. Right: it replaces them atomically.
        HeirOpens,
    }
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

    /// The mistake's number, from 1, or 0. Model checker and simulator use many
    /// threads, so the switch is process-wide.
    static SWITCH: AtomicU32 = AtomicU32::new(0);
    static TURN: Mutex<()> = Mutex::new(());

    /// While this value lives, its mistake is planted and no other can be.
    #[derive(Debug)]
    pub struct Planted {
        _turn: MutexGuard<'static, ()>,
    }

    /// Plants a mistake, or none; blocks until an earlier [`Planted`] is
    /// dropped.
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
