//! Parts that the tests of several crates share.
//!
//! - [`lane`]: identities, peers and connected pairs.
//! - [`identity`]: authorities that issue many kinds of certificates.
//! - [`engine`]: VMs in ordinary memory that can be migrated.
//! - [`hooks`]: a VM with several kinds of regions, and with calls that can fail.
//! - [`hostile`]: peers that lie.
//! - [`recorded`]: recorded sessions of previous versions.
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
