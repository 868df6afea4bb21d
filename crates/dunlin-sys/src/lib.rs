//! The kernel interfaces that Dunlin touches, one file each. The only crate with `unsafe` in it.
#[cfg(feature = "aws-lc")]
pub mod aead;
pub mod affinity;
pub mod cgroup;
pub mod clock;
pub mod epoll;
#[cfg(test)]
#[path = "../tests/huge_pages/mod.rs"]
mod huge_pages;
#[cfg(target_arch = "x86_64")]
pub mod kick;
#[cfg(target_arch = "x86_64")]
pub mod kvm;
pub mod mapping;
pub mod memory;
#[cfg(feature = "rig")]
pub mod netns;
pub mod pagemap;
pub mod passed;
pub mod poll;
pub mod privileges;
pub mod signals;
pub mod socket;
pub mod stdio;
pub mod tcp;
#[cfg(feature = "rig")]
pub mod tun;
pub mod uffd;
