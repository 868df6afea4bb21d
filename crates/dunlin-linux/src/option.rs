//! Socket options that `rustix` does not offer (setsockopt(2), getsockopt(2)).
//!
//! For this crate alone: the functions are safe because no option that it uses holds an address.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Sets an option to `value`, in the layout that the kernel reads.
///
/// # Errors
/// The error of setsockopt(2).
pub(crate) fn set(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    // SAFETY: `value` is initialised, lives through the call, and its length is passed with it; the
    // kernel only reads it. The descriptor is borrowed, hence open.
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

/// Reads an option in the kernel's layout, `BYTES` of it at most; returns how many bytes the kernel
/// has written. The others are zero.
///
/// # Errors
/// The error of getsockopt(2).
pub(crate) fn get<const BYTES: usize>(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
) -> io::Result<([u8; BYTES], usize)> {
    let mut value = [0; BYTES];
    let mut length = BYTES as libc::socklen_t;
    // SAFETY: `value` and `length` are initialised, live through the call and are borrowed
    // exclusively; `length` states the room at `value`, beyond which the kernel does not write. The
    // descriptor is borrowed, hence open.
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

/// Sets an option that is an `int`.
///
/// # Errors
/// The error of setsockopt(2).
pub(crate) fn set_int(
    socket: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    set(socket, level, name, &value.to_ne_bytes())
}

/// The 32-bit number at an offset of an option. Panics if the option ends before.
pub(crate) fn number(option: &[u8], at: usize) -> u32 {
    let bytes = option[at..].first_chunk();
    u32::from_ne_bytes(*bytes.expect("the offset is one of the option's own fields"))
}
