//! Events of sessions.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::plan::SessionParameters;

/// An event. `Display` writes one line for a log.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The traffic in both directions is protected.
    Up(SessionParameters),
    /// A session has ended.
    Over {
        /// The name of the peer.
        peer: String,
        /// The reason; `None` if this side ended it.
        why: Option<String>,
    },
    /// A session has ended, and its ports stay blocked while connections of this host use them.
    /// Without the blocking policies, the connections would continue in the clear.
    StillUsed {
        /// The number of connections.
        connections: usize,
    },
    /// The ports stay blocked after a session, and no process waits to free them. The reason is
    /// that neither side requested the end, or that connections still use the ports.
    Left {
        /// The record with which a later process frees the ports.
        record: PathBuf,
        /// The number of connections on the ports.
        connections: usize,
    },
    /// The policies and SAs that a dead process left have been removed.
    Cleaned {
        /// The record of that process.
        record: PathBuf,
        /// The number of policies and SAs in the record.
        objects: usize,
    },
    /// The policies and SAs of a dead process have been removed, except policies that block
    /// previously protected ports.
    StaysBlocked {
        /// The record with which a later session takes the ports over.
        record: PathBuf,
    },
    /// The policies and SAs of a dead process could not be removed, or its record cannot be read.
    NotCleaned {
        /// The reason.
        why: String,
    },
    /// The peer has not granted an SA for this CPU in time, so lanes of the CPU use the fallback
    /// SA, which seals on one CPU at a time.
    NoOwnAssociation {
        /// The CPU.
        cpu: u32,
    },
    /// Lanes of a CPU used an SA other than the CPU's own. The lanes are moved back to the CPU's
    /// SA.
    Strayed {
        /// The CPU.
        cpu: u32,
        /// Bytes that the lanes sent since the last check.
        sent: u64,
        /// Upper bound of the bytes that the CPU's SA carried in that time.
        carried: u64,
    },
    /// A connection or an offer was rejected.
    Rejected {
        /// The source address of the connection, or the name of the peer. If neither is available,
        /// what was rejected, such as `a lane`.
        from: String,
        /// The reason's code.
        fault: FaultCode,
        /// The reason.
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
            Self::Over { peer, why: None } => write!(formatter, "session with {peer} ended"),
            Self::Over {
                peer,
                why: Some(why),
            } => write!(formatter, "session with {peer} ended: {why}"),
            Self::StillUsed { connections } => write!(
                formatter,
                "the ports stay blocked until the connections that use them end ({connections} now)"
            ),
            Self::Left {
                record,
                connections,
            } => write!(
                formatter,
                "the ports stay blocked until a later process frees them or takes them over ({connections} connections use them now; record {})",
                record.display()
            ),
            Self::Cleaned { record, objects } => write!(
                formatter,
                "removed {objects} policies and SAs of a dead process (record {})",
                record.display()
            ),
            Self::StaysBlocked { record } => write!(
                formatter,
                "ports of a dead process stay blocked until the next session on them (record {})",
                record.display()
            ),
            Self::NotCleaned { why } => {
                write!(
                    formatter,
                    "SAs or policies of a dead process were not removed: {why}"
                )
            }
            Self::NoOwnAssociation { cpu } => write!(
                formatter,
                "the peer grants no SA for CPU {cpu}: lanes of this CPU use the fallback SA; raise the peer's \
                 limit, or use fewer CPUs on this host"
            ),
            Self::Strayed { cpu, sent, carried } => write!(
                formatter,
                "lanes of CPU {cpu} used another SA: the CPU's own SA carried only {carried} of \
                 {sent} bytes; the lanes are moved back to that SA"
            ),
            Self::Rejected { from, why, .. } => write!(formatter, "rejected {from}: {why}"),
        }
    }
}

/// Receives each event, on the thread that reports it. `Arc::new` turns a closure that takes a
/// `&Event` into an observer.
pub type Observer = Arc<dyn dunlin_proto::observe::Observer<Event>>;
