//! The network device by which a connection leaves, and whether it is to seal and open TLS records
//! (`tls-hw-tx-offload`, `tls-hw-rx-offload`, as `ethtool --show-features` has them).

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

use crate::netlink::{Request, ask, attribute, number};

/// The question about a route, and of its answer the fixed part and the device's attribute
/// (rtnetlink(7)).
const RTM_GETROUTE: u16 = 26;
const ROUTE_BYTES: usize = 12;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
/// The same about a device by its number, which has its name.
const RTM_GETLINK: u16 = 18;
const LINK_BYTES: usize = 16;
const IFLA_IFNAME: u16 = 3;

/// The ioctl, what it is asked, and the set of strings (include/uapi/linux/ethtool.h).
const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETH_SS_FEATURES: u32 = 4;
/// A feature's name, in words.
const NAME_WORDS: usize = 8;
/// Of each 32 features: which there are, are wanted, are in force, never change; in words.
const BLOCK_WORDS: usize = 4;
/// More than any kernel has.
const FEATURES_LIMIT: u32 = 1024;

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

/// The device by which a connection's segments leave now.
///
/// # Errors
/// What the kernel says: there may be no netlink sockets, or no route any more.
pub fn of(connection: &TcpStream) -> io::Result<Device> {
    let name = name_of(connection)?;
    let features = features(connection, &name).unwrap_or_default();
    let is_on = |wanted: &str| {
        let mut known = features.iter();
        known.find(|(name, _)| name == wanted).map(|(_, on)| *on)
    };
    Ok(Device {
        tls_sends: is_on("tls-hw-tx-offload"),
        tls_receives: is_on("tls-hw-rx-offload"),
        name,
    })
}

/// The name of the device by which a connection's segments leave now.
///
/// # Errors
/// As [`of`].
pub fn name_of(connection: &TcpStream) -> io::Result<String> {
    name(index(connection.peer_addr()?.ip())?)
}

/// The number of the device on the way to an address.
fn index(to: IpAddr) -> io::Result<u32> {
    let (family, address) = match to.to_canonical() {
        IpAddr::V4(to) => (libc::AF_INET, to.octets().to_vec()),
        IpAddr::V6(to) => (libc::AF_INET6, to.octets().to_vec()),
    };
    // `rtmsg`: the family, how many bits of the address count, nothing else.
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
    // `ifinfomsg`: any family, the device's number behind its type, of which nothing is said.
    let mut fixed = [0; LINK_BYTES];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut request = Request::new(RTM_GETLINK, 0);
    request.put_bytes(&fixed);
    let answer = ask(libc::NETLINK_ROUTE, request, LINK_BYTES)?;
    let name = attribute(&answer, IFLA_IFNAME).ok_or(io::ErrorKind::InvalidData)?;
    let name = CStr::from_bytes_until_nul(name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

/// All features by their names, and whether each is in force.
fn features(socket: impl AsFd, device: &str) -> io::Result<Vec<(String, bool)>> {
    // How many: a bit for the set, in two words, then the answer.
    let mut set = [ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_FEATURES, 0, 0];
    ethtool(&socket, device, &mut set)?;
    let count = set[4];
    if count > FEATURES_LIMIT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut names = vec![0; 3 + NAME_WORDS * count as usize];
    names[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count]);
    ethtool(&socket, device, &mut names)?;
    let blocks = count.div_ceil(32);
    let mut states = vec![0; 2 + BLOCK_WORDS * blocks as usize];
    states[..2].copy_from_slice(&[ETHTOOL_GFEATURES, blocks]);
    ethtool(&socket, device, &mut states)?;
    let of = |(number, words): (usize, &[u32])| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let name = CStr::from_bytes_until_nul(&bytes).ok()?;
        let active = states[2 + BLOCK_WORDS * (number / 32) + 2];
        let is_on = active >> (number % 32) & 1 == 1;
        Some((name.to_string_lossy().into_owned(), is_on))
    };
    let names = names[3..].chunks_exact(NAME_WORDS).enumerate();
    Ok(names.filter_map(of).collect())
}

/// One question, whose answer takes the place of its words.
fn ethtool(socket: &impl AsFd, device: &str, words: &mut [u32]) -> io::Result<()> {
    // SAFETY: `ifreq` consists of integers and pointers, for all of which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = words.as_mut_ptr().cast();
    // SAFETY: `request` and `words` live through the call and are borrowed exclusively. Each question
    // above has room for the answer that it asks for: the kernel writes one word for the one set
    // that is marked, as many names as there are features where as many were asked for or more
    // (`__ethtool_get_strings`), and no more blocks than the second word allows
    // (`ethtool_get_features`, net/ethtool/ioctl.c). A kernel's number of features does not change.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Some processes may have no netlink sockets.
    #[test]
    fn a_connection_to_ourselves_leaves_by_the_loopback_which_seals_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let device = match of(&near) {
            Ok(device) => device,
            Err(error) => return println!("not told here: {error}"),
        };
        assert_eq!((&*device.name, &*name_of(&near).unwrap()), ("lo", "lo"));
        assert_ne!(device.tls_sends, Some(true));
        assert_ne!(device.tls_receives, Some(true));
        let known = features(&near, "lo").unwrap();
        // What every loopback has.
        assert!(known.contains(&("loopback".to_owned(), true)), "{known:?}");
        assert!(features(&near, "no-such-device").is_err());
    }
}
