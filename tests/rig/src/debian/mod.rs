//! Debian's packages, kernels and QEMU, fetched once and kept in the cache.
//!
//! ```text
//! target/rig/debian/
//!     apt/bookworm/        a private apt: configuration, lists, empty package status
//!     roots/SUITE-NAMES/   packages and everything they depend on, unpacked
//!     kernels/VERSION/     a kernel, its configuration and modules, unpacked
//! ```
//!
//! The private apt takes the mirror, its keys and how to reach it from the machine's own
//! configuration, which is only read. Its package status is empty, so a root holds every library
//! down to the C library and depends on nothing of the machine: [`program`] runs a root's programs
//! with the root's own loader, whatever Debian release they are from.
//!
//! What is there is used without a network. Two processes that lack the same thing fetch it once.

mod apt;
mod kernel;
mod qemu;
mod root;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use kernel::{Kernel, Which, cached_kernels, kernel};
pub use qemu::{Qemu, qemu};
pub use root::{packages, program};

/// Why something from Debian cannot be had.
#[derive(Debug, Error)]
pub enum DebianError {
    /// apt is not there, or knows no mirror.
    #[error("{0}: Debian's kernels and QEMU are fetched by a Debian machine's own apt")]
    NotDebian(String),
    /// The mirror's lists or packages did not come.
    #[error(
        "cannot fetch {what}: {output}\n(once fetched it is kept in {cache}, and no network is \
         needed)"
    )]
    Fetch {
        /// Packages, or the lists of a suite.
        what: String,
        /// What apt said.
        output: String,
        /// Where it would have been kept.
        cache: PathBuf,
    },
    /// A tool of Debian's package management failed.
    #[error("`{command}` failed: {output}")]
    Tool {
        /// The program and its arguments.
        command: String,
        /// What it said.
        output: String,
    },
    /// No kernel answers the description.
    #[error("no kernel {0} in the cache or on the mirror")]
    NoKernel(String),
    /// A package does not hold what is expected in it.
    #[error("{0} is not in {1}: Debian's packages have changed")]
    Missing(String, PathBuf),
    /// The cache cannot be read or written.
    #[error("the cache, {0}")]
    Cache(PathBuf, #[source] io::Error),
}

/// For `map_err`: an error of the cache at a path.
fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> DebianError {
    let path = path.into();
    move |error| DebianError::Cache(path, error)
}
