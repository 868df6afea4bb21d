//! The kernel interfaces that Dunlin touches, one file each. The only crate with `unsafe` in it.
#[cfg(feature = "aws-lc")]
pub mod aead;
pub mod affinity;
#[cfg(feature = "rig")]
pub mod bpf;
pub mod cgroup;
pub mod clock;
pub mod epoll;
pub mod fdpass;
#[cfg(test)]
#[path = "../tests/huge_pages/mod.rs"]
mod huge_pages;
#[cfg(feature = "rig")]
pub mod interrupt;
#[cfg(feature = "rig")]
pub mod kcm;
#[cfg(target_arch = "x86_64")]
pub mod kick;
pub mod ktls;
#[cfg(target_arch = "x86_64")]
pub mod kvm;
pub mod mapping;
pub mod memory;
pub mod netdev;
mod netlink;
#[cfg(feature = "rig")]
pub mod netns;
pub mod occupancy;
#[cfg(feature = "rig")]
pub mod packet;
pub mod pagemap;
pub mod passed;
pub mod poll;
pub mod privileges;
pub mod session;
pub mod signals;
pub mod sock_diag;
pub mod socket;
pub mod splice;
pub mod stdio;
pub mod tcp;
#[cfg(feature = "rig")]
pub mod tun;
pub mod uffd;
pub mod xfrm;
