//! IPsec for the TCP ports between two hosts: security associations that two processes
//! agree on over a TLS control connection, one for each CPU or each connection.
//!
//! [`up`] connects to a [`Server`] on the other host; both then have a session, which
//! stands as long as both processes and their control connection do. Programs' plain
//! TCP connections on the ports go by ESP in transport mode meanwhile, and by nothing
//! else. When a session was asked to end, what it installed is taken back. When it ends
//! for another reason, or its process is killed, the ports stay blocked until the next one
//! on them with that peer takes them over, or [`clean_up`] frees them: whoever can cut the control
//! connection must not have what follows sent in the clear.
//!
//! ```text
//!  Server, up ─▶ Session ─▶ thread: exchange (proto) decides ─▶ tables (the kernel's)
//!                   │                    │                          │
//!                status               control connection         record on disk
//! ```
//!
//! [`dunlin_proto::ipsec::plan`] has the order of everything and why nothing is ever in
//! the clear. [`lanes`] has sessions for Dunlin's own lanes, with `--security ipsec`; [`xfrm`] the
//! kernel's tables; [`inspect`] asks the kernel about a connection whose TLS it does.
#![forbid(unsafe_code)]

mod bound;
mod dial;
mod door;
mod error;
pub mod inspect;
pub mod lanes;
mod netdev;
mod netlink;
mod record;
mod recorded;
mod session;
pub mod sock_diag;
mod sockets;
mod tables;
mod udp;
pub mod xfrm;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use dunlin_proto::ipsec::object::{
    Action, Association, Direction, Encapsulation, Listener, Object, Policy, Selector,
};
pub use dunlin_proto::ipsec::plan::{Layout, Step, Udp};
pub use dunlin_proto::ipsec::ports::{NotPorts, PortBlock, PortRange};
pub use dunlin_proto::ipsec::{Grant, Mode, Sender, Slot};

pub use bound::{AddressBlock, NotAddresses};
pub use dial::{up, up_unless};
pub use door::{Peer, Server};
pub use error::IpsecError;
pub use record::Owner;
pub use recorded::{Recorded, recorded};
pub use session::{AssociationStatus, Session, Status};
pub use xfrm::Counters;

use dunlin_lane::peers::Peer as Allowed;

/// What a side wants, or allows.
#[derive(Clone)]
pub struct Options {
    /// How traffic is spread; a server does what it is asked.
    pub mode: Mode,
    /// The ports to protect; of a server, those that it may be asked for.
    pub ports: PortRange,
    /// CPUs of this host that send, each with an SA of its own (mode cpu).
    pub cpus: Vec<u32>,
    /// This side's ports for ESP in UDP; of a server, if it is asked for that.
    pub udp: Option<Udp>,
    /// SAs that the peer may have for what it sends, in one epoch.
    pub sas_max: u16,
    /// How long a peer may take to answer.
    pub patience: Duration,
    /// After how long the keys of what this side sends are renewed.
    pub rekey_after: Option<Duration>,
    /// Directory of the records of what is installed.
    pub records: PathBuf,
    /// How long an ended session waits for the end of connections on its ports before
    /// it leaves them blocked, for a later process to free.
    pub quiet_wait: Duration,
    /// Of a server: peers that may come from these addresses alone.
    pub bound: Vec<(Allowed, Vec<AddressBlock>)>,
    /// Called before each change of the kernel's tables, on the thread that makes it.
    pub before_change: Option<Hook>,
}

impl Options {
    /// The usual ones, for these ports and with records in this directory.
    #[must_use]
    pub fn new(mode: Mode, ports: PortRange, records: PathBuf) -> Self {
        Self {
            mode,
            ports,
            cpus: Vec::new(),
            udp: None,
            sas_max: dunlin_proto::limits::MAX_SAS,
            patience: Duration::from_secs(10),
            rekey_after: Some(Duration::from_secs(60 * 60)),
            records,
            quiet_wait: Duration::from_secs(30),
            bound: Vec::new(),
            before_change: None,
        }
    }

    /// For whom this side wants SAs beside the fallback, at once.
    fn senders(&self, mode: Mode) -> Vec<Sender> {
        match mode {
            Mode::Cpu => self.cpus.iter().copied().map(Sender::Cpu).collect(),
            Mode::Connection => Vec::new(),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Options")
            .field("mode", &self.mode)
            .field("ports", &self.ports)
            .field("cpus", &self.cpus)
            .finish_non_exhaustive()
    }
}

/// Who is told of each change of the kernel's tables before it is made.
pub type Hook = Arc<dyn Fn(&Step) + Send + Sync>;

/// Something that happened. Prints as one line for a log.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The traffic of both sides is protected.
    Up(Layout),
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
            Self::Up(layout) => write!(
                formatter,
                "ports {} between {} and {} are protected, by {}",
                layout.ports, layout.local, layout.peer, layout.mode
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

/// Takes back what processes that have died left in this network namespace.
///
/// # Errors
/// The kernel does not answer, or a record cannot be read; the others are done first.
pub fn clean_up(options: &Options, observer: &Observer) -> Result<(), IpsecError> {
    session::free_all(options, observer)?.map_or(Ok(()), Err)
}
