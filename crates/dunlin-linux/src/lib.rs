//! Safe wrappers of Linux interfaces, one module for each. Wrappers of KVM, of netlink and of
//! interfaces that only tests use are in other crates.
pub mod accounts;
#[cfg(feature = "aws-lc")]
pub mod aead;
pub mod affinity;
pub mod aligned;
pub mod clock;
pub mod epoll;
pub mod ethtool;
pub mod fdpass;
pub mod heap;
pub mod interrupted;
pub mod ktls;
pub mod libraries;
pub mod local;
pub mod mapping;
pub mod memory;
pub mod namespace;
pub mod occupancy;
mod option;
pub mod pagemap;
pub mod passed;
pub mod poll;
pub mod privileges;
pub mod random;
pub mod redirected;
pub mod regular;
pub mod signals;
pub mod socket;
pub mod splice;
pub mod stdio;
pub mod tcp;
pub mod udp_encap;
pub mod uffd;
pub mod vectored;
