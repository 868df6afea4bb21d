//! What happens to sessions.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use dunlin_proto::ipsec::plan::SessionParameters;

/// Something that happened. Prints as one line for a log.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The traffic of both sides is protected.
    Up(SessionParameters),
    /// A session is over.
    Over {
        /// Who the peer was.
        peer: String,
        /// Why; none where this side ended it.
        why: Option<String>,
    },
    /// A session is over, and its ports stay blocked for now: these many connections of
    /// this host would go on in the clear.
    StillUsed {
        /// How many.
        connections: usize,
    },
    /// A session is over that nobody asked to end, or such connections have not ended in
    /// time: its ports stay blocked, and nobody waits any more.
    Left {
        /// The record by which a later process frees the ports.
        record: PathBuf,
        /// How many connections there are.
        connections: usize,
    },
    /// What a dead process had left is gone.
    Cleaned {
        /// Its record.
        record: PathBuf,
        /// How many policies and SAs the record had.
        objects: usize,
    },
    /// What a dead process had left is gone, save what blocks ports that were protected.
    StaysBlocked {
        /// The record by which a later session takes it over.
        record: PathBuf,
    },
    /// What a dead process had left could not be taken back, or is not known.
    NotCleaned {
        /// Why.
        why: String,
    },
    /// The peer has no room for an SA of this CPU's own: its lanes go by the fallback, which
    /// one CPU at a time seals.
    NoOwnAssociation {
        /// Which.
        cpu: u32,
    },
    /// Lanes of a CPU went by another SA than its own. They are led back to it.
    Strayed {
        /// Whose lanes.
        cpu: u32,
        /// Bytes that they have sent since the last look.
        sent: u64,
        /// Bytes that the SA has carried meanwhile, at most.
        carried: u64,
    },
    /// Somebody was not taken in.
    Rejected {
        /// Where it came from.
        from: String,
        /// Why.
        why: String,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up(parameters) => write!(
                formatter,
                "ports {} between {} and {} are protected, by {}",
                parameters.ports, parameters.local, parameters.peer, parameters.mode
            ),
            Self::Over { peer, why: None } => write!(formatter, "the session with {peer} is over"),
            Self::Over {
                peer,
                why: Some(why),
            } => write!(formatter, "the session with {peer} is over: {why}"),
            Self::StillUsed { connections } => write!(
                formatter,
                "{connections} connections use the ports: these stay blocked until they have ended"
            ),
            Self::Left {
                record,
                connections,
            } => write!(
                formatter,
                "the ports stay blocked; {connections} connections use them. The next session on \
                 them takes them over, or `dunlin ipsec clean` frees them when there are none, by {}",
                record.display()
            ),
            Self::Cleaned { record, objects } => write!(
                formatter,
                "{objects} policies and SAs of a process that has died are gone, by {}",
                record.display()
            ),
            Self::StaysBlocked { record } => write!(
                formatter,
                "ports that a process protected that has died stay blocked, until the next session \
                 on them or `dunlin ipsec clean`, by {}",
                record.display()
            ),
            Self::NotCleaned { why } => {
                write!(formatter, "what a process has left stays: {why}")
            }
            Self::NoOwnAssociation { cpu } => write!(
                formatter,
                "the peer grants no SA for CPU {cpu}: its lanes go by the fallback (allow more \
                 there, or use fewer CPUs here)"
            ),
            Self::Strayed { cpu, sent, carried } => write!(
                formatter,
                "lanes of CPU {cpu} had strayed from its SA, which carried {carried} of {sent} \
                 bytes; they are led back to it"
            ),
            Self::Rejected { from, why } => write!(formatter, "{from} was not taken in: {why}"),
        }
    }
}

/// Who is told what happens, on the threads where it does.
pub type Observer = Arc<dyn Fn(&Event) + Send + Sync>;
