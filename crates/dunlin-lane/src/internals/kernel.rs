//! Kernel TLS: finds out whether this kernel can seal and open records, and installs a
//! connection's keys in it.
//!
//! ```text
//!   requested: process ──────────────────────────────────────────────▶ in the process
//!              kernel, auto ──▶ probe: a connection to this host
//!                                 │ no module, no cipher, one direction only
//!                                 ├──── auto ────────────────────────▶ in the process
//!                                 ├──── kernel ──▶ an error
//!                                 │ slow driver: auto ───────────────▶ in the process
//!                                 └──▶ keys of both directions ──────▶ in the kernel
//! ```
//!
//! If the kernel rejects a connection's keys although it accepted the probe's, the connection is
//! closed. It is not used with keys in this process, because the kernel may already have the key of
//! one direction. With `auto`, later connections then use this process until the kernel is probed
//! again.

mod chosen;
mod driver;
mod speed;

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_linux::ktls::{self, Cipher, Direction, Key, Version};
use dunlin_proto::fault::FaultCode;
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};
use thiserror::Error;

use super::offload::Offload;
use super::provider::{CipherSuite, parts};
use super::sync::lock;

pub use chosen::{Acceleration, Chosen, Device, Inspector, RecordEngine, RecordEngines};
pub use driver::Driver;
pub use speed::speed;

/// Time after a refusal until the kernel is probed again.
const REFUSAL_LIFETIME: Duration = Duration::from_secs(30);
/// Timeout of the probe's connection.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// Why the kernel does not seal and open records.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// The kernel has no TLS.
    #[error(
        "this kernel has no TLS: load its module when the host starts (`modprobe tls`; a process \
         in a container or without privileges cannot load it), or use a kernel built \
         with CONFIG_TLS"
    )]
    Absent,
    /// The kernel's TLS does not support this cipher.
    #[error("this kernel's TLS does not support {suite} ({reason}): allow another cipher suite")]
    Cipher {
        /// The cipher.
        suite: CipherSuite,
        /// The kernel's error.
        reason: String,
    },
    /// The kernel rejected the key for one direction.
    #[error("this kernel's TLS rejected the key for {} ({reason})", direction_name(*.direction))]
    Direction {
        /// The rejected direction.
        direction: Direction,
        /// The kernel's error.
        reason: String,
    },
    /// The kernel's cipher driver uses generic code, at least in part.
    #[error(
        "this kernel's cipher driver is {driver}, which is slow: load a driver that uses the processor's \
         vector or AES instructions (for AES-GCM: `modprobe aesni-intel`), or require kernel TLS \
         explicitly"
    )]
    Slow {
        /// The kernel's driver.
        driver: Driver,
    },
    /// This process cannot determine which driver the kernel uses.
    #[error(
        "cannot read this kernel's cipher driver from /proc/crypto, so the driver may be slow: let \
         this process read that file (a service's ProcSubset=pid hides it), or require kernel TLS \
         explicitly"
    )]
    Untold,
    /// The peer closed the connection before any key was installed.
    #[error("the peer closed the connection before its keys were installed in the kernel")]
    Gone,
    /// Any other failure.
    #[error("cannot set up this kernel's TLS: {reason}")]
    Failed {
        /// The cause.
        reason: String,
    },
}

impl Refused {
    /// The fault code.
    pub fn fault(&self) -> FaultCode {
        match self {
            Self::Gone => FaultCode::ControlLost,
            _ => FaultCode::Kernel,
        }
    }
}

/// What the kernel's TLS supports for a cipher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// The driver that seals and opens records; `None` if the kernel does not report it.
    pub driver: Option<Driver>,
    /// Whether the kernel can replace a connection's keys (since Linux 6.14).
    pub renews_keys: bool,
}

/// Whether the kernel or this process seals and opens records, and why.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Whether the kernel seals and opens records.
    pub is_kernel: bool,
    /// A line for the log.
    pub reason: String,
    /// The kernel's driver, if the kernel seals and opens records and reports its driver.
    pub driver: Option<Driver>,
}

/// Chooses by the setting `offload` whether the kernel or this process seals and opens the records
/// of `suite`. The first call for a suite opens a connection to this host and may load the kernel's
/// module.
///
/// # Errors
/// [`Refused`], if the setting requires the kernel and the kernel cannot seal and open the records.
pub fn choose(offload: Offload, suite: CipherSuite) -> Result<Choice, Refused> {
    if offload == Offload::Process {
        return Ok(process(&"as configured"));
    }
    let abilities = match abilities(suite) {
        Ok(abilities) => abilities,
        Err(refused) if offload == Offload::Auto => return Ok(process(&refused)),
        Err(refused) => return Err(refused),
    };
    match (abilities.driver, offload) {
        (None, Offload::Auto) => Ok(process(&Refused::Untold)),
        (Some(driver), Offload::Auto) if driver.is_slow() => Ok(process(&Refused::Slow { driver })),
        (driver, _) => {
            let by = driver.as_ref().map(|driver| format!(", with {driver}"));
            Ok(Choice {
                is_kernel: true,
                reason: format!(
                    "TLS records are sealed in the kernel{}",
                    by.unwrap_or_default()
                ),
                driver,
            })
        }
    }
}

fn process(reason: &dyn fmt::Display) -> Choice {
    Choice {
        is_kernel: false,
        driver: None,
        reason: format!("TLS records are sealed in this process: {reason}"),
    }
}

/// Returns what the kernel supports for `suite`, from a cached probe. A refusal is cached for only
/// half a minute, because the module may be loaded later. A failure of this process (for example,
/// no free descriptor) is not cached. The probe opens a connection to this host. If the process
/// will later be confined so that it cannot connect, call this function before the confinement, so
/// that the result is in the cache.
///
/// # Errors
/// [`Refused`].
pub fn abilities(suite: CipherSuite) -> Result<Abilities, Refused> {
    let mut cache = cache();
    let slot = &mut cache[suite as usize];
    if let Some(found) = slot
        && found.is_current()
    {
        return found.result.clone();
    }
    let result = probe(suite);
    match (Cached::of(&result), slot) {
        (Some(found), slot) => *slot = Some(found),
        // The kernel could not be probed again, so the cached result stays valid.
        (None, Some(found)) => return found.result.clone(),
        (None, None) => {}
    }
    result
}

/// Caches a refusal, so that for [`REFUSAL_LIFETIME`] `auto` lets this process seal and open records
/// instead of the kernel. Called when the kernel refuses a connection although the probe succeeded.
fn remember(suite: CipherSuite, refused: &Refused) {
    if let Some(found) = Cached::of(&Err(refused.clone())) {
        cache()[suite as usize] = Some(found);
    }
}

/// The cached result for a suite.
struct Cached {
    result: Result<Abilities, Refused>,
    at: Instant,
}

impl Cached {
    /// Returns `None` for a result that says nothing about the kernel.
    fn of(result: &Result<Abilities, Refused>) -> Option<Self> {
        match result {
            Err(Refused::Failed { .. } | Refused::Gone) => None,
            result => Some(Self {
                result: result.clone(),
                at: Instant::now(),
            }),
        }
    }

    fn is_current(&self) -> bool {
        self.result.is_ok() || self.at.elapsed() < REFUSAL_LIFETIME
    }
}

type Cache = [Option<Cached>; CipherSuite::ALL.len()];

fn cache() -> MutexGuard<'static, Cache> {
    static CACHE: Mutex<Cache> = Mutex::new([const { None }; CipherSuite::ALL.len()]);
    lock(&CACHE)
}

/// Installs both keys of a connection in the kernel, before anything is sent with them.
///
/// # Errors
/// [`Refused`]. The connection must then be closed without sending on it.
pub fn install(
    stream: &TcpStream,
    secrets: &ExtractedSecrets,
    version: Version,
) -> Result<(), Refused> {
    let (suite, ..) = parts(&secrets.rx.1).map_err(failed)?;
    match prepare(stream, suite, version)? {
        true => give(stream, secrets, version),
        false => Err(Refused::Gone),
    }
}

/// Prepares a connection for [`give`]. Returns false if the peer has already closed the connection.
/// In that case the kernel has no key, and this process can still read the peer's last message,
/// which usually contains the reason for the close.
///
/// # Errors
/// Same as [`install`].
pub(crate) fn prepare(
    stream: &TcpStream,
    suite: CipherSuite,
    version: Version,
) -> Result<bool, Refused> {
    match remembered(attach(stream), suite, version) {
        Ok(()) => Ok(true),
        Err(Refused::Gone) => Ok(false),
        Err(refused) => Err(refused),
    }
}

/// Installs both keys of a prepared connection in the kernel.
///
/// # Errors
/// Same as [`install`].
pub(crate) fn give(
    stream: &TcpStream,
    secrets: &ExtractedSecrets,
    version: Version,
) -> Result<(), Refused> {
    let keys = [
        (Direction::Receiving, &secrets.rx),
        (Direction::Sending, &secrets.tx),
    ];
    for (direction, (sequence, secrets)) in keys {
        let key = parts(secrets).map_err(failed)?;
        let given = try_give(stream, direction, key, *sequence, version)
            .map_err(|error| refused(direction, &error));
        remembered(given, key.0, version)?;
    }
    Ok(())
}

/// If the version is TLS 1.3, caches a refusal for later connections. A refusal of another version
/// is not cached, because the probe tests only TLS 1.3.
fn remembered(
    result: Result<(), Refused>,
    suite: CipherSuite,
    version: Version,
) -> Result<(), Refused> {
    if let (Err(refused), Version::V1_3) = (&result, version) {
        remember(suite, refused);
    }
    result
}

/// Like [`choose`], for a connection to a program other than Dunlin. Such a program may renew its
/// keys in TLS 1.3, so `auto` chooses the kernel only if the kernel can renew keys too.
///
/// # Errors
/// Same as [`choose`].
pub fn choose_for_relay(
    offload: Offload,
    suite: CipherSuite,
    version: Version,
) -> Result<Choice, Refused> {
    let choice = choose(offload, suite)?;
    let follows = || abilities(suite).is_ok_and(|abilities| abilities.renews_keys);
    if offload == Offload::Auto && choice.is_kernel && version == Version::V1_3 && !follows() {
        return Ok(process(
            &"this kernel cannot replace a connection's keys, which the peer may request (needs \
              Linux 6.14)",
        ));
    }
    Ok(choice)
}

/// Why a connection ends when its keys must be renewed and the kernel cannot renew them.
pub const CANNOT_RENEW: &str = "this kernel cannot replace a connection's keys (needs Linux \
 6.14): let this process seal the records of this route";

/// Installs the next key of a direction in the kernel (TLS 1.3). Its record numbers begin at zero.
///
/// # Errors
/// An error from setsockopt(2); `ResourceBusy` if the kernel does not support renewal.
pub fn renew(
    stream: &TcpStream,
    direction: Direction,
    secrets: &ConnectionTrafficSecrets,
) -> io::Result<()> {
    let key = parts(secrets).map_err(io::Error::other)?;
    try_give(stream, direction, key, 0, Version::V1_3).map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => io::Error::new(error.kind(), CANNOT_RENEW),
        _ => error,
    })
}

fn attach(stream: &TcpStream) -> Result<(), Refused> {
    ktls::attach(stream).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Refused::Absent,
        // The kernel returns this error even if only one direction is closed (tls_init,
        // net/tls/tls_main.c).
        io::ErrorKind::NotConnected => Refused::Gone,
        _ => failed(error),
    })
}

pub(crate) fn failed(error: impl fmt::Display) -> Refused {
    Refused::Failed {
        reason: error.to_string(),
    }
}

/// Converts the rejection of a key. If the connection has ended, memory is short or a signal
/// arrived, the rejection says nothing about what the kernel supports.
fn refused(direction: Direction, error: &io::Error) -> Refused {
    let reason = error.to_string();
    match error.kind() {
        io::ErrorKind::NotConnected
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::OutOfMemory
        | io::ErrorKind::Interrupted => Refused::Failed { reason },
        _ => Refused::Direction { direction, reason },
    }
}

/// Installs one key in the kernel and verifies that it is in use.
fn try_give(
    stream: &TcpStream,
    direction: Direction,
    (suite, key, iv): (CipherSuite, &[u8], [u8; 12]),
    sequence: u64,
    version: Version,
) -> io::Result<()> {
    let cipher = cipher(suite);
    let key = Key {
        version,
        cipher,
        key,
        nonce: first_nonce(iv, cipher, version),
        sequence,
    };
    ktls::install(stream, direction, &key)?;
    match ktls::installed(stream, direction)? {
        Some(installed) if installed.is(version, cipher) => Ok(()),
        _ => Err(io::Error::other(
            "the kernel accepted a key but does not report it",
        )),
    }
}

/// Returns the first nonce for the kernel. With AES-GCM in TLS 1.2 each record contains eight bytes
/// of its nonce. In the handshake, rustls computes these eight bytes as the XOR of the record
/// number and the value from the key block. The kernel counts up from the value that it receives.
/// If the kernel started at the key block's value, it would reuse the nonce of *Finished*, and two
/// records with the same nonce reveal the authentication key. So the kernel starts at a distance of
/// 2^63 from the key block's value.
fn first_nonce(mut iv: [u8; 12], cipher: Cipher, version: Version) -> [u8; 12] {
    if version == Version::V1_2 && cipher != Cipher::ChaCha20Poly1305 {
        iv[4] ^= 0x80;
    }
    iv
}

fn cipher(suite: CipherSuite) -> Cipher {
    match suite {
        CipherSuite::Aes128Gcm => Cipher::Aes128Gcm,
        CipherSuite::Aes256Gcm => Cipher::Aes256Gcm,
        CipherSuite::ChaCha20Poly1305 => Cipher::ChaCha20Poly1305,
    }
}

fn probe(suite: CipherSuite) -> Result<Abilities, Refused> {
    let (near, far) = loopback_pair().map_err(|error| Refused::Failed {
        reason: format!("no loopback connection for the probe: {error}"),
    })?;
    attach(&near)?;
    attach(&far)?;
    // Fixed keys are safe here, because both ends of the connection are in this process.
    let keys = [[1; 32], [2; 32], [3; 32]];
    let key = |number: usize| (suite, &keys[number][..suite.key_bytes()], [0; 12]);
    let give =
        |stream, direction, number| try_give(stream, direction, key(number), 0, Version::V1_3);
    // Use one direction per socket, to distinguish an unsupported cipher from an unsupported
    // direction.
    let sends = give(&near, Direction::Sending, 0);
    let receives = give(&far, Direction::Receiving, 0);
    match (&sends, &receives) {
        (Ok(()), Ok(())) => {}
        (Err(error), Err(_)) => {
            let reason = error.to_string();
            return Err(Refused::Cipher { suite, reason });
        }
        (Err(error), Ok(())) => return Err(refused(Direction::Sending, error)),
        (Ok(()), Err(error)) => return Err(refused(Direction::Receiving, error)),
    }
    for (stream, direction) in [(&near, Direction::Receiving), (&far, Direction::Sending)] {
        give(stream, direction, 1).map_err(|error| refused(direction, &error))?;
    }
    let exchanged = exchange(&near, &far).and_then(|()| exchange(&far, &near));
    exchanged.map_err(|error| Refused::Failed {
        reason: format!("a record sealed by the kernel did not arrive: {error}"),
    })?;
    Ok(Abilities {
        driver: Driver::of(suite),
        renews_keys: give(&near, Direction::Sending, 2).is_ok(),
    })
}

fn loopback_pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect_timeout(&listener.local_addr()?, PROBE_LIMIT)?;
    let far = loop {
        let (far, from) = listener.accept()?;
        if from == near.local_addr()? {
            break far;
        }
    };
    for end in [&near, &far] {
        end.set_read_timeout(Some(PROBE_LIMIT))?;
    }
    Ok((near, far))
}

fn exchange(mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    const WORD: &[u8] = b"probe";
    from.write_all(WORD)?;
    let mut received = [0; WORD.len()];
    to.read_exact(&mut received)?;
    if received != WORD {
        return Err(io::Error::other("the probe's data was modified"));
    }
    Ok(())
}

fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Sending => "sending",
        Direction::Receiving => "receiving",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn k01_failures_of_this_process_are_not_cached() {
        let reason = "too many open files".to_owned();
        assert!(Cached::of(&Err(Refused::Failed { reason })).is_none());
        assert!(Cached::of(&Err(Refused::Gone)).is_none());
        let mut absent = Cached::of(&Err(Refused::Absent)).unwrap();
        assert!(absent.is_current());
        if let Some(at) = Instant::now().checked_sub(REFUSAL_LIFETIME) {
            absent.at = at;
            assert!(!absent.is_current(), "an old refusal is still current");
        }
    }

    /// Claim F3 of docs/security.
    #[test]
    fn k18_tls_1_2_nonces_start_away_from_the_handshakes() {
        let iv = [7; 12];
        for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm] {
            let first = first_nonce(iv, cipher, Version::V1_2);
            assert_eq!(first[..4], iv[..4]);
            // The handshake's nonces are the IV of the key block with a small record number XORed
            // into its low bits. Here the highest bit differs, so no nonce of the handshake is used
            // again.
            let number = |iv: [u8; 12]| u64::from_be_bytes(*iv.last_chunk().unwrap());
            assert_eq!(number(first) ^ number(iv), 1 << 63);
        }
        assert_eq!(first_nonce(iv, Cipher::Aes256Gcm, Version::V1_3), iv);
        assert_eq!(first_nonce(iv, Cipher::ChaCha20Poly1305, Version::V1_2), iv);
    }

    /// Claim F2 of docs/security.
    #[test]
    fn k01_a_choice_has_a_reason_and_a_required_kernel_is_never_replaced() {
        for suite in CipherSuite::ALL {
            let auto = choose(Offload::Auto, suite).unwrap();
            match abilities(suite) {
                Ok(_) => assert!(choose(Offload::Kernel, suite).unwrap().is_kernel),
                Err(refused) => {
                    assert_eq!(choose(Offload::Kernel, suite).unwrap_err(), refused);
                    assert!(!auto.is_kernel);
                    assert!(
                        auto.reason.contains(&refused.to_string()),
                        "{}",
                        auto.reason
                    );
                }
            }
            assert!(!choose(Offload::Process, suite).unwrap().is_kernel);
        }
    }
}
