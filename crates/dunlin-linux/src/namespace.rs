//! Network namespaces (network_namespaces(7)).

use std::io;
use std::thread;

use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Calls `work` on a thread in a new network namespace, which has only a loopback device and ends
/// with its last thread and socket. The other threads of this process stay in their own namespace.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`, or another error from unshare(2); an error if `work` panics.
pub fn in_new_network<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("dunlin-network".to_owned());
        let inside = thread.spawn_scoped(scope, || {
            // SAFETY: `CLONE_NEWNET` changes only which network devices and tables new sockets of
            // this thread use. The thread shares memory and descriptors with the process as before.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
            Ok(work())
        })?;
        let failed = |_| Err(io::Error::other("the thread in the new network panicked"));
        inside.join().unwrap_or_else(failed)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// This test checks nothing without `CAP_SYS_ADMIN`.
    #[test]
    fn a_listener_of_this_process_cannot_be_reached_from_the_new_network() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let name = || fs::read_link("/proc/thread-self/ns/net").unwrap();
        let outside = name();
        let found = in_new_network(|| (TcpStream::connect(address).is_ok(), name()));
        let (is_reached, inside) = match found {
            Ok(found) => found,
            Err(error) => return println!("not available here: {error}"),
        };
        assert!(!is_reached);
        assert_ne!(inside, outside);
        assert_eq!(name(), outside);
        TcpStream::connect(address).unwrap();
    }
}
