//! Test infrastructure: hosts, links, hypervisors and guests on one machine.
//!
//! - [`debian`]: kernels, QEMU and other programs from Debian, cached; the machine's own packages
//!   stay unchanged.
//! - [`cloud_hypervisor`]: a guest in Cloud Hypervisor.
//! - [`hosts`]: several hosts on one machine, and links between them that can be slow, long, cut or
//!   lossy.
//! - [`guest`]: two guests that write to their memory and check it.
//! - [`machine`]: a guest in QEMU: start, control, migration, comparison with another guest.
//! - [`libvirt`]: two hosts, each with its own libvirtd that runs virtual machines.
//! - [`linux`]: kernel interfaces that only tests use.
//! - [`need`]: skips or fails a test if the machine lacks something.
#![deny(unsafe_code)]
#![cfg(target_arch = "x86_64")]

pub mod cache;
pub mod cloud_hypervisor;
pub mod debian;
pub mod guest;
pub mod hosts;
pub mod libvirt;
#[allow(unsafe_code)]
pub mod linux;
pub mod machine;
pub mod need;
