//! The variants of the tunnel's benchmark, and the hypervisors' sockets on either side.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_rig::machine::Credentials;
use dunlin_test_base::Scratch;

/// The time limit for every wait.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// The name in the certificate of QEMU's destination.
pub(super) const SERVER: &str = "destination.bench";

/// The transport under measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// No tunnel. The sender's socket is connected directly to the reader's socket.
    Bare,
    /// Two processes without a handshake: one seals the bytes, and the other opens them
    /// ([`super::records`]).
    Floor,
    /// Two processes that move bytes without encryption ([`super::forward`]).
    Pipeline,
    Stunnel,
    /// Port forwarding: `ssh -L` and `sshd`, with one connection for all streams.
    OpenSsh,
    /// A proxy in Go, built the way KubeVirt's is (`go/proxy.go`).
    GoProxy,
    Relay,
    /// A tunnel in stripe mode with this number of lanes.
    Stripe(u16),
    /// QEMU's own TLS without a tunnel, for migrations only.
    QemuTls,
}

impl Variant {
    /// Whether the variant is a tunnel: two programs that carry the hypervisors' bytes from one
    /// host to another, encrypted and authenticated.
    pub(super) fn is_tunnel(self) -> bool {
        !matches!(
            self,
            Self::Bare | Self::Floor | Self::Pipeline | Self::QemuTls
        )
    }

    /// Whether the variant can be measured with this program's own streams.
    pub(super) fn carries_streams(self) -> bool {
        self != Self::QemuTls
    }

    /// Whether several streams share a connection between the ends, so that a stream that is not
    /// read can delay the others.
    pub(super) fn shares_connections(self) -> bool {
        matches!(self, Self::OpenSsh | Self::Stripe(_))
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bare => formatter.write_str("bare"),
            Self::Floor => formatter.write_str("floor"),
            Self::Pipeline => formatter.write_str("pipeline"),
            Self::Stunnel => formatter.write_str("stunnel"),
            Self::OpenSsh => formatter.write_str("openssh"),
            Self::GoProxy => formatter.write_str("go-proxy"),
            Self::Relay => formatter.write_str("relay"),
            Self::Stripe(lanes) => write!(formatter, "stripe-{lanes}"),
            Self::QemuTls => formatter.write_str("qemu-tls"),
        }
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let stripe = text.strip_prefix("stripe-").map(str::parse);
        match (text, stripe) {
            ("bare", _) => Ok(Self::Bare),
            ("floor", _) => Ok(Self::Floor),
            ("pipeline", _) => Ok(Self::Pipeline),
            ("stunnel", _) => Ok(Self::Stunnel),
            ("openssh", _) => Ok(Self::OpenSsh),
            ("go-proxy", _) => Ok(Self::GoProxy),
            ("relay", _) => Ok(Self::Relay),
            ("qemu-tls", _) => Ok(Self::QemuTls),
            (_, Some(Ok(lanes @ 1..=128))) => Ok(Self::Stripe(lanes)),
            _ => Err(format!(
                "unknown variant {text:?} (bare, floor, pipeline, stunnel, openssh, go-proxy, \
                 relay, stripe-N, qemu-tls)"
            )),
        }
    }
}

/// The socket type of the hypervisors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    Unix,
    Tcp,
}

impl Ends {
    pub(super) const BOTH: [Self; 2] = [Self::Unix, Self::Tcp];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }
}

/// A hypervisor's connection.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub(super) fn shutdown(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
        }
    }

    pub(super) fn set_write_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_write_timeout(limit),
            Self::Tcp(stream) => stream.set_write_timeout(limit),
        }
    }

    pub(super) fn patient(self) -> io::Result<Self> {
        match &self {
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
            }
        }
        Ok(self)
    }
}

impl Read for &Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).read(bytes),
            Stream::Tcp(stream) => (&*stream).read(bytes),
        }
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).read_vectored(parts),
            Stream::Tcp(stream) => (&*stream).read_vectored(parts),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).write(bytes),
            Stream::Tcp(stream) => (&*stream).write(bytes),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).write_vectored(parts),
            Stream::Tcp(stream) => (&*stream).write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// State shared by all variants: certificates, and the far hypervisor's listeners.
pub(super) struct Site {
    pub(super) dunlin: PathBuf,
    /// The certificates for QEMU's own TLS.
    pub(super) credentials: Credentials,
    scratch: Scratch,
    unix: UnixListener,
    pub(super) tcp: TcpListener,
}

impl Site {
    pub(super) fn new(dunlin: PathBuf) -> Result<Self> {
        let scratch = Scratch::try_new()?;
        let pki = |words: &[&str]| -> Result<()> {
            let mut command = Command::new(&dunlin);
            command.arg("pki").args(words).current_dir(scratch.path());
            let done = command.output().context("cannot start dunlin")?;
            if !done.status.success() {
                bail!("{}", String::from_utf8_lossy(&done.stderr));
            }
            Ok(())
        };
        pki(&["init", "ca"])?;
        pki(&["issue", "--ca", "ca", "--name", "a.test", "a"])?;
        pki(&["issue", "--ca", "ca", "--name", "b.test", "b"])?;
        let unix = UnixListener::bind(scratch.join("out"))?;
        unix.set_nonblocking(true)?;
        let tcp = TcpListener::bind("127.0.0.1:0")?;
        tcp.set_nonblocking(true)?;
        Ok(Self {
            dunlin,
            credentials: Credentials::new(SERVER, "source.bench")?,
            scratch,
            unix,
            tcp,
        })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// The socket of the far QEMU.
    pub(super) fn qemu(&self) -> PathBuf {
        self.path("qemu-out")
    }

    /// Accepts the next connection at the far hypervisor.
    pub(super) fn accept(&self, ends: Ends) -> Result<Stream> {
        let until = Instant::now() + TIMEOUT;
        loop {
            let accepted = match ends {
                Ends::Unix => self.unix.accept().map(|(stream, _)| Stream::Unix(stream)),
                Ends::Tcp => self.tcp.accept().map(|(stream, _)| Stream::Tcp(stream)),
            };
            match accepted {
                Ok(stream) => return Ok(stream.patient()?),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() > until {
                        bail!("no connection has arrived at the far hypervisor within {TIMEOUT:?}");
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_is_read_as_it_is_written() {
        for name in [
            "bare",
            "floor",
            "pipeline",
            "stunnel",
            "openssh",
            "go-proxy",
            "relay",
            "stripe-1",
            "stripe-128",
            "qemu-tls",
        ] {
            assert_eq!(name.parse::<Variant>().unwrap().to_string(), name);
        }
        for name in ["stripe-0", "stripe-129", "stripe-", "Floor", ""] {
            name.parse::<Variant>().unwrap_err();
        }
    }
}
