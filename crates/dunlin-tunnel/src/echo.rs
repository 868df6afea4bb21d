//! The echo: the peer's side of a probe. It returns the bytes of its channel.
//!
//! ```text
//!  Tunnel::probe ─▶ channel of the route `dunlin-echo` ═ trunk ═▶ echo in the peer's tunnel
//!       ▲                                                            │
//!       └────────────────────── the same bytes ◀─────────────────────┘
//! ```
//!
//! Every tunnel serves this route to the peers that may use one of its targets.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::Duration;

use super::counted::Counted;
use super::socket::Stream;

/// The name of the echo's route. A configured route with this name and a target replaces the echo.
pub(super) const ECHO_ROUTE: &str = "dunlin-echo";

/// The maximum number of bytes that an echo returns.
pub const MAX_PROBE_BYTES: u64 = 1 << 30;
/// How long an echo waits for the next bytes, and how long a probe waits for its bytes to return.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum number of echoes of one trunk. Each has a thread.
const ECHOES: usize = 4;

/// Starts an echo and returns its connection. `echoes` counts the echoes of the same trunk that
/// have not ended.
///
/// # Errors
/// Too many echoes run, or the process has no free descriptors or threads.
pub(super) fn start(echoes: &Arc<AtomicUsize>) -> io::Result<Stream> {
    let running = Counted::one_more(echoes, ECHOES).ok_or_else(|| {
        let text = format!("limit of simultaneous tests reached for this peer ({ECHOES})");
        io::Error::new(io::ErrorKind::QuotaExceeded, text)
    })?;
    let (near, far) = UnixStream::pair()?;
    far.set_read_timeout(Some(TIMEOUT))?;
    far.set_write_timeout(Some(TIMEOUT))?;
    thread::Builder::new()
        .name("dunlin-echo".to_owned())
        .spawn(move || {
            let _running = running;
            // After a failure the connection is closed too, so the peer needs no other report.
            let _ = io::copy(&mut (&far).take(MAX_PROBE_BYTES), &mut &far);
            let _ = far.shutdown(Shutdown::Write);
        })?;
    Stream::unix(near)
}
