//! Live migration of virtual machines over many encrypted lanes at once.
//!
//! A VMM implements the traits of [`engine::vmm`] and calls
//! [`engine::source::migrate`] on one host and
//! [`engine::destination::receive`] on the other. Both run on the caller's
//! thread, take sockets and threads from [`engine::Host`], and report what
//! happens to an observer. Who may talk to whom is decided by
//! [`lane::identity::Identity`], which makes the TLS settings of both sides.
//!
//! - [`engine`]: the migration: pre-copy, switchover, what a VMM implements.
//! - [`lane`]: TCP connections with their security, and the bytes on them.
//! - [`testing`]: whether a VMM keeps what those traits promise.
//!
//! `docs/integrating.md` leads from here to a first migration, and `examples/`
//! has three whole VMMs.
//!
//! Features: `ring` (the default) and `aws-lc-rs`, the crypto libraries; at
//! least one. With both, a probe at start-up picks the faster one.
#![forbid(unsafe_code)]

pub mod engine;
pub mod testing;

pub use dunlin_lane as lane;

/// The version of vm-memory whose types the traits of [`engine::vmm`] have.
pub use vm_memory;

/// The guide's code is compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/integrating.md")]
pub struct Integrating;
