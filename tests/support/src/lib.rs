//! What the tests of several crates share.
//!
//! - [`lane`]: identities, peers and connected pairs; [`identity`]: authorities that issue every
//!   kind of certificate.
//! - [`engine`]: virtual machines in memory that migrate; [`hooks`]: what their VMMs may do wrong;
//!   [`hostile`]: peers that send anything; [`recorded`]: sessions of previous versions.
//! - [`tunnel`]: two tunnels on loopback.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::new_without_default, clippy::unwrap_used)]

pub mod engine;
pub mod hooks;
pub mod hostile;
pub mod identity;
pub mod lane;
pub mod recorded;
pub mod tunnel;
