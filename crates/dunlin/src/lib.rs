//! Live migration of virtual machines over many encrypted lanes at once.
//!
//! A VMM implements the traits of [`engine::vmm`], and runs a [`Migration`] on one host
//! and an [`Incoming`] migration on the other. Both run on the caller's thread, take
//! sockets and threads from [`engine::Host`], and report events to an observer. [`lane::identity::Identity`] loads certificates, decides which peers
//! are authorised, and makes the TLS settings of both sides.
//!
//! - [`engine`]: the migration: pre-copy, switchover, and the traits a VMM implements.
//! - [`lane`]: authenticated TCP connections, and the bytes on them.
//! - [`testing`]: conformance tests for a VMM's implementation of those traits.
//!
//! `docs/integrating.md` is a guide to a first migration. `examples/` has three
//! complete VMMs.
//!
//! Features: `ring` (the default) and `aws-lc-rs` select crypto libraries; at least one
//! is required. With both, a probe at start-up picks the faster one.
#![forbid(unsafe_code)]

pub mod engine;
pub mod testing;

pub use engine::destination::Incoming;
pub use engine::source::Migration;

pub use dunlin_lane as lane;

/// The version of vm-memory used in the traits of [`engine::vmm`].
pub use vm_memory;

/// Compiles the code blocks of the integration guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/integrating.md")]
#[doc = include_str!("../../../docs/integrating/migrate.md")]
pub struct Integrating;
