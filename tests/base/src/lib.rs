//! Helpers for the tests of every crate.
//!
//! - [`Scratch`]: temporary directories.
//! - [`expected`]: what `dunlin doctor` must find under each kernel.
//! - [`huge_pages`]: reserved and transparent huge pages.
//! - [`kvm`]: KVM, for one test at a time.
//! - [`maker`]: names that identify the process that created a resource.
//! - [`need`]: programs and other things that a host may lack.
//! - [`pattern`]: bytes to send.
//! - [`sockets`]: sockets with timeouts, and a port that refuses connections.
#![forbid(unsafe_code)]

pub mod expected;
pub mod huge_pages;
mod kvm;
pub mod maker;
pub mod need;
mod pattern;
mod scratch;
pub mod sockets;

pub use kvm::kvm;
pub use pattern::pattern;
pub use scratch::Scratch;
