//! Moves a connection into the kernel: installs the TLS keys of both directions.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::connect::Connected;
use super::error::HandoffError;
use dunlin_lane::handshake::keyed::Keyed;
use dunlin_lane::kernel::{self, Chosen, Inspector};
use dunlin_lane::provider::TlsVersion;

pub use dunlin_lane::kernel::Refused;
pub use dunlin_lane::record::RECORD_LIMIT;

/// Minimum and maximum time to wait for a TLS 1.3 server's session tickets. Within these limits,
/// the wait is as long as the handshake took.
const TICKETS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A socket with kernel TLS. Its owner reads and writes plaintext; the kernel seals and opens the
/// records.
#[derive(Debug)]
pub struct KtlsSocket {
    /// The socket, in blocking mode and without timeouts.
    pub stream: TcpStream,
    /// The cipher driver, network device and counters that the kernel reports for the
    /// connection.
    pub chosen: Chosen,
}

impl Connected {
    /// Installs the keys of both directions in the kernel. `inspector` queries the kernel for the
    /// parts of [`Chosen`] that concern this connection.
    ///
    /// # Errors
    /// [`HandoffError::Kernel`] if the kernel refuses the keys. [`HandoffError::Handshake`] if the
    /// connection fails, if `deadline` passes, or if the server, after its handshake, sends too many
    /// session tickets, an incomplete one, or another handshake message. After any error the
    /// connection is closed, because the kernel may have only one of its keys.
    pub fn into_kernel(
        self,
        deadline: Instant,
        inspector: &dyn Inspector,
    ) -> Result<KtlsSocket, HandoffError> {
        let mut keyed = self.keyed;
        if keyed.version == TlsVersion::V1_3 {
            let quiet = self.took.clamp(TICKETS.0, TICKETS.1);
            keyed
                .take_tickets(quiet, deadline)
                .map_err(|source| HandoffError::Handshake {
                    at: keyed.at,
                    source: Box::new(source),
                })?;
        }
        let chosen = install(&keyed, inspector)?;
        Ok(KtlsSocket {
            stream: keyed.stream,
            chosen,
        })
    }
}

/// Installs the keys of both directions in the kernel, and reads which driver and device the kernel
/// uses.
///
/// # Errors
/// [`Refused`]. The caller must close the connection, because the kernel may have only one of its
/// keys; after [`Refused::Gone`] it has none.
pub(crate) fn install(keyed: &Keyed, inspector: &dyn Inspector) -> Result<Chosen, Refused> {
    let cipher = keyed.cipher()?;
    kernel::install(&keyed.stream, &keyed.secrets, keyed.version)?;
    Ok(Chosen::of(&keyed.stream, cipher, inspector))
}
