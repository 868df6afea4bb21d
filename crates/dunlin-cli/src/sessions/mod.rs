//! `dunlin status`, `cancel` and `resolve`: the state of this host's sessions, from their journals
//! and their processes, and the operator's actions on them.

mod cancel;
mod resolve;
mod status;

pub(crate) use cancel::Cancel;
pub(crate) use resolve::Resolve;
pub(crate) use status::{Status, ago, left_behind, meaning, to_do};
