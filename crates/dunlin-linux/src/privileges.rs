//! Giving up privileges for good: capabilities (capabilities(7)) and those that a program brings
//! with it (Documentation/userspace-api/no_new_privs.rst).
//!
//! Both belong to a thread and to those that it starts: whoever means the process calls them before
//! it has a second thread.

use std::io;

/// `_LINUX_CAPABILITY_VERSION_3` of include/uapi/linux/capability.h: sets of 64 bits in two halves.
const VERSION: u32 = 0x2008_0522;

/// More capabilities than any kernel has: its own last one is found by asking.
const CAPABILITIES: libc::c_ulong = 64;

/// What is left to who keeps some capabilities, by their numbers in the same header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Capability {
    /// `CAP_DAC_OVERRIDE`: files and local sockets of other users.
    OthersFiles = 1,
    /// `CAP_NET_BIND_SERVICE`: ports below 1024.
    LowPorts = 10,
    /// `CAP_NET_ADMIN`: the kernel's IPsec, and all else of the network namespace.
    Network = 12,
}

/// `struct __user_cap_header_struct` of the same header.
#[repr(C)]
struct Header {
    version: u32,
    thread: libc::c_int,
}

/// `struct __user_cap_data_struct` of the same header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// From now on no program that this thread or its descendants execute has more privileges than
/// they: no set-user-ID, no capabilities of files.
///
/// # Errors
/// What prctl(2) says; kernels since 3.5 have it.
pub fn gain_none() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).map(drop)
}

/// Takes every capability from the calling thread: the ambient, bounding, permitted, effective and
/// inheritable sets are empty. The bounding set stays for a thread that may not change it; with
/// [`gain_none`] it gives nothing.
///
/// # Errors
/// What prctl(2) and capset(2) say; the sets that were emptied before stay so.
pub fn drop_capabilities() -> io::Result<()> {
    keep_capabilities(&[])
}

/// The same for all but those that are named: what the thread has of them stays in the permitted
/// and effective sets, and in the bounding set.
///
/// # Errors
/// What prctl(2), capget(2) and capset(2) say; what was taken before stays so.
pub fn keep_capabilities(kept: &[Capability]) -> io::Result<()> {
    let kept = kept.iter().fold(0_u32, |set, one| set | 1 << *one as u32);
    prctl(
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong,
        0,
    )?;
    for capability in 0..CAPABILITIES {
        if capability < 32 && kept & 1 << capability != 0 {
            continue;
        }
        // What the kernel does not know is no error: there are no more.
        let Ok(bounding) = prctl(libc::PR_CAPBSET_READ, capability, 0) else {
            break;
        };
        if bounding == 0 {
            continue;
        }
        match prctl(libc::PR_CAPBSET_DROP, capability, 0) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => break,
            dropped => dropped.map(drop)?,
        };
    }
    let header = Header {
        version: VERSION,
        thread: 0,
    };
    let mut sets = [Sets {
        effective: 0,
        permitted: 0,
        inheritable: 0,
    }; 2];
    // SAFETY: capget reads one header and, by its version, writes two sets; both live through the
    // call and have the layout of the kernel's structures. Thread 0 is the calling one.
    let code = unsafe { libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    // Those that are named have numbers below 32.
    for (set, kept) in sets.iter_mut().zip([kept, 0]) {
        set.permitted &= kept;
        set.effective &= kept;
        set.inheritable = 0;
    }
    // SAFETY: as above; capset reads both.
    let code = unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn prctl(
    what: libc::c_int,
    first: libc::c_ulong,
    second: libc::c_ulong,
) -> io::Result<libc::c_int> {
    let none: libc::c_ulong = 0;
    // SAFETY: the operations of this file take numbers alone, no pointers.
    let code = unsafe { libc::prctl(what, first, second, none, none) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(code)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_gave_up_its_privileges_has_none_in_any_set() {
        let field = |name: &str| {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        // Threads of their own: the tests beside this one keep what they have.
        std::thread::spawn(move || {
            // CAP_SETPCAP, without which the bounding set stays as it is.
            let effective = u64::from_str_radix(&field("CapEff:"), 16).unwrap();
            let privileged = effective & 1 << 8 != 0;
            gain_none().unwrap();
            drop_capabilities().unwrap();
            assert_eq!(field("NoNewPrivs:"), "1");
            for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
                assert_eq!(field(set), "0000000000000000", "{set}");
            }
            if privileged {
                assert_eq!(field("CapBnd:"), "0000000000000000");
            }
            // A second time nothing is left to do.
            drop_capabilities().unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_keeps_what_is_named_of_what_it_has() {
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
            assert_eq!(effective(), before & 1 << Capability::LowPorts as u64);
            // What was given up does not come back.
            keep_capabilities(&[Capability::OthersFiles]).unwrap();
            assert_eq!(effective(), 0);
        })
        .join()
        .unwrap();
    }
}
