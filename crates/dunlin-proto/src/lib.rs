//! Wire formats and decisions of a live migration, without I/O, a clock or
//! threads.
//!
//! Formats: [`wire`] reads and writes within bounds, [`negotiate`] defines how a connection opens,
//! and [`control`] and [`frame`] define what a connection carries. [`limits`] has every bound, and
//! [`fault`] has the codes of all refusals and failures.
//!
//! Decisions: [`bitmap`] and [`schedule`] choose the pages that each lane sends next, and [`lanes`]
//! tracks the lanes. [`received`] tracks the chunks that have arrived, and [`marks`] keeps
//! iterations apart. [`pace`] and [`shares`] cap rates. [`precopy`] decides when to pause the
//! guest. [`switchover`] decides, from the records in the [`journal`], which side runs the VM.
//! [`sessions`] assigns the connections of a shared listener to sessions.
//!
//! Other products: [`stripe`] spreads the tunnel's connections over lanes,
//! [`client_hello`] reads the server name that a TLS client asks for
//! (hand-off), and [`ipsec`] plans security associations and decides how two
//! hosts agree on them.
//!
//! [`text`] escapes a peer's text for display. [`mistake`] plants errors in the
//! decisions, for the tests that must find them.
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
pub mod observe;
pub mod pace;
pub mod precopy;
pub mod received;
pub mod schedule;
pub mod sessions;
pub mod shares;
pub mod stripe;
pub mod switchover;
pub mod text;
pub mod wire;
