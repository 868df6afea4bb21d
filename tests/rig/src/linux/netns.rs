//! Network namespaces (setns(2)).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::thread;

/// Runs `task` in a new thread inside the network namespace `namespace` (a file of `/run/netns`).
/// Sockets and TUN devices created by it stay in that namespace wherever they are used; the rest of
/// the process is not affected.
///
/// # Errors
/// The error of setns(2): not a namespace, or missing privileges.
///
/// # Panics
/// If `task` panics.
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
