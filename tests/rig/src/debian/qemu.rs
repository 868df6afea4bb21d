//! QEMU 10.0 from bookworm-backports. Bookworm's own 7.2 emulates AES eight times slower.

use std::path::PathBuf;
use std::process::Command;

use super::root::{packages, program};
use super::{DebianError, apt};

/// A QEMU for x86-64 in the cache, with its own libraries, firmware and modules.
#[derive(Clone, Debug)]
pub struct Qemu {
    root: PathBuf,
}

/// Returns QEMU, and fetches it if it is not in the cache.
///
/// # Errors
/// There is no network, or the package has changed; see [`DebianError`].
pub fn qemu() -> Result<Qemu, DebianError> {
    let root = packages("bookworm-backports", &["qemu-system-x86"])?;
    program(&root, "qemu-system-x86_64")?;
    Ok(Qemu { root })
}

impl Qemu {
    /// The QEMU installed on this system, for use inside a virtual machine of the kernel tests.
    #[must_use]
    pub fn installed() -> Self {
        Self {
            root: PathBuf::from("/"),
        }
    }

    /// Returns a command that runs QEMU; the caller adds the machine type and devices. Without
    /// options QEMU would open a window: start with `-nodefaults -nographic` or similar.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command =
            program(&self.root, "qemu-system-x86_64").expect("qemu() has found the program");
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

    /// Returns QEMU's version, for instance "10.0.2".
    ///
    /// # Errors
    /// QEMU does not run.
    pub fn version(&self) -> Result<String, DebianError> {
        let text = apt::output(self.command().arg("--version"))?;
        Ok(text
            .split_whitespace()
            .nth(3)
            .unwrap_or_default()
            .to_owned())
    }
}
