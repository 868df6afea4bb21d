//! IPsec for TCP ports between two hosts. Two processes negotiate the security associations (SAs)
//! over a TLS control connection: one SA for each CPU or for each connection.
//!
//! [`up`] connects to a [`Server`] on the other host and starts a session. The session ends on
//! request, or when one of the two processes or the control connection ends. During the session,
//! plain TCP connections of other programs on these ports use only ESP in transport mode. A session
//! that is asked to end removes its SAs, and frees its ports when no connection uses them. If the
//! session ends for another reason, or its process is killed, the ports stay blocked: otherwise, an
//! attacker who can interrupt the control connection could make later packets leave unencrypted.
//! The next session with that peer takes the ports over, or [`clean_up`] frees them.
//!
//! ```text
//!  Server, up ─▶ Session ─▶ thread: exchange (proto) decides ─▶ tables (the kernel's)
//!                   │                    │                          │
//!                status               control connection         record on disk
//! ```
//!
//! [`dunlin_proto::ipsec::plan`] documents the order of all steps and why nothing ever leaves in
//! the clear. [`lanes`] runs sessions for Dunlin's own lanes (`--security ipsec`), [`xfrm`] wraps
//! the kernel's tables, and [`inspect`] queries the kernel about a connection that uses kernel TLS.
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
pub use dial::up;
pub use error::IpsecError;
pub use event::{Event, Observer};
pub use options::{Hook, Options};
pub use record::Owner;
pub use recorded::{Recorded, recorded};
pub use session::{Session, Status, clean_up};
pub use sockets::connections;
pub use tables::AssociationStatus;
pub use xfrm::Counters;
