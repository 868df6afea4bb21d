//! The kernel's connection multiplexor (its Documentation/networking/kcm.rst): sockets that give
//! and take whole messages, over TCP connections that a program cuts into them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const AF_KCM: libc::c_int = 41;
const ATTACH: libc::Ioctl = 0x89e0;
const CLONE: libc::Ioctl = 0x89e2;

/// One socket of a multiplexor. All of its sockets share its connections.
#[derive(Debug)]
pub struct Messages(OwnedFd);

impl Messages {
    /// The first socket of a new multiplexor.
    ///
    /// # Errors
    /// What socket(2) says.
    pub fn new() -> io::Result<Self> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
        // SAFETY: socket takes no pointers.
        let made = unsafe { libc::socket(AF_KCM, kind, 0) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it, and nobody else knows of it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(made) }))
    }

    /// Adds a connection, which `program` cuts into messages; it is the multiplexor's from then on.
    ///
    /// # Errors
    /// What the ioctl says.
    pub fn attach(&self, connection: impl AsFd, program: impl AsFd) -> io::Result<()> {
        let mut request = [connection.as_fd().as_raw_fd(), program.as_fd().as_raw_fd()];
        // SAFETY: SIOCKCMATTACH reads two ints, which live through the call.
        unsafe { self.ioctl(ATTACH, request.as_mut_ptr()) }
    }

    /// Another socket of the same multiplexor.
    ///
    /// # Errors
    /// What the ioctl says.
    pub fn another(&self) -> io::Result<Self> {
        let mut made = -1;
        // SAFETY: SIOCKCMCLONE writes one int, for which `made` is valid.
        unsafe { self.ioctl(CLONE, &raw mut made) }?;
        // SAFETY: the kernel has just made it, and nobody else knows of it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(made) }))
    }

    /// # Safety
    /// `argument` is as `request` wants it.
    unsafe fn ioctl(&self, request: libc::Ioctl, argument: *mut libc::c_int) -> io::Result<()> {
        // SAFETY: the caller vouches for the argument; the descriptor is open.
        let status = unsafe { libc::ioctl(self.0.as_raw_fd(), request, argument) };
        match status {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
