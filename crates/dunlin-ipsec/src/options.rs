//! What a session is begun with.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dunlin_proto::ipsec::plan::{Step, Udp};
use dunlin_proto::ipsec::ports::PortRange;
use dunlin_proto::ipsec::{Mode, Sender};

use crate::bound::AddressBlock;
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
    pub timeout: Duration,
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
            timeout: Duration::from_secs(10),
            rekey_after: Some(Duration::from_secs(60 * 60)),
            records,
            quiet_wait: Duration::from_secs(30),
            bound: Vec::new(),
            before_change: None,
        }
    }

    /// For whom this side wants SAs beside the fallback, at once.
    pub(crate) fn senders(&self, mode: Mode) -> Vec<Sender> {
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
