//! Huge pages, reserved or transparent.
#![allow(clippy::missing_panics_doc, clippy::unwrap_used)]

use std::fs;

/// Huge pages reserved for a test, released on drop.
#[derive(Debug)]
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
    /// Reserves `pages` pages of 2 MiB in addition to those already reserved. If that fails, panics
    /// in CI and otherwise returns `None`.
    #[must_use]
    pub fn reserve(pages: u64) -> Option<Self> {
        let before = reserved();
        let guard = Self { before };
        let missing = match fs::write(RESERVED, (before + pages).to_string()) {
            Ok(()) if reserved() >= before + pages => return Some(guard),
            Ok(()) => format!("this host cannot reserve {pages} more"),
            Err(error) => format!("they cannot be reserved: {error}"),
        };
        assert!(
            std::env::var_os("CI").is_none_or(|ci| ci != "true"),
            "CI must have huge pages: {missing}"
        );
        println!("skipped, no huge pages: {missing}");
        None
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Ignore an error: if this file cannot be written, nothing was reserved either.
        let _ = fs::write(RESERVED, self.before.to_string());
    }
}

/// Returns the host's policy for transparent huge pages, `madvise` or `always`. If the policy is
/// `never` or the kernel has no transparent huge pages, panics in CI and otherwise returns `None`.
#[must_use]
pub fn transparent() -> Option<String> {
    let file = "/sys/kernel/mm/transparent_hugepage/enabled";
    let policies = fs::read_to_string(file).unwrap_or_default();
    let chosen = policies
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("none", |(chosen, _)| chosen);
    if ["madvise", "always"].contains(&chosen) {
        return Some(chosen.to_owned());
    }
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "CI must have transparent huge pages: {policies:?}"
    );
    println!("skipped, no transparent huge pages: {policies:?}");
    None
}

/// Returns how many bytes of this process's mapping at `address` are on private transparent huge
/// pages.
#[must_use]
pub fn transparent_bytes(address: u64) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap();
        if let Some((from, to)) = first.split_once('-') {
            let [from, to] = [from, to].map(|bound| u64::from_str_radix(bound, 16).unwrap());
            within = (from..to).contains(&address);
        } else if within && first == "AnonHugePages:" {
            return words.next().unwrap().parse::<u64>().unwrap() * 1024;
        }
    }
    0
}
