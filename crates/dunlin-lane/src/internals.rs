//! The modules of this crate. With the feature `unstable-internals`, `lib.rs` re-exports the public
//! ones.

pub mod accept;
pub mod admit;
pub mod control;
pub mod data;
pub(crate) mod denied;
pub mod dial;
pub mod fastest;
pub mod fault;
pub mod handshake;
pub mod identity;
pub mod kernel;
pub mod names;
pub mod offload;
pub mod peers;
pub mod policy;
pub mod proof;
pub mod provider;
pub mod record;
pub mod relayed;
pub mod resolve;
pub mod security;
pub mod splice;
pub mod sync;
pub(crate) mod trust;
