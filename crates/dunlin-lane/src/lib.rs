//! Lanes: authenticated TCP connections, and the bytes that they carry.
//!
//! [`Identity`] loads a host's certificate, key and trust anchors. With the [`Crypto`] to use and the
//! allowed [`Peers`], it makes the TLS settings of both roles: [`ClientTls`] for the side that dials,
//! [`ServerTls`] for the side that accepts.
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
//! A [`LaneDialer`] opens lanes, over TCP connections from a [`Connector`]. [`accept`](accept()) runs
//! the handshakes of all incoming connections on one thread, and a [`LaneAcceptor`] admits the lanes
//! among them. [`TlsDialer`], [`PlainDialer`], [`TlsAcceptor`] and [`PlainAcceptor`] implement the
//! traits; [`SealedLanes`] adds lanes that a layer below TCP protects, such as IPsec. The migration
//! engine and the tunnel request lanes, and send and receive on them.
//!
//! # Stability
//!
//! The items of this page are the crate's interface, listed in `docs/api/dunlin-lane.txt`. A type in
//! their signatures that has no page here is opaque: pass it on, or print it.
//!
//! The feature `unstable-internals` makes the modules public for the other crates of this workspace,
//! without any promise: an item in them may change or disappear in every release.
//!
//! # Modules
//!
//! - `identity` loads certificates and keys. `peers` and `names` decide which peers are allowed,
//!   `denied` which keys are not; `trust` verifies.
//! - `policy` builds the TLS settings of both roles; `provider` has the crypto libraries, and `fastest`
//!   picks one for this CPU; `kernel` and `offload` decide whether the kernel encrypts.
//! - `handshake` establishes a TLS session and `proof` ties a lane to its migration session. `accept`
//!   runs the handshakes of incoming connections.
//! - `dial` and `admit` define the traits through which the layers above open and admit data lanes;
//!   `security` picks an implementation. `resolve` looks up host names.
//! - `control` is the control lane. `data` sends and receives on data lanes; `record` seals and opens
//!   their TLS records.
//! - `relayed` and `splice` serve connections to programs other than Dunlin.
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
// Without the feature, only the items below are reachable; the code behind the rest is unused.
// Builds of the workspace enable the feature, so dead code does not go unnoticed.
#![cfg_attr(
    not(feature = "unstable-internals"),
    allow(dead_code, unreachable_pub, unused_imports)
)]

pub use accept::{Arrival, LaneSocket, accept};
pub use admit::{AdmitError, LaneAcceptor, PlainAcceptor, TlsAcceptor};
pub use data::{Canceller, Counters, DataReceiver, DataSender, PlainConsent};
pub use dial::{
    Connector, DialCancel, DialError, LaneDialer, LaneRequest, PlainDialer, StandardConnector,
    TlsDialer,
};
pub use identity::{
    Files, Identity, IdentityError, Layout, LoadOptions, Role, SettingsError, Warning,
};
pub use names::{BadName, PeerName};
pub use offload::Offload;
pub use peers::{BadPeer, Peer, PeerIdentity, Peers, Pin};
pub use policy::{ClientTls, ServerTls};
pub use provider::{CipherSuite, Crypto, Provider};
pub use security::SealedLanes;

// Each module is public with the feature, and private without it. The pairs are written out because
// rustfmt does not format modules that a macro declares.
#[cfg(feature = "unstable-internals")]
pub mod accept;
#[cfg(not(feature = "unstable-internals"))]
mod accept;
#[cfg(feature = "unstable-internals")]
pub mod admit;
#[cfg(not(feature = "unstable-internals"))]
mod admit;
#[cfg(feature = "unstable-internals")]
pub mod control;
#[cfg(not(feature = "unstable-internals"))]
mod control;
#[cfg(feature = "unstable-internals")]
pub mod data;
#[cfg(not(feature = "unstable-internals"))]
mod data;
mod denied;
#[cfg(feature = "unstable-internals")]
pub mod dial;
#[cfg(not(feature = "unstable-internals"))]
mod dial;
#[cfg(feature = "unstable-internals")]
pub mod fastest;
#[cfg(not(feature = "unstable-internals"))]
mod fastest;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
#[cfg(feature = "unstable-internals")]
pub mod handshake;
#[cfg(not(feature = "unstable-internals"))]
mod handshake;
#[cfg(feature = "unstable-internals")]
pub mod identity;
#[cfg(not(feature = "unstable-internals"))]
mod identity;
#[cfg(feature = "unstable-internals")]
pub mod kernel;
#[cfg(not(feature = "unstable-internals"))]
mod kernel;
#[cfg(feature = "unstable-internals")]
pub mod names;
#[cfg(not(feature = "unstable-internals"))]
mod names;
#[cfg(feature = "unstable-internals")]
pub mod offload;
#[cfg(not(feature = "unstable-internals"))]
mod offload;
#[cfg(feature = "unstable-internals")]
pub mod peers;
#[cfg(not(feature = "unstable-internals"))]
mod peers;
#[cfg(feature = "unstable-internals")]
pub mod policy;
#[cfg(not(feature = "unstable-internals"))]
mod policy;
#[cfg(feature = "unstable-internals")]
pub mod proof;
#[cfg(not(feature = "unstable-internals"))]
mod proof;
#[cfg(feature = "unstable-internals")]
pub mod provider;
#[cfg(not(feature = "unstable-internals"))]
mod provider;
#[cfg(feature = "unstable-internals")]
pub mod record;
#[cfg(not(feature = "unstable-internals"))]
mod record;
#[cfg(feature = "unstable-internals")]
pub mod relayed;
#[cfg(not(feature = "unstable-internals"))]
mod relayed;
#[cfg(feature = "unstable-internals")]
pub mod resolve;
#[cfg(not(feature = "unstable-internals"))]
mod resolve;
#[cfg(feature = "unstable-internals")]
pub mod security;
#[cfg(not(feature = "unstable-internals"))]
mod security;
#[cfg(feature = "unstable-internals")]
pub mod splice;
#[cfg(not(feature = "unstable-internals"))]
mod splice;
#[cfg(feature = "unstable-internals")]
pub mod sync;
#[cfg(not(feature = "unstable-internals"))]
mod sync;
mod trust;
