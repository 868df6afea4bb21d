//! The kernel takes a connection over: its keys in both directions, and what the socket's new
//! owner should know.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use dunlin_linux::ktls::Version;
use thiserror::Error;

use super::connect::Connected;
use dunlin_lane::handshake::HandshakeError;
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

/// Why a connection is not the kernel's.
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
    /// Asks whether the kernel takes such a connection, without touching this one.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn ask_kernel(&self) -> Result<(), Refused> {
        kernel::abilities(self.keyed.cipher()?).map(|_| ())
    }

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
        let took = self.took;
        let mut keyed = self.keyed;
        let version = match keyed.version {
            TlsVersion::V1_2 => Version::V1_2,
            TlsVersion::V1_3 => {
                keyed.take_tickets(took.clamp(TICKETS.0, TICKETS.1), deadline)?;
                Version::V1_3
            }
        };
        kernel::install(&keyed.stream, &keyed.secrets, version)?;
        Ok(Handed {
            chosen: Chosen::of(&keyed.stream, keyed.cipher()?, inspector),
            stream: keyed.stream,
        })
    }
}
