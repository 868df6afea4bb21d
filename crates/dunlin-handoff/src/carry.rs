//! Where the kernel has no TLS: a process of ours that carries a connection in its place.
//!
//! ```text
//!   owner ══ socketpair ══ carrier: seal ─▶ ══ TCP ══ peer
//!                                   ◀─ open
//! ```
//!
//! Whoever made the handshake starts [`run`] in a program of its own and sends it the connection,
//! one end of a socketpair and the keys, over the socket that is its standard input; the other end
//! is handed over. The carrier is no child of anybody by then and holds nothing of who started it.
//! It ends with the connection.
//!
//! What the owner sees is bytes and an end, and an end is all that he sees of a failure too: a unix
//! socket has no way to say more, but for a write into it, which fails (EPIPE), and for a read that
//! says ECONNRESET where something of the owner's had not been taken.
//!
//! Keys are not renewed, as the kernel's are not once a socket was handed over: at
//! [`RECORD_LIMIT`](dunlin_lane::record::RECORD_LIMIT) the connection is at its end.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Interest, poll};
use dunlin_linux::session;
use rustls::crypto::cipher::{AeadKey, Iv};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};
use thiserror::Error;
use zeroize::Zeroizing;

use super::pass::{give, take};
use dunlin_lane::handshake::Renewal;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::provider::parts;
use dunlin_lane::provider::{self, CipherSuite, ProviderError, TlsVersion};
use dunlin_lane::record::{CONTENT_BYTES, HEADER_BYTES, RECEIVED_RECORD_BYTES};
use dunlin_lane::relayed::{Held, Opening, RelayError, Sealing, halves};

/// Records that are sealed and written at once.
const BATCH_RECORDS: usize = 16;
/// Bytes read from the peer at once.
const RECEIVE_BYTES: usize = 256 << 10;
/// How long a peer whose bytes nobody reads any more may take to end the connection. To close it
/// at once would reset it, and with it what the peer has not read yet.
const LINGER: Duration = Duration::from_secs(5);
/// How often a silent peer's thread looks whether that time has passed.
const LOOK: Duration = Duration::from_millis(500);
/// The message that says that the connection is carried.
const READY: &[u8] = b"+";
/// What a carrier may say of its failure.
const REASON_BYTES: usize = 512;
/// One direction's keys: record number, nonce, key.
const DIRECTION_BYTES: usize = 8 + 12 + 32;
const KEYS_BYTES: usize = 2 + 2 * DIRECTION_BYTES;

const _: () = assert!(RECEIVE_BYTES >= 2 * RECEIVED_RECORD_BYTES);

/// Why a connection is not carried, or not any more.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CarryError {
    /// The process cannot be started.
    #[error("a process to carry the connection cannot be started: {0}")]
    Start(#[source] io::Error),
    /// It has given up.
    #[error("the process that was to carry the connection has given up: {0}")]
    GaveUp(String),
    /// The cipher or a key of it.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// What came over standard input is no connection.
    #[error("this command is started by dunlin itself, with a connection on its standard input")]
    NoConnection,
    /// A socket has failed.
    #[error("the connection has failed: {0}")]
    Io(#[from] io::Error),
    /// The TLS is at its end.
    #[error("the connection is over: {0}")]
    Tls(String),
}

impl From<RelayError> for CarryError {
    fn from(error: RelayError) -> Self {
        Self::Tls(error.to_string())
    }
}

/// Has `program`, which must call [`run`] in a process that is not waited for, carry a
/// connection. Returns the end that is to be handed over.
pub(crate) fn spawn(
    mut program: Command,
    keyed: Keyed,
    deadline: Instant,
) -> Result<UnixStream, CarryError> {
    let keys = encode(&keyed)?;
    let (desk, its_desk) = UnixStream::pair().map_err(CarryError::Start)?;
    let (owner, carrier) = UnixStream::pair().map_err(CarryError::Start)?;
    let starting = starting();
    let status = program
        .stdin(OwnedFd::from(its_desk))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Whatever is mounted where the caller stands can be taken away.
        .current_dir("/")
        .status()
        .map_err(CarryError::Start)?;
    drop(starting);
    // It holds the other end of the desk open as long as it lives.
    drop(program);
    if !status.success() {
        return Err(CarryError::GaveUp(status.to_string()));
    }
    let sockets = [keyed.stream.as_fd(), carrier.as_fd()];
    give(&desk, &keys[..], &sockets, deadline).map_err(CarryError::Start)?;
    let mut answer = [0; REASON_BYTES];
    let answered = take(&desk, &mut answer, deadline).map_err(CarryError::Start)?;
    match &answer[..answered.bytes] {
        READY => Ok(owner),
        [] => Err(CarryError::GaveUp("it has ended".to_owned())),
        reason => Err(CarryError::GaveUp(
            String::from_utf8_lossy(reason).into_owned(),
        )),
    }
}

/// Lets carriers go that have ended, where they are left to this process: one that is the first of
/// its process namespace, as in a container, is asked to do so now and then, and must have no other
/// children.
pub fn reap() {
    let _starting = starting();
    session::reap();
}

/// Held while a child is waited for.
fn starting() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries the connection that comes over `desk`, to its end.
///
/// # Errors
/// [`CarryError`]; nobody is there to be told but a log.
pub fn run(desk: impl AsFd, deadline: Instant) -> Result<(), CarryError> {
    let desk = desk.as_fd();
    match receive(desk, deadline) {
        Ok(carried) => {
            give(desk, READY, &[], deadline)?;
            carried.carry()
        }
        Err(error) => {
            let text = error.to_string();
            let reason = &text.as_bytes()[..text.len().min(REASON_BYTES)];
            // Whoever started this may have gone.
            let _ = give(desk, reason, &[], deadline);
            Err(error)
        }
    }
}

fn receive(desk: impl AsFd, deadline: Instant) -> Result<Carried, CarryError> {
    let mut keys = Zeroizing::new([0; KEYS_BYTES]);
    let received = take(desk, &mut keys[..], deadline).map_err(|_| CarryError::NoConnection)?;
    let Ok([tls, plain]) = <[OwnedFd; 2]>::try_from(received.descriptors) else {
        return Err(CarryError::NoConnection);
    };
    // A message this short comes in one piece on a unix socket.
    let keys = Some(&keys).filter(|_| received.bytes == KEYS_BYTES);
    let (is_1_3, secrets) = keys
        .and_then(|keys| decode(keys))
        .ok_or(CarryError::NoConnection)?;
    let provider = provider::auto().provider;
    let (sealing, opening) = halves(secrets, is_1_3, provider, Box::new(NotRenewed))?;
    Ok(Carried {
        tls: tls.into(),
        plain: plain.into(),
        sealing,
        opening,
    })
}

/// A connection's keys as they go to the carrier, whose program is this very one.
fn encode(keyed: &Keyed) -> Result<Zeroizing<Vec<u8>>, ProviderError> {
    // As long as it will be, so that no copy is left behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(KEYS_BYTES));
    bytes.push(u8::from(keyed.version == TlsVersion::V1_3));
    let (suite, _, _) = parts(&keyed.secrets.tx.1)?;
    let number = CipherSuite::ALL.iter().position(|known| *known == suite);
    bytes.push(number.unwrap_or_default() as u8);
    for (sequence, secrets) in [&keyed.secrets.tx, &keyed.secrets.rx] {
        let (_, key, iv) = parts(secrets)?;
        bytes.extend_from_slice(&sequence.to_be_bytes());
        bytes.extend_from_slice(&iv);
        bytes.extend_from_slice(key);
        let end = bytes.len() + 32 - key.len();
        bytes.resize(end, 0);
    }
    Ok(bytes)
}

fn decode(bytes: &[u8; KEYS_BYTES]) -> Option<(bool, ExtractedSecrets)> {
    let suite = *CipherSuite::ALL.get(usize::from(bytes[1]))?;
    let direction = |at: usize| -> Option<(u64, ConnectionTrafficSecrets)> {
        let bytes = bytes.get(at..at + DIRECTION_BYTES)?;
        let sequence = u64::from_be_bytes(bytes[..8].try_into().ok()?);
        let iv = Iv::new(bytes[8..20].try_into().ok()?);
        let key: [u8; 32] = bytes[20..].try_into().ok()?;
        let key = AeadKey::from(key);
        Some((
            sequence,
            match suite {
                CipherSuite::Aes256Gcm => ConnectionTrafficSecrets::Aes256Gcm { key, iv },
                CipherSuite::Aes128Gcm => ConnectionTrafficSecrets::Aes128Gcm { key, iv },
                CipherSuite::ChaCha20Poly1305 => {
                    ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv }
                }
            },
        ))
    };
    let (tx, rx) = (direction(2)?, direction(2 + DIRECTION_BYTES)?);
    Some((bytes[0] == 1, ExtractedSecrets { tx, rx }))
}

/// The secrets behind the keys stay with whoever made the handshake.
pub(super) struct NotRenewed;

impl Renewal for NotRenewed {
    fn sending(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        Err(not_renewed())
    }

    fn receiving(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        Err(not_renewed())
    }
}

fn not_renewed() -> rustls::Error {
    rustls::Error::General("a connection that was handed over keeps its keys".to_owned())
}

struct Carried {
    tls: TcpStream,
    plain: UnixStream,
    sealing: Sealing,
    opening: Opening,
}

impl Carried {
    fn carry(self) -> Result<(), CarryError> {
        let Self {
            tls,
            plain,
            mut sealing,
            mut opening,
        } = self;
        tls.set_read_timeout(Some(LOOK))?;
        let owner_has_left = AtomicBool::new(false);
        thread::scope(|scope| {
            let outward = scope.spawn(|| {
                let result = carry_out(&plain, &tls, &mut sealing);
                if result.is_err() {
                    give_up(&plain, &tls);
                    return result;
                }
                wait_until_left(&plain);
                owner_has_left.store(true, Ordering::SeqCst);
                result
            });
            let inward = carry_in(&tls, &plain, &mut opening, &owner_has_left);
            if inward.is_err() {
                give_up(&plain, &tls);
            }
            let outward = outward.join();
            inward.and(outward.unwrap_or_else(|_| Err(io::Error::other("a panic").into())))
        })
    }
}

/// Wakes the other direction's thread too.
fn give_up(plain: &UnixStream, tls: &TcpStream) {
    // Both fail only where there is nothing left to end.
    let _ = plain.shutdown(Shutdown::Both);
    let _ = tls.shutdown(Shutdown::Both);
}

/// Waits until the owner has closed his end, or both directions have ended.
fn wait_until_left(plain: &UnixStream) {
    let end = Interest {
        fd: plain.as_fd(),
        read: false,
        write: false,
    };
    while poll(&[end], None).is_ok_and(|ready| !ready[0]) {}
}

/// The owner's bytes, to the peer, and then his end.
fn carry_out(
    mut plain: &UnixStream,
    mut tls: &TcpStream,
    sealing: &mut Sealing,
) -> Result<(), CarryError> {
    let layout = sealing.layout();
    let stride = layout.lead + CONTENT_BYTES + layout.trail;
    let mut batch = vec![0; BATCH_RECORDS * stride];
    loop {
        let mut contents: Vec<_> = batch
            .chunks_exact_mut(stride)
            .map(|slot| IoSliceMut::new(&mut slot[layout.lead..layout.lead + CONTENT_BYTES]))
            .collect();
        let count = match plain.read_vectored(&mut contents) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if count == 0 {
            tls.write_all(&sealing.close_notify()?)?;
            return Ok(tls.shutdown(Shutdown::Write)?);
        }
        let mut end = 0;
        for at in (0..count).step_by(CONTENT_BYTES) {
            let start = at / CONTENT_BYTES * stride;
            end = start + layout.lead + CONTENT_BYTES.min(count - at) + layout.trail;
            sealing.seal(&mut batch[start..end])?;
        }
        tls.write_all(&batch[..end])?;
    }
}

/// The peer's bytes, to the owner, and then its end. Bytes for an owner who has left are dropped.
fn carry_in(
    mut tls: &TcpStream,
    mut plain: &UnixStream,
    opening: &mut Opening,
    owner_has_left: &AtomicBool,
) -> Result<(), CarryError> {
    let mut buffer = vec![0; RECEIVE_BYTES];
    let mut filled = 0;
    let mut left_at = None;
    loop {
        if owner_has_left.load(Ordering::SeqCst)
            && left_at.get_or_insert_with(Instant::now).elapsed() > LINGER
        {
            return Ok(());
        }
        match tls.read(&mut buffer[filled..]) {
            Ok(0) if left_at.is_some() => return Ok(()),
            // As from a socket with the kernel's TLS: what holds the stream together is the
            // protocol of those who use it.
            Ok(0) => return Ok(plain.shutdown(Shutdown::Write)?),
            Ok(count) => filled += count,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) =>
            {
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        let mut at = 0;
        while let Some(header) = buffer[at..filled].first_chunk::<HEADER_BYTES>() {
            let whole = opening.record_bytes(*header)?;
            if filled - at < whole {
                break;
            }
            let record = &mut buffer[at..at + whole];
            match opening.open(record)? {
                Held::Data(content) => match plain.write_all(&record[content]) {
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                        owner_has_left.store(true, Ordering::SeqCst);
                    }
                    written => written?,
                },
                Held::Nothing => {}
                Held::Closed => {
                    // Fails where the owner has left.
                    let _ = plain.shutdown(Shutdown::Write);
                    return Ok(());
                }
            }
            at += whole;
        }
        buffer.copy_within(at..filled, 0);
        filled -= at;
    }
}
