//! UDP sockets by which the kernel takes ESP in UDP: one for an address and port, which
//! all sessions of this process share.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dunlin_linux::udp_encap::receive_encapsulated;

/// A network namespace, by its inode, and an address there.
type BoundAddress = (u64, SocketAddr);

/// Those that some session has.
static STANDING: Mutex<BTreeMap<BoundAddress, Weak<UdpSocket>>> = Mutex::new(BTreeMap::new());

/// The socket at an address of the calling thread's network namespace. It goes when
/// nobody has it any more.
pub(super) fn listen(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let place = (fs::metadata("/proc/thread-self/ns/net")?.ino(), address);
    let mut standing = STANDING.lock().unwrap_or_else(PoisonError::into_inner);
    standing.retain(|_, socket| socket.strong_count() > 0);
    if let Some(socket) = standing.get(&place).and_then(Weak::upgrade) {
        return Ok(socket);
    }
    let socket = UdpSocket::bind(address)?;
    receive_encapsulated(&socket)?;
    let socket = Arc::new(socket);
    standing.insert(place, Arc::downgrade(&socket));
    Ok(socket)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn sessions_share_a_socket_and_it_goes_with_the_last() {
        let free = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let one = listen(address).unwrap();
        let other = listen(address).unwrap();
        assert!(Arc::ptr_eq(&one, &other));
        drop(one);
        assert!(UdpSocket::bind(address).is_err(), "the other one has it");
        drop(other);
        UdpSocket::bind(address).unwrap();
    }
}
