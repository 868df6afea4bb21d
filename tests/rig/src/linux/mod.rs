//! Kernel interfaces that only tests use, one file each: allocations, namespaces, TUN devices,
//! captures, swapping, signals during system calls. Contains the only `unsafe` code of the tests.

pub mod allocations;
pub mod interrupt;
pub mod netns;
pub mod packet;
pub mod swap;
pub mod tun;
