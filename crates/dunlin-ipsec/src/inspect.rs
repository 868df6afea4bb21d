//! Queries the kernel about a connection that uses kernel TLS, for crates that open no netlink
//! sockets themselves.

use std::net::TcpStream;

use dunlin_lane::kernel::{Device, Inspector, RecordEngines};

use crate::netdev;
use crate::sock_diag::record_engines;

/// Queries the kernel over netlink. If the kernel refuses, the result is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Netlink;

impl Inspector for Netlink {
    fn record_engines(&self, connection: &TcpStream) -> Option<RecordEngines> {
        record_engines(connection).ok().flatten()
    }

    fn device(&self, connection: &TcpStream) -> Option<Device> {
        netdev::of(connection).ok()
    }
}
