//! System calls that a signal interrupts (EINTR, signal(7)).

use std::io;

/// Repeats `call` while a signal interrupts it.
///
/// # Errors
/// The first error of `call` that is not `EINTR`.
pub fn until_not_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn it_repeats_an_interrupted_call_and_returns_any_other_error() {
        let mut results = vec![
            Err(io::ErrorKind::BrokenPipe),
            Ok(7),
            Err(io::ErrorKind::Interrupted),
            Err(io::ErrorKind::Interrupted),
        ];
        let mut call = || results.pop().unwrap().map_err(io::Error::from);
        assert_eq!(until_not_interrupted(&mut call).unwrap(), 7);
        let error = until_not_interrupted(&mut call).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
