//! Errors that keep a tunnel from starting or from adopting a new configuration.

use std::io;

use dunlin_lane::identity::SettingsError;
use dunlin_proto::fault::FaultCode;
use thiserror::Error;

use crate::route::Listen;

/// Why a tunnel cannot start or cannot adopt a configuration.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TunnelError {
    /// The identity is invalid.
    #[error("invalid identity: {0}")]
    Identity(#[from] SettingsError),
    /// An entrance cannot listen.
    #[error("route {route:?} cannot listen on {listen}: {error}")]
    Listen {
        /// The route.
        route: String,
        /// The address.
        listen: Listen,
        /// The kernel's error.
        error: io::Error,
    },
    /// A route needs IPsec, which [`sealed`](crate::TunnelBuilder::sealed) has not enabled.
    #[error("route {route:?} needs IPsec, which is not enabled in this tunnel")]
    NoIpsec {
        /// The route.
        route: String,
    },
    /// No file descriptors or threads are left.
    #[error("cannot start the tunnel: {0}")]
    Io(#[from] io::Error),
}

impl TunnelError {
    /// The fault code.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Identity(_) => FaultCode::Unauthorised,
            Self::NoIpsec { .. } => FaultCode::FeatureMissing,
            Self::Listen { .. } | Self::Io(_) => FaultCode::Kernel,
        }
    }
}
