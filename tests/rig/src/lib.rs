//! What tests stand on that the machine does not offer by itself.
//!
//! - [`debian`]: kernels, QEMU and other programs from Debian, cached, without touching the
//!   machine's own packages.
#![forbid(unsafe_code)]

pub mod cache;
pub mod debian;
