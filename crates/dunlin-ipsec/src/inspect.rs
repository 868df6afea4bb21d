//! What the kernel says of a connection whose TLS it does, for the crates that open no netlink
//! sockets themselves.

use std::net::TcpStream;

use dunlin_lane::kernel::{Device, Inspector, TlsPlaces};

use crate::netdev;
use crate::sock_diag::tls_places;

/// Asks over netlink. An answer that the kernel refuses is no answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Netlink;

impl Inspector for Netlink {
    fn places(&self, connection: &TcpStream) -> Option<TlsPlaces> {
        tls_places(connection).ok().flatten()
    }

    fn device(&self, connection: &TcpStream) -> Option<Device> {
        netdev::of(connection).ok()
    }
}
