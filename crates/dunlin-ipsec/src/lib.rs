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

mod acceptor;
mod bound;
mod dial;
mod error;
mod event;
pub mod inspect;
pub mod lanes;
mod netdev;
mod netlink;
mod options;
mod record;
mod recorded;
mod session;
pub mod sock_diag;
mod sockets;
mod tables;
mod udp;
pub mod xfrm;

pub use dunlin_proto::ipsec::object::{
    Action, Association, Direction, Encapsulation, Listener, Object, Policy, Selector,
};
pub use dunlin_proto::ipsec::plan::{SessionParameters, Step, Udp};
pub use dunlin_proto::ipsec::ports::{NotPorts, PortBlock, PortRange};
pub use dunlin_proto::ipsec::{Grant, Mode, Sender, Slot};

pub use acceptor::{Peer, Server};
pub use bound::{AddressBlock, NotAddresses};
pub use dial::{up, up_unless};
pub use error::IpsecError;
pub use event::{Event, Observer};
pub use options::{Hook, Options};
pub use record::Owner;
pub use recorded::{Recorded, recorded};
pub use session::{Session, Status, clean_up};
pub use tables::AssociationStatus;
pub use xfrm::Counters;
