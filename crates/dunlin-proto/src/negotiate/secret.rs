//! The secret of a session.

use std::fmt;

use zeroize::Zeroize;

use crate::limits::SESSION_SECRET_BYTES;

/// The secret with which a lane proves that it belongs to the session. The
/// destination chooses it at random for each attempt and sends it in *accept*.
/// `Debug` hides it, and dropping wipes it.
#[derive(Clone, PartialEq, Eq)]
pub struct SessionSecret(pub [u8; SESSION_SECRET_BYTES]);

impl Drop for SessionSecret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SessionSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SessionSecret(..)")
    }
}
