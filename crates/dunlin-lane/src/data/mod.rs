//! The bulk of a lane: frames of pages one way.
//!
//! A [`DataSender`] seals the records of a frame into one buffer that stays in the cache, and hands
//! it to the socket in one call; a [`DataReceiver`] reads much at once and opens records one by
//! one. Where the crypto library can, pages are sealed straight out of one guest's memory
//! ([`Frame::guest_page`]) and opened straight into the other's ([`DataReceiver::payload_into`]);
//! else each is copied once at either end. The kernel's own copies come on top. Nothing is
//! allocated after the lane is made.
//!
//! A frame is a header, whose meaning is the caller's, and a payload that the header must
//! describe: the receiver has to know its length. Three securities share this code: TLS records
//! made here, TLS records made by the kernel and, where both sides consented, plain bytes. To the
//! kernel pages go straight out of guest memory too, and come from it straight into the other's.

mod guard;
mod receiver;
mod sender;

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

/// The unit that a frame is laid out in. Larger pages of the guest are several of these.
pub const PAGE_BYTES: usize = 4096;
/// Pages in a full record; none ever straddles two.
pub const PAGES_PER_RECORD: usize = CONTENT_BYTES / PAGE_BYTES;
/// Records in a full frame, apart from the one of its header.
pub const RECORDS_PER_FRAME: usize = 16;
/// Payload of a full frame: [`PAGES_PER_FRAME`] pages, sealed and written at once. From 128 KiB to
/// 1 MiB the cost per byte is the same within what can be measured (two cores, 1 GiB over
/// loopback, second-level caches of 2 MiB), so this is the size that also stays in caches of
/// 512 KiB, and holds up less of the tunnel's latency and of each lane's memory than a larger one.
pub const BATCH_BYTES: usize = RECORDS_PER_FRAME * CONTENT_BYTES;
/// Pages that one frame takes.
pub const PAGES_PER_FRAME: usize = RECORDS_PER_FRAME * PAGES_PER_RECORD;
/// The longest header of a frame.
pub const HEADER_LIMIT_BYTES: usize = 12 << 10;

const _: () = assert!(CONTENT_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(HEADER_LIMIT_BYTES <= CONTENT_BYTES);

/// How long a lane may stand still unless the caller says otherwise.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Proof that both sides agreed to send this session's memory in the clear.
#[derive(Clone, Copy, Debug)]
pub struct PlainConsent(());

impl PlainConsent {
    /// The proof, if `ours` and `theirs` both say yes.
    pub fn both(ours: bool, theirs: bool) -> Option<Self> {
        (ours && theirs).then_some(Self(()))
    }

    /// The consent for a connection whose packets are sealed below TCP, by an IPsec session of
    /// both sides. The caller vouches for it.
    #[must_use]
    pub fn sealed_below() -> Self {
        Self(())
    }
}

/// What has passed over one end of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of headers and payloads.
    pub content_bytes: u64,
    /// Bytes on the connection, records' overhead included.
    pub wire_bytes: u64,
    /// Data records; zero on a plain lane.
    pub records: u64,
    /// Reads or writes of the socket.
    pub calls: u64,
}

/// Ends a lane from another thread.
#[derive(Clone, Debug)]
pub struct Canceller(Link);

impl Canceller {
    /// Wakes the thread that is blocked in the lane, which gets a `Cancelled` error, as does
    /// every later call. The peer sees the connection cut.
    pub fn shutdown(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        // Fails only when the connection is gone already, which wakes the thread too.
        let _ = self.0.stream.shutdown(Shutdown::Both);
    }
}

/// The connection of a lane and the word that it was ended here.
#[derive(Clone, Debug)]
struct Link {
    stream: Arc<TcpStream>,
    cancelled: Arc<AtomicBool>,
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

/// What protects the bytes. Both halves are kept on both sides: the one that carries no data
/// carries the close and alerts.
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

/// A *close_notify*, whose level is a warning.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
