//! Fuzz targets of this crate: the bytes of a connection before and after its peer is
//! authenticated, certificates, and lists of denied keys. Compiled for tests and with the
//! feature `fuzzing` only; see [`dunlin_proto::fuzz`] for how to run them.

use dunlin_proto::fuzz::Target;

pub use crate::internals::accept::fuzz::fuzz_connection;
pub use crate::internals::data::fuzz::fuzz_data_lane;
pub use crate::internals::denied::fuzz::fuzz_denied;
pub use crate::internals::handshake::fuzz::fuzz_handshake_records;
pub use crate::internals::peers::fuzz::fuzz_certificate;
pub use crate::internals::record::fuzz::{fuzz_record_content, fuzz_records};
pub use crate::internals::relayed::fuzz::fuzz_relayed;

/// Every target of this crate.
pub const TARGETS: &[Target] = &[
    ("connection", fuzz_connection),
    ("handshake_records", fuzz_handshake_records),
    ("certificate", fuzz_certificate),
    ("denied", fuzz_denied),
    ("records", fuzz_records),
    ("record_content", fuzz_record_content),
    ("data_lane", fuzz_data_lane),
    ("relayed", fuzz_relayed),
];

/// Returns the two ends of a connection that needs no network. They are unix sockets in the type
/// `TcpStream`, because every reader in this crate takes that type.
pub fn pair() -> (std::net::TcpStream, std::net::TcpStream) {
    use std::os::fd::OwnedFd;
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("descriptors are free");
    (OwnedFd::from(near).into(), OwnedFd::from(far).into())
}

#[cfg(test)]
#[path = "../../../fuzz/driver.rs"]
mod driver;

#[cfg(test)]
mod tests {
    use super::driver::{Seed, check, noise, vectors};
    use super::*;

    fn seeds(target: &str) -> Vec<Seed> {
        let seed = |name: &str, bytes: &[u8]| (name.to_owned(), bytes.to_vec());
        match target {
            "connection" => {
                let mut seeds = vectors("opening/");
                // A record with a ClientHello that offers two cipher suites.
                let mut hello = vec![22, 3, 1, 0, 49, 1, 0, 0, 45, 3, 3];
                hello.extend([7; 32]);
                hello.extend([0, 0, 4, 0x13, 1, 0x13, 2, 1, 0, 0, 0]);
                seeds.push(seed("client-hello", &hello));
                seeds.push(seed("http", b"GET / HTTP/1.1\r\n\r\n"));
                seeds
            }
            "handshake_records" => vec![
                seed("one", &[22, 3, 3, 0, 4, 1, 2, 3, 4]),
                seed("two", &[20, 3, 3, 0, 1, 1, 23, 3, 3, 0, 2, 9, 9]),
                seed("longest", &[22, 3, 3, 0x41, 0]),
            ],
            "certificate" => Vec::new(),
            "denied" => {
                let key = format!("spki-sha256:{}", "0a".repeat(32));
                let colons = format!("spki-sha256:{}", ["0A"; 32].join(":"));
                let text = format!("# stolen\n\n  {key}  # host-c\r\n{colons}\n");
                let certificate = key.replacen("spki-", "", 1);
                vec![
                    seed("keys", text.as_bytes()),
                    seed("certificate", certificate.as_bytes()),
                    seed("name", b"host-a.example\n"),
                ]
            }
            "record_content" => vec![
                seed("data", &[0, 1, 2, 3, 23]),
                seed("padded", &[1, 1, 2, 3, 23, 0, 0, 0]),
                seed("padding", &[2, 0, 0, 0]),
                seed("close", &[3, 1, 0, 21]),
                seed("alert", &[4, 2, 40, 21]),
                seed("key-update", &[5, 24, 0, 0, 1, 0, 22]),
                seed("empty", &[0, 23]),
            ],
            _ => noise(),
        }
    }

    #[test]
    fn i7_every_reader_of_a_lane_survives_seeds_and_mutations() {
        check(TARGETS, seeds);
    }
}
