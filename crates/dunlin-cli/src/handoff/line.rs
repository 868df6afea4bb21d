//! The description of a socket that is handed over.

use dunlin::lane::kernel::{Chosen, RecordEngine};
use dunlin_handoff::accept::Arrived;
use dunlin_handoff::connect::ConnectionInfo;
use dunlin_handoff::kernel::RECORD_LIMIT;
use serde_json::{Value, json};

use crate::line::DriverLine;
use crate::state::hex;

/// One socket as a JSON object. Unknown values are left out.
pub(super) fn handed(info: &ConnectionInfo, chosen: &Chosen) -> Value {
    let engine = |engine| match engine {
        RecordEngine::Software => "software",
        RecordEngine::Card => "card",
    };
    let peer = info.peer.as_ref();
    let names = peer.iter().flat_map(|peer| &peer.names);
    known(json!({
        // The component that seals and opens the socket's records.
        "offload": "kernel",
        "version": info.version.to_string(),
        "cipher": info.cipher,
        "curve": info.curve,
        // The kernel's cipher driver.
        "driver": chosen.driver.as_ref().map(DriverLine::from),
        // Where records are sealed and opened: in software or on the network card.
        "acceleration": chosen.acceleration.map(|run| json!({
            "sending": engine(run.sending),
            "receiving": engine(run.receiving),
        })),
        // The network device of the socket's route, and its TLS offload features, named as in
        // ethtool(8).
        "device": chosen.device.as_ref().map(|device| known(json!({
            "name": device.name,
            "tls-hw-tx-offload": device.tls_sends,
            "tls-hw-rx-offload": device.tls_receives,
        }))),
        // The kernel's TLS counters, which cover all sockets of the network namespace.
        "tls_stat": (!chosen.counters.is_empty()).then_some(&chosen.counters),
        "peer": known(json!({
            "address": info.at.to_string(),
            "verified": peer.is_some(),
            // SHA-256 of the peer's certificate.
            "fingerprint": peer.map(|peer| hex(&peer.fingerprint)),
            "names": names.map(ToString::to_string).collect::<Vec<_>>(),
        })),
        // Maximum number of records in each direction. After that number the connection must be
        // replaced.
        "record_limit": RECORD_LIMIT,
        // The same limit in bytes, for an owner that writes at least 16 KiB at a time. The owner
        // cannot read a count of records from the kernel.
        "bytes_limit": RECORD_LIMIT * (16 << 10),
    }))
}

/// Describes a socket from `accept` as a JSON object, with the server name that its client sent.
pub(super) fn accepted(arrived: &Arrived) -> String {
    let mut object = handed(&arrived.info, &arrived.chosen);
    object["sni"] = arrived.name.clone().into();
    object.to_string()
}

/// The object without its members that are null.
fn known(mut object: Value) -> Value {
    if let Some(members) = object.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    object
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use dunlin::lane::kernel::{Acceleration, Device, Driver};
    use dunlin::lane::provider::TlsVersion;

    use super::*;

    #[test]
    fn a_socket_has_what_is_known() {
        let info = ConnectionInfo {
            at: "192.0.2.7:443".parse().unwrap(),
            version: TlsVersion::V1_2,
            cipher: "ECDHE-RSA-AES256-GCM-SHA384",
            curve: "secp384r1",
            peer: None,
        };
        let mut chosen = Chosen {
            driver: None,
            acceleration: None,
            device: None,
            counters: BTreeMap::new(),
        };
        let mut expected = json!({
            "offload": "kernel", "version": "TLSv1.2", "cipher": "ECDHE-RSA-AES256-GCM-SHA384",
            "curve": "secp384r1",
            "peer": {"address": "192.0.2.7:443", "verified": false, "names": []},
            "record_limit": 16_777_216_u64, "bytes_limit": 274_877_906_944_u64,
        });
        assert_eq!(handed(&info, &chosen), expected);

        chosen.driver = Some(Driver {
            name: "generic-gcm-aesni".into(),
            priority: 400,
            is_async: false,
        });
        chosen.acceleration = Some(Acceleration {
            sending: RecordEngine::Card,
            receiving: RecordEngine::Software,
        });
        chosen.device = Some(Device {
            name: "eth0".into(),
            tls_sends: Some(true),
            tls_receives: None,
        });
        chosen.counters.insert("TlsDecryptError".into(), 0);
        expected["driver"] =
            json!({"name": "generic-gcm-aesni", "priority": 400, "asynchronous": false});
        expected["acceleration"] = json!({"sending": "card", "receiving": "software"});
        expected["device"] = json!({"name": "eth0", "tls-hw-tx-offload": true});
        expected["tls_stat"] = json!({"TlsDecryptError": 0});
        assert_eq!(handed(&info, &chosen), expected);
    }
}
