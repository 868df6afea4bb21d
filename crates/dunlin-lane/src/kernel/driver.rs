//! What of the kernel's seals and opens, out of `/proc/crypto`.

use std::fmt;
use std::fs;

use crate::provider::CipherSuite;

/// Drivers below this are the kernel's plain code, or half of it: AES instructions come with 300
/// on arm64 and with 400 and more on x86.
const FAST_PRIORITY: u32 = 300;

/// What of the kernel's does the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// As in `/proc/crypto`.
    pub name: String,
    /// The kernel takes the highest.
    pub priority: u32,
    /// It answers later, on another thread or by hardware.
    pub is_async: bool,
}

impl Driver {
    /// What the kernel has taken for `suite`, which it lists once it has used it. `None` where the
    /// list cannot be read: a service's `ProcSubset=pid` hides it, for instance.
    pub(super) fn of(suite: CipherSuite) -> Option<Self> {
        let algorithm = match suite {
            CipherSuite::Aes128Gcm | CipherSuite::Aes256Gcm => "gcm(aes)",
            CipherSuite::ChaCha20Poly1305 => "rfc7539(chacha20,poly1305)",
        };
        best(&fs::read_to_string("/proc/crypto").ok()?, algorithm)
    }

    /// It makes no use of the processor's instructions for AES, or little.
    pub(super) fn is_slow(&self) -> bool {
        self.priority < FAST_PRIORITY
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (priority {}", self.name, self.priority)?;
        f.write_str(if self.is_async {
            ", asynchronous)"
        } else {
            ")"
        })
    }
}

/// The driver of an algorithm with the highest priority, out of paragraphs of lines "NAME : VALUE".
fn best(listed: &str, algorithm: &str) -> Option<Driver> {
    let of = |paragraph: &str| {
        let value = |name: &str| {
            paragraph.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_owned())
            })
        };
        (value("name").as_deref() == Some(algorithm)).then_some(())?;
        Some(Driver {
            name: value("driver")?,
            priority: value("priority")?.parse().ok()?,
            is_async: value("async").as_deref() == Some("yes"),
        })
    };
    listed
        .split("\n\n")
        .filter_map(of)
        .max_by_key(|driver| driver.priority)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn k11_the_driver_with_the_highest_priority_is_the_one() {
        let listed = "name         : gcm(aes)\ndriver       : gcm_base(ctr(aes-generic),ghash-generic)\n\
             module       : gcm\npriority     : 100\nasync        : no\ntype         : aead\n\n\
             name         : __gcm(aes)\ndriver       : __fast\npriority     : 900\n\n\
             name         : gcm(aes)\ndriver       : generic-gcm-aesni-avx\npriority     : 500\n\
             async        : no\n\n\
             name         : gcm(aes)\ndriver       : some-card\npriority     : 300\nasync        : yes\n";
        let driver = best(listed, "gcm(aes)").unwrap();
        assert_eq!(driver.to_string(), "generic-gcm-aesni-avx (priority 500)");
        assert!(!driver.is_slow());
        assert_eq!(best(listed, "rfc7539(chacha20,poly1305)"), None);
        let slow = best(listed.split("\n\n").next().unwrap(), "gcm(aes)").unwrap();
        assert!(slow.is_slow());
    }
}
