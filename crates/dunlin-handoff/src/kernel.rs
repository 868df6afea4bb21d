//! The kernel takes over a connection's TLS: it gets the keys of both directions.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use dunlin_linux::ktls::Version;
use thiserror::Error;

use super::connect::Connected;
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::kernel::{self, Chosen, Inspector};
use dunlin_lane::provider::TlsVersion;

pub use dunlin_lane::kernel::Refused;
pub use dunlin_lane::record::RECORD_LIMIT;

/// How long a server of TLS 1.3 is expected to take for its session tickets, at least and at most;
/// in between it is as long as the handshake took.
const TICKETS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A socket that is used without TLS, whose records the kernel seals and opens.
#[derive(Debug)]
pub struct Handed {
    /// Blocking, with no time-outs set.
    pub stream: TcpStream,
    /// What the kernel has chosen for it.
    pub chosen: Chosen,
}

/// Why the kernel did not take over a connection.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The kernel does not take it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// What followed the handshake was neither tickets nor data.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

impl Connected {
    /// Gives the keys of both directions to the kernel. `inspector` finds what [`Chosen`] has of
    /// this one connection.
    ///
    /// # Errors
    /// [`KernelError`]; the connection is closed then, since the kernel may have one key of two.
    pub fn into_kernel(
        self,
        deadline: Instant,
        inspector: &dyn Inspector,
    ) -> Result<Handed, KernelError> {
        let mut keyed = self.keyed;
        if keyed.version == TlsVersion::V1_3 {
            keyed.take_tickets(self.took.clamp(TICKETS.0, TICKETS.1), deadline)?;
        }
        let chosen = install(&keyed, inspector)?;
        Ok(Handed {
            stream: keyed.stream,
            chosen,
        })
    }
}

/// Gives the keys of both directions to the kernel, and asks it what it has chosen for them.
///
/// # Errors
/// [`Refused`]. The kernel may have one key of two, so the connection must be closed; after
/// [`Refused::Gone`] the kernel has none.
pub(crate) fn install(keyed: &Keyed, inspector: &dyn Inspector) -> Result<Chosen, Refused> {
    let version = match keyed.version {
        TlsVersion::V1_2 => Version::V1_2,
        TlsVersion::V1_3 => Version::V1_3,
    };
    let cipher = keyed.cipher()?;
    kernel::install(&keyed.stream, &keyed.secrets, version)?;
    Ok(Chosen::of(&keyed.stream, cipher, inspector))
}
