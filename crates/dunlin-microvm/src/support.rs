//! What this host's KVM offers.

use std::io;

use kvm_bindings::{KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL};
use kvm_ioctls::Kvm;

/// What this host's KVM offers to a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmSupport {
    /// The largest dirty ring of a vCPU in bytes; 0 if KVM has none.
    pub dirty_ring_bytes: u64,
}

/// Queries what this host's KVM offers. Opens `/dev/kvm` and creates a VM without memory and vCPUs
/// for the query, and closes both before it returns.
///
/// # Errors
/// `NotFound` if `/dev/kvm` does not exist, `PermissionDenied` if this process may not open the
/// device, or another error from ioctl(2).
pub fn kvm_support() -> io::Result<KvmSupport> {
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    let rings = [KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL];
    let bytes = rings.map(|ring| vm.check_extension_raw(ring.into()));
    let largest = bytes.into_iter().max().unwrap_or(0);
    Ok(KvmSupport {
        dirty_ring_bytes: u64::try_from(largest).unwrap_or(0),
    })
}
