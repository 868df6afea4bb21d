//! UDP sockets on which the kernel receives ESP in UDP. There is one for each address and port; all
//! sessions of this process share it.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, Weak};

use dunlin_linux::udp_encap::receive_encapsulated;

/// A network namespace, by its inode, and an address there.
type BoundAddress = (u64, SocketAddr);

/// The open sockets. A socket is closed when the last session that uses it ends.
static OPEN: Mutex<BTreeMap<BoundAddress, Weak<UdpSocket>>> = Mutex::new(BTreeMap::new());

/// Returns the socket at an address of the calling thread's network namespace. It is closed when
/// the last user drops it.
pub(super) fn listen(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let key = (fs::metadata("/proc/thread-self/ns/net")?.ino(), address);
    let mut open = lock(&OPEN);
    open.retain(|_, socket| socket.strong_count() > 0);
    if let Some(socket) = open.get(&key).and_then(Weak::upgrade) {
        return Ok(socket);
    }
    let socket = UdpSocket::bind(address)?;
    receive_encapsulated(&socket)?;
    let socket = Arc::new(socket);
    open.insert(key, Arc::downgrade(&socket));
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
        assert!(
            UdpSocket::bind(address).is_err(),
            "the socket was closed before its last user dropped it"
        );
        drop(other);
        UdpSocket::bind(address).unwrap();
    }
}
