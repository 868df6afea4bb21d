//! Lanes: TCP connections with their security, and the bytes on them.
//!
//! [`identity`] loads a host's certificates, [`peers`] says whom it accepts, [`policy`] how TLS is
//! spoken; [`provider`] picks the crypto library that is fastest on this CPU. [`handshake`] turns a connection into a data
//! lane, whose bytes [`record`] seals and opens and [`data`] sends and receives; [`control`] turns
//! one into the control lane; [`accept`] does both for connections that come in, many at a time on
//! one thread; [`dial`] and [`admit`] have the traits by which engine and tunnel open and admit data
//! lanes, whatever protects them; `reach` finds the first of a name's addresses that answers. The
//! layers above decide what the bytes mean.
//!
//! ```text
//!   identity ── peers ── names
//!       └──── policy ── provider
//!                │
//!   handshake ── record          control (rustls keeps the keys, so that it can export)
//!       └──── data ───┘
//! ```

#![forbid(unsafe_code)]

pub mod accept;
pub mod admit;
pub mod control;
pub mod data;
pub mod denied;
pub mod dial;
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
pub mod security;
pub mod splice;
pub mod sync;
mod trust;
