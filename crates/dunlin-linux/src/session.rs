//! Sessions of processes (credentials(7)).

use std::io;

use rustix::process::WaitOptions;

/// Makes this process the first of a new session, which has no terminal (setsid(2)) and gets none
/// of the signals that the old one's processes get. Programs that it starts inherit the session,
/// and of its descriptors the standard streams alone.
///
/// # Errors
/// `PermissionDenied` for the first process of a group; the error of close_range(2) (Linux 5.11).
pub fn leave() -> io::Result<()> {
    rustix::process::setsid()?;
    let (first, last, flags) = (3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: close_range(2) takes no pointers, and with this flag it closes nothing: every
    // descriptor stays usable by whoever owns it in this process.
    let status = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Collects the status of every child of this process that has ended, and of those that were left
/// to it as the first of its process namespace (pid_namespaces(7)); returns how many there were. No
/// other thread may wait for a child meanwhile: its status would be gone.
pub fn reap() -> usize {
    let mut count = 0;
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {
        count += 1;
    }
    count
}
