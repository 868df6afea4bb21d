//! Lanes: authenticated TCP connections, and the bytes that they carry.
//!
//! - [`identity`] loads a host's certificate, key and trust anchors. [`peers`] and [`names`] decide
//!   which peers are allowed, [`denied`] which keys are not.
//! - [`policy`] builds the TLS settings of both roles; [`provider`] has the crypto libraries, and
//!   [`fastest`] picks one for this CPU; [`kernel`] and [`offload`] decide whether the kernel
//!   encrypts.
//! - [`handshake`] establishes a TLS session and [`proof`] ties a lane to its migration session.
//!   [`accept`] runs the handshakes of all incoming connections on one thread.
//! - [`dial`] and [`admit`] define [`LaneDialer`](dial::LaneDialer) and
//!   [`LaneAcceptor`](admit::LaneAcceptor), the traits through which the layers above open and
//!   admit data lanes; [`security`] picks an implementation. [`resolve`] looks up host names.
//! - [`control`] is the control lane. [`data`] sends and receives on data lanes; [`record`] seals
//!   and opens their TLS records.
//! - [`relayed`] and [`splice`] serve connections to programs other than Dunlin.
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

pub mod accept;
pub mod admit;
pub mod control;
pub mod data;
pub mod denied;
pub mod dial;
pub mod fastest;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod handshake;
pub mod identity;
pub mod kernel;
pub mod names;
pub mod offload;
pub mod peers;
pub mod policy;
pub mod proof;
pub mod provider;
pub mod record;
pub mod relayed;
pub mod resolve;
pub mod security;
pub mod splice;
pub mod sync;
mod trust;
