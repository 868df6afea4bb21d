//! Restricts system calls with seccomp (Documentation/userspace-api/seccomp_filter.rst).
//!
//! Unlisted calls fail with `ENOSYS`, as on an old kernel. Libraries have fallbacks for that error,
//! so a library that tries a new call does not kill a VM. `clone3` is left out deliberately,
//! because its arguments are in memory, which a filter cannot read. The C library falls back to
//! `clone`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use dunlin_linux::local::FileAccess;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

use super::files::Taken;

/// Name of this part in the report of the confinement.
pub(super) const NAME: &str = "seccomp";

/// System calls that every process may make with any arguments.
const ALLOWED: &[libc::c_long] = &[
    // Descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    // Files; Landlock restricts which ones.
    libc::SYS_openat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    // Memory; mmap and mprotect are restricted below.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Threads, and the process itself.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_times,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
    // Signals. `tgkill` is allowed below, only to this process.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigpending,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    // Time.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Sockets; their kinds are restricted below.
    libc::SYS_connect,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
];

/// Calls that only a process with a guest may make, for guest memory.
const FOR_GUESTS: &[libc::c_long] = &[
    libc::SYS_mincore,
    libc::SYS_memfd_create,
    libc::SYS_userfaultfd,
];

/// Calls that only a process with lanes over IPsec may make. Such a process has record files for
/// IPsec, and it replaces an old file by renaming a new one.
const FOR_RECORDS: &[libc::c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
];

/// Calls that only a tunnel and `handoff accept` may make: `splice` moves the bytes of channels and
/// of forwarded connections inside the kernel.
const FOR_CHANNELS: &[libc::c_long] = &[libc::SYS_splice];

/// Older variants of the calls above, which exist only on x86-64.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[libc::c_long] = &[];

/// `PAGEMAP_SCAN` of include/uapi/linux/fs.h.
const PAGEMAP_SCAN: u64 = 0xc060_6610;

/// Ioctl types of KVM and userfaultfd, in the request's second byte.
const REQUEST_TYPES: [u64; 2] = [0xae00, 0xaa00];

/// Ioctls that a process with a guest may use besides those of [`REQUEST_TYPES`]: queries of page
/// maps.
const GUEST_REQUESTS: [u64; 1] = [PAGEMAP_SCAN];

/// Ioctls that a process with channels may use: the query for the number of bytes that the peer of
/// a socket has not acknowledged.
const CHANNEL_REQUESTS: [u64; 1] = [libc::TIOCOUTQ];

/// Ioctls that `handoff accept` may use. `TIOCOUTQ` returns the number of bytes that the peer of a
/// unix socket has not read. `SIOCETHTOOL` returns the features of a network device, for the
/// description of a socket. `SIOCETHTOOL` can also change features, but the kernel requires
/// CAP_NET_ADMIN for that.
const HANDOFF_REQUESTS: [u64; 2] = [libc::TIOCOUTQ, libc::SIOCETHTOOL];

/// Ioctls that every process may use: terminal detection and size, blocking mode, close-on-exec,
/// number of readable bytes.
const REQUESTS: [u64; 6] = [
    libc::TCGETS,
    libc::TCGETS2,
    libc::TIOCGWINSZ,
    libc::FIONBIO,
    libc::FIOCLEX,
    libc::FIONREAD,
];

/// `PR_SET_VMA` of include/uapi/linux/prctl.h, with which the C library names mappings.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// The kind of process to confine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A VM's process.
    Guest {
        /// Whether the process still has to create a control socket.
        makes_sockets: bool,
        /// Whether the lanes of the process may use IPsec.
        ipsec: bool,
    },
    /// A tunnel.
    Channels {
        /// The owners and groups of its sockets.
        owners: Vec<FileAccess>,
    },
    /// `handoff accept`.
    Handoff,
    /// `serve-status`.
    Reader,
}

/// Installs the filter for every thread.
pub(super) fn apply(work: Work) -> Result<Taken> {
    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let besides = match work {
        Work::Guest { .. } => FOR_GUESTS,
        Work::Channels { .. } | Work::Handoff => FOR_CHANNELS,
        Work::Reader => &[],
    };
    let records = match work {
        Work::Guest { ipsec: true, .. } => FOR_RECORDS,
        _ => &[],
    };
    let listening: &[_] = match work {
        Work::Channels { .. }
        | Work::Handoff
        | Work::Guest {
            makes_sockets: true,
            ..
        } => &[libc::SYS_bind, libc::SYS_listen],
        // Lanes over IPsec bind their source ports.
        Work::Guest { ipsec: true, .. } => &[libc::SYS_bind],
        Work::Guest { .. } | Work::Reader => &[],
    };
    for call in ALLOWED
        .iter()
        .chain(ALLOWED_HERE)
        .chain(besides)
        .chain(records)
        .chain(listening)
    {
        allowed.insert(*call, Vec::new());
    }
    for (call, rules) in with_arguments(&work)? {
        allowed.insert(call, rules);
    }
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    install(allowed, enosys, SeccompAction::Allow)?;
    Ok(Taken::wholly(NAME))
}

/// Installs a second filter in every thread. It forbids new unix sockets and listen(2). Unless
/// `ipsec`, it also forbids bind(2): only lanes over IPsec bind their source ports.
pub(super) fn deny_more_sockets(ipsec: bool) -> Result<()> {
    let mut denied = BTreeMap::from([
        (
            libc::SYS_socket,
            vec![rule(&[equals(0, libc::AF_UNIX as u64)])?],
        ),
        (libc::SYS_listen, Vec::new()),
    ]);
    if !ipsec {
        denied.insert(libc::SYS_bind, Vec::new());
    }
    let refuse = SeccompAction::Errno(libc::EACCES as u32);
    install(denied, SeccompAction::Allow, refuse)
}

fn install(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    then: SeccompAction,
) -> Result<()> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, otherwise, then, architecture)?;
    let program: BpfProgram = filter.try_into()?;
    apply_filter_all_threads(&program).context("the kernel rejected the seccomp filter")
}

/// Calls allowed only with certain arguments.
fn with_arguments(work: &Work) -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>> {
    let execute = libc::PROT_EXEC as u64;
    // The argument combines the socket's type with flags, which the mask removes.
    let kind = |kind: libc::c_int| masked(1, 0xf, kind as u64);
    let mut sockets = Vec::new();
    let mut domains = match work {
        Work::Reader => Vec::new(),
        _ => vec![libc::AF_INET, libc::AF_INET6],
    };
    if !matches!(
        work,
        Work::Guest {
            makes_sockets: false,
            ..
        }
    ) {
        domains.push(libc::AF_UNIX);
    }
    for domain in domains {
        for (one, usual) in [
            (libc::SOCK_STREAM, libc::IPPROTO_TCP),
            (libc::SOCK_DGRAM, libc::IPPROTO_UDP),
        ] {
            // Allow only the usual protocol, because Landlock's rules for TCP ports do not apply to
            // other protocols, such as MPTCP.
            for protocol in [0, usual] {
                let protocol = equals(2, protocol as u64);
                sockets.push(rule(&[equals(0, domain as u64), kind(one), protocol])?);
            }
        }
    }
    // Netlink protocols to list connections, to describe the network device that leads to the
    // peer, and to set up IPsec.
    let netlink: &[_] = match work {
        Work::Guest { ipsec: true, .. } => &[
            libc::NETLINK_SOCK_DIAG,
            libc::NETLINK_ROUTE,
            libc::NETLINK_XFRM,
        ],
        Work::Handoff => &[libc::NETLINK_SOCK_DIAG, libc::NETLINK_ROUTE],
        _ => &[],
    };
    for protocol in netlink {
        let netlink = equals(0, libc::AF_NETLINK as u64);
        sockets.push(rule(&[netlink, equals(2, *protocol as u64)])?);
    }
    let (types, besides): (&[u64], &[u64]) = match work {
        Work::Guest { .. } => (&REQUEST_TYPES, &GUEST_REQUESTS),
        Work::Channels { .. } => (&[], &CHANNEL_REQUESTS),
        Work::Handoff => (&[], &HANDOFF_REQUESTS),
        Work::Reader => (&[], &[]),
    };
    let mut requests = Vec::new();
    for kind in types {
        requests.push(rule(&[masked(1, 0xff00, *kind)])?);
    }
    for request in REQUESTS.iter().chain(besides) {
        requests.push(rule(&[equals(1, *request)])?);
    }
    let mut controls = Vec::new();
    for what in [
        libc::PR_SET_NAME as u64,
        libc::PR_GET_NAME as u64,
        PR_SET_VMA,
    ] {
        controls.push(rule(&[equals(0, what)])?);
    }
    let one_more = matches!(
        work,
        Work::Guest {
            makes_sockets: true,
            ..
        }
    );
    if one_more {
        // `deny_more_sockets` will install one more filter, which needs this call.
        controls.push(rule(&[equals(0, libc::PR_SET_NO_NEW_PRIVS as u64)])?);
    }
    let process = u64::from(std::process::id());
    let mut with = vec![
        (libc::SYS_socket, sockets),
        // Local socket pairs are harmless, because both ends stay in this process.
        (
            libc::SYS_socketpair,
            vec![rule(&[equals(0, libc::AF_UNIX as u64)])?],
        ),
        (libc::SYS_ioctl, requests),
        (libc::SYS_prctl, controls),
        // New threads are allowed, new processes are not.
        (
            libc::SYS_clone,
            vec![rule(&[masked(
                0,
                libc::CLONE_THREAD as u64,
                libc::CLONE_THREAD as u64,
            )])?],
        ),
        (libc::SYS_tgkill, vec![rule(&[equals(0, process)])?]),
        (libc::SYS_sched_setaffinity, vec![rule(&[equals(0, 0)])?]),
        // Limits may be read, but not set.
        (libc::SYS_prlimit64, vec![rule(&[null(2)])?]),
        // No new executable mappings: all libraries are loaded before the confinement.
        (libc::SYS_mmap, vec![rule(&[masked(2, execute, 0)])?]),
        (libc::SYS_mprotect, vec![rule(&[masked(2, execute, 0)])?]),
    ];
    if let Work::Channels { owners } = work {
        with.extend(for_sockets(owners)?);
    }
    let owner_alone = 0o600;
    if one_more {
        let filter = libc::SECCOMP_SET_MODE_FILTER;
        with.push((libc::SYS_seccomp, vec![rule(&[equals(0, filter.into())])?]));
        // Before the process binds its control socket, it gives the socket mode 0600.
        with.push((libc::SYS_fchmod, vec![rule(&[equals(1, owner_alone)])?]));
    }
    Ok(with)
}

/// Calls with which a tunnel sets the mode and the owner of its unix sockets. A thread with its own
/// umask creates each socket, so the socket has the right mode. The tunnel changes the owner
/// through an open descriptor. A filter cannot see which file that descriptor refers to, so it
/// permits only the configured owners and groups.
fn for_sockets(owners: &[FileAccess]) -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>> {
    let own_umask = vec![rule(&[equals(0, libc::CLONE_FS as u64)])?];
    let mut calls = vec![
        (libc::SYS_unshare, own_umask),
        (libc::SYS_umask, Vec::new()),
    ];
    let mut changes = Vec::new();
    for access in owners {
        // In chown(2), the largest number means "unchanged".
        let number = |id: Option<u32>| u64::from(id.unwrap_or(u32::MAX));
        changes.push(rule(&[
            equals(2, number(access.owner)),
            equals(3, number(access.group)),
            equals(4, libc::AT_EMPTY_PATH as u64),
        ])?);
    }
    if !changes.is_empty() {
        calls.push((libc::SYS_fchownat, changes));
    }
    Ok(calls)
}

/// A condition on an argument: position, width, comparison, value.
type Condition = (u8, SeccompCmpArgLen, SeccompCmpOp, u64);

/// Compares the low 32 bits of an `int` argument, because the kernel ignores the other bits.
fn equals(argument: u8, value: u64) -> Condition {
    (argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn masked(argument: u8, mask: u64, value: u64) -> Condition {
    let compare = SeccompCmpOp::MaskedEq(mask);
    (argument, SeccompCmpArgLen::Dword, compare, value)
}

fn null(argument: u8) -> Condition {
    (argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)
}

/// A rule that requires all conditions.
fn rule(conditions: &[Condition]) -> Result<SeccompRule> {
    let conditions = conditions
        .iter()
        .map(|(argument, length, compare, value)| {
            SeccompCondition::new(*argument, length.clone(), compare.clone(), *value)
        })
        .collect::<Result<_, _>>()?;
    Ok(SeccompRule::new(conditions)?)
}
