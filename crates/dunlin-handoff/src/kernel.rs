//! Moves a connection's TLS into the kernel: installs the keys of both directions.

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

/// Minimum and maximum time to wait for a TLS 1.3 server's session tickets; between them, as long
/// as the handshake took.
const TICKETS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A socket for plain reads and writes; the kernel seals and opens its records.
#[derive(Debug)]
pub struct Handed {
    /// Blocking, without timeouts.
    pub stream: TcpStream,
    /// What the kernel chose for it.
    pub chosen: Chosen,
}

/// Why a connection could not be moved into the kernel.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The kernel refused it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The handshake was followed by something other than tickets or data.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

impl Connected {
    /// Installs the keys of both directions in the kernel. `inspector` reads the parts of [`Chosen`] that
    /// concern this connection.
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

/// Installs the keys of both directions in the kernel, and reads what it chose for them.
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
