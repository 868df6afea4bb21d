//! What the processes of this host report, for every command that shows it: `dunlin status`, `top`
//! and `serve-status`.
//!
//! A [`Snapshot`] is what the journals and the control sockets say at one time. [`Rates`] are the
//! bytes per second between two snapshots.

mod rates;
mod snapshot;

pub(crate) use rates::{Direction, Rates};
pub(crate) use snapshot::{LIVE_LIMIT, Recorded, Session, Snapshot, is_resolvable};
