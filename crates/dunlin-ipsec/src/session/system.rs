//! Queries to the system that do not read the tables of IPsec.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;

use crate::netdev;

use crate::error::IpsecError;

/// Returns whether packets to an address stay on this host. This is the case if the kernel chooses
/// this address, or a loopback address, as the packets' source.
pub(super) fn is_of_this_host(address: IpAddr) -> Result<bool, IpsecError> {
    const DISCARD: u16 = 9;
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // connect(2) on a UDP socket sends nothing.
    let routed = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, DISCARD))?;
        let source = socket.local_addr()?.ip();
        Ok(source == address || source.is_loopback())
    });
    routed.map_err(IpsecError::resources("the route to the peer"))
}

/// The addresses of a control connection: this side's, then the peer's.
pub(crate) fn ends(connection: &TcpStream) -> Result<(SocketAddr, SocketAddr), IpsecError> {
    let failed = IpsecError::resources("the address of the control connection");
    let local = connection.local_addr().map_err(failed)?;
    Ok((local, connection.peer_addr().map_err(failed)?))
}

/// Checks that IPsec policies apply to packets to and from the peer of a connection. They do not
/// apply if the device on the route to the peer, or every device, is configured to bypass them.
pub(super) fn guarded(connection: &TcpStream) -> Result<(), IpsecError> {
    let failed = IpsecError::resources("the device on the route to the peer");
    let device = netdev::name_of(connection).map_err(failed)?;
    let (_, peer) = ends(connection)?;
    let family = match peer.ip().to_canonical() {
        IpAddr::V4(_) => "ipv4",
        IpAddr::V6(_) => "ipv6",
    };
    match unguarded(Path::new(SYSCTLS), family, &device) {
        None => Ok(()),
        Some(sysctl) => Err(IpsecError::Unguarded { device, sysctl }),
    }
}

const SYSCTLS: &str = "/proc/sys/net";

/// Returns the sysctl that makes packets of a family bypass IPsec on a device, if one is
/// set.
fn unguarded(settings: &Path, family: &str, device: &str) -> Option<String> {
    let names = ["disable_xfrm", "disable_policy"];
    let all = names
        .iter()
        .flat_map(|name| [("all", name), (device, name)]);
    let is_set = |of: &str, name: &str| {
        // Not every kernel has both settings for both families. A missing setting bypasses nothing.
        let path = settings.join(family).join("conf").join(of).join(name);
        fs::read_to_string(path).is_ok_and(|value| value.trim() != "0")
    };
    let mut set = all.filter(|(of, name)| is_set(of, name));
    // Separate the parts by slashes: a device name may contain dots, which sysctl(8) would read as
    // separators otherwise.
    set.next()
        .map(|(of, name)| format!("net/{family}/conf/{of}/{name}"))
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N], IpsecError> {
    let mut bytes = [0; N];
    dunlin_linux::random::fill(&mut bytes).map_err(IpsecError::resources("randomness"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_address_of_this_host_is_recognised() {
        assert!(is_of_this_host([127, 0, 0, 1].into()).unwrap());
        assert!(is_of_this_host([127, 9, 0, 7].into()).unwrap());
    }

    /// Claim K7 of docs/security.
    #[test]
    fn a_setting_by_which_the_device_or_all_devices_bypass_ipsec_is_named() {
        let scratch = dunlin_test_base::Scratch::new();
        let folder = scratch.path();
        let set = |of: &str, name: &str, value: &str| {
            let folder = folder.join("ipv4/conf").join(of);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(name), value).unwrap();
        };
        for of in ["all", "lo", "eth0.5"] {
            set(of, "disable_xfrm", "0\n");
            set(of, "disable_policy", "0\n");
        }
        let found = || unguarded(folder, "ipv4", "eth0.5");
        set("lo", "disable_policy", "1\n");
        assert_eq!(found(), None, "reported a device that packets do not use");
        set("eth0.5", "disable_policy", "1\n");
        assert_eq!(found().unwrap(), "net/ipv4/conf/eth0.5/disable_policy");
        assert_eq!(unguarded(folder, "ipv6", "eth0.5"), None);
        set("eth0.5", "disable_policy", "0\n");
        set("all", "disable_xfrm", "1\n");
        assert_eq!(found().unwrap(), "net/ipv4/conf/all/disable_xfrm");
    }
}
