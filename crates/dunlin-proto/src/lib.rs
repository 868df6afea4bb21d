//! The wire format and the decisions of a migration, without I/O, a clock or threads.
//!
//! Bytes: [`wire`] reads and writes within bounds, [`negotiate`] opens
//! connections, [`control`] and [`frame`] are what they carry, [`limits`] has
//! every bound and [`fault`] every reason to give up. Decisions: [`bitmap`] and
//! [`schedule`] say which pages go next on which lane, [`marks`] keep
//! iterations apart, [`pace`] caps the rate, [`precopy`] says when to pause,
//! and [`switchover`] who runs the VM, by what stands in the [`journal`].
//! The tunnel has its own: [`stripe`] spreads connections over lanes. The
//! hand-off's is [`client_hello`]: whom a client of TLS wants. [`ipsec`] plans
//! security associations and how two hosts agree on them.
//! [`text`] makes a peer's words safe to show. [`mistake`] plants errors in them for the tests that must find them.
#![forbid(unsafe_code)]
pub mod bitmap;
pub mod client_hello;
pub mod control;
pub mod fault;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod ipsec;
pub mod journal;
pub mod lanes;
pub mod limits;
pub mod marks;
pub mod mistake;
pub mod negotiate;
pub mod pace;
pub mod precopy;
pub mod received;
pub mod schedule;
pub mod stripe;
pub mod switchover;
pub mod text;
pub mod wire;
