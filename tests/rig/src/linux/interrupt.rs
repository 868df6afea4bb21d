//! Interrupting a thread's system call by a signal whose handler does nothing (signal(7)).

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// A thread that can be interrupted from others.
#[derive(Clone, Copy, Debug)]
pub struct Thread(libc::pid_t);

impl Thread {
    /// The calling thread. SIGUSR2 of the whole process is taken for it.
    ///
    /// # Errors
    /// What sigaction(2) says.
    pub fn this() -> io::Result<Self> {
        extern "C" fn nothing(_: libc::c_int) {}
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeros are a sigaction: an empty mask, no flags, and the default for a handler.
        let action = unsafe { action.assume_init_mut() };
        // No SA_RESTART: the call that is interrupted ends.
        action.sa_sigaction = nothing as *const () as libc::sighandler_t;
        // SAFETY: the action lives through the call, its handler touches nothing at all, and the
        // old one is not asked for.
        let set = unsafe { libc::sigaction(libc::SIGUSR2, action, ptr::null_mut()) };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: gettid takes nothing and cannot fail.
        Ok(Self(unsafe { libc::gettid() }))
    }

    /// Interrupts the system call that it is in, if it is in one.
    ///
    /// # Errors
    /// What tgkill(2) says: the thread has ended.
    pub fn interrupt(self) -> io::Result<()> {
        // SAFETY: tgkill touches no memory; the signal has a handler, which does nothing.
        let sent =
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, libc::SIGUSR2) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}
