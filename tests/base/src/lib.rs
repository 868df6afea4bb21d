//! What the tests of every crate need.
//!
//! - [`Scratch`]: temporary directories.
//! - [`huge_pages`]: reserved and transparent huge pages.
//! - [`kvm`]: KVM, for one test at a time.
//! - [`maker`]: names by which a process recognises what a dead one has left.
#![forbid(unsafe_code)]

pub mod huge_pages;
mod kvm;
pub mod maker;
mod scratch;

pub use kvm::kvm;
pub use scratch::Scratch;
