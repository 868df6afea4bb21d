//! Data lanes: frames of pages in one direction.
//!
//! A [`DataSender`] seals the records of a frame into one buffer that stays in the cache, and
//! writes them to the socket, if possible in one call. A [`DataReceiver`] reads large blocks and
//! opens records one by one. If the crypto library supports it, pages are sealed straight from the
//! source's memory ([`Frame::guest_page`]) and opened straight into the destination's memory
//! ([`DataReceiver::payload_into`]); otherwise each side copies them once. [`DataSender::send_with`]
//! and [`DataReceiver::read_exact`] do the same for private memory. The kernel's own copies are
//! additional. Sending and receiving frames allocates nothing.
//!
//! A frame consists of a header, which the caller defines, and a payload. The header must contain
//! the payload's length. Three kinds of security share this code: TLS records made by this process,
//! TLS records made by the kernel, and plain bytes if both sides consented or IPsec protects the
//! lane. With the last two, this process copies no pages: they go straight from guest memory to
//! the kernel and from the kernel to guest memory.

mod guard;
mod receiver;
mod sender;
mod turn;

use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use guard::LaneGuard;
#[cfg(any(test, feature = "fuzzing"))]
pub use receiver::fuzz;
pub use receiver::{DataReceiver, ReceiveError};
pub use sender::{DataSender, Frame, FrameError, SendError};

use super::handshake::{InKernel, Records};
use super::record::{CONTENT_BYTES, OpenHalf, SealHalf};

/// The unit of a frame's payload. A larger guest page consists of several units.
pub const PAGE_BYTES: usize = 4096;
/// Pages in a full record. No page crosses the boundary of a record that this process makes.
pub const PAGES_PER_RECORD: usize = CONTENT_BYTES / PAGE_BYTES;
/// Payload records in a full frame, not counting the header's record.
pub const RECORDS_PER_FRAME: usize = 16;
/// Payload of a full frame: [`PAGES_PER_FRAME`] pages, sealed and written in one piece. For sizes
/// from 128 KiB to 1 MiB the measured cost per byte is the same (two cores, 1 GiB over loopback, 2
/// MiB second-level caches). The chosen size also fits caches of 512 KiB, and adds less latency in
/// the tunnel and less memory per lane than a larger size.
pub const BATCH_BYTES: usize = RECORDS_PER_FRAME * CONTENT_BYTES;
/// Maximum number of pages in a frame.
pub const PAGES_PER_FRAME: usize = RECORDS_PER_FRAME * PAGES_PER_RECORD;
/// Maximum length of a frame's header.
pub const HEADER_LIMIT_BYTES: usize = 12 << 10;

const _: () = assert!(CONTENT_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(HEADER_LIMIT_BYTES <= CONTENT_BYTES);

/// Default limit for the time without progress on a lane.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Proof that lanes may carry plain bytes: both sides agreed to it, or IPsec protects the lanes.
#[derive(Clone, Copy, Debug)]
pub struct PlainConsent(());

impl PlainConsent {
    /// Returns the proof if `ours` and `theirs` are both true.
    pub fn both(ours: bool, theirs: bool) -> Option<Self> {
        (ours && theirs).then_some(Self(()))
    }

    /// Returns the proof for a connection that IPsec protects. The caller guarantees that a keying
    /// session between the two hosts has set up this protection.
    #[must_use]
    pub fn sealed_below() -> Self {
        Self(())
    }
}

/// Statistics of one end of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of headers and payloads.
    pub content_bytes: u64,
    /// Bytes on the connection, including the records' overhead.
    pub wire_bytes: u64,
    /// The number of data records; zero on a plain lane. If the kernel opens the records, this is
    /// a lower bound.
    pub records: u64,
    /// Read or write calls on the socket.
    pub calls: u64,
}

/// Ends a lane from another thread.
#[derive(Clone, Debug)]
pub struct Canceller(Link);

impl Canceller {
    /// Wakes the thread that is blocked in a call on the lane. The call returns a `Cancelled`
    /// error. The peer sees that the connection ends without a *close_notify*.
    pub fn shutdown(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        // This fails only if the connection has already ended, and that end also wakes the thread.
        let _ = self.0.stream.shutdown(Shutdown::Both);
    }

    /// What the lane's connection has carried; zeros if the kernel does not report it.
    #[must_use]
    #[cfg(feature = "unstable-internals")]
    pub fn traffic(&self) -> dunlin_linux::tcp::Traffic {
        dunlin_linux::tcp::traffic(&*self.0.stream).unwrap_or_default()
    }

    /// Whether neither side has closed the lane's connection.
    #[must_use]
    #[cfg(feature = "unstable-internals")]
    pub fn is_established(&self) -> bool {
        dunlin_linux::tcp::is_established(&*self.0.stream).unwrap_or_default()
    }
}

/// The lane's connection, and whether this side has cancelled it.
#[derive(Clone, Debug)]
struct Link {
    stream: Arc<TcpStream>,
    cancelled: Arc<AtomicBool>,
}

/// What a [`DataSender`] and a [`DataReceiver`] have in common: one end of a lane, without buffers.
struct End {
    link: Link,
    security: Security,
    guard: Option<Box<dyn LaneGuard>>,
    stall_limit: Duration,
}

impl End {
    fn new(stream: TcpStream, security: Security, stall_limit: Duration) -> std::io::Result<Self> {
        Ok(Self {
            link: Link::new(stream)?,
            security,
            guard: None,
            stall_limit,
        })
    }
}

impl Link {
    fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: Arc::new(stream),
            cancelled: Arc::default(),
        })
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }
}

/// The lane's protection. Each end of the lane keeps the keys of both directions, because the
/// direction without data still carries alerts, such as *close_notify*.
enum Security {
    Tls(Box<Keys>),
    Kernel(InKernel),
    Plain,
}

impl From<Records> for Security {
    fn from(records: Records) -> Self {
        match records {
            Records::Process { seal, open } => Self::Tls(Box::new(Keys { seal, open })),
            Records::Kernel(keys) => Self::Kernel(keys),
        }
    }
}

struct Keys {
    seal: SealHalf,
    open: OpenHalf,
}

/// The *close_notify* alert, with level warning.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
