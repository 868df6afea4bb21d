//! QEMU from bookworm-backports: 10.0. bookworm's own 7.2 emulates AES eight times slower.

use std::path::PathBuf;
use std::process::Command;

use super::root::{packages, program};
use super::{DebianError, apt};

/// A QEMU for x86-64 in the cache, with its own libraries, firmware and modules.
#[derive(Clone, Debug)]
pub struct Qemu {
    root: PathBuf,
}

/// QEMU, fetched when it is not in the cache.
///
/// # Errors
/// There is no network, or the package has changed; see [`DebianError`].
pub fn qemu() -> Result<Qemu, DebianError> {
    let root = packages("bookworm-backports", &["qemu-system-x86"])?;
    program(&root, "qemu-system-x86_64")?;
    Ok(Qemu { root })
}

impl Qemu {
    /// The one that is installed where this runs, as it is inside a virtual machine of the kernel
    /// tests.
    #[must_use]
    pub fn installed() -> Self {
        Self {
            root: PathBuf::from("/"),
        }
    }

    /// A command that runs it; machine, devices and the rest are for the caller to add. Without
    /// options it would open a window: begin with `-nodefaults -nographic` or the like.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command =
            program(&self.root, "qemu-system-x86_64").expect("it was looked for by qemu()");
        command
            .env(
                "QEMU_MODULE_DIR",
                self.root.join("usr/lib/x86_64-linux-gnu/qemu"),
            )
            .arg("-L")
            .arg(self.root.join("usr/share/qemu"))
            .arg("-L")
            .arg(self.root.join("usr/share/seabios"));
        command
    }

    /// Its version, "10.0.2" for instance.
    ///
    /// # Errors
    /// It does not run.
    pub fn version(&self) -> Result<String, DebianError> {
        let text = apt::output(self.command().arg("--version"))?;
        Ok(text
            .split_whitespace()
            .nth(3)
            .unwrap_or_default()
            .to_owned())
    }
}
