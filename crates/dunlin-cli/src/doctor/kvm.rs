//! KVM and userfaultfd.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dunlin_linux::uffd::WriteWatch;
use dunlin_microvm::{KvmSupport, kvm_support};

use super::verdict::{Verdict, setting};

/// Which users may use userfaultfd for page faults that the kernel itself causes. QEMU needs that
/// permission in post-copy.
#[derive(Clone, Copy, Debug)]
struct FaultAccess {
    /// `vm.unprivileged_userfaultfd`; `None` if the kernel has no userfaultfd.
    is_unprivileged: Option<bool>,
    /// The mode of `/dev/userfaultfd`, which Linux 6.1 introduced.
    device_mode: Option<u32>,
}

pub(super) fn examine() -> Vec<Verdict> {
    let found = kvm_support();
    let is_xen = Path::new("/proc/xen/capabilities").exists();
    let allowed = setting("/proc/sys/vm/unprivileged_userfaultfd");
    let device = fs::metadata("/dev/userfaultfd");
    let access = FaultAccess {
        is_unprivileged: allowed.map(|value| value == "1"),
        device_mode: device.ok().map(|found| found.permissions().mode()),
    };
    vec![
        usable(&found, is_xen),
        dirty_ring(&found),
        write_protect(&WriteWatch::new().map(drop)),
        post_copy(access),
    ]
}

fn usable(found: &io::Result<KvmSupport>, is_xen: bool) -> Verdict {
    let check = "kvm.usable";
    match found {
        Ok(_) => Verdict::ok(check, "yes", "VMs can run here"),
        Err(_) if is_xen => Verdict::ok(check, "Xen", "this host is a Xen domain"),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => Verdict::fail(
                check,
                "absent",
                "no VM that uses KVM can run here or migrate to this host",
                "modprobe kvm_intel or kvm_amd; enable virtualisation in the firmware",
            ),
            ErrorKind::PermissionDenied => Verdict::unknown(
                check,
                "this user has no permission to open /dev/kvm",
                "run as root, or as a user in the group kvm",
            ),
            _ => Verdict::fail(
                check,
                "no",
                format!("KVM cannot create a VM: {error}"),
                "enable virtualisation in the firmware; see dmesg",
            ),
        },
    }
}

fn dirty_ring(found: &io::Result<KvmSupport>) -> Verdict {
    let check = "kvm.dirty-ring";
    match found {
        Ok(KvmSupport {
            dirty_ring_bytes: 0,
        }) => Verdict::warn(
            check,
            "no",
            "dirty pages are logged in bitmaps, which are slower for large guests",
            "use Linux 5.11 or newer",
        ),
        Ok(found) => Verdict::ok(
            check,
            format!("{} KiB", found.dirty_ring_bytes >> 10),
            "QEMU can log dirty pages in rings (dirty-ring-size)",
        ),
        Err(_) => Verdict::unknown(check, "KVM cannot be examined", "see kvm.usable"),
    }
}

fn write_protect(found: &io::Result<()>) -> Verdict {
    let check = "userfaultfd.write-protect";
    match found {
        Ok(()) => Verdict::ok(
            check,
            "yes",
            "the kernel can log writes to the memory of a process",
        ),
        Err(error) => Verdict::warn(
            check,
            "no",
            format!(
                "guests without KVM, and VMMs that use Dunlin's dirty log, cannot migrate: {error}"
            ),
            "use Linux 6.7 or newer with CONFIG_USERFAULTFD",
        ),
    }
}

fn post_copy(access: FaultAccess) -> Verdict {
    let check = "userfaultfd.post-copy";
    let is_open = access.device_mode.is_some_and(|mode| mode & 0o066 != 0);
    match access.is_unprivileged {
        None => Verdict::warn(
            check,
            "no",
            "post-copy to this host does not work",
            "use a kernel with CONFIG_USERFAULTFD",
        ),
        Some(true) => Verdict::ok(check, "every user", "QEMU can receive post-copy migrations"),
        Some(false) if is_open => Verdict::ok(
            check,
            "device",
            "QEMU can receive post-copy migrations if its user may open /dev/userfaultfd",
        ),
        Some(false) => Verdict::warn(
            check,
            "root only",
            "QEMU as another user cannot receive post-copy migrations",
            "sysctl -w vm.unprivileged_userfaultfd=1, or let QEMU's group open /dev/userfaultfd",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    #[test]
    fn each_failure_of_kvm_has_its_verdict() {
        let of = |kind: ErrorKind, is_xen| {
            let found = usable(&Err(kind.into()), is_xen);
            (found.state, found.value)
        };
        let absent = (State::Fail, "absent".to_owned());
        assert_eq!(of(ErrorKind::NotFound, false), absent);
        assert_eq!(of(ErrorKind::NotFound, true), (State::Ok, "Xen".to_owned()));
        assert_eq!(of(ErrorKind::PermissionDenied, false).0, State::Unknown);
        assert_eq!(of(ErrorKind::Other, false).0, State::Fail);
        let ring = |dirty_ring_bytes| dirty_ring(&Ok(KvmSupport { dirty_ring_bytes })).state;
        assert_eq!([ring(0), ring(4096)], [State::Warn, State::Ok]);
    }

    #[test]
    fn post_copy_needs_a_setting_or_a_device_for_others_than_root() {
        let value = |is_unprivileged, device_mode| {
            post_copy(FaultAccess {
                is_unprivileged,
                device_mode,
            })
            .value
        };
        assert_eq!(value(None, None), "no");
        assert_eq!(value(Some(true), None), "every user");
        assert_eq!(value(Some(false), Some(0o020_600)), "root only");
        assert_eq!(value(Some(false), Some(0o020_660)), "device");
        assert_eq!(value(Some(false), None), "root only");
    }
}
