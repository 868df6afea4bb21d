//! Interfaces that only tests use, one file each: a counting allocator, and the kernel's
//! namespaces, TUN devices, captures, swapping and signals during system calls. Contains the only
//! `unsafe` code of the tests.

pub mod allocations;
pub mod interrupt;
pub mod netns;
pub mod packet;
pub mod swap;
pub mod tun;
