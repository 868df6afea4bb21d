//! The description of a socket that is handed over.

use std::collections::BTreeMap;
use std::fmt;

use dunlin::lane::kernel::{Acceleration, Chosen, Device, RecordEngine};
use dunlin_handoff::accept::Arrived;
use dunlin_handoff::connect::Facts;
use dunlin_handoff::kernel::RECORD_LIMIT;
use serde::Serialize;

use crate::line::DriverLine;

/// One socket.
#[derive(Debug, Serialize)]
pub(super) struct HandedLine {
    /// What seals and opens its records: "kernel".
    offload: &'static str,
    version: String,
    cipher: &'static str,
    curve: &'static str,
    /// The kernel's cipher driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<DriverLine>,
    /// Where sealing and opening run.
    #[serde(skip_serializing_if = "Option::is_none")]
    acceleration: Option<AccelerationLine>,
    /// The network device of its route.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceLine>,
    /// The kernel's TLS counters, which cover all sockets of the network namespace.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tls_stat: BTreeMap<String, u64>,
    peer: PeerLine,
    /// Maximum number of records in each direction; then the connection must be replaced. Nothing
    /// counts them for the socket's owner.
    record_limit: u64,
    /// `record_limit` in bytes, for an owner that writes at least 16 KiB at a time.
    bytes_limit: u64,
}

/// "software" or "card".
#[derive(Debug, Serialize)]
struct AccelerationLine {
    sending: &'static str,
    receiving: &'static str,
}

/// A device, and its TLS offload features, named as in ethtool(8).
#[derive(Debug, Serialize)]
struct DeviceLine {
    name: String,
    #[serde(rename = "tls-hw-tx-offload", skip_serializing_if = "Option::is_none")]
    tls_sends: Option<bool>,
    #[serde(rename = "tls-hw-rx-offload", skip_serializing_if = "Option::is_none")]
    tls_receives: Option<bool>,
}

#[derive(Debug, Serialize)]
struct PeerLine {
    address: String,
    verified: bool,
    /// SHA-256 of its certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
    names: Vec<String>,
}

/// A socket from `accept`.
#[derive(Debug, Serialize)]
pub(super) struct AcceptedLine {
    /// The server name that its client sent.
    sni: String,
    #[serde(flatten)]
    handed: HandedLine,
}

impl AcceptedLine {
    pub(super) fn of(arrived: &Arrived) -> Self {
        Self {
            sni: arrived.name.clone(),
            handed: HandedLine::of(&arrived.facts, &arrived.chosen),
        }
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("texts and numbers have a JSON form")
    }
}

impl HandedLine {
    pub(super) fn of(facts: &Facts, chosen: &Chosen) -> Self {
        let peer = facts.peer.as_ref();
        Self {
            offload: "kernel",
            version: facts.version.to_string(),
            cipher: facts.cipher,
            curve: facts.curve,
            driver: chosen.driver.as_ref().map(DriverLine::from),
            acceleration: chosen.acceleration.map(AccelerationLine::from),
            device: chosen.device.as_ref().map(DeviceLine::from),
            tls_stat: chosen.counters.clone(),
            peer: PeerLine {
                address: facts.at.to_string(),
                verified: peer.is_some(),
                fingerprint: peer.map(|peer| {
                    let digits = peer.fingerprint.iter().map(|byte| format!("{byte:02x}"));
                    digits.collect()
                }),
                names: peer
                    .iter()
                    .flat_map(|peer| peer.names.iter().map(ToString::to_string))
                    .collect(),
            },
            record_limit: RECORD_LIMIT,
            bytes_limit: RECORD_LIMIT * (16 << 10),
        }
    }
}

impl From<Acceleration> for AccelerationLine {
    fn from(acceleration: Acceleration) -> Self {
        let name = |engine| match engine {
            RecordEngine::Software => "software",
            RecordEngine::Card => "card",
        };
        Self {
            sending: name(acceleration.sending),
            receiving: name(acceleration.receiving),
        }
    }
}

impl From<&Device> for DeviceLine {
    fn from(device: &Device) -> Self {
        Self {
            name: device.name.clone(),
            tls_sends: device.tls_sends,
            tls_receives: device.tls_receives,
        }
    }
}

impl fmt::Display for HandedLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kTLS active: {} {}", self.version, self.cipher)
    }
}
