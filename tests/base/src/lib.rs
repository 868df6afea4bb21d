//! Helpers for the tests of every crate.
//!
//! - [`Scratch`]: temporary directories.
//! - [`huge_pages`]: reserved and transparent huge pages.
//! - [`kvm`]: KVM, for one test at a time.
//! - [`maker`]: names that identify the process that created a resource.
#![forbid(unsafe_code)]

pub mod huge_pages;
mod kvm;
pub mod maker;
mod scratch;

pub use kvm::kvm;
pub use scratch::Scratch;
