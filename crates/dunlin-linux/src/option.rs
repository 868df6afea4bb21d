//! Socket options that `rustix` does not offer (setsockopt(2), getsockopt(2)).
//!
//! The module is private to this crate, because its functions are safe only for options that
//! contain no pointer. The crate uses only such options.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Sets an option to `value`, in the layout that the kernel reads.
///
/// # Errors
/// An error from setsockopt(2).
pub(crate) fn set(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    // SAFETY: `value` is initialised, lives through the call, and is passed with its length; the
    // kernel only reads it. It contains no pointer (see the module's documentation). The descriptor
    // is borrowed, hence open.
    let status = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads at most `BYTES` bytes of an option, in the kernel's layout. Returns the bytes and the
/// number of bytes that the kernel has written; the other bytes are zero.
///
/// # Errors
/// An error from getsockopt(2).
pub(crate) fn get<const BYTES: usize>(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
) -> io::Result<([u8; BYTES], usize)> {
    let mut value = [0; BYTES];
    let mut length = BYTES as libc::socklen_t;
    // SAFETY: `value` and `length` are initialised, live through the call and are borrowed
    // exclusively; `length` is the size of `value`, and the kernel writes no more. The descriptor
    // is borrowed, hence open.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    match status {
        0 => Ok((value, length as usize)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an option of type `int`.
///
/// # Errors
/// An error from setsockopt(2).
pub(crate) fn set_int(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    set(socket, level, name, &value.to_ne_bytes())
}

/// The 32-bit number at offset `at` of an option. Panics if the option is too short.
pub(crate) fn number(option: &[u8], at: usize) -> u32 {
    let bytes = option[at..].first_chunk();
    u32::from_ne_bytes(*bytes.expect("the offset is that of a field of the option"))
}
