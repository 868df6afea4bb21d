//! Records sealed and opened by the kernel: whether this one can, and giving a connection's keys
//! to it.
//!
//! ```text
//!   asked for: process ──────────────────────────────────────────────▶ in the process
//!              kernel, auto ──▶ probe: a connection to ourselves
//!                                 │ no module, no cipher, one direction alone
//!                                 ├──── auto ────────────────────────▶ in the process
//!                                 ├──── kernel ──▶ an error
//!                                 │ a slow driver: auto ─────────────▶ in the process
//!                                 └──▶ each connection's keys, both ─▶ in the kernel
//! ```
//!
//! A connection whose keys the kernel does not take, where it took the probe's, is given up and
//! never used with others: half of it might go in the clear. With `auto` those that follow are
//! then secured in the process, until the kernel is asked again.

mod chosen;
mod driver;

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_linux::ktls::{self, Cipher, Direction, Key, Version};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};
use thiserror::Error;

use super::offload::Offload;
use super::provider::{CipherSuite, parts};
use super::sync::lock;

pub use chosen::{Acceleration, Chosen, Device, Inspector, RecordEngine, RecordEngines};
pub use driver::Driver;

/// After so long a kernel that had no TLS is asked again.
const REFUSAL_BELIEVED: Duration = Duration::from_secs(30);
/// How long the probe's own connection may take.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// Why the kernel does not seal and open records.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// There is nothing that could.
    #[error(
        "this kernel has no TLS: load its module when the host starts (`modprobe tls`), since \
         nobody else can who has no privileges or is in a container; or take a kernel that is \
         built with CONFIG_TLS"
    )]
    Absent,
    /// It knows TLS and not this cipher.
    #[error("this kernel's TLS does not take {suite} ({reason}): allow another cipher suite")]
    Cipher {
        /// The cipher.
        suite: CipherSuite,
        /// What the kernel says.
        reason: String,
    },
    /// It takes a key for one direction and not for the other.
    #[error("this kernel's TLS takes no key for {} ({reason})", way(*.direction))]
    Direction {
        /// The one that it refuses.
        direction: Direction,
        /// What the kernel says.
        reason: String,
    },
    /// Its cipher is slower than this process's.
    #[error(
        "this kernel has {driver} for it, which does not use the processor's instructions for \
         AES: load the module that does (`modprobe aesni-intel`), or ask for the kernel all the \
         same"
    )]
    Slow {
        /// What it would use.
        driver: Driver,
    },
    /// Which cipher it has is hidden from this process.
    #[error(
        "which driver this kernel has for it cannot be read in /proc/crypto, so it may be a slow \
         one: let this process read that (a service's ProcSubset=pid hides it), or ask for the \
         kernel all the same"
    )]
    Untold,
    /// The peer has ended the connection meanwhile, and the kernel was given nothing of it.
    #[error("the peer has ended the connection before the kernel could be given its keys")]
    Gone,
    /// Something else went wrong.
    #[error("this kernel's TLS could not be set up: {reason}")]
    Failed {
        /// What.
        reason: String,
    },
}

/// What the kernel's TLS can do with a cipher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// What seals and opens; `None` where the kernel does not tell.
    pub driver: Option<Driver>,
    /// A connection's keys can be renewed (Linux 6.14).
    pub renews_keys: bool,
    /// Records are opened where the reader wants them (Linux 6.0).
    pub opens_in_place: bool,
}

/// Who it is, and on what grounds.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Whether it is the kernel.
    pub is_kernel: bool,
    /// A line for the log.
    pub reason: String,
    /// What of the kernel's does it, if it is the kernel and tells.
    pub driver: Option<Driver>,
}

/// Asks who is to seal and open `suite` for a caller who wants `offload`. The first question about
/// a suite opens a connection to this host itself and may load the kernel's module.
///
/// # Errors
/// [`Refused`], if it had to be the kernel.
pub fn choose(offload: Offload, suite: CipherSuite) -> Result<Choice, Refused> {
    let process = |reason: &dyn fmt::Display| Choice {
        is_kernel: false,
        driver: None,
        reason: format!("TLS records are sealed in this process: {reason}"),
    };
    if offload == Offload::Process {
        return Ok(process(&"as asked for"));
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

/// What the kernel can do with `suite`, as its probe has found. A refusal is believed for half a
/// minute, since somebody may load the module; one for a reason of this process's own, which may
/// be short of descriptors for a moment, is not believed at all. A process that will not be able to
/// connect to itself any more asks before: what is known then stays.
///
/// # Errors
/// [`Refused`].
pub fn abilities(suite: CipherSuite) -> Result<Abilities, Refused> {
    let mut known = known();
    let slot = &mut known[suite as usize];
    if let Some(found) = slot
        && found.is_believed()
    {
        return found.result.clone();
    }
    let result = probe(suite);
    match (Found::of(&result), slot) {
        (Some(found), slot) => *slot = Some(found),
        // It could not be asked again, so what it said stands.
        (None, Some(found)) => return found.result.clone(),
        (None, None) => {}
    }
    result
}

/// Has `auto` choose this process for a while: a connection was refused where the probe was not.
fn remember(suite: CipherSuite, refused: &Refused) {
    if let Some(found) = Found::of(&Err(refused.clone())) {
        known()[suite as usize] = Some(found);
    }
}

/// What is known of a suite.
struct Found {
    result: Result<Abilities, Refused>,
    at: Instant,
}

impl Found {
    /// None of what says nothing about the kernel.
    fn of(result: &Result<Abilities, Refused>) -> Option<Self> {
        match result {
            Err(Refused::Failed { .. } | Refused::Gone) => None,
            result => Some(Self {
                result: result.clone(),
                at: Instant::now(),
            }),
        }
    }

    fn is_believed(&self) -> bool {
        self.result.is_ok() || self.at.elapsed() < REFUSAL_BELIEVED
    }
}

type Known = [Option<Found>; CipherSuite::ALL.len()];

fn known() -> MutexGuard<'static, Known> {
    static KNOWN: Mutex<Known> = Mutex::new([const { None }; CipherSuite::ALL.len()]);
    lock(&KNOWN)
}

/// Gives both keys of a connection to the kernel, before anything is sent with them.
///
/// # Errors
/// [`Refused`]. The connection must be closed then, and nothing be sent on it.
pub fn install(
    stream: &TcpStream,
    secrets: &ExtractedSecrets,
    version: Version,
) -> Result<(), Refused> {
    match takes(stream, secrets, version)? {
        true => Ok(()),
        false => Err(Refused::Gone),
    }
}

/// As [`install`]. False if the peer has ended the connection already; the kernel has nothing then,
/// and the peer's last words, most likely why it refuses us, are read without it.
///
/// # Errors
/// As [`install`].
pub(crate) fn takes(
    stream: &TcpStream,
    secrets: &ExtractedSecrets,
    version: Version,
) -> Result<bool, Refused> {
    let (suite, ..) = parts(&secrets.rx.1).map_err(failed)?;
    let is_prepared = prepare(stream, suite, version)?;
    if is_prepared {
        give(stream, secrets, version)?;
    }
    Ok(is_prepared)
}

/// Prepares a connection for [`give`]. False if the peer has ended the connection already; the
/// kernel has nothing then, and the peer's last words are read without it.
///
/// # Errors
/// As [`install`].
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

/// Gives both keys of a connection to the kernel that is prepared for them.
///
/// # Errors
/// As [`install`].
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

/// A refusal in TLS 1.3 counts for the connections that follow: that is what the probe asks about.
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

/// Asks the same for a connection to a program that is not Dunlin. Any such may renew its key in
/// TLS 1.3, so `auto` takes the kernel only where it can follow.
///
/// # Errors
/// As [`choose`].
pub fn choose_for_relay(
    offload: Offload,
    suite: CipherSuite,
    version: Version,
) -> Result<Choice, Refused> {
    let choice = choose(offload, suite)?;
    let follows = || abilities(suite).is_ok_and(|abilities| abilities.renews_keys);
    if offload == Offload::Auto && choice.is_kernel && version == Version::V1_3 && !follows() {
        return Ok(Choice {
            is_kernel: false,
            driver: None,
            reason: "TLS records are sealed in this process: this kernel cannot change a \
                     connection's keys, which the peer may do (Linux 6.14 can)"
                .to_owned(),
        });
    }
    Ok(choice)
}

/// Why a connection ends that the peer would have go on with another key.
pub const CANNOT_RENEW: &str = "this kernel cannot change a connection's keys (Linux 6.14 \
    can): let this process seal this route's records, by tls_offload";

/// Gives the kernel the next key of a direction in TLS 1.3, whose records count from zero.
///
/// # Errors
/// What setsockopt(2) says, `ResourceBusy` for a kernel that cannot.
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
        // An end that has come is enough (tls_init, net/tls/tls_main.c).
        io::ErrorKind::NotConnected => Refused::Gone,
        _ => failed(error),
    })
}

fn failed(error: impl fmt::Display) -> Refused {
    Refused::Failed {
        reason: error.to_string(),
    }
}

/// What it means that a key was not taken. A connection that has gone says nothing of the kernel.
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

/// Gives one key to the kernel and asks whether it has it.
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
        _ => Err(io::Error::other("it took a key and does not have it")),
    }
}

/// Where the kernel's nonces begin. AES-GCM of TLS 1.2 sends eight bytes of each, which the
/// handshake makes by adding a record's number to those of the key block, and the kernel by
/// counting on from what it is given: given the key block's, it would use that of *Finished* again,
/// and two records with one nonce give the key away. So it begins at the other end, 2^63 away.
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
    let (near, far) = to_ourselves().map_err(|error| Refused::Failed {
        reason: format!("no connection on the loopback to try it with: {error}"),
    })?;
    attach(&near)?;
    attach(&far)?;
    // These keys protect nothing: both ends are here.
    let keys = [[1; 32], [2; 32], [3; 32]];
    let key = |number: usize| (suite, &keys[number][..suite.key_bytes()], [0; 12]);
    let give =
        |stream, direction, number| try_give(stream, direction, key(number), 0, Version::V1_3);
    // On a socket each, so that a cipher is told from a direction.
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
        reason: format!("a record that it sealed did not arrive: {error}"),
    })?;
    Ok(Abilities {
        driver: Driver::of(suite),
        opens_in_place: ktls::expect_no_padding(&far).is_ok(),
        renews_keys: give(&near, Direction::Sending, 2).is_ok(),
    })
}

fn to_ourselves() -> io::Result<(TcpStream, TcpStream)> {
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
    let mut came = [0; WORD.len()];
    to.read_exact(&mut came)?;
    if came != WORD {
        return Err(io::Error::other("it was changed"));
    }
    Ok(())
}

fn way(direction: Direction) -> &'static str {
    match direction {
        Direction::Sending => "what this side sends",
        Direction::Receiving => "what the peer sends",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn k01_what_says_nothing_of_the_kernel_is_not_remembered() {
        let reason = "too many open files".to_owned();
        assert!(Found::of(&Err(Refused::Failed { reason })).is_none());
        assert!(Found::of(&Err(Refused::Gone)).is_none());
        let mut absent = Found::of(&Err(Refused::Absent)).unwrap();
        assert!(absent.is_believed());
        if let Some(at) = Instant::now().checked_sub(REFUSAL_BELIEVED) {
            absent.at = at;
            assert!(!absent.is_believed(), "the module may be there by now");
        }
    }

    #[test]
    fn k18_a_key_of_tls_1_2_never_begins_where_the_handshake_did() {
        let iv = [7; 12];
        for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm] {
            let first = first_nonce(iv, cipher, Version::V1_2);
            assert_eq!(first[..4], iv[..4]);
            // The handshake's are the key block's with a small number added without carry.
            let number = |iv: [u8; 12]| u64::from_be_bytes(*iv.last_chunk().unwrap());
            assert_eq!(number(first) ^ number(iv), 1 << 63);
        }
        assert_eq!(first_nonce(iv, Cipher::Aes256Gcm, Version::V1_3), iv);
        assert_eq!(first_nonce(iv, Cipher::ChaCha20Poly1305, Version::V1_2), iv);
    }

    #[test]
    fn k01_a_choice_says_why_and_what_must_be_the_kernel_is_never_the_process() {
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
