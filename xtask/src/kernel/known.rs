//! Kernel versions under which the tests have passed on this host. They help to distinguish a fault
//! in a new Debian kernel from a fault in Dunlin.

use std::fs;
use std::io;
use std::path::PathBuf;

use anyhow::Result;
use dunlin_rig::cache;
use dunlin_rig::debian::{self, Kernel, Which};

/// Records that a run of tests has passed under `kernel`.
///
/// # Errors
/// The cache cannot be written.
pub fn record_passed(kernel: &Kernel) -> Result<()> {
    let mut passed = passed()?;
    passed.retain(|version| *version != kernel.version);
    passed.push(kernel.version.clone());
    Ok(fs::write(path(), passed.join("\n"))?)
}

/// Tests have failed under the kernel `failed`. Returns `None` if a comparison does not help: tests
/// have passed under `failed` before, or `which` is a version. Otherwise returns the kernel to
/// compare with: the newest comparable one in the cache under which tests have passed, or
/// `Some(None)` if there is no such kernel.
///
/// # Errors
/// The cache cannot be read.
pub fn previous(which: &Which, failed: &Kernel) -> Result<Option<Option<Kernel>>> {
    let passed = passed()?;
    let cached = debian::cached_kernels()?;
    let versions: Vec<&str> = cached
        .iter()
        .map(|kernel| kernel.version.as_str())
        .collect();
    Ok(choose(which, &failed.version, &passed, &versions)
        .map(|version| {
            cached
                .iter()
                .find(|kernel| Some(kernel.version.as_str()) == version)
        })
        .map(Option::<&Kernel>::cloned))
}

/// The message about a failure under a kernel that has not run before.
#[must_use]
pub fn new_kernel(failed: &Kernel, previous: Option<&Kernel>) -> String {
    match previous {
        Some(previous) => format!(
            "new kernel {}: tests fail; the next line has the result under kernel {}: if tests pass \
             there, look first for a change in the kernel",
            failed.version, previous.version
        ),
        None => format!(
            "new kernel {}: tests fail; no kernel that passed on this machine is available to compare",
            failed.version
        ),
    }
}

/// Implements [`previous`]. `cached` is sorted, the newest last. The newest kernel
/// ([`Which::Newest`]) is compared with kernels of any series. The other kernels are compared only
/// with kernels of their own series, because another series can pass for unrelated reasons.
fn choose<'a>(
    which: &Which,
    failed: &str,
    passed: &[String],
    cached: &[&'a str],
) -> Option<Option<&'a str>> {
    if matches!(which, Which::Version(_)) || passed.iter().any(|version| version == failed) {
        return None;
    }
    let comparable = |version: &&str| {
        passed.iter().any(|known| known == version)
            && (*which == Which::Newest || series(version) == series(failed))
    };
    Some(cached.iter().copied().rfind(comparable))
}

/// The series of a version: 6.12 for 6.12.107+deb13-cloud-amd64.
fn series(version: &str) -> Vec<&str> {
    version.split('.').take(2).collect()
}

/// The versions under which tests have passed.
fn passed() -> Result<Vec<String>> {
    match fs::read_to_string(path()) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

fn path() -> PathBuf {
    cache::directory().join("kernels-that-passed")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(which: &Which, failed: &str, passed: &[&str], cached: &[&str]) -> String {
        let passed: Vec<String> = passed.iter().map(ToString::to_string).collect();
        match choose(which, failed, &passed, cached) {
            None => "ours".to_owned(),
            Some(None) => "new".to_owned(),
            Some(Some(version)) => version.to_owned(),
        }
    }

    #[test]
    fn a_new_kernel_is_compared_with_the_newest_that_passed() {
        let newest = |failed, passed| chosen(&Which::Newest, failed, passed, &["6.12.9", "7.3.4"]);
        assert_eq!(newest("7.4.1", &["7.3.4"]), "7.3.4");
        assert_eq!(newest("7.4.1", &["7.3.4", "6.12.9"]), "7.3.4");
        assert_eq!(newest("7.4.1", &["7.3.4", "7.4.1"]), "ours");
        assert_eq!(newest("7.4.1", &[]), "new");
        // 7.3.9 has passed, but is no longer in the cache.
        assert_eq!(newest("7.4.1", &["7.3.9"]), "new");
    }

    #[test]
    fn the_oldest_is_compared_within_its_series() {
        let cached = ["6.12.9", "7.3.4"];
        let oldest = |passed| chosen(&Which::Oldest, "6.12.10", passed, &cached);
        assert_eq!(oldest(&["6.12.9", "7.3.4"]), "6.12.9");
        assert_eq!(oldest(&["7.3.4"]), "new");
    }

    #[test]
    fn a_version_that_was_asked_for_is_not_new() {
        let which = Which::Version("7.4".to_owned());
        assert_eq!(chosen(&which, "7.4.1", &["7.3.4"], &["7.3.4"]), "ours");
    }
}
