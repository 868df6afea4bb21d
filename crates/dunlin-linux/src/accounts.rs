//! User and group IDs, looked up by name (getpwnam(3), getgrnam(3)).

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::ptr;

/// The size at which the buffer for an entry stops growing. A group with thousands of members fits.
const MOST_BYTES: usize = 1 << 20;

/// The ID of the user with this name; `None` if there is none.
///
/// # Errors
/// The user database cannot be read, or the entry is longer than 1 MiB.
pub fn user_id(name: &str) -> io::Result<Option<u32>> {
    find(
        name,
        |name, entry: *mut libc::passwd, buffer, bytes, found| {
            // SAFETY: `name` is a C string, `buffer` is valid for writes of `bytes` bytes, and `entry` and
            // `found` are valid for writes; all of them live through the call.
            unsafe { libc::getpwnam_r(name, entry, buffer, bytes, found) }
        },
    )
    .map(|entry| entry.map(|entry| entry.pw_uid))
}

/// The ID of the group with this name; `None` if there is none.
///
/// # Errors
/// The group database cannot be read, or the entry is longer than 1 MiB.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    find(
        name,
        |name, entry: *mut libc::group, buffer, bytes, found| {
            // SAFETY: `name` is a C string, `buffer` is valid for writes of `bytes` bytes, and
            // `entry` and `found` are valid for writes; all of them live through the call.
            unsafe { libc::getgrnam_r(name, entry, buffer, bytes, found) }
        },
    )
    .map(|entry| entry.map(|entry| entry.gr_gid))
}

/// Calls a function of the C library that copies an entry into a buffer. While the entry does not
/// fit, repeats the call with a larger buffer, up to `MOST_BYTES`. Returns `None` if no entry has
/// this name. The pointers in the returned entry are dangling, because the buffer has been freed.
fn find<T: Copy>(
    name: &str,
    call: impl Fn(*const c_char, *mut T, *mut c_char, usize, *mut *mut T) -> c_int,
) -> io::Result<Option<T>> {
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    let mut buffer: Vec<c_char> = vec![0; 1024];
    loop {
        let mut entry = std::mem::MaybeUninit::<T>::uninit();
        let mut found = ptr::null_mut();
        let code = call(
            name.as_ptr(),
            entry.as_mut_ptr(),
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        );
        match code {
            libc::ERANGE if buffer.len() < MOST_BYTES => buffer.resize(buffer.len() * 2, 0),
            // For an unknown name the code is 0, or with some databases one of these errors
            // (getpwnam(3)).
            0 | libc::ENOENT | libc::ESRCH if found.is_null() => return Ok(None),
            // SAFETY: the function has filled the entry, because `found` points to it.
            0 => return Ok(Some(unsafe { entry.assume_init() })),
            libc::EINTR => {}
            code => return Err(io::Error::from_raw_os_error(code)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_unknown_names_are_none() {
        assert_eq!(user_id("root").unwrap(), Some(0));
        assert_eq!(group_id("root").unwrap(), Some(0));
        for unknown in ["", "no such account", "root\0x"] {
            assert_eq!(user_id(unknown).unwrap(), None, "{unknown:?}");
            assert_eq!(group_id(unknown).unwrap(), None, "{unknown:?}");
        }
    }
}
