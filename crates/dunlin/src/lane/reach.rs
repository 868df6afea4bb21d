//! Where a peer's name leads.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};

/// The first connection that can be had to any address of `endpoint`.
pub(crate) fn first_of(
    endpoint: &str,
    connect: impl Fn(SocketAddr) -> io::Result<TcpStream>,
) -> io::Result<TcpStream> {
    let mut last = io::Error::new(
        io::ErrorKind::NotFound,
        format!("{endpoint} has no address"),
    );
    for address in endpoint.to_socket_addrs()? {
        match connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
