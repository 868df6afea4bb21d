//! Options of a session.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dunlin_proto::ipsec::plan::{Step, Udp};
use dunlin_proto::ipsec::ports::PortRange;
use dunlin_proto::ipsec::{Mode, Sender};

use crate::bound::AddressBlock;
use dunlin_lane::peers::Peer as Allowed;

/// The options of one side: what a client requests, or what a server allows.
#[derive(Clone)]
pub struct Options {
    /// How traffic is spread over SAs. A server uses the mode that the peer requests.
    pub mode: Mode,
    /// The ports to protect. For a server: the ports that peers may request.
    pub ports: PortRange,
    /// The CPUs of this host that send, each with its own SA (mode cpu).
    pub cpus: Vec<u32>,
    /// This side's ports for ESP in UDP. A server uses them if the peer requests ESP in UDP.
    pub udp: Option<Udp>,
    /// The maximum number of SAs per epoch (from one rekey to the next) for the packets that the
    /// peer sends.
    pub sas_max: u16,
    /// The timeout for each answer from the peer.
    pub timeout: Duration,
    /// The interval after which this side renews the keys for the packets that it sends; `None` to
    /// renew them only on request.
    pub rekey_after: Option<Duration>,
    /// The directory of the records of installed objects.
    pub records: PathBuf,
    /// How long an ended session waits for the connections on its ports to end. If some remain
    /// after that time, the ports stay blocked until a later process frees them.
    pub quiet_wait: Duration,
    /// For a server: the peers that may connect only from certain addresses, each with its
    /// addresses.
    pub bound: Vec<(Allowed, Vec<AddressBlock>)>,
    /// Called before each step of a plan, on the thread that performs the step.
    pub before_change: Option<Hook>,
}

impl Options {
    /// The default options, with these ports and this directory of records.
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

    /// The senders for which this side requests an SA at the start, in addition to the fallback SA.
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

/// A function that is called with each step of a plan, before the step changes the kernel's tables.
pub type Hook = Arc<dyn Fn(&Step) + Send + Sync>;
