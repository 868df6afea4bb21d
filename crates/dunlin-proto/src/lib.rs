//! The wire format and the decisions of a migration, without I/O, a clock or threads.
#![forbid(unsafe_code)]
pub mod bitmap;
pub mod control;
pub mod fault;
pub mod frame;
pub mod limits;
pub mod marks;
pub mod negotiate;
pub mod pace;
pub mod precopy;
pub mod schedule;
pub mod switchover;
pub mod wire;
