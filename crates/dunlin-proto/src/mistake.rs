//! Mistakes that tests plant in this crate's decisions, to prove that the model, the simulator, the
//! engine's checks of interleavings and this crate's tests find them.
//!
//! Only tests enable the feature `mistakes`. Without it, [`planted`] is a
//! constant `false` and no mistake is compiled in.

macro_rules! mistakes {
    ($( $(#[$list_doc:meta])* $list:ident { $( $(#[$doc:meta])* $mistake:ident, )* } )*) => {
        /// A wrong decision. The comment of each variant describes the mistake, and after "Right:"
        /// the correct behaviour if that is not obvious.
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
    /// All mistakes that can be planted in a migration.
    ALL {
        /// The source pauses the guest and commits while its journal says *migrating*. Right: the
        /// source records *committing* before the pause.
        PauseBeforeRecord,
        /// The source resumes when the control lane is lost after *commit*. Right: the source
        /// inquires at the destination.
        ResumeWithoutAsking,
        /// The source accepts an answer about another attempt as an answer about its own attempt.
        BelieveAnyAttempt,
        /// The source sends *release* before it has recorded *released*.
        ReleaseBeforeRecord,
        /// The destination answers an inquiry while the old control lane is open. Right:
        /// the old control lane is closed and its reader joined first.
        AnswerBeforeClose,
        /// The destination answers an inquiry before it has processed the messages that the old
        /// control lane's reader had read.
        AnswerBeforeDrain,
        /// The destination runs the VM before it has recorded *running*.
        RunBeforeRecord,
        /// The destination sends *running* before it has recorded *running*.
        TellBeforeRecord,
        /// The destination sends *aborted* before it has recorded *aborted*.
        TellAbortedBeforeRecord,
        /// If the destination cannot acquire all disks and devices, it sends *aborted* while it
        /// still holds some of them.
        TellBeforeLettingGo,
        /// A restarted destination answers *running* for a VM that died with its
        /// process. Right: *ran, then died*.
        DeadAnswersRunning,
        /// The source resends a lost lane's pages immediately. Right: it waits until the
        /// destination has fenced the lane.
        NoFence,
        /// The source forgets the pages of a lost lane. Right: they become pending again.
        NoRedirty,
        /// The source sends the pages of a dirty log one iteration too early. No mark then keeps
        /// these pages apart from their older versions.
        CutBeforeIteration,
        /// A lane passes a mark that another lane has not reached.
        MarkPassedEarly,
        /// The destination acknowledges the chunk that follows the written one.
        WrongChunkAcknowledged,
    }
    /// All mistakes that can be planted in the tunnel.
    STRIPE {
        /// The tunnel grants a channel twice its window regardless of the other channels. Right:
        /// the grants of all channels of a peer together stay within one bound.
        CreditOverWindow,
        /// A tunnel frame is acknowledged while its bytes are still being buffered. Right: the
        /// frame is acknowledged after its bytes are buffered.
        AckBeforeKept,
        /// A channel is connected while bytes of earlier channels are in flight.
        BarrierIgnored,
        /// A channel's end is forwarded before its last byte.
        EndBeforeLastByte,
        /// Bytes that arrive twice are delivered twice.
        DuplicateDelivered,
        /// The chunks of a lost tunnel lane are not resent.
        LostChunkForgotten,
        /// An abort waits until all earlier bytes are delivered. Right: the abort takes effect
        /// immediately.
        ResetBehindData,
        /// The side that opens all lanes opens a lane a second time if the request is repeated.
        /// Right: it uses each lane number once.
        LaneOpenedTwice,
    }
    /// All mistakes that can be planted in keying sessions.
    IPSEC {
        /// The SAs of a new epoch are numbered from 0 again. Right: a session never
        /// reuses a number.
        SaNumberedAgain,
        /// The SAs of a new epoch keep the request id of the previous epoch. Right: each
        /// epoch has its own request id, and only a policy moves traffic to the new SAs.
        RequestIdKept,
        /// This side asks the peer to retire an epoch while its own policies still use the
        /// epoch's SAs.
        RetiredBeforeSwitch,
        /// SAs are removed while policies still protect traffic with them. Right: before that, the
        /// policies are changed to block.
        TakenBackUnblocked,
        /// Before a session installs its own policies, it removes the blocking policies of an
        /// earlier session. Right: it replaces them atomically.
        HeirOpens,
    }
}

/// Whether the mistake is planted. Without the feature `mistakes`, always false.
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

    /// The number of the planted mistake, counted from 1; 0 if none is planted. The
    /// switch is process-wide, because the model checker and the simulator use many
    /// threads.
    static SWITCH: AtomicU32 = AtomicU32::new(0);
    static TURN: Mutex<()> = Mutex::new(());

    /// While this value lives, its mistake is planted, and no other mistake can be planted.
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
