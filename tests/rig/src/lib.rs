//! What tests stand on that the machine does not offer by itself.
//!
//! - [`debian`]: kernels, QEMU and other programs from Debian, cached, without touching the
//!   machine's own packages.
//! - [`hosts`]: several hosts on one machine, and links between them that can be slow, far, cut or
//!   lossy.
//! - [`guest`]: two guests that write to their memory and check it.
//! - [`machine`]: a guest in a QEMU: started, listened to, migrated, compared with another.
//! - [`linux`]: kernel interfaces that only tests use.
//! - [`need`]: what a test does when the machine lacks something.
#![deny(unsafe_code)]
#![cfg(target_arch = "x86_64")]

pub mod cache;
pub mod debian;
pub mod guest;
pub mod hosts;
#[allow(unsafe_code)]
pub mod linux;
pub mod machine;
pub mod need;
