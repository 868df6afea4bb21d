//! Loads shared libraries (dlopen(3)).

use std::ffi::CString;
use std::io;

/// Loads a module of name resolution, `libnss_SERVICE.so.2` (nsswitch.conf(5)), for the rest of the
/// process's life.
///
/// # Errors
/// `InvalidInput`: the service's name contains characters other than letters, digits, `_` and `-`.
/// `NotFound`: the library cannot be loaded.
pub fn load_name_service(service: &str) -> io::Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if !service.bytes().all(is_plain) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let name = CString::new(format!("libnss_{service}.so.2"))?;
    // SAFETY: `name` is a C string. Loading the library runs its code. getaddrinfo(3) loads the
    // same module and runs the same code, and the standard library treats getaddrinfo(3) as safe.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_modules_are_loaded() {
        for (service, kind) in [
            ("../libc", io::ErrorKind::InvalidInput),
            ("dunlin-has-no-such-module", io::ErrorKind::NotFound),
        ] {
            let error = load_name_service(service).expect_err(service);
            assert_eq!(error.kind(), kind, "{service}");
        }
    }
}
