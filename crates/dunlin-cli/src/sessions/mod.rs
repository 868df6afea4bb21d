//! `dunlin status`, `cancel` and `resolve`: what the sessions of this host are
//! at, by their journals and by the processes that have them, and what an
//! operator does about it.

mod cancel;
mod resolve;
mod status;

pub(crate) use cancel::Cancel;
pub(crate) use resolve::Resolve;
pub(crate) use status::{Status, left_behind};
