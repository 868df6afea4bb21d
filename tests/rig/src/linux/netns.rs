//! Network namespaces (setns(2)): doing something as if on another host.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::thread;

/// Runs `task` in a thread of its own inside the network namespace that `namespace` is (a file of
/// `/run/netns`). Sockets and TUN devices that it makes stay there wherever they are used; nothing
/// else of the process moves.
///
/// # Errors
/// What setns(2) says: no namespace, or no privilege.
///
/// # Panics
/// When `task` does.
pub fn run_inside<T: Send>(namespace: &File, task: impl FnOnce() -> T + Send) -> io::Result<T> {
    let inside = || {
        // SAFETY: setns takes no pointers, and the descriptor is open while `namespace` is
        // borrowed. It changes the calling thread alone, which ends after `task`.
        let result = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(task())
    };
    thread::scope(|scope| {
        scope
            .spawn(inside)
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
