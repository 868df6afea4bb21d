//! Live migration of virtual machines over many encrypted lanes at once.
#![forbid(unsafe_code)]

pub mod engine;
pub mod lane;
