//! Kernel interfaces that only tests use, one file each: namespaces, TUN devices, captures, swapping,
//! signals at an awkward moment. The only `unsafe` of the tests.

pub mod interrupt;
pub mod netns;
pub mod packet;
pub mod swap;
pub mod tun;
