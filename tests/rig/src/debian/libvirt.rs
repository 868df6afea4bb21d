//! libvirt 11.3 and QEMU 10.0 from trixie, the newest in Debian. trixie-backports has no libvirt.

use std::path::PathBuf;

use super::DebianError;
use super::root::packages;

/// Returns the folder with libvirtd and its QEMU driver, virsh, QEMU and nft. Fetches the folder if
/// it is not in the cache. Run the programs in a root file system made of the folder.
///
/// # Errors
/// There is no network, or the package has changed; see [`DebianError`].
pub fn libvirt() -> Result<PathBuf, DebianError> {
    let names = [
        "iproute2",
        "libvirt-clients",
        "libvirt-daemon",
        "libvirt-daemon-driver-qemu",
        "nftables",
        "qemu-system-x86",
    ];
    let root = packages("trixie", &names)?;
    for program in ["usr/sbin/libvirtd", "usr/bin/virsh"] {
        if !root.join(program).is_file() {
            return Err(DebianError::Missing(program.to_owned(), root));
        }
    }
    Ok(root)
}
