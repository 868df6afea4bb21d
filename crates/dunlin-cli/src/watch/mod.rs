//! What the processes of this host report, for every command that shows it: `dunlin status`, `top`
//! and `serve-status`.
//!
//! A [`Snapshot`] is what the journals and the control sockets say at one time, or what the status
//! sockets ([`crate::published`]) say. [`rates::Rates`] are the bytes per second between two
//! snapshots. `source` takes samples. A sample contains a snapshot and its rates, once as JSON and
//! once as text for `metrics`. The script of `page` shows the JSON. The metrics include the
//! `totals` of ended migrations. `serve` serves the samples over `http`, within the CPU time of
//! `budget`.

mod budget;
mod http;
mod metrics;
mod page;
mod rates;
mod serve;
mod snapshot;
mod source;
mod totals;

pub(crate) use rates::{Direction, Rates};
pub(crate) use serve::ServeStatus;
pub(crate) use snapshot::{LIVE_LIMIT, Recorded, Session, SessionLine, Snapshot, is_resolvable};
