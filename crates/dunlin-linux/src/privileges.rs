//! Drops privileges permanently: capabilities (capabilities(7)), and the privileges that executing
//! a program would grant (Documentation/userspace-api/no_new_privs.rst).
//!
//! Dropping affects the calling thread and the threads and processes that it creates later. To
//! affect the whole process, drop privileges before it has a second thread.

use std::io;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// A capability that a thread can keep, with its number in include/uapi/linux/capability.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Capability {
    /// `CAP_CHOWN`: changing the owners and groups of files.
    Owners = 0,
    /// `CAP_DAC_OVERRIDE`: access to files and local sockets of other users.
    OthersFiles = 1,
    /// `CAP_NET_BIND_SERVICE`: listening on ports below 1024.
    LowPorts = 10,
    /// `CAP_NET_ADMIN`: IPsec and all other configuration of the network namespace.
    Network = 12,
}

/// Whether the calling thread has a capability.
///
/// # Errors
/// An error from capget(2).
pub fn has(capability: Capability) -> io::Result<bool> {
    let wanted = CapabilitySet::from_bits_retain(1 << capability as u32);
    Ok(capabilities(None)?.effective.contains(wanted))
}

/// Disables privilege gain through execve(2) for this thread and its descendants: set-user-ID,
/// set-group-ID and file capabilities have no effect (`PR_SET_NO_NEW_PRIVS`, Linux 3.5).
///
/// # Errors
/// An error from prctl(2).
pub fn gain_none() -> io::Result<()> {
    Ok(set_no_new_privs(true)?)
}

/// Drops all capabilities except `kept`. A capability in `kept` stays in the thread's permitted,
/// effective and bounding sets if it is in them now; the inheritable and ambient sets become empty.
/// Without `CAP_SETPCAP` the bounding set does not change.
///
/// # Errors
/// An error from prctl(2), capget(2) or capset(2). Capabilities dropped before the error stay
/// dropped.
pub fn keep_capabilities(kept: &[Capability]) -> io::Result<()> {
    let kept = kept.iter().map(|one| 1 << *one as u32);
    let kept = CapabilitySet::from_bits_retain(kept.fold(0, |set, one| set | one));
    clear_ambient_capability_set()?;
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        // An error means that the kernel has no capability with this number, nor with a higher one.
        let Ok(is_bounding) = capability_is_in_bounding_set(capability) else {
            break;
        };
        if !is_bounding {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Err(Errno::PERM) => break,
            dropped => dropped?,
        }
    }
    let mut sets = capabilities(None)?;
    sets.permitted &= kept;
    sets.effective &= kept;
    sets.inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, sets)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_dropped_its_privileges_has_none_in_any_set() {
        let field = |name: &str| {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        // Run on a separate thread, so that other tests keep their capabilities.
        std::thread::spawn(move || {
            // Without CAP_SETPCAP the bounding set does not change.
            let effective = u64::from_str_radix(&field("CapEff:"), 16).unwrap();
            let privileged = effective & 1 << 8 != 0;
            gain_none().unwrap();
            keep_capabilities(&[]).unwrap();
            assert_eq!(field("NoNewPrivs:"), "1");
            for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
                assert_eq!(field(set), "0000000000000000", "{set}");
            }
            if privileged {
                assert_eq!(field("CapBnd:"), "0000000000000000");
            }
            // A second call changes nothing.
            keep_capabilities(&[]).unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_keeps_the_named_capabilities_that_it_has() {
        let effective = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("CapEff:"));
            let set = line.unwrap().split_whitespace().nth(1).unwrap().to_owned();
            u64::from_str_radix(&set, 16).unwrap()
        };
        std::thread::spawn(move || {
            let named = 1 << Capability::OthersFiles as u64 | 1 << Capability::LowPorts as u64;
            let before = effective();
            keep_capabilities(&[Capability::OthersFiles, Capability::LowPorts]).unwrap();
            assert_eq!(effective(), before & named);
            keep_capabilities(&[Capability::LowPorts]).unwrap();
            let had = before & 1 << Capability::LowPorts as u64 != 0;
            assert_eq!(has(Capability::LowPorts).unwrap(), had);
            assert!(!has(Capability::OthersFiles).unwrap());
            assert_eq!(effective(), before & 1 << Capability::LowPorts as u64);
            // A dropped capability does not return.
            keep_capabilities(&[Capability::OthersFiles]).unwrap();
            assert_eq!(effective(), 0);
        })
        .join()
        .unwrap();
    }
}
