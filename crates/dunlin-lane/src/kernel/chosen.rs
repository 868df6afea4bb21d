//! What the kernel has chosen for a connection that has given it its keys: what does the work,
//! where, and what its counters say.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::TcpStream;

use super::Driver;
use crate::provider::CipherSuite;

/// The counters of the network namespace that the calling thread is in; `/proc/net` is that of the
/// process's first thread, and not there where a service sees its processes alone.
const COUNTERS: &str = "/proc/thread-self/net/tls_stat";
/// As ethtool(8) has them: what is sent, what comes.
const FLAGS: [&str; 2] = ["tls-hw-tx-offload", "tls-hw-rx-offload"];
/// Parts of the names of those that tell of cards and of what went wrong
/// (Documentation/networking/tls.rst).
const TOLD: [&str; 4] = ["Device", "Error", "Retry", "Violation"];

/// Asks the kernel about a connection, over netlink, for which this crate has no socket:
/// `dunlin_ipsec::inspect` implements it. `()` asks nothing.
pub trait Inspector: fmt::Debug + Send + Sync {
    /// Who seals and opens the connection's records; `None` where the kernel does not tell.
    fn record_engines(&self, connection: &TcpStream) -> Option<RecordEngines>;

    /// The device by which its segments leave now; `None` where the kernel does not tell.
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

/// Who seals or opens the records of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordEngine {
    /// The kernel, on this host's processors (`TLS_CONF_SW`, or `sw` as ss(8) has it).
    Software,
    /// The network card (`TLS_CONF_HW`, `TLS_CONF_HW_RECORD`).
    Card,
}

/// The same of both directions; `None` is a direction without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordEngines {
    /// What this side sends.
    pub sending: Option<RecordEngine>,
    /// What the peer sends.
    pub receiving: Option<RecordEngine>,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// As ip(8) shows it.
    pub name: String,
    /// It takes keys for what is sent; `None` where it does not tell.
    pub tls_sends: Option<bool>,
    /// The same for what comes.
    pub tls_receives: Option<bool>,
}

/// What the kernel has chosen for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// What seals and opens in software; `None` where the kernel does not tell.
    pub driver: Option<Driver>,
    /// Where that is done; `None` where the kernel does not tell.
    pub acceleration: Option<Acceleration>,
    /// The network device by which the connection left when it was made, and whether that is to take
    /// keys; `None` where the kernel does not tell.
    pub device: Option<Device>,
    /// Of all sockets of this network namespace since it was made, by the kernel's own names: how
    /// many a card seals and opens for, and what has gone wrong. Empty where it does not tell. None
    /// of them is of one connection.
    pub counters: BTreeMap<String, u64>,
}

/// Where records are sealed and opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acceleration {
    /// What this side sends.
    pub sending: RecordEngine,
    /// What the peer sends.
    pub receiving: RecordEngine,
}

impl Chosen {
    /// What it is for a connection that has its keys in the kernel.
    pub fn of(connection: &TcpStream, suite: CipherSuite, inspector: &dyn Inspector) -> Self {
        let listed = fs::read_to_string(COUNTERS).unwrap_or_default();
        Self {
            driver: Driver::of(suite),
            // Whatever keeps it from being told, it is a remark.
            acceleration: match inspector.record_engines(connection) {
                Some(RecordEngines {
                    sending: Some(sending),
                    receiving: Some(receiving),
                }) => Some(Acceleration { sending, receiving }),
                _ => without_a_card(&listed),
            },
            device: inspector.device(connection),
            counters: counters(&listed)
                .filter(|(name, _)| TOLD.iter().any(|part| name.contains(part)))
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
        }
    }
}

/// Where the kernel does not tell of one socket (before Linux 6.15 without `CAP_NET_ADMIN`): if no
/// card has ever sealed or opened for any socket of this namespace, it does not for this one.
fn without_a_card(listed: &str) -> Option<Acceleration> {
    let never = |wanted: &str| counters(listed).any(|found| found == (wanted, 0));
    (never("TlsTxDevice") && never("TlsRxDevice")).then_some(Acceleration {
        sending: RecordEngine::Software,
        receiving: RecordEngine::Software,
    })
}

/// Lines "NAME VALUE".
fn counters(listed: &str) -> impl Iterator<Item = (&str, u64)> {
    listed.lines().filter_map(|line| {
        let (name, value) = line.split_once(char::is_whitespace)?;
        Some((name, value.trim().parse().ok()?))
    })
}

impl fmt::Display for Chosen {
    /// What is known of it, and such counters as are not zero: a part of a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sealed by the kernel")?;
        if let Some(driver) = &self.driver {
            write!(f, ", with {driver}")?;
        }
        if let Some(acceleration) = &self.acceleration {
            write!(f, ", {acceleration}")?;
        }
        if let Some(device) = &self.device {
            write!(f, ", by {}", device.name)?;
            for (flag, is_on) in FLAGS.iter().zip([device.tls_sends, device.tls_receives]) {
                if is_on == Some(true) {
                    write!(f, " ({flag})")?;
                }
            }
        }
        let counted = self.counters.iter().filter(|&(_, &count)| count != 0);
        for (number, (name, count)) in counted.enumerate() {
            let before = match number {
                0 => "; of all sockets here it has counted",
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
                "on the network card as far as it is sent, in software as far as it is received"
            }
            (RecordEngine::Software, RecordEngine::Card) => {
                "in software as far as it is sent, on the network card as far as it is received"
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
    fn where_no_card_has_ever_sealed_it_is_done_in_software() {
        let acceleration = without_a_card(LISTED).unwrap();
        assert_eq!(acceleration.to_string(), "in software");
        for counter in ["TlsTxDevice", "TlsRxDevice"] {
            let zero = format!("{counter}                     0");
            let one = format!("{counter}                     1");
            assert_eq!(without_a_card(&LISTED.replace(&zero, &one)), None);
            assert_eq!(without_a_card(&LISTED.replace(&zero, "")), None);
        }
        assert_eq!(without_a_card(""), None, "it is not told");
    }

    #[test]
    fn k16_what_is_counted_for_a_whole_namespace_is_told_as_that() {
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
            "sealed by the kernel, with generic-gcm-aesni (priority 400), on the network card; of \
             all sockets here it has counted TlsCurrTxSw 1, TlsDecryptError 2, TlsTxSw 4"
        );
        let told = Chosen {
            counters: BTreeMap::new(),
            device: Some(Device {
                name: "eth0".to_owned(),
                tls_sends: Some(true),
                tls_receives: Some(false),
            }),
            ..chosen
        };
        let words = "on the network card, by eth0 (tls-hw-tx-offload)";
        assert!(told.to_string().ends_with(words), "{told}");
        let nothing = Chosen {
            driver: None,
            acceleration: None,
            device: None,
            counters: BTreeMap::new(),
        };
        assert_eq!(nothing.to_string(), "sealed by the kernel");
    }
}
