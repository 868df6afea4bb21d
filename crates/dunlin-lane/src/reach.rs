//! Where a peer's name leads.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};

/// Connects to the first reachable address of `endpoint`.
pub fn first_of(
    endpoint: &str,
    connect: impl Fn(SocketAddr) -> io::Result<TcpStream>,
) -> io::Result<TcpStream> {
    let mut last = io::Error::new(
        io::ErrorKind::NotFound,
        format!("{endpoint} has no address"),
    );
    // An IPv6 address without brackets would be a host and, by its last group, a port.
    let is_bare = endpoint.matches(':').count() > 1 && !endpoint.starts_with('[');
    let addresses = if is_bare {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "no brackets"))
    } else {
        endpoint.to_socket_addrs()
    };
    let addresses = addresses.map_err(|error| {
        // The standard library's own words do not say what is missing.
        if error.kind() == io::ErrorKind::InvalidInput {
            let wanted = "give a host and a port, as in host-b.example:4444 or [2001:db8::7]:4444";
            return io::Error::new(error.kind(), format!("{error}: {wanted}"));
        }
        error
    })?;
    for address in addresses {
        match connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_is_no_address_is_told_with_what_is_wanted() {
        for endpoint in [
            "127.0.0.1",
            "host-b.example:",
            "host-b.example:65536",
            "::1:4444",
            "2001:db8::2",
            "[::1]",
        ] {
            let error = first_of(endpoint, |_| unreachable!()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains("a host and a port"), "{error}");
        }
    }
}
