//! The network device on a connection's route, and whether the device seals and opens TLS records
//! (`tls-hw-tx-offload`, `tls-hw-rx-offload`, as `ethtool --show-features` lists them).

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, TcpStream};

use dunlin_linux::ethtool::features;

use crate::netlink::{Request, ask, attribute, number};

/// The query for a route. Of its answer, only the attribute with the device is used (rtnetlink(7)).
const RTM_GETROUTE: u16 = 26;
const ROUTE_BYTES: usize = 12;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
/// The query for a device by its index; the answer has the name.
const RTM_GETLINK: u16 = 18;
const LINK_BYTES: usize = 16;
const IFLA_IFNAME: u16 = 3;

use dunlin_lane::kernel::Device;

/// Returns the device on which a connection's segments leave now.
///
/// # Errors
/// Errors from the kernel, for example if the process is not allowed to open netlink sockets, or if
/// no route leads to the peer.
pub(crate) fn of(connection: &TcpStream) -> io::Result<Device> {
    let name = name_of(connection)?;
    let features = features(connection, &name).unwrap_or_default();
    let is_on = |wanted: &str| {
        let mut features = features.iter();
        features.find(|one| one.name == wanted).map(|one| one.is_on)
    };
    Ok(Device {
        tls_sends: is_on("tls-hw-tx-offload"),
        tls_receives: is_on("tls-hw-rx-offload"),
        name,
    })
}

/// Returns the name of the device on which a connection's segments leave now.
///
/// # Errors
/// Same as [`of`].
pub(crate) fn name_of(connection: &TcpStream) -> io::Result<String> {
    name(index(connection.peer_addr()?.ip())?)
}

/// Returns the index of the device on the route to an address.
fn index(to: IpAddr) -> io::Result<u32> {
    let (family, address) = match to.to_canonical() {
        IpAddr::V4(to) => (libc::AF_INET, to.octets().to_vec()),
        IpAddr::V6(to) => (libc::AF_INET6, to.octets().to_vec()),
    };
    // `rtmsg`: only the family and the prefix length are set.
    let mut fixed = [0; ROUTE_BYTES];
    fixed[..2].copy_from_slice(&[family as u8, address.len() as u8 * 8]);
    let mut request = Request::new(RTM_GETROUTE, 0);
    request.put_bytes(&fixed);
    request.attribute(RTA_DST, |request| request.put_bytes(&address));
    let answer = ask(libc::NETLINK_ROUTE, request, ROUTE_BYTES)?;
    attribute(&answer, RTA_OIF)
        .and_then(|index| number(index, 0))
        .map(u32::from_ne_bytes)
        .ok_or(io::ErrorKind::InvalidData.into())
}

fn name(index: u32) -> io::Result<String> {
    // `ifinfomsg`: any family, no type, the device's index.
    let mut fixed = [0; LINK_BYTES];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut request = Request::new(RTM_GETLINK, 0);
    request.put_bytes(&fixed);
    let answer = ask(libc::NETLINK_ROUTE, request, LINK_BYTES)?;
    let name = attribute(&answer, IFLA_IFNAME).ok_or(io::ErrorKind::InvalidData)?;
    let name = CStr::from_bytes_until_nul(name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// This test checks nothing if the process is not allowed to open netlink sockets.
    #[test]
    fn a_local_connection_uses_the_loopback_device_which_seals_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let device = match of(&near) {
            Ok(device) => device,
            Err(error) => return println!("not available here: {error}"),
        };
        assert_eq!((&*device.name, &*name_of(&near).unwrap()), ("lo", "lo"));
        assert_ne!(device.tls_sends, Some(true));
        assert_ne!(device.tls_receives, Some(true));
        let known = features(&near, "lo").unwrap();
        // A feature that every loopback device has.
        let loopback = known.iter().find(|one| one.name == "loopback").unwrap();
        assert!(loopback.is_on && !loopback.can_change, "{loopback:?}");
        assert!(features(&near, "no-such-device").is_err());
    }
}
