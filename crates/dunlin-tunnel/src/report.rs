//! The report: a text about this host, for a peer that asks. The tunnel does not interpret it. The
//! asking side is in `probe`.
//!
//! ```text
//!  Tunnel::report ─▶ channel of the route `dunlin-report` ═ trunk ═▶ text of TunnelBuilder::report
//!       ▲                                                              │
//!       └──────────────── at most 16 KiB, then the end ◀───────────────┘
//! ```
//!
//! A tunnel that has a report answers peers that may use one of its targets. It reads nothing from
//! the channel, so a request has no parameters and changes nothing.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use dunlin_lane::sync::lock;

use super::socket::Stream;

/// The route of the report. A configured target of this name replaces the report.
pub(super) const REPORT_ROUTE: &str = "dunlin-report";
/// The length of the longest report. It fits into the buffer of a unix socket, so a report is
/// written without a thread that waits.
pub const MAX_REPORT_BYTES: usize = 16 << 10;
/// The shortest time between two reports for one trunk.
const INTERVAL: Duration = Duration::from_secs(1);

/// Makes the report, each time that a peer asks.
pub(super) type Reporter = Box<dyn Fn() -> String + Send + Sync>;

/// The time of a trunk's last report.
#[derive(Debug, Default)]
pub(super) struct LastReport(Mutex<Option<Instant>>);

impl LastReport {
    /// Whether a report may be made now. If so, the next one may be made after [`INTERVAL`].
    fn begin(&self, now: Instant) -> bool {
        let mut last = lock(&self.0);
        let is_due = last.is_none_or(|last| now.duration_since(last) >= INTERVAL);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

/// Makes a report. Returns a connection from which it can be read.
///
/// # Errors
/// The trunk's last report is too recent, the report is too long, or the process has no free
/// descriptors.
pub(super) fn start(reporter: &Reporter, last: &LastReport) -> io::Result<Stream> {
    if !last.begin(Instant::now()) {
        let text = format!("only one report every {} s for a peer", INTERVAL.as_secs());
        return Err(io::Error::new(ErrorKind::QuotaExceeded, text));
    }
    let text = reporter();
    if text.len() > MAX_REPORT_BYTES {
        return Err(too_long());
    }
    let (near, far) = UnixStream::pair()?;
    (&far).write_all(text.as_bytes())?;
    Stream::unix(near)
}

pub(super) fn too_long() -> io::Error {
    let text = format!("report longer than {MAX_REPORT_BYTES} bytes");
    io::Error::new(ErrorKind::InvalidData, text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i8_a_trunk_gets_one_report_per_interval() {
        let (last, now) = (LastReport::default(), Instant::now());
        assert!(last.begin(now));
        assert!(!last.begin(now + INTERVAL / 2));
        assert!(last.begin(now + INTERVAL));
        let reporter: Reporter = Box::new(|| "x".repeat(MAX_REPORT_BYTES + 1));
        let refused = start(&reporter, &LastReport::default()).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidData);
    }
}
