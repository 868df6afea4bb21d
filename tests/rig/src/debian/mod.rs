//! Debian's packages, kernels and QEMU, fetched once and cached.
//!
//! ```text
//! target/rig/debian/
//!     apt/RELEASE/         a private apt: configuration, lists, empty package status
//!     bare/RELEASE-NAMES/  a Debian with these packages, for tests of other packages
//!     roots/SUITE-NAMES/   packages and everything they depend on, unpacked
//!     kernels/VERSION/     a kernel, its configuration and modules, unpacked
//! ```
//!
//! The private apt reads the mirror, its keys and the network settings from the machine's own
//! configuration. Its package status is empty. A directory in `roots` therefore contains every
//! library down to the C library, and its programs use no files of the machine. [`program`] runs
//! them with the loader of the same directory, from whatever Debian release it is.
//!
//! Cached files are used without a network. Concurrent processes that need the same files fetch
//! them once.

mod apt;
mod bare;
mod kernel;
mod libvirt;
mod qemu;
mod root;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use bare::bare;
pub use kernel::{Kernel, Which, cached_kernels, kernel};
pub use libvirt::libvirt;
pub use qemu::{Qemu, qemu};
pub use root::{packages, program};

/// Why a Debian package, kernel or program is not available.
#[derive(Debug, Error)]
pub enum DebianError {
    /// apt is missing, or has no mirror.
    #[error(
        "{0}: the tests fetch Debian's kernels and QEMU with this host's apt, so they need a \
         Debian host on which apt has a mirror"
    )]
    NotDebian(String),
    /// The mirror's lists or packages could not be fetched.
    #[error(
        "cannot fetch {what}: {output}\n(needs a network only once: the result is kept in \
         {cache})"
    )]
    Fetch {
        /// What was to be fetched: packages, or the package lists of a suite.
        what: String,
        /// apt's output.
        output: String,
        /// The directory that caches the result.
        cache: PathBuf,
    },
    /// A tool of Debian's package management failed.
    #[error("`{command}` failed: {output}")]
    Tool {
        /// The program and its arguments.
        command: String,
        /// Its output.
        output: String,
    },
    /// No kernel matches.
    #[error("no kernel {0} in the cache or on the mirror")]
    NoKernel(String),
    /// A package lacks an expected file.
    #[error("{0} is not in {1}: Debian's packages have changed")]
    Missing(String, PathBuf),
    /// The cache cannot be read or written.
    #[error("cannot read or write {0} in the cache")]
    Cache(PathBuf, #[source] io::Error),
}

/// For `map_err`: wraps an I/O error that occurred at a path in the cache.
fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> DebianError {
    let path = path.into();
    move |error| DebianError::Cache(path, error)
}
