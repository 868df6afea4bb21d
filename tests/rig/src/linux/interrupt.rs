//! Interrupts a thread's system call with a signal that has an empty handler (signal(7)).

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use rustix::thread::gettid;

/// A thread that other threads can interrupt.
#[derive(Clone, Copy, Debug)]
pub struct Thread(libc::pid_t);

impl Thread {
    /// Returns the calling thread. Installs a handler for SIGUSR2 in the whole process.
    ///
    /// # Errors
    /// An error from sigaction(2).
    pub fn this() -> io::Result<Self> {
        extern "C" fn nothing(_: libc::c_int) {}
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeros are a valid sigaction: an empty mask, no flags, and the default
        // handler.
        let action = unsafe { action.assume_init_mut() };
        // Without SA_RESTART the interrupted call returns.
        action.sa_sigaction = nothing as *const () as libc::sighandler_t;
        // SAFETY: the action outlives the call, its handler accesses no memory, and the pointer for
        // the old action is null.
        let set = unsafe { libc::sigaction(libc::SIGUSR2, action, ptr::null_mut()) };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(gettid().as_raw_pid()))
    }

    /// Interrupts the thread's system call, if the thread is in one.
    ///
    /// # Errors
    /// An error from tgkill(2): the thread has ended.
    pub fn interrupt(self) -> io::Result<()> {
        // SAFETY: tgkill accesses no memory; the signal has an empty handler.
        let sent =
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, libc::SIGUSR2) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}
