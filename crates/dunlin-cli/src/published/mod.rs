//! What processes report in two directories: their status, and the migrations that have ended.
//! Users in the group of a directory can read the reports in it.
//!
//! ```text
//!  VM, tunnel, IPsec, hand-off ──▶ CONTROL/status/KIND-PID.sock ──▶ dunlin serve-status
//!  VM                          ──▶ CONTROL/history/*.json       ──▶
//! ```
//! The sockets of this module take no requests, unlike control sockets ([`crate::control`]).

mod expiry;
pub(crate) mod history;
mod socket;

pub(crate) use expiry::{CertificateLine, expiry};
pub(crate) use socket::{STATUS, StatusSocket, read};
