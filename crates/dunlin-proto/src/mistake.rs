//! Mistakes that tests plant, to show that the simulator and the model would
//! find them. Without the feature `mistakes` none can be made: the question
//! is answered *no* at compile time.

/// A step left out or taken too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mistake {
    /// A lost lane's pages go out again before the destination has fenced it.
    NoFence = 1,
    /// A lost lane's unacknowledged pages are forgotten.
    NoRedirty,
    /// The guest is resumed before *running* is recorded.
    RunsBeforeRecord,
    /// A lane passes a mark that another lane has not reached.
    MarkPassedEarly,
    /// The chunk after the one that was written is acknowledged.
    WrongChunkAcknowledged,
    /// An inquiry is answered while the old control lane can still be read.
    AnswersBeforeClosing,
    /// The source resumes its guest after *commit* without an answer.
    ResumesInDoubt,
    /// *aborted* is told before it is recorded.
    TellsBeforeRecord,
}

impl Mistake {
    /// Every mistake.
    pub const ALL: [Self; 8] = [
        Self::NoFence,
        Self::NoRedirty,
        Self::RunsBeforeRecord,
        Self::MarkPassedEarly,
        Self::WrongChunkAcknowledged,
        Self::AnswersBeforeClosing,
        Self::ResumesInDoubt,
        Self::TellsBeforeRecord,
    ];
}

#[cfg(feature = "mistakes")]
static PLANTED: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Plants a mistake for the whole process, or none.
#[cfg(feature = "mistakes")]
pub fn plant(mistake: Option<Mistake>) {
    let number = mistake.map_or(0, |mistake| mistake as u8);
    PLANTED.store(number, std::sync::atomic::Ordering::SeqCst);
}

/// Whether the mistake is to be made.
#[cfg(feature = "mistakes")]
pub(crate) fn planted(mistake: Mistake) -> bool {
    PLANTED.load(std::sync::atomic::Ordering::SeqCst) == mistake as u8
}

/// Whether the mistake is to be made: never.
#[cfg(not(feature = "mistakes"))]
pub(crate) const fn planted(_: Mistake) -> bool {
    false
}
