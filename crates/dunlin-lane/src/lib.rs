//! Lanes: authenticated TCP connections, and the bytes that they carry.
//!
//! [`Identity`] loads a host's certificate, key and trust anchors. With the [`Crypto`] to use and
//! the allowed [`Peers`], it makes the TLS settings of both roles: [`ClientTls`] for the side that
//! dials, [`ServerTls`] for the side that accepts.
//!
//! ```no_run
//! use dunlin_lane::{Crypto, Identity, LoadOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (identity, warnings) = Identity::load("/etc/my-vmm/pki".as_ref(), LoadOptions::default())?;
//! for warning in warnings {
//!     eprintln!("{warning}");
//! }
//! let peers = ["host-b.example".parse()?].into_iter().collect();
//! let client = identity.client(&Crypto::auto(), peers)?;
//! # let _ = client;
//! # Ok(())
//! # }
//! ```
//!
//! A [`LaneDialer`] opens lanes, over TCP connections from a [`Connector`]. [`accept`](accept())
//! runs the handshakes of all incoming connections on one thread, and a [`LaneAcceptor`] admits the
//! lanes among them. [`TlsDialer`], [`PlainDialer`], [`TlsAcceptor`] and [`PlainAcceptor`]
//! implement the traits; [`SealedLanes`] adds lanes that a layer below TCP protects, such as IPsec.
//! The migration engine and the tunnel request lanes, and send and receive on them.
//!
//! # Stability
//!
//! The items of this page are the crate's interface, listed in `docs/api/dunlin-lane.txt`. If a
//! type in their signatures has no page here, the type is opaque: pass it on, or print it.
//!
//! The feature `unstable-internals` makes the modules public for the other crates of this
//! workspace, without any promise: an item in them may change or disappear in any release.
//!
//! # Modules
//!
//! - `identity` loads certificates and keys. `peers` and `names` decide which peers are allowed,
//!   `denied` decides which keys are denied; `trust` verifies certificates.
//! - `policy` builds the TLS settings of both roles; `provider` has the crypto libraries, and
//!   `fastest` picks one for this CPU; `kernel` and `offload` decide whether the kernel encrypts.
//! - `handshake` establishes a TLS session and `proof` ties a lane to its migration session.
//!   `accept` runs the handshakes of incoming connections.
//! - `dial` and `admit` define the traits through which the layers above open and admit data lanes;
//!   `security` picks an implementation. `resolve` looks up host names.
//! - `control` is the control lane. `data` sends and receives on data lanes; `record` seals and
//!   opens their TLS records.
//! - `relayed` and `splice` serve connections to programs other than Dunlin.
//! - `fault` maps errors to fault codes, for errors with the same code in every context.
//!
//! This crate does not interpret what a lane carries; the layers above do.
//!
//! ```text
//!   identity ── peers ── names
//!       └──── policy ── provider
//!                │
//!   handshake ── record          control (rustls keeps its keys: the exporter needs them)
//!       └──── data ───┘
//! ```

#![forbid(unsafe_code)]
// Without the feature, only the items below are reachable, and the compiler would report the other
// code as unused. Builds of the workspace enable the feature, so they still report other dead code.
#![cfg_attr(
    not(feature = "unstable-internals"),
    allow(dead_code, unreachable_pub, unused_imports)
)]

pub use internals::accept::{Arrival, LaneSocket, accept};
pub use internals::admit::{AdmitError, LaneAcceptor, PlainAcceptor, TlsAcceptor};
pub use internals::data::{Canceller, Counters, DataReceiver, DataSender, PlainConsent};
pub use internals::dial::{
    Connector, DialCancel, DialError, LaneDialer, LaneRequest, PlainDialer, StandardConnector,
    TlsDialer,
};
pub use internals::identity::{
    Files, Identity, IdentityError, Layout, LoadOptions, Role, SettingsError, Warning,
};
pub use internals::names::{BadName, PeerName};
pub use internals::offload::Offload;
pub use internals::peers::{BadPeer, Peer, PeerIdentity, Peers, Pin};
pub use internals::policy::{ClientTls, ServerTls};
pub use internals::provider::{CipherSuite, Crypto, Provider};
pub use internals::security::SealedLanes;

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod internals;

#[cfg(feature = "unstable-internals")]
pub use internals::*;
