//! Why a tunnel cannot run.

use std::io;

use dunlin_lane::identity::SettingsError;
use thiserror::Error;

use crate::route::Listen;

/// Why a tunnel cannot run, or not as it was asked to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TunnelError {
    /// The identity does not serve.
    #[error("the identity cannot be used: {0}")]
    Identity(#[from] SettingsError),
    /// An entrance cannot listen.
    #[error("route {route:?} cannot listen on {listen}: {error}")]
    Listen {
        /// The route.
        route: String,
        /// Where.
        listen: Listen,
        /// What the kernel says.
        error: io::Error,
    },
    /// A route's lanes are to go over IPsec, for which the tunnel was not prepared.
    #[error(
        "route {route:?} goes over IPsec, for which this tunnel is not prepared: start it anew \
         with what IPsec needs"
    )]
    NoIpsec {
        /// The route.
        route: String,
    },
    /// No descriptors or threads are left.
    #[error("the tunnel cannot start: {0}")]
    Io(#[from] io::Error),
}
