//! What the kernel chose for a connection with kernel TLS: the driver, and whether a network card
//! seals and opens the records. Also the kernel's counters.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::TcpStream;

use super::Driver;
use crate::internals::provider::CipherSuite;

/// The counters of the calling thread's network namespace. `/proc/net` shows the namespace of the
/// process's first thread, and is missing in a service with `ProcSubset=pid`.
const COUNTERS: &str = "/proc/thread-self/net/tls_stat";
/// The names in ethtool(8) of the features with which a network card seals and opens records: first
/// for sending, then for receiving.
const FLAGS: [&str; 2] = ["tls-hw-tx-offload", "tls-hw-rx-offload"];
/// Counters are reported if their name contains one of these parts. They count failures, and
/// connections for which a network card seals or opens the records
/// (Documentation/networking/tls.rst).
const REPORTED: [&str; 4] = ["Device", "Error", "Retry", "Violation"];

/// Queries the kernel about a connection. This needs netlink, for which this crate has no socket,
/// so `dunlin_ipsec::inspect` implements this trait. The implementation for `()` reports nothing.
pub trait Inspector: fmt::Debug + Send + Sync {
    /// What seals and opens the connection's records; `None` if the kernel does not report it.
    fn record_engines(&self, connection: &TcpStream) -> Option<RecordEngines>;

    /// The device through which the connection's segments leave now; `None` if the kernel does not
    /// report it.
    fn device(&self, connection: &TcpStream) -> Option<Device>;
}

impl Inspector for () {
    fn record_engines(&self, _: &TcpStream) -> Option<RecordEngines> {
        None
    }

    fn device(&self, _: &TcpStream) -> Option<Device> {
        None
    }
}

/// What seals or opens the records of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordEngine {
    /// The kernel's software, on this host's processors (`TLS_CONF_SW`; `sw` in ss(8)).
    Software,
    /// The network card (`TLS_CONF_HW`, `TLS_CONF_HW_RECORD`).
    Card,
}

/// The engines of both directions; `None` if a direction has no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordEngines {
    /// The engine for what this side sends.
    pub sending: Option<RecordEngine>,
    /// The engine for what the peer sends.
    pub receiving: Option<RecordEngine>,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The name in ip(8).
    pub name: String,
    /// Whether the device accepts keys for sending; `None` if it does not report that.
    pub tls_sends: Option<bool>,
    /// Whether the device accepts keys for receiving; `None` if it does not report that.
    pub tls_receives: Option<bool>,
}

/// What the kernel chose for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The software driver; `None` if the kernel does not report it.
    pub driver: Option<Driver>,
    /// Where records are sealed and opened; `None` if the kernel does not report it.
    pub acceleration: Option<Acceleration>,
    /// The device through which the connection's segments left when its keys were installed, and
    /// whether that device accepts keys; `None` if the kernel does not report it.
    pub device: Option<Device>,
    /// Counters of the kernel, under the kernel's names. They count failures, and connections for
    /// which a network card seals or opens the records. They cover all sockets in this network
    /// namespace since its creation; no counter is specific to this connection. Empty if the kernel
    /// does not report them.
    pub counters: BTreeMap<String, u64>,
}

/// Where records are sealed and opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acceleration {
    /// The engine for what this side sends.
    pub sending: RecordEngine,
    /// The engine for what the peer sends.
    pub receiving: RecordEngine,
}

impl Chosen {
    /// Inspects a connection with kernel TLS.
    pub fn of(connection: &TcpStream, suite: CipherSuite, inspector: &dyn Inspector) -> Self {
        let listed = fs::read_to_string(COUNTERS).unwrap_or_default();
        Self {
            driver: Driver::of(suite),
            // A kernel that does not report this causes no error, because the value is only for
            // display.
            acceleration: match inspector.record_engines(connection) {
                Some(RecordEngines {
                    sending: Some(sending),
                    receiving: Some(receiving),
                }) => Some(Acceleration { sending, receiving }),
                _ => software_only(&listed),
            },
            device: inspector.device(connection),
            counters: counters(&listed)
                .filter(|(name, _)| REPORTED.iter().any(|part| name.contains(part)))
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
        }
    }
}

/// Derives the acceleration from the counters in `listed`, if the kernel does not report it for
/// this socket. Before Linux 6.15, such a report needs `CAP_NET_ADMIN`. If no card has ever sealed
/// or opened records for any socket of this namespace, the kernel's software serves this socket.
/// Otherwise the result is `None`.
fn software_only(listed: &str) -> Option<Acceleration> {
    let never = |wanted: &str| counters(listed).any(|found| found == (wanted, 0));
    (never("TlsTxDevice") && never("TlsRxDevice")).then_some(Acceleration {
        sending: RecordEngine::Software,
        receiving: RecordEngine::Software,
    })
}

/// Parses lines "NAME VALUE".
fn counters(listed: &str) -> impl Iterator<Item = (&str, u64)> {
    listed.lines().filter_map(|line| {
        let (name, value) = line.split_once(char::is_whitespace)?;
        Some((name, value.trim().parse().ok()?))
    })
}

impl fmt::Display for Chosen {
    /// Formats the known facts and all nonzero counters, as a part of a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sealed by the kernel")?;
        if let Some(driver) = &self.driver {
            write!(f, ", with {driver}")?;
        }
        if let Some(acceleration) = &self.acceleration {
            write!(f, ", {acceleration}")?;
        }
        if let Some(device) = &self.device {
            write!(f, ", through {}", device.name)?;
            for (flag, is_on) in FLAGS.iter().zip([device.tls_sends, device.tls_receives]) {
                if is_on == Some(true) {
                    write!(f, " ({flag})")?;
                }
            }
        }
        let counted = self.counters.iter().filter(|&(_, &count)| count != 0);
        for (number, (name, count)) in counted.enumerate() {
            let before = match number {
                0 => "; counters of all sockets in this namespace:",
                _ => ",",
            };
            write!(f, "{before} {name} {count}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Acceleration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.sending, self.receiving) {
            (RecordEngine::Software, RecordEngine::Software) => "in software",
            (RecordEngine::Card, RecordEngine::Card) => "on the network card",
            (RecordEngine::Card, RecordEngine::Software) => {
                "on the network card for sending, in software for receiving"
            }
            (RecordEngine::Software, RecordEngine::Card) => {
                "in software for sending, on the network card for receiving"
            }
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LISTED: &str = "TlsCurrTxSw                     1\nTlsTxSw                         4\n\
        TlsTxDevice                     0\nTlsRxDevice                     0\n\
        TlsDecryptError                 2\nTlsRxNoPadViolation             0\n";

    #[test]
    fn without_card_counters_the_engine_is_software() {
        let acceleration = software_only(LISTED).unwrap();
        assert_eq!(acceleration.to_string(), "in software");
        for counter in ["TlsTxDevice", "TlsRxDevice"] {
            let zero = format!("{counter}                     0");
            let one = format!("{counter}                     1");
            assert_eq!(software_only(&LISTED.replace(&zero, &one)), None);
            assert_eq!(software_only(&LISTED.replace(&zero, "")), None);
        }
        assert_eq!(software_only(""), None, "an engine without counters");
    }

    #[test]
    fn k16_counters_are_labelled_as_those_of_the_namespace() {
        let chosen = Chosen {
            driver: Some(Driver {
                name: "generic-gcm-aesni".to_owned(),
                priority: 400,
                is_async: false,
            }),
            acceleration: Some(Acceleration {
                sending: RecordEngine::Card,
                receiving: RecordEngine::Card,
            }),
            device: None,
            counters: counters(LISTED)
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
        };
        assert_eq!(
            chosen.to_string(),
            "sealed by the kernel, with generic-gcm-aesni (priority 400), on the network card; \
             counters of all sockets in this namespace: TlsCurrTxSw 1, TlsDecryptError 2, TlsTxSw 4"
        );
        let with_device = Chosen {
            counters: BTreeMap::new(),
            device: Some(Device {
                name: "eth0".to_owned(),
                tls_sends: Some(true),
                tls_receives: Some(false),
            }),
            ..chosen
        };
        let expected = "on the network card, through eth0 (tls-hw-tx-offload)";
        assert!(with_device.to_string().ends_with(expected), "{with_device}");
        let nothing = Chosen {
            driver: None,
            acceleration: None,
            device: None,
            counters: BTreeMap::new(),
        };
        assert_eq!(nothing.to_string(), "sealed by the kernel");
    }
}
