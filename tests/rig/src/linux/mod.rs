//! Kernel interfaces that only tests use, one file each: namespaces, TUN devices, captures,
//! swapping, signals during system calls. Contains the only `unsafe` code of the tests.

pub mod interrupt;
pub mod netns;
pub mod packet;
pub mod swap;
pub mod tun;
