//! Connects to a relay's TLS server.
//!
//! A relay adds nothing to the bytes. If one port of the peer serves several targets
//! ([`Target::Ports`](crate::Target::Ports)), the server name of the handshake (SNI) contains the
//! port of the target, as in `port-49152.invalid`. No host can have this name (RFC 6761, section
//! 6.4), and any TLS server that selects by SNI can serve such connections.

use std::time::Instant;

use dunlin_lane::fault::{fault_behind, of_handshake};
use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::handshake::relay::{Relayed, client};
use dunlin_lane::policy::OldestTls;
use dunlin_lane::record::Alert;
use dunlin_proto::fault::FaultCode;

use crate::failure::{Failure, OrFailure};
use crate::options::{Entrance, Mode};
use crate::parameter::{PORT_KEY, parse_port};
use crate::site::Site;

/// Where a connection goes.
pub(super) struct Dial {
    /// Host and port.
    pub(super) to: String,
    oldest: OldestTls,
    /// The port of the target at the peer, if the peer serves several targets at one port.
    port: Option<u16>,
}

impl Dial {
    /// Where a connection with this parameter goes.
    ///
    /// # Errors
    /// The relay does not carry the parameter.
    pub(super) fn of(entrance: &Entrance, parameter: &str) -> Result<Self, Failure> {
        let refuse = || {
            let route = &entrance.route;
            let text = format!("route {route:?} is a relay and cannot pass on {parameter:?}");
            Err(Failure::new(FaultCode::ParameterRefused, text))
        };
        let (oldest, at) = match entrance.mode {
            Mode::Relay(oldest) => (oldest, None),
            Mode::RelayAt(at) => (OldestTls::V1_3, Some(at)),
            Mode::Stripe | Mode::StripeOverIpsec => return refuse(),
        };
        let port = parameter
            .strip_prefix(PORT_KEY)
            .and_then(|rest| rest.strip_prefix('='))
            .and_then(parse_port);
        if !parameter.is_empty() && (at.is_none() || port.is_none()) {
            return refuse();
        }
        let to = match (at, entrance.to.rsplit_once(':')) {
            (Some(at), Some((host, _))) => format!("{host}:{at}"),
            _ => entrance.to.clone(),
        };
        let port = port.map(|port| port.first());
        Ok(Self { to, oldest, port })
    }
}

fn server_name(port: u16) -> String {
    format!("{PREFIX}{port}{SUFFIX}")
}

/// The parameter of a client's connection, from the server name that the client requested. Empty if
/// the client requested no port.
pub(super) fn parameter(asked_for: Option<&str>) -> String {
    let port = asked_for
        .and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX))
        .map(|port| format!("{PORT_KEY}={port}"));
    port.unwrap_or_default()
}

const PREFIX: &str = "port-";
const SUFFIX: &str = ".invalid";

/// Connects to a relay's peer and performs the handshake, unless the tunnel ends first.
pub(super) fn reach(site: &Site, entrance: &Entrance, dial: &Dial) -> Result<Relayed, Failure> {
    let deadline = Instant::now() + site.limits.connect;
    let dialling = site.dials.begin()?;
    let (to, oldest, cancel) = (&dial.to, dial.oldest, &dialling.cancel);
    let host = to.rsplit_once(':').map_or(&**to, |(host, _)| host);
    let peers = entrance.peers.clone();
    let identities = site.identities().clone();
    let mut tls = identities
        .connecting
        .relay_client(&identities.crypto, peers, oldest, host)
        .or_failure(
            FaultCode::Unauthorised,
            "this side's identity cannot be used to connect",
        )?;
    if let Some(port) = dial.port {
        let name = server_name(port);
        tls = tls.asking_for(&name).ok_or_else(|| {
            let text = format!("cannot ask the peer for port {port}: TLS refuses the name {name}");
            Failure::new(FaultCode::Internal, text)
        })?;
    }
    let connected = site.connector.connect(to, deadline, cancel.wakeup());
    let covered = connected.and_then(|stream| cancel.covers(&stream).map(|()| stream));
    let stream = covered.map_err(|error| {
        let text = format!("{to} cannot be reached: {error}");
        match fault_behind(&error) {
            Some(code) => Failure::new(code, text),
            None => Failure::of_peer(FaultCode::TargetUnreachable, &text),
        }
    })?;
    client(stream, &tls, deadline).map_err(|error| {
        let hint = match (&error, oldest) {
            (
                HandshakeError::PeerAlert(Alert(70)) | HandshakeError::Incompatible(_),
                OldestTls::V1_3,
            ) => "; the route requires TLS 1.3",
            _ => "",
        };
        let text = format!("TLS handshake with {to} failed: {error}{hint}");
        match of_handshake(&error) {
            FaultCode::ControlLost => Failure::of_peer(FaultCode::TargetUnreachable, &text),
            code => Failure::new(code, text),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_name_carries_the_port_and_other_names_carry_none() {
        assert_eq!(parameter(Some(&server_name(49152))), "port=49152");
        // The range of the target is checked afterwards.
        assert_eq!(parameter(Some("port-22.invalid")), "port=22");
        for other in [
            None,
            Some("b.example"),
            Some("port-49152"),
            Some("49152.invalid"),
        ] {
            assert_eq!(parameter(other), "", "{other:?}");
        }
    }
}
