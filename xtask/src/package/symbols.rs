//! Checks which version of the C library the command needs.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::programs::output;

/// The newest version of the C library that the command may need: that of the oldest Debian release
/// on which the command must run ([`super::RELEASE`]).
pub const NEWEST: (u32, u32) = (2, 36);
/// The libraries that the command may need: packages `libc6` and `libgcc-s1`.
const LIBRARIES: [&str; 4] = [
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
];

/// Checks that the binary needs no newer C library than [`NEWEST`] and no libraries other than
/// `LIBRARIES`. Returns the version of the C library that it needs.
///
/// # Errors
/// The binary needs a newer or another library, or the package binutils is missing.
pub fn check(binary: &Path) -> Result<(u32, u32)> {
    let read = |what: &str| {
        let mut readelf = Command::new("readelf");
        output(
            readelf
                .args(["--wide", what])
                .arg(binary)
                .env("LC_ALL", "C"),
        )
    };
    let needed = needed(&read("--version-info")?)
        .context("the binary names no version of glibc: link it dynamically with glibc")?;
    ensure!(
        needed <= NEWEST,
        "the binary needs version {}.{} of the C library, and Debian 12 has {}.{}: the build has used \
         headers or libraries of this host",
        needed.0,
        needed.1,
        NEWEST.0,
        NEWEST.1
    );
    for library in libraries(&read("--dynamic")?) {
        ensure!(
            LIBRARIES.contains(&&*library),
            "the binary needs {library}, which is in no package that the package dunlin depends on"
        );
    }
    Ok(needed)
}

/// The newest `GLIBC_x.y` in the output of `readelf --version-info`.
fn needed(text: &str) -> Option<(u32, u32)> {
    let versions = text.split("GLIBC_").skip(1).filter_map(|rest| {
        let digits = |byte: char| !byte.is_ascii_digit() && byte != '.';
        let mut numbers = rest.split(digits).next()?.split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    });
    versions.max()
}

/// The libraries in the output of `readelf --dynamic`.
fn libraries(text: &str) -> Vec<String> {
    let name = |line: &str| {
        let (_, rest) = line.split_once("(NEEDED)")?;
        let (_, rest) = rest.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    };
    text.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        let text = "  0x0010:   Name: GLIBC_2.9  Flags: none  Version: 8\n  0x0020:   Name: \
                    GLIBC_2.34  Flags: none  Version: 5\n  Name: GLIBC_2.2.5  Name: GCC_3.0\n";
        assert_eq!(needed(text), Some((2, 34)));
        assert_eq!(needed("Name: GCC_3.0"), None);
        let text = " 0x0000000000000001 (NEEDED)   Shared library: [libgcc_s.so.1]\n \
                    0x000000000000000c (INIT)  0x1000\n";
        assert_eq!(libraries(text), ["libgcc_s.so.1"]);
    }
}
