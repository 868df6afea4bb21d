//! The kernel's cipher drivers, from `/proc/crypto`.

use std::fmt;
use std::fs;

use crate::internals::provider::CipherSuite;

/// Drivers with a lower priority use generic code, at least in part. Drivers with AES instructions
/// have priority 300 on arm64 and at least 400 on x86.
const FAST_PRIORITY: u32 = 300;

/// A cipher driver of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The name in `/proc/crypto`.
    pub name: String,
    /// The kernel uses the driver with the highest priority.
    pub priority: u32,
    /// Whether the driver completes requests asynchronously, on another thread or in
    /// hardware.
    pub is_async: bool,
}

impl Driver {
    /// Returns the kernel's driver for `suite`. Call this function after the first use of the
    /// cipher, because the kernel lists a driver only then. `None` if the kernel lists no driver
    /// for `suite`, or if the list cannot be read, for example in a service with `ProcSubset=pid`.
    pub fn of(suite: CipherSuite) -> Option<Self> {
        let algorithm = match suite {
            CipherSuite::Aes128Gcm | CipherSuite::Aes256Gcm => "gcm(aes)",
            CipherSuite::ChaCha20Poly1305 => "rfc7539(chacha20,poly1305)",
        };
        best(&fs::read_to_string("/proc/crypto").ok()?, algorithm)
    }

    /// Whether the driver uses generic code, at least in part.
    pub fn is_slow(&self) -> bool {
        self.priority < FAST_PRIORITY
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let asynchronous = if self.is_async { ", asynchronous" } else { "" };
        write!(
            f,
            "{} (priority {}{asynchronous})",
            self.name, self.priority
        )
    }
}

/// Finds the driver with the highest priority for an algorithm in `listed`, which has
/// paragraphs of lines "NAME : VALUE".
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
    fn k11_the_driver_with_the_highest_priority_is_chosen() {
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
