//! Network namespaces (setns(2)).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Runs `task` in a new thread inside the network namespace `namespace` (a file of `/run/netns`).
/// The sockets and TUN devices that the task creates stay in that namespace, even if other threads
/// use them. The rest of the process is not affected.
///
/// # Errors
/// An error from setns(2): not a namespace, or missing privileges.
///
/// # Panics
/// If `task` panics.
pub fn run_inside<T: Send>(namespace: &File, task: impl FnOnce() -> T + Send) -> io::Result<T> {
    let inside = || {
        // Changes the calling thread alone, which ends after `task`.
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(task())
    };
    thread::scope(|scope| {
        scope
            .spawn(inside)
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
