//! Huge pages for a test of this crate or of one above it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;

/// Huge pages reserved for a test; given back with it.
pub struct HugePages {
    before: u64,
}

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

fn reserved() -> u64 {
    fs::read_to_string(RESERVED)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

impl HugePages {
    /// Reserves pages of 2 MiB beyond those that are; none if the host does not give them. In CI it
    /// must.
    pub fn reserve(pages: u64) -> Option<Self> {
        let before = reserved();
        let guard = Self { before };
        let missing = match fs::write(RESERVED, (before + pages).to_string()) {
            Ok(()) if reserved() >= before + pages => return Some(guard),
            Ok(()) => format!("this host has no {pages} to give"),
            Err(error) => format!("they cannot be reserved: {error}"),
        };
        assert!(
            std::env::var_os("CI").is_none_or(|ci| ci != "true"),
            "CI must have huge pages: {missing}"
        );
        println!("huge pages left out: {missing}");
        None
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Only the host's administrator could have changed that meanwhile.
        let _ = fs::write(RESERVED, self.before.to_string());
    }
}
