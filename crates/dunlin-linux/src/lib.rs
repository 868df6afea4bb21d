//! The kernel interfaces that Dunlin touches, one file each. Nothing of KVM or netlink,
//! and nothing for tests alone.
#[cfg(feature = "aws-lc")]
pub mod aead;
pub mod affinity;
pub mod clock;
pub mod epoll;
pub mod ethtool;
pub mod fdpass;
pub mod interrupted;
pub mod ktls;
pub mod mapping;
pub mod memory;
pub mod occupancy;
mod option;
pub mod pagemap;
pub mod passed;
pub mod poll;
pub mod privileges;
pub mod random;
pub mod signals;
pub mod socket;
pub mod splice;
pub mod stdio;
pub mod tcp;
pub mod udp_encap;
pub mod uffd;
