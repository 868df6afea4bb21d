//! Random numbers from the kernel (getrandom(2)): session identifiers and secrets.

use std::io;

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` from the kernel's random number source. Waits while the source is not yet
/// seeded, which is the case only early at boot.
///
/// # Errors
/// An error from getrandom(2): `ENOSYS` before Linux 3.17, or a seccomp filter's error.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += retry_on_intr(|| getrandom(&mut *rest, GetRandomFlags::empty()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_whole_buffer_is_filled_and_differs_each_time() {
        // Request so many bytes that a signal could make the kernel return fewer from one call.
        let (mut one, mut other) = (vec![0; 4096], vec![0; 4096]);
        fill(&mut one).unwrap();
        fill(&mut other).unwrap();
        assert_ne!(one, other);
        // The probability that 64 given bytes are all zero is 2^-512.
        assert!(
            one.chunks(64)
                .all(|part| part.iter().any(|&byte| byte != 0))
        );
        fill(&mut []).unwrap();
    }
}
